"""Predicted against measured time of planned steps: 12 layouts on four gloo processes, on a virtual wire.

Each collective takes ``latency × log2(ranks) + bytes / bandwidth`` more, asleep, so that the wire is the same on every
machine and slower than gloo.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.explanation import explain_program
from meshwright.machines import Hardware, LinkLevel
from meshwright.planner.emit import Keeping, Layouts, table_of
from meshwright.planner.measure import TrainedStep
from meshwright.planner.search import PlanSearch
from meshwright.ranks import runtime
from meshwright.train.config import StepConfig
from meshwright.train.model import GPT, Llama, loss_of

from .core import Benchmark, Effort, Row, Samples, median

LATENCY, BANDWIDTH = 2e-3, 30e6
MACHINE = Hardware("wire", (LinkLevel(0, LATENCY, BANDWIDTH),), 8e9, {"*": 20e9}, 5e9, 20e-6)
MESHES = ({"a": 4}, {"a": 2, "b": 2})
KINDS = ("replicated", "states", "kept", "fsdp")
RANKS = 4
Planned = tuple[str, dict[str, int], str]  # name, mesh, table


class Wire(runtime.Counts):
    """Counts that take as long as the wire."""

    __slots__ = ("sizes",)
    sizes: dict[str, int]

    def add(self, kind: str, axes: tuple[str, ...], nbytes: int) -> None:
        """Record a collective, and sleep while the wire carries it."""
        super().add(kind, axes, nbytes)
        ranks = math.prod(self.sizes[a] for a in axes)
        time.sleep(LATENCY * math.ceil(math.log2(ranks)) + nbytes / BANDWIDTH)


def problem(effort: Effort) -> tuple[Any, Any, Any]:
    """Model, loss function and batch."""
    layers, hidden, seq = effort.pick((2, 128, 64), (2, 64, 32), (2, 16, 8))
    config = StepConfig(layers=layers, hidden=hidden, heads=4, seq=seq, batch=8)
    torch.manual_seed(effort.seed)
    model = GPT(config, "cpu", Llama(vocabulary=256))
    ids = torch.randint(256, (2, 8, seq))
    return model, lambda m, b: loss_of(m, *b), (ids[0], ids[1])


def layouts_of(effort: Effort) -> Iterator[Planned]:
    """Layouts that differ: of rows, of weights, of both; and how parameters are stored."""
    model, loss_fn, batch = problem(effort)
    step = TrainedStep(model, loss_fn, batch, torch.optim.AdamW(model.parameters()))
    whole: dict[str, Any] = {"tokens.weight": mw.Replicate()}
    split = {"blocks.*.attention.query.weight": 0, "blocks.*.mlp.down.weight": 1}
    for sizes in MESHES:
        mesh = mw.Mesh(sizes)
        inner = mesh.axes[-1]
        megatron = {glob: {inner: mw.Shard(d)} for glob, d in split.items()}
        rows = {name: {inner: p} for name, p in whole.items()}
        for fix, words in ((rows, "free"), (megatron, "weights split")):
            search = PlanSearch(step, MACHINE, 1e12, RANKS, mesh, fix)
            found = search.layouts(mesh.sizes)
            if found is None:
                continue
            over = tuple(a for a, role in zip(found.axes, found.roles, strict=True) if role == "dp")
            for kind in KINDS if over else KINDS[:1]:
                yield named(search, found, Keeping(kind, over if kind != "replicated" else ()), sizes, words)
            yield named(search, found, Keeping("replicated", (), True), sizes, f"{words}, recomputed")


def named(search: PlanSearch, found: Layouts, storage: Keeping, sizes: dict[str, int], words: str) -> Planned:
    """A plan as a file that every rank reads."""
    counts = search.repeats.counts()
    blocks = search.repeats.blocks(counts) if storage.recompute else ()
    table = table_of(found, storage, lambda n: search.repeats.names(n, counts), blocks=blocks, fold=False)
    with TemporaryDirectory() as folder:
        table.save(Path(folder) / "plan.toml")
        return f"{words}, {storage.kind} on {sizes}", sizes, (Path(folder) / "plan.toml").read_text()


def measure(effort: Effort) -> Samples:
    """Milliseconds of a step, predicted and measured."""
    given: list[Any] = [list(layouts_of(effort))[: effort.pick(12, 4, 2)] if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(given)
    found: Samples = {"predicted": {}, "measured": {}}
    for name, sizes, text in given[0]:
        mesh = mw.init_mesh(sizes)
        model, loss_fn, batch = problem(effort)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "plan.toml"
            path.write_text(text)
            step = mw.compile_step(
                model, loss_fn, torch.optim.AdamW(model.parameters()), batch, mesh=mesh, layouts=path
            )
        step(batch)
        why = explain_program(step.program, (), MACHINE).time
        assert why is not None
        wire = Wire()
        counts, runtime.RT.counts = runtime.RT.counts, wire
        wire.sizes = dict(sizes)
        try:
            found["measured"][name] = [milliseconds(step, batch) for _ in range(effort.pick(5, 2, 1))]
        finally:
            runtime.RT.counts = counts
        found["predicted"][name] = [why.seconds * 1e3]
    return found


def milliseconds(step: Any, batch: Any) -> float:
    """Of one step, between barriers."""
    dist.barrier()
    start = time.perf_counter()
    step(batch)
    dist.barrier()
    return 1e3 * (time.perf_counter() - start)


def spearman(a: list[float], b: list[float]) -> float:
    """Correlation of ranks; those of equal values are their mean."""

    def ranks(values: list[float]) -> list[float]:
        return [sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]

    x, y = ranks(a), ranks(b)
    mean = (len(x) - 1) / 2
    up = sum((p - mean) * (q - mean) for p, q in zip(x, y, strict=True))
    down = math.sqrt(sum((p - mean) ** 2 for p in x) * sum((q - mean) ** 2 for q in y))
    return up / down if down else 1.0


def rows(samples: Samples) -> Iterator[Row]:
    """How well the predicted order is the measured one, and how good the chosen layouts are."""
    names = list(samples["predicted"])
    predicted = [median(samples, "predicted", n) for n in names]
    measured = [median(samples, "measured", n) for n in names]
    chosen = measured[predicted.index(min(predicted))]
    yield Row(
        f"1 - Spearman of predicted and measured time, {len(names)} layouts", 1 - spearman(predicted, measured), 0.1
    )
    yield Row("time of the layouts that are predicted fastest / fastest", chosen / min(measured), 1.05)
    for name, said, took in zip(names, predicted, measured, strict=True):
        yield Row(f"predicted / measured: {name}", said / took)


BENCHMARKS = [Benchmark("plan", "ms", measure, rows, processes=RANKS)]
