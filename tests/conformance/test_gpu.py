"""``make gpu``, on tensors of the processor: what it checks holds on simulated ranks, and its report has all of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import meshwright as mw
from bench import gpu

HERE = gpu.Where("cpu", small=True)


@pytest.mark.parametrize("name", [n for n in gpu.CHECKS if "inductor" not in n])
def test_checks_pass_on_the_processor(name: str) -> None:
    sizes, check = gpu.CHECKS[name]
    for found in mw.simulate(lambda: check(mesh, HERE), mesh := mw.Mesh(sizes)):
        assert found["passed"], found


def test_a_check_that_finds_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not gpu._close([1.0, 2.0], [1.0, 2.001])["passed"]
    monkeypatch.setattr(mw, "reproducible_random", contextlib.nullcontext)
    mesh = mw.Mesh(gpu.BOTH)
    for found in mw.simulate(lambda: gpu.drawn(mesh, HERE), mesh):
        assert not found["passed"]
        assert found["wrong"] == [f"dropout {p}" for p in ("Replicate()", "Shard(0)", "Shard(1)")]


@pytest.mark.parametrize("name", [n for n in gpu.CONTENDERS if "compile" not in n and "inductor" not in n])
def test_contenders_learn_alike(name: str) -> None:
    found, plain = gpu.timed(HERE, name), gpu.timed(HERE, "plain PyTorch")
    assert found["passed"]
    assert found["parameters"] == plain["parameters"]
    assert found["losses"] == pytest.approx(plain["losses"], rel=2e-2)


def test_figures_of_one_process() -> None:
    found = gpu.one_op(HERE)
    assert {f"{op}, {who}, host us" for op in gpu.OPS for who in ("plain", "Meshwright")} <= found.keys()
    assert gpu.overlap(HERE)["on the host, ms"] > 0


def test_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {"passed": False, "error": "RuntimeError: no", "traceback": ["..."], "seconds": 1.0}
    monkeypatch.setattr(gpu, "found_of", lambda name, where, limit: bad if "tp=3" in name else {"passed": True})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "deep" / "gpu.md"
    assert gpu.main(["--out", str(out)]) == 1
    assert "FAILED    --verify tp=3: error RuntimeError: no, seconds 1.0" in out.read_text()
    assert list(json.loads(out.with_suffix(".json").read_text())["found"]) == gpu.names_by_worth()
    assert sorted(gpu.names_by_worth()) == sorted([*gpu.CHECKS, *gpu.ALONE])
    assert gpu.main(["--only", "fused", "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("there is no CUDA device: the checks run on the CPU, shrunken\n")
    assert gpu.main(["--seconds", "0", "--out", str(out)]) == 0
    assert out.read_text().count("left out  ") == len(gpu.CHECKS) + len(gpu.ALONE)


def test_the_report_is_written_after_each_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that is interrupted leaves what it measured."""

    def interrupted(name: str, where: gpu.Where, limit: float) -> gpu.Found:
        if name == gpu.FIRST[2]:
            raise KeyboardInterrupt
        return {"passed": True}

    monkeypatch.setattr(gpu, "found_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--out", str(tmp_path / "gpu.md")])
    assert list(json.loads((tmp_path / "gpu.json").read_text())["found"]) == list(gpu.FIRST[:2])


@pytest.mark.processes
def test_starts_from_a_checkout_alone(tmp_path: Path) -> None:
    """Without an installation, as on a machine at hand for a quarter of an hour."""
    out = tmp_path / "gpu.md"
    command = [sys.executable, "-S", "-m", "bench.gpu", "--only", "fused AdamW", "--seconds", "60", "--out", str(out)]
    site = [p for p in sys.path if p.endswith("site-packages")]
    path = os.pathsep.join([str(gpu.ROOT / "src"), *site])  # -S: no .pth file is read, so no editable installation
    done = subprocess.run(command, cwd=gpu.ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in out.read_text()


@pytest.mark.long
@pytest.mark.processes
def test_processes_of_a_check() -> None:
    found = gpu.found_of("fused AdamW, ZeRO-3", HERE, 100.0)
    assert found["passed"], found
    assert found["backend"] == "gloo"
    # The ranks that are killed last do not report the end of the first.
    assert gpu.found_of("fused AdamW, ZeRO-3", HERE, 0.3)["error"] == "did not end within 0 s"
