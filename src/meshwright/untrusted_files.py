"""Files that anybody may have written: what names in them may say, what is opened, and what is made of them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import MeshwrightError

_MOST_BYTES = 255  # of a name, on all file systems that there are
_ELSEWHERE = "/\\:"  # lead out of a folder, on one system or another


def plain_name(name: object) -> bool:
    """Whether it names a file of the folder that it is read in, whatever the system, and nothing else.

    The one answer for all names that come from files: a path, a drive or a control character is none.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or any(c in _ELSEWHERE or ord(c) < 32 for c in name):
        return False
    try:
        return len(name.encode()) <= _MOST_BYTES
    except UnicodeEncodeError:  # half of a character: other systems, and a terminal, know no such name
        return False


def open_regular(path: str | os.PathLike[str]) -> int:
    """A regular file, open for reading; a link to one is one.

    Raises:
        OSError: it cannot be, or is something else: a pipe would keep its reader for ever, a device never ends.
    """
    try:
        _check(os.stat(path).st_mode)  # first: to open some devices does something already
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"it is no name of a file ({error})") from error
    try:
        _check(os.fstat(file).st_mode)
    except OSError:
        os.close(file)
        raise
    return file


def _check(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise OSError(errno.EINVAL, f"it is {kinds.get(stat.S_IFMT(mode), 'a device')}, and no regular file")


def read_regular(path: Path) -> bytes:
    """All bytes of a regular file.  Raises OSError as :func:`open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


@contextmanager
def making_sense(
    of: object, kind: type[MeshwrightError], is_: str = "cannot be read", passing: type[MeshwrightError] | None = None
) -> Iterator[None]:
    """Inside, something is made of what a file says: whatever fails for its values is an error of ``kind``.

    There is no end of what values can fail with that nobody ever wrote.

    Args:
        of: what is read, for the message.
        kind: of the error.
        is_: what the message says of it.
        passing: errors that are not about the file, and stay what they are; those of ``kind`` always do.
    """
    try:
        yield
    except kind:
        raise
    except MemoryError as error:
        raise kind(f"{of} cannot be read: there is no memory for it") from error
    except Exception as error:
        if passing is not None and isinstance(error, passing):
            raise
        raise kind(f"{of} {is_}: {error} ({type(error).__name__})") from error


__all__ = ["making_sense", "open_regular", "plain_name", "read_regular"]
