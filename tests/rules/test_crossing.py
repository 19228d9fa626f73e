"""Ops along a dim that stays split: values and gradients of one device, and only what crosses is sent."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright import collective
from tests.support import sweep as sweeps
from tests.support.processes import run_processes

F64 = torch.float64


def real(*shape: int) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=F64)


CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "cumsum": ("cumsum", (real(7, 3), 0)),
    "cumsum of a vector": ("cumsum", (real(7), 0)),
    "logcumsumexp": ("logcumsumexp", (real(7, 3), 0)),
    "cumprod": ("cumprod", (real(7, 3), 0)),
    "cumprod of a vector": ("cumprod", (real(7), 0)),
    "roll, two dims": ("roll", (real(7, 5), (1, -3), (0, 1))),
    "roll by more than all": ("roll", (real(7), 9, 0)),
    "flip": ("flip", (real(7, 5), [0, 1])),
    "pad": ("constant_pad_nd", (real(7, 5), [1, 2, 0, 3])),
    "pad by less than nothing": ("constant_pad_nd", (real(7, 5), [-1, 2, 3, -2])),
    "pad with ones": ("constant_pad_nd", (real(7), [4, 1], 1.5)),
    "diff": ("diff", (real(7, 3), 2, 0)),
    "unfold": ("unfold", (real(7, 3), 0, 3, 2)),
    "slice": ("getitem", (real(7, 5), (None, slice(None, -1), None, slice(1, None)))),
    "slice with steps": ("slice", (real(7, 3), 0, 0, 7, 2)),
    "narrow": ("narrow", (real(7, 3), 0, 1, 5)),
    "convolution": ("conv1d", (real(1, 2, 9), real(4, 2, 3), real(4), 1, 1)),
    "convolution with steps": ("conv1d", (real(2, 9), real(3, 2, 3), None, 2, 2, 2)),
    "convolution of groups": ("conv1d", (real(1, 4, 9), real(4, 1, 4), None, 1, "same", 1, 4)),
    "convolution of planes": ("conv2d", (real(1, 2, 7, 5), real(2, 2, 3, 2), None, (2, 1), (1, 0))),
    "windows within the padding": ("conv1d", (real(1, 2, 4), real(2, 2, 1), None, 3, 4)),
}


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", CALLS)
def test_every_layout_gives_the_values_and_gradients_of_one_device(name: str) -> None:
    op, args = CALLS[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using padding='same'")  # PyTorch's, of what it copies
        report = mw.check_rule(op, *args, most=200 if sweeps.WHOLE else 50)
    assert any(s.startswith(("d0: Shard(0)", "d1: Shard(1)", "x0: Shard")) for s in report.strategies)


def _mamba(x: Tensor, w: Tensor) -> Tensor:
    """What a block of Mamba does along the sequence: a causal convolution of each channel, and a scan."""
    short = F.conv1d(x.transpose(1, 2), w.view(4, 1, 3), groups=4, padding=2)[..., : x.shape[1]]
    return F.silu(short).transpose(1, 2).cumsum(1)


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "shifted labels": lambda x, w: F.pad(x[:, 1:], (0, 0, 0, 1)).mul(w[:, 0]),
    "scan of sums": lambda x, w: x.cumsum(1) * w[:, 0],
    "scan of products": lambda x, w: x.cumprod(1) * w[:, 0],
    "scan of products, with zeros": lambda x, w: (x * (x.abs() > 0.5)).cumprod(1) * w[:, 0],
    "scan of logs of sums": lambda x, w: x.logcumsumexp(1) * w[:, 0],
    "roll and flip": lambda x, w: x.roll(2, 1) * w[:, 0] + x.flip(1),
    "differences": lambda x, w: torch.diff(x, dim=1) * w[:, 0],
    "windows": lambda x, w: x.unfold(1, 3, 1) * w[0],
    "mamba": _mamba,
}
MESHES = [
    (mw.Mesh({"a": 3}), {"a": mw.Shard(1)}),
    (mw.Mesh({"a": 4}), {"a": mw.Shard(1)}),
    (mw.Mesh({"a": 2, "b": 3}), {"b": mw.Shard(1)}),
    (mw.Mesh({"a": 2, "b": 3}), {"a": mw.Shard(1), "b": mw.Shard(1)}),
]


def _to_second_order(fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> list[Tensor]:
    y = fn(x, w).tanh().sum()
    grads = torch.autograd.grad(y, (x, w), create_graph=True)
    return [y, *grads, *torch.autograd.grad(sum((g * g).sum() for g in grads), (x, w))]


@pytest.mark.thin(4)
@pytest.mark.parametrize("length", [3, 7, 16])  # of 3, most ranks of a mesh of six have nothing
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_and_second_gradients_are_those_of_one_device(name: str, length: int) -> None:
    x, w = real(2, length, 4), real(4, 3)
    want = _to_second_order(PROGRAMS[name], x.clone().requires_grad_(), w.clone().requires_grad_())

    def run(mesh: mw.Mesh, placements: dict[str, mw.Shard]) -> list[Tensor]:
        split, whole = mw.shard_tensor(x, mesh, placements), mw.shard_tensor(w, mesh, {})
        made = _to_second_order(PROGRAMS[name], split.requires_grad_(), whole.requires_grad_())
        return [mw.unshard(t) for t in made]

    for mesh, placements in MESHES:
        for made in mw.simulate(partial(run, mesh, placements), mesh):
            torch.testing.assert_close(made, want, rtol=1e-10, atol=1e-10)


SCANS: dict[str, Callable[[Tensor], Tensor]] = {
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "logcumsumexp of complex numbers": lambda x: torch.complex(x, x).logcumsumexp(1).real,
    "cummax": lambda x: x.cummax(1)[0],
    "cummin, squared": lambda x: x.cummin(1)[0].square(),
}


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_of_an_empty_part_is_differentiated_twice_as_those_of_other_ranks(name: str) -> None:
    """Of other dims than the scan's; PyTorch's derivatives leave early where there is nothing."""
    values, weights, mesh = real(2, 3, 4), real(4, 3, 2).view(2, 3, 4), mw.Mesh({"a": 5})

    def twice(x: Tensor) -> list[Tensor]:
        (once,) = torch.autograd.grad((SCANS[name](x) * weights).sum(), x, create_graph=True)
        return [once, *(torch.autograd.grad(once.square().sum(), x) if once.requires_grad else ())]

    want = twice(values.clone().requires_grad_())

    def run() -> list[Tensor]:
        split = mw.shard_tensor(values, mesh, {"a": mw.Shard(2)})  # the last rank has nothing
        return [mw.unshard(t.detach()) for t in twice(split.requires_grad_())]

    for made in mw.simulate(run, mesh):
        torch.testing.assert_close(made, [t.detach() for t in want], rtol=1e-10, atol=1e-10)


def _first_row(x: Tensor) -> Tensor:
    made = x[:, 1:]
    made.mul_(2)
    return made


def _behind_its_back(x: Tensor) -> Tensor:
    made = x[:, 1:]
    x.mul_(2)
    return made * 1


def _into_slices(x: Tensor) -> Tensor:
    x[:, 1:].copy_(x[:, :-1].clone())
    return x * 1


@pytest.mark.parametrize(
    "fn", [_first_row, _behind_its_back, _into_slices, lambda x: x.cumsum_(1), lambda x: x.cumprod_(1)]
)
def test_slices_are_still_views_of_what_they_were_cut_from(fn: Callable[[Tensor], Tensor]) -> None:
    x = real(2, 8, 3)
    want = x.clone()
    made = fn(want)

    def run() -> tuple[Tensor, Tensor]:
        split = mw.shard_tensor(x.clone(), mw.Mesh({"a": 3}), {"a": mw.Shard(1)})
        return mw.unshard(fn(split)), mw.unshard(split)

    for got in mw.simulate(run, mw.Mesh({"a": 3})):
        torch.testing.assert_close(got, (made, want), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("fn", "rows"),
    [
        (lambda x: x.cumsum(1), (0, 1, 2, 3)),  # by the number of parts before it, whatever the length
        (lambda x: x.cumprod(1), (0, 1, 2, 3)),
        (lambda x: x.logcumsumexp(1), (0, 1, 2, 3)),
        (lambda x: x.roll(1, 1), (1, 1, 1, 1)),
        (lambda x: x[:, 1:], (0, 1, 1, 1)),  # each part but the last begins, and ends, a row later
        (lambda x: F.conv1d(x.transpose(1, 2), x.new_ones(2, 2, 3), padding=1), (1, 2, 2, 1)),
    ],
    ids=["scan", "products", "logs", "roll", "slice", "convolution"],
)
def test_only_what_crosses_is_sent(fn: Callable[[Tensor], Tensor], rows: tuple[int, ...]) -> None:
    mesh = mw.Mesh({"a": 4})
    wide = real(1, 64, 2)

    def run() -> tuple[int, int, float]:
        x = mw.shard_tensor(wide, mesh, {"a": mw.Shard(1)}).requires_grad_()
        with collective.counting() as forward, mw.explain() as why:
            made = fn(x)
        with collective.counting() as backward:
            made.sum().backward()
        assert [set(c.bytes) - {"all_reduce"} for c in (forward, backward)] == [{"exchange_rows"}] * 2
        return forward.total_bytes, backward.bytes["exchange_rows"], sum(r.bytes for r in why.records)

    found = mw.simulate(run, mesh)
    row = 2 * 8
    assert sum(f for f, _, _ in found) == sum(b for _, b, _ in found) == row * sum(rows)
    assert [f for f, _, _ in found] == [said for _, _, said in found]


def test_what_crosses_must_be_asked_for_in_explicit_code() -> None:
    def run() -> None:
        x = mw.shard_tensor(real(8, 2), mw.Mesh({"a": 2}), {"a": mw.Shard(0)})
        with mw.explicit():
            x.cumsum(0)

    with pytest.raises(mw.errors.ExplicitError, match=r"cumsum would send rows over a.*mw\.reshard"):
        mw.simulate(run, mw.Mesh({"a": 2}))


class _Hybrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=2, groups=4, dtype=F64)
        self.out = nn.Linear(4, 4, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        short = self.conv(x.transpose(1, 2))[..., : x.shape[1]]
        return self.out(F.silu(short).transpose(1, 2).cumsum(1)).roll(1, 1)


def _next_row(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"])[:, 1:] - batch["x"][:, :-1]).square().mean()


def _trained(mesh: mw.Mesh | None, length: int, captured: bool) -> list[float]:
    torch.manual_seed(1)
    model, batch = _Hybrid(), {"x": real(2, length, 4)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if mesh is not None and captured:
        step = mw.compile_step(model, _next_row, optimizer, batch, mesh=mesh, layouts={}, batch={"a": mw.Shard(1)})
        return [float(step(batch)) for _ in range(3)]
    if mesh is not None:
        mw.shard_module(model, mesh, {})
        optimizer = mw.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batch = {"x": mw.shard_tensor(batch["x"], mesh, {"a": mw.Shard(1)})}
    losses = []
    for _ in range(3):
        loss = _next_row(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("length", [5, 12])
def test_a_hybrid_model_trains_as_on_one_device(length: int) -> None:
    want = _trained(None, length, False)
    for mesh in (mw.Mesh({"a": 3}), mw.Mesh({"a": 2, "b": 2})):
        for captured in (False, True):
            for made in mw.simulate(lambda: _trained(mesh, length, captured), mesh):  # noqa: B023
                assert made == pytest.approx(want, rel=1e-12)


def _on_processes() -> list[list[float]]:
    mesh = mw.init_mesh({"a": 3})
    return [_trained(mesh, 7, captured) for captured in (False, True)]


@pytest.mark.processes
def test_a_hybrid_model_trains_on_real_processes() -> None:
    want = _trained(None, 7, False)
    for made in run_processes(_on_processes, 3):
        assert made[0] == pytest.approx(want, rel=1e-12)
        assert made[1] == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(
    "fn",
    [
        lambda y: y.cumprod_(0),
        lambda y: y[:, 1:].cumprod_(0),
        lambda y: y.t().cumprod_(1),
        lambda y: y.cumsum_(0),
        lambda y: y.mul_((y.detach() > 0).cumprod(0)),  # whole numbers: of 3 rows, the last of 4 ranks has none
    ],
    ids=["cumprod", "of a view", "transposed", "cumsum", "of conditions"],
)
@pytest.mark.parametrize("rows", [3, 7])
def test_scans_in_place(fn: Callable[[Tensor], Any], rows: int, n: int) -> None:
    def results(x: Tensor) -> list[Tensor]:
        y = x * 1.0
        fn(y)
        (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        return [y, first, *torch.autograd.grad(first.sin().sum(), x)]

    given, mesh = real(rows, 3), mw.Mesh({"x": n})
    given[1, 1] = 0.0
    want = results(given.clone().requires_grad_())

    def run() -> list[Tensor]:
        return [mw.unshard(t) for t in results(mw.shard_tensor(given, mesh, {"x": mw.Shard(0)}).requires_grad_())]

    for found in mw.simulate(run, mesh):
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b)


def test_vectors_joined_by_blocks_are_differentiated_twice() -> None:
    """On the rank that has none of four elements, too: it takes part in what the others send."""
    value, mesh = torch.arange(1.0, 5.0, dtype=torch.float64), mw.Mesh({"a": 3})

    def second(x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([x.detach(), x * x])
        (first,) = torch.autograd.grad((joined * (joined * joined).sum()).sum(), [x], create_graph=True)
        return torch.autograd.grad((first * first).sum(), [x])[0]

    def run() -> torch.Tensor:
        return mw.unshard(second(mw.shard_tensor(value, mesh, [mw.Shard(0)]).requires_grad_()))

    wanted = second(value.clone().requires_grad_())
    for found in mw.simulate(run, mesh):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("placements", [{}, {"dp": mw.Shard(0)}, {"dp": mw.Shard(1)}], ids=str)
def test_differences_beside_what_is_joined(placements: dict[str, mw.Shard]) -> None:
    """As in Transformers, which finds documents by positions: along a whole dim, and split along the others."""
    mesh = mw.Mesh({"dp": 2})
    x, before, after = (torch.rand(3, n, dtype=torch.float64) for n in (5, 2, 1))

    def run() -> tuple[torch.Tensor, ...]:
        own = mw.shard_tensor(x, mesh, placements).requires_grad_()
        made = torch.diff(
            own * 2, 2, prepend=mw.shard_tensor(before, mesh, {}), append=mw.shard_tensor(after, mesh, {})
        )
        made.square().sum().backward()
        assert own.grad is not None
        return mw.unshard(made.detach()), mw.unshard(own.grad)

    own = x.clone().requires_grad_()
    want = torch.diff(own * 2, 2, prepend=before, append=after)
    want.square().sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of an op without a rule
        for got in mw.simulate(run, mesh):
            torch.testing.assert_close(got, (want.detach(), own.grad))
