"""Looking at checkpoints without a model: what they have, and whether all of it is as it was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import CheckpointError
from .files import TensorFile
from .manifest import NAME, Manifest, SaveFolder, parsed, read_manifest, saves_in

Tell = Callable[[int], None]


def saves_at(path: Path) -> list[SaveFolder]:
    """All saves in a folder of a run, the newest first; or the one whose folder is given.

    Raises:
        CheckpointError: neither.
    """
    found = saves_in(path) or [s for s in saves_in(path.parent) if s.path.name == path.name]
    if not found:
        raise CheckpointError(f"no checkpoint in {path}. Pass the folder of --save.")
    return found


def manifest_of(path: Path) -> Manifest:
    """The manifest of a checkpoint.  Raises CheckpointError."""
    return parsed(read_manifest(path), path / NAME)


def damages(path: Path, tell: Tell = lambda nbytes: None) -> Iterator[str]:
    """Read all of a checkpoint; each thing that is not as it was written.

    Args:
        tell: told how many bytes more were read.
    """
    try:
        manifest = manifest_of(path)
    except CheckpointError as error:
        yield str(error)
        return
    for name, line in manifest.files.items():
        try:
            file = TensorFile(path / name, line)
        except CheckpointError as error:
            yield str(error)
            continue
        for tensor in file.boxes:
            before = file.bytes_read
            try:
                file.verify(tensor)
            except CheckpointError as error:
                yield str(error)
            tell(file.bytes_read - before)
        file.close()


__all__ = ["damages", "manifest_of", "saves_at"]
