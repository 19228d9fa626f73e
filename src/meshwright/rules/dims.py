"""Small helpers for writing rules: dims, letters and texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .core import Arg, Local, LocalFn

Tensor = torch.Tensor


def args_in(value: Any) -> Iterator[Arg]:
    """All tensors among (nested) arguments of a rule, in order."""
    if isinstance(value, Arg):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from args_in(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from args_in(v)


def dims_of(ndim: int, dim: Any) -> tuple[int, ...]:
    """The dims that a ``dim`` argument names, non-negative; None and () are all."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    listed = dim if isinstance(dim, (tuple, list)) else (dim,)
    return tuple(d % max(ndim, 1) for d in listed) if ndim else ()


def flat_ints(sizes: Sequence[Any]) -> tuple[int, ...]:
    """``(2, 3)`` from both ``f(2, 3)`` and ``f((2, 3))``."""
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        return tuple(sizes[0])
    return tuple(sizes)


def bool_free(*groups: Sequence[Arg | None]) -> list[list[Arg]]:
    """Linear groups less those of masks only: a bool is never a part of a sum."""
    made = [[t for t in group if isinstance(t, Arg)] for group in groups]
    return [g for g in made if any(t.dtype != torch.bool for t in g)]


def names(prefix: str, shape: Sequence[int]) -> list[str]:
    """A fresh factor per dim, ``1`` for dims of size 1."""
    return ["1" if n == 1 else f"{prefix}{i}" for i, n in enumerate(shape)]


def sizes_of(letters: Sequence[str], shape: Sequence[int]) -> dict[str, int]:
    """Letter to size; dims of size one have no letter."""
    return {f: n for f, n in zip(letters, shape, strict=True) if f != "1"}


def aligned(letters: Sequence[str], shape: Sequence[int]) -> list[str]:
    """Letters of a tensor of ``shape`` that broadcasts against a tensor that has ``letters``."""
    mine = list(letters[len(letters) - len(shape) :]) if shape else []
    mine = ["1"] * (len(shape) - len(mine)) + mine
    return ["1" if n == 1 else f for f, n in zip(mine, shape, strict=True)]


def broadcast_letters(*shapes: Sequence[int], prefix: str = "b") -> tuple[list[list[str]], list[str], tuple[int, ...]]:
    """Letters of tensors that broadcast together, those of the result, and its shape."""
    whole = tuple(torch.broadcast_shapes(*shapes))
    out = names(prefix, whole)
    return [aligned(out, s) for s in shapes], out, whole


def without(letters: Sequence[str], dims: Sequence[int], keepdim: bool) -> list[str]:
    """Letters of what is left when ``dims`` are reduced away."""
    if keepdim:
        return ["1" if i in dims else f for i, f in enumerate(letters)]
    return [f for i, f in enumerate(letters) if i not in dims]


def where_split(factors: Sequence[str], fn: LocalFn) -> Callable[[Local], LocalFn | None]:
    """A ``local`` that replaces the op by ``fn`` where one of the factors is split."""
    return lambda ctx: fn if ctx.is_split(*factors) else None


def meta_shapes(fn: Callable[..., Any], x: Arg, *args: Any, **kwargs: Any) -> list[tuple[int, ...]]:
    """Global shapes of what ``fn`` gives, from a run on a meta tensor."""
    made = fn(torch.empty(x.shape, dtype=x.dtype, device="meta"), *args, **kwargs)
    return [tuple(t.shape) for t in ([made] if isinstance(made, Tensor) else made)]


def nothing(shape: Sequence[int], *tensors: Tensor) -> Tensor:
    """Zeros that depend on all the tensors: with an empty shard, too, a rank needs the others' graph.

    Linearly: for an op whose derivative depends on its inputs give functions of them, or use :func:`filled`.
    """
    first, *rest = tensors
    zeros = first.new_zeros(shape)
    for t in (first, *rest):
        # Without a gradient too: what a captured step reads on one rank only would be dropped on the others.
        zeros = zeros + t.flatten()[:0].sum().to(zeros.dtype)
    return zeros


def with_row(x: Tensor, dim: int) -> Tensor:
    """``x`` with a row of zeros behind it.  ``torch.cat`` does not differentiate vectors of no elements twice."""
    pads = [0] * (2 * x.ndim)
    pads[2 * (x.ndim - 1 - dim) + 1] = 1
    return torch.constant_pad_nd(x, pads)


def part(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The first elements of ``x``.  Nothing of it is a copy: writes to an empty view are not differentiated twice."""
    made = x[tuple(map(slice, shape))]
    return made if made.numel() else made.clone()


def filled(ctx: Local, fn: LocalFn) -> LocalFn | None:
    """A ``local`` for kernels that refuse empty parts: ``fn`` on one thing more, of zeros, and nothing of it kept.

    So the graph of a rank with an empty part is that of the others, however often it is differentiated.
    """
    parts = [ctx.in_shape(i) for i in range(len(ctx.inputs))]
    if not any(0 in shape for shape in (*parts, ctx.out_shape())):
        return None
    pads = [_padding(ctx, dims, shape) for dims, shape in zip(ctx.rule.inputs, parts, strict=True)]
    shapes = [ctx.out_shape(i) for i in range(len(ctx.outputs))]

    def run(*args: Any, **named: Any) -> Any:
        left = iter(pads)

        def wider(a: Any) -> Any:
            if not isinstance(a, Tensor):
                return a
            # As it is where nothing is missing: what the op saves of it is then what the other ranks save.
            return torch.constant_pad_nd(a, around) if any(around := next(left)) else a

        made = fn(*map(wider, args), **{k: wider(a) for k, a in named.items()})
        if isinstance(made, Tensor):
            return part(made, shapes[0])
        return tuple(part(t, shape) for t, shape in zip(made, shapes, strict=True))

    return run


def _padding(ctx: Local, dims: Sequence[Sequence[str]], shape: Sequence[int]) -> list[int]:
    """What ``constant_pad_nd`` adds where this rank has nothing: one of each factor that it has nothing of."""
    added = []
    for factors, n in zip(dims, shape, strict=True):
        bounds = [ctx.bounds(f) for f in factors]
        added.append(0 if n else math.prod((stop - start) or 1 for start, stop in bounds))
    return [k for n in reversed(added) for k in (0, n)]


def unless_empty(ctx: Local) -> LocalFn | None:
    """A ``local`` for ops that refuse empty tensors: a rank with an empty part makes its result itself."""
    empty = any(not math.prod(ctx.in_shape(i)) for i in range(len(ctx.inputs)))
    if not empty or not math.prod(ctx.rule.sizes.values()):
        return None
    shape = ctx.out_shape()

    def local(*args: Any, **kwargs: Any) -> Tensor:
        return nothing(shape, *[a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)])

    return local
