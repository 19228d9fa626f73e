"""The runs that are compared: one device, and simulated ranks in each mode."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from ..checkpoint import Checkpoints
from ..compat import pytree
from ..errors import LayoutError
from ..generator import reproducible_random
from ..layout import Placements
from ..mesh import Mesh
from ..passes import PassManager
from ..program import Plan
from ..program.capture.build import batch_placements
from ..program.capture.export import LossFn, leaf_names
from ..program.compile import compile_step
from ..ranks import runtime
from ..ranks.simulation import simulate
from ..shard import no_sync, shard_module, shard_optimizer
from ..tensor.api import shard_tensor
from .captured import WatchedPasses
from .journal import Journal, RankJournal, Rounding
from .steps import Calls, Training
from .watch import Observed

Tensor = torch.Tensor
Optimizers = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]
NUDGE = 2.0**-40  # of a gradient: below every tolerance, and enough to round all that follows from it otherwise
PATIENCE = 3600.0  # seconds that a rank may compute alone: machines are busy


@dataclass(frozen=True)
class Task:
    """What is verified, in float64.

    Attributes:
        model: as it is before the first step; never trained itself.
        optimizer: of the model's parameters, never used itself; or what makes one of parameters.
        loss_fn, batch, mesh, plan, passes: of the step.
        eager_layouts: those of the plan that eager steps know too.
        steps: updates before the save; one more comes behind the load.
        save: whether to save and load.
        seed: of the random generator.
    """

    model: nn.Module
    optimizer: Optimizers
    loss_fn: LossFn
    batch: Any
    mesh: Mesh
    plan: Plan
    eager_layouts: Mapping[str, Placements]
    passes: PassManager
    steps: int
    save: bool
    seed: int

    def training(self, kind: type[Training] = Training, **more: Any) -> Training:
        """A copy, to be trained."""
        model, optimizer = copies(self.model, self.optimizer)
        calls = self.passes.calls_per_update
        return kind(
            model, self.loss_fn, optimizer, self.batch, self.plan.clip_grad_norm, calls,
            1 / calls if self.passes.averages else 1.0, **more,
        )  # fmt: skip

    def spoiled(self, one: Training, begin: Callable[[Training], None]) -> Training:
        """A training with other numbers in all that a checkpoint has, and the first ones in what it has not.

        An eager one is begun anew.  A captured one goes on, since capturing takes longer than all else.
        """
        if one.step_fn is None:
            one = self.training()
            begin(one)
        kept, first = one.model.state_dict(), dict(self.model.named_buffers())
        with torch.no_grad():
            for name, t in one.model.named_buffers():
                if name not in kept:
                    t.copy_(first[name])
            for t in (*kept.values(), *(v for state in one.optimizer.state.values() for v in state.values())):
                if isinstance(t, Tensor):
                    t.logical_not_() if t.dtype is torch.bool else t.add_(1)
        return one

    # -- one device -----------------------------------------------------------------------------------

    def on_one(self, kind: type[Training] = Training, **more: Any) -> Journal:
        """Train on one device."""
        journal = Journal(self.mesh.size)
        for step, calls in enumerate(self._updates(self.training(kind, **more), journal.note)):
            journal.used(step, calls)
        # The same again with all gradients larger by a part that is nothing: each rounds as if summed in another order.
        again = Rounding(journal)
        for _ in self._updates(self.training(kind, seed=1 + NUDGE, **more), again.note):
            pass
        return journal

    def _updates(self, one: Training, note: Callable[[int, Observed], None]) -> Iterator[Calls]:
        """Train on one device; after each update, the calls that it was of."""
        torch.manual_seed(self.seed)
        with reproducible_random():
            for step in range(self.steps + self.save):
                if step == self.steps:
                    one.told(partial(note, step), "loaded")
                yield one.update(partial(note, step))

    # -- ranks ----------------------------------------------------------------------------------------

    def on_ranks(
        self, found: RankJournal, begin: Callable[[Training], None], make: Callable[[], Training] | None = None
    ) -> None:
        """Train on simulated ranks; ``begin`` lays a training on the mesh, which ``make`` makes."""

        def run(folder: str) -> None:
            rank, at = runtime.RT.rank, [0]

            def tell(seen: Any) -> None:
                found.tell(at[0], rank, seen)

            one = self.training() if make is None else make()
            begin(one)
            for at[0] in range(self.steps):
                one.update(tell)
            if self.save:
                store = Checkpoints(folder, mesh=self.mesh)
                store.save(self.steps, **one.saved, wait=True)
                one = self.spoiled(one, begin)
                at[0] = self.steps
                store.load(**one.saved)
                one.told(tell, "loaded")
                one.update(tell)

        torch.manual_seed(self.seed)
        with tempfile.TemporaryDirectory() as folder, found.errors():
            simulate(partial(run, folder), self.mesh, timeout=PATIENCE)

    def eager(self, one: Training) -> None:
        """Lay a training on the mesh for eager steps."""
        plan = self.plan
        shard_module(
            one.model, self.mesh, self.eager_layouts, inputs=plan.inputs, outputs=plan.outputs,
            reshard_after_forward=plan.reshard_after_forward, **plan.options(),
        )  # fmt: skip
        shard_optimizer(one.optimizer, **plan.optimizer_options(one.optimizer))
        one.batch = self._laid()
        one.alone = partial(no_sync, one.model)

    def _laid(self) -> Any:
        names, leaves = iter(leaf_names(self.batch)), []
        said = batch_placements(self.plan.batch, leaf_names(self.batch), self.mesh)
        flat, tree = pytree.tree_flatten(self.batch)
        for x in flat:
            leaves.append(laid(next(names), x, self.mesh, said) if isinstance(x, Tensor) else x)
        return pytree.tree_unflatten(leaves, tree)

    def captured(self, one: Training) -> None:
        """Capture the step of a training."""
        said = self.plan.keywords() | {"gradients": one.calls == 1}
        one.step_fn = compile_step(
            one.model, self.loss_fn, one.optimizer, one.batch, mesh=self.mesh,
            passes=WatchedPasses(self.passes, lambda seen: one.tell(seen)), check=False, **said,  # all is compared here
        )  # fmt: skip


def copies(model: nn.Module, optimizer: Optimizers) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A copy of a model, and an optimizer of its parameters."""
    if isinstance(optimizer, torch.optim.Optimizer):
        made: tuple[nn.Module, torch.optim.Optimizer] = copy.deepcopy((model, optimizer))
        return made
    own = copy.deepcopy(model)
    return own, optimizer(own.parameters())


def laid(name: str, t: Tensor, mesh: Mesh, said: Any) -> Tensor:
    """A leaf of a batch on the mesh.  Raises LayoutError for one that does not split as it is said to."""
    try:
        return shard_tensor(t, mesh, (said[name] if t.ndim else None) or {})
    except LayoutError as error:
        raise LayoutError(
            f"{name} of shape {tuple(t.shape)} does not lie as batch={said[name]!r} says: {error}; say it of the "
            "others alone, by their names: batch={'0': {...}}"
        ) from error
