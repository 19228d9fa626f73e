"""``meshwright train --static``: the captured step, equal to the eager one and to one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.errors import PassError
from meshwright.train import OptionError, TrainConfig
from tests.train.test_train import RUNS, close, config_for, simulated


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} of {i * i}\n" for i in range(300)))
    return str(path)


@pytest.mark.thin(8)
@pytest.mark.parametrize(
    ("mesh", "more"), RUNS, ids=[" ".join([mesh, *(f"{k}={v}" for k, v in more.items())]) for mesh, more in RUNS]
)
@pytest.mark.filterwarnings("ignore")  # of gathers, where nothing is divisible
def test_equal_to_one_device(mesh: str, more: dict[str, Any], text: str) -> None:
    """And so the eager step, which is compared with one device in the same way."""
    found = simulated(config_for(mesh, text, **(more | {"static": True})))
    close(found, "float64")
    assert found.loss_last < found.loss_first


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision(dtype: str, text: str) -> None:
    close(simulated(config_for("dp=2,tp=2", text, dtype=dtype, static=True)), dtype)


@pytest.mark.thin(3)
@pytest.mark.parametrize("more", [{}, {"sequence_parallel": True}, {"clip": 0.5}, {"tie": True}], ids=str)
def test_bytes_are_those_of_the_eager_step(more: dict[str, Any], text: str) -> None:
    """A program sends gradients one by one, where the eager step packs them; what they hold is the same."""
    config = config_for("dp=2,tp=2", text, verify=False, steps=2, **more)
    eager, static = simulated(config), simulated(replace(config, static=True))
    assert static.bytes_per_step == pytest.approx(eager.bytes_per_step, abs=128)


@pytest.mark.parametrize(
    ("passes", "more"),
    [
        pytest.param(("gradient-merge:k_steps=4",), {}, marks=pytest.mark.long),
        (("gradient-merge:k_steps=3,avg=False",), {"clip": 0.5}),
        (("data-parallel-optimization",), {"accumulate": 2}),
    ],
    ids=str,
)
def test_passes_that_merge_calls_are_verified_as_such(passes: tuple[str, ...], more: dict[str, Any], text: str) -> None:
    updates = []

    def emit(kind: str, values: dict[str, Any]) -> None:
        if kind == "step":
            updates.append("rel_grad_diff" in values)

    every, steps = (4, 8) if "k_steps=4" in passes[0] else (3, 7) if "k_steps=3" in passes[0] else (1, 2)
    close(simulated(config_for("dp=2,tp=2", text, static=True, passes=passes, steps=steps, **more), emit), "float64")
    assert updates == [(i + 1) % every == 0 for i in range(steps)]


# ---------------------------------------------------------------------------------------------- options


def test_passes_need_a_captured_step() -> None:
    with pytest.raises(
        OptionError, match="--pass gradient-merge:k_steps=2: passes change the captured step: add --static"
    ):
        TrainConfig(passes=("gradient-merge:k_steps=2",))


def test_merging_twice() -> None:
    with pytest.raises(OptionError, match="--accumulate 2 is the pass gradient-merge"):
        TrainConfig(static=True, accumulate=2, passes=("gradient-merge:k_steps=2",))


def test_a_pass_that_does_not_exist() -> None:
    with pytest.raises(PassError, match="there is no pass 'fold'"):
        TrainConfig(static=True, passes=("fold",))
    done = CliRunner().invoke(app, ["train", "--static", "--pass", "fold", "--no-plot"])
    assert done.exit_code == 2
    assert "there is no pass 'fold'" in done.output


# ---------------------------------------------------------------------------------------------- real processes


@pytest.mark.processes
@pytest.mark.parametrize(
    "case",
    [
        "--mesh dp=2 --dtype float64 --clip 0.5",
        pytest.param(
            "--mesh dp=2,tp=2 --dtype float64 --sequence-parallel --fsdp dp --dropout 0.1", marks=pytest.mark.long
        ),
        pytest.param("--mesh tp=3 --dtype float32 --tie", marks=pytest.mark.long),
    ],
)
def test_processes_equal_one_device(case: str, tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    sizes = ["--layers", "1", "--hidden", "24", "--heads", "4", "--seq", "16", "--batch", "4", "--steps", "20"]
    words = [*case.split(), *sizes, "--verify", "--json", "--no-plot"]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "train", "--static", *words],
        cwd=tmp_path, env=kept | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["max_rel_loss_diff"] <= (1e-9 if "float64" in case else 1e-4)
    assert found["max_rel_grad_diff"] <= (1e-8 if "float64" in case else 1e-3)
    assert found["loss_last"] < found["loss_first"]
