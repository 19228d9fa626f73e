"""Steps as values: kinds, transposes, and how they run.  No ranks: ``test_convert.py`` runs them."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from meshwright.errors import ConversionError
from meshwright.layout import Layout, Partial, Replicate, Shard, Spec
from meshwright.resharding import conversions
from meshwright.resharding.conversions import (
    ConversionStep,
    between,
    gathered_as,
    kind_of,
    lowered,
    op_of,
    replicated,
    transpose,
)

MESH = mw.Mesh({"a": 2, "b": 3, "one": 1})
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
# A type of one axis: its placement, and of a replicated one whether its gradient is Partial.
I, R = (Replicate(), 0), (Replicate(), 1)  # noqa: E741
P, AVG, MAX, PRODUCT = ((Partial(op), 0) for op in ("sum", "avg", "max", "product"))
S0, S1 = (Shard(0), 0), (Shard(1), 0)


def spec(*types, dtype=F32, **more):
    types = (*types, *[I] * (3 - len(types)))
    reduced = sum(r << a for a, (_, r) in enumerate(types))
    return Spec((6, 6), dtype, Layout(MESH, [p for p, _ in types], ndim=2), reduced, **more)


def step(src, dst, *axes):
    return between(src, dst, axes or (0,))


KINDS = [
    (I, R, "retype"), (I, S0, "slice"), (I, P, "keep_one"), (I, PRODUCT, "keep_one"), (I, AVG, "retype"),
    (I, MAX, "retype"), (P, I, "all_reduce"), (MAX, I, "all_reduce"), (P, S1, "reduce_scatter"), (P, P, "retype"),
    (P, AVG, "scale"), (AVG, P, "scale"), (S0, S1, "all_to_all"), (S0, R, "all_gather"), (S0, P, "pad"),
]  # fmt: skip


def test_kinds():
    for a, b, kind in KINDS:
        assert kind_of(a[0], b[0]) == kind
        assert step(spec(a), spec(b)).kind == kind
        assert step(spec(I, a), spec(I, b), 1).kind == kind


@pytest.mark.parametrize(("a", "b"), [("max", "sum"), ("sum", "max"), ("avg", "max"), ("sum", "product")])
def test_reductions_that_become_no_other(a, b):
    with pytest.raises(ConversionError, match=rf"Partial\('{a}'\) cannot become a Partial\('{b}'\) without"):
        kind_of(Partial(a), Partial(b))


# The table of the design page; the transpose is of another kind and leads from one type to another.
TRANSPOSES = [
    (I, R, "retype", ("all_reduce", P, I)), (R, I, "retype", ("keep_one", I, P)),
    (P, I, "all_reduce", ("retype", I, R)), (P, R, "all_reduce", ("all_reduce", P, R)),
    (P, S0, "reduce_scatter", ("all_gather", S0, R)), (S0, R, "all_gather", ("reduce_scatter", P, S0)),
    (S0, I, "all_gather", ("slice", I, S0)), (R, S0, "slice", ("pad", S0, P)),
    (I, S0, "slice", ("all_gather", S0, I)), (R, P, "keep_one", ("keep_one", R, P)),
    (I, P, "keep_one", ("retype", R, I)), (S0, S1, "all_to_all", ("all_to_all", S1, S0)),
    (AVG, I, "all_reduce", ("retype", I, R)), (AVG, S0, "reduce_scatter", ("all_gather", S0, R)),
    (MAX, I, "all_reduce", ("retype", I, R)), (PRODUCT, S1, "reduce_scatter", ("all_gather", S1, R)),
    (P, AVG, "scale", ("all_reduce", P, R)), (S1, P, "pad", ("slice", R, S1)),
]  # fmt: skip


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_transposes(axes):
    for src, dst, kind, back in TRANSPOSES:
        if len(axes) > 1 and not {S0, S1}.isdisjoint((src, dst)):
            continue  # steps over several axes split nothing
        given, made = (spec(*(t if a in axes else R for a in range(2))) for t in (src, dst))
        forward = step(given, made, *axes)
        assert (forward.kind, forward.src, forward.dst, forward.axes) == (kind, given, made, axes)
        backward = forward.transpose()
        start, end = (spec(*(t if a in axes else P for a in range(2))) for t in back[1:])
        assert (backward.kind, backward.src, backward.dst, backward.axes) == (back[0], start, end, axes)
        assert transpose((forward,)) == (backward,)


def test_a_sequence_is_transposed_backwards():
    steps = step(spec(P, S0), spec(I, S0)), step(spec(I, S0), spec(I, R), 1)
    assert [(s.kind, s.axes) for s in transpose(steps)] == [("reduce_scatter", (1,)), ("retype", (0,))]


def test_one_step_is_of_one_kind():
    with pytest.raises(ConversionError, match=r"no single step leads from float32.* to .*: it would mix"):
        step(spec(P, S0), spec(I, I), 0, 1)
    both = step(spec(MAX, MAX), spec(MAX, I), 0, 1)  # of an axis that keeps its type nothing is said
    assert (both.kind, both.axes) == ("all_reduce", (0, 1))
    assert step(spec(I, I), spec(R, R), 0, 1).kind == "retype"


def test_an_axis_of_one_rank_goes_along():
    """It has no type of its own: a gather over it and others is transposed as one over the others."""
    gather = step(spec(S0, I, S0), spec(R, I, I), 0, 2)
    back = gather.transpose()
    assert (gather.kind, gather.axes) == ("all_gather", (0, 2))
    assert (back.kind, back.axes) == ("reduce_scatter", (0,))
    assert (back.src, back.dst) == (gather.dst.dual(), gather.src.dual())


def test_a_step_touches_no_axis_that_is_undecided():
    left = step(spec(P, undecided_mask=2), spec(I, undecided_mask=2))
    assert left.dst.undecided_mask == 2
    for src, dst, axes in (
        (spec(I, undecided_mask=1), spec(S0), (0,)), (spec(S0), spec(I, undecided_mask=1), (0,)),
        (spec(I, I, undecided_mask=2), spec(R, I), (0,)),
        (spec(I, I, undecided_mask=2), spec(S0, I, undecided_mask=2), (1, 0)),
        (spec(I, I, undecided_mask=3), spec(I, I, undecided_mask=3), (0,)),
    ):  # fmt: skip
        with pytest.raises(ConversionError, match=r"the types of .* and .* must be decided before it"):
            between(src, dst, axes)


def test_whose_gradients_have_shares_that_hang_on_the_data():
    of = {"max": (MAX, I), "avg": (AVG, I), "product": (PRODUCT, I), "into a product": (I, PRODUCT)}
    assert {name: conversions.weighted(step(spec(a, R), spec(b, R), 0)) for name, (a, b) in of.items()} == {
        "max": True, "avg": True, "product": True, "into a product": True,
    }  # fmt: skip
    for a, b in ((P, I), (P, S0), (I, P), (S0, R), (I, R), (R, MAX)):
        assert not conversions.weighted(step(spec(a, R), spec(b, R), 0)), (a, b)


def test_what_a_step_says():
    sums, gather, cut = step(spec(P), spec(I)), step(spec(S0), spec(I)), step(spec(I), spec(S0))
    scatter, swap, most = step(spec(P), spec(S0)), step(spec(S0), spec(S1)), step(spec(MAX), spec(I))
    average, alone = step(spec(AVG), spec(I)), step(spec(I, I, P), spec(), 2)
    steps = (sums, gather, cut, scatter, swap, most, average, alone)
    assert [s.moves for s in steps] == [True, True, False, True, True, True, True, False]
    assert [s.adds for s in steps] == [True, False, False, True, False, False, True, False]
    assert [s.reduces for s in steps] == [True, False, False, True, False, True, True, True]
    assert [s.rounds for s in steps] == [True, False, False, True, False, False, True, False]
    assert step(spec(I, P, P), spec(), 1, 2).moves
    assert [op_of(sums.src, sums), op_of(sums.dst, sums), op_of(most.src, most)] == ["sum", None, "max"]
    assert repr(step(spec(P, P), spec(), 0, 1)) == f"all_reduce[a,b] {spec(P, P).layout!r} -> {spec().layout!r}"
    assert replicated(spec(P, S0, I), (0, 1)) is spec()
    assert replicated(spec(P, S0, I), (0,)) is spec(I, S0)
    with pytest.raises(AttributeError):
        sums.kind = "all_gather"
    assert len({sums, step(spec(P), spec(I))}) == 2  # by identity: hashed in each call of an op


def test_sums_in_a_wider_dtype_are_rounded_once():
    """Cast in front of the first sum and behind the last one; what is no sum is between or around them."""
    specs = [spec(S0, P), spec(I, P), spec(I, I), spec(I, S1)]
    for sums, dtype in ((F32, BF16), (F64, F32)):
        narrow = [s.with_(dtype=dtype, accumulate_dtype=sums) for s in specs]
        wide = [s.with_(dtype=sums) for s in narrow]
        steps = tuple(between(a, b, (n,)) for a, b, n in zip(narrow, narrow[1:], (0, 1, 1), strict=False))
        made = lowered(steps)
        assert [(s.kind, s.axes) for s in made] == [
            ("all_gather", (0,)), ("cast", ()), ("all_reduce", (1,)), ("cast", ()), ("slice", (1,)),
        ]  # fmt: skip
        assert [(s.src, s.dst) for s in made[1:4]] == [
            (narrow[1], wide[1]), (wide[1], wide[2]), (wide[2], narrow[2])
        ]  # fmt: skip
        assert (made[0], made[4]) == (steps[0], steps[2])
    several = [spec(*t).with_(dtype=BF16, accumulate_dtype=F32) for t in ((P, S0), (S1, S0), (S1, P), (S1, I), (I, I))]
    steps = tuple(between(a, b, (n,)) for a, b, n in zip(several, several[1:], (0, 1, 1, 0), strict=False))
    made = lowered(steps)
    assert [s.kind for s in made] == ["cast", "reduce_scatter", "pad", "all_reduce", "cast", "all_gather"]
    assert [s.src.dtype for s in made] == [BF16, F32, F32, F32, F32, BF16]
    assert [s.dst.dtype for s in made] == [F32, F32, F32, F32, BF16, BF16]
    assert made[2].axes == (1,)
    same = (step(spec(P), spec(I)),)
    assert lowered(same) == same
    kept = (step(spec(S0, accumulate_dtype=F64), spec(I, accumulate_dtype=F64)),)  # no sum, nothing to widen
    assert lowered(kept) == kept


def test_parts_travel_in_a_format_where_they_are_added():
    wires = (mw.Float8(128), BF16)
    sent = [spec(*t, comm_formats=wires) for t in ((P, S0), (I, S0), (I, I))]
    sums, gather = between(sent[0], sent[1], (0,)), between(sent[1], sent[2], (1,))
    made = lowered((sums, gather))
    assert [(s.kind, s.axes, s.src, s.dst) for s in made] == [
        ("wire_all_reduce", (0,), sent[0], sent[1]), ("all_gather", (1,), sent[1], sent[2]),
    ]  # fmt: skip
    assert [s.travels for s in (sums, gather, *made)] == [F32, F32, wires[0], F32]
    assert [s.rounds for s in (sums, *made)] == [True, False, False]
    assert made[0].adds
    assert made[0].reduces
    assert made[0].moves
    assert lowered((between(spec(MAX, comm_formats=wires), spec(I, comm_formats=wires), (0,)),))[0].kind == "all_reduce"
    assert lowered((between(spec(P), spec(S0), (0,)),))[0].travels is F32
    scatter = between(spec(P, comm_formats=wires), spec(S0, comm_formats=wires), (0,))
    assert lowered((scatter,))[0].kind == "wire_reduce_scatter"


def test_what_is_gathered_may_travel_in_a_format():
    gather, cut = step(spec(S0), spec(I)), step(spec(I), spec(S1))
    made = gathered_as((gather, cut), BF16)
    assert made[1] is cut
    assert (made[0].kind, made[0].axes, made[0].dst) == ("wire_all_gather", (0,), gather.dst)
    assert made[0].src is gather.src.with_(comm_formats=(BF16, None))
    assert made[0].travels is BF16
    assert not made[0].adds
    assert isinstance(made[0], ConversionStep)
    assert conversions.lowered(made) == made
