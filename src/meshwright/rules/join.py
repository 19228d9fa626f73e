"""Ops that cut tensors into pieces or put them together: the dim along which they do stays whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import crossing
from .dims import meta_shapes, put
from .factor_notation import Arg, Local, LocalFn, Native, Rule, args_in, composite, lines, notation, rule
from .index import hidden, shelf_of, sum_op
from .view import at_least_1d, at_least_2d, at_least_3d, moved

Tensor = torch.Tensor

# ------------------------------------------------------------------------------------------------ pieces


def _pieces(fn: Callable[..., Any], x: Arg, dim: int, *args: Any, drop: bool = False) -> Rule | None:
    """Rule of an op that cuts ``x`` along ``dim``; the sizes come from a run on a meta tensor."""
    if any(args_in(args)) or not x.ndim or not (x.shape[x.dim(dim)] or not drop):
        return None
    d = x.dim(dim)
    sizes = {f"p{i}": 1 if drop else shape[d] for i, shape in enumerate(meta_shapes(fn, x, *args))}
    outs = [put(x.letters, {d: None if drop else f}) for f in sizes]
    f = x.letters[d]
    joined = {} if drop or f == "1" else {f: list(sizes.items())}

    def local(ctx: Local) -> LocalFn | None:
        if d not in ctx.inputs[0].layout.blocks:
            return None
        own = [ctx.out_shape(i)[d] for i in range(len(outs))]
        return lambda x, *args, **kwargs: torch.split(x, own, d)

    return notation(
        {x: x.letters}, *outs, whole=[f, *sizes], sizes=sizes, linear=[x], moves=True, local=local, joined=joined,
        blockwise=True,
    )  # fmt: skip


def _named_split(name: str, axis: int) -> Callable[..., Rule | None]:
    return lambda x, given: _pieces(getattr(torch, name), x, 0 if x.ndim == 1 else axis, given)


lines({
    "chunk unsafe_chunk": lambda x, chunks, dim=0: _pieces(torch.chunk, x, dim, chunks, dim),
    "split split_with_sizes unsafe_split unsafe_split_with_sizes": lambda x, given, dim=0: _pieces(
        torch.split, x, dim, given, dim
    ),
    "tensor_split": lambda x, given, dim=0: _pieces(torch.tensor_split, x, dim, given, dim),
    "hsplit": _named_split("hsplit", 1),
    "vsplit": _named_split("vsplit", 0),
    "dsplit": _named_split("dsplit", 2),
    "unbind": lambda x, dim=0: _pieces(torch.unbind, x, dim, dim, drop=True),
})  # fmt: skip


# ------------------------------------------------------------------------------------------------ parts


def _cut(x: Arg, dim: int, size: int | None, start: int | None, step: int = 1) -> Rule:
    """``dim`` cut to ``size`` from ``start``, or dropped with None; one index of it is brought by who has it."""
    d = x.dim(dim)
    if size == x.shape[d]:
        return moved(x, x.letters)
    f, out = x.letters[d], put(x.letters, {d: None if size is None else "cut"})
    if start is None or size is None or size == 1 or f == "1" or step != 1:
        if size is not None and start is not None and (way := crossing.sliced(d, x.shape[d], start, size, step)):
            return crossing.along(x, {d: way}, why=crossing.CUT, linear=[x], moves=True)
        if start is None or size not in (None, 1) or f == "1":
            return moved(x, out, whole=[f, "cut"], sizes={"cut": size or 0})
    else:
        return _taken(x, d, start % x.shape[d], size)

    def local(ctx: Local) -> LocalFn | None:
        shelf = shelf_of(ctx, f, x.shape[d])
        if shelf is None:
            return None
        at, lost = shelf.place(start)

        def own(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            x = shelf.with_zero_row(x, d)
            return hidden(x.select(d, at) if size is None else x.narrow(d, at, 1), lost)

        return own

    return moved(x, out, sizes={"cut": 1}, reduced=[f], op=sum_op(x), local=local)


def _taken(x: Arg, d: int, start: int, size: int) -> Rule:
    """A range of a dim, which is split with it where it is split by blocks; else whole, or rows cross."""
    f = x.letters[d]
    joined = {f: [("", start), ("cut", size), ("", x.shape[d] - start - size)]}
    way = crossing.sliced(d, x.shape[d], start, size)
    along = None if way is None else crossing.along(x, {d: way}, why=crossing.CUT, linear=[x], moves=True)

    def local(ctx: Local) -> LocalFn | None:
        if d in ctx.inputs[0].layout.blocks:
            lo, hi = ctx.own(d, start, start + size)
            return Native(torch.narrow, d, lo, hi - lo)
        return along.local(ctx) if along is not None and along.local is not None else None

    if along is not None and f in along.crossing:
        parts = {f: tuple(joined[f])}
        return dataclasses.replace(along, local=local, joined=parts, blockwise=True)
    out = put(x.letters, {d: "cut"})
    return moved(x, out, whole=[f, "cut"], sizes={"cut": size}, local=local, joined=joined, blockwise=True)


@rule("narrow")
def narrow(x: Arg, dim: int, start: Any, length: int) -> Rule | None:
    """A range of a dim."""
    d = x.dim(dim)
    if length == x.shape[d]:  # each shard whole
        return moved(x, x.letters, local=lambda ctx: Native(torch.narrow, d, 0, ctx.out_shape()[d]))
    return _cut(x, dim, length, start) if isinstance(start, int) else None


@rule("slice")
def slice_(x: Arg, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Rule | None:
    """A range of a dim, with a step."""
    d = x.dim(dim)
    taken = range(*slice(start, end, step).indices(x.shape[d]))
    return _cut(x, d, len(taken), taken.start, step)


def _replaced(x: Arg, src: Arg, dim: int, its: str | None) -> Rule:
    """``x`` with a part of a dim replaced, where ``src`` has the factor ``its`` or none: whole, unless that is all."""
    d = x.dim(dim)
    whole = [] if its and src.shape[d] == x.shape[d] else [x.letters[d], its or "1"]
    letters = put(x.letters, {d: its}) if whole else x.letters
    return notation({x: x.letters, src: letters}, x.letters, whole=whole, linear=[[x, src]], moves=True)


lines({
    "select": lambda x, dim, index: _cut(x, dim, None, index) if isinstance(index, int) else None,
    "slice_scatter": lambda x, src, dim=0, *args, **kwargs: _replaced(x, src, dim, "cut"),
    "select_scatter": lambda x, src, dim, index: _replaced(x, src, dim, None),
})  # fmt: skip


# ------------------------------------------------------------------------------------------------ joins


@rule("cat", "concat", "concatenate")
def cat(tensors: Sequence[Arg], dim: int = 0, **kwargs: Any) -> Rule | None:
    """Jointly linear.  An empty vector counts as nothing, whatever the others' shapes are."""
    first = next((t for t in tensors if t.shape != (0,)), tensors[0])
    d = dim % first.ndim
    sizes = {f"c{i}": t.shape[d] if t.ndim == first.ndim else 0 for i, t in enumerate(tensors)}
    pairs = zip(sizes, tensors, strict=True)
    inputs = {t: put(first.letters, {d: f}) if t.ndim == first.ndim else [f] for f, t in pairs}
    solid = [f for f, n in sizes.items() if n]
    if len(solid) == 1:  # beside nothing, as the first step of a cache of keys: a split stays
        joined, whole = solid[0], [f for f in sizes if f not in solid]
    else:
        joined, whole = "all", [*sizes, "all"]
        sizes["all"] = sum(sizes.values())
    out = put(first.letters, {d: joined})
    joined_of = {joined: list(sizes.items())[:-1]} if joined == "all" and len(sizes) > 2 else None

    def local(ctx: Local) -> LocalFn | None:
        return _vectors_joined if len(ctx.out_shape()) == 1 else None

    return notation(
        inputs, out, whole=whole, sizes=sizes, linear=[tensors], moves=True, joined=joined_of, local=local,
        blockwise=True,
    )  # fmt: skip


def _vectors_joined(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """torch.cat of vectors, which it does not differentiate twice on ranks where one of them has no elements."""
    return torch.cat([t.unsqueeze(1) for t in tensors], 0).squeeze(1)


@rule("stack")
def stack(tensors: Sequence[Arg], dim: int = 0, **kwargs: Any) -> Rule:
    """Along a new dim."""
    out = tensors[0].letters
    out.insert(dim % (len(out) + 1), "all")
    inputs = dict.fromkeys(tensors, tensors[0].letters)
    return notation(inputs, out, whole="all", sizes={"all": len(tensors)}, linear=[tensors], moves=True)


@composite("hstack")
def hstack(tensors: Sequence[Any], **kwargs: Any) -> Any:
    """Vectors along the first dim, the rest along the second."""
    listed = [at_least_1d(t) for t in tensors]
    return torch.cat(listed, 0 if listed[0].ndim == 1 else 1)


@composite("vstack", "row_stack")
def vstack(tensors: Sequence[Any], **kwargs: Any) -> Any:
    """Along the first dim."""
    return torch.cat([at_least_2d(t) for t in tensors], 0)


@composite("dstack")
def dstack(tensors: Sequence[Any], **kwargs: Any) -> Any:
    """Along the third dim."""
    return torch.cat([at_least_3d(t) for t in tensors], 2)


@composite("column_stack")
def column_stack(tensors: Sequence[Any], **kwargs: Any) -> Any:
    """Vectors as columns."""
    return torch.cat([t.reshape(t.numel(), 1) if t.ndim <= 1 else t for t in tensors], 1)


# ------------------------------------------------------------------------------------------------ padding


def _padded(x: Arg, pad: Sequence[int], value: Any = 0) -> Rule:
    """Linear where the padding is known to be zero."""
    dims = {x.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2) if any(pad[2 * i : 2 * i + 2])}
    ways = {d: crossing.padded(d, x.shape[d], *ends, value or 0) for d, ends in dims.items()}
    zero = value is None or (isinstance(value, int) and value == 0)
    return crossing.along(x, ways, why="padding moves rows", linear=[x] if zero else [], moves=True)


def _pad(x: Arg, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Rule:
    """Other modes than a constant see all dims but the batch."""
    if mode == "constant":
        return _padded(x, pad, value)
    dims = {x.ndim - 1 - i: sum(pad[2 * i : 2 * i + 2]) for i in range(len(pad) // 2) if any(pad[2 * i : 2 * i + 2])}
    sizes = {f"w{d}": x.shape[d] + more for d, more in dims.items()}
    free = 1 if x.ndim == len(pad) // 2 + 2 else 0
    whole = [*sizes, *x.letters[free:], *(x.letters[d] for d in dims)]
    return moved(x, put(x.letters, {d: f"w{d}" for d in dims}), whole=whole, sizes=sizes, padded=True)


lines({"constant_pad_nd": _padded, "pad": _pad})
