"""Merged steps prove themselves: the gradient of an update against those of its micro-batches without passes.

The program without passes runs on each micro-batch.  The merged gradient must be one weighted sum of theirs, with the
same weights for all parameters and on all ranks; the weights follow from the sketches.  That they are the right ones is
seen from the loss of the whole batch, which must be the same sum of losses: it is computed without a backward, where
that needs no more memory than the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import collective
from ...errors import PassError
from ...passes import Pass
from ...ranks import runtime
from ..ir.program import Program
from .bind import BACKENDS, Bound, Ready
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
_SMALL = 1e-3  # singular values of gradients that tell micro-batches from each other are above this
_LEFT = 100.0  # times what the closest gradient leaves: others are not asked for weights
_WEIGHTS = 1e-3  # that weights may differ by
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
        self._plains: dict[int, tuple[Ready, Program]] = {}
        self._open: dict[int, int] = {}  # id of programs to the cycles that were to compare them
        self._micros: list[_Micro] = []
        self._runs: dict[int, PlainRun] = {}
        self._active = False
        self._shown: dict[str, Sketch] = {}
        self._loss: Tensor | None = None

    def begin(self, ready: Ready, plain: Program) -> None:
        """Compare the first cycle of these programs."""
        self._plains[id(ready)] = ready, plain
        self._open[id(ready)] = 0

    def call(
        self, bound: Any, readies: Sequence[Ready], micros: Sequence[Sequence[Any]], cycle: tuple[int, int],
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
        watch: Bound = bound.flush if isinstance(bound, Pipelined) else bound
        self._shown, self._last, self._piped = {}, done + 1 == calls, isinstance(bound, Pipelined)
        self._spec = next((o.spec for o in watch.program.outputs if o.kind == "loss"), None)
        program = watched(BACKENDS[watch.carrier.backend](watch.program), self._show, self._verdict, unclipped=True)
        kept, watch.run = watch.run, Compiled(program).once
        try:
            return run()
        except BaseException:
            self._end()
            raise
        finally:
            watch.run = kept
            if self._last:
                self._end()

    def _end(self) -> None:
        self._micros, self._runs, self._active = [], {}, False

    def _micro(self, ready: Ready, leaves: Sequence[Any], before: Before, seed: int | None) -> _Micro:
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
        weights = self._judge(mesh, outcome)
        if weights is not None:
            self._weigh(mesh, weights, outcome)
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

    def _judge(self, mesh: Any, outcome: Outcome) -> list[float] | None:
        """Compare gradients with the sum of those of micro-batches; the weights in it, where they follow from it."""
        names = self._names()
        outcome.values = len(names)
        fits = collective.all_gather_object(_fit(names, self._micros, self._shown), collective.group(mesh), WHAT)
        weights, known = _joint(fits)
        wanted = _sums(names, [m.sketches for m in self._micros], weights)
        found = differing(names, wanted, self._shown, None, outcome)
        if _any(mesh, bool(found)):
            noise = _sums(names, [m.again() for m in self._micros], weights)
            found = differing(names, wanted, self._shown, noise, outcome, SEED)
        self._raise(mesh, found)
        return weights if known else None

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

    def _weigh(self, mesh: Any, weights: list[float], outcome: Outcome) -> None:
        """Compare the weights of micro-batches with the loss of the whole batch."""
        losses = [m.loss for m in self._micros]
        idle = self._without_gradients(mesh)
        alike = [sum(weights) / len(weights)] * len(weights)
        even = max(abs(a - b) for a, b in zip(weights, alike, strict=True)) < _WEIGHTS * max(1.0, abs(alike[0]))
        text = ""
        avg = getattr(self._merge, "avg", True)
        if None in losses or self._by_hand() or not avg or not getattr(self._merge, "weighted", True):
            one = 1 / len(weights) if avg else 1.0
            text = "" if even and abs(alike[0] - one) < _WEIGHTS else f"each is to be {one:.4g}"
        else:
            ready, plain = next((r, p) for r, p in self._plains.values() if id(r) in self._runs)
            dim = getattr(self._merge, "rows_dim", None)
            micros = joined([m.leaves for m in self._micros], plain, 0 if self._piped else dim)
            whole = None if self.whole is None else whole_loss(self.whole, micros, plain, ready.carrier)
            if whole is None:
                outcome.note = "weights of micro-batches were not compared with the whole batch"
                right = even or any(idle) or abs(sum(weights) - 1) < _WEIGHTS
                text = "" if right else "they add up neither to 1 nor to the number of micro-batches"
            else:
                total = sum(w * x for w, x in zip(weights, losses, strict=True) if x is not None and w)
                size = max(abs(x) for x in (*losses, whole) if x is not None)
                limit = max(_LOOSE * eps_of(plain), _FLOOR) * size
                plainly = even and abs(sum(losses) - whole) <= limit * len(losses)  # type: ignore[arg-type]
                unknown = any(i and x for i, x in zip(idle, losses, strict=True))
                if abs(total - whole) > limit and not plainly and not unknown:
                    text = f"the loss of the whole batch is {whole:.6g}, that sum of their losses {total:.6g}"
        listed = ", ".join(f"{w:.4g}" for w in weights)
        words = f"they are {listed}; {text}"
        self._raise(mesh, [Discrepancy(runtime.RT.rank, "the weights of micro-batches", words, 1.0)] if text else [])

    def _without_gradients(self, mesh: Any) -> list[bool]:
        """Of each micro-batch, whether all gradients are zero on all ranks: then nobody sees how much it counts."""
        mine = [not any(s.norm for n, s in m.sketches.items() if n.startswith(GRADIENT)) for m in self._micros]
        return [all(of) for of in zip(*collective.all_gather_object(mine, collective.group(mesh), WHAT), strict=True)]

    def _by_hand(self) -> bool:
        return all(o.spec is None for _, p in self._plains.values() for o in p.outputs)

    def _raise(self, mesh: Any, found: list[Discrepancy]) -> None:
        """Raise on all ranks what one has found."""
        everyone = [f for of in collective.all_gather_object(found, collective.group(mesh), WHAT) for f in of]
        if everyone:
            names = [p.name for p in self.passes]
            name = f"pass {names[0]}" if len(names) == 1 else f"one of the passes {', '.join(names)}"
            raise PassError(message(self.where, name, everyone))


def _any(mesh: Any, mine: bool) -> bool:
    return any(collective.all_gather_object(mine, collective.group(mesh), WHAT))


@dataclass(frozen=True)
class _Fit:
    """How gradients are sums of those of micro-batches, on one rank.

    Attributes:
        weights: of each gradient that determines them, with what part of its norm they leave, and that norm.
        square, product: of all gradients, the normal equations.
        zero: of each micro-batch, whether all of its gradients are zero: nothing in it counts.
    """

    weights: list[tuple[float, float, list[float]]]
    square: Tensor
    product: Tensor
    zero: list[bool]


def _fit(names: Sequence[str], micros: Sequence[_Micro], shown: Sketches) -> _Fit:
    count = len(micros)
    square = torch.zeros(count, count, dtype=torch.float64)
    product, weights = torch.zeros(count, dtype=torch.float64), list[tuple[float, float, list[float]]]()
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
        if not norms[some].min():
            continue
        columns = (columns / norms)[:, some]
        sizes = torch.linalg.svdvals(columns)
        if len(sizes) < len(some) or sizes[-1] < _SMALL * sizes[0]:
            continue
        solved = torch.linalg.lstsq(columns, wanted.unsqueeze(1)).solution.squeeze(1)
        row = torch.zeros(count, dtype=torch.float64)
        row[some] = solved / norms[some]
        left = torch.linalg.vector_norm(columns @ solved - wanted) / torch.linalg.vector_norm(wanted).clamp_min(1e-300)
        weights.append((float(left), float(norms.max()), row.tolist()))
    return _Fit(weights, square, product, zero)


def _joint(fits: Sequence[_Fit]) -> tuple[list[float], bool]:
    """The weights that all ranks' gradients agree on, and whether they determine them."""
    every = [w for f in fits for w in f.weights]
    if every and len({tuple(f.zero) for f in fits}) == 1:
        largest = max(norm for _, norm, _ in every)
        every = [f for f in every if f[1] > _SMALL * largest]  # others may be rounding
        best = min(left for left, *_ in every)
        close = [w for left, _, w in every if left <= max(_LEFT * best, 1e-12)]
        return torch.tensor(close, dtype=torch.float64).median(0).values.tolist(), True
    square, product = (torch.stack([getattr(f, name) for f in fits]).sum(0) for name in ("square", "product"))
    return (torch.linalg.pinv(square, rtol=1e-9, hermitian=True) @ product).tolist(), False


def _sums(names: Sequence[str], shown: Sequence[Sketches], weights: Sequence[float]) -> dict[str, Sketch]:
    sums: dict[str, Sketch] = {}
    nothing = not any(weights)  # counts
    for sketches, weight in zip(shown, weights, strict=True):
        for name in names if weight or nothing else ():  # of what does not count nothing is read
            if name in sketches:
                part = sketches[name].times(weight)
                sums[name] = part if name not in sums else sums[name].plus(part)
    return sums


__all__ = ["MergedProof"]
