"""Runs of real processes in which one rank fails: ``run(case, place, victim)``.

``place`` is where the victim is when it happens, ``case`` what happens to it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from meshwright.failures import process
from meshwright.failures.watchdog import Watcher
from meshwright.program.run import pipeline as run_pipeline
from meshwright.program.step import CompiledStep
from tests.support import stages
from tests.support.processes import CONTEXT

LONG = 600.0  # seconds that nobody waits for: a rank that still sleeps then was not told


def happen(case: str, folder: str) -> None:
    """What happens to the victim; the time of it is told first."""
    Path(f"{folder}/at").write_text(str(time.time()))
    os.rename(f"{folder}/at", f"{folder}/happened")
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case == "raises":
        raise ValueError("no such row")
    elif case == "leaves":  # os._exit: no handlers run
        os._exit(3)
    elif case == "ends":
        sys.exit(0)


class Trap:
    """Springs once, on the victim, at the place, in the third step."""

    def __init__(self, case: str, place: str, victim: int, folder: str) -> None:
        self.case, self.place, self.victim, self.folder = case, place, victim, folder
        self.mine = victim == dist.get_rank()
        self.step = 0

    def at(self, place: str) -> None:
        if self.mine and place == self.place and self.step == 2:
            self.mine = False
            happen(self.case, self.folder)


def training(trap: Trap, mesh: mw.Mesh) -> None:
    """Steps of a small model over dp and tp, with a checkpoint after each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model[1].register_forward_hook(lambda *_: trap.at("forward"))
    mw.shard_module(model, mesh, {"0.*": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}})
    optimizer = mw.shard_optimizer(torch.optim.AdamW(model.parameters()))
    optimizer.register_step_pre_hook(lambda *_: trap.at("optimizer"))
    store, x = mw.Checkpoints(f"{trap.folder}/saves", keep=1), torch.randn(8, 8)
    for step in range(200):
        trap.step = step
        hidden = model(mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)}))
        hidden.register_hook(lambda grad: trap.at("backward"))
        hidden.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        trap.at("between steps")
        if trap.place == "save":
            saved = store.save(step, model=model, optimizer=optimizer)
            trap.at("save")
            saved.wait()
        time.sleep(0.02)


def captures(trap: Trap, mesh: mw.Mesh) -> None:
    """One rank fails while it captures."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    trap.step = 2

    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        trap.at("capture")
        return model(x).pow(2).mean()

    example = (torch.randn(8, 8),)
    step = mw.compile_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), example, mesh=mesh,
                           batch={"dp": mw.Shard(0)})  # fmt: skip
    for _ in range(200):
        step(example)


def own_group(trap: Trap, mesh: mw.Mesh) -> None:
    """All wait in a collective for one that never comes; the victim fails inside of it."""
    rank, trap.step = dist.get_rank(), 2
    late = next(r for r in mesh.ranks if r != trap.victim)
    if trap.mine:  # "killed" or "stopped": what else there is happens where Python is
        threading.Timer(0.5, lambda: trap.at("own group")).start()
    if rank == late:
        time.sleep(LONG)
    collective.all_reduce(torch.ones(1000), "sum", collective.group(mesh))


def other_group(trap: Trap, mesh: mw.Mesh) -> None:
    """The victim fails alone; one of the others sleeps, and two wait for that one, in groups without the victim."""
    rank, trap.step = dist.get_rank(), 2
    if trap.mine:
        there = [Path(f"{trap.folder}/there-{r}") for r in mesh.ranks if r != rank]
        while not all(p.exists() for p in there):
            time.sleep(0.01)
        time.sleep(0.5)
        trap.at("other group")
    Path(f"{trap.folder}/there-{rank}").touch()
    if rank == 3 - trap.victim:
        time.sleep(LONG)  # it reads data: the ones that wait for it can only be told
    axis = next(a for a in (0, 1) if trap.victim not in mesh.group_ranks(rank, (a,)))
    collective.all_reduce(torch.ones(1000), "sum", collective.group(mesh, (axis,)))
    time.sleep(LONG)


def first_ended(trap: Trap, mesh: mw.Mesh) -> None:
    """The first rank, to which all others are connected, comes to its end; then the victim fails alone."""
    trap.step, first = 2, Path(f"{trap.folder}/first")
    if dist.get_rank() == 0:
        Path(f"{first}.tmp").write_text(str(os.getpid()))
        os.rename(f"{first}.tmp", first)
        return
    while not first.exists() or process.state(int(first.read_text())) != "ended":
        time.sleep(0.01)
    time.sleep(0.5)  # for those that were connected to it to turn to the next one
    trap.at("first ended")
    time.sleep(LONG)


def with_a_child(trap: Trap, mesh: mw.Mesh) -> None:
    """The victim has a child that was forked from it, which outlives it."""
    trap.step = 2
    if trap.mine and os.fork() == 0:
        time.sleep(3)
        os._exit(0)
    time.sleep(0.3)
    trap.at("with a child")
    time.sleep(LONG)


def busy(trap: Trap, mesh: mw.Mesh) -> None:
    """The victim does nothing wrong: it holds Python's lock, and is stopped for a moment, while the others wait."""
    if trap.mine:
        ctypes.PyDLL(None).usleep(4_000_000)
        wakes = f"sleep 0.2; kill -CONT {os.getpid()}"
        with subprocess.Popen(["sh", "-c", wakes]):
            os.kill(os.getpid(), signal.SIGSTOP)
        happen("nothing", trap.folder)
    collective.all_reduce(torch.ones(1000), "sum", collective.group(mesh))
    print("done")


def ends_first(trap: Trap, mesh: mw.Mesh) -> None:
    """A rank that comes to its end is missed only by those that wait for it."""
    trap.step = 2
    trap.at("ends first")
    time.sleep(2)
    print("nobody waits for it")
    if dist.get_rank() == 2:
        time.sleep(LONG)
    collective.all_reduce(torch.ones(1000), "sum", collective.group(mesh))


def ends_unheard(trap: Trap, mesh: mw.Mesh) -> None:
    """The victim comes to its end at once, while the others are slow to call those that they are connected to."""
    trap.step = 2
    trap.at(trap.place)
    if trap.place == "ends unheard" or dist.get_rank() == 3:
        time.sleep(3)
    print("done")


def pipelined(trap: Trap, mesh: mw.Mesh) -> None:
    """Stages, of which one fails in a part or before it sends; a checkpoint after each step."""
    step, model, optimizer = stages.captured(mesh, stages={"tp": "layers"}, passes=[PIPELINE])
    store, one, send = mw.Checkpoints(f"{trap.folder}/saves", keep=1), run_pipeline._Run._one, collective.send

    def runs(self: Any, action: Any) -> None:
        if action.micro == 1:
            trap.at(action.part)
        one(self, action)

    def sends(*args: Any) -> Any:
        trap.at("edge")
        return send(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_pipeline._Run, "_one", runs)
        patch.setattr(collective, "send", sends)
        for i in range(200):
            trap.step = i
            step(stages.ignoring(i, 8))
            store.save(i + 1, model=model, optimizer=optimizer, program=step).wait()


PIPELINE = "pipeline:micro_batches=3,schedule=zero-bubble"
PLACES: dict[str, Callable[[Trap, mw.Mesh], None]] = {
    **dict.fromkeys(("forward", "backward", "optimizer", "between steps", "save"), training),
    "capture": captures, "own group": own_group, "other group": other_group,
    **dict.fromkeys(("F", "W", "edge"), pipelined),
    "first ended": first_ended, "with a child": with_a_child, "busy": busy, "ends first": ends_first,
    "ends unheard": ends_unheard, "all end unheard": ends_unheard,
}  # fmt: skip


def rank_main(case: str, place: str, victim: int, rank: int, world: int, folder: str, settings: dict[str, Any]) -> None:
    """The process of one rank; what it says goes to a file."""
    out = os.open(f"{folder}/said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if settings.pop("machines", False):  # two, as far as the ranks know
        process.machine = lambda: f"machine {rank // 2}"  # type: ignore[assignment]
    if settings.pop("slow", False):
        call = Watcher._call
        Watcher._call = lambda *args: time.sleep(0.5) or call(*args)  # type: ignore[method-assign,func-returns-value]
    torch.set_num_threads(1)
    CompiledStep.compares = False  # before anything happens
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    mesh = mw.init_mesh({"dp": world // 2, "tp": 2}, **settings)
    collective.barrier(collective.group(mesh))
    PLACES[place](Trap(case, place, victim, folder), mesh)


def without_gloo(said: str) -> str:
    """What was printed but for what gloo says of itself, in torch 2.10."""
    return "".join(line for line in said.splitlines(keepends=True) if not line.startswith("[Gloo] "))


class Run(NamedTuple):
    """What became of the ranks.

    Attributes:
        seconds: rank to the time from what happened to its end; those that did not end are left out.
        codes: rank to its exit code.
        said: rank to what it printed.
    """

    seconds: dict[int, float]
    codes: dict[int, int]
    said: dict[int, str]


def run(
    case: str, place: str, victim: int, world: int = 4, limit: float = 300.0, saves: Path | None = None, **settings: Any
) -> Run:
    """Let something happen to one rank, and wait for the end of all.

    Args:
        saves: where to leave what the ranks saved.
        limit: seconds after which those that are still there hang, however busy the machine is.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = (case, place, victim)
        ranks = [CONTEXT.Process(target=rank_main, args=(*args, r, world, folder, settings)) for r in range(world)]
        for one in ranks:
            one.start()
        mark, began = Path(folder) / "happened", time.monotonic()
        try:
            while not mark.exists() and any(p.is_alive() for p in ranks) and time.monotonic() < began + LONG:
                time.sleep(0.01)
            ends: dict[int, float] = {}
            at = float(mark.read_text()) if mark.exists() else 0.0
            while at and len(ends) < world and time.time() < at + limit:
                ends |= {r: time.time() - at for r, p in enumerate(ranks) if r not in ends and not p.is_alive()}
                time.sleep(0.01)
            said = {r: without_gloo((Path(folder) / f"said-{r}").read_text()) for r in range(world)}
            if saves is not None:
                shutil.copytree(Path(folder) / "saves", saves)
            return Run(ends, {r: ranks[r].exitcode or 0 for r in ends}, said)
        finally:
            for one in ranks:
                if one.is_alive():
                    one.kill()
                one.join()
