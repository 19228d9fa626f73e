"""Ops that read memory by strides, against the single device: of new memory in row-major order, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import DispatchError
from tests.support.sweep import compare, graded, layouts_of, mesh_of, place

Tensor = torch.Tensor
MESH = mesh_of((2,))
FORMAT = torch.contiguous_format


def rows(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def overlapping(x: Tensor) -> Tensor:
    """Windows of rows that overlap by half, as sliding-window attention has them."""
    x = x.clone(memory_format=FORMAT)
    step = x.stride()
    return x.as_strided((x.shape[0] - 1, 2, x.shape[1]), (step[0], *step))


READS: dict[str, Callable[[Tensor], Any]] = {
    "windows": overlapping,
    "windows of the transposed": lambda x: overlapping(x.t()),
    "an offset": lambda x: torch.as_strided(x.clone(memory_format=FORMAT), (2, 2), (1, 3), 4).square(),
    "one element": lambda x: x.clone(memory_format=FORMAT).as_strided((), (), 5),
    "repeated": lambda x: x.clone(memory_format=FORMAT).as_strided((4, 3), (0, 1)),
    "copied": lambda x: torch.as_strided_copy(x[1:].clone(memory_format=FORMAT), (2, 2), (2, 1)),
    "scattered": lambda x: torch.as_strided_scatter(x.clone(memory_format=FORMAT), x[0, :2] * 3, (2,), (4,), 1),
}


@pytest.mark.parametrize("n", [4, 3, 2])
@pytest.mark.parametrize("name", READS)
def test_of_new_memory(name: str, n: int) -> None:
    whole = rows(n, 5)
    want = graded(READS[name], [own := whole.clone().requires_grad_()], [own])

    def run() -> None:
        for layout in layouts_of(whole, 1):
            leaf, x = place(whole.clone().requires_grad_(), MESH, layout)
            outs, grads = graded(READS[name], [x], [leaf])
            compare(outs, want[0], 1e-12)
            compare(grads, want[1], 1e-12)

    mw.simulate(run, MESH)


@pytest.mark.parametrize("dim", [0, 1])
def test_writes_reach_the_memory_that_was_viewed(dim: int) -> None:
    def written(x: Tensor) -> Tensor:
        x = x.clone(memory_format=FORMAT)
        diagonal = x.as_strided((3,), (6,))
        diagonal.mul_(2)
        x[0] += 1
        return x * diagonal.sum()

    want = written(rows(4, 5))

    def run() -> None:
        x = mw.shard_tensor(rows(4, 5), MESH, {"a0": mw.Shard(dim)})
        torch.testing.assert_close(mw.unshard(written(x)), want)

    mw.simulate(run, MESH)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "transposed in place": lambda x: x.clone(memory_format=FORMAT).t_(),
    "an offset": lambda x: x[2:],
    "an offset, contiguous": lambda x: x[2:].contiguous(),
    "computed of the transposed": lambda x: x.t() + 1,
    "other memory": lambda x: set_data(x.clone(memory_format=FORMAT), x.t()),
}


def set_data(x: Tensor, value: Tensor) -> Tensor:
    x.data = value
    return x


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", OTHERS)
def test_of_memory_that_nobody_knows(name: str, dim: int) -> None:
    """On one device the elements depend on what the tensor is a view of."""

    def run() -> None:
        x = OTHERS[name](mw.shard_tensor(rows(4, 5), MESH, {"a0": mw.Shard(dim)}))
        calls: dict[str, Callable[[], Any]] = {
            "as_strided": lambda: x.as_strided((2, 2), (2, 1)),
            "as_strided_copy": lambda: torch.as_strided_copy(x, (2, 2), (2, 1)),
            "as_strided_scatter": lambda: torch.as_strided_scatter(x, torch.ones(2, 2), (2, 2), (2, 1)),
            "as_strided_": lambda: x.as_strided_((2, 2), (2, 1)),
            "resize_": lambda: x.resize_(2, 2),
            "resize_as_": lambda: x.resize_as_(torch.ones(2, 2)),
        }
        for op, call in calls.items():
            with pytest.raises(DispatchError, match=f"{op}: "):
                call()

    mw.simulate(run, MESH)


@pytest.mark.parametrize("layout", [mw.Shard(0), mw.Shard(1), mw.Shard(2), mw.Partial()])
@pytest.mark.parametrize("n", [4, 3, 1])
def test_strides_are_those_of_the_global_tensor(n: int, layout: mw.Placement) -> None:
    def strides(x: Tensor) -> list[Any]:
        return [x.stride(), x.stride(-1), x.stride(dim=0), x.permute(2, 0, 1).stride()]

    def run() -> None:
        x = mw.reshard(mw.shard_tensor(torch.ones(n, 5, 6), MESH, {}), {"a0": layout})
        assert strides(x) == strides(torch.ones(n, 5, 6))

    mw.simulate(run, MESH)


def test_out_of_bounds_is_pytorchs_error() -> None:
    def run() -> None:
        with pytest.raises(RuntimeError, match="out of bounds"):
            mw.shard_tensor(rows(4, 5), MESH, {"a0": mw.Shard(0)}).as_strided((5, 5), (5, 1))

    mw.simulate(run, MESH)


class Windows(torch.nn.Module):
    """Windows of the rows of a hidden value, whose memory says what they are."""

    def __init__(self, prepare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(5, 6, dtype=torch.float64)
        self.prepare = prepare

    def forward(self, x: Tensor) -> Tensor:
        h = self.prepare(self.linear(x).tanh())
        step = h.stride()
        return h.as_strided((h.shape[0] - 1, 2, h.shape[1]), (step[0], *step))


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) * torch.arange(1.0, 7.0)).square().mean()
    return loss


@pytest.mark.parametrize("n", [4, 3])
def test_captured(n: int) -> None:
    def prepare(h: Tensor) -> Tensor:
        return h.clone(memory_format=FORMAT)

    x = rows(n, 5) / 20
    single = Windows(prepare)
    want = [loss := loss_of(single, x), *torch.autograd.grad(loss, list(single.parameters()))]

    def run() -> None:
        model = Windows(prepare)
        step = mw.compile_step(model, loss_of, None, x, mesh=MESH, batch={"a0": mw.Shard(0)})
        made = step(x)
        grads = [p.grad for p in model.parameters()]
        compare([made, *grads], [t.detach() for t in want], 1e-10)

    mw.simulate(run, MESH)


def test_captured_of_memory_that_starts_later_is_refused() -> None:
    def run() -> None:
        with pytest.raises(DispatchError, match="as_strided: reads memory"):
            mw.compile_step(Windows(lambda h: h[1:]), loss_of, None, rows(4, 5), mesh=MESH, batch={"a0": mw.Shard(0)})

    mw.simulate(run, MESH)
