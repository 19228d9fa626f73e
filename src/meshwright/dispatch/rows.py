"""Rows that a local function gets of other ranks and gives back: differentiable, and recorded as conversions are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import collective
from ..layout import wire_name
from ..mesh import Mesh
from ..ranks import runtime
from ..resharding.record import Record

Tensor = torch.Tensor


@dataclass(frozen=True)
class RowExchange:
    """How the ranks of a group exchange rows, in one call of an op.

    Attributes:
        op: of which it is.
        axes: the mesh axes of the group.
        sizes: how many rows each rank of the group has.
        why: for the records.
    """

    op: str
    mesh: Mesh
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    why: str

    def all(self, x: Tensor) -> Tensor:
        """All rows of all ranks, without a gradient: whole numbers, which say who wants what."""
        group = self._group()
        said = self._record("all_gather", x, 0)
        _note(said)
        with runtime.serving(said):
            return collective.all_gather(x, 0, self.sizes, group)

    def gather(self, x: Tensor, wanted: Tensor, argument: int) -> Tensor:
        """The rows of all ranks that this one wants, (sum(sizes), ...); the gradient goes back as by :meth:`scatter`.

        Args:
            x: (own rows, ...).
            wanted: (ranks, sum(sizes)), the same on all.
            argument: of the op: for the records.
        """
        said = self._record("gather_rows", x, argument, x.requires_grad)
        made: Tensor = _Gather.apply(x, wanted, self.sizes, self._group(), said)
        return made

    def scatter(self, x: Tensor, wanted: Tensor) -> Tensor:
        """The sum of what ranks have of the own rows, (own rows, ...), of each the rows that it wanted."""
        said = self._record("scatter_rows", x, 0, x.requires_grad)
        made: Tensor = _Scatter.apply(x, wanted, self.sizes, self._group(), said)
        return made

    def _group(self) -> collective.Group:
        return collective.group(self.mesh, self.axes)

    def _record(self, kind: str, x: Tensor, argument: int, back: bool = False) -> Record | None:
        """What is sent at most."""
        if runtime.RT.records is None:
            return None
        n = len(self.sizes)
        each = math.prod(x.shape[1:]) * x.element_size()
        sent = (n - 1) * sum(self.sizes) * each // n
        return Record(
            self.op, argument, (kind,), self._group().axes, tuple(x.shape), "local", "local", sent,
            sent if back else 0.0, runtime.user_line(), self.why, dtypes=(wire_name(x.dtype),), sums=(0,),
        )  # fmt: skip


def _note(said: Record | None) -> None:
    if said is not None and runtime.RT.records is not None:
        runtime.RT.records.append(said)


def _back(said: Record | None, kind: str) -> Record | None:
    """The record of the transpose."""
    if said is None:
        return None
    if said.phase == "forward":
        said = replace(said, backward_bytes=0.0, reason=f"its gradient: {said.reason}", phase="backward")
    return replace(said, kinds=(kind,))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, wanted: Tensor, sizes: Sequence[int], group: collective.Group, said: Record | None
    ) -> Tensor:
        ctx.given = (sizes, group, _back(said, "scatter_rows"))
        ctx.save_for_backward(wanted)
        _note(said)
        with runtime.serving(said):
            return collective.gather_rows(x, wanted, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Scatter.apply(grad, *ctx.saved_tensors, *ctx.given), None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, wanted: Tensor, sizes: Sequence[int], group: collective.Group, said: Record | None
    ) -> Tensor:
        ctx.given = (sizes, group, _back(said, "gather_rows"))
        ctx.save_for_backward(wanted)
        _note(said)
        with runtime.serving(said):
            return collective.scatter_rows(x, wanted, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Gather.apply(grad, *ctx.saved_tensors, *ctx.given), None, None, None, None
