"""Files of tensors: written in the safetensors format with checksums, made durable, read block by block."""

from __future__ import annotations

import contextlib
import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_64_intdigest as digest  # ten times as fast as zlib's CRC32: a load is not kept by it

from ..errors import CheckpointError
from ..layout.pieces import BLOCK, Box, inside  # a checksum covers a block; blocks begin with each tensor
from ..untrusted_files import making_sense
from .arrays import DTYPES, NAMES, STRETCH, OpenFile, bytes_of, read_box, slabs

Tensor = torch.Tensor

NEAR = 1 << 20  # bytes that stay in a processor's cache; a multiple of any block
OFFSETS = "DCP_SHARDING_INFO"  # how torch's HuggingFaceStorageReader finds out where a part begins
SUMS = "meshwright"


class Disk:
    """What is done to a disk.  Tests put another one in its place, which fails where they want."""

    def make_folder(self, path: Path) -> None:
        """Make a folder, with those that it is in; it may be there."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """A new, empty file, open for writing.  Nothing may be there, not even a link to nowhere."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def append(self, path: Path) -> int:
        """A file that is there, open for writing at its end."""
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)

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
        """A file, a link or an empty folder is gone; it may be gone already."""
        with contextlib.suppress(FileNotFoundError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


DISK = Disk()


class NewFiles:
    """Files that one call makes.  Until they are kept, all of what it made can be removed, and nothing else is.

    Args:
        replacing: what has such a name is replaced; otherwise it is an error, and stays.
    """

    def __init__(self, replacing: bool) -> None:
        self.replacing, self._made = replacing, list[Path]()

    def folder(self, path: Path) -> None:
        """Make a folder, with those that it is in."""
        self._made += reversed([p for p in (path, *path.parents) if not p.exists()])
        DISK.make_folder(path)

    def create(self, path: Path) -> int:
        """A new file, open for writing.  Raises CheckpointError where something is there that may not be replaced."""
        if self.replacing:
            DISK.remove(path)
        try:
            file = DISK.create(path)
        except FileExistsError:
            raise CheckpointError(f"{path} is there already: give a name that is not") from None
        self._made.append(path)
        return file

    def write(self, path: Path, text: str) -> None:
        """A new file, with a text."""
        file = self.create(path)
        try:
            DISK.write(file, text.encode())
        finally:
            DISK.close(file)

    def place(self, path: Path, to: Path) -> None:
        """Rename a file that was made here.  Raises as :meth:`create`."""
        if not self.replacing:  # a rename asks nobody: an empty file of this call holds the place
            DISK.close(self.create(to))
        elif not os.path.lexists(to):
            self._made.append(to)
        DISK.rename(path, to)
        self._made.remove(path)

    def keep(self) -> None:
        """What was made so far stays, whatever comes."""
        self._made.clear()

    def remove(self) -> None:
        """Nothing of what was made, and is not kept, stays, as far as the disk allows."""
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                DISK.remove(path)
        self._made.clear()


@dataclass(frozen=True)
class Line:
    """What the manifest says of a file."""

    bytes: int
    header: int  # its digest


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
    header = _header(parts)
    file = DISK.create(path)
    try:
        DISK.write(file, header)
        for part in parts:
            for data in _stretches(part.value):
                DISK.write(file, data)
        DISK.sync(file)
        DISK.sync_folder(path.parent)
    except OSError:
        DISK.remove(path)  # a disk that is full should not stay so
        raise
    finally:
        DISK.close(file)
    return Line(len(header) + sum(p.value.nbytes for p in parts), digest(header))


def _stretches(value: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, a little at a time: whole blocks, but for the end."""
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    if value.is_contiguous():
        data = bytes_of(value)
        yield from (data[start : start + STRETCH] for start in range(0, len(data), STRETCH))
        return
    rest = b""
    box = tuple((0, n) for n in value.shape)
    for part, _, _ in slabs(value.shape, box, value.dtype.itemsize):
        data = memoryview(rest + bytes(bytes_of(inside(value, part, box))))
        end = len(data) // BLOCK * BLOCK
        rest = bytes(data[end:])
        yield data[:end]
    yield memoryview(rest)


def _header(parts: Sequence[Part]) -> bytes:
    """A header with the checksums of all blocks."""
    table = {}
    for part in parts:
        dtype, pairs = as_stored(part.value.dtype)
        table[part.name] = dtype, [b - a for a, b in part.box] + [2] * (pairs > 1)
    offsets = {p.name: {"saved_offsets": [a for a, _ in p.box] + [0] * p.value.is_complex()} for p in parts}
    sums = {p.name: _sums(p.value).tobytes().hex() for p in parts}
    return header_of(table, {OFFSETS: json.dumps(offsets), SUMS: json.dumps({"block": BLOCK, "xxh3_64": sums})})


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


def _sums(value: Tensor) -> array[int]:
    blocks = (data[i : i + BLOCK] for data in _stretches(value) for i in range(0, len(data), BLOCK))
    return array("Q", map(digest, blocks))


# ---------------------------------------------------------------------------------------------- reading


class TensorFile(OpenFile):
    """A file that :func:`write_file` wrote, open for reading.

    Attributes:
        boxes: name of a tensor to the part of it that is here.

    Raises:
        CheckpointError: it is not there, is cut, or is not as it was written.
    """

    def __init__(self, path: Path, line: Line) -> None:
        super().__init__(path)
        try:
            self._open(line)
        except BaseException:
            self.close()
            raise

    def _open(self, line: Line) -> None:
        if self.size != line.bytes:
            raise CheckpointError(
                f"{self.path} is damaged: it has {self.size} bytes, and had {line.bytes} when it was written"
            )
        length = min(int.from_bytes(self.read(0, 8), "little"), self.size - 8)
        header = self.read(0, 8 + length)
        if digest(header) != line.header:
            raise CheckpointError(
                f"{self.path} is damaged: the checksum of its header (bytes 0 to {8 + length}) differs"
            )
        with making_sense(self.path, CheckpointError):
            self._understand(json.loads(header[8:]), 8 + length)

    def _understand(self, table: dict[str, Any], start: int) -> None:
        about = table.pop("__metadata__")
        sums, offsets = json.loads(about[SUMS]), json.loads(about[OFFSETS])
        self.table, self.block, self.start = table, int(sums["block"]), start
        self.sums = {name: array("Q", bytes.fromhex(text)) for name, text in sums["xxh3_64"].items()}
        self.boxes: dict[str, Box] = {}
        for name, entry in table.items():
            shape, first, (low, high) = entry["shape"], offsets[name]["saved_offsets"], entry["data_offsets"]
            size = math.prod(shape) * DTYPES[entry["dtype"]].itemsize
            if min((0, low, *shape)) < 0 or high - low != size or len(self.sums[name]) != -(-size // self.block):
                raise CheckpointError(
                    f"{self.path} is damaged: {name!r} of shape {shape} would be bytes {low} to {high}"
                )
            self.boxes[name] = tuple((a, a + n) for a, n in zip(first, shape, strict=True))

    def verify(self, name: str) -> None:
        """Read all of a tensor.  Raises CheckpointError where it is not as it was written."""
        first, last = self.table[name]["data_offsets"]
        memory = memoryview(bytearray(min(NEAR, last - first)))
        for start in range(0, last - first, NEAR):
            self._blocks(name, start, memory[: last - first - start])

    def _blocks(self, name: str, low: int, into: memoryview) -> None:
        """Fill memory with whole blocks of a tensor, and check them while they are in the cache."""
        at = self.start + self.table[name]["data_offsets"][0] + low
        self.fill(at, into)
        for i in range(0, len(into), self.block):
            block = into[i : i + self.block]
            if digest(block) != self.sums[name][(low + i) // self.block]:
                raise CheckpointError(
                    f"{self.path} is damaged: tensor {name!r}, checksum of bytes {at + i} to {at + i + len(block)} of "
                    "the file"
                )

    def _checked(self, name: str, start: int, into: memoryview) -> None:
        """Fill memory with bytes of a tensor, after their blocks were found to be as they were written."""
        first, last = self.table[name]["data_offsets"]
        total, at, stop = last - first, start, start + len(into)
        while at < stop:
            low = at // self.block * self.block
            high = min(
                stop if stop == total else stop // self.block * self.block, low + NEAR // self.block * self.block
            )
            if low == at and high > low:  # whole blocks: straight to their place
                self._blocks(name, low, into[at - start : high - start])
            else:
                block = memoryview(bytearray(min(self.block, total - low)))
                self._blocks(name, low, block)
                high = min(low + self.block, stop)
                into[at - start : high - start] = block[at - low : high - low]
            at = high

    def read_part(self, name: str, box: Box, into: Tensor) -> None:
        """Fill a tensor with a part of the part that is here.

        Args:
            box: global bounds, inside of what is here.
            into: of the size of the box, on the host or a device.
        """
        entry, here = self.table[name], self.boxes[name]
        local = tuple((a - start, b - start) for (a, b), (start, _) in zip(box, here, strict=True))
        shape = tuple(entry["shape"])
        read_box(shape, DTYPES[entry["dtype"]], local, into, partial(self._checked, name))


__all__ = ["BLOCK", "DISK", "Disk", "Line", "NewFiles", "Part", "TensorFile", "as_stored", "header_of", "write_file"]
