"""``F.linear_cross_entropy``: the loss of a linear layer's classes, with never more than some rows of logits in memory.

Each rank takes the log of the sum of exp(logits) over its classes, row by row: these are exchanged, one number of a row
for each rank, and the logits of targets are added up with the loss.  Logits are computed again in the backward, as in
PyTorch's own op in chunks, which does not split the classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..compat import redispatch_function
from ..layout import Shard, Spec, chunk_bounds
from ..operators import KEPT, internal, opaque_operator, operator, part_of
from .cross_entropy import losses, of_class, own_class, reduced
from .factor_notation import Arg, Local, LocalFn, Rule, composite, notation, rule
from .index import VocabRange
from .loss import MEAN, NONE, SUM

Tensor = torch.Tensor
F: Any = torch.nn.functional
BLOCK = 1 << 20  # elements of the logits that are worked on at a time
LEAST = 64  # rows, of which a product of matrices makes good use
_REDUCTIONS = {"none": NONE, "mean": MEAN, "sum": SUM}
Blocks = Sequence[int]  # of each block of classes where this rank's part of it starts and stops; -1 where it has none


@composite("F.linear_cross_entropy", "meshwright::linear_cross_entropy")
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *given: Any, options: Any = None, **named: Any
) -> Tensor:
    """In pieces where the classes are split, or ``options`` ask for it; else a linear layer and its cross entropy.

    Of ``options`` no more is read: how many rows are a piece follows from the classes of this rank.
    """
    named |= zip(("linear_bias", "weight", "reduction", "ignore_index", "label_smoothing"), given, strict=False)
    if len(given) > 5:
        options = given[5] or None
    parts = _parts_of(input, linear_weight, target, **named)
    if parts is None or (parts == 1 and options is None):
        return redispatch_function(F.linear_cross_entropy, (type(input),), (input, linear_weight, target), named)
    return _in_pieces(input, linear_weight, target, parts, **named)


def _whole(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None = None,
    weight: Tensor | None = None, reduction: str = "mean", ignore_index: int | None = None,
    label_smoothing: float = 0.0, options: bool = False,
) -> Tensor:  # fmt: skip
    made: Tensor = F.linear_cross_entropy(
        input, linear_weight, target, linear_bias=linear_bias, weight=weight, reduction=reduction,
        ignore_index=ignore_index, label_smoothing=label_smoothing,
    )  # fmt: skip
    return made


_WHOLE = opaque_operator(
    "linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias=None, "
    "Tensor? weight=None, str reduction='mean', int? ignore_index=None, float label_smoothing=0.0, "
    "bool options=False) -> Tensor",
    _whole,
)
if hasattr(F, "linear_cross_entropy"):  # from PyTorch 2.13 on
    KEPT[F.linear_cross_entropy] = lambda *args, options=None, **named: _WHOLE(
        *args, **named, options=options is not None
    )


def _parts_of(
    x: Tensor, w: Tensor, target: Tensor, linear_bias: Tensor | None = None, weight: Tensor | None = None,
    reduction: str = "mean", **named: Any,
) -> int | None:  # fmt: skip
    """Into how many blocks the classes are split; None for more than indices of classes, or another split of these."""
    plain = x.ndim in (1, 2) and w.ndim == 2 and target.dtype is torch.int64 and reduction in _REDUCTIONS
    if not plain or x.shape[-1] != w.shape[1] or target.shape != x.shape[:-1]:
        return None
    of_classes = [t for t in (linear_bias, weight) if t is not None]
    alike = torch.is_autocast_enabled(x.device.type) or {x.dtype} == {t.dtype for t in (w, *of_classes)}
    if not alike or any(t.shape != w.shape[:1] for t in of_classes):
        return None  # PyTorch is to say what is wrong
    spec: Spec | None = w.__dict__.get("_spec")
    axes = () if spec is None else spec.layout.dim_axes().get(0, ())
    if len(axes) > 1 or (spec is not None and 1 in spec.layout.dim_axes()):
        return None
    others = [s.layout.placements for t in of_classes if (s := t.__dict__.get("_spec")) is not None]
    if any(isinstance(p, Shard) and a not in axes for placements in others for a, p in enumerate(placements)):
        return None
    return spec.mesh.sizes[axes[0]] if spec is not None and axes else 1


def _in_pieces(
    x: Tensor, w: Tensor, target: Tensor, parts: int, linear_bias: Tensor | None = None, weight: Tensor | None = None,
    reduction: str = "mean", ignore_index: int | None = None, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    ignore_index = -100 if ignore_index is None else ignore_index
    device, made = x.device.type, x.dtype
    if torch.is_autocast_enabled(device):  # the products in its dtype, the loss in float32
        low = torch.get_autocast_dtype(device)
        x, w = (t if t.dtype is torch.float64 else t.to(low) for t in (x, w))
        linear_bias = None if linear_bias is None else linear_bias.to(x.dtype)
        made = torch.promote_types(made, torch.float32)
    with torch.autocast(device, enabled=False):
        rows, targets = (x, target) if x.ndim == 2 else (x.unsqueeze(0), target.unsqueeze(0))
        sums = head_sums(rows, w, linear_bias, targets, weight, ignore_index, parts, bool(label_smoothing))
        log_sum = sums[:parts].logsumexp(0)
        loss = losses(log_sum, sums[parts:], len(w), targets, weight, ignore_index, label_smoothing)
        loss = loss if x.ndim == 2 else loss.squeeze(0)
        return reduced(loss, _REDUCTIONS[reduction], target, weight, ignore_index).to(made)


# ---------------------------------------------------------------------------------------------- internal op


@part_of("linear_cross_entropy", "input", "weight")
@internal
def head_sums(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, weight: Tensor | None, ignore_index: int, parts: int,
    spread: bool,
) -> Tensor:  # fmt: skip
    """Per row: of each of so many blocks of classes the log of the sum of exp(logits), then the logit of the target,
    and with ``spread`` the (weighted) sum of the logits."""
    blocks = [at for p in range(parts) for at in chunk_bounds(len(w), parts, p)]
    return _head_sums(x, w, bias, target, weight, ignore_index, blocks, spread, VocabRange(0, len(w), len(w)))


@rule("head_sums")
def _head_sums_rule(
    x: Arg, w: Arg, bias: Arg | None, target: Arg, weight: Arg | None, ignore_index: int, parts: int, spread: bool
) -> Rule:
    def local(ctx: Local) -> LocalFn:
        shelf, split = VocabRange(*ctx.bounds("c"), ctx.rule.sizes["c"]), ctx.axes("c")
        mine = [ctx.here[a] for a in split] or range(parts)
        blocks = [-1] * (2 * parts)
        for p in mine:
            blocks[2 * p : 2 * p + 2] = [at - shelf.start for at in chunk_bounds(shelf.size, parts, p)]

        def run(
            x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, weight: Tensor | None, ignore_index: int,
            parts: int, spread: bool,
        ) -> Tensor:  # fmt: skip
            return _head_sums(x, w, bias, target, weight, ignore_index, blocks, spread, shelf)

        return run

    given = {x: "b k", w: "c k", bias: "c", target: "b", weight: "c"}
    sizes = {"p": parts + 1 + spread}
    return notation(given, "p b", sizes=sizes, whole="k p", reduced="c", heavy=True, local=local)


def _head_sums(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, weight: Tensor | None, ignore_index: int,
    blocks: Blocks, spread: bool, shelf: VocabRange,
) -> Tensor:  # fmt: skip
    own, place = own_class(target, shelf, ignore_index)
    # Aliases: what is given are distributed tensors again when the backward runs.
    given = [t if t is None else t.view_as(t) for t in (x, w, bias)]
    applied: Any = _HeadSums
    return applied.apply(*given, own, place, None if weight is None else weight.detach(), blocks, spread)


class _HeadSums(torch.autograd.Function):
    """Keeps what the logits are made of, and their sums."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *tensors, ctx.blocks, ctx.spread = given
        made: Tensor = _SUMS(*tensors, ctx.blocks, ctx.spread)
        ctx.save_for_backward(*tensors, made)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *given, made = ctx.saved_tensors
        x, w, bias, own, place, weight = given
        if torch.is_grad_enabled():  # of ops that can be differentiated again, with all logits
            logits = F.linear(x, w, bias).to(made.dtype)
            of_logits = _of_logits(logits, made, grad, own, place, weight, ctx.blocks).to(x.dtype)
            found = [of_logits @ w, of_logits.t() @ x, of_logits.sum(0)]
        else:
            wanted = ctx.needs_input_grad[:3]
            found = _GRADS(x, w, bias, own, place, weight, made, grad, ctx.blocks, wanted)
        grads = [g if need else None for g, need in zip(found, ctx.needs_input_grad, strict=False)]
        return *grads, None, None, None, None, None


def _pieces(x: Tensor, w: Tensor) -> Iterator[slice]:
    step = max(LEAST, BLOCK // max(len(w), 1))
    return (slice(i, i + step) for i in range(0, len(x), step))


def _held(blocks: Blocks) -> Iterator[tuple[int, slice]]:
    """The blocks of which this rank has the classes, and where these are."""
    return ((p, slice(*blocks[2 * p : 2 * p + 2])) for p in range(len(blocks) // 2) if blocks[2 * p] >= 0)


def _sums(
    x: Tensor, w: Tensor, bias: Tensor | None, own: Tensor, place: Tensor, weight: Tensor | None, blocks: Blocks,
    spread: bool,
) -> Tensor:  # fmt: skip
    made = _sums_fake(x, w, bias, own, place, weight, blocks, spread).zero_()
    target = len(blocks) // 2
    for part in _pieces(x, w):
        logits = F.linear(x[part], w, bias).to(made.dtype)
        for p, block in _held(blocks):
            made[p, part] = logits[:, block].logsumexp(-1)
        looked_up = logits if len(w) else logits.new_zeros(len(logits), 1)
        made[target, part] = torch.where(own[part], of_class(looked_up, -1, place[part]), 0.0)
        if spread:
            made[target + 1, part] = logits.sum(-1) if weight is None else logits @ weight.to(made.dtype)
    return made


def _sums_fake(
    x: Tensor, w: Tensor, bias: Tensor | None, own: Tensor, place: Tensor, weight: Tensor | None, blocks: Blocks,
    spread: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty(len(blocks) // 2 + 1 + spread, len(x), dtype=torch.promote_types(x.dtype, torch.float32))


def _of_logits(
    logits: Tensor, made: Tensor, grad: Tensor, own: Tensor, place: Tensor, weight: Tensor | None, blocks: Blocks
) -> Tensor:
    """The gradient of logits, from that of what :func:`head_sums` makes of them."""
    target = len(blocks) // 2
    # Where all logits of a block are -inf so is their sum, of which nothing comes back.
    tops = made.masked_fill(made.isneginf(), 0.0)
    shares = [(logits[:, at] - tops[p].unsqueeze(-1)).exp() * grad[p].unsqueeze(-1) for p, at in _held(blocks)]
    found = torch.cat(shares, -1)
    if found.shape[-1]:
        found = found.scatter_add(-1, place.unsqueeze(-1), torch.where(own, grad[target], 0.0).unsqueeze(-1))
    if len(grad) > target + 1:
        of_all = grad[target + 1].unsqueeze(-1)
        found = found + (of_all if weight is None else of_all * weight.to(grad.dtype))
    return found


def _grads(
    x: Tensor, w: Tensor, bias: Tensor | None, own: Tensor, place: Tensor, weight: Tensor | None, made: Tensor,
    grad: Tensor, blocks: Blocks, wanted: Sequence[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    of_x = x.new_empty(x.shape)
    target, tops = len(blocks) // 2, made.masked_fill(made.isneginf(), 0.0)
    # Sums over pieces, which are rounded once.
    of_w, of_b = (w.new_zeros(shape, dtype=made.dtype) for shape in (w.shape, len(w)))
    for part in _pieces(x, w):
        logits = F.linear(x[part], w, bias).to(made.dtype)
        for p, at in _held(blocks):  # as _of_logits, in place
            logits[:, at].sub_(tops[p, part].unsqueeze(-1)).exp_().mul_(grad[p, part].unsqueeze(-1))
        if len(w):
            of_own = torch.where(own[part], grad[target, part], 0.0)
            logits.scatter_add_(-1, place[part].unsqueeze(-1), of_own.unsqueeze(-1))
        if len(grad) > target + 1:
            of_all = grad[target + 1, part].unsqueeze(-1)
            logits += of_all if weight is None else of_all * weight.to(grad.dtype)
        of_logits = logits.to(x.dtype)
        if wanted[0]:
            of_x[part] = of_logits @ w
        if wanted[1]:
            if of_w.dtype is x.dtype:
                of_w.addmm_(of_logits.t(), x[part])
            else:
                of_w += of_logits.t() @ x[part]
        if wanted[2]:
            of_b += of_logits.sum(0, dtype=made.dtype)
    return of_x, of_w.to(w.dtype), of_b.to(w.dtype if bias is None else bias.dtype)


def _grads_fake(x: Tensor, w: Tensor, bias: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), w.new_empty(w.shape), (w if bias is None else bias).new_empty(len(w))


_GIVEN = "Tensor x, Tensor w, Tensor? bias, Tensor own, Tensor place, Tensor? weight"
_SUMS = operator(f"head_sums({_GIVEN}, int[] blocks, bool spread) -> Tensor", _sums, _sums_fake)
_GRADS = operator(
    f"head_grads({_GIVEN}, Tensor made, Tensor grad, int[] blocks, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    _grads, _grads_fake,
)  # fmt: skip
