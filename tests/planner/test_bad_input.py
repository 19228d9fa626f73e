"""Bad input of the planner raises one error, with the value and what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import MeshwrightError, PlanError
from meshwright.planner import FoundPlan


def planned(**options: Any) -> FoundPlan:
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    given: dict[str, Any] = {
        "batch": torch.ones(64, 256), "optimizer": torch.optim.AdamW(net.parameters()), "devices": 4,
        "hardware": "cpu-gloo", **options,
    }  # fmt: skip
    batch, optimizer = given.pop("batch"), given.pop("optimizer")
    return mw.plan(net, lambda net, x: net(x).sum(), batch, optimizer, **given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hardware": None}, r"hardware=None: the name of a preset \(h100-8x400g, .*meshwright calibrate"),
        ({"hardware": 3}, "hardware=3: the name of a preset"),
        ({"fix": {"0.weight": {"tp": "S(0)"}}}, r"plan: fix='0.weight': 'S\(0\)' is not a placement. Give mw.Shard"),
        ({"fix": {"0.weight": mw.Shard(0)}}, r"plan: fix='0.weight': Shard\(0\): give axes and placements"),
        ({"fix": {0: {"tp": mw.Shard(0)}}}, "plan: fix=0: no parameter has such a name"),
        ({"batch": torch.ones(0, 256)}, r"plan: batch has an empty tensor, of shape \(0, 256\)"),
        ({"optimizer": "adamw"}, "plan: optimizer cannot be a str: give a torch.optim.Optimizer"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        planned(**options)


def test_the_change_that_would_fit_fits() -> None:
    """Less memory than weights and rows take: more devices, and fewer rows."""
    with pytest.raises(PlanError, match=r"would fit\.") as error:
        planned(memory="100kB")
    devices, rows = re.findall(r"(\d+) devices with a batch of (\d+) rows would fit", str(error.value))[0]
    found = planned(memory="100kB", devices=int(devices), batch=torch.ones(int(rows), 256))
    assert found.memory <= 100e3


def test_questions_name_their_function_and_axes() -> None:
    found = planned()
    with pytest.raises(PlanError, match="why: 'head': no parameter has such a name"):
        found.why("head", {"tp": mw.Shard(0)})
    with pytest.raises(PlanError, match=r"replan: fix='0.weight': there is no axis 'zz' .*plan with mesh="):
        found.replan({"0.weight": {"zz": mw.Shard(0)}})


def test_more_devices_than_a_model_can_use() -> None:
    net = nn.Linear(3, 5)
    with pytest.raises(PlanError, match="Take fewer devices, or a batch of at least 64 rows"):
        mw.plan(net, lambda net, x: net(x).sum(), torch.ones(2, 3), None, devices=64, hardware="cpu-gloo")
