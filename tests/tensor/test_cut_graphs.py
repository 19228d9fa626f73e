"""Nothing that is recorded ends the graph of gradients without a word: random ops in modes, ops without a formula."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.errors import CaptureError, DispatchError
from meshwright.program.compile import capture_local

Tensor = torch.Tensor
DP = mw.Mesh({"dp": 2})
X = torch.randn(8, 7, generator=torch.Generator().manual_seed(0))
Op = Callable[[Tensor], Any]


class Between(nn.Module):
    """Two layers, and what is done between them."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.a, self.b, self.op = nn.Linear(7, 8), nn.Linear(8, 5), op

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(self.op(h)).square().mean()  # type: ignore[no-any-return]


def made(op: Op) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Between(op)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def one_device(op: Op) -> list[Tensor]:
    model, optimizer = made(op)
    losses = []
    torch.manual_seed(5)
    for _ in range(2):
        with mw.reproducible_random():
            losses.append(model(X))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [torch.stack(losses).detach(), *(p.detach() for p in model.parameters())]


def captured(op: Op, capturing: Any = contextlib.nullcontext, running: Any = contextlib.nullcontext) -> list[Tensor]:
    def rank() -> list[Tensor]:
        model, optimizer = made(op)
        with capturing():
            step = mw.compile_step(model, None, optimizer, X, mesh=DP, batch={"dp": mw.Shard(0)})
        torch.manual_seed(5)
        with running():
            losses = torch.stack([mw.unshard(step(X).detach()).clone() for _ in range(2)])
        return [losses, *(mw.unshard(p.detach()) for p in model.parameters())]

    ranks: list[list[Tensor]] = mw.simulate(rank, DP)
    return ranks[0]


DROPS: dict[str, Op] = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "in place": lambda h: F.dropout(h * 1, 0.3, inplace=True),
    "native": lambda h: torch.native_dropout(h, 0.3, True)[0],
    "feature": lambda h: F.dropout2d(h.view(-1, 8, 1, 1), 0.3).flatten(1),
    "alpha": lambda h: F.alpha_dropout(h, 0.3, True),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "attention": lambda h: F.scaled_dot_product_attention(*[h.view(-1, 2, 2, 2)] * 3, dropout_p=0.3).flatten(1),
}


@pytest.mark.parametrize("name", DROPS)
def test_a_step_is_captured_and_runs_inside_of_reproducible_random(name: str) -> None:
    """With the masks that one device draws there, and their gradients."""
    want = one_device(DROPS[name])
    for modes in ((mw.reproducible_random,), (mw.reproducible_random, mw.reproducible_random)):
        torch.testing.assert_close(captured(DROPS[name], *modes), want)


@pytest.fixture
def twice() -> Iterator[Any]:
    """Operators that double: what is given of them to PyTorch's dispatcher differs."""
    library = torch.library.Library("meshwright_cut", "DEF")
    for name, key in (("plain", "CPU"), ("explicit", "CompositeExplicitAutograd"), ("formula", "CPU")):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x * 2, key)
        torch.library.register_fake(f"meshwright_cut::{name}", torch.empty_like, lib=library)
    torch.library.register_autograd("meshwright_cut::formula", lambda ctx, g: g * 2, lib=library)
    library.define("composite(Tensor x) -> Tensor")
    library.impl("composite", lambda x: x * 2, "CompositeImplicitAutograd")
    library.define("largest(Tensor x) -> Tensor")
    library.impl("largest", lambda x: x.argmax(-1, keepdim=True), "CPU")
    fake = lambda x: torch.empty((*x.shape[:-1], 1), dtype=torch.int64)  # noqa: E731
    torch.library.register_fake("meshwright_cut::largest", fake, lib=library)
    library.define("write(Tensor(a!) x) -> ()")
    library.impl("write", lambda x: (x.mul_(2), None)[1], "CPU")
    torch.library.register_fake("meshwright_cut::write", lambda x: None, lib=library)
    yield torch.ops.meshwright_cut
    library._destroy()


@pytest.mark.filterwarnings("ignore:.*has no rule for these arguments")
def test_ops_without_a_formula_are_refused_where_gradients_would_end(twice: Any) -> None:
    def without(h: Tensor) -> Tensor:
        with torch.no_grad():
            return h * twice.plain(h)

    right: list[Op] = [twice.formula, twice.composite, lambda h: h * twice.plain(h.detach())]
    right += [lambda h: h * twice.largest(h), without]
    for op in right:
        torch.testing.assert_close(captured(op), one_device(op))
    for op in (twice.plain, twice.explicit):
        with pytest.raises(CaptureError, match=r"^[^:]*test_cut_graphs.py:\d+: meshwright_cut.* no formula for its"):
            captured(op)


@pytest.mark.filterwarnings("ignore:.*has no rule for these arguments")
def test_a_step_by_hand_refuses_them_too(twice: Any) -> None:
    model, optimizer = made(twice.plain)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"test_cut_graphs.py:\d+: meshwright_cut.plain.*no formula"):
        mw.simulate(lambda: capture_local(step, DP, model=model, optimizer=optimizer, batch=X), DP)


@pytest.mark.filterwarnings("ignore:.*has no rule for these arguments")
def test_an_op_without_a_rule_that_writes_to_what_is_split_is_refused(twice: Any) -> None:
    """It would write to what was gathered for it; what is whole on every rank it writes to itself."""

    def rank() -> Tensor:
        whole = mw.shard_tensor(X, DP, {})
        twice.write(whole)
        with pytest.raises(DispatchError, match="meshwright_cut::write writes to its argument 'x'"):
            twice.write(mw.shard_tensor(X, DP, {"dp": mw.Shard(0)}))
        return mw.unshard(whole)

    for made in mw.simulate(rank, DP):
        torch.testing.assert_close(made, X * 2)


def test_a_compiled_model_draws_the_masks_of_reproducible_random() -> None:
    torch.manual_seed(0)
    model = Between(DROPS["dropout"])

    def drawn(fn: Callable[[Tensor], Tensor]) -> list[Any]:
        torch.manual_seed(1)
        model.zero_grad()
        with mw.reproducible_random():
            loss = fn(X)
            loss.backward()
        return [loss, *(p.grad for p in model.parameters())]

    torch.testing.assert_close(drawn(torch.compile(model, backend="eager")), drawn(model))
