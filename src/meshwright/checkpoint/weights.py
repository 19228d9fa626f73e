"""Weights alone, read part by part: Hugging Face directories, safetensors files, DCP's and our own checkpoints."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from types import NoneType
from typing import NamedTuple

import torch
import torch.nn as nn

from ..errors import CheckpointError, takes
from ..mesh import Mesh
from ..ranks import runtime
from ..untrusted_files import making_sense, plain_name, read_regular
from .arrays import bytes_of
from .contents import ModelTensors, Roles, model_tensors, stored_spec
from .coordination import attempt, mesh_of, prepared
from .dcp import METADATA, DcpFiles
from .hugging_face import INDEX, SINGLE
from .loading import DIFFERENT, SAME, Reader, choice, read_targets, specs_of
from .manifest import NAME, parsed, read_manifest, saves_in
from .restore import Target, memory_of, misnamed
from .sources import SafetensorFiles

Tensor = torch.Tensor
Source = Reader | SafetensorFiles | DcpFiles


class IncompatibleKeys(NamedTuple):
    """Names that only one side has, by the words of torch's ``load_state_dict``.

    Attributes:
        missing_keys: of tensors of the model that were not there, and are as they were.
        unexpected_keys: of tensors that were there and are none of the model's.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


_MODEL = (nn.Module, "give the nn.Module")
_PATH = ((str, os.PathLike), "give a path")


@takes(CheckpointError, model=_MODEL, path=_PATH, mesh=((Mesh, NoneType), "give the mesh that all ranks are in"))
def load_weights(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, mesh: Mesh | None = None
) -> IncompatibleKeys:
    """Fill a model's parameters and persistent buffers in place. Each rank reads only what it needs.

    Floating-point values of another dtype are converted. Nothing in a file can run code.

    Args:
        model: A sharded or plain model.
        path: A Hugging Face directory (`model.safetensors`, or several files with an index), a safetensors file, a
            folder of [Checkpoints][meshwright.Checkpoints] (the newest is read), or a folder of
            `torch.distributed.checkpoint`, of which the model may be a part.
        strict: Require every tensor of the model and no other. `False`: the first rank warns of differences.
        mesh: As for `Checkpoints`.

    Returns:
        `(missing_keys, unexpected_keys)`, both empty if `strict`.

    Raises:
        CheckpointError: On all ranks, if names, shapes or kinds of dtypes differ, or a file cannot be read.
        DesyncError: On all ranks, if they load different files or into different models.

    Examples:
        ```python
        mesh = mw.Mesh({"tp": 2})
        mw.save_weights(nn.Linear(4, 4), "weights")


        def load():
            model = mw.shard_module(nn.Linear(4, 4), mesh, {"weight": {"tp": mw.Shard(0)}})
            return mw.load_weights(model, "weights").missing_keys


        assert mw.simulate(load, mesh) == [[], []]
        ```
    """
    path = Path(path)
    mesh = mesh_of(Roles.of(model, None, None, None, None), mesh)
    what = f"load weights from {path}"
    source = attempt(mesh, what, lambda: source_of(path))
    try:
        targets, twins, left = prepared(
            mesh, what, lambda: _targets(model, source, strict, mesh),
            lambda made: {"strict=": strict, "the files": source.mark(), **specs_of(made[0])}, DIFFERENT, SAME,
        )  # fmt: skip
        read_targets([*targets, *(twin for _, twin in twins)], source, mesh, what)
        attempt(mesh, what, lambda: _compare(twins))
    finally:
        source.close()
    if any(left) and runtime.RT.rank == mesh.ranks[0]:
        nothing = "" if targets else "no name fits, so nothing was loaded: "
        warnings.warn(f"{what}, strict=False: {nothing}{misnamed(*left)}", stacklevel=3)  # takes() is between
    return left


def source_of(path: Path) -> Source:
    """What reads the tensors at a path.  Raises CheckpointError where there are none."""
    for single in (path / SINGLE, path):  # of one file and an index transformers takes the one file too
        if single.is_file():
            return SafetensorFiles([single])
    if (path / INDEX).is_file():
        index = _index(path / INDEX)
        return SafetensorFiles([path / name for name in sorted(set(index.values()))], index)
    if (path / METADATA).is_file():
        return DcpFiles(path)
    folder = path if (path / NAME).is_file() else None
    if folder is None and path.is_dir():
        found = choice(path, None, saves_in(path))
        folder = None if found is None else found.path
    if folder is None:
        raise CheckpointError(
            f"there are no weights at {path}: {SINGLE}, {INDEX}, a .safetensors file, a folder of mw.Checkpoints or "
            f"one of torch.distributed.checkpoint ({METADATA}) was expected"
        )
    return Reader(folder, parsed(read_manifest(folder), folder))


def _index(index: Path) -> dict[str, str]:
    """The names of tensors to those of the files that an index names.  Raises CheckpointError."""
    try:
        text = read_regular(index)
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror}") from error
    with making_sense(index, CheckpointError, "cannot be read: it is no index of files"):
        names: dict[str, str] = dict(json.loads(text)["weight_map"])
    if outside := [name for name in names.values() if not plain_name(name)]:
        raise CheckpointError(f"{index} names {outside[0]!r}, which is not in its folder")
    return names


Twins = list[tuple[Tensor, Target]]


def _targets(
    model: nn.Module, source: Source, strict: bool, mesh: Mesh
) -> tuple[list[Target], Twins, IncompatibleKeys]:
    """The tensors of a model that are there, as what they are called there; where none may be left out, their twins.

    And the names that are left out.
    """
    found = model_tensors(model)
    if isinstance(source, DcpFiles):
        source.choose(found.tensors)
    aliases = source.aliases
    missing, made = [], []
    for name, t in found.tensors.items():
        called = [name, *(other for other, first in found.aliases.items() if first == name)]
        there = next((aliases.get(n, n) for n in called if aliases.get(n, n) in source.shapes), None)
        if there is None:
            missing.append(name)
            continue
        made.append(_target(name, t, there, source.shapes[there], mesh))
    taken = {t.name for t in made} | set(found.aliases)
    extra = [n for n in source.shapes if n not in taken]
    if strict and (missing or extra):
        raise CheckpointError(f"{misnamed(missing, extra)}; strict=False leaves both out")
    return made, _twins(found, source, mesh) if strict else [], IncompatibleKeys(missing, extra)


def _twins(found: ModelTensors, source: Source, mesh: Mesh) -> Twins:
    """Of tied tensors, what is there by a further name of its own: this rank's part, and the same part of that."""
    made = []
    for other, first in found.aliases.items():
        there, own = (source.aliases.get(n, n) for n in (other, first))
        if there != own and there in source.shapes and own in source.shapes:
            target = _target(other, found.tensors[first], there, source.shapes[there], mesh)
            held = target.local
            target.local = target.counted = torch.empty_like(held)
            made.append((held, target))
    return made


def _compare(twins: Twins) -> None:
    for held, twin in twins:
        if bytes_of(held.cpu()) != bytes_of(twin.local.cpu()):
            raise CheckpointError(
                f"{twin.name} is tied to another tensor here, and has values of its own there: untie them first, or "
                "leave it out with strict=False"
            )


def _target(name: str, t: Tensor, there: str, stored: tuple[tuple[int, ...], torch.dtype], mesh: Mesh) -> Target:
    shape, dtype = stored
    spec = stored_spec(t, mesh, name)
    numbers = dtype.is_floating_point and t.dtype.is_floating_point
    if tuple(spec.shape) != shape or not (dtype is t.dtype or numbers):
        raise CheckpointError(f"{name} is {t.dtype} of shape {tuple(spec.shape)} here, and {dtype} of {shape} there")
    if t.is_meta:
        raise CheckpointError(f"{name} is on the meta device: give the model memory first, with mw.shard_module")
    counted = memory_of(name, t)
    return Target(there, spec, counted.data, counted)


__all__ = ["load_weights"]
