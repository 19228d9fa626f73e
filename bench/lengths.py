"""New sequence lengths: what a step of a new length costs beside one of a known length, and whether memory grows.

A transformer block of the main job, forward and backward, on simulated ranks split over heads; DTensor beside it as one
of two ranks on a process group that sends nothing.  Times are CPU time: of all simulated ranks together.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.train import TrainConfig
from meshwright.train.model import Block

from . import block as small
from .core import Benchmark, Effort, Row, Samples, fake_group, ratio

Step = Callable[[int], None]
BATCH, HEADS, FIRST = 2, 4, 64
COLUMN, ROW = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}
LAYOUTS = {"attention.qkv.*": COLUMN, "mlp.up.*": COLUMN, "attention.out.weight": ROW, "mlp.down.weight": ROW}


def block(hidden: int) -> Block:
    """The block, with weights that do not hang on who makes it."""
    torch.manual_seed(0)
    return Block(TrainConfig(hidden=hidden, heads=HEADS), None)


def ours(hidden: int, mesh: mw.Mesh) -> Step:
    """A step of this rank at a length."""
    model = mw.shard_module(block(hidden), mesh, LAYOUTS)

    def step(length: int) -> None:
        x = mw.shard_tensor(torch.randn(BATCH, length, hidden), mesh, (), check=False)
        model(x, None)[0].square().mean().backward()
        model.zero_grad()

    return step


def on_two_axes() -> Step:
    """A step of the small block of the other benchmarks, as one rank of eight, split over both axes of its mesh."""
    model, x = small.ours()

    def step(length: int) -> None:
        local = torch.randn(small.BATCH // small.DP, length, small.HIDDEN)
        rows = mw.from_local(local, x.mesh, {"dp": mw.Shard(0)}, check=False).requires_grad_()
        model(rows).sum().backward()
        model.zero_grad()

    return step


def captured(hidden: int, mesh: mw.Mesh) -> Step:
    """The same captured, with an update, after the three captures of which it makes one program."""
    model = block(hidden)

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x, None)[0].square().mean()

    def batch(length: int) -> torch.Tensor:
        return torch.randn(BATCH, length, hidden)

    lengths = FIRST // 4, FIRST // 2, 3 * FIRST // 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = mw.compile_step(model, loss, optimizer, batch(lengths[0]), mesh=mesh, layouts=LAYOUTS)
    for length in lengths:
        made(batch(length))
    return lambda length: made(batch(length))


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
    model: Any = parallelize_module(block(hidden), mesh, styles)
    for module in (model.norm1, model.norm2):
        for name, p in list(module.named_parameters()):
            setattr(module, name, torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()])))

    def step(length: int) -> None:
        x = distribute_tensor(torch.randn(BATCH, length, hidden), mesh, [Replicate()])
        with sdpa_kernel(SDPBackend.MATH), implicit_replication():  # it has no strategy for the kernel of CPUs
            made = model(x, None)[0]
        made.square().mean().backward()
        model.zero_grad()

    return step


def timed(step: Step, lengths: Iterable[int]) -> dict[str, list[float]]:
    """CPU ms of a step of each length, ``new`` and then ``known``: the median of three."""
    found: dict[str, list[float]] = {"new": [], "known": []}

    def once(length: int) -> float:
        start = time.process_time()
        step(length)
        return 1e3 * (time.process_time() - start)

    step(FIRST)
    gc.collect()
    gc.disable()  # another rank would collect while this one is timed
    for length in lengths:
        found["new"].append(once(length))
        found["known"].append(statistics.median(once(length) for _ in range(3)))
    gc.enable()
    return found


def resident() -> float:
    """MiB that this process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def grown(step: Step, count: int) -> list[float]:
    """MiB more than at first after the second half of so many new lengths.

    They lie between those of the first half: longer ones need more memory of themselves.
    """
    for done, i in enumerate([*range(0, count, 2), *range(1, count, 2)]):
        if done == count // 2:
            before = resident()
        step(FIRST + i)
    return [resident() - before]


def simulated(ranks: int, fn: Callable[[Step], Any], hidden: int, make: Callable[[int, mw.Mesh], Step] = ours) -> Any:
    """``fn`` of the step, on each of so many simulated ranks; what the first gives."""
    mesh = mw.Mesh({"tp": ranks})
    return mw.simulate(lambda: fn(make(hidden, mesh)), mesh, timeout=3600)[0]


SMALL = "a small block on two axes"
DTENSORS = "DTensor, one of 2 ranks"


def measure(effort: Effort) -> Samples:
    """Milliseconds by what runs the step, and MiB of growth."""
    hidden = effort.pick(64, 64, 16)
    lengths = range(FIRST + 2, FIRST + 2 + 2 * effort.pick(24, 6, 2), 2)
    found: Samples = {}
    for ranks in (1, 2):
        found[f"simulated ranks: {ranks}"] = simulated(ranks, lambda step: timed(step, lengths), hidden)
        found[f"captured, simulated ranks: {ranks}"] = simulated(
            ranks, lambda step: timed(step, lengths), hidden, captured
        )
    with fake_group(small.DP * small.TP):
        found[SMALL] = timed(on_two_axes(), lengths)
    with fake_group(2):
        found[DTENSORS] = timed(dtensor(hidden), lengths)
    count = effort.pick(1000, 40, 4)
    found[f"growth, MiB, {count // 2} lengths"] = {"memory": simulated(2, lambda step: grown(step, count), hidden)}
    return found


def rows(samples: Samples) -> Iterator[Row]:
    """A new length beside a known one."""
    peers = {DTENSORS: ratio(samples, DTENSORS, "new", "known")}
    for case, taken in samples.items():
        if "memory" in taken:
            yield Row(f"memory of the second {case.removeprefix('growth, MiB, ')}, MiB", taken["memory"][0])
        elif case != DTENSORS:
            others = {} if case.startswith("captured") else peers
            what, target = f"a step of a new length / a known one, {case}", 4 if case == SMALL else 1.5
            yield Row(what, ratio(samples, case, "new", "known"), target, {} if case == SMALL else others)


BENCHMARKS = [Benchmark("lengths", "ms", measure, rows)]
