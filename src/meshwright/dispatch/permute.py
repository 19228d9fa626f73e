"""What a local function sends to another rank: differentiable, and recorded as conversions are."""

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
from ..record import Record

Tensor = torch.Tensor


@dataclass(frozen=True)
class Permute:
    """Tensors of one shape that ranks send each other, in one call of an op."""

    op: str
    mesh: Mesh

    def __call__(self, x: Tensor, axes: tuple[int, ...], targets: Sequence[int], why: str) -> Tensor:
        """What the rank sends whose target this one is; the gradient goes the other way.

        Args:
            x: of the same shape on all ranks of the group.
            axes: the mesh axes of the group.
            targets: to which position the rank at each position of the group sends.
            why: for the record.
        """
        group = collective.group(self.mesh, axes)
        assert len(targets) == math.prod(self.mesh.sizes[a] for a in axes)
        sent = x.nbytes if targets[group.index] != group.index else 0
        said = Record(
            self.op, 0, ("permute",), group.axes, tuple(x.shape), "local", "local", sent,
            sent if x.requires_grad else 0.0, runtime.user_line(), why, dtypes=(wire_name(x.dtype),), sums=(0,),
        ) if runtime.RT.records is not None else None  # fmt: skip
        made: Tensor = _Permute.apply(x, tuple(targets), group, said)
        return made


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, targets: tuple[int, ...], group: collective.Group, said: Record | None) -> Tensor:
        ctx.back, ctx.group, ctx.said = tuple(targets.index(i) for i in range(len(targets))), group, said
        if said is not None and runtime.RT.records is not None:
            runtime.RT.records.append(said)
        with runtime.serving(said):
            return collective.permute(x, targets, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        said = ctx.said
        if said is not None and said.phase == "forward":
            said = replace(said, backward_bytes=0.0, reason=f"its gradient: {said.reason}", phase="backward")
        return _Permute.apply(grad, ctx.back, ctx.group, said), None, None, None
