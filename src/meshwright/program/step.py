"""``compile_step``: a training step captured once and run without Python dispatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
import torch.utils._pytree as pytree

from .. import runtime
from ..collective import Fact, together
from ..errors import ProgramError
from ..mesh import Mesh
from ..shard.module import lay_module
from ..shard.optimizer import shard_optimizer
from .base import BaseStep, options_of
from .capture.build import SEEN, Built, Plan, build
from .capture.export import LossFn, batch_sources
from .capture.optimizers import Given, as_one, parts_of
from .capture.update import update_of
from .check.agree import CAPTURED, REBUILD, meetings, numbers
from .ir.program import Program
from .run.bind import BACKENDS, Carrier, Ready
from .run.guard import check_hooks

Tensor = torch.Tensor


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
        optimizer: Given,
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
        with together(mesh, "compile_step", CAPTURED, REBUILD) as facts:
            check_hooks(model)
            optimizer = as_one(optimizer)
            self.built = self._transformed(
                build(model, loss_fn, optimizer, example_batch, mesh, plan, rank=runtime.RT.rank)
            )
            facts += _facts(self.built, optimizer)
        laid = lay_module(model, mesh, self.built.stored, init)
        for name, layout in self.built.seen.items():
            laid[name].__dict__[SEEN] = layout
        for part in parts_of(optimizer):
            _follow(part, names, dict(model.named_parameters()))
            shard_optimizer(part, states_over=plan.states_over)
        updates = update_of(optimizer, {id(p): n for n, p in model.named_parameters()}) is not None
        carrier = Carrier(model, optimizer, updates, plan.gradients, backend)
        if plan.loss_scale is not None:
            carrier.scale = plan.loss_scale.state(mesh.device)
        super().__init__(mesh, carrier, example_batch)
        self._install(pytree.tree_leaves(example_batch), self._bind(self.built))

    def _bind(self, built: Built) -> Ready:
        captured = built.captured
        return Ready(built.program, self.carrier, _leaf_places(built), captured.out_tree, captured.places)

    def _capture(self, batch: Any) -> Ready:
        with together(self.mesh, "capturing the step again", CAPTURED, REBUILD) as facts:
            built = build(
                self.model, self.loss_fn, self.optimizer, batch, self.mesh, self.plan,
                rank=runtime.RT.rank, train=self.training, again=True,
            )  # fmt: skip
            if self.training:
                built = self._transformed(built)
            facts += _facts(built, self.optimizer)
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


def _facts(built: Built, optimizer: Any) -> list[Fact]:
    return [*numbers(options_of(optimizer), built.captured.module), *meetings(built.program)]


def _leaf_places(built: Built) -> dict[str, int]:
    return {s.name: s.leaf for s in batch_sources(built.captured.sources)}


def _follow(optimizer: torch.optim.Optimizer, names: dict[int, str], params: dict[str, Tensor]) -> None:
    """Have an optimizer hold the tensors that took the place of those of a model on the meta device."""
    for group in optimizer.param_groups:
        group["params"] = [params[names[id(p)]] if id(p) in names else p for p in group["params"]]
    for p in [p for p in optimizer.state if id(p) in names and params[names[id(p)]] is not p]:
        optimizer.state[params[names[id(p)]]] = optimizer.state.pop(p)


__all__ = ["Step"]
