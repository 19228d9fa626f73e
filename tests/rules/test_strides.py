"""Calls of kernels of our own, and of PyTorch's without its guard, on tensors with any strides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from tests.support.compare import check_equal, plain
from tests.support.strides import STRIDES, expanded

Tensor = torch.Tensor
IDS = torch.tensor([0, 0, 0, 1, 1, 1, 1])
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    **STRIDES,
    "expanded": expanded,
    "rows expanded": functools.partial(expanded, dim=-2),
    "heads expanded": functools.partial(expanded, dim=1),
}
CALLS: dict[str, Callable[..., Tensor]] = {
    "causal": functools.partial(F.scaled_dot_product_attention, is_causal=True),
    "documents": lambda q, k, v: mw.attention(q, k, v, document_ids=IDS if type(q) is Tensor else ids(q)),
    "window": functools.partial(mw.attention, window=3),
}


def ids(like: Tensor) -> Tensor:
    return mw.shard_tensor(IDS, like.mesh, {"cp": mw.Shard(0)})  # type: ignore[attr-defined]


def dense(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.shape[-2])
    mask = at[:, None] >= at
    mask = mask & (IDS[:, None] == IDS) if name == "documents" else mask
    mask = mask & (at[:, None] - at < 3) if name == "window" else mask
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def results(call: Callable[..., Tensor], form: Callable[[Tensor], Tensor], which: int, given: list[Tensor]) -> Any:
    """The value and the gradients, where one of query, key, value and the gradient of the result has a form."""
    *qkv, grad = [form(t) if i == which else t for i, t in enumerate(given)]
    made = call(*qkv)
    return [plain(t) for t in (made, *torch.autograd.grad(made, given[:3], grad))]


@pytest.mark.thin(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CALLS)
def test_attention(name: str, form: str) -> None:
    # Of three heads two ranks cannot exchange heads: the rows are attended where they lie.
    given = [torch.randn(2, 3, 7, 4, dtype=torch.float64) for _ in range(4)]
    mesh = mw.Mesh({"cp": 2})
    for which in range(4):

        def plain_results(call: Callable[..., Tensor], which: int = which) -> Any:
            return results(call, FORMS[form], which, [t.clone().requires_grad_() for t in given])

        def run(which: int = which) -> Any:
            own = [mw.shard_tensor(t, mesh, {"cp": mw.Shard(2)}).requires_grad_() for t in given]
            return results(CALLS[name], FORMS[form], which, own)

        want = plain_results(functools.partial(dense, name))
        check_equal(plain_results(CALLS[name]), want, f"one device, tensor {which}")
        for got in mw.simulate(run, mesh):
            check_equal(got, want, f"two ranks, tensor {which}")


EXPERTS = ("x", "ids", "weights", "gate_up", "down", "gradient")


def experts(form: str, which: int, given: list[Tensor]) -> Any:
    """The value and the gradients of experts, where one of the tensors has a form."""
    x, ids, weights, gate_up, down, grad = [STRIDES[form](t) if i == which else t for i, t in enumerate(given)]
    made = mw.experts(x, ids, weights, gate_up, down)
    return [plain(t) for t in (made, *torch.autograd.grad(made, [given[i] for i in (0, 2, 3, 4)], grad))]


@pytest.mark.thin(3)
@pytest.mark.parametrize("form", STRIDES)
def test_experts(form: str) -> None:
    shapes = {"x": (6, 3), "weights": (6, 2), "gate_up": (4, 10, 3), "down": (4, 3, 5), "gradient": (6, 3)}
    given = [
        torch.randint(0, 4, (6, 2)) if name == "ids" else torch.randn(shapes[name], dtype=torch.float64)
        for name in EXPERTS
    ]
    mesh = mw.Mesh({"ep": 2})

    def leaf(t: Tensor) -> Tensor:
        return t.requires_grad_() if t.is_floating_point() else t

    want = experts("shifted", 1, [leaf(t.clone()) for t in given])
    for which, name in enumerate(EXPERTS):

        def run(which: int = which) -> Any:
            own = [mw.shard_tensor(t, mesh, {"ep": mw.Shard(0)}) for t in given]
            return experts(form, which, [leaf(t) for t in own])

        check_equal(experts(form, which, [leaf(t.clone()) for t in given]), want, f"one device, {name}")
        for got in mw.simulate(run, mesh):
            check_equal(got, want, f"two ranks, {name}")
