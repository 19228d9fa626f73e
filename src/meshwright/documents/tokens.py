"""Tokens of files, made once: memory-mapped files that digests of data and tokenizer name.

Processes that need the same files share them out: each takes those that no other one holds the lock of.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..errors import DataError
from .fingerprints import fingerprint
from .reading import documents_of

Tensor = torch.Tensor
VERSION = "2"
AT_ONCE = 1000  # documents given to a tokenizer in one call
BYTES = 256
_KINDS = {"B": torch.uint8, "H": torch.uint16, "i": torch.int32}  # codes of arrays to dtypes


class Tokenizer:
    """A tokenizer of any library, or none (each byte of the text is a token), in one form.

    Attributes:
        digest: of what it does to texts.
        size: all tokens are below it, None where it does not tell.
        end: token put after each document, if any.
    """

    def __init__(self, tokenizer: Any, end: int | None) -> None:
        self.tokenizer = tokenizer
        self.end = getattr(tokenizer, "eos_token_id", None) if end is None else end
        self.size = _size(tokenizer)
        self.digest = hashlib.sha256(f"{VERSION} {self.end} {_described(tokenizer)}".encode()).hexdigest()

    def ids(self, texts: Sequence[str | bytes]) -> list[list[int]]:
        """Tokens of each text."""
        made: Any
        if self.tokenizer is None:
            made = [list(text.encode() if isinstance(text, str) else text) for text in texts]
        else:
            words = [text.decode() if isinstance(text, bytes) else text for text in texts]
            if hasattr(self.tokenizer, "encode_batch"):  # of the library tokenizers
                made = [one.ids for one in self.tokenizer.encode_batch(words, add_special_tokens=False)]
            elif hasattr(self.tokenizer, "get_vocab"):  # of transformers
                made = self.tokenizer(words, add_special_tokens=False, return_attention_mask=False)["input_ids"]
            else:
                made = [list(self.tokenizer(text)) for text in words]
        return made if self.end is None else [[*ids, self.end] for ids in made]


def _size(tokenizer: Any) -> int | None:
    if tokenizer is None:
        return BYTES
    return max(tokenizer.get_vocab().values(), default=0) + 1 if hasattr(tokenizer, "get_vocab") else None


def _described(tokenizer: Any) -> str:
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(inner, "to_str"):
        return str(inner.to_str())
    return fingerprint(tokenizer)


@dataclass
class Tokens:
    """Tokens of one file.

    Attributes:
        stem: path of its files without their endings.
        digest: of file and tokenizer.
        count, documents, largest: of tokens, of documents, the largest token.
        code: of the array that was written.
    """

    stem: str
    digest: str
    count: int
    documents: int
    largest: int
    code: str

    def __getstate__(self) -> dict[str, Any]:  # another process maps the file for itself
        return {k: v for k, v in self.__dict__.items() if k != "_ids"}

    @property
    def ids(self) -> Tensor:
        """All tokens, memory-mapped."""
        if "_ids" not in self.__dict__:
            self._ids = self._mapped(".ids", self.count, _KINDS[self.code])
        return self._ids

    def ends(self) -> Tensor:
        """Where documents end."""
        return self._mapped(".ends", self.documents, torch.int64)

    def _mapped(self, ending: str, count: int, dtype: torch.dtype) -> Tensor:
        path = self.stem + ending
        if not os.path.exists(path) or os.path.getsize(path) != count * dtype.itemsize:
            raise DataError(
                f"{path} is not what was written ({count} of {dtype}). Delete {self.stem}.* to write it again"
            )
        return torch.from_file(path, shared=False, size=count, dtype=dtype)


def tokens_of(paths: Sequence[Path], tokenizer: Tokenizer, column: str, folder: Path) -> list[Tokens]:
    """Tokens of files, read where they are there, and made by this or another process where not.

    Raises:
        DataError: If a file has no documents or cannot be read, or a folder cannot be written.
    """
    stems = [folder / _digest(path, tokenizer, column) for path in paths]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for wait in (False, True):  # first those that nobody makes, then those that others make
            for path, stem in zip(paths, stems, strict=True):
                if not _manifest(stem).exists():
                    with _locked(stem.with_suffix(".lock"), wait) as held:
                        if held and not _manifest(stem).exists():
                            _write(path, stem, tokenizer, column)
        return [Tokens(str(stem), stem.name, **json.loads(_manifest(stem).read_text())) for stem in stems]
    except OSError as error:
        raise DataError(
            f"folder {folder} cannot be written ({error.strerror or error}): pass another folder="
        ) from None


def _manifest(stem: Path) -> Path:
    return stem.with_suffix(".json")


def _digest(path: Path, tokenizer: Tokenizer, column: str) -> str:
    made = hashlib.sha256(f"{tokenizer.digest} {column if path.suffix != '.txt' else ''} ".encode())
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                made.update(block)
    except OSError as error:
        raise DataError(f"data {path} cannot be read ({error.strerror or error})") from None
    return made.hexdigest()[:32]


@contextlib.contextmanager
def _locked(path: Path, wait: bool) -> Iterator[bool]:
    """Whether this process holds the lock; where there are no locks each does all, and the last one to rename wins."""
    try:
        import fcntl
    except ImportError:
        yield True
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _write(path: Path, stem: Path, tokenizer: Tokenizer, column: str) -> None:
    code = "i" if tokenizer.size is None or tokenizer.size > 1 << 16 else "H" if tokenizer.size > BYTES else "B"
    code = "H" if code == "B" and (tokenizer.end or 0) >= BYTES else code
    total, largest, ends, texts = 0, 0, array("q"), documents_of(path, column)
    with _replacing(stem.with_suffix(".ids")) as out:
        while batch := list(islice(texts, AT_ONCE)):
            for ids in _tokenized(batch, tokenizer, path):
                out(array(code, ids).tobytes())
                total, largest = total + len(ids), max(largest, *ids) if ids else largest
                ends.append(total)
    if not total:
        raise DataError(f"data {path} has no tokens: leave it out")
    with _replacing(stem.with_suffix(".ends")) as out:
        out(ends.tobytes())
    about = {"count": total, "documents": len(ends), "largest": largest, "code": code}
    with _replacing(_manifest(stem)) as out:
        out(json.dumps(about).encode())


def _tokenized(texts: list[str | bytes], tokenizer: Tokenizer, path: Path) -> list[list[int]]:
    try:
        return tokenizer.ids(texts)
    except UnicodeDecodeError as error:
        raise DataError(f"data {path} is no UTF-8 ({error.reason} at byte {error.start}): convert it") from None
    except UnicodeEncodeError as error:
        text = error.object[max(error.start - 20, 0) : error.end].encode("unicode_escape").decode()
        raise DataError(f"data {path} has a document that is no Unicode text, at {text!r}: mend or drop it") from None


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Callable[[bytes], Any]]:
    """Write a file that is there as a whole or not at all."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            yield file.write
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


__all__ = ["Tokenizer", "Tokens", "tokens_of"]
