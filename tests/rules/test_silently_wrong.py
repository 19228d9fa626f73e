"""What other systems of sharded tensors get silently wrong: here right, value and gradient, over uneven shards.

Each case was seen to give a wrong number, and no error, with PyTorch's DTensor on one layout or another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from tests.support.sweep import compare, fixed, graded, mesh_of, place

R, S0, S1, P = mw.Replicate(), mw.Shard(0), mw.Shard(1), mw.Partial()
MESH = mesh_of((4,))


def r(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def agrees(fn: Callable[..., Any], *inputs: tuple[torch.Tensor, Any]) -> None:
    """``fn`` of tensors of the given layouts against the single device."""

    def fresh() -> list[torch.Tensor]:
        return [t.clone().requires_grad_(t.is_floating_point() and not hasattr(t, "fixed")) for t, _ in inputs]

    own = fresh()
    want = graded(fn, own, own)

    def run() -> None:
        pairs = [place(t, MESH, [layout]) for t, (_, layout) in zip(fresh(), inputs, strict=True)]
        made = graded(fn, [x for _, x in pairs], [leaf for leaf, _ in pairs])
        compare(made[0], want[0], 1e-10)
        compare(made[1], want[1], 1e-10)

    mw.simulate(run, MESH)


BATCHES = (8, 7, 5, 3, 1)  # over 4: even; 2 2 2 1; 2 2 1 0; 1 1 1 0; 1 0 0 0


@pytest.mark.parametrize("n", BATCHES)
@pytest.mark.parametrize("loss", [F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.l1_loss, F.kl_div, F.poisson_nll_loss])
def test_mean_losses_over_a_sharded_batch(loss: Callable[..., Any], n: int) -> None:
    agrees(loss, (r(n, 3), S0), (r(n, 3, seed=1), S0))
    agrees(loss, (r(n, 3), S0), (r(n, 3, seed=1), R))


@pytest.mark.parametrize("n", BATCHES)
def test_binary_cross_entropy_over_a_sharded_batch(n: int) -> None:
    x, y = r(n, 3).sigmoid(), r(n, 3, seed=1).sigmoid()
    agrees(F.binary_cross_entropy, (x, S0), (y, S0))
    agrees(F.binary_cross_entropy_with_logits, (r(n, 3), S0), (y, S0))


@pytest.mark.parametrize("n", BATCHES)
def test_weighted_cross_entropy(n: int) -> None:
    target = torch.tensor([2, 0, 4, 4, -100, 1, 3, 2])[:n]
    weight = fixed(torch.tensor([1.0, 2.0, 0.5, 4.0, 0.25], dtype=torch.float64))
    for layout, of_target in ((S0, S0), (S0, R), (S1, R), (R, S0)):
        for of_weight in (R, S0):
            agrees(F.cross_entropy, (r(n, 5), layout), (target, of_target), (weight, of_weight))
        agrees(F.cross_entropy, (r(n, 5), layout), (target, of_target))
        smooth = lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1)  # noqa: E731
        agrees(smooth, (r(n, 5), layout), (target, of_target))


@pytest.mark.parametrize("n", BATCHES)
def test_cosine_embedding_loss(n: int) -> None:
    sign = fixed(torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)[:n])
    for layout, of_sign in ((S0, S0), (S0, R), (S1, R)):
        agrees(F.cosine_embedding_loss, (r(n, 6), layout), (r(n, 6, seed=1), layout), (sign, of_sign))


@pytest.mark.parametrize("layout", [R, S0, S1, P])
@pytest.mark.parametrize("shape", [(8, 4), (7, 5), (3, 3)])
def test_gradient_of_the_largest(shape: tuple[int, int], layout: Any) -> None:
    x = r(*shape)
    agrees(lambda x: x.amax(), (x, layout))
    agrees(lambda x: x.amax(0), (x, layout))
    agrees(lambda x: x.max(), (x, layout))
    agrees(lambda x: torch.linalg.vector_norm(x, float("inf")), (x, layout))
    agrees(lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1), (x, layout))
    agrees(lambda x: x.norm(), (x, layout))
    tied = torch.ones(shape, dtype=torch.float64)
    agrees(lambda x: x.amax(), (tied, layout))


@pytest.mark.parametrize("layout", [R, S0, S1, P])
def test_item_of_a_sum(layout: Any) -> None:
    x = r(7, 5)

    def run() -> None:
        _, y = place(x, MESH, [layout])
        assert y.sum().item() == pytest.approx(x.sum().item())
        assert float(y.mean()) == pytest.approx(x.mean().item())
        assert bool(y.sum() > 0) == bool(x.sum() > 0)
        assert f"{y.sum():.6f}" == f"{x.sum():.6f}"

    mw.simulate(run, MESH)


@pytest.mark.parametrize("channels", [8, 6, 3])
def test_convolution_with_sharded_channels_and_a_bias(channels: int) -> None:
    x, w, b = r(2, channels, 5, 4), r(6, channels, 3, 3, seed=1), r(6, seed=2)
    for of_x, of_w in ((S1, S1), (S1, R), (R, S1), (S0, R), (R, S0), (P, R), (R, P)):
        for of_b in (R, S0, P):
            agrees(F.conv2d, (x, of_x), (w, of_w), (b, of_b))


@pytest.mark.parametrize("n", [8, 6, 3])
def test_linear_with_a_partial_and_a_bias(n: int) -> None:
    x, w, b = r(5, n), r(4, n, seed=1), r(4, seed=2)
    for of_x, of_w in ((S1, S1), (P, R), (R, P), (S1, R)):
        for of_b in (R, S0, P):
            agrees(F.linear, (x, of_x), (w, of_w), (b, of_b))
            agrees(lambda x, w, b: x @ w.T + b, (x, of_x), (w, of_w), (b, of_b))


@pytest.mark.parametrize("layout", [R, S0, S1])
@pytest.mark.parametrize("of_source", [R, S0, S1, P])
def test_scatter_add(layout: Any, of_source: Any) -> None:
    index = torch.tensor([[0, 3, 3, 1, 6], [2, 2, 0, 5, 6], [1, 1, 1, 4, 4]])
    agrees(lambda x, i, s: x.scatter_add(0, i, s), (r(7, 5), layout), (index, R), (r(3, 5, seed=1), of_source))
    agrees(lambda x, i, s: x.scatter_add(1, i.T, s.T), (r(5, 7), layout), (index, R), (r(3, 5, seed=1), of_source))


@pytest.mark.parametrize("n", [4, 3, 2, 1])
def test_squeeze_of_a_dim_that_is_one_only_locally(n: int) -> None:
    agrees(lambda x: x.squeeze(), (r(n, 3), S0))
    agrees(lambda x: x.squeeze(0), (r(n, 3), S0))
    agrees(lambda x: x.squeeze(-1), (r(3, n), S1))


@pytest.mark.parametrize("layout", [S0, S1, P])
def test_bias_added_to_a_partial(layout: Any) -> None:
    agrees(lambda x, b: x.sum(0) + b, (r(7, 5), layout), (r(5, seed=1), R))
    agrees(lambda x, b: x.sum(0) * 2 - b, (r(7, 5), layout), (r(5, seed=1), R))
    agrees(lambda x, b: (x.sum(0) + b).relu(), (r(7, 5), layout), (r(5, seed=1), S0))
    agrees(lambda x: x.sum(0) + 1, (r(7, 5), layout))
    agrees(lambda x: x.sum() - 1.5, (r(7, 5), layout))


@pytest.mark.parametrize("n", BATCHES)
@pytest.mark.parametrize("layout", [S0, S1, P])
def test_mean_of_uneven_shards(n: int, layout: Any) -> None:
    agrees(lambda x: x.mean(), (r(n, 5), layout))
    agrees(lambda x: x.mean(0), (r(n, 5), layout))
    agrees(lambda x: x.mean((0, 1), keepdim=True), (r(n, 5), layout))
    if n > 1:
        agrees(lambda x: x.var(0), (r(n, 5), layout))
        agrees(lambda x: x.std(), (r(n, 5), layout))
