"""Ranks whose gradients meet must have taken the same batches."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ... import collective
from ...errors import DesyncError
from ...ranks import runtime
from ...ranks.batches import Ranks, Taker

_FIX = (
    "Did one rank skip a batch (continue, break, except), take one alone or call backward once more? Skip it on all "
    'ranks: share the decision first, bool(mw.from_local(torch.tensor(skip), mesh, {"dp": mw.Partial("any")}))'
)


class SameBatches:
    """Compares what the ranks have taken from now on, in this thread."""

    def __init__(self) -> None:
        self.before, self.thread = runtime.RT.batches.copy(), threading.get_ident()

    def loads(self, ranks: Ranks) -> bool:
        """Whether a loader gives batches to these ranks: known to all of them, since its first batch needs all."""
        return bool(runtime.RT.batches.word(Taker(ranks, self.thread)))

    def words(self, group: collective.Group) -> tuple[int, int]:
        """Batches and parts that this rank has taken together with a group."""
        taker = Taker(group.ranks, self.thread)
        (loaded, laid), (loaded_before, laid_before) = (b.counts(taker) for b in (runtime.RT.batches, self.before))
        return loaded - loaded_before, laid - laid_before

    def judge(self, group: collective.Group, heard: Sequence[tuple[int, int]]) -> None:
        """Raise DesyncError on every rank where the words of the ranks differ; they call it together."""
        if len(set(heard)) == 1:
            return
        loaded, laid = self.words(group)
        last = runtime.RT.batches.word(Taker(group.ranks, self.thread))
        facts = [
            collective.Fact("batches", f"{last}, its number {loaded}" if last else "none"),
            collective.Fact("numbers of parts", f"{laid} calls of from_local"),
        ]
        found, _ = collective.difference(group, facts)
        raise DesyncError(f"the ranks add up gradients of {found}. {_FIX}")


__all__ = ["SameBatches"]
