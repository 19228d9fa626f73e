"""Every loss of ``torch.nn.functional``, captured: the graph leaves out arguments that have their defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw

G = torch.Generator().manual_seed(0)
X = torch.randn(7, 5, dtype=torch.float64, generator=G)
Y = torch.rand(7, 5, dtype=torch.float64, generator=G)
CLASSES = torch.tensor([0, 4, 2, 1, 3, -100, 2])
SIGNS = torch.tensor([1.0, -1, 1, -1, 1, 1, -1], dtype=torch.float64)
WEIGHT = torch.tensor([1.0, 2, 0.5, 1, 3], dtype=torch.float64)

LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": lambda x, r: F.mse_loss(x, Y, reduction=r),
    "l1": lambda x, r: F.l1_loss(x, Y, reduction=r),
    "smooth_l1": lambda x, r: F.smooth_l1_loss(x, Y, reduction=r),
    "huber": lambda x, r: F.huber_loss(x, Y, reduction=r),
    "bce": lambda x, r: F.binary_cross_entropy(x.sigmoid(), Y, reduction=r),
    "bce_logits": lambda x, r: F.binary_cross_entropy_with_logits(x, Y, reduction=r),
    "kl_div": lambda x, r: F.kl_div(x.log_softmax(-1), Y, reduction=r),
    "poisson": lambda x, r: F.poisson_nll_loss(x, Y, reduction=r),
    "soft_margin": lambda x, r: F.soft_margin_loss(x, Y.sign(), reduction=r),
    "hinge": lambda x, r: F.hinge_embedding_loss(x.sum(-1), SIGNS, reduction=r),
    "margin_ranking": lambda x, r: F.margin_ranking_loss(x.sum(-1), Y.sum(-1), SIGNS, reduction=r),
    "cosine": lambda x, r: F.cosine_embedding_loss(x, Y, SIGNS, reduction=r),
    "triplet": lambda x, r: F.triplet_margin_loss(x, Y, Y + 1, reduction=r),
    "cross_entropy": lambda x, r: F.cross_entropy(x, CLASSES, reduction=r),
    "cross_entropy_weighted": lambda x, r: F.cross_entropy(x, CLASSES, WEIGHT, reduction=r, label_smoothing=0.1),
    "cross_entropy_soft": lambda x, r: F.cross_entropy(x, Y, reduction=r),
    "nll": lambda x, r: F.nll_loss(x.log_softmax(-1), CLASSES, reduction=r),
    "multi_margin": lambda x, r: F.multi_margin_loss(x, CLASSES.clamp(min=0), reduction=r),
    "multilabel_soft": lambda x, r: F.multilabel_soft_margin_loss(x, Y.round(), reduction=r),
}


class Model(nn.Module):
    """The parameter is what the loss is of."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(X.clone())

    def forward(self) -> Tensor:
        return self.w * 1.0


@pytest.mark.thin(5)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_one_device(name: str, reduction: str, dim: int) -> None:
    loss = LOSSES[name]
    w = X.clone().requires_grad_()
    want = loss(w * 1.0, reduction)
    want.backward()
    mesh = mw.Mesh({"dp": 3})

    def run() -> Any:
        model = Model()
        step = mw.compile_step(
            model, lambda m, b: loss(m(), reduction) + 0 * b.sum(), None, torch.ones(3, dtype=torch.float64),
            mesh=mesh, layouts={"w": {"dp": mw.Shard(dim)}}, gradients=True,
        )  # fmt: skip
        got = step(torch.ones(3, dtype=torch.float64))
        assert isinstance(model.w.grad, mw.DistTensor)
        return got.item(), mw.unshard(model.w.grad)

    for got, grad in mw.simulate(run, mesh):
        assert got == pytest.approx(want.item(), rel=1e-12)
        torch.testing.assert_close(grad, w.grad, rtol=1e-10, atol=1e-13)
