"""``meshwright plan`` and ``meshwright calibrate``: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import meshwright as mw
from meshwright.cli import app

SIZES = ["--devices", "4", "--layers", "3", "--hardware", "cpu-gloo"]


def run(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


def test_the_last_line_is_one_object(tmp_path: Path) -> None:
    done = run("plan", "--preset", "gpt", *SIZES, "--json", "--save", str(tmp_path / "plan.toml"))
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout.splitlines()[-1])
    keys = {"mesh", "seconds", "step_seconds", "bytes", "memory", "layouts", "candidates"}
    assert keys <= said.keys()
    assert mw.load_layouts(tmp_path / "plan.toml").mesh == said["mesh"]
    text = run("plan", "--preset", "gpt", *SIZES, "--html", str(tmp_path / "plan.html"))
    page = (tmp_path / "plan.html").read_text()
    assert "Predicted time" in page
    assert "plan for 4 × cpu-gloo" in page
    assert text.exit_code == 0
    assert "a step takes" in text.output
    assert "other ways" in text.output


def test_your_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_plan.py").write_text(
        "import torch, torch.nn as nn\n"
        "def step(mesh):\n"
        "    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))\n"
        "    return net, lambda net, x: net(x).sum(), torch.ones(16, 64)\n"
    )
    monkeypatch.chdir(tmp_path)
    done = run("plan", "own_plan:step", "--mesh", "dp=2,tp=2", "--hardware", "cpu-gloo", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["mesh"] == {"dp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--preset", "gpt", "--devices", "4"], "--hardware: give the machine"),
        (["--preset", "gpt", "--devices", "4", "--hardware", "b100"], "is unknown"),
        (["--preset", "gptt", "--devices", "4", "--hardware", "cpu-gloo"], "did you mean 'gpt'"),
        (["--preset", "gpt", "--hardware", "cpu-gloo"], "--devices N, or --mesh"),
        (["--devices", "4", "--hardware", "cpu-gloo"], "--preset NAME, or MODULE:FUNCTION"),
        (["--preset", "gpt", *SIZES, "--memory", "1kB"], "too small"),
        (["--preset", "gpt", *SIZES, "--save", "/nowhere/plan.toml"], "--save /nowhere/plan.toml"),
    ],
)
def test_bad_input_is_one_line(args: list[str], words: str) -> None:
    done = run("plan", *args)
    assert done.exit_code == 2
    assert words in done.output.replace("\n", " ")


def test_calibrate_refuses_other_names() -> None:
    done = run("calibrate", "--save", "machine.toml")
    assert done.exit_code == 2
    assert ".json" in done.output


@pytest.mark.processes
def test_a_machine_is_measured(tmp_path: Path) -> None:
    done = run("calibrate", "--save", str(tmp_path / "machine.json"), "--memory", "4GB")
    assert done.exit_code == 0, done.output
    found = mw.hardware(tmp_path / "machine.json")
    assert found.memory == 4e9
    assert found.name == "machine"
    assert 1e8 < found.speed("float32") < 1e14
    assert 1e6 < found.links[0].bandwidth < 1e12
    assert 1e-6 < found.links[0].latency < 0.1
