"""Attention of a sequence that is split over two processes, forward and backward, beside PyTorch's context parallel.

PyTorch's has no kernel of the processor: here its own ring, with its trade of blocks, runs the kernel that both use.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

import meshwright as mw

from .core import OURS, Benchmark, Effort, Row, Samples, ratio, ratios

Tensor = torch.Tensor
aten = torch.ops.aten
RING, GATHER, PACKED = "context parallel of torch", "meshwright, gather", "meshwright, packed documents"
ALIKE = 1e-3  # relative: of the sum of squares of results, and of gradients


class Ring(torch.autograd.Function):
    """What PyTorch's context parallel runs for scaled_dot_product_attention, with the processor's kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any) -> Tensor:
        """Causal attention of this rank's rows: two blocks, as the ring trades them."""
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = theirs._templated_ring_attention(
            group, 2, kernel, query, key, value, is_causal=True, dropout_p=0.0
        )[:2]
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Another ring."""
        query, key, value, out, sums = ctx.saved_tensors
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        made = theirs._templated_ring_attention_backward(
            ctx.group, 2, kernel, grad_out=grad.contiguous(), grad_out_name="grad_out", query=query, key=key,
            value=value, out=out, logsumexp=sums, is_causal=True, dropout_p=0.0,
        )  # fmt: skip
        return (*made[:3], None)


def step_of(attend: Callable[..., Tensor], given: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Forward and backward; the sum of squares of results and gradients on this rank."""

    def step() -> Tensor:
        own = [t.detach().requires_grad_() for t in given]
        made = attend(*own)
        grads = torch.autograd.grad(made.square().sum(), own)
        local = [t.to_local() if hasattr(t, "to_local") else t for t in (made.detach(), *grads)]
        return torch.stack([t.square().sum() for t in local])

    return step


def measure(effort: Effort) -> Samples:
    """Milliseconds between barriers, in turn."""
    length, heads, width = effort.pick((4096, 8, 64), (1024, 4, 64), (64, 2, 16))
    n, rank = dist.get_world_size(), dist.get_rank()
    mesh = mw.init_mesh({"cp": n})
    torch.manual_seed(effort.seed)
    given = [torch.randn(1, heads, length, width) for _ in range(3)]
    blocks = [torch.cat([t.chunk(2 * n, 2)[i] for i in (rank, 2 * n - 1 - rank)], 2) for t in given]
    split = [mw.shard_tensor(t, mesh, {"cp": mw.Shard(2)}) for t in given]
    ids = torch.arange(length) * 6 // length  # of six documents
    ours = partial(F.scaled_dot_product_attention, is_causal=True)
    steps = {
        RING: step_of(lambda *a: Ring.apply(*a, dist.group.WORLD), blocks),
        OURS: step_of(ours, split),
        GATHER: step_of(ours, split),
        PACKED: step_of(partial(mw.attention, document_ids=ids), split),
    }
    wishes: dict[str, dict[str, dict[str, str]]] = {
        GATHER: {"scaled_dot_product_attention": {"cp": "gather"}}, PACKED: {"attention": {"cp": "gather"}},
    }  # fmt: skip
    found: Samples = {"wall": {name: [] for name in steps}}
    expected, rng, order = None, effort.rng(), list(steps)
    for name, step in steps.items():
        with mw.strategies(wishes.get(name, {})):
            total = step()
        dist.all_reduce(total)
        if name != PACKED:
            expected = total if expected is None else expected
            assert torch.allclose(total, expected, rtol=ALIKE), f"{name}: {total.tolist()}, not {expected.tolist()}"
    for _ in range(effort.pick(15, 3, 1)):
        rng.shuffle(order)
        for name in order:
            with mw.strategies(wishes.get(name, {})):
                steps[name]()  # plans are made anew where the wish is another one
                times = []
                for _ in range(effort.pick(3, 2, 1)):
                    dist.barrier()
                    start = time.perf_counter()
                    steps[name]()
                    dist.barrier()
                    times.append(1e3 * (time.perf_counter() - start))
            found["wall"][name].append(statistics.median(times))
    return found


def rows(samples: Samples) -> Iterator[Row]:
    """Beside PyTorch's."""
    others = ratios(samples, "wall", (GATHER, PACKED), RING)
    yield Row(
        "attention of a split sequence / torch's context parallel", ratio(samples, "wall", OURS, RING), 1.0, others
    )


BENCHMARKS = [Benchmark("context", "ms", measure, rows, processes=2)]
