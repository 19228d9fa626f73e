"""A data-parallel step by hand, as it is and captured: what each part of the data-parallel pass gives, alone and all.

24 narrow layers, so that most of a step is what the parts save: ops on few numbers, a collective for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

import meshwright as mw

from .core import Benchmark, Effort, Row, Samples, ratio
from .models import Batch, Make, batches, maker
from .peers import Alone
from .steps import set_up, timed

BY_HAND, ALL = "by hand", "all parts"
# What each contender's pass does; none: captured without passes.
PARTS: dict[str, str | None] = {
    "no pass": None,
    "all parts off": "prune=no,overlap=no,fuse=no",
    "prune": "overlap=no,fuse=no",
    "overlap": "prune=no,fuse=no",
    "fuse": "prune=no,overlap=no",
    ALL: "",
    "all parts, 4 MB": "bucket_bytes=4194304",
}


class ByHand(Alone):
    """A sum over ranks and a division for each gradient, behind the backward."""

    name = BY_HAND

    def whole(self, batch: Batch) -> Tensor:
        """One step on one batch."""
        loss: Tensor = self.model(*batch)
        loss.backward()
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def step(self, batches: list[Batch]) -> Tensor:
        """Of a step by hand there is one batch."""
        return self.whole(batches[0])


class Captured(ByHand):
    """The same, captured, with some parts of the pass."""

    def __init__(self, name: str, options: str | None) -> None:
        self.name = f"captured, {name}"
        self.passes = [] if options is None else [f"data-parallel-optimization:{options}".removesuffix(":")]

    def setup(self, make: Make) -> None:
        """The first step captures."""
        super().setup(make)
        self.captured: Any = None

    def step(self, batches: list[Batch]) -> Tensor:
        """A call of the program."""
        if self.captured is None:
            mesh = mw.init_mesh({"dp": dist.get_world_size()})
            self.captured = mw.capture_local(
                self.whole, mesh, model=self.model, optimizer=self.optimizer, batch=batches[0], passes=self.passes
            )
        made: Tensor = self.captured(batches[0])
        return made


def measure(effort: Effort) -> Samples:
    """Milliseconds of a step, ``wall`` and ``cpu``."""
    layers, hidden, seq = effort.pick((24, 64, 32), (6, 64, 32), (1, 16, 8))
    contenders = [ByHand(), *(Captured(name, options) for name, options in PARTS.items())]
    data = batches(1, 4, seq, 256, effort.seed)
    set_up(contenders, maker(layers, hidden, 4, seq, 256, effort.seed), data)
    return timed(contenders, data, effort)


def rows(samples: Samples) -> Iterator[Row]:
    """Beside the step as it was written."""
    of = {name: ratio(samples, "wall", f"captured, {name}", BY_HAND) for name in PARTS}
    others = {name: value for name, value in of.items() if name != ALL}
    yield Row("step by hand, captured, all parts of the pass / as written", of[ALL], None, others)


BENCHMARKS = [Benchmark("by-hand", "ms", measure, rows, processes=2)]
