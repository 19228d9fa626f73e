"""Generators of an accelerator: kept per simulated rank, and set back where a forward runs again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright import collective
from meshwright.passes import recompute
from meshwright.ranks import generators


class Accelerator:
    """A device whose generator counts."""

    def __init__(self) -> None:
        self.count = 0

    def get_rng_state(self) -> torch.Tensor:
        return torch.tensor([self.count], dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.count = int(state)

    def draw(self) -> int:
        self.count += 1
        return self.count


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    found = Accelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    return found


def test_simulated_ranks_draw_alike(accelerator: Accelerator) -> None:
    mesh = mw.Mesh({"dp": 3}, device="cuda")

    def run() -> Any:
        first = accelerator.draw()
        collective.all_gather_object(first, collective.group(mesh))
        return first, accelerator.draw()

    assert mw.simulate(run, mesh) == [(1, 2)] * 3
    assert accelerator.count == 2


def test_what_runs_again_draws_the_same(accelerator: Accelerator) -> None:
    state = recompute.GET_STATE.default("cuda")
    drawn = torch.rand(3), accelerator.draw()
    recompute.SET_STATE.default(state, "cuda")
    again = torch.rand(3), accelerator.draw()
    assert torch.equal(drawn[0], again[0])
    assert drawn[1] == again[1]


def test_without_an_accelerator_there_is_one_generator() -> None:
    assert list(generators.random_states("cpu")) == list(generators.random_states("meta")) == ["cpu"]
