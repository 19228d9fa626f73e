"""A Partial that several consumers need whole is reduced once, and all of them get the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright import collective
from tests.support.compare import P, R, on_ranks, ramp

PAIR, THREE, GRID = mw.Mesh({"x": 2}), mw.Mesh({"x": 3}), mw.Mesh({"a": 2, "b": 2})
# An extremum is two: the value, and how many ranks hold it, by which its gradient is shared out.
REDUCTIONS = {"sum": 1, "avg": 1, "max": 2, "min": 2}
WHOLE = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}


def parts_of(mesh: mw.Mesh) -> torch.Tensor:
    return torch.randn(mesh.size, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def leaf(op: str, mesh: mw.Mesh) -> mw.DistTensor:
    placements = [mw.Partial(op)] * mesh.ndim
    return mw.from_local(parts_of(mesh)[mw.rank()].clone(), mesh, placements).requires_grad_()


def several(x: torch.Tensor) -> torch.Tensor:
    """Consumers of which one takes the value beside what was made of it: a difference that must not be negative."""
    spread = (x.amax(0) - x).sqrt().detach().sum()  # whose derivative at 0 is infinite
    return spread + x.exp().sum() + (x * x).sum() + (2 * x - 1).sin().sum()


def whole(op: str, mesh: mw.Mesh, fn: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """On one device: the value, its gradient, and that of the sum of its squares."""
    x = WHOLE[op](parts_of(mesh)).requires_grad_()
    made = fn(x)
    (first,) = torch.autograd.grad(made, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return made.detach(), first.detach(), second


def holders(op: str, x: mw.DistTensor, grad: torch.Tensor) -> torch.Tensor:
    """The share of this rank's part of a gradient of the value: ranks that hold an extremum share it equally."""
    if op in ("sum", "avg"):
        return grad / (x.mesh.size if op == "avg" else 1)
    held = (x.to_local().detach() == mw.unshard(x).detach()).to(grad.dtype)
    return grad * held / mw.unshard(mw.from_local(held, x.mesh, [P] * x.mesh.ndim))


@pytest.mark.parametrize("mesh", [PAIR, THREE, GRID], ids=repr)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_a_leaf_is_reduced_once(op: str, mesh: mw.Mesh) -> None:
    want, first, second = whole(op, mesh, several)

    def run() -> Any:
        x = leaf(op, mesh)
        with collective.counting() as counts:
            made = several(x)
        sent = sum(n for n, _ in counts.table.values()), {axes for _, axes in counts.table}
        for _ in range(2):  # what is kept of the first backward is of use for the second
            (g,) = torch.autograd.grad(made, x, create_graph=True, retain_graph=True)
            made = several(x)
        if op == "sum":
            (again,) = torch.autograd.grad(g.square().sum(), x)
            torch.testing.assert_close(mw.unshard(again), second)
        torch.testing.assert_close(g.to_local().detach(), holders(op, x, first))
        return mw.unshard(made).detach(), sent

    for got, (count, axes) in on_ranks(run, mesh):
        torch.testing.assert_close(got, want)
        assert count == REDUCTIONS[op]
        assert axes == {mesh.axes}


@pytest.mark.parametrize("when", ["within", "before", "after", "around"])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_in_a_region_that_runs_again(op: str, when: str) -> None:
    """Both runs choose alike, whether the value was reduced before the first run, or between it and the second."""

    def fn(x: torch.Tensor, again: Callable[..., torch.Tensor]) -> torch.Tensor:
        made = x.cos().sum() if when in ("before", "around") else 0.0
        made = made + again(several, x)
        made = made + (x.sin().sum() if when in ("after", "around") else 0.0)
        return made + again(several, x)

    want, first, _ = whole(op, PAIR, lambda x: fn(x, lambda f, t: f(t)))

    def run() -> Any:
        x = leaf(op, PAIR)
        with collective.counting() as counts:
            made = fn(x, lambda f, t: checkpoint(f, t, use_reentrant=False))
            (g,) = torch.autograd.grad(made, x)
        torch.testing.assert_close(g.to_local(), holders(op, x, first))
        return mw.unshard(made).detach(), counts.kinds

    for got, kinds in on_ranks(run, PAIR):
        torch.testing.assert_close(got, want)
        assert kinds == {"all_reduce": REDUCTIONS[op]}


@pytest.mark.parametrize("op", REDUCTIONS)
def test_consumers_of_either_type(op: str) -> None:
    """One is the same on all ranks, one is of each rank's rows: the value is there, gradients are summed."""
    y = ramp(4, 15)

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.exp().sum() + (x.flatten() * y).sin().sum() + (x.flatten() * y).cos().sum()

    want, first, _ = whole(op, PAIR, lambda x: fn(x, y))

    def run() -> Any:
        x = leaf(op, PAIR)
        h, rows = x[:], mw.shard_tensor(y, PAIR, [mw.Shard(0)])
        with collective.counting() as counts:
            made = fn(h, rows)
        (g,) = torch.autograd.grad(made, x)
        torch.testing.assert_close(g.to_local(), holders(op, x, first))
        return mw.unshard(made).detach(), counts.kinds

    for got, kinds in on_ranks(run, PAIR):
        torch.testing.assert_close(got, want)
        assert kinds == {"all_reduce": REDUCTIONS[op]}


@pytest.mark.parametrize("op", REDUCTIONS)
def test_a_second_backward_of_what_was_reduced_in_the_first(op: str) -> None:
    """Of an alias, whose own history saves nothing: on one device its consumers may be differentiated apart."""
    x = WHOLE[op](parts_of(PAIR)).requires_grad_()
    (x.exp().sum() + x.sin().sum()).backward()

    def run() -> Any:
        x = leaf(op, PAIR)
        calls: list[int] = []
        x.register_hook(lambda g: calls.append(1))
        h = x[:]
        h.exp().sum().backward()
        h.sin().sum().backward()
        return x.grad.to_local(), holders(op, x, want), calls

    want = x.grad
    for got, share, calls in on_ranks(run, PAIR):
        torch.testing.assert_close(got, share)
        assert calls == [1, 1]


WRITES = {
    "in place": lambda x: x.mul_(3),
    "through a view": lambda x: x[1:].mul_(3),
    "through data": lambda x: x.data.mul_(3),
    "through the local": lambda x: x.to_local().detach().mul_(3),
    "through detach": lambda x: x.detach().mul_(3),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("graded", [True, False])
def test_what_was_reduced_does_not_outlive_a_write(op: str, write: str, graded: bool) -> None:
    def changed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = several(x)
        with torch.no_grad():
            WRITES[write](x)
        made = several(x)
        return (before, made, *(torch.autograd.grad(made, x) if graded else ()))

    parts = parts_of(PAIR)
    x = WHOLE[op](parts)
    x.to_local = lambda: x  # type: ignore[attr-defined]
    want = changed(x.requires_grad_(graded))

    def run() -> Any:
        x = leaf(op, PAIR).requires_grad_(graded)
        before, made, *g = changed(x)
        if graded:
            torch.testing.assert_close(g[0].to_local(), holders(op, x, want[2]))
        return mw.unshard(before).detach(), mw.unshard(made).detach()

    for got in on_ranks(run, PAIR):
        torch.testing.assert_close(list(got), [t.detach() for t in want[:2]])


def test_in_inference_mode_writes_are_seen() -> None:
    """Tensors count no writes there: each consumer has the value reduced."""

    def run() -> list[torch.Tensor]:
        with torch.inference_mode():
            x = mw.from_local(parts_of(PAIR)[mw.rank()].clone(), PAIR, [P])
            made = [x.exp()]
            x.to_local().mul_(3)
            return [mw.unshard(t) for t in (*made, x.exp(), mw.reshard(x, [R]))]

    x = parts_of(PAIR).sum(0)
    for got in on_ranks(run, PAIR):
        torch.testing.assert_close(got, [x.exp(), (3 * x).exp(), 3 * x])


# ------------------------------------------------------------------------------------------ images


def product() -> tuple[torch.Tensor, torch.Tensor]:
    return ramp(4, 5).sin().requires_grad_(), ramp(5, 6).cos().requires_grad_()


def _kept(h: torch.Tensor) -> torch.Tensor:
    return (h * 2).relu().sum() + h.t().sin().sum() + (h / 3).exp().sum() + (-h).cos().sum() + h.view(24).tanh().sum()


def _known(h: torch.Tensor) -> torch.Tensor:
    doubled, turned = h * 2, h.t()
    return h.relu().sum() + doubled.sin().sum() + turned.exp().sum()


def _gone(h: torch.Tensor) -> torch.Tensor:
    h = h * 1
    doubled, halved = h * 2, h / 2
    del h
    return doubled.sin().sum() + halved.exp().sum()


def _written(h: torch.Tensor) -> torch.Tensor:
    doubled, halved = h * 2, h / 2
    made = doubled.sin().sum()
    h.mul_(3)
    halved.mul_(5)
    return made + halved.exp().sum() + (h * 2).cos().sum() + (h / 3).sin().sum() + (h + 0.5).exp().sum()


# Eager code reduces the first image, as it knows of no other, and the value itself for the second.
IMAGES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "of a value that is held": (_kept, 2),
    "of a value that was reduced": (_known, 1),
    "of a value that is gone": (_gone, 2),
    # The first image, the one that was written to, and then the value as it was written.
    "of a value that is written to": (_written, 3),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_of_one_value(name: str) -> None:
    fn, reductions = IMAGES[name]
    x, w = product()
    want = fn(x @ w)
    grads = torch.autograd.grad(want, (x, w), create_graph=True)
    seconds = torch.autograd.grad(sum(g.square().sum() for g in grads), (x, w))

    def run() -> Any:
        x, w = product()
        a, b = mw.shard_tensor(x.detach(), PAIR, [mw.Shard(1)]), mw.shard_tensor(w.detach(), PAIR, [mw.Shard(0)])
        a.requires_grad_(), b.requires_grad_()
        with torch.no_grad(), collective.counting() as quietly:
            fn(a @ b)
        h = a @ b
        asked = h if fn is _written else h[:]
        seen: list[bool] = []
        h.register_hook(lambda g: seen.append(True))
        with collective.counting() as counts:
            made = fn(asked)
        first = torch.autograd.grad(made, (a, b), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (a, b))
        assert seen
        return [mw.unshard(t).detach() for t in (made, *first, *second)], counts.kinds, quietly.kinds

    for got, kinds, quietly in on_ranks(run, PAIR):
        torch.testing.assert_close(got, [want.detach(), *(g.detach() for g in grads), *seconds])
        assert kinds == quietly == {"all_reduce": reductions}
