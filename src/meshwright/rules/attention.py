"""Attention: batch, heads and queries may be split; each query sees all keys that its mask lets it see.

Of a causal mask over rows that are split, no rank makes its part: its rows see all keys before them without a mask, and
those of its own rows causally (:mod:`.blocks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .. import compat
from ..errors import DispatchError, ExplicitError
from ..generator import dropout
from ..generator.attention import fits
from ..layout import Shard
from ..ranks import runtime
from . import attention_blocks as blocks
from .attention_blocks import QueryRows, flat, in_blocks
from .attention_kernels import TABLE, HeadSizes
from .dims import aligned
from .factor_notation import (
    ACCEPTS_MAX_BYTES,
    APPLIES_TO,
    IMPLEMENTATIONS,
    Arg,
    Local,
    LocalFn,
    RequestedStrategy,
    Rule,
    notation,
    rule,
)
from .head_groups import Attend, Bounds, bounded, in_groups, sequence_axes

Tensor = torch.Tensor


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
    moved = ulysses_axes("scaled_dot_product_attention", query, key, value, 0.5 * is_causal, attn_mask)
    without = "attn_mask" if attn_mask is not None else "dropout_p" if dropout_p > 0.0 else ""
    bounds, joint = bounded("scaled_dot_product_attention", query, key, value, moved, without)
    return notation(
        inputs, ["...", *heads[0], "t", "e"], sizes=sizes, linear=[value], heavy=True, local=partial(_local, bounds),
        joint=joint, decompose=ulysses(moved, torch.nn.functional.scaled_dot_product_attention),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- strategies

IMPLEMENTATIONS["scaled_dot_product_attention"] = ("gather", "heads")
APPLIES_TO |= dict.fromkeys(("scaled_dot_product_attention", "attention"), "the sequences of q, k and v")
ACCEPTS_MAX_BYTES |= {"scaled_dot_product_attention", "attention"}


def ulysses_axes(
    op: str, query: Arg, key: Arg, value: Arg, shared: float, mask: Arg | None = None, reach: int | None = None
) -> dict[str, str]:
    """The axes that split the sequence and are to split the heads instead; to each what speaks against it, or nothing.

    To gather, a rank sends its keys and values to all others, and ``shared`` of its queries and results, so that all
    have the same work; -1: all but 1/n.  To split heads, it sends of all four all but its own part, and has whole rows
    (DeepSpeed-Ulysses, arXiv 2309.14509).  With ``reach`` a rank needs only so many keys before its own.
    """
    given = [t.spec for t in (query, key, value)]
    specs = [s for s in given if s is not None and s.ndim > 2]
    if len(specs) < 3:
        return {}
    mesh, found = specs[0].mesh, dict[str, str]()
    requested_strategy = runtime.RT.strategies.get(op, {})
    q, k, v = (s.nbytes / math.prod(mesh.sizes[a] for d in s.layout.dim_axes().values() for a in d) for s in specs)
    out = q / max(query.shape[-1], 1) * value.shape[-1]
    for a, _ in sequence_axes(query, key, value):
        axis, n = mesh.axes[a], mesh.sizes[a]
        runtime.RT.met.add((op, axis))
        cuts = [n * math.prod(mesh.sizes[b] for b in s.layout.dim_axes().get(s.ndim - 3, ())) for s in specs]
        cuts = [cut * math.prod(mesh.axis_size(b) for b in found) for cut in cuts]
        wrong = next((s for s, cut in zip(specs, cuts, strict=True) if s.shape[-3] % cut or not s.nbytes), None)
        sent = (n - 1) / n if shared < 0 else shared
        others = n - 1.0 if reach is None else min(n - 1, reach * n / max(key.shape[-2], 1))
        gather, heads = others * (k + v) + (q + out) * sent, (n - 1) / n * (q + k + v + out)
        if mask is not None and mask.spec is not None and mask.spec.layout.placements[a] == Shard(mask.ndim - 2):
            heads += (n - 1) / n * mask.spec.nbytes
        wish = RequestedStrategy.of(requested_strategy.get(axis, "")).name
        if wish == "heads" and wrong is not None:
            found[axis] = f"{wrong.shape[-3]} heads cannot be split evenly over {axis!r} of {n} ranks"
        elif wrong is None and (wish == "heads" or (not wish and heads < gather)):
            found[axis] = ""
    return found


def ulysses(moved: Mapping[str, str], call: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
    """The op as a composition that splits heads, with what attends whole rows; None where no axis is to."""
    return partial(_by_heads, moved, call) if moved else None


def _by_heads(
    moved: Mapping[str, str], call: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *rest: Any,
    **named: Any,
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

    return laid(call(*(laid(t, -3) for t in (query, key, value)), *rest, **named), -2)


def _local(bounds: Bounds | None, ctx: Local) -> LocalFn:
    shape, offset = ctx.place()
    here = ctx.out_shape()
    (first, last), keys = (offset[-2], offset[-2] + here[-2]), ctx.inputs[1].shape[-2]
    causal_split = (first, last) != (0, shape[-2])
    grouped = in_groups(ctx, bounds)
    trade = _trade(ctx, shape[-2], keys, grouped or blocks.attend) if causal_split else None
    if grouped is not None:
        assert bounds is not None
        if bounds.name == "heads":  # a group has all rows
            first, last, trade = 0, shape[-2], None
        return partial(_in_groups, grouped, (0, first, last - first), trade)
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
        few = dropout_p > 0.0 or empty or fits(query, key)  # scores that may be computed at once
        in_tiles = dropout_p == 0.0 and attn_mask is None and in_blocks(query, key, value)
        # Also where this rank has no sequences: others send.  Inside mw.explicit() nothing unasked is sent.
        if in_tiles and trade is not None and is_causal and 0 not in shape and not runtime.RT.explicit:
            return trade(query, key, value, scale, enable_gqa)
        tiled = (is_causal and causal_split) or not (few or computed_by_kernel(query, key, value))
        if in_tiles and tiled and key.numel() and query.numel():
            which = QueryRows((0, first, last - first), causal=is_causal)
            return _attend(query, key, value, scale, enable_gqa, which, blocks.attend)
        if dropout_p > 0.0 or empty or not (few or computed_by_kernel(query, key, value, attn_mask)):
            return dropout.attention(
                at, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa, first=first
            )
        if is_causal and causal_split:
            # The mask of these rows of the whole: row i sees the keys up to i.
            own = torch.ones(query.shape[-2], keys, dtype=torch.bool, device=query.device).tril(first)
            attn_mask, is_causal = own if attn_mask is None else both(own, attn_mask), False
        return compat.C_NN.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return attend


def both(seen: Tensor, mask: Tensor) -> Tensor:
    """A mask of what both let see; the second may be added to scores."""
    return seen & mask if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)


def computed_by_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> bool:
    """Whether PyTorch computes these by a kernel, and not from all scores at once."""
    given = HeadSizes(query.device.type, query.dtype, 1, 1, query.shape[-1], value.shape[-1])
    which = [k for k in TABLE if k.device == given.device and not any(k.refusals(given))]
    if mask is not None:
        which = [k for k in which if k.masked and not (mask.requires_grad and k.device == "cpu")]
    return query.ndim == key.ndim == 4 and given.size == given.value_size and bool(which)


def _in_groups(
    grouped: Attend, spans: tuple[int, ...], trade: Callable[..., Tensor] | None, query: Tensor, key: Tensor,
    value: Tensor, attn_mask: None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if trade is not None and is_causal:
        return trade(query, key, value, scale, enable_gqa)
    return _attend(query, key, value, scale, enable_gqa, QueryRows(spans, causal=is_causal), grouped)


def _trade(ctx: Local, rows: int, keys: int, attended: Attend) -> Callable[..., Tensor] | None:
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
    spans = (0, near, half, half, far, half)

    before = shares([(2 * p + 1) / n for p in parts])
    why = f"halves of causal rows are traded: work per rank {shares([1.0] * n)}, and without it {before}"

    def send(x: Tensor) -> Tensor:
        kept, given = x.split(half, -2)
        return torch.cat([kept, ctx.comm.permute(given, axes, targets, why)], -2)

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, grouped: bool) -> Tensor:
        return send(_attend(send(query), key, value, scale, grouped, QueryRows(spans), attended))

    return attend


def shares(work: Sequence[float]) -> str:
    """Work of the ranks in a line, as parts of the mean."""
    mean = sum(work) / len(work) or 1.0
    told = " ".join(f"{w / mean:.2f}" for w in work[:8])
    return f"{told}{' ...' if len(work) > 8 else ''} of the mean"


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, grouped: bool, which: QueryRows, attended: Attend
) -> Tensor:
    """Attention of some rows; heads of keys may serve several queries."""
    kept = 3 if grouped else 2  # dims that do not broadcast
    lead = torch.broadcast_shapes(*[t.shape[:-kept] for t in (query, key, value)])
    made = attended(*flat(query, key, value, kept), scale, which)
    return made.reshape(*lead, *query.shape[-kept:-1], value.shape[-1])
