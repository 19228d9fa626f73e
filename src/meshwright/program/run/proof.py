"""Programs prove themselves: at the first call of a capture, what its passes made is compared with the step as it was
captured, on the user's batch and on all ranks, before anything is updated.

The step as it was captured, the *reference*, runs first: on copies of what it writes to, with the random numbers that
the call is about to draw, and without its update.  Of each gradient a sketch is kept.  Then the call itself runs; when
its gradients are complete, and nothing has been updated, their sketches are compared.

How large a difference may be is measured where it matters: the reference runs again with its backward started from
another number, which rounds everything otherwise.  A gradient that is zero but for rounding, a sum of other order and a
value sent in 8 bits then differ from themselves as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ... import collective
from ...errors import MeshwrightError, PassError
from ...ranks import runtime
from ...ranks.generators import random_states, set_random_states
from ..ir.nodes import value_of
from ..ir.program import Program
from .bind import BACKENDS, BoundProgram, CompiledVariant, StepState
from .runner import Compiled
from .sketches import Sketch, sketch
from .watched import GRADIENT, LOSS, watched, written_inputs

Tensor = torch.Tensor

SEED = 1.3  # what the backward starts from where rounding is measured: no power of two
_ULPS = 16  # a difference of so many roundings of a gradient's dtype is not looked into
_FEW, _MOST = 128, 1e-5  # nor are so many of the narrowest dtype of a program, up to this: sums come in another order
_NOISE = 8.0  # times what rounding was measured to be
WHAT = "the comparison of passes"  # that ranks do together
TRIES = 3  # calls that are compared where values are not finite
Sketches = Mapping[str, Sketch]
Check = Literal["first", "always", False]


@dataclass(frozen=True)
class Discrepancy:
    """A value that differs from that of the reference.

    Attributes:
        rank: where.
        name: of the value.
        text: how.
        size: how far, in the norm of the value.
    """

    rank: int
    name: str
    text: str
    size: float


@dataclass
class Outcome:
    """What a comparison came to.

    Attributes:
        passes: names of those that were compared.
        values: how many values were.
        largest: the largest difference on this rank, in the norm of the value.
        finite: whether all values were.
        note: what was not compared.
        floor: in the norm of a value, a difference that is not looked into.
    """

    passes: tuple[str, ...]
    values: int = 0
    largest: float = 0.0
    finite: bool = True
    note: str = ""
    floor: float = 0.0


class PlainRun:
    """A program that runs for what it shows, without its update; what it works on stays as it is."""

    def __init__(
        self, program: Program, carrier: StepState, how: tuple[Mapping[str, int], Any], unclipped: bool = False
    ) -> None:
        self._sketches: dict[str, Sketch] = {}
        self._factor = 1.0
        self.loss: Tensor | None = None
        self.program = watched(program, self._show, seed=self._seed, unclipped=unclipped)
        self._code = Compiled(self.program)
        self.bound = BoundProgram(self.program, carrier, *how, compiled=(self._code, ()))
        self.places = written_inputs(self.program)

    def __call__(self, leaves: Sequence[Any], before: Before, factor: float = 1.0, seed: int | None = None) -> Sketches:
        """What it shows, with the random numbers and written tensors of ``before``.

        Args:
            factor: the backward starts from this.
            seed: of the random numbers, where the call sets one.
        """
        self._sketches, self._factor = {}, factor
        inputs = [*self.bound.filled(leaves, {})]
        for i in self.places:
            inputs[i] = before.copy(self.program.inputs[i].name, inputs[i])
        with before.drawing():
            if seed is not None:
                torch.manual_seed(seed)
            self._code.once(inputs)
        return self._sketches

    def _show(self, name: str, t: Tensor) -> None:
        self._sketches[name] = sketch(t)
        if name == LOSS:
            self.loss = t

    def _seed(self, t: Tensor) -> Tensor:
        return t if self._factor == 1.0 else t * self._factor


class Before:
    """What a call is about to change: random numbers, and tensors that a forward writes to."""

    def __init__(self, device: str) -> None:
        self._device, self._states = device, random_states(device)
        self._tensors: dict[str, tuple[Tensor, Tensor]] = {}

    def copy(self, name: str, t: Tensor) -> Tensor:
        """A copy of a tensor as it was."""
        if name not in self._tensors:
            self._tensors[name] = t, t.clone(memory_format=torch.preserve_format)
        return self._tensors[name][1].clone(memory_format=torch.preserve_format)

    def restore(self) -> None:
        """Let everything be as it was."""
        set_random_states(self._states)
        with torch.no_grad():
            for t, was in self._tensors.values():
                t.copy_(was)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, the numbers are drawn that the call draws; behind, none has been, and nothing sent."""
        now = random_states(self._device)
        set_random_states(self._states)
        try:
            with uncounted():
                yield
        finally:
            set_random_states(now)


@contextmanager
def uncounted() -> Iterator[None]:
    """Inside, collectives are not counted: the step does not send them."""
    counts, runtime.RT.counts = runtime.RT.counts, runtime.Counts()
    try:
        yield
    finally:
        runtime.RT.counts = counts


@dataclass
class Proof:
    """The comparison of one capture.

    Attributes:
        ready: the programs after the passes.
        plain: the program before them.
        prefixes: of each pass, its name and what makes the program behind it and those ahead of it.
        where: the function that captured, for messages.
    """

    ready: CompiledVariant
    plain: Program
    prefixes: Sequence[tuple[str, Callable[[Program], Program]]]
    where: str
    tries: int = 0
    outcome: Outcome = field(init=False)
    _shown: dict[str, Sketch] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.outcome = Outcome(tuple(name for name, _ in self.prefixes))

    @property
    def done(self) -> bool:
        """Whether nothing is left to compare."""
        return self.tries > 0 and (self.outcome.finite or self.tries >= TRIES)

    def run(self, bound: BoundProgram, leaves: Sequence[Any], call: Callable[[], Any]) -> Any:
        """A call of the step that is compared.

        Args:
            bound: what ``call`` runs.

        Raises:
            PassError: on all ranks, before the update, where gradients differ.
        """
        self._leaves = leaves
        self._before = Before(self.plain.mesh.device)
        self._reference = PlainRun(self.plain, self.ready.carrier, self.ready.how)
        self._wanted = self._reference(leaves, self._before)
        self._shown, self._judged = {}, set[str]()
        self.outcome = Outcome(self.outcome.passes, len(self._wanted), floor=floor_of(self.plain))
        program = watched(BACKENDS[self.ready.carrier.backend](bound.program), self._show, self._verdict)
        run, bound.run = bound.run, Compiled(program).once
        try:
            made = call()
        finally:
            bound.run = run
            del self._leaves, self._before, self._reference, self._wanted
            self._shown = {}
        self.tries += 1
        return made

    def _show(self, name: str, t: Tensor) -> None:
        self._shown[name] = sketch(t)

    # -- the verdict ----------------------------------------------------------------------------------

    def _verdict(self) -> None:
        """Compare what has been shown since the last verdict."""
        names = [n for n in self._shown if n not in self._judged]
        self._judged.update(names)
        last = len(self._judged) >= len(self._wanted)
        names += [n for n in self._wanted if n not in self._shown] if last else []
        group = collective.group(self.plain.mesh)
        mine = self._differing(names, self._wanted, self._shown, None)
        finite = all(s.finite for s in self._shown.values())
        everyone = collective.all_gather_object((bool(mine), finite), group, WHAT)
        self.outcome.finite &= all(f for _, f in everyone)
        if not any(differ for differ, _ in everyone):
            return
        noise = self._reference(self._leaves, self._before, SEED)
        mine = self._differing(names, self._wanted, self._shown, noise)
        found = [f for of in collective.all_gather_object(mine, group, WHAT) for f in of]
        if found:
            self._fail(found)

    def _differing(
        self, names: Iterable[str], wanted: Sketches, shown: Sketches, noise: Sketches | None
    ) -> list[Discrepancy]:
        return differing(names, wanted, shown, noise, self.outcome)

    def _fail(self, found: Sequence[Discrepancy]) -> None:
        name = self._blamed()
        self._before.restore()
        raise PassError(message(self.where, name, found))

    def _blamed(self) -> str:
        """The first pass behind which the program differs; all ranks ask together."""
        names = [name for name, _ in self.prefixes]
        if len(names) == 1:
            return f"pass {names[0]}"
        group = collective.group(self.plain.mesh)
        for name, prefix in self.prefixes[:-1]:
            try:
                shown = PlainRun(prefix(self.plain), self.ready.carrier, self.ready.how)(self._leaves, self._before)
            except MeshwrightError:
                return f"one of the passes {', '.join(names)}"
            noise = self._reference(self._leaves, self._before, SEED)
            mine = self._differing([*self._wanted], self._wanted, shown, noise)
            if any(collective.all_gather_object(bool(mine), group, WHAT)):
                return f"pass {name}"
        return f"pass {names[-1]}"


def differing(
    names: Iterable[str],
    wanted: Sketches,
    shown: Sketches,
    noise: Sketches | None,
    outcome: Outcome,
    factor: float | None = None,
    more: float = 0.0,
) -> list[Discrepancy]:
    """What differs beyond rounding; without ``noise`` what may.  The outcome gets the largest difference.

    Args:
        factor: what the gradients in ``noise`` are multiplied by; None: as they say.
        more: roundings that ``wanted`` is off by.
    """
    found: list[Discrepancy] = []
    moved = _noise_of(wanted, noise, factor)
    for name in names:
        text, size = _difference(name, wanted, shown, noise, moved.get(name, 0.0), _ULPS + more, outcome.floor)
        if text:
            found.append(Discrepancy(runtime.RT.rank, name, text, size))
        outcome.largest = max(outcome.largest, 0.0 if text else size)
    return found


def eps_of(program: Program) -> float:
    """Of the narrowest dtype in a program."""
    dtypes = {v.dtype for n in program.graph.nodes if (v := value_of(n)) is not None}
    return max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0)


def floor_of(program: Program) -> float:
    """In the norm of a gradient of a program, a difference that is not looked into."""
    return min(_FEW * eps_of(program), _MOST)


def message(where: str, name: str, found: Sequence[Discrepancy]) -> str:
    """Of the error: which pass changes what, on which ranks, and how far."""
    worst = max(found, key=lambda f: f.size)
    ranks = sorted({f.rank for f in found})
    others = len({f.name for f in found}) - 1
    more = f" and {others} more value{'s' if others > 1 else ''}" if others else ""
    return (
        f"{where}: {name} changes {worst.name}{more} on rank{'s' if len(ranks) > 1 else ''} "
        f"{', '.join(map(str, ranks))}: on rank {worst.rank} {worst.text}. Nothing was updated. Leave the pass "
        "out or mend it; check=False if it is meant to change gradients."
    )


def _noise_of(wanted: Sketches, noise: Sketches | None, factor: float | None) -> dict[str, float]:
    """Of each value, how far rounding may have moved it.

    A gradient of a few elements may be rounded alike by chance: what is usual for the others may happen to it, too.
    """
    if noise is None:
        return {}
    names = [n for n in wanted if n in noise]
    gradients = [n for n in names if n.startswith(GRADIENT)]
    if factor is None:  # a clip takes it off again
        squares = [sum(x[n].norm ** 2 for n in gradients) for x in (wanted, noise)]
        factor = (squares[1] / squares[0]) ** 0.5 if all(squares) else 1.0
    apart = {n: wanted[n].apart(noise[n], factor if n in gradients else 1.0) for n in names}
    parts = sorted(apart[n] / wanted[n].norm for n in gradients if wanted[n].norm)
    usual = parts[len(parts) // 2] if parts else 0.0
    return {n: max(d, usual * wanted[n].norm if n in gradients else 0.0) for n, d in apart.items()}


def _difference(
    name: str, wanted: Sketches, shown: Sketches, noise: Sketches | None, moved: float, roundings: float, floor: float
) -> tuple[str, float]:
    """How a value differs, in words, empty if it does not; and how far."""
    if name not in shown or name not in wanted:
        where = "with the passes" if name not in shown else "without the passes"
        return f"it is missing {where}", float("inf")
    want, got = wanted[name], shown[name]
    if got.shape != want.shape:
        return f"its shape is {list(got.shape)}, {list(want.shape)} without the passes", float("inf")
    if not want.same_odd(got):
        if noise is not None and not want.same_odd(noise[name]):
            return "", 0.0
        return "other elements are not finite than without the passes", float("inf")
    norm, distance = max(want.norm, got.norm, want.terms), want.distance(got)
    eps = max(torch.finfo(s.dtype).eps if s.dtype.is_floating_point or s.dtype.is_complex else 0.0 for s in (want, got))
    size = distance / norm if norm else 0.0
    limit = max(roundings * eps, floor) * norm + _NOISE * moved
    if distance <= limit:
        return "", size
    return f"by {size:.2g} of its norm, {limit / norm:.2g} would be rounding", size


__all__ = [
    "SEED", "TRIES", "WHAT", "Before", "Check", "Discrepancy", "Outcome", "PlainRun", "Proof", "Sketches", "differing",
    "eps_of", "floor_of", "message", "uncounted",
]  # fmt: skip
