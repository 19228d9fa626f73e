"""``mw.At``: all on one rank of an axis, nothing on the others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright import collective
from meshwright.errors import LayoutError
from meshwright.layout import placement_from, spec_data, spec_from
from meshwright.ranks import runtime
from meshwright.testing import check_conversion
from tests.support.processes import run_processes

MESH = mw.Mesh({"pp": 3, "dp": 2})
TYPES: list[tuple[Any, int]] = [
    (mw.At(0), 0), (mw.At(2), 0), (mw.Replicate(), 0), (mw.Replicate(), 1), (mw.Partial(), 0), (mw.Shard(0), 0),
    (mw.Shard(1), 0),
]  # fmt: skip


def spec(*types: tuple[Any, int]) -> mw.Spec:
    reduced = sum(r << a for a, (_, r) in enumerate(types))
    return mw.Spec((5, 4), torch.float64, mw.Layout(MESH, [p for p, _ in types]), reduced)


@pytest.mark.parametrize("beside", [(mw.Replicate(), 0), (mw.Shard(0), 0), (mw.Partial(), 0), (mw.At(1), 0)], ids=str)
def test_conversions_and_their_transposes(beside: tuple[Any, int]) -> None:
    for a, b in itertools.product(TYPES, TYPES):
        if isinstance(a[0], mw.At) or isinstance(b[0], mw.At):
            check_conversion(spec(a, beside), spec(b, beside))
            check_conversion(spec(a, beside), spec(b, (mw.Replicate(), 0)))


def test_what_moves() -> None:
    """What is whole everywhere is cut without a word, and what is at one rank is broadcast."""

    def run() -> Any:
        x = mw.shard_tensor(torch.arange(20.0).view(5, 4), MESH, {})
        with collective.counting() as cut:
            held = mw.reshard(x, {"pp": mw.At(1)})
        with collective.counting() as back:
            assert torch.equal(mw.reshard(held, {"pp": mw.Replicate()}).to_local(), x.to_local())
        return tuple(held.to_local().shape), dict(cut.kinds), dict(back.kinds)

    made = mw.simulate(run, MESH)
    assert [m[0] for m in made] == [(0, 4), (0, 4), (5, 4), (5, 4), (0, 4), (0, 4)]
    assert all(m[1:] == ({}, {"all_gather": 1}) for m in made)


def broadcast() -> Any:
    mesh = mw.init_mesh({"pp": 2})
    found = []
    for dtype in (torch.float32, torch.bool, torch.bfloat16, torch.int64):
        value = (torch.arange(12).view(3, 4) % 2).to(dtype)
        x = mw.shard_tensor(value, mesh, {"pp": mw.At(1)})
        rows = mw.reshard(x, {"pp": mw.Shard(0)})
        found.append(torch.equal(mw.unshard(x), value) and torch.equal(mw.unshard(rows), value))
        found.append(tuple(x.to_local().shape) == ((3, 4) if runtime.RT.rank else (0, 4)))
    return found


@pytest.mark.processes
def test_real_processes() -> None:
    assert all(all(found) for found in run_processes(broadcast, 2, timeout=60))


def test_what_users_do_with_one() -> None:
    """Ops see it whole, and what is written to it is written where it is."""
    value = torch.arange(1.0, 13).view(6, 2)

    def run() -> None:
        x = mw.shard_tensor(value, MESH, {"pp": mw.At(1), "dp": mw.Shard(0)})
        assert x.shape == value.shape
        assert x.placements == (mw.At(1), mw.Shard(0))
        p = torch.nn.Parameter(x)
        (p @ mw.shard_tensor(torch.ones(2, 3), MESH, {})).square().sum().backward()
        q = torch.nn.Parameter(value.clone())
        (q @ torch.ones(2, 3)).square().sum().backward()
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(mw.unshard(p.grad), q.grad)
        with torch.no_grad():
            p.mul_(2)
            p[1] = 7.0
            p.copy_(p + 1)
        want = value * 2
        want[1] = 7.0
        assert torch.equal(mw.unshard(p.detach()), want + 1)
        assert p.placements == (mw.At(1), mw.Shard(0))
        back = mw.from_local(x.to_local(), MESH, x.placements)
        assert back.shape == value.shape
        assert torch.equal(mw.unshard(back), want + 1)  # it is the same memory
        drawn = mw.sharded(torch.ones, (4, 2), MESH, {"pp": mw.At(2)})
        assert drawn.sum().item() == 8.0

    torch.manual_seed(0)
    mw.simulate(run, MESH)
    mw.simulate(run, MESH, check=True)


def test_as_data_and_as_text() -> None:
    layout = mw.Layout(MESH, {"pp": mw.At(1), "dp": mw.Shard(0)})
    made = mw.Spec((4, 2), torch.float32, layout)
    assert spec_from(spec_data(made), MESH) is made
    assert placement_from(repr(mw.At(1))) == mw.At(1)
    assert layout.dims == {0: ("dp",)}
    assert "rank 0 (pp0,dp0)  [0:0, :] (empty)" in layout.picture((4, 2))
    assert "rank 3 (pp1,dp1)  [2:4, :]" in layout.picture((4, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mw.At(-1), "mw.At: index=-1, expected the index of a rank"),
        (lambda: mw.At(True), "mw.At: index=True, expected the index of a rank"),
        (lambda: mw.Layout(MESH, {"pp": mw.At(3)}), r"At\(3\) on axis 'pp', which has 3 ranks, from 0"),
        (lambda: mw.Layout(MESH, {"pp": mw.At(1)}, ndim=0), "a tensor without dims: a number is on all ranks"),
        (lambda: mw.Layout(MESH, {"pp": mw.At(1)}).to_torch(), "torch's placements cannot express"),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_at_a_stage(stage: int, dim: int) -> None:
    """A fused projection that is split by its blocks: ranks of other stages have none of them."""
    mesh = mw.Mesh({"pp": 2, "tp": 2})
    layout = {"pp": mw.At(stage), "tp": mw.Shard(dim, blocks=(4, 2, 4))}
    t = torch.arange(100.0).view(10, 10)

    def run() -> list[torch.Tensor]:
        x = mw.shard_tensor(t, mesh, layout)
        return [mw.unshard(x), mw.unshard(mw.reshard(x, {"pp": mw.At(1 - stage), "tp": mw.Replicate()}))]

    for found in mw.simulate(run, mesh):
        assert all(torch.equal(value, t) for value in found)
