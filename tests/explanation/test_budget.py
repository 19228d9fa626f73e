"""What a step may send: budgets, and comparing with what was sent before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from typer.testing import CliRunner

import meshwright as mw
from meshwright.cli import app
from meshwright.errors import ExplicitError, MeshwrightError
from meshwright.explanation import Explanation, check_budget, explain_program, grown
from meshwright.program import Plan, build

MESH = mw.Mesh({"dp": 2, "tp": 2})
SHARDED = {"0.*": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}}


def why(layouts: Any = SHARDED) -> Explanation:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        batch = torch.empty(4, 8)
    plan = Plan(layouts=layouts, batch={"dp": mw.Shard(0)})
    return explain_program(build(net, lambda m, b: m(b).square().mean(), None, batch, MESH, plan).program)


def test_a_budget_that_holds() -> None:
    # The output of the row-parallel linear: 2 rows of 8 floats on a rank, a ring of two: 2 * 1/2 * 64 bytes.
    check_budget(why(), {"tp": {"all_reduce": 64}})
    check_budget(why({}), {"tp": 0})


def test_one_that_does_not_names_the_collective() -> None:
    with pytest.raises(ExplicitError, match=r"64 B over tp, and 63 B are allowed.*test_budget.py:\d+.*all_reduce"):
        check_budget(why(), {"tp": 63})
    with pytest.raises(ExplicitError, match=r"by all_reduce over dp.*It goes where .*weight is split over dp"):
        check_budget(why(), {"dp": {"all_gather": 0}})
    with pytest.raises(MeshwrightError, match="no axis 'pt'; did you mean 'tp'"):
        check_budget(why(), {"pt": 0})


def test_what_grew() -> None:
    before = why().to_dict()
    assert grown(before, why()) == []
    (line,) = grown(why({}).to_dict(), why())
    assert line.startswith("forward all_reduce over tp: 1 of 64 B, before 0 of 0 B; the largest:")
    with pytest.raises(MeshwrightError, match="no explanation to compare with"):
        grown({}, why())


def test_compare_on_the_command_line(tmp_path: Path) -> None:
    def run(*args: str) -> Any:
        return CliRunner().invoke(app, ["explain", "--layers", "1", "--hidden", "16", *args])

    kept = tmp_path / "before.json"
    kept.write_text(run("--mesh", "dp=2", "--json").output)
    assert json.loads(kept.read_text())["total_bytes"] > 0
    assert run("--mesh", "dp=2", "--compare", str(kept)).exit_code == 0
    more = run("--mesh", "dp=2,tp=2", "--compare", str(kept))
    assert more.exit_code == 1
    assert "all_reduce over tp" in " ".join(more.stderr.split())
    kept.write_text("[1")
    assert run("--mesh", "dp=2", "--compare", str(kept)).exit_code == 2
