"""Loading: one checkpoint chosen by the first rank, all checks, then each rank reads what it needs, file by file."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from .. import collective
from ..dispatch import disabled
from ..errors import CheckpointError, MeshwrightError
from ..layout import Spec
from ..layout.pieces import FEW, Box, common, inside, overlapping, read_spec, stretches
from ..mesh import Mesh
from ..ranks import runtime
from ..resharding import executor
from ..resharding.planner import plan as plan_conversion
from ..shard.optimizers.states import batched_by
from ..untrusted_files import making_sense
from .contents import OPTIMIZER, OTHERS, Roles
from .coordination import attempt, from_first, prepared
from .files import TensorFile, as_stored
from .manifest import Manifest, SaveFolder, parsed, read_manifest, saves_in
from .restore import Target, plan_restore
from .runs import of_one_run, run_in

Tensor = torch.Tensor
DIFFERENT, SAME = "load: the ranks load different things", "all ranks must load the same"


@dataclass
class Loaded:
    """A load that was done.

    Attributes:
        step: of the checkpoint.
        bytes_read: by this rank, of tensors.
    """

    step: int
    bytes_read: int


def load(folder: Path, step: int | None, roles: Roles, mesh: Mesh) -> Loaded | None:
    """Fill what is given from the newest complete checkpoint, or from that of a step; None where there is none.

    Raises:
        CheckpointError: on every rank.
    """
    found = _chosen(folder, step, roles, mesh)
    if found is None:
        return None
    path, manifest = found
    restore = prepared(
        mesh, f"load {path}", lambda: plan_restore(roles, manifest, mesh), lambda made: specs_of(made.targets),
        DIFFERENT, SAME,
    )  # fmt: skip
    reader = Reader(path, manifest, collective.on_one_machine(mesh))
    try:
        read_targets(restore.targets, reader, mesh, f"load {path}")
    finally:
        reader.close()
    attempt(mesh, f"load {path}", restore.finish)
    return Loaded(manifest.step, reader.bytes_read)


def specs_of(targets: Sequence[Target]) -> dict[str, object]:
    """How targets lie, by number and name."""
    return {f"{i}: {t.name}": t.spec for i, t in enumerate(targets)}


class TensorSource(Protocol):
    """Where parts of tensors are read from."""

    def spec_of(self, target: Target) -> Spec:
        """How a target is read, before it is brought to how it lies."""
        ...

    def fill(self, name: str, box: Box, value: Tensor) -> None:
        """Fill a tensor of the size of ``box`` with that part of one that is there.  Raises CheckpointError."""
        ...

    def mark(self) -> str:
        """What tells it from other sources."""
        ...


@dataclass(frozen=True)
class Rows:
    """Rows of a target that are read, and brought to how they lie, together.

    Attributes:
        first: of them.
        spec: how they lie.
        local: memory of this rank's part of them.
        read: how they are read; ``spec`` itself where that is straight to their place.
    """

    target: Target
    first: int
    spec: Spec
    local: Tensor
    read: Spec

    @property
    def held(self) -> int:
        """Bytes that a rank has beside what it fills."""
        return 0 if self.read is self.spec else self.read.nbytes // self.read.mesh.size + 1


def read_targets(targets: Iterable[Target], source: TensorSource, mesh: Mesh, what: str) -> None:
    """Fill targets: each rank reads its part of some, and where all could, they are brought to how they lie.

    Raises:
        CheckpointError: on every rank, where any could not read.
    """
    rows = [one for target in targets for one in _rows(target, source.spec_of(target))]
    for batch in batched_by(rows, lambda one: one.held, 2 * FEW):
        for one, value in zip(batch, attempt(mesh, what, partial(_read_all, batch, source)), strict=True):
            place(one, value)


def _rows(target: Target, read: Spec) -> list[Rows]:
    """In which stretches a target is read: few bytes each where ranks exchange what they read."""
    spec = target.spec
    parts = None if read.layout == spec.layout else stretches(spec)
    if parts is None:
        return [Rows(target, 0, spec, target.local, read if spec.layout.blocks else spec)]
    if len(parts) == 1:
        return [Rows(target, 0, spec, target.local, read)]
    locals_ = target.local.split([part.shape[0] for _, part in parts])
    whole = [(first, part, part.with_(layout=read.layout)) for first, part in parts]
    return [Rows(target, first, part, t, how) for (first, part, how), t in zip(whole, locals_, strict=True)]


def _read_all(rows: Iterable[Rows], source: TensorSource) -> list[Tensor]:
    return [_read(one, source) for one in rows]


def _read(one: Rows, source: TensorSource) -> Tensor:
    """What this rank reads of some rows, on the target's device."""
    here, value = one.read.mesh.coordinate(runtime.RT.rank), one.local
    if one.read is not one.spec:
        value = torch.empty(one.read.local_shape(here), dtype=one.spec.dtype, device=one.local.device)
    box = one.read.layout.local_bounds(one.read.shape, here)
    if one.first:
        box[0] = (box[0][0] + one.first, box[0][1] + one.first)
    with torch.no_grad(), making_sense(f"{one.target.name!r}", CheckpointError, passing=MeshwrightError):
        source.fill(one.target.name, tuple(box), value)
    return value


def _chosen(folder: Path, step: int | None, roles: Roles, mesh: Mesh) -> tuple[Path, Manifest] | None:
    """The first rank looks, for all: they may see a shared folder at different times."""

    def choose() -> str:
        saves = saves_in(folder)
        chosen = choice(folder, step, saves)
        there = json.dumps([[s.path.name for s in saves if s.complete is whole] for whole in (True, False)])
        return f"{there}\n" + (f"{chosen.path.name}\n{chosen.step}\n{read_manifest(chosen.path)}" if chosen else "")

    given = {"step=": step, **roles.kinds()}
    there, _, found = from_first(mesh, f"load from {folder}", choose, given, DIFFERENT, SAME).partition("\n")
    own, left = json.loads(there)
    if not found:
        run_in(folder).goes_on("", own, left)
        return None
    name, number, text = found.split("\n", 2)
    path, manifest = folder / name, parsed(text, folder / name)
    if manifest.step != int(number):
        raise CheckpointError(f"{path} has what was saved as step {manifest.step}: it was copied or renamed")
    run_in(folder).goes_on(manifest.run, own, left)
    return path, manifest


def choice(folder: Path, step: int | None, saves: Sequence[SaveFolder]) -> SaveFolder | None:
    """The save to be loaded, of those in a folder; None where there is no checkpoint and no step was asked for.

    Raises:
        CheckpointError: no checkpoint of that step; those of several runs.
    """
    complete = [s for s in saves if s.complete]
    incomplete = "; ".join(s.why_incomplete() for s in saves if not s.complete)
    wanted = [s for s in complete if step in (None, s.step)]
    if wanted:
        of_one_run(folder, wanted)
        return wanted[0]
    if step is None:
        if incomplete:
            warnings.warn(f"{folder} has no complete checkpoint; incomplete: {incomplete}", stacklevel=2)
        return None
    there = f"complete: {', '.join(str(s.step) for s in complete)}" if complete else "there is no complete one"
    raise CheckpointError(
        f"{folder} has no checkpoint of step {step}; {there}" + (f"; incomplete: {incomplete}" if incomplete else "")
    )


class Reader:
    """Reads the tensors of a checkpoint, from the files that have what is needed.

    Attributes:
        shapes: name of a tensor of the model to shape and dtype.
        aliases: further names of tensors.
        one_machine: the ranks that read are on one machine.
    """

    def __init__(self, path: Path, manifest: Manifest, one_machine: bool = False) -> None:
        self.path, self.manifest, self.aliases = path, manifest, manifest.aliases
        self.one_machine = one_machine
        own = {n: s for n, s in manifest.tensors.items() if not n.startswith((OPTIMIZER, OTHERS))}
        self.shapes = {name: (tuple(spec.shape), spec.dtype) for name, spec in own.items()}
        self.files: dict[str, TensorFile] = {}

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, headers too."""
        return sum(file.bytes_read for file in self.files.values())

    def mark(self) -> str:
        """What tells this checkpoint from others, wherever it is: its manifest has checksums."""
        return f"{self.path.name}, digest {zlib.crc32(self.manifest.text().encode()):x}"

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            file.close()

    def spec_of(self, target: Target) -> Spec:
        """How a target is read."""
        return read_spec(self.manifest.tensors[target.name], target.spec, self.one_machine)

    def fill(self, name: str, box: Box, value: Tensor) -> None:
        """Fill a tensor of the size of ``box`` with that part of a saved one."""
        stored = self.manifest.tensors[name]
        if value.is_conj():  # its numbers are not those in its memory
            plain = torch.empty_like(value.resolve_conj())
            self.fill(name, box, plain)
            value.copy_(plain)
            return
        pair = as_stored(stored.dtype)[1]
        value = torch.view_as_real(value) if pair > 1 else value
        for rank, piece in overlapping(stored, box, self.manifest.turns[name]):
            wanted = common(piece, box)
            part = inside(value, wanted, box)
            self._file(rank, name).read_part(name, wanted if pair == 1 else (*wanted, (0, 2)), part)

    def _file(self, rank: int, name: str) -> TensorFile:
        file = f"rank-{rank:05d}.safetensors"
        if file not in self.files:
            if file not in self.manifest.files:
                raise CheckpointError(f"{self.path} is damaged: {name!r} is to be in {file}, which it does not have")
            self.files[file] = TensorFile(self.path / file, self.manifest.files[file])
        found = self.files[file]
        if name not in found.boxes:
            raise CheckpointError(f"{found.path} is damaged: it has no {name!r}")
        return found


def place(one: Rows, value: Tensor) -> None:
    """Bring what the ranks read to how it lies."""
    with torch.no_grad(), disabled():
        if value is not one.local:
            one.local.copy_(executor.apply(plan_conversion(one.read, one.spec).steps, value))
        if not one.first:
            torch.autograd.graph.increment_version(one.target.counted)


__all__ = ["DIFFERENT", "SAME", "Loaded", "Reader", "choice", "load", "read_targets", "specs_of"]
