"""Ranks that die, fail, are stopped or come to their end: the others leave, promptly, and say why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.failures import process, report
from meshwright.failures.report import Obituary
from meshwright.failures.watchdog import Watcher, _Line
from tests.support import faulty, stages, sweep

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc"),
]
KILLED = r"was ended by SIGKILL|has ended without a word"  # who asks first: its parent, or a rank
SOON = 6.0  # seconds; two where nothing else runs on the machine, which `make test` does not ask for


def others_left(run: faulty.Run, victim: int, cause: str, *, within: float = SOON) -> None:
    """All other ranks ended with an error that names the victim."""
    for rank, said in run.said.items():
        if rank != victim:
            assert rank in run.seconds, (rank, run)
            assert run.seconds[rank] < (within if sweep.WHOLE else faulty.LONG), run.seconds
            assert run.codes[rank] == 1, (rank, said)
            assert "RankFailedError: rank " in said, (rank, said)
            assert f"rank {victim} (host" in said, (rank, said)
            assert re.search(cause, said), (rank, said)


def test_a_rank_that_is_killed_ends_those_that_do_not_wait_for_it() -> None:
    run = faulty.run("killed", "other group", 1)
    others_left(run, 1, KILLED)
    assert any("left all_reduce(sum) of float32[1000] over " in said for said in run.said.values())
    assert any("time.sleep(LONG)" in said and "was in no collective" in said for said in run.said.values())


@pytest.mark.parametrize(("place", "victim"), [("F", 1), ("W", 0), ("edge", 1)])
def test_a_stage_that_is_killed_ends_all_and_one_rank_goes_on(place: str, victim: int, tmp_path: Path) -> None:
    """In its forward, in the gradients of its parameters, before it sends; from the last checkpoint, without stages."""
    run = faulty.run("killed", place, victim, world=2, saves=tmp_path / "saves")
    others_left(run, victim, KILLED)
    mesh, batches = mw.Mesh({"pp": 1}), [stages.ignoring(i, 8) for i in range(4)]

    def goes_on() -> tuple[list[float], stages.Result]:
        step, model, optimizer = stages.captured(mesh, passes=[faulty.PIPELINE])
        first = mw.Checkpoints(tmp_path / "saves").load(model=model, optimizer=optimizer, program=step)
        assert first == 2
        return [step(batch).item() for batch in batches[first:]], stages.whole(model)

    losses, wanted = stages.one_device(batches)
    ((found, params),) = mw.simulate(goes_on, mesh)
    assert found == pytest.approx(losses[2:], rel=1e-14)
    assert max((params[n] - wanted[n]).abs().max().item() for n in wanted) < 1e-14


def test_an_error_on_one_rank_ends_all() -> None:
    run = faulty.run("raises", "other group", 2)
    others_left(run, 2, r"failed: ValueError: no such row \(at faulty.py:")
    assert "its last collective: " in run.said[0]
    assert "it had made 0 updates" in run.said[0]


def test_between_machines_and_after_the_first_rank_has_ended() -> None:
    run = faulty.run("killed", "first ended", 3, machines=True)
    assert run.codes.pop(0) == 0
    del run.said[0]
    others_left(run, 3, KILLED)


def test_a_child_of_a_rank_that_died_keeps_nobody() -> None:
    others_left(faulty.run("killed", "with a child", 0), 0, KILLED)


def test_a_busy_rank_is_waited_for() -> None:
    run = faulty.run("nothing", "busy", 0, watch=2.0)
    assert set(run.codes.values()) == {0}, run.said
    assert list(run.said.values()) == ["done\n"] * 4


def test_a_stopped_rank_is_ended() -> None:
    run = faulty.run("stopped", "own group", 0, watch=1.0)
    others_left(run, 0, "", within=2 + SOON)
    assert any("was stopped (SIGSTOP, SIGTSTP) for 1 s, and is ended" in said for said in run.said.values())
    assert run.codes[0] == -9


def test_a_rank_that_ended_is_missed_by_those_that_wait_for_it() -> None:
    run = faulty.run("ends", "ends first", 1)
    assert run.codes[1] == 0
    others_left(run, 1, "has come to its end", within=2 + SOON)
    assert all("nobody waits for it" in run.said[rank] for rank in (0, 2, 3))


@pytest.mark.parametrize("machines", [False, True])
@pytest.mark.parametrize("place", ["ends unheard", "all end unheard"])
def test_an_end_is_known_to_those_that_were_slow_to_call(place: str, machines: bool) -> None:
    run = faulty.run("ends", place, 0, machines=machines, slow=True)
    assert set(run.codes.values()) == {0}, run.said
    assert list(run.said.values()) == ["", "done\n", "done\n", "done\n"]


SCRIPT = """
import sys, time, torch
import torch.distributed as dist
import meshwright as mw

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
mesh = mw.init_mesh({"dp": 2})
if rank:
    raise ValueError("no such row")
t = mw.shard_tensor(torch.ones(4), mesh, {"dp": mw.Shard(0)}, check=False)
try:
    t.sum().item()
except mw.RankFailedError as error:
    print(error.ranks, error.cause, error.step, error.collective, type(error.__cause__).__name__, sep="|")
    raise
"""


def test_what_a_script_sees_and_what_its_launcher_reads(tmp_path: Path) -> None:
    ranks = []
    for rank in (0, 1):
        settings = os.environ | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / f"error-{rank}")}
        command = [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store")]
        kept = subprocess.PIPE
        ranks.append(subprocess.Popen(command, env=settings, stdout=kept, stderr=kept, text=True))
    try:
        (out, shown), _ = ranks[0].communicate(timeout=100), ranks[1].communicate(timeout=100)
    finally:
        for one in ranks:
            one.kill()
    assert ranks[0].returncode == ranks[1].returncode == 1
    seen, cause, step, where, _ = faulty.without_gloo(out).strip().split("|")
    assert (seen, step) == ("(1,)", "0")
    assert cause == "failed: ValueError: no such row (at <string>:10)"
    assert where.startswith(("all_gather_object", "all_reduce"))
    assert "meshwright.errors.RankFailedError: rank 1 (host" in shown
    told = json.loads((tmp_path / "error-0").read_text())
    assert told["message"]["message"].startswith("rank 1 (host")


# -- words and looks --------------------------------------------------------------------------------------


def test_what_is_told_of_a_rank() -> None:
    one = Obituary(2, "n7", True, "was ended by SIGKILL")
    error = report.failed([one], "all_reduce over dp at train.py:3", "Connection closed by peer")
    assert isinstance(error, mw.RankFailedError)
    assert (error.ranks, error.host, error.cause) == ((2,), "n7", "was ended by SIGKILL")
    assert str(error).splitlines() == [
        "rank 2 (host n7) was ended by SIGKILL",
        f"rank 0 left all_reduce over dp at train.py:3 (Connection closed by peer), after {error.step} updates",
    ]
    assert Obituary.of(0, "n", SystemExit(0), ending=True).fatal is False
    assert Obituary.of(0, "n", SystemExit(2), ending=True).fatal is True
    left = Obituary.of(0, "n", KeyError("x"), ending=False)
    assert (left.fatal, left.cause) == (False, "has left its process group, since it failed: KeyError: 'x'")


def test_what_the_system_says_of_a_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    born = process.born(child.pid)
    try:
        assert process.state(child.pid, born) == "running"
        assert process.state(child.pid, "another") == "ended"
        child.send_signal(19)
        end = time.monotonic() + 60
        while process.state(child.pid, born) != "stopped" and time.monotonic() < end:
            time.sleep(0.01)
        assert process.state(child.pid, born) == "stopped"
        child.kill()
        while process.state(child.pid, born) != "ended" and time.monotonic() < end:
            time.sleep(0.01)
        assert process.how(process.status(child.pid, born)) == "was ended by SIGKILL"
    finally:
        child.kill()
        child.wait()
    assert process.status(child.pid, born) is None


# -- any rank, anywhere -----------------------------------------------------------------------------------

SPOTS = ("forward", "backward", "optimizer", "between steps", "save", "capture", "own group", "other group")
IN_PYTHON = [spot for spot in SPOTS if spot != "own group"]


@pytest.mark.long
@pytest.mark.parametrize(("case", "place"), [*product(["killed"], SPOTS), *product(["raises", "leaves"], IN_PYTHON)])
@pytest.mark.parametrize("machines", [False, True])
def test_any_rank_anywhere(case: str, place: str, machines: bool) -> None:
    for victim in range(4):
        run = faulty.run(case, place, victim, machines=machines)
        others_left(run, victim, "")


def test_a_rank_may_come_to_its_end_while_its_watcher_tells_who_has() -> None:
    """The thread that trains says that it ends, the other one greets a caller: neither sees a half of the other's."""
    watcher = object.__new__(Watcher)
    watcher.rank, watcher.endpoints, watcher.lines, watcher.fatal = 2, dict.fromkeys(range(4)), [], None  # type: ignore[arg-type]
    watcher.lock = threading.RLock()
    watcher.gone = {rank: Obituary(rank, "a", False, "") for rank in (0, 1)}
    ends, said = [], []

    class Socket:
        def sendall(self, text: bytes) -> None:
            said.append(json.loads(text)["rank"])
            ends.append(threading.Thread(target=watcher._hear, args=(Obituary(2, "a", False, ""),)))
            ends[-1].start()
            ends[-1].join(0.2)

    watcher._greet(_Line(Socket(), 3))  # type: ignore[arg-type]
    for thread in ends:
        thread.join()
    assert said == [0, 1]
    assert list(watcher.gone) == [0, 1, 2]
