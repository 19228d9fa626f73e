"""Ops that cut tensors into pieces or put them together: the dim along which they do stays whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .core import Arg, Local, LocalFn, Native, Rule, composite, notation, rule
from .dims import meta_shapes, unless_empty
from .index import hidden, shelf_of, sum_op
from .view import at_least_1d, at_least_2d, at_least_3d, moved

Tensor = torch.Tensor

# ------------------------------------------------------------------------------------------------ pieces


def _pieces(fn: Callable[..., Any], x: Arg, dim: int, *args: Any, drop: bool = False) -> Rule | None:
    """Rule of an op that cuts ``x`` along ``dim``; the sizes come from a run on a meta tensor."""
    if any(isinstance(a, Arg) for a in args) or not x.ndim:
        return None
    letters, d = x.letters, x.dim(dim)
    outs, sizes = [], {}
    for i, shape in enumerate(meta_shapes(fn, x, *args)):
        out = list(letters)
        if drop:
            del out[d]
        else:
            out[d] = "1" if shape[d] == 1 else f"p{i}"
            sizes[f"p{i}"] = shape[d]
        outs.append(" ".join(out))
    whole = " ".join([*(f for f in [letters[d]] if f != "1"), *sizes])
    text = f"{' '.join(letters)} -> {', '.join(outs)}"
    return notation(text, x, whole=whole, sizes=sizes, linear=[[x]], moves=True)


@rule("chunk", "unsafe_chunk")
def chunk(x: Arg, chunks: int, dim: int = 0) -> Rule | None:
    """Equal parts."""
    return _pieces(torch.chunk, x, dim, chunks, dim)


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def split(x: Arg, split_size: Any = None, dim: int = 0, **kwargs: Any) -> Rule | None:
    """Parts of a size or of sizes."""
    given = next((v for k, v in kwargs.items() if k.startswith("split_size")), split_size)
    return _pieces(torch.split, x, dim, given, dim)


@rule("tensor_split")
def tensor_split(x: Arg, indices_or_sections: Any = None, dim: int = 0, **kwargs: Any) -> Rule | None:
    """Nearly equal parts, or parts between indices."""
    given = kwargs.get("sections", kwargs.get("indices", indices_or_sections))
    return _pieces(torch.tensor_split, x, dim, given, dim)


def _register_named_splits() -> None:
    for name, axis in (("hsplit", 1), ("vsplit", 0), ("dsplit", 2)):

        def named(x: Arg, given: Any = None, name: str = name, axis: int = axis, **kwargs: Any) -> Rule | None:
            given = next(iter(kwargs.values()), given)
            return _pieces(getattr(torch, name), x, 0 if x.ndim == 1 else axis, given)

        rule(name)(named)


_register_named_splits()


@rule("unbind")
def unbind(x: Arg, dim: int = 0) -> Rule | None:
    """One part per index, without the dim."""
    return _pieces(torch.unbind, x, dim, dim, drop=True) if x.ndim and x.shape[x.dim(dim)] else None


# ------------------------------------------------------------------------------------------------ parts


def _cut(x: Arg, dim: int, size: int | None, start: int | None) -> Rule:
    """``dim`` cut to ``size`` from ``start``, or dropped with None; one index of it is brought by who has it."""
    letters, d = x.letters, x.dim(dim)
    if size == x.shape[d]:
        return moved(x, letters, letters)
    out, f = list(letters), letters[d]
    if size is None:
        del out[d]
    else:
        out[d] = "1" if size == 1 else "cut"
    if start is None or size not in (None, 1) or f == "1":
        made = {"cut": size} if size is not None and size != 1 else {}
        return moved(x, letters, out, whole=[f, *made], sizes=made)

    def local(ctx: Local) -> LocalFn | None:
        shelf = shelf_of(ctx, f, x.shape[d])
        if shelf is None:
            return None
        at, lost = shelf.place(start)

        def own(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            x = shelf.stocked(x, d)
            return hidden(x.select(d, at) if size is None else x.narrow(d, at, 1), lost)

        return own

    text = f"{' '.join(letters)} -> {' '.join(out)}"
    return notation(text, x, reduced={f: sum_op(x)}, linear=[[x]], moves=True, local=local)


@rule("narrow")
def narrow(x: Arg, dim: int, start: Any, length: int) -> Rule | None:
    """A range of a dim."""
    d = x.dim(dim)
    if length == x.shape[d]:  # each shard whole
        return moved(x, x.letters, x.letters, local=lambda ctx: Native(torch.narrow, d, 0, ctx.out_shape()[d]))
    return _cut(x, dim, length, start) if isinstance(start, int) else None


@rule("select")
def select(x: Arg, dim: int, index: Any) -> Rule | None:
    """One index of a dim, which is dropped."""
    return _cut(x, dim, None, index) if isinstance(index, int) else None


@rule("slice")
def slice_(x: Arg, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Rule | None:
    """A range of a dim, with a step."""
    d = x.dim(dim)
    taken = range(*slice(start, end, step).indices(x.shape[d]))
    return _cut(x, d, len(taken), taken.start)


@rule("slice_scatter")
def slice_scatter(x: Arg, src: Arg, dim: int = 0, *args: Any, **kwargs: Any) -> Rule:
    """``x`` with a range of a whole dim replaced."""
    letters, d = x.letters, x.dim(dim)
    its = list(letters)
    if src.shape[d] != x.shape[d]:
        its[d] = "1" if src.shape[d] == 1 else "cut"
        whole = " ".join(f for f in {letters[d], its[d]} if f != "1")
    else:
        whole = ""
    text = f"{' '.join(letters)}, {' '.join(its)} -> {' '.join(letters)}"
    return notation(text, x, src, whole=whole, linear=[[x, src]], moves=True)


@rule("select_scatter")
def select_scatter(x: Arg, src: Arg, dim: int, index: int) -> Rule:
    """``x`` with one index of a whole dim replaced."""
    letters, d = x.letters, x.dim(dim)
    its = [f for i, f in enumerate(letters) if i != d]
    whole = letters[d] if letters[d] != "1" else ""
    text = f"{' '.join(letters)}, {' '.join(its)} -> {' '.join(letters)}"
    return notation(text, x, src, whole=whole, linear=[[x, src]], moves=True)


# ------------------------------------------------------------------------------------------------ joins


@rule("cat", "concat", "concatenate")
def cat(tensors: Sequence[Arg], dim: int = 0, **kwargs: Any) -> Rule | None:
    """Jointly linear.  An empty vector counts as nothing, whatever the others' shapes are."""
    dim = kwargs.get("axis", dim)
    shapes = [t.shape for t in tensors if t.shape != (0,)] or [tensors[0].shape]
    d = dim % len(shapes[0])
    letters = ["1" if n == 1 else f"d{i}" for i, n in enumerate(shapes[0])]
    texts, sizes, total = [], {}, 0
    for i, t in enumerate(tensors):
        its, n = list(letters), t.shape[d] if t.ndim == len(letters) else 0
        its[d] = "1" if n == 1 else f"c{i}"
        sizes[f"c{i}"] = n
        total += n
        texts.append(f"c{i}" if t.shape == (0,) and len(letters) != 1 else " ".join(its))
    out = list(letters)
    out[d] = "1" if total == 1 else "all"
    sizes["all"] = total
    text = f"{', '.join(texts)} -> {' '.join(out)}"
    return notation(text, *tensors, whole=" ".join(sizes), sizes=sizes, linear=[[*tensors]], moves=True)


@rule("stack")
def stack(tensors: Sequence[Arg], dim: int = 0, **kwargs: Any) -> Rule:
    """Along a new dim."""
    first = tensors[0]
    out, n = first.letters, len(tensors)
    out.insert(dim % (first.ndim + 1), "1" if n == 1 else "all")
    text = f"{', '.join([' '.join(first.letters)] * n)} -> {' '.join(out)}"
    return notation(text, *tensors, whole="all" if n != 1 else "", sizes={"all": n}, linear=[[*tensors]], moves=True)


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


@rule("constant_pad_nd")
def constant_pad_nd(x: Arg, pad: Sequence[int], value: Any = 0) -> Rule | None:
    """Padded dims stay whole; linear where the padding is known to be zero."""
    return _padded(x, pad, value)


def _padded(x: Arg, pad: Sequence[int], value: Any = 0) -> Rule:
    letters = x.letters
    out, sizes, whole = list(letters), {}, []
    for i in range(len(pad) // 2):
        before, after, d = pad[2 * i], pad[2 * i + 1], x.ndim - 1 - i
        if before or after:
            size = x.shape[d] + before + after
            out[d] = "1" if size == 1 else f"w{d}"
            sizes[f"w{d}"] = size
            whole += [letters[d], *(f for f in [out[d]] if f != "1")]
    zero = value is None or (isinstance(value, int) and value == 0)
    return moved(x, letters, out, whole=whole, sizes=sizes, linear=zero)


@rule("pad")
def pad(x: Arg, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Rule | None:
    """Other modes than a constant see all dims but the batch."""
    if mode == "constant":
        return _padded(x, pad, value)
    made = _padded(x, pad)
    spatial = len(pad) // 2
    out = [("1" if not d else f"({' '.join(d)})") for d in made.outputs[0]]
    free = 1 if x.ndim == spatial + 2 else 0
    letters = x.letters
    whole = [*letters[free:], *(f for d in made.outputs[0][free:] for f in d)]
    return moved(x, letters, out, whole=whole, sizes=dict(made.sizes), local=unless_empty)


__all__ = ["cat", "narrow", "pad", "select", "split", "stack"]
