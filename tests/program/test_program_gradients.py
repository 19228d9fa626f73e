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


# ---------------------------------------------------------------------------------------------- with respect to weights

GRID, SPLIT, F32 = mw.Mesh({"dp": 2, "tp": 2}), {"dp": mw.Shard(0)}, torch.float32
ROWS = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TENSOR_PARALLEL = {"up.*": {"tp": mw.Shard(0)}, "down.weight": {"tp": mw.Shard(1)}}
STORED: dict[str, dict[str, Any]] = {
    "as_seen": {},
    "over": {"fsdp": "dp"},
    "cpu": {"offload": "cpu"},
    "over_cpu": {"fsdp": "dp", "offload": "cpu", "reshard_after_forward": False},
    "precision": {"fsdp": "dp", "precision": mw.Precision(reduce=F32)},
}


def _weights(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def hessian_vector(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    first = torch.autograd.grad(loss, _weights(model), create_graph=True)
    second = torch.autograd.grad(first, _weights(model), [p.detach() for p in _weights(model)], create_graph=True)
    return loss + 0.1 * sum((h * h).sum() for h in (*first, *second))


def adapted(model: nn.Module, x: Tensor) -> Tensor:
    """Two inner steps of MAML (Finn et al., 2017)."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    for _ in range(2):
        loss = torch.func.functional_call(model, weights, (x,)).square().mean()
        grads = torch.autograd.grad(loss, weights, create_graph=True)  # type: ignore[call-overload]
        weights = {n: p - 0.5 * grads[n] for n, p in weights.items()}
    return torch.func.functional_call(model, weights, (x / 2,)).square().mean()


def _of_inputs_and_some(model: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_()
    y = model(x)
    by_x, by_w = torch.autograd.grad(y.sum(), [x, model.up.weight], create_graph=True)
    (again,) = torch.autograd.grad(by_x.square().sum(), [model.down.weight], create_graph=True)
    return y.mean() + by_x.square().sum() + by_w.square().sum() + again.square().sum()


def _of_some_unused(model: nn.Module, x: Tensor) -> Tensor:
    loss = model.up(x).square().mean()
    grads = torch.autograd.grad(loss, _weights(model), create_graph=True, allow_unused=True)
    zeros = torch.autograd.grad(loss, _weights(model), create_graph=True, materialize_grads=True)
    return sum(torch.log(g.square().sum() + 1e-3) for g in grads if g is not None) + sum(
        (g + model(x).mean()).square().sum() for g in zeros
    )


def _trained(loss: Any, model: Any, step: Any, batches: list[Tensor]) -> list[Tensor]:
    return [
        *[mw.unshard(step(x.clone()).detach()).clone() for x in batches],
        *[mw.unshard(p.detach()) for p in _weights(model)],
    ]


@pytest.mark.parametrize(
    ("stored", "loss"),
    [
        ("over", hessian_vector), ("over", adapted), ("over", _of_inputs_and_some), ("over", _of_some_unused),
        ("cpu", hessian_vector), ("over_cpu", adapted), ("precision", hessian_vector), ("as_seen", _of_some_unused),
    ],
)  # fmt: skip
def test_gradients_by_weights_that_are_stored_in_another_way(stored: str, loss: Any) -> None:
    batches = [ROWS, ROWS[:1]] if stored == "cpu" else [ROWS]
    one = Critic()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)

    def on_one(x: Tensor) -> Tensor:
        made = loss(one, x)
        optimizer.zero_grad()
        made.backward()
        optimizer.step()
        return made

    want = _trained(loss, one, on_one, batches)

    def run() -> list[Tensor]:
        model = Critic()
        step = compile_step(
            model, loss, torch.optim.SGD(model.parameters(), lr=0.1), ROWS, mesh=GRID, layouts=TENSOR_PARALLEL,
            batch=SPLIT, **STORED[stored],
        )  # fmt: skip
        return _trained(loss, model, step, batches)

    tolerance = 1e-6 if stored == "precision" else 1e-10
    for found in mw.simulate(run, GRID):
        torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)


def test_what_the_outputs_do_not_depend_on_is_an_error() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return torch.autograd.grad(model.up(x).sum(), _weights(model))[0].sum()

    model = Critic()
    with pytest.raises(CaptureError, match=r"do not depend on input 2, of shape \(1, 8\): leave it out, or pass allow"):
        compile_step(model, loss, None, BATCH, mesh=mw.Mesh({"dp": 1}))


def test_a_gradient_comes_in_the_dtype_in_which_it_is_reduced() -> None:
    seen: list[Any] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        first = torch.autograd.grad(model(x).sum(), _weights(model), create_graph=True)
        second = torch.autograd.grad(first[0], _weights(model)[:1], [model.up.weight.detach()])
        seen.extend([model.up.weight.dtype, first[0].dtype, second[0].dtype])
        return second[0].square().sum() + first[0].sum()

    model = Critic()
    half = mw.Precision(torch.bfloat16, F32)
    step = compile_step(model, loss, None, BATCH, mesh=mw.Mesh({"dp": 1}), precision=half)
    assert seen[:3] == [torch.bfloat16, F32, F32]
    assert step(BATCH).dtype is F32
