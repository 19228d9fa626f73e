"""Megatron's tensor parallelism written by hand: the two conversions, and blocks that call them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class EnterSplit(torch.autograd.Function):
    """Before layers that are split by columns: the identity, whose gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """``x``."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The sum."""
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class LeaveSplit(torch.autograd.Function):
    """After layers that are split by rows: the sum over the group, in place, whose gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """The sum."""
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The same."""
        return gradient, None


class BlockBase(nn.Module):
    """A transformer block says where its split layers begin and end; on one device nothing happens there."""

    def enter(self, x: Tensor) -> Tensor:
        """Before layers split by columns."""
        return x

    def leave(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """A layer split by rows."""
        return linear(x)


class ByHand(BlockBase):
    """A mixin: what Megatron does at these two places.  Weights are this rank's parts."""

    group: Any = None

    def enter(self, x: Tensor) -> Tensor:
        """Its gradient is summed."""
        return EnterSplit.apply(x, self.group)

    def leave(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """Partial sums are added up, then the bias."""
        made: Tensor = LeaveSplit.apply(F.linear(x, linear.weight), self.group)
        return made + linear.bias


def keep_part(linear: nn.Linear, dim: int, rank: int, ranks: int) -> None:
    """Cut a layer's weight to this rank's part: rows with their bias (``dim=0``) or columns."""

    def part(p: Tensor) -> nn.Parameter:
        return nn.Parameter(p.detach().chunk(ranks, dim)[rank].clone())

    linear.weight = part(linear.weight)
    if dim == 0:
        linear.bias = part(linear.bias)
