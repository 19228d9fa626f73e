"""The notation of rules, read by hand: factors, sizes, what is whole, and what does not fit."""

from __future__ import annotations

import re

import pytest
import torch

from meshwright.errors import RuleError
from meshwright.layout import Partial, Replicate, Shard
from meshwright.rules import factor_notation
from meshwright.rules.factor_notation import Arg, args_in, checked_strategies, notation
from meshwright.rules.strategies import Strategy


def tensors(*shapes, dtype=torch.float32):
    return [Arg(i, tuple(shape), dtype) for i, shape in enumerate(shapes)]


def made(line, *shapes, **more):
    return notation(line, *tensors(*shapes), **more)


def test_dims_and_sizes():
    rule = made("d, b (h d) 1 -> h (b d)", (4,), (2, 12, 1))
    assert rule.inputs == ((("d",),), (("b",), ("h", "d"), ()))
    assert rule.outputs == ((("h",), ("b", "d")),)
    assert dict(rule.sizes) == {"b": 2, "d": 4, "h": 3}
    assert (rule.whole, rule.reduced, rule.linear, rule.text) == (frozenset(), {}, (), "d, b (h d) 1 -> h (b d)")
    assert (rule.moves, rule.heavy, rule.padded, rule.lends, rule.local, rule.decompose) == (
        False, False, False, frozenset(), None, None,
    )  # fmt: skip
    given = made("(h d) -> h d", (12,), sizes={"d": 4, "1": 7})
    assert dict(given.sizes) == {"d": 4, "h": 3}
    assert list(given.sizes) == ["d", "h"]
    assert all(type(n) is int for n in given.sizes.values())
    empty = made("(h d) -> h d", (0,), sizes={"d": 4})
    assert dict(empty.sizes) == {"d": 4, "h": 0}
    assert dict(made("(h d) -> h d", (0,), sizes={"d": 0}).sizes) == {"d": 0, "h": 0}
    assert made("(a 1 b) -> a b", (6,), sizes={"a": 2}).inputs == ((("a", "b"),),)
    assert made("-> a", sizes={"a": 3}).inputs == ()
    assert made("->", ()).outputs == ((),)
    assert made("-> ...").outputs == ((),)
    assert made("a -> a, a 1", (3,)).outputs == ((("a",),), (("a",), ()))


def test_what_is_whole_and_what_is_reduced():
    rule = made("a b c d -> a b", (2, 3, 4, 5), whole="b x", reduced="c y", linear=())
    assert (rule.whole, dict(rule.reduced)) == (frozenset("bd"), {"c": "sum"})
    assert dict(made("a b -> a", (2, 3), reduced=["b"], op="max").reduced) == {"b": "max"}
    worded = made("out in -> out", (2, 3), reduced="in", whole="out")
    assert (worded.whole, dict(worded.reduced)) == (frozenset(["out"]), {"in": "sum"})
    mapped = made("a b c -> a", (2, 3, 4), reduced={"b": "min", "c": "sum", "z": "sum"})
    assert dict(mapped.reduced) == {"b": "min", "c": "sum"}
    assert mapped.whole == frozenset()
    assert made("a b -> a b", (2, 3), whole=["a"]).whole == frozenset("a")
    assert dict(made("a -> a b", (2,), sizes={"b": 3}).sizes) == {"a": 2, "b": 3}


def test_leading_dims():
    rule = made("... k, n k, n -> ... n", (5, 2, 3), (4, 3), (4,), reduced="k")
    assert rule.inputs == ((("~0",), ("~1",), ("k",)), (("n",), ("k",)), (("n",),))
    assert rule.outputs == ((("~0",), ("~1",), ("n",)),)
    assert dict(rule.sizes) == {"k": 3, "n": 4, "~0": 5, "~1": 2}
    wide = made("..., ... -> ...", (5, 1, 3), (2, 1))
    assert wide.inputs == ((("~0",), (), ("~2",)), (("~1",), ()))
    assert wide.outputs == ((("~0",), ("~1",), ("~2",)),)
    assert made("..., ... -> ...", (2, 1), (5, 1, 3)).inputs == ((("~1",), ()), (("~0",), (), ("~2",)))
    assert made("..., ... -> ...", (), (1,)).outputs == (((),),)
    assert made("a ... b -> ... a", (2, 3, 4, 5), reduced="b").inputs == ((("a",), ("~0",), ("~1",), ("b",)),)
    assert made("a ... -> a ...", (2,)).outputs == ((("a",),),)
    with pytest.raises(RuleError, match=r"notation '..., ... -> ...': leading dims 3 and 2 do not broadcast"):
        made("..., ... -> ...", (3,), (2,))


MEANT = [
    ("(h d) b -> h (b d)", [(6, 4)], {"sizes": {"d": 3}},
     lambda x: x.unflatten(0, (-1, 3)).permute(0, 2, 1).flatten(1), "bh"),
    ("h d b -> b (h d)", [(4, 3, 2)], {}, lambda x: x.permute(2, 0, 1).flatten(1), "bh"),
    ("... k, n k -> ... n", [(2, 4, 6), (8, 6)], {"reduced": "k"}, torch.nn.functional.linear, "kn~0~1"),
    ("..., ... -> ...", [(2, 1, 6), (4, 6)], {}, torch.mul, "~0~1~2"),
    ("..., ... -> ...", [(6,), (2, 4, 6)], {}, torch.mul, "~0~1~2"),
    ("..., ... -> ...", [(4, 4, 4), (4, 4)], {}, torch.mul, "~0~1~2"),
    ("... (h d), ... h 1 -> ... h d", [(1, 4, 6), (2, 1, 2, 1)], {"sizes": {"d": 3}},
     lambda x, y: x.unflatten(-1, (-1, 3)) * y, "h~0~1"),
    ("... (h d), ... h 1 -> ... h d", [(4, 6), (2, 1, 2, 1)], {"sizes": {"d": 3}},
     lambda x, y: x.unflatten(-1, (-1, 3)) * y, "h~0~1"),
    ("a b c -> a", [(2, 4, 6)], {"reduced": {"b": "max", "c": "max"}}, lambda x: x.amax((1, 2)), "abc"),
    ("a b -> a", [(2, 4)], {}, lambda x: x.std(1), "a"),
    ("i j, j k -> i k", [(2, 4), (4, 6)], {"reduced": "j"}, torch.matmul, "ijk"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "shapes", "more", "fn", "split"), MEANT, ids=[f"{m[0]} of {m[1]}" for m in MEANT])
def test_a_line_means_what_einsum_would_make_of_it(line, shapes, more, fn, split):
    """Of two parts of each factor that may be split the op makes the parts, or the terms, of the result."""
    rule = made(line, *shapes, **more)
    inputs = [torch.randn(n) for n in shapes]
    whole = fn(*inputs)
    assert "".join(sorted(f for f in rule.sizes if rule.shardable(f) and rule.by_factor(f))) == split
    for f in rule.sizes:
        strategy = rule.by_factor(f) if rule.shardable(f) else None
        if strategy is None:
            continue
        parts = [torch.stack(t.chunk(2, p.dim)) if isinstance(p, Shard) else torch.stack([t, t])
                 for t, p in zip(inputs, strategy.inputs, strict=True)]  # fmt: skip
        results = torch.stack([fn(*(t[i] for t in parts)) for i in range(2)])
        (p,) = strategy.outputs
        if isinstance(p, Shard):
            torch.testing.assert_close(torch.cat(list(results), p.dim), whole)
        else:
            assert p == Partial(rule.reduced[f])
            torch.testing.assert_close(results.sum(0) if p.op == "sum" else results.amax(0), whole)
    with pytest.raises(RuleError):
        made("i j, j k -> i k", (2, 3), (4, 5), reduced="j")
    with pytest.raises(RuleError):
        made("(h d), d -> h", (6,), (4,), reduced="d")


@pytest.mark.parametrize(
    ("line", "shapes", "told"),
    [
        ("a b", ((2, 3),), "has no '->'"),
        ("a (b -> a", ((2, 3),), "a bracket is not closed"),
        ("a -> a", ((2,), (3,)), "names 1 inputs, the rule gave 2"),
        ("a, b -> a", ((2,),), "names 2 inputs, the rule gave 1"),
        ("-> a", ((2,),), "has 1 dims, 0 were named"),
        ("a b -> a", ((2,),), r"a tensor of shape \(2,\) has 1 dims, 2 were named"),
        ("a -> a", ((2, 3),), r"a tensor of shape \(2, 3\) has 2 dims, 1 were named"),
        ("a ... b -> a", ((2,),), "has too few dims"),
        ("a, a -> a", ((2,), (3,)), "a is 2 in one place and 3 in another"),
        ("1 -> 1", ((2,),), "1 is 1 in one place and 2 in another"),
        ("(a b) -> a b", ((6,),), "give the size of a or b"),
        ("a, (a b) -> b", ((4,), (6,)), "6 is not a multiple of 4 in a b"),
        ("a, b, (a b) -> b", ((4,), (2,), (6,)), "a b is 8 in one place and 6 in another"),
        ("a -> b c", ((4,),), "give the size of b, c"),
    ],
)
def test_what_does_not_fit(line, shapes, told):
    with pytest.raises(RuleError, match=f"^notation {re.escape(repr(line))}.*{told}"):
        made(line, *shapes)


def test_every_tensor_is_named():
    first, second = tensors((2,), (3,))
    with pytest.raises(RuleError, match="does not cover every tensor argument"):
        notation("b -> b", second)
    rule = notation("b, a -> a", second, first, reduced="b")
    assert rule.inputs == ((("a",),), (("b",),))  # in the order of the call
    assert notation("a, b -> a", first, None).inputs == ((("a",),),)
    several = notation("a, b -> b", first, [second, None, Arg(2, (3,), torch.float32)], reduced="a")
    assert several.inputs == ((("a",),), (("b",),), (("b",),))


def test_letters_of_each_tensor():
    a, b = tensors((2, 12, 1), (5, 4))
    rule = notation({a: ["b", ["h", "d"], "1"], b: "... d", None: "x"}, ["h", ("b", "d"), "..."], "b", sizes={"d": 4})
    assert rule.inputs == ((("b",), ("h", "d"), ()), (("~0",), ("d",)))
    assert rule.outputs == ((("h",), ("b", "d"), ("~0",)), (("b",),))
    assert rule.text == "b (h d) 1, ... d -> h (b d) ..., b"
    assert notation({a: [["1", "b"], ("h", "1", "d"), "1"]}, "b", sizes={"h": 3}).inputs == ((("b",), ("h", "d"), ()),)
    worded = notation({Arg(0, (2, 3), torch.float32): ["batch", "width"]}, ["batch"], reduced="width")
    assert (worded.inputs, worded.outputs) == (((("batch",), ("width",)),), ((("batch",),),))
    with pytest.raises(RuleError, match=r"^notation 'a \(b': a bracket is not closed"):
        notation({a: "a (b"}, "a")
    assert a.letters == ["d0", "d1", "1"]
    assert (a.ndim, a.dim(-1), a.dim(1), Arg(0, (), torch.float32).dim(-1), a.dim(3)) == (3, 2, 1, 0, 0)


def test_linear_groups():
    x, y, mask = Arg(0, (2,), torch.float32), Arg(1, (2,), torch.float32), Arg(2, (2,), torch.bool)
    rule = notation("a, a, a -> a", x, y, mask, linear=(x, [x, y], mask, (mask, y), {"k": y}, ()))
    assert rule.linear == tuple(map(frozenset, ({0}, {0, 1}, {1, 2}, {1})))
    moved = notation("a, a, a -> a", x, y, mask, linear=(mask,), moves=True, heavy=True, padded=True, lends=[y, mask])
    assert (moved.linear, moved.lends) == ((frozenset({2}),), frozenset({1, 2}))
    assert (moved.moves, moved.heavy, moved.padded) == (True, True, True)
    one, other = (lambda ask: None), (lambda *a: None)
    kept = notation("a -> a", x, local=one, decompose=other)
    assert (kept.local, kept.decompose) == (one, other)
    assert [t.index for t in args_in([x, {"a": (mask, 3)}, "text", y])] == [0, 2, 1]
    assert x == Arg(0, (2,), torch.float32, spec=object())


def test_parts_of_factors_and_those_that_cross():
    plain = made("x -> x", (8,))
    assert (plain.joint, plain.crossing, plain.joined, plain.blockwise) == ((), {}, {}, False)
    (x,) = tensors((8,))
    told = notation("x -> x", x, crossing={"x": 3}, joined={"x": [("", 5), ("cut", 3)]}, blockwise=True)
    assert (told.crossing, told.joined, told.blockwise) == ({"x": 3}, {"x": (("", 5), ("cut", 3))}, True)
    way = Strategy((Replicate(),), (Replicate(),), None)
    assert notation("x -> x", x, joint=[(2, way)]).joint == ((2, way),)


def test_strategies_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(factor_notation, "IMPLEMENTATIONS", {"mix": ("ring", "gather")})
    checked_strategies({})
    checked_strategies({"mix": {"cp": "ring"}})
    checked_strategies({"mix": {"cp": "gather"}}, ["cp"])
    with pytest.raises(RuleError, match="strategies: 'mixed' is computed in one way"):
        checked_strategies({"mixed": {"cp": "ring"}})
    with pytest.raises(RuleError, match=re.escape("give axes and names for 'mix': {\"cp\": 'ring'}")):
        checked_strategies({"mix": "ring"})
    with pytest.raises(RuleError, match="the mesh has no axis 'cp'"):
        checked_strategies({"mix": {"cp": "ring"}}, ["dp"])
    with pytest.raises(RuleError, match=r"'mix' has no strategy 'rings'.*ring"):
        checked_strategies({"mix": {"cp": "rings"}})


def test_registering(monkeypatch):
    monkeypatch.setattr(factor_notation, "RULES", {})
    monkeypatch.setattr(factor_notation, "COMPOSITES", {})

    def fn(x):
        raise AssertionError

    assert factor_notation.rule("lib::one", "lib::two")(fn) is fn
    assert {"lib::one": fn, "lib::two": fn} == factor_notation.RULES
    with pytest.raises(RuleError, match="'lib::two' has a rule already"):
        factor_notation.rule("lib::two")(fn)
    factor_notation.lines({"lib::three lib::four": fn})
    assert dict(factor_notation.RULES) == {f"lib::{name}": fn for name in ("one", "two", "three", "four")}
    assert factor_notation.composite("lib::five", "lib::six")(fn) is fn
    assert {"lib::five": fn, "lib::six": fn} == factor_notation.COMPOSITES
