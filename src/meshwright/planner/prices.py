"""What it costs to bring a value from one layout to another, forward and backward, by the links of the machine.

For each shape and dtype the cheapest ways between all layouts are found at once, over the steps of ``resharding`` and
their transposes (Floyd and Warshall).  Prices are picoseconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import ConversionError
from ..layout import REPLICATE, Partial, Shard
from ..machines import Hardware
from ..resharding.planner import Type, both_ways
from .solve import NEVER, Prices

INVARIANT: Type = (REPLICATE, 0)
REDUCED: Type = (REPLICATE, 1)
SUM: Type = (Partial(), 0)
State = tuple[Type, ...]  # what each axis does to a value
PICO = 1e12
Floats = NDArray[np.float64]


def split(d: int) -> Type:
    """The type of an axis that splits a dim."""
    return Shard(d), 0


@dataclass
class Wires:
    """The axes of a mesh as links.

    Attributes:
        sizes: of the axes, outermost first.
        hardware: the machine; ``dtype``: in which it computes mostly.
        inner: how many ranks lie next to each other inside of one rank of this mesh (stages are outside of it).
    """

    sizes: tuple[int, ...]
    hardware: Hardware
    dtype: str = "*"
    _steps: dict[tuple[State, ...], _Steps] = field(default_factory=dict)
    _closed: dict[tuple[tuple[State, ...], float, bool], Prices] = field(default_factory=dict)

    def seconds(self, axes: Sequence[int], nbytes: float) -> float:
        """Of a collective over some axes, which sends so many bytes from each rank."""
        return self.hardware.seconds(self.sizes, axes, nbytes)

    def conversions(self, states: tuple[State, ...], nbytes: float, learnt: bool) -> Prices:
        """The price from each state of a value to each other one.

        Args:
            nbytes: of the whole value.
            learnt: it has a gradient, which the transposes bring back.
        """
        key = states, nbytes, learnt
        if key not in self._closed:
            if states not in self._steps:
                self._steps[states] = _Steps(states, self)
            self._closed[key] = self._steps[states].closed(nbytes, learnt)
        return self._closed[key]


class _Steps:
    """All single steps between states, as arrays: what each sends for a byte of the value, and how often."""

    def __init__(self, states: tuple[State, ...], wires: Wires) -> None:
        place = {s: i for i, s in enumerate(states)}
        self.count = len(states)
        src: list[int] = []
        dst: list[int] = []
        rows: list[tuple[float, float, float, float]] = []  # seconds a byte and seconds at once, forward and backward
        for s, i in place.items():
            for axes, after in _moves(s, states, place):
                try:
                    there, back = both_ways(s[axes[0]], after[axes[0]], (1.0, 1.0))
                except ConversionError:
                    continue
                src.append(i)
                dst.append(place[after])
                rows.append(self._priced(s, after, axes, there, back, wires))
        self.src, self.dst = np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64)
        self.rows = np.array(rows, dtype=np.float64).reshape(-1, 4)

    @staticmethod
    def _priced(
        src: State,
        dst: State,
        axes: tuple[int, ...],
        there: tuple[float, float],
        back: tuple[float, float],
        wires: Wires,
    ) -> tuple[float, float, float, float]:
        n = math.prod(wires.sizes[a] for a in axes)
        held = [
            1 / math.prod(k for k, t in zip(wires.sizes, s, strict=True) if isinstance(t[0], Shard)) for s in (src, dst)
        ]
        made = []
        for (before, after), (first, last) in ((there, held), (back, held[::-1])):
            sent = (n - 1) / n * (before * first + after * last)
            at_once = wires.seconds(axes, 0.0) if sent else 0.0
            made += [wires.seconds(axes, sent) - at_once if sent else 0.0, at_once]
        return made[0], made[1], made[2], made[3]

    def closed(self, nbytes: float, learnt: bool) -> Prices:
        rows = self.rows
        seconds = rows[:, 0] * nbytes + rows[:, 1]
        if learnt:
            seconds = seconds + rows[:, 2] * nbytes + rows[:, 3]
        price = np.full((self.count, self.count), float(NEVER))
        np.minimum.at(price, (self.src, self.dst), np.rint(seconds * PICO) + 1.0)  # of equals the fewest steps
        np.fill_diagonal(price, 0.0)
        for k in range(self.count):
            np.minimum(price, price[:, k, None] + price[k], out=price)
        return np.minimum(price, NEVER).astype(np.int64)


def _moves(s: State, states: Sequence[State], place: dict[State, int]) -> list[tuple[tuple[int, ...], State]]:
    """States that one step leads to, and its axes; several axes at once that become alike from alike."""
    ndim, made = len(s), list[tuple[tuple[int, ...], State]]()
    types = [list(dict.fromkeys(t[a] for t in states)) for a in range(ndim)]
    dims = [_dim(t) for t in s]
    for a in range(ndim):
        if dims[a] is not None and dims[a] in dims[a + 1 :]:
            continue  # only the minor axis of a dim can leave it
        for t in types[a]:
            if t == s[a] or (isinstance(t[0], Shard) and t[0].dim in dims[a + 1 :]):
                continue
            after = (*s[:a], t, *s[a + 1 :])
            if after in place:
                made.append(((a,), after))
    for k in range(2, ndim + 1):
        for axes in itertools.combinations(range(ndim), k):
            if len({s[a] for a in axes}) > 1 or isinstance(s[axes[0]][0], Shard):
                continue
            for t in types[axes[0]]:
                after = tuple(t if a in axes else s[a] for a in range(ndim))
                if t != s[axes[0]] and not isinstance(t[0], Shard) and after in place:
                    made.append((axes, after))
    return made


def _dim(t: Type) -> int | None:
    return t[0].dim if isinstance(t[0], Shard) else None


__all__ = ["INVARIANT", "PICO", "REDUCED", "SUM", "State", "Wires", "split"]
