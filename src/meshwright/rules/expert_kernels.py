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


# Of functions that are experts' in models: the gradient of what is given, from that of what is made.
DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "relu": lambda grad, x: grad * (x > 0),
}


def _spans(ends: Tensor) -> Iterator[tuple[int, int, int]]:
    """Experts, and which rows they have."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        yield expert, start, end
        start = end


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _forward(
    x: Tensor, order: Tensor, ends: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, act: str, parts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # Gates and what they gate apart: of halves side by side each kernel behind would walk through rows with gaps.
    products = x.new_empty(parts, len(order), gate_up.shape[1] // parts)
    made = x.new_zeros(x.shape, dtype=_wide(x))
    tokens, scores = order // weights.shape[1], weights.flatten()
    for e, start, end in _spans(ends):
        if start == end:
            continue
        at, rows = tokens[start:end], products[:, start:end]
        given = x.index_select(0, at)
        for i, w in enumerate(gate_up[e].chunk(parts)):
            torch.mm(given, w.t(), out=rows[i])
        if gate_up_bias is not None:
            rows += gate_up_bias[e].view(parts, 1, -1)
        a = getattr(F, act)(rows[0])
        y = torch.mm(a if parts == 1 else a * rows[1], down[e].t())
        if down_bias is not None:
            y += down_bias[e]
        made.index_add_(0, at, (y * scores.index_select(0, order[start:end]).unsqueeze(1)).to(made.dtype))
    return made.to(x.dtype), products


def _backward(
    grad: Tensor, x: Tensor, order: Tensor, ends: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, products: Tensor, act: str, parts: int,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of ``y = w (down a + b)`` the weight's gradient is ``<downᵀ g, a> + <b, g>``: no product is computed again.

    ``needs``: of which the gradient is asked for; what serves only others is not computed.
    """
    primals = (x, weights, gate_up, down, gate_up_bias, down_bias)
    wide = (_wide(x), *(None if t is None else t.dtype for t in primals[1:]))
    found = [
        None if t is None or not need else t.new_empty(t.shape, dtype=dtype)  # row by row, as the fake says
        for t, dtype, need in zip(primals, wide, needs, strict=True)
    ]
    for t in found[:2]:
        if t is not None:
            t.zero_()
    of_x, of_weights, of_gate_up, of_down, of_bias, of_down_bias = found
    inside = any(t is not None for t in (of_x, of_gate_up, of_bias))
    tokens = order // weights.shape[1]
    for e, start, end in _spans(ends):
        if start == end:
            for t in found[2:]:
                if t is not None:
                    t[e].zero_()
            continue
        at, slots = tokens[start:end], order[start:end]
        g, w = grad.index_select(0, at), weights.flatten().index_select(0, slots).unsqueeze(1)
        gate, up = products[0, start:end], products[1, start:end] if parts == 2 else None
        weighted = g * w.to(g.dtype)
        of_gate = getattr(F, act)(gate)
        a = of_gate if up is None else of_gate * up
        if of_down is not None:
            torch.mm(weighted.t(), a, out=of_down[e])
        if of_down_bias is not None:
            of_down_bias[e] = weighted.sum(0)
        if of_weights is None and not inside:
            continue
        back = torch.mm(g, down[e])
        if of_weights is not None:
            of_scores = (back * a).sum(1)
            if down_bias is not None:
                of_scores += torch.mv(g, down_bias[e])
            of_weights.view(-1).index_copy_(0, slots, of_scores.to(of_weights.dtype))
        if not inside:
            continue
        back *= w.to(g.dtype)
        h = [DERIVATIVES[act](back if up is None else back * up, gate), *([] if up is None else [back * of_gate])]
        if of_bias is not None:
            of_bias[e] = torch.cat([of.sum(0) for of in h])
        if of_gate_up is not None:
            given = x.index_select(0, at)
            for of, made in zip(h, of_gate_up[e].chunk(parts), strict=True):
                torch.mm(of.t(), given, out=made)
        if of_x is not None:
            first, *rest = gate_up[e].chunk(parts)
            rows = torch.mm(h[0], first)
            for of, w in zip(h[1:], rest, strict=True):
                rows.addmm_(of, w)
            of_x.index_add_(0, at, rows.to(of_x.dtype))
    none = x.new_empty(0)
    found[0] = None if of_x is None else of_x.to(x.dtype)
    return tuple([none if t is None else t for t in found])


def _forward_fake(x: Tensor, order: Tensor, ends: Tensor, weights: Tensor, gate_up: Tensor, *rest: Any) -> Any:
    parts = rest[-1]
    return x.new_empty(x.shape), x.new_empty(parts, order.shape[0], gate_up.shape[1] // parts)


def _backward_fake(grad: Tensor, *given: Any) -> Any:
    x, _, _, *rest = given
    primals, needs = (x, *rest[:5]), given[-1]
    return tuple([
        x.new_empty(0) if t is None or not need else t.new_empty(t.shape)
        for t, need in zip(primals, needs, strict=True)
    ])  # fmt: skip


_GIVEN = (
    "Tensor x, Tensor order, Tensor ends, Tensor weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias, "
    "Tensor? down_bias"
)
_FORWARD = operator(f"expert_rows({_GIVEN}, str act, int parts) -> (Tensor, Tensor)", _forward, _forward_fake)
_BACKWARD = operator(
    f"expert_rows_backward(Tensor grad, {_GIVEN}, Tensor products, str act, int parts, bool[] needs) -> "
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
            found = _BACKWARD(grad, *given, products, *ctx.said, [needs[i] for i in _PLACES])
        of = dict(zip(_PLACES, found, strict=True))
        return None, None, None, *[of.get(i) if needs[i] else None for i in range(len(needs))]


__all__ = ["DERIVATIVES", "ExpertRows"]
