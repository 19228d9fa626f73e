"""Merged steps prove themselves: errors in pipelines, in what a flush makes, in sums that are left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import PassError
from meshwright.passes import pass_manager
from meshwright.program.run.cycle import Cycle
from meshwright.program.run.pipeline import _Run
from meshwright.program.step import CompiledStep
from tests.support import planted_pipelines as plants
from tests.support.planted_passes import Planted

Tensor = torch.Tensor
MESH = mw.Mesh({"dp": 2, "pp": 2})


@pytest.fixture(autouse=True)
def compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledStep, "compares", True)
    monkeypatch.setattr(pass_manager, "checked", lambda program, what: None)  # some errors are found there


class Net(nn.Module):
    """Layers of one shape, so that they can be taken for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(torch.tanh(x))
        return x


def batch(rows: int, ignored: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows))
    y = torch.arange(rows) % 5
    y[rows - ignored :] = -100
    return x, y


def loss_fn(model: nn.Module, data: Any) -> Tensor:
    return nn.functional.cross_entropy(model(data[0]), data[1])


def piped(passes: list[Any], mesh: mw.Mesh = MESH, **options: Any) -> tuple[str, str]:
    """The error of a step, and what the ledger says."""

    def rank() -> tuple[str, str]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = batch(11, 3)
        step = mw.compile_step(
            model, loss_fn, optimizer, data, mesh=mesh, batch={"dp": mw.Shard(0)} if "dp" in mesh.axes else None,
            stages={"pp": "layers"}, passes=["pipeline:micro_batches=3", *passes], **options,
        )  # fmt: skip
        try:
            step(data)
        except PassError as error:
            return str(error), ""
        return "", step.ledger[-1].why

    made: list[tuple[str, str]] = mw.simulate(rank, mesh)
    assert len({m[0] for m in made}) == 1
    return made[0]


def test_pipelines() -> None:
    error, why = piped(["data-parallel-optimization"])
    assert not error
    assert "equal those without pipeline" in why
    assert "not compared" not in why


@pytest.mark.parametrize("name", plants.PIPELINES)
@pytest.mark.thin(3)
def test_planted_errors_in_pipelines(name: str) -> None:
    error, _ = piped(["data-parallel-optimization", Planted(plants.PIPELINES[name])])
    verb = "leaves the sum" if name == "not_emptied" else "changes the"
    assert f"one of the passes pipeline, data-parallel-optimization, planted {verb}" in error


def test_the_rank_of_a_stage_is_named() -> None:
    error, _ = piped([Planted(plants.skipped_sum, ranks=(1,))], mw.Mesh({"pp": 2}))
    assert "on rank 1: on rank 1" in error


def test_gradients_of_another_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Run, "_send", plants.wrong_micro_batch())
    assert "pass pipeline changes the gradient" in piped([], mw.Mesh({"pp": 2}))[0]


def merged(passes: list[Any], rows: tuple[int, ...] = (4, 7)) -> str:
    """The error of micro-steps of two ranks."""
    mesh = mw.Mesh({"dp": 2})

    def rank() -> str:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = mw.compile_step(
            model, loss_fn, optimizer, batch(4, 1), mesh=mesh, batch={"dp": mw.Shard(0)}, passes=passes
        )
        try:
            for n in rows:
                step(batch(n, 1))
        except PassError as error:
            return f"{error} ({step.micro_step} done)"
        return ""

    return mw.simulate(rank, mesh)[0]  # type: ignore[no-any-return]


def test_what_a_flush_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared in the first micro-step, whether the user flushes or not; without weights, too."""
    plain = "gradient-merge:k_steps=2,weighted=false"
    for merge in ("gradient-merge:k_steps=2", plain):
        assert not merged([merge])
        error = merged([merge, Planted(plants.flush_of_others)], rows=(4,))
        assert "planted in step.flush() after one micro-step changes the gradient" in error
        assert "(1 done)" in error
    flush = Cycle.flush

    def wrong(cycle: Cycle) -> Any:
        made = flush(cycle)
        cycle.carrier.flush_scale.fill_(1.0)  # as of a whole cycle
        return made

    monkeypatch.setattr(Cycle, "flush", wrong)
    assert "pass gradient-merge in step.flush()" in merged([plain], rows=(4,))


def test_sums_that_are_left_behind() -> None:
    error = merged(["gradient-merge:k_steps=2", Planted(plants.not_emptied_at_the_end)])
    assert "leaves the sum for" in error
