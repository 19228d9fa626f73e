"""A number of Python that changes after the capture is named in a warning: the program holds the old one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw

MESH = mw.Mesh({"dp": 1})  # threads share warnings
LIMIT = {"scale": 1.0}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.alpha, self.steps = nn.Linear(4, 4), 0.5, list[float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * self.alpha


def change_attribute(model: Any) -> None:
    model.alpha = 0.25


def change_global(model: Any) -> None:
    LIMIT["scale"] = 3.0


def change_eps(model: Any) -> None:
    model.up.scale_of_mine = 1


def grow(model: Any) -> None:
    model.steps.append(1.0)


def switch(model: Any) -> None:
    model.eval()
    model.train()


def nothing(model: Any) -> None: ...


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_attribute, "alpha was 0.5 when the step was captured, and is 0.25"),
        (change_global, "LIMIT.scale was 1.0 when the step was captured, and is 3.0"),
        (change_eps, ""), (grow, ""), (switch, ""), (nothing, ""),
    ],
)  # fmt: skip
def test_changed_numbers_are_named(change: Callable[[Any], None], named: str, by_hand: bool) -> None:
    def run() -> list[str]:
        torch.manual_seed(0)
        model, batch = Scaled(), torch.ones(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if by_hand:

            def local(x: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(x).sum() * LIMIT["scale"]
                loss.backward()
                optimizer.step()
                return loss

            step = mw.capture_local(local, MESH, model=model, optimizer=optimizer, batch=batch)
        else:
            step = mw.compile_step(model, lambda m, x: m(x).sum() * LIMIT["scale"], optimizer, batch, mesh=MESH)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(batch)
            change(model)
            for _ in range(8):
                step(batch)
        return [str(w.message) for w in caught if "captured, and is" in str(w.message)]

    try:
        (found,) = mw.simulate(run, MESH)
    finally:
        LIMIT["scale"] = 1.0
    assert len(found) == bool(named)
    assert not named or named in found[0]
