"""``mw.Packed``: documents packed into rows of one length."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from ..errors import DataError
from .packing import BestFitRows, CutRows, Span
from .reading import check_file
from .tokens import Tokenizer, tokens_of

Tensor = torch.Tensor
FITS = ("best", "cut")
IGNORED = -100  # what cross_entropy leaves out


class Packed(Dataset[dict[str, Tensor]]):
    """Documents of text, JSONL or Parquet files, packed into rows of `length` tokens.

    A row is a dict of `input_ids`, `labels` (not shifted, -100 for the first token of each document and for padding)
    and `position_ids`, which start again with each document: Hugging Face models then let no document attend to
    another (`use_cache=False`). Files are tokenized once, into a folder from which all processes map them.

    Args:
        files: Names of files. Each line of `.jsonl` is a document, `{"text": ...}`, and each row of `.parquet` or
            `.arrow` (with `meshwright[data]`); any other file is one document.
        tokenizer: Of `transformers` or `tokenizers`, or a function from text to ids; `None`: bytes of the text are ids.
        length: Tokens in a row.
        fit: `"best"` packs whole documents, the longest first, in blocks of 4,096; `"cut"` cuts the documents one after
            the other into rows.
        end: Token put after each document. Default: the tokenizer's `eos_token_id`, if it has one.
        column: Key of the text in JSONL, or its column.
        folder: Where tokens are written. Default: `~/.cache/meshwright/tokens`.
        documents: Whether rows have `document_ids` too, for [attention][meshwright.attention].

    Raises:
        DataError: If a file is missing, empty or corrupt (the error names file and line), or an argument is invalid.
        ExtraError: If a file needs pyarrow, which is not installed.

    Examples:
        ```python
        import pathlib, tempfile

        folder = tempfile.mkdtemp()
        pathlib.Path(folder, "a.jsonl").write_text('{"text": "abcde"}\\n{"text": "xyz"}\\n{"text": "12"}\\n')
        data = mw.Packed([f"{folder}/a.jsonl"], length=8, folder=folder)
        assert len(data) == 2 and bytes(data[0]["input_ids"].tolist()) == b"abcdexyz"
        assert data[0]["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
        assert data[1]["labels"].tolist() == [-100, ord("2"), *[-100] * 6]
        ```
    """

    def __init__(
        self, files: Sequence[str | PathLike[str]], tokenizer: Any = None, *, length: int, fit: str = "best",
        end: int | None = None, column: str = "text", folder: str | PathLike[str] | None = None,
        documents: bool = False,
    ) -> None:  # fmt: skip
        if isinstance(files, (str, PathLike)) or not files:
            raise DataError(f"Packed: files={files!r}: pass a list of file names")
        if type(length) is not int or length < 2:
            raise DataError(f"Packed: length={length!r}: pass the tokens of a row, 2 or more")
        if fit not in FITS:
            raise DataError(f"Packed: fit={fit!r}: pass one of {', '.join(map(repr, FITS))}")
        self.length, self.documents = length, documents
        paths = [check_file(str(name)) for name in files]
        self.tokenizer = Tokenizer(tokenizer, end)
        where = Path.home() / ".cache" / "meshwright" / "tokens" if folder is None else Path(folder)
        self.files = tokens_of(paths, self.tokenizer, column, where)
        first = torch.tensor([0, *(one.count for one in self.files)]).cumsum(0)
        self._starts = first.tolist()  # of each file's tokens among all
        ends = torch.cat([one.ends() + start for one, start in zip(self.files, self._starts, strict=False)])
        self.packing: CutRows | BestFitRows = (CutRows if fit == "cut" else BestFitRows)(ends, length)
        self.digest = hashlib.sha256(f"{fit} {length} {[one.digest for one in self.files]}".encode()).hexdigest()[:32]
        self.number_of_documents = len(ends)

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents."""
        return int(self._starts[-1])

    @property
    def largest(self) -> int:
        """The largest token."""
        return max(one.largest for one in self.files)

    @property
    def fill(self) -> float:
        """Share of the rows that is not padding."""
        return self.tokens / (len(self) * self.length)

    def __len__(self) -> int:
        return self.packing.rows

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        spans = self.packing.spans(row % len(self))
        lengths = [stop - start for start, stop in spans]
        if (rest := self.length - sum(lengths)) > 0:
            lengths.append(rest)  # padding is a document that is not learned from
        ids = torch.zeros(self.length, dtype=torch.int64)
        labels = torch.full((self.length,), IGNORED)
        at = 0
        for span in spans:
            count = span[1] - span[0]
            self._read(span, ids[at : at + count])
            labels[at + 1 : at + count] = ids[at + 1 : at + count]
            at += count
        made = {"input_ids": ids, "labels": labels, "position_ids": torch.cat([torch.arange(n) for n in lengths])}
        if self.documents:
            made["document_ids"] = torch.repeat_interleave(torch.tensor(lengths))
        return made

    def _read(self, span: Span, into: Tensor) -> None:
        """Copy tokens, which may be those of several files."""
        start, stop = span
        for one, first in zip(self.files, self._starts, strict=False):
            a, b = max(start, first), min(stop, first + one.count)
            if a < b:
                into[a - start : b - start] = one.ids[a - first : b - first]


__all__ = ["Packed"]
