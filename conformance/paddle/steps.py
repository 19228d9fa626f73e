"""Paddle's ops that are several of PyTorch's: each as the calls that a program of PyTorch's would make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .ops import INDEX, builder, cross_entropy, paddle
from .question import Call, Fresh, Made, Question, Slot, Steps

__all__ = ["builder"]


@paddle("squared_l2_norm")
def _squared_l2_norm(q: Question) -> Steps:
    do = Steps()
    return do.gives(0, do("sum", do("square", q.x)))


@paddle("stanh")
def _stanh(q: Question) -> Steps:
    do = Steps()
    inner = do("mul", q.x, q.attr("scale_a", default=0.67))
    return do.gives(0, do("mul", do("tanh", inner), q.attr("scale_b", default=1.7159)))


@paddle("scale")
def _scale(q: Question) -> Call | Steps:
    factor, bias = q.attr("scale", default=1.0, at=1), q.attr("bias", default=0.0)
    if not bias:
        return Call("mul", (q.x, factor))
    do = Steps()
    if q.attr("bias_after_scale", default=True):
        return do.gives(0, do("add", do("mul", q.x, factor), bias))
    return do.gives(0, do("mul", do("add", q.x, bias), factor))


@paddle("add_n")
def _add_n(q: Question) -> Call | Steps:
    first, *rest = q.tensors[0]
    if len(rest) < 2:
        return Call("add", (first, *rest)) if rest else Call("clone", (first,))
    do = Steps()
    total: Slot | Made = first
    for t in rest:
        total = do("add", total, t)
    assert isinstance(total, Made)
    return do.gives(0, total)


@paddle("swiglu")
def _swiglu(q: Question) -> Steps:
    do = Steps()
    gate, *up = q.tensors
    if not up:
        half = do("chunk", gate, 2, -1)
        gate, up = half, [Made(half.step, 1)]
    return do.gives(0, do("mul", do("silu", gate), up[0]))


@paddle("fused_dropout_add")
def _fused_dropout_add(q: Question) -> Steps:
    x, y = q.tensors[:2]
    do = Steps()
    return do.gives(0, do("add", do("dropout", x, 0.5, True), y))


@paddle("cumsum")
def _cumsum(q: Question) -> Call | Steps:
    axis = q.attr("axis", default=-1, at=1)
    flat, exclusive, reverse = (bool(q.attr(name)) for name in ("flatten", "exclusive", "reverse"))
    if not (flat or exclusive or reverse):
        return Call("cumsum", (q.x, axis))
    do = Steps()
    x: Any = do("flatten", q.x) if flat else q.x
    axis = 0 if flat else axis
    x = do("flip", x, (axis,)) if reverse else x
    total = do("cumsum", x, axis)
    total = do("sub", total, x) if exclusive else total
    return do.gives(0, do("flip", total, (axis,)) if reverse else total)


@paddle("prod")
def _prod(q: Question) -> Call | Steps:
    """Of one dim or of all, as PyTorch has it, the piece of the composition that a split dim leads to; else in turn."""
    over = q.dims()
    if len(over) == 1 or len(over) == q.x.ndim:
        return Call("partial_prod", (q.x, over[0] if len(over) == 1 else None, q.keepdim, None))
    do = Steps()
    x: Any = q.x
    for d in sorted(over, reverse=True):
        x = do("partial_prod", x, d, q.keepdim, None)
    return do.gives(0, x)


@paddle("scatter")
def _scatter(q: Question) -> Call | Steps:
    """Rows put in place; without ``overwrite`` rows that are hit start from zero and add up."""
    x, index, updates = q.tensors
    index = index.as_(INDEX)
    if q.attr("overwrite", default=True):
        return Call("index_copy", (x, 0, index, updates))
    do = Steps()
    return do.gives(0, do("index_add", do("index_fill", x, 0, index, 0.0), 0, index, updates))


@paddle("moe_combine")
def _moe_combine(q: Question) -> Steps:
    x, weight, index = q.tensors
    do = Steps()
    rows = do("index", x, [index.as_(INDEX)])
    return do.gives(0, do("sum", do("mul", rows, do("unsqueeze", weight, -1)), 1))


@paddle("fused_linear_param_grad_add")
def _fused_linear_param_grad_add(q: Question) -> Steps:
    x, grad, weight, *bias = q.tensors
    do = Steps()
    do.gives(0, do("add", do("einsum", "bsi,bso->io", [x, grad]), weight))
    if q.attr("has_bias"):
        do.gives(1, do("add", do("sum", grad, (0, 1)), bias[0]))
    return do


@paddle("unsqueeze", "unsqueeze2")
def _unsqueeze(q: Question) -> Call | Steps:
    axis = q.attr("axis", at=1)
    dims = [axis] if isinstance(axis, int) else list(axis)
    if len(dims) == 1:
        return Call("unsqueeze", (q.x, dims[0]))
    if q.backward:
        shape = list(q.x.shape)
        for d in dims:
            shape.insert(d % (len(shape) + 1), 1)
        return Call("reshape", (q.x, tuple(shape)))
    do = Steps()
    x: Any = q.x
    for d in dims:
        x = do("unsqueeze", x, d)
    return do.gives(0, x)


@paddle("cross_entropy_with_softmax", "softmax_with_cross_entropy", "c_softmax_with_cross_entropy")
def _cross_entropy(q: Question) -> Call | Steps:
    """With ``use_softmax`` one op of PyTorch's; else of probabilities."""
    if q.attr("use_softmax", default=True):
        return cross_entropy(q)
    inside = cross_entropy(q)
    x, target, *rest = inside.args
    do = Steps()
    if q.attr("soft_label", default=False):
        d = q.attr("axis", default=-1) % x.ndim
        label = q.tensors[1]
        return do.gives(1, do("neg", do("sum", do("mul", do("log", q.x), label), d, True)))
    assert inside.results is not None
    return do.gives(1, do("nll_loss_nd", do("log", x), target, *rest), inside.results[0].dims)


@paddle("c_softmax_with_multi_label_cross_entropy")
def _multi_label(q: Question) -> Steps:
    """Several labels a row, each with a weight; with ``sum_multi_label_loss`` their losses add up."""
    x, label, weight = q.tensors
    label = label.as_(INDEX)
    do = Steps()
    logs = do("log_softmax", x, -1)
    loss = do("mul", do("neg", do("gather", logs, -1, label)), weight)
    loss = do("masked_fill", loss, do("eq", label, q.attr("ignore_index", default=-100)), 0.0)
    return do.gives(1, do("sum", loss, -1, True) if q.attr("sum_multi_label_loss") else loss)


@paddle("fused_rotary_position_embedding")
def _rotary(q: Question) -> Steps:
    """Of up to three tensors; sines and cosines are given, or made anew on every rank."""
    x, sin, cos, ids = q.x, *q.tensors[3:6]
    rows = 0 if q.attr("time_major") else 1
    do = Steps()
    turns = [_turn(do, t, ids, x, rows) for t in (sin, cos)]
    for i, t in enumerate(q.tensors[:3]):
        if t.shape != (0,):
            do.gives(i, _rotated(do, t, *turns, every_two=bool(q.attr("use_neox_rotary_style"))))
    return do


def _turn(do: Steps, given: Slot, ids: Slot, x: Slot, rows: int) -> Slot | Made | Fresh:
    """Sines or cosines, as they broadcast with ``x``: of shape 1 x positions x 1 x d, or the rows that ids name."""
    if given.shape == (0,):
        shape = [1, 1, 1, x.shape[-1]]
        shape[rows] = x.shape[rows]
        return Fresh(tuple(shape))
    if ids.shape != (0,):
        picked = do("index", given.without(2).without(0), [ids.as_(INDEX)])
        picked = do("transpose", picked, 0, 1) if rows == 0 else picked
        return do("unsqueeze", picked, 2)
    return given.permute((1, 0, 2, 3)) if rows == 0 else given


def _rotated(do: Steps, x: Slot, sin: Any, cos: Any, *, every_two: bool) -> Made:
    d = x.shape[-1]
    if every_two:  # pairs of neighbours
        pairs = do("unflatten", x, -1, (d // 2, 2))
        even, odd = (do("select", pairs, -1, i) for i in (0, 1))
        turned = do("flatten", do("stack", [do("neg", odd), even], -1), -2)
    else:  # the first half with the second
        half = do("chunk", x, 2, -1)
        turned = do("cat", [do("neg", Made(half.step, 1)), half], -1)
    return do("add", do("mul", x, cos), do("mul", turned, sin))


@paddle("replicated")
def _replicated(q: Question) -> Call:
    """What both do with an op that has no rule: everything whole on every rank."""
    given, made = [q.tensors[0], q.tensors[1]] if len(q.tensors) > 1 else [q.tensors[0], []]
    return Call("", (given,), {"outputs": [tuple(t.shape) for t in _listed(made)]})


def _listed(tensors: Any) -> Sequence[Slot]:
    return tensors if isinstance(tensors, list) else [tensors]
