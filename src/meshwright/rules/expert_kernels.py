"""What experts make of sorted rows, expert by expert: only rows that are there are touched, however many may be.

A program is static, so buffers have room for all pairs of tokens and experts; how many a rank has is a value, and is
read inside of one operator each for the forward and the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..operators import operator

Tensor = torch.Tensor
F: Any = torch.nn.functional


def acted(rows: Tensor, function: Callable[[Tensor], Tensor], parts: int) -> Tensor:
    """A function of each column: of all, or of the first half, multiplied with the second."""
    if parts != 2:
        return function(rows)
    gate, up = rows.chunk(2, -1)
    return function(gate) * up


# Of functions that are experts' in models: the gradient of what is given, from that of what is made.
DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "relu": lambda grad, x: grad * (x > 0),
}


def _spans(ends: Tensor) -> Iterator[tuple[int, int, int]]:
    """Experts that have rows, and which rows."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, start, end
        start = end


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _forward(
    x: Tensor, order: Tensor, ends: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, act: str, parts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    made, products = x.new_zeros(x.shape, dtype=_wide(x)), x.new_empty(len(order), gate_up.shape[1])
    tokens, scores = order // weights.shape[1], weights.flatten()
    for e, start, end in _spans(ends):
        at, rows = tokens[start:end], products[start:end]
        torch.mm(x.index_select(0, at), gate_up[e].t(), out=rows)
        if gate_up_bias is not None:
            rows += gate_up_bias[e]
        y = torch.mm(acted(rows, getattr(F, act), parts), down[e].t())
        if down_bias is not None:
            y += down_bias[e]
        made.index_add_(0, at, (y * scores.index_select(0, order[start:end]).unsqueeze(1)).to(made.dtype))
    return made.to(x.dtype), products


def _backward(
    grad: Tensor, x: Tensor, order: Tensor, ends: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, products: Tensor, act: str, parts: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of ``y = w (down a + b)`` the weight's gradient is ``<downᵀ g, a> + <b, g>``: no product is computed again."""
    of_x, of_weights = x.new_zeros(x.shape, dtype=_wide(x)), torch.zeros_like(weights)
    found = [of_weights.view(-1), *(None if t is None else torch.zeros_like(t) for t in (gate_up, down))]
    of_bias, of_down_bias = (None if t is None else torch.zeros_like(t) for t in (gate_up_bias, down_bias))
    scores, of_gate_up, of_down = found
    tokens = order // weights.shape[1]
    for e, start, end in _spans(ends):
        at, slots = tokens[start:end], order[start:end]
        g, w = grad.index_select(0, at), weights.flatten().index_select(0, slots).unsqueeze(1)
        rows, back, weighted = products[start:end], torch.mm(g, down[e]), g * w.to(g.dtype)
        gate, up = rows.chunk(2, -1) if parts == 2 else (rows, None)
        of_gate = getattr(F, act)(gate)
        a = of_gate if up is None else of_gate * up
        of_scores = (back * a).sum(1)
        torch.mm(weighted.t(), a, out=of_down[e])
        if of_down_bias is not None and down_bias is not None:
            of_scores += torch.mv(g, down_bias[e])
            of_down_bias[e] = weighted.sum(0)
        scores.index_copy_(0, slots, of_scores.to(scores.dtype))
        back *= w.to(g.dtype)
        h = DERIVATIVES[act](back if up is None else back * up, gate)
        h = h if up is None else torch.cat([h, back * of_gate], 1)
        if of_bias is not None:
            of_bias[e] = h.sum(0)
        torch.mm(h.t(), x.index_select(0, at), out=of_gate_up[e])
        of_x.index_add_(0, at, torch.mm(h, gate_up[e]).to(of_x.dtype))
    none = x.new_empty(0)
    biases = [none if t is None else t for t in (of_bias, of_down_bias)]
    return of_x.to(x.dtype), of_weights, of_gate_up, of_down, *biases


def _forward_fake(x: Tensor, order: Tensor, ends: Tensor, weights: Tensor, gate_up: Tensor, *rest: Any) -> Any:
    return x.new_empty(x.shape), x.new_empty(order.shape[0], gate_up.shape[1])


def _backward_fake(
    grad: Tensor, x: Tensor, order: Tensor, ends: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, *rest: Any,
) -> Any:  # fmt: skip
    biases = [x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (gate_up_bias, down_bias)]
    return *[t.new_empty(t.shape) for t in (x, weights, gate_up, down)], *biases


_GIVEN = (
    "Tensor x, Tensor order, Tensor ends, Tensor weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias, "
    "Tensor? down_bias"
)
_FORWARD = operator(f"expert_rows({_GIVEN}, str act, int parts) -> (Tensor, Tensor)", _forward, _forward_fake)
_BACKWARD = operator(
    f"expert_rows_backward(Tensor grad, {_GIVEN}, Tensor products, str act, int parts) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip
_PLACES = (0, 3, 4, 5, 6, 7)  # of what has gradients among the arguments


class ExpertRows(torch.autograd.Function):
    """The weighted sum of what experts make of each token; keeps the first products.

    ``dense`` computes the same of ops that can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, dense: Callable[..., Tensor], act: str, parts: int, *given: Tensor | None) -> Tensor:
        """``given``: x (t, c), order, ends, weights (t, k), gate_up (e, w, c), down (e, c, m) and the two biases."""
        made, products = _FORWARD(*given, act, parts)
        ctx.save_for_backward(*given, products)
        ctx.dense, ctx.said = dense, (act, parts)
        result: Tensor = made
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Of all that has a gradient."""
        *given, products = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        found: Sequence[Any]
        if torch.is_grad_enabled():
            wanted = [i for i in _PLACES if needs[i]]
            grads = torch.autograd.grad(
                ctx.dense(*given, *ctx.said), [given[i] for i in wanted], grad, create_graph=True
            )
            by_place = dict(zip(wanted, grads, strict=True))
            found = [by_place.get(i) for i in _PLACES]
        else:
            found = _BACKWARD(grad, *given, products, *ctx.said)
        of = dict(zip(_PLACES, found, strict=True))
        return None, None, None, *[of.get(i) if needs[i] else None for i in range(len(needs))]


__all__ = ["DERIVATIVES", "ExpertRows", "acted"]
