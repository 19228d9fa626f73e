"""The processes of a run: started here, or started by a launcher (torchrun, mpirun, srun) and joined."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshwright as mw
from meshwright import collective, compat, errors
from meshwright.errors import MeshwrightError, RankFailedError
from meshwright.ranks import runtime
from meshwright.ranks.launchers import Launch

from .config import TrainConfig
from .loop import Emit, train
from .options import OptionError

LOOK = 1.0  # seconds between two looks whether a rank is stopped
STOPPED = 10.0  # seconds after which one that is counts as failed: the others wait for it
GRACE = 0.5  # seconds for the other ranks to say what happened to them, once one failed


class RankError(Exception):
    """A rank failed in a way that is not the user's mistake; the message has its traceback."""


# ---------------------------------------------------------------------------------------------- own processes


@dataclass(frozen=True)
class _Failure:
    """How a rank ended; ``name`` is the class of one of our errors, or empty."""

    rank: int
    name: str
    message: str

    def error(self, world: int) -> Exception:
        """The exception to raise in the parent."""
        if self.name:
            kind: type[Exception] = getattr(errors, self.name, MeshwrightError)
            return kind(self.message)
        return RankError(f"rank {self.rank} of {world} failed:\n{self.message}")


def run_processes(config: TrainConfig, emit: Emit) -> None:
    """Start one process per rank of the mesh on this machine and wait for them.

    Whatever ends this (an error, Ctrl-C, a rank that was killed) ends all of them.

    Args:
        config: the options.
        emit: told in this process what the first rank tells.

    Raises:
        MeshwrightError: one of ours, as the first rank that failed raised it.
        RankError: any other failure, with the traceback of the rank where it began.
    """
    check_devices(config, config.make_mesh().size)
    started: list[tuple[Any, Any]] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        try:
            _start(config, str(Path(folder) / "store"), started)
            _listen(started, emit)
        finally:
            for process, _ in started:
                if process.is_alive():
                    process.kill()
            for process, pipe in started:
                process.join()
                pipe.close()


def _context(captured: bool) -> Any:
    """A server that imported torch once and forks each rank: fast, and safe where threads run here."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__, *(compat.EXPORTER if captured else ())])
    return context


def _start(config: TrainConfig, store: str, started: list[tuple[Any, Any]]) -> None:
    context = _context(config.static)
    for rank in range(config.make_mesh().size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(theirs, rank, config, store), name=f"rank {rank}", daemon=not config.workers
        )
        process.start()
        theirs.close()
        started.append((process, ours))


def _listen(started: list[tuple[Any, Any]], emit: Emit) -> None:
    """Pass on what the ranks tell until all are done.  Raises what the first failure says."""
    pipes: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(started)}
    failures: list[_Failure] = []
    deadline = None
    since: dict[int, float] = {}
    while pipes:
        left = LOOK if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(pipes), left)
        if not ready:
            failures += _stopped([(rank, started[rank][0].pid) for rank in pipes.values()], since)
            if failures:
                break
            continue
        for pipe in ready:
            rank = pipes[pipe]
            kind, values = _received(pipe, started[rank][0], rank, rank in since)
            if kind in ("done", "failed"):
                del pipes[pipe]
            if kind == "failed":
                failures.append(values)
                deadline = deadline or time.monotonic() + GRACE
            elif kind != "done" and not failures:
                emit(kind, values)
    if failures:
        raise _root(failures).error(len(started))


def _stopped(ranks: list[tuple[int, int]], since: dict[int, float]) -> list[_Failure]:
    """The ranks that have been stopped for too long; ``since`` is kept from look to look."""
    for rank, pid in ranks:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # gone, or a system that does not say
            state = ""
        if state == "T":
            since.setdefault(rank, time.monotonic())
        else:
            since.pop(rank, None)
    text = f"the process was stopped (SIGSTOP or SIGTSTP) for {STOPPED:g} s while the others waited for it"
    return [_Failure(rank, "", text) for rank, at in since.items() if time.monotonic() - at >= STOPPED]


def _received(pipe: Any, process: Any, rank: int, stopped: bool) -> tuple[str, Any]:
    """What a rank tells, or how it ended; the others end one that was seen ``stopped``: it is the cause."""
    try:
        received: tuple[str, Any] = pipe.recv()
        return received
    except (EOFError, OSError):  # it ended without a word
        process.join(5)
        code = process.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        if stopped:
            how = f"was stopped (SIGSTOP or SIGTSTP) while the others waited for it, and {how}"
        return "failed", _Failure(rank, "", f"the process {how}")


def _root(failures: list[_Failure]) -> _Failure:
    """The failure that the others followed from: a rank that died, else one of our errors, else the first.

    What others say of a rank that is gone comes last: it follows from what that one says.
    """
    died = [f for f in failures if not f.name and f.message.startswith("the process ")]
    first = [f for f in failures if f.name != RankFailedError.__name__]
    ours = [f for f in first if f.name]
    return (died or ours or first or failures)[0]


def _rank_main(pipe: Connection, rank: int, config: TrainConfig, store: str) -> None:
    """Body of the process of one rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _silence_stdout()
    try:
        emit: Any = lambda kind, values: pipe.send((kind, values))  # noqa: E731
        with _warnings_told(emit if rank == 0 else None):
            _connect(config, rank, rank, init_method=f"file://{store}", world_size=config.make_mesh().size)
            train(config, mw.init_mesh(dict(config.mesh), device=config.device), emit)
            pipe.send(("done", None))
        dist.destroy_process_group()
    except BaseException as error:
        pipe.send(("failed", _failure(rank, error)))
        collective.leave_with(error)
        sys.exit(1)


def _failure(rank: int, error: BaseException) -> _Failure:
    if isinstance(error, MeshwrightError):
        return _Failure(rank, type(error).__name__, str(error))
    return _Failure(rank, "", "".join(traceback.format_exception(error)).rstrip())


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _silence_stdout() -> None:
    """Nothing of ours is printed by a rank, but gloo greets each of its connections on stdout."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)


@contextlib.contextmanager
def _warnings_told(emit: Emit | None) -> Iterator[None]:
    """Pass warnings on as events; without ``emit`` drop them: the first rank has the same."""
    with warnings.catch_warnings():

        def told(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
            if emit is not None:
                emit("warning", {"text": str(message)})

        warnings.showwarning = told
        yield


# ---------------------------------------------------------------------------------------------- both ways


def check_devices(config: TrainConfig, local: int) -> None:
    """Raises OptionError where this machine has not the devices for ``local`` ranks."""
    if config.device != "cuda":
        return
    if not torch.cuda.is_available():
        raise OptionError("--device cuda: no usable GPU here (torch.cuda.is_available() is False); take --device cpu")
    if torch.cuda.device_count() < local:
        raise OptionError(
            f"--device cuda: {local} processes need a GPU each, this machine has "
            f"{torch.cuda.device_count()}: take a smaller --mesh, or --device cpu"
        )


def _prepare(config: TrainConfig, local_rank: int) -> None:
    torch.set_num_threads(config.threads)
    if config.device == "cuda":
        torch.cuda.set_device(local_rank)


def _connect(config: TrainConfig, rank: int, local_rank: int, **how: Any) -> None:
    _prepare(config, local_rank)
    if config.device == "cuda":
        how["device_id"] = torch.device("cuda", local_rank)
    dist.init_process_group("nccl" if config.device == "cuda" else "gloo", rank=rank, **how)


# ---------------------------------------------------------------------------------------------- started by a launcher


def run_joined(config: TrainConfig, joined: Launch, emit: Emit) -> None:
    """Be one of the processes that a launcher started.

    Raises:
        OptionError: this machine has too few devices.
        MeshwrightError, and whatever else the training raises.
    """
    check_devices(config, joined.local_rank + 1)
    with _stdout_silenced(), _warnings_told(emit if joined.rank == 0 else None):
        _prepare(config, joined.local_rank)
        mesh = mw.init_mesh(dict(config.mesh), device=config.device)
    with _warnings_told(emit if joined.rank == 0 else None):
        try:
            train(config, mesh, emit)
        except BaseException as error:
            collective.leave_with(error)
            raise
    # Both hold the groups; when the last reference goes, their threads are joined.
    dist.destroy_process_group()
    runtime.reset()


@contextlib.contextmanager
def _stdout_silenced() -> Iterator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    _silence_stdout()
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def first_to_fail() -> bool:
    """Whether this rank is the first of a launcher's that asks: what failed on all is then shown once."""
    if not dist.is_initialized():
        return True
    with contextlib.suppress(Exception):  # the store may be gone: better shown twice than never
        return int(dist.distributed_c10d._get_default_store().add("meshwright/failed", 1)) == 1
    return True
