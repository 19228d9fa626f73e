"""What a local function sends to other ranks: differentiable, and recorded as conversions are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from .. import collective
from ..layout import wire_name
from ..ranks import runtime
from ..resharding.record import LOCAL, Record

Tensor = torch.Tensor
Said = Record | collective.Served | None


class Send(NamedTuple):
    """One collective, with what it is told beside the tensor and the group, and what its transpose is told."""

    kind: str
    said: tuple[Any, ...]
    back_kind: str
    back: tuple[Any, ...]

    def transpose(self) -> Send:
        """What brings gradients back."""
        return Send(self.back_kind, self.back, self.kind, self.said)

    def bytes(self, x: Tensor, group: collective.Group) -> int:
        """How many this rank sends of ``x``."""
        n, me = group.size, group.index
        if self.kind == "permute":
            return x.nbytes if self.said[0][me] != me else 0
        if self.kind == "all_gather":
            return (n - 1) * x.nbytes
        return x.nbytes if self.kind == "exchange_rows" else x.nbytes * (n - 1) // n


_RUN: dict[str, Callable[..., Tensor]] = {
    "permute": lambda x, group, targets: collective.permute(x, targets, group),
    "all_to_all": lambda x, group, a, sizes, b, lengths: collective.all_to_all(x, a, sizes, b, lengths, group),
    "all_gather": lambda x, group, dim, sizes: collective.all_gather(x, dim, sizes, group),
    "reduce_scatter": lambda x, group, dim, sizes: collective.reduce_scatter(x, dim, sizes, "sum", group),
    "exchange_rows": lambda x, group, dim, table: collective.exchange_rows(x, dim, table, group),
}


def sent(x: Tensor, send: Send, group: collective.Group, said: Said) -> Tensor:
    """What arrives; the gradient goes back by the transpose."""
    made: Tensor = _Sent.apply(x, send, group, said)
    return made


def recorded(
    op: str, kind: str, x: Tensor, shape: Sequence[int], group: collective.Group, why: str, there: float, back: float,
    phase: str = "forward",
) -> Said:  # fmt: skip
    """The record of what is sent of ``x``, where there are records, or what a profile calls it.

    ``shape``: of what is sent; ``there``, ``back``: bytes of it, and of its transpose where there is a gradient.
    """
    if runtime.RT.records is None or group.size == 1:
        return cast(Said, runtime.RT.cause)
    again = back if x.requires_grad and phase == "forward" else 0.0
    return Record(
        op, 0, (kind,), group.axes, tuple(shape), LOCAL, LOCAL, there, again, runtime.user_line(), why, phase=phase,
        dtypes=(wire_name(x.dtype),), sums=(0,),
    )  # fmt: skip


def noted(said: Said) -> AbstractContextManager[None]:
    """List a record, where there are records, of what is sent inside of what is returned."""
    if isinstance(said, Record) and runtime.RT.records is not None:
        runtime.RT.records.append(said)
    return nullcontext() if said is None else runtime.serving(said)


def transposed(said: Said, kind: str) -> Said:
    """The record of the transpose of what was sent, which is of this kind."""
    if not isinstance(said, Record):
        return None if said is None else said.transposed()
    if said.phase == "forward":
        said = replace(
            said, bytes=said.backward_bytes, backward_bytes=0.0, reason=f"its gradient: {said.reason}", phase="backward"
        )
    return replace(said, kinds=(kind,))


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Send, group: collective.Group, said: Said) -> Tensor:
        ctx.send, ctx.group, ctx.said = send, group, said
        with noted(said):
            return _RUN[send.kind](x, group, *send.said)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        send = ctx.send.transpose()
        return _Sent.apply(grad, send, ctx.group, transposed(ctx.said, send.kind)), None, None, None
