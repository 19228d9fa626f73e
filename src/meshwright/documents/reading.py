"""Documents of files: a text file is one document; JSONL has one in each line, Parquet and Arrow one in each row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError, extra
from ..untrusted_files import read_regular

LINES = (".jsonl", ".ndjson")
COLUMNS = (".parquet", ".arrow")  # .arrow: the files of a dataset that datasets saved to disk


def check_file(name: str) -> Path:
    """The path of a file with documents.  Raises DataError, naming the file and what would be right."""
    path = Path(name)
    if path.is_dir():
        files = "*.arrow" if (path / "dataset_info.json").exists() else "*.jsonl"
        raise DataError(f"data {name} is a folder: name the files in it, e.g. {path / files}")
    if not path.exists():
        raise DataError(f"data {name}: there is no such file. Name text, JSONL or Parquet files")
    if path.suffix in COLUMNS:
        extra("pyarrow", "data", f"data {name}")
    if not path.stat().st_size:
        raise DataError(f"data {name} is empty: leave it out, or write it again")
    return path


def documents_of(path: Path, column: str) -> Iterator[str | bytes]:
    """The documents of a file; of a text file its bytes, as one.

    Raises:
        DataError: If a line is no JSON, a file is damaged, or a line or row has no text; it names file and line.
    """
    try:
        if path.suffix in COLUMNS:
            for number, text in enumerate(_column(path, column), 1):
                if not isinstance(text, str):
                    raise DataError(f"data {path}, row {number}: {column!r} is {text!r}, no text. Drop the row")
                yield text
            return
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
        raise DataError(f"{where} has no text under {column!r} ({has}). Pass column= or --column")
    return text


def _column(path: Path, column: str) -> Iterator[Any]:
    """The values of a column, a batch of rows in memory at a time."""
    arrow = extra("pyarrow", "data", f"data {path}")
    try:
        if path.suffix == ".parquet":
            file = extra("pyarrow.parquet", "data", f"data {path}").ParquetFile(path)
            names, batches = file.schema_arrow.names, lambda: file.iter_batches(columns=[column])
        else:
            stream = arrow.ipc.open_stream(arrow.memory_map(str(path)))
            names, batches = stream.schema.names, lambda: stream
        if column not in names:
            listed = ", ".join(map(repr, names))
            raise DataError(f"data {path} has no column {column!r} (it has {listed}). Pass column= or --column")
        for batch in batches():
            yield from batch.column(column).to_pylist()
    except (arrow.ArrowException, OSError) as error:
        kind = path.suffix.removeprefix(".").capitalize()
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"data {path} is damaged, or no {kind} file ({reason}). Write it again") from None


__all__ = ["COLUMNS", "LINES", "check_file", "documents_of"]
