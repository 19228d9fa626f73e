"""Softmax, embedding, and what else torch.nn.functional has for layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import compat
from .dims import broadcast_letters, dims_of, meta_shapes, names, put, sizes_of, without
from .factor_notation import Arg, Local, LocalFn, Rule, lines, notation, rule
from .index import shelf_of

Tensor = torch.Tensor

# ---------------------------------------------------------------------------------------------- softmax


def _along(x: Arg, dim: int | None, decompose: Any) -> Rule | None:
    """Over a split dim only the maxima and the sums are exchanged."""
    if dim is None:
        return None
    d = x.dim(dim)
    whole = x.letters[d : d + 1] if all(x.shape[d : d + 1]) else []  # of nothing there is no maximum
    return notation({x: x.letters}, x.letters, whole=whole, decompose=decompose)


def _softmax_by_sums(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    e = torch.exp(x - x.detach().amax(dim, keepdim=True))
    return e / e.sum(dim, keepdim=True)


def _log_softmax_by_sums(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    shifted = x - x.detach().amax(dim, keepdim=True)
    return shifted - torch.exp(shifted).sum(dim, keepdim=True).log()


lines({
    "softmax special_softmax": lambda x, dim, dtype=None: _along(x, dim, _softmax_by_sums),
    "log_softmax special_log_softmax": lambda x, dim, dtype=None: _along(x, dim, _log_softmax_by_sums),
    # Python functions that only pass their arguments on to one op cost one interception instead of two.
    "F.softmax": lambda x, dim=None, stacklevel=3, dtype=None: _along(x, dim, _softmax_by_sums),
    "F.log_softmax": lambda x, dim=None, stacklevel=3, dtype=None: _along(x, dim, _log_softmax_by_sums),
})  # fmt: skip


# ---------------------------------------------------------------------------------------------- embedding


@rule("embedding")
def embedding(
    weight: Arg, indices: Arg, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Rule | None:
    """Rows of a table.  Rows split: each rank looks up its own and gives zero for the others, which is
    Partial."""
    if scale_grad_by_freq or sparse:
        return None  # the gradient depends on how often an index occurs anywhere; sparse gradients are not converted

    def local(ctx: Local) -> LocalFn | None:
        shelf = shelf_of(ctx, "v", weight.shape[0])
        if shelf is None:
            return None
        padding = padding_idx % shelf.size if padding_idx != -1 else -1
        padding = padding - shelf.start if shelf.start <= padding < shelf.stop else -1

        def lookup(weight: Tensor, indices: Tensor, *args: Any, **named: Any) -> Tensor:
            inside, away = shelf.find(indices)
            return torch.embedding(shelf.with_zero_row(weight, 0), inside, padding).masked_fill(away.unsqueeze(-1), 0)

        return shelf.checked(lookup)

    return notation(
        "v d, ... -> ... d", weight, indices, reduced="v", linear=[weight], heavy=True, padded=True, local=local
    )


@rule("F.embedding")
def whole_embedding(indices: Arg, weight: Arg, *options: Any) -> Rule | None:
    """Whole tables only: rows that are split need a masked lookup."""
    split = weight.spec is not None and 0 in weight.spec.layout.dim_axes()
    if split or any(o not in (None, False, 2.0) for o in options):
        return None
    return notation("..., v d -> ... d", indices, weight, whole="v", linear=[weight], heavy=True, padded=True)


# ---------------------------------------------------------------------------------------------- activations


@rule("prelu")
def prelu(x: Arg, weight: Arg) -> Rule | None:
    """One slope, or one per channel (dim 1)."""
    if weight.ndim > 1 or (weight.ndim and weight.shape[0] != 1 and x.ndim < 2):
        return None
    slope = ["1"] if 1 in weight.shape else x.letters[1 : 1 + weight.ndim]
    return notation({x: x.letters, weight: slope}, x.letters, padded=True)


# ---------------------------------------------------------------------------------------------- distances


def _rowwise(x1: Arg, x2: Arg, dim: int, keepdim: bool, decompose: Any) -> Rule:
    """Two tensors that broadcast, and one dim that is summed over."""
    (a, b), out, whole = broadcast_letters(x1.shape, x2.shape)
    return notation({x1: a, x2: b}, without(out, dims_of(len(whole), dim), keepdim), decompose=decompose)


def _cosine_by_sums(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    x1, x2 = torch.broadcast_tensors(x1, x2)  # a dim of size 1 that is summed over counts as often as it is repeated
    n1, n2 = (torch.linalg.vector_norm(x, 2, dim, keepdim=True) for x in (x1, x2))
    # As in the fused op, the lower limit is not differentiated.
    n1, n2 = (n + (n.detach().clamp_min(eps) - n.detach()) for n in (n1, n2))
    return ((x1 / n1) * (x2 / n2)).sum(dim)


def _distance_by_norm(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim=keepdim)


def _distances(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    fn = torch.cdist if isinstance(compute_mode, str) else torch.ops.aten.cdist  # which name it by words, by number
    made: Tensor = fn(x1, x2, p, compute_mode)
    return made


lines({
    # Two halves of one dim meet: it stays whole.
    "glu": lambda x, dim=-1: notation(
        {x: x.letters}, put(x.letters, {x.dim(dim): "half"}), sizes={"half": x.shape[x.dim(dim)] // 2}, whole="half"
    ),
    "cosine_similarity": lambda x1, x2, dim=1, eps=1e-8: _rowwise(x1, x2, dim, False, _cosine_by_sums),
    "pairwise_distance": lambda x1, x2, p=2.0, eps=1e-6, keepdim=False: _rowwise(
        x1, x2, -1, keepdim, _distance_by_norm
    ),
    # All pairs of rows.
    "cdist": lambda x1, x2, *args: notation(
        "... p m, ... r m -> ... p r", x1, x2, heavy=True, padded=True, local=lambda ctx: _distances
    ),
})  # fmt: skip


# ---------------------------------------------------------------------------------------------- images


def _upsample(name: str) -> None:
    fn = getattr(compat.C_NN, name)

    def make(x: Arg, *args: Any, **named: Any) -> Rule:
        (shape,) = meta_shapes(fn, x, *args, **named)
        before, after = names("x", x.shape[2:]), names("y", shape[2:])
        sizes = sizes_of(after, shape[2:])
        whole = [*before, *after]
        return notation({x: ["b", "c", *before]}, ["b", "c", *after], sizes=sizes, whole=whole, linear=[x], padded=True)

    rule(name)(make)


for _name in dir(compat.C_NN):
    if _name.lstrip("_").startswith("upsample_"):
        _upsample(_name)


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(x: Arg, grid: Arg, *args: Any) -> Rule:
    """Every output pixel may come from anywhere in its image; output pixels are free."""
    inner, outer = names("x", x.shape[2:]), names("y", grid.shape[1:-1])
    inputs = {x: ["b", "c", *inner], grid: ["b", *outer, "n"]}
    return notation(inputs, ["b", "c", *outer], linear=[x], padded=True)


@rule("affine_grid_generator")
def affine_grid(theta: Arg, size: Sequence[int], align_corners: bool) -> Rule:
    """One grid per matrix of the batch."""
    outer = names("y", size[2:])

    def run(theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
        return torch.affine_grid_generator(theta, [theta.shape[0], *size[1:]], align_corners)

    return notation(
        {theta: "b k m"}, ["b", *outer, "k"], sizes=sizes_of(outer, size[2:]), whole=["k", "m", *outer],
        linear=[theta], padded=True, local=lambda ctx: run,
    )  # fmt: skip
