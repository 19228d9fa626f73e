"""Documents of files: a text file is one document, a JSONL file has one in each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..untrusted_files import read_regular

LINES = (".jsonl", ".ndjson")


def check_file(name: str) -> Path:
    """The path of a file with documents.  Raises DataError, naming the file and what would be right."""
    path = Path(name)
    if path.is_dir():
        raise DataError(f"data {name} is a folder: name the files in it, e.g. {path / '*.jsonl'}")
    if not path.exists():
        raise DataError(f"data {name}: there is no such file. Name text files or JSONL files")
    if path.suffix == ".parquet":
        raise DataError(f"data {name}: Parquet is not read. Write JSONL: datasets.Dataset.to_json({path.stem}.jsonl)")
    if not path.stat().st_size:
        raise DataError(f"data {name} is empty: leave it out, or write it again")
    return path


def documents_of(path: Path, column: str) -> Iterator[str | bytes]:
    """The documents of a file; of a text file its bytes, as one.

    Raises:
        DataError: If a line is no JSON, or has no text; it names file and line.
    """
    try:
        if path.suffix not in LINES:
            yield read_regular(path)
            return
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text(line, f"data {path}, line {number}", column)
    except OSError as error:
        raise DataError(f"data {path} cannot be read ({error.strerror or error})") from None


def _text(line: bytes, where: str, column: str) -> str:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is no JSON ({error}). Correct the line, or cut the file before it") from None
    text = value.get(column) if isinstance(value, dict) else value
    if not isinstance(text, str):
        has = f"keys {', '.join(map(repr, value))}" if isinstance(value, dict) else f"a {type(value).__name__}"
        raise DataError(f"{where} has no text under {column!r} ({has}). Pass column= with the key of the text")
    return text


__all__ = ["LINES", "check_file", "documents_of"]
