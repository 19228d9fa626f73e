"""What the tests of captured steps share: a run on one device, the same run captured, and the comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright import collective
from meshwright.generator import reproducible_random
from meshwright.program import Program

Optimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass
class Run:
    """What a run gave: losses, parameters and buffers, and collectives per step."""

    losses: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    kinds: list[dict[str, int]] = field(default_factory=list)
    program: Program | None = None
    extra: Any = None


def first(made: Any) -> Tensor:
    """The loss among what a loss function returned."""
    return made if isinstance(made, Tensor) else next(iter(made.values() if isinstance(made, dict) else made))


def on_one_device(
    model: nn.Module,
    loss_fn: Any,
    optimizer: Optimizer,
    batches: Sequence[Any],
    scheduler: Any = None,
    clip: Any = None,
) -> Run:
    """Plain PyTorch."""
    run = Run()
    opt = optimizer(model.parameters())
    schedule = scheduler(opt) if scheduler else None
    for i, batch in enumerate(batches):
        torch.manual_seed(i)
        with reproducible_random():
            loss = first(loss_fn(model, batch))
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
        if schedule:
            schedule.step()
        run.losses.append(loss.item())
    run.tensors = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    return run


def captured(
    model: nn.Module,
    loss_fn: Any,
    optimizer: Optimizer,
    batches: Sequence[Any],
    mesh: mw.Mesh,
    scheduler: Any = None,
    after: Callable[[Any, Any], Any] | None = None,
    **options: Any,
) -> Run:
    """The same through ``compile_step``; called by every rank."""
    run = Run()
    opt = optimizer(model.parameters())
    schedule = scheduler(opt) if scheduler else None
    step = mw.compile_step(model, loss_fn, opt, batches[0], mesh=mesh, **options)
    for i, batch in enumerate(batches):
        torch.manual_seed(i)
        with collective.counting() as counts:
            made = step(batch)
        run.losses.append(first(made).item())
        run.kinds.append(dict(counts.kinds))
        assert run.kinds[-1] == step.program.kinds
        if schedule:
            schedule.step()
    run.program = step.program
    run.extra = after(step, batches) if after else None
    with torch.no_grad():
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            run.tensors[name] = mw.unshard(t).clone() if isinstance(t, mw.DistTensor) else t.detach().clone()
    return run


def compare(
    make: Callable[[], nn.Module],
    loss_fn: Any,
    batches: Sequence[Any],
    mesh: mw.Mesh,
    optimizer: Optimizer = lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    scheduler: Any = None,
    tolerance: float = 1e-9,
    clip: float | None = None,
    **options: Any,
) -> list[Run]:
    """Train both ways from the same start; equal losses, parameters and buffers; sound programs on all ranks."""
    torch.manual_seed(0)
    model = make()
    start = copy.deepcopy(model.state_dict())
    wanted = on_one_device(model, loss_fn, optimizer, batches, scheduler, clip)

    def rank() -> Run:
        own = make()
        own.load_state_dict(start)
        return captured(own, loss_fn, optimizer, batches, mesh, scheduler, clip_grad_norm=clip, **options)

    runs: list[Run] = mw.simulate(rank, mesh, timeout=120)
    mw.check_program([r.program for r in runs if r.program is not None])
    for run in runs:
        for got, want in zip(run.losses, wanted.losses, strict=True):
            assert abs(got - want) <= tolerance * max(abs(want), 1e-3), (run.losses, wanted.losses)
        assert set(run.tensors) == set(wanted.tensors)
        for name, want in wanted.tensors.items():
            scale = want.abs().max().clamp(min=1e-3) if want.numel() else 1.0
            off = (run.tensors[name] - want).abs().max() if want.numel() else torch.zeros(())
            assert off <= tolerance * scale * 10, (name, off)
    return runs


class MLP(nn.Module):
    """Two linears and what is between them."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, dtype=torch.float64)
        self.down = nn.Linear(4 * width, width, dtype=torch.float64)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(x))))


TP = {"up.weight": {"tp": mw.Shard(0)}, "up.bias": {"tp": mw.Shard(0)}, "down.weight": {"tp": mw.Shard(1)}}
DP = {"dp": mw.Shard(0)}
MESH = mw.Mesh({"dp": 2, "tp": 2})


def squares(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return ((model(x) - y) ** 2).mean()


def pairs(n: int, batch: int = 6, width: int = 8) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(batch, width, generator=g, dtype=torch.float64),
            torch.randn(batch, width, generator=g, dtype=torch.float64),
        )
        for _ in range(n)
    ]
