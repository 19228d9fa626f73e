"""What checkpointed regions read, kept split until the backward and gathered for it: ``mw.saved_split`` in programs."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import torch
import torch.fx as fx

from ... import record
from ...collective import OPERATORS, mesh_text
from ...layout import Shard, Spec, chunk_bounds
from ...record import Record
from ...resharding import planner
from ...resharding.planner import ConversionPlan
from ...split_checkpoints import REASON, part_of, plain
from ..ir.inplace import storages, written
from ..ir.memory import LAID, is_dense, unless_row_major
from ..ir.nodes import NodeInfo, Value, call, checked_value, info_of, move_to_storage, value_of
from ..ir.regions import Region

aten = torch.ops.aten
RECOMPUTATION = "recomputation"  # the role of what runs again
_LATER = ("backward", RECOMPUTATION)


def keep_split(graph: fx.Graph, causes: list[Record], rank: int) -> None:
    """Keep what regions read in parts, as they ask for it, where nobody writes to it; one gather each.

    Args:
        graph: in which regions run again already.
        causes: of its collectives; more are added.
        rank: whose graph it is.
    """
    order = {n: i for i, n in enumerate(graph.nodes)}
    writes: dict[int, int] = defaultdict(int)  # storage to where it was written to last
    for node, i in order.items():
        for s in written(node):
            writes[s] = i
    made = _Kept(graph, causes, rank, 1 + max((s for n in order for s in storages(n)), default=0))
    for node, region in _read(graph).items():
        later = sorted((u for u in node.users if info_of(u).role in _LATER), key=order.__getitem__)
        if later and all(writes[s] <= order[node] for s in storages(node)):
            made.split(node, region, later)


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


class _Kept:
    def __init__(self, graph: fx.Graph, causes: list[Record], rank: int, free: int) -> None:
        self.graph, self.causes, self.rank, self.free = graph, causes, rank, free

    def split(self, node: fx.Node, region: Region, later: list[fx.Node]) -> None:
        """Keep one value in parts for those that read it later, where it is whole on an axis that is asked for."""
        value, spec = value_of(node), info_of(node).spec
        part = None if value is None or spec is None else part_of(spec, region.split)
        if value is None or spec is None or part is None:
            return
        here = spec.mesh.coordinate(self.rank)
        cut, back = planner.plan(plain(spec), part), planner.plan(part, plain(spec))
        moved = {s.kind for s in cut.steps} == {"slice"} and {s.kind for s in back.steps} == {"all_gather"}
        if not moved or spec.local_shape(here) != value.shape or not is_dense(value.shape, value.strides):
            return
        with self.graph.inserting_after(node):
            kept = self._cut(node, value, cut, here)
        with self.graph.inserting_before(later[0]):
            whole = self._gathered(node, kept, back, here, value)
        for user in later:
            user.replace_input_with(node, whole)
        move_to_storage(whole, checked_value(whole).storage)

    def _fresh(self, shape: tuple[int, ...], like: Value, given: tuple[int, ...] | None = None) -> Value:
        self.free += 1
        return Value(shape, like.dtype, self.free - 1, math.prod(shape) * like.dtype.itemsize, given)

    def _cut(self, node: fx.Node, value: Value, plan: ConversionPlan, here: tuple[int, ...]) -> fx.Node:
        """This rank's part, in memory of its own."""
        info, made, shape = info_of(node), node, list(value.shape)
        for step in plan.steps:
            for axis in step.axes:
                d = _dim(step.dst, axis)
                lo, hi = chunk_bounds(shape[d], step.src.mesh.sizes[axis], here[axis])
                shape[d] = hi - lo
                looks = replace(value, shape=tuple(shape), given=unless_row_major(tuple(shape), value.strides))
                args = (made, d, lo, hi)
                with self.graph.inserting_after(made):
                    made = call(self.graph, aten.slice.Tensor, args, NodeInfo("forward", info.line, info.source, looks))
        own = NodeInfo("forward", info.line, info.source, self._fresh(tuple(shape), value))
        with self.graph.inserting_after(made):
            return call(self.graph, aten.clone.default, (made,), own, {"memory_format": torch.contiguous_format})

    def _gathered(
        self, node: fx.Node, kept: fx.Node, plan: ConversionPlan, here: tuple[int, ...], value: Value
    ) -> fx.Node:
        """The whole again, with the strides that it had."""
        info, made = info_of(node), kept
        said = record.make("saved_split", 0, plan, REASON)
        self.causes.append(replace(said, line=info.line, phase=RECOMPUTATION, backward_bytes=0.0))
        for step in plan.steps:
            (axis,) = step.axes
            mesh, d = step.src.mesh, _dim(step.src, axis)
            sizes = [step.src.local_shape((*here[:axis], i, *here[axis + 1 :]))[d] for i in range(mesh.sizes[axis])]
            whole = self._fresh(step.dst.local_shape(here), value)
            own = NodeInfo(RECOMPUTATION, info.line, info.source, whole, len(self.causes) - 1)
            args = (made, d, sizes, mesh.axes[axis], mesh_text(mesh))
            made = call(self.graph, OPERATORS["all_gather"].default, args, own)
        if value.given is not None:
            laid = self._fresh(value.shape, value, value.given)
            own = NodeInfo(RECOMPUTATION, info.line, info.source, laid)
            made = call(self.graph, LAID.default, (made, list(value.given)), own)
        return made


def _dim(spec: Spec, axis: int) -> int:
    p = spec.layout.placements[axis]
    assert isinstance(p, Shard)
    return p.dim


__all__ = ["RECOMPUTATION", "keep_split"]
