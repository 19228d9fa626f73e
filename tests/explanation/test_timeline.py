"""The predicted time of a step: what computes, what is on wires, and what a rank waits for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from typer.testing import CliRunner

import meshwright as mw
from meshwright.cli import app
from meshwright.explanation import Explanation, explain_program
from meshwright.explanation.timeline import COMPUTE, timeline_of
from meshwright.passes import PassManager
from meshwright.program import Plan, Program, build

MACHINE = mw.hardware("cpu-gloo")
ROWS = {"dp": mw.Shard(0)}


def program(passes: Sequence[str] = ()) -> Program:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, mesh, manager = torch.ones(64, 256), mw.Mesh({"dp": 4}), PassManager(list(passes))
    return manager(build(net, lambda m, x: m(x).sum(), optimizer, x, mesh, Plan({}, ROWS)).program)


def test_what_runs_at_once_is_waited_for() -> None:
    line = timeline_of(program(), MACHINE)
    assert line.seconds == pytest.approx(line.compute + line.exposed)
    sent = sum(explain_program(program()).counts.bytes.values())
    count = sum(explain_program(program()).counts.kinds.values())
    link = MACHINE.links[0]
    assert line.wires["dp"] == pytest.approx(2 * count * link.latency + sent / link.bandwidth)
    assert line.exposed == pytest.approx(line.wires["dp"])


def test_what_is_started_is_waited_for_where_it_is_read() -> None:
    made = program(["data-parallel-optimization:bucket_bytes=100000"])
    line = timeline_of(made, MACHINE)
    assert line.seconds == pytest.approx(line.compute + line.exposed)
    assert 0 < line.exposed < line.wires["dp"]
    for lane in line.lanes():
        spans = [s for s in line.spans if s.lane == lane]
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(spans)), "one at a time"
        assert sum(s.end - s.start for s in spans) == pytest.approx(line.lanes()[lane])
    slower = replace(MACHINE, flops={"*": MACHINE.flops["*"] / 1e4})
    assert timeline_of(made, slower).exposed < line.exposed, "what computes for longer hides more"


def test_it_is_shown_as_text_data_and_page() -> None:
    why: Explanation = explain_program(program(), (), MACHINE)
    text = why.text(140)
    assert "predicted time of a step on cpu-gloo" in text
    assert "waits for collectives" in text
    assert "wire of dp" in text
    assert json.loads(why.to_json())["time"]["wires"].keys() == {"dp"}
    assert "Predicted time" in why.to_html()
    assert json.loads(explain_program(program()).to_json())["time"] is None
    assert why.time is not None
    assert why.time.drawn(COMPUTE).strip()


def test_stages_wait_for_each_other(tmp_path: Path) -> None:
    args = ["explain", "--mesh", "pp=2,dp=2", "--micro-batches", "4", "--hardware", "cpu-gloo"]
    done = CliRunner().invoke(app, [*args, "--json", "--html", str(tmp_path / "step.html")])
    assert done.exit_code == 0, done.output
    time = json.loads(done.stdout.splitlines()[-1])["time"]
    assert time["bubble"] == pytest.approx((time["compute"] + time["exposed"]) / 4)  # (p - 1) / m
    assert "waiting for other stages" in (tmp_path / "step.html").read_text()
    bad = CliRunner().invoke(app, ["explain", "--mesh", "dp=2", "--hardware", "b100"])
    assert bad.exit_code == 2
    assert "is unknown" in bad.output
