"""The scripts of examples/ run on real processes, and say on two what they say on one."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import fresh
from tests.support.processes import run_processes

TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"
INTEGRATIONS = ("integrations/test_integrations.py", "integrations/test_logged_values.py")


def said(script: str, *args: str) -> str:
    """What a script prints in this process."""
    kept, sys.argv = sys.argv, [script, *args]
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    finally:
        sys.argv = kept
    return text.getvalue()


def said_by_a_rank(script: str, *args: str) -> str:
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    return said(script, *args)


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss ([\d.]+)", text)]


def by_torchrun() -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(EXAMPLES / "train_mlp.py"), "--tp", "2", "--steps", "51"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_by_torchrun() -> str:
    """In processes that have its variables, without its agent and without imports of PyTorch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    many = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    many |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "ROLE_RANK": "0"}
    words = [str(EXAMPLES / "train_mlp.py"), "--tp", "2", "--steps", "51"]
    code = f"import runpy, sys; sys.argv = {words!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    return "".join(fresh.run_ranks(code, [{**many, "RANK": r, "LOCAL_RANK": r} for r in ("0", "1")]))


@pytest.mark.processes
@pytest.mark.parametrize("run", [as_by_torchrun, pytest.param(by_torchrun, marks=pytest.mark.long)])
def test_train_mlp_on_two_processes(run: Callable[[], str]) -> None:
    text = run()
    on_two = losses(text)
    assert len(on_two) == 3
    assert on_two[-1] < on_two[0]
    on_one = said_on_one()
    assert on_two == pytest.approx(losses(on_one), rel=1e-4)
    assert "of 512 points right" in text


def said_on_one() -> str:
    return run_processes(said, 1, "train_mlp.py", "--steps", "51")[0]  # a process of its own: it sets seeds


@pytest.mark.processes
def test_custom_op_on_two_processes() -> None:
    first, second = run_processes(said_by_a_rank, 2, "custom_op.py")
    assert "runs agree with the single device" in first
    assert "<dp: Shard(0)>, no communication" in first
    assert second == ""


def compiled_blocks(*args: str) -> list[float]:
    return [loss for _, loss in numbered_losses(said_by_a_rank("compiled_blocks.py", "--backend", "aot_eager", *args))]


@pytest.mark.processes
def test_blocks_that_are_compiled_eagerly_and_in_a_captured_step() -> None:
    (expected,) = run_processes(compiled_blocks, 1)
    assert len(expected) == 4
    assert expected[3] < expected[0]
    for words in (("--tp", "2"), ("--captured",)):  # over tp, and over dp
        found, other = run_processes(compiled_blocks, 2, *words)
        assert found == pytest.approx(expected, abs=1e-6)  # as many digits are printed
        assert other == []


@pytest.mark.processes
def test_a_profile_has_every_collective_by_name(tmp_path: Path) -> None:
    for more in ((), ("--captured",)):
        trace = str(tmp_path / f"trace{len(more)}.json")
        first, *others = run_processes(said_by_a_rank, 4, "profiled_step.py", "--tp", "2", "--trace", trace, *more)
        assert set(others) == {""}
        (sent,) = re.findall(r"(\d+) collectives in each step", first)
        found = re.findall(r"(\d+) × meshwright::(\w+) over (\w+), \d+ bytes, (.*)", first)
        assert sum(int(times) for times, *_ in found) == 2 * int(sent)  # two steps were active
        assert any(kind == "all_reduce" and axis == "dp" and "gradient" in what for _, kind, axis, what in found)
    assert "2 × meshwright::all_reduce over dp, 80 bytes, gradient of 0.weight\n" in first


def restarts(processes: int, folder: Path, steps: int) -> str:
    args = ("--folder", str(folder), "--steps", str(steps))
    told: str = run_processes(said_by_a_rank, processes, "restarts.py", *args)[0]
    return told


def numbered_losses(text: str) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+) loss ([-\d.e]+)", text)]


@pytest.mark.processes
def test_restarts_go_on_where_the_newest_checkpoint_is(tmp_path: Path) -> None:
    whole = numbered_losses(restarts(1, tmp_path / "whole", 6))
    first, then = restarts(2, tmp_path / "parts", 3), restarts(1, tmp_path / "parts", 6)
    assert then.startswith("from step 3 on 1 ranks\n")
    found = numbered_losses(first) + numbered_losses(then)
    assert [step for step, _ in found] == [step for step, _ in whole]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in whole], rel=1e-12)


@pytest.mark.long
@pytest.mark.processes
def test_machines_that_die_leave_the_losses_of_an_uninterrupted_run(tmp_path: Path) -> None:
    """torchrun on 4, then 3, then 2 machines: each time one is killed, with its rank."""
    whole = dict(numbered_losses(restarts(1, tmp_path / "whole", 40)))
    said_by = [tmp_path / f"{i}.txt" for i in range(4)]
    machines = [machine(tmp_path / "parts", file) for file in said_by]

    def found() -> list[tuple[int, float]]:
        return [one for file in said_by for one in numbered_losses(file.read_text())]

    def wait(until: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not until():
            assert time.monotonic() < end, [file.read_text() for file in said_by]
            time.sleep(0.2)

    try:
        for step, lost in ((10, 3), (25, 2)):
            wait(lambda step=step: max((n for n, _ in found()), default=0) >= step)  # type: ignore[misc]
            ranks = subprocess.run(["pgrep", "-P", str(machines[lost].pid)], capture_output=True, text=True, check=True)
            for pid in (machines[lost].pid, *map(int, ranks.stdout.split())):
                os.kill(pid, signal.SIGKILL)
        wait(lambda: all(m.poll() is not None for m in machines))
    finally:
        for m in machines:
            m.kill()
    assert [m.returncode for m in machines[:2]] == [0, 0]
    text = "".join(file.read_text() for file in said_by)
    assert re.findall(r"on (\d) ranks", text) == ["4", "3", "2"]
    assert {n for n, _ in found()} == set(whole)
    for n, loss in found():
        assert loss == pytest.approx(whole[n], rel=1e-12)


def machine(folder: Path, said: Path) -> subprocess.Popen[str]:
    """One of torchrun's, with one rank."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:4", "--nproc-per-node", "1"]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{29600 + os.getpid() % 100}", "--rdzv-id", "one"]
    options = ["--max-restarts", "8", "--rdzv-conf", "last_call_timeout=3,join_timeout=60"]
    script = [str(EXAMPLES / "restarts.py"), "--folder", str(folder), "--steps", "40", "--pause", "0.4"]
    with said.open("w") as out:
        return subprocess.Popen(
            [*torchrun, *meet, *options, *script], stdout=out, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


def test_every_example_is_run_here() -> None:
    text = "".join((TESTS / file).read_text() for file in ("project/test_examples.py", *INTEGRATIONS))
    assert [p.name for p in EXAMPLES.glob("*.py") if f'"{p.name}"' not in text] == []
