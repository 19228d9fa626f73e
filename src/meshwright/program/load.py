"""Programs from files that :func:`~meshwright.program.ir.store.save_program` wrote."""

from __future__ import annotations

import itertools
import json
import keyword
import math
import operator
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.fx as fx

from .. import compat
from ..errors import MeshwrightError, ProgramError, takes
from ..layout import Layout, Spec, dtype_from, layout_from, spec_from
from ..mesh import Mesh, mesh_data, mesh_from
from ..resharding.record import Record
from ..rules import RULES
from ..untrusted_files import open_regular
from .check.verify import verify
from .ir.nodes import NodeInfo, Value
from .ir.program import STEP, WHOLE, Input, Origin, Output, Program
from .ir.store import DIGEST, FORMAT, NAMED, TENSORS, TEXT, VERSION, digest, torch_version

# Bounds on what reading a file may cost; a program of a model of many billions of parameters is far below them.
_MOST_TEXT, _MOST_NODES, _MOST_STEPS, _MOST_PARTS, _DEEPEST = 1 << 27, 1 << 20, 1 << 16, 1 << 10, 32
_OPS = ("placeholder", "call_function", "output")


@takes(ProgramError, path=((str, Path), "give the path of a file"), mesh=((Mesh, NoneType), "give a mw.Mesh"))
def load_program(path: str | Path, *, mesh: Mesh | None = None, rank: int | None = None) -> Program:
    """Read the program that a rank saved, and check it.

    Args:
        path: File of `save_program`.
        mesh: Mesh to run it on. Must equal the mesh it was saved on.
        rank: Rank to run it as. Must be the rank that saved it.

    Raises:
        ProgramError: If the file is missing, damaged or changed, or of another torch version, mesh or rank.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 1})


        def round_trip():
            options = {"mesh": mesh, "batch": {"dp": mw.Shard(0)}}
            step = mw.compile_step(nn.Linear(4, 1), lambda model, x: model(x).sum(), None, torch.ones(2, 4), **options)
            mw.save_program(step.program, "rank0.mwp")
            return len(mw.load_program("rank0.mwp").graph.nodes) == len(step.program.graph.nodes)


        assert mw.simulate(round_trip, mesh) == [True]
        ```
    """
    try:
        with os.fdopen(open_regular(path), "rb") as opened, zipfile.ZipFile(opened) as file:
            text, tensors, said = _read(file, TEXT, _MOST_TEXT), _read(file, TENSORS), _read(file, DIGEST, 64)
        data = json.loads(text)
    except FileNotFoundError:
        raise ProgramError(f"{path}: there is no such file") from None
    except Exception as error:  # whatever a damaged file makes zipfile and json raise
        raise ProgramError(f"{path} holds no program: {error}") from error
    _check_origin(path, data, mesh, rank)
    try:
        made = _Reader(data, tensors).program(data)
    except MeshwrightError as error:
        raise ProgramError(f"{path}: {error}") from error
    except Exception as error:
        raise ProgramError(f"{path} is damaged: {error!r}") from error
    try:
        verify(made)
    except Exception as error:
        raise ProgramError(f"{path} was changed after it was saved: {error}") from error
    if said.decode(errors="replace") != digest(text, tensors):
        raise ProgramError(f"{path} was changed after it was saved: its digest is that of another file")
    return made


def _read(file: zipfile.ZipFile, name: str, most: int | None = None) -> bytes:
    """A member of the file, of a size that the file itself has or of ``most`` bytes."""
    about = file.getinfo(name)
    if about.file_size > (about.compress_size if most is None else most):
        raise ValueError(f"{name} has {about.file_size} bytes, which is more than a program has")
    return file.read(name)


def _check_origin(path: str | Path, data: Any, mesh: Mesh | None, rank: int | None) -> None:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ProgramError(f"{path} holds no program")
    if data.get("version") != VERSION:
        raise ProgramError(f"{path}: program format {data.get('version')}, expected {VERSION}. Save the program again.")
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

    def __init__(self, data: Mapping[str, Any], tensors: bytes) -> None:
        self.mesh = mesh_from(data["mesh"])
        self.rank, self.constants = int(data["rank"]), self._tensors(data["constants"], tensors)

    def _tensors(self, listed: Any, held: bytes) -> dict[str, torch.Tensor]:
        made, start = {}, 0
        for name, dtype, device, shape, stride in listed:
            kind = dtype_from(dtype)
            if device not in ("cpu", self.mesh.device) or min((0, *shape, *stride)) < 0:
                raise ValueError(f"the constant {name!r} cannot be on {device!r} with sizes {shape}, strides {stride}")
            stop = start + math.prod(shape) * kind.itemsize
            if stop > len(held):
                raise ValueError(f"the constant {name!r} has more bytes than the file")
            flat = torch.frombuffer(bytearray(held[start:stop]), dtype=torch.uint8) if stop > start else torch.empty(0)
            flat = flat.ne(0) if kind is torch.bool else flat.to(torch.uint8).view(kind)
            made[_word(name)] = flat.as_strided(shape, stride).to(device)
            start = stop
        if start != len(held):
            raise ValueError("the file has more bytes than its constants")
        return made

    def program(self, data: Mapping[str, Any], depth: int = 0) -> Program:
        """A program, and its parts, which have none themselves."""
        if depth > 1 or len(data["parts"]) > _MOST_PARTS:
            raise ValueError(f"{len(data['parts'])} parts")
        graph, named = fx.Graph(), dict[str, fx.Node]()
        if len(data["nodes"]) > _MOST_NODES:
            raise ValueError(f"{len(data['nodes'])} nodes")
        for given in data["nodes"]:
            name, op = _identifier(given["name"]), given["op"]
            if op not in _OPS or name in named:
                raise ValueError(f"node {name!r} is a {op!r}, or the second of its name")
            args = self._decoded(given["args"], named)
            kwargs = {_identifier(k): self._decoded(v, named) for k, v in given.get("kwargs", {}).items()}
            target = _operator(given["target"]) if op == "call_function" else _identifier(given["target"])
            node = graph.create_node(op, target, args, kwargs, name=name)
            node.name = name
            node.meta["info"] = self._typed_dataclass(NodeInfo, given["info"])
            named[name] = node
        parts = {_identifier(name): self.program(part, depth + 1) for name, part in data["parts"].items()}
        return Program(
            self.mesh,
            self.rank,
            graph,
            tuple(self._typed_dataclass(Input, i) for i in data["inputs"]),
            tuple(self._typed_dataclass(Output, o) for o in data["outputs"]),
            tuple(self._typed_dataclass(Record, c) for c in data["causes"]),
            tuple(self._typed_dataclass(Origin, o) for o in data["origins"]),
            self.constants,
            _word(data["update"]),
            parts,
            _schedules(data["schedules"], parts),
            tuple(map(_word, data["passes"])),
        )

    def _typed_dataclass(self, kind: Any, given: Mapping[str, Any]) -> Any:
        """One of the program's dataclasses, if its fields are of their types."""
        made = kind(**{k: self._decoded(v, {}) for k, v in given.items()})
        for f in fields(made):
            value = getattr(made, f.name)
            if not _TYPES[str(f.type)](value):
                raise TypeError(f"{f.name} cannot be {value!r}")
        return made

    def _decoded(self, a: Any, named: Mapping[str, fx.Node], depth: int = 0) -> Any:
        """What :func:`~meshwright.program.ir.store.encoded` was given."""
        if depth > _DEEPEST:
            raise ValueError("values within values within values")
        depth += 1
        if isinstance(a, list):
            return [self._decoded(x, named, depth) for x in a]
        if not isinstance(a, dict):
            return a
        ((word, given),) = a.items()
        if word == "node":
            return named[given]
        if word == "tuple":
            return tuple([self._decoded(x, named, depth) for x in given])
        if word == "dict":
            return {k: self._decoded(v, named, depth) for k, v in given.items()}
        if word == "value":
            shape, dtype, storage, nbytes, *strides = given
            if not all(type(n) is int and n >= 0 for n in (*shape, storage, nbytes, *itertools.chain(*strides))):
                raise ValueError(f"sizes {shape}, storage {storage!r} of {nbytes!r} bytes, strides {strides}")
            return Value(tuple(shape), dtype_from(dtype), storage, nbytes, *map(tuple, strides))
        if word == "spec":
            return spec_from(given, self.mesh)
        if word == "placements":
            return layout_from(given, self.mesh, given["ndim"])
        if word == "device":
            return torch.device(given)
        if word == "float":
            return float(given)
        found = getattr(torch, given, None)
        if not isinstance(found, NAMED[word]):
            raise ValueError(f"torch has no {word} {given!r}")
        return found


def _schedules(given: Mapping[str, Any], parts: Mapping[str, Program]) -> dict[str, tuple[str, ...]]:
    """Schedules over parts that there are."""
    made = {}
    for name, runs in given.items():
        steps = [n for _, n in runs]
        if any(type(n) is not int or n < 1 for n in steps) or not 0 < sum(steps) <= _MOST_STEPS:
            raise ValueError(f"the schedule {name!r} runs {steps} times")
        if any(part != WHOLE and part not in parts for part, _ in runs):
            raise ValueError(f"the schedule {name!r} runs what is no part")
        made[_word(name)] = tuple([part for part, n in runs for _ in range(n)])
    if STEP not in made:
        raise ValueError("no schedule of a step")
    return made


def _operator(name: str) -> Any:
    """An operator by its name.  Raises ProgramError where there is none, or none that a program may call."""
    if name == "operator.getitem":
        return operator.getitem
    space, packet, overload = name.split(".")
    found: Any = getattr(getattr(getattr(torch.ops, space), packet, None), overload, None)
    if not isinstance(found, compat.OpOverload):
        raise ProgramError(f"there is no operator {name!r} here; import what defines it first")
    ruled = space == "meshwright" or f"{space}::{packet}" in RULES
    # TorchScript's own functions, which print and save, have no kernel.
    kernel = space in ("aten", "prims") and compat.dispatch_has_kernel(found.name())
    if not ruled and (not kernel or any(a.name == "filename" for a in found._schema.arguments)):
        raise ProgramError(
            f"a program may not call {name!r}: operators of PyTorch that compute are allowed, and those that have a "
            "rule here (@mw.rule)"
        )
    return found


def _word(a: Any) -> str:
    if not isinstance(a, str):
        raise TypeError(f"expected a string, got {a!r}")
    return a


def _identifier(a: Any) -> str:
    """Names in a program are words: graphs are written as Python elsewhere too."""
    if not _word(a).isidentifier() or keyword.iskeyword(a):
        raise ValueError(f"{a!r} is not a name")
    return a


def _all(a: Any, test: Callable[[Any], bool]) -> bool:
    return isinstance(a, tuple) and all(map(test, a))


def _is(*kinds: type) -> Callable[[Any], bool]:
    """Of which types exactly: a flag is no number."""
    return lambda a: type(a) in kinds


# What may be in a field of this type.
_TYPES: dict[str, Callable[[Any], bool]] = {
    "str": _is(str),
    "bool": _is(bool),
    "int": _is(int),
    "int | None": _is(int, NoneType),
    "float": _is(int, float),
    "Spec | None": _is(Spec, NoneType),
    "Layout": _is(Layout),
    "Layout | str": _is(Layout, str),
    "Values": lambda a: a is None or isinstance(a, Value) or _all(a, _is(Value, NoneType)),
    "tuple[int, ...]": lambda a: _all(a, _is(int)),
    "tuple[str, ...]": lambda a: _all(a, _is(str)),
    "tuple[tuple[str, Spec], ...]": lambda a: _all(a, lambda p: _all(p, bool) and [type(x) for x in p] == [str, Spec]),
    "Path": lambda a: a == (),
}

__all__ = ["load_program"]
