"""What a run leaves of its steps: lines of JSON, scalars for TensorBoard, memory and arithmetic in what is shown."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import meshwright as mw
from meshwright.errors import ExtraError
from meshwright.train import OptionError, TrainConfig, show
from meshwright.train.log import KEPT, Lines, sinks_of
from meshwright.train.loop import train
from meshwright.train.usage import flops_share

Told = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 4)
    more = {"mesh": (("dp", 2),), "layers": 1, "hidden": 8, "heads": 2, "seq": 8, "batch": 4, "steps": 3}
    return {**more, "data": (str(tmp_path / "text"),), "log": str(tmp_path / "made" / "run.jsonl")}


def events(config: TrainConfig) -> Told:
    told: Told = []
    mesh = config.make_mesh()
    mw.simulate(lambda: train(config, mesh, lambda kind, values: told.append((kind, values))), mesh)
    return told


def written(config: TrainConfig, told: Told) -> tuple[list[dict[str, Any]], str]:
    """The lines of the log, and what the terminal shows."""
    out, sinks = io.StringIO(), sinks_of(config)
    listener = show.Show(config, Console(file=out, width=200), sinks)
    for kind, values in told:
        listener(kind, values)
    for sink in sinks:
        sink.close()
    return [json.loads(line) for line in Path(config.log or "").read_text().splitlines()], out.getvalue()


def test_a_line_for_the_run_and_one_for_each_step(config: dict[str, Any]) -> None:
    given = TrainConfig(**config, clip=0.5)
    told = events(given)
    (first, *steps), out = written(given, told)
    assert first["config"]["hidden"] == 8
    assert first["mesh"] == first["config"]["mesh"] == {"dp": 2}
    assert set(first["versions"]) == {"meshwright", "torch", "python"}
    assert first["predicted_bytes"] is None  # of a program alone
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line, values in zip(steps, [values for kind, values in told if kind == "step"], strict=True):
        assert line.keys() == {"step", *KEPT} - {"flops_share", "eval_loss"}
        assert line["loss"] == values["loss"]
        assert line["lr"] == given.learning_rate
        assert line["tokens_per_s"] == pytest.approx(4 * 8 / line["seconds"])
        assert line["peak_bytes"] >= 0
        assert line["grad_norm"] > 0
    assert re.search(r"tokens/s  peak \d+", out)


def test_the_norm_is_that_of_one_device(config: dict[str, Any]) -> None:
    norms = []
    for mesh in ((("dp", 1),), (("dp", 2), ("tp", 2))):
        told = events(TrainConfig(**{**config, "mesh": mesh, "dtype": "float64", "clip": 0.5}))
        norms.append([values["grad_norm"] for kind, values in told if kind == "step"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)


def test_a_program_is_predicted(config: dict[str, Any]) -> None:
    given = TrainConfig(**config, static=True, clip=0.5)
    (first, *steps), out = written(given, events(given))
    assert first["predicted_bytes"] > 0
    assert "grad_norm" not in steps[0]  # it stays in the program
    assert f"({show.in_bytes(first['predicted_bytes'])} predicted)" in out


def test_a_run_that_is_resumed_goes_on_at_the_end(config: dict[str, Any]) -> None:
    step = {"step": 0, "loss": float("nan"), "lr": 0.1, "seconds": 1.0}
    for given, lines in (({}, 2), ({}, 2), ({"resume": True, "save": "x"}, 4)):
        log = Lines(TrainConfig(**config, **given))
        log("start", {"begin": 0})
        log("step", step)
        log("warning", {"text": "no line"})
        log.close()
        found = Path(config["log"]).read_text().splitlines()
        assert len(found) == lines
    assert json.loads(found[-1])["loss"] == "nan"


def test_a_full_disk_is_an_error(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        close = flush

    log = Lines(TrainConfig(**config))
    monkeypatch.setattr(log, "file", Full())
    with pytest.raises(OptionError, match=r"--log .*run\.jsonl cannot be written \(No space left on device\)"):
        log("start", {"begin": 0})
    log.close()


def test_scalars_for_tensorboard(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[Any] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            found.append(folder)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            found.append((name, value, step))

        def flush(self) -> None:
            pass

        def close(self) -> None:
            found.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    board = str(tmp_path / "board")
    (sink,) = sinks_of(TrainConfig(**{**config, "log": None}, tensorboard=board))
    sink("start", {"begin": 0})
    sink("step", {"step": 4, "loss": 2.0, "lr": 0.1, "rel_loss_diff": 1.0})
    sink.close()
    assert found == [board, ("loss", 2.0, 5), ("lr", 0.1, 5), "closed"]
    with pytest.raises(OptionError, match=r"--tensorboard .*text cannot be written"):
        sinks_of(TrainConfig(**{**config, "log": None}, tensorboard=config["data"][0]))


def test_tensorboard_that_is_not_installed(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExtraError, match=r"^--tensorboard needs tensorboard: pip install tensorboard$"):
        sinks_of(TrainConfig(**{**config, "log": None}, tensorboard="x"))


def test_share_of_the_arithmetic() -> None:
    given = TrainConfig(precision="bf16", layers=2, hidden=64, seq=64, batch=8, mesh=(("dp", 2),))
    per_token = 6 * 1000 + 12 * 2 * 64 * 64
    assert flops_share(given, 1000, 0.5, "NVIDIA H100 80GB HBM3") == pytest.approx(per_token * 512 / (989e12 * 2 * 0.5))
    assert flops_share(given, 1000, 0.5, "a name that is not known") is None
    assert flops_share(TrainConfig(), 1000, 0.5, "NVIDIA H100 80GB HBM3") is None
