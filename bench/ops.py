"""Contender for the per-op benchmark: DistTensor."""

from __future__ import annotations

from typing import Any

import torch

import meshwright as mw


class Meshwright:
    """Wraps local tensors as DistTensors on a mesh of the fake process group."""

    name = "meshwright"

    def setup(self, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
        self.mesh = mw.init_mesh(dict(zip(names, shape, strict=True)))

    def wrap(self, t: torch.Tensor, placements: str, requires_grad: bool = False) -> Any:
        made = [mw.Replicate() if p == "R" else mw.Shard(int(p[1:])) for p in placements.split(",")]
        x = mw.from_local(t.detach().clone(), self.mesh, made, check=False)
        return x.requires_grad_() if requires_grad else x


CONTENDERS = [Meshwright()]
