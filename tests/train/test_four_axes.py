"""Batch, sequence, model and experts split at once, on sixteen simulated ranks, step by step like one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.train.config import StepConfig
from meshwright.train.model import GPT, loss_of
from meshwright.train.plan import plan_for
from tests.support.sweep import steps

MESH = mw.Mesh({"dp": 2, "cp": 2, "tp": 2, "ep": 2})
CONFIG = StepConfig(layers=1, hidden=16, heads=4, experts=4, expert_width=8, seq=8, batch=4, dtype="float64")


def loss(model: Any, batch: Any) -> Tensor:
    return loss_of(model, *batch)


def drawn(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 256, (CONFIG.batch, CONFIG.seq + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def built() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(CONFIG, "cpu")
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def trained(model: Any, optimizer: Any, put: Any = lambda batch: batch) -> list[float]:
    losses = []
    for step in range(steps(50)):
        optimizer.zero_grad()
        found = loss(model, put(drawn(step)))
        found.backward()
        optimizer.step()
        losses.append(float(mw.unshard(found.detach())))
    return losses


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.thin(2)
def test_like_one_device(captured: bool) -> None:
    alone, optimizer = built()
    want = trained(alone, optimizer)
    plan = plan_for(MESH, experts=True)

    def run() -> tuple[list[float], dict[str, Tensor]]:
        model, optimizer = built()
        if captured:
            step = mw.compile_step(model, loss, optimizer, drawn(0), mesh=MESH, layouts=plan.layouts, batch=plan.batch)
            losses = [float(step(drawn(i))) for i in range(len(want))]
        else:
            mw.shard_module(model, MESH, plan.layouts)
            put = lambda batch: tuple(mw.shard_tensor(t, MESH, plan.batch) for t in batch)  # noqa: E731
            losses = trained(model, mw.shard_optimizer(optimizer), put)
        return losses, {n: mw.unshard(p).detach() for n, p in model.named_parameters()}

    for losses, parameters in mw.simulate(run, MESH):
        assert losses == pytest.approx(want, rel=1e-9)
        for name, p in alone.named_parameters():
            assert (parameters[name] - p.detach()).abs().max() < 1e-9, name
