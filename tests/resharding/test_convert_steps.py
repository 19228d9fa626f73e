"""Single steps as they run, on two axes: formats of wires, shares of gradients, memory of what is cut."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from meshwright.layout import Layout, Partial, Replicate, Shard, Spec
from meshwright.ranks import runtime
from meshwright.resharding import conversions, executor
from meshwright.resharding.planner import plan

MESH = mw.Mesh({"a": 2, "b": 3})
I, S0, S1 = Replicate(), Shard(0), Shard(1)  # noqa: E741


def spec(*placements, **more):
    return Spec((5, 7), torch.float32, Layout(MESH, placements, ndim=2), **more)


def here():
    return MESH.coordinate(runtime.RT.rank)


def part(value, a_spec):
    for d, (lo, hi) in enumerate(a_spec.layout.local_bounds(a_spec.shape, here())):
        value = value.narrow(d, lo, hi - lo)
    return value


def test_what_travels_in_a_format_arrives():
    """Numbers that the format has: the same as without it."""
    parts = torch.randint(-5, 6, (2, 5, 7), generator=torch.Generator().manual_seed(0)).float()

    def run():
        for wire in (torch.bfloat16, torch.float16, mw.Float8(128)):
            for other, dst in ((I, I), (S0, S0), (I, S1), (S0, S1)):
                src, to = spec(Partial(), other, comm_formats=(wire, None)), spec(dst, other, comm_formats=(wire, None))
                if other == dst != I:
                    continue
                (step,) = plan(src, to).steps
                made = executor.ready((step,)).run(part(parts[here()[0]], src))
                assert torch.equal(made, part(parts.sum(0), to)), (wire, src, to)
        whole, split = spec(I, I), spec(I, S1)
        for wire in (torch.bfloat16, mw.Float8(128)):
            sent = conversions.gathered_as(plan(split, whole).steps, wire)
            assert torch.equal(executor.ready(sent).run(part(parts[1], split)), parts[1])
        rounded = conversions.gathered_as(plan(split, whole).steps, torch.bfloat16)
        made = executor.ready(rounded).run(part(parts[1] / 3, split))
        assert torch.equal(made, (parts[1] / 3).bfloat16().float())
        average = plan(spec(Partial("avg"), I, comm_formats=(torch.bfloat16, None)), whole).steps
        assert torch.equal(executor.ready(average).run(parts[here()[0]]), parts.sum(0) / 2)

    mw.simulate(run, MESH)


@pytest.mark.parametrize("dst", [I, S0])
def test_each_part_has_its_share_of_the_gradient(dst):
    """Of a reduction over one axis of two, in one device's numbers; equal holders share alike."""
    draw = torch.Generator().manual_seed(0)
    seed = torch.randn(5, 7, generator=draw)
    given = {
        "max": torch.randint(0, 3, (3, 5, 7), generator=draw).float(),
        "min": torch.randint(0, 3, (3, 5, 7), generator=draw).float(),
        "product": torch.randint(0, 4, (3, 5, 7), generator=draw).float(),
        "avg": torch.randn(3, 5, 7, generator=draw),
    }
    ops = {"max": lambda x: x.amax(0), "min": lambda x: x.amin(0), "product": lambda x: x.prod(0)}
    ops["avg"] = lambda x: x.mean(0)

    def run():
        for op, parts in given.items():
            src, to = spec(I, Partial(op)), spec(I, dst)
            whole = parts.clone().requires_grad_()
            (ops[op](whole) * seed).sum().backward()
            local = parts[here()[1]].clone().requires_grad_()
            out = executor.apply(plan(src, to).steps, local)
            assert torch.allclose(out, part(ops[op](parts), to)), op
            out.backward(part(seed, to))
            assert torch.allclose(local.grad, whole.grad[here()[1]]), (op, dst)

    mw.simulate(run, MESH)


def test_a_slice_holds_no_more_than_itself():
    def run():
        whole = torch.arange(35.0).reshape(5, 7)
        for dst in (spec(I, S0), spec(S1, I), spec(S0, S1)):
            made = executor.ready(plan(spec(I, I), dst).steps).run(whole)
            assert torch.equal(made, part(whole, dst))
            assert made.is_contiguous()
            if dst.layout.placements[0] == S1:
                assert made.untyped_storage().nbytes() == made.numel() * 4
        x = whole.clone().requires_grad_()
        out = executor.apply(plan(spec(S0, I), spec(I, I)).steps, part(x, spec(S0, I)))
        cotangent = torch.ones(5, 7)
        (grad,) = torch.autograd.grad(out, x, cotangent)
        grad += 1  # it is nobody else's
        assert torch.equal(cotangent, torch.ones(5, 7))

    mw.simulate(run, MESH)
