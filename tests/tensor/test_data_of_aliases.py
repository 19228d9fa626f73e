"""Writes that no version counter tells of: through ``.data`` of whatever has the memory of a tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import meshwright as mw

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


def test_sums_that_were_reduced_are_reduced_again() -> None:
    def run() -> list[float]:
        y = mw.shard_tensor(torch.arange(12.0).view(6, 2), MESH, {"dp": mw.Shard(0)}).sum(0)
        before = float(y.max())
        y.detach().data.mul_(2)
        return [before, float(y.max()), float((y * y).sum())]

    for made in mw.simulate(run, MESH):
        assert made == [36.0, 72.0, 60.0**2 + 72.0**2]
