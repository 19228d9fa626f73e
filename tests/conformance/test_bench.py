"""The benchmarks: each runs in its smallest form, contenders do the same work, and runs are read and compared."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import __main__ as bench_main
from bench import block, capture, curves, ops, optimizers, ours, peers, replay, report, steps, wire
from bench.__main__ import main
from bench.core import DTENSOR, LOCAL, OURS, Benchmark, Effort, Row, Samples, fake_group
from bench.models import batches, maker
from bench.registry import benchmarks, chosen
from meshwright import DistTensor
from tests.support.processes import run_processes

SMALLEST = Effort("smallest")
NAMED = {b.name: b for b in benchmarks()}


def checked(name: str, samples: Samples) -> list[Row]:
    """The rows; every sample is a number."""
    values = [v for of in samples.values() for rounds in of.values() for v in rounds]
    assert values
    assert all(map(math.isfinite, values))
    rows = list(NAMED[name].rows(samples))
    assert len({row.what for row in rows}) == len(rows)
    return rows


def at_length(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "name", ["ops-2d-fwdbwd", at_length("block"), "optimizers", at_length("capture"), "replay", at_length("lengths")]
)
def test_runs(name: str) -> None:
    assert checked(name, NAMED[name].measure(SMALLEST))


def measured(name: str) -> Samples:
    return NAMED[name].measure(SMALLEST)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", ["wire-dp", "wire-zero"])
def test_runs_on_a_wire(name: str) -> None:
    """Each in a process of its own: a mesh keeps to the wire that it got."""
    assert checked(name, *run_processes(measured, 1, name))


def local(t: Any) -> torch.Tensor:
    """This rank's values."""
    if isinstance(t, DistTensor) or hasattr(t, "to_local"):
        t = t.to_local()
    return t.detach()  # type: ignore[no-any-return]


@pytest.mark.parametrize("mesh", ops.MESHES)
def test_ops_compute_what_plain_tensors_do(mesh: str) -> None:
    with fake_group(8):
        made = ops.built(mesh, False)
        assert len(made[LOCAL]) == 15
        for op, case in made[LOCAL].items():
            assert torch.equal(local(made[OURS][op].run()), case.run()), op


def test_blocks_compute_the_same() -> None:
    with fake_group(8):
        made = {name: make() for name, make in block.CONTENDERS.items()}
        found = {}
        for name, (module, x) in made.items():
            with torch.no_grad():  # a sum that is not sent has the bias once, or a part of it
                module.o.bias.zero_()
                module.down.bias.zero_()
            found[name] = local(module(x))
        for name, value in found.items():
            torch.testing.assert_close(value, found[LOCAL], msg=lambda m, name=name: f"{name}: {m}")


FEW = (peers.Alone, peers.DataParallelOfTorch, peers.TensorParallelByHand, ours.TensorParallel, ours.CapturedZero3)


def few_steps() -> Samples:
    return steps.measure(SMALLEST, micro_batches=2, kinds=FEW)  # which compares their losses


@pytest.mark.processes
def test_steps_on_processes() -> None:
    first, _ = run_processes(few_steps, 2)
    assert set(first["wall"]) == {kind.name for kind in FEW}


@pytest.mark.processes
def test_checkpoints_on_processes() -> None:
    first, _ = run_processes(measured, 2, "checkpoint")  # which compares what is loaded with what was saved
    assert len(checked("checkpoint", first)) == 6


@pytest.mark.long
@pytest.mark.processes
def test_precisions_on_processes() -> None:
    first, _ = run_processes(measured, 2, "precision-step")  # which compares the losses
    assert len(checked("precision-step", first)) == 10
    sent = first["bytes of all_gather"]
    assert 0 < sent[ours.ZERO3][0] <= sent[peers.FSDP2][0]
    assert first["bytes of reduce_scatter"][ours.ZERO3] == first["bytes of reduce_scatter"][peers.FSDP2]
    assert first["bytes of all_reduce"] == {peers.FSDP2: [0.0], ours.ZERO3: [8.0], ours.CAPTURED_ZERO3: [8.0]}


@pytest.mark.processes
@pytest.mark.long
def test_memory_of_precisions_on_processes() -> None:
    first, _ = run_processes(measured, 2, "precision-memory")
    assert len(checked("precision-memory", first)) == 2


@pytest.mark.processes
@pytest.mark.long
def test_steps_of_all_on_processes() -> None:
    first, _ = run_processes(measured, 2, "step-acc4")  # which compares the losses of all contenders
    assert len(first["wall"]) == 10
    assert len(checked("step-acc4", first)) == 10


def test_steps_that_differ_are_refused() -> None:
    class Wrong(peers.Alone):
        name = "wrong"

        def step(self, batches: Any) -> Any:
            return super().step(batches[:1])

    make, data = maker(1, 16, 4, 8, 32), batches(2, 2, 8, 32)
    with pytest.raises(AssertionError, match=r"wrong: losses .* of no communication"):
        steps.set_up([peers.Alone(), Wrong()], make, data)


def test_replay_computes_the_gradients() -> None:
    model, (batch,) = maker(1, 16, 2, replay.SEQ, replay.VOCABULARY)(), batches(1, 2, replay.SEQ, replay.VOCABULARY)
    expected = replay.eager(model, batch)()
    for got, want in zip(replay.joint(model, batch)(), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_the_least_that_a_wire_exposes() -> None:
    def message(took: float, gathers: bool, asked: float, waited: float) -> wire.Message:
        return wire.Message(took, gathers, asked, waited)

    # gathered 2 s before 1 s of computing; scattered at 9 of 10 s, for 3 s; so 1 + 2 are exposed
    assert wire.least_exposed(0, 10, [message(2, True, 0, 1), message(3, False, 9, 10)]) == pytest.approx(3)
    assert wire.least_exposed(0, 1, [message(2, True, 0, 0.5), message(3, False, 0.5, 1)]) == pytest.approx(4)


# ---------------------------------------------------------------------------------------------- runs


def fake(name: str, figure: float, target: float | None = 1.0) -> Benchmark:
    """A benchmark whose only figure this is."""
    samples = {"case": {OURS: [figure * (1 + i / 1000) for i in range(5)], LOCAL: [1.0] * 5}}

    def rows(of: Samples) -> Any:
        yield Row(f"{name} / local", report.statistics.median(of["case"][OURS]), target, {DTENSOR: 2.0})

    return Benchmark(name, "us", lambda effort: samples, rows)


def fake_run(size: str = "whole", load: float = 0.1, **figures: float) -> dict[str, Any]:
    machine = {"cpu": "a", "cores": 2, "python": "3", "torch": "2", "commit": "c", "load at start": load}
    made = [(b, b.measure(SMALLEST)) for b in (fake(name, figure) for name, figure in figures.items())]
    done = {b.name: report.record(b, samples, 1.0) for b, samples in made}
    return json.loads(json.dumps({"size": size, "seed": 3, "machine": machine, "benchmarks": done}))  # type: ignore[no-any-return]


def test_the_table_tells_target_figure_and_verdict() -> None:
    run = fake_run(one=0.9, two=1.5)
    table = report.table(run)
    assert "| one / local | ≤ 1 | 0.902 ± 0.0" in table
    assert "| met | dtensor 2.00 | one |" in table
    assert "| missed | dtensor 2.00 | two |" in table
    assert "seed 3" in table
    assert "busy" not in table
    assert not report.well(run)
    assert report.well(fake_run("quick", two=1.5))
    assert "busy at the start (load 3" in report.table(fake_run(load=3.0, one=0.9))
    assert "Quick run" in report.table(fake_run("quick", one=0.9))


def test_two_runs_are_compared() -> None:
    a, b = fake_run(same=1.0, slower=1.0, faster=1.0, gone=1.0), fake_run(same=1.01, slower=1.2, faster=0.8)
    page = report.comparison(a, b)
    lines = {line.split(" ")[1]: line for line in page.splitlines() if line.startswith("| ")}
    assert "| 1.200 | worse | dtensor 2.00 → 2.00 |" in lines["slower"]
    assert "better" in lines["faster"]
    assert "worse" not in lines["same"] + lines["faster"]
    assert "better" not in lines["same"] + lines["slower"]
    assert "Only in A: gone." in page


def test_a_bound_of_nothing_is_a_message() -> None:
    samples = {"bound": {wire.BOUND: [0.0]}, "step": {peers.ALONE: [1.0], "eager 1 KiB": [1.2], "captured auto": [1.3]}}
    assert [row.figure for row in wire.rows(samples)] == pytest.approx([2.0, 3.0, 3.0])


def test_one_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_main, "samples_of", lambda *_: {"case": {LOCAL: [1.0]}})
    assert "KeyError" in bench_main.run(fake("x", 1.0), SMALLEST, 1.0)["error"]


def test_rounds_of_a_case_are_drawn_together() -> None:
    samples = {"case": {"a": [1.0, 2.0, 3.0], "b": [10.0, 20.0, 30.0]}, "other": {"a": [7.0]}}
    drawn = report.resampled(samples, random.Random(0))
    assert drawn["case"]["b"] == [10 * v for v in drawn["case"]["a"]]
    assert drawn["other"] == {"a": [7.0]}


def test_names_of_benchmarks() -> None:
    assert [b.name for b in chosen(benchmarks(), "step,mem-ddp")] == ["step-acc1", "step-acc4", "mem-ddp"]
    with pytest.raises(ValueError, match="--only nothing: no such benchmark; there are ops-1d-fwd, "):
        chosen(benchmarks(), "nothing")


def test_reads_and_compares_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, figure in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).write_text(json.dumps(fake_run(x=figure)))
    assert main(["--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "| 2.000 | worse |" in capsys.readouterr().out
    assert main(["--table", str(tmp_path / "b")]) == 1
    assert "| missed |" in capsys.readouterr().out


def test_curves_are_smoothed_and_drawn(tmp_path: Path) -> None:
    found = curves.losses(replace(curves.CONFIG, steps=2, layers=1, hidden=8, seq=4, batch=2))
    assert len(found) == 2
    assert curves.smoothed([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
    assert curves.final([9.0, *[1.0, 3.0] * 50])[0] == 2.0
    curves.draw(tmp_path / "images" / "x.png", {"float32": found, "bfloat16": found})
    assert (tmp_path / "images" / "x.png").stat().st_size > 1000


def test_captures_by_layers() -> None:
    assert set(capture.CONTENDERS) > {capture.EXPORT, capture.JOINT}
    assert set(optimizers.CASES) == set(optimizers.TARGETS)
