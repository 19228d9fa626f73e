"""Contenders for the whole training step on real processes: data parallel and tensor parallel."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import meshwright as mw


class DataParallel:
    """The harness's model as it is; parameters replicated, the batch split over dp."""

    name = "meshwright_dp"

    def setup(self, ctor: Any) -> None:
        self.mesh = mw.init_mesh({"dp": dist.get_world_size()})
        self.m = mw.shard_module(ctor(), self.mesh, {})
        self.o = mw.shard_optimizer(torch.optim.AdamW(self.m.parameters(), lr=1e-3, foreach=True))

    def place(self, t: torch.Tensor) -> Any:
        return mw.from_local(t, self.mesh, {"dp": mw.Shard(0)}, check=False)

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for i, batch in enumerate(batches):
            if i < len(batches) - 1:
                with mw.no_sync(self.m):
                    self.backward(batch, len(batches))
            else:
                self.backward(batch, len(batches))
        self.o.step()
        self.o.zero_grad()

    def backward(self, batch: tuple[torch.Tensor, torch.Tensor], n: int) -> None:
        (self.m(*map(self.place, batch)) / n).backward()


def by_heads(block: Any, x: torch.Tensor) -> torch.Tensor:
    """The harness's block with the rows of qkv grouped by head, as its hand-written tensor-parallel one has them."""
    b, s, h = x.shape
    qkv = block.qkv(block.ln1(x)).view(b, s, block.nh, 3, h // block.nh)
    q, k, v = (t.squeeze(3).transpose(1, 2) for t in qkv.split(1, 3))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
    x = x + block.o(a)
    return x + block.down(F.gelu(block.up(block.ln2(x))))


class TensorParallel(DataParallel):
    """Megatron's layouts on the blocks; the batch is the same on every rank, as for the hand-written contender."""

    name = "meshwright_tp"

    def setup(self, ctor: Any) -> None:
        self.mesh = mw.init_mesh({"tp": dist.get_world_size()})
        column, row = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}
        self.m = ctor()
        for block in self.m.blocks:
            block.forward = types.MethodType(by_heads, block)
        layouts = {"*.qkv.*": column, "*.up.*": column, "*.o.weight": row, "*.down.weight": row}
        mw.shard_module(self.m, self.mesh, layouts)
        self.o = mw.shard_optimizer(torch.optim.AdamW(self.m.parameters(), lr=1e-3, foreach=True))

    def place(self, t: torch.Tensor) -> Any:
        return mw.from_local(t, self.mesh, {}, check=False)


class Zero3(DataParallel):
    """Parameters, gradients and states stored in parts over dp, in units of a block: FSDP2's."""

    name = "meshwright_zero3"

    def setup(self, ctor: Any) -> None:
        self.mesh = mw.init_mesh({"dp": dist.get_world_size()})
        self.m = mw.shard_module(ctor(), self.mesh, {}, stored_over="dp")
        self.o = mw.shard_optimizer(torch.optim.AdamW(self.m.parameters(), lr=1e-3, foreach=True))


class StaticDataParallel:
    """The captured step with its passes."""

    name = "meshwright_static_dp"
    stored_over: str | None = None

    def setup(self, ctor: Any) -> None:
        self.mesh = mw.init_mesh({"dp": dist.get_world_size()})
        self.m = ctor()
        self.o = torch.optim.AdamW(self.m.parameters(), lr=1e-3, foreach=True)
        self.compiled: Any = None

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        placed = [tuple(mw.from_local(t, self.mesh, {"dp": mw.Shard(0)}, check=False) for t in b) for b in batches]
        if self.compiled is None:
            passes = ["data-parallel-optimization"]
            if len(batches) > 1:
                passes.append(f"gradient-merge:k_steps={len(batches)}")
            self.compiled = mw.compile_step(
                self.m, lambda m, b: m(*b), self.o, placed[0], mesh=self.mesh, passes=passes,
                stored_over=self.stored_over,
            )  # fmt: skip
        for batch in placed:
            self.compiled(batch)


class StaticZero3(StaticDataParallel):
    """The captured step of ZeRO-3 with its passes."""

    name = "meshwright_static_zero3"
    stored_over = "dp"


CONTENDERS: list[Any] = [DataParallel(), StaticDataParallel(), TensorParallel(), Zero3(), StaticZero3()]
