"""Losses.  A mean is over the global count, however uneven the parts; only scalars or one number per row
travel.

The ops are the C functions behind ``torch.nn.functional``: ``reduction`` is 0 (none), 1 (mean) or 2 (sum).
On parts the fused op runs with the same reduction, and a mean is weighed with the share of elements that the
part has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import compat
from .dims import broadcast_letters, names
from .factor_notation import Arg, Letters, Local, LocalFn, Rule, args_in, composite, notation, rule

Tensor = torch.Tensor
NONE, MEAN, SUM = 0, 1, 2


def weighed(fn: Callable[..., Any], ctx: Local, factors: Sequence[str], reduction: int, at: int) -> LocalFn | None:
    """``fn`` on a part; a mean becomes the part's contribution to the global mean.

    ``factors`` are those that are averaged over, ``at`` is the position of the argument ``reduction``.
    """
    shares = [(b - a, ctx.rule.sizes[f]) for f in factors if f in ctx.rule.sizes for a, b in [ctx.bounds(f)]]
    here, everywhere = math.prod(n for n, _ in shares), math.prod(n for _, n in shares)
    if here == everywhere or reduction == NONE or (here and reduction == SUM):
        return None
    share = here / everywhere

    def mean_of_part(*args: Any, **named: Any) -> Tensor:
        if len(args) <= at:  # said, because ATen's default is the mean and that of some Python bindings is none
            named["reduction"] = reduction
        # The part's own mean, and not its sum: a sum overflows half precision where a mean does not.
        return fn(*args, **named) * share

    def sum_of_nothing(*args: Any, **named: Any) -> Tensor:
        # The same graph as on the other ranks: a mean over nothing would be nan, and some kernels leave
        # their sum over nothing as they found it.
        each = (*args[:at], NONE, *args[at + 1 :]) if len(args) > at else args
        loss = fn(*each, **named if len(args) > at else {**named, "reduction": NONE}).sum()
        return loss / everywhere if reduction == MEAN else loss  # that it is a mean can be read in programs

    return mean_of_part if here else sum_of_nothing


# ----------------------------------------------------------------------------------------- element by element


def _elementwise(name: str, at: int) -> None:
    fn = getattr(compat.C_NN, name, None) or getattr(torch, name)

    def make(*args: Any, **named: Any) -> Rule:
        tensors = list(args_in((args, named)))
        letters, out, _ = broadcast_letters(*[t.shape for t in tensors])
        reduction = args[at] if len(args) > at else named.get("reduction", MEAN)
        return by_rows(fn, dict(zip(tensors, letters, strict=True)), out, reduction, at)

    rule(name)(make)


def by_rows(
    fn: Callable[..., Any], inputs: Mapping[Any, Letters], rows: Sequence[str], reduction: int, at: int,
    decompose: Callable[..., Any] | None = None, **flags: Any,
) -> Rule:  # fmt: skip
    """A loss per row (``rows``: its factors), of tensors whose other dims are whole; ``at`` as in :func:`weighed`."""
    if reduction == NONE:
        return notation(inputs, rows, decompose=decompose, **flags)
    return notation(
        inputs, "", reduced=rows, decompose=decompose, local=lambda ctx: weighed(fn, ctx, rows, reduction, at), **flags
    )


for _name, _at in {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "soft_margin_loss": 2,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
    "kl_div": 2,
    "poisson_nll_loss": 5,
    "hinge_embedding_loss": 3,
    "margin_ranking_loss": 4,
}.items():
    _elementwise(_name, _at)


# ---------------------------------------------------------------------------------------------- row by row


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    return loss if reduction == NONE else loss.mean() if reduction == MEAN else loss.sum()


@rule("cosine_embedding_loss")
def cosine_embedding_loss(
    input1: Arg, input2: Arg, target: Arg, margin: float = 0.0, reduction: int = MEAN
) -> Rule | None:
    """1 - cos for targets 1, max(0, cos - margin) for targets -1."""
    if input1.shape != input2.shape or target.ndim != input1.ndim - 1 or target.ndim > 1:
        return None
    rows = ["b"] * target.ndim
    inputs = {input1: [*rows, "d"], input2: [*rows, "d"], target: rows}
    return by_rows(torch.cosine_embedding_loss, inputs, rows, reduction, 4, _cosine_loss_by_sums)


def _cosine_loss_by_sums(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: int = MEAN
) -> Tensor:
    tiny = 1e-12
    norms = ((input1 * input1).sum(-1) + tiny) * ((input2 * input2).sum(-1) + tiny)
    cos = (input1 * input2).sum(-1) / norms.sqrt()
    alike = torch.where(target == 1, 1 - cos, 0.0)
    unlike = torch.where(target == -1, (cos - margin).clamp_min(0), 0.0)
    return _reduced(alike + unlike, reduction)


@rule("triplet_margin_loss")
def triplet_margin_loss(
    anchor: Arg,
    positive: Arg,
    negative: Arg,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = MEAN,
) -> Rule | None:
    """Distances over the last dim."""
    if not anchor.shape == positive.shape == negative.shape or not anchor.ndim:
        return None
    rows = names("r", anchor.shape[:-1])
    inputs = {t: [*rows, "d"] for t in (anchor, positive, negative)}
    return by_rows(torch.triplet_margin_loss, inputs, rows, reduction, 7, _triplet_by_norms)


def _triplet_by_norms(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = MEAN,
) -> Tensor:
    near, far = (torch.pairwise_distance(anchor, x, p, eps) for x in (positive, negative))
    if swap:
        far = torch.minimum(far, torch.pairwise_distance(positive, negative, p, eps))
    return _reduced((margin + near - far).clamp_min(0), reduction)


@rule("multi_margin_loss")
def multi_margin_loss(
    input: Arg,
    target: Arg,
    p: float = 1,
    margin: float = 1.0,
    weight: Arg | None = None,
    reduction: int = MEAN,
) -> Rule | None:
    """A row's classes are whole."""
    if not input.ndim:
        return None
    rows = ["b"] * (input.ndim - 1)
    inputs = {input: [*rows, "c"], target: rows if target.ndim == len(rows) else "1", weight: "c"}
    return by_rows(compat.C_NN.multi_margin_loss, inputs, rows, reduction, 5)


@rule("multilabel_margin_loss")
def multilabel_margin_loss(input: Arg, target: Arg, reduction: int = MEAN) -> Rule | None:
    """A row's classes are whole."""
    if not input.ndim or not target.ndim:
        return None
    rows = ["b"] * (input.ndim - 1)
    inputs = {input: [*rows, "c"], target: [*rows, "t"]}
    return by_rows(compat.C_NN.multilabel_margin_loss, inputs, rows, reduction, 2)


@composite("F.gaussian_nll_loss")
def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """As torch.nn.functional has it, but without writing to a copy of ``var``, which may be Partial."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if not isinstance(var, compat.FakeTensor) and bool((var < 0).any()):  # a fake has no values
        raise ValueError("var has negative entry/entries")
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    limited = torch.where(var.detach() < eps, eps, var.detach())
    var = var + (limited - var.detach())  # the limit is not differentiated
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return _reduced(loss, {"none": NONE, "mean": MEAN, "sum": SUM}[reduction])
