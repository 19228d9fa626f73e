"""How tensors lie in memory: strides are part of what is captured.

Autograd and composites decide by strides what they record, and fused updates walk through memory.  So every value of a
program has the strides with which it was recorded: inputs are laid so when they come in, gradients lie as what they
update, and where a kernel gives other strides than its stand-in said, the runner lays its result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...collective import row_major
from ...local_tensor import is_dense
from ...operators import operator

Tensor = torch.Tensor
Strides = tuple[int, ...]


def same(shape: Sequence[int], a: Strides, b: Strides) -> bool:
    """Whether two strides mean the same places in memory."""
    return a == b or 0 in shape or all(x == y or n == 1 for n, x, y in zip(shape, a, b, strict=True))


def dense(shape: Sequence[int], like: Strides) -> Strides:
    """Strides without gaps and with dims in the order of ``like``."""
    if is_dense(shape, like):
        return like
    made, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        made[d] = step
        step *= max(shape[d], 1)
    return tuple(made)


def unless_row_major(shape: tuple[int, ...], strides: Strides) -> Strides | None:
    """Strides as a :class:`~meshwright.program.ir.nodes.Value` has them."""
    return None if strides == row_major(shape) else strides


def laid(t: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy of ``t`` with these strides, which must be those of a dense tensor."""
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def with_strides(t: Tensor, strides: Strides) -> Tensor:
    """``t`` with exactly these strides: itself, an alias of it, or a copy where they mean other places in memory."""
    if t.stride() == strides:
        return t
    if not same(t.shape, t.stride(), strides):
        return laid(t, strides)
    # Of four and five dims PyTorch reads the memory format from strides of dims of one, too, and kernels ask for it.
    return t.as_strided(t.shape, strides) if t.ndim in (4, 5) and t.numel() else t


def _fake(t: Tensor, strides: Sequence[int]) -> Tensor:
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device)


LAID = operator("laid(Tensor x, int[] strides) -> Tensor", laid, _fake)

__all__ = ["LAID", "dense", "is_dense", "laid", "row_major", "same", "unless_row_major", "with_strides"]
