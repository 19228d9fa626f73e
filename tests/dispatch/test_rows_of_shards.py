"""One index of a split dim: the rank that has it brings it, and no other row moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright import collective
from tests.support.compare import GRID, S0, S1, P, R, ramp, same

THREE = mw.Mesh({"x": 3})
SIZES = {"even": 6, "uneven": 5, "empty": 2}
TAKEN: dict[str, Callable[[Any], Any]] = {
    "first": lambda w: w[0],
    "last": lambda w: w[-1],
    "tensor": lambda w: w[torch.tensor(1)],
    "one long": lambda w: w[1:2],
    "narrow": lambda w: w.narrow(0, 1, 1),
    "select": lambda w: w.select(0, -1),
    "list": lambda w: w[[1]],
    "and a range": lambda w: w[1, 1:3],
    "and a column": lambda w: w[1, :, -1],
    "and an index": lambda w: w[-1, torch.tensor([[0, 2], [3, 0]])],
    "new dims": lambda w: w[None, 0, ..., None, 1:2],
    "aten": lambda w: torch.ops.aten.slice(w, 0, 1, 2),
}


def value_and_gradient(take: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def both(w: Any) -> Any:
        row = take(w)
        loss = (row * row * torch.arange(1, row.numel() + 1).reshape(row.shape)).sum()
        (grad,) = torch.autograd.grad(loss, w, create_graph=True)
        (again,) = torch.autograd.grad((grad * grad).sum(), w)
        return row, grad, again

    return both


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", TAKEN)
def test_value_and_gradient(name: str, size: str) -> None:
    w = ramp(SIZES[size], 4, 3).requires_grad_()
    for layout in (S0, S1):
        same(value_and_gradient(TAKEN[name]), (w, [layout]), mesh=THREE)


@pytest.mark.parametrize("name", ["last", "and a column", "and an index"])
def test_on_two_axes_and_beside_a_partial(name: str) -> None:
    w = ramp(5, 4, 3).requires_grad_()
    others = [mw.Partial(op) for op in ("avg", "max", "min")]
    for layout in ([S0, S0], [S0, S1], [S1, S0], [S0, P], [P, S0], [R, S0], *[[S0, p] for p in others]):
        same(value_and_gradient(TAKEN[name]), (w, layout), mesh=GRID)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.complex128], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    w = (torch.arange(5 * 4 * 3).reshape(5, 4, 3) % 3).to(dtype)
    for name in ("first", "last", "list", "and an index"):
        same(TAKEN[name], (w, [S0]), mesh=THREE)


def test_rows_without_numbers_stay_where_they_are() -> None:
    w = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0], [3.0, 4.0]], dtype=torch.float64)
    same(lambda w: [w[0], w[1], w[2]], (w, [S0]), mesh=THREE)


def test_only_the_row_moves() -> None:
    """A loop over experts gathered all experts for each of them."""

    def run() -> Any:
        w = mw.shard_tensor(torch.ones(6, 8, 4).requires_grad_(), THREE, [S0])
        x = mw.shard_tensor(torch.ones(2, 8), THREE, [R])
        with collective.counting() as sent:
            sum((x @ w[i]).relu() for i in range(6)).sum().backward()
        return sent.table, mw.unshard(w.grad)

    for table, grad in mw.simulate(run, THREE):
        assert table == {("all_reduce", ("x",)): [6, 252]}  # of what each expert gives, which is less than the expert
        assert torch.equal(grad, torch.full((6, 8, 4), 2.0))


@pytest.mark.parametrize("index", [5, -6, torch.tensor(5)])
def test_out_of_range(index: Any) -> None:
    def run() -> str:
        with pytest.raises(IndexError) as caught:
            mw.shard_tensor(ramp(5, 4), THREE, [S0])[index]
        return str(caught.value)

    for message in mw.simulate(run, THREE):
        assert message == f"index {int(index)} is out of bounds for dimension 0 with size 5"


def test_an_index_out_of_range_beside_a_row_of_one_rank() -> None:
    """The ranks that do not have the row looked up nothing, so that one alone complained."""

    def run() -> str:
        w = mw.shard_tensor(ramp(5, 4), THREE, [S0])
        with pytest.raises(IndexError) as caught:
            w[1, torch.tensor([0, 4])]
        return str(caught.value)

    for message in mw.simulate(run, THREE):
        assert "index 4 is out of bounds for dimension 0 with size 4" in message


WRITES: dict[str, Callable[[Any], Any]] = {
    "zero": lambda w: w[1].zero_(),
    "add": lambda w: w[-1].add_(2.0),
    "mul": lambda w: w[1:2].mul_(3.0),
    "copy": lambda w: w.select(0, 1).copy_(torch.arange(4.0)),
    "through two": lambda w: w[1][1:3].add_(1.0),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WRITES)
def test_writes_to_a_row_reach_the_whole(name: str, size: str) -> None:
    def written(w: Any) -> Any:
        h = w * 2
        row = h[1]
        made = WRITES[name](h)
        loss = (h * h).sum() + (row * 3).sum()
        return h, row, made, torch.autograd.grad(loss, w)[0]

    same(written, (ramp(SIZES[size], 4).requires_grad_(), [S0]), mesh=THREE)
