"""Files of tensors: written in the safetensors format with checksums, made durable, read block by block."""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .pieces import Box

Tensor = torch.Tensor

BLOCK = 1 << 16  # bytes that a checksum covers; they begin with each tensor
STRETCH = 1 << 24  # bytes that are written or read at a time
NEAR = 1 << 20  # bytes that stay in a processor's cache; a multiple of any block
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
OFFSETS = "DCP_SHARDING_INFO"  # how torch's HuggingFaceStorageReader finds out where a part begins
SUMS = "meshwright"


class Disk:
    """What is done to a disk.  Tests put another one in its place, which fails where they want."""

    def make_folder(self, path: Path) -> None:
        """Make a folder, with those that it is in; it may be there."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """A new, empty file, open for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write(self, file: int, data: Any) -> None:
        """Append to an open file."""
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]

    def sync(self, file: int) -> None:
        """What was written to an open file is durable from here on."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """No more of it."""
        os.close(file)

    def sync_folder(self, path: Path) -> None:
        """What was made, renamed and removed in a folder is durable from here on."""
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def rename(self, path: Path, to: Path) -> None:
        """Put a file in the place of another one, at once."""
        path.rename(to)

    def remove(self, path: Path) -> None:
        """A file, or an empty folder, is gone; it may be gone already."""
        with contextlib.suppress(FileNotFoundError):
            path.rmdir() if path.is_dir() else path.unlink()


DISK = Disk()


@dataclass(frozen=True)
class Line:
    """What the manifest says of a file."""

    bytes: int
    header: int  # its CRC32


@dataclass(frozen=True)
class Part:
    """A part of a tensor, as a file has it.

    Attributes:
        name: of the tensor.
        box: which part of it.
        value: in memory of the host.
    """

    name: str
    box: Box
    value: Tensor


def as_stored(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """What elements of a dtype are in a file, and how many: complex numbers are pairs."""
    return (dtype.to_real(), 2) if dtype.is_complex else (dtype, 1)


def write_file(path: Path, parts: Sequence[Part]) -> Line:
    """Write parts of tensors, durably.

    Raises:
        OSError: the file is then gone, unless that fails too.
    """
    parts = sorted(parts, key=lambda p: -p.value.dtype.itemsize)  # so that all are aligned
    values = [bytes_of(p.value) for p in parts]
    header = _header(parts, values)
    file = DISK.create(path)
    try:
        DISK.write(file, header)
        for value in values:
            for start in range(0, len(value), STRETCH):
                DISK.write(file, value[start : start + STRETCH])
        DISK.sync(file)
        DISK.sync_folder(path.parent)
    except OSError:
        DISK.remove(path)  # a disk that is full should not stay so
        raise
    finally:
        DISK.close(file)
    return Line(len(header) + sum(map(len, values)), zlib.crc32(header))


def bytes_of(value: Tensor) -> memoryview:
    """The bytes of a tensor in memory of the host, row by row; a copy where they do not lie so."""
    value = value.detach().resolve_conj().resolve_neg()
    value = torch.view_as_real(value) if value.is_complex() else value
    plain: Any = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(plain)


def _header(parts: Sequence[Part], values: Sequence[memoryview]) -> bytes:
    """A header with the checksums of all blocks."""
    table = {}
    for part in parts:
        dtype, pairs = as_stored(part.value.dtype)
        table[part.name] = dtype, [b - a for a, b in part.box] + [2] * (pairs > 1)
    offsets = {p.name: {"saved_offsets": [a for a, _ in p.box] + [0] * p.value.is_complex()} for p in parts}
    sums = {p.name: _sums(value).tobytes().hex() for p, value in zip(parts, values, strict=True)}
    return header_of(table, {OFFSETS: json.dumps(offsets), SUMS: json.dumps({"block": BLOCK, "crc32": sums})})


def header_of(tensors: Mapping[str, tuple[torch.dtype, list[int]]], about: Mapping[str, str]) -> bytes:
    """What a safetensors file begins with: the length of the header, and the header.

    Args:
        tensors: name to dtype and shape, in the order of their bytes.
        about: notes.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _sums(value: memoryview) -> array[int]:
    return array("I", (zlib.crc32(value[i : i + BLOCK]) for i in range(0, len(value), BLOCK)))


# ---------------------------------------------------------------------------------------------- reading


class TensorFile:
    """A file that :func:`write_file` wrote, open for reading.

    Attributes:
        boxes: name of a tensor to the part of it that is here.
        bytes_read: so far.

    Raises:
        CheckpointError: it is not there, is cut, or is not as it was written.
    """

    def __init__(self, path: Path, line: Line) -> None:
        self.path, self.bytes_read = path, 0
        try:
            self.file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        size = os.fstat(self.file).st_size
        if size != line.bytes:
            os.close(self.file)
            raise CheckpointError(f"{path} is damaged: it has {size} bytes, and had {line.bytes} when it was written")
        length = min(int.from_bytes(self._read(0, 8), "little"), size - 8)
        header = self._read(0, 8 + length)
        if zlib.crc32(header) != line.header:
            os.close(self.file)
            raise CheckpointError(f"{path} is damaged: the checksum of its header (bytes 0 to {8 + length}) differs")
        self.table = json.loads(header[8:])
        about = self.table.pop("__metadata__")
        sums, offsets = json.loads(about[SUMS]), json.loads(about[OFFSETS])
        self.block, self.start = sums["block"], 8 + length
        self.sums = {name: array("I", bytes.fromhex(text)) for name, text in sums["crc32"].items()}
        self.boxes: dict[str, Box] = {}
        for name, entry in self.table.items():
            first = offsets[name]["saved_offsets"]
            self.boxes[name] = tuple((a, a + n) for a, n in zip(first, entry["shape"], strict=True))

    def close(self) -> None:
        """No more of it."""
        os.close(self.file)

    def _read(self, start: int, size: int) -> bytearray:
        made = bytearray(size)
        view, at = memoryview(made), start
        while view:
            n = os.preadv(self.file, [view], at)
            if not n:
                raise CheckpointError(f"{self.path} is damaged: it ends at byte {at}")
            view, at = view[n:], at + n
        self.bytes_read += size
        return made

    def verify(self, name: str) -> None:
        """Read all of a tensor.  Raises CheckpointError where it is not as it was written."""
        first, last = self.table[name]["data_offsets"]
        for start in range(0, last - first, STRETCH):
            self._checked(name, start, min(start + STRETCH, last - first))

    def _checked(self, name: str, start: int, stop: int) -> memoryview:
        """Bytes of a tensor, after their blocks were found to be as they were written."""
        first, last = self.table[name]["data_offsets"]
        low, high = start // self.block * self.block, min(-(-stop // self.block) * self.block, last - first)
        at = self.start + first + low
        found = memoryview(self._read(at, high - low))
        for i in range(0, high - low, self.block):
            if zlib.crc32(found[i : i + self.block]) != self.sums[name][(low + i) // self.block]:
                end = min(i + self.block, high - low)
                raise CheckpointError(
                    f"{self.path} is damaged: tensor {name!r}, checksum of bytes {at + i} to {at + end} of the file"
                )
        return found[start - low : stop - low]

    def _read_rows(self, name: str, start: int, stop: int, into: memoryview) -> None:
        """Fill memory with bytes of a tensor, a little at a time: checked and copied while it is in the cache."""
        for low in range(start // self.block * self.block, stop, NEAR // self.block * self.block):
            a, b = max(start, low), min(stop, low + NEAR // self.block * self.block)
            into[a - start : b - start] = self._checked(name, a, b)

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """Fill a tensor with a part of the part that is here.

        Args:
            box: global bounds, inside of what is here.
            into: of the size of the box; of the dtype that was stored, on the host or a device.
        """
        entry, here = self.table[name], self.boxes[name]
        dtype = DTYPES[entry["dtype"]]
        if not here:
            into.copy_(torch.frombuffer(self._checked(name, 0, dtype.itemsize), dtype=dtype)[0])
            return
        lengths = [b - a for a, b in here]
        row = math.prod(lengths[1:]) * dtype.itemsize
        (lo, hi), begin = box[0], here[0][0]
        if box[1:] == here[1:] and into.dtype is dtype and into.is_contiguous() and into.device.type == "cpu":
            self._read_rows(name, (lo - begin) * row, (hi - begin) * row, bytes_of(into))
            return
        rows = max(1, STRETCH // row)
        for a in range(lo, hi, rows):
            b = min(a + rows, hi)
            data = self._checked(name, (a - begin) * row, (b - begin) * row)
            values = torch.frombuffer(data, dtype=dtype).view(b - a, *lengths[1:])
            for d in range(1, len(box)):
                values = values.narrow(d, box[d][0] - here[d][0], box[d][1] - box[d][0])
            into[a - lo : b - lo].copy_(values)


__all__ = [
    "DISK", "DTYPES", "NAMES", "STRETCH", "Disk", "Line", "Part", "TensorFile", "as_stored", "bytes_of", "header_of",
    "write_file",
]  # fmt: skip
