"""Gradient merge: one update for the gradients of several micro-steps.

The idea is that of PaddlePaddle's general gradient merge pass.  A step becomes three programs without a conditional
among them: *accumulate* (forward and backward; gradients are added to sums as autograd gave them, before anything is
sent), the *last* micro-step (the same, then synchronise, clip, update, empty the sums) and *flush* (the update alone).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.fx as fx

from ..collective import COLLECTIVES, STARTS
from ..errors import PassError
from ..layout import At, Layout, Partial, Replicate, Spec
from ..program.ir.edit import Edit
from ..program.ir.inplace import follow, returned, storages, written
from ..program.ir.linear import is_linear
from ..program.ir.loss_weight import LossWeight, Weighing
from ..program.ir.nodes import (
    UPDATE,
    ancestors,
    annotate,
    checked_value,
    draws,
    info_of,
    is_sum,
    reduces,
)
from ..program.ir.program import STEP, WHOLE, Input, Program
from ..program.ir.subgraphs import copied, needed, part_of, read_instead
from .batch_weights import UPDATE_WEIGHTS, WeightNodes, name_of, weight_of, without_count
from .pass_manager import Pass, PassRecord, register

aten = torch.ops.aten

_HINT = "give weighted=False for the plain mean of the micro-steps, or take the step on the whole batch"
Contributions = Mapping[fx.Node, Mapping[int, fx.Node]]  # of a gradient, by stage
# Ops that leave elements as they are and in their order.
_IN_ORDER = {
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.squeeze.default, aten.unsqueeze.default, aten.slice.Tensor, aten.clone.default, aten.alias.default,
    aten.detach.default, aten._to_copy.default,
}  # fmt: skip


@register
@dataclass(frozen=True)
class GradientMerge(Pass):
    """One update for the gradients of ``k_steps`` calls of a step.

    Gradients are added up as autograd gave them, on each rank; what synchronises, clips and uses them runs in every
    ``k_steps``-th call only.  ``step.flush()`` updates from what is there.  Comes before
    ``data-parallel-optimization``, whatever the order in which both are listed.

    Attributes:
        k_steps: micro-steps per update; 1 leaves the program as it is.
        avg: update with the mean over the micro-steps, else with their sum.
        weighted: weigh micro-steps by what their losses are means over, so that the mean is that of one step on all
            micro-batches together, however many labels of each are ignored; False: all alike.  Of a loss that is a sum,
            and in steps by hand, they are all alike.
        rows_dim: which dim of the batch's tensors has its rows; None: the first, or what the mesh shards.
        whole_sums: sum gradients of parameters that are stored split (ZeRO-3) whole and scatter them once per update:
            less is sent, and the sums are as large as the gathered parameters.  Otherwise each micro-step scatters.

    Raises:
        PassError: ``k_steps`` below 1, options of other types; in :meth:`apply` a program that has no gradients, is
            merged already, returns what only complete gradients have, or whose loss is no weighted mean of those of
            micro-batches.
    """

    name = "gradient-merge"
    before = ("data-parallel-optimization",)

    k_steps: int
    avg: bool = True
    whole_sums: bool = False
    weighted: bool = True
    rows_dim: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.k_steps, int) or isinstance(self.k_steps, bool) or self.k_steps < 1:
            raise PassError(f"gradient-merge: k_steps={self.k_steps!r}: a whole number of at least 1 was expected")
        for option in ("avg", "whole_sums", "weighted"):
            if not isinstance(getattr(self, option), bool):
                raise PassError(f"gradient-merge: {option}={getattr(self, option)!r}: True or False was expected")
        if self.rows_dim is not None and (not isinstance(self.rows_dim, int) or self.rows_dim < 0):
            raise PassError(f"gradient-merge: rows_dim={self.rows_dim!r}: pass the number of a dim, or None")

    @property
    def calls_per_update(self) -> int:
        """Micro-steps."""
        return self.k_steps

    @property
    def averages(self) -> bool:
        """As asked for."""
        return self.avg

    @property
    def weighing(self) -> Weighing | None:
        """How much micro-steps count, where they do not count alike."""
        return Weighing(_HINT, self.rows_dim) if self.k_steps > 1 and self.avg and self.weighted else None

    def apply(self, program: Program) -> tuple[Program, PassRecord]:
        """The program of the last micro-step, with the parts ``accumulate``, for the others, and ``flush``."""
        if self.k_steps == 1:
            return program, PassRecord("one micro-step per update: the program stays as it is")
        merge = Merge(copied(program), self)
        made = merge.run()
        return made, _record(made, merge)


def _record(last: Program, merge: Merge) -> PassRecord:
    sums = [checked_value(s.node).fresh(0, checked_value(s.place).dtype) for s in merge.sums]
    nbytes = sum(v.nbytes for v in sums)
    kinds = last.parts["accumulate"].kinds, last.kinds, last.parts["flush"].kinds
    return PassRecord(
        f"{len(sums)} gradients are summed over {len(last.step)} micro-steps and synchronised once",
        (
            f"sums: {nbytes} bytes on this rank",
            f"the update is by {merge.words()}",
            f"collectives of a micro-step that does not update: {kinds[0]}",
            f"of the one that updates: {kinds[1]}; of a flush: {kinds[2]}",
        ),
        {"sums": len(sums), "bytes": nbytes, "accumulate": kinds[0], "last": kinds[1], "flush": kinds[2]},
    )


@dataclass(frozen=True)
class Sum:
    """One sum of gradients over micro-steps.

    Attributes:
        node: the gradient of a micro-step, in the graph of the last one.
        place: the input that holds the sum.
        given: how the input is called.
    """

    node: fx.Node
    place: fx.Node
    given: Input


@dataclass(frozen=True)
class SumsUpdate:
    """What an update does with sums, for a pass that changes it.

    Attributes:
        emptied: sets them to zero, at the end.
        divided: divides them by the weights of micro-steps; None where all are alike.
        total: what the loss is a mean over.
    """

    emptied: fx.Node
    divided: fx.Node | None = None
    total: fx.Node | float = 1.0


class Merge:
    """One application of the pass, on a graph that it may change.

    Args:
        seeded: the backward starts from a micro-batch's weight, where values say it; sums are then of gradients alone.
        contributions: of gradients that are not summed as one, what is: what each stage contributes.

    Attributes:
        update: what ``flush`` does with the sums, once the pass has run.
    """

    update: SumsUpdate

    def __init__(
        self,
        program: Program,
        how: GradientMerge,
        seeded: bool = False,
        contributions: Contributions = MappingProxyType({}),
    ) -> None:
        if program.parts:
            raise PassError(f"the program merges {len(program.step)} micro-steps already")
        self.how, self.plain = how, program
        self.program, self.count = without_count(program)
        self.graph, self.k_steps, self.avg = program.graph, how.k_steps, how.avg
        self.whole_sums = how.whole_sums  # whether reduce-scatters change places with sums over micro-steps
        # Behind the backward, whatever that starts from: hooks see each micro-step's own gradient.
        self.alpha: float | fx.Node = 1 / self.k_steps if self.avg else 1.0
        self.seeded = seeded
        self.contributions = contributions
        self.stage_of = {n: s for of in contributions.values() for s, n in of.items()}
        self.counted: tuple[Any, Any] = (1, 1)  # of a micro-step: how much it counts, and what its loss is divided by
        self.edit = Edit(program.graph, program.mesh.device)
        self.weight: LossWeight | None = None  # micro-steps are all alike
        self.weight_nodes: WeightNodes | None = None
        given = dict(zip(program.placeholders, program.inputs, strict=True))
        self.kept = {s for n, i in given.items() if i.kind == "buffer" for s in storages(n)}
        self.updated = {s for n, i in given.items() if i.kind in ("param", "state", "scale") for s in storages(n)}

    def run(self) -> Program:
        """Cut the graph where gradients are not yet synchronised, and make the three programs."""
        if any(n.target in STARTS.values() for n in self.graph.nodes):
            raise PassError("gradients are sent while others are computed: merge first, then overlap")
        cuts = list(self._cuts())
        place = {n: i for i, n in enumerate(self.graph.nodes)}
        self.end = max(cuts, key=place.__getitem__, default=None)  # of the backward
        if not cuts:
            raise PassError("the program has no gradients to merge; it must be that of a training step")
        weight = weight_of(self.plain) if self.how.avg and self.how.weighted else None
        if weight is not None and weight.weighs:
            self.weight, self.weight_nodes = weight, WeightNodes(weight)
        self._one_sum_each(cuts)
        losses = [o for o in self.program.outputs if o.kind in ("loss", "aux")]
        values = dict(zip(self.program.outputs, self.program.results, strict=True))
        self._independent({o.name: values[o] for o in losses}, cuts)
        # Other ranks may wait in collectives whose result this one, with an empty shard, has no use for.
        met = [n for n in self.program.collectives() if not n.users and info_of(n).role != "optimizer"]
        roots = [*cuts, *met, *(values[o] for o in losses), *([] if self.count is None else [self.count])]
        nodes = needed(self.graph, roots, self._by_forward)
        self._unchanged(nodes)
        nodes |= {n for n in self.graph.nodes if draws(n) and info_of(n).role != "optimizer"}
        self.sums = sums = [self._sum(n) for n in cuts]
        self.places = {s.place: s.given for s in sums}
        if self.weight is not None:
            self.weights = self.edit.input("sum_weights")
            spec = Spec(torch.Size(()), torch.float64, Layout(self.program.mesh))
            self.places[self.weights] = Input(name_of(self.weight), "accumulator", spec)
        self._list_inputs()
        accumulate = part_of(self.program, nodes | {*self.places}, losses)
        self._accumulate(accumulate, sums)
        self._total(sums, nodes)
        schedules = {STEP: ("accumulate",) * (self.k_steps - 1) + (WHOLE,), "flush": ("flush",)}
        return replace(self.program, parts={"accumulate": accumulate, "flush": self._flush(sums)}, schedules=schedules)

    # -- where to cut ---------------------------------------------------------------------------------

    def _cuts(self) -> Iterator[fx.Node]:
        """The gradients, each where nothing has been sent for it yet, unless another one is made of what was sent.

        In the order of their parameters, as that of a rank's own graph may differ.
        """
        order = {i.name: place for place, i in enumerate(self.program.inputs)}
        gradients = [n for n in self.graph.nodes if info_of(n).grad_of]
        unsent = {n: before_reduction(n, self.whole_sums) for n in gradients}
        read = ancestors([*unsent.values()])
        found: dict[fx.Node, int] = {}
        for node, at in unsent.items():
            if not read.isdisjoint(_to_gradient(at, node)):
                at = node
            if self.seeded:
                at = next((n for n in _equivalent_cuts(at) if self._lies(n) is not None), at)
            for cut in self.contributions[at].values() if at in self.contributions else (at,):
                found.setdefault(cut, order[info_of(node).grad_of[0][0]])
        yield from sorted(found, key=lambda cut: (found[cut], self.stage_of.get(cut, -1)))

    def _one_sum_each(self, cuts: list[fx.Node]) -> None:
        seen = set[tuple[str, int | None]]()
        for name, stage in ((n, self.stage_of.get(cut)) for cut in cuts for n in _names(cut)):
            if (name, stage) in seen:
                raise PassError(
                    f"the step sums several gradients of {name} over ranks, each on its own, and adds them afterwards: "
                    "add them first and sum once, so that there is one gradient to merge"
                )
            seen.add((name, stage))

    def _independent(self, outputs: dict[str, fx.Node], cuts: list[fx.Node]) -> None:
        for name, node in outputs.items():
            if not ancestors([node]).isdisjoint(cuts):
                raise PassError(
                    f"the result {name} is computed from gradients, which are complete in every "
                    f"{self.k_steps}th call only; return it from a step of its own, or leave it out"
                )

    def _unchanged(self, nodes: set[fx.Node]) -> None:
        """Forwards and backwards of a micro-step must not see an update of the same step: most have none."""
        changed: set[int] = set()
        for node in self.graph.nodes:
            read = {x for n in node.all_input_nodes for x in storages(n)}
            if node in nodes and info_of(node).role != "optimizer" and not changed.isdisjoint(read):
                where = info_of(node).line or node.name
                raise PassError(
                    f"{where} reads parameters behind an update of them in the same step, which only every "
                    f"{self.k_steps}th call makes: capture the two updates as steps of their own"
                )
            if info_of(node).role == "optimizer":
                changed |= written(node) & self.updated

    def _by_forward(self, node: fx.Node) -> bool:
        """Whether a node writes what a forward leaves behind: running statistics, parameters that it averages."""
        return info_of(node).writes or (info_of(node).role != "optimizer" and not self.kept.isdisjoint(written(node)))

    # -- sums -----------------------------------------------------------------------------------------

    def _sum(self, node: fx.Node) -> Sum:
        """An input for the sum of a gradient."""
        (param, *_), dtype, stage = _names(node), checked_value(node).dtype, self.stage_of.get(node)
        spec = self._lies(node) if self.seeded else next((s for _, s in info_of(node).grad_of), None)
        dtype = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        place = self.edit.input(f"sum_{param.replace('.', '_')}", checked_value(node), dtype)
        name, spec = param if stage is None else f"{param} at stage {stage}", spec and spec.with_(dtype=dtype)
        return Sum(node, place, Input(name, "accumulator", spec, param))

    def _lies(self, node: fx.Node) -> Spec | None:
        """How a gradient lies where micro-steps add it up: Partial where it is summed over ranks behind that."""
        axes, at = set[str](), node
        for at in _to_gradient(node):
            added = at.target is aten.add.Tensor and all(_shape(n) == _shape(at) for n in at.all_input_nodes)
            if at.target not in COLLECTIVES and at.target not in _IN_ORDER and not added:
                return None  # a transposition, say: of a square matrix no shape would tell it
            axes |= set(str(at.args[-2]).split(",")) if is_sum(at) else set()
        spec, mesh = info_of(at).grad_of[0][1], self.program.mesh
        layout = spec.layout
        for name in axes:
            layout = layout.replace(mesh.axis_index(name), Partial())
        for axis, p in enumerate(layout.placements):
            if isinstance(p, At) and node is not at:  # cut to a stage's own behind it
                layout = layout.replace(axis, Replicate())
        made = spec.with_(layout=layout)
        return made if made.local_shape(mesh.coordinate(self.program.rank)) == checked_value(node).shape else None

    def _list_inputs(self) -> None:
        older = [n for n in self.program.placeholders if n not in self.places]
        known = {**dict(zip(older, self.program.inputs, strict=True)), **self.places}
        self.program = replace(self.program, inputs=tuple(known[n] for n in self.program.placeholders))

    def _added(self, edit: Edit, gradient: fx.Node, place: fx.Node, end: fx.Node | None) -> fx.Node:
        """Add a gradient to its sum as soon as it exists: its memory is free from there on.

        A part of one that was scattered is small, and under way until the backward ends.
        """
        kind = COLLECTIVES.get(gradient.target)
        under_way = kind is not None and kind.scatters
        with edit.after(end if under_way and end is not None else gradient, info_of(gradient).beside()) as emit:
            if isinstance(self.alpha, fx.Node):
                made = emit(aten.addcmul_.default, place, gradient, self.alpha)
            else:
                made = emit(aten.add_.Tensor, place, gradient, **({"alpha": self.alpha} if self.alpha != 1.0 else {}))
        annotate(made, grad_of=info_of(gradient).grad_of)
        return made

    # -- the three programs ---------------------------------------------------------------------------

    def _accumulate(self, program: Program, sums: list[Sum]) -> None:
        named = {n.name: n for n in program.graph.nodes}
        end = None if self.end is None else named[self.end.name]
        edit = Edit(program.graph, program.mesh.device)
        if self.weight is not None:
            counted, self.alpha = self.counted = self._weights(edit, named)
            at = counted if isinstance(counted, fx.Node) else program.placeholders[-1]
            if isinstance(self.alpha, fx.Node):
                at = max(at, self.alpha)
            with edit.after(at, UPDATE_WEIGHTS) as emit:
                emit(aten.add_.Tensor, named[self.weights.name], counted)
            if self.seeded and isinstance(self.alpha, fx.Node):
                self.alpha = self._seed_with_weight(program, edit, self.alpha)
        for s in sums:
            self._added(edit, named[s.node.name], named[s.place.name], end)

    def _total(self, sums: list[Sum], earlier: set[fx.Node]) -> None:
        """In the last micro-step, what comes after the backward reads the sums; they end empty.

        Args:
            earlier: what forward and backward consist of; it goes on reading the micro-step's own gradient.
        """
        self.totals: dict[fx.Node, fx.Node] = {}
        self.scaled: fx.Node | None = None
        if self.weight is not None:
            self._scale_by_weight(earlier)

        def later(user: fx.Node) -> bool:
            return user not in earlier

        for s in sums:
            # What reads the gradient may stand before the end of the backward: a cast to the parameter's dtype.
            early = self.end is not None and any(later(u) and u < self.end for u in s.node.users)
            total = added = self._added(self.edit, s.node, s.place, None if early else self.end)
            earlier.add(added)
            dtype = checked_value(s.node).dtype
            if dtype is not checked_value(added).dtype:
                total = self._cast(added, dtype)
            s.node.replace_all_uses_with(total, delete_user_cb=later)
            annotate(s.node, grad_of=())
            self.totals[added] = s.place
        follow(self.graph)  # views of gradients, which the step may write through, are views of sums
        (output,) = self.graph.find_nodes(op="output")
        self._apart(output, {x for s in sums for x in storages(s.place)})
        with self.edit.before(output, UPDATE) as emit:
            self.emptied = emit(aten._foreach_zero_.default, [*self.places])

    # -- weights --------------------------------------------------------------------------------------

    def words(self) -> str:
        """What the update is by."""
        if self.weight is None:
            return "the mean over micro-steps, all alike" if self.avg else "the sum over micro-steps"
        if not self.weight.counted:
            return f"the mean over micro-steps, each by what its loss is a mean over ({self.weight.number:g} here)"
        return f"the mean over micro-steps, each by what its loss is divided by ({self.weight.line})"

    def _weights(self, edit: Edit, named: Mapping[str, fx.Node]) -> tuple[Any, Any]:
        """How much a micro-step counts, and by what its gradients are multiplied before they are added up."""
        assert self.weight_nodes is not None
        return self.weight_nodes.of_micro_batch(edit, None if self.count is None else named[self.count.name])

    def _seed_with_weight(self, program: Program, edit: Edit, by: fx.Node) -> float:
        """Start the backward from a micro-batch's weight, in a unit in which it is about 1: that unit."""
        batch = (i.spec.shape.numel() for i in program.inputs if i.kind == "batch" and i.spec is not None)
        unit = float(2 ** int(math.log2(max(batch, default=1) or 1)))
        (seed,) = (n for n in program.graph.nodes if info_of(n).seed)
        users = list(seed.users)
        with edit.after(max(seed, by), UPDATE_WEIGHTS) as emit:
            one = emit(aten._to_copy.default, emit(aten.mul.Tensor, by, 1 / unit), dtype=checked_value(seed).dtype)
            made = emit(aten.mul.Tensor, seed, one)
        read_instead(users, {seed: made})
        return unit

    def _scale_by_weight(self, earlier: set[fx.Node]) -> None:
        """In the last micro-step, whose backward is to come: sums become its share of the mean, and so does alpha."""
        before = set(self.graph.nodes)
        counted, by = self._weights(self.edit, {n.name: n for n in self.graph.nodes})
        at = max(counted, by) if isinstance(by, fx.Node) else self.program.placeholders[-1]
        with self.edit.after(at, UPDATE_WEIGHTS) as emit:
            end = emit(aten.add.Tensor, self.weights, counted)
        self.scaled, _ = self._divided(self.edit, [s.place for s in self.sums], end)
        with self.edit.after(self.scaled, UPDATE_WEIGHTS) as emit:
            self.alpha = emit(aten.mul.Tensor, emit(aten.reciprocal.default, self.scaled.args[1]), by)
        earlier |= set(self.graph.nodes) - before

    def _divided(self, edit: Edit, places: list[fx.Node], total: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Divide sums by the weights of the micro-steps in them; that, and what the loss is a mean over."""
        assert self.weight_nodes is not None
        mean_over, by = self.weight_nodes.divisor(edit, total)
        with edit.after(by, UPDATE_WEIGHTS) as emit:
            return emit(aten._foreach_div_.Tensor, places, by), mean_over

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        info = info_of(node)
        annotate(node, grad_of=())
        with self.edit.after(node, info) as emit:
            return emit(aten._to_copy.default, node, dtype=dtype)

    def _apart(self, output: fx.Node, sums: set[int]) -> None:
        """Gradients that leave the program and are a sum itself leave as copies."""
        for node in output.all_input_nodes:
            if not sums.isdisjoint(storages(node)):
                with self.edit.before(output, info_of(node)) as emit:
                    output.replace_input_with(node, emit(aten.clone.default, node))

    def _flush(self, sums: list[Sum]) -> Program:
        """The update alone: where the last micro-step adds to a sum, the sum as it is."""
        wanted = self.updated | {x for s in sums for x in storages(s.place)}
        grads = [o for o in self.program.outputs if o.kind == "grad"]
        values = dict(zip(self.program.outputs, self.program.results, strict=True))

        # What a forward wrote to parameters it wrote in its micro-step.
        done = {n: returned(n) for n in self.graph.nodes if info_of(n).writes}
        if self.scaled is not None:
            done[self.scaled] = None
        instead = {**self.totals, **{n: held for n, held in done.items() if held is not None}}

        def writes(node: fx.Node) -> bool | None:
            left = written(node)
            wrote = not wanted.isdisjoint(left) or (
                info_of(node).role == "optimizer" and not self.kept.isdisjoint(left)
            )
            return None if node in done else wrote

        nodes = needed(self.graph, [values[o] for o in grads], writes, instead)
        for node, given in zip(self.program.placeholders, self.program.inputs, strict=True):
            if node in nodes and given.kind == "batch":
                raise PassError(
                    f"the update reads {given.name}, which only a micro-step has: it may read gradients only"
                )
        made = part_of(self.program, nodes, grads, instead)
        named = {n.name: n for n in made.graph.nodes}
        self.update = SumsUpdate(named[self.emptied.name])
        if self.weight is not None:
            edit, places = Edit(made.graph, made.mesh.device), [named[s.place.name] for s in sums]
            self.update = SumsUpdate(self.update.emptied, *self._divided(edit, places, named[self.weights.name]))
            return made
        return self._with_flush_scale(made) if self.avg else made

    def _with_flush_scale(self, program: Program) -> Program:
        """Sums of fewer than k micro-steps become their mean."""
        pairs, edit = zip(program.placeholders, program.inputs, strict=True), Edit(program.graph, program.mesh.device)
        places = [n for n, i in pairs if i.kind == "accumulator"]
        factor = edit.input("flush_scale")
        with edit.after(factor, UPDATE) as emit:
            emit(aten._foreach_mul_.Tensor, places, factor)
        return replace(program, inputs=(*program.inputs, Input("flush_scale", "hyper")))


def _to_gradient(node: fx.Node, gradient: fx.Node | None = None) -> Iterator[fx.Node]:
    """What a node that is summed over micro-steps becomes behind linear ops, up to the (next) gradient."""
    while node is not gradient if gradient is not None else not info_of(node).grad_of:
        (node,) = node.users
        yield node


def _names(node: fx.Node) -> list[str]:
    """Parameters whose gradient a node is, or becomes behind linear ops."""
    *_, gradient = node, *_to_gradient(node)
    return [name for name, _ in info_of(gradient).grad_of]


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(checked_value(node).shape)


def _equivalent_cuts(node: fx.Node) -> Iterator[fx.Node]:
    """A node and those beside it that may be summed over micro-steps in its place: nothing is sent between them."""
    yield node
    at = node
    while is_linear(at := next(iter(at.users))):
        yield at
        if info_of(at).grad_of:
            break
    at = node
    while is_linear(at) and len((at := at.all_input_nodes[0]).users) == 1 and at.op == "call_function":
        yield at


def before_reduction(node: fx.Node, whole_sums: bool) -> fx.Node:
    """Where the value of a gradient was before anything, or an all-reduce without ``whole_sums``, was sent.

    Sums over ranks and over micro-steps may change places, as long as all in between is linear and serves this gradient
    alone: the reduce-scatter that autograd puts behind the gather of a stored parameter, say.
    """
    at = found = node
    # What runs behind such ops may as well run on a sum.
    while is_linear(at) or is_sum(at) or (at.target in COLLECTIVES and not reduces(at)):
        before = at.all_input_nodes[0]
        if len(before.users) > 1 or before.op != "call_function":
            break
        if is_sum(at):
            if not whole_sums and COLLECTIVES[at.target].scatters:
                break
            found = before
        at = before
    return found


__all__ = ["Contributions", "GradientMerge", "Merge", "SumsUpdate", "before_reduction"]
