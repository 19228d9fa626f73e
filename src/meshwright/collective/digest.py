"""Digests: numbers by which ranks compare values."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..compat import disable_current_modes
from .transport import contiguous

Tensor = torch.Tensor

# Doubles by halves: their last bits are often zero, and so would be those of the products.
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_SAMPLE = 1024  # elements of a large tensor that is not looked through whole
_CHUNK = 1 << 16  # elements: small enough for a cache, and every generator's state is smaller


def digests(tensors: Sequence[Tensor], *, whole: bool = True) -> list[int]:
    """A number for each tensor that tells other values, wherever it lies: one pass, and one wait for the device.

    The sum of all bit patterns, each times a number that its position alone gives and that looks random: values that
    change places, or changes that cancel in a plain sum (a counter's carry), make another number.

    Args:
        whole: every element counts; otherwise a sample of large tensors, which costs next to nothing.
    """
    with torch.no_grad():
        made = [digest(t, whole=whole) for t in tensors]
        return torch.stack([m.to(made[0].device) for m in made]).tolist() if made else []


def digest(t: Tensor, *, whole: bool = True) -> Tensor:
    """The number of one tensor, on its device: nobody waits for it.  To be called without gradients."""
    t = t.detach().resolve_conj().resolve_neg()
    t = torch.view_as_real(t) if t.is_complex() else t
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    if t.layout is not torch.strided or not t.numel():
        return total
    if not whole and t.numel() > _CHUNK:
        t = _sampled(t)
    flat = contiguous(t).view(-1).view(_INTEGER[t.element_size()])
    weights = _weights(t.device)
    for part in flat.split(_CHUNK):
        total = total * _ODD + (part * weights[: part.numel()]).sum()
    return total


def _sampled(t: Tensor) -> Tensor:
    """Whole elements, at equal distances: halves of doubles would be all first or all second ones."""
    step = -(-t.numel() // _SAMPLE)
    if t.is_contiguous():
        return t.view(-1)[::step]
    return t[torch.unravel_index(torch.arange(0, t.numel(), step, device=t.device), t.shape)]  # not a copy of it all


_ODD = 6364136223846793005


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers that look random (the mixing of SplitMix64)."""
    with disable_current_modes():  # they are kept: real tensors, whatever mode the first caller is in
        x = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * -7046029254386353131
        x = (x ^ (x >> 30)) * -4658895280553007687
        x = (x ^ (x >> 27)) * -7723592293110705685
        return (x ^ (x >> 31)) | 1


__all__ = ["digest", "digests"]
