"""What training steps have besides a loss: schedules, clipping, frozen parts, averages; captured against eager."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

import meshwright as mw
from meshwright.passes import DataParallelOptimization, GradientMerge
from tests.support.processes import run_processes

Tensor = torch.Tensor
FUSED, MERGED = DataParallelOptimization(bucket_bytes=1 << 20), GradientMerge(k_steps=2)


class Averaged(nn.Module):
    """A network, and the moving average of its weights that the step keeps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        self.mean = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double().requires_grad_(False)


def by_hand(model: Averaged, optimizer: Any, clip: str) -> Any:
    params = list(model.net.parameters())

    def step(*micro: Tensor) -> Tensor:
        optimizer.zero_grad()
        for x in micro:
            loss = model.net(x).square().mean() / len(micro)
            loss.backward()
        for p in params:
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        if clip == "norm":
            nn.utils.clip_grad_norm_(params, 0.1)
        elif clip == "value":
            nn.utils.clip_grad_value_(params, 0.02)
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(model.mean.parameters(), params, strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)
        return loss.detach()

    return step


SCHEDULES = {
    "step": lambda o: StepLR(o, 1, 0.7),
    "cosine": lambda o: CosineAnnealingLR(o, 4),
    "cycle": lambda o: OneCycleLR(o, [0.1, 0.04], total_steps=8, cycle_momentum=False),
}


def compared(clip: str, schedule: str, passes: list[Any], frozen: bool) -> float:
    mesh, k = mw.init_mesh({"dp": 2}), 2 if MERGED in passes else 1
    results = []

    def data(i: int) -> Tensor:
        g = torch.Generator().manual_seed(10 * i + dist.get_rank())
        return torch.randn(4, 4, dtype=torch.float64, generator=g)

    for captured in (False, True):
        model = Averaged()
        groups = [{"params": model.net[0].parameters()}, {"params": model.net[2].parameters(), "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        plan = SCHEDULES[schedule](optimizer)
        if frozen:
            model.net[0].requires_grad_(False)
        step: Any = by_hand(model, optimizer, clip)
        if captured:
            step = mw.capture_local(step, mesh, model=model, optimizer=optimizer, batch=data(0), passes=passes)
        for i in range(0, 8, k):
            if i == 4:  # the next phase of training
                model.net[0].requires_grad_(True)
            if captured:
                for j in range(i, i + k):
                    step(data(j))
            else:
                step(*(data(j) for j in range(i, i + k)))
            plan.step()
        results.append([p.detach() for p in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*results, strict=True))


def all_of_them() -> dict[str, float]:
    made = {}
    for clip, schedule, passes, frozen in (
        ("norm", "step", [FUSED], False),
        ("value", "cosine", [FUSED], False),
        ("norm", "cycle", [MERGED, FUSED], False),
        ("value", "step", [FUSED, MERGED], True),
        ("", "cosine", [], True),
        ("norm", "cycle", [MERGED], True),
    ):
        made[f"{clip} {schedule} {passes} {frozen}"] = compared(clip, schedule, passes, frozen)
    return made


@pytest.mark.processes
def test_practice() -> None:
    for found in run_processes(all_of_them, 2):
        assert not {k: v for k, v in found.items() if v > 1e-12}


def test_an_interrupt_while_a_step_is_captured() -> None:
    """It is raised behind the capture, whose C++ calls Python where nothing may be thrown; a second one at once."""
    at: list[str] = []

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        at.append("went on")
        return model(batch).square().mean()

    for times in (1, 2):
        at.clear()
        model = nn.Linear(4, 2)
        with pytest.raises(KeyboardInterrupt):
            mw.compile_step(model, loss_fn, None, torch.randn(3, 4), mesh=mw.Mesh({"dp": 1}))
        assert at == ["went on"][: 2 - times]
    mw.compile_step(model, lambda m, x: m(x).sum(), None, torch.randn(3, 4), mesh=mw.Mesh({"dp": 1}))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
