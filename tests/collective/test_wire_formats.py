"""Formats of wires, and sums on them: what arrives, within derived bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright import collective
from meshwright.collective.codec import encode
from meshwright.errors import CollectiveError, LayoutError, ShardError
from meshwright.layout import Wire, block_of, wire_bytes, wire_from, wire_name
from meshwright.ranks import runtime
from tests.support.wire_values import WIRES, bound, parts_of, summed, through, values

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

wires = st.sampled_from(WIRES)
sizes = st.sampled_from([0, 1, 2, 5, 127, 128, 129, 1000])


# -- what a wire does to values ---------------------------------------------------------------------------


@given(st.integers(0, 10**6), sizes, st.sampled_from([0.0, 3.0, 12.0, 40.0]), st.integers(-149, 100), wires)
@settings(max_examples=300, deadline=None)
def test_one_value_is_off_by_its_bound_at_most(seed: int, n: int, spread: float, power: int, wire: Wire) -> None:
    x = values(seed, n, min(spread, (127 - abs(power)) / 5)) * 2.0**power
    if wire is torch.float16:
        x = x.clamp(-65504, 65504)
    made = through(x, wire)
    assert bool((((made.double() - x.double()).abs() <= bound(x, wire)) | (x == made)).all())
    assert torch.equal(through(made, wire), made)  # what has travelled travels unchanged
    assert bool((made[x == 0] == 0).all())


@given(st.integers(0, 10**6), st.integers(1, 300), wires, st.sampled_from([math.inf, -math.inf, math.nan]))
@settings(max_examples=100, deadline=None)
def test_what_is_not_finite_arrives_so_and_nothing_else(seed: int, n: int, wire: Wire, odd: float) -> None:
    x = values(seed, n, 2.0)
    clean, at = through(x, wire), seed % n
    x[at] = odd
    made = through(x, wire)
    assert not math.isfinite(made[at])
    others = torch.arange(n) != at
    block = torch.arange(n) // block_of(wire) != at // block_of(wire)
    assert torch.equal(made[block], clean[block])
    assert made[others].isfinite().all()
    assert bool(((made - x)[others].double().abs() <= bound(torch.where(others, x, 0.0), wire)[others]).all())


def test_by_hand() -> None:
    x = torch.tensor([448.0, 1.0, -0.0009, 449.0, 0.0, 2.0**-140, 3.0e38, torch.inf])
    assert through(x[:3], mw.Float8(4)).tolist() == [448.0, 1.0, 0.0]  # below half of the least step
    assert through(x[3:4], mw.Float8(4)).tolist() == [448.0]  # of steps of 32
    assert encode(x[:3], mw.Float8(4)).tolist()[0] == 127  # 2 ** 0
    assert through(x[4:6], mw.Float8(4)).tolist() == [0.0, 0.0]
    assert through(x[6:7], mw.Float8(4))[0] == pytest.approx(3.0e38, rel=2**-4)
    assert not through(x[7:], mw.Float8(4)).isfinite().any()
    assert through(torch.full((3,), 3.4e38), BF16).isinf().all()  # as a cast has it


def test_names() -> None:
    for wire in WIRES:
        assert wire_from(wire_name(wire)) == wire
    for wrong in ("float32", "float8", "float8/x", ""):
        with pytest.raises(ValueError, match="no wire"):
            wire_from(wrong)


# -- sums -------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(2, 5), sizes, wires.filter(lambda w: w is not torch.float16))
@settings(max_examples=60, deadline=None)
def test_a_sum_is_within_its_bound_and_the_same_on_all_ranks(seed: int, ranks: int, n: int, wire: Wire) -> None:
    mesh, given = mw.Mesh({"dp": ranks}), parts_of(ranks, (n,), seed)

    def run() -> Any:
        me = runtime.RT.rank
        group = collective.group(mesh)
        return collective.wire_all_reduce(given[me], "sum", wire_name(wire), group)

    found = mw.simulate(run, mesh)
    want = summed(given, wire)
    for made in found:
        assert torch.equal(made, through(want, wire))  # bit by bit
    exact = torch.stack(given).double().sum(0)
    rounding = sum(p.double().abs() for p in given) * ranks * 2**-23
    once = sum(bound(p, wire) for p in given) + rounding
    assert bool(((want.double() - exact).abs() <= once).all())
    assert bool(((found[0].double() - exact).abs() <= once + bound(want, wire)).all())


@pytest.mark.parametrize("wire", WIRES, ids=wire_name)
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_other_lengths_and_none(wire: Wire, dim: int) -> None:
    mesh, lengths = mw.Mesh({"dp": 3}), [4, 3, 0]
    given = parts_of(3, (7, 7), 5)

    def run() -> Any:
        me, group = runtime.RT.rank, collective.group(mesh)
        with collective.counting() as counts:
            made = collective.wire_reduce_scatter(given[me], "sum", dim, lengths, wire_name(wire), group)
        return made, counts.table

    for me, (made, counts) in enumerate(mw.simulate(run, mesh)):
        chunks = [p.split(lengths, dim)[me].contiguous() for p in given]
        assert torch.equal(made, summed(chunks, wire))
        sent = sum(wire_bytes(wire, 7 * n) for n in lengths)
        assert counts == {("wire_reduce_scatter", ("dp",)): [1, 2 * sent // 3]}


def test_what_no_wire_carries() -> None:
    def run() -> None:
        group = collective.group(mw.Mesh({"dp": 2}))
        with pytest.raises(CollectiveError, match="only a sum"):
            collective.wire_all_reduce(torch.ones(2), "max", "bfloat16", group)
        with pytest.raises(CollectiveError, match="int64"):
            collective.wire_all_reduce(torch.ones(2, dtype=torch.int64), "sum", "bfloat16", group)

    mw.simulate(run, mw.Mesh({"dp": 2}))


def test_words_of_precision() -> None:
    for wrong in (torch.float32, torch.float8_e4m3fn, "float8", 8):
        with pytest.raises(ShardError, match="grad_comm="):
            mw.Precision(grad_comm=wrong)  # type: ignore[arg-type]
    for block in (0, True, 1 << 20, 2.0):
        with pytest.raises(LayoutError, match="block="):
            mw.Float8(block)  # type: ignore[arg-type]
