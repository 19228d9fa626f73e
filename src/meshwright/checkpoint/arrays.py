"""Arrays in files that others wrote: parts of them are read into tensors, a little at a time."""

from __future__ import annotations

import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..layout.pieces import Box, far_apart, inside
from ..untrusted_files import making_sense, open_regular

Tensor = torch.Tensor
Fetch = Callable[[int, memoryview], None]  # fills memory with the bytes of an array from so many on
STRETCH = 1 << 22  # bytes that are written or read at a time
SAMPLES, SAMPLE = 64, 4096  # of a file, and bytes of each
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class OpenFile:
    """A file open for reading.

    Attributes:
        bytes_read: so far.
        size: in bytes.

    Raises:
        CheckpointError: it cannot be.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.bytes_read = path, 0
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        self.size = os.fstat(self._file).st_size

    def close(self) -> None:
        """No more of it."""
        os.close(self._file)

    def fill(self, at: int, into: memoryview) -> None:
        """Fill memory with what begins at a byte.  Raises CheckpointError where the file ends before."""
        self.bytes_read += len(into)
        while into:
            try:
                n = os.preadv(self._file, [into], at)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror}, at byte {at}") from error
            if not n:
                raise CheckpointError(f"{self.path} is damaged: it ends at byte {at}")
            into, at = into[n:], at + n

    def read(self, at: int, size: int) -> bytearray:
        """Bytes of the file."""
        made = bytearray(size)
        self.fill(at, memoryview(made))
        return made


@dataclass(frozen=True)
class StoredArray:
    """An array of numbers, row by row, in a file.

    Attributes:
        start: its first byte.
        order: the dims of the tensor as which it is read, slowest first.
    """

    file: OpenFile
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...] | None = None

    def read(self, box: Box, into: Tensor) -> None:
        """Fill a tensor of the size of ``box`` with that part of it; numbers of other dtypes are converted."""
        shape = self.shape
        if self.order is not None:
            into = into.permute(self.order)
            shape, box = tuple(shape[d] for d in self.order), tuple(box[d] for d in self.order)
        read_box(shape, self.dtype, box, into, lambda at, memory: self.file.fill(self.start + at, memory))


def bytes_of(value: Tensor) -> memoryview:
    """The bytes of a tensor in memory of the host, row by row; a copy where they do not lie so."""
    value = value.detach().resolve_conj().resolve_neg()
    value = torch.view_as_real(value) if value.is_complex() else value
    plain: Any = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(plain)


def slabs(
    shape: Sequence[int], box: Box, itemsize: int, *, limit: int | None = None, dense: bool = False
) -> Iterator[tuple[Box, int, int]]:
    """Parts of a box in an array, in order, each of some rows that lie together in few bytes.

    Args:
        limit: bytes; ``STRETCH``.
        dense: nothing else lies between them.

    Yields:
        The part, the dim that the rows are of, and the byte of the array that they begin at.
    """
    if not shape:
        yield (), 0, 0
        return
    limit = STRETCH if limit is None else limit
    below = [itemsize * math.prod(shape[d + 1 :]) for d in range(len(shape))]  # bytes of a row of each dim
    if any(a >= b for a, b in box):
        return
    dim = next((d for d, size in enumerate(below) if size <= limit), len(shape) - 1)
    if dense:
        dim = max([dim, *(d for d, n in enumerate(shape) if box[d] != (0, n))])
    (low, high), rows = box[dim], max(1, limit // max(1, below[dim]))
    for index in itertools.product(*(range(a, b) for a, b in box[:dim])):
        at = sum(i * size for i, size in zip(index, below, strict=False))
        for a in range(low, high, rows):
            part = (*((i, i + 1) for i in index), (a, min(a + rows, high)), *box[dim + 1 :])
            yield part, dim, at + a * below[dim]


def read_box(shape: tuple[int, ...], dtype: torch.dtype, box: Box, into: Tensor, fetch: Fetch) -> None:
    """Fill a tensor with a part of an array, straight where it lies alike, and by a little memory where not."""
    if not shape:
        shape, box, into = (1,), ((0, 1),), into.view(1)
    plain = into.dtype is dtype and into.device.type == "cpu" and not into.is_conj() and not into.is_neg()
    dense = far_apart(shape, [b - a for a, b in box], dtype.itemsize)
    for part, dim, at in slabs(shape, box, dtype.itemsize, dense=dense):
        place, rows = inside(into, part, box), part[dim][1] - part[dim][0]
        inner = shape[dim + 1 :]
        whole = all(part[d] == (0, n) for d, n in enumerate(inner, dim + 1))
        if plain and whole and place.is_contiguous():
            fetch(at, bytes_of(place))
            continue
        data = bytearray(rows * math.prod(inner) * dtype.itemsize)
        fetch(at, memoryview(data))
        values = torch.frombuffer(data, dtype=dtype).view(rows, *inner)
        for d in range(1, values.ndim):
            values = values.narrow(d, part[dim + d][0], part[dim + d][1] - part[dim + d][0])
        place.copy_(values.view([1] * dim + list(values.shape)) if dim else values)


def arrays_of(file: OpenFile) -> dict[str, StoredArray]:
    """The tensors of a safetensors file, by name.  Raises CheckpointError where it is none, or is cut."""

    def fail(what: str) -> CheckpointError:
        return CheckpointError(f"{file.path} cannot be read: {what}")

    if file.size < 8:
        raise fail(f"it has {file.size} bytes, a safetensors file has at least 8")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > file.size - 8:
        raise fail(f"its header would end at byte {8 + length}, and it has {file.size}: it is cut, or no safetensors")
    with making_sense(file.path, CheckpointError, "cannot be read: its header is not one of safetensors"):
        table = json.loads(bytes(file.read(8, length)))
        table.pop("__metadata__", None)
        found, spans = {}, []
        for name, entry in table.items():
            kind, shape, (first, last) = (
                entry["dtype"],
                tuple(map(int, entry["shape"])),
                map(int, entry["data_offsets"]),
            )
            if kind not in DTYPES:
                raise CheckpointError(f"{file.path}: {name} is of the dtype {kind}, which cannot be read")
            if min((0, *shape)) < 0 or first < 0 or last - first != math.prod(shape) * DTYPES[kind].itemsize:
                raise fail(f"{name} of shape {shape} would be bytes {first} to {last}")
            found[name] = StoredArray(file, 8 + length + first, shape, DTYPES[kind])
            spans.append((first, last, name))
    end = 0
    for first, last, name in sorted(spans):
        if first != end:
            raise fail(f"{name} begins at byte {8 + length + first}, and what is before it ends at {8 + length + end}")
        end = last
    if end != file.size - 8 - length:
        raise fail(f"its tensors end at byte {8 + length + end}, and it has {file.size}")
    return found


def digest_of(files: Iterable[OpenFile]) -> str:
    """What tells files from others, wherever they are: their sizes, and samples of what is in them."""
    crc = 0
    for file in files:
        crc = zlib.crc32(repr((file.path.name, file.size)).encode(), crc)
        for at in range(0, file.size, max(1, -(-file.size // SAMPLES))):
            crc = zlib.crc32(file.read(at, min(SAMPLE, file.size - at)), crc)
    return f"digest {crc:x}"


__all__ = [
    "DTYPES", "NAMES", "STRETCH", "OpenFile", "StoredArray", "arrays_of", "bytes_of", "digest_of",
    "read_box", "slabs",
]  # fmt: skip
