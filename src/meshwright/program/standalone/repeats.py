"""Repeated blocks of a step: where they are, and which values differ from one to the next."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch.fx as fx

from .statements import Statement

_SHORTEST = 2  # lines of a block
_FEWEST = 8  # lines of all blocks: fewer are as short without a function
_TRIED = 12  # candidates for the longest repeat


@dataclass
class Slot:
    """A value from outside that a block reads: the node in each iteration."""

    nodes: tuple[fx.Node, ...]
    places: list[tuple[int, int]] = field(default_factory=list)  # (line of the block, which of its reads)


@dataclass
class Repeat:
    """Blocks of one form, one after the other: `count` times `period` statements from `start`."""

    start: int
    period: int
    count: int
    slots: list[Slot] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The first statement after it."""
        return self.start + self.period * self.count

    def at(self, iteration: int, line: int) -> int:
        """The number of a statement."""
        return self.start + iteration * self.period + line


def repeats_of(statements: Sequence[Statement]) -> list[Repeat]:
    """The repeats of a step, in order; the rest of its statements stand alone."""
    known: dict[tuple[str, str, str], int] = {}
    forms = [(s.code, _shape(s), re.sub(r"\d+", "#", s.section)) for s in statements]
    ids = np.array([known.setdefault(form, len(known)) for form in forms], dtype=np.int64)
    places = {s.node: i for i, s in enumerate(statements)}
    return sorted(_search(statements, ids, places, 0, len(statements)), key=lambda r: r.start)


def _shape(s: Statement) -> str:
    return s.comment.partition("<")[0]


def _search(
    statements: Sequence[Statement], ids: np.ndarray, places: dict[fx.Node, int], low: int, high: int
) -> Iterator[Repeat]:
    found = next(
        (made for at in _candidates(ids, low, high) if (made := _checked(statements, places, *at)) is not None), None
    )
    if found is not None:
        yield from _search(statements, ids, places, low, found.start)
        yield found
        yield from _search(statements, ids, places, found.end, high)


def _candidates(ids: np.ndarray, low: int, high: int) -> list[tuple[int, int, int]]:
    """(first statement, period, statements in all), those that save most lines first."""
    found = []
    for period in range(_SHORTEST, (high - low) // 2 + 1):
        same = np.flatnonzero(ids[low : high - period] != ids[low + period : high])
        edges = np.concatenate(([-1], same, [high - period - low]))
        lengths = np.diff(edges) - 1
        best = int(lengths.argmax())
        length = int(lengths[best])
        if length >= period and length + period >= _FEWEST:
            found.append((length, period, low + int(edges[best]) + 1))
    found.sort(key=lambda f: (-f[0], f[1]))
    return [(start, period, length + period) for length, period, start in found[:_TRIED]]


def _checked(
    statements: Sequence[Statement], places: dict[fx.Node, int], start: int, period: int, total: int
) -> Repeat | None:
    """The repeat at this place whose blocks read values alike, as many of them as do."""
    count, slack = divmod(total, period)
    offsets = sorted(range(slack + 1), key=lambda o: (not _boundary(statements, start + o), o))
    for offset in offsets[:3]:
        first, n = _alike(statements, places, start + offset, period, count)
        if n > 1:
            made = Repeat(start + offset + first * period, period, n)
            made.slots = list(_slots(statements, places, made))
            return made
    return None


def _boundary(statements: Sequence[Statement], i: int) -> bool:
    """Whether another module of a list begins here."""
    return i == 0 or _numbers(statements[i]) != _numbers(statements[i - 1])


def _numbers(s: Statement) -> tuple[str, ...]:
    return (s.section.partition(" ")[0].partition(".")[0], *re.findall(r"\d+", s.section)[:1], s.section[-8:])


def _alike(
    statements: Sequence[Statement], places: dict[fx.Node, int], start: int, period: int, count: int
) -> tuple[int, int]:
    """The longest run of blocks that read inner values at the same places: its first block, and how many."""
    best, first = (0, 1), 0
    for k in range(1, count):
        before = start + (k - 1) * period
        if not all(
            _pair(statements[before + j], statements[before + period + j], places, before, period)
            for j in range(period)
        ):
            first = k
        if k - first + 1 > best[1]:
            best = first, k - first + 1
    return best


def _pair(a: Statement, b: Statement, places: dict[fx.Node, int], start: int, period: int) -> bool:
    for x, y in zip(a.reads, b.reads, strict=True):
        i, j = places.get(x, -1), places.get(y, -1)
        inner = start <= i < start + period, start + period <= j < start + 2 * period
        if inner[0] != inner[1] or (inner[0] and j - i != period):
            return False
    return True


def _slots(statements: Sequence[Statement], places: dict[fx.Node, int], r: Repeat) -> Iterator[Slot]:
    found: dict[tuple[fx.Node, ...], Slot] = {}
    for line in range(r.period):
        for k, ref in enumerate(statements[r.at(0, line)].reads):
            if r.start <= places.get(ref, -1) < r.start + r.period:
                continue
            nodes = tuple(statements[r.at(n, line)].reads[k] for n in range(r.count))
            found.setdefault(nodes, Slot(nodes)).places.append((line, k))
    yield from found.values()


__all__ = ["Repeat", "Slot", "repeats_of"]
