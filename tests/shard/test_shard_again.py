"""Modules that are sharded again after they got other parameters (adapters), or whose parts were sharded before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from tests.support.compare import check_equal, plain, ramp

DP = mw.Mesh({"dp": 3})
BOTH = mw.Mesh({"dp": 2, "tp": 2})


class Adapted(nn.Module):
    """A layer with a low-rank addition."""

    def __init__(self, base: nn.Module, frozen: bool) -> None:
        super().__init__()
        self.base = base.requires_grad_(not frozen)
        self.down = nn.Parameter(torch.linspace(-1.0, 1.0, 8, dtype=torch.float64).view(4, 2))
        self.up = nn.Parameter(torch.ones(2, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down @ self.up


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)))


Shard = Callable[..., Any]


def once(m: nn.Sequential, shard: Shard, **options: Any) -> None:
    shard(m, **options)
    m[0] = Adapted(m[0], frozen=True)
    shard(m)


def unfrozen(m: nn.Sequential, shard: Shard, **options: Any) -> None:
    shard(m, **options)
    m[1] = Adapted(m[1], frozen=False)
    shard(m)


def thrice(m: nn.Sequential, shard: Shard, **options: Any) -> None:
    shard(m, **options)
    for i in range(3):
        m[i] = Adapted(m[i], frozen=bool(i))
        shard(m, **options)


def trained_between(m: nn.Sequential, shard: Shard, **options: Any) -> None:
    shard(m, **options)
    (m(m[0].weight * 2) ** 2).sum().backward()
    m.zero_grad()
    m[0] = Adapted(m[0], frozen=False)
    shard(m, **options)


def whole_behind_parts(m: nn.Sequential, shard: Shard, **options: Any) -> None:
    shard(m[0], **options)
    shard(m[1])
    shard(m, **options)


def part_behind_whole(m: nn.Sequential, shard: Shard, **options: Any) -> None:
    shard(m, **options)
    m[1] = Adapted(m[1], frozen=False)
    shard(m[1])
    m[2] = Adapted(m[2], frozen=False)
    shard(m[2], **options)


def layer_replaced(m: nn.Sequential, shard: Shard, **options: Any) -> None:
    shard(m, **options)
    m[1] = nn.Linear(4, 4, dtype=torch.float64)
    shard(m, **options)


def copied(m: nn.Sequential, shard: Shard, **options: Any) -> None:
    once(m, shard, **options)
    for i, layer in enumerate(copy.deepcopy(m)):
        m[i] = layer
    shard(m)


ORDERS = [once, unfrozen, thrice, trained_between, whole_behind_parts, part_behind_whole, layer_replaced]


def losses(order: Callable[..., None], mesh: mw.Mesh | None, states: bool = False, **options: Any) -> Any:
    """Two accumulated backwards, the first without synchronisation, and a step; losses, gradients and parameters."""
    m = net()
    order(m, (lambda x, **o: mw.shard_module(x, mesh, **o)) if mesh is not None else (lambda x, **o: x), **options)
    optimizer, x = torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9), ramp(5, 4)
    called: list[str] = []
    for name, p in m.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))  # type: ignore[misc]
    if mesh is not None:
        x = mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)})
        optimizer = mw.shard_optimizer(optimizer, shard_states="dp" if states else None)
    found = []
    for _ in range(2):
        if mesh is not None:
            with mw.no_sync(m):
                (m(x) ** 2).sum().backward()
        else:
            (m(x) ** 2).sum().backward()
        loss = (m(x) ** 2).sum()
        loss.backward()
        found.append([loss, *(p.grad for p in m.parameters() if p.grad is not None)])
        found[-1] = plain(found[-1])
        optimizer.step()
        optimizer.zero_grad()
    return [found, plain([p.detach() for p in m.parameters()]), sorted(called)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [{}, {"fsdp": "dp"}], ids=["replicated", "stored"])
def test_trains_as_one_device(order: Callable[..., None], options: dict[str, Any]) -> None:
    want = losses(order, None)
    for mesh in (DP, mw.Mesh({"dp": 7})) if order is once else (DP,):
        for got in mw.simulate(lambda: losses(order, mesh, **options), mesh):  # noqa: B023
            check_equal(got[:2], want[:2])
            assert got[2] == want[2]


@pytest.mark.parametrize("options", [{"states": True}, {"placements": {"*.weight": {"tp": mw.Shard(0)}}}])
def test_with_other_strategies(options: dict[str, Any]) -> None:
    want = losses(once, None)
    if "placements" in options:

        def shard(m: nn.Sequential, shard: Shard, **options: Any) -> None:
            once(m, shard, fsdp="dp", **options)
    else:
        shard = once
    for got in mw.simulate(lambda: losses(shard, BOTH, **options), BOTH):
        check_equal(got[:2], want[:2])


def test_a_copy_is_sharded_again() -> None:
    want = losses(once, None)
    for got in mw.simulate(lambda: losses(copied, DP, fsdp="dp"), DP):
        check_equal(got[:2], want[:2])


def test_captured_after_it_was_sharded_twice() -> None:
    def fn(mesh: mw.Mesh | None) -> list[float]:
        m, x = net(), ramp(6, 4)
        once(m, (lambda x, **o: mw.shard_module(x, mesh, **o)) if mesh is not None else (lambda x, **o: x))
        optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01)
        if mesh is not None:
            step = mw.compile_step(
                m, lambda m, x: (m(x) ** 2).sum(), optimizer, x, mesh=mesh, batch={"dp": mw.Shard(0)}
            )
            return [step(x).item() for _ in range(3)]
        found = []
        for _ in range(3):
            loss = (m(x) ** 2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert mw.simulate(lambda: fn(DP), DP)[0] == pytest.approx(fn(None), rel=1e-9)


def test_parameters_keep_their_synchronisation_when_the_module_that_had_them_is_gone() -> None:
    class Taken(nn.Module):
        def __init__(self, m: nn.Linear) -> None:
            super().__init__()
            self.weight, self.other = m.weight, nn.Parameter(torch.ones(4, dtype=torch.float64))

    def fn() -> Any:
        taken = mw.shard_module(Taken(mw.shard_module(net()[0], DP)), DP)
        x = mw.shard_tensor(ramp(6, 4), DP, {"dp": mw.Shard(0)})
        (x @ taken.weight * taken.other).square().sum().backward()
        assert not taken.weight.grad.spec.layout.partial
        return plain([p.grad for p in taken.parameters()])

    taken = Taken(net()[0])
    (ramp(6, 4) @ taken.weight * taken.other).square().sum().backward()
    for got in mw.simulate(fn, DP):
        check_equal(got, plain([p.grad for p in taken.parameters()]))
