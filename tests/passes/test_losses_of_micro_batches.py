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
    "a mean over rows, summed": lambda out, y: ((out - y).square().mean(0) * torch.arange(4)).sum(),
    "half of a sum": lambda out, y: 0.5 * (out - y).square().sum(),
    "a number": lambda out, y: F.mse_loss(out, y) + 3,
    "rows times ones": lambda out, y: out.mean(1) @ torch.ones(len(y), dtype=F64) / len(y),
    "sum of mse_loss": lambda out, y: F.mse_loss(out, y, reduction="sum"),
}
REFUSED: dict[str, tuple[Loss, str]] = {
    "a sum and a mean": (lambda out, y: F.mse_loss(out, y, reduction="sum") + out.mean(), "a sum over the batch and"),
    "max": (lambda out, y: (out - y).abs().max(), "max.default reduces over all rows"),
    "norm": (lambda out, y: (out - y).norm(), "linalg_vector_norm.default of a sum over the batch"),
    "std": (lambda out, y: out.std(), "std.correction uses a sum over the rows"),
    "var of rows": (lambda out, y: out.var(0).sum(), "var.dim uses a sum over the rows"),
    "amax of rows": (lambda out, y: out.amax(0).sum(), "amax.default reduces over all rows"),
    "some rows": (lambda out, y: (out[:2] - y[:2]).square().mean(), "slice.Tensor reads rows of other micro-batches"),
    "some rows, summed": (lambda out, y: out[-3:].sum(), "slice.Tensor reads rows of other micro-batches"),
    "neighbours": (lambda out, y: (out * out.roll(1, 0)).mean(), "roll.default reads rows of other"),
    "other labels": (lambda out, y: F.triplet_margin_loss(out, y, y.flip(0)), "flip.default reads rows of other"),
    "scan": (lambda out, y: out.cumsum(0).sum(), "cumsum.default reads rows of other"),
    "a root of rows": (lambda out, y: out.square().mean() * len(y) ** 0.5, "mul.Tensor takes the number 1.73205"),
    "rows inside": (lambda out, y: (out / len(y)).square().sum(), "square.default uses how many rows the batch has"),
    "rows filled in": (lambda out, y: out.mean(1) @ torch.full((len(y),), 1 / len(y), dtype=F64), "full.default takes"),
    "rows as a tensor": (lambda out, y: (out * torch.tensor(1 / len(y))).square().sum(), "takes the number 0.33"),
    "rows added": (lambda out, y: out.mean() + len(y), "add.Tensor takes the number 3"),
    "largest label": (lambda out, y: (out / (y > 0).long().max()).mean(), "max.default reduces over all rows"),
    "number of labels": (lambda out, y: (out * (y > 0).sum(0)).mean(), "two sums over the batch are multiplied"),
    "a sum and a number": (lambda out, y: out.sum() + 3, "is the same for all rows, a penalty say, is added to a sum"),
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


@pytest.mark.thin(3)
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


PENALTIES: dict[str, Callable[[nn.Module], Tensor]] = {
    "all": lambda model: sum((p.square().sum() for p in model.parameters()), torch.zeros((), dtype=F64)),
    "of the first stage": lambda model: model.get_parameter("layers.0.weight").norm(),
    "of what only the last one has": lambda model: model.get_parameter("head").abs().sum(),
}


class Headed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.randn(4, 4, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.head


@pytest.mark.thin(3)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "v"])
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_on_weights(name: str, schedule: str) -> None:
    """It is computed where the weights are, which stay where the model uses them."""
    x, y = torch.randn(7, 4, dtype=F64), torch.randn(7, 4, dtype=F64)

    def of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1]) + 0.1 * PENALTIES[name](model)

    def run(mesh: mw.Mesh | None) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(1)
        model = Headed()
        model.layers.extend(nn.Linear(4, 4, dtype=F64) for _ in range(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if mesh is None:
            of(model, (x, y)).backward()
            optimizer.step()
            return of(model, (x, y)).detach(), {n: p.detach() for n, p in model.named_parameters()}
        passes = [f"pipeline:micro_batches=3,schedule={schedule}"]
        step = mw.compile_step(model, of, optimizer, (x, y), mesh=mesh, stages={"pp": "layers"}, passes=passes)
        step((x, y))
        assert model.head.placements[0] == mw.At(0 if schedule == "v" else 1)  # type: ignore[attr-defined]
        return step.eval((x, y)), {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}

    mesh, want = mw.Mesh({"pp": 2}), run(None)
    torch.testing.assert_close(mw.simulate(lambda: run(mesh), mesh)[0], want, rtol=1e-12, atol=1e-12)


def test_a_batch_of_which_nothing_counts() -> None:
    """Its loss is no number, its gradients are zeros, as of one device."""
    x, y = torch.randn(5, 4, dtype=F64), torch.full((5,), -100)

    def run(mesh: mw.Mesh | None) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1])

        if mesh is None:
            loss = of(model, (x, y))
            loss.backward()
            optimizer.step()
            return loss.detach(), model.layers[0].weight.detach()  # type: ignore[return-value]
        passes = ["pipeline:micro_batches=2"]
        step = mw.compile_step(model, of, optimizer, (x, y), mesh=mesh, stages={"pp": "layers"}, passes=passes)
        return mw.unshard(step((x, y))), mw.unshard(model.layers[0].weight.detach())  # type: ignore[return-value, arg-type]

    mesh, want = mw.Mesh({"pp": 2}), run(None)
    torch.testing.assert_close(mw.simulate(lambda: run(mesh), mesh)[0], want, equal_nan=True)
