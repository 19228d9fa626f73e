"""Contenders for the overlap benchmark: data parallel over the harness's virtual wire, eager and static."""

from __future__ import annotations

from typing import Any

import torch

import meshwright as mw
from meshwright import collective


class DataParallel:
    """The harness's process is rank 0 of a mesh of two; gradients go over the process group that it brings."""

    def __init__(self, name: str, bucket_bytes: int) -> None:
        self.name, self.bucket_bytes = name, bucket_bytes

    def setup(self, ctor: Any, pg: Any) -> None:
        self.mesh = mw.Mesh({"dp": 2})
        collective.override_group(self.mesh, (0,), pg)
        self.m = mw.shard_module(ctor(), self.mesh, {}, bucket_bytes=self.bucket_bytes)
        self.o = mw.shard_optimizer(torch.optim.SGD(self.m.parameters(), lr=1e-3, foreach=True))

    def place(self, t: torch.Tensor) -> mw.DistTensor:
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


class Static:
    """The captured step; the harness's process is rank 0 of a mesh of two."""

    def __init__(self, name: str, option: str) -> None:
        self.name, self.option = name, option

    def setup(self, ctor: Any, pg: Any) -> None:
        self.mesh = mw.Mesh({"dp": 2})
        collective.override_group(self.mesh, (0,), pg)
        self.m = ctor()
        self.o = torch.optim.SGD(self.m.parameters(), lr=1e-3, foreach=True)
        self.compiled: Any = None

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        placed = [tuple(mw.from_local(t, self.mesh, {"dp": mw.Shard(0)}, check=False) for t in b) for b in batches]
        if self.compiled is None:
            passes = [f"data-parallel-optimization:gb_per_s=0.4,{self.option}"]
            if len(batches) > 1:
                passes.append(f"gradient-merge:k_steps={len(batches)}")
            self.compiled = mw.compile_step(
                self.m, lambda m, b: m(*b), self.o, placed[0], mesh=self.mesh, passes=passes
            )
        for batch in placed:
            self.compiled(batch)


CONTENDERS: list[Any] = [DataParallel(f"meshwright_{k}KB", k << 10) for k in (128, 256, 512, 1024, 25 << 10)]
CONTENDERS += [Static("static_auto", "bucket_bytes=auto")]
CONTENDERS += [Static(f"static_{k}KB", f"bucket_bytes={k << 10}") for k in (256, 512, 1024)]
