"""Paddle's ops in terms of ours: one table, op name to a function that builds our call from a case.  Elementwise ops
that have the same name in PyTorch are not in it: its own tags tell.

A builder gets a :class:`Question` (Paddle's inputs, constants and attributes) and returns a :class:`Call`: the name of
our rule and its arguments, with a :class:`Slot` for each tensor, or :class:`Steps`, where it is several of ours
(:mod:`.steps`).  It returns None where Paddle's op, with these attributes, is none of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright.rules.pointwise import is_pointwise

from .question import Call, Question, Result, Slot, Steps

INDEX = torch.int64

Builder = Callable[[Question], Call | Steps | None]
TABLE: dict[str, Builder] = {}


def paddle(*names: str) -> Callable[[Builder], Builder]:
    """Enter a builder for Paddle's ops of these names."""

    def enter(fn: Builder) -> Builder:
        TABLE.update(dict.fromkeys(names, fn))
        return fn

    return enter


# ------------------------------------------------------------------------------------------- elementwise

_UNARY = {
    "assign": "clone", "bernoulli": "bernoulli", "logsigmoid": "log_sigmoid", "swish": "silu",
    "tanh_shrink": "tanhshrink",
    "elementwise_unary": "relu",  # the rule of the whole family
}  # fmt: skip
_BINARY = {
    "elementwise_add": "add", "elementwise_sub": "sub", "elementwise_mul": "mul", "elementwise_div": "div",
    "elementwise_pow": "pow", "elementwise_max": "maximum", "elementwise_min": "minimum",
    "elementwise_mod": "remainder", "greater_than": "gt", "less_than": "lt", "equal": "eq", "not_equal": "ne",
    "elementwise_binary": "maximum",  # the rule of the whole family
}  # fmt: skip
_BITS = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not")
_LOGIC = ("logical_and", "logical_or", "logical_xor", "logical_not")


def _elementwise(name: str, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Builder:
    return lambda q: Call(name, tuple(t.as_(dtype) for t in q.tensors), kwargs)


TABLE.update({theirs: _elementwise(ours) for theirs, ours in (_UNARY | _BINARY).items()})
TABLE.update({name: _elementwise(name, torch.int32) for name in _BITS})
TABLE.update({name: _elementwise(name, torch.bool) for name in _LOGIC})


def builder(op: str) -> Builder | None:
    """The builder for an op of Paddle's: that of the table, or PyTorch's elementwise op of the same name."""
    return TABLE.get(op) or (_elementwise(op) if is_pointwise(op) else None)


TABLE["trunc_divide"] = _elementwise("div", rounding_mode="trunc")


@paddle("clip")
def _clip(q: Question) -> Call:
    return Call("clamp", (q.x, q.attr("min", default=0.0, at=1), q.attr("max", default=1.0, at=2)))


@paddle("pow")
def _pow(q: Question) -> Call:
    return Call("pow", (q.x, q.attr("y", default=2.0, at=1)))


@paddle("thresholded_relu")
def _threshold(q: Question) -> Call:
    return Call("threshold", (q.x, 1.0, 0.0))


@paddle("cast")
def _cast(q: Question) -> Call:
    return Call("to", (q.x, _dtype(q.attr("dtype"))))


@paddle("fill")
def _fill(q: Question) -> Call:
    return Call("fill", (q.x, 0.0))


@paddle("full_like")
def _full_like(q: Question) -> Call:
    return Call("full_like", (q.x, q.attr("value", default=0.0, at=1)))


def _dtype(name: Any) -> torch.dtype:
    return getattr(torch, str(name).removeprefix("paddle."))


@paddle("dropout")
def _dropout(q: Question) -> Call:
    return Call("dropout", (q.x, float(q.attr("p", default=0.5, at=2)), True))


@paddle("where")
def _where(q: Question) -> Call:
    condition, x, y = q.tensors
    return Call("where", (condition.as_(torch.bool), x, y))


@paddle("label_smooth")
def _label_smooth(q: Question) -> Call:
    label, prior = q.tensors
    return Call("lerp", (label, prior, q.attr("epsilon")))


# -------------------------------------------------------------------------------------------- reductions


def _reduction(name: str, dtype: torch.dtype = torch.float32) -> Builder:
    return lambda q: Call(name, (q.x.as_(dtype), q.dims(), q.keepdim))


def _extremum(largest: bool) -> Builder:
    """Ours keeps the reduced dims, of size 1."""

    def build(q: Question) -> Call:
        over = q.dims()
        kept = tuple(d for d in range(q.x.ndim) if q.keepdim or d not in over)
        return Call("extremum", (q.x, over, largest), results=(Result(0, kept, q.x.ndim),))

    return build


TABLE.update(
    {"sum": _reduction("sum"), "reduce_sum": _reduction("sum"), "mean": _reduction("mean")}
    | {"mean_all": _reduction("mean"), "logsumexp": _reduction("logsumexp")}
    | {"any": _reduction("any", torch.bool), "all": _reduction("all", torch.bool)}
    | dict.fromkeys(("max", "amax", "reduce_max"), _extremum(True))
    | dict.fromkeys(("min", "amin"), _extremum(False))
)
_REDUCE_TYPES = ("sum", "max", "min", "prod", "mean", "any", "all")


@paddle("reduce_base")
def _reduce_base(q: Question) -> Call | Steps | None:
    return TABLE[_REDUCE_TYPES[q.attr("reduce_type")]](q)


@paddle("p_norm")
def _p_norm(q: Question) -> Call:
    return Call("linalg_vector_norm", (q.x, q.attr("porder"), q.dims(), q.keepdim))


@paddle("frobenius_norm")
def _frobenius_norm(q: Question) -> Call:
    return Call("linalg_vector_norm", (q.x, 2.0, q.dims(), q.keepdim))


def _position(name: str) -> Builder:
    def build(q: Question) -> Call:
        over = None if q.attr("flatten", default=False) else q.attr("axis", default=-1, at=1)
        return Call(name, (q.x, over, q.keepdim))

    return build


TABLE |= {"argmax": _position("argmax"), "argmin": _position("argmin")}


# -------------------------------------------------------------------------------------- along whole dims


def _along(name: str) -> Builder:
    return lambda q: Call(name, (q.x, q.attr("axis", default=-1, at=1)))


TABLE |= {"softmax": _along("softmax"), "log_softmax": _along("log_softmax")}
TABLE |= {"cummax": _along("cummax"), "cummin": _along("cummin"), "argsort": _along("sort")}


@paddle("topk")
def _topk(q: Question) -> Call:
    return Call("topk", (q.x, q.attr("k", at=1), q.attr("axis", default=-1)))


@paddle("roll")
def _roll(q: Question) -> Call:
    axis = q.attr("axis", default=())
    return Call("roll", (q.x, tuple(q.attr("shifts", at=1)), tuple(axis) or None))


@paddle("triu")
def _triu(q: Question) -> Call:
    return Call("triu", (q.x, q.attr("diagonal", default=0)))


@paddle("tril_triu")
def _tril_triu(q: Question) -> Call:
    return Call("tril" if q.attr("lower", default=True) else "triu", (q.x, q.attr("diagonal", default=0)))


# ------------------------------------------------------------------------------------------ contractions


def _operand(t: Slot, transposed: Any) -> Slot:
    if not transposed or t.ndim < 2:
        return t
    return t.permute([*range(t.ndim - 2), t.ndim - 1, t.ndim - 2])


@paddle("matmul", "matmul_v2", "bmm")
def _matmul(q: Question) -> Call:
    x, y = q.tensors
    left = _operand(x, q.attr("trans_x", "transpose_x"))
    return Call("matmul", (left, _operand(y, q.attr("trans_y", "transpose_y"))))


@paddle("linear_v2", "fused_gemm_epilogue")
def _linear(q: Question) -> Call:
    x, weight, *bias = q.tensors
    weight = _operand(weight, not q.attr("trans_y", "transpose_weight", default=False))
    return Call("linear", (_operand(x, q.attr("trans_x")), weight, *bias), results=(Result(0),))


@paddle("einsum")
def _einsum(q: Question) -> Call:
    return Call("einsum", (q.attr("equation"), q.tensors[0]), results=(Result(0),))


@paddle("conv2d", "conv3d", "depthwise_conv2d")
def _conv(q: Question) -> Call:
    x, weight = q.tensors
    nd = x.ndim - 2
    spread = [q.attr(name, default=[v] * nd) for name, v in (("strides", 1), ("paddings", 0), ("dilations", 1))]
    return Call(f"conv{nd}d", (x, weight, None, *spread, q.attr("groups", default=1)))


@paddle("flash_attention")
def _attention(q: Question) -> Call | None:
    if q.attr("return_softmax", default=False):
        return None
    heads_first = [t.permute((0, 2, 1, 3)) for t in q.tensors[:3]]
    query, key, _ = heads_first
    options = {"is_causal": bool(q.attr("causal")), "enable_gqa": query.shape[1] != key.shape[1]}
    name = "scaled_dot_product_attention"
    return Call(name, (*heads_first, None, 0.0), options, results=(Result(0, (0, 2, 1, 3)),))


@paddle("embedding", "lookup_table_v2")
def _embedding(q: Question) -> Call:
    ids, weight = q.tensors
    padding = q.attr("padding_idx", default=-1)
    return Call("embedding", (weight, ids.as_(INDEX), padding))


@paddle("c_embedding")
def _c_embedding(q: Question) -> Call | None:
    weight, ids = q.tensors
    return Call("embedding", (weight, ids.as_(INDEX))) if not q.attr("start_index") else None


# ----------------------------------------------------------------------------------------- normalisation


@paddle("layer_norm")
def _layer_norm(q: Question) -> Call:
    x, *affine = q.tensors
    normal = x.shape[q.attr("begin_norm_axis", default=1) :]
    return Call("layer_norm", (x, normal, *[t.unflatten(normal) for t in affine]), results=(Result(0),))


@paddle("batch_norm")
def _batch_norm(q: Question) -> Call:
    """The normalised batch; running statistics are another matter."""
    x, _, _, weight, bias = q.tensors
    return Call("batch_norm", (x, weight, bias, None, None, True, 0.1, 1e-5, False), results=(Result(0),))


@paddle("fused_rms_norm")
def _rms_norm(q: Question) -> Call:
    x, *weight = q.tensors
    return Call("rms_norm", (x, x.shape[-1:], *weight), results=(Result(0),))


@paddle("group_norm")
def _group_norm(q: Question) -> Call:
    x, *affine = q.tensors
    return Call("group_norm", (x, q.attr("groups", default=1), *affine), results=(Result(0),))


@paddle("instance_norm")
def _instance_norm(q: Question) -> Call:
    x, *affine = q.tensors
    return Call("instance_norm", (x, *affine, None, None, True, 0.1, 1e-5, False), results=(Result(0),))


def cross_entropy(q: Question) -> Call:
    """The loss; Paddle's other result, the softmax, is not asked for."""
    x, label = q.tensors
    d = q.attr("axis", default=-1) % x.ndim
    rows = [i for i in range(x.ndim) if i != d]
    classes_second = [*rows[:1], d, *rows[1:]]
    shown = tuple(-1 if i == d else rows.index(i) for i in range(x.ndim))
    if q.attr("soft_label", default=False):
        target = label.permute(classes_second)
    elif label.ndim == x.ndim:
        target = label.without(d).as_(INDEX)
    else:
        target = label.as_(INDEX)
    args = (x.permute(classes_second), target, None, 0, q.attr("ignore_index", default=-100))
    return Call("cross_entropy_loss", args, results=(Result(1, shown),))


# ------------------------------------------------------------------------------------------------- views


@paddle("reshape", "reshape2")
def _reshape(q: Question) -> Call:
    shape = q.attr("shape", at=1)
    return Call("reshape", (q.x, tuple(q.x.shape[i] if n == 0 else n for i, n in enumerate(shape))))


@paddle("flatten")
def _flatten(q: Question) -> Call:
    return Call("flatten", (q.x, q.attr("start_axis"), q.attr("stop_axis")), results=(Result(0),))


@paddle("transpose", "transpose2")
def _transpose(q: Question) -> Call:
    return Call("permute", (q.x, tuple(q.attr("perm"))))


@paddle("squeeze")
def _squeeze(q: Question) -> Call:
    return Call("squeeze", (q.x, q.dims()), results=(Result(0),))


@paddle("expand", "expand_as", "expand_as_v2")
def _expand(q: Question) -> Call:
    if len(q.tensors) == 2:
        return Call("expand_as", tuple(q.tensors))
    return Call("expand", (q.x, tuple(q.attr("target_shape", "shape", at=1))))


@paddle("tile")
def _tile(q: Question) -> Call:
    return Call("tile", (q.x, tuple(q.attr("repeat_times", at=1))))


@paddle("pad")
def _pad(q: Question) -> Call:
    given = q.attr("paddings")
    pairs = [given[i : i + 2] for i in range(0, len(given), 2)]
    return Call("constant_pad_nd", (q.x, [n for pair in reversed(pairs) for n in pair]))


# ---------------------------------------------------------------------------------------- pieces and parts


@paddle("concat")
def _concat(q: Question) -> Call:
    return Call("cat", (q.tensors[0], q.attr("axis", default=0, at=1)))


@paddle("stack")
def _stack(q: Question) -> Call:
    return Call("stack", (q.tensors[0], q.attr("axis", default=0)))


@paddle("split")
def _split(q: Question) -> Call:
    return Call("split", (q.x, list(q.attr("sections", at=1)), q.attr("axis", default=0, at=2)))


@paddle("split_with_num")
def _split_with_num(q: Question) -> Call:
    return Call("chunk", (q.x, q.attr("num"), q.attr("axis", default=0, at=1)))


@paddle("unbind")
def _unbind(q: Question) -> Call:
    return Call("unbind", (q.x, q.attr("axis", default=0)))


@paddle("slice", "strided_slice")
def _slice(q: Question) -> Call:
    starts, ends = q.attr("starts", at=1), q.attr("ends", at=2)
    steps = q.attr("strides", default=[1] * len(starts), at=3)
    items: list[Any] = [slice(None)] * q.x.ndim
    for d, start, end, step in zip(q.attr("axes"), starts, ends, steps, strict=True):
        items[d] = slice(start, end, step)
    # Paddle's rule answers before the dims of ``decrease_axis`` (of size 1 by then) are dropped.
    return Call("getitem", (q.x, tuple(items)))


# ---------------------------------------------------------------------------------------------- by index


@paddle("gather", "index_select")
def _gather(q: Question) -> Call:
    x, index = q.tensors
    axis = q.attr("axis", default=0, at=2) % x.ndim
    if index.ndim == 0:
        return Call("getitem", (x, (*[slice(None)] * axis, index.as_(INDEX))))
    return Call("index_select", (x, axis, index.as_(INDEX)))


@paddle("gather_nd")
def _gather_nd(q: Question) -> Call:
    x, index = q.tensors
    return Call("getitem", (x, tuple(index.as_(INDEX).parts())))


@paddle("scatter_nd_add")
def _scatter_nd_add(q: Question) -> Call:
    x, index, updates = q.tensors
    return Call("index_put", (x, index.as_(INDEX).parts(), updates, True))


@paddle("take_along_axis")
def _take_along_axis(q: Question) -> Call:
    x, index = q.tensors
    return Call("gather", (x, q.attr("axis"), index.as_(INDEX)))


@paddle("put_along_axis")
def _put_along_axis(q: Question) -> Call | None:
    x, index, values = q.tensors
    return Call("scatter", (x, q.attr("axis"), index.as_(INDEX), values)) if q.attr("reduce") == "assign" else None


@paddle("index_put")
def _index_put(q: Question) -> Call:
    x, indices, values = q.tensors
    return Call("index_put", (x, [i.as_(INDEX) for i in indices], values, bool(q.attr("accumulate"))))


@paddle("one_hot")
def _one_hot(q: Question) -> Call:
    return Call("one_hot", (q.x.as_(INDEX), q.attr("num_classes", default=1, at=1)))
