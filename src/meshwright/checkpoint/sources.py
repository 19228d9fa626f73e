"""Files of tensors that others wrote, as sources that parts of tensors are read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from ..errors import CheckpointError
from ..layout import Layout, Spec
from ..layout.pieces import Box, read_spec
from .arrays import OpenFile, StoredArray, arrays_of, digest_of
from .restore import Target

Tensor = torch.Tensor


class ArrayFiles:
    """Tensors in files that others wrote, as a source of parts of them.

    Attributes:
        shapes: name to shape and dtype.
        aliases: none.
    """

    def __init__(self) -> None:
        self.files: dict[Path, OpenFile] = {}
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.aliases: Mapping[str, str] = {}

    def open(self, path: Path) -> OpenFile:
        """A file of the folder.  Raises CheckpointError."""
        if path not in self.files:
            self.files[path] = OpenFile(path)
        return self.files[path]

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, headers too."""
        return sum(file.bytes_read for file in self.files.values())

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            file.close()

    def mark(self) -> str:
        """What tells these files from others, wherever they are."""
        return digest_of(self.files.values())

    def spec_of(self, target: Target) -> Spec:
        """How a target is read: in whole rows."""
        stored = Spec(target.spec.shape, target.spec.dtype, Layout(target.spec.mesh))
        return read_spec(stored, target.spec)

    def fill(self, name: str, box: Box, value: Tensor) -> None:
        """Fill a tensor of the size of ``box`` with that part of one that is there.  Raises CheckpointError."""
        raise NotImplementedError


class SafetensorFiles(ArrayFiles):
    """Files of whole tensors.

    Args:
        index: name of a tensor to the name of the file that it is to be read from.

    Raises:
        CheckpointError: a file that cannot be read, or has not what it is to have.
    """

    def __init__(self, paths: Sequence[Path], index: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__()
        self.arrays: dict[str, StoredArray] = {}
        try:
            for path in paths:
                self._take(path, index)
            if lost := [name for name in index if name not in self.arrays]:
                raise CheckpointError(
                    f"{paths[0].parent / index[lost[0]]} lacks {lost[0]}, which the index says it has"
                )
        except BaseException:
            self.close()
            raise
        self.shapes = {name: (array.shape, array.dtype) for name, array in self.arrays.items()}

    def _take(self, path: Path, index: Mapping[str, str]) -> None:
        for name, array in arrays_of(self.open(path)).items():
            if index.get(name, path.name) != path.name:
                continue  # of older weights, say
            if name in self.arrays:
                raise CheckpointError(f"{name} is in {self.arrays[name].file.path} and in {path}: which is meant?")
            self.arrays[name] = array

    def fill(self, name: str, box: Box, value: Tensor) -> None:
        self.arrays[name].read(box, value)


__all__ = ["ArrayFiles", "SafetensorFiles"]
