"""The same training on one device, in plain PyTorch, and the comparison with it, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call

import meshwright as mw
from meshwright.collective import travelled
from meshwright.compat import pytree
from meshwright.generator import reproducible_random
from meshwright.layout import Wire, chunk_sizes
from meshwright.passes import PassManager

from .config import TrainConfig
from .subject import TrainingSubject


@dataclass
class Verdict:
    """The largest differences so far, relative to one device, and where they were.

    Attributes:
        loss, grad: the differences: |a - b| / |b| of the losses, ||a - b|| / ||b|| of the worst gradient.
        loss_step, grad_step, grad_name: where.
        loss_tolerance, grad_tolerance: what rounding explains.
    """

    loss_tolerance: float
    grad_tolerance: float
    loss: float = 0.0
    grad: float = 0.0
    loss_step: int = 0
    grad_step: int = 0
    grad_name: str = ""

    @property
    def passed(self) -> bool:
        """Whether both are within tolerance; a NaN is not."""
        return self.loss <= self.loss_tolerance and self.grad <= self.grad_tolerance


class Reference:
    """The model on one device: same seed, same batches, native optimizer, no distributed tensor anywhere.

    Where passes merge calls of a captured step into one update, so does this.
    """

    def __init__(self, config: TrainConfig, subject: TrainingSubject) -> None:
        self.config, self.subject = config, subject
        torch.manual_seed(config.seed)
        self.model = subject.model(config.device)
        self.optimizer = config.make_optimizer(self.model)
        self.batches = subject.batches()
        passes = config.pass_manager() if config.static else PassManager(())
        self.calls = passes.calls_per_update if config.static else config.accumulate
        self.weight = 1 / self.calls if passes.averages else 1.0
        self.count = 0
        self.gathered: dict[str, list[tuple[int, int]]] = {}  # parameter to the dims, and numbers, of ranks' chunks

    @property
    def complete(self) -> bool:
        """Whether the gradients are those of an update."""
        return self.count % self.calls == 0

    def backward(self, seed: int) -> float:
        """Gradients of one step, added to those since the last update and clipped if complete; its loss."""
        torch.manual_seed(seed)
        total = 0.0
        for _ in range(self.config.accumulate):
            batch = pytree.tree_map(lambda t: t.to(self.config.device), next(self.batches))
            # Masks of dropout belong to elements, not to ranks: inside, plain tensors get the same ones.
            with reproducible_random():
                loss = self.subject.loss(self._seen(), batch)
            (loss * self.weight).backward()
            total += loss.item() / self.config.accumulate
            self.count += 1
        if self.config.clip is not None and self.complete:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        return total

    def _seen(self) -> Callable[..., Any]:
        """The model, computing with casts of its parameters where a precision is asked for."""
        if self.config.policy is None:
            return self.model
        seen = {n: p.to(self.config.policy.compute) for n, p in self.model.named_parameters()}
        wire = self.config.policy.gather
        for name, cuts in self.gathered.items() if wire is not None else ():
            made = seen[name]
            seen[name] = made + (_arrived(made.detach(), cuts, wire) - made.detach())  # type: ignore[arg-type]
        return lambda *args, **kwargs: functional_call(self.model, seen, args, kwargs)

    def update(self) -> None:
        """One step of the optimizer, if the gradients are complete."""
        if self.complete:
            self.optimizer.step()
            self.optimizer.zero_grad()


class Verifier:
    """Compares each step with the reference, which the first rank computes; gathering takes all ranks.

    Args:
        config, subject: as for the training.
        first: whether this is the rank that compares.
    """

    def __init__(self, config: TrainConfig, subject: TrainingSubject, first: bool) -> None:
        self.config, self.reference = config, Reference(config, subject) if first else None
        self._verdict = Verdict(*config.tolerances)

    def check(self, step: int, loss: float, model: nn.Module, seed: int) -> dict[str, float]:
        """Compare loss and, where there are any, the gradients that the optimizer gets; let the reference step too.

        Returns:
            ``rel_loss_diff`` and, of a step that updates, ``rel_grad_diff``; empty on the ranks that do not compare.
        """
        if self.reference and self.config.gather:
            self.reference.gathered = _gathered(model, self.config.fsdp)
        expected = self.reference.backward(seed) if self.reference else 0.0
        wanted = {n: p.grad for n, p in self.reference.model.named_parameters()} if self.reference else {}
        worst, worst_name = 0.0, ""
        for name, parameter in model.named_parameters():
            got = mw.unshard(parameter.grad) if parameter.grad is not None else None
            if self.reference is None or not self.reference.complete:
                continue
            difference = relative(got, wanted[name])
            if worse(difference, worst):
                worst, worst_name = difference, name
        if self.reference is None:
            return {}
        complete = {"rel_grad_diff": worst} if self.reference.complete else {}
        self.reference.update()
        off = abs(loss - expected) / abs(expected) if expected else abs(loss)
        found = self._verdict
        if worse(off, found.loss):
            found.loss, found.loss_step = off, step
        if worse(worst, found.grad):
            found.grad, found.grad_step, found.grad_name = worst, step, worst_name
        return {"reference": expected, "rel_loss_diff": off, **complete}

    def verdict(self) -> Verdict:
        """The largest differences over all steps (on the ranks that do not compare: none)."""
        return self._verdict


def _gathered(model: nn.Module, over: str | None) -> dict[str, list[tuple[int, int]]]:
    """Parameters that are stored split over an axis, to the dims that axes cut and into how many chunks."""
    found = {}
    for name, p in model.named_parameters():
        if over is None or not isinstance(p, mw.DistTensor):
            continue
        laid: dict[str, mw.Placement] = dict(zip(p.mesh.axes, p.placements, strict=True))
        if isinstance(laid[over], mw.Shard):
            found[name] = [(q.dim, p.mesh.axis_size(a)) for a, q in laid.items() if isinstance(q, mw.Shard)]
    return found


def _arrived(t: Tensor, cuts: Sequence[tuple[int, int]], wire: Wire) -> Tensor:
    """A parameter as ops see it that is gathered in a format: each rank's chunk as it travelled."""
    if not cuts:
        return travelled(t, wire)
    (dim, n), *rest = cuts
    return torch.cat([_arrived(part, rest, wire) for part in t.split(chunk_sizes(t.shape[dim], n), dim)], dim)


def worse(new: float, old: float) -> bool:
    """Whether a difference is larger; NaN is the largest."""
    return new > old or (new != new and old == old)


def relative(got: Tensor | None, wanted: Tensor | None) -> float:
    """``||got - wanted|| / ||wanted||`` in float64; infinite where only one of them exists."""
    if got is None or wanted is None:
        return 0.0 if got is wanted else float("inf")
    scale = wanted.double().norm().item()
    off = (got.detach().double() - wanted.double().to(got.device)).norm().item()  # one may be on the host
    return off / scale if scale else (float("inf") if off else 0.0)
