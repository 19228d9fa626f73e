"""Between two updates of a captured step: how many of their calls have run, and what these leave to the next ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import ProgramError
from ...layout import Spec
from ..capture.scale import SCALE
from ..ir.program import STEP, WEIGHT
from .bind import BoundProgram, CompiledVariant, StepState
from .pipeline import Pipelined

Tensor = torch.Tensor


class Cycle:
    """Where a step is in the schedule that its calls run.

    Batches of other shapes have programs of their own, with schedules of the same length; what all of them add to are
    the sums of the carrier.

    Attributes:
        carrier: what the programs work on.
        done: calls since the last update.
    """

    def __init__(self, carrier: StepState) -> None:
        self.carrier, self.done = carrier, 0
        self._ready: CompiledVariant | None = None  # whose sums those of the carrier are

    @property
    def calls(self) -> int:
        """Of one update."""
        return 1 if self._ready is None else len(self._ready.schedules[STEP])

    @property
    def specs(self) -> dict[str, Spec | None]:
        """How sums of gradients lie, by name; None for one that belongs to its rank."""
        return {} if self._ready is None or self.calls == 1 else self._ready.sums

    @property
    def sums(self) -> dict[str, torch.Tensor]:
        """What calls leave to the next ones: nothing where each one updates."""
        return {} if self.calls == 1 else self.carrier.sums

    def flush(self) -> BoundProgram:
        """What updates from the calls that have run, of which there are some.

        Raises:
            ProgramError: the model lies otherwise in memory than it did then.
        """
        assert self._ready is not None
        (bound,) = self._ready.schedules["flush"]
        if not self._ready.follow():
            raise ProgramError("parameters lie otherwise in memory than in the last micro-step: flush, then move them")
        self.carrier.flush_scale.fill_(self.calls / self.done)
        return bound

    def join(self, made: CompiledVariant) -> BoundProgram:
        """What the next call runs, of the programs for its batch.

        Raises:
            ProgramError: their sums are not what the calls since the last update have added to.
        """
        before = self._ready
        if made is not before and self.done and before is not None:
            _alike(made, before)
        self._ready = made
        return made.schedules[STEP][self.done]

    def pipelined(self, readies: Sequence[CompiledVariant], micros: Sequence[Sequence[Any]]) -> Any:
        """What a step of several micro-batches runs, of the programs for each.

        Raises as :meth:`join`.
        """
        for one in dict.fromkeys(readies):
            _check_stages(one, readies[0])
            _alike(one, readies[0], folded=True)
        return Pipelined(readies, micros)

    def state(self) -> dict[str, Any]:
        """The number of calls since the last update, this rank's sums, and the loss scale."""
        made: dict[str, Any] = {"micro_step": self.done, "sums": {n: t.clone() for n, t in self.sums.items()}}
        if self.carrier.scale:
            made[SCALE] = {name: t.clone() for name, t in self.carrier.scale.items()}
        return made

    def loadable(self, state: Mapping[str, Any]) -> int:
        """The number of calls in a state that fits.  Raises ProgramError for one that does not."""
        sums, scale = self.sums, self.carrier.scale
        wanted = {"micro_step", "sums", *((SCALE,) if scale else ())}
        if set(state) != wanted:
            raise ProgramError(f"no state of this step: it has {sorted(state)}, {sorted(wanted)} were expected")
        if scale and set(state[SCALE]) != set(scale):
            raise ProgramError(f"the state has {sorted(state[SCALE])} of a loss scale, this step has {sorted(scale)}")
        done, given = int(state["micro_step"]), state["sums"]
        if not 0 <= done < self.calls:
            raise ProgramError(
                f"the state was saved after {done} micro-steps, but this step updates every {self.calls}"
            )
        if set(given) != set(sums):
            other = sorted(set(given) ^ set(sums))[0]
            raise ProgramError(f"the state is of another program: only one of both has a sum for {other}")
        for name, t in sums.items():
            if given[name].shape != t.shape or given[name].dtype != t.dtype:
                raise ProgramError(
                    f"the sum for {name} is {given[name].dtype} of shape {tuple(given[name].shape)} in the state, here "
                    f"it is {t.dtype} of shape {tuple(t.shape)}: load it on the mesh and layouts that it was saved on"
                )
        return done

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where a state that fits was taken."""
        for name, t in self.sums.items():
            t.copy_(state["sums"][name])
        for name, t in self.carrier.scale.items():
            t.copy_(state[SCALE][name])
        self.done = int(state["micro_step"])


def _check_stages(made: CompiledVariant, before: CompiledVariant) -> None:
    """Raises ProgramError where stages send or sum other things in one micro-batch than in another."""
    sent = [[] if (how := one.program.pipeline) is None else [m.name for m in how.messages] for one in (made, before)]
    weights = any(n.startswith(WEIGHT) for n in made.sums.keys() ^ before.sums.keys())
    if sent[0] != sent[1] or (made.sums.keys() != before.sums.keys() and not weights):
        raise ProgramError(
            "pipeline: micro-batches of one row and of several rows do not send the same values between stages (a "
            "weight of several stages that is stored sharded). Use fewer micro-batches, so that each has two rows, or "
            "a batch that they divide."
        )


def _alike(made: CompiledVariant, before: CompiledVariant, folded: bool = False) -> None:
    """Raises ProgramError where the sums of one's programs are not those of the other's.

    Args:
        folded: whether sums that lie otherwise are brought together before the update.
    """
    if made.sums.keys() == before.sums.keys() if folded else made.sums == before.sums:
        return
    other = sorted(set(made.sums) ^ set(before.sums))
    if any(n.startswith(WEIGHT) for n in other):
        raise ProgramError(
            "the loss is a mean over other things in this micro-step than in the one before, so that they have "
            "no weights in common: call step.flush() before it, or give GradientMerge(weighted=False)"
        )
    if other:
        raise ProgramError(
            f"{other[0]} has a gradient in one micro-step of a merge and none in another (requires_grad was "
            "changed between them): call step.flush() before the change"
        )
    name = next(n for n, s in made.sums.items() if s != before.sums[n])
    raise ProgramError(
        f"gradient merge: micro-batches of 1 and of more elements in a sharded dim give the gradient of {name} other "
        f"layouts ({made.sums[name]!r}, {before.sums[name]!r} before). Pass larger micro-batches, or call step.flush() "
        "before this batch."
    )


__all__ = ["Cycle"]
