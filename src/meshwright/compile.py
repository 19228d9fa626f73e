"""``compile_step`` and ``capture_local``: steps captured, rewritten by passes, bound, and explained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
import torch.nn as nn

from .errors import ProgramError, takes
from .explain import Explanation, explain_program
from .layout import Placements
from .mesh import Mesh
from .passes import Pass, PassManager
from .program import LossScale, Plan, Step
from .program.capture.build import Globs, checked_mesh
from .program.capture.export import LossFn
from .program.capture.local import StepFn
from .program.local_step import LocalStep


class CompiledStep(Step):
    """A training step of global tensors, captured by :func:`compile_step`; call it with a batch."""

    def explain(self) -> Explanation:
        """Every collective of the step and why, where layouts came from, bytes and memory."""
        return explain_program(self.program)


class CapturedStep(LocalStep):
    """A step of one rank, captured by :func:`capture_local`; call it with this rank's batch."""

    def explain(self) -> Explanation:
        """Every collective of the step and why, bytes and memory."""
        return explain_program(self.program)


_MODEL = (nn.Module, "give the nn.Module that is trained")
_OPTIMIZER = ((torch.optim.Optimizer, list, tuple, NoneType), "give an optimizer of the model's parameters, or None")
_GLOBS = ((Mapping, NoneType), 'give a dict, glob of names to placements: {"*.weight": {"tp": mw.Shard(0)}}')
_PASSES = ((list, tuple, PassManager), "give a list of passes, or of their names")


@takes(ProgramError, model=_MODEL, optimizer=_OPTIMIZER, layouts=_GLOBS, inputs=_GLOBS, outputs=_GLOBS, passes=_PASSES)
def compile_step(
    model: nn.Module,
    loss_fn: LossFn | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    example_batch: Any,
    *,
    mesh: Mesh,
    layouts: Globs | None = None,
    batch: Placements | Mapping[str, Placements] | None = None,
    inputs: Globs | None = None,
    outputs: Globs | None = None,
    stored_over: str | Mapping[str, str] | None = None,
    regather: bool = True,
    states_over: str | None = None,
    clip_grad_norm: float | None = None,
    gradients: bool = False,
    loss_scale: str | float | LossScale | None = None,
    passes: Sequence[Pass | str] | PassManager = (),
    init: Callable[[nn.Module], Any] | None = None,
    backend: str | None = None,
) -> CompiledStep:
    """Capture a training step of ``model`` on a mesh as one static program, which ``loss = step(batch)`` runs.

    Args:
        model: for one device: plain (the same on every rank), on the meta device, or from
            ``shard_module(sync=False)``.  Its parameters are laid on the mesh, as completion decides.
        loss_fn: ``loss_fn(model, batch)`` returns the loss (global values), or a tuple that begins with it; None: the
            model returns the loss, given the batch.
        optimizer: of the model's parameters; several, each with its own, as a list; None: gradients only.  SGD, Adam
            and AdamW become part of the program; others, and those with step hooks, run after it, on local tensors.
        example_batch: a tensor, or tuples, lists and dicts of tensors, of global shapes; values do not matter.
        mesh: connected (or simulated).
        layouts: glob over names of parameters, buffers, batch tensors (``batch.0``) or values of the program to
            placements.  All others follow by completion.
        batch: placements of all batch tensors.
        inputs, outputs: glob over module names to placements of their inputs and outputs.
        stored_over: store parameters split over this axis, gather them for use (ZeRO-3).
        regather: with ``stored_over``: gather again for the backward instead of keeping gathered parameters.
        states_over: split the optimizer's states over this axis, and with them gradients and the update (ZeRO-1/2).
        clip_grad_norm: clip the global norm of the gradients before the update.
        gradients: set ``parameter.grad`` after each step.
        loss_scale: ``"dynamic"``, a number or a :class:`LossScale`: the backward starts from it, and an update whose
            gradients are not finite, on whatever rank, is skipped on all; the host waits for nothing.
        passes: passes, or texts such as ``"data-parallel-optimization:bucket_bytes=4194304"``; applied in the order
            that they declare, then as listed.  Or a :class:`PassManager`.
        init: as for ``shard_module``.
        backend: ``"inductor"`` compiles what lies between collectives.

    Raises:
        PassError: a pass given twice, passes that conflict, one that cannot be applied.
        CaptureError, LayoutError, ShardError, DesyncError (programs differ): on all ranks, before anything runs.
    """
    plan = Plan(
        dict(layouts or {}), batch, dict(inputs or {}), dict(outputs or {}), stored_over, regather, states_over,
        clip_grad_norm, gradients, LossScale.of(loss_scale),
    )  # fmt: skip
    return CompiledStep(
        model, loss_fn, optimizer, example_batch, checked_mesh(mesh), plan, init=init, backend=backend,
        transform=_manager(passes),
    )  # fmt: skip


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
) -> CapturedStep:
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
        passes: as for :func:`compile_step`.

    Returns:
        A step: ``loss = step(batch)``, with this rank's batch and loss.

    Raises:
        PassError: a pass given twice, passes that conflict, one that cannot be applied.
        CaptureError: the step reads values, calls what no program can hold, or leaves gradients to the next step.
        DesyncError: the ranks recorded different steps; before anything runs.
    """
    return CapturedStep(step_fn, checked_mesh(mesh), model, optimizer, batch, backend, _manager(passes))


def _manager(passes: Sequence[Pass | str] | PassManager) -> PassManager:
    return passes if isinstance(passes, PassManager) else PassManager(passes)


__all__ = ["CapturedStep", "CompiledStep", "capture_local", "compile_step"]
