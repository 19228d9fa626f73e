"""Contender for the transformer-block benchmark: the plain block, with Megatron's layouts said on its weights."""

from __future__ import annotations

import sys
from typing import Any

import torch

import meshwright as mw

COLUMN, ROW = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}
LAYOUTS = {**{f"{n}.*": COLUMN for n in ("q", "k", "v", "up")}, "o.weight": ROW, "down.weight": ROW}


class Meshwright:
    """Built from the harness's own single-device block."""

    name = "meshwright"

    def setup(self) -> None:
        self.mesh = mw.init_mesh({"dp": 2, "tp": 4})

    def build(self, hidden: int, heads: int, ffn: int, batch: int, seq: int) -> tuple[torch.nn.Module, Any]:
        block = sys.modules["__main__"].Block
        torch.manual_seed(0)
        # The hand-written blocks do not reduce gradients over dp either.
        module = mw.shard_module(block(hidden, heads, hidden, ffn), self.mesh, LAYOUTS, sync=False)
        part = torch.randn(batch // 2, seq, hidden)
        x = mw.from_local(part, self.mesh, {"dp": mw.Shard(0)}, check=False)
        return module, x.requires_grad_()


CONTENDERS = [Meshwright()]
