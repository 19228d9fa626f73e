"""Pieces that compositions of reductions are made of: ops of our own, with rules like any other op."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..layout import neutral
from ..operators import internal
from .core import Arg, Local, LocalFn, Rule, notation, rule
from .dims import dims_of, without

Tensor = torch.Tensor


# ------------------------------------------------------------------------------------------------ carrier


class _Carrier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@internal
def carrier(x: Tensor) -> Tensor:
    """Zeros with the gradient of x: adds a gradient to a value that is computed otherwise."""
    out: Tensor = _Carrier.apply(x)
    return out


@rule("carrier")
def _carrier_rule(x: Arg) -> Rule:
    return notation("... -> ...", x, linear=[[x]])


# ------------------------------------------------------------------------------------------------ extrema


@internal
def extremum(x: Tensor, dims: Sequence[int], largest: bool) -> Tensor:
    """Largest or smallest values over ``dims``, which stay as dims of size 1.  Has no gradient."""
    if not dims:
        return x.clone()
    return x.amax(tuple(dims), keepdim=True) if largest else x.amin(tuple(dims), keepdim=True)


@rule("extremum")
def _extremum_rule(x: Arg, dims: Sequence[int], largest: bool) -> Rule:
    letters = x.letters
    over = [letters[d] for d in dims if letters[d] != "1"]
    words = ("any", "all") if x.dtype == torch.bool else ("max", "min")

    def local(ctx: Local) -> LocalFn | None:
        if all(ctx.in_shape()[d] for d in dims):
            return None
        shape = ctx.out_shape()
        return lambda x, dims, largest: x.new_full(shape, neutral("max" if largest else "min", x.dtype))

    text = f"{' '.join(letters)} -> {' '.join(without(letters, dims, True))}"
    return notation(text, x, reduced=dict.fromkeys(over, words[0 if largest else 1]), local=local)


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
    letters = x.letters
    over = [letters[d] for d in dims if letters[d] != "1"]
    kept = " ".join(without(letters, dims, True))
    sizes = [x.shape[d] for d in dims]

    def local(ctx: Local) -> LocalFn | None:
        if not ctx.is_split(*over):
            return None
        starts = [0 if letters[d] == "1" else ctx.bounds(letters[d])[0] for d in dims]
        return lambda x, best, dims: first_index(x, best, dims, starts, sizes)

    return notation(f"{' '.join(letters)}, {kept} -> {kept}", x, best, reduced=dict.fromkeys(over, "min"), local=local)


# ------------------------------------------------------------------------------------------------ products


def _product(x: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    return torch.prod(x, dtype=dtype) if dim is None else torch.prod(x, dim, keepdim, dtype=dtype)


@internal
def partial_prod(x: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """Product whose dim may be split; only without gradients."""
    return _product(x, dim, keepdim, dtype)


@internal
def whole_prod(x: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """Product along a whole dim."""
    return _product(x, dim, keepdim, dtype)


def _prod_rule(op: str | None) -> Callable[..., Rule]:
    def made(x: Arg, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Rule:
        letters, dims = x.letters, dims_of(x.ndim, dim)
        over = [letters[d] for d in dims if letters[d] != "1"]
        text = f"{' '.join(letters)} -> {' '.join(without(letters, dims, keepdim))}"
        return notation(text, x, reduced=dict.fromkeys(over, op) if op else "")

    return made


rule("partial_prod")(_prod_rule("product"))
rule("whole_prod")(_prod_rule(None))


__all__ = ["carrier", "extremum", "first_index", "partial_prod", "whole_prod"]
