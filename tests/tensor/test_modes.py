"""Dispatch modes of users around a step: values stay right, and they see this rank's plain tensors."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import meshwright as mw

MESH = mw.Mesh({"tp": 2})
PLAN = {"0.weight": mw.Shard(0), "0.bias": mw.Shard(0), "2.weight": mw.Shard(1)}


class Watch(TorchDispatchMode):
    """Goes on with what it gets, and keeps the classes and shapes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.classes: set[type] = set()
        self.shapes: dict[str, set[tuple[int, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for a in args:
            if isinstance(a, torch.Tensor):
                self.classes.add(type(a))
                self.shapes.setdefault(str(func), set()).add(tuple(a.shape))
        return func(*args, **(kwargs or {}))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)).double()


def step(model: nn.Module, forward: Any, backward: Any, plain: bool) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(1)
    x = torch.randn(6, 8, dtype=torch.float64)
    with forward:
        loss = (model(x) ** 2 * torch.arange(8.0)).sum()
    if plain and isinstance(loss, mw.DistTensor):
        loss = mw.unshard(loss)
    with backward:
        loss.backward()
    grads = [p.grad for p in model.parameters()]
    return loss.item(), [mw.unshard(g) if isinstance(g, mw.DistTensor) else g for g in grads]  # type: ignore[misc]


@pytest.mark.parametrize("stored", [None, "tp"], ids=["", "fsdp"])
@pytest.mark.parametrize("plain", [False, True], ids=["dist-loss", "plain-loss"])
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
def test_values_under_a_mode(where: str, plain: bool, stored: str | None) -> None:
    want_loss, want = step(net(), contextlib.nullcontext(), contextlib.nullcontext(), False)

    def rank() -> None:
        model = mw.shard_module(net(), MESH, PLAN if stored is None else {}, fsdp=stored)
        watch = Watch()
        forward = watch if where != "backward" else contextlib.nullcontext()
        backward = watch if where != "forward" else contextlib.nullcontext()
        loss, grads = step(model, forward, backward, plain)
        assert loss == pytest.approx(want_loss, rel=1e-12)
        for got, ref in zip(grads, want, strict=True):
            torch.testing.assert_close(got, ref)
        if not plain or where == "forward":
            assert mw.DistTensor not in watch.classes, watch.classes
        if stored is None and where != "backward":
            assert (8, 8) in watch.shapes["aten.t.default"], watch.shapes  # 16 rows in two parts

    mw.simulate(rank, MESH)


def test_flops_of_the_ranks_add_up_to_those_of_one_device() -> None:
    with FlopCounterMode(display=False) as whole:
        step(net(), _none(), _none(), False)

    def rank() -> int:
        model = mw.shard_module(net(), MESH, PLAN)
        with FlopCounterMode(display=False) as counter:
            step(model, _none(), _none(), False)
        return counter.get_total_flops()

    assert sum(mw.simulate(rank, MESH)) == whole.get_total_flops()


def test_a_hook_that_computes_under_a_mode_sees_global_values() -> None:
    def rank() -> None:
        x = mw.shard_tensor(torch.arange(8.0), MESH, mw.Shard(0)).requires_grad_()
        y = x * x
        seen = []
        y.register_hook(lambda g: seen.append(((g * y).sum().item(), type(g))))
        with Watch():
            y.sum().backward()
        assert seen == [(140.0, mw.DistTensor)]
        torch.testing.assert_close(mw.unshard(x.grad), 2 * torch.arange(8.0))

    mw.simulate(rank, MESH)


def _none() -> Any:
    return contextlib.nullcontext()
