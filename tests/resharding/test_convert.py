"""Conversions: the cheapest plan between any two layouts, its value, and its transpose."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright import collective
from meshwright.layout import Layout, Partial, Replicate, Shard, Spec
from meshwright.ranks import runtime
from meshwright.resharding import executor
from meshwright.resharding.conversions import transpose
from meshwright.resharding.planner import plan as make_plan
from tests.support.compare import laid

R = Replicate()


def types(ndim: int):
    """Every type of one axis: placement, and for Replicate whether its gradient is Partial."""
    return [(Replicate(), 0), (Replicate(), 1), (Partial(), 0), *[(Shard(d), 0) for d in range(ndim)]]


def specs(mesh: mw.Mesh, shape: tuple[int, ...], dtype=torch.float64) -> list[Spec]:
    made = {}
    for combo in itertools.product(types(len(shape)), repeat=mesh.ndim):
        mask = sum(r << a for a, (_, r) in enumerate(combo))
        spec = Spec(shape, dtype, Layout(mesh, [p for p, _ in combo]), mask)
        made[spec] = None
    return list(made)


def local_of(value: torch.Tensor, spec: Spec, seed: int) -> torch.Tensor:
    """A local part such that all parts make up ``value``; Partial parts are random and add up to it."""
    here = spec.mesh.coordinate(runtime.RT.rank)
    part = value
    for a, p in enumerate(spec.layout.placements):
        if isinstance(p, Partial):
            n = spec.mesh.sizes[a]
            weights = torch.rand(n, generator=torch.Generator().manual_seed(seed + a), dtype=value.dtype)
            part = part * (weights / weights.sum())[here[a]]
    for d, (lo, hi) in enumerate(spec.layout.local_bounds(spec.shape, here)):
        part = part.narrow(d, lo, hi - lo)
    return part.clone()


def dot(x: torch.Tensor, x_spec: Spec, y: torch.Tensor, y_spec: Spec) -> torch.Tensor:
    """<x, y> of a value and a cotangent: each pair of local parts contributes, replicas once."""
    here = x_spec.mesh.coordinate(runtime.RT.rank)
    total = (x * y).sum()
    for a, p in enumerate(x_spec.layout.placements):
        invariant = isinstance(p, Replicate) and not x_spec.grad_partial_mask >> a & 1
        if invariant and here[a]:
            total = total * 0
    return total


def check(src: Spec, dst: Spec, value: torch.Tensor, cotangent: torch.Tensor) -> None:
    plan = make_plan(src, dst)
    x = local_of(value, src, 3).requires_grad_()
    out = executor.apply(plan.steps, x)
    whole = make_plan(dst, Spec(dst.shape, dst.dtype, Layout(dst.mesh)))
    with torch.no_grad():
        assert torch.allclose(executor.apply(whole.steps, out), value), (src, dst, plan.steps)
    # Cotangents of replicated (invariant) types must be equal on all ranks; of the others they are per rank.
    y = local_of(cotangent, dst.grad(), 5)
    (back,) = torch.autograd.grad(out, x, y)
    group = collective.group(src.mesh, tuple(range(src.mesh.ndim)))
    left = collective.all_reduce(dot(out.detach(), dst, y, dst.grad()), "sum", group)
    right = collective.all_reduce(dot(x.detach(), src, back, src.grad()), "sum", group)
    assert torch.allclose(left, right), (src, dst, plan.steps, left, right)


@pytest.mark.parametrize(
    ("axes", "shape"),
    [({"x": 4}, (8, 4)), ({"x": 3}, (4, 2)), ({"x": 4}, (10, 3)), ({"x": 4}, (2, 5))],
    ids=["even", "uneven", "uneven-4", "empty"],
)
def test_every_pair_on_one_axis(axes, shape):
    mesh = mw.Mesh(axes)
    value, cotangent = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)

    def run():
        for src, dst in itertools.product(specs(mesh, shape), repeat=2):
            check(src, dst, value, cotangent)

    mw.simulate(run, mesh)


@pytest.mark.parametrize(
    ("axes", "shape"), [({"a": 2, "b": 2}, (5, 4)), ({"a": 2, "b": 3}, (7, 2))], ids=["2x2", "2x3"]
)
def test_every_pair_on_two_axes(axes, shape):
    mesh = mw.Mesh(axes)
    value, cotangent = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)

    def run():
        for src, dst in itertools.product(specs(mesh, shape), repeat=2):
            check(src, dst, value, cotangent)

    mw.simulate(run, mesh)


def test_second_derivatives_through_every_pair():
    """What a gradient is, is a value again: its own gradient needs its type."""
    mesh, x, w, v = mw.Mesh({"x": 3}), *torch.randn(3, 4, 2, dtype=torch.float64)
    placements = [Replicate(), Partial(), Partial("avg"), Shard(0), Shard(1)]

    def derivatives(x, through):
        (g,) = torch.autograd.grad((through(x * 1).sin() * w).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad((g.exp() * v).sum(), x, create_graph=True)
        return g, h, *torch.autograd.grad((h * h).sum(), x)

    want = derivatives(x.clone().requires_grad_(), lambda y: y)

    def run():
        found = []
        for src, dst in itertools.product(placements, repeat=2):
            leaf = laid(x.clone().requires_grad_(), mesh, [src])
            made = derivatives(leaf, lambda y, dst=dst: mw.reshard(y, [dst]))
            found.append(((src, dst), [mw.unshard(t).detach() for t in made]))
        return found

    for found in mw.simulate(run, mesh):
        for pair, made in found:
            for have, ref in zip(made, want, strict=True):
                torch.testing.assert_close(have, ref.detach(), msg=lambda m, pair=pair: f"{pair}: {m}")


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_orders_of_axes_on_one_dim(data):
    sizes = data.draw(st.sampled_from([(2, 2), (2, 3), (3, 2), (2, 2, 2)]))
    mesh = mw.Mesh({f"a{i}": n for i, n in enumerate(sizes)})
    shape = (data.draw(st.integers(0, 13)), data.draw(st.integers(1, 4)))

    def layout():
        placements = [data.draw(st.sampled_from([Shard(0), Shard(1), Replicate()])) for _ in sizes]
        order = {}
        for d in (0, 1):
            axes = [a for a, p in enumerate(placements) if p == Shard(d)]
            order[d] = data.draw(st.permutations(axes))
        return Layout(mesh, placements, order=order)

    src, dst = Spec(shape, torch.float64, layout()), Spec(shape, torch.float64, layout())
    value, cotangent = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    mw.simulate(lambda: check(src, dst, value, cotangent), mesh)


@pytest.mark.parametrize("op", ["avg", "max", "min", "product"])
@pytest.mark.parametrize("dst", [Replicate(), Shard(0)])
def test_other_reductions(op, dst):
    mesh = mw.Mesh({"x": 4})
    parts = torch.randn(4, 5, 3, dtype=torch.float64)
    parts[0, 0], parts[1, 1], parts[2, 1] = 0, 0, 0  # one zero among the parts, and two
    reduce = {"avg": lambda p: p.mean(0), "max": lambda p: p.amax(0), "min": lambda p: p.amin(0),
              "product": lambda p: p.prod(0)}[op]  # fmt: skip
    leaf = parts.clone().requires_grad_()
    want = reduce(leaf)
    weight = torch.randn(5, 3, dtype=torch.float64)
    (want * weight).sum().backward()

    def run():
        part = parts[runtime.RT.rank].clone().requires_grad_()
        x = mw.from_local(part, mesh, [Partial(op)])
        y = mw.reshard(x, [dst])
        (mw.unshard(y) * weight).sum().backward()
        return mw.unshard(y).detach(), part.grad

    for r, (value, grad) in enumerate(mw.simulate(run, mesh)):
        assert torch.allclose(value, want.detach())
        assert torch.allclose(grad, leaf.grad[r])


def test_several_partial_axes_reduce_once_over_the_flattened_group():
    mesh = mw.Mesh({"dp": 2, "tp": 2})
    spec = Spec((4, 4), torch.float32, Layout(mesh, [Partial(), Partial()]))
    plan = make_plan(spec, Spec((4, 4), torch.float32, Layout(mesh)))
    assert [s.kind for s in plan.steps] == ["all_reduce"]
    assert plan.steps[0].axes == (0, 1)
    assert plan.forward_bytes == 2 * 3 / 4 * 64
    three = mw.Mesh({"a": 2, "b": 2, "c": 2})
    for before, after, axes in [
        ([Partial()] * 3, [R, R, R], (0, 1, 2)),
        ([Partial()] * 3, [Partial(), R, R], (1, 2)),
        ([Partial()] * 3, [R, Partial(), R], (0, 2)),
        ([Partial(), Shard(0), Partial()], [R, Shard(0), R], (0, 2)),
        ([Partial("max"), R, Partial("max")], [R, R, R], (0, 2)),
    ]:
        src, dst = (Spec((4, 4), torch.float32, Layout(three, p)) for p in (before, after))
        assert [(s.kind, s.axes) for s in make_plan(src, dst).steps] == [("all_reduce", axes)]
    # Nothing is sent forward, and the gradient is reduced once.
    src = Spec((4, 4), torch.float32, Layout(mesh))
    plan = make_plan(src, src.with_(grad_partial_mask=3))
    assert [(s.kind, s.axes) for s in transpose(plan.steps)] == [("all_reduce", (0, 1))]
    assert (plan.forward_bytes, plan.backward_bytes) == (0, 2 * 3 / 4 * 64)


def test_exchange_is_one_all_to_all():
    mesh = mw.Mesh({"x": 4})
    plan = make_plan(
        Spec((8, 8), torch.float32, Layout(mesh, [Shard(0)])), Spec((8, 8), torch.float32, Layout(mesh, [Shard(1)]))
    )
    assert [s.kind for s in plan.steps] == ["all_to_all"]
    assert plan.forward_bytes == 3 / 4 * 64
    assert [s.kind for s in make_plan(plan.dst, plan.src).steps] == ["all_to_all"]


def test_partial_max_cannot_become_partial_sum_silently():
    mesh = mw.Mesh({"x": 4})
    plan = make_plan(
        Spec((8,), torch.float32, Layout(mesh, [Partial("max")])), Spec((8,), torch.float32, Layout(mesh, [Partial()]))
    )
    assert plan.steps[0].kind == "all_reduce"
