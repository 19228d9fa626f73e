"""Partition: the captured graph with layouts, run once on fake local tensors, becomes one rank's program.

Forward, autograd's backward of it, the reduction of gradients and the optimizer's update are recorded one after the
other.  Nothing here knows an op: rules, choices and conversions are those of eager dispatch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from ... import collective
from ...compat import DataDependentOutputException, DynamicOutputShapeException
from ...dispatch import (
    CONVERT_WITH_GRAD_DTYPE,
    ONCE,
    CachedCast,
    convert_layout,
    link,
    resolve_types,
    root,
    unit_cotangent,
)
from ...errors import CaptureError
from ...layout import Layout, Partial, Spec
from ...mesh import Mesh
from ...ranks import runtime
from ...resharding import executor, record
from ...resharding.copies import TO_DEVICE, TO_HOST
from ...resharding.planner import ConversionPlan, in_dtype
from ...resharding.planner import plan as plan_conversion
from ...shard.optimizers.states import chunk_spec
from ...shard.parameters.chain import between, chain
from ...shard.parameters.packing import own_part
from ...shard.parameters.precision import put
from ...shard.parameters.stored import UNSHARDED, Axes, Stored
from ...tensor import tell as wrap
from ..ir.edges import put_stages
from ..ir.inplace import note_writes, storages, written
from ..ir.loss_weight import COUNT, WEIGHT_OUTPUT, LossWeight
from ..ir.nodes import annotate, info_of, remove_dead
from ..ir.program import Input, Origin, Output, Program, without_unserved
from ..ir.strides import LAID, Strides, dense, is_dense, same
from ..ir.trace import Recorder
from .early_sums import EarlySum, Key, PartialFlow, bytes_sent, cheapest_sums, sends_less
from .export import Captured, Source
from .interpret import Interpreter, spec_at
from .scale import LossScale, Scaling
from .source_lines import VALUES
from .update import Update, clip, emit_update

Tensor = torch.Tensor


@dataclass(frozen=True)
class Assignment:
    """How the inputs of a captured graph lie on the mesh.

    Attributes:
        specs: name of a placeholder to the spec in which ops see it.
        stored: name of a node of a parameter that is kept otherwise than ops see it to the spec in which it is kept.
        constraints: name of a node in the middle to the placements that it is to have.
        origins: where layouts came from.
        kept: of the same parameters, the records.
        stages: name of a node to its stage, of a step that has stages; ``axis``: of the mesh, over which they are.
        weight: what the loss is a mean over; the last output is the count, where values say it.
    """

    specs: Mapping[str, Spec]
    stored: Mapping[str, Spec] = field(default_factory=dict)
    constraints: Mapping[str, Any] = field(default_factory=dict)
    origins: tuple[Origin, ...] = ()
    kept: Mapping[str, Stored] = field(default_factory=dict)
    stages: Mapping[str, int] = field(default_factory=dict)
    axis: str = ""
    weight: LossWeight | None = None


def partition(
    captured: Captured,
    laid: Assignment,
    mesh: Mesh,
    rank: int,
    *,
    update: Update | None = None,
    clip_grad_norm: float | None = None,
    gradients: bool = False,
    shard_states: Axes | None = None,
    offload_states: str | None = None,
    loss_scale: LossScale | None = None,
    train: bool = True,
) -> Program:
    """The program of one rank, before any passes.

    Args:
        update: the optimizer's update as part of the program.
        clip_grad_norm: clip the global norm of all gradients to this before the update.
        gradients: return the gradients too.
        shard_states: axes over which the optimizer's states are split, and with them gradients and the update.
        offload_states: the host, where the states lie there, and the update is made there.
        loss_scale: scale the loss, skip updates that overflow; then ``update`` is needed.
        train: False: forward only.

    Raises:
        CaptureError: the step does what a program cannot hold.
        MeshwrightError: what dispatch raises for these layouts, with the user's line.
    """

    def recorded(merge: bool, early: Mapping[Key, EarlySum]) -> _Partition:
        made = _Partition(captured, laid, mesh, rank, loss_scale if train else None, merge, early)
        with captured.mode, made.recorder, torch.set_grad_enabled(train):
            made.forward()
            if train:
                made.backward(shard_states)
                with torch.no_grad():
                    made.update(update, clip_grad_norm, gradients, offload_states is not None)
        return made

    with collective.as_rank(mesh, rank), _no_values():
        made = late = recorded(merge=True, early={})
        sent, early = bytes_sent(), cheapest_sums(made.flow.values)
        if early:
            runtime.RT.records = []
            made = recorded(merge=True, early=early)
            if not sends_less(bytes_sent(), sent):  # what ops choose for a reduced operand sends more elsewhere
                made, early = late, {}
        if any(not made.recorder.merged.isdisjoint(written(n)) for n in made.recorder.graph.nodes):
            made = recorded(merge=False, early=early)  # one of two results is written to: each needs memory of its own
        for node in made.recorder.graph.nodes:
            if how := laid.kept.get(info_of(node).gather):
                annotate(node, unit=how.unit)
        if laid.stages:
            params = [made.by_node[s.node] for s in captured.sources if s.kind == "param"]
            put_stages(made.recorder.graph, set(map(made.recorder.node_of, params)), laid.stages, mesh.device)
        return made.program("" if update is None or not train else update.text)


@contextmanager
def _no_values() -> Iterator[None]:
    """What asks for values of fakes, or for shapes that depend on them, is no program."""
    try:
        yield
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        where = f"{runtime.RT.line}: " if runtime.RT.line else ""
        raise CaptureError(f"{where}{error} cannot be captured: {VALUES}") from error


class _Partition:
    """The state of one partition."""

    def __init__(
        self,
        captured: Captured,
        laid: Assignment,
        mesh: Mesh,
        rank: int,
        loss_scale: LossScale | None,
        merge: bool,
        early: Mapping[Key, EarlySum],
    ) -> None:
        self.captured, self.laid, self.mesh, self.rank = captured, laid, mesh, rank
        self.here = mesh.coordinate(rank)
        self.recorder = Recorder(merge)
        self.flow = PartialFlow(self.recorder, early)
        self.inputs: list[Input] = []
        self.params: dict[str, Tensor] = {}  # name to the local fake leaf, in the order of the model
        self.wide: dict[int, torch.dtype] = {}  # id of a leaf to what its gradient is reduced in, if not in its own
        self.near: dict[int, Tensor] = {}  # id of a parameter on the host to the leaf that is it on the mesh's device
        self.homes: dict[int, Tensor] = {}  # the other way round
        self.leaves: dict[int, Tensor] = {}  # id of the global fake to the local one: tied ones share it
        self.by_node: dict[str, Tensor] = {}
        self.gathered: dict[int, tuple[Tensor, int]] = {}  # and its version when it was gathered
        self.seen_of: dict[int, Tensor] = {}  # id of what ops see of a stored parameter to the leaf that it was made of
        self.outputs: list[tuple[Output, fx.Node]] = []
        self.grads: dict[str, Tensor] = {}
        self.chunks: dict[str, Spec] = {}  # of parameters of which this rank updates a part only
        self.loss: Tensor | None = None
        for source in captured.sources:
            self._input(source)
        self.scaling: Scaling | None = None
        if loss_scale is not None:
            with captured.mode:
                self.scaling = Scaling(loss_scale, self.recorder, mesh)
            self.inputs += self.scaling.inputs

    def _input(self, source: Source) -> None:
        shared = self.leaves.get(id(source.fake))
        if shared is not None:
            self.by_node[source.node] = shared
            return
        seen = self.laid.specs[source.node]
        spec = self.laid.stored.get(source.node, seen)
        shape = torch.Size(spec.local_shape(self.here))
        with self.captured.mode:
            strides, how = _lies(source, shape, spec), self.laid.kept.get(source.node, UNSHARDED)
            local = leaf = torch.empty_strided(shape, strides, dtype=spec.dtype, device=self.mesh.device)
            if how.device:
                local = torch.empty_strided(shape, strides, dtype=spec.dtype, device=how.device)
                self.near[id(local)], self.homes[id(leaf)] = wrap(leaf, spec), local
        leaf.requires_grad_(source.fake.requires_grad)
        if source.kind == "param":
            self.params[source.name] = leaf
            if how.dtypes is not None and how.dtypes.reduce is not spec.dtype:
                self.wide[id(leaf)] = how.dtypes.reduce
                leaf.grad_dtype = None  # contributions come in the dtype that they are reduced in
        if source.kind == "constant":
            assert source.value is not None
            self.recorder.constants[source.name] = source.value
        self.recorder.placeholder(source.node, local)
        wrap(local, spec)
        self.leaves[id(source.fake)] = self.by_node[source.node] = local
        self.inputs.append(Input(source.name, source.kind, spec.invariant()))

    # -- forward --------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Record the forward; outputs are the loss and what the loss function returned beside it."""
        interpreter = Interpreter(
            self.recorder, dict(self.laid.constraints), self.captured.regions, self._differentiable
        )
        with self.flow:
            for name, t in self.by_node.items():
                self.flow.add_input(name, t)
            made = interpreter.run(self.captured.module, self._read)
        for i, value in enumerate(made):
            if not isinstance(value, Tensor):
                raise CaptureError(f"the loss function returned {value!r}: return tensors only")
            if self._output(i, Spec(value.shape, value.dtype, Layout(self.mesh))).kind == WEIGHT_OUTPUT:
                value = self._whole(value)
            if spec_at(value) is None:
                wrap(value, Spec(value.shape, value.dtype, Layout(self.mesh)))
            resolve_types(value, value.__dict__["_spec"].decided())
            spec = value.__dict__["_spec"]
            if i == 0:
                self.loss = value
            node, output = self.recorder.node_of(value), self._output(i, spec)
            if output.kind != WEIGHT_OUTPUT:  # which is no value of the user's
                annotate(node, spec=spec)
            self.outputs.append((output, node))
        self._store()

    def _whole(self, count: Tensor) -> Tensor:
        """A count, summed over the ranks that have parts of it."""
        have = spec_at(count)
        if have is None:
            return count
        with torch.no_grad():
            return convert_layout(count, Spec(have.shape, have.dtype, Layout(self.mesh)), wrap)

    def _output(self, i: int, spec: Spec) -> Output:
        if self.laid.weight is not None and self.laid.weight.counted and i == len(self.captured.outputs) - 1:
            return Output(COUNT, WEIGHT_OUTPUT, spec)
        return Output("loss" if i == 0 else f"aux.{i - 1}", "aux" if i else "loss", spec)

    def _read(self, node: fx.Node) -> Tensor:
        local = self.by_node[node.name]
        how, seen = self.laid.kept.get(node.name), self.laid.specs[node.name]
        if how is None or (
            not (how.axes or how.device) and seen.dtype is local.dtype and seen.accumulate_dtype is None
        ):
            return local
        if id(local) not in self.gathered:
            made = self._seen(local, node.name)
            self.gathered[id(local)] = made, made._version
        return self.gathered[id(local)][0]

    def _seen(self, local: Tensor, name: str) -> Tensor:
        """A stored parameter as the ops see it: copied, cast, and gathered over the axes it is stored split over, each
        rank using it for its own part of the batch."""
        leaf, seen, way = self._leaf(local), self.laid.specs[name], chain(self.laid.stored[name], self.laid.kept[name])
        wide, why = self.wide.get(id(leaf), local.dtype), "the parameter is stored split and seen whole by the ops"
        with record.asked(name, way.plan, why), self.recorder.noting(gather=name):
            with torch.no_grad():
                value = executor.apply(way.plan.steps, local)
            made = executor.bring(leaf, value, wide, way.back)
        open_ = leaf.__dict__["_spec"].undecided_mask & way.seen.undecided_mask
        wrap(made, seen.with_(grad_partial_mask=way.seen.grad_partial_mask, undecided_mask=open_))
        if made.requires_grad:

            def brought(t: Tensor, steps: ConversionPlan, value: Tensor | None) -> Tensor:
                with torch.no_grad():
                    value = executor.apply(steps.steps, t) if value is None else value
                return executor.bring(leaf, value, wide, (*way.back, *in_dtype(steps, wide).steps))

            made.__dict__[CONVERT_WITH_GRAD_DTYPE] = brought
            made.__dict__[ONCE] = CachedCast(self.mesh.device)
        link([leaf, made])
        self.seen_of[id(made)] = leaf
        return made

    def _differentiable(self, value: Tensor) -> Tensor:
        """What a gradient by ``value`` is asked of: of a stored parameter the leaf, of others themselves."""
        return self.seen_of.get(id(value), self._leaf(value))

    def _leaf(self, local: Tensor) -> Tensor:
        """What gradients of a parameter are those of: itself, or what it would be on the mesh's device."""
        return self.near.get(id(local), local)

    def _store(self) -> None:
        """Bring what the forward wrote to gathered parameters back to where they are stored.

        Once, behind the forward: what the backward gathers again is what was written last, and autograd has refused to
        differentiate with what was written since it was read.
        """
        names = {id(local): name for name, local in self.by_node.items() if name in self.laid.kept}
        for local in dict.fromkeys(self.by_node.values()):
            made, version = self.gathered.get(id(local), (local, local._version))
            if made._version != version:
                have, want = (spec_at(t).invariant() for t in (made, local))  # type: ignore[union-attr]
                self.recorder.begin("", "")
                with torch.no_grad():
                    steps = plan_conversion(have, want.with_(dtype=have.dtype)).steps
                    part, dtypes = executor.apply(steps, made.detach()), self.laid.kept[names[id(local)]].dtypes
                    part = TO_HOST(part) if id(local) in self.near else part
                    put(local.detach(), part, dtypes and dtypes.gather)

    # -- backward -------------------------------------------------------------------------------------

    def backward(self, shard_states: Axes | None) -> None:
        """Record autograd's backward, and bring each gradient to the layout in which its update needs it."""
        assert self.loss is not None
        self.recorder.role = "backward"
        wanted = {n: p for n, p in self.params.items() if p.requires_grad}
        if not self.loss.requires_grad:
            raise CaptureError("the loss does not depend on any parameter that requires a gradient")
        start = root(self.loss, wrap)
        seed = unit_cotangent(start.__dict__["_spec"], self.mesh.device)
        if self.scaling is not None:
            seed = self.scaling.seed(seed)
        annotate(self.recorder.node_of(seed), seed=True)
        others = [self.by_node[s.node] for s in self.captured.sources if s.kind == "constant" and s.fake.requires_grad]
        made = torch.autograd.grad([start], [*wanted.values(), *others], [seed], allow_unused=True)
        for other, grad in zip(others, made[len(wanted) :], strict=True):
            if grad is not None:
                raise CaptureError(
                    f"a tensor of shape {tuple(other.shape)} from outside of the model requires a gradient: make it a "
                    "parameter of the model, or say detach()"
                )
        self.recorder.begin("gradients", "")
        spoilt = self._spoilt({name for name, grad in zip(wanted, made, strict=False) if grad is not None})
        with torch.no_grad():
            for (name, p), grad in zip(wanted.items(), made, strict=False):
                if grad is not None:
                    if self.scaling is not None and name == spoilt:
                        grad = self.scaling.spoil(grad, self.loss)
                    resolve_types(p, p.__dict__["_spec"].decided())
                    if shard_states is not None and (chunk := chunk_spec(p.__dict__["_spec"], shard_states)):
                        self.chunks[name] = chunk
                    self.grads[name] = self._reduced(name, p, grad)

    def _spoilt(self, names: Collection[str]) -> str | None:
        """The parameter whose gradient says that the loss is not finite: a small one, where the loss is computed."""
        if self.scaling is None or not self.scaling.how.check_loss:
            return None
        sources = [s for s in self.captured.sources if s.kind == "param" and s.name in names]
        stages = {s.name: self.laid.stages.get(s.node, -1) for s in sources}
        last, several = max(stages.values(), default=-1), set(self.captured.tied.values())

        def rank(source: Source) -> tuple[bool, bool, bool, int]:
            name, spec = source.name, self.laid.specs[source.node]
            empty = any(0 in spec.local_shape(self.mesh.coordinate(r)) for r in self.mesh.ranks)
            return stages[name] != last, name in several, empty, spec.shape.numel()

        return min(sources, key=rank).name if sources else None

    def _reduced(self, name: str, p: Tensor, grad: Tensor) -> Tensor:
        spec: Spec = p.__dict__["_spec"]
        grad = grad.to(self.wide.get(id(p), spec.dtype))
        have = spec.grad().summed_as(grad.dtype)
        want = Spec(spec.shape, grad.dtype, self.chunks.get(name, spec).layout)
        steps = between(have, want)
        axes = [a for a, p in zip(self.mesh.axes, have.layout.placements, strict=True) if isinstance(p, Partial)]
        since = p.__dict__.get("_since")
        why = f"each rank of {', '.join(axes)} used {name} for its own part: their gradients are summed"
        node = self.recorder.node_of(grad)
        annotate(node, grad_of=(*info_of(node).grad_of, (name, have)))
        served = record.asked(f"gradient of {name}", steps, why + (record.SINCE + since if since else ""))
        with served if steps.moves else nullcontext(), self.recorder.noting(sync=name):
            return wrap(executor.apply(steps.steps, grad).to(spec.dtype), want.with_(dtype=spec.dtype))

    # -- update ---------------------------------------------------------------------------------------

    def update(self, update: Update | None, max_norm: float | None, gradients: bool, on_host: bool) -> None:
        """Record clipping and the optimizer's update; list the gradients that leave the program.

        Args:
            on_host: the update is made on the host, whatever lies there.
        """
        self.recorder.role = "optimizer"
        self.recorder.begin("update", "")
        grads, scaling = self.grads, self.scaling
        if scaling is not None:
            grads = scaling.unscale(grads, {s for _, node in self.outputs for s in storages(node)})
        if max_norm is not None:
            grads = clip(grads, max_norm, self.mesh)
        # What is updated on the host, gradients are brought to: clipped and unscaled on the device.
        hosted = {n for n in grads if (on_host and update is not None) or id(self.params[n]) in self.homes}
        grads = {n: wrap(TO_HOST(g), g.__dict__["_spec"]) if n in hosted else g for n, g in grads.items()}
        if gradients or update is None:
            grads = {n: g if n in self.chunks else as_gradient(g, self.params[n]) for n, g in grads.items()}
        nodes = {n: self.recorder.node_of(g) for n, g in grads.items()}
        if gradients or update is None:
            for name, node in nodes.items():
                self.outputs.append((Output(name, "grad", grads[name].__dict__["_spec"]), node))
        if update is not None:
            own = {n: self._own(n, n in hosted) for n in grads}
            params = {n: self.recorder.node_of(t) for n, t in own.items()}
            specs = {n: self.params[n].__dict__["_spec"].invariant() for n in grads}
            lie = {**specs, **self.chunks}
            self.inputs += emit_update(self.recorder, update, params, nodes, lie, hosted, scaling)
            for name in {**self.chunks, **dict.fromkeys(hosted)}:
                self._spread(name, own[name], lie[name], specs[name], name in hosted)
        if scaling is not None:
            scaling.adapt()

    def _own(self, name: str, on_host: bool) -> Tensor:
        """What this rank updates of a parameter: memory of it, or a copy where a part of it is not contiguous, or where
        the update is made elsewhere."""
        leaf, chunk = self.params[name], self.chunks.get(name)
        p = self.homes.get(id(leaf), leaf).detach()
        p = p if chunk is None else own_part(p, leaf.__dict__["_spec"], chunk)
        if on_host and id(leaf) not in self.homes:
            return TO_HOST(p)
        if chunk is None:
            return p  # the update copies what has gaps
        return p if is_dense(p.shape, p.stride()) else p.clone(memory_format=torch.contiguous_format)

    def _spread(self, name: str, own: Tensor, chunk: Spec, whole: Spec, hosted: bool) -> None:
        """Bring the updated parts of a parameter to all ranks, and to where it is stored."""
        leaf, steps = self.params[name], between(chunk, whole)
        home = self.homes.get(id(leaf))
        if home is not None and not steps.steps:
            return  # it was updated where it is stored
        why = "each rank updated its own part of the parameter"
        with record.asked(f"update of {name}", steps, why), self.recorder.noting(gather=name):
            made = executor.apply(steps.steps, TO_DEVICE(own, self.mesh.device) if hosted else own)
        (leaf if home is None else home).detach().copy_(made if home is None else TO_HOST(made))

    # -- the result -----------------------------------------------------------------------------------

    def program(self, text: str) -> Program:
        """What was recorded, without what nobody needs."""
        graph = self.recorder.graph
        graph.output(tuple(node for _, node in self.outputs))
        remove_dead(graph)
        brought = tuple(Input(n, "constant") for n in self.recorder.constants if n.startswith("constant_"))
        held = {i.name for i in brought}
        inputs = _in_order(graph, self.inputs, held, brought)
        note_writes(graph)
        graph.lint()
        made = Program(
            self.mesh, self.rank, graph, inputs, tuple(o for o, _ in self.outputs), tuple(self.recorder.causes),
            self.laid.origins, dict(self.recorder.constants), text, stages=self.laid.axis, weight=self.laid.weight,
        )  # fmt: skip
        return without_unserved(made)


def as_gradient(g: Tensor, p: Tensor) -> Tensor:
    """A gradient that lies in memory as its parameter, as autograd accumulates it; it keeps its spec."""
    want = dense(p.shape, tuple(p.stride()))
    return g if same(g.shape, tuple(g.stride()), want) else wrap(LAID(g, want), g.__dict__["_spec"])


def _lies(source: Source, shape: torch.Size, spec: Spec) -> Strides:
    """Strides of an input's local part: those that it has, or that it is given when it comes in."""
    found = source.strides
    if found is None or (source.kind == "buffer" and not spec.layout.is_replicated()):
        return collective.row_major(shape)
    if source.kind in ("param", "buffer") and is_dense(shape, found, gaps=True):
        return found
    return dense(shape, found)


def _in_order(graph: fx.Graph, listed: Sequence[Input], held: set[str], brought: Sequence[Input]) -> tuple[Input, ...]:
    """Inputs in the order of the placeholders; constants that came up while recording are somewhere among them."""
    rest, late = iter(listed), {i.name: i for i in brought}
    made = []
    for node in graph.nodes:
        if node.op == "placeholder":
            made.append(late[str(node.target)] if str(node.target) in held else next(rest))
    return tuple(made)


__all__ = ["Assignment", "partition"]
