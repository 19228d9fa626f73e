"""Tensors that a captured step finds outside of its model's state, and batches of all kinds."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.errors import CaptureError, ProgramError

MESH = mw.Mesh({"dp": 2})
X = torch.arange(15.0).view(5, 3) / 6  # parts of 3 and 2
Made = tuple[Callable[[Any, Any], Any], Callable[[int], Any]]


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 4)
        self.scale: Tensor = torch.ones(4)
        self.last: Tensor | None = None
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(4))


def whole(t: Tensor) -> Tensor:
    return mw.unshard(t.detach()) if isinstance(t, mw.DistTensor) else t.detach().clone()


def train(make: Callable[[Net], Made], compiled: bool) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = Net()
    loss_fn, between = make(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step: Any = None
    if compiled:
        layouts = {"weight": {"dp": mw.Shard(0)}}
        step = mw.compile_step(model, loss_fn, optimizer, X, mesh=MESH, layouts=layouts, batch={"dp": mw.Shard(0)})
    seen: list[Tensor] = []
    for i in range(4):
        if compiled:
            seen.append(whole(step(X)))
        else:
            optimizer.zero_grad()
            loss = loss_fn(model, X)
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        extra = between(i)
        seen += [extra.clone()] if isinstance(extra, Tensor) else []
    seen += [whole(t) for t in (model.weight, model.bias, model.mean)]
    return seen, id(step.program) if compiled else None


def same(make: Callable[[Net], Made]) -> None:
    one, _ = train(make, False)
    for many, _ in mw.simulate(lambda: train(make, True), MESH):
        torch.testing.assert_close(many, one)


def teacher(model: Net) -> Made:
    old = copy.deepcopy(model).requires_grad_(False)

    def loss_fn(model: Any, x: Tensor) -> Any:
        return F.mse_loss(model(x), old(x) + 1)

    def between(i: int) -> None:
        with torch.no_grad():
            for p, q in zip(old.parameters(), model.parameters(), strict=True):
                p.lerp_(whole(q), 0.5)

    return loss_fn, between


def assigned_teacher(model: Net) -> Made:
    old = copy.deepcopy(model).requires_grad_(False)

    def loss_fn(model: Any, x: Tensor) -> Any:
        return F.mse_loss(model(x), old(x) + 1)

    def between(i: int) -> None:
        old.load_state_dict({n: whole(p) for n, p in model.state_dict().items()}, assign=i == 1)

    return loss_fn, between


def moved(model: Net) -> Made:
    old = copy.deepcopy(model).requires_grad_(False)

    def loss_fn(model: Any, x: Tensor) -> Any:
        return F.mse_loss(model(x), old(x) + 1)

    def between(i: int) -> None:
        old.bias.data = torch.full((4,), float(i))

    return loss_fn, between


def others_modules(model: Net) -> Made:
    """A module that leads to tensors, and one that has none, are replaced, switched and hooked."""
    old = nn.Sequential(copy.deepcopy(model), nn.Identity()).requires_grad_(False)
    held = {"olds": [old], "drop": nn.Dropout(1.0).eval()}

    def loss_fn(model: Any, x: Tensor) -> Any:
        return F.mse_loss(model(x), held["drop"](held["olds"][0](x)) + 1)

    def between(i: int) -> None:
        if i == 0:
            old[1] = nn.ReLU()
        elif i == 1:
            held["olds"] = [nn.Linear(3, 4).requires_grad_(False)]
            held["olds"][0].register_forward_hook(lambda module, args, made: made * 2)
        elif i == 2:
            held["drop"].train()

    return loss_fn, between


def attribute_in_place(model: Net) -> Made:
    return lambda m, x: (m(x) * m.scale).square().mean(), lambda i: model.scale.mul_(0.5)


def attribute_replaced(model: Net) -> Made:
    return lambda m, x: (m(x) * m.scale).square().mean(), lambda i: setattr(model, "scale", torch.full((4,), i + 2.0))


def closed_over_replaced(model: Net) -> Made:
    weight = torch.ones(4)

    def loss_fn(model: Any, x: Tensor) -> Any:
        return (model(x) * weight).square().mean()

    def between(i: int) -> None:
        nonlocal weight
        weight = torch.full((4,), i + 2.0)

    return loss_fn, between


def with_gaps(model: Net) -> Made:
    base = torch.ones(8)
    weight = base[::2]
    return lambda m, x: (m(x) * weight).square().mean(), lambda i: base.mul_(0.5)


def sharded_by_use(model: Net) -> Made:
    rows = torch.ones(5, 1)  # what x is split by reaches it
    return lambda m, x: (m(x) * rows).square().mean(), lambda i: rows.mul_(0.5)


def written(model: Net) -> Made:
    seen = torch.zeros(4)

    def loss_fn(model: Any, x: Tensor) -> Any:
        y = model(x)
        with torch.no_grad():
            seen.add_(y.mean(0))
        return (y - seen).square().mean()

    return loss_fn, lambda i: seen


def parameters_closed_over(model: Net) -> Made:
    weights = list(model.parameters())
    return lambda m, x: m(x).square().mean() + sum(w.square().sum() for w in weights), lambda i: None


def buffer_assigned(model: Net) -> Made:
    def loss_fn(model: Any, x: Tensor) -> Any:
        y = model(x)
        loss = (y - model.mean).square().mean()
        model.mean = 0.5 * model.mean + y.detach().mean(0)
        return loss

    return loss_fn, lambda i: None


def attribute_within(model: Net) -> Made:
    def loss_fn(model: Any, x: Tensor) -> Any:
        model.last = model(x).square().mean()
        return model.last * 2

    return loss_fn, lambda i: None


@pytest.mark.parametrize(
    "make",
    [
        teacher, assigned_teacher, moved, others_modules, attribute_in_place, attribute_replaced, closed_over_replaced,
        with_gaps, sharded_by_use, written, parameters_closed_over, buffer_assigned, attribute_within,
    ],
)  # fmt: skip
def test_as_on_one_device(make: Callable[[Net], Made]) -> None:
    same(make)


def compiling(loss_fn: Callable[[Any, Any], Any], batch: Any = X) -> Any:
    def rank() -> Any:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile_step(model, loss_fn, optimizer, batch, mesh=MESH, batch={"dp": mw.Shard(0)})
        return model, whole(step(batch)), [whole(p) for p in model.parameters()]

    return mw.simulate(rank, MESH)[0]


def test_an_attribute_that_one_step_leaves_to_the_next() -> None:
    def loss_fn(model: Any, x: Tensor) -> Any:
        y = model(x)
        loss = (y - model.scale).square().mean()
        model.scale = y.detach().mean(0)
        return loss

    with pytest.raises(CaptureError, match=r"test_capture_outside.py:\d+: the step sets scale, .*register_buffer"):
        compiling(loss_fn)


def test_an_attribute_has_no_value_behind_the_step() -> None:
    model, *_ = compiling(attribute_within(Net())[0])
    for use in (lambda t: t + 1, float, torch.mean, lambda t: t.item()):
        with pytest.raises(CaptureError, match=r"test_capture_outside.py:\d+: last was set in the forward"):
            use(model.last)
    copy.deepcopy(model)


def test_a_write_to_a_tensor_with_gaps() -> None:
    seen = torch.zeros(8)[::2]

    def loss_fn(model: Any, x: Tensor) -> Any:
        y = model(x)
        with torch.no_grad():
            seen.add_(y.mean(0))
        return y.mean()

    with pytest.raises(ProgramError, match=r"test_capture_outside.py:\d+: the step writes to a tensor of shape \(4,\)"):
        compiling(loss_fn)


def test_parameters_of_others() -> None:
    """They are no part of the model: where they need no gradient they may require one."""
    other = nn.Linear(3, 4)

    def loss_fn(model: Any, x: Tensor) -> Any:
        with torch.no_grad():
            target = other(x)
        return F.mse_loss(model(x), target)

    compiling(loss_fn)
    with pytest.raises(CaptureError, match="outside of the model requires a gradient"):
        compiling(lambda m, x: F.mse_loss(m(x), other(x)))


def test_a_distributed_tensor_closed_over() -> None:
    def rank() -> None:
        model = Net()
        other = mw.shard_tensor(torch.ones(4), MESH, {"dp": mw.Shard(0)})
        mw.compile_step(model, lambda m, x: (m(x) * other).mean(), None, X, mesh=MESH)

    with pytest.raises(CaptureError, match="closes over a DistTensor"):
        mw.simulate(rank, MESH)


# ---------------------------------------------------------------------------------------------- batches


@dataclasses.dataclass
class Batch:
    x: Tensor


def test_a_batch_of_an_unknown_class() -> None:
    with pytest.raises(CaptureError, match="the batch has a Batch: a batch is a tensor, or tuples"):
        compiling(lambda m, b: m(b.x).mean(), Batch(X))


def test_a_number_in_a_batch_is_not_split() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return (model(batch["x"]) * batch["weight"]).square().mean()

    batch = {"x": X, "weight": torch.tensor(3.0)}
    _, loss, _ = compiling(loss_fn, batch)
    torch.manual_seed(0)
    torch.testing.assert_close(loss, loss_fn(Net(), batch).detach())


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda c: c.add_(1),
    "mul_": lambda c: c.mul_(2),
    "sub_": lambda c: c.sub_(0.5),
    "div_": lambda c: c.div_(3),
    "+=": lambda c: c.__iadd__(1),
    "remainder_": lambda c: c.add_(2).remainder_(3),
    "pow_": lambda c: c.pow_(2),
    "zero_": lambda c: c.zero_(),
    "fill_": lambda c: c.fill_(5),
    "clamp_": lambda c: c.add_(1).clamp_(0, 2),
    "copy_": lambda c: c.copy_(c + 1),
    "element": lambda c: c[...].add_(1),
    "out=": lambda c: torch.add(c, 1, out=c),
}


@pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=str)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.thin(4)
def test_capture_writes_nothing_of_the_users(write: str, shape: tuple[int, ...]) -> None:
    """A write with a number ran for real while the step was captured, and again at each new capture."""

    def run(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model, count, held = nn.Linear(3, 2), torch.ones(shape), {"factor": torch.ones(())}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_fn(model: Any, x: Tensor) -> Any:
            WRITES[write](count)
            return model(x).square().mean() * held["factor"] * (1 + 0.1 * count.sum())

        def plain(x: Tensor) -> Any:
            optimizer.zero_grad()
            loss = loss_fn(model, x)
            loss.backward()
            optimizer.step()
            return loss

        layout = {"dp": mw.Shard(0)}
        step = mw.compile_step(model, loss_fn, optimizer, X, mesh=MESH, batch=layout) if compiled else plain
        made = [count.sum().item()]
        for i in range(4):
            if i == 2:
                held["factor"] = torch.tensor(2.0)  # another capture
            made += [step(X).item(), count.sum().item()]
        return made

    want = run(False)
    for got in mw.simulate(lambda: run(True), MESH):
        assert got == pytest.approx(want)


@pytest.mark.parametrize("merged", [False, True])
def test_a_count_in_a_closure_under_passes(merged: bool) -> None:
    """Passes look at the program anew: it may write to tensors from outside of the model, once for each call."""
    passes = ["data-parallel-optimization", *(["gradient-merge:k_steps=2"] if merged else [])]

    def run() -> tuple[float, list[float]]:
        torch.manual_seed(0)
        count, model = torch.zeros(()), nn.Linear(6, 5)

        def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                count.add_(1)
            return count * model(x).square().mean()

        optimizer, mesh = torch.optim.SGD(model.parameters(), lr=0.1), mw.Mesh({"dp": 2})
        step = mw.compile_step(
            model, loss, optimizer, torch.ones(4, 6), mesh=mesh, batch={"dp": mw.Shard(0)}, passes=passes
        )
        losses = [float(step(torch.ones(4, 6))) for _ in range(4)]
        return count.item(), [a / b for a, b in zip(losses[1:], losses, strict=False)]

    (count, ratios), _ = mw.simulate(run, mw.Mesh({"dp": 2}))
    assert count == 4
    assert not merged or ratios[0] == pytest.approx(2)  # no update between them


@dataclasses.dataclass(slots=True)
class Slots:
    value: torch.Tensor


HOLDERS: dict[str, tuple[Any, Any, Any]] = {  # one, what replaces its tensor, what reads it
    "slots": (Slots, lambda h, t: setattr(h, "value", t), lambda h: h.value),
    "deque": (lambda t: collections.deque([t], maxlen=1), lambda h, t: h.append(t), lambda h: h[0]),
    "class": (lambda t: type("Of", (), {"value": t}), lambda h, t: setattr(h, "value", t), lambda h: h.value),
    "base class": (
        lambda t: type("Of", (type("Base", (), {"value": t}),), {})(),
        lambda h, t: setattr(type(h).__mro__[1], "value", t), lambda h: h.value,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLDERS)
def test_another_tensor_in_a_holder_is_seen(name: str) -> None:
    new, put, get = HOLDERS[name]
    holder, model = new(torch.ones(5)), nn.Linear(6, 5)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.0), torch.ones(4, 6)
    step = mw.compile_step(
        model, lambda m, x: (m(x) * get(holder)).square().mean(), optimizer, x, mesh=mw.Mesh({"dp": 1})
    )
    before = float(step(x))
    put(holder, torch.full((5,), 3.0))
    assert float(step(x)) == pytest.approx(9 * before)
