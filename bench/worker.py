"""Starts a benchmark's processes, each forked from a server that has imported what all need, and takes its samples."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from .core import Benchmark, Effort, Samples
from .registry import benchmarks

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["bench.registry"])
GRACE = 5.0  # seconds that processes have to end when one has failed, or all are done


class BenchmarkError(Exception):
    """A benchmark did not give samples; the message is what its processes said last."""


def work(name: str, effort: Effort, rank: int, folder: Path) -> None:
    """One process: take the samples; the first one writes them."""
    log = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    warnings.filterwarnings("ignore")  # of PyTorch's own parts
    torch.set_num_threads(1)
    torch.manual_seed(effort.seed)
    try:
        (benchmark,) = (b for b in benchmarks() if b.name == name)
        several = benchmark.processes > 1
        if several:
            start = f"file://{folder / 'store'}"
            dist.init_process_group("gloo", init_method=start, rank=rank, world_size=benchmark.processes)
        samples = benchmark.measure(effort)
        if rank == 0:
            (folder / "samples.json").write_text(json.dumps(samples))
        if several:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once, whatever its threads wait for


def samples_of(benchmark: Benchmark, effort: Effort, timeout: float) -> Samples:
    """Run it.

    Raises:
        BenchmarkError: a process failed, or they did not end in time.
    """
    with tempfile.TemporaryDirectory() as path:
        folder, processes = Path(path), []
        for rank in range(benchmark.processes):
            process = CONTEXT.Process(target=work, args=(benchmark.name, effort, rank, folder), daemon=True)
            process.start()
            processes.append(process)
        try:
            late = not ended(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        out = folder / "samples.json"
        if not late and out.exists() and all(p.exitcode == 0 for p in processes):
            found: Samples = json.loads(out.read_text())
            return found
        said = [f"rank {i}: {folder.joinpath(f'{i}.txt').read_text()[-3000:]}" for i in range(len(processes))]
        raise BenchmarkError("\n".join([*said, f"not done after {timeout:g} s" if late else "a process failed"]))


def ended(processes: Sequence[multiprocessing.process.BaseProcess], timeout: float) -> bool:
    """Wait for all of them, shortly where one has failed; whether they ended in time."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [p.exitcode for p in processes]
        if None not in codes:
            return True
        if any(codes):
            for process in processes:
                process.join(GRACE)
            return True
        time.sleep(0.05)
    return False
