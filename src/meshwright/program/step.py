"""``compile_step``: a training step captured once and run without Python dispatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from .. import runtime
from ..errors import ProgramError
from ..layout import Placements
from ..mesh import Mesh
from ..shard.module import lay_module
from ..shard.optimizer import shard_optimizer
from .agree import agree, together
from .base import BaseStep
from .bind import BACKENDS, Carrier, Ready
from .build import Built, Globs, Plan, build, checked_mesh
from .capture import LossFn, batch_sources
from .core import Program
from .update import update_of

Tensor = torch.Tensor


def compile_step(
    model: nn.Module,
    loss_fn: LossFn | None,
    optimizer: torch.optim.Optimizer | None,
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
    init: Callable[[nn.Module], Any] | None = None,
    backend: str | None = None,
    transform: Callable[[Program], Program] | None = None,
) -> Step:
    """Capture a training step of ``model`` on a mesh as one static program.

    Args:
        model: for one device.  Plain (the same on every rank), on the meta device, or from
            ``shard_module(sync=False)``.  Its parameters are laid on the mesh, as completion decides.
        loss_fn: ``loss_fn(model, batch)`` returns the loss (global values), or a tuple that begins with it; None: the
            model returns the loss, given the batch.
        optimizer: over the model's parameters.  SGD, Adam and AdamW become part of the program; others run after it, on
            local tensors.  None: the program computes gradients only.
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
        init: as for ``shard_module``.
        backend: ``"inductor"`` compiles what lies between collectives.
        transform: applied to every program that trains, before it is bound.

    Returns:
        A step: ``loss = step(batch)``.

    Raises:
        CaptureError, LayoutError, ShardError: on all ranks, before anything runs.
        DesyncError: ranks whose programs differ.
    """
    plan = Plan(
        dict(layouts or {}), batch, dict(inputs or {}), dict(outputs or {}), stored_over, regather, states_over,
        clip_grad_norm, gradients,
    )  # fmt: skip
    on = checked_mesh(mesh)
    return Step(model, loss_fn, optimizer, example_batch, on, plan, init=init, backend=backend, transform=transform)


class Step(BaseStep):
    """A captured training step.  Call it with a batch; it returns the loss, as a DistTensor.

    Attributes:
        program: this rank's program for the batches of the last call (or for the example).
        built: all that the stages returned for the example.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        optimizer: torch.optim.Optimizer | None,
        example_batch: Any,
        mesh: Mesh,
        plan: Plan,
        *,
        init: Callable[[nn.Module], Any] | None = None,
        backend: str | None = None,
        transform: Callable[[Program], Program] | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise ProgramError(f"backend={backend!r}: None or 'inductor' was expected")
        self.loss_fn, self.plan, self.transform = loss_fn, plan, transform
        names = {id(p): n for n, p in model.named_parameters()}
        with together(mesh, "compile_step"):
            self.built = self._transformed(
                build(model, loss_fn, optimizer, example_batch, mesh, plan, rank=runtime.RT.rank)
            )
        lay_module(model, mesh, self.built.stored, init)
        updates = False
        if optimizer is not None:
            _follow(optimizer, names, dict(model.named_parameters()))
            updates = update_of(optimizer, {id(p): n for n, p in model.named_parameters()}) is not None
            shard_optimizer(optimizer, states_over=plan.states_over)
            optimizer.register_load_state_dict_post_hook(self._follow_states)
        carrier = Carrier(model, optimizer, updates, plan.gradients, backend)
        super().__init__(mesh, carrier, example_batch)
        self._install(example_batch, self._bind(self.built))

    def _bind(self, built: Built) -> Ready:
        agree(built.program)
        return Ready(built.program, self.carrier, _leaf_places(built), built.captured.out_tree)

    def _capture(self, batch: Any) -> Ready:
        with together(self.mesh, "a batch of another shape"):
            built = build(
                self.model, self.loss_fn, self.optimizer, batch, self.mesh, self.plan,
                rank=runtime.RT.rank, train=self.training,
            )  # fmt: skip
            if self.training:
                built = self._transformed(built)
        return self._bind(built)

    def _transformed(self, built: Built) -> Built:
        return built if self.transform is None else replace(built, program=self.transform(built.program))

    def train(self, mode: bool = True) -> Step:
        """Train (or, with False, only compute the loss) from now on; the model's modules are switched too."""
        self.training = mode
        self.model.train(mode)
        return self

    def eval(self) -> Step:
        """From now on steps compute the loss only, without dropout."""
        return self.train(False)

    def __repr__(self) -> str:
        return f"<Step of {type(self.model).__name__}: {self.program!r}>"


def _leaf_places(built: Built) -> dict[str, int]:
    return {s.name: s.leaf for s in batch_sources(built.captured.sources)}


def _follow(optimizer: torch.optim.Optimizer, names: dict[int, str], params: dict[str, Tensor]) -> None:
    """Have an optimizer hold the tensors that took the place of those of a model on the meta device."""
    for group in optimizer.param_groups:
        group["params"] = [params[names[id(p)]] if id(p) in names else p for p in group["params"]]
    for p in [p for p in optimizer.state if id(p) in names and params[names[id(p)]] is not p]:
        optimizer.state[params[names[id(p)]]] = optimizer.state.pop(p)


__all__ = ["Step", "compile_step"]
