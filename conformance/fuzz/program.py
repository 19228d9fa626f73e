"""A random program as data: leaves, then lines of Python that plain and distributed tensors run alike.

A line is source text over names ``v0``, ``v1``, ... and a few helpers (``vals``, ``ints``, ``mask``, ``reshard``) whose
meaning depends on where it runs: on one device a layout means nothing, on a mesh it is what the tensor gets.  So what a
program prints as is what runs, and a finding can be pasted into a bug report.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.layout import Layout, Partial, Shard
from meshwright.mesh import Mesh
from meshwright.ranks import runtime
from meshwright.tensor import DistTensor, api

Tensor = torch.Tensor


@dataclass(frozen=True)
class Leaf:
    """An input: its global value follows from shape, dtype and seed.

    Attributes:
        layout: on the mesh; None: a plain tensor, the same on every rank.
        grad: whether it requires a gradient.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    layout: Layout | None
    grad: bool

    def __str__(self) -> str:
        made = f"{self.name} = leaf({self.shape}, {self.dtype}, seed={self.seed}, layout={self.layout!r})"
        return made + (".requires_grad_()" if self.grad else "")

    def parts(self) -> dict[tuple[int, ...], Tensor]:
        """The contribution of each coordinate on the axes where the leaf is Partial; one entry if there are none."""
        axes = [] if self.layout is None else list(self.layout.partial)
        sizes = [] if self.layout is None else [self.layout.mesh.sizes[a] for a in axes]
        spots = itertools.product(*map(range, sizes))
        return {at: values(self.shape, self.seed + 1000 * k, self.dtype).clone() for k, at in enumerate(spots)}

    def value(self) -> Tensor:
        """The global value, as one device has it."""
        parts = self.parts()
        if self.layout is None or not self.layout.partial:
            return parts[()]
        stacked = torch.stack(list(parts.values()))
        sizes = [self.layout.mesh.sizes[a] for a in self.layout.partial]
        folded = stacked.reshape(*sizes, *self.shape)
        for op in self.layout.partial.values():  # one reduction after the other, from the first axis
            folded = _REDUCE[op](folded)
        return folded

    def make(self, mesh: Mesh | None) -> Tensor:
        """The leaf on the mesh, or (None) on one device."""
        if mesh is None or self.layout is None:
            return self.value().requires_grad_(self.grad)
        here = mesh.coordinate(runtime.RT.rank)
        part = self.parts()[tuple(here[a] for a in self.layout.partial)]
        bounds = self.layout.local_bounds(self.shape, here)
        local = part[tuple(slice(*b) for b in bounds)].clone()
        order = dict(self.layout.order)
        made = api.from_local(local, mesh, self.layout.placements, shape=self.shape, order=order, check=False)
        return made.requires_grad_(self.grad)


_REDUCE = {
    "sum": lambda t: t.sum(0), "avg": lambda t: t.mean(0), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0),
    "product": lambda t: t.prod(0), "any": lambda t: t.any(0), "all": lambda t: t.all(0),
}  # fmt: skip


@lru_cache(maxsize=4096)  # so that they are constants of a step that is captured; nothing writes to them
def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Values of moderate size without ties, the same on every call."""
    n = math.prod(shape)
    base = torch.cos(torch.arange(n, dtype=torch.float64) * 1.7 + seed * 0.9 + 0.3) + 0.01 * math.sin(seed)
    if dtype is torch.bool:
        return (base > 0.1).reshape(shape)
    if dtype.is_complex:
        return torch.complex(base, base.flip(0)).reshape(shape).to(dtype)
    if not dtype.is_floating_point:
        return (base * 7).reshape(shape).to(dtype)
    return base.reshape(shape).to(dtype)


@lru_cache(maxsize=4096)
def _indices(shape: tuple[int, ...], high: int, seed: int) -> Tensor:
    return ((torch.arange(math.prod(shape)) * 7 + seed) % max(high, 1)).reshape(shape)


@lru_cache(maxsize=4096)
def _distinct(size: int, high: int, seed: int) -> Tensor:
    return torch.tensor(random.Random(seed).sample(range(high), size), dtype=torch.int64)


@dataclass(frozen=True)
class Program:
    """What runs: leaves, lines, and which values the loss is made of.

    Attributes:
        watch: read every value right after its line (which reduces Partials early), not only at the end.
        second: differentiate a penalty on the gradients too.
    """

    mesh: Mesh
    leaves: tuple[Leaf, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    watch: bool = False
    second: bool = False

    def __str__(self) -> str:
        axes = dict(zip(self.mesh.axes, self.mesh.sizes, strict=True))
        head = [f"mesh = mw.Mesh({axes})", *map(str, self.leaves)]
        marks = [w for w in ("watch", "second") if getattr(self, w)]
        tail = f"# loss from {', '.join(self.outputs) or 'nothing'}" + (f"; {', '.join(marks)}" if marks else "")
        return "\n".join([*head, *self.lines, tail])

    def without(self, k: int) -> Program:
        """The program without line ``k``."""
        return replace(self, lines=self.lines[:k] + self.lines[k + 1 :])


@lru_cache(maxsize=4096)
def _code(line: str) -> CodeType:
    return compile(line, "<program>", "exec")


def namespace(mesh: Mesh | None) -> dict[str, Any]:
    """The helpers, for one device (None) or for this rank of a mesh."""

    def lay(t: Tensor, layout: Any) -> Tensor:
        if mesh is None or layout is None:
            return t
        return api.shard_tensor(t, mesh, Layout(mesh, layout[0], order=layout[1]), check=False)

    def vals(shape: Any, seed: int, layout: Any = None, dtype: torch.dtype = torch.float64) -> Tensor:
        return lay(values(shape, seed, dtype), layout)

    def ints(shape: Any, high: int, seed: int, layout: Any = None) -> Tensor:
        return lay(_indices(shape, high, seed), layout)

    def distinct(size: int, high: int, seed: int, layout: Any = None) -> Tensor:
        return lay(_distinct(size, high, seed), layout)

    def mask(shape: Any, seed: int, layout: Any = None) -> Tensor:
        return lay(values(shape, seed, torch.bool), layout)

    def reshard(x: Tensor, placements: Any, order: Any = None) -> Tensor:
        if mesh is None or not isinstance(x, DistTensor):
            return x * 1
        return api.reshard(x, Layout(mesh, placements, order=order))

    def unshard(x: Tensor) -> Tensor:
        return api.unshard(x) * 1

    return {
        "torch": torch, "F": F, "checkpoint": checkpoint, "vals": vals, "ints": ints, "mask": mask, "reshard": reshard,
        "unshard": unshard, "distinct": distinct, "Shard": Shard, "Partial": Partial, "R": api.Replicate(),
    }  # fmt: skip


def run_line(line: str, env: dict[str, Any]) -> None:
    """Run one line in ``env``."""
    exec(_code(line), env)  # the text is made by ``grammar`` alone


def tensors(env: Mapping[str, Any]) -> dict[str, Tensor]:
    """The values of a program so far."""
    return {k: v for k, v in env.items() if k[0] == "v" and k[1:].isdigit() and isinstance(v, Tensor)}
