"""What the ranks are told of one that is gone, and the error that each of them leaves with."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from types import TracebackType
from typing import NamedTuple

from ..errors import RankFailedError
from ..ranks import runtime
from ..ranks.launchers import error_file
from ..ranks.process_group import Link


class Obituary(NamedTuple):
    """How a rank left.

    Attributes:
        fatal: whether the others are to leave too; one that came to its end is missed only by those that wait for it.
        cause: ``was ended by SIGKILL``, ``failed: ValueError: ...``.
        last: its last collective, where it could say.
        step: updates that it had made, or -1.
    """

    rank: int
    host: str
    fatal: bool
    cause: str
    last: str = ""
    step: int = -1

    def __str__(self) -> str:
        text = f"rank {self.rank} (host {self.host}) {self.cause}"
        if self.last:
            text += f"\n  its last collective: {self.last}"
        return text + (f"\n  it had made {self.step} updates" if self.step >= 0 else "")

    @classmethod
    def of(cls, rank: int, host: str, error: BaseException | None, ending: bool) -> Obituary:
        """Of this rank, which leaves with an error or, as it should, without."""
        if error is None or (isinstance(error, SystemExit) and error.code in (0, None)):
            return cls(rank, host, False, "has come to its end" if ending else "has left its process group")
        said = (str(error).strip() or repr(error)).splitlines()[0]
        where = _raised_at(error.__traceback__)
        cause = f"failed: {type(error).__name__}: {said}" + (f" (at {where})" if where else "")
        if not ending:
            cause = f"has left its process group, since it {cause}"
        return cls(rank, host, ending, cause, last_collective(), runtime.RT.updates)


def _raised_at(trace: TracebackType | None) -> str:
    """The last line of the user's that an error passed."""
    found = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if runtime.is_users(file):
            found = f"{os.path.basename(file)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def last_collective() -> str:
    """The collective that this rank began last, as a group that it has knows it."""
    latest = Link.latest
    for one in list(runtime.RT.groups.values()):
        link = getattr(one, "link", None)
        if latest and link is not None and link.recent is latest:
            ranks = ", ".join(map(str, one.ranks))
            return f"{latest[-1][1]} over {','.join(one.axes) or 'a group'} (ranks {ranks})"
    return ""


def failed(gone: list[Obituary], where: str, what: str = "") -> RankFailedError:
    """The error on a rank that is left.

    Args:
        where: what this rank was in.
        what: what its backend said.
    """
    causes = "\n".join(map(str, gone))
    here = f"rank {runtime.RT.rank} left {where}" if where else f"rank {runtime.RT.rank} was in no collective"
    text = f"{causes}\n{here}{f' ({what})' if what else ''}, after {runtime.RT.updates} updates"
    return RankFailedError(
        text, tuple(o.rank for o in gone), gone[0].host, gone[0].cause, where or gone[0].last, runtime.RT.updates
    )


# ---------------------------------------------------------------------------------------------- leaving for good


def note_error(text: str, stack: str) -> None:
    """Tell the launcher, in the file that torchrun reads, unless somebody has."""
    file = error_file()
    if not file or os.path.exists(file):
        return
    with contextlib.suppress(OSError):
        extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
        with open(file, "w") as out:
            json.dump({"message": {"message": text, "extraInfo": extra}}, out)


def interactive() -> bool:
    """Whether somebody sits at this process (a notebook, a prompt), whose session is not ours to end."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def end_process(error: RankFailedError, thread: int) -> None:
    """End this process, whose ``thread`` does something that no error can be raised in."""
    frame = sys._current_frames().get(thread)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
    note_error(str(error), stack)
    text = f"{stack}{type(error).__module__}.{type(error).__qualname__}: {error}\n"
    with contextlib.suppress(OSError, ValueError):
        os.write(2, text.encode(errors="backslashreplace"))
    os._exit(1)


__all__ = ["Obituary", "end_process", "failed", "interactive", "last_collective", "note_error"]
