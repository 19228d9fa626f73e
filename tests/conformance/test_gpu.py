"""``make gpu``, on tensors of the processor: what it checks holds on simulated ranks, and its report has all of it."""

from __future__ import annotations

import contextlib
import json
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


def test_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {"passed": False, "error": "RuntimeError: no", "traceback": ["..."], "seconds": 1.0}
    monkeypatch.setattr(gpu, "found_of", lambda name, where, limit: bad if "tp=3" in name else {"passed": True})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "deep" / "gpu.md"
    assert gpu.main(["--out", str(out)]) == 1
    text = out.read_text()
    assert "FAILED    --verify tp=3: error RuntimeError: no, seconds 1.0" in text
    assert set(json.loads(text.split("```json\n")[1].removesuffix("```\n"))["found"]) == {*gpu.CHECKS, *gpu.CONTENDERS}
    assert gpu.main(["--only", "fused", "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("there is no CUDA device: what can run on the processor does, shrunken\n")
    monkeypatch.setattr(gpu, "SECONDS", 0.0)
    assert gpu.main(["--out", str(out)]) == 0
    assert out.read_text().count("left out  ") == len(gpu.CHECKS) + len(gpu.CONTENDERS)


@pytest.mark.long
@pytest.mark.processes
def test_processes_of_a_check() -> None:
    found = gpu.found_of("fused AdamW, ZeRO-3", HERE, 100.0)
    assert found["passed"], found
    assert found["backend"] == "gloo"
