"""Cross entropy and negative log likelihood, with classes (the vocabulary) split or not.

Classes whole: the fused op on parts, and where the batch is split one more scalar, the number (or the weight)
of the targets that count.  Classes split: the logits stay where they are; one number per row is exchanged for
the maximum and a few more for the sums (the scheme of Megatron-LM, Shoeybi et al. 2019, with its last two
exchanges in one).
"""

from __future__ import annotations

from typing import Any

import torch

from .. import compat
from ..operators import internal, operator, part_of
from .dims import with_row
from .factor_notation import Arg, Letters, Local, LocalFn, Rule, notation, rule
from .index import VocabRange
from .loss import MEAN, NONE, SUM, by_rows, weighed

Tensor = torch.Tensor
_C_NN: Any = compat.C_NN  # whose stubs take the reduction for a str
BLOCK = 1 << 17  # elements of the logits that are worked on at a time


def _inputs(x: Arg, target: Arg, weight: Arg | None) -> tuple[dict[Arg | None, Letters], list[str]]:
    """Letters of the inputs, and the factors of a row: ``x`` is (c), (b, c) or (b, c, positions)."""
    dims = ["c"] if x.ndim == 1 else ["b", "c", *(f"s{i}" for i in range(x.ndim - 2))]
    rows = [f for f in dims if f != "c"]
    of_target = dims if target.ndim == x.ndim and target.dtype.is_floating_point else rows
    return {x: dims, target: of_target, weight: "c"}, rows


@rule("cross_entropy_loss")
def cross_entropy_loss(
    self: Arg,
    target: Arg,
    weight: Arg | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Rule | None:
    """Rows are free; see the module for what happens when classes or the rows of a mean are split."""
    if self.ndim == 0:
        return None
    inputs, rows = _inputs(self, target, weight)
    # A mean over classes as targets divides by what the values say: it is no mean of means.
    averaged = reduction == MEAN and not target.dtype.is_floating_point
    return by_rows(_C_NN.cross_entropy_loss, inputs, rows, reduction, 3, _by_parts, whole=rows if averaged else [])


def _by_parts(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """As sums over parts; a rank needs no row and no class of another one."""
    spec = getattr(self, "__dict__", {}).get("_spec")
    classes = 0 if self.ndim == 1 else 1
    split = spec is not None and classes in spec.layout.dim_axes()
    if target.dtype.is_floating_point:
        return _soft_targets(self, target, weight, reduction, label_smoothing, classes)
    if not split and reduction == MEAN:
        loss = _C_NN.cross_entropy_loss(self, target, weight, SUM, ignore_index, label_smoothing)
        return loss / target_weights(target, weight, ignore_index).sum()
    if reduction == MEAN and weight is None and not label_smoothing:
        total, count = class_loss(*_exchanged(self, target, classes, ignore_index), target, ignore_index)
        return (total / count).to(self.dtype)
    loss = _split_classes(self, target, weight, ignore_index, label_smoothing, classes)
    return reduced(loss, reduction, target, weight, ignore_index)


def _soft_targets(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float, classes: int
) -> Tensor:
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / x.shape[classes]
    logs = torch.log_softmax(x, classes) * target
    if weight is not None:
        logs = logs * weight.reshape(-1, *(1,) * (x.ndim - classes - 1))
    if reduction == NONE:
        return -logs.sum(classes)
    return -logs.sum() / (x.numel() // x.shape[classes] if reduction == MEAN else 1)


def _exchanged(
    x: Tensor, target: Tensor, classes: int, ignore_index: int, weight: Tensor | None = None, spread: bool = False
) -> tuple[Tensor, Tensor]:
    top = x.detach().amax(classes)
    return class_sums(x, top, target, weight, ignore_index, spread), top


def _split_classes(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, classes: int
) -> Tensor:
    sums, top = _exchanged(x, target, classes, ignore_index, weight, bool(label_smoothing))
    loss = losses(
        sums[0].log() + top, sums[1:], x.shape[classes], target, weight, ignore_index, label_smoothing
    )  # fmt: skip
    return loss.to(x.dtype)


def losses(
    log_sum: Tensor, sums: Tensor, classes: int, target: Tensor, weight: Tensor | None, ignore_index: int,
    label_smoothing: float,
) -> Tensor:  # fmt: skip
    """Per row: the loss, from the log of the sum of exp(logits), the logit of the target and the sum of the logits."""
    loss = target_weights(target, weight, ignore_index) * (log_sum - sums[0])
    if label_smoothing:
        total = classes if weight is None else weight.to(loss.dtype).sum()
        loss = (1 - label_smoothing) * loss + (label_smoothing / classes) * (total * log_sum - sums[1])
    # Not a product with 0: where all rows are ignored the gradient of the mean is no number, and theirs is 0.
    return torch.where(target != ignore_index, loss, 0.0)


def reduced(loss: Tensor, reduction: int, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Losses of rows, reduced over them."""
    if reduction == NONE:
        return loss
    if reduction == SUM:
        return loss.sum()
    return loss.sum() / target_weights(target, weight, ignore_index).sum()


# ---------------------------------------------------------------------------------------------- internal ops


def own_class(target: Tensor, shelf: VocabRange, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Whether a target is one of this rank's classes, and its place there: 0 where it is elsewhere or ignored, out of
    range where it is nowhere."""
    place, away = shelf.find(target)
    counted = target != ignore_index
    return counted & ~away, torch.where(counted, place, 0)


def of_class(x: Tensor, classes: int, place: Tensor) -> Tensor:
    """One number per row, of the class at ``place``.  Raises IndexError as the fused losses do."""
    try:
        return x.gather(classes, place.unsqueeze(classes)).squeeze(classes)
    except RuntimeError as error:
        if "out of bounds" in str(error):
            raise IndexError("Target is out of bounds: it is no class and not ignore_index") from error
        raise


def _shelf(ctx: Local) -> VocabRange:
    return VocabRange(*ctx.bounds("c"), ctx.rule.sizes["c"])


@part_of("cross_entropy", "input", "row maxima", "target", "weight")
@internal
def class_sums(
    x: Tensor, top: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, spread: bool
) -> Tensor:
    """Per row: sum of exp(x - top), logit of the target, and with ``spread`` the (weighted) sum of the
    logits."""
    classes = x.shape[0 if x.ndim == 1 else 1]
    return _class_sums(x, top, target, weight, ignore_index, spread, VocabRange(0, classes, classes))


@rule("class_sums")
def _class_sums_rule(x: Arg, top: Arg, target: Arg, weight: Arg | None, ignore_index: int, spread: bool) -> Rule:
    inputs, rows = _inputs(x, target, weight)

    def local(ctx: Local) -> LocalFn:
        shelf = _shelf(ctx)

        def run(
            x: Tensor, top: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, spread: bool
        ) -> Tensor:
            return _class_sums(x, top, target, weight, ignore_index, spread, shelf)

        return run

    sizes = {"k": 3 if spread else 2}
    return notation({x: inputs[x], top: rows, **inputs}, ["k", *rows], sizes=sizes, whole="k", reduced="c", local=local)


def _class_sums(
    x: Tensor, top: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, spread: bool, shelf: VocabRange
) -> Tensor:
    classes = 0 if x.ndim == 1 else 1
    own, place = own_class(target, shelf, ignore_index)
    empty = not x.numel()
    if empty:  # one class that counts for nothing: the graph is that of the other ranks, to any order
        x = with_row(x, classes) + top.unsqueeze(classes)
        weight = None if weight is None else torch.cat([weight, weight.new_zeros(1)])
    # Rows last to first: classes become the last dim, a view.
    flat = x.movedim(classes, -1)
    applied: Any = _ClassSums
    made = applied.apply(flat, top, own, place, weight, spread)
    return made.masked_fill(torch.ones_like(made, dtype=torch.bool), 0.0) if empty else made


class _ClassSums(torch.autograd.Function):
    """Keeps the logits, which are alive anyway, and no tensor of their size: the exponentials are computed
    again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, top: Tensor, own: Tensor, place: Tensor, weight: Tensor | None, spread: bool
    ) -> Tensor:
        sums = _EXP_SUM(x, top)
        picked = of_class(x, -1, place).to(sums.dtype)
        parts = [sums, torch.where(own, picked, 0.0)]
        if spread:
            parts.append(x.sum(-1, dtype=sums.dtype) if weight is None else x.to(sums.dtype) @ weight.to(sums.dtype))
        # Aliases: the inputs themselves are distributed tensors again when the backward runs (``x`` is a
        # view).
        ctx.save_for_backward(x, *[t if t is None else t.detach() for t in (top, own, place, weight)])
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, top, own, place, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _class_sums_vjp(x, top, own, place, weight, grad), None, None, None, None, None
        made = _EXP_TIMES(x, top, grad[0], place, torch.where(own, grad[1], 0.0))
        if len(grad) > 2:
            of_all = grad[2].unsqueeze(-1)
            made = made + (of_all if weight is None else of_all * weight.to(grad.dtype)).to(x.dtype)
        return made, None, None, None, None, None


def _class_sums_vjp(x: Tensor, top: Tensor, own: Tensor, place: Tensor, weight: Tensor | None, grad: Tensor) -> Tensor:
    """The same, of ops that can be differentiated again."""
    made = (x.to(grad.dtype) - top.unsqueeze(-1)).exp() * grad[0].unsqueeze(-1)
    if len(grad) > 2:
        of_all = grad[2].unsqueeze(-1)
        made = made + (of_all if weight is None else of_all * weight.to(grad.dtype))
    picked = torch.where(own, grad[1], 0.0)
    return made.scatter_add(-1, place.unsqueeze(-1), picked.unsqueeze(-1)).to(x.dtype)


@part_of("cross_entropy", "row sums", "row maxima", "target")
@internal
def class_loss(sums: Tensor, top: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The loss added up over rows, and how many rows count: the plain case in one op."""
    kept = target != ignore_index
    return torch.where(kept, sums[0].log() + top - sums[1], 0.0).sum(), kept.sum()


@rule("class_loss")
def _class_loss_rule(sums: Arg, top: Arg, target: Arg, ignore_index: int) -> Rule:
    rows = target.letters
    return notation({sums: ["k", *rows], top: rows, target: rows}, "", "", whole="k", reduced=rows)


def _row_blocks(rows: Tensor) -> list[slice]:
    step = max(1, BLOCK // max(rows.shape[-1], 1))
    return [slice(i, i + step) for i in range(0, rows.shape[0], step)]


def _exp_sum(x: Tensor, top: Tensor) -> Tensor:
    """Sum of exp(x - top) over the last dim, in float32 at least."""
    out = _exp_sum_fake(x, top)
    rows, tops, flat = x.reshape(-1, x.shape[-1]), top.reshape(-1, 1), out.view(-1)
    for part in _row_blocks(rows):
        flat[part] = (rows[part].to(out.dtype) - tops[part]).exp_().sum(-1)
    return out


def _exp_sum_fake(x: Tensor, top: Tensor) -> Tensor:
    return torch.empty(top.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _exp_times(x: Tensor, top: Tensor, factor: Tensor, place: Tensor, more: Tensor) -> Tensor:
    """exp(x - top) × factor, with one top and one factor per row, and ``more`` added at one ``place`` per row."""
    out = _exp_times_fake(x, top, factor, place, more)
    rows, made = x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1])
    tops, factors = top.reshape(-1, 1), factor.reshape(-1, 1)
    for part in _row_blocks(rows):
        made[part] = (rows[part].to(factor.dtype) - tops[part]).exp_().mul_(factors[part])
    return out.scatter_add_(-1, place.unsqueeze(-1), more.to(x.dtype).unsqueeze(-1))


def _exp_times_fake(x: Tensor, top: Tensor, factor: Tensor, place: Tensor, more: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_EXP_SUM = operator("exp_sum(Tensor x, Tensor top) -> Tensor", _exp_sum, _exp_sum_fake)
_EXP_TIMES = operator(
    "exp_times(Tensor x, Tensor top, Tensor factor, Tensor place, Tensor more) -> Tensor", _exp_times, _exp_times_fake
)


@part_of("cross_entropy", "target", "weight")
@internal
def target_weights(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Per row: the weight of its class, or 1; 0 where the target is ignored."""
    classes = 0 if weight is None else len(weight)
    return _target_weights(target, weight, ignore_index, VocabRange(0, classes, classes))


@rule("target_weights")
def _target_weights_rule(target: Arg, weight: Arg | None, ignore_index: int) -> Rule:
    def local(ctx: Local) -> LocalFn:
        shelf = _shelf(ctx)
        return lambda target, weight, ignore_index: _target_weights(target, weight, ignore_index, shelf)

    given = {target: target.letters, weight: "c"}
    return notation(given, target.letters, reduced="c", local=local if weight is not None else None)


def _target_weights(target: Tensor, weight: Tensor | None, ignore_index: int, shelf: VocabRange) -> Tensor:
    if weight is None:
        return (target != ignore_index).to(torch.int64)
    own, place = own_class(target, shelf, ignore_index)
    return torch.where(own, shelf.with_zero_row(weight, 0)[place], 0.0)


# --------------------------------------------------------------------------------------------- log likelihood


@rule("nll_loss_nd", "nll_loss", "nll_loss2d")
def nll_loss(
    self: Arg, target: Arg, weight: Arg | None = None, reduction: int = MEAN, ignore_index: int = -100
) -> Rule:
    """Picks one number per row: with classes split, the rank that holds the class gives it."""
    inputs, rows = _inputs(self, target, weight)
    if reduction == MEAN:
        return notation(inputs, "", whole=["c", *rows], decompose=_nll_mean)

    def local(ctx: Local) -> LocalFn | None:
        if not ctx.is_split("c"):
            return weighed(_C_NN.nll_loss_nd, ctx, rows, reduction, 3)
        shelf = _shelf(ctx)
        return lambda *args, **named: _pick(shelf, *args, **named)

    reduced, out = (["c"], rows) if reduction == NONE else (["c", *rows], [])
    return notation(inputs, out, reduced=reduced, linear=[self], local=local)


def _nll_mean(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> Tensor:
    loss = _C_NN.nll_loss_nd(self, target, weight, SUM, ignore_index)
    return loss / target_weights(target, weight, ignore_index).sum()


def _pick(
    shelf: VocabRange,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> Tensor:
    classes = 0 if x.ndim == 1 else 1
    own, place = own_class(target, shelf, ignore_index)
    picked = -of_class(shelf.with_zero_row(x, classes), classes, place)
    if weight is not None:
        picked = picked * shelf.with_zero_row(weight, 0)[place]
    picked = torch.where(own, picked, 0.0)
    return picked if reduction == NONE else picked.sum()
