"""Prices of strategies: on one axis those of the plans that they need, and what the search makes of several axes."""

from __future__ import annotations

import itertools

import pytest
import torch

import meshwright as mw
from meshwright.layout import Layout, Partial, Replicate, Shard, Spec
from meshwright.resharding.planner import plan
from meshwright.rules.factor_notation import Arg, notation
from meshwright.strategy_selection import search
from meshwright.strategy_selection.search import Search, choose
from meshwright.strategy_selection.types import Wanted

LINE, GRID = mw.Mesh({"a": 4}), mw.Mesh({"a": 2, "b": 3})
F32, INT = torch.float32, torch.int64
R, S0, S1, P, MAX = Replicate(), Shard(0), Shard(1), Partial(), Partial("max")


def spec(*placements, shape=(24, 24), mesh=GRID, dtype=F32, order=None, **more):
    return Spec(shape, dtype, Layout(mesh, placements, order=order, ndim=len(shape)), **more)


def rule_of(line, ins, **more):
    return notation(line, *(Arg(i, tuple(s.shape), s.dtype, s) for i, s in enumerate(ins)), **more)


TYPES = [(R, {}), (R, {"grad_partial_mask": 1}), (S0, {}), (S1, {}), (P, {}), (MAX, {})]


@pytest.mark.parametrize("graded", [True, False])
def test_an_operand_costs_what_its_plan_does(graded):
    """Of dims that are shorter than the mesh, which no plan splits on its way."""
    kinds = [(Partial(op), {}) for op in ("avg", "product")]
    for (have, more), (want, _), dependent in itertools.product(TYPES + kinds, TYPES[1:] + kinds, (False, True)):
        src = spec(have, mesh=LINE, shape=(3, 3), **more)
        reduced = want == R and (dependent or src.grad_partial_mask)  # what is reduced keeps its type
        made = plan(src, spec(want, mesh=LINE, shape=(3, 3), grad_partial_mask=int(reduced)))
        expected = made.bytes if graded else made.forward_bytes
        got = search._axis_bytes(src, 0, want, dependent, float(graded), 1.0) * 3 / 4 * src.nbytes
        assert got == pytest.approx(expected), (src, want, dependent)
    leaf = spec(R, mesh=LINE, undecided_mask=1)
    assert [search._axis_bytes(leaf, 0, R, d, g, w) for d, g, w in ((True, 1, 1), (True, 1, 2), (True, 0, 1))] == [
        2,
        4,
        0,
    ]
    assert search._axis_bytes(leaf, 0, R, False, 1, 1) == 0
    # Of a part of it, too: as much as of the whole, so that what is decided changes no order of candidates.
    assert [search._axis_bytes(leaf, 0, S0, d, g, w) for d, g, w in ((True, 1, 1), (True, 1, 2), (True, 0, 1))] == [
        2,
        4,
        0,
    ]
    second = spec(S0, R, grad_partial_mask=2)
    assert [search._axis_bytes(second, a, R, True, 1, 1) for a in (0, 1)] == [2, 0]
    assert [search._axis_bytes(spec(P, S0), a, R, True, 1, 2) for a in (0, 1)] == [8, 3]
    assert [search._axis_bytes(spec(P, S0), a, S0, True, 1, 2) for a in (0, 1)] == [3, 0]


def test_parts_stay_parts_beside_a_split_on_one_axis_as_on_two():
    for mesh, before in ((LINE, ()), (mw.Mesh({"d": 1, "a": 4}), (R,)), (GRID, (S1,))):
        for pair in ((S0, P), (P, S0)):
            ins = [spec(*before, p, mesh=mesh) for p in pair]
            rule = rule_of("a b, a b -> a b", ins, linear=[[Arg(i, (24, 24), F32) for i in (0, 1)]])
            made = choose(rule, ins, [((24, 24), F32)])
            assert made.outputs[0].layout.placements == (*before, P), (mesh, pair)


def test_what_a_result_still_has_to_pay():
    n = 4
    table = {
        (R, None): 0, (S0, None): 0, (P, None): 2, (P, R): 2, (P, S0): 1, (P, P): 0, (S0, S0): 0, (S0, S1): 1 / n,
        (S0, R): 1, (R, S0): 1, (R, R): 0, (R, P): 0,
    }  # fmt: skip
    for (p, wanted), expected in table.items():
        assert search._distance(p, wanted, n, 1.0) == expected, (p, wanted)
    assert [search._distance(P, w, n, 2.0) for w in (None, R, S0)] == [4, 4, 2]
    assert search._distance(S0, R, n, 2.0) == 1


def cost(made, constants=()):
    """By the plans: forward and, of what has a gradient, backward; and what a Partial result has to pay."""
    total = 0.0
    for i, (src, dst) in enumerate(zip(made.sources, made.inputs, strict=True)):
        steps = plan(src, dst)
        total += steps.forward_bytes + (0 if i in constants else steps.backward_bytes)
    for out in made.outputs:
        if out.layout.partial:
            total += plan(out, out.with_(layout=out.layout.without_partial())).forward_bytes
    return total


OPS = {
    "contracts": ("t k, n k -> t n", ((8, 64), (16, 64)), {"reduced": "k", "heavy": True}),
    "reduces": ("t k, n k -> t n", ((64, 8), (16, 8)), {"reduced": "k"}),
    "alike": ("a b, a b -> a b", ((8, 16), (8, 16)), {}),
    "broadcast": ("a b, 1 b -> a b", ((8, 16), (1, 16)), {}),
    "whole": ("a b, b -> b a", ((8, 16), (16,)), {"whole": "b"}),
}


@pytest.mark.parametrize("op", OPS)
def test_the_cheapest_on_one_axis(op):
    """Of all that is suggested and divides work where it must, by its plans."""
    line, shapes, more = OPS[op]
    for types in itertools.product(TYPES, repeat=2):
        if any(isinstance(p, Shard) and p.dim >= len(s) for (p, _), s in zip(types, shapes, strict=True)):
            continue
        ins = [spec(p, shape=s, mesh=LINE, **t) for (p, t), s in zip(types, shapes, strict=True)]
        rule = rule_of(line, ins, linear=([Arg(0, shapes[0], F32)], [Arg(1, shapes[1], F32)]), **more)
        outs = [(rule.out_shape(0), F32)]
        for constants in ((), (1,)):
            made = choose(rule, ins, outs, constants=constants)
            options = rule.axis_strategies([p for p, _ in types])
            others = [choose(rule, ins, outs, strategies=[c], constants=constants) for c in options]
            divided = [o for o in others if o.strategies[0].factor]
            kept = [o for o in divided if more.get("heavy") or not sends(o)]
            among = divided if kept else others
            prices = [cost(o, constants) for o in among]
            assert cost(made, constants) == pytest.approx(min(prices)), (types, made)
            again = choose(rule, ins, outs, constants=constants)  # as it is known now
            assert (again, made.strategies[0] in options) == (made, True)
            ask = Search(rule, ins, outs, constants=constants)
            held = [ask._held_of_output([], 0, 0)]
            priced = [ask.price(o.strategies[0], 0, held, i) for i, o in enumerate(among)]
            assert [p[0] for p in priced] == pytest.approx(prices)
            for o, (_, moved, _) in zip(among, priced, strict=True):
                pairs = zip(ins, o.inputs, strict=True)
                assert moved == max((s.nbytes for s, d in pairs if s.layout != d.layout), default=0)


def sends(made):
    """Whether something that is not replicated changes its placement."""
    pairs = zip(made.sources, made.inputs, strict=True)
    return any(s.layout != d.layout and s.layout.placements != (R,) for s, d in pairs)


def test_orders_of_axes_are_those_of_the_largest_that_several_split():
    ba = {0: (1, 0)}
    small, large = spec(S0, S0, shape=(24,), order=ba), spec(S0, S0)
    for ins, expected in (
        ((small, large), [0, 1]), ((large, small), [0, 1]), ((small, spec(S0, R)), [1, 0]),
        ((spec(S0, S0, shape=(24,)), spec(S0, S0, order=ba)), [1, 0]),
        ((spec(S0, S0, order=ba), spec(S0, S0)), [1, 0]),  # of equals the first
        ((spec(S0, R), spec(R, S0)), [0, 1]),
    ):  # fmt: skip
        rule = rule_of(", ".join("a" if s.ndim == 1 else "a b" for s in ins) + " -> a b", ins)
        ask = Search(rule, ins, [((24, 24), F32)])
        assert ask._order("a", [0, 1]) == expected, ins
        assert ask._order("a", [1]) == [1]
        assert ask._orders([rule.by_factor("a")] * 2) == {"a": expected}
        assert ask._orders([rule.by_factor("a"), rule.by_factor("b")]) == {}
    hinted = Search(rule, ins, [((24, 24), F32)], hint=Wanted((spec(S0, S0, order=ba),)))
    assert [s for _, s in hinted.held] == [*ins, spec(S0, S0, order=ba)]
    assert hinted._order("a", [0, 1]) == [1, 0]
    assert [s for _, s in Search(rule, ins, [((24, 24), F32)], hint=Wanted((None,))).held] == list(ins)
    assert [hinted.wanted(k, a) for k, a in ((0, 0), (0, 1), (1, 0))] == [S0, S0, None]


def test_what_a_rank_holds_of_a_result():
    ins = spec(S0, R), spec(R, S0)
    rule = rule_of("t k, n k -> t n", ins, reduced="k")
    ask = Search(rule, ins, [((24, 24), F32)])
    whole, t, n, k = 24 * 24 * 4, *(rule.by_factor(f) for f in "tnk")
    assert ask._held_of_output([], 0, 0) == whole / 3  # the second axis splits n, as it seems
    assert [ask._held_of_output([c, n], 1, 0) for c in (t, k)] == [whole / 2, whole]
    assert Search(rule, (spec(S0, S1), spec(R, S1)), [((24, 24), F32)])._held_of_output([], 0, 0) == whole
    assert Search(rule, (spec(R, R), spec(R, R)), [((24, 24), F32)])._held_of_output([], 0, 0) == whole


def test_what_moves():
    ins = spec(S0, R), spec(R, S0)
    rule = rule_of("t k, n k -> t n", ins, reduced="k")
    ask, (t, n) = Search(rule, ins, [((24, 24), F32)]), map(rule.by_factor, "tn")
    assert [[ask._moves(c, a) for c in (t, n)] for a in (0, 1)] == [[False, True], [True, False]]
    lent = rule_of("t k, n k -> t n", ins, reduced="k", lends=[Arg(0, (24, 24), F32)])
    assert not Search(lent, ins, [((24, 24), F32)])._moves(n, 0)
    assert [[ask._stays(a, c) for c in (t, n)] for a in (0, 1)] == [[True, False], [False, True]]
    assert not ask._stays(0, rule.axis_strategies([R, R])[0])
    assert [ask._cut(0, "t"), ask._cut(1, "t"), ask._cut(1, "n")] == [2, 6, 3]


def test_the_price_of_all_axes_is_that_of_the_plans():
    ba = {0: (1, 0)}
    leaf = spec(R, R, undecided_mask=3)
    for line, ins, factors in (
        ("t k, n k -> t n", (spec(S0, R), spec(R, S0)), "tn"),
        ("t k, n k -> t n", (spec(S0, R), leaf), "tt"),  # reduced at the leaf, over both
        ("t k, n k -> t n", (spec(S0, R), leaf), ("t", None)),
        ("t k, n k -> t n", (spec(S1, S1), spec(S1, R)), "kk"),
        ("a b, a b -> a b", (spec(S0, S0), spec(S0, S0, order=ba)), "aa"),
        ("a b, a b -> a b", (spec(R, R, dtype=INT, undecided_mask=3), spec(S0, P)), "ab"),
        ("a b, a b -> a b", (leaf, spec(P, P)), (0, 0)),
    ):
        rule = rule_of(line, ins, reduced="k", linear=[Arg(1, (24, 24), F32)])
        parts = [c for c in rule.axis_strategies([P, P]) if not c.factor]
        picks = [rule.by_factor(f) if isinstance(f, str) else parts[0 if f is None else 1] for f in factors]
        for constants in ((), (1,)):
            ask = Search(rule, ins, [((24, 24), F32)], constants=constants)
            made = ask.typed(picks, {})
            expected = cost(made, (*constants, *(i for i, s in enumerate(ins) if s.dtype == INT)))
            for i, (given, src) in enumerate(zip(ins, made.sources, strict=True)):
                axes = given.undecided_mask & src.grad_partial_mask if given.dtype == F32 and i not in constants else 0
                expected += sum(2 * (n - 1) / n * src.nbytes for a, n in enumerate((2, 3)) if axes >> a & 1)
            shared = len([f for f in factors if isinstance(f, str)]) - len({f for f in factors if isinstance(f, str)})
            price = ask._exact(made)
            assert price[:2] == pytest.approx((expected, shared), abs=0.01), (line, ins, constants)
            moved = [round(plan(s, d).forward_bytes, 3) for s, d in zip(made.sources, made.inputs, strict=True)]
            assert price[2:] == (max(moved), *moved)


def test_of_what_only_moves_the_outermost_dims_are_split():
    ins = (spec(S0, R), spec(S0, R))
    rule = rule_of("a b, c b -> b a", ins, moves=True)
    ask = Search(rule, ins, [((24, 24), F32)])
    b, whole = rule.by_factor("b"), rule.axis_strategies([R, R])[0]
    for picks, dims in (((b, whole), (1, 0)), ((whole, b), (0, 1)), ((b, b), (1, 1))):
        made = ask.typed(picks, {})
        assert ask._exact(made) == (pytest.approx(cost(made), abs=0.01), picks.count(b) // 2, *dims)


def test_what_is_wide():
    half, ints = spec(S0, R, dtype=torch.bfloat16, accumulate_dtype=torch.float64), spec(S0, R, dtype=INT)
    rule = rule_of("a b, a b -> a b", (half, ints))
    ask = Search(rule, (half, ints), [((24, 24), torch.bfloat16)])
    assert [ask.wide(d) for d in (torch.bfloat16, F32, INT)] == [4, 2, 1]
    assert Search(rule, (ints, ints), [((24, 24), INT)]).wide(INT) == 1
    assert Search(rule, (ints, ints), [((24, 24), INT)]).wide(torch.bfloat16) == 1
    assert ask.kind() != Search(rule, (spec(S0, R, dtype=torch.bfloat16), ints), [((24, 24), torch.bfloat16)]).kind()


def test_what_a_choice_hangs_on():
    """Two calls have the same kind only where the choice is the same, whatever the sizes."""

    def kind(line, *shapes, placed=((S0,), (R,)), mesh=LINE, **more):
        ins = tuple(spec(*p, shape=s, mesh=mesh) for p, s in zip(placed, shapes, strict=False))
        rule = rule_of(line, ins, **more)
        return Search(rule, ins, [(rule.out_shape(0), F32)]).kind()

    view = "a b -> (a b)"
    assert kind(view, (8, 4)) == kind(view, (16, 12))  # even ones
    assert kind(view, (7, 2)) != kind(view, (6, 2))  # 7 rows of two in fours are cut where 14 are, 6 are not
    assert kind(view, (8, 4)) != kind(view, (8, 1))
    join = {"moves": True, "mesh": GRID, "placed": ((S0, R),)}
    assert kind("a b -> b a", (7, 4), **join) != kind("a b -> b a", (7, 3), **join)  # what an axis of two may split
    assert kind("a b -> b a", (11, 13), **join) == kind("a b -> b a", (13, 19), **join)
    assert kind("a b -> b a", (7, 5), **join) != kind("a b -> b a", (5, 11), **join)  # 11 a plan may split on its way
    add = {"mesh": GRID, "placed": ((S0, R),)}
    assert kind("a b -> b a", (7, 4), **add) == kind("a b -> b a", (7, 3), **add)  # computes: nothing is moved there


def test_orders_that_are_tried():
    """Of a dim of two factors those in which the axes cut it at whole rows."""
    for rows, orders in ((6, [[0, 1], [1, 0]]), (5, [[0, 1]])):
        ins = (spec(S0, S0, shape=(rows, 4)),)
        rule = rule_of("a b -> (a b)", ins)
        ask = Search(rule, ins, [((rows * 4,), F32)])
        picks = [rule.by_factor("a")] * 2
        assert [found["a"] for found in ask._all_orders(picks)] == orders
    assert [f["a"] for f in Search(rule, ins, [((rows * 4,), F32)], inplace=True)._all_orders(picks)] == [[0, 1]]


def test_in_place_a_layout_stays():
    """Also where an operand's parts could pass: the product of a whole value and parts would be parts."""
    for have, other in itertools.product((R, S0, P), repeat=2):
        ins = (spec(have, mesh=LINE), spec(other, mesh=LINE))
        rule = rule_of("a b, a b -> a b", ins, linear=([Arg(0, (24, 24), F32)], [Arg(1, (24, 24), F32)]))
        made = choose(rule, ins, [((24, 24), F32)], inplace=True)
        assert made.inputs[0].layout.placements == made.outputs[0].layout.placements == (have,), (have, other)


def test_shards_hinted_at_that_are_cut_from_something_larger():
    ins = (spec(S0, R),)
    rule = rule_of("a b -> a b", ins)
    a, whole = rule.by_factor("a"), rule.axis_strategies([R])[0]
    for picks, wanted, cut in (
        ((a, whole), (S0, R), 0), ((a, whole), (S0, S1), 1), ((whole, whole), (S0, S1), 2), ((a, whole), (R, R), 0),
        ((whole, whole), (R, R), 0), ((a, a), (S0, R), 0),
    ):  # fmt: skip
        ask = Search(rule, ins, [((24, 24), F32)], hint=Wanted((spec(*wanted),)))
        assert search._planned(ask.typed(picks, {}), ask.hint)[1] == cut, (picks, wanted)
    assert search._planned(ask.typed(picks, {}), Wanted((None,)))[1] == 0
