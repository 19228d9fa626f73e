"""Choosing a strategy: the same function for eager ops and for completion.

Per mesh axis the candidates are those that an operand's present layout suggests; the one that moves fewest bytes,
forward plus transposed backward, wins; divided work stays divided where that sends nothing forward, and an op that
contracts wherever it can; ties
keep the larger operand where it is, then the leftmost.  Everything follows from specs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations, product

import torch

from .cost import held_bytes
from .errors import DispatchError
from .layout import REPLICATE, Layout, Partial, Placement, Replicate, Shard, Spec, commute
from .mesh import Mesh
from .reshard import plan
from .rules.strategies import Dims, Rule, Strategy


@dataclass(frozen=True)
class Choice:
    """How an op is divided: the types that its inputs must have and that its outputs get.

    ``sources`` are the inputs as given, with undecided axes decided; ``open`` are axes on which outputs stay undecided.
    """

    sources: tuple[Spec, ...]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    strategies: tuple[Strategy, ...]
    open: int = 0
    bytes: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Wish:
    """Layouts that the caller wants outputs to have: candidates come from them too, and their distance costs."""

    outputs: tuple[Spec, ...]


def carries_grad(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can have gradients."""
    return dtype.is_floating_point or dtype.is_complex


def choose(
    rule: Rule,
    ins: Sequence[Spec],
    outs: Sequence[tuple[Sequence[int], torch.dtype]],
    *,
    inplace: bool = False,
    wish: Wish | None = None,
    strategies: Sequence[Strategy] | None = None,
    constants: Collection[int] = (),
) -> Choice:
    """The cheapest way to run an op on inputs of these specs.

    Args:
        rule: the op's rule for this call.
        ins: specs of the tensor arguments, in order.
        outs: global shape and dtype of each output.
        inplace: the first input is written to: it must keep its layout, and the output must have the same.
        wish: layouts that outputs should have, where the caller has one (backward inference).
        strategies: one per axis: take these instead of choosing (for tests of a rule).
        constants: the inputs that have no gradient to be reduced.

    Raises:
        DispatchError: in-place, and no strategy keeps the first input as it is.
    """
    if strategies or wish:
        return _axis_by_axis(rule, ins, outs, inplace, wish, strategies, constants)[0]
    best, thrown = _axis_by_axis(rule, ins, outs, inplace, None, None, constants)
    if ins[0].mesh.ndim == 1 or all(s.layout == t.layout for s, t in zip(best.sources, best.inputs, strict=True)):
        return best
    return _together(rule, ins, outs, inplace, constants, best, thrown)


_MOST = 128  # combinations of strategies and orders that are priced together


def _together(
    rule: Rule,
    ins: Sequence[Spec],
    outs: Sequence[tuple[Sequence[int], torch.dtype]],
    inplace: bool,
    constants: Collection[int],
    best: Choice,
    thrown: Sequence[bool],
) -> Choice:
    """All axes together, where data has to move: a choice that is cheaper by the plans of its conversions.

    Axis by axis, an axis does not see that another one could take a dim, or take it first.  Of equals, what was found
    axis by axis stays; so does an axis whose split is there already, and all where there are too many combinations.
    """
    mesh = ins[0].mesh
    held = _held(rule, ins, None)
    stays = [c.factor and all(s.layout.placements[a] == p for s, p in zip(ins, c.inputs, strict=True))
             for a, c in enumerate(best.strategies)]  # fmt: skip
    options = [[c] if stays[a] else _suggested(rule, ins, a, None) for a, c in enumerate(best.strategies)]
    if mesh.ndim > 3 or math.prod(map(len, options)) * math.factorial(mesh.ndim) > _MOST:
        return best
    price = _exact(best, rule, ins, constants)
    for picks in product(*options):
        if any(t and not c.factor for t, c in zip(thrown, picks, strict=True)):
            continue
        if not _fit_together(picks, rule, ins, held, inplace):
            continue
        for orders in _all_orders(picks, rule, mesh, inplace, held):
            made = _typed(rule, ins, outs, list(picks), orders, inplace, 0.0)
            cost = _exact(made, rule, ins, constants)
            if cost < price:
                best, price = made, cost
    return best


def _all_orders(
    picks: Sequence[Strategy], rule: Rule, mesh: Mesh, inplace: bool, held: Sequence[Held]
) -> Iterator[dict[str, list[int]]]:
    """The orders in which several axes may split one factor, that of the largest operand first."""
    axes_of: dict[str, list[int]] = {}
    for a, c in enumerate(picks):
        if c.factor:
            axes_of.setdefault(c.factor, []).append(a)
    usual = {f: _order(f, axes, held) for f, axes in axes_of.items() if len(axes) > 1}
    yield usual
    if not inplace:
        for f, axes in usual.items():
            for order in permutations(axes):
                if list(order) != axes and rule.aligned(f, mesh, order):
                    yield {**usual, f: list(order)}


def _exact(choice: Choice, rule: Rule, ins: Sequence[Spec], constants: Collection[int]) -> tuple[float, ...]:
    """Bytes of the plans that bring the inputs, both ways, and of what Partial outputs still have to pay.

    Of equals, fewer axes share a dim; then the largest operand moves least, then the leftmost.  Where elements only
    move no operand is more than another: then the outermost dims are split.
    """
    cost = 0.0
    moved = []
    sizes = choice.inputs[0].mesh.sizes
    for i, (given, src, dst) in enumerate(zip(ins, choice.sources, choice.inputs, strict=True)):
        steps = plan(src.with_(undecided=0), dst.with_(undecided=0))
        graded = carries_grad(src.dtype) and i not in constants
        cost += steps.bytes if graded else steps.forward_bytes
        moved.append(round(steps.forward_bytes, 3))
        for a, n in enumerate(sizes):
            if graded and given.undecided & ~src.undecided & src.reduced & 1 << a:  # reduced at the leaf
                cost += 2 * (n - 1) / n * held_bytes(src, without=(a,))
    for spec in choice.outputs:
        if spec.layout.partial:
            whole = spec.with_(layout=spec.layout.without_partial(), undecided=0)
            cost += plan(spec.with_(undecided=0), whole).forward_bytes
    factors = [c.factor for c in choice.strategies if c.factor]
    crowd = len(factors) - len(set(factors))
    if rule.moves:
        dims = [p.dim + 1 if isinstance(p, Shard) else 0 for p in choice.outputs[0].layout.placements]
        return round(cost, 3), crowd, *dims
    return round(cost, 3), crowd, max(moved, default=0.0), *moved


def _axis_by_axis(
    rule: Rule,
    ins: Sequence[Spec],
    outs: Sequence[tuple[Sequence[int], torch.dtype]],
    inplace: bool,
    wish: Wish | None,
    strategies: Sequence[Strategy] | None,
    constants: Collection[int],
) -> tuple[Choice, list[bool]]:
    """The choice, and per axis whether work must stay divided there."""
    mesh = ins[0].mesh
    held = _held(rule, ins, wish)
    chosen: list[Strategy] = []
    divides: list[bool] = []
    factor_axes: dict[str, list[int]] = {}
    total = 0.0
    for a in range(mesh.ndim):
        candidates = [strategies[a]] if strategies else _suggested(rule, ins, a, wish)
        candidates = [c for c in candidates if _fits(c, a, rule, ins, held, factor_axes, inplace, chosen)]
        if not candidates:
            raise _inplace_error(ins, a)
        # Work stays divided where that moves nothing forward; for an op that contracts, wherever it can.
        divided = any(c.factor and (rule.heavy or not _moves(c, a, ins, rule)) for c in candidates)
        split = [_split_elsewhere(rule, ins, chosen, a, k) for k in range(len(outs))]
        priced = [_price(c, a, ins, outs, split, divided, wish, i, constants, rule) for i, c in enumerate(candidates)]
        best = min(range(len(candidates)), key=lambda i: priced[i])
        strategy = candidates[best]
        divides.append(divided)
        total += priced[best][1]
        chosen.append(strategy)
        if strategy.factor:
            factor_axes.setdefault(strategy.factor, []).append(a)
    orders = {f: _order(f, axes, held) for f, axes in factor_axes.items() if len(axes) > 1}
    return _typed(rule, ins, outs, chosen, orders, inplace, total), divides


def choose_for(
    rule: Rule, ins: Sequence[Spec], outs: Sequence[tuple[Sequence[int], torch.dtype]], wish: Wish
) -> Choice:
    """The cheapest way to run an op whose outputs should have certain layouts: inputs and outputs, all axes together.

    Starts from what :func:`choose` takes axis by axis and changes two axes at a time for as long as that gets cheaper:
    fewest bytes, forward and backward, of the plans that bring the inputs and then the outputs to where they should
    be; of equals, the one that makes more of the wished shards itself.
    """
    options = [_suggested(rule, ins, a, wish) for a in range(ins[0].mesh.ndim)]
    held = _held(rule, ins, wish)
    best = choose(rule, ins, outs, wish=wish)
    price = _planned(best, wish)
    improved = True
    while improved:
        improved = False
        for axes in combinations(range(len(options)), min(2, len(options))):
            for picks in product(*(options[a] for a in axes)):
                strategies = [picks[axes.index(a)] if a in axes else c for a, c in enumerate(best.strategies)]
                if not _fit_together(strategies, rule, ins, held):
                    continue
                made = choose(rule, ins, outs, wish=wish, strategies=strategies)
                cost = _planned(made, wish)
                if cost < price:
                    best, price, improved = made, cost, True
    return best


def _planned(choice: Choice, wish: Wish) -> tuple[float, int]:
    """Bytes of all conversions, and how many of the wished shards are cut from something larger."""
    pairs = list(zip(choice.sources, choice.inputs, strict=True))
    cut = 0
    for made, wanted in zip(choice.outputs, wish.outputs, strict=False):
        pairs.append((made, made.with_(layout=wanted.layout, reduced=wanted.reduced)))
        placements = zip(made.layout.placements, wanted.layout.placements, strict=True)
        cut += sum(isinstance(w, Shard) and p != w for p, w in placements)
    return round(sum(plan(src, dst).bytes for src, dst in pairs), 3), cut


def _fit_together(
    strategies: Sequence[Strategy], rule: Rule, ins: Sequence[Spec], held: Sequence[Held], inplace: bool = False
) -> bool:
    factor_axes: dict[str, list[int]] = {}
    for a, c in enumerate(strategies):
        if not _fits(c, a, rule, ins, held, factor_axes, inplace, strategies[:a]):
            return False
        if c.factor:
            factor_axes.setdefault(c.factor, []).append(a)
    return True


def _suggested(rule: Rule, ins: Sequence[Spec], axis: int, wish: Wish | None) -> list[Strategy]:
    hints = [s.layout.placements[axis] for s in wish.outputs] if wish else ()
    found = rule.axis_strategies([s.layout.placements[axis] for s in ins], hints)
    # A split that cannot stay goes to another dim of its tensor (all-to-all), where that is cut evenly.
    for i, spec in enumerate(ins):
        for c in rule.instead_of(i, spec.layout.placements[axis]):
            if c not in found and c.factor and rule.sizes[c.factor] % _parts(rule, ins, axis, c.factor) == 0:
                found.append(c)
    return found


def _parts(rule: Rule, ins: Sequence[Spec], axis: int, factor: str) -> int:
    """Into how many parts a factor is cut if this axis splits it beside those that split it now."""
    sizes = ins[0].mesh.sizes
    others = (
        a for a in range(len(sizes)) if a != axis and any(_splits(rule, s, i, a, factor) for i, s in enumerate(ins))
    )
    return math.prod((sizes[a] for a in others), start=sizes[axis])


def _splits(rule: Rule, spec: Spec, i: int, axis: int, factor: str) -> bool:
    """Whether an axis splits a factor in input ``i`` as given."""
    p = spec.layout.placements[axis]
    return isinstance(p, Shard) and factor in rule.inputs[i][p.dim]


Held = tuple[Dims, Spec]  # the factors of a tensor's dims, and how it lies


def _held(rule: Rule, ins: Sequence[Spec], wish: Wish | None) -> list[Held]:
    """The tensors whose layouts are known: operands, and outputs that are wished for."""
    wanted = wish.outputs if wish else ()
    return [*zip(rule.inputs, ins, strict=True), *zip(rule.outputs, wanted, strict=False)]


def _fits(
    c: Strategy,
    axis: int,
    rule: Rule,
    ins: Sequence[Spec],
    held: Sequence[Held],
    factor_axes: dict[str, list[int]],
    inplace: bool,
    before: Sequence[Strategy],
) -> bool:
    tensors = zip(*(s.inputs + s.outputs for s in (*before, c)), strict=True)
    if not all(commute(*placements) for placements in tensors):
        return False  # no layout may reduce by a sum on one axis and by a maximum on another
    if inplace:
        now = ins[0].layout.placements[axis]
        if c.inputs[0] != now or c.outputs[0] != now:
            return False
    if c.factor:
        axes = [*factor_axes.get(c.factor, ()), axis]
        return rule.aligned(c.factor, ins[0].mesh, _order(c.factor, axes, held))
    return True


def _order(factor: str, axes: list[int], held: Sequence[Held]) -> list[int]:
    """Order of the axes that split a factor: that of the largest tensor which is split by several of them."""
    if len(axes) < 2:
        return axes
    best: tuple[int, list[int]] = (-1, [])
    for dims, spec in held:
        for d, names in enumerate(dims):
            if factor in names:
                given = [x for x in spec.layout.dim_axes().get(d, ()) if x in axes]
                if len(given) > 1 and spec.nbytes > best[0]:
                    best = (spec.nbytes, given)
    return best[1] + [a for a in axes if a not in best[1]]


Price = tuple[int, float, float, int]


def _price(
    c: Strategy,
    axis: int,
    ins: Sequence[Spec],
    outs: Sequence[tuple[Sequence[int], torch.dtype]],
    split: Sequence[int],
    divided: bool,
    wish: Wish | None,
    index: int,
    constants: Collection[int],
    rule: Rule,
) -> Price:
    """(work thrown away, bytes, largest operand moved, position): smaller is better."""
    n = ins[0].mesh.sizes[axis]
    part = (n - 1) / n
    dependent = any(p is not REPLICATE and not isinstance(p, Replicate) for p in c.outputs)
    cost, moved = 0.0, 0.0
    for i, (spec, want) in enumerate(zip(ins, c.inputs, strict=True)):
        if i in rule.lends:
            continue
        held = held_bytes(spec, without=(axis,))
        grad = 1.0 if carries_grad(spec.dtype) and i not in constants else 0.0
        step = _axis_bytes(spec, axis, want, dependent, n, grad) * part * held
        cost += step
        if spec.layout.placements[axis] != want:
            moved = max(moved, held)
    for k, ((shape, dtype), p) in enumerate(zip(outs, c.outputs, strict=True)):
        numel = math.prod(shape) / split[k]
        wanted = wish.outputs[k].layout.placements[axis] if wish else None
        if isinstance(p, Partial) and not isinstance(wanted, Partial):
            cost += (1 if isinstance(wanted, Shard) else 2) * part * numel * dtype.itemsize  # still to be reduced
        elif wanted is not None and isinstance(p, Shard) and p != wanted:
            cost += part * numel * dtype.itemsize / (n if isinstance(wanted, Shard) else 1)
        elif wanted is not None and isinstance(wanted, Shard) and isinstance(p, Replicate):
            cost += part * numel * dtype.itemsize  # the work was not divided though the result will be
    # One more input Partial is as good as it was; among equals prefer to stay Partial, then to stay put.
    lazy = 0 if any(isinstance(p, Partial) for p in c.inputs) else 1
    return (int(divided and not c.factor), cost, moved, lazy * 1000 + index)


def _moves(c: Strategy, axis: int, ins: Sequence[Spec], rule: Rule) -> bool:
    """Whether a strategy sends data in the forward: only what is replicated changes its placement for nothing."""
    return any(
        i not in rule.lends and s.layout.placements[axis] != p and not isinstance(s.layout.placements[axis], Replicate)
        for i, (s, p) in enumerate(zip(ins, c.inputs, strict=True))
    )


def _split_elsewhere(rule: Rule, ins: Sequence[Spec], chosen: Sequence[Strategy], axis: int, k: int) -> int:
    """Into how many parts the other axes split output ``k``: those before as chosen, those after as inputs hint."""
    parts = 1
    for a, n in enumerate(ins[0].mesh.sizes):
        if a < axis:
            parts *= n if isinstance(chosen[a].outputs[k], Shard) else 1
        elif a > axis and any(_leads(rule, i, k, s.layout.placements[a]) for i, s in enumerate(ins)):
            parts *= n
    return parts


def _leads(rule: Rule, i: int, k: int, p: Placement) -> bool:
    """Whether input ``i`` placed so is split by a factor that output ``k`` has."""
    if not isinstance(p, Shard) or p.dim >= len(rule.inputs[i]):
        return False
    return any(f in dim for f in rule.inputs[i][p.dim][:1] for dim in rule.outputs[k])


def _axis_bytes(spec: Spec, axis: int, want: Placement, dependent: bool, n: int, grad: float) -> float:
    """Forward and backward bytes to bring one axis to ``want``, in units of (n-1)/n of the gathered bytes."""
    have = spec.layout.placements[axis]
    if isinstance(have, Replicate):
        if isinstance(want, Replicate):
            reduced, undecided = spec.reduced >> axis & 1, spec.undecided >> axis & 1
            # An undecided leaf that becomes reduced has its gradient reduced once, at the leaf.
            return 2 * grad if dependent and (undecided or not reduced) else 0.0
        return grad if isinstance(want, Shard) and not spec.reduced >> axis & 1 else 0.0
    if isinstance(want, Partial) and want.op != "sum" and have != want:
        # Zeros around it or the like; the shares of its gradient are summed.
        return grad + (grad if isinstance(have, Replicate) else 0) + (2 if isinstance(have, Partial) else 0)
    if isinstance(have, Partial):
        if isinstance(want, Replicate):
            return 2 + (2 * grad if dependent else 0)
        return 1 + grad if isinstance(want, Shard) else 0.0
    if isinstance(want, Replicate):
        return 1 + (grad if dependent else 0)
    if isinstance(want, Shard):
        return 0.0 if have == want else (1 + grad) / n
    return grad  # shard to Partial: zeros around it; its transpose gathers nothing but slices


def _typed(
    rule: Rule,
    ins: Sequence[Spec],
    outs: Sequence[tuple[Sequence[int], torch.dtype]],
    chosen: list[Strategy],
    orders: dict[str, list[int]],
    inplace: bool,
    total: float,
) -> Choice:
    """Give every replicated axis its type (invariant or reduced), deciding leaves that are still undecided."""
    mesh = ins[0].mesh
    source_reduced, source_open = [s.reduced for s in ins], [s.undecided for s in ins]
    want_reduced = [0] * len(ins)
    out_reduced, still_open = 0, 0
    for a, c in enumerate(chosen):
        bit = 1 << a
        dependent = any(not isinstance(p, Replicate) for p in c.outputs)
        kind = _kind_of_axis([s for i, s in enumerate(ins) if i not in rule.lends], c, a, dependent, inplace)
        if kind == "open":
            still_open |= bit
        elif kind == "reduced":
            out_reduced |= bit
        for i, (spec, p) in enumerate(zip(ins, c.inputs, strict=True)):
            if not carries_grad(spec.dtype):
                # Integers and masks have no gradient: whatever type they have is fine.
                want_reduced[i] |= spec.reduced & bit
                source_open[i] &= ~bit
                continue
            if isinstance(p, Replicate):
                if kind == "open":
                    continue
                if kind == "reduced":
                    want_reduced[i] |= bit
                    if source_open[i] & bit:
                        source_reduced[i] |= bit
            elif isinstance(p, Shard) and source_open[i] & bit:
                # Each rank uses its own part: zeros around its gradient, and one sum at the leaf.
                source_reduced[i] |= bit
            source_open[i] &= ~bit
    sources, inputs = [], []
    for i, spec in enumerate(ins):
        if i in rule.lends:
            sources.append(spec)
            inputs.append(spec)
            continue
        placements = [c.inputs[i] for c in chosen]
        order = _dim_orders(rule.inputs[i], placements, orders)
        layout = Layout(mesh, placements, order=order, ndim=spec.ndim)
        source = spec.with_(reduced=source_reduced[i], undecided=source_open[i])
        sources.append(source)
        inputs.append(Spec(spec.shape, spec.dtype, layout, want_reduced[i], source_open[i]))
    outputs = []
    for k, (shape, dtype) in enumerate(outs):
        placements = [c.outputs[k] for c in chosen]
        order = _dim_orders(rule.outputs[k], placements, orders)
        layout = Layout(mesh, placements, order=order, ndim=len(shape))
        if carries_grad(dtype):
            outputs.append(Spec(shape, dtype, layout, out_reduced, still_open))
        else:
            outputs.append(Spec(shape, dtype, layout, 0, mesh.everywhere))
    return Choice(tuple(sources), tuple(inputs), tuple(outputs), tuple(chosen), still_open, total)


def _kind_of_axis(ins: Sequence[Spec], c: Strategy, axis: int, dependent: bool, inplace: bool) -> str:
    """Type of the replicated values of an op on one axis: ``"reduced"``, ``"invariant"`` or ``"open"``."""
    if dependent:
        return "reduced"
    bit = 1 << axis
    kinds = set()
    for i, spec in enumerate(ins):
        if not carries_grad(spec.dtype):
            continue
        if not isinstance(spec.layout.placements[axis], Replicate):
            kinds.add("converted")
        elif spec.undecided & bit:
            kinds.add("open")
        else:
            kinds.add("reduced" if spec.reduced & bit else "invariant")
            if inplace and i == 0:
                return "reduced" if spec.reduced & bit else "invariant"
    if kinds <= {"open"}:
        return "open"
    return "reduced" if "invariant" not in kinds and "converted" not in kinds else "invariant"


def _dim_orders(
    dims: tuple[tuple[str, ...], ...], placements: Sequence[Placement], orders: dict[str, list[int]]
) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for d, names in enumerate(dims):
        for f in names:
            if f in orders and all(placements[a] == Shard(d) for a in orders[f]):
                found[d] = orders[f]
    return found


def _inplace_error(ins: Sequence[Spec], axis: int) -> DispatchError:
    return DispatchError(
        f"in place, the first tensor must keep its layout {ins[0].layout!r}, and on axis "
        f"{ins[0].mesh.axes[axis]!r} no way to run this op does; use the out-of-place op, or mw.reshard it first"
    )
