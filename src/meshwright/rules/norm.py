"""Normalisations.  Where the dims of the statistics are split, only the statistics are exchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from ..errors import RuleError
from ..layout import Partial
from ..operators import internal, part_of
from .dims import names
from .factor_notation import Arg, Letters, Local, LocalFn, Rule, lines, notation, rule

Tensor = torch.Tensor
HALF = (torch.float16, torch.bfloat16)


def _standardised(x: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / std over ``dims``, the mean and the (biased) variance, which keep the dims.

    The second pass over centred values is as exact as one device's; a single exchange of sums and sums of
    squares would cancel.
    """
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    var = (centred * centred).mean(dims, keepdim=True)
    return centred * torch.rsqrt(var + eps), mean, var


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


# --------------------------------------------------------------------------------------------- over last dims


def over_last(x: Arg, shape: Sequence[int], *params: Arg | None, decompose: Any) -> Rule:
    """The normalised dims are whole, or their statistics are sums over parts; jointly linear in the parameters."""
    d = names("n", shape)
    inputs: dict[Any, Letters] = {x: ["...", *d], **dict.fromkeys(params, d)}
    return notation(inputs, ["...", *d], whole=d, linear=_affinely(*params), decompose=decompose)


def _affinely(weight: Arg | None, bias: Arg | None = None) -> list[list[Arg | None]]:
    """Linear in weight and bias, or not: without a weight the rest is added to the bias."""
    return [[weight, bias]] if weight is not None else []


def _layer_norm_by_sums(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    *rest: Any,
) -> Tensor:  # fmt: skip
    made, _, _ = _standardised(_wide(x), tuple(range(-len(shape), 0)), eps)
    return _affine(made, weight, bias).to(x.dtype)


def _rms_norm_by_sums(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    wide = _wide(x)
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    square = (wide * wide).mean(tuple(range(-len(normalized_shape), 0)), keepdim=True)
    return _affine(wide * torch.rsqrt(square + eps), weight, None).to(x.dtype)


# --------------------------------------------------------------------------------------------- over the batch


lines({
    "layer_norm F.layer_norm": lambda x, shape, weight=None, bias=None, *rest: over_last(
        x, shape, weight, bias, decompose=_layer_norm_by_sums
    ),
    "rms_norm F.rms_norm": lambda x, shape, weight=None, eps=None: over_last(
        x, shape, weight, decompose=_rms_norm_by_sums
    ),
})  # fmt: skip


# --------------------------------------------------------------------------------------------- over the batch


@rule("batch_norm")
def batch_norm(
    x: Arg, weight: Arg | None, bias: Arg | None, running_mean: Arg | None, running_var: Arg | None, training: bool,
    *rest: Any,
) -> Rule | None:  # fmt: skip
    """In training the statistics are those of the global batch; otherwise everything is free."""
    if x.ndim < 2:
        return None
    b, c, *spatial = dims = ["b", "c", *names("s", x.shape[2:])]
    inputs: dict[Any, Letters] = {x: dims, **{t: [c] for t in (weight, bias, running_mean, running_var)}}
    local = _in_one_dtype(x, weight, bias, running_mean, running_var)
    if not training:
        return notation(inputs, dims, linear=_affinely(weight, bias), padded=True, local=local)
    _refuse_partial((running_mean, running_var), "batch_norm")
    # The op writes to the running statistics: a slice of a replicated one must not be written to alone.
    whole = dims if running_mean is not None else [b, *spatial]
    return notation(inputs, dims, whole=whole, padded=True, decompose=_BATCH, local=local)


def _in_one_dtype(x: Arg, *others: Arg | None) -> Callable[[Local], LocalFn] | None:
    """A batch norm of dtypes that the kernel refuses together; None where the kernel takes them.

    The kernel takes one dtype, or a half one with float32.  ``compute=`` casts weights and not buffers.
    """
    dtypes = {t.dtype for t in others if t is not None}
    if dtypes <= {x.dtype} or (x.dtype in HALF and dtypes == {torch.float32}):
        return None
    wide = reduce(torch.promote_types, dtypes, x.dtype)
    own = x.dtype if x.dtype in HALF and wide is torch.float32 else wide

    def run(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
        running_var: Tensor | None, training: bool, *rest: Any,
    ) -> Tensor:  # fmt: skip
        weight, bias = (None if t is None else t.to(wide) for t in (weight, bias))
        mean, var = (None if t is None else t.to(wide) for t in (running_mean, running_var))
        made = torch.batch_norm(x.to(own), weight, bias, mean, var, training, *rest)
        for t, now in ((running_mean, mean), (running_var, var)):
            if training and t is not None and now is not None and now is not t:
                with torch.no_grad():
                    t.copy_(now)
        return made.to(x.dtype)

    return lambda ctx: run


def _refuse_partial(running: Sequence[Arg | None], op: str) -> None:
    """Running statistics are written to: what a conversion gives would be written to, and lost."""
    for t in running:
        if t is not None and t.spec is not None and any(isinstance(p, Partial) for p in t.spec.layout.placements):
            raise RuleError(
                f"{op} cannot update running statistics of layout {t.spec.layout!r}; "
                "make them replicated first: mw.reshard(buffer, mw.Replicate())"
            )


def _by_channel_sums(over: Callable[[int], tuple[int, ...]]) -> Callable[..., Tensor]:
    """A norm with one weight and one running statistic per channel, over the dims that ``over`` names."""

    def run(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
        running_var: Tensor | None, training: bool, momentum: float, eps: float, *rest: Any,
    ) -> Tensor:  # fmt: skip
        dims = over(x.ndim)
        made, mean, var = _standardised(_wide(x), dims, eps)
        count = math.prod(x.shape[d] for d in dims)
        mean, var = (t.detach() if 0 in dims else t.detach().mean(0) for t in (mean, var))
        if x.shape.numel():  # as PyTorch: nothing is learned of nothing
            _update(running_mean, mean, momentum)
            _update(running_var, var * (count / max(count - 1, 1)), momentum)
        return _per_channel(made, weight, bias).to(x.dtype)

    return run


_BATCH = _by_channel_sums(lambda ndim: (0, *range(2, ndim)))
_INSTANCE = _by_channel_sums(lambda ndim: tuple(range(2, ndim)))


def _per_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = (-1, *(1,) * (x.ndim - 2))
    weight, bias = (None if t is None else t.reshape(shape) for t in (weight, bias))
    return _affine(x, weight, bias)


def _update(running: Tensor | None, now: Tensor, momentum: float) -> None:
    """running = (1 - momentum) running + momentum now, in place, the same on every rank."""
    if running is None:
        return
    with torch.no_grad():
        now = now.flatten().to(running.dtype)
        if "_spec" in running.__dict__:
            running.mul_(1 - momentum).add_(now, alpha=momentum)
        else:
            blend_running(now, running, momentum)


@part_of("batch_norm", "batch statistics", "running statistics")
@internal
def blend_running(now: Tensor, running: Tensor, momentum: float) -> Tensor:
    """Update a plain buffer, which stays plain."""
    running.mul_(1 - momentum).add_(now, alpha=momentum)
    return now.new_zeros(())


@rule("blend_running")
def _blend_running(now: Arg, running: Arg, momentum: float) -> Rule:
    return notation("c, c ->", now, running, whole="c")


# ---------------------------------------------------------------------------------------------- over groups


@rule("group_norm")
def group_norm(x: Arg, num_groups: int, weight: Arg | None = None, bias: Arg | None = None, *rest: Any) -> Rule:
    """Groups are free where a split of the channels respects them."""
    spatial, each = names("s", x.shape[2:]), x.shape[1] // num_groups
    channels = [("g", "c")]

    def local(ctx: Local) -> LocalFn | None:
        def run(x: Tensor, num_groups: int, *args: Any, **named: Any) -> Tensor:
            return torch.group_norm(x, x.shape[1] // each, *args, **named)

        return run if ctx.is_split("g") else None

    return notation(
        {x: ["b", *channels, *spatial], weight: channels, bias: channels}, ["b", *channels, *spatial],
        sizes={"g": num_groups, "c": each}, whole=["c", *spatial, *(() if each else ("g",))],
        linear=_affinely(weight, bias), padded=True, local=local, decompose=_group_norm_by_sums,
    )  # fmt: skip


def _group_norm_by_sums(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *rest: Any
) -> Tensor:
    wide = _wide(x).unflatten(1, (num_groups, -1))
    made, _, _ = _standardised(wide, tuple(range(2, wide.ndim)), eps)
    return _per_channel(made.flatten(1, 2), weight, bias).to(x.dtype)


@rule("instance_norm")
def instance_norm(
    x: Arg, weight: Arg | None, bias: Arg | None, running_mean: Arg | None, running_var: Arg | None,
    use_input_stats: bool, *rest: Any,
) -> Rule | None:  # fmt: skip
    """Batch and channels are free, positions too where running statistics are used instead."""
    updates = use_input_stats and running_mean is not None  # with a mean over the batch
    if updates:
        _refuse_partial((running_mean, running_var), "instance_norm")
    dims = ["b", "c", *names("s", x.shape[2:])]
    return notation(
        {x: dims, **{t: ["c"] for t in (weight, bias, running_mean, running_var)}}, dims,
        whole=dims if updates else dims[2:] if use_input_stats else [], linear=_affinely(weight, bias), padded=True,
        decompose=_INSTANCE,
    )  # fmt: skip
