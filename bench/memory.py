"""Peak memory of a contender's training on real processes, above what the process had before: one per run."""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

from . import ours, peers
from .core import Benchmark, Effort, Row, Samples
from .steps import problem

CONTENDERS: dict[str, Callable[[], Any]] = {
    "ddp": peers.DataParallelOfTorch,
    "dp": ours.DataParallel,
    "captured-dp": ours.CapturedDataParallel,
    "fsdp2": peers.FullyShard,
    "zero3": ours.Zero3,
    "captured-zero3": ours.CapturedZero3,
}


def peak() -> float:
    """MiB, the most that this process ever held."""
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held / (2**20 if sys.platform == "darwin" else 2**10)


def measure(effort: Effort, *, name: str) -> Samples:
    """MiB after five steps."""
    make, data = problem(effort, 1)
    contender = CONTENDERS[name]()
    before = peak()
    contender.setup(make)
    for _ in range(5):
        contender.step(data)
    return {"peak": {name: [peak() - before]}}


def rows(samples: Samples, *, name: str) -> Iterator[Row]:
    """MiB."""
    yield Row(f"peak memory over an idle process, {name}, MiB", samples["peak"][name][0])


BENCHMARKS = [
    Benchmark(
        f"mem-{name}", "MiB", functools.partial(measure, name=name), functools.partial(rows, name=name), processes=2
    )
    for name in CONTENDERS
]
