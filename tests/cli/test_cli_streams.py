"""The command line where output is narrow, of another encoding, or cannot be written."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.cli import _missing
from meshwright.train.config import TrainConfig
from meshwright.train.launch import STOPPED, _received, _stopped
from meshwright.train.show import Show

EXPLAIN = [sys.executable, "-m", "meshwright", "explain", "--layers", "1", "--hidden", "16", "--mesh", "dp=2"]


def shown(command: list[str], stdout: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    settings = {"env": os.environ | environment, "stderr": subprocess.PIPE, "timeout": 120}
    if stdout == "pipe":
        return subprocess.run(command, stdout=subprocess.PIPE, **settings)  # type: ignore[call-overload]
    with open(stdout, "w") as file:
        return subprocess.run(command, stdout=file, **settings)  # type: ignore[call-overload]


@pytest.mark.processes
def test_signs_are_spelled_out_where_the_encoding_has_none() -> None:
    done = shown(EXPLAIN, "pipe", LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("ascii")


@pytest.mark.processes
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line() -> None:
    done = shown([*EXPLAIN[:3], "--version"], "/dev/full")
    assert done.returncode == 1
    assert done.stderr.decode() == "error: the output cannot be written: No space left on device\n"


@pytest.mark.processes
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(closed: str) -> None:
    command = " ".join([*EXPLAIN[:3], "--version"])
    done = subprocess.run(f"exec {command} {closed}", shell=True, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (closed == "2>&-")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "open files"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
        (MemoryError(), "memory"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "memory"),
        (RuntimeError("can't start new thread"), "threads"),
        (RuntimeError("something else"), ""),
        (OSError(errno.ENOSPC, "No space left on device"), ""),
        (ImportError("no module"), ""),
    ],
)
def test_what_the_system_has_no_more_of(error: Exception, said: str) -> None:
    missing = _missing(error)
    assert missing.startswith(said)
    assert bool(missing) == bool(said)
    assert not said or "ulimit" in missing


@pytest.mark.processes
def test_few_files_are_one_line() -> None:
    """Whatever is opened next fails: an import, the text, a thread."""
    limits = "import resource, sys; from meshwright import cli; resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))"
    code = f"{limits}; cli.app = lambda: [open('/dev/null') for _ in range(9)]; cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert done.stderr.startswith("error: this process can have no more open files (ulimit -n): raise the limit")
    assert "Traceback" not in done.stderr


def test_a_narrow_terminal_cuts_nothing() -> None:
    console = Console(width=40, force_terminal=True, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    row = {"name": "blocks.0.attention.qkv.weight", "shape": (192, 64), "local": (96, 64)}
    config = TrainConfig(mesh=(("dp", 2), ("tp", 2)))
    show = Show(config, console)
    rows = [{**row, "placements": ("Replicate()", "Shard(0)")}]
    show("start", {"parameters": rows, "source": "text", "title": "a GPT", "passes": [], "begin": 0})
    show.close()
    text = console.export_text()
    assert "blocks.*.attention.qkv.weight" in text or "blocks.0.attention.qkv.weight" in text
    assert "dp replicate, tp Shard(0), local 96 × 64" in text
    assert "…" not in text


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")
def test_an_interrupt_while_it_starts_is_a_line() -> None:
    process = subprocess.Popen([*EXPLAIN[:3], "rules"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 300
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text() and time.monotonic() < end:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert shown == "interrupted\n"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_rank_that_is_ended_since_it_was_stopped(stopped: bool) -> None:
    """The others end it with SIGKILL: that is not what went wrong."""

    class Ended:
        exitcode = -signal.SIGKILL

        def join(self, seconds: float) -> None:
            pass

        def recv(self) -> None:
            raise EOFError

    _, failure = _received(Ended(), Ended(), 1, stopped)
    cause = "was stopped (SIGSTOP or SIGTSTP) while the others waited for it, and "
    assert failure.message == f"the process {cause if stopped else ''}was ended by SIGKILL"


@pytest.mark.processes
def test_a_rank_that_is_stopped_counts_as_failed_after_a_while() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    since: dict[int, float] = {}
    try:
        assert _stopped([(1, child.pid)], since) == []
        child.send_signal(19)
        while not since:
            assert _stopped([(1, child.pid)], since) == []
        since[1] -= STOPPED
        (failure,) = _stopped([(1, child.pid)], since)
        assert failure.message.startswith("the process was stopped (SIGSTOP")
    finally:
        child.kill()
        child.wait()
