"""Pieces that compositions of reductions are made of: ops of our own, with rules like any other op."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..layout import neutral
from ..operators import internal, part_of
from .dims import dims_of, without
from .factor_notation import Arg, Local, LocalFn, Rule, lines, notation, rule

Tensor = torch.Tensor


def reduction(
    x: Arg, dim: Any, keepdim: bool = False, *, op: str | None = None, outputs: int = 1, **flags: Any
) -> Rule:
    """The rule of a reduction of ``dim``: Partial(``op``) where it may be split, whole without ``op``."""
    letters, dims = x.letters, dims_of(x.ndim, dim)
    made = [without(letters, dims, bool(keepdim))] * outputs
    over = {letters[d]: op for d in dims if op}
    return notation({x: letters}, *made, reduced=over, **flags)


# ------------------------------------------------------------------------------------------------ carrier


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@internal
def carrier(x: Tensor) -> Tensor:
    """Zeros with the gradient of x: adds a gradient to a value that is computed otherwise."""
    out: Tensor = _Carried.apply(x)
    return out


# ------------------------------------------------------------------------------------------------ extrema


@part_of("amax or amin", "input")
@internal
def extremum(x: Tensor, dims: Sequence[int], largest: bool) -> Tensor:
    """Largest or smallest values over ``dims``, which stay as dims of size 1.  Has no gradient."""
    if not dims:
        return x.clone()
    return x.amax(tuple(dims), keepdim=True) if largest else x.amin(tuple(dims), keepdim=True)


@rule("extremum")
def _extremum_rule(x: Arg, dims: Sequence[int], largest: bool) -> Rule:
    words = ("any", "all") if x.dtype == torch.bool else ("max", "min")

    def local(ctx: Local) -> LocalFn | None:
        if all(ctx.in_shape()[d] for d in dims):
            return None
        shape = ctx.out_shape()
        return lambda x, dims, largest: x.new_full(shape, neutral("max" if largest else "min", x.dtype))

    return reduction(x, dims, True, op=words[not largest], local=local)


@part_of("argmax or argmin", "input")
@internal
def first_index(
    x: Tensor, best: Tensor, dims: Sequence[int], starts: Sequence[int] = (), sizes: Sequence[int] = ()
) -> Tensor:
    """Position of the first element equal to ``best`` over ``dims`` (of several: counted in memory order).

    ``starts`` and ``sizes`` place a shard in the whole: its offset and the global size, per dim of ``dims``.
    """
    starts, sizes = starts or [0] * len(dims), sizes or [x.shape[d] for d in dims]
    place = torch.zeros((), dtype=torch.int64, device=x.device)
    for d, start, size in zip(dims, starts, sizes, strict=True):
        along = torch.arange(start, start + x.shape[d], device=x.device)
        place = place * size + along.view([-1 if i == d else 1 for i in range(x.ndim)])
    hit = x == best
    if x.dtype.is_floating_point:
        hit = hit | (x.isnan() & best.isnan())
    end = math.prod(sizes)
    place = torch.where(hit, place, end)
    shape = [1 if i in dims else n for i, n in enumerate(x.shape)]
    if not dims:
        return place
    if not all(x.shape[d] for d in dims):
        return place.new_full(shape, end)
    return place.amin(tuple(dims), keepdim=True)


@rule("first_index")
def _first_index_rule(x: Arg, best: Arg, dims: Sequence[int]) -> Rule:
    over, kept = [x.letters[d] for d in dims], without(x.letters, dims, True)
    sizes = [x.shape[d] for d in dims]

    def local(ctx: Local) -> LocalFn | None:
        if not ctx.is_split(*over):
            return None
        starts = [ctx.bounds(f)[0] for f in over]
        return lambda x, best, dims: first_index(x, best, dims, starts, sizes)

    return notation({x: x.letters, best: kept}, kept, reduced=over, op="min", local=local)


# ------------------------------------------------------------------------------------------------ products


@part_of("prod", "input")
@internal
def partial_prod(x: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """Product whose dim may be split; only without gradients."""
    return torch.prod(x, dtype=dtype) if dim is None else torch.prod(x, dim, keepdim, dtype=dtype)


@part_of("prod", "input")
@internal
def whole_prod(x: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """Product along a whole dim."""
    return torch.prod(x, dtype=dtype) if dim is None else torch.prod(x, dim, keepdim, dtype=dtype)


lines({
    "carrier": lambda x: notation("... -> ...", x, linear=[x]),
    "partial_prod": lambda x, dim, keepdim, dtype: reduction(x, dim, keepdim, op="product"),
    "whole_prod": lambda x, dim, keepdim, dtype: reduction(x, dim, keepdim),
})  # fmt: skip


__all__ = ["carrier", "extremum", "first_index", "partial_prod", "reduction", "whole_prod"]
