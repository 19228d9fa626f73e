"""Losses, of the model, its output (rows, positions, CLASSES) and the batch; plain PyTorch, as a user writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

CLASSES = 5
Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Tensor, Batch], Any]


def _entropy(out: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), labels.flatten(), **options)


def _weighted(model: nn.Module, out: Tensor, batch: Batch) -> Tensor:
    return _entropy(out, batch["labels"], weight=torch.linspace(0.5, 1.5, CLASSES).to(out.dtype))


def _masked(model: nn.Module, out: Tensor, batch: Batch) -> Tensor:
    mask = batch["mask"].to(out.dtype)
    return (out.square().mean(-1) * mask).sum() / mask.sum()


def _sequence(model: nn.Module, out: Tensor, batch: Batch) -> Tensor:
    mask = batch["mask"].to(out.dtype)
    return ((out.square().mean(-1) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def _contrastive(model: nn.Module, out: Tensor, batch: Batch) -> Tensor:
    rows = F.normalize(out.mean(1), dim=-1)
    return F.cross_entropy(rows @ rows.mT / 0.5, torch.arange(len(rows)))


def _over_rows(model: nn.Module, out: Tensor, batch: Batch) -> Tensor:
    score = out.sum((1, 2))
    return (score.softmax(0) * score).sum()


def _gradient_penalty(model: nn.Module, out: Tensor, batch: Batch) -> Tensor:
    loss, params = out.square().mean(), [p for p in model.parameters() if p.requires_grad]
    made = torch.autograd.grad(loss, params, create_graph=True)
    return loss + 0.1 * sum(((g * p.detach()).sum() for g, p in zip(made, params, strict=True)), torch.zeros(()))


def _z_loss(model: nn.Module, out: Tensor, batch: Batch) -> Tensor:
    return _entropy(out, batch["labels"].clamp(min=0)) + 0.01 * out.logsumexp(-1).square().mean()


def _auxiliary(model: nn.Module, out: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return out.square().mean(), out.abs().mean().detach()


LOSSES: dict[str, Loss] = {
    "mean": lambda model, out, batch: out.square().mean(),
    "sum": lambda model, out, batch: 0.1 * out.square().sum(),
    "cross entropy": lambda model, out, batch: _entropy(out, batch["labels"].clamp(min=0)),
    "ignored labels": lambda model, out, batch: _entropy(out, batch["labels"]),
    "smoothed": lambda model, out, batch: _entropy(out, batch["labels"], label_smoothing=0.1),
    "class weights": _weighted,
    "masked mean": _masked,
    "sequence mean": _sequence,
    "contrastive": _contrastive,
    "over rows": _over_rows,
    "against the first row": lambda model, out, batch: (out - 0.5 * out[0]).square().mean(),
    "gradient penalty": _gradient_penalty,
    "z-loss": _z_loss,
    "weight decay": lambda model, out, batch: (
        out.square().mean() + 0.01 * sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
    ),
    "binary": lambda model, out, batch: F.binary_cross_entropy_with_logits(out.mean(-1), batch["mask"].to(out.dtype)),
    "by a count": lambda model, out, batch: out.square().sum() / batch["count"],
    "auxiliary": _auxiliary,
}
