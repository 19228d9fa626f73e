"""Programs from files that :func:`~meshwright.program.store.save` wrote."""

from __future__ import annotations

import io
import json
import operator
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from ..errors import MeshwrightError, ProgramError
from ..layout import dtype_from, spec_from
from ..mesh import Mesh, mesh_data, mesh_from
from ..record import Record
from .core import Input, Merged, Origin, Output, Program
from .store import FORMAT, NAMED, TENSORS, TEXT, VERSION, torch_version
from .trace import Value


def load_program(path: str | Path, *, mesh: Mesh | None = None, rank: int | None = None) -> Program:
    """Read the program that a rank saved, and verify it.

    Args:
        mesh, rank: what it is to run as, if it is: then it must have been saved on an equal mesh, by that rank.

    Raises:
        ProgramError: no such file, one that is damaged or was changed, of another version of torch, mesh or rank.
    """
    try:
        with zipfile.ZipFile(path) as file:
            data = json.loads(file.read(TEXT))
            constants = torch.load(io.BytesIO(file.read(TENSORS)), weights_only=True)
    except FileNotFoundError:
        raise ProgramError(f"{path}: there is no such file") from None
    except (OSError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise ProgramError(f"{path} holds no program: {error}") from error
    _check_origin(path, data, mesh, rank)
    try:
        made = _Reader(data, constants).program(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ProgramError(f"{path} is damaged: {error!r}") from error
    except MeshwrightError as error:
        raise ProgramError(f"{path}: {error}") from error
    try:
        made.verify()
    except ProgramError as error:
        raise ProgramError(f"{path} was changed after it was saved: {error}") from error
    return made


def _check_origin(path: str | Path, data: Any, mesh: Mesh | None, rank: int | None) -> None:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ProgramError(f"{path} holds no program")
    if data.get("version") != VERSION:
        raise ProgramError(f"{path} has version {data.get('version')} of the format; this reads version {VERSION}")
    if data.get("torch") != torch_version():
        raise ProgramError(
            f"{path} was saved with torch {data.get('torch')}, this is {torch_version()}: ops may differ, so capture "
            "the step again"
        )
    if mesh is not None and mesh_data(mesh) != data.get("mesh"):
        axes = data["mesh"]["axes"]
        sizes = ", ".join(f"{a}={n}" for a, n in axes.items())
        raise ProgramError(
            f"{path} was saved on the mesh {sizes} ({data['mesh']['device']}), this is {mesh!r} ({mesh.device}): a "
            "program is for one mesh; capture the step again"
        )
    if rank is not None and data.get("rank") != rank:
        raise ProgramError(f"{path} is the program of rank {data.get('rank')}, this is rank {rank}")


class _Reader:
    """The values of one file."""

    def __init__(self, data: Mapping[str, Any], constants: dict[str, torch.Tensor]) -> None:
        self.mesh = mesh_from(data["mesh"])
        self.rank, self.constants = int(data["rank"]), constants

    def program(self, data: Mapping[str, Any]) -> Program:
        """A program, and those that belong to it."""
        graph, named = fx.Graph(), dict[str, fx.Node]()
        for given in data["nodes"]:
            args = self._decoded(given["args"], named)
            kwargs = {k: self._decoded(v, named) for k, v in given.get("kwargs", {}).items()}
            target = _operator(given["target"]) if given["op"] == "call_function" else given["target"]
            node = graph.create_node(given["op"], target, args, kwargs, name=given["name"])
            node.name = given["name"]
            node.meta = {k: self._decoded(v, named) for k, v in given["meta"].items()}
            named[node.name] = node
        merged = None
        if data["merged"] is not None:
            parts = data["merged"]
            merged = Merged(parts["k_steps"], self.program(parts["accumulate"]), self.program(parts["flush"]))
        return Program(
            self.mesh,
            self.rank,
            graph,
            tuple(Input(**{**i, "spec": self._decoded(i["spec"], named)}) for i in data["inputs"]),
            tuple(Output(**{**o, "spec": self._decoded(o["spec"], named)}) for o in data["outputs"]),
            tuple(Record(**{k: _tupled(v) for k, v in c.items()}) for c in data["causes"]),
            tuple(Origin(**{k: _tupled(v) for k, v in o.items()}) for o in data["origins"]),
            self.constants,
            data["update"],
            merged,
            tuple(data["passes"]),
        )

    def _decoded(self, a: Any, named: Mapping[str, fx.Node]) -> Any:
        """What :func:`~meshwright.program.store.encoded` was given."""
        if isinstance(a, list):
            return [self._decoded(x, named) for x in a]
        if not isinstance(a, dict):
            return a
        ((word, given),) = a.items()
        if word == "node":
            return named[given]
        if word == "tuple":
            return tuple([self._decoded(x, named) for x in given])
        if word == "dict":
            return {k: self._decoded(v, named) for k, v in given.items()}
        if word == "value":
            shape, dtype, storage, nbytes, *strides = given
            return Value(tuple(shape), dtype_from(dtype), storage, nbytes, *map(tuple, strides))
        if word == "spec":
            return spec_from(given, self.mesh)
        if word == "device":
            return torch.device(given)
        if word == "float":
            return float(given)
        found = getattr(torch, given, None)
        if not isinstance(found, NAMED[word]):
            raise ValueError(f"torch has no {word} {given!r}")
        return found


def _operator(name: str) -> Any:
    """An operator by its name.  Raises ProgramError where there is none."""
    if name == "operator.getitem":
        return operator.getitem
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise ProgramError(f"there is no operator {name!r} here; import what defines it first")
    return found


def _tupled(a: Any) -> Any:
    return tuple(a) if isinstance(a, list) else a


__all__ = ["load_program"]
