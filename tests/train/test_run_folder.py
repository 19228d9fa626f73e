"""The folder of a run: it starts again by one command, whatever ended it, and no second run harms it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.cli.options import from_files, values_of
from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.train import OptionError, TrainConfig, folder
from meshwright.train.loop import train

from .test_train_processes import LINUX, environment, meshwright, ranks_of

STEPS = 40
OWN = """
import torch, torch.nn as nn

def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def step(mesh):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)).double()
    x = torch.randn(40, 6, dtype=torch.float64)
    return model, loss_fn, torch.utils.data.TensorDataset(x, x[:, :2] * 2)
"""


def losses(path: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in map(json.loads, path.read_text().splitlines()) if "step" in row]


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 2)
    return TrainConfig(
        mesh=(("dp", 2),), layers=1, hidden=8, heads=2, seq=8, batch=6, steps=4, data=(str(tmp_path / "text"),),
        dtype="float64", save=str(tmp_path / "run"), save_every=2,
    )  # fmt: skip


def simulated(config: TrainConfig) -> list[float]:
    seen: list[float] = []
    mesh = config.make_mesh()
    mw.simulate(lambda: train(config, mesh, lambda k, v: seen.append(v["loss"]) if k == "step" else None), mesh)
    return seen


class NoContext:
    """Of a command line on which nothing is set but files."""

    def get_parameter_source(self, name: str) -> None:
        return None


def read(path: Path) -> TrainConfig:
    context: Any = NoContext()
    defaults: dict[str, Any] = dict.fromkeys(TrainConfig.__dataclass_fields__)
    defaults |= {n: f.default for n, f in TrainConfig.__dataclass_fields__.items() if n != "mesh"} | {"mesh": "dp=1"}
    return TrainConfig(**values_of(TrainConfig, from_files(context, TrainConfig, [path], defaults)))


@pytest.mark.processes
@LINUX
def test_a_rank_is_killed_and_the_others_go_on(tmp_path: Path) -> None:
    """Three ranks, one of which is killed between two checkpoints; then two, on another mesh."""
    (tmp_path / "own_run.py").write_text(OWN)
    words = ["train", "--model", "own_run:step", "--batch", "6", "--dtype", "float64", "--no-plot"]
    words += ["--steps", str(STEPS), "--save", "run", "--save-every", "3", "--clip", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", *words, "--mesh", "dp=3"],
        cwd=tmp_path, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    log = tmp_path / "run" / folder.LOG
    while not (log.exists() and len(log.read_text().splitlines()) > 8):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(ranks_of(process)[-1], signal.SIGKILL)
    _, shown = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "is saved. Continue, on any mesh: meshwright train --config run/config.toml --mesh" in shown
    before = losses(log)
    assert 8 <= before[-1][0] < STEPS
    done = meshwright("train", "--config", "run/config.toml", "--mesh", "tp=2,dp=1", "--no-plot", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    after = losses(log)[len(before) :]
    assert 3 < after[0][0] <= before[-1][0] + 1
    assert after[-1][0] == STEPS
    sys.path.insert(0, str(tmp_path))
    try:
        whole = simulated(
            TrainConfig(model="own_run:step", batch=6, dtype="float64", steps=STEPS, clip=1.0, mesh=(("dp", 1),))
        )
    finally:
        sys.path.remove(str(tmp_path))
    for step, loss in before + after:
        assert loss == pytest.approx(whole[step - 1], rel=1e-9), step


def test_options_come_back_from_the_folder(config: TrainConfig, tmp_path: Path) -> None:
    simulated(config)
    found = read(tmp_path / "run" / folder.NAME)
    assert found == TrainConfig(**{**vars(config), "resume": True})
    more = TrainConfig(
        mesh=(("dp", 2), ("tp", 2)), passes=("recompute", "data-parallel-optimization"), static=True, lr=1e-5, clip=0.5,
        save="a \"b\"\\ü", data=("x y", "z"), verify=True, optimizer="sgd", precision="bf16",
    )  # fmt: skip
    (tmp_path / "more.toml").write_text(folder.options_as_toml(more))
    here = {"save": os.path.abspath(more.save or ""), "data": tuple(map(os.path.abspath, more.data))}
    assert read(tmp_path / "more.toml") == TrainConfig(**{**vars(more), **here, "verify": False, "resume": True})


def test_what_changed_under_a_run_is_an_error(config: TrainConfig, tmp_path: Path) -> None:
    simulated(config)
    again = TrainConfig(**{**vars(config), "resume": True, "steps": 6})
    text = (tmp_path / "text").read_bytes()
    (tmp_path / "text").write_bytes(text[::-1])
    with pytest.raises(OptionError, match=r"--resume: the newest checkpoint in .* is of other data than .*text, 512"):
        simulated(again)
    (tmp_path / "text").write_bytes(text)
    with pytest.raises(OptionError, match=r"other data .*seed"):
        simulated(TrainConfig(**{**vars(again), "seed": 3}))
    assert len(simulated(again)) == 2


def test_a_run_in_the_folder_of_another_one_loses_nothing(config: TrainConfig, tmp_path: Path) -> None:
    before = simulated(config)
    with pytest.raises(OptionError, match="has checkpoints of another run, up to step 4: add --resume"):
        simulated(config)
    assert len(mw.Checkpoints(tmp_path / "run").steps) == 2
    again = TrainConfig(**{**vars(config), "resume": True, "steps": 6})
    ready, go_on = multiprocessing.Event(), multiprocessing.Event()
    other = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path / "run", ready, go_on))
    other.start()
    assert ready.wait(20)
    with pytest.raises(MeshwrightError, match=rf"another run saves there \(process {other.pid} on .*End it, or"):
        simulated(again)
    other.kill()  # the lock goes with the process
    other.join()
    assert len(simulated(again)) == 2
    assert before


def hold(path: Path, ready: Any, go_on: Any) -> None:
    held = folder.lock(path)
    ready.set()
    go_on.wait(100)
    assert held


@pytest.mark.parametrize("lost", ["manifest.json", "rank-00000.safetensors", "cut"])
def test_a_checkpoint_that_is_not_whole(config: TrainConfig, tmp_path: Path, lost: str) -> None:
    whole = simulated(TrainConfig(**{**vars(config), "save": None, "save_every": None, "steps": 6}))
    simulated(config)
    again = TrainConfig(**{**vars(config), "resume": True, "steps": 6, "mesh": (("dp", 3),)})
    newest = max((tmp_path / "run").glob("step-*"))
    if lost == "manifest.json":  # as a process leaves it that dies in the middle of a save
        (newest / lost).rename(newest / "manifest.json.tmp")
        assert simulated(again) == pytest.approx(whole[2:], rel=1e-9)
        return
    file = newest / "rank-00000.safetensors"
    if lost == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=rf"{newest.name}.*rank-00000"):
        simulated(again)
