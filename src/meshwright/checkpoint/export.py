"""A checkpoint as weights that others read: a Hugging Face directory or one safetensors file, by one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..layout import Spec
from . import files
from .arrays import bytes_of, slabs
from .contents import OPTIMIZER, OTHERS
from .files import NewFiles
from .hugging_face import SHARD_BYTES, WholeFile, begin, configure, into_place, plan_files
from .inspection import manifest_of, saves_at
from .loading import Reader
from .manifest import SaveFolder
from .runs import of_one_run

SUFFIX = ".safetensors"


def chosen(folder: Path, step: int | None) -> SaveFolder:
    """The newest complete checkpoint, or that of a step.  Raises CheckpointError where there is none."""
    saves = saves_at(folder)
    wanted = [s for s in saves if s.complete and step in (None, s.step)]
    if wanted:
        of_one_run(folder, wanted)
        return wanted[0]
    of, there = "" if step is None else f" of step {step}", [str(s.step) for s in saves if s.complete]
    incomplete = "".join(f"; incomplete: {s.why_incomplete()}" for s in saves if not s.complete)
    raise CheckpointError(
        f"{folder} has no complete checkpoint{of} (complete: {', '.join(there) or 'none'}){incomplete}"
    )


def export(
    path: Path, out: Path, shard_bytes: int = SHARD_BYTES, tell: Callable[[int, int], None] = lambda done, total: None
) -> list[str]:
    """Write the model of a checkpoint, a few MiB at a time, with all checksums compared.

    Args:
        path: of the checkpoint.
        out: a folder that is not there yet, or is empty; or a file that is not there, named ``.safetensors``.
        shard_bytes: how large the files of a folder may become, where no tensor is larger.
        tell: told how many bytes were written, of how many.

    Returns:
        The names of what was written.

    Raises:
        CheckpointError: something is there, what was saved is damaged or no model, a disk that is full; nothing is
            left then.
    """
    manifest = manifest_of(path)
    specs = {n: spec for n, spec in manifest.tensors.items() if not n.startswith((OPTIMIZER, OTHERS))}
    if not specs:
        raise CheckpointError(f"{path} was saved without model=: there are no weights in it")
    single = out.suffix == SUFFIX
    vacant(out)
    plan = plan_files(specs, sum(s.nbytes for s in specs.values()) if single else shard_bytes)
    configs: dict[str, str] = {} if single else manifest.values.get("config", {})
    if single:
        plan[0].name = out.name
    folder, reader, new = out.parent if single else out, Reader(path, manifest), NewFiles(replacing=False)
    try:
        begin(folder, plan, new)
        _write(folder, plan, reader, tell)
        configure(folder, configs, new)
        into_place(folder, plan, new)
        files.DISK.sync_folder(folder)
    except BaseException as error:
        new.remove()
        if isinstance(error, OSError):
            raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from error
        raise
    finally:
        reader.close()
    return [*(f.name for f in plan), *configs]


def vacant(out: Path) -> None:
    """Raise CheckpointError where something is already."""
    with contextlib.suppress(NotADirectoryError):
        if not out.is_symlink() and (not out.exists() or (out.suffix != SUFFIX and not any(out.iterdir()))):
            return
    raise CheckpointError(f"{out} is there already: give a name that is not")


def _write(folder: Path, plan: Sequence[WholeFile], reader: Reader, tell: Callable[[int, int], None]) -> None:
    disk, done, total = files.DISK, 0, sum(s.nbytes for f in plan for s in f.specs.values())
    for file in plan:
        opened = disk.append(folder / file.unfinished)
        try:
            for name, spec in file.specs.items():
                for data in stretches(reader, name, spec):
                    disk.write(opened, data)
                    done += len(data)
                    tell(done, total)
            disk.sync(opened)
        finally:
            disk.close(opened)


def stretches(reader: Reader, name: str, spec: Spec) -> Iterator[memoryview]:
    """The bytes of a saved tensor, a little at a time."""
    for part, _, _ in slabs(spec.shape, tuple((0, n) for n in spec.shape), spec.dtype.itemsize):
        value = torch.empty([b - a for a, b in part], dtype=spec.dtype)
        reader.fill(name, part, value)
        yield bytes_of(value)


__all__ = ["chosen", "export", "vacant"]
