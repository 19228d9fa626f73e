"""Ranks that do not agree, that leave, and that come back: on real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright import collective
from meshwright.collective import monitor
from meshwright.collective.store_messages import RankStatus
from meshwright.errors import CollectiveError, DesyncError, MeshError
from meshwright.ranks import runtime
from tests.support.processes import run_processes

Case = Callable[[mw.Mesh], Any]


def reads_different_values(mesh: mw.Mesh) -> None:
    x = mw.shard_tensor(torch.arange(4.0), mesh, {"dp": mw.Shard(0)})
    loss, accuracy = x.sum(), x.mean()
    loss.item() if runtime.RT.rank == 0 else accuracy.item()


def went_other_ways_before(mesh: mw.Mesh) -> None:
    group = collective.group(mesh, (0,))
    collective.all_reduce(torch.ones(100), "sum" if runtime.RT.rank else "max", group)
    collective.all_reduce(torch.ones(1), "sum", group)


def another_kind(mesh: mw.Mesh) -> None:
    group = collective.group(mesh, (0,))
    collective.all_reduce(torch.ones(40), "sum", group)  # the first one goes with what was claimed of plain tensors
    if runtime.RT.rank == 0:
        collective.all_gather(torch.ones(4), 0, [4, 4], group)
    else:
        collective.all_reduce(torch.ones(40), "sum", group)


def reads_alone(mesh: mw.Mesh) -> None:
    x = mw.shard_tensor(torch.arange(4.0), mesh, {"dp": mw.Shard(0)})
    loss = x.sum()
    if runtime.RT.rank == 0:
        loss.item()
    mw.shard_tensor(torch.arange(4.0), mesh, {"dp": mw.Shard(0)})  # a size, where rank 0 sends a value


def waits_alone(mesh: mw.Mesh) -> None:
    if runtime.RT.rank == 0:
        mw.unshard(mw.shard_tensor(torch.arange(4.0), mesh, {"dp": mw.Shard(0)}, check=False))
    else:
        time.sleep(3)
        collective.barrier(collective.group(mesh, (0,)))


def is_stopped(mesh: mw.Mesh) -> None:
    if runtime.RT.rank == 1:
        wakes = f"sleep 4; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wakes])  # which begins at once
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGSTOP)
    collective.barrier(collective.group(mesh, (0,)))


def interrupted(mesh: mw.Mesh) -> None:
    if runtime.RT.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    else:
        time.sleep(1)
    try:
        collective.barrier(collective.group(mesh, (0,)))
    except KeyboardInterrupt:
        raise DesyncError("KeyboardInterrupt") from None


# Case to settings, and what the two ranks must be told.
CASES: dict[Case, tuple[dict[str, Any], str, str]] = {
    reads_different_values: ({}, r"rank 0: .* read at test_agreement.py:.*\n  rank 1: .* read at test_agree", ""),
    went_other_ways_before: ({}, r"rank 0: all_reduce\(max\) .*\n  rank 1: all_reduce\(sum\) of float32\[100\]", ""),
    reads_alone: (
        {},
        r"rank 0: all_reduce.*for the value read at test_agr.*\n  rank 1: all_gather_object; now at test_a",
        "",
    ),
    another_kind: (
        {},
        r"rank 0: all_gather\(.* over dp \(ranks 0, 1\) at test_agreement.py:.*\n  rank 1: all_reduce\(sum\) of flo",
        "",
    ),
    waits_alone: (
        {"timeout": 1.5},
        r"rank 0: to read what is .* at test_agreement.py:\d+ failed: not complete after 1.5 s\n  rank 1: has not come",
        r"rank 1: barrier over dp .* failed: Connection closed by peer(.|\n)*rank 0: failed: rank 0: to read what",
    ),
    is_stopped: (
        {"timeout": 1.5},
        r"rank 0: barrier .* failed: not complete after 1.5 s\n  rank 1: its process \d+ is stopped \(SIGSTOP",
        r"rank 1: barrier over dp .* failed: Connection (closed|reset) by peer",
    ),
    interrupted: ({}, "KeyboardInterrupt", r"rank 1: barrier (.|\n)*rank 0: failed: KeyboardInterrupt on rank 0"),
}


def again(rank: int, folder: str, name: str) -> None:
    """A process group of its own for each case: the one before is broken."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2)
    dist.barrier()  # a case that fails at once must not go while the other rank still connects


def each_case(folder: str) -> list[tuple[str, float]]:
    monitor.SPEAK, rank = 0.5, dist.get_rank()
    told = []
    for case, (settings, *_) in CASES.items():
        again(rank, folder, case.__name__)
        mesh = mw.init_mesh({"dp": 2}, **settings)
        start = time.monotonic()
        try:
            case(mesh)
            told.append(("no error", time.monotonic() - start))
        except DesyncError as error:
            told.append((str(error), time.monotonic() - start))
    again(rank, folder, "last")
    assert mw.shard_tensor(torch.arange(4.0), mw.init_mesh({"dp": 2}), {"dp": mw.Shard(0)}).sum().item() == 6
    return told


@pytest.mark.processes
def test_ranks_that_do_not_agree_are_told_on_every_rank() -> None:
    with tempfile.TemporaryDirectory() as folder:
        zero, one = run_processes(each_case, 2, folder)
    for (case, (_, first, second)), a, b in zip(CASES.items(), zero, one, strict=True):
        assert re.search(first, a[0]), (case, a)
        assert re.search(second or first, b[0]), (case, b)
        assert case is reads_different_values or max(a[1], b[1]) < 250, (case, a, b)


# -- verdicts from words ----------------------------------------------------------------------------------


def word(ranks: tuple[int, ...], number: int, *recent: tuple[int, int, str], **counts: int) -> RankStatus:
    named = {key.strip("_").replace("_", ","): n for key, n in counts.items()}
    return RankStatus("waits", ranks, number, f"number {number} of {ranks}", named, list(recent), "")


def test_a_circle_of_waiting_ranks_is_a_deadlock() -> None:
    heard = {
        0: word((0, 1), 3, _0_1=3, _0_2=1),
        1: word((1, 3), 2, _0_1=2, _1_3=2),
        3: word((0, 1, 2, 3), 1, _1_3=1, _0_1_2_3=1),
        2: word((0, 1, 2, 3), 1, _0_1_2_3=1, _0_2=1),
    }
    assert monitor.judge(heard, 0).startswith("deadlock: every rank waits for another one\n  rank 0: waits in number 3")
    del heard[3]  # it computes, and may come
    assert monitor.judge(heard, 0) == ""


def test_a_slow_collective_is_no_deadlock() -> None:
    heard = {0: word((0, 1), 3, (3, 7, "x"), _0_1=3), 1: word((0, 1), 2, (2, 5, "y"), (3, 7, "x"), _0_1=3)}
    assert monitor.judge(heard, 0) == monitor.judge(heard, 1) == ""  # started together, and on its way


def test_other_histories_are_a_disagreement() -> None:
    heard = {0: word((0, 1), 3, (2, 5, "y"), (3, 7, "x"), _0_1=3), 1: word((0, 1), 2, (2, 6, "z"), _0_1=2)}
    assert "  rank 0: y; now in number 3" in monitor.judge(heard, 0)
    assert "  rank 1: number 2 of" in monitor.judge(heard, 1)


# -- process groups that end, and begin again -------------------------------------------------------------


def with_ranks_swapped(folder: str) -> list[Any]:
    rank = dist.get_rank()
    mesh = mw.init_mesh({"dp": 2})
    rows = mw.shard_tensor(torch.arange(4.0), mesh, {"dp": mw.Shard(0)})
    old = collective.group(mesh, (0,))
    torch_mesh = mesh.device_mesh()
    again(1 - rank, folder, "swapped")  # and no init_mesh: a mesh is only a description
    told: list[Any] = [runtime.RT.rank == 1 - rank, mesh.device_mesh() is not torch_mesh]
    new = mw.shard_tensor(torch.arange(4.0), mesh, {"dp": mw.Shard(0)}, check=False)
    told += [new.to_local().tolist() == [[0.0, 1.0], [2.0, 3.0]][1 - rank], new.sum().item()]
    for stale in (lambda: rows + 1, lambda: rows.shape):
        with pytest.raises(MeshError, match=rf"when the process was rank {rank}, and it is rank {1 - rank} now"):
            stale()
    with pytest.raises(CollectiveError, match="its group was made for a process group that was destroyed"):
        collective.all_reduce(torch.ones(1), "sum", old)
    with pytest.raises(CollectiveError, match="names rank 2 but there are 2 processes: make a mesh of these"):
        collective.group(mw.Mesh({"dp": 3}), (0,))  # of a process group that was larger
    again(1 - rank, folder, "once more")
    told.append((new * 2).sum().item())  # the same rank as before: what it holds is still its own
    return told


@pytest.mark.processes
def test_ranks_and_groups_belong_to_the_process_group() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for told in run_processes(with_ranks_swapped, 2, folder):
            assert told == [True, True, True, 6.0, 12.0]


def in_a_fork(folder: str) -> str:
    mesh = mw.init_mesh({"dp": 2})
    x = mw.shard_tensor(torch.arange(4.0), mesh, {"dp": mw.Shard(0)})
    path = Path(folder) / f"child{dist.get_rank()}"
    child = os.fork()
    if not child:
        try:
            x.sum().item()
        except CollectiveError as error:
            path.write_text(str(error))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert x.sum().item() == 6
    return path.read_text()


@pytest.mark.processes
def test_a_forked_child_is_no_rank() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank, told in enumerate(run_processes(in_a_fork, 2, folder)):
            assert f"this process was forked from rank {rank} after init_mesh and is no rank itself" in told


ENDS = """
import os, sys
import torch, torch.distributed as dist
import meshwright as mw

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mw.init_mesh({"dp": 1})
child = os.fork()
if not child:
    sys.exit(3)  # as Python ends, without the threads of the groups: it would wait for them
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.processes
def test_a_forked_child_ends() -> None:
    assert subprocess.run([sys.executable, "-c", ENDS], timeout=60).returncode == 3
