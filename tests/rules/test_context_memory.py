"""What a rank holds of a long sequence: its part of one device's activations, and what is gathered for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.explanation import memory_of
from meshwright.program.capture.build import build
from meshwright.train.config import StepConfig
from meshwright.train.model import GPT, loss_of
from meshwright.train.plan import plan_for

LENGTH, HIDDEN = 32768, 32


def held(sizes: dict[str, int], wish: str | None) -> float:
    """Bytes of activations and temporaries at the peak of a step of a decoder of one layer, from its program."""
    config, mesh = StepConfig(layers=1, hidden=HIDDEN, heads=4, seq=LENGTH, batch=1), mw.Mesh(sizes)
    ids = torch.empty(1, LENGTH, dtype=torch.long, device="meta")
    strategies = None if wish is None else {"scaled_dot_product_attention": {"cp": wish}}

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return loss_of(model, *batch)

    with mw.strategies(strategies or {}):
        program = build(GPT(config, "meta"), loss, None, (ids, ids), mesh, plan_for(mesh)).program
    assert ("all_to_all" in program.kinds) == (wish is not None and wish.startswith("heads"))
    at_peak = memory_of(program).at_peak
    return at_peak["activations"] + at_peak["temporaries"]


@pytest.mark.parametrize("wish", ["heads", "gather"])
def test_a_quarter_of_what_one_device_holds(wish: str) -> None:
    gathered = 2 * LENGTH * HIDDEN * 4 if wish == "gather" else 0  # keys and values of all, in float32
    assert held({"cp": 4}, wish) <= 1.1 * (held({"dp": 1}, None) / 4 + gathered)
