"""Contenders of whole steps that are not ours: DDP, FSDP2, DTensor and hand-written tensor parallelism.

A contender has ``name``, ``setup(make)`` and ``step(batches)``: the forward and backward of every micro-batch, a step
of AdamW, and the gradients cleared; the loss of the last micro-batch comes back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from .models import Batch, GPTBlock, Make
from .tensor_parallel import ByHand, keep_part

ALONE, DDP, FSDP2, DTENSOR_TP, BY_HAND = "no communication", "ddp", "fsdp2", "dtensor tp", "hand-written tp"


class Steps(Protocol):
    """A contender."""

    name: str

    def setup(self, make: Make) -> None:
        """Make model and optimizer."""

    def step(self, batches: list[Batch]) -> Any:
        """One step of training; the loss of the last micro-batch."""


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer of all contenders."""
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


class Alone:
    """No communication at all: what all others are more than."""

    name = ALONE
    model: Any
    optimizer: Any

    def setup(self, make: Make) -> None:
        """The plain model."""
        self.model = self.wrapped(make())
        self.optimizer = adamw(self.model.parameters())

    def wrapped(self, model: nn.Module) -> Any:
        """What a step calls."""
        return model

    def step(self, batches: list[Batch]) -> Tensor:
        """As all contenders."""
        for i, batch in enumerate(batches):
            with self.synchronised(i == len(batches) - 1):
                loss = self.model(*batch)
                (loss / len(batches)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def synchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around a micro-batch: gradients are reduced with the last one."""
        return contextlib.nullcontext()


class DataParallelOfTorch(Alone):
    """DistributedDataParallel."""

    name = DDP

    def wrapped(self, model: nn.Module) -> Any:
        """Gradients are views of the buckets."""
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def synchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """With ``no_sync`` but for the last one."""
        return contextlib.nullcontext() if last else self.model.no_sync()


class FullyShard(Alone):
    """FSDP2, in units of a block."""

    name = FSDP2

    def wrapped(self, model: nn.Module) -> Any:
        """Parameters are given back after the forward."""
        from torch.distributed.fsdp import fully_shard

        for unit in (*model.blocks, model):  # type: ignore[misc]
            fully_shard(unit, reshard_after_forward=True, **self.options())
        return model

    def options(self) -> dict[str, Any]:
        """More of ``fully_shard``."""
        return {}

    def synchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """As it is told before the micro-batch."""
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


class TensorParallelOfTorch(Alone):
    """``parallelize_module`` with Megatron's layouts; every rank has the same batch."""

    name = DTENSOR_TP

    def wrapped(self, model: nn.Module) -> Any:
        """DTensor's weights, plain tensors between the layers."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:  # type: ignore[union-attr]
            column, row = ColwiseParallel(), RowwiseParallel()
            parallelize_module(block, mesh, {"qkv": column, "o": row, "up": column, "down": row})
        return model

    def setup(self, make: Make) -> None:
        """Two groups of parameters: AdamW takes no lists of both kinds."""
        from torch.distributed.tensor import DTensor

        self.model = self.wrapped(make())
        kinds: dict[bool, list[Any]] = {True: [], False: []}
        for p in self.model.parameters():
            kinds[isinstance(p, DTensor)].append(p)
        self.optimizer = adamw([{"params": of} for of in kinds.values()])


class BlockByHand(ByHand, GPTBlock):
    """The block with Megatron's two conversions."""


class TensorParallelByHand(Alone):
    """Megatron's code; every rank has the same batch."""

    name = BY_HAND

    def wrapped(self, model: nn.Module) -> Any:
        """Weights are cut, blocks are of the hand-written kind."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for block in model.blocks:  # type: ignore[union-attr]
            block.__class__ = BlockByHand
            for linear in (block.qkv, block.up):
                keep_part(linear, 0, rank, ranks)
            for linear in (block.o, block.down):
                keep_part(linear, 1, rank, ranks)
        return model


PEERS: tuple[type[Alone], ...] = (
    Alone,
    DataParallelOfTorch,
    FullyShard,
    TensorParallelOfTorch,
    TensorParallelByHand,
)
