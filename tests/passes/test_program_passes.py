"""Captured steps with the built-in passes in both orders, against one device: what they once refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshwright as mw
from tests.support.programs import compare

BOTH = ["gradient-merge:k_steps=1", "data-parallel-optimization"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.n(F.gelu(self.a(x))))  # type: ignore[no-any-return]


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(5, 8, dtype=torch.float64) for _ in range(3)]


COLUMNS = {"layouts": {"a.weight": {"tp": mw.Shard(0)}}}


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 1}, {}),
        ({"dp": 1, "tp": 2}, {}),
        ({"dp": 1, "tp": 2}, COLUMNS),
        ({"dp": 1, "tp": 2}, {**COLUMNS, "shard_states": "dp", "loss_scale": 8.0}),
        ({"dp": 1, "tp": 1}, {**COLUMNS, "fsdp": "dp"}),
        ({"dp": 2, "tp": 1}, {**COLUMNS, "shard_states": "dp", "loss_scale": "dynamic"}),
        ({"dp": 2, "tp": 2}, {**COLUMNS, "shard_states": "dp", "loss_scale": 8.0}),  # sums over tp of parts over dp
    ],
)
@pytest.mark.thin(3)
def test_axes(axes: dict[str, int], options: dict[str, Any]) -> None:
    for passes in (BOTH, BOTH[::-1]):
        compare(Net, squares, batches(), mw.Mesh(axes), batch={"dp": mw.Shard(0)}, clip=0.5, passes=passes, **options)


def test_nothing_moves_over_axes_of_one_rank() -> None:
    """No record of it, nothing to ask for, and a copy where somebody asks for another layout."""
    mesh = mw.Mesh({"dp": 1, "tp": 2})

    def rank() -> tuple[Tensor, Tensor, str]:
        x = mw.shard_tensor(torch.zeros(2, 3), mesh, {"dp": mw.Shard(0)})
        mw.reshard(x, {"dp": mw.Replicate()}).add_(1)
        one = mw.shard_tensor(torch.ones(3, 3), mesh, {"dp": mw.Shard(0)})
        with mw.explicit():
            return mw.unshard(x), mw.unshard(one @ one), str(mw.explain(lambda: one @ one))

    for x, product, text in mw.simulate(rank, mesh):
        assert not x.any()
        assert torch.equal(product, torch.full((3, 3), 3.0))
        assert "all_" not in text


class Repeated(nn.Module):
    """One value brought to one layout twice: recorded once, and one of the results may be written to."""

    def __init__(self, write: bool) -> None:
        super().__init__()
        self.w, self.write = nn.Parameter(torch.randn(4, 6, dtype=torch.float64)), write

    def forward(self, x: Tensor) -> Tensor:
        a, b = (mw.constrain(self.w.transpose(0, 1), {"tp": mw.Replicate()}) for _ in range(2))
        a = a.add_(x) if self.write and isinstance(x, torch._subclasses.FakeTensor) else a + x  # one device has one
        return (a * b.sin()).sum(0).view(-1).exp()[None]


@pytest.mark.parametrize("write", [False, True])
def test_a_conversion_that_repeats(write: bool) -> None:
    data = [torch.ones(6, 4, dtype=torch.float64) / (i + 1) for i in range(3)]
    options = {"layouts": {"w": {"tp": mw.Shard(0)}}, "batch": {}, "passes": BOTH}
    compare(lambda: Repeated(write), squares, data, mw.Mesh({"tp": 2}), **options)


class Attention(nn.Module):
    """Disentangled attention: positions are gathered from products with one table, which two of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Parameter(torch.randn(8, 6))
        self.q, self.k = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        heads = lambda t: t.view(*t.shape[:-1], 2, 3).transpose(-3, -2)  # noqa: E731
        q, k, r = heads(self.q(x)), heads(self.k(x)), heads(self.r[None])
        i = (torch.arange(4)[:, None] - torch.arange(4) + 3).expand(3, 2, 4, 4)
        rel = torch.gather(q @ r.transpose(-1, -2), -1, i) + 0
        rel += torch.gather(k @ r.transpose(-1, -2), -1, i).transpose(-1, -2)
        return (q @ k.transpose(-1, -2) + rel).softmax(-1) @ k


def test_memory_of_what_repeats() -> None:
    data = [torch.randn(3, 4, 6, dtype=torch.float64) for _ in range(2)]
    layouts = {"q.weight": {"tp": mw.Shard(0)}, "r": {"tp": mw.Shard(0)}}
    compare(Attention, squares, data, mw.Mesh({"tp": 2}), layouts=layouts, batch={}, passes=BOTH)


@pytest.mark.parametrize("first", [(0, 1, 5), (0, 3)])
def test_two_optimizers_share_buckets(first: tuple[int, ...]) -> None:
    """A sum that both read is waited for ahead of the first; what the other waits for comes later."""
    data, mesh = batches(), mw.Mesh({"dp": 2})

    def rank(passes: list[str]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4)).double()
        listed = list(model.parameters())
        own = [p for i, p in enumerate(listed) if i in first], [p for i, p in enumerate(listed) if i not in first]
        optimizers = [torch.optim.SGD(ps, lr=0.1, momentum=0.9) for ps in own]
        options: dict[str, Any] = {"batch": {"dp": mw.Shard(0)}, "passes": passes}
        step = mw.compile_step(model, squares, optimizers, data[0], mesh=mesh, **options)
        for x in data:
            step(x)
        return [mw.unshard(p).detach().clone() for p in listed]

    wanted = mw.simulate(lambda: rank([]), mesh)[0]
    for got in mw.simulate(lambda: rank(["data-parallel-optimization:bucket_bytes=60"]), mesh):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("options", [{}, {"shard_states": "dp", "clip_grad_norm": 0.5}])
def test_a_flush_of_plain_sums(options: dict[str, Any]) -> None:
    """Sums that come in are sent as they are: nothing multiplies them first."""
    data, mesh = batches(), mw.Mesh({"dp": 2})

    def rank() -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        passes = ["gradient-merge:k_steps=4,avg=false", BOTH[1]]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile_step(
            model, squares, optimizer, data[0], mesh=mesh, batch={"dp": mw.Shard(0)}, passes=passes, **options
        )
        for x in data:
            step(x)
        step.flush()
        return [mw.unshard(p).detach().clone() for p in model.parameters()]

    torch.manual_seed(0)
    model = Net()
    sum(squares(model, x) for x in data).backward()  # type: ignore[union-attr]
    if options:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for got in mw.simulate(rank, mesh):
        for a, b in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------------------------------- steps by hand


@pytest.fixture
def group() -> Iterator[None]:
    """What ``torch.distributed`` calls the ranks while a step is captured; simulated ranks run it."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def gradients(how: str, loss: Tensor, parameters: list[nn.Parameter]) -> None:
    if how == "backward":
        loss.backward()  # type: ignore[no-untyped-call]
        return
    made = torch.autograd.grad(loss, parameters, retain_graph=how == "twice")
    if how == "twice":
        made = tuple(a + b for a, b in zip(made, torch.autograd.grad(loss, parameters), strict=True))
    for p, g in zip(parameters, made, strict=True):
        p.grad = g * 3 if how == "scaled" else g


@pytest.mark.parametrize("how", ["backward", "grad", "scaled", "twice"])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 1, "dp": 2}])
@pytest.mark.thin(3)
def test_a_flat_buffer(group: None, axes: dict[str, int], how: str) -> None:
    """Gradients from ``backward`` or ``autograd.grad``, summed as parts of one tensor."""
    mesh, factor = mw.Mesh(axes), {"scaled": 3, "twice": 2}.get(how, 1)
    data = [torch.randn(4, 8, dtype=torch.float64) for _ in range(4)]

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Net()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def rank(passes: list[str]) -> list[Tensor]:
        model, optimizer = made()
        parameters = list(model.parameters())

        def step(x: Tensor) -> Tensor:
            loss = squares(model, x)
            gradients(how, loss, parameters)
            flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
            dist.all_reduce(flat)
            flat /= 2
            for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                assert p.grad is not None
                p.grad.copy_(part.view_as(p))
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = mw.capture_local(step, mesh, model=model, optimizer=optimizer, batch=data[0][:2], passes=passes)
        i = mesh.coordinate(mw.ranks.runtime.RT.rank)[-1]
        for x in data:
            run(x[2 * i : 2 * i + 2])
        return [p.detach().clone() for p in parameters]

    for k, passes in (
        (1, []),
        (1, BOTH),
        (2, ["gradient-merge:k_steps=2", BOTH[1]]),
        (2, [BOTH[1], "gradient-merge:k_steps=2"]),
    ):
        model, optimizer = made()
        for i in range(0, len(data), k):
            (squares(model, torch.cat(data[i : i + k])) * factor).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        for got in mw.simulate(lambda passes=passes: rank(passes), mesh):
            for a, b in zip(got, model.parameters(), strict=True):
                torch.testing.assert_close(a, b.detach(), rtol=1e-9, atol=1e-12)
