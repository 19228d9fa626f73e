"""Tensors of the same values that lie otherwise in memory, by ops that plain and distributed tensors have."""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor


def _transposed(t: Tensor) -> Tensor:
    """Columns first, as of a factor of an einsum."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.ndim > 1 else t


def _outer_last(t: Tensor) -> Tensor:
    """The first dims last, as heads that are innermost or images with channels last."""
    if t.ndim < 3:
        return _transposed(t)
    order = [0, *range(2, t.ndim), 1]
    return t.permute(order).contiguous().permute([0, t.ndim - 1, *range(1, t.ndim - 1)])


def _stepped(t: Tensor) -> Tensor:
    """Every other element of a row, as of rotary halves that are interleaved."""
    return torch.stack([t, torch.zeros_like(t)], -1).select(-1, 0) if t.ndim else t


def _offset(t: Tensor) -> Tensor:
    """The end of longer rows, as of a fused projection."""
    return torch.cat([torch.zeros_like(t), t], -1).tensor_split(2, -1)[1] if t.ndim and t.shape[-1] else t


def _shifted(t: Tensor) -> Tensor:
    """Behind a row that nobody looks at."""
    return torch.cat([torch.zeros_like(t.narrow(0, 0, 1)), t]).narrow(0, 1, t.shape[0]) if t.ndim and len(t) else t


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": _transposed,
    "outer dim last": _outer_last,
    "step of two": _stepped,
    "offset": _offset,
    "shifted": _shifted,
}


def expanded(t: Tensor, dim: int = -1) -> Tensor:
    """``t`` with the first slice of a dim in place of all: stride 0, as the gradient of a sum has it."""
    return t.narrow(dim, 0, 1).expand(t.shape)
