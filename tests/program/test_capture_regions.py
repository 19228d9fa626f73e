"""Regions of a captured model: ``torch.no_grad`` and ``torch.autocast`` inside each other, as on one device."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import meshwright as mw
from meshwright.errors import CaptureError

MESH = mw.Mesh({"dp": 2})
X = torch.arange(24.0, dtype=torch.float64).view(6, 4) / 9 - 1
REGIONS = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "off": lambda: torch.autocast("cpu", enabled=False),
}


class Model(nn.Module):
    """Each block, and what it gives again with no gradient."""

    def __init__(self, outer: list[str], inner: list[str], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for _ in range(2))
        self.outer, self.inner = outer, inner

    def forward(self, x: Tensor) -> Tensor:
        y = x
        with entered(self.outer):
            for layer in self.layers:
                x = layer(x.to(layer.weight.dtype))
                with entered(self.inner):
                    y = x * 2 + layer(y.to(layer.weight.dtype))
            x = x + y
        return (x * layer(y.to(layer.weight.dtype))).sum(dtype=torch.float64)


def entered(names: list[str]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for name in names:
        stack.enter_context(REGIONS[name]())
    return stack


def step_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mw.compile_step(model, lambda m, b: m(b), optimizer, x, mesh=MESH, batch={"dp": mw.Shard(0)})
    step(x)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    return [mw.unshard(p).detach() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (["autocast"], ["no_grad"]),
        (["no_grad"], ["autocast"]),
        (["no_grad"], ["enable_grad", "autocast"]),
        (["autocast", "no_grad"], ["enable_grad"]),
        (["autocast"], ["off", "no_grad"]),
        ([], ["autocast", "no_grad"]),
    ],
    ids=lambda names: "-".join(names) or "none",
)
def test_no_grad_and_autocast_inside_each_other(outer: list[str], inner: list[str], dtype: torch.dtype) -> None:
    one, x = Model(outer, inner, dtype), X.to(dtype)
    model = copy.deepcopy(one)
    one(x).backward()
    with torch.no_grad():
        want = [p if p.grad is None else p - 0.1 * p.grad for p in one.parameters()]
    near = {torch.float64: 1e-14, torch.float32: 0.05}[dtype]  # autocast rounds to bfloat16, on each rank its part
    for found in mw.simulate(lambda: step_of(copy.deepcopy(model), x), MESH):
        torch.testing.assert_close(found, want, rtol=near, atol=near)


def test_a_refusal_inside_leaves_no_region_open() -> None:
    class Refused(Model):
        def forward(self, x: Tensor) -> Tensor:
            with entered(["autocast", "no_grad"]):
                return torch.matrix_exp(self.layers[0](x).T @ x).sum()

    def run() -> tuple[bool, bool]:
        model = Refused([], [], torch.float64)
        with contextlib.suppress(CaptureError):
            step_of(model, X)
        return torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()

    assert set(mw.simulate(run, MESH)) == {(False, True)}
