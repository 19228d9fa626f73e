"""Attention of some rows, block by block, without a mask: blocks of a kernel, merged by sums.

Rows see a range of keys whole, and keys about their own causally.  Such blocks are computed one by one by a kernel
(:mod:`.attention_kernels`) and merged by the log of the sum of exp(scores), which it gives too.  The backward is the
kernel's own, block by block, with the merged result and sums in place of the block's: then nothing is computed again
(Liu et al., Ring Attention, arXiv 2310.01889).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from .. import compat
from ..operators import operator
from ..ranks import runtime
from . import attention_kernels
from .attention_kernels import PLAIN, Kernel, choose, shapes_of, told
from .attention_tiles import Tile, plan_of
from .dims import nothing

Tensor = torch.Tensor


class QueryRows(NamedTuple):
    """Which rows a rank attends, and what each of them sees.

    Attributes:
        spans: flat, of each run of rows: local number of the first, its number in the sequence, how many.
        rows: or the number of each local row in the sequence, for each sequence or for all; negative: none.
        documents: to which document each position belongs, for each sequence or for all; None: there is one.
        causal: rows see keys up to themselves; else all of their document.
        window: how many keys at most, itself included; 0: all.
    """

    spans: tuple[int, ...]
    rows: Tensor | None = None
    documents: Tensor | None = None
    causal: bool = True
    window: int = 0


# ---------------------------------------------------------------------------------------------- one call


def in_blocks(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether these can be attended block by block; kernels decide how fast."""
    sizes = bool(query.shape[-1] and value.shape[-1])
    return sizes and query.dtype.is_floating_point and query.dtype == key.dtype == value.dtype


def flat(query: Tensor, key: Tensor, value: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of four dims: sequences, heads, rows, elements; ``kept``: how many dims do not broadcast."""
    given = (query, key, value)
    lead = torch.broadcast_shapes(*[t.shape[:-kept] for t in given])
    # Aliases: what is given are distributed tensors again when the backward runs.
    own = [t.expand(*lead, *t.shape[-kept:]) for t in given]
    q, k, v = (t[(None,) * (4 - t.ndim)] if t.ndim < 4 else t.flatten(0, -4) for t in own)
    return q, k, v


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, which: QueryRows) -> Tensor:
    """Attention of rows, of tensors of four dims, each row seeing one key at least; heads of keys may serve several."""
    if 0 in query.shape:  # in the graph of the other ranks all the same, to any order
        linked = nothing((), *(t.exp() for t in (query, key, value)))
        return query.new_zeros((*query.shape[:-1], value.shape[-1])) + linked
    if not in_blocks(query, key, value) or 0 in key.shape:
        mask = seen(which, query.shape[-2], key.shape[-2], query.device)
        return cast(
            Tensor, compat.C_NN.scaled_dot_product_attention(
                query, key, value, mask, 0.0, False, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            ),
        )  # fmt: skip
    if runtime.RT.notes is not None:
        runtime.RT.notes[told(query.shape, key.shape[2], shapes_of(query, value))] = None
    made: Tensor = _Blocks.apply(query, key, value, which, scale)
    return made


def attend_forward(
    query: Tensor, key: Tensor, value: Tensor, which: QueryRows, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The result, and of each row the log of its sum of exp(scores); without a gradient."""
    spans, *more = which
    made: tuple[Tensor, Tensor] = _FORWARD(query, key, value, list(spans), *more, scale)
    return made


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, made: Tensor, sums: Tensor, which: QueryRows,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value, of what :func:`attend_forward` gave."""
    spans, *more = which
    found: tuple[Tensor, Tensor, Tensor] = _BACKWARD(grad, query, key, value, made, sums, list(spans), *more, scale)
    return found


class _Blocks(torch.autograd.Function):
    """Keeps what it was given, the result, and of each row the log of its sum."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, which: QueryRows, scale: float | None) -> Tensor:
        made, sums = attend_forward(query, key, value, which, scale)
        ctx.save_for_backward(query, key, value, made, sums, which.rows, which.documents)
        ctx.which, ctx.scale = which._replace(rows=None, documents=None), scale
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, made, sums, rows, documents = ctx.saved_tensors
        which = ctx.which._replace(rows=rows, documents=documents)
        if torch.is_grad_enabled():  # of ops that can be differentiated again, with all scores
            return *dense_grads(grad, query, key, value, which, ctx.scale), None, None
        return *attend_backward(grad, query, key, value, made, sums, which, ctx.scale), None, None


def _turned(tile: Tile, *given: Tensor) -> list[Tensor]:
    """What sees keys from itself on sees them, read backwards, up to itself."""
    return [t.flip(2) for t in given] if tile.kind < 0 else list(given)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, spans: Sequence[int], rows: Tensor | None, documents: Tensor | None,
    causal: bool, window: int, scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if 0 in query.shape:  # kernels divide by these
        made, sums = _forward_fake(query, key, value)
        return made.zero_(), sums
    which, kernel = QueryRows(tuple(spans), rows, documents, causal, window), choose(shapes_of(query, value)).kernel
    return forward_of(kernel, groups_of(kernel, which, query, key), query, key, value, scale)


def groups_of(kernel: Kernel, which: QueryRows, query: Tensor, key: Tensor) -> Sequence[Sequence[Tile]]:
    """The calls of a kernel: of each the blocks."""
    most = attention_kernels.block_sizes(*query.shape[:2]) if kernel is PLAIN else None
    return plan_of(*which, key.shape[2], kernel.at_end, kernel.packed is not None, most)


def forward_of(
    kernel: Kernel, groups: Sequence[Sequence[Tile]], query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Blocks computed and merged."""
    result, sums = _forward_fake(query, key, value)
    made, scale = torch.zeros_like(result, dtype=sums.dtype), _scale_of(query, scale)
    sums.fill_(-math.inf)
    begun = np.zeros((len(query), query.shape[2]), dtype=bool)
    for group in groups:
        tile = group[0]
        if len(group) > 1 and kernel.packed is not None:
            run = _Packed(group, query, key)
            own, own_sums = _called(kernel, kernel.packed, *run.pick(query, key, value), *run.said, scale)
            made[run.rows[0], :, run.rows[1]] = own.to(made.dtype)
            sums[run.rows[0], :, run.rows[1]] = own_sums.transpose(0, 1).to(sums.dtype)
            continue
        b, at, keys = tile.at(len(query))
        given, fit = _turned(tile, query[b, :, at], key[b, :, keys], value[b, :, keys]), _fitting(kernel, tile)
        own, own_sums = _turned(tile, *_called(fit, fit.forward, *given, tile.kind != 0, tile.window, scale))
        if begun[b, at].any():
            before = sums[b, :, at]
            total = torch.logaddexp(before, own_sums)
            made[b, :, at] *= (before - total).exp_().unsqueeze(-1)
            own, own_sums = own * (own_sums - total).exp_().unsqueeze(-1), total
            made[b, :, at] += own
        else:
            made[b, :, at] = own
        begun[b, at] = True
        sums[b, :, at] = own_sums
    return made.to(result.dtype), sums


def _scale_of(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _fitting(kernel: Kernel, tile: Tile) -> Kernel:
    """The kernel, or PyTorch's own ops for a block of fewer keys than it takes."""
    return kernel if tile.last - tile.first >= kernel.fewest_keys else PLAIN


def _called(kernel: Kernel, function: Callable[..., Any], *given: Any) -> Any:
    try:
        return function(*given)
    except RuntimeError as error:
        error.add_note(f"attention: {kernel.name} failed. Choose another kernel with torch.nn.attention.sdpa_kernel.")
        raise


class _Packed:
    """Many runs of rows as one call: where they and their keys are in sequences, and how they follow each other."""

    def __init__(self, group: Sequence[Tile], query: Tensor, key: Tensor) -> None:
        every = range(len(query))
        runs = [(b, tile) for tile in group for b in (every if tile.batch < 0 else (tile.batch,))]
        rows, keys = [t.stop - t.start for _, t in runs], [t.last - t.first for _, t in runs]
        device = query.device

        def placed(firsts: Sequence[int], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
            counts = torch.tensor(sizes, device=device)
            which = torch.tensor([b for b, _ in runs], device=device)
            first = torch.tensor(firsts, device=device) - (counts.cumsum(0) - counts)
            total = sum(sizes)
            sequence, shift = (t.repeat_interleave(counts, output_size=total) for t in (which, first))
            return sequence, torch.arange(total, device=device) + shift

        def ends(sizes: Sequence[int]) -> Tensor:
            totals = [0]
            for n in sizes:
                totals.append(totals[-1] + n)
            return torch.tensor(totals, dtype=torch.int32, device=device)

        self.rows = placed([t.start for _, t in runs], rows)
        self.keys = placed([t.first for _, t in runs], keys)
        self.said = (ends(rows), ends(keys)), (max(rows), max(keys)), group[0].kind != 0, group[0].window

    def pick(self, query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> list[Tensor]:
        """Rows and keys of these, (rows, heads, elements); of more tensors the rows."""
        places = (self.rows, self.keys, self.keys, *[self.rows] * len(more))
        return [t[b, :, at] for t, (b, at) in zip((query, key, value, *more), places, strict=True)]


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    made = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return made, query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, made: Tensor, sums: Tensor, spans: Sequence[int],
    rows: Tensor | None, documents: Tensor | None, causal: bool, window: int, scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if 0 in query.shape:
        return tuple([t.new_zeros(t.shape) for t in (query, key, value)])
    which, kernel = QueryRows(tuple(spans), rows, documents, causal, window), choose(shapes_of(query, value)).kernel
    return backward_of(kernel, groups_of(kernel, which, query, key), grad, query, key, value, made, sums, scale)


def backward_of(
    kernel: Kernel, groups: Sequence[Sequence[Tile]], grad: Tensor, query: Tensor, key: Tensor, value: Tensor,
    made: Tensor, sums: Tensor, scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The transpose of :func:`forward_of`, from its result and sums."""
    given, scale = (query, key, value), _scale_of(query, scale)
    found = [t.new_zeros(t.shape, dtype=sums.dtype) for t in given]  # sums over blocks, which are rounded once
    for group in groups:
        tile = group[0]
        if len(group) > 1 and kernel.packed_backward is not None:
            run = _Packed(group, query, key)
            *qkv, g, result, own_sums = run.pick(*given, grad, made, sums.unsqueeze(-1))
            logs = own_sums.squeeze(-1).transpose(0, 1)
            parts = _called(kernel, kernel.packed_backward, g, *qkv, result, logs, *run.said, scale)
            for total, part, (which, places_in) in zip(found, parts, (run.rows, run.keys, run.keys), strict=True):
                total[which, :, places_in] += part  # blocks of one call share no key
            continue
        b, at, keys = tile.at(len(query))
        places, fit = (at, keys, keys), _fitting(kernel, tile)
        own = _called(
            fit, fit.backward, *_turned(
                tile, grad[b, :, at], *[t[b, :, p] for t, p in zip(given, places, strict=True)], made[b, :, at],
                sums[b, :, at],
            ), tile.kind != 0, tile.window, scale,
        )  # fmt: skip
        for total, part, p in zip(found, _turned(tile, *own), places, strict=True):
            total[b, :, p] += part
    return tuple(total.to(t.dtype) for total, t in zip(found, given, strict=True))


def _backward_fake(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (query, key, value))


def seen(which: QueryRows, count: int, keys: int, device: torch.device) -> Tensor:
    """The mask, (sequences or 1, 1, rows, keys)."""
    at = torch.arange(keys, device=device)
    rows = which.rows
    if rows is None:
        rows = torch.full((1, count), -1, device=device)
        for start, row, size in zip(*[which.spans[i::3] for i in range(3)], strict=True):
            rows[0, start : start + size] = torch.arange(row, row + size, device=device)
    rows = rows.unsqueeze(-1)
    mask = (rows >= 0) & (at >= 0)
    if which.causal:
        mask = mask & (at <= rows)
    if which.window:
        mask = mask & (at > rows - which.window)
    if which.documents is not None:
        ids = which.documents
        lead = len(rows) if len(ids) == 1 else len(ids)  # none where this rank has no sequence
        own = ids.expand(lead, -1).gather(1, rows.squeeze(-1).expand(lead, -1).clamp(min=0))
        mask = mask & (own.unsqueeze(-1) == ids.unsqueeze(1))
    return mask.unsqueeze(1)


def dense_grads(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, which: QueryRows, scale: float | None
) -> Iterator[Tensor]:
    """The gradients from all scores: what :func:`_backward` gives, differentiable."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    hidden = ~seen(which, query.shape[-2], key.shape[-2], query.device).unsqueeze(2)
    shape = (key.shape[1], query.shape[1] // key.shape[1])
    query, grad = (t.unflatten(1, shape) for t in (query, grad))
    key, value = key.unsqueeze(2), value.unsqueeze(2)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(hidden, -math.inf)
    weights = torch.softmax(scores.masked_fill(hidden.all(-1, keepdim=True), 0.0), -1).masked_fill(hidden, 0.0)
    of_weights = grad @ value.transpose(-1, -2)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    yield (of_scores @ key).flatten(1, 2)
    yield (of_scores.transpose(-1, -2) @ query).sum(2)
    yield (weights.transpose(-1, -2) @ grad).sum(2)


_GIVEN = "Tensor query, Tensor key, Tensor value"
_SAID = "int[] spans, Tensor? rows, Tensor? documents, bool causal, int window, float? scale"
ROWS = _FORWARD = operator(f"attention_rows({_GIVEN}, {_SAID}) -> (Tensor, Tensor)", _forward, _forward_fake)
_BACKWARD = operator(
    f"attention_rows_backward(Tensor grad, {_GIVEN}, Tensor made, Tensor sums, {_SAID}) -> (Tensor, Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip
