"""ZeRO-3 that computes in bfloat16 and reduces in float32, beside FSDP2 with the same policy, in units of a block.

A processor without arithmetic in bfloat16 is ten times slower in it than in float32, whoever asks: so there are few
tokens in a step, and what is compared is what is around the matrix products.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshwright as mw
from meshwright import collective
from meshwright.ranks import runtime

from . import ours, peers
from .core import Benchmark, Effort, Row, Samples, ratio
from .models import Batch, Make, batches, maker
from .steps import set_up, timed

HALF = mw.Precision(compute=torch.bfloat16, reduce=torch.float32)
ALIKE = 1e-2  # relative: the loss is in bfloat16
KINDS = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce"}
MIB = 2**20


class FSDP2(peers.FullyShard):
    """With its policy."""

    def options(self) -> dict[str, Any]:
        """As ``HALF``."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return {"mp_policy": MixedPrecisionPolicy(param_dtype=HALF.compute, reduce_dtype=HALF.reduce)}


class Zero3(ours.Zero3):
    """Eager."""

    precision = HALF


class CapturedZero3(ours.CapturedZero3):
    """Captured, with its passes."""

    precision = HALF


CONTENDERS: tuple[Any, ...] = (FSDP2, Zero3, CapturedZero3)


def problem(effort: Effort) -> tuple[Make, list[Batch]]:
    """A function that makes the model, and the batch of a step."""
    layers, hidden, seq, vocabulary = effort.pick((4, 256, 32, 1024), (1, 128, 16, 256), (1, 16, 8, 32))
    return maker(layers, hidden, 4, seq, vocabulary, effort.seed), batches(1, 1, seq, vocabulary, effort.seed)


# ---------------------------------------------------------------------------------------------- steps


class OptionUse(TorchDispatchMode):
    """Counts what is asked of torch.distributed, in the bytes of the ring model."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = runtime.Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Before it is done."""
        kind, n = KINDS.get(func.overloadpacket.__name__), dist.get_world_size()
        if func.namespace == "c10d" and kind is not None:
            whole = max(t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor))
            self.counts.add(kind, (), whole * (n - 1) // n * (2 if kind == "all_reduce" else 1))
        return func(*args, **(kwargs or {}))


def measure(effort: Effort) -> Samples:
    """Milliseconds of a step, ``wall`` and ``cpu``; what it sends: bytes by kind of collective, and messages."""
    contenders: list[Any] = [kind() for kind in CONTENDERS]
    make, data = problem(effort)
    set_up(contenders, make, data, ALIKE)
    found = timed(list(contenders), data, effort)
    for contender in contenders:
        with OptionUse() as asked, collective.counting() as counted:
            contender.step(data)
        counts = counted if counted.table else asked.counts
        for kind in KINDS.values():
            found.setdefault(f"bytes of {kind}", {})[contender.name] = [float(counts.bytes.get(kind, 0))]
        found.setdefault("messages", {})[contender.name] = [float(sum(counts.kinds.values()))]
    return found


WHAT = {ours.ZERO3: "ZeRO-3 in bfloat16", ours.CAPTURED_ZERO3: "captured ZeRO-3 in bfloat16"}


# An all-reduce of ours has the number of targets, 8 bytes: the loss is the mean over all ranks.
TARGETS = {"cpu": 0.95, "wall": 0.9, "bytes of all_gather": 1.0, "bytes of reduce_scatter": 1.0, "messages": None}


def rows(samples: Samples) -> Iterator[Row]:
    """Beside FSDP2."""
    for name, what in WHAT.items():
        for case, target in TARGETS.items():
            yield Row(f"{what} / FSDP2, {case}", ratio(samples, case, name, peers.FSDP2), target)


# ---------------------------------------------------------------------------------------------- memory


def resident(what: str) -> float:
    """MiB that this process holds, ``VmRSS``, or held at most, ``VmHWM``."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) / 1024


def trimmed() -> float:
    """MiB that this process holds once it has given back what it can; what it held at most counts from here."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def measure_memory(effort: Effort) -> Samples:
    """MiB, the most in a step above what the process held before the contender was there."""
    return peaks(effort, CONTENDERS, *problem(effort))


def peaks(
    effort: Effort, contenders: Sequence[Any], make: Make, data: Any, told: Callable[[float], float] = float
) -> Samples:
    """Peaks of contenders in turn; ``told``: the figure of this process as it is told, that of several ranks say."""
    found: Samples = {"peak": {kind.name: [] for kind in contenders}}
    rng, order = effort.rng(), list(contenders)
    for turn in range(effort.pick(6, 2, 2)):
        rng.shuffle(order)
        for kind in order:
            before, contender = trimmed(), kind()
            contender.setup(make)
            for _ in range(2):
                contender.step(data)
            trimmed()
            for _ in range(2):
                contender.step(data)
            most = told(resident("VmHWM") - before)
            if turn:  # the first brings what the process keeps: modules, caches of kernels
                found["peak"][kind.name].append(most)
            del contender
    return found


def rows_memory(samples: Samples) -> Iterator[Row]:
    """Beside FSDP2."""
    for name, what in WHAT.items():
        yield Row(f"{what} / FSDP2, peak memory", ratio(samples, "peak", name, peers.FSDP2), 0.95)


BENCHMARKS = [
    Benchmark("precision-step", "ms", measure, rows, processes=2),
    Benchmark("precision-memory", "MiB", measure_memory, rows_memory, processes=2),
]
