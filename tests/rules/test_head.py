"""``F.linear_cross_entropy`` with split classes: one exchange, never all logits, the numbers of one device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import meshwright as mw
from meshwright.program import value_of
from meshwright.rules import head
from tests.support.compare import S0, S1, R

F: Any = nn.functional
pytestmark = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="PyTorch has it from 2.13 on")
ROWS, WIDTH, CLASSES = 7, 5, 11
torch.manual_seed(0)
X, W, BIAS, WEIGHT = (
    torch.randn(*s, dtype=torch.float64) for s in ((ROWS, WIDTH), (CLASSES, WIDTH), (CLASSES,), (CLASSES,))
)
WEIGHT.abs_()
TARGET = torch.randint(0, CLASSES, (ROWS,))
TARGET[2] = -100
FEW = [3, 4, -100, 0, 4, 1, 0]  # of five classes

# How ``x``, ``w``, the bias, the targets and the weight of classes lie.
LAID = [
    (R, S0, S0, R, S0),
    (R, S0, R, R, R),
    (S0, S0, S0, S0, R),
    (mw.Partial(), S0, S0, R, S0),
    (S0, R, R, S0, R),
    (S1, S0, S0, R, R),
]
GIVEN = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none"},
    {"reduction": "none", "label_smoothing": 0.3},
    {"label_smoothing": 0.2},
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LEAST", 2)
    monkeypatch.setattr(head, "BLOCK", 8)


def found(given: list[Tensor | None], named: dict[str, Any], options: Any = None) -> list[Tensor]:
    """The loss, gradients and gradients of these."""
    x, w, bias, target, weight = given
    loss = F.linear_cross_entropy(x, w, target, linear_bias=bias, weight=weight, options=options, **named)
    wanted = [t for t in (x, w, bias) if t is not None]
    first = torch.autograd.grad(loss.square().sum(), wanted, create_graph=options is None)
    again = torch.autograd.grad(sum(g.square().sum() for g in first), wanted) if options is None else ()
    return [loss, *first, *again]


def leaves(given: list[Tensor | None]) -> list[Tensor | None]:
    return [t if t is None or not t.is_floating_point() or t is WEIGHT else t.detach().requires_grad_() for t in given]


def laid(mesh: mw.Mesh, given: list[Tensor | None], placed: Any) -> list[Tensor | None]:
    made: list[Tensor | None] = []
    for t, p in zip(given, placed, strict=True):
        if t is None:
            made.append(None)
            continue
        whole = mw.shard_tensor(t.detach(), mesh, [p if isinstance(p, mw.Shard) else R])
        made.append(mw.reshard(whole, [p]).detach() if isinstance(p, mw.Partial) else whole)
    return [t if t is None or not t.is_floating_point() or i == 4 else t.requires_grad_() for i, t in enumerate(made)]


@pytest.mark.thin(2)
@pytest.mark.parametrize("named", GIVEN, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(5, marks=pytest.mark.long)])
def test_numbers_of_one_device(ranks: int, named: dict[str, Any]) -> None:
    mesh = mw.Mesh({"tp": ranks})
    for placed, bias, weight in itertools.product(LAID, (None, BIAS), (None, WEIGHT)):
        given = [X, W, bias, TARGET, weight]
        want = found(leaves(given), named)

        def run(given: Any = given, placed: Any = placed) -> list[Tensor]:
            return [mw.unshard(t.detach()) for t in found(laid(mesh, given, placed), named)]

        for made in mw.simulate(run, mesh):
            torch.testing.assert_close(made, [t.detach() for t in want], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("named", [{}, {"reduction": "none", "label_smoothing": 0.2}], ids=str)
def test_more_ranks_than_classes_and_no_rows(named: dict[str, Any]) -> None:
    """Ranks without classes, or without rows, add nothing; in the gradients of gradients too."""
    mesh = mw.Mesh({"dp": 2, "tp": 4})
    for rows in (7, 1, 2):
        given = [X[:rows], W[:5], BIAS[:5], torch.tensor(FEW[:rows]), None]
        want = found(leaves(given), named)

        def run(given: Any = given) -> list[Tensor]:
            x, w, bias, target = (
                mw.shard_tensor(t.detach(), mesh, p)
                for t, p in zip(given[:4], ([S0, R], [R, S0], [R, S0], [S0, R]), strict=True)
            )
            made = found([x.requires_grad_(), w.requires_grad_(), bias.requires_grad_(), target, None], named)
            return [mw.unshard(t.detach()) for t in made]

        for made in mw.simulate(run, mesh):
            torch.testing.assert_close(made, [t.detach() for t in want], rtol=1e-11, atol=1e-12)


def test_options_and_one_row() -> None:
    """Options of chunks do not change numbers, also where nothing is split but rows; one row needs no batch."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    mesh = mw.Mesh({"tp": 2})
    for x, target in ((X, TARGET), (X[0], TARGET[0])):
        given = [x, W, BIAS, target, None]
        want = found(leaves(given), {}, options)
        rows = S0 if x.ndim == 2 else R
        for placed in ((R, S0, S0, R, R), (rows, R, R, rows, R)):

            def run(given: Any = given, placed: Any = placed) -> list[Tensor]:
                return [mw.unshard(t.detach()) for t in found(laid(mesh, given, placed), {}, options)]

            for made in mw.simulate(run, mesh):
                torch.testing.assert_close(made, [t.detach() for t in want], rtol=1e-11, atol=1e-12)


def test_classes_that_are_masked() -> None:
    """A block of which all logits are -inf (padding of a vocabulary) counts for nothing, and has no gradient of nan."""
    bias = torch.where(torch.arange(CLASSES) < 5, BIAS, -torch.inf)
    target = torch.tensor(FEW)
    want = found(leaves([X, W, bias, target, None]), {})[:3]

    def run() -> list[Tensor]:
        return [
            mw.unshard(t.detach()) for t in found(laid(PAIR, [X, W, bias, target, None], (R, S0, S0, R, R)), {})[:3]
        ]

    assert all(t.isfinite().all() for t in want[:3])
    for made in mw.simulate(run, PAIR):
        torch.testing.assert_close(made, [t.detach() for t in want], rtol=1e-11, atol=1e-12)


PAIR = mw.Mesh({"tp": 2})


def test_all_rows_ignored_or_wrong() -> None:
    def run() -> None:
        x, w = mw.shard_tensor(X, PAIR, [R]).requires_grad_(), mw.shard_tensor(W, PAIR, [S0]).requires_grad_()
        ignored = mw.shard_tensor(torch.full((ROWS,), -100), PAIR, [R])
        F.linear_cross_entropy(x, w, ignored, reduction="sum").backward()
        assert not mw.unshard(x.grad).any()
        assert F.linear_cross_entropy(x, w, ignored).isnan()
        for wrong in (CLASSES, -1):
            with pytest.raises(IndexError, match="out of bounds"):
                F.linear_cross_entropy(x, w, mw.shard_tensor(torch.full((ROWS,), wrong), PAIR, [R]))
        with pytest.raises(RuntimeError, match="dtype"):
            F.linear_cross_entropy(x.float(), w, ignored)

    mw.simulate(run, PAIR)


def test_one_exchange() -> None:
    """One number of each row for each rank, as logits of targets are added up with the loss; the gradient of ``x``."""

    def run() -> Any:
        x, w = mw.shard_tensor(X, PAIR, [R]).requires_grad_(), mw.shard_tensor(W, PAIR, [S0]).requires_grad_()
        target = mw.shard_tensor(TARGET, PAIR, [R])
        with mw.explain() as forward:
            loss = F.linear_cross_entropy(x, w, target)
        with mw.explain() as backward:
            loss.backward()
            mw.unshard(x.grad)
        return forward.counts.bytes, backward.counts.bytes

    forward, backward = mw.simulate(run, PAIR)[0]
    assert forward == {"all_reduce": 2 * ROWS * 8}  # 2 × (2 - 1) / 2 of two numbers of each row
    assert backward == {"all_reduce": ROWS * WIDTH * 8}


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest tensor that an op makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(made):
            if isinstance(t, Tensor):
                self.most = max(self.most, t.numel())
        return made


@pytest.mark.parametrize("placed", [(R, S0, R), (S0, R, S0), (S0, R, R), (S0, S0, S0)], ids=str)
def test_never_all_logits(placed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, classes = 96, 64
    options = None if placed[1] is S0 else nn.LinearCrossEntropyOptions()
    monkeypatch.setattr(head, "BLOCK", 4 * classes)

    def run() -> int:
        x, w = torch.randn(rows, 4), torch.randn(classes, 4)
        given = (x, w, torch.zeros(rows, dtype=torch.long))
        x, w, target = (mw.shard_tensor(t, PAIR, [p]) for t, p in zip(given, placed, strict=True))
        with Largest() as seen:
            F.linear_cross_entropy(x.requires_grad_(), w.requires_grad_(), target, options=options).backward()
        return seen.most

    assert max(mw.simulate(run, PAIR)) < rows * classes // 4


def summed(x: Tensor, w: Tensor, target: Tensor) -> list[Tensor]:
    """The loss and its gradients."""
    loss = F.linear_cross_entropy(x, w, target)
    return [loss, *torch.autograd.grad(loss, [x, w])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_dtypes(dtype: torch.dtype) -> None:
    """Within the rounding of the dtype, and under autocast in the dtypes of one device."""
    x, w = X.to(dtype), W.to(dtype)
    exact = summed(x.double().requires_grad_(), w.double().requires_grad_(), TARGET)

    def both(x: Tensor, w: Tensor, wide: Tensor, table: Tensor, target: Tensor) -> list[Tensor]:
        plain = summed(x, w, target)
        with torch.autocast("cpu", dtype):
            return [*plain, *summed(wide, table, target)]

    given = [x, w, x.float(), w.float()]
    want = both(*[t.requires_grad_() for t in given], TARGET)

    def run() -> Any:
        made = [mw.shard_tensor(t.detach(), PAIR, [p]) for t, p in zip(given, (R, S0, R, S0), strict=True)]
        return [
            mw.unshard(t.detach())
            for t in both(*[t.requires_grad_() for t in made], mw.shard_tensor(TARGET, PAIR, [R]))
        ]

    for made in mw.simulate(run, PAIR):
        assert [t.dtype for t in made] == [t.dtype for t in want]
        for t, one in zip(made, (*exact, *exact), strict=True):
            torch.testing.assert_close(t.double(), one, rtol=0.03, atol=0.02)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.up, self.head = nn.Embedding(90, 6), nn.Linear(6, 6), nn.Linear(6, 90, bias=False)
        self.double()

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        hidden = self.up(self.embed(ids)).tanh().flatten(0, 1)
        loss: Tensor = F.linear_cross_entropy(hidden, self.head.weight, target.flatten())
        return loss


IDS, NEXT = torch.randint(0, 90, (4, 9)), torch.randint(0, 90, (4, 9))


def trained(model: Any, step: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(IDS, NEXT)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 4}], ids=str)
def test_captured(sizes: dict[str, int]) -> None:
    """The losses of one device, and no value of the program is as large as half of a rank's logits."""
    mesh, want = mw.Mesh(sizes), trained(Tiny())
    batch = {"dp": S0} if "dp" in sizes else {}

    def run() -> Any:
        model = Tiny()
        step = mw.compile_step(
            model, lambda m, batch: m(*batch), torch.optim.SGD(model.parameters(), lr=0.5), (IDS, NEXT), mesh=mesh,
            layouts={"head.weight": {"tp": S0}}, batch=batch,
        )  # fmt: skip
        values = [value_of(n) for n in step.program.graph.nodes]
        held = [torch.Size(v.shape).numel() for v in values if v is not None]
        return [float(step((IDS, NEXT))) for _ in range(3)], max(held)

    for losses, largest in mw.simulate(run, mesh):
        assert losses == pytest.approx(want, rel=1e-12)
        assert largest <= max(90 * 6, IDS.numel() * 90 // mesh.size // 2)
