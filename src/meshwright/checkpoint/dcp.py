"""Checkpoints of ``torch.distributed.checkpoint``: read slice by slice, with nothing in them that could run.

Their metadata and the head of each chunk are pickles.  They are read by an unpickler that knows a few names, each of
which stands for a plain record here: nothing of torch, and nothing else, is imported or called.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..layout.pieces import Box, common, inside, nothing
from ..untrusted_files import making_sense, plain_name
from .arrays import OpenFile, StoredArray
from .sources import ArrayFiles

Tensor = torch.Tensor
METADATA = ".metadata"
HEAD = 1 << 20  # bytes that the pickled head of a chunk has at most
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"),
}  # fmt: skip
_DTYPES = {name: one for name, one in vars(torch).items() if isinstance(one, torch.dtype)}
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip


class PickledObject:
    """What a pickle says of an object: the arguments that it would be made with, then its state."""

    kind = ""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.given, self.state = (), state


class PlainUnpickler(pickle.Unpickler):
    """Makes records, numbers, words and containers of them."""

    def __init__(self, data: bytes | bytearray) -> None:
        super().__init__(io.BytesIO(data))
        # New classes each time: a pickle may set attributes of what it names.
        self.known: dict[tuple[str, str], Any] = {
            (module, name): type(name, (PickledObject,), {"kind": name})
            for module, names in _RECORDS.items()
            for name in names
        }
        self.known |= {("torch", name): dtype for name, dtype in _DTYPES.items()}
        self.known |= {("torch", name): _DTYPES[of] for name, of in _STORAGES.items()}
        self.known |= {("torch.storage", "UntypedStorage"): None, ("torch", "Size"): tuple}
        self.known |= {("collections", "OrderedDict"): OrderedDict}

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for."""
        if (module, name) not in self.known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no such file has: it was not run")
        return self.known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """A storage is what it is called."""
        return pid


def unpickled(data: bytes | bytearray, where: str) -> Any:
    """What a pickle has, as records.  Raises CheckpointError, for what would run code too."""
    with making_sense(where, CheckpointError):
        return PlainUnpickler(data).load()


class StoredChunk(NamedTuple):
    """A part of a tensor.

    Attributes:
        box: which part.
        file, start, length: the bytes that have it, an archive of its own.
    """

    box: Box
    file: str
    start: int
    length: int


@dataclass
class Chunked:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[StoredChunk] = field(default_factory=list)


class DcpFiles(ArrayFiles):
    """A folder that ``torch.distributed.checkpoint`` wrote, as a source of parts of its tensors."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.prefix = folder, ""
        path = folder / METADATA
        try:
            file = self.open(path)
            data = unpickled(file.read(0, file.size), str(path))
            with making_sense(path, CheckpointError):
                self.tensors = _tensors(data, path)
            for name in sorted({c.file for t in self.tensors.values() for c in t.chunks}):
                self.open(folder / name)
        except BaseException:
            self.close()
            raise
        self.arrays: dict[StoredChunk, StoredArray] = {}
        self.shapes = {name: (t.shape, t.dtype) for name, t in self.tensors.items()}

    def choose(self, names: Iterable[str]) -> None:
        """Find out under which prefix a model lies, and leave the rest out.

        Raises:
            CheckpointError: under several.
        """
        names = list(names)
        first = [name[: -len(n)] for n in names for name in self.tensors if name.endswith("." + n)]
        found = Counter(p for p in dict.fromkeys(first) for n in names if p + n in self.tensors)
        found[""] = sum(n in self.tensors for n in names)
        most = max(found.values())
        best = sorted(p for p, count in found.items() if count == most)
        if len(best) > 1 and "" not in best:
            raise CheckpointError(
                f"{self.folder} has the model several times, as {', '.join(map(repr, best))}: it is not known which "
                "is meant"
            )
        self.prefix = "" if "" in best else best[0]
        cut = len(self.prefix)
        self.shapes = {n[cut:]: (t.shape, t.dtype) for n, t in self.tensors.items() if n.startswith(self.prefix)}

    def mark(self) -> str:
        """What tells these files from others."""
        return f"{super().mark()} {self.prefix}"

    def fill(self, name: str, box: Box, value: Tensor) -> None:
        name = self.prefix + name
        parts = [(c, common(c.box, box)) for c in self.tensors[name].chunks]
        parts = [(c, part) for c, part in parts if not nothing(part)]
        volume = sum(math.prod(b - a for a, b in part) for _, part in parts)
        twice = any(not nothing(common(p, q)) for i, (_, p) in enumerate(parts) for _, q in parts[:i])
        if twice or volume != value.numel():
            raise CheckpointError(f"{self.folder} is damaged: the chunks of {name!r} do not make up {_where(box)}")
        for chunk, part in parts:
            local = tuple((a - start, b - start) for (a, b), (start, _) in zip(part, chunk.box, strict=True))
            self._array(name, chunk).read(local, inside(value, part, box))

    def _array(self, name: str, chunk: StoredChunk) -> StoredArray:
        if chunk not in self.arrays:
            file = self.open(self.folder / chunk.file)
            where = f"{file.path}: the chunk of {name!r} at byte {chunk.start}"
            tensor = self.tensors[name]
            with making_sense(where, CheckpointError):
                self.arrays[chunk] = _array(file, chunk, tensor.dtype, where)
        return self.arrays[chunk]


def _where(box: Box) -> str:
    return f"[{', '.join(f'{a}:{b}' for a, b in box)}]"


# ---------------------------------------------------------------------------------------------- the metadata


def _tensors(data: Any, path: Path) -> dict[str, Chunked]:
    """The tensors that a checkpoint has, by name."""
    if getattr(data, "kind", "") != "Metadata":
        raise CheckpointError(f"{path} is no metadata of torch.distributed.checkpoint")
    found, sizes = {}, {}
    for name, about in data.state["state_dict_metadata"].items():
        if about.kind == "TensorStorageMetadata":
            found[name] = Chunked(_numbers(about.state["size"]), _dtype_of(about.state["properties"].state))
            for chunk in about.state["chunks"]:
                sizes[name, _numbers(chunk.state["offsets"])] = _numbers(chunk.state["sizes"])
    for index, info in data.state["storage_data"].items():
        name = index.state["fqn"]
        if name in found:
            offsets = _numbers(index.state["offset"] or [0] * len(found[name].shape))
            found[name].chunks.append(_chunk(name, offsets, sizes[name, offsets], info.state, path))
    return found


def _numbers(given: Any) -> tuple[int, ...]:
    if not all(type(n) is int and n >= 0 for n in given):
        raise ValueError(f"{given} are no sizes")
    return tuple(given)


def _dtype_of(properties: Any) -> torch.dtype:
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype} is no dtype")
    return dtype


def _chunk(
    name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Mapping[str, Any], path: Path
) -> StoredChunk:
    file = info["relative_path"]
    if not plain_name(file):
        raise CheckpointError(f"{path} names {file!r}, which is not in its folder")
    if info.get("transform_descriptors"):
        raise CheckpointError(f"{path}: {name!r} was written through {info['transform_descriptors']}: that is not read")
    box = tuple((a, a + n) for a, n in zip(offsets, sizes, strict=True))
    return StoredChunk(box, file, *_numbers((info["offset"], info["length"])))


# ---------------------------------------------------------------------------------------------- chunks


class FileWindow(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: OpenFile, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0
        if start + length > file.size:
            raise ValueError(f"it would end at byte {start + length}, and the file has {file.size}")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        data = self._file.read(self._start + self._at, left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return bytes(data)


def _array(file: OpenFile, chunk: StoredChunk, dtype: torch.dtype, where: str) -> StoredArray:
    """Where the numbers of a chunk are: ``torch.save`` writes an archive in which they lie as they are."""
    archive = zipfile.ZipFile(FileWindow(file, chunk.start, chunk.length))
    members = {m.filename.partition("/")[2]: m for m in archive.infolist()}
    if any(m.compress_type != zipfile.ZIP_STORED for m in members.values()) or members["data.pkl"].file_size > HEAD:
        raise ValueError("it is no archive of torch.save")
    if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
        raise ValueError("its numbers begin with their high bytes")
    head = unpickled(archive.read(members["data.pkl"]), where)
    head = head.given[0] if head.kind == "_rebuild_parameter" else head
    storage, offset, sizes, strides, *rest = head.given
    shape, strides, (offset,) = _numbers(sizes), _numbers(strides), _numbers((offset,))
    late = head.kind == "_rebuild_tensor_v3"
    kind, notes = (rest[2], rest[3:]) if late else (storage[1], rest[2:])
    if any(notes):  # torch.save says there that they are to be conjugated or negated
        raise ValueError(f"its numbers are not those of the tensor: {notes[0]}")
    if kind is not dtype or shape != tuple(b - a for a, b in chunk.box):
        raise ValueError(f"it is {kind} of shape {shape}, and the metadata says {dtype} of {_where(chunk.box)}")
    order = tuple(sorted(range(len(shape)), key=lambda d: (-strides[d], -shape[d])))
    step, count = 1, math.prod(shape)
    for d in reversed(order):
        if strides[d] != step and shape[d] > 1 and count:
            raise ValueError(f"its strides are {strides} for the shape {shape}")
        step *= shape[d]
    member = members[f"data/{storage[2]}"]
    if (offset + count) * dtype.itemsize > member.file_size:
        raise ValueError(f"it has {member.file_size} bytes of numbers")
    return StoredArray(file, chunk.start + _data_of(file, chunk, member) + offset * dtype.itemsize, shape, dtype, order)


def _data_of(file: OpenFile, chunk: StoredChunk, member: zipfile.ZipInfo) -> int:
    """Where the bytes of a member of an archive begin: behind a head of its own, with a name and notes."""
    head = file.read(chunk.start + member.header_offset, 30)
    at = member.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    if head[:4] != b"PK\3\4" or at + member.file_size > chunk.length:
        raise ValueError("its archive is damaged")
    return at


__all__ = ["METADATA", "DcpFiles", "PlainUnpickler", "unpickled"]
