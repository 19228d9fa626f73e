"""The program: one rank's training step as a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from ...collective import COLLECTIVES
from ...layout import Layout, Spec
from ...mesh import Mesh
from ...resharding.record import Record
from .loss_weight import LossWeight
from .nodes import Value, info_of, target_name
from .schedules import Action, Schedule, StagePart

Tensor = torch.Tensor


@dataclass(frozen=True)
class Input:
    """One input of a program, in the order of its placeholders.

    Attributes:
        name: ``"blocks.0.weight"``, ``"batch.0"``, ``"blocks.0.weight.exp_avg"``, ``"lr.0"``.
        kind: ``"param"``, ``"buffer"``, ``"batch"``, ``"constant"``, ``"state"``, ``"hyper"`` (a number that may
            change from step to step, as a tensor), ``"scale"`` (the loss scale), ``"accumulator"``; of a part of a
            pipeline ``"held"`` (what an earlier part of the same micro-batch left), ``"edge"`` (what another stage
            sent), ``"gathered"`` (what was made of stored parameters, for several micro-batches) or ``"reduced"`` (a
            gradient, summed over ranks).
        spec: how it lies on the mesh; None for what is not distributed.
        owner: of a state, of a sum of gradients and of a reduced one, the parameter.
    """

    name: str
    kind: str
    spec: Spec | None = None
    owner: str = ""


@dataclass(frozen=True)
class Output:
    """One output: its name, how it lies, and its kind: ``"loss"``, ``"aux"``, ``"grad"``, ``"weight"`` (the count of a
    micro-batch, which a pass takes), or as of inputs of parts."""

    name: str
    kind: str
    spec: Spec | None = None


@dataclass(frozen=True)
class Origin:
    """Where the layout of a value of the captured graph came from.

    Attributes:
        value: name of the parameter, input or node.
        layout: what it got.
        source: ``"user"``, ``"propagated"`` or ``"default"``.
        reason: which op and factor it came through.
        lost: alternatives that lost, and why.
    """

    value: str
    layout: Layout
    source: str
    reason: str = ""
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Message:
    """A value that one stage sends to another one.

    Attributes:
        name: the same at both ends: the output of one part and the input of the other one.
        part: with which part it comes and goes: for each micro-batch FORWARD or BACKWARD (of a backward that is cut
            with BACKWARD_INPUT); once for all of them SEND_PARAMS, a parameter, and REDUCE_GRAD, a sum of gradients.
        src, dst: the stages.
        nbytes: of this rank's part of it.
    """

    name: str
    part: StagePart
    src: int
    dst: int
    nbytes: int

    @property
    def once(self) -> bool:
        """Whether it goes once for all micro-batches."""
        return self.part.once


@dataclass(frozen=True)
class Staging:
    """How a step that is cut runs: the parts of a rank's stage, :class:`~meshwright.program.StagePart`, then a flush.

    The program has them by their letters, ``F``, ``B``; of several stages of a rank as ``F0``, ``F2`` and so on, by the
    numbers of the stages.

    Attributes:
        axis: of the mesh, that of the stages.
        schedule: what each rank runs, in order.
        messages: between all stages, in the order in which parts send them.
        gather: for how long what UNSHARD made is kept: ``"run"``, while a rank runs parts of the stage one after the
            other, ``"step"`` or ``"micro-batch"``, for one part.
        gathered: of each stage, the bytes that UNSHARD makes of stored parameters.
        left: of each stage, the bytes that FORWARD leaves for the backward of its micro-batch, and
            BACKWARD_INPUT besides.
        sums: of each stage, the bytes of its sums of gradients, and of what REDUCE_GRAD makes of them.
        draws: a stage draws random numbers, for which all ranks then draw one seed.
    """

    axis: int
    schedule: Schedule
    messages: tuple[Message, ...]
    gather: str = "run"
    gathered: Mapping[int, int] = field(default_factory=dict)
    left: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    sums: Mapping[int, int] = field(default_factory=dict)
    draws: bool = False

    def name(self, part: StagePart, stage: int) -> str:
        """Of a part of a stage."""
        return str(part) if self.schedule.stages == len(self.schedule.orders) else f"{part}{stage}"

    def times(self, name: str, rank: int) -> int:
        """How often a rank of the axis runs a part in a step."""
        part = part_named(name)
        if part is None or part.once:
            return 1
        if part is not StagePart.UNSHARD:
            return self.schedule.micro_batches
        stage = int(name[1:]) if name[1:] else self.schedule.homes.index(rank)
        return sum(self.ends(rank, i) for i, a in enumerate(self.schedule.orders[rank]) if a.stage == stage)

    def ends(self, rank: int, place: int) -> bool:
        """Whether what UNSHARD made is let go behind this action of a rank."""
        order = self.schedule.orders[rank]
        here, rest = order[place].stage, order[place + 1 :]
        if self.gather == "micro-batch":
            return True
        return all(a.stage != here for a in (rest if self.gather == "step" else rest[:1]))

    def actions(self, rank: int) -> Iterator[Action]:
        """All that a rank of the axis runs, in order, but UNSHARD: SEND_PARAMS first, REDUCE_GRAD behind the last part
        of its stage, and of what other stages of the rank contribute to it."""
        order = self.schedule.orders[rank]
        last = {a.stage: i for i, a in enumerate(order)}
        yield from (Action(StagePart.SEND_PARAMS, stage, 0) for stage in last)
        left = set(last)
        for i, a in enumerate(order):
            yield a
            for stage in sorted(left, reverse=True):
                sources = {m.src for m in self.messages if m.part is StagePart.REDUCE_GRAD and m.dst == stage}
                if last[stage] <= i and left.isdisjoint(sources):
                    left.remove(stage)
                    yield Action(StagePart.REDUCE_GRAD, stage, 0)

    def sent(self, src: int, dst: int) -> Iterator[Message]:
        """What goes from one rank to another one."""
        homes = self.schedule.homes
        return (m for m in self.messages if (homes[m.src], homes[m.dst]) == (src, dst))


def part_named(name: str) -> StagePart | None:
    """The part of a stage of which this is the name; None for what every stage has alike."""
    letter = name.rstrip("0123456789")
    return StagePart(letter) if letter in list(StagePart) else None


PASSED = ("held", "edge", "gathered", "reduced")  # kinds of what parts hand on
STEP, WHOLE, PIPELINE = "step", "whole", "pipeline"
WEIGHT = "weight of micro-batches"  # how the names of the sums of what losses are means over begin


@dataclass(frozen=True)
class Program:
    """One rank's step: local ops and collectives, forward, backward and update, in one flat graph.

    What is known of a node is its :class:`~meshwright.program.ir.nodes.NodeInfo` (``info_of(node)``).

    A step may consist of several programs.  They are the named ``parts`` of the one that has all of forward, backward
    and update, which is itself the part ``"whole"``; ``schedules`` say when each of them runs.  The conditions that a
    program would need otherwise are data here: no program has a branch.

    Attributes:
        mesh, rank: whose program it is.
        graph: the nodes; its output node lists the values that ``outputs`` name.
        inputs, outputs: what goes in and comes out, in order.
        causes: the conversions that collectives serve, with reasons.
        origins: where layouts came from.
        constants: tensors that the model brought in.
        update: the optimizer that the program contains, in words; empty if it has none.
        parts: the other programs of the step, by name.
        schedules: what runs the step, by name: ``"step"`` has the part that each call between two updates runs, in
            order, of which the last one updates; ``"flush"``, if it is there, those that update between two calls.
        passes: records of the passes that made it, in order; as text in a program that was loaded.
        stages: the axis of the mesh over which layers are spread; empty for a step without stages.
        pipeline: how a step that is cut runs its parts.
        weight: what its loss is a mean over, where a pass asked for it; None: nobody did.
    """

    mesh: Mesh
    rank: int
    graph: fx.Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    causes: tuple[Record, ...] = ()
    origins: tuple[Origin, ...] = ()
    constants: dict[str, Tensor] = field(default_factory=dict)
    update: str = ""
    parts: Mapping[str, Program] = field(default_factory=dict)
    schedules: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {STEP: (WHOLE,)})
    passes: tuple[Any, ...] = ()
    stages: str = ""
    pipeline: Staging | None = None
    weight: LossWeight | None = None

    # -- looking at it --------------------------------------------------------------------------------

    @property
    def placeholders(self) -> list[fx.Node]:
        """The nodes of the inputs, in order."""
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes of the outputs, in order."""
        (node,) = self.graph.find_nodes(op="output")
        return tuple(node.args[0])

    def collectives(self) -> Iterator[fx.Node]:
        """The nodes that move data between ranks, in the order in which they start."""
        return (n for n in self.graph.nodes if n.target in COLLECTIVES)

    @property
    def step(self) -> tuple[str, ...]:
        """The part that each call between two updates runs."""
        return self.schedules[STEP]

    @property
    def kinds(self) -> dict[str, int]:
        """Kind of collective to how many of them a step runs."""
        return dict(Counter(COLLECTIVES[n.target].name for n in self.collectives()))

    def cause(self, node: fx.Node) -> Record | None:
        """The record of the conversion that a node serves."""
        i = info_of(node).cause
        return None if i is None else self.causes[i]

    def __str__(self) -> str:
        return render(self)

    def __repr__(self) -> str:
        n = len(self.graph.nodes)
        return f"<Program of rank {self.rank} on {self.mesh!r}: {n} nodes, collectives {self.kinds}>"


def without_unserved(program: Program) -> Program:
    """The program with conversions of which no collective is left, because others do their work, as moving nothing."""
    served = {info_of(n).cause for n in program.collectives()}
    causes = tuple(
        c if i in served or not c.kinds else replace(c, kinds=(), axes=(), bytes=0.0)
        for i, c in enumerate(program.causes)
    )
    parts = {name: without_unserved(part) for name, part in program.parts.items()}
    return replace(program, causes=causes, parts=parts)


# ---------------------------------------------------------------------------------------------- printing

_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64",
    torch.int32: "i32", torch.bool: "bool", torch.uint8: "u8",
}  # fmt: skip


def render(program: Program) -> str:
    """The program as text: a line per node, with shapes, layouts, lines of the user and reasons."""
    lines = [f"program of rank {program.rank} on {program.mesh!r}"]
    role = ""
    for node, given in zip(program.placeholders, program.inputs, strict=True):
        lines.append(f"  {_name(node)}: {_typed(node)} = {given.kind} {given.name}{_layout(given.spec)}")
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if info_of(node).role != role:
            role = info_of(node).role
            lines.append(f"{role}:")
        lines.append(f"  {_line(program, node)}")
    outs = ", ".join(f"{o.kind} {o.name}: {_name(n)}" for o, n in zip(program.outputs, program.results, strict=True))
    lines.append(f"returns {outs}")
    return "\n".join(lines)


def _line(program: Program, node: fx.Node) -> str:
    args = ", ".join([_arg(a) for a in node.args] + [f"{k}={_arg(v)}" for k, v in node.kwargs.items()])
    text = f"{_name(node)}: {_typed(node)} = {target_name(node.target)}({args}){_layout(info_of(node).spec)}"
    cause = program.cause(node)
    notes = [info_of(node).line]
    if cause is not None and node.target in COLLECTIVES:
        notes.append(f"{cause.src} -> {cause.dst}: {cause.reason}")
    return f"{text}  # {'; '.join(filter(None, notes))}" if any(notes) else text


def _name(node: fx.Node) -> str:
    return f"%{node.name}"


def _typed(node: fx.Node) -> str:
    found = info_of(node).value
    if isinstance(found, Value):
        return f"{_SHORT.get(found.dtype, str(found.dtype))}[{', '.join(map(str, found.shape))}]"
    return "none" if found is None else f"{len(found)} values"


def _layout(spec: Spec | None) -> str:
    return "" if spec is None else f" {spec.layout!r}"


def _arg(a: Any) -> str:
    if isinstance(a, fx.Node):
        return _name(a)
    if isinstance(a, (list, tuple)):
        inner = ", ".join(map(_arg, a[:8])) + (f", ... {len(a)}" if len(a) > 8 else "")
        return f"[{inner}]" if isinstance(a, list) else f"({inner})"
    return repr(a)
