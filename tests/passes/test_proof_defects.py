"""Defects that passes once had, put back: the comparison with the program without passes finds each at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.errors import DesyncError, PassError
from meshwright.program.capture import build
from meshwright.program.capture.loss_sums import MicroBatchWeight
from meshwright.program.ir.loss_weight import LossWeight
from meshwright.program.step import CompiledStep

Tensor = torch.Tensor
Loss = Callable[[nn.Module, Any], Tensor]
DP = mw.Mesh({"dp": 2})


@pytest.fixture(autouse=True)
def compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledStep, "compares", True)


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 7))


def run(make: type[nn.Module], loss: Loss, batches: list[Any], passes: list[str]) -> str:
    def rank() -> None:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile_step(model, loss, optimizer, batches[0], mesh=DP, batch={"dp": mw.Shard(0)}, passes=passes)
        for batch in batches:
            step(batch)

    try:
        mw.simulate(rank, DP)
    except (PassError, DesyncError) as error:
        return str(error)
    return ""


def labels(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 7, (rows, 5), generator=g)
    y[torch.rand(rows, 5, generator=g) < 0.5] = -100
    return torch.randn(rows, 5, 4, generator=g), y


def smoothed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), label_smoothing=0.1)


def over_batch(model: nn.Module, batch: Any) -> Tensor:
    s = model(batch[0]).sum((1, 2))
    return (s.softmax(0) * s).sum()


def sequence_mean(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    mask = y >= 0
    per_row: Tensor = (model(x).square().mean(-1) * mask).sum(1) / mask.sum(1).clamp(min=1)
    return per_row.mean()


def _weighed(weight: LossWeight) -> Callable[..., MicroBatchWeight]:
    return lambda *args: MicroBatchWeight(weight=weight)


MERGES: dict[str, tuple[Loss, LossWeight, tuple[int, ...]]] = {
    "labels that count are not counted": (smoothed, LossWeight(5.0, mean=True), (4, 4)),
    "unequal rows weigh alike": (sequence_mean, LossWeight(1.0, mean=True), (4, 2)),
    "a mean is taken for a sum": (sequence_mean, LossWeight(), (4, 2)),
    "rows are mixed": (over_batch, LossWeight(1.0, mean=True), (4, 4)),
    "rows are mixed, one on each rank": (over_batch, LossWeight(), (2, 2)),
}


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.thin(2)
def test_weights_of_micro_batches(name: str) -> None:
    loss, weight, rows = MERGES[name]
    batches = [labels(i + 3, n) for i, n in enumerate(rows)]  # 5 labels count in the first, 15 or 4 in the other
    with mock.patch.object(build, "find_weight", _weighed(weight)):
        found = run(Plain, loss, batches, ["gradient-merge:k_steps=2"])
    assert "changes the weights of micro-batches" in found or "pass gradient-merge changes the gradient" in found
