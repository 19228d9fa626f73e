"""Random numbers do not depend on the layout: they are what one device draws, or belong to the element."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.generator import counter, reproducible_random, stream
from tests.support.sweep import MESHES, mesh_of, sweep

LAYOUTS_1 = [[mw.Replicate()], [mw.Partial()], [mw.Partial("max")], [mw.Shard(0)], [mw.Shard(1)], [mw.Shard(2)]]
LAYOUTS_2 = [
    [mw.Shard(0), mw.Shard(1)],
    [mw.Shard(1), mw.Shard(1)],
    [mw.Replicate(), mw.Shard(2)],
    [mw.Shard(2), mw.Shard(0)],
    [mw.Partial(), mw.Shard(1)],
    [mw.Partial(), mw.Partial()],
]


def layouts(sizes: tuple[int, ...], partial: bool = True) -> list[list[Any]]:
    listed = LAYOUTS_1 if len(sizes) == 1 else LAYOUTS_2
    return [lay for lay in listed if partial or not any(isinstance(p, mw.Partial) for p in lay)]


def same_draws(draw: Callable[[torch.Tensor], torch.Tensor], template: torch.Tensor, partial: bool = True) -> None:
    """``draw`` gives the same values, and leaves the generator in the same state, as on one device."""
    torch.manual_seed(3)
    want, after = draw(template.clone()), torch.rand(())
    for sizes in MESHES:
        mesh = mesh_of(sizes)

        def run(mesh: mw.Mesh = mesh, sizes: tuple[int, ...] = sizes) -> None:
            for layout in layouts(sizes, partial):
                x = mw.reshard(mw.shard_tensor(template, mesh, {}), layout)
                torch.manual_seed(3)
                made = draw(x)
                then = torch.rand(())
                assert torch.equal(mw.unshard(made), want), (mesh, layout)
                assert torch.equal(then, after), (mesh, layout)

        mw.simulate(run, mesh)


FILLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(1, 2),
    "normal_ by name": lambda x: x.normal_(mean=1.0, std=3.0),
    "random_": lambda x: x.random_(7),
    "exponential_": lambda x: x.exponential_(2.0),
    "geometric_": lambda x: x.geometric_(0.3),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_ of the half": lambda x: x.bernoulli_(),
    "rand_like": torch.rand_like,
    "rand_like with dtype": lambda x: torch.rand_like(x, dtype=torch.float64),
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randint_like from": lambda x: torch.randint_like(x, 3, 9),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x, std=0.7),
    "xavier_uniform_": lambda x: nn.init.xavier_uniform_(x),
    "kaiming_normal_": lambda x: nn.init.kaiming_normal_(x),
    "exponential_ of an empty_like": lambda x: torch.empty_like(x * 0).exponential_(),
}


@pytest.mark.thin(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 7, 3), (2, 3, 2), (4, 4, 3)])
@pytest.mark.parametrize("name", FILLS)
def test_fills(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    same_draws(FILLS[name], torch.zeros(shape, dtype=dtype), partial=name != "trunc_normal_")


def test_fills_longer_than_a_piece() -> None:
    size = stream.CHUNK + 1003
    for draw in (lambda x: x.normal_(), lambda x: x.uniform_(), lambda x: x.bernoulli_(0.2)):
        same_draws(draw, torch.zeros(size // 12 + 1, 4, 3))


def test_what_does_not_come_in_pieces_is_drawn_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_in_pieces", lambda *args: False)
    for name in ("bernoulli_", "exponential_", "normal_"):
        same_draws(FILLS[name], torch.zeros(5, 7, 3))


def test_an_accelerator_draws_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """There which number an element gets depends on the size of what is drawn: the processor stands in for one."""
    monkeypatch.setattr(stream, "_serial", lambda t: False)
    monkeypatch.setattr(stream, "_in_pieces", lambda *args: pytest.fail("asked what only a serial generator knows"))
    for name in ("uniform_", "normal_", "exponential_", "rand_like", "randn_like", "kaiming_normal_"):
        same_draws(FILLS[name], torch.zeros(5, 7, 3))
    same_draws(lambda x: x.normal_(), torch.zeros(stream.CHUNK // 12 + 99, 4, 3))


def test_masks_do_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    x, seed = torch.randn(40, 3000), torch.tensor(5)
    made = counter.dropout(x, seed, 0.3, x.shape, (0, 0))
    monkeypatch.setattr(counter, "_block", lambda device: counter.WIDE_BLOCK)
    assert torch.equal(counter.dropout(x, seed, 0.3, x.shape, (0, 0)), made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_probabilities_and_means_from_tensors(dtype: torch.dtype) -> None:
    x = torch.linspace(0.05, 0.95, 5 * 7 * 3).view(5, 7, 3).to(dtype)
    same_draws(lambda p: torch.bernoulli(p), x)
    same_draws(lambda p: p.clone().bernoulli_(p), x)
    same_draws(lambda p: p.bernoulli(0.3), x)
    same_draws(lambda p: torch.normal(p, p), x)
    same_draws(lambda p: torch.normal(p, 2.0), x)
    same_draws(lambda p: torch.normal(1.0, p), x)


def test_gradients_of_draws_are_zeros() -> None:
    p = torch.rand(5, 7, dtype=torch.float64)
    for draw in (torch.bernoulli, lambda p: torch.normal(p, 2.0), lambda p: torch.normal(p, p)):
        sweep(draw, p, cases=6, same_each_time=1)


def test_a_generator_of_ones_own() -> None:
    same_draws(lambda x: x.uniform_(generator=torch.Generator().manual_seed(5)), torch.zeros(5, 7, 3))
    same_draws(lambda x: x.normal_(generator=torch.Generator().manual_seed(5)), torch.zeros(5, 7, 3))
    same_draws(lambda x: torch.bernoulli(x, generator=torch.Generator().manual_seed(5)), torch.full((5, 7, 3), 0.4))


@pytest.mark.parametrize(
    "factory",
    [
        torch.rand,
        torch.randn,
        torch.zeros,
        torch.ones,
        functools.partial(torch.full, fill_value=3),
        functools.partial(torch.randint, 2, 9),
        functools.partial(torch.randint, 9),
        functools.partial(torch.randn, generator=None),
        lambda shape, dtype: torch.arange(math.prod(shape), dtype=dtype).view(shape),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_factories(factory: Any, dtype: torch.dtype) -> None:
    streamed = factory in (torch.rand, torch.randn, torch.zeros)
    if dtype.is_complex and not streamed:
        pytest.skip("no complex numbers")
    torch.manual_seed(4)
    want = factory((5, 7, 3), dtype=dtype)
    for sizes in MESHES:
        mesh = mesh_of(sizes)

        def run(mesh: mw.Mesh = mesh, sizes: tuple[int, ...] = sizes) -> None:
            for layout in layouts(sizes, not dtype.is_complex):
                torch.manual_seed(4)
                assert torch.equal(mw.unshard(mw.sharded(factory, (5, 7, 3), mesh, layout, dtype=dtype)), want)

        mw.simulate(run, mesh)


# ---------------------------------------------------------------------------------------------- dropout

X = torch.linspace(-2, 3, 5 * 8 * 6, dtype=torch.float64).view(5, 8, 6)
DROPOUT: dict[str, tuple[Any, ...]] = {
    "dropout": (lambda x: F.dropout(x, 0.4), X),
    "dropout in place": (lambda x: F.dropout(x * 1.0, 0.4, inplace=True), X),
    "dropout, evaluating": (lambda x: F.dropout(x, 0.4, training=False), X),
    "dropout of nothing": (lambda x: F.dropout(x, 0.0), X),
    "dropout of all": (lambda x: F.dropout(x, 1.0), X),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.4, True), X),
    "dropout1d": (lambda x: F.dropout1d(x, 0.4), X),
    "dropout2d": (lambda x: F.dropout2d(x, 0.4), X.view(5, 8, 3, 2)),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.4, training=True), X),
    "feature_alpha_dropout": (lambda x: F.feature_alpha_dropout(x, 0.4, training=True), X),
    "rrelu": (lambda x: F.rrelu(x, training=True), X),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True),
        *(X.view(2, 4, 5, 6) * s for s in (1.0, 0.5, 0.3)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_the_same_on_every_mesh(name: str) -> None:
    fn, *inputs = DROPOUT[name]
    with reproducible_random():
        # The reference runs on one device inside the mode; so do the distributed runs, which it leaves alone.
        sweep(fn, *inputs, cases=10, same_each_time=11)


def test_a_model_with_dropout_equals_one_device() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True, dtype=torch.float64)
    x = X[:, :, :].reshape(5, 6, 8)

    def loss(x: Any) -> Any:
        torch.manual_seed(9)
        return (model(x) ** 2).sum()

    with reproducible_random():
        want = loss(x)
    for sizes in MESHES:
        mesh = mesh_of(sizes)

        def run(mesh: mw.Mesh = mesh) -> Any:
            return loss(mw.shard_tensor(x, mesh, [mw.Shard(0), *[mw.Replicate()] * (mesh.ndim - 1)])).item()

        for got in mw.simulate(run, mesh):
            assert got == pytest.approx(want.item(), rel=1e-9)


def test_dropout_under_checkpoint() -> None:
    def run() -> None:
        x = mw.shard_tensor(X.clone().requires_grad_(), mesh_of((4,)), [mw.Shard(0)])

        def block(x: Any) -> Any:
            return F.dropout(x * 2, 0.5).sin()

        grads = []
        block(x).sum()  # so that both have their plans
        for again in (True, False):
            torch.manual_seed(1)
            y = checkpoint(block, x, use_reentrant=False) if again else block(x)
            grads.append(mw.unshard(torch.autograd.grad(y.sum(), x)[0]))
        assert torch.equal(*grads)

    mw.simulate(run, mesh_of((4,)))


def test_second_derivative_of_dropout() -> None:
    seed = torch.tensor(5)
    x = X.clone().requires_grad_()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return counter.dropout(x, seed, 0.5, (10, 8, 6), (5, 0, 0)) ** 2

    assert torch.autograd.gradcheck(fn, x[:2])
    assert torch.autograd.gradgradcheck(fn, x[:1, :3])


def mask(shape: tuple[int, ...], p: float, seed: int) -> torch.Tensor:
    """1 where an element is kept, less the mean."""
    kept = counter.dropout(torch.ones(shape), torch.tensor(seed), p, shape, (0,) * len(shape)) != 0
    return kept.double() - (1 - p)


@pytest.mark.thin(5)
@pytest.mark.parametrize("shape", [(700, 900), (100_000,), (6, 9, 30, 300), (3000, 7, 11)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_statistics_of_masks(shape: tuple[int, ...], p: float) -> None:
    v = p * (1 - p)
    for seed in (0, 1, 2**40):
        m = mask(shape, p, seed)
        n, flat, two = m.numel(), m.flatten(), m.view(-1, shape[-1])
        scores = {"mean": m.sum() / math.sqrt(v * n)}
        for lag in (1, 2, 7, 64, 256, shape[-1]):
            if lag < n:  # neighbours, in a row and below each other
                scores[f"lag {lag}"] = (flat[lag:] * flat[:-lag]).sum() / v / math.sqrt(n - lag)
        other = mask(shape, p, seed + 1)
        scores["next seed"] = (m * other).sum() / v / math.sqrt(n)
        if len(two) > 1:  # the index enters as row + column: corners of rectangles must not be related
            high, wide = two.shape[0] // 2, two.shape[1] // 2
            for corners in (two[:-1] * two[1:], two[:high] * two[high : 2 * high]):
                for quad in (corners[:, 1:] * corners[:, :-1], corners[:, :wide] * corners[:, wide : 2 * wide]):
                    scores[f"rectangle {quad.shape}"] = quad.sum() / v**2 / math.sqrt(quad.numel())
        assert all(abs(float(s)) < 4.5 for s in scores.values()), {k: round(float(s), 2) for k, s in scores.items()}


def test_pairs_of_uniform_numbers() -> None:
    """Chi-square of pairs of neighbours over 16 x 16 cells, and moments."""
    shape = (500, 1000)
    like = torch.empty(shape, dtype=torch.float64)
    for seed in range(3):
        u = counter.uniform(like, torch.tensor(seed), shape, (0, 0))
        assert 0 < u.min() < 1e-4
        assert 1 - 1e-4 < u.max() < 1
        assert abs(u.mean() - 0.5) < 4 / math.sqrt(12 * u.numel())
        assert abs(u.var() * 12 - 1) < 0.01
        cells = (u * 16).long()
        for a, b in ((cells[:, ::2], cells[:, 1::2]), (cells[::2], cells[1::2])):
            counts = torch.bincount((a * 16 + b).flatten(), minlength=256).double()
            expected = a.numel() / 256
            chi = ((counts - expected) ** 2 / expected).sum()
            assert abs(chi - 255) < 4.5 * math.sqrt(2 * 255)


def test_only_own_elements_are_computed() -> None:
    """The part of a tensor far larger than memory."""
    shape, offset = (1 << 20, 1 << 20), (77_777, 1 << 19)
    part = counter.dropout(torch.ones(3, 1000), torch.tensor(1), 0.5, shape, offset)
    first = counter.dropout(torch.ones(1, 1000), torch.tensor(1), 0.5, shape, (77_778, 1 << 19))
    assert torch.equal(part[1:2], first)
    assert 0.4 < (part != 0).double().mean() < 0.6


def test_gumbel_softmax_agrees_with_one_device() -> None:
    sweep(lambda x: F.gumbel_softmax(x, dim=1), X, cases=8, same_each_time=2)


@pytest.mark.parametrize(
    "kind", ["uniform_", "normal_", "random_", "exponential_", "rand_like", "randn_like", "complex"]
)
@pytest.mark.parametrize("dims", [(1, 0, 2), (2, 0, 1), (0, 2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fills_follow_the_memory(kind: str, dims: tuple[int, ...], dtype: torch.dtype) -> None:
    """A tensor of permuted strides is filled in another order than a contiguous one, as on one device."""
    mesh = mw.Mesh({"x": 2})
    base = torch.zeros(6, 5, 7, dtype=dtype)

    def fill(t: Any) -> Any:
        t = t.permute(dims)
        if kind == "complex":
            return torch.randn_like(t, dtype=torch.complex64)
        return getattr(t, kind)() if kind.endswith("_") else getattr(torch, kind)(t)

    torch.manual_seed(3)
    want = fill(base.clone())
    for placement in (mw.Replicate(), mw.Shard(0), mw.Shard(1), mw.Shard(2)):

        def run(placement: Any = placement) -> Any:
            torch.manual_seed(3)
            x = mw.shard_tensor(base.clone(), mesh, [placement])
            return mw.unshard(fill(x)), torch.rand(1)

        torch.manual_seed(3)
        fill(base.clone())
        after = torch.rand(1)
        for got, next_number in mw.simulate(run, mesh):
            assert torch.equal(got, want), placement
            assert torch.equal(next_number, after)


def test_attention_of_plain_tensors_by_name_drops_alike() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()

    def drawn(*args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        with reproducible_random():
            return F.scaled_dot_product_attention(*args, **named, dropout_p=0.5)

    assert torch.equal(drawn(q, k, v), drawn(query=q, key=k, value=v))
