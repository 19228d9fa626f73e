"""Writes that no version counter tells of: through ``.data`` of whatever has the memory of a tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import meshwright as mw
from meshwright.local_tensor import Sharing

F64 = torch.float64
MESH = mw.Mesh({"dp": 3})


def _state(model: nn.Module) -> None:
    for value in model.state_dict().values():
        value.data.mul_(0.5)


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "state_dict": _state,
    "detach": lambda m: m.weight.detach().data.mul_(0.5),
    "data": lambda m: m.weight.data.mul_(0.5),
    "view": lambda m: m.weight.detach().view(-1).data.mul_(0.5),
    "transposed": lambda m: m.weight.detach().t().data.mul_(0.5),
    "foreach": lambda m: torch._foreach_mul_([m.weight.detach().data], 0.5),
    "data of data": lambda m: m.weight.detach().data.data.mul_(0.5),
}


def _outputs(write: Callable[[nn.Module], object], on_mesh: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4, dtype=F64), torch.randn(7, 4, dtype=F64)
    if on_mesh:
        model = mw.shard_module(model, MESH, {"weight": {"dp": mw.Shard(0)}})
        x = mw.shard_tensor(x, MESH, {"dp": mw.Shard(0)})
    kept, found = model.weight.detach(), []
    for _ in range(3):
        with torch.no_grad():
            found += [model(x), kept @ x.t()]
        write(model)
    return [mw.unshard(y) if on_mesh else y for y in found]


@pytest.mark.parametrize("name", WRITES)
def test_later_uses_see_what_was_written(name: str) -> None:
    want = _outputs(WRITES[name], False)
    for made in mw.simulate(lambda: _outputs(WRITES[name], True), MESH):
        torch.testing.assert_close(made, want, rtol=1e-12, atol=1e-12)


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda w: w,
    "detached": lambda w: w.detach(),
    "view": lambda w: w.detach().view(-1),
    "transposed": lambda w: w.detach().t().detach(),
}


def _late(alias: Callable[[Tensor], Tensor], on_mesh: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4, dtype=F64), torch.randn(7, 4, dtype=F64)
    if on_mesh:
        model = mw.shard_module(model, MESH, {"weight": {"dp": mw.Shard(0)}})
        x = mw.shard_tensor(x, MESH, {"dp": mw.Shard(0)})
    kept, seen, found = alias(model.weight), model.weight.detach(), []
    for step in range(12):
        with torch.no_grad():
            found += [model(x), seen @ x.t(), (kept @ kept.t()).sum()]
            model.weight.mul_(0.9)
        if step > 7:  # all plans are kept by now
            kept.data.mul_(0.5)
    return [mw.unshard(y) if on_mesh else y for y in found]


@pytest.mark.parametrize("name", ALIASES)
def test_memory_that_is_shared_late(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sharing, "ever", False)
    want = _late(ALIASES[name], False)
    for made in mw.simulate(lambda: _late(ALIASES[name], True), MESH):
        torch.testing.assert_close(made, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stored", [None, "dp"])
def test_parameters_that_are_given_other_memory(stored: str | None) -> None:
    def run(on_mesh: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = nn.Linear(4, 4, dtype=F64), torch.randn(6, 4, dtype=F64)
        if on_mesh:
            model = mw.shard_module(model, MESH, {}, fsdp=stored)
            x = mw.shard_tensor(x, MESH, {"dp": mw.Shard(0)})
        found, first, second = [], model.weight.detach().clone(), model.weight.detach() * 2
        for given in (first, second, first, second):  # memory that was shared as often as that before it
            model.weight.data = given
            found.append(model(x).detach())
            given.mul_(1.5)
            found.append(model(x).detach())
            for scale in (0.3, 0.7):  # memory that nobody else holds
                model.weight.data = given * scale
                found += [model(x).detach() for _ in range(3)]
        return [mw.unshard(y) if on_mesh else y for y in found]

    want = run(False)
    for made in mw.simulate(lambda: run(True), MESH):
        torch.testing.assert_close(made, want, rtol=1e-12, atol=1e-12)


def test_sums_that_were_reduced_are_reduced_again() -> None:
    def run() -> list[float]:
        y = mw.shard_tensor(torch.arange(12.0).view(6, 2), MESH, {"dp": mw.Shard(0)}).sum(0)
        before = float(y.max())
        y.detach().data.mul_(2)
        return [before, float(y.max()), float((y * y).sum())]

    for made in mw.simulate(run, MESH):
        assert made == [36.0, 72.0, 60.0**2 + 72.0**2]


def test_a_gradient_is_detached_in_place() -> None:
    def run(on_mesh: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = nn.Linear(4, 4, dtype=F64), torch.randn(6, 4, dtype=F64)
        if on_mesh:
            model = mw.shard_module(model, MESH, {"weight": {"dp": mw.Shard(0)}})
            x = mw.shard_tensor(x, MESH, {"dp": mw.Shard(0)})
        for _ in range(2):
            model(x).square().mean().backward()
            for p in model.parameters():
                assert p.grad.detach_() is p.grad
                p.grad.mul_(2)
        return [mw.unshard(p.grad) if on_mesh else p.grad for p in model.parameters()]

    want = run(False)
    for made in mw.simulate(lambda: run(True), MESH):
        torch.testing.assert_close(made, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kept", ["data", "detach", "nothing"])
def test_a_view_in_a_forward_sees_what_out_writes(kept: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(5, 4, dtype=F64))

        def forward(self, x: Tensor) -> Tensor:
            alias = {"data": lambda: self.w.data, "detach": self.w.detach, "nothing": lambda: None}[kept]()
            seen = self.w.view(-1)
            torch.mul(self.w, 0.9, out=self.w)
            first = (x @ self.w.t()).sum()
            if alias is not None:
                alias.mul_(0.5)
            return first + (self.w * 3).sum() + (seen * 2).sum()

    def run(on_mesh: bool) -> list[Tensor]:
        module, x = Scaled(), torch.ones(6, 4, dtype=F64)
        if on_mesh:
            module = mw.shard_module(module, MESH, {}, fsdp="dp")
            x = mw.shard_tensor(x, MESH, {"dp": mw.Shard(0)})
        with torch.no_grad():
            found = [module(x), module(x), module.w.detach().clone()]
        return [mw.unshard(y) if on_mesh else y for y in found]

    want = run(False)
    for made in mw.simulate(lambda: run(True), MESH):
        torch.testing.assert_close(made, want, rtol=1e-12, atol=1e-12)


READERS: dict[str, Callable[[Tensor], object]] = {
    "norm": lambda t: t.data.norm(),
    "one rank": lambda t: t.data.shape if mw.ranks.runtime.RT.rank == 0 else None,
    "one rank, of a view": lambda t: t.detach().t().data if mw.ranks.runtime.RT.rank == 0 else None,
}


@pytest.mark.parametrize("name", READERS)
def test_reading_data_changes_nothing(name: str) -> None:
    """Views that are copies stay as they are, and what was reduced or gathered is not sent again by one rank."""

    def run() -> list[Tensor]:
        rows = mw.shard_tensor(torch.arange(30.0).view(5, 6), MESH, {"dp": mw.Shard(0)})
        parts = mw.shard_tensor(torch.arange(30.0).view(5, 6), MESH, {"dp": mw.Partial()})
        early = [rows.view(-1), parts.amax(0)]
        for t in (rows, parts):
            READERS[name](t)
        with torch.no_grad():
            return [mw.unshard(t) for t in (*early, rows.flatten() * 2, rows.reshape(30) + 1, parts.amax(0))]

    x = torch.arange(30.0).view(5, 6)
    for made in mw.simulate(run, MESH):
        torch.testing.assert_close(made, [x.view(-1), x.amax(0), x.flatten() * 2, x.reshape(30) + 1, x.amax(0)])


@pytest.mark.parametrize("cast", [False, True])
def test_one_rank_reads_data_of_stored_parameters(cast: bool) -> None:
    def run(on_mesh: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 4, dtype=F64), nn.Linear(4, 4, dtype=F64)), torch.ones(6, 4, dtype=F64)
        if on_mesh:
            model = mw.shard_module(model, MESH, {}, fsdp="dp")
            x = mw.shard_tensor(x, MESH, {"dp": mw.Shard(0)})
        losses = []
        for step in range(4):
            for p in model.parameters():
                if step > 1:
                    p.data.mul_(0.9)
                kept = p.data if on_mesh and mw.ranks.runtime.RT.rank == 0 else None
            with torch.autocast("cpu", enabled=cast):
                loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
            del kept
        return [mw.unshard(t) if on_mesh else t for t in (*losses, *(p.grad for p in model.parameters()))]

    want = run(False)
    for made in mw.simulate(lambda: run(True), MESH):
        torch.testing.assert_close(made, want, rtol=1e-2 if cast else 1e-12, atol=1e-2 if cast else 1e-12)
