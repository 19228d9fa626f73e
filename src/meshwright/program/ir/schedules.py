"""Schedules of a pipeline as data: which rank runs which part of which micro-batch, in which order.

A micro-batch has two parts on each stage, **F**, its forward, and **B**, its backward; or three, with the backward cut
into **I**, what the gradient that is sent back needs, and **W**, the gradients of parameters, which nobody waits for.
1F1B is Narayanan et al.'s (PipeDream-Flush, 2021), the cut that of Qi et al. (Zero Bubble Pipeline Parallelism, 2024).

All is pure: a schedule is made, checked and timed before anything runs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...errors import ProgramError


@dataclass(frozen=True, order=True)
class Action:
    """One run of a part (``"F"``, ``"B"``, ``"I"`` or ``"W"``) of a stage, for a micro-batch."""

    part: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.part}{self.micro} of stage {self.stage}"


# The first sends on, the second back, the last frees.
PARTS = {"gpipe": "FB", "1f1b": "FB", "zero-bubble": "FIW", "looped": "FB", "v": "FIW"}
COST = {"F": 1, "B": 2, "I": 1, "W": 1}
LOOPED, V = "looped", "v"  # of which a rank has several stages


def schedule(name: str, stages: int, micro_batches: int, limit: int | None = None, chunks: int = 1) -> Schedule:
    """The order of each rank.

    One rule makes most of them: a rank that is free takes a backward that is ready (B or I), else an F as long as it
    holds fewer micro-batches than it may, else a W.  ``looped`` is the fixed order of Megatron-LM (Narayanan et al.,
    2021), which the rule does not reach; of ``v`` the stages go along the ranks and back (Qi et al., Pipeline
    Parallelism with Controllable Memory, 2024).

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
    """Micro-batches in groups, one for each rank: a group goes through one stage of the rank, then through the next."""
    groups = [range(k, min(k + ranks, micro_batches)) for k in range(0, micro_batches, ranks)]
    ahead = [Action("F", c * ranks + rank, k) for g in groups for c in range(chunks) for k in g]
    back = [Action("B", c * ranks + rank, k) for g in groups for c in reversed(range(chunks)) for k in g]
    # The first backward follows the last stage's forward of its group; the ranks in front are as much further.
    first = min(len(ahead), (chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank))
    yield from ahead[:first]
    for f, b in zip(ahead[first:], back, strict=False):
        yield from (f, b)
    yield from back[len(ahead) - first :]


def _greedy(name: str, homes: Sequence[int], most: Sequence[int], micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The orders that the rule gives where the parts take the time of ``COST``; of several stages of a rank, the later
    one's F first, and the earlier one's I."""
    parts, stages, now = PARTS[name], len(homes), 0
    own = [[s for s, home in enumerate(homes) if home == rank] for rank in range(len(most))]
    ended: dict[Action, int] = {}
    orders: list[list[Action]] = [[] for _ in most]
    counts = [dict.fromkeys(parts, 0) for _ in homes]
    free = [0] * len(most)
    while len(ended) < len(parts) * stages * micro_batches:
        taken = []
        for rank, mine in enumerate(own):
            left = [Action(p, s, counts[s][p]) for s in mine for p in parts if counts[s][p] < micro_batches]
            ready = [a for a in left if all(ended.get(b, now + 1) <= now for b in before(a, stages))]
            held = sum(counts[s]["F"] - counts[s][parts[-1]] for s in mine)
            # What comes last must have room, or nothing is ever freed.
            ready = [a for a in ready if a.part != "F" or held < most[rank] - (a.stage != mine[-1])]
            if name == "gpipe" and counts[rank]["F"] < micro_batches:
                ready = [a for a in ready if a.part == "F"]
            if ready and free[rank] <= now:
                taken.append(min(ready, key=lambda a: _RULE[a.part](a.stage)))
        for a in taken:
            ended[a] = free[homes[a.stage]] = now + COST[a.part]
            counts[a.stage][a.part] += 1
            orders[homes[a.stage]].append(a)
        now += 1
    return tuple(map(tuple, orders))


_RULE: dict[str, Callable[[int], tuple[int, int]]] = {
    "I": lambda s: (0, s), "B": lambda s: (0, s), "F": lambda s: (1, -s), "W": lambda s: (2, s),
}  # fmt: skip


def before(a: Action, stages: int) -> Iterator[Action]:
    """What an action waits for."""
    if a.part == "F" and a.stage:
        yield Action("F", a.stage - 1, a.micro)
    elif a.part in "BI":
        yield Action("F", a.stage, a.micro)
        if a.stage + 1 < stages:
            yield Action(a.part, a.stage + 1, a.micro)
    elif a.part == "W":
        yield Action("I", a.stage, a.micro)


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
        parts = "FB" if any(a.part == "B" for a in listed) else "FIW"
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
        return any(a.part == "W" for order in self.orders for a in order)

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

    def times(self, cost: Mapping[str, float] = COST) -> dict[Action, tuple[float, float]]:
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

    def bubble(self, cost: Mapping[str, float] = COST) -> float:
        """The share of the time in which ranks wait."""
        times = self.times(cost)
        end = max((t for _, t in times.values()), default=0.0)
        return 1 - sum(t - s for s, t in times.values()) / (end * len(self.orders)) if end else 0.0

    def held(self, rank: int) -> int:
        """The most micro-batches of which a rank holds what their backward needs."""
        return max(itertools.accumulate({"F": 1, "I": 0}.get(a.part, -1) for a in self.orders[rank]), default=0)

    def check_memory(self, limit: int) -> None:
        """Raises ProgramError where a rank would hold more micro-batches than ``limit``."""
        for rank in range(len(self.orders)):
            if self.held(rank) > limit:
                raise ProgramError(f"{self.name}: rank {rank} holds {self.held(rank)} micro-batches, more than {limit}")

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


__all__ = ["COST", "PARTS", "Action", "Schedule", "before", "schedule"]
