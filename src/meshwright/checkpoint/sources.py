"""Files of tensors that others wrote, as sources that parts of tensors are read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..layout import Layout, Spec
from .arrays import OpenFile, StoredArray, arrays_of, digest_of
from .pieces import Box, read_spec
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
    """Files of whole tensors."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__()
        self.arrays: dict[str, StoredArray] = {}
        try:
            for path in paths:
                self.arrays.update(arrays_of(self.open(path)))
        except BaseException:
            self.close()
            raise
        self.shapes = {name: (array.shape, array.dtype) for name, array in self.arrays.items()}

    def fill(self, name: str, box: Box, value: Tensor) -> None:
        self.arrays[name].read(box, value)


__all__ = ["ArrayFiles", "SafetensorFiles"]
