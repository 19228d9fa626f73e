"""Shard what checkpointed regions read until the backward: ``mw.shard_checkpoint_inputs`` in programs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from ..collective import OPERATORS, mesh_text
from ..layout import Shard, Spec, chunk_bounds
from ..program.ir.inplace import storages, written
from ..program.ir.nodes import NodeInfo, Value, annotate, checked_value, info_of, value_of
from ..program.ir.program import Program
from ..program.ir.regions import Region
from ..program.ir.strides import LAID, is_dense
from ..program.ir.subgraphs import RECOMPUTATION, Rewrite, copied, read_instead
from ..resharding import planner, record
from ..resharding.planner import ConversionPlan
from ..tensor.split_checkpoints import REASON, part_of, plain
from .pass_manager import Pass, PassRecord, register

aten = torch.ops.aten


@register
@dataclass(frozen=True)
class SplitCheckpoints(Pass):
    """Keep what checkpointed calls read in parts, where ``mw.shard_checkpoint_inputs`` asks for it; one gather each.

    Every captured step has it, where the model has such calls.
    """

    name = "split-checkpoints"
    before = ("reshard-after-forward", "gradient-merge", "data-parallel-optimization")

    def applies(self, program: Program) -> bool:
        """Whether there are calls that ask for it, and run again already."""
        return any(info_of(n).regions for n in program.graph.nodes)

    def apply(self, program: Program) -> tuple[Program, PassRecord]:
        """The program in which parts are kept of what nobody writes to."""
        made = _SavedShards(copied(program))
        writes: dict[int, int] = defaultdict(int)  # storage to where it was written to last
        for node, i in made.order.items():
            for s in written(node):
                writes[s] = i
        held: list[tuple[int, int]] = []
        for node, region in _read(made.graph).items():
            later = made.readers([node])
            if later and all(writes[s] <= made.order[node] for s in storages(node)):
                held += made.split(node, region, later)
        for node in made.graph.nodes:
            annotate(node, regions=())
        parts, whole = (sum(h) for h in zip(*held, strict=True)) if held else (0, 0)
        summary = f"{len(held)} inputs of checkpointed calls are kept split: {parts} bytes for {whole}"
        return made.done(), PassRecord(summary, details={"inputs": len(held), "bytes": parts, "whole": whole})


def _read(graph: fx.Graph) -> dict[fx.Node, Region]:
    """Activations that a region reads of what came before, and the first that does."""
    found: dict[fx.Node, Region] = {}
    for node in graph.nodes:
        info = info_of(node)
        region = info.regions[0] if info.regions else None
        if info.role != "forward" or region is None or not region.split:
            continue
        for used in node.all_input_nodes:
            known = info_of(used)
            own = bool(known.regions) and known.regions[0] is region
            if used.op == "call_function" and known.role == "forward" and not own and not known.gather:
                found.setdefault(used, region)
    return found


class _SavedShards(Rewrite):
    def split(self, node: fx.Node, region: Region, later: list[fx.Node]) -> list[tuple[int, int]]:
        """Keep one value in parts for those that read it later, where it is whole on an axis that is asked for.

        Returns:
            Bytes of the part and of the whole; nothing where it is kept as it is.
        """
        value, spec = value_of(node), info_of(node).spec
        part = None if value is None or spec is None else part_of(spec, region.split)
        if value is None or spec is None or part is None:
            return []
        here = spec.mesh.coordinate(self.program.rank)
        cut, back = planner.plan(plain(spec), part), planner.plan(part, plain(spec))
        moved = {s.kind for s in cut.steps} == {"slice"} and {s.kind for s in back.steps} == {"all_gather"}
        if not moved or spec.local_shape(here) != value.shape or not is_dense(value.shape, value.strides):
            return []
        held, by_stage = list[tuple[int, int]](), defaultdict[int | None, list[fx.Node]](list)
        for reader in later:  # each stage keeps a shard, and gathers it for its backward
            by_stage[info_of(reader).stage].append(reader)
        for stage, readers in by_stage.items():
            origin = NodeInfo(line=info_of(node).line, source=info_of(node).source, stage=stage)
            kept = self._cut(node, origin, cut, here)
            with self.graph.inserting_before(readers[0]):
                whole = self._gathered(origin, kept, back, here, value)
            read_instead(readers, {node: whole})
            held.append((sum(v.nbytes for v in info_of(kept).values), value.nbytes))
        return held

    def _cut(self, node: fx.Node, origin: NodeInfo, plan: ConversionPlan, here: tuple[int, ...]) -> fx.Node:
        """This rank's part, in memory of its own."""
        made, shape = node, list(checked_value(node).shape)
        with self.after(node, replace(origin, role="forward")) as emit:
            for step in plan.steps:
                for axis in step.axes:
                    d = _dim(step.dst, axis)
                    lo, hi = chunk_bounds(shape[d], step.src.mesh.sizes[axis], here[axis])
                    shape[d] = hi - lo
                    made = emit(aten.slice.Tensor, made, d, lo, hi)
            return emit(aten.clone.default, made, memory_format=torch.contiguous_format)

    def _gathered(
        self, origin: NodeInfo, kept: fx.Node, plan: ConversionPlan, here: tuple[int, ...], value: Value
    ) -> fx.Node:
        """The whole again, with the strides that it had."""
        made, of = kept, replace(origin, role=RECOMPUTATION)
        said = record.make("shard_checkpoint_inputs", 0, plan, REASON)
        self.causes.append(replace(said, line=of.line, phase=RECOMPUTATION, backward_bytes=0.0))
        for step in plan.steps:
            (axis,) = step.axes
            mesh, d = step.src.mesh, _dim(step.src, axis)
            sizes = [step.src.local_shape((*here[:axis], i, *here[axis + 1 :]))[d] for i in range(mesh.sizes[axis])]
            own = replace(of, cause=len(self.causes) - 1)
            args = (made, d, sizes, mesh.axes[axis], mesh_text(mesh))
            made = self.emit(own, OPERATORS["all_gather"].default, *args)
        if value.given is not None:
            made = self.emit(of, LAID.default, made, list(value.given))
        return made


def _dim(spec: Spec, axis: int) -> int:
    p = spec.layout.placements[axis]
    assert isinstance(p, Shard)
    return p.dim


__all__ = ["SplitCheckpoints"]
