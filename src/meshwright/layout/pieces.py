"""Which part of a tensor each rank writes, and which of these parts a rank reads: from specs alone, nothing is sent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from . import At, Replicate, Shard, Spec, chunk_bounds

Box = tuple[tuple[int, int], ...]  # per dim the first and last + 1 global index
FEW = 1 << 22  # bytes that a rank may hold beside what it has
SMALL = 1 << 16  # bytes that are not worth another rank: one writes them all, each that needs them reads them
BLOCK = 1 << 16  # bytes of a file that are read and checked together
# Bytes that a rank may read, as a multiple of its share, in place of an exchange: anywhere, and where the ranks have
# one page cache, from which the second rank gets what the first has read.
EXTRA, EXTRA_ON_ONE_MACHINE = 1.25, 2.5


class Piece(NamedTuple):
    """What one rank writes of a tensor."""

    rank: int
    box: Box


def nothing(box: Box) -> bool:
    """Whether a box has no elements."""
    return any(a >= b for a, b in box)


def own_piece(spec: Spec, coordinate: Sequence[int], turn: int) -> Box | None:
    """What the rank at ``coordinate`` writes of a tensor, or None.

    Ranks that hold the same share it evenly, and take turns with what is too small to be shared by all.

    Args:
        spec: a layout without Partial.
        turn: number of the tensor in its checkpoint.
    """
    box = tuple(spec.layout.local_bounds(spec.shape, coordinate))
    if nothing(box):
        return None
    index, n = replica(spec, coordinate)
    dim, shares = _shares(spec, box, n)
    share = (index - turn) % n
    return _cut(box, dim, shares, share) if share < shares else None


def replica(spec: Spec, coordinate: Sequence[int]) -> tuple[int, int]:
    """Which of the ranks that hold the same the one at ``coordinate`` is, and how many they are."""
    index, n = 0, 1
    for size, placement, at in zip(spec.mesh.sizes, spec.layout.placements, coordinate, strict=True):
        if isinstance(placement, Replicate):
            index, n = index * size + at, n * size
    return index, n


def _shares(spec: Spec, box: Box, n: int) -> tuple[int, int]:
    """In how many shares, along which dim, ``n`` ranks that hold ``box`` write it: none much smaller than ``SMALL``."""
    lengths = [b - a for a, b in box]
    shares = min(n, -(-math.prod(lengths) * spec.dtype.itemsize // SMALL))
    if shares == 1:
        return 0, 1
    long_enough = (d for d, length in enumerate(lengths) if length >= shares)
    return next(long_enough, max(range(len(lengths)), key=lengths.__getitem__)), shares


def _cut(box: Box, dim: int, n: int, index: int) -> Box | None:
    if n == 1:
        return box
    a, b = box[dim]
    lo, hi = chunk_bounds(b - a, n, index)
    return None if lo == hi else (*box[:dim], (a + lo, a + hi), *box[dim + 1 :])


@lru_cache(maxsize=4096)
def overlapping(spec: Spec, box: Box, turn: int) -> tuple[Piece, ...]:
    """The pieces of a saved tensor that have elements in ``box``."""
    return tuple(_overlapping(spec, box, turn))


def _overlapping(spec: Spec, box: Box, turn: int) -> Iterator[Piece]:
    if nothing(box):
        return
    mesh, split = spec.mesh, spec.layout.dim_axes()
    copies = [a for a, p in enumerate(spec.layout.placements) if isinstance(p, Replicate)]
    cells = [list(_cells(size, split.get(d, ()), mesh.sizes, *box[d])) for d, size in enumerate(spec.shape)]  # per dim
    n = math.prod(mesh.sizes[a] for a in copies)
    for chosen in itertools.product(*cells):
        at = _first(spec)
        for axes in (axes for axes, _ in chosen):
            for axis, i in axes:
                at[axis] = i
        whole = tuple(bounds for _, bounds in chosen)
        dim, shares = _shares(spec, whole, n)
        for share in _chunks(whole[dim], shares, box[dim]) if shares > 1 else (0,):
            piece, index = _cut(whole, dim, shares, share), (share + turn) % n
            if piece is not None:
                for axis in reversed(copies):
                    index, at[axis] = divmod(index, mesh.sizes[axis])
                yield Piece(mesh.rank_at(at), piece)


def _first(spec: Spec) -> list[int]:
    """Where the first rank is that holds part of a tensor; no other holds more."""
    return [p.index if isinstance(p, At) else 0 for p in spec.layout.placements]


def _cells(
    size: int, axes: Sequence[int], sizes: Sequence[int], lo: int, hi: int
) -> Iterator[tuple[tuple[tuple[int, int], ...], tuple[int, int]]]:
    """The parts of a dim, split by axes, that have elements in lo..hi: (axis, index on it) each, and bounds."""
    found: list[tuple[tuple[tuple[int, int], ...], tuple[int, int]]] = [((), (0, size))]
    for axis in axes:
        deeper = []
        for at, (a, b) in found:
            for i in _chunks((a, b), sizes[axis], (lo, hi)):
                x, y = chunk_bounds(b - a, sizes[axis], i)
                deeper.append(((*at, (axis, i)), (a + x, a + y)))
        found = deeper
    return iter(found)


def _chunks(bounds: tuple[int, int], n: int, wanted: tuple[int, int]) -> range:
    """Which of the ``n`` chunks of ``bounds`` have elements in ``wanted``."""
    (a, b), lo, hi = bounds, max(bounds[0], wanted[0]), min(bounds[1], wanted[1])
    if lo >= hi:
        return range(0)
    step = -(-(b - a) // n)
    return range((lo - a) // step, (hi - 1 - a) // step + 1)


def common(box: Box, other: Box) -> Box:
    """What two boxes have in common."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))


def inside(t: Tensor, part: Box, box: Box) -> Tensor:
    """The part of a tensor, which covers ``box``, that covers ``part``."""
    for d, ((a, b), (start, _)) in enumerate(zip(part, box, strict=True)):
        t = t.narrow(d, a - start, b - a)
    return t


def difference(box: Box, other: Box) -> Iterator[Box]:
    """The parts of a box that are not in another one: at most two for each dim, without elements in common."""
    shared = common(box, other)
    if nothing(shared):
        yield from () if nothing(box) else (box,)
        return
    for d, ((a, b), (start, stop)) in enumerate(zip(box, shared, strict=True)):
        for part in ((a, start), (stop, b)):
            if part[0] < part[1]:
                yield (*shared[:d], part, *box[d + 1 :])


# ---------------------------------------------------------------------------------------------- reading


def read_spec(stored: Spec, target: Spec, one_machine: bool = False) -> Spec:
    """How a tensor is read that is then converted to ``target``: so that each byte is read once, in whole rows.

    Ranks that are to hold the same read a part each.  A target that cuts across the rows of what was stored is read by
    rows, which lie together in any file, and rearranged between the ranks.  Where reading ``target`` itself costs few
    bytes more, nothing is exchanged.

    Args:
        one_machine: the ranks read through one page cache.
    """
    given, target = target, target.with_(layout=target.layout.without_blocks()) if target.layout.blocks else target
    if target.mesh.size == 1 or target.nbytes <= SMALL or not target.ndim:
        return target
    layout = target.layout
    by_rows = not all(_edges(target, d) <= _edges(stored, d) for d in range(1, target.ndim))
    for axis, placement in enumerate(target.layout.placements):
        if target.mesh.sizes[axis] > 1 and (by_rows or isinstance(placement, Replicate)):
            layout = layout.replace(axis, Shard(0))
    most = (EXTRA_ON_ONE_MACHINE if one_machine else EXTRA) * target.nbytes / target.mesh.size
    if layout != target.layout and target is given and bytes_to_read(stored, target) <= most:
        return target
    return target.with_(layout=layout)


@lru_cache(maxsize=4096)
def bytes_to_read(stored: Spec, target: Spec) -> int:
    """About how many bytes the rank reads that holds most of a target, with all of their blocks."""
    box, total = tuple(target.layout.local_bounds(target.shape, _first(target))), 0
    for _, piece in overlapping(stored, box, 0):
        lengths, wanted = [b - a for a, b in piece], [b - a for a, b in common(piece, box)]
        below = [stored.dtype.itemsize * math.prod(lengths[d + 1 :]) for d in range(len(lengths))]
        if far_apart(lengths, wanted, stored.dtype.itemsize):
            d = max(d for d, n in enumerate(lengths) if wanted[d] != n)
            total += math.prod(wanted[:d]) * (wanted[d] * below[d] + BLOCK)
        else:
            d = next((d for d, size in enumerate(below) if size <= FEW), len(lengths) - 1)
            total += math.prod(wanted[: d + 1]) * below[d]
    return total


def far_apart(shape: Sequence[int], lengths: Sequence[int], itemsize: int) -> bool:
    """Whether more bytes lie between the stretches of a box of an array than in the blocks at both ends of one."""
    cut = max((d for d, n in enumerate(shape) if lengths[d] != n), default=0)
    return cut > 0 and (shape[cut] - lengths[cut]) * itemsize * math.prod(shape[cut + 1 :]) >= 2 * BLOCK


def stretches(spec: Spec) -> list[tuple[int, Spec]] | None:
    """Rows of a tensor (the first, and how they lie) of which a rank holds few bytes; None where it cannot be cut so.

    All ranks have part of each stretch, so that they can exchange one after the other with little memory.
    """
    held = math.prod(spec.local_shape(_first(spec))) * spec.dtype.itemsize  # by the rank that holds most
    if held <= FEW:
        return [(0, spec)]
    step = max(spec.mesh.size, FEW * spec.shape[0] // held)
    if 0 in spec.layout.dim_axes() or step * held // spec.shape[0] > 2 * FEW:
        return None
    return [
        (a, spec.with_(shape=(min(step, spec.shape[0] - a), *spec.shape[1:]))) for a in range(0, spec.shape[0], step)
    ]


@lru_cache(maxsize=4096)
def _edges(spec: Spec, dim: int) -> frozenset[int]:
    """Where a dim is cut."""
    axes = spec.layout.dim_axes().get(dim, ())
    return frozenset(a for _, (a, b) in _cells(spec.shape[dim], axes, spec.mesh.sizes, 0, spec.shape[dim]) if a < b)


__all__ = [
    "BLOCK", "FEW", "SMALL", "Box", "Piece", "bytes_to_read", "common", "difference", "far_apart", "inside", "nothing",
    "overlapping", "own_piece", "read_spec", "replica", "stretches",
]  # fmt: skip
