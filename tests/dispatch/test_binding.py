"""Calls with names in the order of their schema, by hand; and names that fit nothing."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.dispatch.binding import Bindings, Param, bind, signatures, unread

Tensor = torch.Tensor
T, U = torch.zeros(2), torch.ones(2)
NEEDED = inspect.Parameter.empty
KEEP = torch.contiguous_format


def of(func: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """The arguments in order, and those that keep their names; None where no schema fits."""
    made = bind(func, name, args, kwargs)
    return None if made is None else made(args, kwargs)


@pytest.mark.parametrize(
    ("func", "name", "args", "kwargs", "want"),
    [
        (torch.add, "add", (T,), {"other": U}, ((T, U), {})),
        (torch.add, "add", (), {"other": U, "input": T}, ((T, U), {})),
        (torch.add, "add", (), {"x1": T, "x2": U}, ((T, U), {})),
        (torch.add, "add", (), {"a": T, "tensor": U}, ((T, U), {})),
        (torch.add, "add", (), {"x": T, "other": 2, "alpha": 3}, ((T, 2), {"alpha": 3})),
        (torch.add, "add", (T, U), {"alpha": 3}, ((T, U), {"alpha": 3})),
        (torch.add, "add", (T,), {"other": 2.5}, ((T, 2.5), {})),
        (torch.sum, "sum", (T,), {"axis": 0, "keepdims": True}, ((T, 0, True), {})),
        (torch.sum, "sum", (T,), {"keepdim": True, "dim": 0}, ((T, 0, True), {})),
        (torch.sum, "sum", (T,), {"dim": 0, "dtype": torch.float64}, ((T, 0), {"dtype": torch.float64})),
        (torch.sum, "sum", (T,), {"dtype": torch.float64}, ((T,), {"dtype": torch.float64})),
        (torch.sum, "sum", (T,), {"keepdim": True}, None),  # of an overload that needs a dim
        (torch.transpose, "transpose", (T,), {"dim1": 1, "dim0": 0}, ((T, 0, 1), {})),
        (torch.transpose, "transpose", (T,), {"dim1": 1}, None),
        (torch.clamp, "clamp", (T,), {"max": 1}, ((T, None, 1), {})),
        (torch.clamp, "clamp", (T,), {"max": U}, ((T, None, U), {})),
        (torch.clamp, "clamp", (T,), {"min": None, "max": 1}, ((T, None, 1), {})),
        (torch.where, "where", (T > 0,), {"other": 2.0, "input": T}, ((T > 0, T, 2.0), {})),
        (Tensor.copy_, "copy_", (T,), {"src": U}, ((T, U), {})),
        (Tensor.copy_, "copy_", (T,), {"other": U}, ((T, U), {})),
        (Tensor.masked_fill, "masked_fill", (T,), {"mask": T > 0, "value": U[0]}, ((T, T > 0, U[0]), {})),
        (Tensor.masked_fill, "masked_fill", (T,), {"mask": T > 0, "value": 3}, ((T, T > 0, 3), {})),
        (Tensor.masked_fill, "masked_fill", (T,), {"mask": 1, "value": U}, ((T, 1, U), {})),
        (torch.zeros_like, "zeros_like", (T,), {"requires_grad": True}, ((T,), {"requires_grad": True})),
        (torch.cumsum, "cumsum", (), {"input": T, "dim": 0}, ((T, 0), {})),
        (torch.add, "add", (T,), {"other": U, "nothing": 1}, None),
        (torch.add, "add", (T,), {"input": U}, None),  # given twice
        (torch.add, "add", ("no",), {"other": U}, None),
        (torch.mm, "mm", (T,), {"mat2": "no"}, None),
        (torch.add, "add", (T,), {}, None),
        (torch.transpose, "transpose", (T, T), {"dim1": 1}, None),
        (torch.transpose, "transpose", (T, 0), {"dim1": T}, None),
        (F.mse_loss, "F.mse_loss", (T,), {"target": U, "reduction": "sum"}, ((T, U, None, None, "sum"), {})),
        (F.linear, "linear", (T,), {"bias": None, "weight": U}, ((T, U, None), {})),
        (torch._C._nn.mse_loss, "mse_loss", (T, U), {}, ((T, U, 0), {})),
        (torch._C._nn.mse_loss, "mse_loss", (T, U, 2), {}, ((T, U, 2), {})),
        (torch._C._nn.mse_loss, "mse_loss", (T,), {"target": U, "reduction": 1}, ((T, U, 1), {})),
        (torch.ops.aten.mse_loss.default, "mse_loss", (T, U), {}, ((T, U), {})),
        (torch.ops.aten.sum, "sum", (T,), {"dim": [0]}, ((T, [0]), {})),
    ],
)
def test_calls_in_order(func: Any, name: str, args: Any, kwargs: Any, want: Any) -> None:
    got = of(func, name, *args, **kwargs)
    assert (got is None) == (want is None)
    if got is not None:
        assert len(got[0]) == len(want[0])
        for a, b in zip(got[0], want[0], strict=True):
            assert a is b or (not isinstance(b, Tensor) and a == b) or torch.equal(a, b)
        assert got[1] == want[1]


def test_calls_in_order_are_those_of_the_function() -> None:
    def told(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    made = bind(torch.add, "add", (T,), {"other": 2, "alpha": 3})
    assert made == Bindings((("other", NEEDED),), (("alpha", "alpha"),))
    assert made.around(told)(T, other=5, alpha=7) == ((T, 5), {"alpha": 7})


def test_what_schemas_say() -> None:
    (only,) = signatures(torch.ops.aten.add.Tensor, "add")
    assert only == (
        Param("self", tensor=True), Param("other", tensor=True), Param("alpha", True, 1, None),
    )  # fmt: skip
    assert Param("dim").default is NEEDED
    every = sorted(signatures(torch.sum, "sum"), key=len)
    assert [[p.name for p in s] for s in every] == [["self", "dtype"], ["self", "dim", "keepdim", "dtype"]]
    assert [p.tensor for p in every[1]] == [True, False, False, False]
    assert [p.keyword for p in every[1]] == [False, False, False, True]
    assert [p.default for p in every[1]][1:] == [NEEDED, False, None]
    (linear,) = signatures(F.mse_loss, "F.mse_loss")
    assert [p.name for p in linear][:2] == ["input", "target"]
    assert not any(p.unread for p in linear)
    (loss,) = signatures(torch._C._nn.mse_loss, "mse_loss")
    assert loss[-1] == Param("reduction", False, 0, False, unread=True)
    assert unread(torch._C._nn.mse_loss, "mse_loss")
    assert not unread(torch.add, "add")
    assert not unread(torch.ops.aten.mse_loss.default, "mse_loss")
    optional = signatures(torch.ops.aten.linear.default, "linear")[0][2]
    assert (optional.name, optional.tensor, optional.default) == ("bias", None, None)
    assert signatures(lambda *args: 0, "no") == ()
    assert signatures(lambda a, /: 0, "no") == ()
    assert signatures(lambda a, *, b=1, **more: 0, "no") == ((Param("a"), Param("b", True, 1)),)
