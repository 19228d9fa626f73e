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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ... import collective
from ...errors import MeshwrightError, PassError, ProgramError
from ...passes import PassManager
from ...ranks import runtime
from ..capture.ledger import Asked
from ..ir.program import Program
from ..ir.subgraphs import copied
from .bind import BACKENDS, Bound, Carrier, Ready
from .runner import Compiled
from .sketches import Sketch, sketch
from .watched import watched, written_inputs

Tensor = torch.Tensor

SEED = 1.3  # what the backward starts from where rounding is measured: no power of two
_ULPS = 16  # a difference of so many roundings of a gradient's dtype is not looked into
_NOISE = 8.0  # times what rounding was measured to be
_TRIES = 3  # calls that are compared where values are not finite
Sketches = Mapping[str, Sketch]
Check = Literal["first", "always", False]
WORDS = ("first", "always")


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
    """

    passes: tuple[str, ...]
    values: int = 0
    largest: float = 0.0
    finite: bool = True


class PlainRun:
    """A program that runs for what it shows, without its update; what it works on stays as it is."""

    def __init__(self, program: Program, carrier: Carrier, how: tuple[Mapping[str, int], Any]) -> None:
        self._sketches: dict[str, Sketch] = {}
        self._factor = 1.0
        self.program = watched(program, self._show, seed=self._seed)
        self._code = Compiled(self.program)
        self.bound = Bound(self.program, carrier, *how, compiled=(self._code, ()))
        self.places = written_inputs(self.program)

    def __call__(self, leaves: Sequence[Any], before: Before, factor: float = 1.0) -> Sketches:
        """What it shows, with the random numbers and written tensors of ``before``.

        Args:
            factor: the backward starts from this.
        """
        self._sketches, self._factor = {}, factor
        inputs = self.bound.filled(leaves, {})
        for i in self.places:
            inputs[i] = before.copy(self.program.inputs[i].name, inputs[i])
        with before.drawing():
            self._code.once(inputs)
        return self._sketches

    def _show(self, name: str, t: Tensor) -> None:
        self._sketches[name] = sketch(t)

    def _seed(self, t: Tensor) -> Tensor:
        return t if self._factor == 1.0 else t * self._factor


class Before:
    """What a call is about to change: random numbers, and tensors that a forward writes to."""

    def __init__(self, device: str) -> None:
        self._device = None if device == "cpu" else torch.get_device_module(device)
        self._states = self._now()
        self._tensors: dict[str, tuple[Tensor, Tensor]] = {}

    def _now(self) -> tuple[Tensor, Tensor | None]:
        return torch.get_rng_state(), None if self._device is None else self._device.get_rng_state()

    def _set(self, states: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(states[0])
        if self._device is not None and states[1] is not None:
            self._device.set_rng_state(states[1])

    def copy(self, name: str, t: Tensor) -> Tensor:
        """A copy of a tensor as it was."""
        if name not in self._tensors:
            self._tensors[name] = t, t.clone(memory_format=torch.preserve_format)
        return self._tensors[name][1].clone(memory_format=torch.preserve_format)

    def restore(self) -> None:
        """Let everything be as it was."""
        self._set(self._states)
        with torch.no_grad():
            for t, was in self._tensors.values():
                t.copy_(was)

    def drawing(self) -> _Drawing:
        """Inside, the numbers are drawn that the call draws; behind, none has been."""
        return _Drawing(self)


class _Drawing:
    def __init__(self, of: Before) -> None:
        self.of = of

    def __enter__(self) -> None:
        self.now, self.counts = self.of._now(), runtime.RT.counts
        runtime.RT.counts = runtime.Counts()  # what is sent here is not what the step sends
        self.of._set(self.of._states)

    def __exit__(self, *_: object) -> None:
        self.of._set(self.now)
        runtime.RT.counts = self.counts


@dataclass
class Proof:
    """The comparison of one capture.

    Attributes:
        ready: the programs after the passes.
        plain: the program before them.
        prefixes: of each pass, its name and what makes the program behind it and those ahead of it.
        where: the function that captured, for messages.
    """

    ready: Ready
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
        return self.tries > 0 and (self.outcome.finite or self.tries >= _TRIES)

    def run(self, bound: Bound, leaves: Sequence[Any], call: Callable[[], Any]) -> Any:
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
        self.outcome = Outcome(self.outcome.passes, len(self._wanted))
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
        everyone = collective.all_gather_object((bool(mine), finite), group, "the comparison of passes")
        self.outcome.finite &= all(f for _, f in everyone)
        if not any(differ for differ, _ in everyone):
            return
        noise = self._reference(self._leaves, self._before, SEED)
        mine = self._differing(names, self._wanted, self._shown, noise)
        found = [f for of in collective.all_gather_object(mine, group, "the comparison of passes") for f in of]
        if found:
            self._fail(found)

    def _differing(
        self, names: Sequence[str], wanted: Sketches, shown: Sketches, noise: Sketches | None
    ) -> list[Discrepancy]:
        """What differs beyond rounding, the largest first; without ``noise`` what may."""
        found: list[Discrepancy] = []
        for name in names:
            text, size = _difference(name, wanted, shown, noise)
            if text:
                found.append(Discrepancy(runtime.RT.rank, name, text, size))
            self.outcome.largest = max(self.outcome.largest, 0.0 if text else size)
        return sorted(found, key=lambda f: -f.size)

    def _fail(self, found: Sequence[Discrepancy]) -> None:
        worst = max(found, key=lambda f: f.size)
        name = self._blamed()
        self._before.restore()
        ranks = sorted({f.rank for f in found})
        others = len({f.name for f in found}) - 1
        more = f" and {others} more values" if others else ""
        raise PassError(
            f"{self.where}: {name} changes {worst.name}{more} on rank{'s' if len(ranks) > 1 else ''} "
            f"{', '.join(map(str, ranks))}: on rank {worst.rank} {worst.text}. Nothing was updated. Leave the pass "
            "out or mend it; check=False if it is meant to change gradients."
        )

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
            if any(collective.all_gather_object(bool(mine), group, "the comparison of passes")):
                return f"pass {name}"
        return f"pass {names[-1]}"


def _difference(name: str, wanted: Sketches, shown: Sketches, noise: Sketches | None) -> tuple[str, float]:
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
    norm, distance = max(want.norm, got.norm), want.distance(got)
    eps = max(torch.finfo(s.dtype).eps if s.dtype.is_floating_point or s.dtype.is_complex else 0.0 for s in (want, got))
    size = distance / norm if norm else 0.0
    limit = _ULPS * eps * norm + (0.0 if noise is None else _NOISE * want.apart(noise[name]))
    if distance <= limit:
        return "", size
    return f"by {size:.2g} of its norm, {limit / norm:.2g} would be rounding", size


class Proofs:
    """The comparisons of a step.

    Args:
        where: the function that captured it.
        transform: what applies its passes.
        check: as of ``compile_step``.
        compares: False: nothing is compared.
    """

    def __init__(self, where: str, transform: Any, check: Check, compares: bool) -> None:
        if check is not False and check not in WORDS:
            raise ProgramError(f"{where}: check={check!r}. Pass {', '.join(map(repr, WORDS))} or False.")
        self.where, self.check = where, check
        self._passes: tuple[Any, ...] = tuple(getattr(transform, "passes", ()))
        self._compares = compares and check is not False and bool(self._passes)
        self._open: dict[int, Proof] = {}  # by id of the programs, which it holds
        self.outcomes: list[Outcome] = []

    def plain(self, program: Program) -> Program | None:
        """A copy of a program before its passes; None where nothing is to be compared."""
        return copied(program) if self._compares else None

    def begin(self, ready: Ready, plain: Program | None) -> None:
        """Compare the first call of these programs, where passes made them."""
        ran = [r.name for r in ready.program.passes[len(plain.passes) :]] if plain is not None else []
        if plain is None or not ran or ready.program.parts:
            return
        applied = [p for p in self._passes if p.name in ran]
        prefixes = [(p.name, PassManager(applied[: i + 1], keep_order=True)) for i, p in enumerate(applied)]
        self._open[id(ready)] = Proof(ready, plain, prefixes, self.where)

    def of(self, ready: Ready) -> Proof | None:
        """The comparison that the next call of these programs makes."""
        proof = self._open.get(id(ready))
        if proof is not None and proof.done and self.check != "always":
            self.outcomes.append(proof.outcome)
            del self._open[id(ready)]
            return None
        return proof

    def asked(self) -> Iterator[Asked]:
        """What became of ``check=``."""
        if not self._compares:
            return
        outcomes = [*self.outcomes, *(p.outcome for p in self._open.values() if p.tries)]
        why = "no call was compared yet"
        if outcomes:
            values, largest = sum(o.values for o in outcomes), max(o.largest for o in outcomes)
            captures = f"{len(outcomes)} capture{'s' if len(outcomes) > 1 else ''}"
            passes = ", ".join(dict.fromkeys(n for o in outcomes for n in o.passes))
            why = f"{values} values of {captures} equal those without {passes}; largest difference {largest:.1g}"
            if not all(o.finite for o in outcomes):
                why += "; some were not finite"
        elif not self._open:
            why = "no pass changed the program"
        yield Asked("check", repr(self.check), bool(outcomes or self._open), why)


__all__ = ["Check", "Discrepancy", "Outcome", "Proof", "Proofs"]
