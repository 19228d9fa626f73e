"""Values for tests of wires, how far off each may arrive, and their sums by hand."""

from __future__ import annotations

import math

import torch
import torch.nn as nn

import meshwright as mw
from meshwright.collective.codec import decode, encode, units
from meshwright.layout import Wire, wire_bytes

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
WIRES: list[Wire] = [BF16, torch.float16, mw.Float8(), mw.Float8(5), mw.Float8(1)]
NORMAL = 2.0**-126  # the least scale of a block, and the least normal value of float32


def bound(x: torch.Tensor, wire: Wire) -> torch.Tensor:
    """How far each of some finite float32 values may be off behind a wire (docs/precision.md), in float64."""
    size = x.double().abs()
    if wire is BF16:
        return torch.clamp(size * 2**-8, min=2.0**-134)
    if wire is torch.float16:
        return torch.clamp(size * 2**-11, min=2.0**-25)
    assert isinstance(wire, mw.Float8)
    padded = nn.functional.pad(size.reshape(-1), (0, -size.numel() % wire.block)).view(-1, wire.block)
    scale = torch.clamp(padded.amax(1, keepdim=True) / 224, min=NORMAL).expand_as(padded).reshape(-1)[: size.numel()]
    return torch.maximum(size * 2**-4, scale.view(size.shape) * 2**-10)


def through(x: torch.Tensor, wire: Wire) -> torch.Tensor:
    sent = encode(x.reshape(-1), wire)
    assert sent.numel() == units(wire, x.numel())
    assert sent.nbytes == wire_bytes(wire, x.numel())
    return decode(sent, x.numel(), wire, F32).view(x.shape)


def values(seed: int, n: int, spread: float) -> torch.Tensor:
    """Of all sizes, zeros and denormals among them."""
    draw = torch.Generator().manual_seed(seed)
    made = torch.randn(n, generator=draw) * torch.exp2(spread * torch.randn(n, generator=draw))
    return torch.where(torch.rand(n, generator=draw) < 0.1, 0.0, made)


def summed(parts: list[torch.Tensor], wire: Wire) -> torch.Tensor:
    """By hand: decoded, and added up in the order of the ranks."""
    total = through(parts[0], wire)
    for part in parts[1:]:
        total = total + through(part, wire)
    return total


def parts_of(ranks: int, shape: tuple[int, ...], seed: int, spread: float = 3.0) -> list[torch.Tensor]:
    return [values(seed + r, math.prod(shape), spread).view(shape) for r in range(ranks)]
