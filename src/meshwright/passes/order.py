"""In which order collectives of gradients start, and where: one decision of all ranks.

Ranks must run the same collectives in the same order, and have other local ops between them.  So places of nodes are
compared through what all ranks share: the collectives that stay where they are (*fences*).  A gradient is complete
behind so many fences, on the rank where that is latest; whatever is started between two fences on one rank is started
between the same two on all, in one order.  Within that each rank starts as early as it can.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch.fx as fx

from ..collective import COLLECTIVES, WAIT_OP, Fact
from .agreement import check_alike
from .buckets import FusedBucket, fusible
from .gradients import Gradients, SentGradient, is_reduction, parameter_of


class SumView(NamedTuple):
    """The sum of a gradient as one rank sees it.

    Attributes:
        name: of the parameter; ``group``: what is the same for sums that may share a collective.
        nbytes: of this rank's part.
        ready, needed, place: places of the last write to the gradient, of the first reader of the sum, and of the sum.
        born: seconds after which the gradient is complete, by a model of the backward.
        fusible: whether the sum can share a buffer with others.
    """

    name: str
    group: str
    nbytes: int
    ready: int
    needed: int
    place: int
    born: float
    fusible: bool

    @property
    def text(self) -> str:
        """Which sum it is."""
        return f"the gradient of {self.name} is summed by {self.group}"


class ProgramView(NamedTuple):
    """A program as one rank sees it: the collectives that stay, with their places, and the sums of gradients.

    Attributes:
        fences: their places; ``kinds``: what they are; ``names``: of whose gradient, where that is known.
        sums: of gradients, in the order of the program.
    """

    fences: tuple[int, ...]
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    sums: tuple[SumView, ...]

    def facts(self) -> list[Fact]:
        """What all ranks have alike."""
        return [*(Fact(s.text) for s in self.sums), *map(Fact, self.kinds)]

    def named(self) -> list[Fact]:
        """All collectives with names, to tell which one ranks do not have alike."""
        kinds = [f"{kind} of {name}" if name else kind for kind, name in zip(self.kinds, self.names, strict=True)]
        return [*(Fact(s.text) for s in self.sums), *map(Fact, kinds)]


def is_fence(node: fx.Node) -> bool:
    """Whether ranks meet in a node: in a collective, or in a wait that runs the rest of one."""
    return node.target in COLLECTIVES or (node.target is WAIT_OP and COLLECTIVES[node.args[0].target].staged)  # type: ignore[union-attr]


def view_of(gradients: Gradients, born: Mapping[fx.Node, float]) -> ProgramView:
    """This rank's view.

    Args:
        born: node of each reduction to the seconds after which its gradient is complete.
    """
    moved = {r.node for r in gradients.reductions}
    fences = [(i, n) for i, n in enumerate(gradients.order) if is_fence(n) and n not in moved]
    sums = tuple(
        SumView(", ".join(parameter_of(r.node)), _group_text(r), r.nbytes, r.ready, r.needed, gradients.place[r.node],
                born[r.node], fusible(r)) for r in gradients.reductions
    )  # fmt: skip
    names = tuple(", ".join(parameter_of(n)) if is_reduction(n) else "" for _, n in fences)
    return ProgramView(tuple(i for i, _ in fences), tuple(_text(n) for _, n in fences), names, sums)


def _group_text(r: SentGradient) -> str:
    kind, dtype, *rest, unit = r.group
    return f"{kind}{rest[:-1]} of {dtype}" + (f" with {unit}" if unit else "")


def _text(node: fx.Node) -> str:
    return f"{COLLECTIVES[node.target]} over {node.args[-2]}" if node.target in COLLECTIVES else "the rest of a sum"


@dataclass
class _Where:
    """How far collectives are placed: how many fences are ahead of the last start, and its place in each view."""

    slot: int
    at: list[int]


@dataclass(frozen=True)
class Start:
    """A bucket and where it starts.

    Attributes:
        bucket: with its members; ``place``: of the node of this rank behind which it starts.
        slot: so many fences are ahead of it, on every rank.
        recorded: it starts behind the places where its sums were recorded.
    """

    bucket: FusedBucket
    place: int
    slot: int
    recorded: bool


class Order:
    """What all ranks decide of the sums of gradients.

    Args:
        gradients: of this rank; ``views``: of all ranks, this one's is ``mine``.

    Raises:
        DesyncError: ranks do not sum the same gradients; the message names the first.
    """

    def __init__(self, gradients: Gradients, mine: ProgramView, views: Mapping[int, ProgramView]) -> None:
        self.gradients, self.views = gradients, list(dict.fromkeys(views.values()))
        if any(v.facts() != self.views[0].facts() for v in self.views):
            check_alike({r: v.named() for r, v in views.items()})
        self.own = self.views.index(mine)
        count = range(len(mine.sums))
        # Of each sum the fences ahead of where its gradient is complete, and of where it was recorded.
        self.slots = [max(bisect_right(v.fences, v.sums[i].ready) for v in self.views) for i in count]
        self.recorded = [max(bisect_right(v.fences, v.sums[i].place) for v in self.views) for i in count]

    def sums(self) -> list[SentGradient]:
        """The reductions in the order of the backward, as the rank has them on which each is last."""
        last = [0] * len(self.slots)
        for view in self.views:
            found = sorted(range(len(last)), key=lambda i: (view.sums[i].ready, i))
            for n, i in enumerate(found):
                last[i] = max(last[i], n)
        made = []
        for i, r in enumerate(self.gradients.reductions):
            nbytes = max(v.sums[i].nbytes for v in self.views)
            made.append(replace(r, key=(self.slots[i], last[i], i), nbytes=nbytes))
        return sorted(made, key=lambda r: r.key)

    def fusible(self, r: SentGradient) -> bool:
        """Whether on every rank a reduction can share a buffer with others."""
        return all(v.sums[r.index].fusible for v in self.views)

    def born(self, r: SentGradient) -> float:
        """When a gradient is complete, on the rank where that is latest."""
        return max(v.sums[r.index].born for v in self.views)

    def fitting(self) -> Callable[[SentGradient], bool]:
        """A function that is given one reduction after the other, and says each time whether all of them may start
        together: on no rank one of the sums is used before the last of the gradients exists."""
        slot, ready, needed = 0, [-1] * len(self.views), [math.inf] * len(self.views)

        def fits(r: SentGradient) -> bool:
            nonlocal slot
            slot = max(slot, self.slots[r.index])
            fit = True
            for v, view in enumerate(self.views):
                own = view.sums[r.index]
                ready[v], needed[v] = max(ready[v], own.ready), min(needed[v], own.needed)
                fit &= max([ready[v], *view.fences[max(slot - 1, 0) : slot]]) < needed[v]
            return fit

        return fits

    def _next(self, where: _Where, members: Sequence[SentGradient], recorded: bool) -> _Where | None:
        """Where these start behind all others; None where some rank needs a sum before."""
        known = self.recorded if recorded else self.slots
        slot = max([where.slot, *(known[r.index] for r in members)])
        made = []
        for view, at in zip(self.views, where.at, strict=True):
            own = [view.sums[r.index] for r in members]
            place = max([at, *(s.place if recorded else s.ready for s in own), *view.fences[max(slot - 1, 0) : slot]])
            if place >= min(s.needed for s in own):
                return None
            made.append(place)
        return _Where(slot, made)

    # -- the schedule ---------------------------------------------------------------------------------

    def starts(self, buckets: Iterable[FusedBucket], overlap: bool) -> list[Start]:
        """Where buckets start, in order.

        Args:
            overlap: as soon as gradients exist; otherwise behind the places where they were recorded.
        """
        listed = sorted(buckets, key=lambda b: max(r.key for r in b.members))
        made = self._schedule(listed, overlap)
        if made is None:  # in the recorded order each sum is there in time, on all ranks
            alone = sorted((r for b in listed for r in b.members), key=lambda r: r.index)
            made = [(FusedBucket((r,), "ranks need the sums in other orders"), False) for r in alone]
        walked = self._walk(made)
        assert walked is not None
        return [
            Start(bucket, where.at[self.own], where.slot, recorded)
            for (bucket, recorded), where in zip(made, walked, strict=True)
        ]

    def _schedule(self, listed: Iterable[FusedBucket], overlap: bool) -> list[tuple[FusedBucket, bool]] | None:
        """Buckets in the order in which all ranks can start them, and whether behind the recorded places; None where no
        order is found."""
        made, end = list[tuple[FusedBucket, bool]](), _Where(0, [-1] * len(self.views))
        for bucket in listed:
            for recorded in (False,) if overlap else (True, False):
                behind = self._next(end, bucket.members, recorded)
                if behind is not None:
                    made.append((bucket, recorded))
                    end = behind
                    break
            else:
                # Some rank needs it before those have started: it starts ahead of some of them on all ranks.
                tried = ([*made[:i], (bucket, False), *made[i:]] for i in reversed(range(len(made))))
                walked = ((t, w) for t in tried if (w := self._walk(t)) is not None)
                found = next(walked, None)
                if found is None:
                    return None
                made, end = found[0], found[1][-1]
        return made

    def _walk(self, listed: Sequence[tuple[FusedBucket, bool]]) -> list[_Where] | None:
        made, where = list[_Where](), _Where(0, [-1] * len(self.views))
        for bucket, recorded in listed:
            behind = self._next(where, bucket.members, recorded)
            if behind is None:
                return None
            made.append(where := behind)
        return made

    def ends(self, starts: Sequence[Start]) -> list[int]:
        """Of each start the number of the first start or fence that lies behind its wait on all ranks, where waits run
        the rest of a collective: numbers go through the fences and starts of the program in their order."""
        walked = self._walk([(s.bucket, s.recorded) for s in starts])
        assert walked is not None
        made = [len(self.views[0].fences) + len(starts)] * len(starts)
        for v, view in enumerate(self.views):
            # A fence is at its place, and what starts behind a place ahead of what waits in front of the next.
            events = sorted([
                *((i + sum(w.slot <= i for w in walked), float(f)) for i, f in enumerate(view.fences)),
                *((w.slot + k, w.at[v] + 0.5) for k, w in enumerate(walked)),
            ])  # fmt: skip
            places = [place for _, place in events]
            for k, start in enumerate(starts):
                needed = min(view.sums[r.index].needed for r in start.bucket.members)
                made[k] = min(made[k], bisect_left(places, needed - 0.25))
        return made

    def event(self, number: int, starts: Sequence[Start]) -> tuple[int, int | None]:
        """What such a number is of: the place of a fence on this rank, or else the number of a start."""
        for k, start in enumerate(starts):
            if start.slot + k == number:
                return -1, k
        fences = [*self.views[self.own].fences, len(self.gradients.order) - 1]  # all ends with the program
        return fences[number - sum(s.slot + k < number for k, s in enumerate(starts))], None


__all__ = ["Order", "ProgramView", "Start", "SumView", "is_fence", "view_of"]
