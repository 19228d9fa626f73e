"""Copies of views whose base was written to, where something other than an op takes them: checkpoints, backwards."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import meshwright as mw

# Of a value of 7 x 4 that is split over its rows: each needs communication.
CUTS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda v: v[4:], "row": lambda v: v[5], "element": lambda v: v[5, 2],
    "view": lambda v: v.view(-1, 2), "rows of rows": lambda v: v[4:][1:],
}  # fmt: skip
WRITES: dict[str, Callable[[Any], Any]] = {
    "all": lambda v: v.mul_(3), "a row": lambda v: v[0].copy_(torch.ones(4, dtype=v.dtype)),
    "a row of another piece": lambda v: v[:4][0].mul_(2), "an alias": lambda v: v.view_as(v).mul_(3),
    "a part of it": lambda v: v[5:, 2:].mul_(-1),
}  # fmt: skip


def block(t: Any) -> Any:
    return F.gelu(t) * t


again = functools.partial(checkpoint, use_reentrant=False)


def saved_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def selective(c: Any, v: Any) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, saved_all)
    return again(lambda t: block(c)[..., -1:].clone() * t[:, :3].clone().sum(), v, context_fn=contexts)


def split(c: Any, v: Any) -> Any:
    with mw.shard_checkpoint_inputs({"b": mw.Shard(0)}):
        return again(block, c)


USES: dict[str, Callable[[Any, Any], Any]] = {
    "an input": lambda c, v: again(block, c),
    "an input of two": lambda c, v: again(lambda t: again(block, t) * t, c),
    "an input in a list": lambda c, v: again(lambda t: block(t[0]), [c]),
    "an input by name": lambda c, v: again(lambda t: block(t), t=c),
    "read by the block": lambda c, v: again(lambda t: block(c) * t.sum(), v),
    "read by a selective block": selective,
    "kept split": split,
}


def outcome(mesh: mw.Mesh | None, use: str, write: str, cut: str, late: str | None = None) -> list[Any] | str:
    """The value and the gradient, or the beginning of what a write after the block is answered with."""
    x: Any = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if mesh is not None:
        x = mw.shard_tensor(x, mesh, {"a": mw.Shard(0)})
    v = x.requires_grad_() * 2
    c = CUTS[cut](v)
    if write:
        WRITES[write](v)
    y = USES[use](c, v)
    if late is not None:
        WRITES[late](v)
    try:
        y.sum().backward()
    except RuntimeError as e:
        return str(e)[:60]
    return [t if mesh is None else mw.unshard(t) for t in (y.detach(), x.grad)]


def compare(use: str, write: str, cut: str, late: str | None = None) -> None:
    if cut == "element" and use in ("read by a selective block", "kept split"):  # which has no dims
        return
    for sizes in ({"a": 2, "b": 2}, {"a": 3, "b": 1}):
        mesh, want = mw.Mesh(sizes), outcome(None, use, write, cut, late)
        for got in mw.simulate(lambda: outcome(mesh, use, write, cut, late), mesh):  # noqa: B023
            if isinstance(want, str) or isinstance(got, str):
                assert got == want, (use, write, cut)
            else:
                torch.testing.assert_close(got, want, msg=lambda m: f"{use}, {write}, {cut}: {m}")


@pytest.mark.parametrize("use", USES)
def test_a_checkpoint_sees_what_was_written(use: str) -> None:
    for write, cut in itertools.product(WRITES, CUTS):
        compare(use, write, cut)


@pytest.mark.parametrize("use", ["an input", "an input of two", "an input in a list", "read by the block"])
def test_a_write_after_a_checkpointed_block(use: str) -> None:
    """Refused where autograd refuses it on one device: else the block would run again on other values."""
    for write, cut in itertools.product(("", "all"), ("rows", "row", "element", "rows of rows")):
        compare(use, write, cut, late="all")


def test_a_policy_sees_no_copy_brought_up_to_date() -> None:
    """A selective checkpoint keeps what ops gave by their number: the second run brings nothing up to date."""
    seen: list[str] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(str(op))
        return CheckpointPolicy.MUST_SAVE

    def run() -> None:
        x = mw.shard_tensor(torch.ones(7, 4, dtype=torch.float64), mesh, {"a": mw.Shard(0)}).requires_grad_()
        v = x * 2
        c = v[4:]
        v.mul_(3)
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        seen.clear()
        again(lambda t: torch.relu(c) * t, torch.ones(()), context_fn=contexts)
        assert "aten.relu.default" in seen
        assert not {"aten.slice.Tensor", "aten.copy_.default"} & {*seen}, seen

    mesh = mw.Mesh({"a": 2})
    mw.simulate(run, mesh)


STARTS: dict[str, Callable[[Any, Any], Any]] = {
    "backward": lambda c, x: c.backward() or x.grad,
    "autograd.backward": lambda c, x: torch.autograd.backward([c]) or x.grad,
    "grad": lambda c, x: torch.autograd.grad(c, x)[0],
    "a gradient's gradient": lambda c, x: torch.autograd.grad(
        (x * x).sum(), x, grad_outputs=c.detach(), create_graph=True
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("start", STARTS)
def test_a_backward_starts_at_what_was_written(start: str) -> None:
    def gradient(write: str, mesh: mw.Mesh | None) -> Any:
        x: Any = torch.arange(28, dtype=torch.float64).view(7, 4)
        if mesh is not None:
            x = mw.shard_tensor(x, mesh, {"a": mw.Shard(0)})
        v = x.requires_grad_() * 2
        c = v[5, 3]
        WRITES[write](v)
        made = STARTS[start](c, x)
        return made if mesh is None else mw.unshard(made)

    for write, ranks in itertools.product(WRITES, (2, 3)):
        mesh = mw.Mesh({"a": ranks})
        for got in mw.simulate(lambda: gradient(write, mesh), mesh):  # noqa: B023
            torch.testing.assert_close(got, gradient(write, None))


@pytest.mark.parametrize("used", [False, True])
def test_a_gradient_of_a_view_whose_base_was_written(used: bool) -> None:
    """A view of a base that was written since is no input of what was computed before."""

    def gradient(mesh: mw.Mesh | None) -> Any:
        x: Any = torch.arange(28, dtype=torch.float64).view(7, 4)
        if mesh is not None:
            x = mw.shard_tensor(x, mesh, {"a": mw.Shard(0)})
        v = x.requires_grad_() * 2
        c = v[4:]
        loss = c.sum()
        v.mul_(3)
        if used:
            loss = loss + (c * c).sum()
        (made,) = torch.autograd.grad(loss, c, allow_unused=True)
        return mw.unshard(made) if isinstance(made, mw.DistTensor) else made

    mesh = mw.Mesh({"a": 2})
    want = gradient(None)
    for got in mw.simulate(lambda: gradient(mesh), mesh):
        assert (got is None) == (want is None)
        if used:
            torch.testing.assert_close(got, want)


REWRITES: dict[str, Callable[[Any, Any], Any]] = {
    "row": lambda y, x: y[5].mul_(x[0]),
    "rows": lambda y, x: y[4:].mul_(x[0]),
    "twice": lambda y, x: y[4:].mul_(2).tanh_(),
    "saved": lambda y, x: y[4:].exp_(),
    "view": lambda y, x: y.view(2, 14).mul_(2),
    "part of a copy": lambda y, x: (c := y[4:], c[:, 1:].sin_())[0],
    "+=": lambda y, x: (y.__setitem__(5, y[5].add_(x[0])), y[5])[1],
}


@pytest.mark.parametrize("name", REWRITES)
def test_a_gradient_of_a_base_that_was_written_through_a_copy(name: str) -> None:
    """What a copy is used for after a write to it is part of the gradient of its base, as of its history."""

    def gradients(mesh: mw.Mesh | None) -> list[Any]:
        x: Any = torch.arange(28, dtype=torch.float64).view(7, 4) / 28
        if mesh is not None:
            x = mw.shard_tensor(x, mesh, {"a": mw.Shard(0)})
        y = x.requires_grad_() * 1
        v = REWRITES[name](y, x)
        loss = (y * 2).sum() + (v * v).sum()
        made = [*torch.autograd.grad(loss, [x, y], create_graph=True)]
        made.append(torch.autograd.grad((made[0] ** 2).sum(), x)[0])
        return made if mesh is None else [mw.unshard(g) for g in made]

    for ranks in (2, 3):
        mesh = mw.Mesh({"a": ranks})
        for got in mw.simulate(lambda: gradients(mesh), mesh):  # noqa: B023
            for a, b in zip(got, gradients(None), strict=True):
                torch.testing.assert_close(a, b)
