"""Records of communication, for ``mw.explain`` and ``mw.explicit``.

Nothing is looked up unless somebody listens: finding the user's line walks the stack.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch

from . import reshard, runtime
from .errors import ExplicitError

_OWN = os.path.dirname(os.path.abspath(__file__))
_EXAMPLES = os.path.join(_OWN, "train")  # the model of the main job is user code
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


@dataclass(frozen=True, slots=True)
class Record:
    """One implied conversion: which op asked, what it did, what it cost, where in the user's code, and why."""

    op: str
    argument: int
    kinds: tuple[str, ...]
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    src: str
    dst: str
    bytes: float
    backward_bytes: float
    line: str
    reason: str
    phase: str = "forward"

    def __str__(self) -> str:
        return (
            f"{self.line}: {self.op} argument {self.argument} {list(self.shape)}: {' + '.join(self.kinds)} over "
            f"{','.join(self.axes)}, {self.bytes:.0f} bytes ({self.src} -> {self.dst}): {self.reason}"
        )


def user_line() -> str:
    """``file:line`` of the nearest frame outside this package and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, _TORCH)) or name.startswith(_EXAMPLES):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def make(op: str, argument: int, plan: reshard.Plan, reason: str) -> Record:
    """Record of one plan that is about to be executed."""
    moving = [s for s in plan.steps if s.moves]
    axes = dict.fromkeys(plan.src.mesh.axes[a] for s in moving for a in s.axes)
    return Record(
        op, argument, tuple(s.kind for s in moving), tuple(axes), tuple(plan.src.shape), repr(plan.src.layout),
        repr(plan.dst.layout), plan.forward_bytes, plan.backward_bytes, user_line(), reason,
    )  # fmt: skip


def implicit(op: str, argument: int, plan: reshard.Plan, why: str) -> None:
    """Note communication that an op implied.  Raises ExplicitError inside ``mw.explicit()``."""
    partial = any(s.kind in ("all_reduce", "reduce_scatter") for s in plan.steps)
    reason = ("a Partial value is reduced before " if partial else "operands are brought to one layout for ") + op
    reason += f" ({why})" if why else " (no rule: gathered)"
    made = make(op, argument, plan, reason)
    if runtime.RT.records is not None:
        runtime.RT.records.append(made)
    if runtime.RT.explicit:
        raise ExplicitError(
            f"{made}. Inside mw.explicit() this must be asked for: mw.reshard(x, placements) before the call, or give "
            "the operands matching layouts"
        )
