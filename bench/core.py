"""What a benchmark is: contenders timed alternately in one process, and the rows of the table made of their samples."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch.distributed as dist

T = TypeVar("T")
Size = Literal["whole", "quick", "smallest"]
# Case to contender to one value per round, in the unit of the benchmark; values of one round belong together.
Samples = dict[str, dict[str, list[float]]]

OURS, DTENSOR, LOCAL = "meshwright", "dtensor", "local"
LEAST = 0.9  # of a physical bound: less is noise


@dataclass(frozen=True)
class Effort:
    """How much is run: ``whole`` for figures, ``quick`` to see that all runs, ``smallest`` for tests."""

    size: Size = "whole"
    seed: int = 0

    def pick(self, whole: T, quick: T, smallest: T) -> T:
        """What belongs to this size."""
        return {"whole": whole, "quick": quick, "smallest": smallest}[self.size]

    def rng(self) -> random.Random:
        """Draws the order of contenders; the same on all ranks."""
        return random.Random(self.seed)


@dataclass(frozen=True)
class Row:
    """One figure of the table.

    Attributes:
        what: what it is the ratio of, or its unit.
        figure: ours; smaller is better.
        target: the largest figure that meets the target; None where there is none.
        peers: what peers have in the same run.
        least: smaller figures are impossible, so they show a busy machine.
    """

    what: str
    figure: float
    target: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    least: float | None = None

    @property
    def verdict(self) -> str:
        """``met``, ``missed``, ``noise``, or empty without a target."""
        if self.least is not None and self.figure < self.least:
            return "noise"
        return "" if self.target is None else "met" if self.figure <= self.target else "missed"


@dataclass(frozen=True)
class Benchmark:
    """One run in processes of its own.

    Attributes:
        name: on the command line.
        unit: of the samples.
        measure: takes the samples; on every rank where there are several processes, of which the first one's count.
        rows: the figures that samples of all sizes of effort give.
        processes: how many; 1: without torch.distributed.
    """

    name: str
    unit: str
    measure: Callable[[Effort], Samples]
    rows: Callable[[Samples], Iterator[Row]]
    processes: int = 1


# ---------------------------------------------------------------------------------------------- taking samples


def interleave(
    calls: Mapping[str, Callable[[], object]], effort: Effort, *, target_ms: float = 6.0
) -> dict[str, list[float]]:
    """Time calls in turn, in an order drawn anew each round.

    Args:
        calls: contender to a call, which should take microseconds.
        target_ms: how long the calls of a contender take in a round, together.

    Returns:
        Microseconds of the calling thread's CPU time for one call, per round.
    """
    rounds, warm = effort.pick(11, 5, 2), effort.pick(30, 10, 2)
    counts = {}
    for name, call in calls.items():
        repeat(call, warm)
        counts[name] = max(3, int(target_ms / 1e3 / repeat(call, 10))) if effort.size != "smallest" else 1
    found: dict[str, list[float]] = {name: [] for name in calls}
    rng, order = effort.rng(), list(calls)
    gc.collect()
    gc.freeze()  # what was made before is not walked through by collections while we time
    try:
        for _ in range(rounds):
            rng.shuffle(order)
            for name in order:
                found[name].append(1e6 * repeat(calls[name], counts[name]))
    finally:
        gc.unfreeze()
    return found


def repeat(call: Callable[[], object], count: int) -> float:
    """CPU seconds of this thread for one of so many calls."""
    start = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - start) / count


@contextlib.contextmanager
def fake_group(world: int) -> Iterator[None]:
    """This process is rank 0 of a process group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------- reading samples


def median(samples: Samples, case: str, contender: str) -> float:
    """Of the rounds."""
    return statistics.median(samples[case][contender])


def ratio(samples: Samples, case: str, contender: str, base: str) -> float:
    """Of medians."""
    return median(samples, case, contender) / median(samples, case, base)


def ratios(samples: Samples, case: str, contenders: Sequence[str], base: str) -> dict[str, float]:
    """Of those contenders that took part in the case."""
    return {name: ratio(samples, case, name, base) for name in contenders if name in samples[case]}


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values, at least one."""
    return math.exp(statistics.fmean(map(math.log, values)))
