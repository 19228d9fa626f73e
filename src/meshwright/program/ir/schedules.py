"""Schedules of a pipeline as data: which rank runs which part of which micro-batch, in which order.

A micro-batch has two parts on each stage, its forward and its backward; or three, with the backward cut into what the
gradient that is sent back needs, and the gradients of parameters, which nobody waits for (:class:`StagePart`).
1F1B is Narayanan et al.'s (PipeDream-Flush, 2021), the cut that of Qi et al. (Zero Bubble Pipeline Parallelism, 2024).

All is pure: a schedule is made, checked and timed before anything runs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

from ... import drawing
from ...errors import ProgramError


class StagePart(StrEnum):
    """What a stage of a pipeline runs, by PyTorch's words; the letters are those of schedules on paper.

    Attributes:
        FORWARD: of a micro-batch.
        BACKWARD: of a micro-batch, all of it.
        BACKWARD_INPUT: what the gradient that is sent back needs.
        BACKWARD_WEIGHT: the gradients of the stage's parameters.
        SEND_PARAMS: once for all micro-batches: parameters to other stages that use them.
        UNSHARD: gathers and casts the parameters that the stage uses.
        REDUCE_GRAD: once for all micro-batches: sums gradients over ranks.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_PARAMS = "P"
    UNSHARD = "G"
    REDUCE_GRAD = "R"

    __hash__ = str.__hash__  # a letter finds its part in a dict, and the other way round

    @property
    def once(self) -> bool:
        """Whether it runs once for all micro-batches."""
        return self in (StagePart.SEND_PARAMS, StagePart.REDUCE_GRAD)

    @property
    def ends(self) -> bool:
        """Whether nothing of its micro-batch is left to the stage behind it."""
        return self in (StagePart.BACKWARD, StagePart.BACKWARD_WEIGHT)

    @property
    def carrier(self) -> StagePart:
        """The part whose messages come and go with it: a gradient goes back as soon as there is one."""
        return StagePart.BACKWARD if self is StagePart.BACKWARD_INPUT else self

    @property
    def readers(self) -> tuple[StagePart, ...]:
        """Parts that may read what comes with it."""
        return _READERS.get(self, _BACKWARDS)


_BACKWARDS = (StagePart.BACKWARD, StagePart.BACKWARD_INPUT, StagePart.BACKWARD_WEIGHT)
_READERS = {
    StagePart.FORWARD: (StagePart.FORWARD,),
    StagePart.SEND_PARAMS: (StagePart.UNSHARD, StagePart.FORWARD, *_BACKWARDS),
    StagePart.REDUCE_GRAD: (StagePart.REDUCE_GRAD,),
}


@dataclass(frozen=True, order=True)
class Action:
    """One run of a part of a stage, for a micro-batch; the part may be said by its letter.

    Raises:
        ProgramError: there is no such part.
    """

    part: StagePart
    stage: int
    micro: int

    def __post_init__(self) -> None:
        if self.part not in list(StagePart):
            raise ProgramError(f"an action of part {self.part!r}: one of {', '.join(StagePart)} was expected")
        object.__setattr__(self, "part", StagePart(self.part))

    def __str__(self) -> str:
        return f"{self.part}{self.micro} of stage {self.stage}"


# The first sends on, the second back, the last frees.
_WHOLE = (StagePart.FORWARD, StagePart.BACKWARD)
_SPLIT = (StagePart.FORWARD, StagePart.BACKWARD_INPUT, StagePart.BACKWARD_WEIGHT)
PARTS = {"gpipe": _WHOLE, "1f1b": _WHOLE, "zero-bubble": _SPLIT, "looped": _WHOLE, "v": _SPLIT}
COST = {StagePart.FORWARD: 1, StagePart.BACKWARD: 2, StagePart.BACKWARD_INPUT: 1, StagePart.BACKWARD_WEIGHT: 1}
LOOPED, V = "looped", "v"  # of which a rank has several stages


@lru_cache(maxsize=256)
def schedule(name: str, stages: int, micro_batches: int, limit: int | None = None, chunks: int = 1) -> Schedule:
    """The order of each rank.

    A rule makes most of them: a rank that is free takes a backward that is ready (B or I), else an F as long as it
    holds fewer micro-batches than it may, else a W.  ``looped`` is the fixed order of Megatron-LM (Narayanan et al.,
    2021), which no rule reaches; of ``v`` the stages go along the ranks and back (Qi et al., Pipeline Parallelism with
    Controllable Memory, 2024), and of several rules the one that ends first is taken.

    Args:
        name: ``"gpipe"`` (all forwards first), ``"1f1b"``, ``"zero-bubble"``, ``"looped"`` or ``"v"``.
        stages: how many there are, on all ranks together.
        limit: of how many micro-batches a rank may hold what their backward needs, each of its stages by itself; None:
            what the schedule is made for, all, one for each stage from there on, 2 stages - 1, or of ``v`` 2 ranks + 1.
        chunks: how many stages a rank has: 1, of ``looped`` 2 or more, of ``v`` 2.

    Raises:
        ProgramError: no such schedule, no stages or micro-batches, a limit that it cannot keep.
    """
    if name not in PARTS:
        raise ProgramError(f"there is no schedule {name!r}: take one of {', '.join(PARTS)}")
    if stages < 1 or micro_batches < 1 or (limit is not None and limit < 1):
        raise ProgramError(
            f"{name}: {stages} stages, {micro_batches} micro-batches, limit {limit}: take numbers above 0"
        )
    if chunks < 1 or stages % chunks or (chunks == 1) is (name in (LOOPED, V)) or (name == V and chunks > 2):
        fits = {V: "2, of an even number of stages", LOOPED: "2 or more, which divide the stages"}.get(name, "1")
        raise ProgramError(f"{name}: {chunks} of {stages} stages on a rank: {fits} was expected")
    if name == "gpipe" and limit is not None and limit < micro_batches:
        raise ProgramError(f"gpipe holds all {micro_batches} micro-batches, more than {limit}: take '1f1b'")
    homes, ranks = homes_of(name, stages, chunks), stages // chunks
    if name == LOOPED:
        made = Schedule(tuple(tuple(_looped(rank, ranks, micro_batches, chunks)) for rank in range(ranks)), name)
        if limit is not None:
            made.check_memory(limit)
        return made
    own = {
        "gpipe": [micro_batches] * ranks,
        "1f1b": [ranks - rank for rank in range(ranks)],
        V: [2 * ranks + 1] * ranks,
    }
    most = own.get(name, [2 * ranks - 1] * ranks)
    if name == V and limit is not None and limit < 2:
        raise ProgramError(f"v: a rank holds a micro-batch of each of its 2 stages, more than {limit}")
    return Schedule(_greedy(name, homes, [min(n, limit or n) for n in most], micro_batches), name)


def homes_of(name: str, stages: int, chunks: int) -> tuple[int, ...]:
    """The rank of each stage: round and round, or of ``v`` there and back."""
    ranks = stages // chunks
    return tuple(ranks - 1 - s % ranks if name == V and s // ranks % 2 else s % ranks for s in range(stages))


def _looped(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """Micro-batches in groups, at least one for each rank: a group goes through one stage of the rank, then through the
    next.  With fewer than that in the last group ranks would wait for each other, so what is left is shared out."""
    count = max(1, micro_batches // ranks)
    cuts = [-(-i * micro_batches // count) for i in range(count + 1)]
    groups = [range(a, b) for a, b in itertools.pairwise(cuts)]
    ahead = [Action(StagePart.FORWARD, c * ranks + rank, k) for g in groups for c in range(chunks) for k in g]
    back = [Action(StagePart.BACKWARD, c * ranks + rank, k) for g in groups for c in reversed(range(chunks)) for k in g]
    # The first backward follows the last stage's forward of its group; the ranks in front are as much further.
    first = min(len(ahead), (chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank))
    yield from ahead[:first]
    for f, b in zip(ahead[first:], back, strict=False):
        yield from (f, b)
    yield from back[len(ahead) - first :]


# Of a rule, what a free rank takes first: parts, of the first or of the last of its stages.  No single one reaches the
# formula of ``v`` for all numbers of ranks and micro-batches; one of these does.
_RULES = {
    "gpipe": ("F0 B0",),
    "1f1b": ("B0 F0",),
    "zero-bubble": ("I0 F0 W0",),
    V: (
        "I0 F1 F0 I1 W0 W1", "I0 F1 F0 W0 I1 W1", "I0 I1 W0 F1 F0 W1", "I0 F1 I1 W0 F0 W1", "I0 I1 F1 F0 W0 W1",
        "I0 F1 I1 F0 W0 W1", "I0 F1 W0 I1 W1 F0",
    ),
}  # fmt: skip


def _greedy(name: str, homes: Sequence[int], most: Sequence[int], micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The orders that a rule gives where the parts take the time of ``COST``: of several rules those that end first."""
    ranks = len(most)
    work = micro_batches * len(homes) // ranks * sum(COST[p] for p in PARTS[name])
    found: tuple[int, list[list[Action]]] | None = None
    for rule in _RULES[name]:
        made = _by_rule(rule.split(), PARTS[name], homes, most, micro_batches)
        found = made if found is None or made[0] < found[0] else found
        if found[0] <= work + ranks - 1:  # the last rank begins as late
            break
    assert found is not None
    return tuple(map(tuple, found[1]))


def _by_rule(
    rule: Sequence[str], parts: Sequence[StagePart], homes: Sequence[int], most: Sequence[int], micro_batches: int
) -> tuple[int, list[list[Action]]]:
    """When all is done, and the orders."""
    stages, now, left = len(homes), 0, len(parts) * len(homes) * micro_batches
    own = [[s for s, home in enumerate(homes) if home == rank] for rank in range(len(most))]
    wanted = [[(StagePart(r[0]), mine[int(r[1])]) for r in rule] for mine in own]
    ends: dict[StagePart, list[list[int]]] = {p: [[] for _ in homes] for p in parts}
    orders: list[list[Action]] = [[] for _ in most]
    free = [0] * len(most)

    waits = {(p, s): list(_waits(p, s, stages)) for p in parts for s in range(stages)}

    def ready(part: StagePart, stage: int, rank: int) -> bool:
        k = len(ends[part][stage])
        if k == micro_batches:
            return False
        if part is StagePart.FORWARD:
            held = sum(len(ends[part][s]) - len(ends[parts[-1]][s]) for s in own[rank])
            # What comes last must have room, or nothing is ever freed.
            if held >= most[rank] - (stage != own[rank][-1]):
                return False
        return all(len(done := ends[p][s]) > k and done[k] <= now for p, s in waits[part, stage])

    while left:
        ranks = [r for r in range(len(own)) if free[r] <= now]
        taken = [next((a for a in wanted[r] if ready(*a, r)), None) for r in ranks]
        for rank, one in zip(ranks, taken, strict=True):
            if one is not None:
                part, stage = one
                free[rank] = now + COST[part]
                orders[rank].append(Action(part, stage, len(ends[part][stage])))
                ends[part][stage].append(free[rank])
                left -= 1
        now += 1
    return max(free), orders


def before(a: Action, stages: int) -> Iterator[Action]:
    """What an action waits for."""
    return (Action(part, stage, a.micro) for part, stage in _waits(a.part, a.stage, stages))


def _waits(part: StagePart, stage: int, stages: int) -> Iterator[tuple[StagePart, int]]:
    """For which parts of which stages a part waits, of the same micro-batch."""
    if part is StagePart.FORWARD:
        if stage:
            yield part, stage - 1
    elif part is StagePart.BACKWARD_WEIGHT:
        yield StagePart.BACKWARD_INPUT, stage
    else:
        yield StagePart.FORWARD, stage
        if stage + 1 < stages:
            yield part, stage + 1


@dataclass(frozen=True)
class Schedule:
    """What each rank runs, in order; of a user's own too.

    Attributes:
        orders: the actions of each rank.
        name: for people.

    Raises:
        ProgramError: an action that is missing, or there twice; ranks that wait for each other in a circle.
    """

    orders: tuple[tuple[Action, ...], ...]
    name: str = "a schedule"

    def __post_init__(self) -> None:
        listed = Counter(a for order in self.orders for a in order)
        parts = _WHOLE if any(a.part is StagePart.BACKWARD for a in listed) else _SPLIT
        wanted = {Action(p, s, k) for p in parts for s in range(self.stages) for k in range(self.micro_batches)}
        if missing := sorted(wanted - set(listed)):
            raise ProgramError(f"{self.name} has no {missing[0]}")
        if wrong := sorted({a for a, n in listed.items() if n > 1} | (set(listed) - wanted)):
            raise ProgramError(f"{self.name} has {wrong[0]} {'twice' if wrong[0] in wanted else 'beside B'}")
        for rank, order in enumerate(self.orders):
            if other := next((a for a in order if self.homes[a.stage] != rank), None):
                raise ProgramError(
                    f"{self.name} has {other} on rank {rank}, and other parts of that stage on rank "
                    f"{self.homes[other.stage]}: a stage is on one rank"
                )
        self.times()

    @cached_property
    def split(self) -> bool:
        """Whether the backward is cut into I and W."""
        return any(a.part is StagePart.BACKWARD_WEIGHT for order in self.orders for a in order)

    @cached_property
    def stages(self) -> int:
        """How many there are."""
        return 1 + max((a.stage for order in self.orders for a in order), default=-1)

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The rank of each stage."""
        at = {a.stage: rank for rank, order in enumerate(self.orders) for a in order}
        return tuple(at[s] for s in range(self.stages))

    @cached_property
    def micro_batches(self) -> int:
        """How many there are."""
        return 1 + max((a.micro for order in self.orders for a in order), default=-1)

    def times(self, cost: Mapping[Any, float] = COST) -> dict[Action, tuple[float, float]]:
        """When each action begins and ends.

        Args:
            cost: seconds of each part.  Sending takes none.
        """
        made: dict[Action, tuple[float, float]] = {}
        free, at = [0.0] * len(self.orders), [0] * len(self.orders)
        while len(made) < sum(map(len, self.orders)):
            moved = False
            for rank, order in enumerate(self.orders):
                while at[rank] < len(order) and all(b in made for b in before(order[at[rank]], self.stages)):
                    a = order[at[rank]]
                    start = max([free[rank], *(made[b][1] for b in before(a, self.stages))])
                    made[a] = start, start + cost[a.part]
                    free[rank], at[rank], moved = made[a][1], at[rank] + 1, True
            if not moved:
                raise ProgramError(f"{self.name} never ends: {self._circle(made, at)}")
        return made

    def _circle(self, made: Mapping[Action, tuple[float, float]], at: Sequence[int]) -> str:
        rank_of = {a: rank for rank, order in enumerate(self.orders) for a in order}
        waits = []
        for rank, order in enumerate(self.orders):
            if at[rank] < len(order):
                b = next(b for b in before(order[at[rank]], self.stages) if b not in made)
                waits.append(f"rank {rank} waits in {order[at[rank]]} for {b}, which rank {rank_of[b]} runs later")
        return "; ".join(waits)

    def bubble(self, cost: Mapping[Any, float] = COST) -> float:
        """The share of the time in which ranks wait."""
        times = self.times(cost)
        end = max((t for _, t in times.values()), default=0.0)
        return 1 - sum(t - s for s, t in times.values()) / (end * len(self.orders)) if end else 0.0

    def held(self, rank: int) -> int:
        """The most micro-batches of which a rank holds what their backward needs."""
        return max(
            itertools.accumulate((a.part is StagePart.FORWARD) - a.part.ends for a in self.orders[rank]), default=0
        )

    def check_memory(self, limit: int) -> None:
        """Raises ProgramError where a rank would hold more micro-batches than ``limit``."""
        for rank in range(len(self.orders)):
            if self.held(rank) > limit:
                raise ProgramError(f"{self.name}: rank {rank} holds {self.held(rank)} micro-batches, more than {limit}")

    def _repr_html_(self) -> str:
        """Bars along time, for notebooks: a row for each rank, its color by the part."""
        times, colors = self.times(), {StagePart.FORWARD: 0, StagePart.BACKWARD_WEIGHT: 2}
        rows = [
            (f"rank {rank}", [(f"{a.part}{a.micro}", *times[a], drawing.tint(colors.get(a.part, 1))) for a in order])
            for rank, order in enumerate(self.orders)
        ]
        end = max((t for _, t in times.values()), default=1.0)
        return drawing.heading(f"{self.name}: bubble {self.bubble():.1%}") + drawing.bars(rows, end)

    def __str__(self) -> str:
        """A line per rank; a column per unit of time: the part and its micro-batch (and stage, of several), or dots."""
        times = self.times()
        several = self.stages > len(self.orders)
        width = 2 + len(str(self.micro_batches - 1)) + (1 + len(str(self.stages - 1))) * several
        lines = []
        for rank, order in enumerate(self.orders):
            marks = {a: f"{a.part}{a.micro}" + (f".{a.stage}" if several else "") for a in order}
            row = {int(times[a][0]) + i: mark for a, mark in marks.items() for i in range(COST[a.part])}
            last = max(int(t) for _, t in times.values())
            cells = "".join(row.get(t, ".").ljust(width) for t in range(last)).rstrip()
            lines.append(f"rank {rank}  {cells}")
        return "\n".join((*lines, f"bubble {self.bubble():.1%}"))


__all__ = ["COST", "PARTS", "Action", "Schedule", "StagePart", "before", "schedule"]
