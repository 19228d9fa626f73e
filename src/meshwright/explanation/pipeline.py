"""A pipeline along its schedule: who computes what when, what crosses between stages, what ranks of all stages hold.

All of it is read from one rank's program, which has the values and the layouts of every stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..program import Program
from ..program.ir.host import host_storages
from ..program.ir.inplace import storages
from ..program.ir.nodes import checked_value, value_of
from ..program.ir.program import Staging
from ..program.ir.schedules import Schedule, StagePart
from .memory import CATEGORIES, OF_INPUT, Memory, memory_of


@dataclass(frozen=True)
class RankOfStages:
    """What a rank along the axis of the stages holds, in bytes, without what a part makes for itself while it runs.

    Attributes:
        rank: its coordinate on that axis; ``stages``: those that it has.
        parameters, states: that it stores; what all stages have counts on each.
        gathered: at most of what is gathered, cast and sent of stored parameters, as long as it is kept.
        gradients: sums of gradients, and what they are reduced to behind the last backward.
        micro_batches: parts of micro-batches that it holds at most; ``activations``: what their backward needs of them.
    """

    rank: int
    stages: tuple[int, ...]
    parameters: int
    states: int
    gathered: int
    gradients: int
    micro_batches: int
    activations: int

    @property
    def total(self) -> int:
        """Of all these."""
        return self.parameters + self.states + self.gathered + self.gradients + self.activations


@dataclass(frozen=True)
class Sent:
    """What one stage sends to another one: how many values, and their bytes, for each micro-batch or once for all."""

    src: int
    dst: int
    once: bool
    values: int
    bytes: int

    def __str__(self) -> str:
        values = f"{self.values} value{'s' if self.values > 1 else ''}"
        often = "once for all micro-batches" if self.once else "for each micro-batch"
        return f"from stage {self.src} to stage {self.dst}: {values}, {self.bytes} bytes {often}"


@dataclass(frozen=True)
class PipelineAccount:
    """A step that is cut.

    Attributes:
        axis: of the mesh.
        here: this rank's coordinate on it.
        schedule: what each rank runs, in order.
        ranks: what each holds.
        sent: between all stages.
    """

    axis: str
    here: int
    schedule: Schedule
    ranks: tuple[RankOfStages, ...]
    sent: tuple[Sent, ...]

    @property
    def own(self) -> Iterator[Sent]:
        """What this rank's stages send or are sent."""
        homes = self.schedule.homes
        return (s for s in self.sent if self.here in (homes[s.src], homes[s.dst]))

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        order = self.schedule
        return {
            "axis": self.axis, "schedule": order.name, "stages": order.stages, "micro_batches": order.micro_batches,
            "bubble": order.bubble(), "orders": [[f"{a.part}{a.micro}.{a.stage}" for a in o] for o in order.orders],
            "ranks": [asdict(r) | {"total": r.total} for r in self.ranks], "sent": [asdict(s) for s in self.sent],
        }  # fmt: skip


def pipeline_of(program: Program) -> PipelineAccount | None:
    """That of a program; None where no rank has a stage of its own."""
    how = program.pipeline
    if how is None or not how.messages:
        return None
    ways: dict[tuple[bool, int, int], list[int]] = {}
    for m in how.messages:
        ways.setdefault((m.once, m.src, m.dst), []).append(m.nbytes)
    sent = tuple(Sent(src, dst, once, len(n), sum(n)) for (once, src, dst), n in sorted(ways.items()))
    here = program.mesh.coordinate(program.rank)[how.axis]
    return PipelineAccount(program.mesh.axes[how.axis], here, how.schedule, tuple(_ranks(program, how)), sent)


def _ranks(program: Program, how: Staging) -> Iterator[RankOfStages]:
    order, hosted = how.schedule, host_storages(program)
    kinds = {"param": "parameters", "state": "states"}
    stored = [
        (kinds[i.kind], i.spec, checked_value(n))
        for n, i in zip(program.placeholders, program.inputs, strict=True)
        if i.kind in kinds and i.spec is not None
    ]
    for rank in range(len(order.orders)):
        at = list(program.mesh.coordinate(program.rank))
        at[how.axis] = rank
        found = dict.fromkeys(kinds.values(), 0)
        for name, spec, value in stored:
            if value.storage not in hosted:
                found[name] += math.prod(spec.local_shape(tuple(at))) * value.dtype.itemsize
        own = tuple(s for s, home in enumerate(order.homes) if home == rank)
        yield RankOfStages(
            rank, own, **found, gathered=_gathered(how, rank),
            gradients=sum(how.sums.get(s, 0) for s in own), micro_batches=order.held(rank),
            activations=most_held(how, rank),
        )  # fmt: skip


def _gathered(how: Staging, rank: int) -> int:
    """The most that a rank has of what is made of stored parameters, and of those that other stages sent."""
    sizes: dict[int, int] = {}
    most = 0
    for place, a in enumerate(how.schedule.orders[rank]):
        sizes[a.stage] = how.gathered.get(a.stage, 0)
        most = max(most, sum(sizes.values()))
        if how.ends(rank, place):
            del sizes[a.stage]
    return most + sum(
        m.nbytes for m in how.messages if m.part is StagePart.SEND_PARAMS and how.schedule.homes[m.dst] == rank
    )


def most_held(how: Staging, rank: int) -> int:
    """The most bytes that a rank holds of micro-batches under way."""

    def change(part: StagePart, stage: int) -> int:
        ahead, between = how.left.get(stage, (0, 0))
        return {
            StagePart.FORWARD: ahead, StagePart.BACKWARD_INPUT: between, StagePart.BACKWARD: -ahead,
            StagePart.BACKWARD_WEIGHT: -ahead - between,
        }[part]  # fmt: skip

    return max(itertools.accumulate(change(a.part, a.stage) for a in how.schedule.orders[rank]), default=0)


# ---------------------------------------------------------------------------------------------- memory

Sizes = dict[tuple[str, str], tuple[str, int]]  # (kind, name) of an input of parts to what it is and its bytes


def memory_of_stages(program: Program, how: Staging) -> Memory:
    """What a rank of a pipeline holds: in each part that it runs, with what that part does not look at."""
    alone = {name: memory_of(part) for name, part in program.parts.items()}
    found = [_beside(alone[name], more) for name, more in dict.fromkeys(_UnderWay(program, how).walk())]
    highest = {c: max(m.highest.get(c, 0) for m in found) for c in CATEGORIES}
    return replace(max(found, key=lambda m: m.peak), highest=highest)


def _beside(memory: Memory, more: tuple[int, ...]) -> Memory:
    """What is held where there is more besides, by category, all the time."""

    def plus(held: Mapping[str, int]) -> dict[str, int]:
        return {c: held.get(c, 0) + n for c, n in zip(CATEGORIES, more, strict=True)}

    along = tuple(tuple(a + b for a, b in zip(held, more, strict=True)) for held in memory.along)
    return replace(
        memory, peak=memory.peak + sum(more), at_peak=plus(memory.at_peak), highest=plus(memory.highest), along=along
    )


class _UnderWay:
    """What a rank has at hand while it runs its parts, as :mod:`meshwright.program.run.pipeline` runs them."""

    def __init__(self, program: Program, how: Staging) -> None:
        self.program, self.how = program, how
        self.here = program.mesh.coordinate(program.rank)[how.axis]
        self.read = {name: {(i.kind, i.name) for i in part.inputs} for name, part in program.parts.items()}
        self.stays, self.batch = self._staying()
        self.reduced: Sizes = {}
        self.kept: dict[int, Sizes] = {}  # made of stored parameters, by stage
        self.came: dict[int, Sizes] = {}
        self.held: dict[tuple[int, int], dict[int, int]] = {}  # by stage and micro-batch, by storage

    def _staying(self) -> tuple[Sizes, int]:
        """What is there throughout the step; and the batches of the other micro-batches."""
        found: Sizes = {}
        hosted = host_storages(self.program)
        batch = 0
        for of in (self.program, *self.program.parts.values()):
            for n, i in zip(of.placeholders, of.inputs, strict=True):
                value = value_of(n)
                if value is None or value.storage in hosted or (of is not self.program and i.kind != "accumulator"):
                    continue
                if i.kind == "batch" and value.shape:
                    batch += value.nbytes * (self.how.schedule.micro_batches - 1)
                found[i.kind, i.name] = OF_INPUT.get(i.kind, "inputs"), value.nbytes
        return found, batch

    def walk(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The parts in order, each with what it does not look at, by category."""
        if "accumulate" in self.program.parts:
            yield self._now("accumulate", ())
        else:
            yield from self._actions()
        yield self._now("flush", ())

    def _actions(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        how, place = self.how, 0
        for a in how.actions(self.here):
            name, key = how.name(a.part, a.stage), (a.stage, a.micro)
            part = self.program.parts.get(name)
            if part is None:
                continue
            if a.part.once:
                yield self._now(name, key)
                self.reduced |= _made(part, "reduced", "gradients")
                if a.part is StagePart.REDUCE_GRAD:
                    self.came.pop(a.stage, None)
                continue
            g = self.program.parts.get(how.name(StagePart.UNSHARD, a.stage))
            if any(kind == "gathered" for kind, _ in self.read[name]) and a.stage not in self.kept:
                self.came[a.stage] = {
                    ("gathered", m.name): ("parameters", m.nbytes)
                    for m in how.messages
                    if m.part is StagePart.SEND_PARAMS and m.dst == a.stage
                }
                if g is not None:
                    yield self._now(how.name(StagePart.UNSHARD, a.stage), ())
                self.kept[a.stage] = {} if g is None else _made(g, "gathered", "parameters")
            yield self._now(name, key)
            if a.part.ends:
                self.held.pop(key, None)
            else:
                self.held.setdefault(key, {}).update(_left(part))
            if how.ends(self.here, place):
                self.kept.pop(a.stage, None)
            place += 1

    def _now(self, name: str, key: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        part = self.program.parts[name]
        seen = {s for n, i in zip(part.placeholders, part.inputs, strict=True) if i.kind == "held" for s in storages(n)}
        more = dict.fromkeys(CATEGORIES, 0)
        more["inputs"] = self.batch
        for sizes in (self.stays, self.reduced, *self.kept.values(), *self.came.values()):
            for one, (what, size) in sizes.items():
                more[what] += 0 if one in self.read[name] else size
        for of, left in self.held.items():
            more["activations"] += sum(n for s, n in left.items() if of != key or s not in seen)
        return name, tuple(more.values())


def _made(part: Program, kind: str, what: str) -> Sizes:
    pairs = zip(part.results, part.outputs, strict=True)
    return {(kind, o.name): (what, checked_value(n).size) for n, o in pairs if o.kind == kind}


def _left(part: Program) -> dict[int, int]:
    """Storages that a part leaves for the backward of its micro-batch, and their bytes."""
    pairs = zip(part.placeholders, part.inputs, strict=True)
    there = {s for n, i in pairs if i.kind not in ("edge", "held") for s in storages(n)}
    made = (checked_value(n) for n, o in zip(part.results, part.outputs, strict=True) if o.kind == "held")
    return {v.storage: v.nbytes for v in made if v.storage not in there}


__all__ = ["PipelineAccount", "RankOfStages", "Sent", "memory_of_stages", "most_held", "pipeline_of"]
