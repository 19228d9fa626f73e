"""Which documents are in which row: a function of their lengths, the same in every process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

Tensor = torch.Tensor
BLOCK = 4096  # documents that best fit packs together
Span = tuple[int, int]  # of tokens: from, up to


class CutRows:
    """Row k has tokens k * length up to (k + 1) * length of all documents one after the other."""

    def __init__(self, ends: Tensor, length: int) -> None:
        self.ends, self.length, self.total = ends, length, int(ends[-1])
        self.rows = -(-self.total // length)

    def spans(self, row: int) -> list[Span]:
        """Tokens of a row, document by document."""
        start, stop = row * self.length, min((row + 1) * self.length, self.total)
        first, last = torch.searchsorted(self.ends, torch.tensor([start, stop - 1]), right=True).tolist()
        cuts = [start, *self.ends[first:last].tolist(), stop]
        return [(a, b) for a, b in pairwise(cuts) if a < b]


class BestFitRows:
    """Each document in the row that it fills best; longer ones are cut first."""

    def __init__(self, ends: Tensor, length: int) -> None:
        self.length = length
        self.starts, self.lengths = _pieces(ends, length)
        order: list[int] = []
        row_ends: list[int] = []
        for first in range(0, len(self.lengths), BLOCK):
            for held in best_fit(self.lengths[first : first + BLOCK].tolist(), length):
                order += [first + i for i in held]
                row_ends.append(len(order))
        self.order, self.row_ends = torch.tensor(order), torch.tensor(row_ends)
        self.rows = len(row_ends)

    def spans(self, row: int) -> list[Span]:
        """Tokens of a row, document by document."""
        first = int(self.row_ends[row - 1]) if row else 0
        held = self.order[first : int(self.row_ends[row])]
        starts, lengths = self.starts[held].tolist(), self.lengths[held].tolist()
        return [(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def _pieces(ends: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Starts and lengths of documents, long ones cut into pieces of `length` and a rest; empty ones left out."""
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    counts = (ends - starts + length - 1) // length
    pieces = torch.repeat_interleave(counts)
    within = torch.arange(len(pieces)) - (counts.cumsum(0) - counts)[pieces]
    begin = starts[pieces] + within * length
    return begin, torch.minimum(ends[pieces] - begin, torch.tensor(length))


def best_fit(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Pack lengths into rows of at most `limit`, the longest first, each into the row with the least room for it."""
    rows: list[list[int]] = []
    having: list[list[int]] = [[] for _ in range(limit + 1)]  # room to the rows that have it
    rooms = 0  # bit n: some row has room n
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[i]
        fits = rooms >> length
        if fits:
            room = length + (fits & -fits).bit_length() - 1
            row = having[room].pop()
            if not having[room]:
                rooms ^= 1 << room
            rows[row].append(i)
        else:
            room, row = limit, len(rows)
            rows.append([i])
        if room > length:
            rooms |= 1 << room - length
            having[room - length].append(row)
    yield from rows


__all__ = ["BestFitRows", "CutRows", "Span", "best_fit"]
