"""The text to train on, as bytes."""

from __future__ import annotations

import errno
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.errors import DataError
from meshwright.untrusted_files import read_regular

LIMIT = 8_000_000  # bytes of the default text: more would only take longer to read
SKIPPED = {"site-packages", "dist-packages", "__pycache__"}
FIX = "give files of text with --data FILE..., or leave --data out to train on Python's standard library"


def load_text(files: Sequence[str], seq: int) -> tuple[bytes, str]:
    """The named files one after the other; without names, the sources of Python's standard library.

    Returns:
        The text, and where it comes from in words.

    Args:
        files: paths; a folder is an error, not a search.
        seq: bytes per window: the text must be longer.

    Raises:
        DataError: a file that is missing, empty or unreadable, or too little text; names it and the fix.
    """
    if files:
        text = b"".join([_read(name) for name in files])
        more = f" and {len(files) - 3} more" if files[3:] else ""
        source = f"{', '.join(files[:3])}{more}, {len(text):,} bytes"
    else:
        text, source = standard_library()
    if len(text) < seq + 1:
        raise DataError(
            f"{source}: too few for windows of --seq {seq} bytes and the byte after: give more text, or take "
            f"--seq {max(1, len(text) - 1)} or less"
        )
    return text, source


def _read(name: str) -> bytes:
    path = Path(name)
    try:
        if path.is_dir():
            raise DataError(f"--data {name} is a folder: name the files in it, e.g. {path / '*.txt'}")
        text = read_regular(path)
    except FileNotFoundError:
        raise DataError(f"--data {name}: there is no such file; {FIX}") from None
    except OSError as error:
        raise DataError(f"--data {name} cannot be read ({error.strerror or error}); {FIX}") from None
    if not text:
        raise DataError(f"--data {name} is empty; {FIX}")
    return text


def _sources(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - SKIPPED)  # os.walk goes on with what is left here
        yield from (Path(here, name) for name in sorted(files) if name.endswith(".py"))


def standard_library(folder: Path | None = None, limit: int = LIMIT) -> tuple[bytes, str]:
    """The sources below ``folder`` (default: Python's standard library), ``limit`` bytes at most.

    The order is the same on every machine: sorted, the files of a folder before those of the folders in it.

    Raises:
        DataError: no sources there (some systems ship the library as a zip file).
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in _sources(folder):
        if len(text) >= limit:
            break
        try:
            text += read_regular(path)
        except OSError as error:  # one unreadable source does not matter: enough others are there
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # so it is with all
                raise
    if not text:
        raise DataError(f"{folder} has no readable .py files to train on by default: {FIX}")
    length = f"the first {limit:,}" if len(text) > limit else f"{len(text):,}"
    return bytes(text[:limit]), f"Python's standard library, {length} bytes"
