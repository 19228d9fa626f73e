"""Hugging Face directories, written part by part: from a model by all ranks, from a checkpoint by one process."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType

import torch
import torch.nn as nn

from ..dispatch import disabled
from ..errors import CheckpointError, takes
from ..layout import Shard, Spec
from ..layout.pieces import SMALL, Box, inside, own_piece, stretches
from ..mesh import Mesh
from ..ranks import runtime
from ..resharding import executor
from ..resharding.planner import plan as plan_conversion
from ..tensor import local_data
from . import files
from .arrays import NAMES, STRETCH, bytes_of, slabs
from .contents import Roles, configurations, model_tensors, stored_spec
from .coordination import attempt, from_first, mesh_of, prepared
from .files import NewFiles, header_of

Tensor = torch.Tensor
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 5 * 10**9
# The names of files of weights, whoever wrote them, and what they are called until they are complete.
_WEIGHTS = re.compile(r"model(-[0-9a-f]{8})?(-\d{5}-of-\d{5})?\.safetensors(\.tmp)?")


@takes(
    CheckpointError,
    model=(nn.Module, "give the nn.Module"),
    path=((str, os.PathLike), "give a path"),
    shard_bytes=(int, "give a number of bytes"),
    mesh=((Mesh, NoneType), "give the mesh that all ranks are in"),
)
def save_weights(
    model: nn.Module, path: str | os.PathLike[str], *, shard_bytes: int = SHARD_BYTES, mesh: Mesh | None = None
) -> None:
    """Write a model's parameters and persistent buffers as a Hugging Face directory for `from_pretrained`.

    Every rank writes a part of each file. No rank holds the full tensor of a sharded one. Tied tensors are written
    once. A model of Transformers also writes its configuration.

    Args:
        model: A sharded or plain model.
        path: Shared directory; created if it does not exist. Its weights are replaced. After a crash it holds either
            the old or the new weights, complete; so a directory with as many files gets new file names.
        shard_bytes: Maximum size of a file in bytes, unless one tensor is larger.
        mesh: As for [Checkpoints][meshwright.Checkpoints].

    Raises:
        CheckpointError: On all ranks, if something cannot be saved or the disk is full.
        DesyncError: If ranks have different models.

    Examples:
        ```python
        mesh = mw.Mesh({"tp": 2})


        def save():
            model = mw.shard_module(nn.Linear(4, 4), mesh, {"weight": {"tp": mw.Shard(0)}})
            mw.save_weights(model, "weights")  # weights/model.safetensors


        mw.simulate(save, mesh)
        mw.load_weights(nn.Linear(4, 4), "weights")
        ```
    """
    path = Path(path)
    mesh = mesh_of(Roles.of(model, None, None, None, None), mesh)
    what = f"save weights to {path}"
    plan = prepared(
        mesh, what, lambda: plan_files(_specs(model, mesh), shard_bytes),
        lambda plan: {f"{n} in {f.name}": s for f in plan for n, s in f.specs.items()} | {"shard_bytes=": shard_bytes},
        what, "all ranks must save the same model",
    )  # fmt: skip
    first = runtime.RT.rank == mesh.ranks[0]
    mark = from_first(mesh, what, lambda: _apart(path, plan), {}, what, "")
    for file in plan:
        file.name = marked(file.name, mark)
    new = NewFiles(replacing=True)
    try:
        attempt(mesh, what, lambda: begin(path, plan, new) if first else None)
        tensors = model_tensors(model).tensors
        for file in plan:
            _write(path, file, tensors, mesh, what)
        attempt(mesh, what, lambda: _finish(path, plan, model, new) if first else None)
    except BaseException:
        new.remove()  # a disk that is full should not stay so
        raise


def _apart(path: Path, plan: Sequence[WholeFile]) -> str:
    """A word for names that are not there yet; none where there is no other set of as many files."""
    taken = len(plan) > 1 and any((path / file.name).exists() for file in plan)
    return secrets.token_hex(4) if taken else ""


def marked(name: str, mark: str) -> str:
    """The name of one of several files, told apart from those of another set."""
    return name.replace("model-", f"model-{mark}-", 1) if mark else name


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


def _specs(model: nn.Module, mesh: Mesh) -> dict[str, Spec]:
    """What of a model is saved, and how it lies."""
    found = model_tensors(model).tensors
    if meta := next((name for name, t in found.items() if t.is_meta), None):
        raise CheckpointError(f"{meta} is on the meta device: it cannot be saved")
    return {name: stored_spec(t, mesh, name) for name, t in found.items()}


def plan_files(specs: Mapping[str, Spec], shard_bytes: int) -> list[WholeFile]:
    """Which file each tensor goes to, and where: from specs alone.  Raises CheckpointError for other dtypes."""
    batches: list[dict[str, Spec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if spec.dtype not in NAMES:
            raise CheckpointError(f"{name} is {spec.dtype}: it cannot be saved")
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


def begin(path: Path, plan: Sequence[WholeFile], new: NewFiles) -> None:
    """Make the files, with their headers."""
    new.folder(path)
    for file in plan:
        opened = new.create(path / file.unfinished)
        try:
            files.DISK.write(opened, file.header)
        finally:
            files.DISK.close(opened)


def _write(path: Path, file: WholeFile, tensors: Mapping[str, Tensor], mesh: Mesh, what: str) -> None:
    """Every rank brings its part of each tensor to the file."""
    opened = attempt(mesh, what, lambda: os.open(path / file.unfinished, os.O_WRONLY | os.O_NOFOLLOW))
    here = mesh.coordinate(runtime.RT.rank)
    problem: list[OSError] = []
    try:
        for name, spec in file.specs.items():
            t = tensors[name]
            local = local_data(t)
            for box, value in _own(spec, local, here):
                if problem:
                    continue
                try:
                    for part, _, at in slabs(spec.shape, box, spec.dtype.itemsize, dense=True):
                        put(opened, file.starts[name] + at, bytes_of(inside(value, part, box).to("cpu")))
                except OSError as error:  # not yet: the others are in collectives
                    problem.append(error)
        attempt(mesh, what, lambda: _synced(opened, problem))
    finally:
        os.close(opened)


def _own(spec: Spec, local: Tensor, here: Sequence[int]) -> Iterator[tuple[Box, Tensor]]:
    """What this rank writes: rows, which ranks exchange; of what cannot be exchanged with little memory what it has."""
    parts = [(0, spec)] if spec.layout.blocks else stretches(spec)
    if parts is None:
        box = own_piece(spec, here, 0)
        if box is not None:
            yield box, inside(local, box, tuple(spec.layout.local_bounds(spec.shape, here)))
        return
    for (first, part), t in zip(
        parts, local.split([p.shape[0] for _, p in parts]) if parts[1:] else [local], strict=True
    ):
        rows = _rows(part)
        with torch.no_grad(), disabled():
            value = executor.apply(plan_conversion(part, rows).steps, t)
        if rows.layout.is_replicated() and runtime.RT.rank != spec.mesh.ranks[0]:
            continue
        box = tuple(rows.layout.local_bounds(rows.shape, here))
        yield ((box[0][0] + first, box[0][1] + first), *box[1:]) if box else (), value


def _rows(spec: Spec) -> Spec:
    """The tensor cut into rows over all ranks; as it is where it is whole on all and not worth cutting."""
    if not spec.ndim or (spec.layout.is_replicated() and spec.nbytes <= SMALL):
        return spec
    layout = spec.layout.without_blocks()  # which no axis may split beside another
    for axis, n in enumerate(spec.mesh.sizes):
        if n > 1:
            layout = layout.replace(axis, Shard(0))
    return spec.with_(layout=layout)


def put(file: int, at: int, data: memoryview) -> None:
    """Write bytes at a place of an open file."""
    for start in range(0, len(data), STRETCH):
        view = data[start : start + STRETCH]
        while view:
            n = os.pwrite(file, view, at)
            view, at = view[n:], at + n


def _synced(file: int, problem: list[OSError]) -> None:
    if problem:
        raise problem[0]
    files.DISK.sync(file)


def _finish(path: Path, plan: Sequence[WholeFile], model: nn.Module, new: NewFiles) -> None:
    """Put the files in their places, and then remove those of other weights: a reader finds one set at any time."""
    configure(path, configurations(model), new)
    into_place(path, plan, new)
    new.keep()
    files.DISK.sync_folder(path)
    kept = {file.name for file in plan}
    if len(plan) == 1:
        files.DISK.remove(path / INDEX)
    for old in path.iterdir():
        if _WEIGHTS.fullmatch(old.name) and old.name not in kept:
            files.DISK.remove(old)
    files.DISK.sync_folder(path)


def configure(path: Path, texts: Mapping[str, str], new: NewFiles) -> None:
    """Write the configuration of a model of transformers."""
    for name, text in texts.items():
        new.write(path / f"{name}.tmp", text)
        new.place(path / f"{name}.tmp", path / name)


def into_place(path: Path, plan: Sequence[WholeFile], new: NewFiles) -> None:
    """Rename complete files to what they are called, the index last."""
    for file in plan:
        new.place(path / file.unfinished, path / file.name)
    if len(plan) > 1:
        total = sum(s.nbytes for file in plan for s in file.specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": {n: f.name for f in plan for n in f.specs}}
        new.write(path / f"{INDEX}.tmp", json.dumps(index, indent=1))
        new.place(path / f"{INDEX}.tmp", path / INDEX)


__all__ = [
    "INDEX", "SHARD_BYTES", "SINGLE", "WholeFile", "begin", "configure", "into_place", "plan_files", "put",
    "save_weights",
]  # fmt: skip
