"""Merged steps prove themselves: the gradient of an update against those of its micro-batches without passes.

The program without passes runs on each micro-batch.  The merged gradient must be one weighted sum of theirs, with the
same weights for all parameters and on all ranks; the weights follow from the sketches.  That they are the right ones is
seen from the loss of the whole batch, which must be the same sum of losses: it is computed without a backward, where
that needs no more memory than the step.  Gradients that are multiples of each other, or zeros, leave weights open: then
some weights among those that are left must do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import collective
from ...errors import PassError
from ...passes import Pass
from ...ranks import runtime
from ..ir.program import Program
from .bind import BACKENDS, BoundProgram, CompiledVariant
from .pipeline import Pipelined
from .proof import (
    SEED,
    TRIES,
    WHAT,
    Before,
    Discrepancy,
    Outcome,
    PlainRun,
    Sketches,
    differing,
    eps_of,
    floor_of,
    message,
)
from .runner import Compiled
from .sketches import Sketch, sketch
from .watched import GRADIENT, LOSS, is_added_up, points_of, watched
from .whole_loss import Record, joined, value_of_loss, whole_loss

Tensor = torch.Tensor
_LOOSE = 256  # roundings of the narrowest dtype that losses may differ by
_NARROW = 8  # the same of dtypes in which that is more than a thousandth
_SMALL = 1e-3  # singular values of gradients that tell micro-batches from each other are above this
_LEFT = 100.0  # times what the closest gradient leaves: others are not asked for weights
_WEIGHTS = 1e-3  # that weights may differ by; or this many roundings of the narrowest dtype
_ROUNDINGS = 4
_FLOOR = 1e-9  # of losses: weights are known no better, as they follow from gradients


@dataclass
class _Micro:
    """A micro-batch of the cycle under way."""

    run: PlainRun
    leaves: Sequence[Any]
    before: Before
    seed: int | None
    sketches: Sketches
    loss: float | None

    def again(self) -> Sketches:
        """What it shows where its backward starts from another number."""
        return self.run(self.leaves, self.before, SEED, self.seed)


class MergedProof:
    """The comparisons of a step whose micro-batches are merged.

    Args:
        where: the function that captured, for messages.
        passes: that made the programs.
        always: each cycle is compared.
        whole: records the loss of a whole batch.
    """

    def __init__(self, where: str, passes: Sequence[Pass], always: bool, whole: Record | None) -> None:
        self.where, self.passes, self.always, self.whole = where, passes, always, whole
        self._merge = next((p for p in passes if p.calls_per_update > 1 or p.splits > 1), None)
        self.outcomes: list[Outcome] = []
        self._plains: dict[int, tuple[CompiledVariant, Program]] = {}
        self._open: dict[int, int] = {}  # id of programs to the cycles that were to compare them
        self._micros: list[_Micro] = []
        self._runs: dict[int, PlainRun] = {}
        self._active = False
        self._shown: dict[str, Sketch] = {}
        self._loss: Tensor | None = None

    def begin(self, ready: CompiledVariant, plain: Program) -> None:
        """Compare the first cycle of these programs."""
        self._plains[id(ready)] = ready, plain
        self._open[id(ready)] = 0

    def call(
        self, bound: Any, readies: Sequence[CompiledVariant], micros: Sequence[Sequence[Any]], cycle: tuple[int, int],
        run: Callable[[], Any],
    ) -> Any:  # fmt: skip
        """A call, with the programs and leaves of its micro-batches; raises as ``Proofs.call``."""
        done, calls = cycle
        if not done:
            self._end()
            self._active = self.always or bool(self._open)
        self._active &= all(id(r) in self._plains for r in readies)
        if not self._active:
            return run()
        before = Before(readies[0].program.mesh.device)
        seed = None
        if isinstance(bound, Pipelined) and bound.how.draws:
            with before.drawing():
                seed = int(torch.randint(1 << 62, ()))
        for i, (ready, micro) in enumerate(zip(readies, micros, strict=True)):
            self._micros.append(self._micro(ready, micro, before, None if seed is None else seed + i))
        watch: BoundProgram = bound.flush if isinstance(bound, Pipelined) else bound
        self._shown, self._last, self._piped = {}, done + 1 == calls, isinstance(bound, Pipelined)
        self._spec = next((o.spec for o in watch.program.outputs if o.kind == "loss"), None)
        program = watched(BACKENDS[watch.carrier.backend](watch.program), self._show, self._verdict, unclipped=True)
        kept, watch.run = watch.run, Compiled(program).once
        try:
            made = run()
            if self._last:
                self._emptied(readies[0])
            return made
        except BaseException:
            self._end()
            raise
        finally:
            watch.run = kept
            if self._last:
                self._end()

    def early(self, flush: Callable[[], BoundProgram]) -> None:
        """Compare what ``step.flush()`` would update with now, after the first call of a cycle; it stays as it is.

        Args:
            flush: gives what updates from the calls that have run.
        """
        if not self._active or len(self._micros) != 1:
            return
        micro, bound = self._micros[0], flush()
        ready, plain = next((r, p) for r, p in self._plains.values() if id(r) in self._runs)
        run = PlainRun(bound.program, bound.carrier, ready.how, unclipped=True)
        self._shown = dict(run([], Before(plain.mesh.device)))
        names, outcome = self._names(), Outcome(())
        found = differing(names, micro.sketches, self._shown, None, outcome)
        if _any(plain.mesh, bool(found)):
            found = differing(names, micro.sketches, self._shown, micro.again(), outcome, SEED)
        self._raise(plain.mesh, found, " in step.flush() after one micro-step")

    def _emptied(self, ready: CompiledVariant) -> None:
        """Raise where sums of gradients are left to the next update."""
        left = [name for name, t in ready.carrier.sums.items() if t.numel() and bool(t.any())]
        mesh = ready.program.mesh
        everyone = collective.all_gather_object(left, collective.group(mesh), WHAT)
        if any(everyone):
            name = next(n for of in everyone for n in of)
            ranks = ", ".join(str(r) for r, of in zip(mesh.ranks, everyone, strict=True) if of)
            raise PassError(
                f"{self.where}: {self._passes()} leaves the sum for {name} as it is behind the update (ranks {ranks}): "
                "the next update would count these micro-batches again. Leave the pass out or mend it."
            )

    def _passes(self) -> str:
        names = [p.name for p in self.passes]
        return f"pass {names[0]}" if len(names) == 1 else f"one of the passes {', '.join(names)}"

    def _end(self) -> None:
        self._micros, self._runs, self._active = [], {}, False

    def _micro(self, ready: CompiledVariant, leaves: Sequence[Any], before: Before, seed: int | None) -> _Micro:
        plain = self._plains[id(ready)][1]
        run = self._runs.get(id(ready))
        if run is None:
            run = self._runs[id(ready)] = PlainRun(plain, ready.carrier, ready.how, unclipped=True)
        sketches = run(leaves, before, seed=seed)
        spec = next((o.spec for o in plain.outputs if o.kind == "loss"), None)
        held = [x.clone() if isinstance(x, Tensor) else x for x in leaves]  # users may fill their batch anew
        return _Micro(run, held, before, seed, sketches, value_of_loss(run.loss, spec))

    def _show(self, name: str, t: Tensor) -> None:
        self._shown[name] = sketch(t)
        if name == LOSS:
            self._loss = t

    # -- the verdict ----------------------------------------------------------------------------------

    def _verdict(self) -> None:
        """Compare a call, and the update behind the last one of a cycle."""
        mesh = self._micros[0].run.program.mesh
        outcome = Outcome(tuple(p.name for p in self.passes), floor=floor_of(self._plain))
        here = self._micros[-1].sketches
        found: list[Discrepancy] = []
        if not self._piped:
            names = [n for n in here if not n.startswith(GRADIENT)]
            found = differing(names, here, self._shown, None, outcome)
            if _any(mesh, bool(found)):
                found = differing(names, here, self._shown, self._micros[-1].again(), outcome)
            self._raise(mesh, found)
        if not self._last:
            return
        self._weigh(mesh, self._judge(mesh, outcome), outcome)
        finite = all(s.finite for m in self._micros for s in m.sketches.values())
        outcome.finite = not _any(mesh, not finite)
        self.outcomes.append(outcome)
        for key in {id(r) for r, _ in self._plains.values() if id(r) in self._runs}:
            self._open[key] = self._open.get(key, 0) + 1
        for key in list(self._open):
            tries = self._open[key]
            if (key in self._runs and outcome.finite) or tries >= TRIES:
                del self._open[key]
            elif key not in self._runs:
                self._open[key] += 1

    def _judge(self, mesh: Any, outcome: Outcome) -> _Weights:
        """Compare gradients with the sum of those of micro-batches; the weights in it."""
        names = self._names()
        outcome.values = len(names)
        fits = collective.all_gather_object(_fit(names, self._micros, self._shown), collective.group(mesh), WHAT)
        weights = _joint(fits)
        wanted = _sums(names, [m.sketches for m in self._micros], weights.values)
        found = differing(names, wanted, self._shown, None, outcome, more=weights.loose)
        if _any(mesh, bool(found)):
            noise = _sums(names, [m.again() for m in self._micros], weights.values)
            found = differing(names, wanted, self._shown, noise, outcome, SEED, weights.loose)
        self._raise(mesh, found)
        return weights

    @property
    def _plain(self) -> Program:
        """A program without passes that ran in this cycle."""
        return next(p for r, p in self._plains.values() if id(r) in self._runs)

    def _names(self) -> list[str]:
        """Of the gradients that are compared: a rank updates none of those of other stages."""
        names: list[str] = []
        plain = self._plain
        by_hand = all(o.spec is None for o in plain.outputs)
        added = {p.name: not by_hand or is_added_up(p) for p in points_of(plain, unclipped=True)}
        for name in dict.fromkeys(n for m in self._micros for n in m.sketches if n.startswith(GRADIENT)):
            shapes = [m.sketches[name].shape for m in self._micros if name in m.sketches]
            empty = all(0 in s for s in shapes)
            if added.get(name, True) and not (empty and name not in self._shown):
                names.append(name)
        return names

    def _weigh(self, mesh: Any, weights: _Weights, outcome: Outcome) -> None:
        """Compare the weights of micro-batches with the loss of the whole batch."""
        losses, count = [m.loss for m in self._micros], len(self._micros)
        ready, plain = next((r, p) for r, p in self._plains.values() if id(r) in self._runs)
        eps = min(eps_of(plain), torch.finfo(torch.bfloat16).eps)  # what has fewer bits is only sent
        near = max(_WEIGHTS, _ROUNDINGS * eps)
        avg, text = getattr(self._merge, "avg", True), ""
        if None in losses or self._by_hand() or not avg or not getattr(self._merge, "weighted", True):
            one = 1 / count if avg else 1.0
            text = "" if weights.can_be(one, near) else f"each is to be {one:.4g}"
        else:
            dim = getattr(self._merge, "rows_dim", None)
            micros = joined([m.leaves for m in self._micros], plain, 0 if self._piped else dim)
            whole = None if self.whole is None else whole_loss(self.whole, micros, plain, ready.carrier)
            values = [x for x in losses if x is not None]
            if whole is None:
                outcome.note = "weights of micro-batches were not compared with the whole batch"
                right = weights.can_be(1.0, near) or weights.left([([1.0] * count, 1.0)])[0] < near
                text = "" if right else "they add up neither to 1 nor to the number of micro-batches"
            elif math.isfinite(whole):
                loose = max(min(_LOOSE * eps, max(_NARROW * eps, _WEIGHTS)), _FLOOR)
                if not _give(weights, values, whole, loose, near):
                    total = sum(w * x for w, x in zip(weights.values, values, strict=True) if w)
                    text = f"the loss of the whole batch is {whole:.6g}, that sum of their losses {total:.6g}"
        listed = ", ".join(f"{w:.4g}" for w in weights.values)
        words = f"they are {listed}; {text}"
        self._raise(mesh, [Discrepancy(runtime.RT.rank, "the weights of micro-batches", words, 1.0)] if text else [])

    def _by_hand(self) -> bool:
        return all(o.spec is None for _, p in self._plains.values() for o in p.outputs)

    def _raise(self, mesh: Any, found: list[Discrepancy], when: str = "") -> None:
        """Raise on all ranks what one has found."""
        everyone = [f for of in collective.all_gather_object(found, collective.group(mesh), WHAT) for f in of]
        if everyone:
            raise PassError(message(self.where, self._passes() + when, everyone))


def _any(mesh: Any, mine: bool) -> bool:
    return any(collective.all_gather_object(mine, collective.group(mesh), WHAT))


@dataclass(frozen=True)
class _Fit:
    """How gradients are sums of those of micro-batches, on one rank.

    Attributes:
        weights: of each gradient that determines them, with what part of its norm they leave, and that norm; last, how
            far micro-batches are from multiples of each other in it.
        square, product: of all gradients, the normal equations.
        zero: of each micro-batch, whether all of its gradients are zero: nothing in it counts.
    """

    weights: list[tuple[float, float, list[float], float]]
    square: Tensor
    product: Tensor
    zero: list[bool]


def _fit(names: Sequence[str], micros: Sequence[_Micro], shown: Sketches) -> _Fit:
    count = len(micros)
    square = torch.zeros(count, count, dtype=torch.float64)
    product, weights = torch.zeros(count, dtype=torch.float64), list[tuple[float, float, list[float], float]]()
    zero = [not any(m.sketches[n].norm for n in names if n in m.sketches) for m in micros]
    some = [i for i, z in enumerate(zero) if not z]
    for name in names:
        if name not in shown or any(name not in m.sketches for m in micros) or not some:
            continue
        columns = torch.stack([m.sketches[name].signed for m in micros], 1)
        norms = torch.linalg.vector_norm(columns, dim=0)
        if not norms.max():
            continue
        wanted = shown[name].signed
        square += columns.T @ columns
        product += columns.T @ wanted
        if not norms[some].min() or not wanted.any():
            continue
        columns = (columns / norms)[:, some]
        sizes = torch.linalg.svdvals(columns)
        if len(sizes) < len(some) or sizes[-1] < _SMALL * sizes[0]:
            continue
        solved = torch.linalg.lstsq(columns, wanted.unsqueeze(1)).solution.squeeze(1)
        row = torch.zeros(count, dtype=torch.float64)
        row[some] = solved / norms[some]
        left = torch.linalg.vector_norm(columns @ solved - wanted) / torch.linalg.vector_norm(wanted).clamp_min(1e-300)
        weights.append((float(left), float(norms.max()), row.tolist(), float(sizes[-1] / sizes[0])))
    return _Fit(weights, square, product, zero)


@dataclass(frozen=True)
class _Weights:
    """Of micro-batches in a merged gradient.

    Attributes:
        values: some that fit.
        free: columns, each of which may be added to them without a change of any gradient.
        loose: roundings of gradients that they may be off by.
    """

    values: list[float]
    free: Tensor
    loose: float = 0.0

    def left(self, wanted: Sequence[tuple[Sequence[float], float]]) -> list[float]:
        """Of several products with rows of numbers, by how much each misses its value, with the best of all weights;
        what has no finite number does not count."""
        rows = torch.tensor([[x if math.isfinite(x) else 0.0 for x in row] for row, _ in wanted], dtype=torch.float64)
        values = torch.tensor([v for _, v in wanted], dtype=torch.float64)
        missing = values - rows @ torch.tensor(self.values, dtype=torch.float64)
        if self.free.shape[1]:
            missing -= rows @ self.free @ (torch.linalg.pinv(rows @ self.free, rtol=1e-9) @ missing)
        return missing.abs().tolist()

    def can_be(self, one: float, near: float) -> bool:
        """Whether all may be one number."""
        return max(self.left([(row, one) for row in torch.eye(len(self.values)).tolist()])) < near * max(1.0, one)


def _give(weights: _Weights, losses: Sequence[float], whole: float, loose: float, near: float) -> bool:
    """Whether weights give the loss of the whole batch: as those of a mean, of a sum, or of a sum of which micro-steps
    take the mean."""
    count, size = len(losses), max(abs(x) for x in (*losses, whole) if math.isfinite(x)) or 1.0
    ones = [1.0] * count
    for total in (1.0, float(count)):
        missed, apart = weights.left([([x / size for x in losses], whole / size), (ones, total)])
        if missed <= loose * total and apart < near * total:
            return True
    return weights.can_be(1 / count, near) and abs(sum(losses) - whole) <= loose * size * count


def _joint(fits: Sequence[_Fit]) -> _Weights:
    """The weights that all ranks' gradients agree on."""
    count = len(fits[0].zero)
    every = [w for f in fits for w in f.weights]
    zeros = {tuple(f.zero) for f in fits}
    if every and len(zeros) == 1:
        largest = max(f[1] for f in every)
        every = [f for f in every if f[1] > _SMALL * largest]  # others may be rounding
        least = min(left for left, *_ in every)
        close = [f for f in every if f[0] <= max(_LEFT * least, 1e-12)]
        apart = max(f[3] for f in close) / 4
        close = [f for f in close if f[3] >= apart]  # others say it less exactly
        (zero,) = zeros
        free = torch.eye(count, dtype=torch.float64)[:, list(zero)]
        values = torch.tensor([w for _, _, w, _ in close], dtype=torch.float64).median(0).values
        return _Weights(values.tolist(), free, 1 / apart)
    square, product = (torch.stack([getattr(f, name) for f in fits]).sum(0) for name in ("square", "product"))
    sizes = square.diagonal().sqrt()
    sizes[sizes == 0] = 1.0
    values, vectors = torch.linalg.eigh(square / sizes / sizes.unsqueeze(1))
    kept = values > _SMALL**2 * values[-1].clamp_min(1e-300)
    inverse = vectors[:, kept] / values[kept] @ vectors[:, kept].T
    free = torch.linalg.qr(vectors[:, ~kept] / sizes.unsqueeze(1)).Q
    return _Weights((inverse @ (product / sizes) / sizes).tolist(), free)


def _sums(names: Sequence[str], shown: Sequence[Sketches], weights: Sequence[float]) -> dict[str, Sketch]:
    sums: dict[str, Sketch] = {}
    nothing = not any(weights)  # counts
    for sketches, weight in zip(shown, weights, strict=True):
        for name in names if weight or nothing else ():  # of what does not count nothing is read
            if name in sketches:
                part = sketches[name].times(weight)
                sums[name] = part if name not in sums else sums[name].plus(part)
    for sketches in shown:
        sums.update((name, sketches[name].zeros()) for name in names if name in sketches and name not in sums)
    return sums


__all__ = ["MergedProof"]
