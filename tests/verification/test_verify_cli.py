"""``meshwright verify``: exit codes, text, JSON, and the report that is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.verification import Verification

OWN = """
import torch
import torch.nn as nn
import meshwright as mw
from meshwright.ranks import runtime


def right(mesh):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    batch = torch.randn(4, 4), torch.randn(4, 2)
    said = {"layouts": {"0.*": {"tp": mw.Shard(0)}}, "batch": {"dp": mw.Shard(0)}, "optimizer": torch.optim.SGD}
    return model, lambda m, b: (m(b[0]) - b[1]).square().mean(), batch, said


def wrong(mesh):
    model, loss_fn, batch, said = right(mesh)
    return model, lambda m, b: loss_fn(m, b) * (1.0 + runtime.RT.rank), batch, said


def odd(mesh):
    model, loss_fn, batch, said = right(mesh)
    return model, lambda m, b: m(b[0]), batch, said
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "verifyown.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "verifyown"


def run(*args: str) -> tuple[int, str]:
    made = CliRunner().invoke(app, ["verify", "--mesh", "dp=2,tp=2", "--modes", "eager", "--steps", "1", *args])
    return made.exit_code, made.output + (made.stderr if made.exit_code == 2 else "")


def test_right_is_0_and_kept(own: str, tmp_path: Path) -> None:
    code, said = run(f"{own}:right", "--report", str(tmp_path / "made.json"))
    assert code == 0, said
    assert "passed" in said
    assert Verification.load(tmp_path / "made.json").passed


def test_sizes_are_taken_down_where_asked(own: str) -> None:
    code, said = run(f"{own}:right", "--shrink", "always", "--json")
    assert code == 0
    assert json.loads(said)["taken"] == ["the batch: 2 of 4 along dim 0"]


def test_wrong_is_1_and_named(own: str) -> None:
    code, said = run(f"{own}:wrong", "--json")
    assert code == 1
    (found,) = json.loads(said)["departures"]
    assert (found["op"], found["phase"]) == ("mul", "forward")
    assert found["line"].startswith("verifyown.py:")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("odd",), "return the loss, a scalar"),
        (("nothing",), "has no attribute 'nothing'"),
        (("right", "--pass", "gradient-merge:k_steps=2"), "--pass is for captured steps"),
        (("right", "--seconds", "0"), "--seconds"),
        (("right", "--modes", "eagre"), "eager,captured, eager, captured was expected"),
    ],
)
def test_bad_input_is_2(own: str, args: tuple[str, ...], words: str) -> None:
    code, said = run(f"{own}:{args[0]}", *args[1:])
    assert code == 2, said
    assert words in " ".join(said.split())
