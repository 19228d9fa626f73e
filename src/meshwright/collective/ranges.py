"""What ``torch.profiler`` shows: a range for each op on distributed tensors and for each collective, named by what it
is for.

Whether anybody profiles is one attribute of a module of PyTorch (``profiler._is_profiler_enabled``), which those who
open ranges read first; the functions here are called only where it is set.  They decide nothing: what is sent, and in
which order, is the same on a rank that profiles and on one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..compat import RecordFunctionFast
from ..compat import autograd_profiler as profiler
from ..ranks import runtime
from ..ranks.simulation import Call
from .groups import Group

OWN = "meshwright::"
_RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Served:
    """What communication is for, in words: the place of a record, which nobody keeps for a profile."""

    words: str

    def transposed(self, steps: Any = ()) -> Served:
        """That of the backward."""
        return Served(f"gradient of {self.words}")


def named(group: Group, call: Call) -> str:
    """The name of a collective's range.  Bytes are those that it was counted with; what is not counted (what ranks
    compare with each other) has none."""
    rt, kind = runtime.RT, call.kind
    counted, rt.counts.last = rt.counts.last, None
    what: list[Any] = [v for name, v in call.args if name == "what"]  # of what goes along a lane
    if what and group.index:
        kind = _RECEIVE
    words = [f"{OWN}{kind} over {','.join(group.axes) or f'ranks {list(group.ranks)}'}"]
    if counted is not None and counted[0] == kind:
        words.append(f"{counted[1]} bytes")
    if rt.cause is not None:
        words.append(rt.cause.words)
    elif call.tag:
        words.append(f"read at {call.tag}")
    # A trace that is exported leaves out ranges whose names are not ASCII.
    return ", ".join([*words, *what]).replace("…", "...").encode("ascii", "backslashreplace").decode()


def started_in(name: str, start: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What a call of a backend gives, inside of a range."""
    with RecordFunctionFast(name):
        return start(*args)


def waiting_for(name: str) -> Any:
    """The range of the wait for a collective."""
    return RecordFunctionFast(f"{OWN}wait for {name.removeprefix(OWN)}")


@contextmanager
def uncounted(words: str) -> Iterator[None]:
    """Inside, what is sent is not the collective that was counted last, though it goes by its name."""
    counts = runtime.RT.counts
    counted, counts.last = counts.last, None
    with runtime.serving(Served(words) if profiler._is_profiler_enabled else runtime.RT.cause):
        yield
    counts.last = counted


class _Op:
    """The op whose range was opened last, so that the call inside of it opens no other one."""

    func: Any = None


OP = _Op()


def op_range(name: str, run: Callable[..., Any], func: Any, *rest: Any) -> Any:
    """``run(func, *rest)``, a call of ``func`` on distributed tensors, inside of the range of an op."""
    rt, outer = runtime.RT, OP.func
    before, OP.func = rt.cause, func
    if rt.sim is None:
        rt.cause = Served(f"{name} at {runtime.user_line()}")
    try:
        with RecordFunctionFast(OWN + name.removeprefix(OWN)):
            return run(func, *rest)
    finally:
        OP.func, rt.cause = outer, before


@contextmanager
def serving(what: str, names: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Inside, what is sent brings ``what`` of parameters; they are asked for their names only for a profile."""
    if profiler._is_profiler_enabled and runtime.RT.sim is None:
        with runtime.serving(Served(several(what, names()))):
            yield
    else:
        yield


def several(what: str, names: Sequence[str]) -> str:
    """``gradient of a``, ``3 gradients: a … c``; of parameters themselves (``what`` is empty) ``a``."""
    if len(names) == 1:
        return f"{what} of {names[0]}" if what else names[0]
    return f"{len(names)} {what or 'parameter'}s: {names[0]} … {names[-1]}"


def told(way: Callable[..., Any], words: str) -> Callable[..., Any]:
    """A collective of a captured program that says what it is for."""
    served = Served(words)

    def run(*args: Any) -> Any:
        with runtime.serving(served):
            return way(*args)

    return run


__all__ = ["OP", "Served", "named", "op_range", "profiler", "serving", "several", "started_in", "told", "waiting_for"]
