"""Pooling along split positions: values, indices and gradients of one device, and only what windows reach is sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright import collective
from tests.support.sweep import sweep


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def hidden(x: Tensor) -> Tensor:
    """Where windows see nothing but minus infinity, the first position that is inside has the index, and the slope."""
    return torch.where(torch.arange(x.shape[-1]) < 5, -math.inf, x)


CALLS: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "mean": (lambda x: F.avg_pool1d(x, 3), real(2, 4, 17)),
    "mean, without a batch": (lambda x: F.avg_pool1d(x, 4, 3, 2, True), real(3, 16)),
    "mean of what is inside": (lambda x: F.avg_pool1d(x, 4, 3, 2, True, False), real(1, 2, 19)),
    "mean of planes": (lambda x: F.avg_pool2d(x, (3, 2), (2, 3), (1, 0), True, False), real(1, 2, 9, 16)),
    "mean of planes by a number": (lambda x: F.avg_pool2d(x, 3, 2, 1, True, True, 5), real(2, 2, 9, 7)),
    "mean of volumes": (lambda x: F.avg_pool3d(x, 2, 1, 1), real(1, 2, 5, 4, 6)),
    "largest": (lambda x: F.max_pool1d(x, 3, 2), real(2, 3, 17)),
    "largest, with indices": (lambda x: F.max_pool1d(x, 3, 2, 1, 2, True, True), real(2, 3, 18)),
    "largest of planes": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True), real(1, 2, 9, 16)),
    "largest of nothing": (lambda x: F.max_pool1d(hidden(x), 5, 2, 2, 3, return_indices=True), real(1, 2, 24)),
    "largest of volumes": (lambda x: F.max_pool3d(x, 2, 1, 1, return_indices=True), real(1, 2, 5, 4, 6)),
    "apart": (lambda x: F.max_pool1d(x, 1, 5, return_indices=True), real(2, 3, 23)),
    "adaptive": (lambda x: F.adaptive_avg_pool1d(x, 4), real(2, 3, 16)),
    "adaptive, of planes": (lambda x: F.adaptive_avg_pool2d(x, (3, 5)), real(2, 3, 9, 5)),
    "adaptive, to one": (lambda x: F.adaptive_avg_pool2d(x, 1), real(2, 3, 9, 5)),
    "adaptive, unevenly": (lambda x: F.adaptive_avg_pool1d(x, 4), real(2, 3, 18)),
    "adaptive, largest": (lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True), real(2, 3, 9, 4)),
}


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", CALLS)
def test_like_one_device(name: str) -> None:
    fn, x = CALLS[name]
    sweep(fn, x, meshes=((4,), (2, 3)), cases=16)


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", ["mean of what is inside", "largest, with indices", "adaptive", "largest of planes"])
@pytest.mark.parametrize("length", [6, 32])  # of 6, some ranks have nothing
def test_second_gradients_and_captured_steps(name: str, length: int) -> None:
    fn, mesh = CALLS[name][0], mw.Mesh({"a": 2, "b": 3})
    x = real(*CALLS[name][1].shape[:-1], length if name != "adaptive" else length // 4 * 4)

    def results(x: Tensor) -> list[Tensor]:
        made = fn(x)
        y = made[0] if isinstance(made, tuple) else made
        (once,) = torch.autograd.grad(y.tanh().sum(), x, create_graph=True)
        return [y, once, *torch.autograd.grad(once.square().sum(), x)]

    want = results(x.clone().requires_grad_())

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(x.shape[-1], dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            made = fn(x * self.scale)
            return (made[0] if isinstance(made, tuple) else made).square().mean()

    model = Model()
    model(x).backward()

    def run() -> tuple[list[Tensor], Tensor]:
        found = results(mw.shard_tensor(x, mesh, {"b": mw.Shard(x.ndim - 1)}).requires_grad_())
        own = Model()
        step = mw.compile_step(
            own, lambda m, x: m(x), torch.optim.SGD(own.parameters(), lr=1.0), x, mesh=mesh,
            batch={"a": mw.Shard(x.ndim - 1), "b": mw.Shard(x.ndim - 1)},
        )  # fmt: skip
        step(x)
        return [mw.unshard(t) for t in found], 1 - mw.unshard(own.scale)

    for found, grad in mw.simulate(run, mesh):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, model.scale.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("fn", "rows"),
    [
        (lambda x: F.avg_pool1d(x, 3, 1, 1), 6),  # a row before and behind each border
        (lambda x: F.max_pool1d(x, 4, 2), 3 * 2),
        (lambda x: F.adaptive_max_pool1d(x, 16), 0),
    ],
    ids=["mean", "largest", "adaptive"],
)
def test_only_what_windows_reach_is_sent(fn: Callable[[Tensor], Tensor], rows: int) -> None:
    mesh, wide = mw.Mesh({"a": 4}), real(1, 2, 64)

    def run() -> tuple[int, int]:
        x = mw.shard_tensor(wide, mesh, {"a": mw.Shard(2)}).requires_grad_()
        with collective.counting() as forward:
            made = fn(x)
        with collective.counting() as backward:
            made.sum().backward()
        return forward.total_bytes, backward.bytes.get("exchange_rows", 0)

    found = mw.simulate(run, mesh)
    assert [sum(n) for n in zip(*found, strict=True)] == [rows * 2 * 8] * 2
