"""``meshwright train --save --resume`` and ``meshwright checkpoint``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import meshwright as mw
from meshwright.cli import app
from meshwright.errors import CheckpointError
from meshwright.train import OptionError, TrainConfig
from meshwright.train.loop import train

SMALL = TrainConfig(
    layers=1, hidden=8, heads=2, seq=6, batch=4, steps=6, dtype="float64", lr=1e-2, dropout=0.1, clip=0.5, tie=True
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} of {i * i}\n" for i in range(300)))
    return str(path)


def losses_of(config: TrainConfig) -> list[float]:
    mesh, losses = config.make_mesh(), []

    def emit(kind: str, values: dict[str, Any]) -> None:
        if kind == "step":
            losses.append(values["loss"])

    mw.simulate(lambda: train(config, mesh, emit), mesh)
    return losses


def test_train_goes_on_where_it_was_saved(text: str, tmp_path: Path) -> None:
    whole = losses_of(replace(SMALL, data=(text,)))
    config = replace(SMALL, data=(text,), save=str(tmp_path / "run"), save_every=2, resume=True)
    losses = losses_of(replace(config, steps=3))  # nothing to resume from
    assert mw.Checkpoints(tmp_path / "run").steps == [3, 2]
    losses += losses_of(replace(config, steps=5, mesh=(("dp", 2), ("tp", 2)), shard_states="dp"))
    losses += losses_of(replace(config, steps=6, mesh=(("dp", 2),), fsdp="dp", static=True))
    assert max(abs(a - b) for a, b in zip(losses, whole, strict=True)) < 1e-12
    assert mw.Checkpoints(tmp_path / "run").steps == [6, 5]
    with pytest.raises(OptionError, match="newest checkpoint is of step 6: take more --steps than 6"):
        losses_of(replace(config, steps=6))
    with pytest.raises(OptionError, match="has checkpoints of another run, up to step 6: add --resume"):
        losses_of(replace(config, steps=9, resume=False))
    with pytest.raises(CheckpointError, match=r"is torch.float64 of shape .* here, and was torch.float64 of shape"):
        losses_of(replace(config, hidden=16, steps=9))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_torchrun_goes_on_with_two_of_four(text: str, tmp_path: Path) -> None:
    """One of four is killed while it trains; two go on where the newest checkpoint is, with the same losses."""
    words = "--layers 1 --hidden 8 --heads 2 --seq 6 --batch 4 --dtype float64 --lr 0.01 --dropout 0.1 --clip 0.5 --tie"
    common = [*words.split(), "--data", text, "--save", str(tmp_path / "run"), "--save-every", "2", "--resume"]

    def launched(ranks: int, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "meshwright", "train", "--mesh", f"dp={ranks}", *common, "--json", "--no-plot", *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    store = mw.Checkpoints(tmp_path / "run")
    four = launched(4, "--steps", "100000")
    try:
        end = time.monotonic() + 120
        while not store.steps and time.monotonic() < end and four.poll() is None:
            time.sleep(0.05)
        ranks = Path(f"/proc/{four.pid}/task/{four.pid}/children").read_text().split()
        os.kill(int(ranks[2]), signal.SIGKILL)
        _, said = four.communicate(timeout=60)
    finally:
        four.kill()
    assert "rank 2" in said
    done = store.steps[0]
    out, said = launched(2, "--steps", str(done + 3)).communicate(timeout=200)
    summary = json.loads(out.splitlines()[-1])
    whole = losses_of(replace(SMALL, data=(text,), steps=done + 3))
    assert summary["loss_first"] == pytest.approx(whole[done], rel=1e-12), said
    assert summary["loss_last"] == pytest.approx(whole[-1], rel=1e-12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"resume": True}, "--resume needs the folder of the checkpoints: add --save DIR"),
        ({"save_every": 3}, "--save-every needs the folder"),
        ({"save": "x", "keep": 0}, "--keep 0: at least 1"),
        ({"save": "x", "resume": True, "verify": True}, "leave out --resume or --verify"),
    ],
)
def test_options_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        replace(SMALL, **given)


def test_show_and_verify(tmp_path: Path) -> None:
    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["checkpoint", *words, str(tmp_path)], env={"COLUMNS": "200"})

    assert run("show").exit_code == 2
    assert "Pass the folder of --save" in run("show").stderr
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False))
    model.append(model[0])
    for step in (4, 5):
        mw.Checkpoints(tmp_path).save(step, model=model).wait()
    (tmp_path / "step-00000006-00009-0000").mkdir()
    shown = run("show")
    assert shown.exit_code == 0
    for words in ("step 6, (no data and no manifest.json", "step 4, complete", "step 5 on Mesh(ranks=1): 2 tensors"):
        assert words in shown.stdout
    assert "0.weight = 1.weight  2×3    float32  Replicate()" in shown.stdout
    verified = run("verify")
    assert (verified.exit_code, verified.stdout) == (0, "2 complete, all as written: step 5, 4\n")
    path = next(tmp_path.glob("step-00000004*/*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    one = CliRunner().invoke(app, ["checkpoint", "verify", str(path.parent)])
    for found in (run("verify"), one):
        assert found.exit_code == 1
        assert "rank-00000.safetensors is damaged: tensor 'other/random/cpu'" in found.stderr.replace("\n", " ")
    path.unlink()
    assert "cannot be read" in run("verify").stderr
