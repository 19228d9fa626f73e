"""A step without numbers: it ends the run before its update, and names step, rank, op, line and tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import DataError
from meshwright.train.config import TrainConfig
from meshwright.train.loop import StaticTrainer, Trainer, agreed_subject, train
from meshwright.train.not_finite import check_weights

STEP = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

def planted(model, x, y):
    h = model[0](x)
    LINE
    return (h - y).square().mean()

def loss_fn(model, batch):
    return planted(model, *batch)

def step(mesh):
    model = nn.Sequential(nn.Linear(6, 2), nn.Embedding(4, 2), nn.Linear(2, 2)).double()
    x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x[:, :2] * 2
    BATCH
    return model, loss_fn, torch.utils.data.TensorDataset(x, y), {"layouts": {}}
"""
CHECKPOINT = "h = checkpoint(lambda t: (t - 100).sqrt(), h, use_reentrant=False)"
BUFFER = "model.register_buffer('shift', torch.full((2,), torch.nan, dtype=torch.float64))"
# What is planted in the loss and in the data, and which value an error names; 9 is the line that is planted.
PLANTS = {
    "root": ("h = (h - h.detach().abs().amax() - 1).sqrt()", "", "NaN in the result of sqrt:9"),
    "log": ("h = h * 0 * (h * 0).log()", "", "NaN in the result of mul:9"),
    "quotient": ("h = (h - h.detach()) / (h - h.detach())", "", "NaN in the result of div:9"),
    "power": ("h = (-h.abs() - 1) ** 0.5", "", "NaN in the result of pow:9"),
    "exp": ("h = (h.abs() * 1e6).exp()", "", "infinity in the result of exp:9"),
    "masked": ("h = h.masked_fill(h == h, -torch.inf).softmax(-1)", "", "NaN in the result of softmax:9"),
    "batch": ("", "x[7, 3] = torch.nan", r"NaN in batch.0"),
    "row": ("", "x = x.clone(); x[5, 0] = torch.inf", "infinity in batch.0"),
    "weight": ("", "model[0].bias.data[1] = torch.nan", "NaN in 0.bias"),
    "gradient": ("h = (h - h.detach()).abs().sqrt()", "", "infinity in the (gradient|backward) of .*:9"),
    "label": ("", "y[7, 1] = torch.nan", "NaN in batch.1"),
    "mask": ("h = (h @ h.T + torch.full((1,), -torch.inf)).softmax(-1) @ h", "", "NaN in the result of softmax:9"),
    "count": ("h = h / (h.detach() * 0).sum()", "", "infinity in the result of div:9"),
    "ignored": ("h = h + F.cross_entropy(h, y[:, 0].long() * 0 - 100)", "", "NaN in the result of cross_entropy.*:9"),
    "half": ("h = (h.half() * 1e4 * 1e4).double()", "", "infinity in the result of mul:9"),
    "bfloat": ("h = (h.bfloat16() * 1e38 * 1e38).double()", "", "infinity in the result of mul:9"),
    "embedding": ("h = h + model[1](y[:, 0].long() * 0)", "model[1].weight.data[0] = torch.nan", "NaN in 1.weight"),
    "scale": ("h = h * 1e200 * 1e200", "", "infinity in the result of mul:9"),
    "rank": ("h = h.abs() / (x[:, :1] < 0.9)", "", "infinity in the result of div:9"),
    "checkpoint": (CHECKPOINT, "", "NaN in the result of sqrt:9"),
    "frozen": ("h = model[2](h)", "model[2].requires_grad_(False).weight.data[0] = torch.inf", "infinity in 2.weight"),
    "slope": ("h = h + (h - h.detach()) ** 0.5", "", "infinity in the (gradient|backward) of .*:9"),
    "buffer": ("h = h + model.shift", BUFFER, "NaN in shift"),
    "domain": ("h = torch.acos(h.abs() + 1)", "", "NaN in the result of acos:9"),
    "product": ("h = h * torch.inf * 0", "", "infinity in the result of mul:9"),
}  # fmt: skip


FINITE = {"nothing": ("", "", ""), "large": ("h = h * 1e3", "", "")}


def config_of(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> TrainConfig:
    line, batch, _ = (PLANTS | FINITE)[name]
    text = STEP.replace("LINE", line or "pass").replace("BATCH", batch or "pass")
    (tmp_path / f"planted_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    values: dict[str, Any] = {
        "mesh": (("dp", 2),), "model": f"planted_{name}:step", "batch": 6, "steps": 4, "dtype": "float64", "clip": 1.0,
    }  # fmt: skip
    return TrainConfig(**(values | more))


def nobody(kind: str, values: dict[str, Any]) -> None:
    """Hears what happens."""


@pytest.mark.parametrize("static", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("name", PLANTS)
def test_the_first_value_is_named(name: str, static: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, name, monkeypatch, static=static, clip=None)
    value, _, line = PLANTS[name][2].partition(":")
    place = rf" at planted_{name}\.py:{line}" if line else ""
    message = rf"step [12]: the loss is .*first there was {value}{place}.* on rank [01].* The update was not made"
    with pytest.raises(DataError, match=message):
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


ONE_RANK = "h = h.masked_fill((x[:, :1] > 0.9) & (h == h), -torch.inf).softmax(-1)"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"accumulate": 3},
        {"fsdp": "dp", "accumulate": 2},
        {"shard_states": "dp", "optimizer": "sgd"},
        {"passes": ("data-parallel-optimization",)},
    ],
    ids=str,
)
def test_a_loss_without_a_number_beside_finite_gradients(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank, in one micro-step: no gradient reads the masked values, and no rank updates."""
    monkeypatch.setitem(PLANTS, "one_rank", (ONE_RANK, "", ""))
    config = config_of(tmp_path, "one_rank", monkeypatch, static=True, batch=4, **more)

    def run() -> tuple[bool, int]:
        trainer = StaticTrainer(config, config.make_mesh(), agreed_subject(config, config.make_mesh()))
        for step in range(4):
            before = [mw.unshard(p).detach().clone() for p in trainer.model.parameters()]
            loss = float(trainer.backward(step))
            after = [mw.unshard(p).detach() for p in trainer.model.parameters()]
            same = all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
            if loss != loss:
                return same, step
            assert not same
        return False, -1

    assert {same for same, _ in mw.simulate(run, config.make_mesh())} == {True}


STATE = "values that are not finite in the optimizer's state exp_avg"
UPDATES = {"lr": "lr inf", "weight_decay": "weight_decay inf", "state": STATE}  # what is planted, and what is named


@pytest.mark.parametrize(
    ("name", "static"), [("lr", False), ("lr", True), ("weight_decay", False), ("state", False), ("state", True)]
)
def test_an_update_is_named(name: str, static: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, "nothing", monkeypatch, static=static)

    def run() -> None:
        kind = StaticTrainer if static else Trainer
        trainer = kind(config, config.make_mesh(), agreed_subject(config, config.make_mesh()))
        for step in range(3):
            trainer.check_finite(step, float(trainer.backward(step)))
            if name == "state" and step:
                trainer.optimizer.state[trainer.model.get_parameter("0.weight")]["exp_avg"].fill_(torch.nan)
            elif name != "state" and not step:
                trainer.optimizer.param_groups[0][name] = torch.inf
            trainer.update()
        with pytest.raises(
            DataError, match=rf"step 3: 0.weight is not finite after the update \(.*{UPDATES[name]}.*\)"
        ):
            check_weights(2, trainer.mesh, trainer.model, trainer.optimizer)
        trainer.check_finite(3, float(trainer.backward(3)))

    with pytest.raises(DataError, match=rf"in 0.weight.* \(the update before has {UPDATES[name]}\)"):
        mw.simulate(run, config.make_mesh())


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(
        tmp_path, "large", monkeypatch, lr=1.7e308, clip=None, save=str(tmp_path / "run"), optimizer="sgd"
    )
    with pytest.raises(DataError, match=r"step 1: 0.weight is not finite after the update. It is not saved"):
        mw.simulate(lambda: train(replace(config, steps=1), config.make_mesh(), nobody), config.make_mesh())
    assert not mw.Checkpoints(tmp_path / "run").steps


MERGED = {"accumulate": 2, "batch": 3}
MESHES = {  # and other forms of a captured step
    "merged": MERGED,
    "stored": {"mesh": (("dp", 2), ("tp", 2)), "fsdp": "dp"},
    "clipped": {"clip": 1.0},
}


@pytest.mark.parametrize("form", MESHES)
def test_forms_of_a_captured_step(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, "batch", monkeypatch, **{"clip": None, "static": True} | MESHES[form])
    words = r"NaN in batch\.0( in micro-step [12])? on rank.* The update was not made"
    with pytest.raises(DataError, match=words):
        mw.simulate(lambda: train(config, config.make_mesh(), nobody), config.make_mesh())


@pytest.mark.long
def test_a_pipeline_names_the_stage(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 2)
    config = TrainConfig(
        mesh=(("pp", 2),), layers=2, hidden=8, heads=2, seq=8, batch=4, micro_batches=2, data=(str(tmp_path / "text"),)
    )

    def run() -> None:
        trainer = StaticTrainer(config, config.make_mesh(), agreed_subject(config, config.make_mesh()))
        with torch.no_grad():
            trainer.model.get_parameter("head.weight").fill_(torch.nan)
        trainer.check_finite(0, float(trainer.backward(0)))

    with pytest.raises(DataError, match=r"step 1: .*NaN in head.weight on rank 1\. The update was not made"):
        mw.simulate(run, config.make_mesh())
