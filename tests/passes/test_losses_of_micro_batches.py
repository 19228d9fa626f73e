"""Losses of a batch cut into unequal micro-batches: the number and update of one device, or refused by their line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.errors import PassError

F64 = torch.float64
Loss = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=F64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


RIGHT: dict[str, Loss] = {
    "mse_loss": F.mse_loss,
    "bce_with_logits": lambda out, y: F.binary_cross_entropy_with_logits(out, (y > 0).to(F64)),
    "bce": lambda out, y: F.binary_cross_entropy(out.sigmoid(), (y > 0).to(F64)),
    "huber": F.huber_loss,
    "smooth_l1": F.smooth_l1_loss,
    "soft margin": lambda out, y: F.soft_margin_loss(out, y.sign()),
    "multi margin": lambda out, y: F.multi_margin_loss(out, y.argmax(1)),
    "cross_entropy": lambda out, y: F.cross_entropy(out, y.argmax(1)),
    "sums of labels": lambda out, y: F.cross_entropy(out, y.argmax(1), reduction="sum"),
    "two means": lambda out, y: F.mse_loss(out, y) + 0.1 * out.square().mean(),
    "a mean with a sign": lambda out, y: -0.5 * F.mse_loss(out, y),
    "a mean of means": lambda out, y: (out - y).square().mean(1).mean(0),
    "a mean of a stack": lambda out, y: torch.stack([F.mse_loss(out, y), out[:, 0].square().mean()]).mean(),
    "a sum of a stack": lambda out, y: torch.stack([F.mse_loss(out, y), out.sum() / out.numel()]).view(2, 1).sum(),
    "a stack of sums": lambda out, y: torch.stack([out.sum(), (out - y).square().sum()]).mean(),
    "a fifth of five sums": lambda out, y: torch.stack([out.sum(), *[(out - y).square().sum()] * 4]).sum() / 5,
    "sum": lambda out, y: (out - y).square().sum(),
    "sum by a number": lambda out, y: (out - y).square().sum() / 21.0,
    "sum by rows": lambda out, y: (out - y).square().sum() / len(y),
    "sum of mse_loss": lambda out, y: F.mse_loss(out, y, reduction="sum"),
}
REFUSED: dict[str, tuple[Loss, str]] = {
    "half of a sum": (lambda out, y: 0.5 * (out - y).square().sum(), "times 1/2"),
    "a sum and a mean": (lambda out, y: F.mse_loss(out, y, reduction="sum") + out.mean(), "a sum over the batch and"),
    "max": (lambda out, y: (out - y).abs().max(), "max.default over the batch"),
    "norm": (lambda out, y: (out - y).norm(), "over the batch"),
    "std": (lambda out, y: out.std(), "over the batch"),
    "var of rows": (lambda out, y: out.var(0).sum(), "all rows of the batch together"),
    "amax of rows": (lambda out, y: out.amax(0).sum(), "all rows of the batch together"),
    "some rows": (lambda out, y: (out[:2] - y[:2]).square().mean(), "lie beside each other, or some of them"),
    "some rows, summed": (lambda out, y: out[-3:].sum(), "lie beside each other, or some of them"),
    "neighbours": (lambda out, y: (out * out.roll(1, 0)).mean(), "lie beside each other"),
    "other labels": (lambda out, y: F.triplet_margin_loss(out, y, y.flip(0)), "lie beside each other"),
    "scan": (lambda out, y: out.cumsum(0).sum(), "lie beside each other"),
    "places": (lambda out, y: (out.sum(1) * torch.arange(len(y))).mean(), "the places of rows"),
}


def _step(loss: Loss, mesh: mw.Mesh | None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(7, 4, dtype=F64), torch.randn(7, 4, dtype=F64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model(batch[0]), batch[1])

    if mesh is None:
        made = of(model, (x, y))
        made.backward()
        optimizer.step()
        return made.detach(), model.layers[0].weight.detach()  # type: ignore[union-attr, return-value]
    passes = ["pipeline:micro_batches=3,schedule=1f1b"]  # of 3, 2 and 2 rows
    step = mw.compile_step(model, of, optimizer, (x, y), mesh=mesh, stages={"pp": "layers"}, passes=passes)
    made = step((x, y))
    return mw.unshard(made).detach(), mw.unshard(model.layers[0].weight).detach()  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("name", RIGHT)
def test_the_loss_and_update_of_one_device(name: str) -> None:
    mesh, want = mw.Mesh({"pp": 2}), _step(RIGHT[name], None)
    for made in mw.simulate(lambda: _step(RIGHT[name], mesh), mesh):
        torch.testing.assert_close(made, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_weighted_mean_is_refused(name: str) -> None:
    loss, message = REFUSED[name]
    mesh = mw.Mesh({"pp": 2})
    with pytest.raises(PassError, match=message):
        mw.simulate(lambda: _step(loss, mesh), mesh)
