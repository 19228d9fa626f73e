"""The types that an op gives to replicated axes, by hand; ``test_autograd.py`` runs what follows from them."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from meshwright.layout import Layout, Partial, Replicate, Shard, Spec
from meshwright.rules.factor_notation import Arg, notation
from meshwright.strategy_selection.types import Choice, Operand, carries_grad, types

MESH = mw.Mesh({"a": 2, "b": 3})
F32, F64, INT, BOOL = torch.float32, torch.float64, torch.int64, torch.bool
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def spec(*placements, shape=(6, 6), dtype=F32, **more):
    return Spec(shape, dtype, Layout(MESH, placements or (R, R), ndim=len(shape)), **more)


def rule_of(line, ins, **more):
    return notation(line, *(Arg(i, tuple(s.shape), s.dtype, s) for i, s in enumerate(ins)), **more)


def chosen(rule, *factors):
    """By the factor that each axis splits; None: replicated, ``0``, ``1``, ...: a linear group."""
    found = []
    for f in factors:
        if isinstance(f, int):
            found.append(list(rule.by_partial(P, None))[f])
        else:
            found.append(rule.by_factor(f) if f else rule.axis_strategies([R] * len(rule.inputs))[0])
    return found


def typed(line, ins, *factors, inplace=False, orders=None, outs=((6, 6),), dtype=F32, **more):
    rule = rule_of(line, ins, **more)
    made = types(rule, ins, chosen(rule, *factors), orders or {}, inplace=inplace)
    return made.of(ins, [(shape, dtype) for shape in outs])


def kind(made):
    """Types of the first output: undecided and reduced axes."""
    return made.outputs[0].undecided_mask, made.outputs[0].grad_partial_mask


ADD = "a b, a b -> a b"


@pytest.mark.parametrize("inplace", [False, True])
def test_types_where_all_is_replicated(inplace):
    both = 3
    invariant, reduced, leaf = spec(), spec(grad_partial_mask=both), spec(undecided_mask=both)
    number = spec(dtype=INT, grad_partial_mask=2)
    for ins, expected in (
        ((invariant, invariant), (0, 0)), ((reduced, reduced), (0, both)), ((leaf, leaf), (both, 0)),
        ((invariant, leaf), (0, 0)), ((reduced, leaf), (0, both)), ((number, leaf), (both, 0)),
        ((number, reduced), (0, both)), ((number, number), (both, 0)),
        ((reduced, invariant), (0, both if inplace else 0)), ((invariant, reduced), (0, 0)),
        ((spec(undecided_mask=1, grad_partial_mask=2), leaf), (1, 2)),
        ((spec(undecided_mask=2), spec(undecided_mask=1)), (0, 0)),
    ):  # fmt: skip
        assert kind(typed(ADD, ins, None, None, inplace=inplace)) == expected, ins
    # In place the target keeps its type, whatever comes behind it; what is undecided has none yet.
    assert kind(typed(ADD, (leaf, reduced), None, None, inplace=inplace)) == (0, both)
    assert typed(ADD, (leaf, reduced), None, None).open == 0
    assert typed(ADD, (leaf, leaf), None, None).open == both


def test_what_is_reduced_on_the_way_is_invariant():
    given = spec(S0, P), spec(grad_partial_mask=3)
    made = typed(ADD, given, None, None)
    assert kind(made) == (0, 0)
    assert [s.layout.placements for s in made.inputs] == [(R, R), (R, R)]
    assert made.inputs[1].grad_partial_mask == 0  # asked for as invariant
    assert made.sources == given


def test_a_leaf_is_decided_by_its_use():
    """A weight is reduced where the op splits something, invariant where what it meets is, and open otherwise."""
    x, w = spec(S0, R, grad_partial_mask=0, undecided_mask=2), spec(undecided_mask=3)
    made = typed("t k, n k -> t n", (x, w), "t", None, reduced="k")
    assert (made.sources[1].grad_partial_mask, made.sources[1].undecided_mask) == (1, 2)
    assert (made.inputs[1].grad_partial_mask, made.inputs[1].undecided_mask) == (1, 2)
    assert (made.sources[0], made.inputs[0]) == (x, x)
    assert made.outputs == (spec(S0, R, undecided_mask=2),)
    assert made.open == 2
    assert [s.factor for s in made.strategies] == ["t", None]
    made = typed("t k, n k -> t n", (spec(S0, R), w), "t", None, reduced="k")
    assert (made.sources[1].grad_partial_mask, made.sources[1].undecided_mask) == (1, 0)  # invariant on b
    assert made.outputs == (spec(S0, R),)
    # Of what is split itself each rank uses its part: zeros around the gradient, and one sum at the leaf.
    made = typed("t k, n k -> t n", (spec(S0, R), w), "t", "n", reduced="k")
    assert (made.sources[1].grad_partial_mask, made.sources[1].undecided_mask) == (3, 0)
    assert made.inputs[1] == spec(R, S0, grad_partial_mask=1)
    assert made.inputs[0] == spec(S0, R, grad_partial_mask=2)
    assert made.sources[0] == spec(S0, R)
    assert made.outputs[0].layout.placements == (S0, S1)
    # Kept Partial: the other operand of a product is reduced too.
    parts, other = spec(P, R), spec(undecided_mask=1)
    made = typed(ADD, (parts, other), 0, None, linear=(Arg(0, (6, 6), F32),))
    assert made.inputs == (parts, spec(grad_partial_mask=1))
    assert made.sources[1] == spec(grad_partial_mask=1)
    assert made.outputs == (parts,)
    # A leaf that becomes Partial itself is decided, and not reduced.
    made = typed(ADD, (parts, other), 0, None, linear=([Arg(0, (6, 6), F32), Arg(1, (6, 6), F32)],))
    assert (made.sources[1], made.inputs[1]) == (spec(), parts)


def test_integers_have_no_gradient():
    index = spec(dtype=INT, undecided_mask=3)
    made = typed(ADD, (spec(S0, R), index), "a", None)
    assert made.inputs[1].layout.placements == (S0, R)
    assert made.sources[1].undecided_mask == 0
    mask = spec(dtype=BOOL, grad_partial_mask=3)
    assert typed(ADD, (spec(), mask), None, None).inputs[1] == mask  # whatever type it has is fine
    assert typed(ADD, (spec(S0, R), mask), "a", None).inputs[1].grad_partial_mask == 2
    plain = spec(dtype=BOOL)
    assert typed(ADD, (spec(), plain), None, None).inputs[1] == plain
    made = typed(ADD, (spec(grad_partial_mask=3), spec(grad_partial_mask=3)), None, None, dtype=BOOL)
    assert kind(made) == (MESH.everywhere, 0)
    assert [carries_grad(d) for d in (F32, torch.complex64, INT, BOOL)] == [True, True, False, False]


def test_sums_are_the_widest():
    made = typed(ADD, (spec(S0, R), spec(accumulate_dtype=F64)), "a", None)
    assert {s.accumulate_dtype for s in (*made.inputs, *made.outputs)} == {F64}
    assert made.sources[1] == spec(accumulate_dtype=F64)
    assert made.sources[0].accumulate_dtype is None
    leaf = spec(undecided_mask=1)
    made = typed(ADD, (spec(S0, R, accumulate_dtype=F64), leaf), "a", None)
    assert made.sources[1] == spec(
        grad_partial_mask=1, accumulate_dtype=F64
    )  # its gradient is summed as the op's values are


def test_what_lends_its_shape_stays():
    lender = spec(S1, R, grad_partial_mask=0, undecided_mask=2)
    rule = rule_of(ADD, (spec(S0, R), lender), lends=[Arg(1, (6, 6), F32)])
    made = types(rule, (spec(S0, R), lender), chosen(rule, "a", None), {}, inplace=False)
    ins = spec(S0, R), lender
    assert made.of(ins, [((6, 6), F32)]).inputs == ins
    assert made.of(ins, [((6, 6), F32)]).sources == ins
    assert made.operands[1].layout is None
    # And says nothing about types: the other operand alone does.
    other = spec(undecided_mask=3)
    rule = rule_of(ADD, (other, spec()), lends=[Arg(1, (6, 6), F32)])
    assert types(rule, (other, spec()), chosen(rule, None, None), {}, inplace=False).open == 3


def test_what_lends_its_shape_may_come_first():
    ins = spec(S1, R), spec(undecided_mask=3)
    made = typed(ADD, ins, "a", None, lends=[Arg(0, (6, 6), F32)])
    assert (made.inputs[0], made.inputs[1]) == (ins[0], spec(S0, R, undecided_mask=2))


def test_an_axis_may_stay_open_in_front_of_one_that_is_decided():
    ins = spec(R, S0, undecided_mask=1), spec(undecided_mask=3)
    made = typed("t k, n k -> t n", ins, None, "t", reduced="k")
    assert made.sources[1] == spec(grad_partial_mask=2, undecided_mask=1)
    assert made.inputs[1] == spec(grad_partial_mask=2, undecided_mask=1)
    assert made.open == 1


def test_what_a_choice_does_not_say():
    bare = Choice((), (), (), ())
    assert bare.open == 0
    assert bare != Choice((), (), (), (), open=1)
    assert Operand(None) == Operand(None, 0, 0, 0)


def test_orders_of_axes_on_one_dim():
    given = spec(S0, S0), spec()
    made = typed(ADD, given, "a", "a", orders={"a": [1, 0]})
    ba = Layout(MESH, (S0, S0), order={0: (1, 0)}, ndim=2)
    assert [s.layout for s in (*made.inputs, *made.outputs)] == [ba] * 3
    assert typed(ADD, given, "a", "a").inputs[0].layout == Layout(MESH, (S0, S0), ndim=2)
    one = typed("a b, b -> a b", (spec(S0, S0), spec(shape=(6,))), "a", "a", orders={"a": [1, 0]})
    assert one.inputs[0].layout == ba
    assert one.inputs[1].layout == Layout(MESH, (R, R), ndim=1)
    turned = typed("a b -> b a", (spec(S0, S0),), "a", "a", orders={"a": [1, 0]})
    assert turned.outputs[0].layout == Layout(MESH, (S1, S1), order={1: (1, 0)}, ndim=2)
