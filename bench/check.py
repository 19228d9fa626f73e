"""What the comparison of passes (``check="first"``) adds to the first update of a captured step, on two processes.

The unit is the update that follows: one call, or the calls of a merge.  The first update without the comparison takes
longer than those that follow, too, and is subtracted.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

import meshwright as mw

from . import pipeline, steps
from .core import Benchmark, Effort, Row, Samples, median
from .models import Batch, Make
from .peers import adamw
from .precision import resident, trimmed

FIRST, NOT, LATER = "first", "not", "later"
FUSED = "data-parallel-optimization"
CASES: dict[str, tuple[dict[str, int], int, dict[str, Any]]] = {  # mesh, calls of an update, options
    "dp": ({"dp": 2}, 1, {"passes": [FUSED]}),
    "zero3": ({"dp": 2}, 1, {"passes": [FUSED], "fsdp": "dp"}),
    "merge": ({"dp": 2}, 4, {"passes": [FUSED, "gradient-merge:k_steps=4"]}),
    "pipeline": (
        {"pp": 2},
        1,
        {"passes": [f"pipeline:micro_batches={pipeline.MICRO_BATCHES}"], "stages": {"pp": "blocks"}},
    ),
}


class Updates:
    """A captured step, and the batches of an update."""

    def __init__(self, make: Make, data: list[Batch], case: str, check: Any) -> None:
        axes, calls, options = CASES[case]
        mesh, model = mw.init_mesh(axes), make()
        split = {"dp": mw.Shard(0)} if "dp" in axes else None
        self.data = data[:calls]
        self.step = mw.compile_step(
            model, lambda m, b: m(*b), adamw(model.parameters()), self.data[0], mesh=mesh, batch=split, check=check,
            **options,
        )  # fmt: skip
        self.bytes = sum(p.nbytes for p in model.parameters())

    def __call__(self) -> None:
        """One update."""
        for batch in self.data:
            self.step(batch)


def measure(effort: Effort, *, case: str) -> Samples:
    """Milliseconds of a first update with and without the comparison and of a later one, ``wall`` and ``cpu``; MiB that
    each needs above what is held before it, ``peak``, and those of all gradients."""
    make, data = pipeline.problem(effort) if case == "pipeline" else steps.problem(effort, 4)
    found: Samples = {what: {FIRST: [], NOT: [], LATER: []} for what in ("wall", "cpu", "peak")}
    rng, order = effort.rng(), [FIRST, NOT]
    for turn in range(effort.pick(7, 3, 2)):
        rng.shuffle(order)
        for check in order:
            updates = Updates(make, data, case, check == FIRST and "first")
            _take(found if turn else {}, check, updates)  # the first brings caches of kernels
            updates()
            _take(found if turn else {}, LATER, updates)
            found.setdefault("gradients", {})[FIRST] = [updates.bytes / 2**20]
            del updates
    return found


def _take(found: Samples, kind: str, updates: Updates) -> None:
    before = trimmed()
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    updates()
    cpu = time.process_time() - cpu
    dist.barrier()
    taken = {"wall": 1e3 * (time.perf_counter() - start), "cpu": 1e3 * cpu, "peak": resident("VmHWM") - before}
    for what in found and taken:
        found[what][kind].append(taken[what])


def rows(samples: Samples, *, case: str) -> Iterator[Row]:
    """In updates, and in gradients."""
    for what in ("wall", "cpu"):
        first, without, later = (median(samples, what, kind) for kind in (FIRST, NOT, LATER))
        yield Row(f"check of {case}, {what}, updates", (first - without) / later)
    most = max(median(samples, "peak", LATER), median(samples, "peak", NOT))
    more = median(samples, "peak", FIRST) - most
    yield Row(f"check of {case}, peak memory, gradients", more / median(samples, "gradients", FIRST))


BENCHMARKS = [
    Benchmark(f"check-{case}", "ms", functools.partial(measure, case=case), functools.partial(rows, case=case), 2)
    for case in CASES
]
