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


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4, 4))


META = {"device": "meta"}


def _in_place(write: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(model: Any) -> None:
        with torch.no_grad():
            write(model)

    return run


def _average(model: Any) -> None:
    average = AveragedModel(model)
    average.update_parameters(model)
    model.linear = average.module.linear


OUTSIDE: dict[str, Callable[[Any], Any]] = {
    "data.copy_": lambda m: m.linear.weight.data.copy_(torch.ones(4, 4)),
    "data.fill_ of what no op wrote": lambda m: m.scale.data.fill_(3.0),
    "data[0] =": lambda m: m.linear.weight.data.__setitem__(0, 3.0),
    "data of views": lambda m: m.linear.weight.data.view(-1)[2:].mul_(3.0),
    "data of a buffer": lambda m: m.norm.running_mean.data.fill_(3.0),
    "data read before": lambda m: m.held.fill_(3.0),
    "foreach of data": lambda m: torch._foreach_mul_([p.data for p in m.parameters()], 3.0),
    "out=data": lambda m: torch.add(m.scale.data, 1, out=m.linear.weight.data),
    "data =": lambda m: setattr(m.linear.weight, "data", torch.ones(4, 4, **META)),
    "data = data * 3": lambda m: setattr(m.linear.weight, "data", m.linear.weight.data * 3),
    "data of a buffer =": lambda m: setattr(m.norm.running_mean, "data", torch.ones(4, **META)),
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(torch.ones(20, **META), m.linear.parameters()),
    "trunc_normal_": lambda m: nn.init.trunc_normal_(m.linear.weight),
    "orthogonal_": lambda m: nn.init.orthogonal_(m.linear.weight.data),
    "a new parameter": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.ones(4, 4, **META))),
    "a new buffer": lambda m: setattr(m.norm, "running_mean", torch.ones(4, **META)),
    "swap_tensors": lambda m: torch.utils.swap_tensors(m.linear.weight, nn.Parameter(torch.ones(4, 4, **META))),
    "set_": _in_place(lambda m: m.linear.weight.set_(torch.ones(4, 4, **META))),
    "a copy, and a write to it": lambda m: (
        setattr(m, "linear", copy.deepcopy(m.linear)),
        m.linear.weight.data.fill_(3.0),
    ),
    "a write, and a conversion": lambda m: (m.linear.weight.data.fill_(3.0), m.half()),
    "an average": _average,
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_writes_outside_of_the_context(name: str) -> None:
    """One device has these values: where nothing recorded them they would be lost."""

    def build(recorded: bool) -> Any:
        with torch.device("meta"):
            model = Net() if recorded else None
        if model is None:
            model = nn.Module()
            model.linear, model.norm = nn.Linear(4, 4, **META), nn.BatchNorm1d(4, **META)
            model.__dict__["scale"] = model.linear.weight
        model.__dict__["held"] = model.linear.weight.data
        return model

    def run(recorded: bool) -> None:
        model = build(recorded)
        OUTSIDE[name](model)
        mw.shard_module(model, PAIR)

    with pytest.raises(ShardError, match=r"(linear\.weight|scale|running_mean) (was written to|got values) .* outside"):
        mw.simulate(lambda: run(True), PAIR)
    if name not in ("a write, and a conversion", "an average"):  # these write as often as reset_parameters()
        with pytest.warns(UserWarning, match=r"(linear|running_mean).* got values from reset_parameters"):
            mw.simulate(lambda: run(False), PAIR)


def test_data_inside_of_the_context() -> None:
    def write(model: Any) -> None:
        model.linear.weight.data.fill_(3.0)
        model.linear.bias.data = torch.full((4,), 2.0)
        model.norm.weight.data = model.scale.data[0] * 5
        nn.init.trunc_normal_(model.scale.data, std=0.5)

    torch.manual_seed(0)
    want = Net()
    write(want)

    def run(later: bool) -> None:
        with torch.device("meta"):
            model = Net()
            write(model)
        model.double()
        if later:
            model.linear.bias.data.add_(1.0)
        torch.manual_seed(0)
        mw.shard_module(model, PAIR, {"scale": {"dp": mw.Shard(0)}})
        for name, t in model.state_dict().items():
            assert torch.equal(mw.unshard(t), want.state_dict()[name].to(t.dtype)), name

    mw.simulate(lambda: run(False), PAIR)
    with pytest.raises(ShardError, match=r"linear\.bias was written to"):
        mw.simulate(lambda: run(True), PAIR)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_two_parameters_of_one_memory(device: str) -> None:
    """One device changes both when an optimizer changes one; as two shards they would not."""

    def run(tie: Callable[[Any], Any]) -> None:
        with torch.device(device):
            model = Net()
            tie(model)
        mw.shard_module(model, PAIR)

    mw.simulate(lambda: run(lambda m: setattr(m, "scale", m.linear.weight)), PAIR)
    mw.simulate(lambda: run(lambda m: setattr(m.norm, "running_mean", m.norm.running_var)), PAIR)
    parts = lambda m: nn.utils.vector_to_parameters(torch.ones(44), m.parameters())  # noqa: E731
    mw.simulate(lambda: run(parts), PAIR)
    with pytest.raises(ShardError, match=r"scale and linear\.weight are two tensors of one memory"):
        mw.simulate(lambda: run(lambda m: setattr(m.linear.weight, "data", m.scale.data)), PAIR)
