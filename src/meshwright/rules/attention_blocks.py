"""Attention of some rows, block by block, without a mask: the fused kernel of the processor, merged by sums.

Rows see a range of keys whole, and keys about their own causally.  Such blocks are computed one by one by PyTorch's
fused kernel and merged by the log of the sum of exp(scores), which that kernel gives too.  The backward is the kernel's
own, block by block, with the merged result and sums in place of the block's: then nothing is computed again (Liu et
al., Ring Attention, arXiv 2310.01889).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from .. import compat, kernels
from ..operators import operator
from .dims import nothing

Tensor = torch.Tensor
KERNEL: Any = kernels.flash_attention
KERNEL_BACKWARD: Any = kernels.flash_attention_backward
FUSED = {torch.float64, torch.float32, torch.bfloat16, torch.float16}  # what the kernel of the processor computes in


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


class Tile(NamedTuple):
    """Some rows of the scores: local rows ``start:stop`` see the keys ``first:last``.

    ``kind`` 0: all of them; 1: the i-th row the first i + 1; -1: the i-th row all from the i-th on.  ``batch``: of
    which sequence, or -1 for all.
    """

    batch: int
    start: int
    stop: int
    first: int
    last: int
    kind: int

    def at(self, size: int) -> tuple[slice, slice, slice]:
        """Where it is: sequences of ``size``, rows and keys."""
        which = slice(0, size) if self.batch < 0 else slice(self.batch, self.batch + 1)
        return which, slice(self.start, self.stop), slice(self.first, self.last)


def tiles(which: QueryRows, keys: int) -> Sequence[Tile]:
    """The blocks of these rows: of each row first one that has its own key, where there is one."""
    rows, documents = which.rows, which.documents
    read = [None if t is None else np.ascontiguousarray(t.detach().cpu().numpy()) for t in (rows, documents)]
    told = tuple([None if a is None else (a.tobytes(), a.shape) for a in read])
    return _tiles(which.spans, *told, which.causal, which.window, keys)


Array = tuple[bytes, tuple[int, ...]] | None


@lru_cache(maxsize=64)  # every layer asks for the same, and so does the backward
def _tiles(
    spans: tuple[int, ...], rows: Array, documents: Array, causal: bool, window: int, keys: int
) -> tuple[Tile, ...]:
    limits: list[Any] = [None] if documents is None else [limits_of(ids) for ids in _read(documents)]
    given: list[Any] = [None] if rows is None else list(_read(rows))
    made: list[Tile] = []
    count = max(len(limits), len(given))
    for b in range(count):
        limit = limits[min(b, len(limits) - 1)]
        starts: Any = None if limit is None else limit[0]
        stops: Any = None if limit is None else limit[1]
        for start, row, size in _runs(spans, given[min(b, len(given) - 1)], starts):
            begin, end = (0, keys) if limit is None else (int(starts[row]), int(stops[row]))
            made += _run(-1 if count == 1 else b, start, row, size, begin, end, causal, window)
    return tuple(made)


def _read(array: Array) -> Any:
    assert array is not None
    return np.frombuffer(array[0], np.int64).reshape(array[1])


def limits_of(ids: Any) -> Any:
    """Where the document of each position begins and ends."""
    new = np.flatnonzero(np.diff(ids)) + 1
    edges = np.concatenate([[0], new, [len(ids)]])
    sizes = np.diff(edges)
    return np.stack([edges[:-1].repeat(sizes), edges[1:].repeat(sizes)])


def _runs(spans: Sequence[int], rows: Any, starts: Any) -> Iterator[tuple[int, int, int]]:
    """Rows that follow each other in one document: local number, number in the sequence, how many."""
    if rows is None:
        for s, r, n in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
            new = () if starts is None else (np.flatnonzero(np.diff(starts[r : r + n])) + 1).tolist()
            yield from ((s + a, r + a, b - a) for a, b in zip([0, *new], [*new, n], strict=True) if a < b)
        return
    begin = np.zeros_like(rows) if starts is None else np.where(rows < 0, -1, starts[rows])
    new = (np.flatnonzero((np.diff(rows) != 1) | (np.diff(begin) != 0)) + 1).tolist()
    yield from (
        (a, int(rows[a]), b - a) for a, b in zip([0, *new], [*new, len(rows)], strict=True) if a < b and rows[a] >= 0
    )


def _run(b: int, start: int, row: int, size: int, begin: int, end: int, causal: bool, window: int) -> Iterator[Tile]:
    """The blocks of rows that follow each other in one document."""
    if not causal:
        yield Tile(b, start, start + size, begin, end, 0)
        return
    near = size if not window else min(max(begin + window - row, 0), size)  # rows that see their document's beginning
    if near:
        before, own = min(row, end), min(row + near, end)
        found = [Tile(b, start, start + near, before, own, 1), Tile(b, start, start + near, begin, before, 0)]
        yield from (t for t in found if t.first < t.last)
    for a in range(near, size, window or 1):
        n, r, s = min(window, size - a), row + a, start + a
        yield Tile(b, s, s + n, r, r + n, 1)
        if n < window:
            yield Tile(b, s, s + n, r + n - window, r, 0)
        if n > 1:  # the last row sees none of the keys that the first ones still see
            yield Tile(b, s, s + n - 1, r - window + 1, r + n - window, -1)


def work(ids: Any, causal: bool, window: int) -> Any:
    """How many keys each row sees."""
    starts, stops = limits_of(ids)
    if not causal:
        return stops - starts
    seen = np.arange(len(ids)) - starts + 1
    return np.minimum(seen, window) if window else seen


# ---------------------------------------------------------------------------------------------- one call


def in_blocks(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel whose sums and backward can be had takes these, and is not switched off."""
    alike = query.dtype in FUSED and query.shape[-1] == value.shape[-1] and torch.backends.cuda.flash_sdp_enabled()
    return query.device.type == "cpu" and alike and bool(query.shape[-1])


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
    result, sums = _forward_fake(query, key, value)
    made, begun = torch.zeros_like(result, dtype=sums.dtype), set[tuple[int, int]]()
    if 0 in query.shape:  # the kernel divides by these
        return made.to(result.dtype), sums
    for tile in tiles(QueryRows(tuple(spans), rows, documents, causal, window), key.shape[2]):
        b, at, keys = tile.at(len(query))
        given = _turned(tile, query[b, :, at], key[b, :, keys], value[b, :, keys])
        own, own_sums = _turned(tile, *KERNEL(*given, 0.0, tile.kind != 0, scale=scale))
        if (tile.batch, tile.start) in begun:
            before = sums[b, :, at]
            total = torch.logaddexp(before, own_sums)
            made[b, :, at] *= (before - total).exp_().unsqueeze(-1)
            own, own_sums = own * (own_sums - total).exp_().unsqueeze(-1), total
            made[b, :, at] += own
        else:
            made[b, :, at] = own
            begun.add((tile.batch, tile.start))
        sums[b, :, at] = own_sums
    return made.to(result.dtype), sums


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    made = query.new_empty(*query.shape[:-1], value.shape[-1])
    return made, query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, made: Tensor, sums: Tensor, spans: Sequence[int],
    rows: Tensor | None, documents: Tensor | None, causal: bool, window: int, scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    given = (query, key, value)
    if 0 in query.shape:
        return tuple([t.new_zeros(t.shape) for t in given])
    found = [t.new_zeros(t.shape, dtype=sums.dtype) for t in given]  # sums over blocks, which are rounded once
    for tile in tiles(QueryRows(tuple(spans), rows, documents, causal, window), key.shape[2]):
        b, at, keys = tile.at(len(query))
        places = (at, keys, keys)
        own = KERNEL_BACKWARD(
            *_turned(
                tile, grad[b, :, at], *[t[b, :, p] for t, p in zip(given, places, strict=True)], made[b, :, at],
                sums[b, :, at],
            ), 0.0, tile.kind != 0, scale=scale,
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
_FORWARD = operator(f"attention_rows({_GIVEN}, {_SAID}) -> (Tensor, Tensor)", _forward, _forward_fake)
_BACKWARD = operator(
    f"attention_rows_backward(Tensor grad, {_GIVEN}, Tensor made, Tensor sums, {_SAID}) -> (Tensor, Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip
