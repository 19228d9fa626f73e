"""Small helpers for writing rules: dims, letters, and parts without elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from .factor_notation import Arg, Local, LocalFn

Tensor = torch.Tensor


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


def names(prefix: str, shape: Sequence[int]) -> list[str]:
    """A fresh factor per dim, ``1`` for dims of size 1."""
    return ["1" if n == 1 else f"{prefix}{i}" for i, n in enumerate(shape)]


def sizes_of(letters: Sequence[str], shape: Sequence[int]) -> dict[str, int]:
    """Letter to size."""
    return dict(zip(letters, shape, strict=True))


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


def without(letters: Sequence[str], dims: Sequence[int], keepdim: bool = False) -> list[str]:
    """Letters of what is left when ``dims`` are reduced away."""
    return put(letters, dict.fromkeys(dims, "1" if keepdim else None))


def put(letters: Sequence[str], instead: Mapping[int, Any]) -> list[str]:
    """Letters with others (or a tuple of them) at some dims, or none."""
    made = [instead.get(i, f) for i, f in enumerate(letters)]
    return [f for f in made if f is not None]


def meta_shapes(fn: Callable[..., Any], *args: Any, **named: Any) -> list[tuple[int, ...]]:
    """Global shapes of what ``fn`` gives, from a run on meta tensors."""
    wide: torch.dtype | None = None  # under autocast operands have several dtypes, which change no shape
    for a in (*args, *named.values()):
        if isinstance(a, Arg) and a.dtype.is_floating_point:
            wide = a.dtype if wide is None else torch.promote_types(wide, a.dtype)

    def meta(a: Any) -> Any:
        if not isinstance(a, Arg):
            return a
        dtype = wide if wide is not None and a.dtype.is_floating_point else a.dtype
        return torch.empty(a.shape, dtype=dtype, device="meta")

    made = fn(*map(meta, args), **{k: meta(v) for k, v in named.items()})
    return [tuple(t.shape) for t in ([made] if isinstance(made, Tensor) else made)]


def nothing(shape: Sequence[int], *tensors: Tensor) -> Tensor:
    """Zeros that depend, linearly, on all the tensors: with an empty shard, too, a rank needs the others' graph."""
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


def on_padded(ctx: Local, fn: LocalFn) -> LocalFn:
    """``fn`` for kernels that refuse empty parts: run on one thing more, and nothing of it kept.

    So the graph of a rank with an empty part is that of the others, however often it is differentiated.  The thing is
    zero where it is added up.  Elsewhere its numbers differ from zero and from each other: where a derivative is
    infinite (a variance of zero without an epsilon), nothing of it would be NaN.
    """
    kept = {f for dims in ctx.rule.outputs for factors in dims for f in factors}
    pads = [_padding(ctx, dims, ctx.in_shape(i), kept) for i, dims in enumerate(ctx.rule.inputs)]
    shapes = [ctx.out_shape(i) for i in range(len(ctx.outputs))]

    def run(*args: Any, **named: Any) -> Any:
        left = iter(pads)

        def wider(a: Any) -> Any:
            if not isinstance(a, Tensor):
                return a
            # As it is where nothing is missing: what the op saves of it is then what the other ranks save.
            around, dropped = next(left)
            if not any(around):
                return a
            wide = torch.constant_pad_nd(a, around)
            if not dropped or not (a.is_floating_point() or a.is_complex()):
                return wide
            return wide + (torch.arange(wide.numel()) * 0.618 % 1 * 4 + 0.5).to(wide).view(wide.shape)

        positional = [wider(a) for a in args]  # before those by name: so they are numbered
        made = fn(*positional, **{k: wider(a) for k, a in named.items()})
        if isinstance(made, Tensor):
            return part(made, shapes[0])
        parts = [part(t, shape) for t, shape in zip(made, shapes, strict=True)]
        return type(made)(parts)  # with the names of its fields

    return run


def _padding(
    ctx: Local, dims: Sequence[Sequence[str]], shape: Sequence[int], kept: Collection[str]
) -> tuple[list[int], bool]:
    """What ``constant_pad_nd`` adds where this rank has nothing: one of each factor that it has nothing of.

    And whether no output adds it up: these factors are all ``kept``.
    """
    added, dropped = [], True
    for factors, n in zip(dims, shape, strict=True):
        # Of one that is a dim by itself as many as the dim has, which may be split by blocks: no range is what is here.
        alone = [f for f in factors if ctx.rule.sizes[f] != 1]
        ranges = {f: (0, n) if alone == [f] else ctx.bounds(f) if f in alone else (0, 1) for f in factors}
        added.append(0 if n else math.prod((stop - start) or 1 for start, stop in ranges.values()))
        dropped = dropped and all(f in kept for f, (start, stop) in ranges.items() if start == stop)
    return [k for n in reversed(added) for k in (0, n)], dropped
