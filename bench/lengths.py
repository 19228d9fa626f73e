"""New sequence lengths: what a step of a new length costs beside one of a known length, and whether memory grows.

A transformer block of the main job, forward and backward, on simulated ranks split over heads; DTensor beside it as one
of two ranks on a process group that sends nothing.  Times are medians of CPU time: of all simulated ranks together.

    python bench/lengths.py [--hidden 64] [--lengths 24] [--grow 1000] [--no-peer] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.train import TrainConfig
from meshwright.train.model import Block

Step = Callable[[int], None]
BATCH, HEADS, FIRST = 2, 4, 64
COLUMN, ROW = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}
LAYOUTS = {"attention.qkv.*": COLUMN, "mlp.up.*": COLUMN, "attention.out.weight": ROW, "mlp.down.weight": ROW}


def block(hidden: int) -> Block:
    """The block, with weights that do not hang on who makes it."""
    torch.manual_seed(0)
    return Block(hidden, HEADS, TrainConfig().dropout, False)


def ours(hidden: int, mesh: mw.Mesh) -> Step:
    """A step of this rank at a length."""
    model = mw.shard_module(block(hidden), mesh, LAYOUTS)

    def step(length: int) -> None:
        x = mw.shard_tensor(torch.randn(BATCH, length, hidden), mesh, (), check=False)
        model(x, None).square().mean().backward()
        model.zero_grad()

    return step


def dtensor(hidden: int) -> Step:
    """The same of DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cpu", (2,))
    column, row = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
    styles = {"attention.qkv": column, "attention.out": row, "mlp.up": column, "mlp.down": row}
    model = parallelize_module(block(hidden), mesh, styles)  # type: ignore[arg-type]
    for module in (model.norm1, model.norm2):
        for name, p in list(module.named_parameters()):
            setattr(module, name, torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()])))

    def step(length: int) -> None:
        x = distribute_tensor(torch.randn(BATCH, length, hidden), mesh, [Replicate()])
        with sdpa_kernel(SDPBackend.MATH), implicit_replication():  # it has no strategy for the kernel of CPUs
            made = model(x, None)
        made.square().mean().backward()
        model.zero_grad()

    return step


def timed(step: Step, lengths: Iterable[int]) -> tuple[float, float]:
    """CPU ms of a step of a new length and of one of a known length."""
    new, known = [], []
    step(FIRST)
    for length in lengths:
        gc.collect()
        gc.disable()
        start = time.process_time()
        step(length)
        new.append(time.process_time() - start)
        for _ in range(3):
            start = time.process_time()
            step(length)
            known.append(time.process_time() - start)
        gc.enable()
    return 1e3 * statistics.median(new), 1e3 * statistics.median(known)


def resident() -> float:
    """MiB that this process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def grown(step: Step, count: int, every: int = 500) -> list[float]:
    """MiB more than at the start after each ``every`` of that many new lengths."""
    step(FIRST)
    before, made = resident(), []
    for i in range(1, count + 1):
        step(FIRST + i)
        if i % every == 0:
            made.append(resident() - before)
    return made


def simulated(ranks: int, fn: Callable[[Step], Any], hidden: int) -> Any:
    """``fn`` of the step, on each of so many simulated ranks; what the first gives."""
    mesh = mw.Mesh({"tp": ranks})
    return mw.simulate(lambda: fn(ours(hidden, mesh)), mesh, timeout=3600)[0]


def main() -> None:
    """Time, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lengths", type=int, default=24, help="how many new lengths are timed")
    parser.add_argument("--grow", type=int, default=0, help="through how many lengths memory is watched")
    parser.add_argument("--no-peer", action="store_true", help="without DTensor")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = range(FIRST + 2, FIRST + 2 + 2 * options.lengths, 2)
    found: dict[str, Any] = {}

    def note(name: str, pair: tuple[float, float]) -> None:
        found[name] = new, known = pair
        if not options.json:
            print(f"{name:24} new {new:7.2f} ms   known {known:7.2f} ms   {new / known:6.2f} x", flush=True)

    for ranks in (1, 2):
        note(f"simulated ranks: {ranks}", simulated(ranks, lambda step: timed(step, lengths), options.hidden))
    if not options.no_peer:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        note("DTensor, 1 of 2 ranks", timed(dtensor(options.hidden), lengths))
        dist.destroy_process_group()
    if options.grow:
        found["growth, MiB"] = simulated(2, lambda step: grown(step, options.grow), options.hidden)
    if options.json:
        print(json.dumps(found))
    elif options.grow:
        print("growth, MiB, per 500 lengths:", *(f"{mib:.1f}" for mib in found["growth, MiB"]))


if __name__ == "__main__":
    main()
