"""Communication that a step waits for, on a virtual wire of 0.4 GB/s, beside what no schedule avoids.

Data parallel: gradients of a backward, against DDP with its bucket sizes.  ZeRO-3: parameters gathered and gradients
scattered, each contender beside itself on a wire that takes no time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective

from . import ours
from .core import LEAST, Benchmark, Effort, Row, Samples
from .models import Make, batches, maker
from .peers import ALONE, Alone, DataParallelOfTorch
from .virtual import RANKS, Message, OnWire, Wire

ALPHA, GB_PER_S = 100e-6, 0.4
BOUND, VOCABULARY = "bound", 1024
AUTO = f"bucket_bytes=auto,gb_per_s={GB_PER_S}"


def sgd(model: nn.Module) -> Any:
    """A cheap optimizer: the step is there to be communicated."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)


def joined(wire: Wire, scatters: bool) -> mw.Mesh:
    """A mesh of two, of which this process is the first, over the wire."""
    mesh = mw.Mesh({"dp": RANKS})
    collective.override_group(mesh, (0,), OnWire(wire)).scatters = scatters
    return mesh


class AloneOnWire(Alone):
    """No communication."""

    def setup(self, make: Make) -> None:
        """With the cheap optimizer."""
        self.model = self.wrapped(make())
        self.optimizer = sgd(self.model)


class TorchOnWire(AloneOnWire, DataParallelOfTorch):
    """DDP, with buckets of so many MB; None: its default."""

    def __init__(self, wire: Wire, bucket_mb: int | None) -> None:
        self.name, self.wire, self.bucket_mb = f"ddp {bucket_mb or 25} MB", wire, bucket_mb

    def wrapped(self, model: nn.Module) -> Any:
        """Over the wire."""
        return nn.parallel.DistributedDataParallel(
            model, process_group=OnWire(self.wire), gradient_as_bucket_view=True, init_sync=False,
            broadcast_buffers=False, bucket_cap_mb=self.bucket_mb,
        )  # fmt: skip


class EagerOnWire(ours.DataParallel):
    """Ours, with buckets of so many KiB."""

    def __init__(self, wire: Wire, bucket_kib: int | None = None, fsdp: str | None = None) -> None:
        self.name = "eager zero3" if fsdp else f"eager {bucket_kib} KiB"
        self.wire, self.fsdp = wire, fsdp
        self.options: dict[str, Any] = {} if bucket_kib is None else {"bucket_bytes": bucket_kib << 10}

    def setup(self, make: Make) -> None:
        """Over the wire."""
        self.mesh = joined(self.wire, self.fsdp is not None)
        self.model = mw.shard_module(make(), self.mesh, {}, fsdp=self.fsdp, **self.options)
        self.optimizer = mw.shard_optimizer(sgd(self.model))


class CapturedOnWire(ours.CapturedDataParallel):
    """Ours, captured; ``option`` of its pass."""

    def __init__(self, wire: Wire, name: str, option: str, fsdp: str | None = None) -> None:
        self.name, self.wire, self.option, self.fsdp = name, wire, f":{option}", fsdp

    def joined(self) -> mw.Mesh:
        """Over the wire."""
        return joined(self.wire, self.fsdp is not None)

    def optimized(self) -> Any:
        """The cheap one."""
        return sgd(self.model)


def problem(effort: Effort) -> tuple[Make, Any]:
    """A function that makes the model, and the one batch of a step."""
    layers, hidden, seq = effort.pick((6, 256, 128), (2, 128, 64), (1, 16, 8))
    make = maker(layers, hidden, 4, seq, VOCABULARY, effort.seed)
    return make, batches(1, 2, seq, VOCABULARY, effort.seed)


def data_parallel(wire: Wire, effort: Effort) -> list[Any]:
    """Contenders."""
    kib = effort.pick((128, 256, 512, 1024, 25 << 10), (512, 1024), (512,))
    torch_mb: tuple[int | None, ...] = effort.pick((None, 1, 4), (None, 1), (None,))
    sizes = [f"gb_per_s={GB_PER_S},bucket_bytes={k << 10}" for k in effort.pick((256, 512, 1024), (), ())]
    made: list[Any] = [AloneOnWire(), *(TorchOnWire(wire, mb) for mb in torch_mb), *(EagerOnWire(wire, k) for k in kib)]
    made.append(CapturedOnWire(wire, "captured auto", AUTO))
    return made + [CapturedOnWire(wire, f"captured {int(s.split('=')[-1]) >> 10} KiB", s) for s in sizes]


def measure(effort: Effort) -> Samples:
    """Milliseconds of a step, the bound, and what the wire carried."""
    wire, (make, data) = Wire(ALPHA, GB_PER_S * 1e9), problem(effort)
    contenders = data_parallel(wire, effort)
    for contender in contenders:
        contender.setup(make)
        for _ in range(effort.pick(3, 2, 1)):
            contender.step(data)
    found: Samples = {"bound": {BOUND: bounds(make(), data[-1], wire, effort.pick(7, 3, 2))}}
    found |= {case: {c.name: [] for c in contenders} for case in ("step", "sent")}
    wire.instant, rng = False, effort.rng()
    for _ in range(effort.pick(21, 3, 2)):
        rng.shuffle(contenders)
        for contender in contenders:
            _, took, messages = timed(contender, wire, data)
            found["step"][contender.name].append(1e3 * took)
            found["sent"][contender.name].append(1e3 * sum(m.took for m in messages))
    wire.close()
    return found


def bounds(model: nn.Module, batch: Any, wire: Wire, rounds: int) -> list[float]:
    """Milliseconds behind the end of a backward until a serial wire has carried gradients, each sent as it is made."""
    ready: list[tuple[float, int]] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: ready.append((time.perf_counter(), p.nbytes)))
    found = []
    for _ in range(rounds):
        model.zero_grad()
        ready.clear()
        model(*batch).backward()
        end, left, worst = time.perf_counter(), 0, 0.0
        for when, size in reversed(ready):
            left += size
            worst = max(worst, when + wire.seconds(left) - end)
        found.append(1e3 * worst)
    return found


def timed(contender: Any, wire: Wire, data: Any) -> tuple[float, float, list[Message]]:
    """When a step began, how long it took (seconds), and its messages."""
    wire.messages.clear()
    start = time.perf_counter()
    contender.step(data)
    return start, time.perf_counter() - start, list(wire.messages)


def rows(samples: Samples) -> Iterator[Row]:
    """Exposed time, per round beside the step without communication, by the bound: one message's latency or more."""
    bound, steps = max(statistics.median(samples["bound"][BOUND]), 1e3 * ALPHA), samples["step"]

    def exposed(name: str) -> float:
        return statistics.median(a - b for a, b in zip(steps[name], steps[ALONE], strict=True)) / bound

    of = {name: exposed(name) for name in steps if name != ALONE}
    torchs = {name: value for name, value in of.items() if name.startswith("ddp")}
    for kind, target in (("eager", 1.5), ("captured", 1.5)):
        found = {name: value for name, value in of.items() if name.startswith(kind)}
        # Below the bound is noise; it is told only where there is nothing else.
        best = min({n: v for n, v in found.items() if v >= LEAST} or found, key=lambda name: found[name])
        what = f"exposed communication / bound, data parallel, {kind}"
        yield Row(f"{what}, best buckets", found[best], target, found | torchs, LEAST)
    yield Row("exposed communication / bound, data parallel, captured, auto buckets", of["captured auto"], None, torchs)


# ---------------------------------------------------------------------------------------------- ZeRO-3


def measure_zero(effort: Effort) -> Samples:
    """Milliseconds: of a step without the wire's time, sent, exposed, and the least that any schedule exposes."""
    wire, (make, data) = Wire(ALPHA, GB_PER_S * 1e9), problem(effort)
    contenders: list[Any] = [
        EagerOnWire(wire, fsdp="dp"),
        CapturedOnWire(wire, "captured zero3", AUTO, fsdp="dp"),
    ]
    names = ("compute", "sent", "exposed", BOUND)
    found: Samples = {case: {c.name: [] for c in contenders} for case in names}
    for contender in contenders:
        contender.setup(make)
        for _ in range(effort.pick(3, 2, 1)):
            contender.step(data)
    rng = effort.rng()
    for _ in range(effort.pick(11, 3, 2)):
        rng.shuffle(contenders)
        for contender in contenders:
            wire.instant = True
            start, quiet, messages = timed(contender, wire, data)
            wire.instant = False
            _, slow, _ = timed(contender, wire, data)
            sent, bound = sum(m.took for m in messages), least_exposed(start, quiet, messages)
            for case, value in zip(names, (quiet, sent, slow - quiet, bound), strict=True):
                found[case][contender.name].append(1e3 * value)
    wire.close()
    return found


def least_exposed(start: float, took: float, messages: list[Message]) -> float:
    """What no order of the messages avoids, from a step whose wire took no time: seconds.

    All that is gathered for a computation, and for those before it, must have passed the wire: the head.  Behind the
    end of the computation passes what could not be sent earlier: the tail.  And the wire is never faster than itself.
    """
    passed, head = 0.0, 0.0
    for m in sorted((m for m in messages if m.gathers and m.waited), key=lambda m: m.waited):
        passed += m.took
        head = max(head, passed - (m.waited - start))
    rest, tail = 0.0, 0.0
    for m in sorted((m for m in messages if not m.gathers), key=lambda m: -m.asked):
        rest += m.took
        tail = max(tail, rest - (start + took - m.asked))
    return max(head + tail, sum(m.took for m in messages) - took)


def rows_zero(samples: Samples) -> Iterator[Row]:
    """Beside the bound, where there is one; and the part that is hidden."""
    middle = {case: {name: statistics.median(v) for name, v in of.items()} for case, of in samples.items()}
    for name, bound in middle[BOUND].items():
        exposed, sent = middle["exposed"][name], middle["sent"][name]
        if bound > 0.1:  # else all can be hidden
            yield Row(f"exposed communication / bound, {name}", exposed / bound, 1.2, {}, LEAST)
        yield Row(f"exposed communication / sent, {name}", exposed / sent)


BENCHMARKS = [
    Benchmark("wire-dp", "ms", measure, rows),
    Benchmark("wire-zero", "ms", measure_zero, rows_zero),
]
