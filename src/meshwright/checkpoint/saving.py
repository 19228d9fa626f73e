"""Saving: ranks agree on what, each writes its own parts, and the first one makes it a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch

from .. import collective, runtime
from ..errors import CheckpointError
from ..mesh import Mesh
from ..raw import bare
from ..tensor import DistTensor
from .agree import alike, everyone, together
from .contents import Contents, Roles, gather
from .files import Line, Part, write_file
from .manifest import NAME, Manifest, commit, make_folder, new_folder, remove_old
from .pieces import own_piece

Tensor = torch.Tensor
SEEDS = "seed all ranks alike (torch.manual_seed(seed), not seed + rank), and keep what is not distributed the same"


def save(folder: Path, keep: int | None, step: int, roles: Roles, mesh: Mesh) -> Save:
    """Begin to save; the ranks have agreed and what is to be written is apart from what training changes.

    Raises:
        CheckpointError, DesyncError: on every rank; nothing was written.
    """
    contents = together(mesh, "save", lambda: gather(roles, mesh))
    _agree(step, contents)
    path = folder / _begin(folder, step, mesh)
    parts = own_parts(contents, path)
    manifest = Manifest(step, mesh, contents.specs, contents.aliases, contents.values)
    return Save(path, keep, manifest, parts)


def _agree(step: int, contents: Contents) -> None:
    mesh = contents.mesh
    lines: dict[str, object] = {"step": step}
    lines.update({name: repr(spec) for name, spec in contents.specs.items()})
    lines.update({f"the other name {name}": of for name, of in contents.aliases.items()})
    lines.update({word: json.dumps(value) for word, value in contents.values.items()})
    alike(mesh, "save: the ranks save different things", "all ranks must save the same step of the same run", lines)
    if mesh.size > 1:
        plain = {n: t for n, t in contents.tensors.items() if not isinstance(t, DistTensor)}
        values = collective.digests(list(plain.values()))
        found = {f"digest of {name}": value for name, value in zip(plain, values, strict=True)}
        alike(mesh, "save: the ranks hold different values", SEEDS, found)


def _begin(folder: Path, step: int, mesh: Mesh) -> str:
    """Make the folder of a save; its name, on all ranks."""

    def begin() -> str:
        if runtime.RT.rank != mesh.ranks[0]:
            return ""
        path = new_folder(folder, step)
        make_folder(path)
        return path.name

    return everyone(together(mesh, f"save to {folder}", begin), mesh)[0]


def own_parts(contents: Contents, path: Path) -> list[Part]:
    """What this rank writes, of memory that training goes on to change."""
    here = contents.mesh.coordinate(runtime.RT.rank)
    parts = []
    for turn, (name, spec) in enumerate(contents.specs.items()):
        box = own_piece(spec, here, turn)
        if box is None:
            continue
        t = contents.tensors[name]
        value = bare(t) if isinstance(t, DistTensor) else t.detach()
        for d, ((a, b), start) in enumerate(zip(box, spec.local_offset(here), strict=True)):
            value = value.narrow(d, a - start, b - a)
        parts.append(Part(name, box, value))
    return parts


class Save:
    """A save that was begun.

    Attributes:
        path: its folder, a checkpoint once :meth:`wait` has returned.
        step: of the run.
    """

    def __init__(self, path: Path, keep: int | None, manifest: Manifest, parts: list[Part]) -> None:
        self.path, self.step = path, manifest.step
        self._keep, self._manifest, self._parts = keep, manifest, parts
        self._post = collective.Post(manifest.mesh, f"checkpoint/{path.name}")
        self._error: str | None = None
        self._finish()

    def __repr__(self) -> str:
        return f"<save of step {self.step} to {self.path}>"

    def _finish(self) -> None:
        file = self.path / f"rank-{runtime.RT.rank:05d}.safetensors"
        report: dict[str, object]
        try:
            report = {"line": asdict(write_file(file, self._parts)), "file": file.name} if self._parts else {}
        except OSError as error:
            report = {"error": f"{file} cannot be written: {error.strerror}"}
        self._parts = []
        words = self._post.collect(json.dumps(report))
        error_text = self._post.announce(self._commit(words) if words else "")
        self._error = error_text

    def _commit(self, words: list[str]) -> str:
        """On the first rank, with the reports of all: make it a checkpoint.  Why it could not, or nothing."""
        if runtime.RT.rank != self._manifest.mesh.ranks[0]:
            return ""
        reports = [json.loads(word) for word in words]
        errors = [
            f"rank {rank}: {r['error']}"
            for rank, r in zip(self._manifest.mesh.ranks, reports, strict=True)
            if "error" in r
        ]
        if errors:
            return "; ".join(errors)
        lines = {r["file"]: Line(**r["line"]) for r in reports if r}
        for name, line in lines.items():
            there = (self.path / name).stat().st_size if (self.path / name).exists() else None
            if there != line.bytes:
                return f"{self.path / name} is not what its rank wrote there: all ranks must save to one shared folder"
        try:
            commit(self.path, replace(self._manifest, files=lines))
        except OSError as error:
            return f"{self.path / NAME} cannot be written: {error.strerror}"
        remove_old(self.path.parent, self._keep, self.path)
        return ""

    def wait(self) -> None:
        """Wait until the checkpoint is complete and durable.

        Raises:
            CheckpointError: on every rank; the older checkpoints are whole.
        """
        if self._error:
            raise CheckpointError(
                f"step {self.step} was not saved: {self._error}; checkpoints that were complete before still are"
            )


__all__ = ["Save", "save"]
