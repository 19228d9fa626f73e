"""``associative_scan`` of PyTorch along split dims: values, gradients and theirs, eagerly and captured."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import meshwright as mw
from meshwright import collective
from meshwright.errors import DispatchError

associative_scan = pytest.importorskip("torch._higher_order_ops.associative_scan").associative_scan  # name taken early
F64 = torch.float64
Rows = tuple[Tensor, ...]


def recurrence(before: Rows, row: Rows) -> Rows:
    return before[0] * row[0], row[0] * before[1] + row[1]


def product(before: Rows, row: Rows) -> Rows:
    return (row[0] @ before[0],)


def two(before: Rows, row: Rows) -> Rows:
    return before[0] + row[0], torch.logaddexp(before[1], row[1])


def results(fn: Any, xs: Rows, reverse: bool) -> list[Tensor]:
    """Values, gradients of the last one, and of these."""
    made = associative_scan(fn, xs, 1, reverse=reverse, combine_mode="generic")
    first = torch.autograd.grad(made[-1].tanh().sum(), xs, create_graph=True, allow_unused=True)
    first = [torch.zeros_like(x) if g is None else g for g, x in zip(first, xs, strict=True)]
    again = torch.autograd.grad(sum((g * g).sum() for g in first), xs, allow_unused=True)
    return [*made, *first, *(torch.zeros_like(x) if g is None else g for g, x in zip(again, xs, strict=True))]


LAID: list[tuple[mw.Mesh, dict[str, Any]]] = [
    (mw.Mesh({"a": 3}), {"a": mw.Shard(1)}),
    (mw.Mesh({"a": 3}), {"a": mw.Shard(0)}),  # of two rows: one rank has none
    (mw.Mesh({"a": 2, "b": 3}), {"a": mw.Shard(1), "b": mw.Shard(1)}),
    (mw.Mesh({"a": 2, "b": 3}), {"a": mw.Shard(0), "b": mw.Shard(1)}),
    (mw.Mesh({"a": 4, "b": 2}), {"a": mw.Shard(1), "b": mw.Shard(2)}),
    (mw.Mesh({"a": 2}), {"a": mw.Partial()}),
]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("fn", [recurrence, product, two])
@pytest.mark.parametrize("t", [1, 3, 4, 17, 32])  # of 3 and 4 nested parts in the middle are empty
@pytest.mark.thin(3)
def test_like_one_device(t: int, fn: Any, reverse: bool) -> None:
    draw = torch.Generator().manual_seed(t)
    xs = tuple(torch.rand(2, t, 3, 3, dtype=F64, generator=draw) + 0.3 for _ in range(1 if fn is product else 2))
    want = results(fn, tuple(x.clone().requires_grad_() for x in xs), reverse)

    def run(mesh: mw.Mesh, laid: dict[str, Any]) -> list[Tensor]:
        own = tuple(mw.shard_tensor(x, mesh, laid).requires_grad_() for x in xs)
        made = results(fn, own, reverse)
        if t > 1 and fn is not product and laid["a"] != mw.Partial():
            assert made[0].placements == own[0].placements
        return [mw.unshard(x) for x in made]

    for mesh, laid in LAID:
        for made in mw.simulate(partial(run, mesh, laid), mesh):
            torch.testing.assert_close(made, want, rtol=1e-9, atol=1e-12)


def add(before: Tensor, row: Tensor) -> Tensor:
    return before + row


def named(before: dict[str, Tensor], row: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"gate": before["gate"] * row["gate"], "state": row["gate"] * before["state"] + row["state"]}


def segments(before: Rows, row: Rows) -> Rows:
    return before[0] | row[0], torch.where(row[0], row[1], before[1] + row[1])


def wide(before: Rows, row: Rows) -> Rows:
    return before[0] * row[0], row[0].unsqueeze(-1) * before[1] + row[1]


def latest(before: Rows, row: Rows) -> Rows:
    later = row[0] > before[0]
    return torch.where(later, row[0], before[0]), torch.where(later, row[1], before[1])


def oldest(before: Rows, row: Rows) -> Rows:
    return before[0], before[1] + row[1]


def drawn(t: int, *more: int) -> Tensor:
    return torch.rand(t, *more, dtype=F64, generator=torch.Generator().manual_seed(t)) - 0.4


# The function, what it is given of so many rows, and which of that has a gradient.
GIVEN: dict[str, tuple[Any, Any, list[bool]]] = {
    "one tensor": (add, lambda t: drawn(t, 2), [True]),
    "by name": (named, lambda t: {"gate": drawn(t, 2), "state": drawn(t, 2).cos()}, [True, True]),
    "bool first": (segments, lambda t: (drawn(t) > 0.3, drawn(t)), [False, True]),
    "other shapes": (wide, lambda t: (drawn(t, 2), drawn(t, 2, 3)), [True, True]),
    "a frozen tensor": (recurrence, lambda t: (drawn(t, 2), drawn(t, 2).cos()), [False, True]),
    "the other frozen": (recurrence, lambda t: (drawn(t, 2), drawn(t, 2).cos()), [True, False]),
    "whole numbers": (latest, lambda t: (drawn(t), torch.arange(t)), [True, False]),
    "of the first row": (oldest, lambda t: (drawn(t, 2), drawn(t, 2)), [True, True]),
}


def graph(fn: Any, xs: Any, needs: list[bool], uses: int) -> list[Any]:
    """Values, which of them have a graph, gradients of one of them, and of these: None where there is none."""
    flat = tree_leaves(xs)
    own = [x for x, need in zip(flat, needs, strict=True) if need]
    made = tree_leaves(associative_scan(fn, xs, 0, combine_mode="generic"))
    found: list[Any] = [*made, *(x.requires_grad for x in made)]
    if not made[uses].requires_grad:
        return found
    first = torch.autograd.grad(
        (made[uses] * made[uses].detach().cos()).sum(), own, create_graph=True, allow_unused=True
    )
    again = torch.stack([(g * g).sum() for g in first if g is not None]).sum()
    second = torch.autograd.grad(again, own, allow_unused=True) if again.requires_grad else [None]
    return [*found, *first, *second]


@pytest.mark.parametrize("uses", [0, -1])
@pytest.mark.parametrize("name", GIVEN)
def test_the_graph_is_that_of_one_device(name: str, uses: int) -> None:
    """Ranks have other rows, one of them or none, and the same graph: what has no gradient there has none here."""
    fn, given, needs = GIVEN[name]
    for t, mesh in ((7, mw.Mesh({"a": 4})), (5, mw.Mesh({"a": 2, "b": 2}))):

        def run(made: Any, t: int = t) -> list[Any]:
            xs = tree_map(made, given(t))
            for x, need in zip(tree_leaves(xs), needs, strict=True):
                x.requires_grad_(need)
            found = graph(fn, xs, needs, uses)
            return [mw.unshard(f) if isinstance(f, mw.DistTensor) else f for f in found]

        want = run(lambda x: x)
        laid = {axis: mw.Shard(0) for axis in mesh.axes}
        for found in mw.simulate(lambda: run(lambda x: mw.shard_tensor(x, mesh, laid)), mesh):  # noqa: B023
            assert [type(f) for f in found] == [type(w) for w in want]
            for f, w in zip(found, want, strict=True):
                torch.testing.assert_close(f, w, rtol=1e-9, atol=1e-12)


class Layer(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.fn = nn.Linear(6, 18).double(), fn

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.into(x).chunk(2, -1)
        rows = (a.sigmoid().unflatten(-1, (3, 3)), b.unflatten(-1, (3, 3)))
        made = associative_scan(self.fn, rows[: 1 if self.fn is product else 2], 1, combine_mode="generic")
        return made[-1].square().mean()


@pytest.mark.parametrize("fn", [recurrence, product])
def test_captured(fn: Any) -> None:
    x, mesh = torch.randn(4, 18, 6, dtype=F64, generator=torch.Generator().manual_seed(1)), mw.Mesh({"dp": 2, "cp": 3})
    alone = Layer(fn)
    loss = alone(x)
    loss.backward()

    def run() -> tuple[float, Tensor, dict[str, int]]:
        model = Layer(fn)
        before = model.into.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        batch = {"dp": mw.Shard(0), "cp": mw.Shard(1)}
        step = mw.compile_step(model, lambda m, x: m(x), optimizer, x, mesh=mesh, batch=batch)
        return float(step(x)), before - mw.unshard(model.into.weight), step.program.kinds

    for found, grad, kinds in mw.simulate(run, mesh):
        assert found == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(grad, alone.into.weight.grad, rtol=1e-9, atol=1e-12)
        assert kinds["exchange_rows"] == (4 if fn is recurrence else 2)  # of each tensor, forward and backward


def test_what_is_sent_does_not_depend_on_the_length() -> None:
    mesh = mw.Mesh({"cp": 4})

    def run(t: int) -> int:
        x = mw.shard_tensor(torch.ones(2, t, 3, dtype=F64), mesh, {"cp": mw.Shard(1)})
        with collective.counting() as counts:
            associative_scan(recurrence, (x, x), 1, combine_mode="generic")
        return counts.total_bytes

    for t in (16, 64):  # one row of each tensor to each rank behind
        assert mw.simulate(partial(run, t), mesh) == [after * 2 * 2 * 3 * 8 for after in (3, 2, 1, 0)]


@pytest.mark.parametrize("what", ["a DistTensor", "a tensor that requires a gradient and"])
def test_a_function_that_uses_a_tensor_of_its_own(what: str) -> None:
    mesh = mw.Mesh({"cp": 2})

    def run() -> None:
        scale = torch.rand(3).requires_grad_()
        if what == "a DistTensor":
            scale = mw.shard_tensor(scale.detach(), mesh, {})
        x = mw.shard_tensor(torch.rand(4, 3), mesh, {"cp": mw.Shard(0)})
        with torch.no_grad():
            if what != "a DistTensor":
                associative_scan(lambda a, b: a * scale + b, x, 0, combine_mode="generic")
        associative_scan(lambda a, b: a * scale + b, x, 0, combine_mode="generic")

    with pytest.raises(DispatchError, match=f"combine_fn uses {what} that it is not given: make it one of xs"):
        mw.simulate(run, mesh)


def test_a_function_that_cannot_combine_nothing() -> None:
    """PyTorch's scan of two rows calls it with none, and of three it does not."""
    x, mesh = torch.rand(3, 2, dtype=F64), mw.Mesh({"cp": 2})

    def summed(before: Tensor, row: Tensor) -> Tensor:
        return before + row * before.sum() / before.sum()

    want = associative_scan(summed, x, 0, combine_mode="generic")
    laid = {"cp": mw.Shard(0)}
    for found in mw.simulate(
        lambda: mw.unshard(associative_scan(summed, mw.shard_tensor(x, mesh, laid), 0, combine_mode="generic")), mesh
    ):
        torch.testing.assert_close(found, want)


def test_a_function_that_changes_the_dtype() -> None:
    mesh = mw.Mesh({"cp": 3})

    def run() -> None:
        x = mw.shard_tensor(torch.ones(6, dtype=F64), mesh, {"cp": mw.Shard(0)})
        associative_scan(lambda a, b: (a + b).float(), x, 0, combine_mode="generic")

    with pytest.raises(DispatchError, match=r"combine_fn makes .*float32.* of rows of .*float64.*: convert xs before"):
        mw.simulate(run, mesh)
