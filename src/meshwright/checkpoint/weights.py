"""Weights alone, in and out: Hugging Face directories and single safetensors files, read and written part by part."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open

from .. import convert, runtime
from ..dispatch import disabled
from ..errors import CheckpointError, takes
from ..layout import Layout, Shard, Spec
from ..mesh import Mesh
from ..raw import bare
from ..reshard import plan as plan_conversion
from ..tensor import DistTensor
from . import files
from .agree import alike, attempt, mesh_of
from .contents import ModelTensors, Roles, model_tensors, stored_spec
from .files import DTYPES, NAMES, STRETCH, bytes_of, header_of
from .loading import DIFFERENT, SAME, Reader, choice, read_targets
from .manifest import NAME, parsed, read_manifest
from .pieces import SMALL, Box, read_spec
from .restore import Target, misnamed

Tensor = torch.Tensor
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 5 * 10**9
SAMPLES, SAMPLE = 64, 4096  # of a file, and bytes of each

_MODEL = (nn.Module, "give the nn.Module")
_PATH = ((str, os.PathLike), "give a path")


@takes(CheckpointError, model=_MODEL, path=_PATH, mesh=((Mesh, NoneType), "give the mesh that all ranks are in"))
def load_weights(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, mesh: Mesh | None = None
) -> nn.Module:
    """Fill the parameters and persistent buffers of a model, in place, each rank reading what it needs.

    Args:
        model: sharded or plain.
        path: a Hugging Face directory (``model.safetensors``, or several files with their index), a safetensors file,
            or a folder of :class:`Checkpoints`, of which the newest is read.
        strict: every tensor of the model must be there, and no other.
        mesh: as for :class:`Checkpoints`.

    Floating-point values of another dtype are converted.

    Returns:
        The model.

    Raises:
        CheckpointError: on all ranks: names, shapes or kinds of dtypes that differ; a file that cannot be read.
        DesyncError: on all ranks: they load different files, or into different models.
    """
    path = Path(path)
    mesh = mesh_of(Roles.of(model, None, None, None, None), mesh)
    what = f"load weights from {path}"
    source = attempt(mesh, what, lambda: source_of(path))
    try:
        targets, mark = attempt(mesh, what, lambda: (_targets(model, source, strict, mesh), source.mark()))
        alike(mesh, DIFFERENT, SAME, {
            "strict=": strict, "the files": mark, **{f"{i}: {t.name}": t.spec for i, t in enumerate(targets)},
        })  # fmt: skip
        read_targets(targets, source, mesh, what)
    finally:
        source.close()
    return model


def source_of(path: Path) -> Reader | SafetensorFiles:
    """What reads the tensors at a path.  Raises CheckpointError where there are none."""
    if (path / INDEX).is_file():
        names = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise CheckpointError(f"{path / INDEX} names {outside[0]!r}, which is not in its folder")
        return SafetensorFiles([path / name for name in names])
    for single in (path / SINGLE, path):
        if single.is_file():
            return SafetensorFiles([single])
    folder = path if (path / NAME).is_file() else None
    if folder is None and path.is_dir():
        found = choice(path, None)
        folder = None if found is None else found.path
    if folder is None:
        raise CheckpointError(
            f"there are no weights at {path}: {SINGLE}, {INDEX}, a .safetensors file or a folder of mw.Checkpoints was "
            "expected"
        )
    return Reader(folder, parsed(read_manifest(folder), folder))


class SafetensorFiles:
    """Files of whole tensors that others wrote, as a source of parts of them.

    Attributes:
        shapes: name to shape and dtype.
        aliases: none.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.stack, self.aliases = contextlib.ExitStack(), dict[str, str]()
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.opened: dict[str, tuple[Path, Any]] = {}
        for path in paths:
            try:
                file = self.stack.enter_context(safe_open(path, "pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                part = file.get_slice(name)
                kind = part.get_dtype()
                if kind not in DTYPES:
                    raise CheckpointError(f"{path}: {name} is of the dtype {kind}, which cannot be read")
                self.shapes[name] = tuple(part.get_shape()), DTYPES[kind]
                self.opened[name] = path, file

    def close(self) -> None:
        """Close all files."""
        self.stack.close()

    def mark(self) -> str:
        """What tells these files from others, wherever they are: their sizes, and samples of what is in them."""
        crc = 0
        for path in dict.fromkeys(path for path, _ in self.opened.values()):
            size = path.stat().st_size
            crc = zlib.crc32(repr((path.name, size)).encode(), crc)
            with path.open("rb") as file:
                for at in range(0, size, -(-size // SAMPLES)):
                    file.seek(at)
                    crc = zlib.crc32(file.read(SAMPLE), crc)
        return f"digest {crc:x}"

    def spec_of(self, target: Target) -> Spec:
        """How a target is read: in whole rows."""
        stored = Spec(target.spec.shape, target.spec.dtype, Layout(target.spec.mesh))
        return read_spec(stored, target.spec)

    def fill(self, name: str, box: Box, value: Tensor) -> None:
        """Fill a tensor of the size of ``box`` with that part of one that is there."""
        path, file = self.opened[name]
        try:
            if not box:
                value.copy_(file.get_tensor(name))
                return
            row = max(1, value[:1].numel() * value.element_size())
            (low, high), rows = box[0], max(1, STRETCH // row)
            part = file.get_slice(name)
            for a in range(low, high, rows):
                b = min(a + rows, high)
                value[a - low : b - low].copy_(part[(slice(a, b), *(slice(*bounds) for bounds in box[1:]))])
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error


def _targets(model: nn.Module, source: Reader | SafetensorFiles, strict: bool, mesh: Mesh) -> list[Target]:
    """The tensors of a model that are there, as what they are called there."""
    found = model_tensors(model)
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
    return made


def _target(name: str, t: Tensor, there: str, stored: tuple[tuple[int, ...], torch.dtype], mesh: Mesh) -> Target:
    shape, dtype = stored
    spec = stored_spec(t, mesh, name)
    numbers = dtype.is_floating_point and t.dtype.is_floating_point
    if tuple(spec.shape) != shape or not (dtype is t.dtype or numbers):
        raise CheckpointError(f"{name} is {t.dtype} of shape {tuple(spec.shape)} here, and {dtype} of {shape} there")
    if t.is_meta:
        raise CheckpointError(f"{name} is on the meta device: give the model memory first, with mw.shard_module")
    counted = bare(t) if isinstance(t, DistTensor) else t.detach()
    return Target(there, spec, counted.data, counted)


# ---------------------------------------------------------------------------------------------- writing


@takes(
    CheckpointError,
    model=_MODEL,
    path=_PATH,
    shard_bytes=(int, "give a number of bytes"),
    mesh=((Mesh, NoneType), "give the mesh that all ranks are in"),
)
def save_weights(
    model: nn.Module, path: str | os.PathLike[str], *, shard_bytes: int = SHARD_BYTES, mesh: Mesh | None = None
) -> None:
    """Write parameters and persistent buffers of a model as a Hugging Face directory, which ``from_pretrained`` reads.

    Every rank writes a part of each file; no rank ever holds the whole of a split tensor.  Tied tensors are written
    once.  A model of transformers has its configuration written beside.

    Args:
        path: a folder that all ranks share; made if it is not there, its weights are replaced.
        shard_bytes: how large files may become, where no tensor is larger.
        mesh: as for :class:`Checkpoints`.

    Raises:
        CheckpointError: on all ranks: what cannot be saved, a disk that is full.
        DesyncError: ranks with different models.
    """
    path = Path(path)
    mesh = mesh_of(Roles.of(model, None, None, None, None), mesh)
    what = f"save weights to {path}"
    plan = attempt(mesh, what, lambda: _plan(model, mesh, shard_bytes))
    lies = {f"{n} in {f.name}": s for f in plan for n, s in f.specs.items()}
    alike(mesh, what, "all ranks must save the same model", {**lies, "shard_bytes=": shard_bytes})
    first = runtime.RT.rank == mesh.ranks[0]
    attempt(mesh, what, lambda: _begin(path, plan) if first else None)
    tensors = model_tensors(model).tensors
    for file in plan:
        _write(path, file, tensors, mesh, what)
    attempt(mesh, what, lambda: _finish(path, plan, model) if first else None)


@dataclass
class WholeFile:
    """A file of whole tensors that is to be written.

    Attributes:
        name: of the file.
        specs: name of a tensor to how it lies.
        header: the bytes that it begins with.
        starts: name of a tensor to where its bytes begin.
        size: in bytes.
    """

    name: str
    specs: dict[str, Spec]
    header: bytes = b""
    starts: dict[str, int] = field(default_factory=dict)
    size: int = 0

    @property
    def unfinished(self) -> str:
        """Its name until it is complete."""
        return f"{self.name}.tmp"


def _plan(model: nn.Module, mesh: Mesh, shard_bytes: int) -> list[WholeFile]:
    """Which file each tensor goes to, and where: from specs alone."""
    found: ModelTensors = model_tensors(model)
    batches: list[dict[str, Spec]] = [{}]
    size = 0
    for name, t in found.tensors.items():
        spec = stored_spec(t, mesh, name)
        if spec.dtype not in NAMES or t.is_meta:
            raise CheckpointError(f"{name} is {'on the meta device' if t.is_meta else spec.dtype}: it cannot be saved")
        if batches[-1] and size + spec.nbytes > shard_bytes:
            batches.append({})
            size = 0
        batches[-1][name] = spec
        size += spec.nbytes
    names = [f"model-{i + 1:05d}-of-{len(batches):05d}.safetensors" for i in range(len(batches))]
    names = names if len(names) > 1 else [SINGLE]
    made = []
    for name, specs in zip(names, batches, strict=True):
        order = sorted(specs, key=lambda n: -specs[n].dtype.itemsize)  # so that all are aligned
        header = header_of({n: (specs[n].dtype, list(specs[n].shape)) for n in order}, {})
        file = WholeFile(name, {n: specs[n] for n in order}, header, size=len(header))
        for n in order:
            file.starts[n] = file.size
            file.size += specs[n].nbytes
        made.append(file)
    return made


def _begin(path: Path, plan: Sequence[WholeFile]) -> None:
    files.DISK.make_folder(path)
    for file in plan:
        opened = files.DISK.create(path / file.unfinished)
        try:
            files.DISK.write(opened, file.header)
            os.truncate(opened, file.size)
        finally:
            files.DISK.close(opened)


def _write(path: Path, file: WholeFile, tensors: Mapping[str, Tensor], mesh: Mesh, what: str) -> None:
    """Every rank brings its rows of each tensor to the file."""
    opened = attempt(mesh, what, lambda: os.open(path / file.unfinished, os.O_WRONLY))
    here = mesh.coordinate(runtime.RT.rank)
    problem: list[OSError] = []
    try:
        for name, spec in file.specs.items():
            rows = _rows(spec)
            with torch.no_grad(), disabled():
                t = tensors[name]
                local = bare(t) if isinstance(t, DistTensor) else t.detach()
                value = convert.apply(plan_conversion(spec, rows).steps, local)
            if problem or (rows.layout.is_replicated() and runtime.RT.rank != mesh.ranks[0]):
                continue
            row = spec.nbytes // max(1, spec.shape[0]) if spec.ndim else spec.nbytes
            at = file.starts[name] + (rows.local_offset(here)[0] * row if spec.ndim else 0)
            try:
                _place(opened, at, bytes_of(value.to("cpu")))
            except OSError as error:  # not yet: the others are in collectives
                problem.append(error)
        attempt(mesh, what, lambda: _synced(opened, problem))
    finally:
        os.close(opened)


def _rows(spec: Spec) -> Spec:
    """The tensor cut into rows over all ranks; as it is where it is whole on all and not worth cutting."""
    if not spec.ndim or (spec.layout.is_replicated() and spec.nbytes <= SMALL):
        return spec
    layout = spec.layout
    for axis, n in enumerate(spec.mesh.sizes):
        if n > 1:
            layout = layout.replace(axis, Shard(0))
    return spec.with_(layout=layout)


def _place(file: int, at: int, data: memoryview) -> None:
    for start in range(0, len(data), STRETCH):
        view = data[start : start + STRETCH]
        while view:
            n = os.pwrite(file, view, at)
            view, at = view[n:], at + n


def _synced(file: int, problem: list[OSError]) -> None:
    if problem:
        raise problem[0]
    files.DISK.sync(file)


def _finish(path: Path, plan: Sequence[WholeFile], model: nn.Module) -> None:
    """Put the files in their places, the index last."""
    kept = {file.name for file in plan}
    (path / INDEX).unlink(missing_ok=True)
    for old in path.glob("model*.safetensors"):
        if old.name not in kept:
            old.unlink()
    for file in plan:
        files.DISK.rename(path / file.unfinished, path / file.name)
    if len(plan) > 1:
        total = sum(s.nbytes for file in plan for s in file.specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": {n: f.name for f in plan for n in f.specs}}
        (path / f"{INDEX}.tmp").write_text(json.dumps(index, indent=1))
        files.DISK.rename(path / f"{INDEX}.tmp", path / INDEX)
    for part in ("config", "generation_config"):
        given: Any = getattr(model, part, None)
        if hasattr(given, "save_pretrained"):
            given.save_pretrained(path)
    files.DISK.sync_folder(path)


__all__ = ["load_weights", "save_weights"]
