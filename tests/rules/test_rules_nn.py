"""Layers, normalisations, losses and convolutions against the single device, value and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.errors import RuleError
from meshwright.ranks import runtime
from tests.support.sweep import fixed, mesh_of, sweep

torch.manual_seed(0)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


def p(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))) * 0.9 + 0.05


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high + len(shape)))


SOFT = {
    "softmax": (lambda x: F.softmax(x, -1), r(5, 7)),
    "softmax of the first dim": (lambda x: torch.softmax(x, 0), r(5, 7)),
    "log_softmax": (lambda x: F.log_softmax(x, 1), r(2, 7, 3)),
    "log_softmax of few": (lambda x: x.log_softmax(-1), r(3, 2)),
    "softmin": (lambda x: F.softmin(x, 0), r(6, 3)),
    "softmax with dtype": (lambda x: F.softmax(x, -1, dtype=torch.float64), r(5, 7)),
    "glu": (lambda x: F.glu(x, 1), r(5, 6)),
    "prelu": (lambda x, w: F.prelu(x, w), r(4, 6, 2), r(6)),
    "prelu of one slope": (lambda x, w: F.prelu(x, w), r(4, 6), r(1)),
    "normalize": (lambda x: F.normalize(x, dim=1), r(5, 6)),
    "cosine_similarity": (lambda x, y: F.cosine_similarity(x, y, dim=1), r(5, 6), r(5, 6) + 1),
    "cosine_similarity that broadcasts": (lambda x, y: F.cosine_similarity(x, y, dim=-1), r(5, 1, 6), r(4, 6)),
    "pairwise_distance": (lambda x, y: F.pairwise_distance(x, y), r(5, 6), r(6)),
    "cdist": (lambda x, y: torch.cdist(x, y), r(2, 5, 3), r(2, 4, 3) + 1),
}

EMBED = {
    "embedding": (lambda w, i: F.embedding(i, w), r(10, 4), ints(10, 3, 5)),
    "embedding with padding": (lambda w, i: F.embedding(i, w, padding_idx=6), r(10, 4), ints(10, 6, 5)),
    "embedding with padding from the end": (lambda w, i: F.embedding(i, w, padding_idx=-1), r(7, 4), ints(7, 6, 5)),
    "embedding of few rows": (lambda w, i: F.embedding(i, w), r(2, 3), ints(2, 5)),
    "embedding scaled by frequency": (
        lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), r(5, 3), ints(5, 8),
    ),
}  # fmt: skip


def sdpa(*args: Any, **named: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*args, **named)


MASK = ints(2, 5, 7).bool() | torch.eye(5, 7, dtype=torch.bool)
ATTENTION = {
    "attention": (sdpa, r(2, 4, 5, 3), r(2, 4, 7, 3), r(2, 4, 7, 6)),
    "attention of 3 dims": (sdpa, r(4, 5, 3), r(4, 7, 3), r(4, 7, 3)),
    "causal attention": (lambda q, k, v: sdpa(q, k, v, is_causal=True), r(2, 3, 5, 4), r(2, 3, 5, 4), r(2, 3, 5, 4)),
    "attention with a mask": (lambda q, k, v: sdpa(q, k, v, MASK), r(2, 4, 5, 3), r(2, 4, 7, 3), r(2, 4, 7, 6)),
    "attention with a bias": (sdpa, r(2, 4, 5, 3), r(2, 4, 7, 3), r(2, 4, 7, 6), r(4, 5, 7)),
    "attention with a bias per key": (sdpa, r(2, 4, 5, 3), r(2, 4, 7, 3), r(2, 4, 7, 3), r(2, 1, 1, 7)),
    "grouped attention": (
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True, is_causal=True), r(2, 8, 5, 3), r(2, 4, 5, 3), r(2, 4, 5, 3),
    ),
    "grouped attention, 2 heads": (
        lambda q, k, v, m: sdpa(q, k, v, m, enable_gqa=True), r(1, 6, 3, 2), r(1, 2, 4, 2), r(1, 2, 4, 2), r(6, 3, 4),
    ),
}  # fmt: skip


def stats(*args: Any, **named: Any) -> Any:
    """batch_norm, and the running statistics after it."""
    x, w, b, *rest = args
    mean, var = rest if rest else (torch.zeros(x.shape[1]).double(), torch.ones(x.shape[1]).double())
    made = F.batch_norm(x, mean, var, w, b, training=True, momentum=0.3)
    return made, mean.detach().clone(), var.detach().clone()


def running(x: Any) -> Any:
    """instance_norm, and the running statistics after it."""
    mean, var = torch.zeros(x.shape[1]).double(), torch.ones(x.shape[1]).double()
    made = F.instance_norm(x, mean, var, use_input_stats=True, momentum=0.3)
    return made, mean.clone(), var.clone()


NORM = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), r(5, 3, 6), r(6), r(6) + 1),
    "layer_norm of 2 dims": (lambda x, w, b: F.layer_norm(x, (3, 6), w, b), r(5, 3, 6), r(3, 6), r(3, 6) + 1),
    "layer_norm, plain": (lambda x: F.layer_norm(x, (7,)), r(5, 7)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), r(5, 3, 6), r(6)),
    "rms_norm with eps": (lambda x: F.rms_norm(x, (3, 6), eps=0.1), r(5, 3, 6)),
    "batch_norm": (stats, r(6, 5), r(5), r(5) + 1),
    "batch_norm of images": (stats, r(5, 4, 3, 2), r(4), r(4) + 1),
    "batch_norm without statistics": (lambda x: F.batch_norm(x, None, None, training=True), r(5, 4, 3)),
    "batch_norm, evaluating": (
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b), r(5, 4, 3), fixed(r(4)), fixed(p(4)), r(4) + 1, r(4) + 2,
    ),
    "cosine_similarity over a repeated dim": (lambda x, y: F.cosine_similarity(x, y, dim=1), r(1, 8, 3), r(2, 1, 3)),
    "cosine_similarity beside one": (lambda x, y: F.cosine_similarity(x, y, dim=-1), r(1, 4, 8), r(2, 1, 8)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), r(3, 8, 5), r(8), r(8) + 1),
    "group_norm of 2 groups": (lambda x, w, b: F.group_norm(x, 2, w, b), r(5, 6, 2, 3), r(6), r(6) + 1),
    "group_norm of 1 group": (lambda x: F.group_norm(x, 1), r(3, 4, 2)),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), r(3, 4, 5), r(4), r(4) + 1),
    "instance_norm with statistics": (running, r(3, 4, 5)),
    "local_response_norm": (lambda x: F.local_response_norm(x, 2), r(3, 4, 5)),
}  # fmt: skip

REDUCTIONS = ("mean", "sum", "none")
PAIR_LOSSES = {
    "mse_loss": (F.mse_loss, r(5, 3), r(5, 3) + 1),
    "mse_loss with weights": (
        lambda x, y, reduction: F.mse_loss(x, y, weight=p(5, 3), reduction=reduction), r(5, 3), p(5, 3),
    ),
    "l1_loss": (F.l1_loss, r(5, 3), r(5, 3) + 1),
    "smooth_l1_loss": (lambda x, y, reduction: F.smooth_l1_loss(x, y, beta=0.7, reduction=reduction), r(5, 3), p(5, 3)),
    "huber_loss": (lambda x, y, reduction: F.huber_loss(x, y, delta=0.7, reduction=reduction), r(5, 3), p(5, 3)),
    "binary_cross_entropy": (F.binary_cross_entropy, p(5, 3), p(5, 3) / 2),
    "bce with weights": (
        lambda x, y, w, reduction: F.binary_cross_entropy(x, y, w, reduction=reduction),
        p(5, 3), p(5, 3) / 2, fixed(p(3)),
    ),
    "bce_with_logits": (
        lambda x, y, w, reduction: F.binary_cross_entropy_with_logits(x, y, pos_weight=w, reduction=reduction),
        r(5, 3), p(5, 3), fixed(p(3)),
    ),
    "kl_div": (F.kl_div, r(5, 3), p(5, 3)),
    "poisson_nll_loss": (F.poisson_nll_loss, r(5, 3), p(5, 3)),
    "gaussian_nll_loss": (F.gaussian_nll_loss, r(5, 3), r(5, 3) + 1, p(5, 3)),
    "soft_margin_loss": (F.soft_margin_loss, r(5, 3), fixed(r(5, 3).sign())),
    "hinge_embedding_loss": (F.hinge_embedding_loss, r(5, 3), r(5, 3).sign()),
    "margin_ranking_loss": (F.margin_ranking_loss, r(5), r(5) + 0.2, r(5).sign()),
    "cosine_embedding_loss": (F.cosine_embedding_loss, r(5, 3), r(5, 3) + 1, r(5).sign()),
    "triplet_margin_loss": (
        lambda a, b, c, reduction: F.triplet_margin_loss(a, b, c, swap=True, reduction=reduction),
        r(5, 3), p(5, 3), r(5, 3) + 1,
    ),
    "triplet_margin_with_distance_loss": (F.triplet_margin_with_distance_loss, r(5, 3), p(5, 3), r(5, 3) + 1),
    "multi_margin_loss": (F.multi_margin_loss, r(5, 3), ints(3, 5)),
    "multilabel_margin_loss": (F.multilabel_margin_loss, r(5, 3), torch.tensor([[0, -1, 1]] * 5)),
    "multilabel_soft_margin_loss": (F.multilabel_soft_margin_loss, r(5, 3), p(5, 3)),
}  # fmt: skip

TARGETS = torch.tensor([3, -100, 0, 6, 5, 2])
WIDE_TARGETS = ints(7, 5, 3, 2)
CROSS = {
    "cross_entropy": (lambda x, t, reduction: F.cross_entropy(x, t, reduction=reduction), r(6, 7), TARGETS),
    "cross_entropy with weights": (
        lambda x, t, w, reduction: F.cross_entropy(x, t, w, reduction=reduction), r(6, 7), TARGETS, fixed(p(7)),
    ),
    "cross_entropy smoothed": (
        lambda x, t, reduction: F.cross_entropy(x, t, label_smoothing=0.2, ignore_index=5, reduction=reduction),
        r(6, 7), TARGETS.clamp(min=0),
    ),
    "cross_entropy smoothed with weights": (
        lambda x, t, w, reduction: F.cross_entropy(x, t, w, label_smoothing=0.2, reduction=reduction),
        r(6, 7), TARGETS, fixed(p(7)),
    ),
    "cross_entropy with positions": (
        lambda x, t, reduction: F.cross_entropy(x, t, reduction=reduction), r(5, 7, 3, 2), WIDE_TARGETS,
    ),
    "cross_entropy of one row": (lambda x, t, reduction: F.cross_entropy(x, t, reduction=reduction), r(7), ints(7)),
    "cross_entropy of probabilities": (
        lambda x, t, w, reduction: F.cross_entropy(x, t, w, label_smoothing=0.1, reduction=reduction),
        r(5, 7), p(5, 7), fixed(p(7)),
    ),
    "nll_loss": (lambda x, t, reduction: F.nll_loss(x, t, reduction=reduction), r(6, 7), TARGETS),
    "nll_loss with weights": (
        lambda x, t, w, reduction: F.nll_loss(x, t, w, reduction=reduction), r(6, 7), TARGETS, fixed(p(7)),
    ),
    "nll_loss with positions": (
        lambda x, t, reduction: F.nll_loss(x, t, reduction=reduction), r(5, 7, 3, 2), WIDE_TARGETS,
    ),
}  # fmt: skip

CONV = {
    "conv1d": (F.conv1d, r(3, 4, 6), r(5, 4, 3), r(5)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), r(2, 3, 5, 4), r(4, 3, 3, 2), r(4)),
    "conv2d without batch": (F.conv2d, r(3, 5, 4), r(4, 3, 3, 2), r(4)),
    "conv2d, same": (lambda x, w: F.conv2d(x, w, padding="same"), r(2, 3, 5, 4), r(4, 3, 3, 3)),
    "conv2d of groups": (lambda x, w, b: F.conv2d(x, w, b, groups=4), r(2, 8, 4, 3), r(8, 2, 2, 2), r(8)),
    "conv2d of 2 groups": (lambda x, w, b: F.conv2d(x, w, b, groups=2), r(2, 6, 4, 3), r(4, 3, 2, 2), r(4)),
    "conv2d by channel": (lambda x, w: F.conv2d(x, w, groups=5), r(2, 5, 4, 3), r(5, 1, 2, 2)),
    "conv3d": (F.conv3d, r(2, 3, 3, 4, 3), r(2, 3, 2, 2, 2), r(2)),
    "conv_transpose1d": (F.conv_transpose1d, r(3, 4, 5), r(4, 5, 3), r(5)),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, groups=4), r(2, 8, 3, 3), r(8, 2, 2, 2), r(8),
    ),
}  # fmt: skip

IMAGES = {
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), r(3, 5, 6)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2, return_indices=True), r(3, 5, 6, 4)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), r(3, 2, 2, 4, 4)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2, padding=1), r(3, 5, 6, 4)),
    "avg_pool1d without batch": (lambda x: F.avg_pool1d(x, 3), r(5, 6)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), r(3, 5, 6, 4)),
    "adaptive_avg_pool2d to one": (lambda x: F.adaptive_avg_pool2d(x, 1), r(3, 5, 6, 4)),
    "adaptive_max_pool1d": (lambda x: F.adaptive_max_pool1d(x, 2), r(3, 5, 6)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True), r(3, 5, 6, 4)),
    "lp_pool2d": (lambda x: F.lp_pool2d(x, 2, 2), p(3, 5, 6, 4)),
    "max_unpool2d": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), r(3, 5, 6, 4)),
    "unfold": (lambda x: F.unfold(x, 2), r(3, 4, 3, 4)),
    "fold": (lambda x: F.fold(x, (4, 4), 2), r(2, 12, 9)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), r(3, 5, 3, 4)),
    "interpolate bilinear": (lambda x: F.interpolate(x, size=(5, 2), mode="bilinear"), r(3, 5, 3, 4)),
    "interpolate linear": (lambda x: F.interpolate(x, size=5, mode="linear"), r(3, 5, 4)),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), r(3, 2, 4, 4), r(3, 5, 2, 2) / 3),
    "affine_grid": (lambda t: F.affine_grid(t, (5, 2, 3, 4), align_corners=False), r(5, 2, 3)),
}  # fmt: skip

OTHERS = {
    "embedding_bag": (lambda w, i: F.embedding_bag(i, w, mode="sum"), r(9, 4), ints(9, 5, 3)),
    "ctc_loss": (
        lambda x, t: F.ctc_loss(x.log_softmax(-1), t, (5, 5, 5), (2, 2, 2)),
        r(5, 3, 4), torch.tensor([[1, 2], [1, 1], [2, 1]]),
    ),
    "fractional_max_pool2d": (
        lambda x: F.fractional_max_pool2d(x, 2, output_size=3, _random_samples=p(3, 5, 2)), r(3, 5, 6, 6),
    ),
}  # fmt: skip

if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
    OTHERS["linear_cross_entropy"] = (F.linear_cross_entropy, r(6, 4), r(7, 4), TARGETS)

CASES = {**OTHERS, **SOFT, **EMBED, **ATTENTION, **NORM, **CONV, **IMAGES}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thin(2)
def test_like_one_device(name: str) -> None:
    fn, *inputs = CASES[name]
    sweep(fn, *inputs, cases=5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", {**PAIR_LOSSES, **CROSS})
@pytest.mark.thin(2)
def test_losses(name: str, reduction: str) -> None:
    fn, *inputs = {**PAIR_LOSSES, **CROSS}[name]
    sweep(lambda *tensors: fn(*tensors, reduction=reduction), *inputs, cases=3)


def recorded(fn: Any) -> list[Any]:
    """Implied conversions that ``fn`` makes on rank 0 of 4."""

    def run() -> list[Any]:
        runtime.RT.records = []
        fn(mesh_of((4,)))
        return runtime.RT.records

    return mw.simulate(run, mesh_of((4,)))[0]


def test_split_classes_exchange_a_few_numbers_per_row() -> None:
    x, target = r(32, 4096), ints(4096, 32)

    def run(mesh: mw.Mesh) -> None:
        logits = mw.shard_tensor(x, mesh, [mw.Shard(1)])
        loss = F.cross_entropy(logits.requires_grad_(), target)
        loss.backward()

    found = recorded(run)
    assert [rec.kinds for rec in found] == [("all_reduce",), ("all_reduce",)], found
    assert sum(rec.bytes for rec in found) <= 2 * 3 * 32 * 8, found
    for fn in (torch.softmax, torch.log_softmax, F.softmax, F.log_softmax):
        found = recorded(lambda mesh, fn=fn: fn(mw.shard_tensor(x, mesh, [mw.Shard(1)]), 1))
        assert sum(rec.bytes for rec in found) <= 2 * 2 * 32 * 8, (fn, found)


def test_batches_and_heads_need_nothing() -> None:
    """What a transformer does on a split batch, or with split heads, implies no communication."""

    def run(mesh: mw.Mesh) -> None:
        for dim in (0, 1):
            q = mw.shard_tensor(r(4, 4, 5, 3), mesh, [mw.Shard(dim)])
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
        x = mw.shard_tensor(r(8, 5, 6), mesh, [mw.Shard(0)])
        F.layer_norm(x, (6,), r(6), r(6))
        F.rms_norm(x, (6,), r(6))
        F.dropout(F.softmax(x, -1), 0.5)
        F.embedding(mw.shard_tensor(ints(9, 8, 5), mesh, [mw.Shard(0)]), mw.shard_tensor(r(9, 4), mesh, {}))
        F.mse_loss(x, mw.shard_tensor(r(8, 5, 6), mesh, [mw.Shard(0)]))

    assert recorded(run) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cross_entropy_of_half_precision(dtype: torch.dtype) -> None:
    """Sums over split classes are made in float32."""
    x, target = (r(6, 300) * 4).to(dtype), ints(300, 6)
    sweep(F.cross_entropy, x, target, meshes=((4,),), tolerance=0.02)


def test_buffers_of_batch_norm_stay_plain() -> None:
    layer = torch.nn.BatchNorm1d(5, dtype=torch.float64)
    layer(r(7, 5))

    def run() -> torch.nn.Module:
        own = torch.nn.BatchNorm1d(5, dtype=torch.float64)
        own(mw.shard_tensor(r(7, 5), mesh_of((4,)), [mw.Shard(0)]))
        return own

    for own in mw.simulate(run, mesh_of((4,))):
        assert type(own.running_mean) is torch.Tensor
        torch.testing.assert_close(own.running_mean, layer.running_mean)
        torch.testing.assert_close(own.running_var, layer.running_var)


def test_multi_head_attention_layer() -> None:
    layer = torch.nn.MultiheadAttention(8, 4, batch_first=True, dtype=torch.float64)
    named = dict(layer.named_parameters())

    def attend(x: Any, *weights: Any) -> Any:
        given = dict(zip(named, weights, strict=True))
        return torch.func.functional_call(layer, given, (x, x, x), {"need_weights": False})[0]

    sweep(attend, r(6, 5, 8), *[w.detach().clone() for w in named.values()], cases=10)


def test_running_statistics_that_could_not_be_written_are_refused() -> None:
    def run() -> None:
        mesh = mesh_of((4,))
        x = mw.shard_tensor(r(8, 5), mesh, [mw.Shard(0)])
        mean = mw.reshard(mw.shard_tensor(r(5), mesh, {}), [mw.Partial()])
        with pytest.raises(RuleError, match=r"mw\.reshard"):
            F.batch_norm(x, mean, mean, training=True)

    mw.simulate(run, mesh_of((4,)))


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_mean_over_ignored_rows_alone(dim: int, smoothing: float, weighed: bool) -> None:
    """No number, and a gradient of zeros, as on one device: a later product with 0 cannot mend one that is none."""

    def run(lay: Any) -> Any:
        x, weight = lay(r(5, 7)).requires_grad_(), p(7) if weighed else None
        loss = F.cross_entropy(x, torch.full((5,), -100), weight, label_smoothing=smoothing)
        loss.backward()
        return loss.isnan().item(), mw.unshard(x.grad) if isinstance(x, mw.DistTensor) else x.grad

    mesh = mw.Mesh({"x": 3})
    bad, gradient = mw.simulate(lambda: run(lambda t: mw.shard_tensor(t, mesh, [mw.Shard(dim)])), mesh)[0]
    want = run(torch.clone)
    assert bad == want[0]
    assert torch.equal(gradient, want[1])
