"""Whole training steps on real processes, timed in turn: wall time between barriers, and CPU time of the first rank."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from . import ours, peers
from .core import Benchmark, Effort, Row, Samples, ratio, ratios
from .models import Batch, batches, maker

ALIKE = 1e-4  # relative: losses of contenders differ by rounding alone


def problem(effort: Effort, micro_batches: int) -> tuple[Any, list[Batch]]:
    """A function that makes the model, and the batches of a step."""
    seq, vocabulary = effort.pick((128, 4096), (64, 512), (8, 32))
    layers, hidden = effort.pick((4, 256), (1, 128), (1, 16))
    make = maker(layers, hidden, 4, seq, vocabulary, effort.seed)
    return make, batches(micro_batches, 4, seq, vocabulary, effort.seed)


def set_up(contenders: Sequence[Any], make: Any, data: list[Batch], alike: float = ALIKE) -> None:
    """Take the first steps of all.

    Raises:
        AssertionError: a contender's loss is another one than the first contender's: it does other work.
    """
    expected = None
    for contender in contenders:
        contender.setup(make)
        losses = [float(contender.step(data)) for _ in range(3)]
        expected = expected or losses
        error = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        assert error < alike, f"{contender.name}: losses {losses}, of {contenders[0].name} {expected}"


ALL = (*peers.PEERS, *ours.OURS)


def measure(effort: Effort, *, micro_batches: int, kinds: Sequence[Callable[[], Any]] = ALL) -> Samples:
    """Milliseconds of a step, ``wall`` and ``cpu``."""
    contenders = [kind() for kind in kinds]
    make, data = problem(effort, micro_batches)
    set_up(contenders, make, data)
    return timed(contenders, data, effort)


def timed(contenders: list[Any], data: list[Batch], effort: Effort) -> Samples:
    """Milliseconds of a step of each, ``wall`` and ``cpu``, in turn."""
    found: Samples = {case: {c.name: [] for c in contenders} for case in ("wall", "cpu")}
    rng = effort.rng()
    for _ in range(effort.pick(24, 3, 1)):
        rng.shuffle(contenders)
        for contender in contenders:
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            contender.step(data)
            cpu = time.process_time() - cpu
            dist.barrier()
            found["wall"][contender.name].append(1e3 * (time.perf_counter() - start))
            found["cpu"][contender.name].append(1e3 * cpu)
    return found


# What is compared: our contender, with what, its name in the table, target, peers.
PAIRS = (
    (ours.DP, peers.DDP, "data-parallel step{} / DDP", 1.0, (peers.FSDP2, peers.ALONE)),
    (ours.TP, peers.BY_HAND, "tensor-parallel step{} / hand-written", 1.05, (peers.DTENSOR_TP,)),
    (ours.CAPTURED_DP, peers.DDP, "captured step{} / DDP", 1.0, ()),
    (ours.ZERO3, peers.FSDP2, "ZeRO-3 step{} / FSDP2", 1.0, ()),
    (ours.CAPTURED_ZERO3, peers.FSDP2, "captured ZeRO-3 step{} / FSDP2", 0.8, ()),
)


def rows(samples: Samples, *, micro_batches: int) -> Iterator[Row]:
    """Beside the peer of each."""
    label = f", {micro_batches} micro-batches" if micro_batches > 1 else ""
    for name, base, what, target, others in PAIRS:
        what = what.format(label)
        yield Row(f"{what}, wall", ratio(samples, "wall", name, base), target, ratios(samples, "wall", others, base))
        yield Row(
            f"{what}, CPU per rank", ratio(samples, "cpu", name, base), None, ratios(samples, "cpu", others, base)
        )


BENCHMARKS = [
    Benchmark(
        f"step-acc{n}",
        "ms",
        functools.partial(measure, micro_batches=n),
        functools.partial(rows, micro_batches=n),
        processes=2,
    )
    for n in (1, 4)
]
