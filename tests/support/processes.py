"""Real processes for tests: ``run_processes(fn, world, *args)`` runs ``fn(*args)`` on gloo ranks."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.compat import EXPORTER
from meshwright.program.step import CompiledStep
from tests.support import late

# A server that has imported torch forks each rank: fast, and safe where this process runs threads.
CONTEXT = multiprocessing.get_context("forkserver")
# With what captured steps and test files import: 2.4 s for each rank otherwise.
CONTEXT.set_forkserver_preload(
    [
        *("torch.distributed", *EXPORTER, "networkx", "pytest", "meshwright.collective", "meshwright.program.compile"),
        "tests.support.frozen",
    ]
)


class ProcessError(AssertionError):
    """A rank failed; the message has its rank and traceback."""


def _rank_main(pipe: Connection, rank: int, world: int, store: str, job: bytes, is_late: bool, compares: bool) -> None:
    torch.set_num_threads(1)
    CompiledStep.compares = compares
    try:
        if is_late:
            late.install(pytest.MonkeyPatch())
        fn, args = pickle.loads(job)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        dist.barrier()  # a rank that is done at once must not go while another one still connects to it
        answer = (True, fn(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    if answer[0] and dist.is_initialized():
        dist.destroy_process_group()


def run_processes(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 300.0) -> list[Any]:
    """Run ``fn(*args)`` in ``world`` processes with torch.distributed initialised on gloo.

    Args:
        fn: a function at the top level of a module; it, its arguments and results are pickled.
        timeout: seconds until the processes are ended.

    Returns:
        The results in the order of the ranks.

    Raises:
        ProcessError: the first rank that failed, with its traceback; or the ranks that did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        store, job = str(Path(folder) / "store"), pickle.dumps((fn, args))
        pipes: dict[Any, int] = {}
        processes = []
        for rank in range(world):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_rank_main,
                args=(theirs, rank, world, store, job, late.installed(), CompiledStep.compares),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes[ours] = rank
            processes.append(process)
        try:
            results = _collect(pipes, timeout)
            for process in processes:
                process.join(5)
            return results
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: dict[Any, int], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    world, end = len(pipes), time.monotonic() + timeout
    while pipes:
        ready = wait(list(pipes), max(0.0, end - time.monotonic()))
        if not ready:
            raise ProcessError(f"ranks {sorted(pipes.values())} did not end within {timeout:g} s")
        for pipe in ready:
            rank = pipes.pop(pipe)
            try:
                good, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                good, value = False, "the process ended without a result"
            if not good:
                raise ProcessError(f"rank {rank} of {world} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(world)]
