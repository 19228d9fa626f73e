"""Python's operators on distributed tensors, forwards, reflected and in place, and methods whose tensor is no first."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright as mw

INTS = ("and_", "or_", "xor", "lshift", "rshift")
BOTH = ("add", "sub", "mul", "floordiv", "mod", "pow", "truediv")
MESH = mw.Mesh({"x": 3})


def alike(fn: Callable[[Any], Any], full: torch.Tensor) -> None:
    """What an operator gives, or writes to a base and a view of it, is what it does on one device."""
    want = fn(full.clone())

    def run() -> Any:
        x = mw.shard_tensor(full.clone(), MESH, {"x": mw.Shard(0)})
        return [mw.unshard(t) if isinstance(t, mw.DistTensor) else t for t in fn(x)]

    for found in mw.simulate(run, MESH):
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", [*BOTH, *INTS])
def test_operators(name: str) -> None:
    op, inplace = getattr(operator, name), getattr(operator, "i" + name.rstrip("_"), None)
    inplace = inplace or getattr(operator, f"i{name.rstrip('_')}")
    full = torch.arange(1, 8) if name in INTS else torch.arange(1.0, 8.0)

    def written(x: Any) -> Any:
        y, view = x, x[2:5]
        y = inplace(y, 2)
        assert y is x
        view = inplace(view, 3)
        return x, view

    alike(lambda x: (op(x, 2), op(2, x), op(x, x), op(x, x[:1])), full)
    alike(written, full)


@pytest.mark.parametrize("op", [operator.neg, operator.pos, operator.abs, operator.invert, operator.not_])
def test_operators_of_one(op: Any) -> None:
    full = torch.arange(-3, 4)
    if op is operator.not_:
        alike(lambda x: (not x.sum(), not x.any()), full)
    else:
        alike(lambda x: (op(x),), full)


def test_methods_whose_tensor_is_not_the_first_argument_of_the_op() -> None:
    full = torch.arange(1.0, 8.0)
    alike(lambda x: (x.where(x > 3, x * 10), x.where(x > 3, torch.tensor(-1.0)), x.polygamma(1)), full)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: (x.is_floating_point(), x.is_complex(), x.is_signed(), x.element_size(), x.is_conj(), x.is_neg()),
        lambda x: (x.storage_offset(), x.is_inference(), x.is_pinned(), x.is_shared(), x.get_device()),
        lambda x: (hash(x) == hash(x), x.requires_grad_() is x, x.is_set_to(x), x in {x}),
    ],
)
def test_questions_are_answered_and_send_nothing(ask: Callable[[Any], Any]) -> None:
    full = torch.arange(1.0, 8.0)
    want = ask(full.clone())
    assert mw.simulate(lambda: ask(mw.shard_tensor(full.clone(), MESH, {"x": mw.Shard(0)})), MESH) == [want] * 3
