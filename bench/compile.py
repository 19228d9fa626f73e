"""Contenders for the cost of capture: capture, complete and partition, with backward and AdamW, no devices."""

from __future__ import annotations

import torch

import meshwright as mw
from meshwright.program import Plan, build


class Static:
    """The harness's model on a mesh, two weights of each block named, the rest by completion."""

    def __init__(self, name: str, axes: dict[str, int]) -> None:
        self.name, self.mesh = name, mw.Mesh(axes)
        tp = {"tp": mw.Shard(0)}
        layouts = {"*.qkv.weight": tp, "*.up.weight": tp} if "tp" in axes else {}
        self.plan = Plan(layouts, batch={"dp": mw.Shard(0)})

    def run(self, model: torch.nn.Module, ids: torch.Tensor, tgt: torch.Tensor) -> int:
        optimizer = torch.optim.AdamW(model.parameters())
        self.built = build(model, None, optimizer, (ids, tgt), self.mesh, self.plan)
        return len(self.built.program.graph.nodes)


CONTENDERS = [Static("meshwright dp=4", {"dp": 4}), Static("meshwright dp=2,tp=2", {"dp": 2, "tp": 2})]
