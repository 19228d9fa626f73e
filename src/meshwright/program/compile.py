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
from ..layout import At, LayoutTable, Placements, read_layouts
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
from .capture.free_variables import constants, numbers, places
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

    def constants(self) -> Mapping[str, Any]:
        return constants(self.loss_fn, self.model)

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
            shard_optimizer(part, **self.plan.optimizer_options(part))

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

    def constants(self) -> Mapping[str, Any]:
        return constants(self.step_fn, self.model)


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
    by: str | None = None,
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
    """Capture one training step as a static program per rank. `loss = step(batch)` runs it.

    The program holds forward, backward, collectives and the update. Layouts that you do not give are inferred. The step
    must do the same work every time: no branches on tensor values.

    PyTorch: `torch.compile` of a whole step, with sharding.

    Args: Model and data
        model: A module for one device, the same on every rank, or on the meta device, or from
            `shard_module(sync=False)`. Its parameters are sharded in place.
        loss_fn: `loss_fn(model, batch)` returns the loss, or a tuple or dict that starts with it. `None`: the model
            computes the loss; it is called as `model(**batch)`, `model(*batch)` or `model(batch)`.
        optimizer: One, a list, or `None` (gradients only). SGD, Adam and AdamW run inside the program. Others, and
            those with step hooks, run after it on local tensors.
        example_batch: A tensor, or nested tuples, lists and dicts of tensors, with global shapes. Values do not matter.

    Args: Layouts
        mesh: A connected or a simulated mesh.
        layouts: Globs of parameters, buffers, batch tensors (`batch.0`) or values of the program to placements; or a
            [LayoutTable][meshwright.LayoutTable] or the path of one, whose options (`fsdp`, `stages`, ...) count where
            you give none. The last glob that matches wins.
        batch: Placements of all batch tensors, or globs of their names: `{"input_ids": {"dp": mw.Shard(0)}}` for a
            dict, `"0"` for a tuple, `"images.pixels"` for nested ones. Default: those of the table.
        inputs: As for [shard_module][meshwright.shard_module].
        outputs: As for `shard_module`.
        strategies: Algorithm of an op on an axis, as for [strategies][meshwright.strategies].
        stages: Pipeline axis to a list of modules (`{"pp": "model.layers"}`), to globs with stages (`{"pp": {"encoder":
            0, "decoder": 1}}`), or to `"auto"`, which balances time. Parameters and optimizer states are stored at
            their stage only. Without the pass `pipeline`, every rank still computes all layers.

    Args: Storage (ZeRO, offload)
        fsdp: Axis or axes over which parameters are stored sharded and all-gathered for use (ZeRO-3); or globs of names
            of parameters or modules to axes. FSDP2: `fully_shard`.
        offload: `"cpu"` stores parameters, gradients and optimizer states on the CPU and updates there; or globs of
            names. FSDP2: `CPUOffloadPolicy`.
        reshard_after_forward: With `fsdp` or `offload`: free parameters after forward, and gather or copy them again
            for backward. FSDP2: `reshard_after_forward`.
        shard_states: Axis or axes over which optimizer states, gradients and the update are sharded (ZeRO-1/2).
        offload_states: `"cpu"` keeps optimizer states and the update on the CPU.
        by: What an update of an optimizer class of your own takes together: `"element"`, `"parameter"` or `"model"`
            (see `shard_optimizer`).

    Args: Numerics
        precision: As for `shard_module`. Micro-batches accumulate in its `reduce`. FSDP2: `MixedPrecisionPolicy`.
        init: As for `shard_module`.
        loss_scale: `"dynamic"`, a number or a [LossScale][meshwright.LossScale]. An update with non-finite gradients on
            any rank is skipped on all, without waiting for the CPU. PyTorch: `GradScaler`.
        clip_grad_norm: Maximum global norm of the gradients. Default: no clipping.
        gradients: Set `parameter.grad` after each step.

    Args: Program
        passes: Passes, or texts such as `"data-parallel-optimization:bucket_bytes=4194304"`; or a `PassManager`. They
            run in the order they declare, then as listed.
        backend: `"inductor"` compiles the code between collectives. `"cudagraphs"`, on GPUs, replays it as CUDA graphs.
        check: Compare loss and gradients with those of the program without `passes`, on all ranks, before the update:
            `"first"` call of each capture, `"always"`, or `False`.

    Returns:
        The step. `step(batch)` returns the loss as a DistTensor; `step.explain()`, `step.ledger` and `step.program`
        describe it.

    Raises:
        CaptureError: If the step branches on values. The message names your line.
        PassError: If passes repeat, conflict or cannot be applied. In a step: if a pass changes a gradient.
        LayoutError: If a placement does not fit, on all ranks, before anything runs.
        ShardError: If a glob matches nothing or an option does not fit the model, on all ranks, before anything runs.
        DesyncError: If programs differ between ranks, on all ranks, before anything runs.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})


        def train():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            batch = (torch.randn(6, 4), torch.randn(6, 1))
            step = mw.compile_step(
                model, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), optimizer, batch,
                mesh=mesh, batch={"dp": mw.Shard(0)}, fsdp="dp",
            )
            losses = [step(batch).item() for _ in range(5)]  # .item() reduces: call it on every rank
            return losses[-1] < losses[0]


        assert mw.simulate(train, mesh) == [True, True]
        ```
    """
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise ProgramError(f"compile_step: clip_grad_norm={clip_grad_norm}: give the largest norm, a number above 0")
    mesh, names = checked_mesh(mesh), {id(p): n for n, p in model.named_parameters()}
    with together(mesh, "compile_step"):
        trained, table = as_one(optimizer), read_layouts(layouts)
        checked_strategies(strategies or {}, mesh.axes)
    if isinstance(table, LayoutTable) and not passes:
        passes = table.options.get("passes", ())
    manager = _manager(passes)
    plan = Plan(
        layouts={} if table is None else table, batch=batch, inputs=dict(inputs or {}), outputs=dict(outputs or {}),
        fsdp=fsdp, offload=offload, reshard_after_forward=reshard_after_forward, shard_states=shard_states,
        offload_states=offload_states, by=by, clip_grad_norm=clip_grad_norm, gradients=gradients,
        loss_scale=LossScale.of(loss_scale), precision=precision, strategies=strategies, stages=stages,
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
    """Capture a step written by hand for one rank, with `torch.distributed` calls.

    `step_fn(batch)` does this rank's work, with the model and optimizer it closes over. It runs once on fake tensors:
    nothing is sent and nothing changes. Calls of the result then run the recorded program. Python effects such as
    prints and counters happen once. Nothing may depend on tensor values (`loss.item()`).

    Args:
        step_fn: Takes a batch; returns the loss, a tuple or dict of tensors that starts with it, or `None`.
        mesh: Mesh whose axes are the process groups that the step uses.
        model: Model whose parameters and buffers the step changes in place. Several: an `nn.ModuleList`.
        optimizer: Optimizer whose `step()` the step calls once. SGD, Adam and AdamW run inside the program, others
            after it. Several: a list of all that the step calls.
        batch: This rank's batch, as an example: shapes, dtypes and structure count.
        passes: As for [compile_step][meshwright.compile_step].
        backend: `"inductor"` compiles the code between collectives. `"cudagraphs"`, on GPUs, replays it as CUDA graphs.
        check: As for [compile_step][meshwright.compile_step].

    Returns:
        A step: `loss = step(batch)`, with this rank's batch and loss.

    Raises:
        PassError: If a pass is given twice, passes conflict or cannot be applied. In a step: if one changes a gradient.
        CaptureError: If the step reads values, calls what no program can hold, or leaves gradients for the next step.
        DesyncError: If ranks recorded different steps, before anything runs.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 1})


        def train():
            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step_fn(batch):
                loss = model(batch).square().mean()
                loss.backward()
                # on several ranks: dist.all_reduce(p.grad) for p in model.parameters()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            step = mw.capture_local(step_fn, mesh, model=model, optimizer=optimizer, batch=torch.ones(2, 4))
            losses = [step(torch.ones(2, 4)).item() for _ in range(3)]
            return losses[2] < losses[0]


        assert mw.simulate(train, mesh) == [True]
        ```
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
