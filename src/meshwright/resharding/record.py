"""Records of communication, for ``mw.explain`` and ``mw.explicit``.

Nothing is looked up unless somebody listens: finding the user's line walks the stack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import collective
from ..errors import ExplicitError
from ..layout import Layout, wire_name
from ..operators import USERS_CALLS
from ..ranks import runtime
from ..ranks.runtime import user_line
from . import planner
from .conversions import ConversionStep, lowered
from .cost import step_bytes

LOCAL = "local"  # the layouts of what a local function sends by itself
SINCE = "; it is Partial since "
_USED = "each rank uses the value for its own part of "


@dataclass(frozen=True, slots=True)
class Record:
    """One implied conversion: which op asked, what it did, what it cost, where in the user's code, and why.

    ``src``, ``dst``: layouts before and after; of several tensors at once, which have none together, a word.
    ``use``: the op that asked with its rule; ranks that use one value in it for their parts make its gradient Partial.
    ``part``: the argument in the words of the user's call, where the op is a part of that.
    ``dtypes``, ``sums``: for each of ``kinds`` the dtype of what it sends, and of how many ranks it adds up the parts
    in that.
    """

    op: str
    argument: int
    kinds: tuple[str, ...]
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    src: Layout | str
    dst: Layout | str
    bytes: float
    backward_bytes: float
    line: str
    reason: str
    phase: str = "forward"
    asked: bool = False
    use: str = ""
    dtypes: tuple[str, ...] = ()
    sums: tuple[int, ...] = ()
    part: str = ""

    def transposed(self, steps: tuple[ConversionStep, ...]) -> Record:
        """Record of the backward of the same conversion, which runs ``steps``; listed where they move data."""
        moving = [s for s in lowered(steps) if s.moves]
        summed = self.use and any(s.reduces for s in moving)
        made = replace(
            self,
            **_sent(moving),
            src=steps[0].src.layout,
            dst=steps[-1].dst.layout,
            bytes=sum(step_bytes(s) for s in moving),
            backward_bytes=0.0,
            reason="its gradient: " + (_USED + self.use if summed else self.reason),
            phase="backward",
        )
        if moving and runtime.RT.records is not None:
            runtime.RT.records.append(made)
        return made

    @property
    def tensor(self) -> str:
        """What moves, in words."""
        return f"{'gradient of ' if self.phase == 'backward' else ''}{self._argument}"

    @property
    def _argument(self) -> str:
        return f"{self.op}, {self.part}" if self.part else f"{self.op} argument {self.argument}"

    @property
    def words(self) -> str:
        """What it is for, as a profile says it."""
        return f"{self.tensor} at {self.line}"

    def without(self, kind: str) -> Record:
        """The record of what is left where one of several collectives travels together with those of others."""
        if len(self.kinds) < 2 or kind not in self.kinds:
            return self
        at = self.kinds.index(kind)
        kinds, dtypes, sums = list(self.kinds), list(self.dtypes), list(self.sums)
        del kinds[at], dtypes[at : at + 1], sums[at : at + 1]
        return replace(self, kinds=tuple(kinds), dtypes=tuple(dtypes), sums=tuple(sums))

    def __str__(self) -> str:
        return (
            f"{self.line}: {self._argument} {list(self.shape)}: {' + '.join(self.kinds)} over "
            f"{','.join(self.axes)}, {self.bytes:.0f} bytes{in_dtypes(self.dtypes)} ({self.src} -> {self.dst}): "
            f"{self.reason}"
        )


def make(op: str, argument: int, plan: planner.ConversionPlan, reason: str) -> Record:
    """Record of one plan that is about to be executed."""
    sent, call = _sent([s for s in lowered(plan.steps) if s.moves]), USERS_CALLS.get(op)
    if call is not None:
        sent["part"] = dict(enumerate(call.arguments)).get(argument, "inner sums")
    return Record(
        users_name(op), argument, shape=tuple(plan.src.shape), src=plan.src.layout, dst=plan.dst.layout,
        bytes=plan.forward_bytes, backward_bytes=plan.backward_bytes, line=user_line(), reason=reason, **sent,
    )  # fmt: skip


def _sent(moving: Sequence[ConversionStep]) -> dict[str, Any]:
    """What a record says of its collectives, from the steps that move data as they run."""
    return {
        "kinds": tuple(s.kind for s in moving),
        "axes": tuple(dict.fromkeys(s.src.mesh.axes[a] for s in moving for a in s.axes)),
        "dtypes": tuple(wire_name(s.travels) for s in moving),
        "sums": tuple(math.prod(s.src.mesh.sizes[a] for a in s.axes) if s.rounds else 0 for s in moving),
    }


def in_dtypes(dtypes: Sequence[str]) -> str:
    """Of what bytes are, in words; empty where that is not known."""
    return f" of {' and '.join(dict.fromkeys(dtypes))}" if any(dtypes) else ""


def produced(t: torch.Tensor, since: str, inputs: Sequence[torch.Tensor]) -> None:
    """Note on a Partial value which op made it so, where and why: this one, or what made an input of it Partial."""
    own = [since] if since else []
    before = [p for x in inputs for p in getattr(x, "__dict__", {}).get("_producers", ())]
    if own or before:  # each once: a sum over repeated layers says what it is in as many words as one of few layers
        t.__dict__["_producers"] = tuple(dict.fromkeys([*own, *before]))


def users_name(op: str) -> str:
    """The call of the user's that an op is part of; its own name where it is one."""
    return USERS_CALLS[op].name if op in USERS_CALLS else op


def since(op: str, factors: str) -> str:
    """Which op makes a value Partial, or the gradient of a leaf that it is the first to use, and where."""
    return f"{users_name(op)} at {user_line()}, where {factors} is split"


def implicit(op: str, argument: int, plan: planner.ConversionPlan, why: str, moves: bool, producer: str = "") -> None:
    """Note communication that an op implies now or, if no data moves yet, in its backward; inside of ``serving``.

    ``producer``: what made a Partial value one.

    Raises ExplicitError inside ``mw.explicit()`` where data moves.
    """
    if not moves and runtime.RT.records is None:
        return
    partial = any(s.reduces for s in plan.steps)
    use = users_name(op) + (f" ({why})" if why else " (no rule: gathered)")
    if moves:
        reason = "a Partial value is reduced before " if partial else "operands are brought to one layout for "
    else:
        reason = _USED
    reason += use
    if moves and partial and producer:
        reason += SINCE + producer
    made = replace(make(op, argument, plan, reason), use=use)
    if runtime.RT.records is not None:
        runtime.RT.cause = made
        if moves:
            runtime.RT.records.append(made)
    if moves and runtime.RT.explicit:
        raise ExplicitError(
            f"{made}. Inside mw.explicit() this must be asked for: mw.reshard(x, placements) before the call, or give "
            "the operands matching layouts"
        )


def asked(what: str, plan: planner.ConversionPlan, reason: str) -> AbstractContextManager[None]:
    """Note a conversion that somebody asked for by name, and that runs inside of what is returned."""
    if runtime.RT.records is None:
        if collective.profiler._is_profiler_enabled:
            return runtime.serving(collective.Served(f"{what} at {user_line()}"))
        return nullcontext()
    made = replace(make(what, 0, plan, reason), asked=True)
    if plan.moves:
        runtime.RT.records.append(made)
    return runtime.serving(made)
