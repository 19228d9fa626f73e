"""Steps that merge calls into one update, on micro-batches that differ: against one device that has all their rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from ..compat import pytree
from ..errors import PassError, ProgramError
from ..program.capture.build import batch_placements
from ..program.capture.export import leaf_names
from .journal import Departure, RankJournal
from .runs import Task
from .steps import Calls, Training, scalar
from .watch import Tell, random_state

Tensor = torch.Tensor
SEED = 5  # of the rows that micro-batches consist of
_WITHOUT = "micro-batches that differ are not compared with one batch of all their rows: "


@dataclass
class MergedTraining(Training):
    """Training by updates of several micro-batches.

    Attributes:
        micros: of each update, its micro-batches.
        together: an update is that of one batch of all rows; otherwise of the sum of what micro-batches give.
    """

    micros: list[list[Any]] = field(default_factory=list)
    together: bool = True
    done: int = 0

    def update(self, tell: Tell) -> Calls:
        """One update; compared is what it leaves."""
        micros = self.micros[self.done % len(self.micros)]
        self.done += 1
        if self.step_fn is not None:
            for micro in micros:
                self.step_fn(micro)
        else:
            self._backward(micros)
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
        self._told(tell, "param", self.model.named_parameters())
        self._told(tell, "state", self.states)
        self.optimizer.zero_grad()
        self.model.zero_grad()
        return []

    def _backward(self, micros: list[Any]) -> None:
        """The gradients of one batch of all rows.  Of a loss that is a sum, as of all others where micro-batches count
        alike, those of micro-batches, added up with one weight."""
        losses = [scalar(self.loss_fn(self.model, micro), self.loss_fn) for micro in micros]
        seeds = [self.weight * self.seed] * len(losses)
        if self.together and self.weight != 1:
            whole = scalar(self.loss_fn(self.model, joined(micros)), self.loss_fn)
            if not math.isclose(whole.item(), sum(loss.item() for loss in losses), rel_tol=1e-9):
                losses, seeds = [whole], [self.seed]
        for loss, seed in zip(losses, seeds, strict=True):
            loss.backward(torch.full_like(loss, seed))


def merged(task: Task) -> tuple[Departure | None, str]:
    """Where an update from micro-batches that differ is not that of all their rows; or why that was not compared."""
    micros, why = _micro_batches(task)
    if not micros:
        return None, _WITHOUT + why
    weighted = any(getattr(p, "weighted", False) for p in task.passes.passes if p.calls_per_update > 1)
    task = replace(task, steps=len(micros), save=False)
    more = {"micros": micros, "together": weighted}
    if draws(task):
        return None, _WITHOUT + "the step draws random numbers, for each micro-batch its own"
    try:
        journal = task.on_one(MergedTraining, **more)
    except RuntimeError as error:  # a kernel that wants more rows
        return None, f"{_WITHOUT}one device raises {type(error).__name__}: {error}"
    found = RankJournal(journal, "captured")
    try:
        task.on_ranks(found, task.captured, partial(task.training, MergedTraining, **more))
    except PassError as error:
        return None, f"{_WITHOUT}PassError: {error}"
    first = found.first()
    if first is None or (first is found.raised and first.text.startswith(ProgramError.__name__)):
        return None, ""  # unequal ones that the step itself refuses, with what to give it
    rows = [_rows(micro) for micro in micros[first.step]]
    what = f"an update from micro-batches of {', '.join(map(str, rows))} rows: {first.value}"
    return replace(first, phase="merge", op="the merge of micro-batches", line="the passes", value=what), ""


def draws(task: Task) -> bool:
    """Whether a step draws random numbers."""
    one = task.training()
    before = random_state()
    with torch.no_grad():
        one.loss_fn(one.model, one.batch)
    return random_state() != before


def _micro_batches(task: Task) -> tuple[list[list[Any]], str]:
    """Of two updates: ones with a row for each rank, then unequal ones; or why there are none."""
    leaves = [x for x in pytree.tree_leaves(task.batch) if isinstance(x, Tensor) and x.ndim]
    if len({len(x) for x in leaves}) != 1:
        return [], "the tensors of the batch have different numbers of rows"
    names = leaf_names(task.batch)
    said = batch_placements(task.plan.batch, names, task.mesh)
    axes = {a for given in said.values() for a, p in _placed(given, task.mesh.axes) if getattr(p, "dim", None) == 0}
    rows, few, calls = len(leaves[0]), math.prod(task.mesh.axis_size(a) for a in axes), task.passes.calls_per_update
    generator = torch.Generator().manual_seed(SEED)

    def micro(n: int) -> Any:
        at = torch.randint(rows, (n,), generator=generator)
        return pytree.tree_map(lambda x: x[at].contiguous() if isinstance(x, Tensor) and x.ndim else x, task.batch)

    sizes = [[few] * calls, [(rows, few)[i % 2] for i in range(calls)]]
    return [[micro(n) for n in of] for of in sizes], ""


def _placed(given: Any, axes: tuple[str, ...]) -> Any:
    return given.items() if isinstance(given, Mapping) else zip(axes, given or (), strict=False)


def joined(micros: list[Any]) -> Any:
    """One batch of all rows of some."""
    flat = [pytree.tree_flatten(m) for m in micros]
    together = zip(*(leaves for leaves, _ in flat), strict=True)
    made = [torch.cat(xs) if isinstance(xs[0], Tensor) and xs[0].ndim else xs[0] for xs in together]
    return pytree.tree_unflatten(made, flat[0][1])


def _rows(micro: Any) -> int:
    return next(len(x) for x in pytree.tree_leaves(micro) if isinstance(x, Tensor) and x.ndim)
