"""Hypothesis strategies for meshes, placements, layouts and specs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import assume
from hypothesis import strategies as st

import meshwright as mw
from meshwright.layout import Placement, commute

MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2))
AXES = ("a", "b", "c")


def mesh_of(sizes: Sequence[int]) -> mw.Mesh:
    """A mesh with the axes ``a``, ``b``, ``c`` of these sizes."""
    return mw.Mesh(dict(zip(AXES, sizes, strict=False)))


def meshes(sizes: Sequence[Sequence[int]] = MESHES) -> st.SearchStrategy[mw.Mesh]:
    """Small meshes of one to three axes."""
    return st.sampled_from([mesh_of(s) for s in sizes])


def shapes(max_dims: int = 3, max_size: int = 9, min_dims: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes, dims of size 0 and 1 among them."""
    return st.lists(st.integers(0, max_size), min_size=min_dims, max_size=max_dims).map(tuple)


def placements(ndim: int, ops: Sequence[str] = ("sum",)) -> st.SearchStrategy[Placement]:
    """What one axis can do to a tensor of ``ndim`` dims; Replicate first, as the simplest."""
    found: list[Placement] = [mw.Replicate(), *(mw.Shard(d) for d in range(ndim))]
    return st.sampled_from([*found, *(mw.Partial(op) for op in ops)])


@st.composite
def layouts(draw: st.DrawFn, mesh: mw.Mesh, ndim: int, ops: Sequence[str] = ("sum",), orders: bool = True) -> mw.Layout:
    """Layouts of a tensor of ``ndim`` dims; with ``orders``, several axes of one dim come in any order."""
    given = [draw(placements(ndim, ops)) for _ in mesh.axes]
    assume(commute(*given))
    order = {}
    for d in range(ndim):
        axes = [a for a, p in enumerate(given) if p == mw.Shard(d)]
        if orders and len(axes) > 1:
            order[d] = draw(st.permutations(axes))
    return mw.Layout(mesh, given, order=order, ndim=ndim)


@st.composite
def specs(draw: st.DrawFn, mesh: mw.Mesh, max_dims: int = 3, ops: Sequence[str] = ("sum",)) -> mw.Spec:
    """Specs with a random shape and layout on one mesh."""
    shape = draw(shapes(max_dims))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int64]))
    exact = [op for op in ops if dtype.is_floating_point or op != "avg"]  # an average of integers is refused
    return mw.Spec(shape, dtype, draw(layouts(mesh, len(shape), exact)))


def numbered(shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Values that differ everywhere and stay of moderate size, the same on every call."""
    n = math.prod(shape)
    return torch.cos(torch.arange(n, dtype=torch.float64) * 1.7 + seed * 0.9 + 0.3).reshape(tuple(shape)).to(dtype)
