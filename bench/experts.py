"""A step of a mixture of experts on two processes, beside one written by hand with ``all_to_all_single``.

The one written by hand is what torchtitan and Megatron-LM do without a capacity: rows are sorted by expert, counts are
exchanged, each chosen pair of token and expert sends a row, and weights are applied where the token lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw

from .core import OURS, Benchmark, Effort, Row, Samples, ratio
from .peers import adamw
from .steps import set_up, timed

BY_HAND, CAPTURED = "all_to_all_single by hand", "meshwright captured"
COUNT, K = 8, 2


class Layer(nn.Module):
    """A router and its experts; the loss is the mean square of what they make."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, COUNT, bias=False)
        self.gate_up = nn.Parameter(torch.randn(COUNT, 2, inner, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(COUNT, width, inner) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, width]`` to a number."""
        top, ids = self.router(x).softmax(-1).topk(K)
        y = self.made(x, ids, top / top.sum(-1, keepdim=True))
        return (x + y).square().mean()

    def made(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What the experts make."""
        return mw.experts(x, ids, weights, self.gate_up, self.down)


class Exchange(torch.autograd.Function):
    """Rows to all ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, give: list[int], take: list[int]) -> Tensor:
        """``give`` rows to each rank, ``take`` from each."""
        ctx.back = take, give
        made = x.new_empty(sum(take), x.shape[1])
        dist.all_to_all_single(made, x.contiguous(), take, give)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The same the other way round."""
        return Exchange.apply(gradient, *ctx.back), None, None


class LayerByHand(Layer):
    """The experts of this rank alone."""

    def made(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sorted by expert, there and back."""
        ranks, own = dist.get_world_size(), len(self.gate_up)
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=COUNT)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts)
        give, take = counts.view(ranks, own).sum(1).tolist(), coming.view(ranks, own).sum(1).tolist()
        rows = Exchange.apply(x[order // K], give, take)
        expert = torch.arange(own).repeat(ranks).repeat_interleave(coming)
        by_expert = expert.argsort(stable=True)
        parts = rows[by_expert].split(torch.bincount(expert, minlength=own).tolist())
        found = []
        for part, gate_up, down in zip(parts, self.gate_up, self.down, strict=True):
            gate, up = (part @ gate_up.flatten(0, 1).t()).chunk(2, -1)
            found.append((F.silu(gate) * up) @ down.t())
        rows = Exchange.apply(torch.cat(found)[by_expert.argsort()], take, give)
        return (rows[order.argsort()].view(-1, K, x.shape[1]) * weights[..., None]).sum(1)


class ByHand:
    """Expert parallelism by hand; the router's gradient is summed over ranks."""

    name = BY_HAND

    def setup(self, make: Callable[[], Layer]) -> None:
        """Keep this rank's experts."""
        self.model: Layer = make()
        self.model.__class__ = LayerByHand
        for name in ("gate_up", "down"):
            part = getattr(self.model, name).detach().chunk(dist.get_world_size())[dist.get_rank()]
            setattr(self.model, name, nn.Parameter(part.clone()))
        self.optimizer = adamw(self.model.parameters())

    def step(self, batches: list[Tensor]) -> Tensor:
        """One step."""
        ranks = dist.get_world_size()
        loss = self.model(batches[0].chunk(ranks)[dist.get_rank()]) / ranks
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        dist.all_reduce(self.model.router.weight.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


LAYOUTS = {"gate_up": {"ep": mw.Shard(0)}, "down": {"ep": mw.Shard(0)}}


class Ours:
    """The op, in an eager step."""

    name = OURS

    def setup(self, make: Callable[[], Layer]) -> None:
        """Experts split."""
        self.mesh = mw.init_mesh({"ep": dist.get_world_size()})
        self.model = mw.shard_module(make(), self.mesh, LAYOUTS)
        self.optimizer = mw.shard_optimizer(adamw(self.model.parameters()))

    def step(self, batches: list[Tensor]) -> Tensor:
        """One step."""
        loss = self.model(mw.shard_tensor(batches[0], self.mesh, {"ep": mw.Shard(0)}, check=False))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mw.unshard(loss.detach())


class Captured:
    """The op, in a captured step."""

    name = CAPTURED

    def setup(self, make: Callable[[], Layer]) -> None:
        """The first step captures."""
        self.model = make()
        self.captured: Any = None

    def step(self, batches: list[Tensor]) -> Tensor:
        """A call of the program."""
        if self.captured is None:
            self.captured = mw.compile_step(
                self.model, lambda model, x: model(x), adamw(self.model.parameters()), batches[0],
                mesh=mw.init_mesh({"ep": dist.get_world_size()}), layouts=LAYOUTS, batch={"ep": mw.Shard(0)},
            )  # fmt: skip
        made: Tensor = self.captured(batches[0])
        return made


def measure(effort: Effort) -> Samples:
    """Milliseconds of a step, ``wall`` and ``cpu``."""
    tokens, width, inner = effort.pick((2048, 256, 512), (256, 64, 128), (16, 8, 8))

    def make() -> Layer:
        torch.manual_seed(effort.seed)
        return Layer(width, inner)

    contenders = [ByHand(), Ours(), Captured()]
    data = [torch.randn(tokens, width, generator=torch.Generator().manual_seed(effort.seed))]
    set_up(contenders, make, data)  # type: ignore[arg-type]
    return timed(contenders, data, effort)  # type: ignore[arg-type]


def rows(samples: Samples) -> Iterator[Row]:
    """Beside the one by hand."""
    what = "MoE step / hand-written all_to_all_single"
    captured = {"captured": ratio(samples, "wall", CAPTURED, BY_HAND)}
    yield Row(f"{what}, wall", ratio(samples, "wall", OURS, BY_HAND), 1.1, captured)
    captured = {"captured": ratio(samples, "cpu", CAPTURED, BY_HAND)}
    yield Row(f"{what}, CPU per rank", ratio(samples, "cpu", OURS, BY_HAND), None, captured)


BENCHMARKS = [Benchmark("experts", "ms", measure, rows, processes=2)]
