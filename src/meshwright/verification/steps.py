"""Steps of the user's training, eager: on one device and on each rank, watched alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn

from ..compat import pytree
from ..errors import VerifyError
from ..program.capture.export import LossFn, leaf_names
from ..program.step import CompiledStep
from ..shard.optimizers.kinds import own_work, reads_no_shapes
from .watch import Key, Observed, Tell, Watch, held, random_state

Tensor = torch.Tensor
Calls = list[tuple[str, str, tuple[Key, ...]]]  # op, line, and the keys of what it is given


@dataclass
class Training:
    """What is trained: on one device, or a rank's part of it.

    Attributes:
        clip: the largest norm of all gradients, or None.
        calls: how many batches an update is of; ``weight``: of each of their gradients.
        alone: inside of what it gives, gradients are not synchronised.
        step_fn: what takes a step in place of all this, captured.
        tell: who is told of what a captured step computes.
        seed: the gradient of each loss.
    """

    model: nn.Module
    loss_fn: LossFn
    optimizer: torch.optim.Optimizer
    batch: Any
    clip: float | None = None
    calls: int = 1
    weight: float = 1.0
    alone: Callable[[], AbstractContextManager[None]] = nullcontext
    step_fn: CompiledStep | None = None
    tell: Tell = lambda seen: None
    seed: float = 1.0

    @property
    def names(self) -> dict[int, str]:
        """Id of what lies in the model or the batch to its name."""
        named = (*self.model.named_parameters(), *self.model.named_buffers(), *named_leaves(self.batch))
        return {id(t): n for n, t in named}

    @property
    def states(self) -> Iterator[tuple[str, Any]]:
        """States of the optimizer by name."""
        return states(self.model, self.optimizer)

    @property
    def saved(self) -> dict[str, Any]:
        """What a checkpoint is given."""
        own = {"model": self.model, "optimizer": self.optimizer}
        return own if self.step_fn is None else {"program": self.step_fn}

    def update(self, tell: Tell) -> Calls:
        """One update, from as many batches as it takes; the calls of all."""
        calls: Calls = []
        for i in range(self.calls):
            counted = self.tell = tell if self.calls == 1 else _numbered(tell, i)
            if self.step_fn is not None:
                loss = self.step_fn(self.batch)
                loss = pytree.tree_leaves(loss)[0]
            else:
                with self.alone() if i + 1 < self.calls else nullcontext():
                    made, more = self.forward(counted)
                    loss = scalar(made, self.loss_fn)
                    loss.backward(torch.full_like(loss, self.seed) if self.seed != 1 else None)
                calls += more
            counted(held(loss.detach(), Observed(("loss", "loss"), "the loss", "", None, name="the loss")))
        if self.step_fn is None:
            self._finish(tell)
        elif self.calls == 1:
            what = "stepped" if may_write(self.optimizer) else "grad" if self.clip is None else "clipped"
            self._told(tell, what, gradients(self.model))
        self.told(tell)
        self.optimizer.zero_grad()
        self.model.zero_grad()  # of parameters, too, that are not the optimizer's: captured steps do not add to these
        return calls

    def _finish(self, tell: Tell) -> None:
        """From the sums of gradients to the update."""
        for p in self.model.parameters() if self.weight != 1 else ():
            if p.grad is not None:
                p.grad.mul_(self.weight)
        self._told(tell, "grad", gradients(self.model))
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self._told(tell, "clipped", gradients(self.model))
        self.optimizer.step()
        if may_write(self.optimizer):
            self._told(tell, "stepped", gradients(self.model))

    def forward(self, tell: Tell) -> tuple[Any, Calls]:
        """What the loss function returns, and the calls that it made."""
        with Watch(tell, self.names) as watch:
            return self.loss_fn(self.model, self.batch), watch.calls

    def told(self, tell: Tell, what: str = "") -> None:
        """Parameters, states and buffers as they are now, and the random generator."""
        self._told(tell, what or "param", self.model.named_parameters())
        self._told(tell, what or "state", self.states)
        self._told(tell, what or "buffer", self.model.named_buffers())
        tell(Observed((what or "random", "random"), "", "", random_state(), name="the random generator"))

    @staticmethod
    def _told(tell: Tell, what: str, values: Any) -> None:
        for name, t in values:
            seen = Observed((what, name), "", "", t, name=name)
            tell(held(t, seen) if isinstance(t, Tensor) else seen)


def _numbered(tell: Tell, i: int) -> Tell:
    """``tell`` for one of several batches."""
    return lambda seen: tell(replace(seen, key=(seen.key[0], f"batch {i}", *seen.key[1:])))


def may_write(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step may write to gradients: behind a captured program they are not seen before it."""
    return bool(own_work(optimizer)) or not reads_no_shapes(optimizer)


def gradients(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Gradients by the names of their parameters."""
    return ((n, p.grad) for n, p in model.named_parameters())


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """States of an optimizer, by the names of parameters and their own."""
    names = {id(p): n for n, p in model.named_parameters()}
    params = [p for g in optimizer.param_groups for p in g["params"]]
    for i, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            # torch counts steps in the default dtype, and captured steps in float32
            counted = key == "step" and isinstance(value, Tensor)
            yield f"{names.get(id(params[i]), i)}.{key}", value.double() if counted else value


def named_leaves(batch: Any) -> list[tuple[str, Tensor]]:
    """Tensors of a batch by name: ``batch``, ``batch.0``, ``batch.x``."""
    return list(zip(leaf_names(batch), (x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)), strict=True))


def scalar(made: Any, loss_fn: LossFn) -> Tensor:
    """The loss among what a loss function returned.

    Raises VerifyError where it is no scalar that depends on parameters.
    """
    leaves = pytree.tree_leaves(made)
    loss = leaves[0] if leaves else None
    name = getattr(loss_fn, "__qualname__", repr(loss_fn))
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise VerifyError(
            f"verify: {name} returned {what}: return the loss, a scalar (loss.mean(), say), or a tuple or dict that "
            "begins with it"
        )
    if not loss.requires_grad:
        raise VerifyError(
            f"verify: the loss that {name} returned does not depend on any parameter that requires a gradient: was it "
            "detached, or computed under torch.no_grad()?"
        )
    return loss


__all__ = ["LossFn", "Training", "named_leaves", "scalar"]
