"""Steps by hand with several backwards: a loop over micro-batches, two losses, gradients asked for by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import meshwright as mw
from meshwright.passes import DataParallelOptimization, GradientMerge
from tests.support.processes import run_processes

Tensor = torch.Tensor
Gradients = Callable[[nn.Module, Tensor], Tensor]


def loop(model: nn.Module, x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=x.dtype)
    for part in x.chunk(3):
        loss = model(part).square().mean() / 3
        loss.backward()
        total = total + loss.detach()
    return total


def two_losses(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    first, second = out.square().mean(), out.abs().mean()
    first.backward(retain_graph=True)
    second.backward()
    return (first + second).detach()


def listed(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    losses = [out.square().mean(), out.abs().mean()]
    torch.autograd.backward(losses)
    return (losses[0] + losses[1]).detach()


def weighted(model: nn.Module, x: Tensor) -> Tensor:
    """Cotangents of the step's own: one is a value that the step reads elsewhere too."""
    out = model(x)
    v = torch.ones_like(out) * 0.5
    torch.autograd.backward([out.square(), out], [v, v * 2])
    return (out.detach() * v).mean()


def by_grad(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    params = list(model.parameters())
    for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = g
    return loss.detach()


def both_ways(model: nn.Module, x: Tensor) -> Tensor:
    """One gradient from ``grad``, added to what ``backward`` left."""
    out = model(x)
    out.square().mean().backward(retain_graph=True)
    params = list(model.parameters())
    for p, g in zip(params, torch.autograd.grad(out.abs().mean(), params), strict=True):
        p.grad += g
    return out.detach().mean()


def hooked(model: nn.Module, x: Tensor) -> Tensor:
    """A hook that is not linear: what it is given must not be scaled."""
    out = model(x)
    out.register_hook(lambda g: g.clamp(-1e-2, 1e-2))
    loss = out.square().sum()
    loss.backward()
    return loss.detach()


class Signed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.sign() * 1e-2


def own_function(model: nn.Module, x: Tensor) -> Tensor:
    loss = Signed.apply(model(x)).square().mean()
    loss.backward()
    return loss.detach()


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """A gradient inside of the loss, that is not returned: of two seeds only one is what gradients are linear in."""
    x = x.clone().requires_grad_()
    out = model(x).square().mean()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    (out + slope.square().sum()).backward()
    return torch.zeros((), dtype=x.dtype)


def decayed(model: nn.Module, x: Tensor) -> Tensor:
    """Decay by hand, before the sum over ranks."""
    loss = model(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.grad.add_(p, alpha=0.1)
    return loss.detach()


FOLDED = [loop, two_losses, listed, by_grad, both_ways, penalty]
KINDS = [*FOLDED, weighted, hooked, own_function, decayed]
FUSED, MERGED = DataParallelOptimization(bucket_bytes=1 << 20), GradientMerge(k_steps=2)
PASSES: dict[str, list[Any]] = {
    "optimized": [FUSED],
    "merged": [MERGED],
    "both": [MERGED, FUSED],
    "both, listed otherwise": [FUSED, MERGED],
}


def hand(model: nn.Module, optimizer: Any, gradients: Gradients, k: int = 1) -> Callable[[Tensor], Tensor]:
    """A step by hand; with ``k`` the mean over micro-batches is updated from."""

    def step(*micro: Tensor) -> Tensor:
        total: list[Tensor] = []
        for x in micro:
            optimizer.zero_grad()
            loss = gradients(model, x)
            grads = [p.grad for p in model.parameters()]
            total = [a + b / k for a, b in zip(total, grads, strict=True)] if total else [g / k for g in grads]
        for p, g in zip(model.parameters(), total, strict=True):
            p.grad = g
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def captured_hand(model: nn.Module, optimizer: Any, gradients: Gradients) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = gradients(model, x)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        return loss

    return step


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data(i: int) -> Tensor:
    g = torch.Generator().manual_seed(10 * i + dist.get_rank())
    return torch.randn(6, 6, dtype=torch.float64, generator=g)


def difference(mesh: mw.Mesh, kind: Gradients, passes: list[Any], k: int) -> tuple[float, list[float]]:
    """How far a captured step is from the same by hand, and what the backward starts from."""
    records: list[Any] = []
    manager = mw.passes.PassManager(passes, after_each=lambda record, *_: records.append(record))
    results = []
    for captured in (False, True):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        if captured:
            by_hand = captured_hand(model, optimizer, kind)
            step = mw.capture_local(by_hand, mesh, model=model, optimizer=optimizer, batch=data(0), passes=manager)
            losses = [step(data(i)) for i in range(4)][k - 1 :: k]
        else:
            own = hand(model, optimizer, kind, k)
            losses = [own(*(data(j) for j in range(i, i + k))) for i in range(0, 4, k)]
        results.append([*losses, *(p.detach() for p in model.parameters())])
    worst = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
    return worst, [r.details["folded"] for r in records if "folded" in r.details]


def differences() -> dict[tuple[str, str], Any]:
    mesh, made = mw.init_mesh({"dp": 2}), {}
    for kind in KINDS:
        for name, passes in PASSES.items():
            if name in ("optimized", "merged") or kind in (loop, both_ways):
                made[kind.__name__, name] = difference(mesh, kind, passes, 2 if MERGED in passes else 1)
    return made


@pytest.mark.processes
def test_several_backwards() -> None:
    for found in run_processes(differences, 2, timeout=180):
        wrong = {k: v for k, v in found.items() if v[0] > 1e-9}
        assert not wrong
        for kind in KINDS:
            starts = [0.5] if kind in FOLDED else [1.0]
            assert found[kind.__name__, "optimized"][1] == starts, kind


# -- sums over one axis after another, through views -----------------------------------------------------


def level_by_level(p: Tensor, dp: Any, ep: Any) -> None:
    for group in (dp, ep):
        dist.all_reduce(p.grad, group=group)
        p.grad /= 2


def through_a_view(p: Tensor, dp: Any, ep: Any) -> None:
    flat = p.grad.view(-1)
    dist.all_reduce(flat)
    flat /= 4


def scattered_within(p: Tensor, dp: Any, ep: Any) -> None:
    """Scattered within a node, summed between nodes, gathered within the node."""
    n = p.numel()
    flat = nn.functional.pad(p.grad.view(-1), (0, -n % 2))
    own = flat.new_empty(flat.numel() // 2)
    dist.reduce_scatter_tensor(own, flat, group=dp)
    dist.all_reduce(own, group=ep)
    own /= 4
    dist.all_gather_into_tensor(flat, own, group=dp)
    p.grad.copy_(flat[:n].view_as(p))


def levels() -> dict[tuple[str, str], Any]:
    mesh, rank = mw.init_mesh({"dp": 2, "ep": 2}), dist.get_rank()
    dp = [dist.new_group([i, i + 2]) for i in range(2)][rank % 2]
    ep = [dist.new_group([2 * i, 2 * i + 1]) for i in range(2)][rank // 2]
    made = {}
    for sync in (level_by_level, through_a_view, scattered_within):
        for name, passes in {"none": [], "fused": [FUSED], "merged": [MERGED, FUSED]}.items():
            results, k = [], 2 if name == "merged" else 1
            for captured in (False, True):
                model = network()
                optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

                def step(
                    *micro: Tensor, model: nn.Module = model, optimizer: Any = optimizer, sync: Any = sync
                ) -> None:
                    optimizer.zero_grad()
                    for x in micro:
                        two = torch.tensor(2.0, dtype=x.dtype)  # a constant that is written to
                        two += x.mean().detach() ** 2
                        (model(x).square().mean() * two / len(micro)).backward()
                    for p in model.parameters():
                        sync(p, dp, ep)
                    optimizer.step()

                if captured:
                    run: Any = mw.capture_local(
                        step, mesh, model=model, optimizer=optimizer, batch=data(0), passes=passes
                    )  # fmt: skip
                    for i in range(4):
                        run(data(i))
                else:
                    for i in range(0, 4, k):
                        step(*(data(j) for j in range(i, i + k)))
                results.append([p.detach() for p in model.parameters()])
            worst = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
            starts = [n.args[3] for n in run.program.graph.nodes if "as_strided" in str(n.target)]
            made[sync.__name__, name] = (worst, run.program.kinds, {8 * int(a) % 256 for a in starts})
    return made


@pytest.mark.processes
def test_sums_level_by_level_and_through_views() -> None:
    for found in run_processes(levels, 4):
        assert not {k: v for k, v in found.items() if v[0] > 1e-12}
        for sync in ("level_by_level", "through_a_view"):
            assert found[sync, "fused"][1] == {"all_reduce": 1}
            assert found[sync, "fused"][2] == {0}  # where gradients begin in the buffer, in bytes
        assert found["level_by_level", "none"][1] == {"all_reduce": 8}
