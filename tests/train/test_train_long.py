"""The proof: 50 steps on real processes, every mesh against one device; the table goes to runs/verify.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.train.choices import TOLERANCES

pytestmark = [pytest.mark.long, pytest.mark.processes]

STEPS = 50
FOLDER = Path(__file__).parents[2] / "runs"
CASES = (
    "--mesh dp=4",
    "--mesh tp=4",
    "--mesh dp=2,tp=2",
    "--mesh dp=2,tp=2 --sequence-parallel",
    "--mesh tp=3",
    "--mesh dp=4 --fsdp dp",
    "--mesh dp=4 --shard-states dp",
    "--mesh dp=2,tp=2 --accumulate 4",
    "--mesh dp=2,tp=2 --dropout 0.1",
    "--mesh dp=2,tp=2 --clip 0.5",
    "--mesh dp=2,tp=2 --tie",
    "--mesh dp=4 --fsdp dp --accumulate 4 --dropout 0.1 --clip 0.5",
    "--mesh dp=4 --shard-states dp --accumulate 4 --dropout 0.1 --clip 0.5",
    "--mesh dp=2,tp=2 --sequence-parallel --fsdp dp --accumulate 4 --dropout 0.1 --clip 0.5",
)
STATIC = (*CASES, "--mesh tp=3 --sequence-parallel --tie")
RUNS = [
    f"{case} --optimizer {optimizer} --dtype {dtype}"
    for dtype in ("float64", "float32")
    for optimizer in ("adamw", "sgd")
    for case in (*CASES, *(f"{case} --static" for case in STATIC))
]


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return kept | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def result_of(run: str) -> Path:
    return FOLDER / "verify" / (run.replace("--", "").replace(" ", "_") + ".json")


def write_table() -> None:
    """All results so far, in the order of RUNS; written whole, as several tests may do it at once."""
    lines = [
        f"`meshwright train --steps {STEPS} --verify`: largest relative differences from one device over all steps.",
        "",
        "| run | loss | gradients | loss first → last | per step and rank | bytes |",
        "|---|---|---|---|---|---|",
    ]
    for run in RUNS:
        if result_of(run).exists():
            found = json.loads(result_of(run).read_text())
            kinds = ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in found["collectives_per_step"].items())
            lines.append(
                f"| `{run}` | {found['max_rel_loss_diff']:.1e} | {found['max_rel_grad_diff']:.1e} "
                f"| {found['loss_first']:.3f} → {found['loss_last']:.3f} | {kinds} | {found['bytes_per_step']:,} |"
            )
    part = FOLDER / f"verify.md.{os.getpid()}"
    part.write_text("\n".join(lines) + "\n")
    part.replace(FOLDER / "verify.md")


@pytest.mark.parametrize("run", RUNS, ids=RUNS)
def test_fifty_steps_equal_one_device(run: str) -> None:
    words = ["train", *run.split(), "--steps", str(STEPS), "--verify", "--json", "--no-plot"]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words], env=environment(), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result_of(run).parent.mkdir(parents=True, exist_ok=True)
    result_of(run).write_text(json.dumps(found))
    write_table()
    loss, grad = TOLERANCES[run.rpartition(" ")[2]]
    assert found["max_rel_loss_diff"] <= loss
    assert found["max_rel_grad_diff"] <= grad
    assert found["loss_last"] < found["loss_first"] - 1
