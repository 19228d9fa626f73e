"""Ranks that update with other numbers, or drop out other elements, are told; right programs are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import DesyncError
from meshwright.ranks import runtime
from meshwright.shard.gradients.sync import _sampled

DP, TP, BOTH = mw.Mesh({"dp": 3}), mw.Mesh({"tp": 2}), mw.Mesh({"dp": 2, "tp": 2})
SPLIT = {"0.weight": {"tp": mw.Shard(0)}, "0.bias": {"tp": mw.Shard(0)}, "3.weight": {"tp": mw.Shard(1)}}
PLANS: dict[str, tuple[mw.Mesh, dict[str, Any], dict[str, Any]]] = {
    "dp": (DP, {}, {}),
    "zero1": (DP, {}, {"shard_states": "dp"}),  # chunks of 3 and of 0
    "zero3": (DP, {"fsdp": "dp"}, {}),
    "replicated": (TP, {}, {}),  # nothing is reduced
    "tp": (TP, {"placements": SPLIT}, {}),
    "both": (BOTH, {"placements": SPLIT}, {}),
}
Change = Callable[[nn.Module, Any, int], None]


def trained(plan: str, change: Change, heard: list[str] | None = None) -> list[torch.Tensor]:
    """The parameters after some steps; ``change`` is called on one rank before each."""
    mesh, how, states = PLANS[plan]

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = mw.shard_module(
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 2)).double(), mesh, **how
        )
        groups = [{"params": [*model[0].parameters()]}, {"params": [*model[3].parameters()], "weight_decay": 0.5}]
        opt = mw.shard_optimizer(torch.optim.AdamW(groups, lr=0.01), **states)
        over = {a: mw.Shard(0) for a in mesh.axes if a == "dp"}
        for i in range(6):
            x = mw.shard_tensor(torch.arange(20.0, dtype=torch.float64).view(5, 4) / 20 + i, mesh, over)
            try:
                model(x).square().mean().backward()
            except DesyncError as error:
                if heard is not None:
                    heard.append(str(error))
                raise
            if runtime.RT.rank == 1:
                change(model, opt, i)
            opt.step()
            opt.zero_grad()
        return [mw.unshard(p.detach()) for p in model.parameters()]

    return mw.simulate(run, mesh)[0]


def told(plan: str, change: Change) -> str:
    """The error, which all ranks have."""
    heard: list[str] = []
    with pytest.raises(DesyncError) as found:
        trained(plan, change, heard)
    assert len(heard) == PLANS[plan][0].size
    return str(found.value)


def rate(model: nn.Module, opt: Any, i: int) -> None:
    opt.param_groups[1]["lr"] = 0.01 if i < 2 else 0.02


def rate_for_one_step(model: nn.Module, opt: Any, i: int) -> None:
    opt.param_groups[0]["lr"] = 0.02 if i == 2 else 0.01


def plateau(model: nn.Module, opt: Any, i: int) -> None:
    scheduler = opt.__dict__.setdefault("of", torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5))
    scheduler.step(float(i))


def decay(model: nn.Module, opt: Any, i: int) -> None:
    opt.param_groups[1]["weight_decay"] = 0.5 if i < 2 else 0.6


def momentum(model: nn.Module, opt: Any, i: int) -> None:
    opt.param_groups[0]["betas"] = (0.9, 0.999 if i < 2 else 0.99)


def forgets(model: nn.Module, opt: Any, i: int) -> None:
    if i == 2:
        opt.state.clear()


NUMBERS: list[tuple[Change, str]] = [
    (rate, r"different lr of group 1: .*0\.01; rank 1: 0\.02"),
    (rate_for_one_step, r"different lr of group 0: .*0\.01; rank 1: 0\.02"),
    (plateau, r"different lr of group 0 \(and 1 more differ\): .*0\.01; rank 1: 0\.005"),
    (decay, r"different weight_decay of group 1: .*0\.5; rank 1: 0\.6"),
    (momentum, r"different betas of group 0: .*\[0\.9, 0\.999\]; rank 1: \[0\.9, 0\.99\]"),
    (forgets, r"different states of group 0 \(and 1 more differ\): .*4; rank 1: 0"),
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("change", "message"), NUMBERS, ids=[c.__name__ for c, _ in NUMBERS])
def test_other_numbers_are_told(change: Change, message: str, plan: str) -> None:
    assert re.search(f"the ranks updated with {message}", told(plan, change))


@pytest.mark.parametrize("plan", PLANS)
def test_generators_out_of_step_are_told(plan: str) -> None:
    def draws(model: nn.Module, opt: Any, i: int) -> None:
        if i == 2:
            torch.randint(10, ())

    assert "the ranks drew different seeds of dropout since the last backward" in told(plan, draws)


@pytest.mark.parametrize("plan", ["dp", "replicated", "both"])
def test_other_gradients_are_told_by_a_sample_of_values(plan: str) -> None:
    def doubles(model: Any, opt: Any, i: int) -> None:
        if i == 2:
            model[3].bias.grad.add_(3)

    assert "the ranks hold different values of 3.bias: rank" in told(plan, doubles)


def test_values_are_sampled_often_at_first() -> None:
    assert [n for n in range(1, 200) if _sampled(n)] == [*range(1, 9), 16, 32, 64, 128, 192]


@pytest.mark.parametrize("plan", PLANS)
def test_right_programs_are_not(plan: str) -> None:
    """What one rank does alone and what changes nothing; and the same numbers as without."""

    def alone(model: Any, opt: Any, i: int) -> None:
        with torch.random.fork_rng():
            torch.rand(3)
            with mw.reproducible_random():
                nn.functional.dropout(torch.ones(4))
        torch.rand(3, generator=torch.Generator())
        opt.param_groups[0].update(name=f"of rank {runtime.RT.rank}", lr=torch.tensor(0.01, dtype=torch.float64).item())

    quiet = trained(plan, lambda model, opt, i: None)
    for a, b in zip(quiet, trained(plan, alone), strict=True):
        assert torch.equal(a, b)


def test_all_ranks_may_change_them_together() -> None:
    def run() -> None:
        torch.manual_seed(0)
        model = mw.shard_module(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2)), DP)
        opts = [torch.optim.SGD(model[0].parameters(), lr=torch.tensor(0.1)), torch.optim.Adam(model[2].parameters())]
        rates = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.9) for opt in opts]
        for i in range(4):
            with mw.no_sync(model):
                model(mw.shard_tensor(torch.ones(4, 4), DP, {"dp": mw.Shard(0)})).sum().backward()
            model(mw.shard_tensor(torch.ones(4, 4), DP, {"dp": mw.Shard(0)})).sum().backward()
            opts[i % 2].step()
            rates[i % 2].step()
            opts[i % 2].zero_grad()

    mw.simulate(run, DP)


def test_once_told_ranks_may_start_again() -> None:
    """After the same weights and numbers everywhere nothing is left of what differed."""

    def run() -> None:
        torch.manual_seed(0)
        model = mw.shard_module(nn.Linear(4, 2), DP)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        start = {n: mw.unshard(t).clone() for n, t in model.state_dict().items()}
        opt.param_groups[0]["lr"] += runtime.RT.rank
        for i in range(4):
            loss = model(mw.shard_tensor(torch.ones(4, 4), DP, {"dp": mw.Shard(0)})).sum()
            if i == 1:
                with pytest.raises(DesyncError, match=r"different lr of group 0: rank 0: 0\.1; rank 1: 1\.1; rank 2"):
                    loss.backward()
                model.load_state_dict(start)
                opt.param_groups[0]["lr"] = 0.1
                continue
            loss.backward()
            opt.step()
            opt.zero_grad()

    mw.simulate(run, DP)
