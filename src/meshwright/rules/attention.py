"""Attention: batch, heads and queries may be split; each query sees all keys that its mask lets it see.

Of a causal mask over rows that are split, no rank makes its part: its rows see all keys before them without a mask, and
those of its own rows causally.  Such blocks are computed one by one by PyTorch's fused kernel and merged by the log of
the sum of exp(scores), which that kernel gives too.  The backward is the kernel's own, block by block, with the merged
result and sums in place of the block's: then nothing is computed again (Liu et al., Ring Attention, arXiv 2310.01889).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from .. import compat
from ..errors import DispatchError, ExplicitError
from ..generator import dropout
from ..layout import Shard
from ..operators import operator
from ..ranks import runtime
from .core import STRATEGIES, Arg, Local, LocalFn, Rule, notation, rule
from .dims import aligned

Tensor = torch.Tensor
aten = torch.ops.aten
KERNEL: Any = aten._scaled_dot_product_flash_attention_for_cpu
KERNEL_BACKWARD: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward
FUSED = {torch.float64, torch.float32, torch.bfloat16, torch.float16}  # what the kernel of the processor computes in


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
    heads: tuple[Sequence[Any], Sequence[Any]] = [], []
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        if query.shape[-3] % key.shape[-3] or key.shape[-3] != value.shape[-3]:
            return None
        heads = [("h", "g")], ["h"]  # query head i uses key head i // g
        sizes |= {"h": key.shape[-3], "g": query.shape[-3] // key.shape[-3]}
    inputs = {
        query: ["...", *heads[0], "t", "d"], key: ["...", *heads[1], "s", "d"], value: ["...", *heads[1], "s", "e"]
    }  # fmt: skip
    if attn_mask is not None:
        fixed = [*heads[0], "t", "s"]
        lead = ["..."] * (attn_mask.ndim >= len(fixed))
        inputs[attn_mask] = [*lead, *aligned(fixed, attn_mask.shape[-len(fixed) :])]
    moved = _moved(query, key, value, attn_mask, is_causal)
    return notation(
        inputs, ["...", *heads[0], "t", "e"], sizes=sizes, linear=[value], heavy=True, local=_local,
        decompose=partial(_by_heads, moved) if moved else None,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- strategies

STRATEGIES["scaled_dot_product_attention"] = ("gather", "heads")


def _moved(query: Arg, key: Arg, value: Arg, mask: Arg | None, is_causal: bool) -> dict[str, str]:
    """The axes that split the sequence and are to split the heads instead; to each what speaks against it, or nothing.

    To gather, a rank sends its keys and values to all others, and half of its queries to one.  To split heads, it sends
    of all four all but its own part, and has whole rows (DeepSpeed-Ulysses, arXiv 2309.14509).
    """
    given = [t.spec for t in (query, key, value)]
    specs = [s for s in given if s is not None and s.ndim > 2]
    if len(specs) < 3:
        return {}
    mesh, found = specs[0].mesh, dict[str, str]()
    wished = runtime.RT.strategies.get("scaled_dot_product_attention", {})
    q, k, v = (s.nbytes / math.prod(mesh.sizes[a] for d in s.layout.dim_axes().values() for a in d) for s in specs)
    out = q / max(query.shape[-1], 1) * value.shape[-1]
    for a, (axis, n) in enumerate(zip(mesh.axes, mesh.sizes, strict=True)):
        if n == 1 or any(s.layout.placements[a] != Shard(s.ndim - 2) for s in specs):
            continue
        cuts = [n * math.prod(mesh.sizes[b] for b in s.layout.dim_axes().get(s.ndim - 3, ())) for s in specs]
        cuts = [cut * math.prod(mesh.axis_size(b) for b in found) for cut in cuts]
        wrong = next((s for s, cut in zip(specs, cuts, strict=True) if s.shape[-3] % cut or not s.nbytes), None)
        gather, heads = (n - 1) * (k + v) + (q + out) / 2 * is_causal, (n - 1) / n * (q + k + v + out)
        if mask is not None and mask.spec is not None and mask.spec.layout.placements[a] == Shard(mask.ndim - 2):
            heads += (n - 1) / n * mask.spec.nbytes
        wish = wished.get(axis)
        if wish == "heads" and wrong is not None:
            found[axis] = f"{wrong.shape[-3]} heads cannot be split evenly over {axis!r} of {n} ranks"
        elif wrong is None and (wish == "heads" or (wish is None and heads < gather)):
            found[axis] = ""
    return found


def _by_heads(
    moved: Mapping[str, str], query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    wrong = next(filter(None, moved.values()), None)
    if wrong is not None:
        raise DispatchError(f"the strategy 'heads': {wrong}: leave the choice to the bytes, or say 'gather'")
    if runtime.RT.explicit:
        axes = ", ".join(moved)
        raise ExplicitError(
            f"scaled_dot_product_attention would split its heads over {axes} in place of the sequence. Inside "
            "mw.explicit() this must be asked for: mw.reshard(q, placements) before the call, and of k and v"
        )
    bring = torch.ops.meshwright.constrain

    def laid(t: Tensor, dim: int) -> Tensor:
        made: Tensor = bring(t, ";".join(f"{axis}=Shard({t.ndim + dim})" for axis in moved))
        return made

    query, key, value = (laid(t, -3) for t in (query, key, value))
    made = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return laid(made, -2)


def _local(ctx: Local) -> LocalFn:
    shape, offset = ctx.place()
    here = ctx.out_shape()
    (first, last), keys = (offset[-2], offset[-2] + here[-2]), ctx.inputs[1].shape[-2]
    causal_split = (first, last) != (0, shape[-2])
    trade = _trade(ctx, shape[-2], keys) if causal_split else None
    at = (*shape[:-1], keys), (*offset[:-1], 0)
    empty = 0 in here and 0 not in shape  # where all is empty, PyTorch keeps nothing for the backward

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
            if dropout_p == 0.0 and _in_blocks(query, key, value):
                given = (key, value, scale, enable_gqa)
                if trade is not None and not runtime.RT.explicit:  # there nothing is sent that nobody asked for
                    return trade(query, *given)
                return _attend(query, *given, causal(first, 0, last - first, keys))
            # The mask of these rows of the whole: row i sees the keys up to i.
            attn_mask = torch.ones(query.shape[-2], keys, dtype=torch.bool, device=query.device).tril(first)
            is_causal = False
        if dropout_p > 0.0 or empty:
            return dropout.attention(
                at, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        return compat.C_NN.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return attend


def _trade(ctx: Local, rows: int, keys: int) -> Callable[..., Tensor] | None:
    """Attention of this part of the rows in which all ranks do the same work; None where parts are not even.

    Later rows see more keys.  So the second half of each part goes to the rank whose part lies as far from the end
    as it lies from the start, and the result comes back.
    """
    axes, parts = ctx.axes("t"), ctx.parts("t")
    n = len(parts)
    if rows != keys or rows % (2 * n):
        return None
    half, targets = rows // (2 * n), [parts.index(n - 1 - p) for p in parts]
    own = ctx.bounds("t")[0] // (2 * half)
    near, far = 2 * own * half, (2 * (n - 1 - own) + 1) * half
    blocks = [*causal(near, 0, half, keys), *causal(far, half, half, keys)]

    def send(x: Tensor) -> Tensor:
        kept, given = x.split(half, -2)
        return torch.cat([kept, ctx.permute(given, axes, targets, _WHY)], -2)

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, grouped: bool) -> Tensor:
        return send(_attend(send(query), key, value, scale, grouped, blocks))

    return attend


_WHY = "halves of causal rows are traded, so that all ranks have the same work"


# ---------------------------------------------------------------------------------------------- blocks


class Tile(NamedTuple):
    """Some rows of the scores: local rows ``start:stop`` see the keys ``first:last``, all or causally.

    Causally: the i-th row sees the first i + 1 of these keys.
    """

    start: int
    stop: int
    first: int
    last: int
    causal: int


def causal(row: int, start: int, rows: int, keys: int) -> list[Tile]:
    """The blocks of a causal mask of which rows from ``row`` on lie at local rows from ``start`` on."""
    before, own = min(row, keys), min(row + rows, keys)
    blocks = [Tile(start, start + rows, 0, before, 0), Tile(start, start + rows, before, own, 1)]
    return [b for b in blocks if b.first < b.last]


def _in_blocks(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel whose sums and backward can be had takes these, and is not switched off."""
    alike = query.dtype in FUSED and query.shape[-1] == value.shape[-1] and torch.backends.cuda.flash_sdp_enabled()
    return query.device.type == "cpu" and alike and 0 not in (*query.shape, *key.shape)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, grouped: bool, blocks: Sequence[Tile]
) -> Tensor:
    """Attention of some rows over blocks, each row in one of them at least; heads of keys may serve several queries."""
    kept = 3 if grouped else 2  # dims that do not broadcast
    given = (query, key, value)
    lead = torch.broadcast_shapes(*[t.shape[:-kept] for t in given])
    # Aliases: what is given are distributed tensors again when the backward runs.
    own = [t.expand(*lead, *t.shape[-kept:]) for t in given]
    own = [t[(None,) * (4 - t.ndim)] if t.ndim < 4 else t.flatten(0, -4) for t in own]
    made: Tensor = _Blocks.apply(*own, [n for b in blocks for n in b], scale)
    return made.reshape(*lead, *query.shape[-kept:-1], value.shape[-1])


class _Blocks(torch.autograd.Function):
    """Keeps what it was given, the result, and of each row the log of its sum."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: list[int], scale: float | None) -> Tensor:
        made, sums = _FORWARD(query, key, value, blocks, scale)
        ctx.save_for_backward(query, key, value, made, sums)
        ctx.blocks, ctx.scale = blocks, scale
        return cast(Tensor, made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, made, sums = ctx.saved_tensors
        if torch.is_grad_enabled():  # of ops that can be differentiated again, with all scores
            return *_dense_grads(grad, query, key, value, _read(ctx.blocks), ctx.scale), None, None
        return *_BACKWARD(grad, query, key, value, made, sums, ctx.blocks, ctx.scale), None, None


def _read(blocks: Sequence[int]) -> list[Tile]:
    return [Tile(*blocks[i : i + 5]) for i in range(0, len(blocks), 5)]


def _forward(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[int], scale: float | None
) -> tuple[Tensor, Tensor]:
    result, sums = _forward_fake(query, key, value, blocks, scale)
    made, merged = result.to(sums.dtype), set[tuple[int, int]]()
    for b in _read(blocks):
        rows, keys = slice(b.start, b.stop), slice(b.first, b.last)
        own, own_sums = KERNEL(query[:, :, rows], key[:, :, keys], value[:, :, keys], 0.0, bool(b.causal), scale=scale)
        if (b.start, b.stop) in merged:
            before = sums[:, :, rows]
            total = torch.logaddexp(before, own_sums)
            made[:, :, rows] *= (before - total).exp_().unsqueeze(-1)
            own, own_sums = own * (own_sums - total).exp_().unsqueeze(-1), total
            made[:, :, rows] += own
        else:
            made[:, :, rows] = own
            merged.add((b.start, b.stop))
        sums[:, :, rows] = own_sums
    return made.to(result.dtype), sums


def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[int], scale: float | None
) -> tuple[Tensor, Tensor]:
    made = query.new_empty(*query.shape[:-1], value.shape[-1])
    return made, query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, made: Tensor, sums: Tensor, blocks: Sequence[int],
    scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    given = (query, key, value)
    found = [t.new_zeros(t.shape, dtype=sums.dtype) for t in given]  # sums over blocks, which are rounded once
    for b in _read(blocks):
        rows, keys = slice(b.start, b.stop), slice(b.first, b.last)
        places = (rows, keys, keys)
        own = KERNEL_BACKWARD(
            grad[:, :, rows], *[t[:, :, at] for t, at in zip(given, places, strict=True)], made[:, :, rows],
            sums[:, :, rows], 0.0, bool(b.causal), scale=scale,
        )  # fmt: skip
        for total, part, at in zip(found, own, places, strict=True):
            total[:, :, at] += part
    return tuple(total.to(t.dtype) for total, t in zip(found, given, strict=True))


def _backward_fake(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (query, key, value))


def _dense_grads(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Tile], scale: float | None
) -> Iterator[Tensor]:
    """The gradients from all scores: what :func:`_backward` gives, differentiable."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    seen = torch.zeros(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
    for b in blocks:
        part = torch.ones(b.stop - b.start, b.last - b.first, dtype=torch.bool, device=query.device)
        seen[b.start : b.stop, b.first : b.last] = part.tril() if b.causal else part
    shape = (key.shape[1], query.shape[1] // key.shape[1])
    query, grad = (t.unflatten(1, shape) for t in (query, grad))
    key, value = key.unsqueeze(2), value.unsqueeze(2)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~seen, -math.inf)
    weights = torch.softmax(scores, -1)
    of_weights = grad @ value.transpose(-1, -2)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    yield (of_scores @ key).flatten(1, 2)
    yield (of_scores.transpose(-1, -2) @ query).sum(2)
    yield (weights.transpose(-1, -2) @ grad).sum(2)


_GIVEN = "Tensor query, Tensor key, Tensor value"
_FORWARD = operator(
    f"attention_blocks({_GIVEN}, int[] blocks, float? scale) -> (Tensor, Tensor)", _forward, _forward_fake
)
_BACKWARD = operator(
    f"attention_blocks_backward(Tensor grad, {_GIVEN}, Tensor made, Tensor sums, int[] blocks, float? scale) -> "
    "(Tensor, Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip
