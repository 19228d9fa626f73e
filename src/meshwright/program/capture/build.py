"""From a model and a few layouts to a program: capture, complete, partition.

Pure: no process group, no device and no memory for the model is needed, so a program for any mesh can be looked at
on a laptop.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from ...compat import pytree
from ...errors import LayoutError, ProgramError, near
from ...layout import At, Layout, LayoutLine, LayoutTable, Placements, Replicate, Spec, read_layouts
from ...mesh import Mesh
from ...passes.pass_manager import PassManager
from ...passes.recompute import Recompute
from ...passes.reshard_after_forward import ReshardAfterForward
from ...passes.split_checkpoints import SplitCheckpoints
from ...ranks import runtime
from ...shard.modules.constraints import Inputs, Outputs, hooked
from ...shard.optimizers.kinds import builtin
from ...shard.parameters.made_for import check_plan_matches, planned_for
from ...shard.parameters.names import Names, matching
from ...shard.parameters.packing import whole_over
from ...shard.parameters.precision import Casts, Precisions, casts_of, check_autocast
from ...shard.parameters.stored import Axes, Storage, Stored, stored
from ...tensor import DistTensor
from ..ir.loss_weight import Weighing
from ..ir.nodes import no_collection
from ..ir.program import Program
from .complete import Completed, complete
from .export import Captured, LossFn, capture
from .fakes import writing_nothing
from .loss_sums import MicroBatchWeight, with_count
from .micro_batches import find_weight
from .optimizers import Given, as_one, parts_of
from .partition import Assignment, partition
from .planned import Recomputed, matching_modules
from .refusals import without_anomaly_mode
from .scale import LossScale
from .shared_export import answered, constants_of
from .stages import Given as StagesGiven
from .stages import Homes, Stages, stages_of
from .update import Update, update_of

if TYPE_CHECKING:
    from .conditions import Conditions

Tensor = torch.Tensor
Globs = Mapping[str, Placements]
_UNSAID: tuple[Any, ...] = (None, (), {}, True)


@dataclass(frozen=True)
class Plan(Storage):
    """How a step is to be laid out; what the user said, as data: options of storage, and these.

    Attributes:
        layouts: glob over names of parameters and buffers, of batch tensors (``batch``, ``batch.0``, ``batch.x``) or of
            values of the captured graph, to placements; or a table of them, or its file.
        batch: placements of every batch tensor, or a mapping from their names (``x``, ``batch.x``) to placements.
        inputs, outputs: glob over module names to placements of what goes in or comes out, as for ``shard_module``.
        reshard_after_forward: with ``fsdp``: gather again for the backward instead of keeping gathered parameters.
        shard_states: the optimizer's states are split over this axis, or axes, and with them gradients and the update
            (ZeRO-1/2).
        clip_grad_norm: clip the global norm of the gradients to this.
        gradients: return gradients too (``parameter.grad`` is set after each step).
        loss_scale: scale the loss, skip updates that overflow.
        precision: the dtypes in which ops see parameters and gradients are reduced.
        strategies: of ops that have several, which one an axis takes; None: what ``mw.strategies`` says.
        offload_states: the states alone do, and the update is made there.
        stages: a mesh axis to the list of modules, or globs over names of modules, that say which stage has what; or to
            ``"auto"``.
        by: what an update of an optimizer of the user's own class takes together.
        recompute: globs over names of modules whose calls are run again for the backward.
        made_for: what a plan was made for, which :func:`build` compares.
    """

    layouts: Globs = field(default_factory=dict)
    batch: Any = None
    inputs: Globs = field(default_factory=dict)
    outputs: Globs = field(default_factory=dict)
    reshard_after_forward: bool = True
    shard_states: Axes | None = None
    clip_grad_norm: float | None = None
    gradients: bool = False
    loss_scale: LossScale | None = None
    precision: Precisions | None = None
    strategies: Mapping[str, Mapping[str, str]] | None = None
    offload_states: str | None = None
    stages: StagesGiven | None = None
    by: str | None = None
    recompute: Sequence[str] = ()
    made_for: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the file; a table says what nobody else does."""
        table = read_layouts(self.layouts)
        object.__setattr__(self, "layouts", dict(table or {}))
        if not isinstance(table, LayoutTable):
            return
        said: dict[str, Any] = {k: v for k, v in table.options.items() if k != "passes"}
        said |= {"inputs": {**table.inputs, **self.inputs}, "outputs": {**table.outputs, **self.outputs}}
        said |= {"batch": table.batch or self.batch, "made_for": planned_for(table)}  # {}: no axis splits it
        for name, value in said.items():
            if name in ("inputs", "outputs") or getattr(self, name) in _UNSAID:
                object.__setattr__(self, name, value)

    def keywords(self) -> dict[str, Any]:
        """Keywords of ``compile_step`` that say the same; what tables alone say is in the layouts."""
        said = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("recompute", "made_for")}
        if self.recompute:
            lines = {glob: LayoutLine(placements) for glob, placements in dict[str, Any](self.layouts).items()}
            said["layouts"] = LayoutTable({}, lines, options={"recompute": list(self.recompute)})
        return said

    def optimizer_options(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Options of ``shard_optimizer``, by name."""
        by = None if builtin(optimizer) else self.by
        return {"shard_states": self.shard_states, "offload_states": self.offload_states, "by": by}


@dataclass(frozen=True)
class Built:
    """What the stages made of a step, for one rank.

    Attributes:
        captured: the step of one device.
        completed: where layouts came from.
        laid: the layouts.
        program: the rank's program.
        stored: name of each parameter to the spec in which it is to be stored.
        kept: name of each parameter that is kept otherwise than ops see it to its record.
        update: what of the optimizer is in the program; None if it runs after it.
        decided: glob of the plan's layouts to the names of which it says how they lie.
        met: option and name of each module that was called with, or returned, what ``inputs`` or ``outputs`` is for.
        stages: what each stage has, of a step with stages.
    """

    captured: Captured
    completed: Completed
    laid: Assignment
    program: Program
    stored: dict[str, Spec]
    kept: dict[str, Stored]
    update: Update | None
    decided: Mapping[str, tuple[str, ...]]
    met: Collection[tuple[str, str]]
    stages: Stages | None


def build(
    model: nn.Module,
    loss_fn: LossFn | None,
    optimizer: Given,
    batch: Any,
    mesh: Mesh,
    plan: Plan | None = None,
    *,
    rank: int | None = None,
    train: bool = True,
    again: bool = False,
    homes: Homes | None = None,
    weighing: Weighing | None = None,
    captured: Captured | None = None,
) -> Built:
    """Capture a step, complete its layouts and partition it for one rank.

    Args:
        model: for one device; plain, on the meta device or fake (no memory), or distributed already.
        loss_fn: ``loss_fn(model, batch)`` returns the loss; None: the model does, given the batch.
        optimizer: of the model's parameters, or several; None: the program returns gradients.
        batch: an example with global shapes; values do not matter.
        mesh: need not be connected.
        rank: whose program; the first one's unless given.
        train: False: forward only.
        again: the model lies as another capture laid it: what that left plain, because it was whole, stays whole.
        homes: of how many ranks there are along the axis of stages, the one of each stage; None: one each.
        weighing: a pass cuts batches into micro-batches, and asks how much each counts; None: none does.
        captured: the step, if it is captured already, with all that hooks of the plan would leave in it.

    Raises:
        PassError: the loss is no weighted mean over micro-batches.
        CaptureError, LayoutError, ShardError, MeshwrightError: with the user's line where there is one.
    """
    plan = plan or Plan()
    requested_strategy = runtime.RT.strategies if plan.strategies is None else plan.strategies
    staged = sum(1 << a for a, name in enumerate(mesh.axes) if name in (plan.stages or ()))
    with no_collection(), without_anomaly_mode(), writing_nothing(), runtime.preferring(requested_strategy, staged):
        return _build(
            model, loss_fn, as_one(optimizer), batch, mesh, plan, rank, train, again, homes, weighing, captured
        )


def _build(
    model: nn.Module,
    loss_fn: LossFn | None,
    optimizer: Any,
    batch: Any,
    mesh: Mesh,
    plan: Plan,
    rank: int | None,
    train: bool,
    again: bool,
    homes: Homes | None,
    weighing: Weighing | None,
    captured: Captured | None,
) -> Built:
    check_plan_matches(model, mesh, plan.made_for)
    casts = _casts(model, mesh, plan)
    met: set[tuple[str, str]] = set()
    if captured is None:
        with _hooks(model, mesh, plan, casts) as met:
            captured = capture(model, loss_fn, batch, mesh.device, casts.dtypes)
    constraints, decided = _constraints(model, captured, mesh, plan, batch)
    if again:
        plain = {n for n, b in model.named_buffers() if not isinstance(b, DistTensor)}
        constraints.update({s.node: Layout(mesh) for s in captured.sources if s.kind == "buffer" and s.name in plain})
    completed = complete(captured, mesh, constraints)
    stages = stages_of(model, captured, mesh, plan.stages, homes)
    laid, final, kept = _assign_layouts(model, captured, completed, mesh, plan, casts, stages)
    counting = captured
    if weighing is not None and train:

        def capture_again(batch: Any) -> Captured:
            with _hooks(model, mesh, plan, casts):
                return capture(model, loss_fn, batch, mesh.device, casts.dtypes)

        counting, laid = _counting(captured, laid, _weighed(captured, completed, capture_again, batch, weighing))
    update = None
    if optimizer is not None and train:
        update = update_of(optimizer, {id(p): n for n, p in model.named_parameters()})
    if plan.loss_scale is not None and train:
        _check_scaled(model, optimizer, update)
    made = partition(
        counting, laid, mesh, mesh.ranks[0] if rank is None else rank, update=update,
        clip_grad_norm=plan.clip_grad_norm, gradients=plan.gradients, shard_states=plan.shard_states,
        offload_states=plan.offload_states, train=train, loss_scale=plan.loss_scale,
    )  # fmt: skip
    always = PassManager(
        [Recompute(), SplitCheckpoints(), *([ReshardAfterForward()] if plan.reshard_after_forward else [])]
    )
    return Built(captured, completed, laid, always(made), final, kept, update, decided, met, stages)


def _weighed(
    captured: Captured,
    completed: Completed,
    capture_again: Callable[[Any], Captured],
    batch: Any,
    weighing: Weighing,
) -> MicroBatchWeight:
    """What the loss is a mean over: it depends on nothing but the graph, global layouts and values of constants."""
    layouts = {s.node: completed.layouts[s.node] for s in captured.sources if s.kind == "batch"}
    values = constants_of(s.value for s in captured.sources if s.value is not None)

    def found() -> MicroBatchWeight:
        return find_weight(captured, layouts, capture_again, batch, weighing)

    if values is None:
        return found()
    return answered(captured.answers, ("loss weight", *layouts.items(), weighing, values), found)


def _counting(captured: Captured, laid: Assignment, found: MicroBatchWeight) -> tuple[Captured, Assignment]:
    """The step, and its layouts, with the count of a micro-batch as its last output, where values say it."""
    laid = replace(laid, weight=found.weight)
    if not found.weight.counted:
        return captured, laid
    made, origins = with_count(captured, found)
    return made, replace(
        laid, stages={**laid.stages, **{n: s for n, of in origins.items() if (s := laid.stages.get(of)) is not None}}
    )


def conditions_of(
    model: nn.Module, loss_fn: LossFn | None, batch: Any, mesh: Mesh, plan: Plan, dims: Mapping[int, Sequence[int]]
) -> Conditions:
    """What sizes of batches must fulfil, so that the step does what it was captured to do.

    Args:
        dims: of the tensors of a batch, by their number, those of which the size is open.

    Raises:
        Unlike: what the step does with sizes is not what a program of many can do.
        CaptureError: as :func:`build`.
    """
    from .conditions import conditions  # and sympy, which takes long to import

    casts = _casts(model, mesh, plan)
    with no_collection(), without_anomaly_mode(), writing_nothing(), _hooks(model, mesh, plan, casts):
        return conditions(model, loss_fn, batch, mesh.device, casts.dtypes, dims)


def _check_scaled(model: nn.Module, optimizer: Any, update: Update | None) -> None:
    """Raises ProgramError where gradients of a scaled loss cannot be used."""
    if update is None:
        kinds = ", ".join(type(o).__name__ for o in parts_of(optimizer)) or "no optimizer"
        raise ProgramError(
            f"loss_scale with {kinds}: an update that "
            "overflowed is skipped inside of the program, so use one of those that become part of it: Adam, AdamW, SGD "
            "of parameters in float32"
        )
    halves = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype is torch.float16]
    if halves:
        raise ProgramError(
            f"loss_scale with {halves[0]} in float16, whose gradients overflow when they are unscaled: keep parameters "
            "in float32 and compute in float16 under torch.autocast"
        )


# ---------------------------------------------------------------------------------------------- what the user said


def _casts(model: nn.Module, mesh: Mesh, plan: Plan) -> Casts:
    """What the plan's precision says.

    Raises ProgramError where the model has one from elsewhere, or computes what overflows without a loss scale, and
    ShardError where autocast says something else.
    """
    cast = next((n for n, p in model.named_parameters() if stored(p).unit and stored(p).dtypes), None)
    if cast is not None:
        raise ProgramError(
            f"{cast} has a precision from mw.shard_module(precision=...), and captured steps cast for themselves: pass "
            "precision= to mw.compile_step, and a plain model, or one from shard_module(sync=False) without precision="
        )
    casts = casts_of(model, Names(model), plan.precision)
    for name, dtypes in casts.dtypes.items():
        if dtypes.compute is torch.float16 and plan.loss_scale is None:
            raise ProgramError(
                f"precision computes {name} in float16, in which small gradients vanish: scale the loss, with "
                'loss_scale="dynamic" or a number (1.0 for none), or compute in bfloat16'
            )
    check_autocast(casts.dtypes.items(), mesh.device)
    return casts


@contextlib.contextmanager
def _hooks(model: nn.Module, mesh: Mesh, plan: Plan, casts: Casts) -> Iterator[set[tuple[str, str]]]:
    """Inside, modules cast what goes in and comes out, and leave the plan's constraints of it; gives those that did, as
    they do."""
    modules, met = dict(model.named_modules()), set[tuple[str, str]]()
    names = {id(m): n for n, m in modules.items()}
    handles = list(casts.attach(model))
    handles += [Recomputed(modules[name]) for name in matching_modules(plan.recompute, modules)]
    for globs, kind, register in (
        (plan.inputs, Inputs, "register_forward_pre_hook"),
        (plan.outputs, Outputs, "register_forward_hook"),
    ):
        option = kind.__name__.lower()
        for module, placements in hooked(modules, dict(globs or {}), option):
            note = partial(_note, met, (option, names[id(module)]))
            handles += [getattr(module, register)(hook) for hook in (kind(mesh, placements), note)]
    try:
        yield met
    finally:
        for handle in handles:
            handle.remove()


def _note(met: set[tuple[str, str]], key: tuple[str, str], module: nn.Module, *given: Any) -> None:
    """A hook: that a module has floating-point tensors where a constraint is for them."""
    floating = (x for x in pytree.tree_leaves(given[-1]) if isinstance(x, Tensor))
    if any(x.is_floating_point() or x.is_complex() for x in floating):
        met.add(key)


def _constraints(
    model: nn.Module, captured: Captured, mesh: Mesh, plan: Plan, batch: Any
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Node of the captured graph to what the user said of it; and glob to the names of which it says so."""
    by_name = {s.name: s.node for s in captured.sources}
    by_name.update({other: by_name[first] for other, first in captured.tied.items() if first in by_name})
    constraints: dict[str, Any] = {}
    carried: dict[str, Layout] = {}  # node to the layout of the distributed tensor that stands behind it
    said_by: dict[str, str] = {}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(t, DistTensor) and name in by_name:
            # A program may have been made of the model before: then it is stored split, and the ops see what they saw.
            as_kept = plan.fsdp is None and plan.stages is None
            layout = t.spec.layout if as_kept else whole_over(t.spec, stored(t).axes)
            constraints[by_name[name]] = carried[by_name[name]] = layout
    values = (n for n in captured.graph.nodes if n.op == "call_function" and n.meta.get("val") is not None)
    names = [*by_name, *(n.name for n in values)]  # but of checks, as of dtypes under autocast
    what = "parameter, buffer, batch tensor or value of the program"
    modules = dict(model.named_modules(remove_duplicate=False))
    numbers = {s.node for s in captured.sources if not s.fake.ndim}
    for glob, matched in matching(dict(plan.layouts or {}), names, what, modules).items():
        for name in sorted(matched):
            if by_name.get(name, name) not in numbers or name == glob:
                said_by.pop(name, None)
                said_by[name] = glob  # the last glob that matches counts, as in shard_module
            # a pattern for weights meets counters too, of which there is nothing to split
    for name, glob in said_by.items():
        node, placements = by_name.get(name, name), dict(plan.layouts or {})[glob]
        if node in carried and Layout(mesh, placements).placements != carried[node].placements:
            raise LayoutError(
                f"layouts={{{glob!r}: {placements!r}}} contradicts {name}, which is a DistTensor with "
                f"{carried[node]!r}. Reshard the parameter, or leave the glob out."
            )
        constraints[node] = placements
    said = batch_placements(plan.batch, [s.name for s in captured.sources if s.kind == "batch"], mesh)
    for source in captured.sources:
        wanted = said.get(source.name) if source.kind == "batch" else None
        if wanted is plan.batch and not source.fake.ndim:
            wanted = None  # said of all tensors of the batch: a number has nothing to split
        if wanted is not None and source.node not in constraints:
            constraints[source.node] = wanted
    leaves = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    for source, leaf in zip((s for s in captured.sources if s.kind == "batch"), leaves, strict=True):
        if isinstance(leaf, DistTensor):
            constraints.setdefault(source.node, leaf.spec.layout)
    decided = {g: tuple(n for n, said in said_by.items() if said == g) for g in plan.layouts or {}}
    return constraints, decided


def batch_placements(given: Any, names: Sequence[str], mesh: Mesh) -> dict[str, Any]:
    """Name of each tensor of the batch to its placements, by its name or of all; the last glob that matches counts.

    Raises LayoutError for a name that is none of a tensor, nor of an axis.
    """
    if given is None or not isinstance(given, Mapping) or (given.keys() <= set(mesh.axes) and _are_placements(given)):
        return dict.fromkeys(names, given)
    short = {name: name.removeprefix("batch.") for name in names}
    found = {g: [n for n in names if any(fnmatch.fnmatchcase(x, str(g)) for x in (n, short[n]))] for g in given}
    for glob, matched in found.items():
        if not matched:
            raise LayoutError(
                f"batch: {glob!r} is neither an axis of {mesh!r} nor a tensor of the batch"
                f"{near(str(glob), short.values())}"
            )
        if glob not in mesh.axes and not isinstance(given[glob], (Mapping, Layout, list, tuple)):
            raise LayoutError(
                f"batch: {glob!r} is given {given[glob]!r}, which does not say on which axis: "
                f"{{{glob!r}: {{{mesh.axes[0]!r}: {given[glob]!r}}}}} does"
            )
    made: dict[str, Any] = {}
    for glob in given:
        made.update(dict.fromkeys(found[glob], given[glob]))
    return made


def _are_placements(given: Mapping[Any, Any]) -> bool:
    """Whether a mapping says something of axes, and nothing of names that are called like axes."""
    return not any(isinstance(p, (Mapping, Layout, list, tuple)) for p in given.values())


# ---------------------------------------------------------------------------------------------- layouts as specs


def _assign_layouts(
    model: nn.Module,
    captured: Captured,
    completed: Completed,
    mesh: Mesh,
    plan: Plan,
    casts: Casts,
    stages: Stages | None,
) -> tuple[Assignment, dict[str, Spec], dict[str, Stored]]:
    everywhere, names = mesh.everywhere, Names(model)
    specs: dict[str, Spec] = {}
    params: dict[str, Spec] = {}
    for source in captured.sources:
        # What the user holds outside of the model stays whole: the program shares its memory.
        layout = Layout(mesh) if source.kind == "constant" else completed.layouts[source.node]
        if layout.partial and source.kind != "batch":
            raise LayoutError(f"{source.name}: a parameter cannot be Partial; use mw.Shard or mw.Replicate")
        # What carries no gradient fits whatever it meets; parameters get their types from their first use.
        told = casts.dtypes.get(source.name)
        sums, wire = (None, None) if told is None else (told.accumulate, told.grad_comm)
        specs[source.node] = Spec(
            source.fake.shape,
            source.fake.dtype,
            layout,
            undecided_mask=everywhere,
            accumulate_dtype=sums,
            comm_formats=(None, wire),
        )
        if source.kind in ("param", "buffer"):
            own = source.fake.dtype if told is None else names.tensors[source.name].dtype
            params[source.name] = specs[source.node].summed_as(own)
    placed = dict(params)
    for name, t in model.named_parameters():
        if name not in placed and name not in captured.tied:  # a parameter that the loss does not need
            placed[name] = Spec(t.shape, t.dtype, Layout(mesh), undecided_mask=everywhere)
    records = plan.records(names, mesh, placed, casts.dtypes)
    if stages is not None:
        _check_whole(specs, mesh.axes[stages.axis], stages.axis, {s.node: s.name for s in captured.sources})
        _put_at_stages(placed, records, stages)
    kept = {s.node: records[s.name] for s in captured.sources if s.kind == "param" and s.name in records}
    lie = {s.node: placed[s.name] for s in captured.sources if s.node in kept}
    where, axis = ({}, "") if stages is None else (stages.nodes, mesh.axes[stages.axis])
    if stages is not None:
        where = where | {s.node: stages.params[s.name] for s in captured.sources if s.name in stages.params}
    laid = Assignment(specs, lie, completed.constraints, completed.origins, kept, where, axis)
    buffers = {n for n, _ in model.named_buffers()}
    final = {
        n: s
        for n, s in placed.items()
        if n not in buffers or not s.layout.is_replicated()  # buffers that are whole everywhere stay plain tensors
    }
    return laid, final, records


def _check_whole(specs: Mapping[str, Spec], axis: str, index: int, names: Mapping[str, str]) -> None:
    """Raises LayoutError for an input that is split over the axis of the stages."""
    for node, spec in specs.items():
        if not isinstance(spec.layout.placements[index], Replicate):
            raise LayoutError(
                f"{names[node]} lies as {spec.layout!r}, and {axis!r} is the axis of the stages, over which layers are "
                "spread: split it over another axis"
            )


def _put_at_stages(specs: dict[str, Spec], records: dict[str, Stored], stages: Stages) -> None:
    """Have parameters stored at their stages: specs become those, records say so.

    Numbers, which have no rows to leave out, are on all ranks.  Raises LayoutError for what is stored over the axis.
    """
    axis = stages.axis
    for name, stage in stages.params.items():
        spec, how = specs[name], records.get(name, Stored())
        if axis in how.axes:
            raise LayoutError(f"{name} is stored over {spec.mesh.axes[axis]!r}, the axis of the stages: take another")
        if spec.ndim:
            specs[name] = spec.with_(layout=spec.layout.replace(axis, At(stages.homes[stage])))
            records[name] = replace(how, axes=(*how.axes, axis))


def checked_mesh(mesh: Any) -> Mesh:
    """``mesh`` as a mesh.  Raises ProgramError for anything else."""
    if not isinstance(mesh, Mesh):
        raise ProgramError(f"mesh={mesh!r}: a mw.Mesh was expected, from mw.init_mesh({{'dp': 2}})")
    return mesh
