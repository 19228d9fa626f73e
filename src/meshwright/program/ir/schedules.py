"""Schedules of a pipeline as data: which rank runs which part of which micro-batch, in which order.

A micro-batch has two parts on each stage, **F**, its forward, and **B**, its backward; or three, with the backward cut
into **I**, what the gradient that is sent back needs, and **W**, the gradients of parameters, which nobody waits for.
1F1B is Narayanan et al.'s (PipeDream-Flush, 2021), the cut that of Qi et al. (Zero Bubble Pipeline Parallelism, 2024).

All is pure: a schedule is made, checked and timed before anything runs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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


PARTS = {"gpipe": "FB", "1f1b": "FB", "zero-bubble": "FIW"}  # the first sends on, the second back, the last frees
COST = {"F": 1, "B": 2, "I": 1, "W": 1}


def schedule(name: str, stages: int, micro_batches: int, limit: int | None = None) -> Schedule:
    """The order of each rank, one stage each.

    One rule makes all of them: a rank that is free takes a backward that is ready (B or I), else an F as long as it
    holds fewer micro-batches than it may, else a W.

    Args:
        name: ``"gpipe"`` (all forwards first), ``"1f1b"`` or ``"zero-bubble"``.
        limit: of how many micro-batches a rank may hold what their backward needs; None: what the schedule is made for,
            all, one for each stage from there on, or 2 stages - 1.

    Raises:
        ProgramError: no such schedule, no stages or micro-batches, a limit that it cannot keep.
    """
    if name not in PARTS:
        raise ProgramError(f"there is no schedule {name!r}: take one of {', '.join(PARTS)}")
    if stages < 1 or micro_batches < 1 or (limit is not None and limit < 1):
        raise ProgramError(
            f"{name}: {stages} stages, {micro_batches} micro-batches, limit {limit}: take numbers above 0"
        )
    if name == "gpipe" and limit is not None and limit < micro_batches:
        raise ProgramError(f"gpipe holds all {micro_batches} micro-batches, more than {limit}: take '1f1b'")
    own = {"gpipe": [micro_batches] * stages, "1f1b": [stages - rank for rank in range(stages)]}
    most = own.get(name, [2 * stages - 1] * stages)
    return Schedule(_greedy(name, [min(n, limit or n) for n in most], micro_batches), name)


def _greedy(name: str, most: Sequence[int], micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The orders that the rule gives where the parts take the time of ``COST``."""
    parts, stages, now = PARTS[name], len(most), 0
    ended: dict[Action, int] = {}
    orders: list[list[Action]] = [[] for _ in most]
    counts = [dict.fromkeys(parts, 0) for _ in most]
    free = [0] * stages
    while len(ended) < len(parts) * stages * micro_batches:
        taken = []
        for rank, n in enumerate(counts):
            left = {p: Action(p, rank, k) for p, k in n.items() if k < micro_batches}
            ready = {p for p, a in left.items() if all(ended.get(b, now + 1) <= now for b in before(a, stages))}
            if n["F"] - n[parts[-1]] >= most[rank]:
                ready.discard("F")
            if name == "gpipe" and n["F"] < micro_batches:
                ready.discard("B")
            part = next((p for p in (parts[1], "F", parts[-1]) if p in ready and free[rank] <= now), None)
            if part is not None:
                taken.append(left[part])
        for a in taken:
            ended[a] = free[a.stage] = now + COST[a.part]
            counts[a.stage][a.part] += 1
            orders[a.stage].append(a)
        now += 1
    return tuple(map(tuple, orders))


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
        """A line per rank; a column per unit of time: the part and its micro-batch, or dots."""
        times = self.times()
        width = 2 + len(str(self.micro_batches - 1))
        lines = []
        for rank, order in enumerate(self.orders):
            row = {int(times[a][0]) + i: f"{a.part}{a.micro}" for a in order for i in range(COST[a.part])}
            last = max(int(t) for _, t in times.values())
            cells = "".join(row.get(t, ".").ljust(width) for t in range(last)).rstrip()
            lines.append(f"rank {rank}  {cells}")
        return "\n".join((*lines, f"bubble {self.bubble():.1%}"))


__all__ = ["COST", "PARTS", "Action", "Schedule", "before", "schedule"]
