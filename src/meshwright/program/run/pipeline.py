"""Running a step that is cut: the actions of this rank, in the order of the schedule, and what goes between stages."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ... import collective
from ...collective import Group, Pending
from ...errors import DesyncError, ProgramError
from ...layout import Layout, Shard, Spec
from ...mesh import Mesh
from ...ranks import runtime
from ...tensor import DistTensor, wrap
from ..ir.nodes import Value, checked_value
from ..ir.program import Message, Staging
from ..ir.schedules import Action, StagePart
from .bind import BoundProgram, CompiledVariant

Tensor = torch.Tensor
_AHEAD = 2  # messages of a lane that are received before they are asked for


class Pipelined:
    """One step of several micro-batches, which may have programs of their own.

    To those who compare ranks it is as a :class:`~meshwright.program.run.bind.BoundProgram`: that of the update.

    Args:
        readies: the programs of each micro-batch.
        micros: the leaves of each.
    """

    def __init__(self, readies: Sequence[CompiledVariant], micros: Sequence[Sequence[Any]]) -> None:
        first = readies[0]
        assert first.program.pipeline is not None
        self.readies, self.micros, self.flush = readies, micros, first.parts["flush"]
        self.how: Staging = first.program.pipeline
        self.program, self.outside, self.inputs = self.flush.program, self.flush.outside, self.flush.inputs
        known = dict(zip(first.program.placeholders, first.program.inputs, strict=True))
        leaves, _ = first.how
        self.batch = [(0, leaves[i.name], i.spec, checked_value(n)) for n, i in known.items() if i.kind == "batch"]
        mesh = first.program.mesh
        self.here = mesh.coordinate(first.program.rank)[self.how.axis]
        self.lanes: dict[tuple[int, int], Group] = {}
        homes = self.how.schedule.homes
        for src, dst in sorted({(homes[m.src], homes[m.dst]) for m in self.how.messages}):
            lane = collective.lane(mesh, self.how.axis, src, dst) if src != dst else None
            if lane is not None:
                self.lanes[src, dst] = lane

    @property
    def seen(self) -> int:
        """As of the update."""
        return self.flush.seen

    @seen.setter
    def seen(self, number: int) -> None:
        self.flush.seen = number

    def writes(self) -> int:
        """As of the update."""
        return self.flush.writes()

    def fold(self, part: str) -> None:
        """Bring together what a part reads of sums to which micro-batches of other sizes added."""
        for ready in dict.fromkeys(self.readies[1:]):
            ready.fold(self.readies[0], part)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Run the step; the loss of the whole batch."""
        run = _Run(self)
        try:
            if "accumulate" in self.readies[0].parts:
                for i, (ready, micro) in enumerate(zip(self.readies, self.micros, strict=True)):
                    with run.drawing(i):
                        ready.parts["accumulate"].values(micro, {})
            else:
                run.every()
            self.fold("flush")
            return self.flush(leaves, run.reduced)
        except BaseException as error:
            for t in self.flush.carrier.sums.values():
                t.zero_()
            why = f"a step ended in the middle on rank {runtime.RT.rank} ({type(error).__name__})"
            collective.cut_off(list(self.lanes.values()), why)
            raise


class _Run:
    """One step under way."""

    def __init__(self, of: Pipelined) -> None:
        self.of = of
        self.seed = int(torch.randint(1 << 62, ())) if of.how.draws else None
        self.held: dict[tuple[int, int], dict[str, Tensor]] = {}  # by stage and micro-batch
        self.gathered: dict[int, dict[str, Tensor]] = {}  # by stage
        self.came: dict[int, dict[str, Tensor]] = {}  # parameters of other stages, by stage that uses them
        self.reduced: dict[str, Tensor] = {}
        self.sent: deque[Pending] = deque()
        self.due: dict[tuple[int, int], deque[tuple[Message, int]]] = {}  # lane to what is to come
        self.coming: dict[tuple[int, int], deque[tuple[tuple[str, int], Pending]]] = {}
        self.here: dict[tuple[str, int], Tensor] = {}
        for src, dst in of.lanes:
            if dst == of.here:
                along = set(of.how.sent(src, dst))
                listed = ((m, micro) for m, micro in self._sends(src) if m in along)
                self.due[src, dst], self.coming[src, dst] = deque(listed), deque()

    def _sends(self, rank: int) -> Iterator[tuple[Message, int]]:
        """What a rank sends, in order."""
        for a in self.of.how.actions(rank):
            yield from ((m, a.micro) for m in self._of(a) if m.src == a.stage)

    def _of(self, a: Action) -> list[Message]:
        """What goes and comes with an action."""
        return [m for m in self.of.how.messages if m.part is a.part.carrier and a.stage in (m.src, m.dst)]

    def every(self) -> None:
        """Run the actions of this rank."""
        how, here, place = self.of.how, self.of.here, 0
        for a in how.actions(here):
            if a.part.once:
                self._once(a)
                continue
            self._one(a)
            if how.ends(here, place):
                self.gathered.pop(a.stage, None)
            place += 1
        while self.sent:
            self.sent.popleft().wait()

    @contextmanager
    def drawing(self, micro: int) -> Iterator[None]:
        """Inside, a micro-batch draws what is its own, whichever stages of it a rank runs, and when."""
        if self.seed is None:
            yield
            return
        device = self.of.program.mesh.device
        devices = [] if device == "cpu" else [torch.get_device_module(device).current_device()]
        with torch.random.fork_rng(devices, device_type="cuda" if device == "cpu" else device):
            torch.manual_seed(self.seed + micro)
            yield

    def _once(self, a: Action) -> None:
        """Run a part that runs once for all micro-batches, where a stage has it."""
        name = self.of.how.name(a.part, a.stage)
        if a.part is StagePart.REDUCE_GRAD:
            self.came.pop(a.stage, None)
            self.of.fold(name)
        bound = self.of.readies[0].parts.get(name)
        if bound is None:
            return
        crossing = self._of(a)
        came = [m for m in crossing if m.dst == a.stage and a.part is StagePart.REDUCE_GRAD]
        made = bound.values([], {m.name: self._received(m, 0) for m in came})
        named = {(o.kind, o.name): t for o, t in zip(bound.program.outputs, made, strict=True)}
        self.reduced.update((name, t) for (kind, name), t in named.items() if kind == "reduced")
        for m in crossing:
            if m.src == a.stage:
                self._send(m, 0, named["edge", m.name])

    def _one(self, a: Action) -> None:
        bound = self.of.readies[a.micro].parts[self.of.how.name(a.part, a.stage)]
        given = self.held.setdefault((a.stage, a.micro), {})
        came = {m.name: self._received(m, a.micro) for m in self._of(a) if m.dst == a.stage}
        last = a.part.ends
        passed = {**(self.held.pop((a.stage, a.micro)) if last else given), **came, **self._gathered(bound, a)}
        with self.drawing(a.micro):
            made = bound.values(self.of.micros[a.micro], passed)
        outputs = list(zip(bound.program.outputs, made, strict=True))
        if not last:
            given.update((o.name, t) for o, t in outputs if o.kind == "held")
        named = {o.name: t for o, t in outputs if o.kind == "edge"}
        del made, outputs, given, came, passed
        for m in self._of(a):
            if m.src == a.stage:
                self._send(m, a.micro, named[m.name])
        while self.sent and self.sent[0].done():
            self.sent.popleft().wait()

    def _gathered(self, bound: BoundProgram, a: Action) -> dict[str, Tensor]:
        """What was made of stored parameters, of what a part of this stage reads: made if it is not there."""
        wanted = [given.name for _, given, _ in bound.passed if given.kind == "gathered"]
        if not wanted:
            return {}
        came, made = self.came.get(a.stage), self.gathered.setdefault(a.stage, {})
        if came is None:
            of = [m for m in self.of.how.messages if m.part is StagePart.SEND_PARAMS and m.dst == a.stage]
            came = self.came[a.stage] = {m.name: self._received(m, 0) for m in of}
        if any(name not in made and name not in came for name in wanted):
            g = self.of.readies[a.micro].parts[self.of.how.name(StagePart.UNSHARD, a.stage)]
            made.update(zip([o.name for o in g.program.outputs], g.values([], dict(came)), strict=True))
        return {name: came[name] if name in came else made[name] for name in wanted}

    def _send(self, m: Message, micro: int, t: Tensor) -> None:
        homes = self.of.how.schedule.homes
        lane = self.of.lanes.get((homes[m.src], homes[m.dst]))
        if lane is None:  # to another stage of this rank
            self.here[m.name, micro] = t
        else:
            self.sent.append(collective.send(t, self._called(m, micro), lane))

    def _called(self, m: Message, micro: int) -> str:
        """A message as both ends know it: of another step it is another one, which may have ended in the middle."""
        return f"{m.name} of {micro}, update {runtime.RT.updates}"

    def _received(self, m: Message, micro: int) -> Tensor:
        homes = self.of.how.schedule.homes
        lane, key = (homes[m.src], homes[m.dst]), (m.name, micro)
        while key not in self.here:
            self._post(lane)
            of, pending = self.coming[lane].popleft()
            self.here[of] = pending.wait()
        if lane in self.coming:
            self._post(lane)
        return self.here.pop(key)

    def _post(self, lane: tuple[int, int]) -> None:
        """Start to receive what comes next."""
        coming, due = self.coming[lane], self.due[lane]
        while due and len(coming) < _AHEAD:
            m, micro = due.popleft()
            value = self._value(m, micro)
            called = self._called(m, micro)
            pending = collective.receive(called, value.shape, value.dtype, self.of.lanes[lane])
            coming.append(((m.name, micro), pending))

    def _value(self, m: Message, micro: int) -> Value:
        bounds = self.of.readies[micro].parts
        for part in m.part.readers:
            name = self.of.how.name(part, m.dst)
            for _, given, value in bounds[name].passed if name in bounds else ():
                if given.name == m.name:
                    return value
        raise ProgramError(f"{m.name} goes to no part of stage {m.dst}")


# ---------------------------------------------------------------------------------------------- micro-batches


def check_rows(leaves: Sequence[Any], mesh: Mesh, axis: int) -> None:
    """Compare the rows of a batch between all ranks, before the first of them captures or sends.

    Raises:
        DesyncError: on every rank, where some have batches of other sizes: stages would wait for each other forever.
    """
    own = [x.shape[0] if isinstance(x, Tensor) and x.ndim else -1 for x in leaves][: collective.WORDS]
    everyone = collective.compare_progress(own, collective.group(mesh), "a step of a pipeline")()
    for rank, other in zip(mesh.ranks, everyone, strict=True):
        for i, (n, m) in enumerate(zip(everyone[0], other, strict=False)):
            if n != m:
                a, b = (f"rank {r} (stage rank {mesh.coordinate(r)[axis]})" for r in (mesh.ranks[0], rank))
                raise DesyncError(
                    f"pipeline: batch tensor {i} has {n} rows on {a} and {m} rows on {b}. Pass the same batch on every "
                    "rank of a step."
                )


def cut_batch(leaves: Sequence[Any], micro_batches: int) -> list[list[Any]]:
    """The leaves of each micro-batch: the rows of a batch, as evenly as they can be cut.

    Plain tensors hold the global batch, and are cut in order; of a DistTensor each rank cuts its own rows.

    Raises:
        ProgramError: fewer rows than micro-batches, tensors with other numbers of rows, or parts that have no layout.
    """
    rows = {i: x.shape[0] for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.ndim}
    if not rows:
        raise ProgramError("a pipeline cuts the rows of a batch, its first dim, and no tensor of the batch has rows")
    first = next(iter(rows))
    for i, n in rows.items():
        if n != rows[first]:
            raise ProgramError(
                f"a pipeline cuts the rows of a batch, its first dim: batch tensor {first} has {rows[first]} of them, "
                f"tensor {i} has {n}: give every tensor of the batch one row for each example"
            )
    if rows[first] < micro_batches:
        raise ProgramError(
            f"a batch of {rows[first]} rows cannot be cut into {micro_batches} micro-batches, of which each has at "
            "least one: give more rows, or fewer micro-batches"
        )
    parts = [_cut(x, micro_batches) if i in rows else [x] * micro_batches for i, x in enumerate(leaves)]
    return [list(one) for one in zip(*parts, strict=True)]


def _cut(x: Tensor, n: int) -> list[Tensor]:
    if not isinstance(x, DistTensor):
        return list(x.tensor_split(n))
    return [wrap(t, spec) for t, spec in zip(x.to_local().tensor_split(n), _cut_specs(x.spec, n), strict=True)]


@functools.lru_cache(maxsize=256)
def _cut_specs(spec: Spec, n: int) -> list[Spec]:
    """The specs of micro-batches, for which each rank cuts its own rows."""
    mesh, placements = spec.mesh, spec.layout.placements
    held = [spec.local_shape(mesh.coordinate(rank))[0] for rank in mesh.ranks]
    if max(held) < n:
        raise ProgramError(
            f"a batch of {spec.shape[0]} rows, of which each rank has at most {max(held)}, cannot be cut into {n} "
            "micro-batches, of which each has at least one: give more rows, or fewer micro-batches"
        )
    whole = [size for size, p in zip(mesh.sizes, placements, strict=True) if not (isinstance(p, Shard) and p.dim == 0)]
    cuts = [[rows // n + (i < rows % n) for rows in held] for i in range(n)]
    made = [Spec((sum(cut) // math.prod(whole), *spec.shape[1:]), spec.dtype, Layout(mesh, placements)) for cut in cuts]
    for part, cut in zip(made, cuts, strict=True):
        if [part.local_shape(mesh.coordinate(rank))[0] for rank in mesh.ranks] != cut:
            raise ProgramError(
                f"a batch tensor of shape {tuple(spec.shape)} has the layout {spec.layout!r}, and {n} micro-batches "
                f"cut from its ranks' rows {held} would have {cut}, which is no layout of {part.shape[0]} rows: give "
                "a batch that its ranks divide, or plain tensors with the global values"
            )
    return made


__all__ = ["Pipelined", "check_rows", "cut_batch"]
