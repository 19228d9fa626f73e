"""A step without numbers: it ends the run before its update, and names step, rank, op, line and tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.errors import DataError
from meshwright.train.config import TrainConfig
from meshwright.train.loop import Trainer, agreed_subject, train

STEP = """
import torch
import torch.nn as nn

def planted(model, x, y):
    h = model[0](x)
    LINE
    return (h - y).square().mean()

def loss_fn(model, batch):
    return planted(model, *batch)

def step(mesh):
    model = nn.Sequential(nn.Linear(6, 2)).double()
    x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    BATCH
    return model, loss_fn, torch.utils.data.TensorDataset(x, x[:, :2] * 2), {"layouts": {}}
"""
PLANTS = {  # what is planted in the loss and in the data, and what is said of it
    "root": ("h = (h - h.detach().abs().amax() - 1).sqrt()", "", r"NaN in the result of sqrt at planted_root.py:7"),
    "log": ("h = h * 0 * (h * 0).log()", "", r"NaN in the result of mul at planted_log.py:7"),
    "quotient": ("h = (h - h.detach()) / (h - h.detach())", "", r"NaN in the result of .*div.* at planted_quotient"),
    "power": ("h = (-h.abs() - 1) ** 0.5", "", r"NaN in the result of .*pow.* at planted_power.py:7"),
    "exp": ("h = (h.abs() * 1e6).exp()", "", r"infinity in the result of exp at planted_exp.py:7"),
    "masked": ("h = h.masked_fill(h == h, -torch.inf).softmax(-1)", "", r"NaN in the result of softmax at planted_"),
    "batch": ("", "x[7, 3] = torch.nan", r"NaN in batch\[0\]"),
    "labels": ("", "x = x.clone(); x[5, 0] = torch.inf", r"infinity in batch\[0\]"),
    "weight": ("", "model[0].bias.data[1] = torch.nan", r"NaN in 0.bias"),
    "gradient": ("h = (h - h.detach()).abs().sqrt()", "", r"NaN in the gradient of .* at planted_gradient.py:7"),
}  # fmt: skip


def config_of(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> TrainConfig:
    line, batch, _ = PLANTS[name]
    text = STEP.replace("LINE", line or "pass").replace("BATCH", batch or "pass")
    (tmp_path / f"planted_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    values: dict[str, Any] = {
        "mesh": (("dp", 2),), "model": f"planted_{name}:step", "batch": 6, "steps": 4, "dtype": "float64", "clip": 1.0,
    }  # fmt: skip
    return TrainConfig(**(values | more))


def nobody(kind: str, values: dict[str, Any]) -> None:
    """Hears what happens."""


@pytest.mark.parametrize("name", PLANTS)
def test_the_first_value_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, name, monkeypatch)
    with pytest.raises(DataError, match=rf"step [12]: the loss is .*{PLANTS[name][2]}.* on rank [01].* The update was"):
        mw.simulate(lambda: train(config, config.make_mesh(), nobody), config.make_mesh())


def test_the_weights_stay_and_micro_steps_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, "batch", monkeypatch, accumulate=2)

    def run() -> bool:
        trainer = Trainer(config, config.make_mesh(), agreed_subject(config, config.make_mesh()))
        before = [mw.unshard(p).detach().clone() for p in trainer.model.parameters()]
        with pytest.raises(DataError, match=r"NaN in batch\[0\] of micro-step [12] at"):
            trainer.check_finite(0, float(trainer.backward(0)))
        return all((mw.unshard(p) == b).all() for p, b in zip(trainer.model.parameters(), before, strict=True))

    assert mw.simulate(run, config.make_mesh()) == [True, True]


def test_a_captured_step_says_how_to_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(config_of(tmp_path, "batch", monkeypatch), static=True)
    with pytest.raises(DataError, match=r"the captured step has updated with it.*resume without --static"):
        mw.simulate(lambda: train(config, config.make_mesh(), nobody), config.make_mesh())
