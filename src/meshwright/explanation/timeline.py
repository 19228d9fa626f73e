"""When a rank computes and sends along a step, as predicted for a machine: compute, the wire of each axis, what waits.

A rank computes in the order of its program.  A collective takes the wire of its axes.  Where it runs at once the rank
waits for it; where it is only started, the rank waits at the op that needs it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from ..collective import COLLECTIVES, bytes_of
from ..collective.graph import STARTS, WAIT_OP
from ..machines import Hardware, Network
from ..passes.buckets import seconds_of
from ..program import Program
from ..program.ir.nodes import checked_value, info_of
from ..program.ir.program import Staging

COMPUTE = "compute"
_CELLS = 60  # of a lane as text


@dataclass(frozen=True)
class Span:
    """What a lane does for some time.

    Attributes:
        lane: ``"compute"``, or axes (``"dp"``, ``"dp,tp"``).
        role: part of the step; ``what``: the kind of a collective.
        start, end: seconds from the begin of the step.
    """

    lane: str
    role: str
    what: str
    start: float
    end: float


@dataclass
class Timeline:
    """A step of one rank in time, as predicted.

    Attributes:
        hardware: name of the machine.
        seconds: of the step; ``compute``: of its ops.
        exposed: seconds that the rank waits for collectives; ``bubble``: for other stages.
        wires: axes to seconds that their collectives take.
        spans: in the order in which they begin; none of a pipeline, whose schedule is drawn.
    """

    hardware: str
    seconds: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    bubble: float = 0.0
    wires: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, without the spans."""
        return {
            "hardware": self.hardware, "seconds": self.seconds, "compute": self.compute, "exposed": self.exposed,
            "bubble": self.bubble, "wires": dict(self.wires),
        }  # fmt: skip

    def lanes(self) -> dict[str, float]:
        """Lane to the seconds that it is busy."""
        return {COMPUTE: self.compute, **self.wires}

    def drawn(self, lane: str) -> str:
        """A lane as text: a full cell where it is busy for most of its time, a light one for a part."""
        busy = [0.0] * _CELLS
        each = self.seconds / _CELLS or 1.0
        for span in self.spans:
            if span.lane == lane:
                for i in range(int(span.start / each), min(_CELLS, int(span.end / each) + 1)):
                    busy[i] += max(0.0, min(span.end, (i + 1) * each) - max(span.start, i * each))
        return "".join("█" if b > each / 2 else "░" if b > 0 else " " for b in busy) if self.spans else ""

    def add(self, span: Span) -> None:
        """Add a span; ops that follow each other in one part of the step are one."""
        last = self.spans[-1] if self.spans else span
        if span.lane == COMPUTE == last.lane and span.role == last.role and span.start == last.end:
            span = Span(span.lane, span.role, span.what, self.spans.pop().start, span.end)
        self.spans.append(span)


def timeline_of(program: Program, hardware: Hardware) -> Timeline:
    """The step of the program's rank in time."""
    how = program.pipeline
    if how is None:
        return _line(program, hardware)
    here, made = program.mesh.coordinate(program.rank)[how.axis], Timeline(hardware.name)
    wires: defaultdict[str, float] = defaultdict(float)
    for name, part in program.parts.items():
        times = how.times(name, here)
        line = _line(part, hardware) if times else Timeline("")
        made.compute, made.exposed = made.compute + times * line.compute, made.exposed + times * line.exposed
        for axes, seconds in line.wires.items():
            wires[axes] += times * seconds
    made.wires = dict(wires)
    made.bubble = idle_of(how, here) * (made.compute + made.exposed)
    made.seconds = made.compute + made.exposed + made.bubble
    return made


def idle_of(how: Staging, rank: int) -> float:
    """The time that a rank of a pipeline waits for others, as a part of the time that it works."""
    times = how.schedule.times()
    mine = sum(times[a][1] - times[a][0] for a in how.schedule.orders[rank])
    return max(end for _, end in times.values()) / mine - 1.0 if mine else 0.0


def network_of(program: Program, hardware: Hardware) -> Network:
    """The machine for the dtype in which a program computes mostly."""
    dtypes = Counter(v.dtype for n in program.graph.nodes for v in info_of(n).values)
    dtype = max((d for d in dtypes if d.is_floating_point), key=dtypes.__getitem__, default=torch.float32)
    return hardware.network(1, 1, str(dtype).removeprefix("torch."))


def collectives_of(program: Program, hardware: Hardware) -> Iterator[tuple[fx.Node, str, int, float]]:
    """Each collective with its axes, the bytes that its rank sends, and seconds."""
    mesh = program.mesh
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in COLLECTIVES:
            x, *options = node.args
            given, axes = checked_value(x), str(options[-2])
            nbytes = bytes_of(node.target, given.shape, given.dtype, options)
            numbers = [mesh.axis_index(a) for a in axes.split(",")]
            yield node, axes, int(nbytes), hardware.seconds(mesh.sizes, numbers, nbytes)


def _line(program: Program, hardware: Hardware) -> Timeline:
    made, clock, network = Timeline(hardware.name), 0.0, network_of(program, hardware)
    sent = {node: (axes, seconds) for node, axes, _, seconds in collectives_of(program, hardware)}
    free: dict[str, float] = {}  # axes to when their wire is
    there: dict[fx.Node, float] = {}  # what is under way to when it is there
    starts = {*STARTS.values()}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        role = info_of(node).role
        waits = max((there.pop(n) for n in node.all_input_nodes if n in there), default=clock)
        if node.target is WAIT_OP or waits > clock:
            made.exposed, clock = made.exposed + max(0.0, waits - clock), max(clock, waits)
        if node in sent:
            axes, seconds = sent[node]
            begin = max(clock, free.get(axes, 0.0))
            end = free[axes] = begin + seconds
            made.wires[axes] = made.wires.get(axes, 0.0) + seconds
            made.add(Span(axes, role, COLLECTIVES[node.target].name, begin, end))
            if node.target in starts:
                there[node] = end
            else:
                made.exposed, clock = made.exposed + end - clock, end
        elif seconds := seconds_of(node, network):
            made.add(Span(COMPUTE, role, "", clock, clock + seconds))
            made.compute, clock = made.compute + seconds, clock + seconds
    made.seconds = max([clock, *there.values()])
    made.exposed += made.seconds - clock
    return made


__all__ = ["COMPUTE", "Span", "Timeline", "collectives_of", "idle_of", "network_of", "timeline_of"]
