"""Softmax, embedding, attention, and what else torch.nn.functional has for layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from . import counter, dropout
from .core import Arg, Local, LocalFn, Rule, notation, rule
from .dims import broadcast_letters, filled, meta_shapes, names, nothing, without
from .index import shelf_of

Tensor = torch.Tensor

# ---------------------------------------------------------------------------------------------- softmax


@rule("softmax", "special_softmax")
def softmax(input: Arg, dim: int, dtype: torch.dtype | None = None) -> Rule:
    """Over a split dim only the maxima and the sums are exchanged."""
    return _along(input, dim, _softmax_by_sums)


@rule("log_softmax", "special_log_softmax")
def log_softmax(input: Arg, dim: int, dtype: torch.dtype | None = None) -> Rule:
    """Over a split dim only the maxima and the sums are exchanged."""
    return _along(input, dim, _log_softmax_by_sums)


def _along(x: Arg, dim: int, decompose: Any) -> Rule:
    letters = x.letters
    dims = " ".join(letters)
    whole = letters[x.dim(dim)] if x.ndim and x.shape[x.dim(dim)] > 1 else ""  # of nothing there is no maximum
    return notation(f"{dims} -> {dims}", x, whole=whole, decompose=decompose)


def _softmax_by_sums(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    e = torch.exp(x - x.detach().amax(dim, keepdim=True))
    return e / e.sum(dim, keepdim=True)


def _log_softmax_by_sums(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    shifted = x - x.detach().amax(dim, keepdim=True)
    return shifted - torch.exp(shifted).sum(dim, keepdim=True).log()


# ---------------------------------------------------------------------------------------------- embedding


def no_rows(weight: Tensor, indices: Tensor) -> Tensor:
    """What a rank without indices looks up: the second derivative of the kernel cannot tell the shape of no rows."""
    return nothing((*indices.shape, weight.shape[1]), weight)


@rule("embedding")
def embedding(
    weight: Arg, indices: Arg, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Rule | None:
    """Rows of a table.  Rows split: each rank looks up its own and gives zero for the others, which is
    Partial."""
    if scale_grad_by_freq or sparse:
        return None  # the gradient depends on how often an index occurs anywhere; sparse gradients are not converted

    def local(ctx: Local) -> LocalFn | None:
        if 0 in ctx.in_shape(1):
            return lambda weight, indices, *args, **named: no_rows(weight, indices)
        shelf = shelf_of(ctx, "v", weight.shape[0])
        if shelf is None:
            return None
        padding = padding_idx % shelf.size if padding_idx != -1 else -1
        padding = padding - shelf.start if shelf.start <= padding < shelf.stop else -1

        def lookup(weight: Tensor, indices: Tensor, *args: Any, **named: Any) -> Tensor:
            inside, away = shelf.find(indices)
            return torch.embedding(shelf.stocked(weight, 0), inside, padding).masked_fill(away.unsqueeze(-1), 0)

        return shelf.checked(lookup)

    return notation("v d, ... -> ... d", weight, indices, reduced="v", linear=[[weight]], heavy=True, local=local)


# ---------------------------------------------------------------------------------------------- attention


@rule("scaled_dot_product_attention")
def attention(
    query: Arg,
    key: Arg,
    value: Arg,
    attn_mask: Arg | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Rule | None:
    """Batch, heads and queries are free; every query sees all keys, so these stay whole."""
    if min(query.ndim, key.ndim, value.ndim) < 2 or (enable_gqa and min(query.ndim, key.ndim, value.ndim) < 3):
        return None
    t, s = query.shape[-2], key.shape[-2]
    sizes = {"t": t, "s": s, "d": query.shape[-1], "e": value.shape[-1]}
    heads = ["", ""]
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        if query.shape[-3] % key.shape[-3] or key.shape[-3] != value.shape[-3]:
            return None
        heads = ["(h g)", "h"]  # query head i uses key head i // g
        sizes |= {"h": key.shape[-3], "g": query.shape[-3] // key.shape[-3]}
    q, k, v = f"... {heads[0]} t d", f"... {heads[1]} s d", f"... {heads[1]} s e"
    mask = ""
    if attn_mask is not None:
        dims = ["...", *heads[0:1], "t", "s"] if heads[0] else ["...", "t", "s"]
        dims = dims if attn_mask.ndim >= len(dims) - 1 else dims[len(dims) - attn_mask.ndim :]
        fixed = dims[1:] if dims[0] == "..." else dims
        ones = [
            "1" if n == 1 else f for f, n in zip(fixed, attn_mask.shape[attn_mask.ndim - len(fixed) :], strict=True)
        ]
        mask = ", " + " ".join([*(["..."] if dims[0] == "..." else []), *ones])
    return notation(
        f"{q}, {k}, {v}{mask} -> ... {heads[0]} t e",
        query, key, value, *([attn_mask] if attn_mask is not None else []),
        sizes=sizes, linear=[[value]], heavy=True, local=_attention_local,
    )  # fmt: skip


def _attention_local(ctx: Local) -> LocalFn:
    shape, offset = dropout.place_of(ctx)
    here = ctx.out_shape()
    (first, last), keys = (offset[-2], offset[-2] + here[-2]), ctx.inputs[1].shape[-2]
    causal_split = (first, last) != (0, shape[-2])
    at = (*shape[:-1], keys), (*offset[:-1], 0)

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if is_causal and causal_split:
            # The mask of these rows of the whole: row i sees the keys up to i.
            attn_mask = torch.ones(query.shape[-2], keys, dtype=torch.bool, device=query.device).tril(first)
            is_causal = False
        if dropout_p > 0.0 or 0 in here:
            return _attend_by_steps(at, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return torch._C._nn.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return attend


def _attend_by_steps(
    at: dropout.Place,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Attention whose dropout mask follows from global indices; the fused kernels draw their own."""
    if enable_gqa and key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-2, -1) * ((query.shape[-1] or math.nan) ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = torch.softmax(scores, -1)
    if dropout_p > 0.0:
        weights = counter.dropout(weights, counter.draw_seed(), dropout_p, *at)
    return weights @ value


def _drops(*args: Any, **named: Any) -> bool:
    return (args[4] if len(args) > 4 else named.get("dropout_p", 0.0)) > 0.0


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2] if not enable_gqa else (1,))
    shape = (*lead, query.shape[-2], key.shape[-2])
    at = shape, (0,) * len(shape)
    return _attend_by_steps(at, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


dropout.PLAIN["scaled_dot_product_attention"] = _plain_attention, _drops


# ---------------------------------------------------------------------------------------------- activations


@rule("glu")
def glu(x: Arg, dim: int = -1) -> Rule:
    """Two halves of one dim meet: it stays whole."""
    letters, d = x.letters, x.dim(dim)
    out = [*letters]
    out[d] = "half"
    sizes = {"half": x.shape[d] // 2}
    return notation(f"{' '.join(letters)} -> {' '.join(out)}", x, sizes=sizes, whole=f"{letters[d]} half")


@rule("prelu")
def prelu(x: Arg, weight: Arg) -> Rule | None:
    """One slope, or one per channel (dim 1)."""
    letters = x.letters
    if weight.ndim > 1 or (weight.ndim and weight.shape[0] != 1 and x.ndim < 2):
        return None
    slope = "" if not weight.ndim else "1" if weight.shape[0] == 1 else letters[1]

    text = f"{' '.join(letters)}, {slope} -> {' '.join(letters)}"
    return notation(text, x, weight, local=lambda ctx: filled(ctx, torch.prelu))


# ---------------------------------------------------------------------------------------------- distances


@rule("cosine_similarity")
def cosine_similarity(x1: Arg, x2: Arg, dim: int = 1, eps: float = 1e-8) -> Rule:
    """One dim is summed over."""
    (a, b), out, whole = broadcast_letters(x1.shape, x2.shape)
    d = dim % max(len(whole), 1)
    text = f"{' '.join(a)}, {' '.join(b)} -> {' '.join(without(out, (d,), False))}"
    return notation(text, x1, x2, decompose=_cosine_by_sums)


def _cosine_by_sums(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    n1, n2 = (torch.linalg.vector_norm(x, 2, dim, keepdim=True) for x in (x1, x2))
    # As in the fused op, the lower limit is not differentiated.
    n1, n2 = (n + (n.detach().clamp_min(eps) - n.detach()) for n in (n1, n2))
    return ((x1 / n1) * (x2 / n2)).sum(dim)


@rule("pairwise_distance")
def pairwise_distance(x1: Arg, x2: Arg, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Rule:
    """Norm of the difference over the last dim."""
    (a, b), out, whole = broadcast_letters(x1.shape, x2.shape)
    text = f"{' '.join(a)}, {' '.join(b)} -> {' '.join(without(out, (len(whole) - 1,), keepdim))}"
    return notation(text, x1, x2, decompose=_distance_by_norm)


def _distance_by_norm(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim=keepdim)


@rule("cdist")
def cdist(x1: Arg, x2: Arg, *args: Any, **named: Any) -> Rule:
    """All pairs of rows."""
    text = "... p m, ... r m -> ... p r"
    return notation(text, x1, x2, heavy=True, local=lambda ctx: filled(ctx, _distances))


def _distances(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    fn = torch.cdist if isinstance(compute_mode, str) else torch.ops.aten.cdist  # which name it by words, by number
    made: Tensor = fn(x1, x2, p, compute_mode)
    return made


# ---------------------------------------------------------------------------------------------- images


def _upsample(name: str) -> None:
    fn = getattr(torch._C._nn, name)

    def make(x: Arg, *args: Any, **named: Any) -> Rule:
        (shape,) = meta_shapes(fn, x, *args, **named)
        before, after = names("x", x.shape[2:]), names("y", shape[2:])
        sizes = {f: n for f, n in zip(after, shape[2:], strict=True) if f != "1"}
        whole = " ".join(f for f in (*before, *after) if f != "1")
        text = f"b c {' '.join(before)} -> b c {' '.join(after)}"
        return notation(text, x, sizes=sizes, whole=whole, linear=[[x]], local=lambda ctx: filled(ctx, fn))

    rule(name)(make)


for _name in dir(torch._C._nn):
    if _name.lstrip("_").startswith("upsample_"):
        _upsample(_name)


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(x: Arg, grid: Arg, *args: Any) -> Rule:
    """Every output pixel may come from anywhere in its image; output pixels are free."""
    inner, outer = names("x", x.shape[2:]), names("y", grid.shape[1:-1])
    text = f"b c {' '.join(inner)}, b {' '.join(outer)} n -> b c {' '.join(outer)}"
    return notation(text, x, grid, linear=[[x]], local=lambda ctx: filled(ctx, torch.grid_sampler))


@rule("affine_grid_generator")
def affine_grid(theta: Arg, size: Sequence[int], align_corners: bool) -> Rule:
    """One grid per matrix of the batch."""
    outer = names("y", size[2:])
    sizes = {f: n for f, n in zip(outer, size[2:], strict=True) if f != "1"} | {"k": len(size) - 2}
    text = f"b k m -> b {' '.join(outer)} k"

    def local(ctx: Local) -> LocalFn:
        shape = ctx.out_shape()

        def run(theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
            if 0 in shape:
                return nothing(shape, theta)
            return torch.affine_grid_generator(theta, [shape[0], *size[1:]], align_corners)

        return run

    whole = " ".join(["k", "m", *(f for f in outer if f != "1")])
    return notation(text, theta, sizes=sizes, whole=whole, linear=[[theta]], local=local)
