"""``meshwright train`` on real processes: its own, and torchrun's; and what happens when one of them fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.train import ENDING

pytestmark = pytest.mark.processes

SIZES = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "16", "--batch", "4"]
TINY = ["train", *SIZES, "--dtype", "float64", "--no-plot"]
FOR_EVER = ["--steps", "1000000"]
LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return kept | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def meshwright(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshwright", *words],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def torchrun(n: int, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", *words],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def summary(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1  # with --json the rest goes to stderr
    found: dict[str, Any] = json.loads(lines[0])
    return found


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("--static",)], ids=["eager", "captured"])
def test_experts_on_processes_equal_one_device(more: tuple[str, ...], tmp_path: Path) -> None:
    words = (*TINY, "--experts", "3", "--mesh", "ep=2", "--steps", "3", "--verify", "--json", *more)
    found = summary(meshwright(*words, folder=tmp_path))
    assert found["max_rel_loss_diff"] < 1e-9
    assert found["max_rel_grad_diff"] < 1e-8
    assert (found["collectives_per_step"]["gather_rows"], found["collectives_per_step"]["scatter_rows"]) == (3, 3)


@pytest.mark.long
def test_two_processes_equal_one_device(tmp_path: Path) -> None:
    words = [word for word in TINY if word != "--no-plot"]
    done = meshwright(*words, "--mesh", "dp=2", "--steps", "4", "--verify", "--json", folder=tmp_path)
    found = summary(done)
    assert list(found) == [
        "mesh", "steps", "loss_first", "loss_last", "max_rel_loss_diff", "max_rel_grad_diff", "collectives_per_step",
        "bytes_per_step", "tokens_per_s",
    ]  # fmt: skip
    assert found["mesh"] == {"dp": 2}
    assert found["steps"] == 4
    assert found["loss_last"] < found["loss_first"]
    assert found["max_rel_loss_diff"] <= 1e-9
    assert found["max_rel_grad_diff"] <= 1e-8
    assert found["collectives_per_step"] == {"all_reduce": 1}
    assert found["bytes_per_step"] > 0
    assert found["tokens_per_s"] > 0
    assert (tmp_path / "runs" / "loss.png").stat().st_size > 1000
    assert "passed" in done.stderr
    assert "Gloo" not in done.stderr


ENDED = """
import os, sys
from pathlib import Path
from meshwright.cli import app
app(sys.argv[1:], standalone_mode=False)
names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
Path(f"threads-{os.environ['RANK']}").write_text(" ".join(names))
"""


@pytest.mark.long
@LINUX
def test_torchrun_is_joined_and_gives_the_same_run(tmp_path: Path) -> None:
    """And no thread of a process group is left: one that drops its tensors when Python exits aborts the process."""
    script = tmp_path / "ended.py"
    script.write_text(ENDED)
    words = (*TINY, "--mesh", "dp=1,tp=2", "--steps", "3", "--json")
    joined = summary(torchrun(2, str(script), *words, "--verify", folder=tmp_path))
    own = summary(meshwright(*words, folder=tmp_path))
    assert own["max_rel_loss_diff"] is None
    assert joined["max_rel_loss_diff"] <= 1e-9
    for name in ("mesh", "loss_first", "loss_last", "collectives_per_step", "bytes_per_step"):
        assert joined[name] == own[name]
    for rank in (0, 1):
        assert "gloo" not in (tmp_path / f"threads-{rank}").read_text()


@pytest.mark.long
def test_torchrun_with_another_number_of_processes(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "meshwright", *TINY, "--mesh", "dp=2,tp=2", folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("--mesh dp=2,tp=2 needs 4 processes and torchrun started 2") == 1


@pytest.mark.long
def test_torchrun_shows_an_error_of_all_ranks_once(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "meshwright", *TINY, "--mesh", "dp=2", "--data", "nowhere.txt", folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("error: --data nowhere.txt: there is no such file") == 1


# ---------------------------------------------------------------------------------------------- failures

OWN_TEXT = ["--data", "/proc/self/stat"]  # another text in every process that reads it


@LINUX
def test_an_error_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    done = meshwright(*TINY, "--mesh", "dp=2", *OWN_TEXT, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the ranks train with different texts (--data): rank 0: ")
    assert done.stderr.count("\n") == 1
    assert not done.stdout


@pytest.mark.long
@LINUX
def test_torchrun_shows_an_error_of_running_ranks_once(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "meshwright", *TINY, "--mesh", "dp=2", *OWN_TEXT, folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("error: the ranks train with different texts") == 1


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile
            continue
    return sorted(found)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Two ranks in the middle of an endless run, in a process group of their own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", *TINY, "--mesh", "dp=2", *FOR_EVER],
        cwd=tmp_path, env=environment() | {"PYTHONUNBUFFERED": "1"}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    while "step " not in (line := process.stdout.readline()):
        assert line, process.stderr.read() if process.stderr else ""
    yield process
    process.kill()
    process.communicate()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The ranks are what the fork server forked; the server is a child of the process."""
    return [rank for server in children(process.pid) for rank in children(server)]


def gone(pids: list[int], seconds: float = 100.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


@LINUX
def test_a_rank_that_dies_ends_all(running: subprocess.Popen[str]) -> None:
    ranks = ranks_of(running)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    _, shown = running.communicate(timeout=90)
    assert running.returncode == 1
    assert shown.count("error: ") == 1
    assert "of 2 failed:\nthe process was ended by SIGKILL" in shown
    assert gone(ranks)


@LINUX
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_ctrl_c_ends_all(running: subprocess.Popen[str], number: signal.Signals) -> None:
    assert {signal.SIGTERM, signal.SIGHUP} == set(ENDING)  # for both the same is done
    ranks = ranks_of(running)
    os.killpg(running.pid, number)  # as a terminal does: to all of them
    _, shown = running.communicate(timeout=90)
    assert running.returncode == 128 + number
    assert shown == "interrupted: all processes are ended\n"
    assert gone(ranks)


@LINUX
def test_ranks_end_with_a_parent_that_was_killed(running: subprocess.Popen[str]) -> None:
    below = children(running.pid) + ranks_of(running)
    assert len(below) >= 3
    running.kill()
    assert gone(below)
