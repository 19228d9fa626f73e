"""Strategies that follow from what a rule says, by hand.  No ranks: ``test_check_rule.py`` runs them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import meshwright as mw
from meshwright.errors import DispatchError
from meshwright.layout import Layout, Partial, Replicate, Shard, Spec, chunk_bounds
from meshwright.rules.strategies import Local, Native, Rule, Strategy, nested_bounds

R, S0, S1, P, AVG, MAX = Replicate(), Shard(0), Shard(1), Partial(), Partial("avg"), Partial("max")


def dims(text):
    """``"b (h d)"``: ``(("b",), ("h", "d"))``."""
    made, inside = [], None
    for word in text.replace("(", "( ").replace(")", " )").split():
        if word == "(":
            inside = []
        elif word == ")":
            made, inside = [*made, tuple(inside)], None
        elif inside is None:
            made.append((word,))
        else:
            inside.append(word)
    return tuple(made)


def rule(inputs, outputs, linear=(), **more):
    words = f"{inputs} , {outputs}".replace("(", "").replace(")", "").replace(",", "").split()
    sizes = dict.fromkeys(words, 4) | more.pop("sizes", {})
    ins, outs = (tuple(dims(t) for t in text.split(",")) for text in (inputs, outputs))
    return Rule(ins, outs, sizes, linear=tuple(frozenset(g) for g in linear), **more)


def way(strategy):
    return strategy and (strategy.inputs, strategy.outputs, strategy.factor)


LINEAR = rule("t k, n k, n", "t n", linear=({0, 2}, {1, 2}), reduced={"k": "sum"})


def test_a_factor():
    assert way(LINEAR.by_factor("t")) == ((S0, R, R), (S0,), "t")
    assert way(LINEAR.by_factor("n")) == ((R, S0, S0), (S1,), "n")
    assert way(LINEAR.by_factor("k")) == ((S1, S1, P), (P,), "k")  # the bias counts once
    most = rule("a b, a", "a", reduced={"b": "max"}, linear=({0, 1},))
    assert way(most.by_factor("b")) == ((S1, R), (MAX,), "b")  # nothing is added
    assert rule("a b", "a").by_factor("b") is None  # the output lacks it, and nobody says how
    assert rule("a a", "a").by_factor("a") is None  # one axis would split two dims
    assert rule("a b", "a, a b", reduced={"b": "sum"}).by_factor("b").outputs == (P, S1)
    product = rule("a k, k b, a b", "a b", reduced={"k": "sum"}, linear=({0}, {1}))
    assert product.by_factor("k").inputs == (S1, S0, R)  # the third is not added


def test_a_factor_within_a_dim_must_lead_it():
    view = rule("b (h d)", "b h d")
    assert way(view.by_factor("h")) == ((S1,), (S1,), "h")
    assert view.by_factor("d") is None
    assert rule("b h d", "b (h d)").by_factor("d") is None
    one = rule("b (h d)", "b h d", sizes={"h": 1})
    assert way(one.by_factor("d")) == ((S1,), (Shard(2),), "d")
    assert one.by_factor("b").inputs == (S0,)


def test_terms_must_be_told():
    """index_put(x, index, number, accumulate=True): nothing tells that the number goes with the index."""
    put = rule("a, i, ", "a", reduced={"i": "sum"}, linear=({0, 2},))
    assert put.by_factor("i") is None
    alone = rule("a, i, ", "a", reduced={"i": "sum"}, linear=({0}, {2}))
    assert way(alone.by_factor("i")) == ((R, S0, R), (P,), "i")
    told = rule("a, i, i", "a", reduced={"i": "sum"}, linear=({0, 2},))
    assert way(told.by_factor("i")) == ((P, S0, S0), (P,), "i")
    both = rule("a, i, i, ", "a", reduced={"i": "sum"}, linear=({0, 2}, {0, 3}))
    assert both.by_factor("i").inputs == (P, S0, S0, R)


def test_what_the_operands_suggest():
    everything = LINEAR.axis_strategies((S0, R, R))
    assert [s.factor for s in everything] == [None, "t"]
    assert way(everything[0]) == ((R, R, R), (R,), None)
    assert [s.factor for s in LINEAR.axis_strategies((S1, S1, R))] == [None, "k"]  # once
    assert [s.factor for s in LINEAR.axis_strategies((S0, S0, S0))] == [None, "t", "n"]
    assert [s.factor for s in LINEAR.axis_strategies((R, R, R), (S1,))] == [None, "n"]
    assert [s.factor for s in LINEAR.axis_strategies((R, R, Shard(1)))] == [None]  # no such dim
    parts = LINEAR.axis_strategies((P, R, P))
    assert [way(s) for s in parts[1:]] == [((P, R, P), (P,), None), ((R, P, P), (P,), None)]
    assert [way(s) for s in LINEAR.axis_strategies((R, R, R), (P,))[1:]] == [way(s) for s in parts[1:]]
    assert [way(s) for s in LINEAR.axis_strategies((P, S0, R))[1:]] == [
        ((P, R, P), (P,), None),
        way(LINEAR.by_factor("n")),
    ]
    kept = rule("a b, a", "a b", whole=frozenset("b"), sizes={"a": 1})
    assert kept.axis_strategies((S1, R)) == [kept.axis_strategies((R, R))[0]]
    assert kept.axis_strategies((S0, R)) == kept.axis_strategies((R, R))
    assert [kept.shardable(f) for f in "ab"] == [False, False]
    assert LINEAR.shardable("t")
    assert rule("(h d)", "h d", sizes={"h": 1}).axis_strategies((S0,))[1].factor == "d"
    assert rule("(h d)", "h d", whole=frozenset("h")).axis_strategies((S0,))[1:] == []


def test_every_strategy():
    assert [s.factor for s in LINEAR.all_strategies()] == [None, "t", "k", "n", None, None]
    assert [s.outputs for s in LINEAR.all_strategies((AVG, MAX))][4:] == [(AVG,), (AVG,)]
    assert [s.factor for s in rule("a b", "a b", whole=frozenset("a")).all_strategies()] == [None, "b"]
    assert [s.factor for s in rule("a b", "a", sizes={"a": 1}).all_strategies()] == [None]


def test_partials_pass_where_the_op_is_linear():
    add = rule("a, a, a", "a, a", linear=({0, 1},))
    assert [way(s) for s in add.by_partial(P, 0)] == [((P, P, R), (P, P), None)]
    assert list(add.by_partial(P, 2)) == []
    assert list(add.by_partial(MAX, 0)) == []
    assert [way(s) for s in add.by_partial(AVG, 1, (AVG, AVG, R))] == [((AVG, AVG, R), (AVG, AVG), None)]
    # An average among others becomes a sum.
    assert [way(s) for s in add.by_partial(AVG, 0, (AVG, R, AVG))] == [((P, P, R), (P, P), None)]
    assert [way(s) for s in add.by_partial(AVG, 0, (AVG, P, R))] == [((P, P, R), (P, P), None)]
    assert [way(s) for s in add.by_partial(P, 0, (P, AVG, R))] == [((P, P, R), (P, P), None)]
    assert [way(s) for s in add.by_partial(AVG, None)] == [((AVG, AVG, R), (AVG, AVG), None)]
    moved = rule("a b", "b a", linear=({0},), moves=True)
    assert [s.inputs for s in moved.by_partial(MAX, 0)] == [(MAX,)]
    mixed = [way(s) for s in add.axis_strategies((AVG, R, AVG))[1:]]
    assert mixed == [((P, P, R), (P, P), None)]
    two = rule("a, a", "a", linear=({0}, {1}))
    assert [s.inputs for s in two.by_partial(P, 1)] == [(R, P)]
    assert [s.inputs for s in two.by_partial(P, None)] == [(P, R), (R, P)]


def test_a_split_that_cannot_stay_goes_elsewhere():
    joined = rule("b c h", "(b c) h", moves=True)
    assert [way(s) for s in joined.instead_of(0, S1)] == [((S0,), (S0,), "b"), ((Shard(2),), (S1,), "h")]
    assert list(joined.instead_of(0, S0)) == []  # it can stay
    assert list(joined.instead_of(0, R)) == []
    assert list(joined.instead_of(0, Shard(3))) == []
    assert list(rule("b c h", "(b c) h").instead_of(0, S1)) == []  # it computes
    assert [s.factor for s in rule("b c h", "(b c) h", moves=True, whole=frozenset("b")).instead_of(0, S1)] == ["h"]
    summed = rule("b c h", "(b c)", moves=True, reduced={"h": "sum"})
    assert [s.factor for s in summed.instead_of(0, S1)] == ["b"]
    flat = rule("(b c) h, k", "b c h", moves=True, whole=frozenset("b"))
    assert [s.factor for s in flat.instead_of(0, S0)] == ["h"]
    assert [s.factor for s in rule("k, b c", "(b c)", moves=True).instead_of(1, S1)] == ["b"]
    assert list(rule("b c h", "(b c) h", moves=True, sizes={"b": 2}).instead_of(0, S0)) == []
    narrow = rule("b c h", "(b c) h", moves=True, sizes={"c": 1})
    assert [s.factor for s in narrow.instead_of(0, S1)] == ["b", "h"]


def test_cuts_between_wholes():
    mesh = mw.Mesh({"a": 2, "b": 3})
    for h, d, axes in itertools.product((1, 2, 3, 4, 5, 6, 12), (1, 2, 5), ((0,), (1,), (0, 1), (1, 0))):
        view = rule("t (h d)", "t h d", sizes={"h": h, "d": d})
        parts = [mesh.sizes[a] for a in axes]

        def cuts(n, parts=parts):
            made = [(0, n)]
            for k in parts:
                made = [(a + lo, a + hi) for a, b in made for lo, hi in (chunk_bounds(b - a, k, i) for i in range(k))]
            return made

        same = all(
            (a * d, b * d) == c or (a == b and c[0] == c[1]) for (a, b), c in zip(cuts(h), cuts(h * d), strict=True)
        )
        assert view.aligned("h", mesh, axes) is same, (h, d, axes)
        assert view.aligned("t", mesh, axes)
        assert rule("h d", "(h d)", sizes={"h": h, "d": d}).aligned("h", mesh, axes) is same
        n = h * d
        for here in itertools.product(range(2), range(3)):
            lo, hi = nested_bounds(n, mesh, axes, here)
            index = 0
            for a in axes:
                index = index * mesh.sizes[a] + here[a]
            assert (lo, hi) == cuts(n)[index]
    assert rule("t (h d)", "t h d", sizes={"h": 0}).aligned("h", mesh, (0, 1))
    assert nested_bounds(7, mesh, (), (1, 2)) == (0, 7)


def test_what_a_local_function_may_ask():
    mesh = mw.Mesh({"a": 2, "b": 3})

    def spec(shape, *placements):
        return Spec(shape, torch.float32, Layout(mesh, placements, ndim=len(shape)))

    view = rule("t (o h d)", "t h d", sizes={"t": 5, "o": 1, "h": 6, "d": 2})
    ask = Local(view, [spec((5, 12), S0, S1)], [spec((5, 6, 2), S0, S1)], (1, 2))
    assert (ask.out_shape(), ask.out_shape(0), ask.in_shape(), ask.in_shape(0)) == (
        (2, 2, 2),
        (2, 2, 2),
        (2, 4),
        (2, 4),
    )
    assert ask.place() == ((5, 6, 2), (3, 4, 0))
    assert [ask.axes(f) for f in ("t", "h", "d", "o", "x")] == [(0,), (1,), (), (), ()]
    assert [ask.bounds(f) for f in ("t", "h", "d", "x")] == [(3, 5), (4, 6), (0, 2), (0, 1)]
    assert [ask.is_split("d"), ask.is_split("d", "h"), ask.is_split("t")] == [False, True, True]
    assert not ask.is_empty()
    assert not Local(view, [spec((5, 1), R, R)], [spec((5, 1), R, R)], (0, 0)).is_empty()
    assert Local(view, [spec((5, 12), R, R)], [spec((5, 0), R, R)], (0, 0)).is_empty()
    assert Local(view, [spec((5, 12), R, R)], [spec((5, 6, 2), R, R)], (0, 0)).axes("t") == ()
    two = rule("a, b", "a b, b", sizes={"a": 3, "b": 1})
    ask = Local(two, [spec((3,), S0, R), spec((1,), R, R)], [spec((3, 1), S0, R), spec((1,), R, S0)], (0, 1))
    assert (ask.in_shape(1), ask.out_shape(1)) == ((1,), (0,))
    assert ask.is_empty()
    assert ask.axes("b") == ()
    assert Local(two, [spec((1,), S0, R), spec((1,), R, R)], [spec((1, 1), R, R)], (1, 0)).is_empty()
    assert two.out_shape(0) == (3, 1)
    assert view.out_shape(0) == (5, 6, 2)
    assert rule("t h d", "t (h d)", sizes={"h": 3, "d": 5}).out_shape(0) == (4, 15)


def test_what_a_local_function_may_ask_of_other_ranks():
    mesh = mw.Mesh({"a": 2, "b": 3})
    view = rule("t n", "t n", sizes={"t": 5, "n": 12})
    for here, place in (((0, 0), 0), ((0, 2), 2), ((1, 1), 4)):
        spec = Spec((5, 12), torch.float32, Layout(mesh, (S1, S1), order={1: ("b", "a")}, ndim=2))
        ask = Local(view, [spec], [spec], here)
        assert ask.axes("n") == (1, 0)
        assert ask.parts("n") == [0, 2, 4, 1, 3, 5]  # in the order of the axes; b is the major one
        assert ask.spans("n") == [(0, 2), (4, 6), (8, 10), (2, 4), (6, 8), (10, 12)]
        assert ask.spans("n", 7) == [(0, 2), (3, 5), (6, 7), (2, 3), (5, 6), (7, 7)]
        assert (ask.place_in("n"), ask.place_in("t")) == (place, 0)
        assert (ask.parts("t"), ask.spans("t")) == ([0], [(0, 5)])
    lies = Layout(mesh, (Shard(1, (4, 8)), R), ndim=2)
    blocks = Spec((5, 12), torch.float32, lies)
    ask = Local(view, [blocks], [blocks], (1, 0))
    assert ask.bounds("t") == (0, 5)
    for asked in (ask.bounds, ask.spans):
        with pytest.raises(DispatchError, match="takes no dims that are split by blocks"):
            asked("n")


def test_what_a_rule_does_not_say():
    bare = Rule((dims("a"),), (dims("a"),), {"a": 4})
    assert (bare.whole, bare.reduced, bare.linear, bare.lends, bare.text) == (frozenset(), {}, (), frozenset(), "")
    assert [bare.moves is False, bare.heavy is False, bare.padded is False] == [True] * 3
    assert [bare.local is None, bare.decompose is None] == [True] * 2


def test_one_native_call_with_another_behind_it():
    x = torch.arange(6.0).reshape(2, 3)
    assert Native(torch.sum, 0)(x, "whatever", other=1).tolist() == [3.0, 5.0, 7.0]
    refused = Native(torch.Tensor.view, (6,), otherwise=torch.Tensor.reshape)
    assert refused(x.t()).tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    assert refused(x).data_ptr() == x.data_ptr()
    with pytest.raises(RuntimeError):
        Native(torch.Tensor.view, (6,))(x.t())
    assert (refused.fn, refused.static, refused.otherwise) == (torch.Tensor.view, ((6,),), torch.Tensor.reshape)
    assert Strategy((R,), (R,), None) == Strategy((R,), (R,), None)
    assert math.prod(LINEAR.out_shape(0)) == 16


def test_dims_that_are_split_by_blocks() -> None:
    view = rule("(b h)", "b h", sizes={"b": 4, "h": 6}, moves=True)
    assert view.axis_strategies((Shard(0),))[1].outputs == (S0,)
    fused = view.axis_strategies((Shard(0, (6,) * 4),))
    assert (S1,) in [s.outputs for s in fused]  # each of the four blocks is what h is
    assert view.axis_strategies((Shard(0, (1,) * 24),)) == fused[:1]  # single elements are no blocks to be split
    assert view.axis_strategies((Shard(0, (5, 19)),)) == fused[:1]
    chunk = rule(
        "x", "p, q", sizes={"x": 6, "p": 3, "q": 3}, whole=frozenset("xpq"), joined={"x": (("p", 3), ("q", 3))}
    )
    assert [s.outputs for s in chunk.axis_strategies((Shard(0, (3, 3)),))[1:]] == [(S0, S0)]
    assert [s.outputs for s in chunk.axis_strategies((Shard(0, (3, 2, 1)),))[1:]] == [(S0, Shard(0, (2, 1)))]
    assert chunk.axis_strategies((Shard(0, (2, 4)),))[1:] == []  # the first part ends within a block
    assert chunk.axis_strategies((S0,))[1:] == []
    assert rule("(a b c)", "a b c", sizes={"a": 2, "b": 3, "c": 4}).aligned("b", mw.Mesh({"a": 3}), (0,))
    assert not rule("(a b c)", "a b c", sizes={"a": 4, "b": 5, "c": 3}).aligned("b", mw.Mesh({"a": 3}), (0,))
    assert rule("(a b c)", "a b c", sizes={"a": 4, "b": 5, "c": 1}).aligned("b", mw.Mesh({"a": 3}), (0,))
    assert [s.inputs for s in chunk.axis_strategies((R,), (S0, R))[1:]] == [(Shard(0, (3, 3)),)]
    stays = rule("(b h)", "(b h)", sizes={"b": 4, "h": 6}, moves=True)
    assert (Shard(0, (6,) * 4),) in [s.outputs for s in stays.axis_strategies((Shard(0, (6,) * 4),))]


def test_blocks_of_a_part_that_crosses():
    cut = {"x": (("", 2), ("cut", 3), ("", 3))}
    part = rule("x", "x", sizes={"x": 8, "cut": 3}, crossing={"x": 3}, joined=cut, blockwise=True)
    assert part.by_factor("x", (2, 3, 3)).outputs == (S0,)  # the part is one block
    assert part.by_factor("x", (2, 2, 1, 3)).outputs == (Shard(0, (2, 1)),)
    assert part.by_factor("x", (4, 4)) is None  # the part begins within a block
    assert part.by_factor("x").inputs == (S0,)
    nothing = rule("x", "x", sizes={"x": 8}, crossing={"x": 0}, joined={"x": (("", 8),)}, blockwise=True)
    assert nothing.by_factor("x", (3, 5)).outputs == (S0,)
    assert (
        rule("x", "x", sizes={"x": 8}, crossing={"x": 3}).by_factor("x", (3, 5)) is None
    )  # nobody says whose they are
