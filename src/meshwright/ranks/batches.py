"""Which batches this rank has taken.  Ranks that train together take the same ones; the end of a backward compares."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

Ranks = tuple[int, ...]


class Taker(NamedTuple):
    """Who takes batches: ranks that do it together, and the thread.

    A thread that loads ahead is further on some ranks than on others, so threads are counted separately.
    """

    ranks: Ranks
    thread: int

    def covers(self, other: Taker) -> bool:
        """Whether all ranks of the other one take part, in the same thread."""
        return self.thread == other.thread and (self.ranks == other.ranks or {*self.ranks} >= {*other.ranks})


class Batches:
    """Counts what a rank takes.

    Attributes:
        loaded: number of batches of loaders.
        laid: number of parts that the user distributed without a loader.
        last: the last batch of a loader, in words.
    """

    def __init__(self) -> None:
        self.loaded: dict[Taker, int] = {}
        self.laid: dict[Taker, int] = {}
        self.last: dict[Taker, str] = {}

    def load(self, ranks: Ranks, text: str) -> None:
        """Note that a loader gives a batch to these ranks.  ``text``: which one of which loader."""
        taker = Taker(ranks, threading.get_ident())
        self.loaded[taker] = self.loaded.get(taker, 0) + 1
        self.last[taker] = text

    def lay(self, ranks: Ranks) -> None:
        """Note that the user distributes a part over these ranks."""
        taker = Taker(ranks, threading.get_ident())
        self.laid[taker] = self.laid.get(taker, 0) + 1

    def copy(self) -> Batches:
        """The counts as they are now."""
        made = Batches()
        made.loaded, made.laid = dict(self.loaded), dict(self.laid)
        return made

    def counts(self, taker: Taker) -> tuple[int, int]:
        """Batches and parts that this taker, or one with more ranks, has taken."""
        return _sum(self.loaded, taker), _sum(self.laid, taker)

    def word(self, taker: Taker) -> str:
        """The last batch of a loader that a taker, or one with more ranks, has taken; empty where there is none."""
        return next((text for one, text in self.last.items() if one.covers(taker)), "")


def _sum(counted: Mapping[Taker, int], taker: Taker) -> int:
    return sum(n for one, n in counted.items() if one.covers(taker))


__all__ = ["Batches", "Ranks", "Taker"]
