"""Saving: ranks agree on what, each writes its own parts, and the first one makes it a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import threading
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import torch

from .. import collective
from ..errors import CheckpointError, DesyncError
from ..layout.pieces import own_piece, replica
from ..local_tensor import bare
from ..mesh import Mesh
from ..ranks import runtime
from ..shard.gradients.replicas import facts_of
from ..tensor import DistTensor, local_data
from . import files
from .contents import Contents, Roles, gather, host_generators
from .coordination import everyone, prepared
from .files import Line, Part, write_file
from .manifest import NAME, Manifest, commit, make_folder, new_folder, remove, remove_old
from .runs import clear, run_in, stranger

Tensor = torch.Tensor
DIFFERENT = "save: the ranks save different things"
SEEDS = (
    "all ranks must save the same step of the same run: seed all ranks alike (torch.manual_seed(seed), not seed + "
    "rank), and keep what is not distributed the same"
)


def save(
    folder: Path, keep: int | None, step: int, roles: Roles, mesh: Mesh, staging: dict[str, Tensor] | None,
    gradients: bool,
) -> Save:  # fmt: skip
    """Begin to save; the ranks have agreed and what is to be written is apart from what training changes.

    Args:
        staging: memory of the save before, by name of the tensor; what this one needs is put there.  None: what is
            saved is written before this returns, and not copied.

    Raises:
        CheckpointError, DesyncError: on every rank; nothing was written.
    """
    _same_call(mesh, step, roles, gradients)
    contents = prepared(mesh, "save", lambda: gather(roles, mesh, gradients), _lines, DIFFERENT, SEEDS)
    generators = host_generators()
    name, subject, same = _named(folder, step, contents, zlib.crc32(repr(generators).encode()))
    if same:
        contents.values["generators"] = generators
    path = folder / name
    contents.in_own_order()
    parts = own_parts(contents, path)
    run = run_in(folder).name
    manifest = Manifest(step, mesh, contents.specs, contents.aliases, contents.values, run=run)
    return Save(path, keep, manifest, parts, staging, subject)


def _same_call(mesh: Mesh, step: int, roles: Roles, gradients: bool) -> None:
    """Ranks were given the same, before what they gather has them communicate."""

    def check() -> None:
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise CheckpointError(f"save: step={step!r}: a whole number of at least 0 was expected")
        if not isinstance(gradients, bool):
            raise CheckpointError(f"save: gradients={gradients!r}: True or False was expected")

    given = {"step": step, "gradients=": gradients, **roles.kinds()}
    given["micro-step of program="] = None if roles.program is None else roles.program.micro_step
    prepared(mesh, "save", check, lambda made: given, DIFFERENT, SEEDS)


def _lines(contents: Contents) -> dict[str, object]:
    """What all ranks must save alike."""
    lines: dict[str, object] = {name: repr(spec) for name, spec in contents.specs.items()}
    lines.update({f"the other name {name}": of for name, of in contents.aliases.items()})
    lines.update({word: json.dumps(value) for word, value in contents.values.items()})
    if contents.mesh.size > 1:
        plain = {n: t for n, t in contents.tensors.items() if not isinstance(t, DistTensor)}
        values = collective.digests(list(plain.values()))
        lines.update({f"the digest of {name}": value for name, value in zip(plain, values, strict=True)})
    return lines


def _named(folder: Path, step: int, contents: Contents, generators: int) -> tuple[str, str, bool]:
    """The name of the folder of a save, which the first rank gives; it is made where the disk is waited for.

    And a word that no save has had, whatever its folder is called.  From here on the save is one of this run.

    In the same exchange samples of what several ranks hold are compared; and whether all bring the same digest of the
    generators beside torch's, which need not be.
    """
    mesh, name, error, same = contents.mesh, "", "", True
    subject, run = secrets.token_hex(16), run_in(folder)
    own = run.name or secrets.token_hex(8)
    if runtime.RT.rank == mesh.ranks[0]:
        try:
            clear(folder, run)
            error = stranger(folder, run)
            name = new_folder(folder, step).name
        except Exception as raised:  # of whatever kind: the others would wait
            error = why(raised)
    if mesh.size > 1:
        here = mesh.coordinate(runtime.RT.rank)
        split = {n: t for n, t in contents.tensors.items() if isinstance(t, DistTensor)}
        shared = {n: (t.spec.layout, bare(t)) for n, t in split.items() if replica(t.spec, here)[1] > 1}
        told = everyone((name, error, facts_of(shared, whole=False), generators, own, subject), mesh)
        name, error, *_, own, subject = told[0]
        same = len({one[3] for one in told}) == 1
        went = collective.differing({rank: one[2] for rank, one in zip(mesh.ranks, told, strict=True)})[0]
        if went:
            raise DesyncError(
                f"save: ranks that hold the same part of a tensor hold {went}; each would save some of them"
            )
    if error:
        raise CheckpointError(f"save to {folder}: {error}")
    run.name = own
    run.own.add(name)
    return name, subject, same


def own_parts(contents: Contents, path: Path) -> list[Part]:
    """What this rank writes, of memory that training goes on to change."""
    here = contents.mesh.coordinate(runtime.RT.rank)
    parts = []
    for turn, (name, spec) in enumerate(contents.specs.items()):
        box = own_piece(spec, here, turn)
        if box is None:
            continue
        t = contents.tensors[name]
        value = local_data(t)
        for d, ((a, b), start) in enumerate(zip(box, spec.local_offset(here), strict=True)):
            value = value.narrow(d, a - start, b - a)
        parts.append(Part(name, box, value))
    return parts


class Save:
    """A save that was begun: its files are written in a thread, from copies.

    Attributes:
        path: its folder, a checkpoint once :meth:`wait` has returned.
        step: of the run.
    """

    def __init__(
        self, path: Path, keep: int | None, manifest: Manifest, parts: list[Part], staging: dict[str, Tensor] | None,
        subject: str,
    ) -> None:  # fmt: skip
        self.path, self.step = path, manifest.step
        self._keep, self._manifest, self._parts = keep, manifest, parts
        self._rank, self._post = runtime.RT.rank, collective.StoreMailbox(manifest.mesh, f"checkpoint/{subject}")
        self._error, self._told, self._unable = "", False, ""
        self._staging, self._copies = {} if staging is None else staging, dict[str, Tensor]()
        self._thread: threading.Thread | None = None
        if self._post.simulated:  # its rank has the only thread that may run, and meets the others in it
            self._finish()
            return
        if staging is None:
            self._run()
            return
        held = dict(staging)
        staging.clear()  # until it was written, the memory is nobody else's
        try:
            self._copies = {p.name: staged(p.value, held.get(p.name)) for p in parts}
            self._parts = [replace(p, value=self._copies[p.name]) for p in parts]
        except Exception as error:  # the others must hear of it
            self._parts = []
            self._unable = f"what is saved cannot be copied: {why(error)}; save(..., wait=True) needs no copy"
        self._thread = threading.Thread(target=self._run, name=f"meshwright saves step {self.step}")
        _UNDER_WAY[self._rank, os.path.realpath(path.parent)] = self
        self._thread.start()

    def __repr__(self) -> str:
        return f"<save of step {self.step} to {self.path}{'' if self.done else ', under way'}>"

    @property
    def done(self) -> bool:
        """Whether it came to its end, or failed: :meth:`wait` returns, or raises, at once."""
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._finish()
        except Exception as error:
            self._error = str(error) or type(error).__name__
        self._staging.update(self._copies)  # for the next one
        self._staging, self._copies = {}, {}  # whoever remembers this save keeps no memory of its size
        if self._error and not threading.main_thread().is_alive():  # nobody is left to be told
            print(f"step {self.step} was not saved: {self._error}", file=sys.stderr)

    def _finish(self) -> None:
        """Write, and hear whether it is a checkpoint; of one that failed nothing stays."""
        report, said = self._written(), ""
        try:
            words = self._post.collect(json.dumps(report))
            said = self._commit(words) if self._post.first else ""
        except Exception as error:
            if not self._post.first:
                raise
            said = why(error)  # a rank is gone: the others are to hear of it
        if said:  # before they do: none then finds a manifest
            self._discard()
        try:
            self._error = self._post.announce(said)
        except Exception:  # the first rank has ended, and the store with it: what it did is to be seen
            if not (self.path / NAME).is_file():
                raise
            files.DISK.sync_folder(self.path)  # the first rank may have ended between the two
        if self._error and not self._post.first:
            self._discard()

    def _discard(self) -> None:
        """Remove what a save that failed wrote: a disk that is full should not stay so."""
        with contextlib.suppress(OSError):
            if self._post.first:
                remove(self.path)
            elif not (self.path / NAME).exists():  # else it could not be removed
                files.DISK.remove(self._file)
                files.DISK.remove(self.path)  # by the last of them

    @property
    def _file(self) -> Path:
        return self.path / f"rank-{self._rank:05d}.safetensors"

    def _written(self) -> dict[str, object]:
        """Write this rank's file.  What the first rank is to know of it."""
        file = self._file
        report: dict[str, object]
        try:
            make_folder(self.path)
            report = {"line": asdict(write_file(file, self._parts)), "file": file.name} if self._parts else {}
        except Exception as error:  # the others must hear of it, whatever it is
            report = {"error": f"{file} cannot be written: {why(error)}"}
        report = {"error": self._unable} if self._unable else report
        self._parts = []
        return report

    def _commit(self, words: list[str]) -> str:
        """On the first rank, with the reports of all: make it a checkpoint.  Why it could not, or nothing."""
        folder, run = self.path.parent, run_in(self.path.parent, self._rank)
        if other := stranger(folder, run):  # who was first may have removed what is here, so this is what to say
            return f"{folder}: {other}"
        reports = [json.loads(word) for word in words]
        ranks = self._manifest.mesh.ranks
        errors = [f"rank {rank}: {r['error']}" for rank, r in zip(ranks, reports, strict=True) if "error" in r]
        if errors:
            return "; ".join(errors)
        lines = {r["file"]: Line(**r["line"]) for r in reports if r}
        try:
            for name, line in lines.items():
                if (self.path / name).stat().st_size != line.bytes:
                    raise FileNotFoundError
        except FileNotFoundError:
            return (
                f"{self.path / name} is not what its rank wrote: all ranks must save to one folder, which they share, "
                "and nobody else"
            )
        try:
            commit(self.path, replace(self._manifest, files=lines))
        except Exception as error:
            return f"{self.path / NAME} cannot be written: {why(error)}"
        with contextlib.suppress(OSError, CheckpointError):  # it is a checkpoint, whatever became of the older ones
            remove_old(folder, self._keep, self.path, run.owns)
        return ""

    def wait(self) -> None:
        """Wait until the checkpoint is complete and durable.

        Raises:
            CheckpointError: on every rank; the older checkpoints are whole.
        """
        self._join()
        if self._error:
            self._told = True
            raise CheckpointError(
                f"step {self.step} was not saved: {self._error}; checkpoints that were complete before still are"
            )

    def settle(self) -> None:
        """:meth:`wait`, but for what was said before."""
        self._join()
        if not self._told:
            self.wait()

    def _join(self) -> None:
        if self._thread is not None and self._thread.ident is not None:  # an interrupt may have come before its start
            self._thread.join()


# The last save that a thread of this process began, by rank and folder; another one to the same folder comes after it.
_UNDER_WAY: dict[tuple[int, str], Save] = {}


def settle(folder: Path) -> None:
    """Wait for what any :class:`Checkpoints` of this process saves to a folder.  Raises as :meth:`Save.settle`."""
    last = _UNDER_WAY.get((runtime.RT.rank, os.path.realpath(folder)))
    if last is not None:
        last.settle()


def why(error: Exception) -> str:
    """What went wrong, in words."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def staged(value: Tensor, held: Tensor | None) -> Tensor:
    """A copy of a part in memory of the host, which training does not change; in memory that is there, where it fits.

    New memory costs more than the copy: the system clears each page of it when it is first written.
    """
    if held is not None and (held.shape, held.dtype) == (value.shape, value.dtype):
        return held.copy_(value.detach())
    if value.device.type != "cpu":
        return value.detach().to("cpu")
    return value.detach().clone(memory_format=torch.contiguous_format)


__all__ = ["Save", "save", "settle"]
