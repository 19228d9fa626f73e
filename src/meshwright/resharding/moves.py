"""Tensors that move from one mesh to another: each rank receives the elements that it lacks, once, in bounded rounds.

Like the reads of a checkpoint, without files: which rank sends a part follows from specs alone, and each rank plans
its own sends and receives.  The idea of moving only what is missing is that of resharding in "On Optimizing the
Communication of Model Parallelism" (Zhuang et al., 2022), over an all-to-all in place of broadcasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from .. import collective
from ..layout import At, Replicate, Spec
from ..layout.pieces import Box, common, difference, inside, nothing, overlapping, own_piece
from ..mesh import Mesh

Tensor = torch.Tensor


class Transfer(NamedTuple):
    """How a tensor lies before and after it has moved, and in which dtype it travels; layouts have no blocks."""

    source: Spec
    target: Spec
    dtype: torch.dtype


class TensorPart(NamedTuple):
    """Part of a tensor: the number of its transfer, and the global indices."""

    number: int
    box: Box


class Round(NamedTuple):
    """Parts that this rank sends to each rank of the union, and those that it receives from each."""

    sends: tuple[tuple[TensorPart, ...], ...]
    receives: tuple[tuple[TensorPart, ...], ...]


class Moves(NamedTuple):
    """What one rank does: parts that it has already, then rounds with the others."""

    kept: tuple[TensorPart, ...]
    rounds: tuple[Round, ...]


@lru_cache(maxsize=8)
def plan_moves(transfers: tuple[Transfer, ...], ranks: tuple[int, ...], rank: int, max_bytes: int) -> Moves:
    """Plan the part of one rank in moving tensors.

    Args:
        transfers: of all tensors, in one order on all ranks.
        ranks: global ranks of both meshes, in order.
        max_bytes: a rank receives, and sends, at most so many in a round; one element to all ranks at least.
    """
    rounds: list[Round] = []
    kept: list[TensorPart] = []
    ways = [_Way(number, transfer, ranks, rank) for number, transfer in enumerate(transfers)]
    for way in ways:
        kept += [TensorPart(way.number, box) for box in way.kept]
    for batch in _batches(transfers, max_bytes):
        sends: list[list[TensorPart]] = [[] for _ in ranks]
        receives: list[list[TensorPart]] = [[] for _ in ranks]
        for number, slab in batch:
            ways[number].add(slab, sends, receives)
        rounds.append(Round(tuple(map(tuple, sends)), tuple(map(tuple, receives))))
    return Moves(tuple(kept), tuple(rounds))


class _Way:
    """Of one tensor: what this rank sends to whom, and what it receives from whom."""

    def __init__(self, number: int, transfer: Transfer, ranks: Sequence[int], rank: int) -> None:
        self.number = number
        source, target, _ = transfer
        before, after = _box(source, rank), _box(target, rank)
        both = common(before, after)
        self.kept = [both] if _holds(source, rank) and _holds(target, rank) and not nothing(both) else []
        self.sends: list[list[Box]] = [[] for _ in ranks]
        self.receives: list[list[Box]] = [[] for _ in ranks]
        place = {r: i for i, r in enumerate(ranks)}
        for lack in _lacks(source, target, rank):
            for sender, piece in overlapping(source, lack, number):
                self.receives[place[sender]].append(common(piece, lack))
        own = own_piece(source, source.mesh.coordinate(rank), number) if _holds(source, rank) else None
        for receiver in target.mesh.ranks if own is not None else ():
            assert own is not None
            if receiver != rank and _meets(own, _box(target, receiver)):
                for lack in _lacks(source, target, receiver):
                    if _meets(own, lack):
                        self.sends[place[receiver]].append(common(own, lack))

    def add(self, slab: Box, sends: list[list[TensorPart]], receives: list[list[TensorPart]]) -> None:
        """Add what of a slab is sent and received; both sides list parts in the order of their boxes."""
        for boxes, parts in ((self.sends, sends), (self.receives, receives)):
            for own, listed in zip(boxes, parts, strict=True):
                listed += sorted(TensorPart(self.number, common(box, slab)) for box in own if _meets(box, slab))


def _meets(box: Box, other: Box) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, other, strict=True))


@lru_cache(maxsize=1 << 16)
def _box(spec: Spec, rank: int) -> Box:
    """What a rank holds of a tensor: nothing outside of its mesh."""
    if rank not in spec.mesh.ranks:
        return ((0, 0),) * len(spec.shape)
    return tuple(spec.layout.local_bounds(spec.shape, spec.mesh.coordinate(rank)))


def _holds(spec: Spec, rank: int) -> bool:
    """Whether a rank has part of a tensor; of a number there is no empty box that says so."""
    if rank not in spec.mesh.ranks:
        return False
    pairs = zip(spec.layout.placements, spec.mesh.coordinate(rank), strict=True)
    return not any(isinstance(p, At) and p.index != i for p, i in pairs)


def _lacks(source: Spec, target: Spec, rank: int) -> Iterator[Box]:
    """What a rank is to have and has not."""
    if not _holds(target, rank):
        return
    if _holds(source, rank):
        yield from difference(_box(target, rank), _box(source, rank)) if target.shape else ()
    elif not nothing(box := _box(target, rank)):
        yield box


def _batches(transfers: Sequence[Transfer], max_bytes: int) -> Iterator[list[TensorPart]]:
    """Slabs of tensors in rounds, from specs alone: all ranks have as many."""
    batch: list[TensorPart] = []
    held = 0
    for number, transfer in enumerate(transfers):
        whole: Box = tuple((0, n) for n in transfer.source.shape)
        cost, copies = _cost(transfer)
        slabs = [(whole, cost)]
        if cost > max_bytes:
            limit = max(1, max_bytes // copies)
            slabs = [(box, _bytes(box, transfer) * copies) for box in _slabs(whole, transfer.dtype.itemsize, limit)]
        for slab, nbytes in slabs:
            if batch and held + nbytes > max_bytes:
                yield batch
                batch, held = [], 0
            if nbytes:
                batch.append(TensorPart(number, slab))
                held += nbytes
    if batch:
        yield batch


def _cost(transfer: Transfer) -> tuple[int, int]:
    """Bytes that a rank sends or receives at most, and how many ranks are to have an element."""
    source, target, dtype = transfer
    pairs = zip(target.mesh.sizes, target.layout.placements, strict=True)
    copies = math.prod(n for n, p in pairs if isinstance(p, Replicate))
    largest = [
        max(math.prod(b - a for a, b in _box(spec, rank)) for rank in spec.mesh.ranks) * dtype.itemsize
        for spec in (source, target)
    ]
    return max(largest[0] * copies, largest[1]), copies


def _bytes(box: Box, transfer: Transfer) -> int:
    return math.prod(b - a for a, b in box) * transfer.dtype.itemsize


def _slabs(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Parts of a box of at most so many bytes, or of one element."""
    lengths = [b - a for a, b in box]
    parts = -(-math.prod(lengths) * itemsize // limit)
    dim = next((d for d, n in enumerate(lengths) if n > 1), None)
    if parts <= 1 or dim is None:
        yield box
        return
    step = max(1, lengths[dim] // parts)
    for a in range(*box[dim], step):
        part = (*box[:dim], (a, min(a + step, box[dim][1])), *box[dim + 1 :])
        yield from _slabs(part, itemsize, limit)


def run_moves(
    moves: Moves, transfers: Sequence[Transfer], sources: Sequence[Tensor | None], targets: Sequence[Tensor | None],
    over: Mesh, rank: int,
) -> None:  # fmt: skip
    """Move tensors: all ranks of a mesh call it together.

    Args:
        sources: this rank's parts before, None where it has none; ``targets``: memory of those afterwards.
        over: a mesh of all ranks of both.
    """

    def part_of(tensors: Sequence[Tensor | None], part: TensorPart, spec: Spec) -> Tensor:
        t = tensors[part.number]
        assert t is not None
        return inside(t, part.box, _box(spec, rank))

    for part in moves.kept:
        source, target, _ = transfers[part.number]
        part_of(targets, part, target).copy_(part_of(sources, part, source))
    if over.size == 1:
        return
    group = collective.group(over)
    for sends, receives in moves.rounds:
        give, take = ([_total(parts, transfers) for parts in side] for side in (sends, receives))
        filled = torch.empty(sum(give), dtype=torch.uint8, device=over.device)
        at = 0
        for part in (part for parts in sends for part in parts):
            source, _, dtype = transfers[part.number]
            raw = _raw(part_of(sources, part, source), dtype)
            filled[at : at + raw.numel()] = raw
            at += raw.numel()
        received, at = collective.exchange_pieces(filled, give, take, group), 0
        for part in (part for parts in receives for part in parts):
            n = _bytes(part.box, transfers[part.number])
            place = part_of(targets, part, transfers[part.number].target)
            place.copy_(_typed(received[at : at + n], transfers[part.number].dtype).view(place.shape))
            at += n


def _total(parts: Sequence[TensorPart], transfers: Sequence[Transfer]) -> int:
    return sum(_bytes(part.box, transfers[part.number]) for part in parts)


def _raw(t: Tensor, dtype: torch.dtype) -> Tensor:
    t = t.to(dtype).resolve_conj().resolve_neg().contiguous().view(-1)
    return (torch.view_as_real(t).view(-1) if dtype.is_complex else t).view(torch.uint8)


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    whole = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
    return whole.view(dtype)


__all__ = ["Moves", "Round", "TensorPart", "Transfer", "plan_moves", "run_moves"]
