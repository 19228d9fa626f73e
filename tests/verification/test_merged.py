"""Updates of several micro-batches: wrong merges are found, right ones pass, and what is not compared is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.passes import gradient_merge
from meshwright.verification import Verification, merged

DP = mw.Mesh({"dp": 2})
THREE = ["gradient-merge:k_steps=3"]


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def total(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]).square().mean(-1) * batch[1]).sum()


def masked(model: nn.Module, batch: Any) -> torch.Tensor:
    return total(model, batch) / batch[1].sum()


def net(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), *more, nn.Linear(5, 3))


def reported(loss: Any, rows: int, passes: Any = THREE, model: nn.Module | None = None, **said: Any) -> Verification:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(rows, 5, generator=generator) < 0.6).double()
    mask[:, 0] = 1
    batch = torch.randn(rows, 5, 4, generator=generator), mask
    said = {"batch": {"dp": mw.Shard(0)}, "modes": ["captured"], "steps": 1, "save": False, **said}
    return mw.verify(model or net(), loss, batch, DP, {}, passes=passes, **said)


@pytest.mark.parametrize(
    ("loss", "rows", "passes"),
    [
        (mean, 5, THREE), (masked, 4, THREE), (total, 4, THREE),
        (masked, 2, ["gradient-merge:k_steps=2,weighted=false"]), (total, 4, ["gradient-merge:k_steps=2,avg=false"]),
    ],
)  # fmt: skip
def test_right_merges_pass(loss: Any, rows: int, passes: Any) -> None:
    report = reported(loss, rows, passes)
    assert report.passed, report
    assert not report.notes, report


def test_with_all_that_an_update_does() -> None:
    report = reported(masked, 5, [*THREE, "data-parallel-optimization"], clip_grad_norm=0.1, shard_states="dp")
    assert report.passed, report
    assert not report.notes, report


@pytest.mark.parametrize("rows", [4, 2])
def test_a_merge_that_forgets_weights_is_found(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches count alike, whatever their masks count."""
    monkeypatch.setattr(gradient_merge, "weight_of", lambda program: None)
    report = reported(masked, rows)
    (found,) = report.departures
    assert (found.phase, found.op) == ("merge", "the merge of micro-batches")
    assert "an update from micro-batches of 2, 2, 2 rows: " in found.value


def mixes(model: nn.Module, batch: Any) -> torch.Tensor:
    scores = model(batch[0]).sum((1, 2))
    return (scores.softmax(0) * scores).sum()


def test_a_loss_that_mixes_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_merge.GradientMerge, "weighing", None)
    monkeypatch.setattr(gradient_merge, "weight_of", lambda program: None)
    assert reported(mixes, 4).departures[0].phase == "merge"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"model": net(nn.Dropout(0.5))}, "the step draws random numbers"),
        ({"loss": lambda m, b: (m(b[0]) * b[1]).square().mean()}, "different numbers of rows"),
    ],
)
def test_what_is_not_compared_is_named(said: dict[str, Any], words: str) -> None:
    if "loss" in said:
        batch = torch.randn(4, 5, 4), torch.ones(1, 3)
        how = {"batch": {"0": {"dp": mw.Shard(0)}}, "modes": ["captured"], "steps": 1, "save": False}
        report = mw.verify(net(), said["loss"], batch, DP, {}, passes=THREE, **how)
    else:
        report = reported(mean, 4, model=said["model"])
    assert report.passed, report
    assert len(report.notes) == 1, report
    assert words in report.notes[0]


def test_rows_of_micro_batches_are_joined() -> None:
    parts = [(torch.ones(2, 3), torch.tensor(1.0), "text"), (torch.zeros(1, 3), torch.tensor(1.0), "text")]
    whole = merged.joined(parts)
    assert torch.equal(whole[0], torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3]))
    assert whole[1:] == (torch.tensor(1.0), "text")
