"""Choosing a strategy: the same search and the same price for eager ops and for completion.

Per mesh axis the candidates are those that an operand's present layout suggests; the one that moves fewest bytes,
forward plus transposed backward, wins; divided work stays divided where that sends nothing forward, and an op that
contracts wherever it can; ties keep the larger operand where it is, then the leftmost.  Everything follows from specs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, permutations, product
from typing import Any, cast

import torch

from ..errors import DispatchError
from ..layout import Partial, Placement, Replicate, Shard, Spec, commute, crowded, wider, widest_accumulate_dtype
from ..mesh import Mesh
from ..ranks.runtime import Recent
from ..resharding.cost import held_bytes
from ..resharding.planner import on_one_axis, plan
from ..rules.strategies import Dims, Rule, Strategy
from .types import Choice, Like, Types, Wanted, carries_grad, types

Price = tuple[float, float, int]
_MOST = 128  # combinations of strategies and orders that are priced together
_SURE = Recent(1024)  # choices than which none is better, whatever the sizes
# Bytes per element of a sum that are the same but for rounding; that differ by more than prices are rounded to.
_SAME, _TOLD_APART = 1e-9, 2e-3
VERIFY = False  # search all the same, and compare: of tests


def choose(
    rule: Rule,
    ins: Sequence[Spec],
    outs: Sequence[Like],
    *,
    inplace: bool = False,
    strategies: Sequence[Strategy] | None = None,
    constants: Collection[int] = (),
) -> Choice:
    """The cheapest way to run an op on inputs of these specs.

    Args:
        rule: the op's rule for this call.
        ins: specs of the tensor arguments, in order.
        outs: global shape and dtype of each output.
        inplace: the first input is written to: it must keep its layout, and the output must have the same.
        strategies: one per axis: take these instead of choosing (for tests of a rule).
        constants: the inputs that have no gradient to be reduced.

    Raises:
        DispatchError: in-place, and no strategy keeps the first input as it is.
    """
    search = Search(rule, ins, outs, inplace, None, constants)
    if strategies:
        return search.by_axis([[c] for c in strategies])[0]
    # What is split by blocks hangs on their lengths.
    kind = None if any(s.layout.blocks for s in ins) else search.kind()
    known = _SURE.find(kind) if kind is not None else None
    if known is not None and not VERIFY:
        return cast(Types, known).of(ins, outs)
    best, thrown, sure = search.by_axis()
    if search.mesh.ndim > 1 and any(s.layout != t.layout for s, t in zip(best.sources, best.inputs, strict=True)):
        best, sure = search.together(best, thrown, sure)
    if known is not None and best != known.of(ins, outs):
        raise AssertionError(f"{known} was taken for known, the search gives {best}")
    factors = [c.factor for c in best.strategies if c.factor]
    if sure and kind is not None and len(factors) == len(set(factors)) and not any(c.blocked for c in best.strategies):
        _SURE.keep(kind, search.types(best.strategies, {}))
    return best


def sure_types(
    rule: Rule, ins: Sequence[Spec], outs: Sequence[Like], *, inplace: bool, constants: Collection[int]
) -> Types | None:
    """What :func:`choose` was sure of, in all sizes; None where it looks at these."""
    if VERIFY or any(s.layout.blocks for s in ins):
        return None
    return cast("Types | None", _SURE.find(Search(rule, ins, outs, inplace, None, constants).kind()))


def choose_for(rule: Rule, ins: Sequence[Spec], outs: Sequence[Like], hint: Wanted) -> Choice:
    """The cheapest way to run an op whose outputs should have certain layouts: inputs and outputs, all axes together.

    Starts from what is taken axis by axis and changes two axes at a time for as long as that gets cheaper: fewest
    bytes, forward and backward, of the plans that bring the inputs and then the outputs to where they should be; of
    equals, the one that makes more of the shards hinted at itself.
    """
    search = Search(rule, ins, outs, hint=hint)
    options = [search.suggested(a) for a in range(search.mesh.ndim)]
    best = search.by_axis(options)[0]
    price = _planned(best, hint)
    improved = True
    while improved:
        improved = False
        for axes in combinations(range(len(options)), min(2, len(options))):
            for picks in product(*(options[a] for a in axes)):
                strategies = [picks[axes.index(a)] if a in axes else c for a, c in enumerate(best.strategies)]
                if not search.fit_together(strategies):
                    continue
                made = search.by_axis([[c] for c in strategies])[0]
                cost = _planned(made, hint)
                if cost < price:
                    best, price, improved = made, cost, True
    return best


def _planned(choice: Choice, hint: Wanted) -> tuple[float, int]:
    """Bytes of all conversions, and how many of the shards hinted at are cut from something larger."""
    pairs = list(zip(choice.sources, choice.inputs, strict=True))
    cut = 0
    for made, wanted in zip(choice.outputs, hint.outputs, strict=False):
        if wanted is not None:
            pairs.append((made, made.with_(layout=wanted.layout, grad_partial_mask=wanted.grad_partial_mask)))
            placements = zip(made.layout.placements, wanted.layout.placements, strict=True)
            cut += sum(isinstance(w, Shard) and p != w for p, w in placements)
    return round(sum(plan(src, dst).bytes for src, dst in pairs), 3), cut


@dataclass(frozen=True, eq=False)
class Search:
    """The ways to run an op on inputs of these specs, and their prices: the arguments of :func:`choose`."""

    rule: Rule
    ins: Sequence[Spec]
    outs: Sequence[Like]
    inplace: bool = False
    hint: Wanted | None = None
    constants: Collection[int] = ()

    @property
    def mesh(self) -> Mesh:
        """The mesh of all specs."""
        return self.ins[0].mesh

    @cached_property
    def sums(self) -> torch.dtype | None:
        """The dtype in which what is made of the inputs is summed at least."""
        return widest_accumulate_dtype(self.ins)

    def wide(self, dtype: torch.dtype) -> float:
        """Bytes that are sent in a sum over ranks for each byte of a value of this dtype."""
        return wider(dtype, self.sums).itemsize / dtype.itemsize if self.sums and carries_grad(dtype) else 1.0

    def wanted(self, k: int, axis: int) -> Placement | None:
        """What output ``k`` should be on an axis; None where that does not matter."""
        spec = self.hint.outputs[k] if self.hint and k < len(self.hint.outputs) else None
        return None if spec is None else spec.layout.placements[axis]

    def kind(self) -> Any:
        """What a choice hangs on that is the best in all sizes: of these whether they are 0 or 1, or cut evenly.

        Where a cut may fall within a part of a dim of several factors, all of these.
        """
        rule, n = self.rule, self.mesh.size
        uneven = {f for f, size in rule.sizes.items() if size % n}
        sizes: list[Any] = [min(size, 2) for size in rule.sizes.values()]
        if uneven:
            dims = [dim for t in (*rule.inputs, *rule.outputs) for dim in t if len(dim) > 1]
            sizes += [0 if uneven.isdisjoint(dim) else tuple([rule.sizes[f] for f in dim]) for dim in dims]
            if rule.moves:
                sizes += [size % p == 0 for size in rule.sizes.values() for p in _parts(self.mesh.sizes)]
        if self.mesh.ndim > 1:  # on the way a plan may split a dim that is long enough for that
            dims = [dim for t in (*rule.inputs, *rule.outputs) for dim in t]
            sizes += [math.prod([rule.sizes[f] for f in dim]) >= n for dim in dims]
        ins = [
            (
                s.layout,
                s.grad_partial_mask,
                s.undecided_mask,
                s.dtype,
                s.accumulate_dtype,
                s.comm_formats,
                self.wide(s.dtype),
            )
            for s in self.ins
        ]
        outs = [(dtype, self.wide(dtype)) for _, dtype in self.outs]
        reduced = tuple(rule.reduced.items())
        says = (
            rule.inputs,
            rule.outputs,
            rule.whole,
            reduced,
            rule.linear,
            rule.moves,
            rule.heavy,
            rule.lends,
            rule.joint,
        )
        return (says, bool(uneven), *sizes, *ins, *outs, self.inplace, frozenset(self.constants))

    @cached_property
    def held(self) -> list[tuple[Dims, Spec]]:
        """The tensors whose layouts are known, with their dims' factors: operands, and outputs with hints."""
        hinted = zip(self.rule.outputs, self.hint.outputs if self.hint else (), strict=False)
        return [*zip(self.rule.inputs, self.ins, strict=True), *((dims, s) for dims, s in hinted if s is not None)]

    # -- candidates -----------------------------------------------------------------------------------

    def suggested(self, axis: int) -> list[Strategy]:
        """The strategies that the layouts suggest for one axis; the first one replicates everything."""
        rule, now = self.rule, [s.layout.placements[axis] for s in self.ins]
        hints = [self.wanted(k, axis) or Replicate() for k in range(len(rule.outputs))] if self.hint else ()
        found = rule.axis_strategies(now, hints) + [c for a, c in rule.joint if a == axis]
        # A split that cannot stay goes to another dim of its tensor (all-to-all), where that is cut evenly.
        for i, p in enumerate(now):
            for c in rule.instead_of(i, p):
                if c not in found and c.factor and rule.sizes[c.factor] % self._cut(axis, c.factor) == 0:
                    found.append(c)
        return found

    def _cut(self, axis: int, factor: str) -> int:
        """Into how many parts a factor is cut if this axis splits it beside those that split it now."""
        others = (n for a, n in enumerate(self.mesh.sizes) if a != axis and self._splits(a, factor))
        return math.prod(others, start=self.mesh.sizes[axis])

    def _splits(self, axis: int, factor: str) -> bool:
        """Whether an axis splits a factor in some input as given."""
        placed = zip(self.rule.inputs, (s.layout.placements[axis] for s in self.ins), strict=True)
        return any(isinstance(p, Shard) and factor in dims[p.dim] for dims, p in placed)

    def fit_together(self, strategies: Sequence[Strategy]) -> bool:
        """Whether one strategy per axis can be had at the same time."""
        return all(self._fits(c, strategies[:a]) for a, c in enumerate(strategies))

    def _fits(self, c: Strategy, before: Sequence[Strategy]) -> bool:
        """Whether the next axis can have a strategy, after those of the axes before it."""
        axis = len(before)
        tensors = list(zip(*(s.inputs + s.outputs for s in (*before, c)), strict=True))
        if not all(commute(*placements) for placements in tensors):
            return False  # no layout may reduce by a sum on one axis and by a maximum on another
        if axis and any(s.blocked for s in (*before, c)) and any(map(crowded, tensors)):
            return False
        if self.inplace:
            now = self.ins[0].layout.placements[axis]
            if c.inputs[0] != now or c.outputs[0] != now:
                return False
        if not c.factor:
            return True
        axes = [a for a, s in enumerate((*before, c)) if s.factor == c.factor]
        return self.rule.aligned(c.factor, self.mesh, self._order(c.factor, axes), c.blocks)

    def _order(self, factor: str, axes: list[int]) -> list[int]:
        """Order of the axes that split a factor: that of the largest tensor which is split by several of them."""
        if len(axes) < 2:
            return axes
        best: tuple[int, list[int]] = (-1, [])
        for dims, spec in self.held:
            for d, names in enumerate(dims):
                if factor in names:
                    given = [x for x in spec.layout.dim_axes().get(d, ()) if x in axes]
                    if len(given) > 1 and spec.nbytes > best[0]:
                        best = (spec.nbytes, given)
        return best[1] + [a for a in axes if a not in best[1]]

    def _orders(self, strategies: Sequence[Strategy]) -> dict[str, list[int]]:
        """The order of the axes that split one factor, where several do."""
        axes_of: dict[str, list[int]] = {}
        for a, c in enumerate(strategies):
            if c.factor:
                axes_of.setdefault(c.factor, []).append(a)
        return {f: self._order(f, axes) for f, axes in axes_of.items() if len(axes) > 1}

    def _all_orders(self, strategies: Sequence[Strategy]) -> Iterator[dict[str, list[int]]]:
        """The orders in which several axes may split one factor, that of the largest operand first."""
        usual = self._orders(strategies)
        yield usual
        for f, axes in usual.items() if not self.inplace else ():
            for order in permutations(axes):
                if list(order) != axes and self.rule.aligned(f, self.mesh, order):
                    yield {**usual, f: list(order)}

    # -- axis by axis ---------------------------------------------------------------------------------

    def by_axis(self, options: Sequence[Sequence[Strategy]] = ()) -> tuple[Choice, list[bool], bool]:
        """The choice among ``options`` (what is suggested), per axis whether work must stay divided there, and whether
        it is the best in all sizes."""
        chosen: list[Strategy] = []
        divides: list[bool] = []
        sure = True
        for a in range(self.mesh.ndim):
            candidates = [c for c in (options[a] if options else self.suggested(a)) if self._fits(c, chosen)]
            if not candidates:
                raise self._inplace_error(a)
            # Work stays divided where that moves nothing forward; for an op that contracts, wherever it can.
            divided = any(c.factor and (self.rule.heavy or not self._moves(c, a)) for c in candidates)
            if divided:
                candidates = [c for c in candidates if c.factor]
            held = [self._held_of_output(chosen, a, k) for k in range(len(self.outs))]
            priced = [self.price(c, a, held, i) for i, c in enumerate(candidates)]
            best = min(range(len(candidates)), key=priced.__getitem__)
            sure = sure and all(self._in_all_sizes(candidates[best], c, a, held) for c in candidates)
            divides.append(divided)
            chosen.append(candidates[best])
        return self.typed(chosen, self._orders(chosen)), divides, sure

    def typed(self, chosen: Sequence[Strategy], orders: dict[str, list[int]]) -> Choice:
        """The choice that strategies are."""
        return self.types(chosen, orders).of(self.ins, self.outs)

    def types(self, chosen: Sequence[Strategy], orders: dict[str, list[int]]) -> Types:
        """The types that strategies give."""
        return types(self.rule, self.ins, chosen, orders, inplace=self.inplace)

    def price(self, c: Strategy, axis: int, outputs: Sequence[float], index: int = 0) -> Price:
        """(bytes, largest operand moved, position): smaller is better.

        ``outputs``: bytes that a rank holds of each output but for this axis; ``index``: place among the candidates,
        which decides among equals.
        """
        held = [held_bytes(spec, without=(axis,)) for spec in self.ins]
        sent, moved = self._sent(c, axis)
        cost = _rounded(sum(s * nbytes for s, nbytes in zip(sent, (*held, *outputs), strict=True)))
        # One more input Partial is as good as it was; among equals prefer to stay Partial, then to stay put.
        lazy = 0 if any(isinstance(p, Partial) for p in c.inputs) else 1
        return (cost, max((held[i] for i in moved), default=0.0), lazy * 1000 + index)

    def _sent(self, c: Strategy, axis: int) -> tuple[list[float], set[int]]:
        """Bytes sent for each byte that is held of operands and results without this axis; which operands move."""
        n = self.mesh.sizes[axis]
        part = (n - 1) / n
        dependent = any(not isinstance(p, Replicate) for p in c.outputs)
        sent: list[float] = []
        moved: set[int] = set()
        for i, (spec, want) in enumerate(zip(self.ins, c.inputs, strict=True)):
            if i in self.rule.lends:
                sent.append(0.0)
                continue
            grad = 1.0 if carries_grad(spec.dtype) and i not in self.constants else 0.0
            sent.append(_axis_bytes(spec, axis, want, dependent, grad, self.wide(spec.dtype)) * part)
            if spec.layout.placements[axis] != want:
                moved.add(i)
        for k, p in enumerate(c.outputs):
            sent.append(_distance(p, self.wanted(k, axis), n, self.wide(self.outs[k][1])) * part)
        return sent, moved

    def _in_all_sizes(self, best: Strategy, other: Strategy, axis: int, outputs: Sequence[float]) -> bool:
        """Whether the better one of two strategies is so whatever the sizes of what has elements.

        What has the same factors is of one size, and of that the bytes of both can be compared.
        """
        held = [*(held_bytes(spec, without=(axis,)) for spec in self.ins), *outputs]
        sizes = [tuple(sorted(f for dim in dims for f in dim)) for dims in (*self.rule.inputs, *self.rule.outputs)]
        elements = [math.prod(self.rule.sizes[f] for f in factors) for factors in sizes]
        (sent, moved), (instead, move) = self._sent(best, axis), self._sent(other, axis)
        totals: dict[tuple[str, ...], list[float]] = {}
        for factors, n, nbytes, *both in zip(sizes, elements, held, sent, instead, strict=True):
            if n:
                total = totals.setdefault(factors, [0.0, 0.0])
                total[:] = [t + s * nbytes / n for t, s in zip(total, both, strict=True)]
        # What a tensor of few factors costs more, one that has others too may cost less, of as many elements or more.
        for few, less in totals.items():
            for many, total in totals.items():
                if less[0] > less[1] and total[0] < total[1] and set(few) < set(many):
                    times = math.prod(self._least(f) for f in set(many).difference(few))
                    spared = min(less[0] - less[1], (total[1] - total[0]) * times)
                    less[0], total[0] = less[0] - spared, total[0] + spared / times
        pairs = [tuple(map(_rounded, total)) for total in totals.values()]
        if any(s > t for s, t in pairs):
            return False
        # Of equals the one that moves least is taken, and of these the first.
        large, larger = ({(sizes[i], held[i] / elements[i]) for i in some if elements[i]} for some in (moved, move))
        return any(s < t for s, t in pairs) or large == larger or not large

    def _least(self, factor: str) -> int:
        """The least size that a factor has where :meth:`kind` is the same."""
        size, n = self.rule.sizes[factor], self.mesh.size
        return n if size and not any(s % n for s in self.rule.sizes.values()) else min(size, 2)

    def _moves(self, c: Strategy, axis: int) -> bool:
        """Whether a strategy sends data in the forward: only what is replicated changes its placement for nothing."""
        now = [s.layout.placements[axis] for s in self.ins]
        return any(
            i not in self.rule.lends and have != want and not isinstance(have, Replicate)
            for i, (have, want) in enumerate(zip(now, c.inputs, strict=True))
        )

    def _held_of_output(self, chosen: Sequence[Strategy], axis: int, k: int) -> float:
        """Bytes of output ``k`` as other axes split it: those before as chosen, those after as inputs hint."""
        parts = 1
        for a, n in enumerate(self.mesh.sizes):
            if a < axis:
                parts *= n if isinstance(chosen[a].outputs[k], Shard) else 1
            elif a > axis and any(self._leads(i, k, s.layout.placements[a]) for i, s in enumerate(self.ins)):
                parts *= n
        shape, dtype = self.outs[k]
        return math.prod(shape) / parts * dtype.itemsize

    def _leads(self, i: int, k: int, p: Placement) -> bool:
        """Whether input ``i`` placed so is split by a factor that output ``k`` has."""
        dims = self.rule.inputs[i]
        if not isinstance(p, Shard) or p.dim >= len(dims):
            return False
        return any(f in dim for f in dims[p.dim][:1] for dim in self.rule.outputs[k])

    def _inplace_error(self, axis: int) -> DispatchError:
        return DispatchError(
            f"in place, the first tensor must keep its layout {self.ins[0].layout!r}, and on axis "
            f"{self.mesh.axes[axis]!r} no way to run this op does; use the out-of-place op, or mw.reshard it first"
        )

    # -- all axes together ----------------------------------------------------------------------------

    def together(self, best: Choice, thrown: Sequence[bool], sure: bool) -> tuple[Choice, bool]:
        """All axes together, where data has to move: a choice that is cheaper by the plans of its conversions, and
        whether it is the best in all sizes.

        Axis by axis, an axis does not see that another one could take a dim, or take it first.  Of equals, what was
        found axis by axis stays; so does an axis whose split is there already, and all where there are too many
        combinations.

        Args:
            best, thrown, sure: as :meth:`by_axis` gives them.
        """
        options = [[c] if self._stays(a, c) else self.suggested(a) for a, c in enumerate(best.strategies)]
        if self.mesh.ndim > 3 or math.prod(map(len, options)) * math.factorial(self.mesh.ndim) > _MOST:
            return best, False
        price = self._exact(best)
        tried = [best]
        for picks in product(*options):
            if any(t and not c.factor for t, c in zip(thrown, picks, strict=True)) or not self.fit_together(picks):
                continue
            for orders in self._all_orders(picks):
                made = self.typed(picks, orders)
                cost = self._exact(made)
                tried.append(made)
                sure = sure and not orders  # which hang on what is largest
                if cost < price:
                    best, price = made, cost
        return best, sure and self._never_worse(best, tried)

    def _never_worse(self, best: Choice, others: Sequence[Choice]) -> bool:
        """Whether none of these is taken in its place whatever the sizes, as :meth:`_in_all_sizes`."""
        shapes = [*(s.shape for s in self.ins), *(shape for shape, _ in self.outs)]
        sizes = [tuple(sorted(f for dim in dims for f in dim)) for dims in (*self.rule.inputs, *self.rule.outputs)]
        elements = list(map(math.prod, shapes))

        def by_size(choice: Choice) -> tuple[dict[Any, float], tuple[float, ...]]:
            totals: dict[Any, float] = {}
            sent, moved = self._terms(choice)
            for factors, n, nbytes in zip(sizes, elements, sent, strict=True):
                if n:
                    totals[factors] = totals.get(factors, 0.0) + nbytes / n
            ties = tuple([_rounded(m / n) if n else 0.0 for m, n in zip(moved, elements, strict=False)])
            return totals, (0.0,) * len(ties) if self.rule.moves else ties

        least, ties = by_size(best)
        for other in others:
            if other is best:
                continue
            totals, moved = by_size(other)
            more = [totals[factors] - nbytes for factors, nbytes in least.items()]
            if min(more, default=0.0) < -_SAME or any(_SAME < m < _TOLD_APART for m in more):
                return False
            if max(more, default=0.0) <= _SAME and _crowd(other) == _crowd(best):
                # Of equals what moves decides: alike in all sizes where that is of one size.
                apart = [abs(a - b) for a, b in zip(ties, moved, strict=True)]
                scales = {sizes[i] for i, (a, b) in enumerate(zip(ties, moved, strict=True)) if a or b}
                if any(_SAME < d < _TOLD_APART for d in apart) or (max(apart, default=0.0) > _SAME and len(scales) > 1):
                    return False
        return True

    def _stays(self, axis: int, c: Strategy) -> bool:
        now = [s.layout.placements[axis] for s in self.ins]
        return c.factor is not None and all(p == q for p, q in zip(now, c.inputs, strict=True))

    def _exact(self, choice: Choice) -> tuple[float, ...]:
        """Bytes of the plans that bring the inputs, both ways, and of what Partial outputs still have to pay.

        Of equals, fewer axes share a dim; then the largest operand moves least, then the leftmost.  Where elements
        only move no operand is more than another: then the outermost dims are split.
        """
        sent, moved = self._terms(choice)
        cost, moved = round(sum(sent), 3), [round(m, 3) for m in moved]
        if self.rule.moves:
            dims = [p.dim + 1 if isinstance(p, Shard) else 0 for p in choice.outputs[0].layout.placements]
            return cost, _crowd(choice), *dims
        return cost, _crowd(choice), max(moved, default=0.0), *moved

    def _terms(self, choice: Choice) -> tuple[list[float], list[float]]:
        """Bytes of the plans of each operand, and of what each result still has to pay; those of operands forward."""
        sent, moved = [], []
        for i, (given, src, dst) in enumerate(zip(self.ins, choice.sources, choice.inputs, strict=True)):
            # As if invariant where nothing is decided: a checkpointed block that runs again, when more is, then chooses
            # as it did, though the plans of its conversions may be others.
            steps = plan(src.decided(), dst.decided())
            graded = carries_grad(src.dtype) and i not in self.constants
            cost = steps.bytes if graded else steps.forward_bytes
            moved.append(steps.forward_bytes)
            for a, n in enumerate(self.mesh.sizes):
                if (
                    graded and given.undecided_mask & ~src.undecided_mask & src.grad_partial_mask & 1 << a
                ):  # reduced at the leaf
                    cost += 2 * (n - 1) / n * held_bytes(src, without=(a,))
            sent.append(cost)
        for spec in choice.outputs:
            whole = spec.with_(layout=spec.layout.without_partial(), undecided_mask=0) if spec.layout.partial else None
            sent.append(0.0 if whole is None else plan(spec.decided(), whole).forward_bytes)
        return sent, moved


def _crowd(choice: Choice) -> int:
    """How many axes share a factor with another one."""
    factors = [c.factor for c in choice.strategies if c.factor]
    return len(factors) - len(set(factors))


@lru_cache(maxsize=256)
def _parts(sizes: tuple[int, ...]) -> list[int]:
    """Into how many parts axes of these sizes may cut a dim."""
    return sorted({math.prod(some) for k in range(len(sizes)) for some in combinations(sizes, k + 1)})


def _rounded(cost: float) -> float:
    """What is equal but for rounding is equal: of sums of the same terms in another order."""
    return float(f"{cost:.13g}")


def _distance(p: Placement, wanted: Placement | None, n: int, wide: float) -> float:
    """What one axis of an output still has to pay, in units of (n-1)/n of its bytes; ``wide`` of these in a sum."""
    if isinstance(p, Partial) and not isinstance(wanted, Partial):
        return wide if isinstance(wanted, Shard) else 2 * wide  # still to be reduced
    if isinstance(p, Shard) and wanted is not None and p != wanted:
        return 1 / n if isinstance(wanted, Shard) else 1
    return 1 if isinstance(wanted, Shard) and isinstance(p, Replicate) else 0  # not divided, though the result will be


def _axis_bytes(spec: Spec, axis: int, want: Placement, dependent: bool, grad: float, wide: float) -> float:
    """Forward and backward bytes to bring one axis to ``want``, in units of (n-1)/n of the gathered bytes; ``wide`` of
    these where they are summed."""
    have = spec.layout.placements[axis]
    # An undecided leaf that becomes reduced has its gradient summed once, at the leaf, whatever part a rank uses of it:
    # so a checkpointed block, which runs again when that is decided, finds the same strategy the cheapest.
    if spec.undecided_mask >> axis & 1 and isinstance(want, Shard):
        return 2 * wide * grad
    reduced = isinstance(have, Replicate) and spec.grad_partial_mask >> axis & 1
    becomes = isinstance(want, Replicate) and (dependent or reduced)
    there, back = on_one_axis((have, int(reduced)), (want, int(becomes)), spec.mesh.sizes[axis], wide)
    return there + grad * back
