"""Plans as values: steps and bytes, by hand.  No ranks: ``test_convert.py`` runs them."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from meshwright.errors import ConversionError
from meshwright.layout import Layout, Marks, Partial, Replicate, Shard, Spec, marked
from meshwright.ranks import runtime
from meshwright.resharding.conversions import gathered_as
from meshwright.resharding.cost import bytes_of
from meshwright.resharding.planner import in_dtype, on_one_axis, plan

MESH = mw.Mesh({"a": 2, "b": 3})
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
# A type of one axis: its placement, and of a replicated one whether its gradient is Partial.
I, R, P = (Replicate(), 0), (Replicate(), 1), (Partial(), 0)  # noqa: E741
MAX, AVG = (Partial("max"), 0), (Partial("avg"), 0)
S0, S1 = (Shard(0), 0), (Shard(1), 0)


def spec(*types, shape=(12, 12), dtype=F32, mesh=MESH, order=None, **more):
    reduced = sum(r << a for a, (_, r) in enumerate(types))
    return Spec(shape, dtype, Layout(mesh, [p for p, _ in types], ndim=len(shape), order=order), reduced, **more)


def told(made):
    """A plan in short: ``"all_reduce ab"``, ... and its bytes, forward and backward."""
    steps = ", ".join(f"{s.kind} {''.join(made.src.mesh.axes[a] for a in s.axes)}" for s in made.steps)
    return steps, round(made.forward_bytes, 2), round(made.backward_bytes, 2)


def test_a_plan_knows_of_shares():
    assert plan(spec(MAX, S0), spec(I, S0)).weighted
    assert not plan(spec(P, S0), spec(I, S0)).weighted


PRICES = [
    (P, I, (2, 0)), (P, S0, (1, 1)), (S0, I, (1, 0)), (S0, R, (1, 1)), (S0, S1, (0.5, 0.5)), (I, R, (0, 2)),
    (I, S0, (0, 1)), (R, S0, (0, 0)), (I, I, (0, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("src", "dst", "expected"), PRICES)
def test_prices_on_one_axis(src, dst, expected):
    """In gathered bytes times (n-1)/n, forward and backward; a dim that moves sends its part."""
    given = [(p, bool(r)) for p, r in (src, dst)]
    assert on_one_axis(*given, 2, 1.0) == pytest.approx(expected)


# Of 12 x 12 float32, 576 bytes, on 2 x 3 ranks: a way, and what each rank sends both ways.
WAYS = [
    ((P, P), (I, I), "all_reduce ab", 2 * 576 * 5 / 6, 0),
    ((P, P), (R, R), "all_reduce ab", 960, 960),
    ((P, P), (S0, S1), "reduce_scatter b, reduce_scatter a", 576 * 2 / 3 + 192 / 2, 480),
    ((P, P), (S0, S0), "reduce_scatter a, reduce_scatter b", 576 / 2 + 288 * 2 / 3, 480),
    ((I, I), (R, R), "retype ab", 0, 960),
    ((S0, S0), (I, I), "all_gather b, all_gather a", 480, 0),
    ((S0, S0), (S0, I), "all_gather b", 192, 0),
    ((S0, S0), (I, S0), "all_to_all b, all_gather a, all_to_all b", 64 + 96 + 128, 64 + 128),
    ((S0, S1), (S1, S0), "all_gather a, all_to_all b, slice a", 96 + 128, 224),
    ((P, S0), (S0, P), "all_reduce a, pad b, slice a", 192, 192),
    ((R, P), (R, R), "slice a, all_reduce b, all_gather a", 288 * 4 / 3 + 288, 672),
    ((I, P), (R, R), "slice a, all_reduce b, all_gather a", 672, 960),
    ((I, P), (I, R), "slice a, all_reduce b, all_gather a", 672, 672),
    ((S0, AVG), (S0, I), "all_reduce b", 384, 0),
    ((MAX, S1), (I, S1), "all_reduce a", 192, 0),
]


def test_ways():
    for src, dst, *expected in WAYS:
        made = plan(spec(*src), spec(*dst))
        assert told(made) == (expected[0], round(expected[1], 2), round(expected[2], 2)), (src, dst)
        assert made.bytes == pytest.approx(expected[1] + expected[2])
        assert (made.moves, made.free) == (expected[1] > 0, expected[0].startswith("retype"))
        assert (made.src, made.dst) == (made.steps[0].src, made.steps[-1].dst) == (spec(*src), spec(*dst))
        assert all(a.dst is b.src for a, b in zip(made.steps, made.steps[1:], strict=False))


def test_a_slice_is_neither_free_nor_moves():
    made = plan(spec(R, I), spec(S0, I))
    assert (made.moves, made.free, told(made)) == (False, False, ("slice a", 0, 0))


def test_dims_that_neither_side_splits_are_split_on_the_way_where_they_are_long():
    for shape, dim in (((6, 6), 0), ((5, 6), 1), ((5, 7, 7), 1), ((5, 6, 3), 1)):
        made = plan(spec(I, P, shape=shape), spec(R, I, shape=shape))
        assert told(made)[0] == "slice a, all_reduce b, all_gather a"
        assert made.steps[0].dst.layout.placements[0] == Shard(dim)
    assert told(plan(spec(I, P, shape=(5, 5)), spec(R, I, shape=(5, 5))))[0] == "retype a, all_reduce b"
    # Where one side splits the only long dim there is none to spare.
    made = plan(spec(P, S0, shape=(12, 5)), spec(S0, R, shape=(12, 5)))
    assert all(s.dst.layout.placements[1] != Shard(1) for s in made.steps)
    long = plan(spec(P, S0, shape=(12, 12)), spec(S0, R, shape=(12, 12)))
    assert told(long)[0] == "all_to_all b, reduce_scatter a, all_gather b"
    assert long.bytes < plan(spec(P, S0, shape=(36, 4)), spec(S0, R, shape=(36, 4))).bytes


def test_sums_in_a_wider_dtype_count_as_wide():
    ways = {
        None: ("reduce_scatter a, all_reduce b", 144 + 192, 144),
        F32: ("reduce_scatter a, all_reduce b", 288 + 384, 144),
        F64: ("reduce_scatter a, reduce_scatter b, all_gather b", 4 * (144 + 96) + 96, 240),
    }
    for sums, way in ways.items():
        made = plan(spec(P, P, dtype=BF16, accumulate_dtype=sums), spec(S0, I, dtype=BF16, accumulate_dtype=sums))
        assert told(made) == way, sums
    # The gradient is summed in that too; and what one side says counts for both.
    for src, dst in ((F32, F32), (F32, None), (None, F32)):
        made = plan(spec(P, S0, dtype=BF16, accumulate_dtype=src), spec(S0, R, dtype=BF16, accumulate_dtype=dst))
        assert told(made) == ("all_to_all b, reduce_scatter a, all_gather b", 256, 304)
        assert made.src.accumulate_dtype is made.dst.accumulate_dtype is F32
    there, back = spec(P, S0, dtype=BF16, accumulate_dtype=F32), spec(S0, P, dtype=BF16, accumulate_dtype=F32)
    assert told(plan(there, back)) == ("all_to_all b, reduce_scatter a, pad b", 160, 112)


def test_sums_in_a_format_of_one_way():
    """Values of 2 bytes, summed in 8, that travel in 2 one way, the other, or both."""
    for wires, src, dst, way in (
        ((BF16, None), (P, P), (S0, I), ("reduce_scatter a, all_reduce b", 336, 144)),
        ((None, BF16), (P, P), (S0, I), ("reduce_scatter a, reduce_scatter b, all_gather b", 1056, 240)),
        ((BF16, BF16), (P, S0), (S0, P), ("all_reduce a, pad b, slice a", 96, 96)),
        ((None, BF16), (P, S0), (S0, P), ("reduce_scatter a, all_gather a, pad b, slice a", 240, 96)),
        ((BF16, None), (P, R), (R, R), ("reduce_scatter a, all_gather a", 288, 720)),
        ((None, BF16), (P, R), (R, R), ("slice b, reduce_scatter a, all_gather a, all_gather b", 432, 288)),
        ((BF16, BF16), (P, R), (R, R), ("all_reduce a", 288, 288)),
    ):
        made = plan(*(spec(*t, dtype=BF16, accumulate_dtype=F64, comm_formats=wires) for t in (src, dst)))
        assert told(made) == way, (wires, src, dst)


def test_three_axes():
    cube = mw.Mesh({"a": 2, "b": 2, "c": 2})
    assert told(plan(spec(P, P, S0, mesh=cube), spec(I, I, S0, mesh=cube))) == ("all_reduce ab", 432, 0)
    assert told(plan(spec(I, I, I, mesh=cube), spec(S0, S0, S0, mesh=cube))) == ("slice a, slice b, slice c", 0, 504)


def test_a_format_is_counted_and_is_no_reason_to_sum():
    float8 = mw.Float8(128)  # 129 bytes for 128 values
    for wires, forward, backward in (
        ((None, None), 672, 288), ((float8, None), 672 * 129 / 512, 288), ((BF16, torch.float16), 336, 288),
        ((None, BF16), 672, 288),
    ):  # fmt: skip
        made = plan(spec(P, P, comm_formats=wires), spec(S0, I, comm_formats=wires))
        assert told(made) == ("reduce_scatter a, all_reduce b", round(forward, 2), backward)
        made = plan(spec(P, R, comm_formats=wires), spec(R, S1, comm_formats=wires))
        assert told(made)[0] == "slice b, all_reduce a"
    assert told(made) == ("slice b, all_reduce a", 192, 96)
    made = plan(spec(P, P, comm_formats=(BF16, None)), spec(S0, I))  # of the value as it is given
    assert made.dst.comm_formats == made.src.comm_formats == (BF16, None)
    assert plan(spec(P, P), spec(S0, I, comm_formats=(BF16, None))).dst.comm_formats == (None, None)


def test_what_is_there_already_needs_nothing():
    here = spec(S0, R)
    for there in (here, *(marked(here, m) for m in (Marks(copied=True), Marks(stored=True), Marks(known=here)))):
        for made in (plan(here, there), plan(there, here)):
            assert told(made) == ("", 0, 0)
            assert made.src is made.dst is here
            assert (made.moves, made.free, made.bytes) == (False, True, 0)
    made = plan(marked(spec(P, P), Marks(known=spec(I, I))), marked(spec(I, I), Marks(copied=True)))
    assert (made.src, made.dst) == (spec(P, P), spec(I, I))


def test_what_no_plan_is_for():
    with pytest.raises(ConversionError, match=r"cannot convert float32\[12, 12\].* into float32\[12, 11\]"):
        plan(spec(P, P), spec(P, P, shape=(12, 11)))
    with pytest.raises(ConversionError, match=r"cannot convert .* on .* into .* on "):
        plan(spec(P, P), spec(P, P, mesh=mw.Mesh({"a": 3, "b": 2})))
    # By way of a replicated value: a maximum and a sum side by side would not commute.
    assert told(plan(spec(MAX, I), spec(I, P)))[0].split(", ")[-1] == "keep_one b"
    assert told(plan(spec(I, P), spec(MAX, I)))[0].split(", ")[-1] == "pad a"
    assert told(plan(spec(P, I), spec(MAX, I)))[0] == "reduce_scatter a, pad a"


def test_what_is_undecided_is_left_alone():
    src, dst = spec(P, I, undecided_mask=2), spec(I, I, undecided_mask=2)
    made = plan(src, dst)
    assert told(made) == ("all_reduce a", 576, 0)  # and not by way of a part of it on b
    assert (made.src, made.dst) == (src, dst)
    assert made.ends == (spec(P, I), spec(I, I))
    assert plan(spec(P, R), spec(I, R)).ends != plan(spec(P, R), spec(R, R)).ends
    assert plan(spec(I, R), spec(I, I)).ends == (spec(I, R), spec(I, I))
    assert told(plan(spec(I, P), spec(I, R)))[0] == "slice a, all_reduce b, all_gather a"
    assert told(plan(spec(I, P, undecided_mask=1), spec(I, R, undecided_mask=1))) == ("all_reduce b", 768, 768)
    turned = mw.Mesh({"a": 3, "b": 2})
    assert told(plan(spec(P, I, mesh=turned), spec(R, I, mesh=turned)))[0] == "slice b, all_reduce a, all_gather b"
    left = plan(spec(P, I, mesh=turned, undecided_mask=2), spec(R, I, mesh=turned, undecided_mask=2))
    assert told(left) == ("all_reduce a", 768, 768)
    assert plan(spec(R, P), spec(I, P)).ends == (spec(R, P), spec(I, P))
    ways = {plan(spec(S0, t), spec(I, t)).ends for t in (I, R)}
    assert ways == {(spec(S0, I), spec(I, I))}  # of an axis that no step touches any type is right
    for other in (spec(I, I), spec(I, R), spec(I, S0)):  # undecided in one of the two: of a value, as if invariant
        for a, b in ((src, other), (other, src)):
            assert plan(a, b).ends == plan(a.decided(), b.decided()).ends


def test_axes_that_are_spared_are_touched_where_they_change_alone():
    with runtime.preferring({}, 0b01):
        assert told(plan(spec(R, P), spec(R, R))) == ("all_reduce b", 768, 768)
        assert told(plan(spec(S0, P), spec(I, R)))[0] == "all_reduce b, all_gather a"  # a changes
    with runtime.preferring({}, 0b10):
        assert told(plan(spec(R, P), spec(R, R)))[0] == "slice a, all_reduce b, all_gather a"


def test_only_the_minor_axis_of_a_dim_leaves_it():
    ba = {0: ("b", "a")}
    assert told(plan(spec(S0, S0, order=ba), spec(I, S0)))[0] == "all_gather a"
    assert told(plan(spec(S0, S0), spec(S0, I)))[0] == "all_gather b"
    swapped = plan(spec(S0, S0, order=ba), spec(S0, S0))
    assert told(swapped) == ("all_gather a, pad b, slice a, reduce_scatter b", 96 + 192, 288)
    assert told(plan(spec(I, I), spec(S0, S0, order=ba)))[0] == "slice b, slice a"


def test_the_same_of_another_dtype_and_with_a_format():
    given = plan(spec(P, S0, dtype=BF16, accumulate_dtype=F32), spec(S0, R, dtype=BF16, accumulate_dtype=F32))
    made = in_dtype(given, F64)
    assert (made.src, made.dst) == (spec(P, S0, dtype=F64), spec(S0, R, dtype=F64))
    assert made.forward_bytes == 4 * 208
    gather = plan(spec(S0, S0), spec(I, R))
    sent = gathered_as(gather.steps, BF16)
    assert [s.kind for s in sent] == ["wire_all_gather", "wire_all_gather"]
    assert bytes_of(sent) == gather.forward_bytes / 2
