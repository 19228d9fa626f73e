"""Attention with dropout or a mask, some rows at a time: no tensor of all rows times all keys.

Each block of rows computes its scores and leaves them; the backward computes them again, with the same dropout mask,
which follows from global indices (:mod:`.counter`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..operators import operator
from . import counter

Tensor = torch.Tensor
Place = tuple[tuple[int, ...], tuple[int, ...]]  # global shape of the weights, and where in it these begin
MOST_SCORES = 1 << 24  # of a block of rows, over all sequences and heads: 64 MiB in float32


class AttentionCall(NamedTuple):
    """What a call says beside its tensors.

    Attributes:
        at: the weights' place, for the dropout mask.
        dropout_p: probability, where there is a seed.
        causal: the number in the sequence of the first row, which sees the keys up to its own; None: rows see all.
        scale: of the scores.
    """

    at: Place
    dropout_p: float
    causal: int | None
    scale: float

    def flat(self) -> tuple[list[int], list[int], float, int, float]:
        """As operators take it."""
        return (
            list(self.at[0]),
            list(self.at[1]),
            self.dropout_p,
            -1 if self.causal is None else self.causal,
            self.scale,
        )


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, call: AttentionCall
) -> Tensor:
    """Attention of tensors with equal leading dims, all rows at once, of ops that can be differentiated."""
    weights = _weights(query, key, mask, call)
    if seed is not None:
        weights = counter.dropout(weights, seed, call.dropout_p, *call.at)
    return weights @ value


def attend_in_rows(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, call: AttentionCall
) -> Tensor:
    """The same, some rows at a time."""
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    # Aliases: what is given are distributed tensors again when the backward runs.
    own = [t.expand(*lead, *t.shape[-2:]) for t in (query, key, value)]
    made: Tensor = _InRows.apply(*own, None if mask is None else mask.view_as(mask), seed, call)
    return made


def fits(query: Tensor, key: Tensor) -> bool:
    """Whether all scores are few enough to be computed at once; heads of the key may serve several of the query."""
    pairs = itertools.zip_longest(reversed(query.shape[:-2]), reversed(key.shape[:-2]), fillvalue=1)
    return math.prod(map(max, pairs)) * query.shape[-2] * key.shape[-2] <= MOST_SCORES


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, call: AttentionCall) -> Tensor:
    scores = query @ key.transpose(-2, -1) * call.scale
    if call.causal is not None:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(~ones.tril(call.causal), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, -1)


class _InRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        seed: Tensor | None,
        call: AttentionCall,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask, seed)
        ctx.call = call
        made: Tensor = _FORWARD(query, key, value, mask, seed, *call.flat())
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, mask, seed = ctx.saved_tensors
        if torch.is_grad_enabled():  # of ops that can be differentiated again, with all scores
            wanted = [t for t in (query, key, value, mask) if t is not None and t.requires_grad]
            found = iter(
                torch.autograd.grad(attend(query, key, value, mask, seed, ctx.call), wanted, grad, create_graph=True)
            )
            given = [next(found) if t is not None and t.requires_grad else None for t in (query, key, value, mask)]
            return *given, None, None
        *grads, of_mask = _BACKWARD(grad, query, key, value, mask, seed, *ctx.call.flat())
        return *grads, of_mask if ctx.needs_input_grad[3] else None, None, None


def _blocks(
    query: Tensor, mask: Tensor | None, keys: int, call: AttentionCall
) -> Iterator[tuple[slice, Tensor | None, AttentionCall]]:
    """Rows, their part of the mask, and what the call is for them."""
    shape, offset = call.at
    step = max(MOST_SCORES // max(query.shape[:-2].numel() * keys, 1), 1)
    for a in range(0, query.shape[-2], step):
        own = mask if mask is None or mask.ndim < 2 or mask.shape[-2] == 1 else mask[..., a : a + step, :]
        place = shape, (*offset[:-2], offset[-2] + a, offset[-1])
        yield slice(a, a + step), own, call._replace(at=place, causal=None if call.causal is None else call.causal + a)


def _call(shape: list[int], offset: list[int], dropout_p: float, causal: int, scale: float) -> AttentionCall:
    return AttentionCall((tuple(shape), tuple(offset)), dropout_p, None if causal < 0 else causal, scale)


def _forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, *said: Any) -> Tensor:
    made = _forward_fake(query, key, value)
    for rows, own, call in _blocks(query, mask, key.shape[-2], _call(*said)):
        made[..., rows, :] = attend(query[..., rows, :], key, value, own, seed, call)
    return made


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, *said: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)  # sums over blocks, which are rounded once
    of_query, of_key, of_value = (t.new_zeros(t.shape, dtype=wide) for t in (query, key, value))
    of_mask = grad.new_zeros(mask.shape if _additive(mask) else (0,), dtype=wide)  # type: ignore[union-attr]
    for rows, own, call in _blocks(query, mask, key.shape[-2], _call(*said)):
        q, g = query[..., rows, :], grad[..., rows, :]
        weights = _weights(q, key, own, call)
        kept, of_weights = weights, g @ value.transpose(-2, -1)
        if seed is not None:
            kept, of_weights = (counter.dropout(t, seed, call.dropout_p, *call.at) for t in (weights, of_weights))
        of_value += kept.transpose(-2, -1) @ g
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
        if own is not None and _additive(mask):
            place = of_mask if own.shape == of_mask.shape else of_mask[..., rows, :]
            place += of_scores.sum_to_size(own.shape)
        of_query[..., rows, :] = of_scores @ key * call.scale
        of_key += of_scores.transpose(-2, -1) @ q * call.scale
    grads = [t.to(query.dtype) for t in (of_query, of_key, of_value)]
    return grads[0], grads[1], grads[2], of_mask.to(mask.dtype) if mask is not None and _additive(mask) else of_mask


def _additive(mask: Tensor | None) -> bool:
    return mask is not None and mask.dtype != torch.bool


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _backward_fake(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = [t.new_empty(t.shape) for t in (query, key, value)]
    wide = torch.promote_types(query.dtype, torch.float32)
    of_mask = grad.new_empty((0,), dtype=wide)
    if mask is not None and _additive(mask):
        of_mask = mask.new_empty(mask.shape)
    return grads[0], grads[1], grads[2], of_mask


_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? seed"
_SAID = "int[] shape, int[] offset, float dropout_p, int causal, float scale"
_FORWARD = operator(f"attention_in_rows({_GIVEN}, {_SAID}) -> Tensor", _forward, _forward_fake)
_BACKWARD = operator(
    f"attention_in_rows_backward(Tensor grad, {_GIVEN}, {_SAID}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip

__all__ = ["MOST_SCORES", "AttentionCall", "Place", "attend", "attend_in_rows", "fits"]
