"""A user's torch.autograd.Function on distributed tensors: gathered, right, and named once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.tensor import autograd_functions

MESH = mw.Mesh({"x": 4})


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w * w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return grad * w * w, (2 * grad * x * w).sum(0)


@pytest.mark.parametrize("layout", [mw.Shard(0), mw.Shard(1), mw.Replicate(), mw.Partial()], ids=repr)
def test_gradients_are_those_of_one_device(layout):
    x, w = torch.randn(6, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    (Scaled.apply(a * 2, b).exp()).sum().backward()

    def run():
        u = mw.shard_tensor(x, MESH, [layout]).requires_grad_()
        v = mw.shard_tensor(w, MESH, {}).requires_grad_()
        y = Scaled.apply(u * 2, v)
        assert isinstance(y, mw.DistTensor)
        y.exp().sum().backward()
        return mw.unshard(u.grad), mw.unshard(v.grad)

    autograd_functions._warned.add("Scaled")
    for got_x, got_w in mw.simulate(run, MESH):
        torch.testing.assert_close(got_x, a.grad)
        torch.testing.assert_close(got_w, b.grad)


def test_it_is_named_once():
    autograd_functions._warned.discard("Scaled")

    def run():
        Scaled.apply(mw.shard_tensor(torch.ones(6, 3), MESH, [mw.Shard(0)]), torch.ones(3))

    with pytest.warns(UserWarning, match=r"Scaled has no rule: its inputs are gathered on every rank.*custom op"):
        mw.simulate(run, MESH)


def test_the_one_of_backward_hooks_says_what_to_write_instead():
    autograd_functions._warned.discard("BackwardHookFunction")

    def run(hooked):
        torch.manual_seed(0)
        linear = mw.shard_module(nn.Linear(3, 2), MESH, {})
        if hooked:
            linear.register_full_backward_hook(lambda module, gradients, out: None)
        else:
            linear.register_forward_hook(lambda module, args, out: out.register_hook(lambda g: g * 1) and None)
        return linear(mw.shard_tensor(torch.ones(6, 3).requires_grad_(), MESH, [mw.Shard(0)])).placements

    with pytest.warns(UserWarning, match=r"register_full_backward_hook.*output.register_hook"):
        assert mw.simulate(lambda: run(True), MESH)[0] == (mw.Replicate(),)
    assert mw.simulate(lambda: run(False), MESH)[0] == (mw.Shard(0),)


def test_plain_tensors_pass_through():
    x = torch.ones(2, 3, requires_grad=True)
    Scaled.apply(x, torch.ones(3)).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3))
