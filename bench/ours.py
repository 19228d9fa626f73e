"""Our contenders of whole steps: data parallel, tensor parallel and ZeRO-3, eager and captured."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import meshwright as mw

from .models import Batch, Make
from .peers import Alone, adamw

DP, TP, ZERO3 = "meshwright dp", "meshwright tp", "meshwright zero3"
CAPTURED_DP, CAPTURED_ZERO3 = "meshwright captured dp", "meshwright captured zero3"
COLUMN, ROW = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}
MEGATRON = {"*.qkv.*": COLUMN, "*.up.*": COLUMN, "*.o.weight": ROW, "*.down.weight": ROW}


class DataParallel(Alone):
    """Parameters replicated, the batch split over dp."""

    name = DP
    axis = "dp"
    batch: dict[str, mw.Placement] = {"dp": mw.Shard(0)}  # noqa: RUF012
    fsdp: str | None = None
    precision: mw.Precision | None = None

    def wrapped(self, model: nn.Module) -> Any:
        """The model, laid out."""
        self.mesh = mw.init_mesh({self.axis: dist.get_world_size()})
        return mw.shard_module(model, self.mesh, self.layouts(), fsdp=self.fsdp, precision=self.precision)

    def layouts(self) -> dict[str, Any]:
        """Of the weights."""
        return {}

    def setup(self, make: Make) -> None:
        """The model and its optimizer."""
        super().setup(make)
        self.optimizer = mw.shard_optimizer(self.optimizer)

    def step(self, batches: list[Batch]) -> Tensor:
        """With the batch as this rank's part."""
        loss = super().step([self.placed(batch) for batch in batches])
        return loss

    def placed(self, batch: Batch) -> Any:
        """On the mesh."""
        return tuple(mw.from_local(t, self.mesh, self.batch, check=False) for t in batch)

    def synchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """With ``no_sync`` but for the last one."""
        return contextlib.nullcontext() if last else mw.no_sync(self.model)


class TensorParallel(DataParallel):
    """Megatron's layouts on the blocks; the batch is the same on every rank."""

    name = TP
    axis = "tp"
    batch: dict[str, mw.Placement] = {}  # noqa: RUF012

    def layouts(self) -> dict[str, Any]:
        """Megatron's."""
        return MEGATRON


class Zero3(DataParallel):
    """Parameters, gradients and states stored in parts over dp, in units of a block as FSDP2's."""

    name = ZERO3
    fsdp = "dp"


class CapturedDataParallel:
    """The captured step with its passes."""

    name = CAPTURED_DP
    fsdp: str | None = None
    precision: mw.Precision | None = None
    option = ""

    def setup(self, make: Make) -> None:
        """The plain model; the first step captures."""
        self.mesh = self.joined()
        self.model: Any = make()
        self.optimizer = self.optimized()
        self.compiled: Any = None

    def joined(self) -> mw.Mesh:
        """The mesh of all processes."""
        return mw.init_mesh({"dp": dist.get_world_size()})

    def optimized(self) -> Any:
        """The optimizer."""
        return adamw(self.model.parameters())

    def step(self, batches: list[Batch]) -> Any:
        """One call of the program per micro-batch."""
        split = {"dp": mw.Shard(0)}
        placed = [tuple(mw.from_local(t, self.mesh, split, check=False) for t in b) for b in batches]
        if self.compiled is None:
            passes = ["data-parallel-optimization" + self.option]
            if len(batches) > 1:
                passes.append(f"gradient-merge:k_steps={len(batches)}")
            self.compiled = mw.compile_step(
                self.model, lambda m, b: m(*b), self.optimizer, placed[0], mesh=self.mesh, passes=passes,
                fsdp=self.fsdp, precision=self.precision,
            )  # fmt: skip
        for batch in placed:
            loss = self.compiled(batch)
        return loss


class CapturedZero3(CapturedDataParallel):
    """The captured step of ZeRO-3 with its passes."""

    name = CAPTURED_ZERO3
    fsdp = "dp"


OURS: tuple[Any, ...] = (DataParallel, CapturedDataParallel, TensorParallel, Zero3, CapturedZero3)
