"""What would leave tensors of the meta device without their values, and say nothing, raises and says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import meshwright as mw
from meshwright.errors import DispatchError, ShardError

PAIR = mw.Mesh({"dp": 2})


@pytest.mark.parametrize("shape", [(6, 8), (8, 6)])
def test_orthogonal_parametrizations(shape: tuple[int, int]) -> None:
    """register_parametrization catches that QR has no kernel for meta tensors, and leaves its buffer out.

    Of a square weight PyTorch's constructor itself raises: it asks for a value.
    """

    def run() -> None:
        with torch.device("meta"):
            model = nn.utils.parametrizations.orthogonal(nn.Linear(*shape))
        mw.shard_module(model, PAIR)

    with pytest.raises(ShardError, match=r"on the meta device .* NotImplementedError .* Build the model on the CPU"):
        mw.simulate(run, PAIR)


UPDATES: dict[str, Callable[[list[Any], list[Any]], Any]] = {
    "copy_": lambda ps, qs: [p.copy_(q) for p, q in zip(ps, qs, strict=True)],
    "add_": lambda ps, qs: [p.mul_(0.9).add_(q, alpha=0.1) for p, q in zip(ps, qs, strict=True)],
    "lerp_": lambda ps, qs: [p.lerp_(q, 0.1) for p, q in zip(ps, qs, strict=True)],
    "foreach lerp_": lambda ps, qs: torch._foreach_lerp_(ps, qs, 0.1),
}


@pytest.mark.parametrize("name", UPDATES)
def test_an_average_that_was_copied_before_it_had_memory(name: str) -> None:
    def run() -> None:
        with torch.device("meta"):
            model = nn.Linear(4, 4)
        average = copy.deepcopy(model)
        mw.shard_module(model, PAIR)
        with torch.no_grad():
            UPDATES[name](*([p.detach() for p in m.parameters()] for m in (average, model)))

    said = r"on the meta device.*Copy the model after mw\.shard_module|not on the expected device meta"
    with pytest.raises((DispatchError, RuntimeError), match=said):
        mw.simulate(run, PAIR)


@pytest.mark.parametrize("multi", [None, get_ema_multi_avg_fn(0.9)], ids=["copy", "ema"])
def test_an_averaged_model(multi: Any) -> None:
    def run(late: bool) -> torch.Tensor:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = nn.Linear(4, 4)
        average = None if late else AveragedModel(model, multi_avg_fn=multi)
        mw.shard_module(model, PAIR)
        average = average or AveragedModel(model, multi_avg_fn=multi)
        for _ in range(2):
            average.update_parameters(model)
        return mw.unshard(average.module.weight - model.weight).detach()

    for difference in mw.simulate(lambda: run(True), PAIR):
        torch.testing.assert_close(difference, torch.zeros(4, 4))
    with pytest.raises((DispatchError, RuntimeError), match="meta"):
        mw.simulate(lambda: run(False), PAIR)
