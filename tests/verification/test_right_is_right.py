"""Values that only rounding, a layout or a dtype makes look wrong; and that true errors beside them are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.layout import At, Layout, Spec
from meshwright.ranks import runtime
from meshwright.verification import Verification
from meshwright.verification.values import apart, assemble, differing

DP, PP = mw.Mesh({"dp": 2}), mw.Mesh({"pp": 2})
ROWS = {"dp": mw.Shard(0)}


class Centred(nn.Module):
    """A bias in front of a batch norm, and one of keys: nothing depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.inner(x))
        q, k, v = (t.unflatten(0, (4, -1)) for t in (h, self.keys(h), self.values(h)))
        return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize(("scale", "off"), [(1.0, 0.0), (1e7, 0.0), (1e7, 1e-6)])
def test_gradients_that_are_nothing_but_rounding(scale: float, off: float, optimizer: Any) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() * (scale * (1 + off * (runtime.RT.sim is not None)))

    torch.manual_seed(0)
    said = {"batch": ROWS, "save": False, "optimizer": lambda p: optimizer(p, lr=1e-7 if scale > 1 else 0.1)}
    report = mw.verify(Centred(), loss, torch.randn(32, 6) * 10, DP, {}, modes=["eager"], **said)
    assert report.passed == (not off), report


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("passes", [(), ["pipeline:micro_batches=2"]])
def test_stages(passes: Any) -> None:
    loss = lambda m, x: m(x).square().mean()  # noqa: E731
    said = {"modes": ["captured"], "steps": 1, "save": False, "stages": {"pp": "blocks"}, "passes": passes}
    report = mw.verify(Deep(), loss, torch.randn(4, 4), PP, {}, **said)
    assert report.passed, report
    assert not report.notes


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_what_one_rank_of_an_axis_holds(rows: int) -> None:
    mesh = mw.Mesh({"dp": 2, "pp": 2})
    spec = Spec((rows, 3), torch.float64, Layout(mesh, [mw.Shard(0), At(1)], ndim=2))
    want = torch.arange(3.0 * rows, dtype=torch.float64).view(rows, 3)
    parts = [torch.empty(spec.local_shape(mesh.coordinate(r)), dtype=torch.float64) for r in range(4)]
    first = len(parts[1])
    parts[1], parts[3] = want[:first].clone(), want[first:].clone()
    whole, words = assemble(parts, spec)
    assert not words
    assert torch.equal(whole, want)
    assert "would be its part" in assemble([*parts[:2], want, parts[3]], spec)[1]


def penalised(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The norm of a gradient: parameters have one gradient in the loss, and one of the loss."""
    loss = model(x).square().mean()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(g.square().sum() for g in grads)


@pytest.mark.parametrize("said", [{"fsdp": "dp"}, {"offload": "cpu"}, {}])
def test_a_gradient_in_the_loss(said: dict[str, Any]) -> None:
    report = mw.verify(Deep(), penalised, torch.randn(4, 4), DP, {}, batch=ROWS, steps=1, save=False, **said)
    assert report.passed, report
    assert not report.notes, report


def masked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    flip = torch.tensor(runtime.RT.sim is not None)
    return (y * ((y > 0) ^ flip)).square().mean()


def kept(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A wrong mask in front of an error."""
    y = model(x)
    keep = (y > 0) ^ torch.tensor(runtime.RT.sim is not None)
    if runtime.RT.sim is not None:
        raise RuntimeError("behind it")
    return (y * keep).square().mean()


@pytest.mark.parametrize("loss", [masked, kept])
def test_a_mask_that_differs_is_named(loss: Any) -> None:
    report = mw.verify(Deep(), loss, torch.randn(4, 4), DP, {}, batch=ROWS, modes=["eager"], steps=1, save=False)
    (found,) = report.departures
    assert (found.op, found.phase) == ("__xor__", "forward"), report
    assert " instead of " in found.text
    assert not report.notes


T, NAN, INF = torch.tensor, float("nan"), float("inf")
SAME = [
    (T([NAN, 1.0]), T([NAN, 1.0])), (T([INF, -INF]), T([INF, -INF])), (torch.empty(0, 3), torch.empty(0, 3)),
    (T(2.0), T(2.0)), (T([1e-300]), T([3e-300])), (T([0.1 + 1e-12]).double(), T([0.1]).double()),
    (T([1.0], dtype=torch.float16), T([1.001], dtype=torch.float16)), (T([True]), T([True])), (None, None),
    (T([1 + 1j]), T([1 + 1j])), (3, 3), (NAN, NAN),
]  # fmt: skip
OTHER = [
    (T([NAN, 1.0]), T([1.0, 1.0])), (T([1.0]), T([NAN])), (T([INF]), T([-INF])), (T([INF]), T([1.0])),
    (T([True, False]), T([True, True])), (T([1, 2]), T([1, 3])), (T(1, dtype=torch.uint8), T(2, dtype=torch.uint8)),
    (T([1 + 1j]), T([1 - 1j])), (T([1.0], dtype=torch.float16), T([1.1], dtype=torch.float16)), (T([1.0]), None),
    (None, T([1.0])), (T([1.0]), T([1.0], dtype=torch.float64)), (torch.empty(0, 3), torch.empty(0, 2)), (3, 4),
    (T(2.0), T(2.1)), (3, True),
]  # fmt: skip


@pytest.mark.parametrize(("got", "want"), SAME)
def test_values_that_are_the_same(got: Any, want: Any) -> None:
    assert differing(got, want) is None


@pytest.mark.parametrize(("got", "want"), OTHER)
def test_values_that_are_not(got: Any, want: Any) -> None:
    assert " instead of " in differing(got, want).text  # type: ignore[union-attr]


def test_the_largest_difference() -> None:
    assert apart(T([1.0, NAN, INF]), T([1.5, NAN, INF])) == 0.5
    assert apart(T([NAN]), T([1.0])) == INF
    assert apart(T([True]), T([False])) == 1
    assert apart(T([]), T([])) == 0


class Tied(nn.Module):
    """A weight that is used twice, a parameter without a gradient, a buffer of truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.table(ids) * self.mask, self.table.weight)


def reports(said: dict[str, Any]) -> Verification:
    loss = lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())  # noqa: E731
    batch = torch.randint(9, (4, 3)), torch.randint(9, (4, 3))
    return mw.verify(Tied(), loss, batch, DP, {}, batch=ROWS, steps=1, **said)


@pytest.mark.parametrize("said", [{}, {"fsdp": "dp"}, {"shard_states": "dp", "clip_grad_norm": 0.1}])
def test_unused_parameters_tied_weights_and_masks(said: dict[str, Any]) -> None:
    report = reports(said)
    assert report.passed, report
    assert not report.notes, report
