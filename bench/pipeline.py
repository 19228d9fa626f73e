"""A step through two stages on two processes, and four on four, beside ``torch.distributed.pipelining``.

The same model, cut at the same places, micro-batches and schedule.  Four processes on fewer cores take turns: what a
clock then shows is the sum of their work, and no overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import meshwright as mw

from .core import OURS, Benchmark, Effort, Row, Samples, ratio
from .models import Batch, Make, SmallGPT, batches, maker
from .peers import adamw
from .precision import peaks
from .steps import set_up, timed

TORCH = "torch.distributed.pipelining"
MICRO_BATCHES = 8


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over tokens."""
    return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Part(nn.Module):
    """What one stage has of the model, as one writes it by hand for PyTorch's."""

    def __init__(self, model: SmallGPT, stage: int, stages: int) -> None:
        super().__init__()
        count = len(model.blocks)
        bounds = [-(-i * count // stages) for i in (stage, stage + 1)]
        self.blocks = model.blocks[bounds[0] : bounds[1]]
        if stage == 0:
            self.tokens, self.places, self.positions = model.tokens, model.places, model.positions
        if stage == stages - 1:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """Ids or an activation, to an activation or logits."""
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.places(self.positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


class OfTorch:
    """``Schedule1F1B`` of ``PipelineStage``."""

    name = TORCH

    def setup(self, make: Make) -> None:
        """The stage of this rank."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.rank, self.stages = dist.get_rank(), dist.get_world_size()
        self.part = Part(make(), self.rank, self.stages)
        stage = PipelineStage(self.part, self.rank, self.stages, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
        self.optimizer = adamw(self.part.parameters())

    def step(self, data: list[Batch]) -> Tensor:
        """One step; the mean loss on all ranks."""
        ids, targets = data[0]
        losses: list[Tensor] = []
        if self.rank == 0:
            self.schedule.step(ids)
        elif self.rank == self.stages - 1:
            self.schedule.step(target=targets, losses=losses)
        else:
            self.schedule.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        dist.all_reduce(loss)
        return loss


class Ours:
    """``compile_step`` with ``stages=`` and the pass."""

    name = OURS

    def setup(self, make: Make) -> None:
        """Captured."""
        model, mesh = make(), mw.init_mesh({"pp": dist.get_world_size()})
        seq = model.places.num_embeddings
        example = batches(1, 4 * MICRO_BATCHES, seq, model.tokens.num_embeddings)[0]
        self.captured = mw.compile_step(
            model, lambda m, b: m(*b), adamw(model.parameters()), example, mesh=mesh, stages={"pp": "blocks"},
            passes=[f"pipeline:micro_batches={MICRO_BATCHES},schedule=1f1b"],
        )  # fmt: skip

    def step(self, data: list[Batch]) -> Any:
        """One step."""
        return self.captured(data[0])


KINDS: tuple[Any, ...] = (OfTorch, Ours)
WHAT = "1F1B, {} stages / torch.distributed.pipelining"


def problem(effort: Effort) -> tuple[Make, list[Batch]]:
    """A function that makes the model, and the batch of a step: micro-batches of four rows."""
    seq, vocabulary = effort.pick((128, 4096), (64, 512), (8, 32))
    layers, hidden = effort.pick((4, 256), (4, 128), (4, 16))
    make = maker(layers, hidden, 4, seq, vocabulary, effort.seed)
    return make, batches(1, 4 * MICRO_BATCHES, seq, vocabulary, effort.seed)


def measure(effort: Effort) -> Samples:
    """Milliseconds of a step, ``wall`` and ``cpu``."""
    contenders = [kind() for kind in KINDS]
    make, data = problem(effort)
    set_up(contenders, make, data)
    return timed(contenders, data, effort)


def rows(samples: Samples, stages: str) -> Iterator[Row]:
    """Beside PyTorch's."""
    what = WHAT.format(stages)
    yield Row(f"{what}, wall", ratio(samples, "wall", OURS, TORCH), 0.95)
    yield Row(f"{what}, CPU of the first stage", ratio(samples, "cpu", OURS, TORCH))


def measure_memory(effort: Effort) -> Samples:
    """MiB, the most in a step above what the process held before the contender was there, of the rank with the most."""
    return peaks(effort, KINDS, *problem(effort), told=_of_ranks)


def _of_ranks(mib: float) -> float:
    most = torch.tensor(mib)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def rows_memory(samples: Samples) -> Iterator[Row]:
    """Beside PyTorch's."""
    yield Row(f"{WHAT.format('two')}, peak memory", ratio(samples, "peak", OURS, TORCH), 1.0)


BENCHMARKS = [
    Benchmark("pipeline-step", "ms", measure, partial(rows, stages="two"), processes=2),
    Benchmark("pipeline-step-of-four", "ms", measure, partial(rows, stages="four"), processes=4),
    Benchmark("pipeline-memory", "MiB", measure_memory, rows_memory, processes=2),
]
