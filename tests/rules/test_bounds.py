"""Indices out of range of a split dim are refused as on one device: the same kind of exception, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw

Tensor = torch.Tensor
N = 5  # rows: over 3 ranks uneven, over 8 with empty shards
INDICES = (0, N - 1, -1, -N, -N - 1, N, N + 3, 2**40, -(2**40))


def _lookups() -> dict[str, Callable[[Any, Any], Any]]:
    """Functions of x (N, 3), whose first dim is split, and of two indices."""
    one = lambda i: i.reshape(-1, 1).expand(-1, 3)  # noqa: E731
    new = torch.ones(2, 3, dtype=torch.float64)
    return {
        "embedding": lambda x, i: F.embedding(i, x),
        "embedding of the op": lambda x, i: torch.embedding(x, i, 2),
        "embedding_bag": lambda x, i: F.embedding_bag(i.reshape(1, -1), x, mode="sum"),
        "x[i]": lambda x, i: x[i],
        "x[i, 1:]": lambda x, i: x[i, 1:],
        "x[i, i]": lambda x, i: x[i, torch.zeros_like(i)],
        "x[list]": lambda x, i: x[mw.unshard(i).tolist()],
        "index_select": lambda x, i: x.index_select(0, i),
        "gather": lambda x, i: x.gather(0, one(i)),
        "take": lambda x, i: x[:, 0].take(i),
        "take_along_dim": lambda x, i: torch.take_along_dim(x, one(i), 0),
        "index_add": lambda x, i: x.index_add(0, i, new),
        "index_copy": lambda x, i: x.index_copy(0, i, new),
        "index_fill": lambda x, i: x.index_fill(0, i, 2.0),
        "index_put": lambda x, i: torch.index_put(x, (i,), new),
        "index_put accumulated": lambda x, i: torch.index_put(x, (i,), new, accumulate=True),
        "scatter": lambda x, i: x.scatter(0, one(i), new),
        "scatter of a number": lambda x, i: x.scatter(0, one(i), 3.0),
        "scatter_add": lambda x, i: x.scatter_add(0, one(i), new),
        "scatter_reduce": lambda x, i: x.scatter_reduce(0, one(i), new, "amax"),
        "index_add_": lambda x, i: x.clone().index_add_(0, i, new),
        "setitem": lambda x, i: _set(x.clone(), i, new),
        "setitem of a number": lambda x, i: _set(x.clone(), i, 2.0),
        "put_": lambda x, i: x.clone().put_(i, new[:, 0]),
        "one_hot": lambda x, i: F.one_hot(i, N),
    }


def _set(x: Any, i: Any, value: Any) -> Any:
    x[i] = value
    return x


def _losses() -> dict[str, Callable[[Any, Any], Any]]:
    """Functions of logits (2, N), whose classes are split, and of two targets."""
    weight = torch.arange(1.0, N + 1, dtype=torch.float64)
    return {
        "cross_entropy": lambda x, i: F.cross_entropy(x, i),
        "cross_entropy none": lambda x, i: F.cross_entropy(x, i, reduction="none", ignore_index=N + 3),
        "cross_entropy ignoring": lambda x, i: F.cross_entropy(x, i, ignore_index=-1),
        "cross_entropy weighed": lambda x, i: F.cross_entropy(x, i, weight, label_smoothing=0.1),
        "nll_loss": lambda x, i: F.nll_loss(x, i),
        "nll_loss weighed": lambda x, i: F.nll_loss(x, i, weight, reduction="sum", ignore_index=-N),
    }


def _outcome(fn: Callable[[], Tensor]) -> Tensor | type[BaseException]:
    try:
        made = fn()
        return mw.unshard(made) if isinstance(made, torch.Tensor) else made
    except (IndexError, RuntimeError, ValueError) as error:
        return type(error)


def _same(fn: Callable[[Any, Any], Any], x: Tensor, dim: int, ranks: int) -> None:
    mesh = mw.Mesh({"a": ranks})
    want = [_outcome(lambda k=k: fn(x, torch.tensor([k, 1]))) for k in INDICES]

    def run() -> Any:
        d = mw.shard_tensor(x, mesh, [mw.Shard(dim)])
        return [_outcome(lambda k=k: fn(d, mw.shard_tensor(torch.tensor([k, 1]), mesh, []))) for k in INDICES]

    for made in mw.simulate(run, mesh):
        for k, got, expected in zip(INDICES, made, want, strict=True):
            if isinstance(expected, type):
                assert got is expected, (k, got, expected)
            else:
                assert isinstance(got, torch.Tensor), (k, got)
                torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize("name", _lookups())
def test_lookup(name: str, ranks: int) -> None:
    _same(_lookups()[name], torch.randn(N, 3, dtype=torch.float64), 0, ranks)


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize("name", _losses())
def test_targets(name: str, ranks: int) -> None:
    _same(_losses()[name], torch.randn(2, N, dtype=torch.float64), 1, ranks)


@pytest.mark.parametrize("name", ["embedding", "x[i]", "gather", "index_add", "setitem", "cross_entropy", "nll_loss"])
def test_split_index(name: str) -> None:
    """Only some ranks see the bad index: they raise as one device does, and that ends the others."""
    lookup = name in _lookups()
    fn = (_lookups() | _losses())[name]
    mesh = mw.Mesh({"a": 3, "b": 2})
    x = torch.randn(N, 3) if lookup else torch.randn(2, N)
    x, index = x.double(), torch.tensor([1, N])
    expected = _outcome(lambda: fn(x, index))
    assert isinstance(expected, type)

    def run() -> Any:
        d = mw.shard_tensor(x, mesh, {"a": mw.Shard(0 if lookup else 1)})
        return mw.unshard(fn(d, mw.shard_tensor(index, mesh, {"b": mw.Shard(0)})).sum())

    with pytest.raises(expected):
        mw.simulate(run, mesh)


def test_the_message_tells_the_size_of_the_whole_dim() -> None:
    mesh = mw.Mesh({"a": 2})

    def run() -> Any:
        return mw.shard_tensor(torch.zeros(8), mesh, [mw.Shard(0)])[torch.tensor([0, 8])]

    with pytest.raises(IndexError, match="index 8 is out of bounds for dimension 0 with size 8"):
        mw.simulate(run, mesh)


class _Classes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


@pytest.mark.parametrize("bad", ["ids", "targets"])
def test_captured_step(bad: str) -> None:
    """The kernels' own checks are in the program."""
    mesh = mw.Mesh({"tp": 2})

    def run() -> Any:
        torch.manual_seed(0)
        model = _Classes()
        good = {"ids": torch.tensor([0, 1, 5, 3]), "targets": torch.tensor([1, -100, 2, 5])}
        step = mw.compile_step(
            model,
            lambda model, batch: F.cross_entropy(model(batch["ids"]), batch["targets"]),
            torch.optim.SGD(model.parameters(), lr=0.1),
            good,
            mesh=mesh,
            layouts={"table.weight": {"tp": mw.Shard(0)}, "head.weight": {"tp": mw.Shard(0)}},
        )
        before = float(step(good))
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            step({**good, bad: torch.tensor([0, 1, 6, 3])})
        return before, float(step(good))

    for before, after in mw.simulate(run, mesh):
        assert after < before
