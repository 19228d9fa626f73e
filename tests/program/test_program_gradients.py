"""Gradients that are part of the loss: gradient penalties, captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import meshwright as mw
from meshwright.errors import CaptureError
from meshwright.program.compile import compile_step

BATCH = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8).double(), nn.Linear(8, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    """The critic's loss of a Wasserstein GAN with gradient penalty (Gulrajani et al., 2017)."""
    x = x.detach().requires_grad_()
    scores = model(x)
    (by_sum,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    (by_vector,) = torch.autograd.grad(scores, [x], torch.ones_like(scores), create_graph=True)
    return scores.mean() + (by_sum.norm(dim=-1) - 1).square().mean() + by_vector.square().sum()


def one_device(steps: int) -> tuple[list[float], list[Tensor]]:
    model = Critic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = penalised(model, BATCH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 3}, {"tp": 4}], ids=str)
def test_gradient_penalty_equals_one_device(axes: dict[str, int]) -> None:
    mesh = mw.Mesh(axes)
    losses, params = one_device(20)

    def run() -> Any:
        model = Critic()
        step = compile_step(
            model, penalised, torch.optim.AdamW(model.parameters(), lr=1e-2), BATCH, mesh=mesh,
            layouts={"up.weight": {"tp": mw.Shard(0)}} if "tp" in axes else {},
            batch={"dp": mw.Shard(0)} if "dp" in axes else {},
        )  # fmt: skip
        return [step(BATCH).item() for _ in range(20)], [mw.unshard(p.detach()) for p in model.parameters()]

    for got, found in mw.simulate(run, mesh):
        torch.testing.assert_close(got, losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(found, params, rtol=1e-9, atol=1e-12)


def test_batched_gradients_are_refused() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = model(x)
        (g,) = torch.autograd.grad(y, x, torch.ones(2, *y.shape, dtype=y.dtype), is_grads_batched=True)
        return g.sum()

    model = Critic()
    with pytest.raises(CaptureError, match=r"is_grads_batched=True\) cannot be captured: loop"):
        compile_step(model, loss, None, BATCH, mesh=mw.Mesh({"dp": 1}))
