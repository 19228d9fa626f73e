"""Making, moving and reading distributed tensors: values, aliasing, gradients, other libraries' tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import meshwright as mw
from meshwright import collective
from meshwright.errors import LayoutError, MeshError
from meshwright.ranks import runtime
from tests.support.compare import FOUR, GRID, S0, S1, P, R, fresh, on_ranks, plain, ramp, same
from tests.support.processes import run_processes
from tests.support.strategies import layouts, meshes, numbered, shapes

LAYOUTS = [(R,), (S0,), (S1,), (P,)]


def here(mesh=FOUR):
    return mesh.coordinate(runtime.RT.rank)


# ------------------------------------------------------------------------------------------ shard_tensor


@settings(max_examples=60, deadline=None)
@given(mesh=meshes(), shape=shapes(), data=st.data())
def test_shard_tensor_and_unshard(mesh, shape, data):
    layout = data.draw(layouts(mesh, len(shape)))
    value = numbered(shape)

    def run():
        x = mw.shard_tensor(value, mesh, layout)
        assert x.shape == value.shape
        assert x.spec.layout == layout
        assert tuple(x.to_local().shape) == layout.local_shape(shape, here(mesh))
        return mw.unshard(x)

    for got in mw.simulate(run, mesh):
        assert torch.equal(got, value)


def test_shard_tensor_makes_a_leaf_that_is_a_copy():
    value = ramp(8, 4).requires_grad_()

    def run():
        for p in LAYOUTS:
            x = mw.shard_tensor(value, FOUR, p)
            assert x.is_leaf
            assert x.requires_grad
            assert x.to_local().is_contiguous()
            with torch.no_grad():
                x.zero_()
            x.sum().backward()
            assert value.grad is None
            assert torch.equal(value, ramp(8, 4))
        assert isinstance(mw.shard_tensor(nn.Parameter(ramp(2)), FOUR, (R,)), nn.Parameter)
        assert not mw.shard_tensor(ramp(2), FOUR, (R,)).requires_grad

    on_ranks(run)


def test_shard_tensor_with_an_order_of_axes():
    def run():
        x = mw.shard_tensor(torch.arange(8.0), GRID, [S0, S0], order={0: ["tp", "dp"]})
        y = mw.shard_tensor(torch.arange(8.0), GRID, [S0, S0])
        return x.to_local().tolist(), (x + y).tolist(), mw.reshard(x, [S0, S0]).to_local().tolist()

    got = on_ranks(run, GRID)
    assert [g[0] for g in got] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert [g[2] for g in got] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(g[1] == [2.0 * i for i in range(8)] for g in got)


# ------------------------------------------------------------------------------------------ from_local


@settings(max_examples=60, deadline=None)
@given(mesh=meshes(), shape=shapes(), data=st.data())
def test_from_local_finds_the_global_shape(mesh, shape, data):
    layout = data.draw(layouts(mesh, len(shape)))
    value = numbered(shape)

    def run():
        local = mw.shard_tensor(value, mesh, layout).to_local()
        x = mw.from_local(local, mesh, layout)
        assert x.shape == value.shape
        assert x.to_local().data_ptr() == local.data_ptr()
        return mw.unshard(x)

    for got in mw.simulate(run, mesh):
        assert torch.equal(got, value)


def test_from_local_of_partial_parts():
    """Users may make Partial tensors: the value is the reduction of what the ranks bring."""
    parts = torch.stack([ramp(5, 2) * (r + 1) - r for r in range(4)])
    want = {"sum": parts.sum(0), "avg": parts.mean(0), "max": parts.amax(0), "min": parts.amin(0),
            "product": parts.prod(0)}  # fmt: skip

    def run():
        made = {}
        for op in want:
            x = mw.from_local(parts[runtime.RT.rank], FOUR, [mw.Partial(op)])
            made[op] = [mw.unshard(x), mw.unshard(x * 1.0 if op in ("sum", "avg") else x.t()), mw.unshard(x.tanh())]
        flags = torch.tensor([runtime.RT.rank == 1, True])
        made["any"] = mw.unshard(mw.from_local(flags, FOUR, [mw.Partial("any")]))
        made["all"] = mw.unshard(mw.from_local(flags, FOUR, [mw.Partial("all")]))
        return made

    for got in on_ranks(run):
        assert got.pop("any").tolist() == [True, True]
        assert got.pop("all").tolist() == [False, True]
        for op, (value, moved, changed) in got.items():
            torch.testing.assert_close(value, want[op])
            torch.testing.assert_close(moved, want[op] if op in ("sum", "avg") else want[op].t())
            torch.testing.assert_close(changed, want[op].tanh())


@pytest.mark.parametrize("p", LAYOUTS, ids=[repr(q[0]) for q in LAYOUTS])
def test_from_local_is_differentiable(p):
    """Gradients of locals: the own shard; the whole gradient where each rank brings the whole or a part of a sum."""
    value = ramp(8, 4)

    def run():
        local = mw.shard_tensor(value, FOUR, p).to_local().clone().requires_grad_()
        x = mw.from_local(local * 2.0, FOUR, p, shape=(8, 4))
        (x.tanh() * ramp(8, 4)).sum().backward()
        leaf = mw.shard_tensor(value, FOUR, p).requires_grad_()
        ((leaf * 2.0).tanh() * ramp(8, 4)).sum().backward()
        return plain(mw.from_local(local.grad, FOUR, [R] if p == (P,) else p, shape=(8, 4))), plain(leaf.grad)

    plainly = value.clone().requires_grad_()
    ((plainly * 2.0).tanh() * ramp(8, 4)).sum().backward()
    for local, leaf in on_ranks(run):
        torch.testing.assert_close(leaf, plainly.grad)
        torch.testing.assert_close(local, plainly.grad)


def test_from_local_of_a_leaf_gives_the_leaf_its_gradient():
    def run():
        local = torch.ones(2, 3).requires_grad_()
        x = mw.from_local(local, FOUR, [S0])
        (x * 3.0).sum().backward()
        return local.grad

    for grad in on_ranks(run):
        assert grad.tolist() == [[3.0] * 3] * 2


def test_to_local_shares_memory():
    def run():
        x = mw.shard_tensor(ramp(8, 4), FOUR, [S0])
        x.to_local().zero_()
        assert not x.any()
        assert type(x.to_local()) is torch.Tensor

    on_ranks(run)


# ------------------------------------------------------------------------------------------ sharded


@settings(max_examples=40, deadline=None)
@given(mesh=meshes(), shape=shapes(2, 9, 1), data=st.data())
def test_sharded_gives_the_same_values_for_every_layout(mesh, shape, data):
    layout = data.draw(layouts(mesh, len(shape), ops=()))

    def make(m, where):
        torch.manual_seed(11)
        return [
            mw.unshard(mw.sharded(f, shape, m, where, dtype=torch.float64))
            for f in (torch.randn, torch.rand, torch.ones)
        ]

    (one,) = mw.simulate(lambda: make(mw.Mesh({"x": 1}), ()), mw.Mesh({"x": 1}))
    for got in mw.simulate(lambda: make(mesh, layout), mesh):
        for a, b in zip(got, one, strict=True):
            assert torch.equal(a, b)


def test_sharded_flags():
    def run():
        x = mw.sharded(torch.zeros, (10, 4), FOUR, {"x": S0}, dtype=torch.float32, requires_grad=True)
        assert x.requires_grad
        assert x.is_leaf
        assert x.dtype == torch.float32
        return tuple(x.to_local().shape)

    assert on_ranks(run) == [(3, 4), (3, 4), (3, 4), (1, 4)]


# ------------------------------------------------------------------------------------------ reshard, unshard, constrain


@settings(max_examples=60, deadline=None)
@given(mesh=meshes([(4,), (2, 2), (3,), (2, 3)]), data=st.data())
def test_reshard_keeps_the_value_and_the_gradient(mesh, data):
    shape = data.draw(shapes(2, 7, 1))
    source, target = data.draw(layouts(mesh, len(shape))), data.draw(layouts(mesh, len(shape)))
    value = numbered(shape).requires_grad_()
    weight = numbered(shape, 3)
    (value.tanh() * weight).sum().backward()

    def run():
        x = mw.shard_tensor(value, mesh, source)
        y = mw.reshard(x, target)
        assert y.spec.layout == target
        (y.tanh() * weight).sum().backward()
        z = (x * 1.0).redistribute(target)  # DTensor's names
        assert z.spec.layout == target
        (g,) = torch.autograd.grad((z.full_tensor().tanh() * weight).sum(), x)
        return plain([y, x.grad, g])

    for y, first, second in mw.simulate(run, mesh):
        torch.testing.assert_close(y, value.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(first, value.grad)
        torch.testing.assert_close(second, value.grad)


def test_reshard_by_name_keeps_the_other_axes():
    def run():
        x = mw.shard_tensor(ramp(8, 4), GRID, {"dp": S0, "tp": S1})
        y = mw.reshard(x, {"tp": R})
        assert y.placements == (S0, R)
        assert mw.reshard(x, [R, S0]).placements == (R, S0)
        assert mw.reshard(x, {"dp": S0}) is x
        assert mw.reshard(x, {"dp": mw.Shard(-1), "tp": R}).placements == (S1, R)
        part = mw.reshard(x, {"tp": mw.Partial()})
        assert part.placements == (S0, mw.Partial())
        assert mw.reshard(part, {"dp": R}).placements == (R, mw.Partial())
        assert mw.reshard(part, {"dp": mw.Partial()}).spec.layout.partial == {0: "sum", 1: "sum"}
        turned = mw.reshard(x, [S0, S0], order={0: ["tp", "dp"]})
        assert turned.spec.layout.dims == {0: ("tp", "dp")}
        for y in (x, part, turned):
            assert torch.equal(mw.unshard(y), ramp(8, 4))
        both = mw.Layout(GRID, [mw.Partial(), mw.Partial()])
        assert both.without_partial() == mw.Layout(GRID)
        assert both.without_partial([1]).partial == {0: "sum"}

    on_ranks(run, GRID)


def test_reshard_does_not_alias_where_it_changes_anything():
    def run():
        for p in LAYOUTS:
            for q in LAYOUTS:
                if p != q:
                    x = mw.shard_tensor(ramp(8, 4), FOUR, p)
                    mw.reshard(x, q).zero_()
                    assert torch.equal(mw.unshard(x), ramp(8, 4))

    on_ranks(run)


def test_unshard_gives_every_rank_its_own():
    def run():
        x = mw.shard_tensor(ramp(8, 4), FOUR, [S0])
        y = mw.unshard(x)
        assert type(y) is torch.Tensor
        y.add_(runtime.RT.rank)
        assert torch.equal(mw.unshard(x), ramp(8, 4))
        assert mw.unshard(y) is y
        return y[0, 0].item()

    assert on_ranks(run) == [ramp(8, 4)[0, 0].item() + r for r in range(4)]


@pytest.mark.parametrize("placement", [S0, R, P], ids=["split", "whole", "parts"])
@pytest.mark.parametrize("grad", [False, True])
def test_unshard_is_a_snapshot_however_a_tensor_lies(placement, grad):
    def run():
        x = mw.shard_tensor(ramp(8, 4), FOUR, [placement]).requires_grad_(grad)
        y = mw.unshard(x)
        with torch.no_grad():
            x.add_(1)
        assert torch.equal(y.detach(), ramp(8, 4))
        assert y.requires_grad is grad

    on_ranks(run)


def test_constrain():
    def run(x):
        y = mw.constrain(x, [S1])
        assert not isinstance(y, mw.DistTensor) or y.placements == (S1,)
        assert isinstance(y, mw.DistTensor) or y is x
        return y, *(torch.autograd.grad((y * y).sum(), x) if x.requires_grad else ())

    for p in LAYOUTS:
        same(run, (ramp(8, 4), p))
        same(run, (ramp(8, 4).requires_grad_(), p))


def test_what_cannot_be():
    def run():
        x = mw.shard_tensor(ramp(8, 4), FOUR, [S0])
        with pytest.raises(LayoutError, match=r"Shard\(2\) on axis 'x': the tensor has 2 dims"):
            mw.shard_tensor(ramp(8, 4), FOUR, [mw.Shard(2)])
        with pytest.raises(LayoutError, match=r"Shard\(2\) on axis 'x'"):
            mw.reshard(x, [mw.Shard(2)])
        with pytest.raises(MeshError, match="unknown axis 'tp'"):
            mw.reshard(x, {"tp": S0})
        with pytest.raises(MeshError, match="unknown axis 'tp'"):
            mw.shard_tensor(ramp(8, 4), FOUR, {"tp": S0})
        with pytest.raises(LayoutError, match=r"shard_tensor takes a plain tensor; mw\.reshard changes the layout"):
            mw.shard_tensor(x, FOUR, [S1])
        with pytest.raises(LayoutError, match="nothing to split"):
            mw.shard_tensor(torch.tensor(1.0), FOUR, [S0])

    on_ranks(run)


def test_parts_of_other_sizes_are_refused_on_every_rank():
    def run():
        rows = 1 if runtime.RT.rank == 2 else 3
        with pytest.raises(LayoutError, match=r"rank 2 brought a part that does not fit") as caught:
            mw.from_local(torch.zeros(rows, 2), FOUR, [S0])
        assert "torch.chunk sizes" in str(caught.value)

    on_ranks(run)


# ------------------------------------------------------------------------------------------ torch's DTensor


def _dtensors() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = mw.init_mesh({"dp": 2, "tp": 2})
    value = ramp(7, 4)
    for p in ([S0, R], [S0, S1], [R, S1], [R, R], [P, S0], [S0, S0]):
        x = mw.shard_tensor(value, mesh, p)
        d = mw.to_dtensor(x)
        assert isinstance(d, DTensor)
        assert d.shape == x.shape
        assert d.to_local().data_ptr() == x.to_local().data_ptr() or not x.to_local().numel()
        torch.testing.assert_close(d.full_tensor(), value)
        y = mw.from_dtensor(d)
        assert y.placements == x.placements
        assert y.mesh == mesh
        assert y.to_local().data_ptr() == x.to_local().data_ptr() or not x.to_local().numel()
        torch.testing.assert_close(mw.unshard(y), value)
    device_mesh = mesh.device_mesh()
    d = distribute_tensor(value, device_mesh, [Shard(0), Replicate()])
    x = mw.from_dtensor(d, mesh)
    torch.testing.assert_close(mw.unshard(x), value)
    x.to_local().mul_(2.0)
    torch.testing.assert_close(d.full_tensor(), value * 2)
    part = DTensor.from_local(value / 2, device_mesh, [Partial(), Replicate()])
    torch.testing.assert_close(mw.unshard(mw.from_dtensor(part)), value)
    # Gradients pass through in both directions.
    leaf = mw.shard_tensor(fresh(value).requires_grad_(), mesh, [S0, R])
    (mw.to_dtensor(leaf * 2).to_local() ** 2).sum().backward()
    torch.testing.assert_close(mw.unshard(leaf.grad), value * 8)


@pytest.mark.processes
def test_dtensor_round_trips():
    run_processes(_dtensors, 4)


def test_values_are_made_without_communication():
    def run():
        with collective.counting() as counts:
            x = mw.shard_tensor(ramp(8, 4), FOUR, [S0], check=False)
            mw.reshard(mw.shard_tensor(ramp(8, 4), FOUR, [R], check=False), [S1])
            mw.from_local(x.to_local(), FOUR, [S0], shape=(8, 4), check=False)
            mw.sharded(torch.zeros, (8, 4), FOUR, [S0])
        return counts.total

    assert on_ranks(run) == [0] * 4
