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
from meshwright import collective
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


# ---------------------------------------------------------------------------------------------- while it runs


def spent(budget: Any, run: Any, mesh: mw.Mesh = MESH) -> list[str]:
    """What each rank says of a function under a budget, and what it had sent then."""

    def rank() -> str:
        with collective.counting() as counts:
            try:
                with mw.explicit(budget=budget):
                    run(mesh)
            except ExplicitError as error:
                return f"{error} | {len(counts.table)}"
            return ""

    return mw.simulate(rank, mesh)


def eager(mesh: mw.Mesh, rows: int = 4) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    mw.shard_module(net, mesh, SHARDED)
    x = mw.shard_tensor(torch.randn(rows, 8), mesh, {"dp": mw.Shard(0)} if "dp" in mesh.axes else {})
    net(x).square().mean().backward()


def captured(mesh: mw.Mesh, rows: int = 4) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    loss = lambda m, b: m(b).square().mean()  # noqa: E731
    said = {"layouts": SHARDED, "batch": {"dp": mw.Shard(0)} if "dp" in mesh.axes else None}
    mw.compile_step(net, loss, opt, torch.randn(rows, 8), mesh=mesh, **said)(torch.randn(rows, 8))


@pytest.mark.parametrize("run", [eager, captured])
def test_what_runs_is_held_against_a_budget(run: Any) -> None:
    # The row-parallel linear 64 B, and of the loss a scalar over dp; the gradients over dp: 2 * 1/2 * 4 * (140, 8).
    assert not any(spent({"tp": 64, "dp": {"all_reduce": 4 * (64 + 8 + 64 + 8) + 8}}, run))
    for budget in ({"tp": 63}, {"tp": {"all_gather": 99}}, {"tp": 0}):
        said = spent(budget, run)
        assert all("are allowed" in text and "all_reduce over tp, 64 bytes" in text for text in said)
        assert all("test_budget.py:" in text and "It goes where" in text for text in said)
        assert all(text.endswith(" 0") for text in said) or run is captured  # before anything was sent


def test_gradients_are_in_the_budget_of_eager_code() -> None:
    for text in spent({"dp": 500}, eager):
        assert "over dp, and 500 B are allowed; most of it" in text
        assert "sums gradients of parameters over dp" in text


def test_uneven_parts_are_refused_on_all_ranks_alike() -> None:
    mesh = mw.Mesh({"dp": 3, "tp": 2})
    for run in (eager, captured):
        ranks = spent({"tp": 50}, lambda m, run=run: run(m, 4), mesh)  # 2, 1 and 1 rows of 32 bytes
        assert all("over tp" in text for text in ranks), ranks
        assert not any(spent({"tp": 64}, lambda m, run=run: run(m, 4), mesh))


def test_a_step_that_was_captured_before_is_held_too() -> None:
    def rank() -> None:
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        loss = lambda m, b: m(b).square().mean()  # noqa: E731
        step = mw.compile_step(net, loss, None, torch.randn(4, 8), mesh=MESH, layouts=SHARDED)
        with mw.explicit(budget={"tp": 128}):
            step(torch.randn(4, 8))
        with pytest.raises(ExplicitError, match="128 B over tp, and 100 B"), mw.explicit(budget={"tp": 100}):
            step(torch.randn(4, 8))
        with pytest.raises(ExplicitError, match="over tp"), mw.explicit(budget={"tp": 129}):
            step(torch.randn(8, 8))  # captured again, for another shape

    mw.simulate(rank, MESH)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ({"tp": "1 MB"}, "'tp': '1 MB' is no number of bytes"), ({"tp": -1}, "-1 is no number of bytes"),
        ({"tp": {"all_reduc": 1}}, "no collective 'all_reduc'; did you mean 'all_reduce'"),
        ({"tpp": 1}, "no axis 'tpp'; did you mean 'tp'"), (5, "a dict, axes to bytes, was expected"),
    ],
)  # fmt: skip
def test_a_budget_that_means_nothing_is_named(budget: Any, words: str) -> None:
    def rank() -> None:
        with pytest.raises(MeshwrightError, match=words), mw.explicit(budget=budget):
            eager(MESH)
        with pytest.raises(MeshwrightError, match=words):
            check_budget(why(), budget)

    mw.simulate(rank, MESH)
