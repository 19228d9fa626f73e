"""Modules changed by PyTorch's utilities before they are sharded: their weights are computed from other parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import meshwright as mw
from tests.support.compare import S0, S1, R, check_equal, plain, ramp

MESH = mw.Mesh({"x": 3})
CHANGED: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": torch.nn.utils.weight_norm,
    "spectral_norm": torch.nn.utils.spectral_norm,
    "parametrized": parametrizations.weight_norm,
    "pruned": lambda m: prune.l1_unstructured(m, "weight", amount=0.4),
    "pruned by rows": lambda m: prune.ln_structured(m, "weight", amount=0.5, n=2, dim=0),
}

SPLIT = ("0.weight_v", "0.weight_orig", "0.parametrizations.weight.original1")


def trained(change: Callable[[nn.Module], Any], layout: Any, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5, dtype=torch.float64), nn.Tanh(), nn.Linear(5, 3, dtype=torch.float64))
    change(model[0])
    x = ramp(6, 4)
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if layout is not None:
        globs = {n: {"x": layout} for n, _ in model.named_parameters() if n in SPLIT}
        mw.shard_module(model, MESH, {} if options else globs, **options)
        opt, x = mw.shard_optimizer(opt), mw.shard_tensor(x, MESH, [R])
    losses = []
    for _ in range(2):
        opt.zero_grad()
        loss = (model(x) ** 2).sum()
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return [losses, [p.detach() for p in model.parameters()]]


@pytest.mark.parametrize("name", CHANGED)
def test_changed_before_it_was_sharded(name: str) -> None:
    """The graph of the weight made then held the nodes for gradients of the shape that the parameters had."""
    want = plain(trained(CHANGED[name], None))
    for layout, options in ((S0, {}), (S1, {}), (R, {"fsdp": "x"})):
        for got in mw.simulate(lambda: plain(trained(CHANGED[name], layout, **options)), MESH):  # noqa: B023
            check_equal(got, want)
