"""What the other ranks do with a captured step: compared at each update, by a few words beside its collectives."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import collective
from ...errors import DesyncError
from ...layout import Layout
from ...mesh import Mesh
from ...ranks import runtime
from ...shard.gradients.batches import SameBatches
from ...shard.gradients.replicas import first_divergent_replica
from ...tensor import DistTensor
from .bind import BoundProgram, StepState

Tensor = torch.Tensor

_STATES = "programs for (state of the model, training, default dtype, deterministic algorithms, autocast)"


def doing(leaves: Sequence[Any], what: str) -> str:
    """What ranks do with a batch that all of them have whole, so that another shape on one is told as such."""
    shapes = ", ".join(str(tuple(x.shape)) for x in leaves if isinstance(x, Tensor))
    return f"{what} for the global batch {shapes}" if shapes else ""


class Peers:
    """Compares learning rates, what programs were made for, batches and writes to what a step owns.

    Args:
        whole: whether plain tensors hold global values; otherwise each rank has its own.
    """

    def __init__(self, mesh: Mesh, carrier: StepState, whole: bool) -> None:
        self.mesh, self.carrier, self.whole = mesh, carrier, whole
        self.batches = 0  # digest of those since the last update
        self.taken = SameBatches()
        self.states: list[Any] = []  # what the programs since then were made for
        self.torn = False  # a call ended with an error

    def run(self, bound: BoundProgram, leaves: Sequence[Any], updates: bool, state: Any) -> Any:
        """Run a program; where it updates, compare.

        Args:
            state: what the program was made for.

        Raises:
            DesyncError: on every rank, after the update, if they did not do the same since the last one.
        """
        runtime.RT.updates += updates
        if self.mesh.size == 1:
            return bound(leaves)
        torn, self.torn = self.torn, True
        plain = self._plain(bound, leaves)
        self._claim(bound, [] if updates else plain)
        digests = collective.digests(plain, whole=runtime.RT.check)
        self.batches = zlib.crc32(repr((self.batches, digests)).encode())
        self.states.append(state)
        answer = self._start(bound, torn, leaves) if updates else None
        made = bound(leaves)
        bound.seen = bound.writes()
        if answer is not None:
            answer()
            self.batches, self.states = 0, []
        self.torn = torn and answer is None
        return made

    def all_have(self, program: bool) -> bool:
        """Whether all ranks have a program for their batch; else all of them capture.

        Of global batches each rank says so by itself.  Of its own parts another rank may have a new shape, and this
        one not.
        """
        if self.whole or self.mesh.size == 1:
            return program
        heard = collective.compare_progress((int(program),), collective.group(self.mesh), "")
        return all(word for (word,) in heard())

    def evaluate(self, bound: BoundProgram, leaves: Sequence[Any]) -> Any:
        """Run a program that updates nothing; over gloo its small reductions carry what is compared."""
        if self.mesh.size == 1:
            return bound(leaves)
        self._claim(bound, self._plain(bound, leaves))
        group = collective.group(self.mesh)
        if group.words is group or not bound.program.collectives():  # without any a rank may run it alone
            return bound(leaves)
        answer = collective.compare_progress((), group, doing(leaves, "a captured step") if self.whole else "")
        made = bound(leaves)
        answer()
        return made

    def _plain(self, bound: BoundProgram, leaves: Sequence[Any]) -> list[Tensor]:
        """Tensors of a batch that are the same on all ranks."""
        given = [leaves[k] for _, k, spec, _ in bound.batch if spec is not None]
        return [t for t in given if not isinstance(t, DistTensor)] if self.whole else []

    def _claim(self, bound: BoundProgram, batch: Sequence[Tensor]) -> None:
        """Tensors from outside of the model, and batches without an update, are compared as all plain tensors are."""
        if not self.whole:
            return

        def everyone() -> collective.Group:
            return collective.group(self.mesh)

        collective.check_replicated_inputs("what a captured step finds outside of the model", bound.outside, everyone)
        collective.check_replicated_inputs("what a captured step is given", batch, everyone)

    def _start(self, bound: BoundProgram, torn: bool, leaves: Sequence[Any]) -> Callable[[], None]:
        optimizer = self.carrier.optimizer
        rates = [] if optimizer is None else [float(g["lr"]) for g in optimizer.param_groups if "lr" in g]
        group = collective.group(self.mesh)
        numbers = zlib.crc32(repr((rates, self.states)).encode())
        words = (numbers, self.batches, bound.writes() - bound.seen, int(torn), *self.taken.words(group))
        heard = collective.compare_progress(words, group, doing(leaves, "a captured step") if self.whole else "")
        return lambda: self._judge(bound, group, heard(), rates)

    def _judge(
        self, bound: BoundProgram, group: collective.Group, heard: list[tuple[int, ...]], rates: list[float]
    ) -> None:
        numbers, batches, writes, torn, loaded, laid = zip(*heard, strict=True)
        self.taken.judge(group, list(zip(loaded, laid, strict=True)))
        if self.whole and len(set(numbers)) > 1:
            facts = [collective.Fact("learning rates", rates), collective.Fact(_STATES, self.states)]
            found, _ = collective.difference(group, facts)
            raise DesyncError(f"the ranks update with {found}")
        if len(set(batches)) > 1:
            sides = ", ".join(f"digest {n:x} on rank {r}" for r, n in zip(group.ranks, batches, strict=True))
            raise DesyncError(
                f"the ranks were given different batches since the last update ({sides}): did one rank leave out a "
                "batch, or shuffle otherwise? Plain tensors hold the global batch, the same on all ranks"
            )
        if len(set(writes)) == 1 and not any(torn) and not runtime.RT.check:
            return
        counts = ", ".join(f"{n} on rank {r}" for r, n in zip(group.ranks, writes, strict=True))
        text = f"parameters were not written to equally often on all ranks since the last update ({counts})"
        if any(torn):
            text = "an earlier call ended with an error or an interrupt on some rank"
        first = first_divergent_replica(self._values(bound), group) if self.whole else ""
        if first:
            raise DesyncError(f"the ranks hold {first}; {text}; load the same weights and states on all ranks")
        if not self.whole and len(set(writes)) > 1:
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _values(self, bound: BoundProgram) -> dict[str, tuple[Layout, Tensor]]:
        return {
            given.name: (Layout(self.mesh) if given.spec is None else given.spec.layout, t)
            for given, t in zip(bound.program.inputs, bound.inputs, strict=True)
            if given.kind in ("param", "buffer", "state")
        }


__all__ = ["Peers", "doing"]
