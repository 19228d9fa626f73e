"""``compile_step`` and ``capture_local``: what a captured step is captured from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from ..collective import together
from ..errors import CaptureError, ProgramError, takes
from ..layout import At, Placements, read_layouts
from ..mesh import Mesh
from ..passes import Pass, PassManager
from ..ranks import runtime
from ..rules import checked_strategies
from ..shard.modules.module import lay_module
from ..shard.optimizers.optimizer import binding_of, shard_optimizer
from ..shard.parameters.precision import PRECISION_WANTED, Precisions
from ..shard.parameters.stored import ON_WANTED, OVER_WANTED, STORED, Axes, Over, on_host, stored
from ..tensor import DistTensor
from . import LossScale, Plan
from .capture.build import Globs, build, checked_mesh, conditions_of
from .capture.export import LossFn, batch_sources
from .capture.fakes import named_in
from .capture.free_variables import numbers, places
from .capture.local import HandWritten, StepFn, record_step
from .capture.optimizers import as_one, parts_of
from .capture.stages import Homes
from .capture.update import update_of
from .ir.loss_weight import Weighing
from .run.guard import check_hooks
from .run.lengths import Read
from .run.proof import Check
from .step import CaptureSource, CompiledStep, Recorded

if TYPE_CHECKING:
    from .capture.conditions import Conditions


@dataclass(frozen=True)
class _OfDevice(CaptureSource):
    """A step of global values, as one device would take it.

    Attributes:
        names: id of each parameter, as the model was given, to its name.
        homes: of how many ranks a pipeline has, the one of each stage.
    """

    name, by_hand = "compile_step", False

    loss_fn: LossFn | None
    init: Callable[[nn.Module], Any] | None
    names: Mapping[int, str]
    homes: Homes

    def record(self, batch: Any, train: bool, again: bool, weighing: Weighing | None = None) -> Recorded:
        if not again:
            check_hooks(self.model)
        made = build(
            self.model, self.loss_fn, self.optimizer, batch, self.mesh, self.plan,
            rank=runtime.RT.rank, train=train, again=again, homes=self.homes, weighing=weighing,
        )  # fmt: skip
        captured = made.captured
        leaves = {s.name: s.leaf for s in batch_sources(captured.sources)}
        return Recorded(made.program, leaves, captured.out_tree, captured.module, captured.places, made)

    def conditions(self, batch: Any, dims: Mapping[int, Sequence[int]]) -> Conditions:
        return conditions_of(self.model, self.loss_fn, batch, self.mesh, self.plan, dims)

    def reads(self) -> Read:
        return numbers([self.loss_fn, self.model])

    @property
    def more(self) -> Mapping[str, Any]:
        return {"init": self.init}

    def prepare(self, recorded: Recorded) -> None:
        """Lay the model on the mesh; the optimizer follows."""
        assert recorded.built is not None
        laid = lay_module(self.model, self.mesh, recorded.built.stored, recorded.built.kept, self.init)
        for name, how in recorded.built.kept.items():
            laid[name].__dict__[STORED] = replace(how, dtypes=None, unit="")  # what casts and gathers it is the program
        for part in parts_of(self.optimizer):
            self._follow(part)
            shard_optimizer(part, **self.plan.optimizer_options())

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer hold the tensors that took the place of those of a model on the meta device."""
        names, params = self.names, dict(self.model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [params[names[id(p)]] if id(p) in names else p for p in group["params"]]
        for p in [p for p in optimizer.state if id(p) in names and params[names[id(p)]] is not p]:
            optimizer.state[params[names[id(p)]]] = optimizer.state.pop(p)


@dataclass(frozen=True)
class _ByHand(CaptureSource):
    """A step that was written for one rank."""

    name, by_hand = "capture_local", True

    step_fn: StepFn

    def record(self, batch: Any, train: bool, again: bool, weighing: Weighing | None = None) -> Recorded:
        if not train:
            raise ProgramError("a step by hand does what it was written to do: capture another one without an update")
        model, optimizer = self.model, self.optimizer
        update = update_of(optimizer, {id(p): n for n, p in named_in(model, optimizer).items()})
        made = HandWritten(self.step_fn, self.mesh, runtime.RT.rank, model, optimizer, batch, update)
        program, tree = record_step(made)
        leaves = {i.name: int(i.name.partition(".")[2]) for i in program.inputs if i.kind == "batch"}
        found = places([self.step_fn, model], program.constants.values(), model)
        return Recorded(program, leaves, tree, places=found)


_MODEL = (nn.Module, "give the nn.Module that is trained")
_OPTIMIZER = ((torch.optim.Optimizer, list, tuple, NoneType), "give an optimizer of the model's parameters, or None")
_GLOBS = ((Mapping, NoneType), 'give a dict, glob of names to placements: {"*.weight": {"tp": mw.Shard(0)}}')
_STAGES = (
    (Mapping, NoneType),
    'give a dict, a mesh axis to a list of modules: {"pp": "model.layers"}, or {"pp": "auto"}',
)
_PASSES = ((list, tuple, PassManager), "give a list of passes, or of their names")


@takes(
    ProgramError, model=_MODEL, optimizer=_OPTIMIZER, inputs=_GLOBS, outputs=_GLOBS, passes=_PASSES, stages=_STAGES,
    layouts=((Mapping, str, PathLike, NoneType), _GLOBS[1]), precision=PRECISION_WANTED,
    fsdp=OVER_WANTED, offload=ON_WANTED,
    clip_grad_norm=((int, float, NoneType), "give the largest norm, a number above 0"),
)  # fmt: skip
def compile_step(
    model: nn.Module,
    loss_fn: LossFn | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    example_batch: Any,
    *,
    mesh: Mesh,
    layouts: Globs | str | PathLike[str] | None = None,
    batch: Placements | Mapping[str, Placements] | None = None,
    inputs: Globs | None = None,
    outputs: Globs | None = None,
    fsdp: Over | None = None,
    offload: str | Mapping[str, str] | None = None,
    reshard_after_forward: bool = True,
    shard_states: Axes | None = None,
    offload_states: str | None = None,
    elementwise: bool = False,
    clip_grad_norm: float | None = None,
    gradients: bool = False,
    loss_scale: str | float | LossScale | None = None,
    precision: Precisions | None = None,
    passes: Sequence[Pass | str] | PassManager = (),
    stages: Mapping[str, str | Mapping[str, int]] | None = None,
    init: Callable[[nn.Module], Any] | None = None,
    strategies: Mapping[str, Mapping[str, str]] | None = None,
    backend: str | None = None,
    check: Check = "first",
) -> CompiledStep:
    """Capture a training step of ``model`` on a mesh as one static program, which ``loss = step(batch)`` runs.

    Args:
        model: for one device: plain (the same on every rank), on the meta device, or from
            ``shard_module(sync=False)``.  Its parameters are laid on the mesh, as completion decides.
        loss_fn: ``loss_fn(model, batch)`` gives the loss, or a tuple or dict that begins with it.  None: the model
            does, called as ``model(**batch)`` with a dict, ``model(*batch)`` with a tuple or a list, else
            ``model(batch)``.
        optimizer: of the model's parameters; several, each with its own, as a list; None: gradients only.  SGD, Adam
            and AdamW become part of the program; others, and those with step hooks, run after it, on local tensors.
        example_batch: a tensor, or tuples, lists and dicts of tensors, of global shapes; values do not matter.
        mesh: connected (or simulated).
        layouts: glob over names of parameters, buffers, batch tensors (``batch.0``) or values of the program to
            placements.  All others follow by completion.  Or a table of :func:`layouts`, or its file.
        batch: placements of all batch tensors (those of the table, unless given); or glob over their names to
            placements: ``{"input_ids": {"dp": mw.Shard(0)}}`` of a dict, ``"0"`` of a tuple, ``"images.pixels"`` of
            what is nested.
        inputs, outputs: glob over module names to placements of their inputs and outputs.
        fsdp: store parameters split over this axis, or these, gather them for use (ZeRO-3); or glob of names of
            parameters or modules to those.
        offload: ``"cpu"``: store parameters, their gradients and the optimizer's states in the memory of the host,
            copy parameters to the device for use, and update them on the host; or glob of names to that.
        reshard_after_forward: with ``fsdp`` or ``offload``: gather and copy again for the backward, keeping nothing.
        shard_states: split the optimizer's states over this axis, or these, and with them gradients and the update
            (ZeRO-1/2).
        offload_states: ``"cpu"``: keep the optimizer's states in the memory of the host, and update there.
        elementwise: an optimizer of a class of your own treats elements one by one, as for ``shard_optimizer``.
        clip_grad_norm: clip the global norm of the gradients before the update.
        gradients: set ``parameter.grad`` after each step.
        loss_scale: ``"dynamic"``, a number or a :class:`LossScale`: the backward starts from it, and an update whose
            gradients are not finite, on whatever rank, is skipped on all; the host waits for nothing.
        precision, init: as for ``shard_module``; micro-steps accumulate in the precision's ``reduce``.
        strategies: of ops that can be computed in several ways, which one an axis takes, as for ``mw.strategies``.
        passes: passes, or texts such as ``"data-parallel-optimization:bucket_bytes=4194304"``; applied in the order
            that they declare, then as listed.  Or a :class:`PassManager`.
        stages: the mesh axis of a pipeline to the list of modules that its stages share out, ``{"pp":
            "model.layers"}``, or to globs of names of modules and the stage of each, ``{"pp": {"encoder": 0, "decoder":
            1}}``, or to ``"auto"``: stages that take equally long.  Parameters and their states are stored at their
            stage alone (``mw.At``), and seen by all.
        backend: ``"inductor"`` compiles what lies between collectives.
        check: compare the loss and each gradient with those of the same program without ``passes``, on all ranks and
            before the update: in the ``"first"`` call of each capture, in each call (``"always"``), or not (False).

    Raises:
        PassError: a pass given twice, passes that conflict, one that cannot be applied; in a step, one that changes a
            gradient.
        CaptureError, LayoutError, ShardError, DesyncError (programs differ): on all ranks, before anything runs.
    """
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise ProgramError(f"compile_step: clip_grad_norm={clip_grad_norm}: give the largest norm, a number above 0")
    mesh, names = checked_mesh(mesh), {id(p): n for n, p in model.named_parameters()}
    with together(mesh, "compile_step"):
        trained, table = as_one(optimizer), read_layouts(layouts)
        checked_strategies(strategies or {}, mesh.axes)
    manager = _manager(passes)
    plan = Plan(
        table or {}, batch, dict(inputs or {}), dict(outputs or {}), reshard_after_forward, shard_states,
        clip_grad_norm, gradients, LossScale.of(loss_scale), precision, strategies, offload_states, stages, elementwise,
        fsdp=fsdp, offload=offload,
    )  # fmt: skip
    _check_prepared(model, trained, plan)
    source = _OfDevice(model, trained, mesh, plan, loss_fn, init, names, manager.homes)
    return CompiledStep(source, example_batch, transform=manager, backend=backend, check=check)


def _check_prepared(model: nn.Module, optimizer: Any, plan: Plan) -> None:
    """What eager code splits by hooks and copies, a captured step splits itself: it must be said to it.

    Raises:
        CaptureError: it was said to ``shard_module`` or ``shard_optimizer`` alone.
    """
    said = [b for o in parts_of(optimizer) if (b := binding_of(o)) is not None]
    states = {"shard_states": plan.shard_states, "offload_states": plan.offload_states}
    apart = next((k for b in said for k, v in states.items() if v is None and getattr(b, k) is not None), None)
    eager = next((how for p in model.parameters() if (how := stored(p)).unit and not how.dtypes), None)
    if apart is not None:
        word, where = apart, "mw.shard_optimizer"
    elif eager is not None:  # a precision is refused with words of its own
        word, where = "fsdp" if eager.axes else "offload", "mw.shard_module"
    elif plan.stages is None and (name := _at_a_stage(model)):
        raise CaptureError(
            f"{name} is stored at a stage of a step that was captured with stages=: give this one the same stages="
        )
    else:
        _check_hosted(model, plan)
        return
    raise CaptureError(
        f"{word}= was said to {where}, which prepares eager steps: give it to mw.compile_step({word}=...), and leave "
        "it out there; or capture the eager step with mw.capture_local"
    )


def _at_a_stage(model: nn.Module) -> str | None:
    """The first parameter that is stored at a stage."""
    for name, p in model.named_parameters():
        if isinstance(p, DistTensor) and any(isinstance(q, At) for q in p.placements):
            return name
    return None


def _check_hosted(model: nn.Module, plan: Plan) -> None:
    """Raises CaptureError for a model that is stored on the host, and a step that takes it on the mesh's device."""
    hosted = next((n for n, p in model.named_parameters() if on_host(p)), None)
    if hosted is not None and plan.offload is None:
        raise CaptureError(
            f"{hosted} is stored on the host (offload=), and this step would take it on the mesh's device: say "
            "offload= to mw.compile_step as well; steps by hand work on models that are stored there"
        )


@takes(
    ProgramError, step_fn=(Callable, "give a function of a batch"), model=_MODEL, optimizer=_OPTIMIZER, passes=_PASSES
)
def capture_local(
    step_fn: StepFn,
    mesh: Mesh,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    batch: Any,
    passes: Sequence[Pass | str] | PassManager = (),
    backend: str | None = None,
    check: Check = "first",
) -> CompiledStep:
    """Capture a step that was written by hand for one rank, with calls of ``torch.distributed``.

    ``step_fn(batch)`` does what a step does on this rank, with the model and the optimizer that it closes over::

        def step_fn(batch):
            loss = loss_of(model(batch[0]), batch[1])
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
            return loss

    It runs once on fake tensors, which stand for the parameters, buffers and the batch while it does; nothing is sent
    and nothing is changed.  Calls of the result then do on real tensors what was recorded.  So Python's own effects
    (a counter, a print) happen once, and nothing may depend on values (``loss.item()``).

    Args:
        step_fn: takes a batch; returns the loss, or a tuple or dict of tensors that begins with it, or None.
        mesh: its axes are the process groups that the step uses.
        model: whose parameters and buffers the step changes, in place; several as an ``nn.ModuleList``.
        optimizer: whose ``step()`` the step calls, once.  SGD, Adam and AdamW become part of the program, others run
            after it.  Several as a list: all that the step calls.
        batch: this rank's batch, as an example: shapes, dtypes and structure count.
        backend: ``"inductor"`` compiles what lies between collectives.
        passes, check: as for :func:`compile_step`.

    Returns:
        A step: ``loss = step(batch)``, with this rank's batch and loss.

    Raises:
        PassError: a pass given twice, passes that conflict, one that cannot be applied; in a step, one that changes a
            gradient.
        CaptureError: the step reads values, calls what no program can hold, or leaves gradients to the next step.
        DesyncError: the ranks recorded different steps; before anything runs.
    """
    mesh = checked_mesh(mesh)
    _check_hosted(model, Plan())
    with together(mesh, "capture_local"):
        trained = as_one(optimizer)
    source = _ByHand(model, trained, mesh, Plan(), step_fn)
    return CompiledStep(source, batch, transform=_manager(passes), backend=backend, check=check)


def _manager(passes: Sequence[Pass | str] | PassManager) -> PassManager:
    return passes if isinstance(passes, PassManager) else PassManager(passes)


__all__ = ["capture_local", "compile_step"]
