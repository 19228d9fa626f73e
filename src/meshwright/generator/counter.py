"""Random numbers that belong to an element, not to a rank: a hash of (seed, global index).

Dropout needs random bits that do not depend on the layout.  Drawing them from a stream would make every rank
draw everybody's bits.  A counter-based generator (Salmon et al., *Parallel random numbers: as easy as 1, 2,
3*, 2011) computes the bits of an element from its global index, so a rank does only its own share of the
work; and since the bits can be computed again, the backward needs the seed and not the mask.

The index is split into a row and a column (of the global shape, never of the local one).  Rows and columns
get two 32-bit keys each from a 64-bit mixer; what is left per element are a few int32 operations on blocks
that stay in cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..operators import operator
from ..ranks import runtime

Tensor = torch.Tensor

GOLDEN = -7046029254386353131  # 2**64 / golden ratio, odd, as a signed int64: the increment of SplitMix64
COLUMN_SALT = 0x5851F42D4C957F2D
M1, M2, M3 = (
    0x2C1B3C6D,
    0x297A2D39,
    0x1B56C4E9,
)  # odd multipliers below 2**31 (C. Wellons' search for 32-bit mixers)
BLOCK = 1 << 15  # elements per block: int32 scratch of 128 KiB, well inside a core's L2 cache
WIDE_BLOCK = 1 << 24  # on an accelerator, where a kernel takes longer to start than to run on a small one
MIN_COLUMNS = 256  # shorter rows would spend their time in the 64-bit mixer
CACHED = 1 << 18  # index vectors up to this length are kept


def draw_seed(generator: torch.Generator | None = None) -> Tensor:
    """One 63-bit seed from the default CPU generator (or from ``generator``), as a 0-dim tensor on the CPU.

    A tensor and not a number: a captured program draws a new one in every step.
    """
    device = "cpu" if generator is None else generator.device
    seed = torch.empty((), dtype=torch.int64, device=device).random_(generator=generator).cpu()
    if seed.__class__ is Tensor:  # not while a program is captured
        runtime.RT.drawn += int(seed) & 0xFFFFFFFF  # ranks compare it
    return seed


def dropout(x: Tensor, seed: Tensor, p: float, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Dropout of the part ``x``, which starts at ``offset``, of a tensor of global ``shape``.

    Element ``i`` is kept, and divided by ``1 - p``, if the hash of (seed, i) says so.  Linear in ``x`` and
    its own transpose: the backward computes the mask again instead of keeping it.
    """
    if p <= 0.0:
        return x.view_as(x)
    if p >= 1.0:
        return x * 0.0
    if torch.is_grad_enabled() and x.requires_grad:
        applied: Any = _Dropout
        return applied.apply(x, seed, p, tuple(shape), tuple(offset))
    return _DROPOUT(x, seed, p, list(shape), list(offset))


def uniform(like: Tensor, seed: Tensor, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Numbers in (0, 1), a multiple of 2**-25 each, in the shape and the dtype of the local ``like``."""
    return _UNIFORM(like, seed, list(shape), list(offset))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, p: float, shape: tuple[int, ...], offset: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.rest = (p, shape, offset)
        return _DROPOUT(x, seed, p, list(shape), list(offset))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return dropout(grad, *ctx.saved_tensors, *ctx.rest), None, None, None, None


# ---------------------------------------------------------------------------------------------- the hash


def _mix64_(x: Tensor) -> Tensor:
    """SplitMix64's finalizer (Steele et al., 2014), in place, with arithmetic shifts."""
    x.bitwise_xor_(x >> 30).mul_(-4658895280553007687)
    x.bitwise_xor_(x >> 27).mul_(-7723592293110705685)
    return x.bitwise_xor_(x >> 31)


def _mix_seed(seed: int) -> int:
    """SplitMix64's finalizer of one number, as a signed 64-bit number."""
    x = (seed + GOLDEN) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def _split_at(shape: Sequence[int]) -> int:
    """First dim of the columns: the fewest last dims that hold MIN_COLUMNS elements."""
    d, columns = len(shape), 1
    while d > 0 and columns < MIN_COLUMNS:
        d -= 1
        columns *= shape[d]
    return d


def _index(shape: Sequence[int], offset: Sequence[int], local: Sequence[int], device: torch.device) -> Tensor:
    """Row-major index in ``shape`` of each element of the box at ``offset``, flat."""
    index = torch.zeros((1,) * len(shape), dtype=torch.int64, device=device)
    stride = 1
    for d in reversed(range(len(shape))):
        own = torch.arange(offset[d], offset[d] + local[d], device=device)
        index = index + (own * stride).view(-1, *(1,) * (len(shape) - 1 - d))
        stride *= shape[d]
    return index.flatten()


def _counters(shape: Sequence[int], offset: Sequence[int], local: Sequence[int], device: torch.device) -> Tensor:
    """Weyl sequence of the rows, then that of the columns (which starts elsewhere)."""
    at = _split_at(shape)
    rows = _index(shape[:at], offset[:at], local[:at], device)
    columns = _index(shape[at:], offset[at:], local[at:], device)
    return torch.cat((rows * GOLDEN, columns * GOLDEN + COLUMN_SALT))


_cached_counters = lru_cache(maxsize=128)(_counters)


def _keys(
    seed: Tensor, shape: Sequence[int], offset: Sequence[int], local: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two int32 keys per row and two per column."""
    columns = math.prod(local[_split_at(shape) :])
    rows = math.prod(local[: _split_at(shape)])
    find = _cached_counters if rows + columns <= CACHED else _counters
    mixed = _mix64_(find(tuple(shape), tuple(offset), tuple(local), device) + _mix_seed(int(seed)))
    first, second = mixed.view(torch.int32).view(-1, 2).t().contiguous()
    return first[:rows, None], second[:rows, None], first[None, rows:], second[None, rows:]


def _block(device: torch.device) -> int:
    return BLOCK if device.type == "cpu" else WIDE_BLOCK


def _blocks(
    seed: Tensor, shape: Sequence[int], offset: Sequence[int], local: Sequence[int], device: torch.device
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, columns, hashes) for blocks of the local part seen as rows x columns.

    The hashes are int32, live in scratch and may be overwritten.
    """
    if 0 in local:
        return
    a, a2, b, b2 = _keys(seed, shape, offset, local, device)
    rows, columns = a.shape[0], b.shape[1]
    block = _block(device)
    wide = min(columns, block)
    high = min(rows, block // wide)
    scratch = torch.empty((2, high * wide), dtype=torch.int32, device=device)
    for r in range(0, rows, high):
        own_rows = slice(r, min(r + high, rows))
        for c in range(0, columns, wide):
            own = slice(c, min(c + wide, columns))
            size = (own_rows.stop - r, own.stop - c)
            h, shifted = (part[: size[0] * size[1]].view(size) for part in scratch.unbind())
            torch.add(a[own_rows], b[:, own], out=h)
            _round(h, shifted, 15, M1)
            # The second keys: two rows (or columns) are alike only if all 64 bits are.
            h.add_(a2[own_rows]).bitwise_xor_(b2[:, own])
            _round(h, shifted, 14, M2)
            _round(h, shifted, 15, M3)
            yield own_rows, own, h


def _round(h: Tensor, scratch: Tensor, shift: int, factor: int) -> None:
    """Spread the high bits down and the low bits up, in place."""
    torch.bitwise_right_shift(h, shift, out=scratch)
    h.bitwise_xor_(scratch).mul_(factor)


def _local_2d(t: Tensor, shape: Sequence[int]) -> Tensor:
    columns = math.prod(t.shape[_split_at(shape) :])
    return t.view(-1, columns) if columns else t.view(0, 0)


# ---------------------------------------------------------------------------------------------- operators
def _counter_dropout(x: Tensor, seed: Tensor, p: float, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    source, target = _local_2d(x, shape), _local_2d(out, shape)
    threshold = min(round(p * 2**32) - 2**31, 2**31 - 1)  # the hash is uniform over all int32
    scale = 1.0 / (1.0 - p)
    # The scale goes into the mask: in low precision x * (mask * scale) is what PyTorch computes, too.
    kept = torch.empty(min(_block(x.device), x.numel()), dtype=x.dtype, device=x.device)
    for rows, columns, h in _blocks(seed, shape, offset, x.shape, x.device):
        keep = kept[: h.numel()].view(h.shape)
        torch.ge(h, threshold, out=keep)
        torch.mul(source[rows, columns], keep.mul_(scale), out=target[rows, columns])
    return out


def _counter_uniform(like: Tensor, seed: Tensor, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    target = _local_2d(out, shape)
    for rows, columns, h in _blocks(seed, shape, offset, like.shape, like.device):
        # 24 bits: what a float32 holds exactly; half a step keeps the ends of the interval out.
        target[rows, columns] = ((h >> 8).to(torch.float64) + (2.0**23 + 0.5)) * 2.0**-24
    return out


def _like(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_DROPOUT = operator(
    "counter_dropout(Tensor x, Tensor seed, float p, int[] shape, int[] offset) -> Tensor", _counter_dropout, _like
)
_UNIFORM = operator(
    "counter_uniform(Tensor like, Tensor seed, int[] shape, int[] offset) -> Tensor", _counter_uniform, _like
)
