"""What users do to ``parameter.grad`` between backwards: keep, alias, freeze, copy it, assign it in other layouts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from tests.support.shard_networks import OwnScale

MESHES = [{"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}]
OPTIONS: list[dict[str, Any]] = [{}, {"fsdp": "dp"}, {"fsdp": "dp", "reshard_after_forward": False}]


Loss = Callable[[int], Any]
Full = Callable[[Any], Any]


def kept(m: nn.Module, loss: Loss, full: Full) -> Any:
    loss(0).backward()
    held = [p.grad for p in m.parameters()]
    loss(1).backward()
    seen = [full(g) for g in held]
    m.zero_grad(set_to_none=False)
    loss(2).backward()
    return seen + [full(g) for g in held] + [full(p.grad) for p in m.parameters()]


def buffers(m: nn.Module, loss: Loss, full: Full) -> Any:
    flat = []
    for p in m.parameters():
        flat.append(torch.zeros_like(p.detach()))
        p.grad = flat[-1][:]
    loss(0).backward()
    loss(1).backward()
    return [full(p.grad) for p in m.parameters()]


def whole(m: nn.Module, loss: Loss, full: Full) -> Any:
    loss(0).backward()
    for p in m.parameters():
        p.grad = full(p.grad).clone() if not isinstance(p.grad, mw.DistTensor) else mw.reshard(
            p.grad, {a: mw.Replicate() for a in p.grad.mesh.axes}
        )  # fmt: skip
    loss(1).backward()
    loss(2).backward()
    return [full(p.grad) for p in m.parameters()]


def rows(m: nn.Module, loss: Loss, full: Full) -> Any:
    loss(0).backward()
    for p in m.parameters():
        p.grad = mw.reshard(p.grad, {"dp": mw.Shard(0)}) if isinstance(p.grad, mw.DistTensor) else p.grad.clone()
    loss(1).backward()
    return [full(p.grad) for p in m.parameters()]


def viewed(m: nn.Module, loss: Loss, full: Full) -> Any:
    loss(0).backward()
    for p in m.parameters():
        p.grad = p.grad.view(-1).view(p.shape)
    loss(1).backward()
    return [full(p.grad) for p in m.parameters()]


def frozen(m: nn.Module, loss: Loss, full: Full) -> Any:
    made = loss(0)
    for p in list(m.parameters())[::2]:
        p.requires_grad_(False)
    made.backward()
    return [None if p.grad is None else full(p.grad) for p in m.parameters()]


def copied(m: nn.Module, loss: Loss, full: Full) -> Any:
    loss(0).backward()
    return [p.grad is None for p in copy.deepcopy(m).parameters()]


def stepped(m: nn.Module, loss: Loss, full: Full) -> Any:
    made = loss(0)
    made.backward(retain_graph=True)
    torch.optim.SGD(m.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.backward()
    return []


def doubled(m: nn.Module, loss: Loss, full: Full) -> Any:
    made = loss(0)
    for p in m.parameters():
        p.data.mul_(2)  # not counted: the backward is that of the new weights, where they were saved
    made.backward()
    return [full(p.grad) for p in m.parameters()]


WAYS = [kept, buffers, whole, rows, viewed, frozen, copied, stepped, doubled]


def ways(axes: dict[str, int] | None, options: dict[str, Any]) -> list[Any]:
    found = []
    for way in WAYS:
        torch.manual_seed(0)
        m, data = OwnScale().double(), [torch.randn(7, 4, dtype=torch.float64) for _ in range(3)]
        if axes is not None:
            mesh = mw.Mesh(axes)
            plan = {"layers.0.*": {"tp": mw.Shard(0)}, "layers.2.weight": {"tp": mw.Shard(1)}} if "tp" in axes else {}
            m = mw.shard_module(m, mesh, plan, **options)
            data = [mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)}) for x in data]
        full: Full = (lambda t: t.detach().clone()) if axes is None else (lambda t: mw.unshard(t.detach()).clone())
        found.append(way(m, lambda i, m=m, data=data: m(data[i]).square().mean(), full))  # type: ignore[misc]
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.thin(2)
def test_as_on_one_device(axes: dict[str, int], options: dict[str, Any]) -> None:
    wanted = ways(None, {})
    for found in mw.simulate(lambda: ways(axes, options), mw.Mesh(axes)):
        for way, made, want in zip(WAYS, found, wanted, strict=True):
            torch.testing.assert_close(made, want, rtol=1e-9, atol=1e-12, msg=f"{way.__name__}: {made} {want}")
