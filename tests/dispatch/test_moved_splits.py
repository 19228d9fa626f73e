"""Splits that an op cannot keep: joins and views hand them to another dim; what only lends its shape stays as it is."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from tests.support.compare import FOUR, GRID, S0, S1, P, R, on_ranks, plain, ramp

S2 = mw.Shard(2)


def spec(shape, *p, mesh=FOUR):
    return mw.Spec(shape, torch.float32, mw.Layout(mesh, p, ndim=len(shape)))


def asked(op, *args):
    found = mw.infer_forward(op, *args)
    return [s.layout.placements for s in found.inputs], found.outputs[0].layout.placements


def test_a_join_along_a_split_dim_sends_nothing():
    x = spec((8, 16), S0)
    assert asked("cat", [x, x], 0) == ([(S0,), (S0,)], (mw.Shard(0, blocks=(8, 8)),))  # each rank has parts of both
    assert asked("stack", [x, x], 0) == ([(S0,), (S0,)], (S1,))


def test_a_view_that_cannot_keep_a_split_is_an_all_to_all():
    x = spec((8, 16), S0)
    assert asked("cat", [x, x], 1) == ([(S0,), (S0,)], (S0,))  # may stay
    assert asked("flatten", spec((8, 4, 4), S1), 0, 1) == ([(S0,)], (S0,))
    assert asked("expand", spec((1, 16), S0), (3, 16)) == ([(S1,)], (S1,))


def test_only_where_it_is_cut_evenly_and_nothing_is_computed():
    assert asked("flatten", spec((6, 4, 6), S1), 0, 1)[1] == (R,)
    assert asked("cummax", spec((8, 16), S1), 1)[1] == (R,)
    assert asked("flatten", spec((7, 4, 6), S1, S2, mesh=GRID), 0, 1)[1] == (R, S1)


def test_of_equals_fewer_axes_share_a_dim_then_the_leftmost_stays():
    x, y = spec((8, 16), S0, S0, mesh=GRID), spec((8, 16), S1, S0, mesh=GRID)
    assert asked("add", x, y)[1] == (S1, S0)
    x, y = spec((8, 16, 4), S2, S1, mesh=GRID), spec((8, 16, 4), R, S0, mesh=GRID)
    assert asked("add", x, y)[1] == (S2, S1)


@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (2, 8)], ids=["even", "uneven", "empty"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.cat([x, y, x], 1),
        lambda x, y: torch.stack([x, y]).flatten(1),
        lambda x, y: (x * 2).flatten() * y.flatten(),
        lambda x, y: x[:1].expand_as(y) * y,
        lambda x, y: torch.ones_like(x) * y + torch.full_like(y, 2.0) * x,
    ],
    ids=["cat0", "cat1", "stack-flatten", "flatten", "expand_as", "like"],
)
@pytest.mark.parametrize("places", [(S0, S0), (S1, S0), (R, S0), (P, S1)], ids=str)
def test_values_and_gradients(shape, fn, places):
    x, y = ramp(*shape), ramp(*shape) + 1

    def single():
        a, b = (t.clone().requires_grad_() for t in (x, y))
        out = fn(a, b)
        out.square().sum().backward()
        return out.detach(), a.grad, b.grad

    def ranks():
        a, b = (mw.shard_tensor(t, FOUR, [R]) for t in (x, y))
        a, b = (mw.reshard(t, [p]).detach().requires_grad_() for t, p in zip((a, b), places, strict=True))
        out = fn(a, b)
        out.square().sum().backward()
        return plain(out), plain(a.grad), plain(b.grad)

    expected = single()
    for got in on_ranks(ranks):
        for one, want in zip(got, expected, strict=True):
            torch.testing.assert_close(one, want)


def test_what_only_lends_its_shape_is_neither_moved_nor_reduced():
    def ranks():
        pending = mw.from_local(torch.randn(4, 3), FOUR, [P])
        split = mw.shard_tensor(torch.zeros(4, 3), FOUR, [S0])
        with mw.explicit():
            ones = torch.ones_like(pending)
            threes = torch.full_like(pending, 3.0, dtype=torch.float64)
            row = mw.shard_tensor(ramp(1, 3), FOUR, [R]).expand_as(split)
        return ones.placements, plain(ones), plain(threes), row.placements, plain(row)

    for kept, ones, threes, placed, row in on_ranks(ranks):
        assert kept == (R,)
        assert placed == (S0,)
        assert torch.equal(ones, torch.ones(4, 3))
        assert torch.equal(threes, torch.full((4, 3), 3.0, dtype=torch.float64))
        assert torch.equal(row, ramp(1, 3).expand(4, 3))
