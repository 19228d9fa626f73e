"""What values become on a wire, and back.  Every rank decodes the same bytes to the same values.

Elements travel in row-major order.  A cast is a cast.  In float8 a block is one byte with its scale and one for each
element, so that a part of whole blocks is a part of what is sent.  What is not finite arrives as NaN, in its place; it
counts for no scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..layout import Float8, Wire, wire_bytes

Tensor = torch.Tensor
_MANTISSA = 23  # bits of float32 below its exponent
_LARGEST = 0x600000  # the bits there of 448 = 1.75 * 2 ** 8, the largest value in e4m3
_MIDDLE = 127  # the byte of the scale 1, as in float32's exponent


def encode(flat: Tensor, wire: Wire) -> Tensor:
    """One dim of floating-point values as they travel: :func:`units` of them."""
    if not isinstance(wire, Float8):
        return flat.to(wire)
    n, block = flat.numel(), wire.block
    x = flat.float()
    x = x + (x - x)  # NaN where it is not finite: a cast to float8 may take infinity for its largest value
    if n % block:
        x = torch.nn.functional.pad(x, (0, -n % block))
    x = x.view(-1, block)
    scale = _scales(x)
    rows = torch.empty(x.shape[0], block + 1, dtype=torch.uint8, device=x.device)
    rows[:, 0] = scale
    rows[:, 1:] = (x * _power(2 * _MIDDLE - scale)[:, None]).to(wire.dtype).view(torch.uint8)
    return rows.view(-1)[: wire_bytes(wire, n)]


def _scales(x: Tensor) -> Tensor:
    """The biased exponents of the scales of rows: of the least powers of two by which all that is finite divided is at
    most 448, and none below 2 ** -126, so that neither they nor their inverses are denormal."""
    bits = x.abs().nan_to_num_(0.0, 0.0, 0.0).amax(1).view(torch.int32)
    above = (bits & ((1 << _MANTISSA) - 1)) > _LARGEST
    return ((bits >> _MANTISSA) - 8 + above).clamp_(min=1)


def _power(exponent: Tensor) -> Tensor:
    """Powers of two from their biased exponents."""
    return (exponent.to(torch.int32) << _MANTISSA).view(torch.float32)


def decode(sent: Tensor, n: int, wire: Wire, dtype: torch.dtype) -> Tensor:
    """The ``n`` values that travelled, in a dtype that has them all."""
    if not isinstance(wire, Float8):
        return sent.to(dtype)
    block = wire.block
    if n % block:
        sent = torch.nn.functional.pad(sent, (0, -n % block))
    rows = sent.view(-1, block + 1)
    values = rows[:, 1:].contiguous().view(wire.dtype).to(torch.float32)
    return (values * _power(rows[:, 0])[:, None]).view(-1)[:n].to(dtype)


def units(wire: Wire, n: int) -> int:
    """Elements of what :func:`encode` makes of ``n`` values."""
    return wire_bytes(wire, n) if isinstance(wire, Float8) else n


def added(sent: Sequence[Tensor], n: int, wire: Wire, dtype: torch.dtype) -> Tensor:
    """The sum of what several ranks sent, in their order: the same whichever rank adds it."""
    total = decode(sent[0], n, wire, dtype)
    for other in sent[1:]:
        total += decode(other, n, wire, dtype)
    return total


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which contributions of this dtype are added up."""
    return torch.float64 if dtype is torch.float64 else torch.float32


__all__ = ["added", "decode", "encode", "units", "wide"]
