"""What a local function sends to other ranks: differentiable, and recorded as conversions are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import collective
from ..layout import wire_name
from ..mesh import Mesh
from ..ranks import runtime
from ..resharding.record import Record
from ..rules.strategies import Swap

Tensor = torch.Tensor


@dataclass(frozen=True)
class Sending:
    """Sends of one call of an op.  All that decides on them is metadata, which all ranks share."""

    op: str
    mesh: Mesh

    def permute(self, x: Tensor, axes: tuple[int, ...], targets: Sequence[int], why: str) -> Tensor:
        """What the rank sends whose target this one is; the gradient goes the other way.

        Args:
            x: of the same shape on all ranks of the group.
            axes: the mesh axes of the group.
            targets: to which position the rank at each position of the group sends.
            why: for the record.
        """
        group = collective.group(self.mesh, axes)
        assert len(targets) == group.size
        sent = x.nbytes if targets[group.index] != group.index else 0
        made: Tensor = _Permute.apply(x, tuple(targets), group, self._said(x, "permute", group, sent, why))
        return made

    def swap(self, x: Tensor, axes: tuple[int, ...], way: Swap, why: str) -> Tensor:
        """An all-to-all over the group of some axes; the gradient goes back."""
        group = collective.group(self.mesh, axes)
        sent = x.nbytes * (group.size - 1) // group.size
        made: Tensor = _Swap.apply(x, way, group, self._said(x, "all_to_all", group, sent, why))
        return made

    def gather(self, x: Tensor, axes: tuple[int, ...], why: str) -> Tensor:
        """Values of all ranks of a group, one below the other: numbers that take no gradient, of one shape."""
        group = collective.group(self.mesh, axes)
        said = self._said(x, "all_gather", group, x.nbytes * (group.size - 1), why)
        with _noted(said):
            return collective.all_gather(x.detach(), 0, [x.shape[0]] * group.size, group)

    def _said(self, x: Tensor, kind: str, group: collective.Group, sent: float, why: str) -> Record | None:
        if runtime.RT.records is None or group.size == 1:
            return None
        return Record(
            self.op, 0, (kind,), group.axes, tuple(x.shape), "local", "local", sent, sent if x.requires_grad else 0.0,
            runtime.user_line(), why, dtypes=(wire_name(x.dtype),), sums=(0,),
        )  # fmt: skip


def _noted(said: Record | None) -> Any:
    if said is not None and runtime.RT.records is not None:
        runtime.RT.records.append(said)
    return runtime.serving(said)


def _transposed(said: Record | None) -> Record | None:
    if said is None or said.phase != "forward":
        return said
    return replace(said, backward_bytes=0.0, reason=f"its gradient: {said.reason}", phase="backward")


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, targets: tuple[int, ...], group: collective.Group, said: Record | None) -> Tensor:
        ctx.back, ctx.group, ctx.said = tuple(targets.index(i) for i in range(len(targets))), group, said
        with _noted(said):
            return collective.permute(x, targets, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Permute.apply(grad, ctx.back, ctx.group, _transposed(ctx.said)), None, None, None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Swap, group: collective.Group, said: Record | None) -> Tensor:
        ctx.back, ctx.group, ctx.said = way.back(), group, said
        with _noted(said):
            return collective.all_to_all(x, *way, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Swap.apply(grad, ctx.back, ctx.group, _transposed(ctx.said)), None, None, None
