"""Where PyTorch's C code reads a DistTensor as a number or as memory: the global value, on every rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.errors import DispatchError, LayoutError
from meshwright.tensor.dist_tensor import Numbers
from tests.support.compare import S0, R, on_ranks, plain

THREE = mw.Mesh({"x": 3})
PARTS = {"sum": [1.0, 4.0, -2.0], "avg": [2.0, 4.0, 3.0], "max": [1.0, 3.0, 2.0], "product": [2.0, 0.5, 3.0]}
X = torch.arange(5.0, dtype=torch.float64)


def adam(lr: Any) -> torch.Tensor:
    p = torch.ones(2, dtype=torch.float64, requires_grad=True)
    p.grad = torch.ones_like(p)
    torch.optim.Adam([p], lr=lr, foreach=False).step()
    return p


READ: dict[str, Callable[[Any, Any], Any]] = {
    "add alpha": lambda x, s: torch.add(x, x, alpha=s),
    "add_ alpha": lambda x, s: x.clone().add_(x, alpha=s),
    "addcmul": lambda x, s: torch.addcmul(x, x, x, value=s),
    "addmm": lambda x, s: torch.addmm(torch.eye(2), torch.eye(2), torch.eye(2), alpha=s, beta=s),
    "full_like": lambda x, s: torch.full_like(x, s),
    "leaky_relu": lambda x, s: F.leaky_relu(-x, s),
    "hardtanh": lambda x, s: F.hardtanh(x, -s, s),
    "std correction": lambda x, s: torch.std(x, correction=s),
    "histc": lambda x, s: torch.histc(x + 0, bins=3, max=s),
    "norm p": lambda x, s: x.norm(p=s),
    "foreach alpha": lambda x, s: torch._foreach_add([x], [x], alpha=s),
    "adam lr": lambda x, s: adam(s),
    "torch.Tensor": lambda x, s: torch.Tensor(s),
    "torch.Tensor of a list": lambda x, s: torch.Tensor([s, 1]),
    "Tensor.new": lambda x, s: torch.ones(1).new([s]),
    "tensor": lambda x, s: [torch.tensor([s, 2.0]), torch.as_tensor([s]), torch.asarray(s)],
    "numpy": lambda x, s: [np.asarray(s).tolist(), np.array([s, s]).tolist(), float(np.float64(s))],
    "sizes": lambda x, s: [torch.zeros(s.long()), list(range(s.long())), X[: s.long()], math.sqrt(s)],
}


def test_the_first_part_that_could_be_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on the kernel that reads numbers asks whose they are."""
    noticed: list[int] = []

    def x() -> Any:
        return mw.shard_tensor(torch.ones(3, 2), THREE, [S0])

    def recorded() -> Any:
        return x().requires_grad_().sum()

    part = mw.from_local(torch.tensor(1.0), THREE, [mw.Partial()], check=False)

    def assigned() -> None:
        made = mw.shard_tensor(torch.tensor(1.0), THREE, [R])
        made.data = recorded()

    def counted(rows: Any) -> Any:
        return F.cross_entropy(rows, torch.zeros(3, dtype=torch.long))

    made: dict[str, tuple[Callable[[], Any], bool]] = {
        "recorded": (recorded, False),
        "recorded, known": (lambda: [recorded() * 2.0 for _ in range(3)], False),
        "read": (lambda: [recorded().item(), str(recorded()), bool(recorded())], False),
        "mean of rows": (lambda: [counted(x().requires_grad_()) for _ in range(3)], False),
        "mean of rows without history": (lambda: counted(x()), True),
        "sum": (lambda: x().sum(), True),
        "detached": (lambda: recorded().detach(), True),
        "detached in place": (lambda: recorded().detach_(), True),
        "data": (lambda: recorded().data, True),
        "assigned data": (assigned, True),
        "copied": (lambda: copy.deepcopy(part), True),
        "of locals": (lambda: mw.from_local(torch.tensor(1.0), THREE, [mw.Partial()], check=False), True),
        "maximum": (lambda: x().max(), True),
        "row": (lambda: x()[1, 1], True),
    }
    for name, (make, expected) in made.items():
        for _ in range(2):  # of a plan that is made, and of one that is known
            noticed.clear()
            monkeypatch.setattr(Numbers, "to_be_read", lambda: noticed.append(1))
            on_ranks(make, THREE)
            assert bool(noticed) == expected, name


CASES = [(name, layout) for name in READ for layout in (None, R, S0) if layout is None or name != "norm p"]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_partial_in_the_place_of_a_number(name: str, layout: Any) -> None:
    """The parser of C functions takes a 0-d tensor for a number without asking whose it is: it read the own part."""
    want = plain(READ[name](X, torch.tensor(3.0, dtype=torch.float64)))

    def run() -> Any:
        x = X if layout is None else mw.shard_tensor(X, THREE, [layout])
        here = mw.ranks.runtime.RT.rank
        return [
            plain(READ[name](x, mw.from_local(torch.tensor(parts[here], dtype=torch.float64), THREE, [mw.Partial(op)])))
            for op, parts in PARTS.items()
        ]

    for rank in on_ranks(run, THREE):
        for got in rank:
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", [torch.Tensor, lambda x: torch.ones(1).new(x), np.asarray])
def test_memory_of_a_shard_is_not_taken_for_the_tensor(kind: Callable[[Any], Any]) -> None:
    want = plain(kind(X.float()))
    for got in on_ranks(lambda: plain(kind(mw.shard_tensor(X.float(), THREE, [S0]))), THREE):
        np.testing.assert_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.set_(),
        lambda x: x.set_(torch.ones(2, 4)),  # the shape of a part
        lambda x: x.set_(torch.ones(9).untyped_storage(), 0, (3, 3)),
        lambda x: x.set_(source=torch.ones(5, 4)),
    ],
)
def test_other_memory_is_refused(write: Callable[[Any], Any]) -> None:
    """Without a DistTensor among its arguments set_ went past dispatch: the spec lay over other memory."""

    def run() -> None:
        with pytest.raises((DispatchError, LayoutError), match=r"mw\.from_local"):
            write(mw.shard_tensor(torch.zeros(5, 4), THREE, [S0]))
        x = mw.shard_tensor(torch.zeros(5, 4).requires_grad_(), THREE, [S0]) * 2
        with pytest.raises(RuntimeError, match="derivative for set_ is not implemented"):
            x.set_(x * 3)

    on_ranks(run, THREE)


def test_a_tensor_of_another_shape_is_the_new_global_value() -> None:
    value = torch.arange(6.0).view(2, 3)

    def run() -> Any:
        x = mw.shard_tensor(torch.zeros(5, 4), THREE, [S0])
        x.set_(value)
        return x.shape, plain(x)

    for shape, got in on_ranks(run, THREE):
        assert shape == (2, 3)
        assert torch.equal(got, value)
