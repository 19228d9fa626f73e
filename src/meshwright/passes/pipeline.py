"""Pipelines: a step of several micro-batches, cut into what each stage computes, in the order of a schedule.

A micro-step's program is made as gradient merge makes it, then cut where values cross from one stage to another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_type_hints

import torch
import torch.fx as fx

from ..collective import OPERATORS, mesh_text
from ..errors import PassError, ProgramError
from ..layout import Partial, Replicate
from ..program.ir.cut import cut
from ..program.ir.edit import Edit
from ..program.ir.loss_weight import Weighing
from ..program.ir.nodes import NodeInfo, annotate, checked_value, draws, info_of, is_mutating
from ..program.ir.program import PIPELINE, STEP, Input, Output, Program, Staging, part_named
from ..program.ir.schedules import LOOPED, PARTS, Schedule, StagePart, V, schedule
from ..program.ir.subgraphs import copied
from .batch_weights import UPDATE_WEIGHTS, weight_of
from .gradient_merge import GradientMerge, Merge, SumsUpdate
from .pass_manager import Pass, PassRecord, register
from .stage_sums import (
    accumulate_by_stage,
    bytes_of,
    contributions,
    divide_after_reduction,
    split_reductions,
    stages_of,
)

aten = torch.ops.aten

UNCUT = "uncut"
_WHOLE = "take the step on the whole batch, without micro-batches"
Orders = Callable[[int, int], Schedule]
LOSS = "loss of micro-batches"  # the name of its sum
_ENDS = NodeInfo("backward", source="sums of stages")


@register
@dataclass(frozen=True)
class Pipeline(Pass):
    """A step of ``micro_batches`` micro-batches, each of which goes through the stages of ``stages=``.

    A call of the step takes the whole batch, cuts it along its first dim, and updates once, as one step on the whole
    batch would: what the loss is a mean over weighs micro-batches, so they may be of any sizes.

    Attributes:
        micro_batches: into how many a batch is cut, as evenly as its rows allow.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"zero-bubble"``, ``"looped"`` or ``"v"``; or ``"uncut"``: every rank
            computes all stages, which schedules are compared with; or a table of your own, or a function that makes one
            of the numbers of stages and micro-batches.
        chunks: how many stages a rank has: of ``"looped"`` 2 or more, of ``"v"`` 2; None: as few as the schedule takes,
            or as a table of your own says.
        limit: the most micro-batches of which a rank holds what their backward needs; None: as the schedule is made.
        gather: for how long a rank keeps what it gathers of parameters that are stored split (ZeRO-3), and casts: a
            ``"run"`` of a stage, parts of it one after the other, which with one stage on a rank is the whole step; the
            ``"step"``, where it has several; or one part of one ``"micro-batch"``, which sends most and needs least
            memory: gradients then are scattered for each micro-batch, too, and not summed whole.

    Raises:
        PassError: options out of range; in :meth:`apply` a step without ``stages=``, whose loss is no weighted mean of
            those of micro-batches, or that cannot be cut, with the user's line.
    """

    name = "pipeline"
    before = ("data-parallel-optimization",)
    conflicts_with = ("gradient-merge",)

    micro_batches: int
    schedule: str | Schedule | Orders = "1f1b"
    limit: int | None = None
    chunks: int | None = None
    gather: Literal["run", "step", "micro-batch"] = "run"

    def __post_init__(self) -> None:
        m = self.micro_batches
        if not isinstance(m, int) or isinstance(m, bool) or m < 1:
            raise PassError(f"pipeline: micro_batches={m!r}: a whole number of at least 1 was expected")
        named = (*PARTS, UNCUT)
        if self.schedule not in named if isinstance(self.schedule, str) else not self._own(self.schedule):
            raise PassError(
                f"pipeline: schedule={self.schedule!r}: one of {', '.join(named)}, or a Schedule, was expected"
            )
        if self.gather not in (known := get_args(get_type_hints(type(self))["gather"])):
            raise PassError(f"pipeline: gather={self.gather!r}: one of {', '.join(known)} was expected")
        if self.limit is not None and (not isinstance(self.limit, int) or self.limit < 1):
            raise PassError(f"pipeline: limit={self.limit!r}: a whole number of at least 1 was expected")

    @staticmethod
    def _own(given: Any) -> bool:
        return isinstance(given, Schedule) or callable(given)

    def homes(self, ranks: int) -> tuple[int, ...]:
        """As the schedule says."""
        return self.order(ranks).homes

    def order(self, ranks: int) -> Schedule:
        """What the ranks run.

        Raises:
            PassError: a schedule for other numbers of ranks, stages or micro-batches; one that holds more than the
                limit, or never ends.
        """
        m, given = self.micro_batches, self.schedule
        chunks = self.chunks or (2 if given in (LOOPED, V) else 1)
        if isinstance(given, Schedule) and self.chunks is None:
            chunks = max(1, given.stages // ranks)
        stages = ranks * chunks
        try:
            if isinstance(given, str):
                return schedule("gpipe" if given == UNCUT else given, stages, m, self.limit, chunks)
            made = given if isinstance(given, Schedule) else given(stages, m)
            if self.limit is not None:
                made.check_memory(self.limit)
        except ProgramError as error:
            raise PassError(str(error)) from error
        if (len(made.orders), made.stages, made.micro_batches) != (ranks, stages, m):
            raise PassError(
                f"{made.name} has {made.stages} stages on {len(made.orders)} ranks and {made.micro_batches} "
                f"micro-batches; this step has {stages} on {ranks} and {m}"
            )
        return made

    @property
    def weighing(self) -> Weighing | None:
        """How much micro-batches count: they are cut along the first dim."""
        return Weighing(_WHOLE, rows_dim=0, cuts=True)

    @property
    def splits(self) -> int:
        """Micro-batches."""
        return self.micro_batches

    def apply(self, program: Program) -> tuple[Program, PassRecord]:
        """The program with the parts of this rank's stage and how they run."""
        if not program.stages:
            raise PassError('the step has no stages: give compile_step(stages={"pp": "model.layers"})')
        if program.parts:
            raise PassError("the step merges micro-steps already")
        axis = program.mesh.axis_index(program.stages)
        order = self.order(program.mesh.sizes[axis])
        aux = next((o for o in program.outputs if o.kind == "aux"), None)
        if aux is not None:
            raise PassError(
                "the loss function returns other values beside the loss, which micro-batches have each their own of: "
                "return the loss alone"
            )
        weight = weight_of(program)
        counts = weight is not None and weight.weighs
        program, stages, often = copied(program), stages_of(program), self.gather == "micro-batch"
        apart = contributions(program, whole_sums=not often)
        accumulate_by_stage(program)
        how = GradientMerge(self.micro_batches, avg=counts, whole_sums=not often)
        merge = Merge(program, how, seeded=True, contributions=apart)
        made = merge.run()
        step, flush = made.parts["accumulate"], made.parts["flush"]
        step, flush = _with_loss(step, flush, merge, order.stages - 1)
        adds = {s.given.name: merge.stage_of[s.node] for s in merge.sums if s.node in merge.stage_of}
        sums = divide_after_reduction(flush, merge.update, stages, adds, self._unit(program))
        if self.schedule == UNCUT:
            return self._uncut(made, step, flush, order, axis)
        here = program.mesh.coordinate(program.rank)[axis]
        mine = [s for s, home in enumerate(order.homes) if home == here]
        found = cut(step, program.stages, mine, order.split, gathers=not often)
        kept = bytes_of(sums, program, order.homes)
        flush, ends, back = split_reductions(flush, merge.update, sums, mine)
        flush = _over_stages(flush, program.stages, stages)
        drawn = any(map(draws, step.graph.nodes))
        pipeline = Staging(axis, order, (*found.messages, *back), self.gather, found.gathered, found.left, kept, drawn)
        of = {pipeline.name(n, s): part for s, parts in found.parts.items() for n, part in parts.items()}
        of.update((pipeline.name(StagePart.REDUCE_GRAD, s), part) for s, part in ends.items())
        made = replace(made, parts={**of, "flush": flush}, schedules={STEP: (PIPELINE,)}, pipeline=pipeline)
        return made, _record(made, order, here)

    def _unit(self, program: Program) -> float:
        """About one over how many things the loss of a batch may be a mean over."""
        sizes = [i.spec.shape.numel() for i in program.inputs if i.kind == "batch" and i.spec is not None]
        return 2.0 ** -int(math.log2(max(1, *sizes) * self.micro_batches))

    def _uncut(
        self, made: Program, step: Program, flush: Program, order: Schedule, axis: int
    ) -> tuple[Program, PassRecord]:
        parts = {"accumulate": step, "flush": flush}
        how = Staging(axis, order, (), draws=any(map(draws, step.graph.nodes)))
        made = replace(made, parts=parts, schedules={STEP: (PIPELINE,)}, pipeline=how)
        return made, PassRecord(f"{self.micro_batches} micro-batches; every rank computes all stages")


def _record(made: Program, order: Schedule, here: int) -> PassRecord:
    assert made.pipeline is not None
    mine = [s for s, home in enumerate(order.homes) if home == here]
    crossing = [m for m in made.pipeline.messages if order.homes[m.src] == here != order.homes[m.dst]]
    sent, once = sum(not m.once for m in crossing), sum(m.once for m in crossing)
    gathered = [n for part, p in made.parts.items() if part_named(part) is StagePart.UNSHARD for n in p.results]
    sums = {i.name: checked_value(n).size for p in made.parts.values()
            for n, i in zip(p.placeholders, p.inputs, strict=True) if i.kind == "accumulator"}  # fmt: skip
    held = [order.held(rank) for rank in range(len(order.orders))]
    what = f"{order.micro_batches} micro-batches through {order.stages} stages by {order.name}"
    return PassRecord(
        f"{what}, bubble {order.bubble():.1%}",
        (
            f"this rank has stage {' and '.join(map(str, mine))}, and sends {sent} values for each micro-batch"
            + (f", {once} once" if once else ""),
            f"gathered and cast parameters: {sum(checked_value(n).size for n in gathered)} bytes on this rank, kept "
            f"for a {made.pipeline.gather}; sums of gradients: {sum(sums.values())} bytes",
            f"micro-batches held by the stages: {', '.join(map(str, held))}",
        ),
        {"bubble": order.bubble(), "held": held, "messages": len(made.pipeline.messages)},
    )


# ---------------------------------------------------------------------------------------------- the loss


def _with_loss(step: Program, flush: Program, merge: Merge, last: int) -> tuple[Program, Program]:
    """The loss of the whole batch: summed over micro-batches by their weights, returned by the update."""
    ((out, loss),) = zip(step.outputs, step.results, strict=True)
    graph, edit = step.graph, Edit(step.graph, step.mesh.device)
    assert out.spec is not None
    # Of programs for other sizes the loss may be whole on an axis or not: one rank counts, in all of them.
    mesh, layout, counts = step.mesh, out.spec.layout, 1
    for axis, here in enumerate(mesh.coordinate(step.rank)):
        if mesh.axes[axis] != step.stages and isinstance(layout.placements[axis], Replicate):
            layout, counts = layout.replace(axis, Partial()), counts * (here == 0)
    out = replace(out, spec=out.spec.with_(layout=layout))
    assert out.spec is not None
    held = Input(LOSS, "accumulator", out.spec.with_(dtype=torch.float64))
    place = edit.input("sum_loss")
    (output,) = graph.find_nodes(op="output")
    of = NodeInfo("forward", source=info_of(loss).source, stage=last)
    by = merge.counted[1]
    with edit.before(output, of.beside()) as emit:
        one = emit(aten._to_copy.default, loss, dtype=torch.float64)
        one = emit(aten.mul.Tensor, one, by)
        if isinstance(by, fx.Node):  # a mean over nothing is no number
            one = emit(aten.masked_fill.Scalar, one, emit(aten.eq.Scalar, by, 0), 0)
        if not counts:
            one = emit(aten.mul.Tensor, one, 0)
        emit(aten.add_.Tensor, place, one)
    for node in graph.nodes:
        if info_of(node).source in (UPDATE_WEIGHTS.source, of.source) and is_mutating(node):
            annotate(node, stage=last)
    output.args = ((),)
    return replace(step, inputs=(*step.inputs, held), outputs=()), _returns(flush, merge.update, held, out)


def _returns(flush: Program, update: SumsUpdate, held: Input, out: Output) -> Program:
    graph, edit, zero = flush.graph, Edit(flush.graph, flush.mesh.device), update.emptied
    place = edit.input("sum_loss")
    zero.args = ([*zero.args[0], place],)  # type: ignore[misc]
    dtype = torch.float64 if out.spec is None else out.spec.dtype
    with edit.before(zero, NodeInfo("backward", source="loss")) as emit:
        made = emit(aten._to_copy.default, emit(aten.div.Tensor, place, update.total), dtype=dtype)
    annotate(made, spec=out.spec)
    (output,) = graph.find_nodes(op="output")
    output.args = ((made, *output.args[0]),)
    return replace(flush, inputs=(*flush.inputs, held), outputs=(out, *flush.outputs))


# ---------------------------------------------------------------------------------------------- over stages


def _over_stages(flush: Program, axis: str, stages: Collection[str]) -> Program:
    """What one stage alone has added up, and all use, is summed over the stages first: weights, losses, gradients of
    parameters that are on all ranks.

    Args:
        stages: names of parameters that are not.
    """
    pairs = zip(flush.placeholders, flush.inputs, strict=True)
    places = [n for n, i in pairs if i.kind == "accumulator" and i.owner not in stages]
    if not places:
        return flush
    sizes = [math.prod(checked_value(n).shape) for n in places]
    with Edit(flush.graph, flush.mesh.device).after(flush.placeholders[-1], _ENDS) as emit:
        flat = [emit(aten._to_copy.default, emit(aten.view.default, n, [-1]), dtype=torch.float64) for n in places]
        args = "sum", axis, mesh_text(flush.mesh)
        summed, start = emit(OPERATORS["all_reduce"].default, emit(aten.cat.default, flat), *args), 0
        for n, size in zip(places, sizes, strict=True):
            part = emit(aten.slice.Tensor, summed, 0, start, start + size)
            emit(aten.copy_.default, n, emit(aten.view.default, part, list(checked_value(n).shape)))
            start += size
    return flush


__all__ = ["Pipeline"]
