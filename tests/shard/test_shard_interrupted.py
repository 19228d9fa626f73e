"""Backwards that raise, are caught, and training goes on: as on one device that went through the same."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.errors import DesyncError, MeshwrightError
from meshwright.ranks import runtime
from tests.support.processes import run_processes
from tests.support.shard_networks import batches, loss_of, net, same_values

Tensor = torch.Tensor
DP, THREE = mw.Mesh({"dp": 2}), mw.Mesh({"dp": 3})
MODES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "plain": ({}, None),
    "bound": ({}, {}),
    "states": ({}, {"shard_states": "dp"}),
    "stored": ({"fsdp": "dp"}, None),
    "kept": ({"fsdp": "dp", "reshard_after_forward": False}, {}),
    "both": ({"fsdp": {"blocks.*": "dp"}}, {"shard_states": "dp"}),
}
DATA = batches(4)


class Boom(BaseException):
    """As Ctrl-C: not an Exception."""


def boom(*_: Any) -> Any:
    raise Boom


def in_backward(*_: Any) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise Boom


def by_modules(model: Any, ids: Tensor) -> Tensor:
    """The loss without a call of the root."""
    x = model.emb(ids) * model.scale + model.offset
    for block in model.blocks:
        x = block(x)
    return F.cross_entropy(model.head(x).flatten(0, 1), ids.flatten())


def on_output(module: nn.Module) -> Any:
    return module.register_forward_hook(lambda m, a, out: out.register_hook(boom) and None)


# Where the backward raises: what to put there, and to take away again.
RAISES: dict[str, Callable[[Any], Any]] = {
    "at once": lambda m: on_output(m.head),
    "half-way": lambda m: on_output(m.blocks[0]),
    "at the end": lambda m: on_output(m.emb),
    "hook of a parameter": lambda m: m.emb.weight.register_hook(boom),
    "recomputed forward": lambda m: m.blocks[0].register_forward_pre_hook(in_backward),
    "forward": lambda m: m.blocks[1].register_forward_pre_hook(boom),
}
CLEARED: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "all": lambda m: m.zero_grad(),
    "to zero": lambda m: m.zero_grad(set_to_none=False),
}
NEXT = ("root", "modules", "graph", "step", "under no_sync")


def goes_on(model: Any, opt: torch.optim.Optimizer, where: str, cleared: str, following: str, sharded: bool) -> None:
    data = [mw.shard_tensor(x, model.scale.mesh, {"dp": mw.Shard(0)}) if sharded else x for x in DATA]
    loss_of(model, data[0]).backward()
    opt.step()
    before = loss_of(model, data[2]) if following == "graph" else None
    model.checkpointed = where == "recomputed forward"
    handle = RAISES[where](model)
    with pytest.raises(Boom):
        loss_of(model, data[1]).backward()
    handle.remove()
    model.checkpointed = False
    CLEARED[cleared](model)
    if before is not None:
        before.backward()
    elif following in ("root", "modules"):
        (loss_of if following == "root" else by_modules)(model, data[2]).backward()
    elif following == "under no_sync" and sharded:
        with mw.no_sync(model):
            by_modules(model, data[2]).backward()
        by_modules(model, data[3]).backward()
    elif following == "under no_sync":
        by_modules(model, data[2]).backward()
        by_modules(model, data[3]).backward()
    opt.step()
    model.zero_grad()
    loss_of(model, data[3]).backward()
    opt.step()


def compare(mesh: mw.Mesh, mode: str, bucket_bytes: int, cases: Any) -> list[str]:
    """The cases that differ from one device."""
    wrong = []
    options, bound = MODES[mode]
    for case in cases:
        one = net()
        goes_on(one, torch.optim.SGD(one.parameters(), 0.5), *case, False)
        model = mw.shard_module(net(), mesh, bucket_bytes=bucket_bytes, **options)
        opt = torch.optim.SGD(model.parameters(), 0.5)
        if bound is not None:
            opt = mw.shard_optimizer(opt, **bound)
        try:
            goes_on(model, opt, *case, True)
            same_values(model, one)
        except (AssertionError, MeshwrightError) as error:
            wrong.append(f"{mode}, {bucket_bytes}, {case}: {str(error)[:150]}")
    return wrong


CASES = list(itertools.product(RAISES, CLEARED, NEXT))


@pytest.mark.parametrize("bucket_bytes", [200, 8 << 20])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.thin(3)
def test_training_goes_on_as_on_one_device(mode: str, bucket_bytes: int) -> None:
    # Each mode and size takes its turn with every fifth case.
    first = list(MODES).index(mode) + (bucket_bytes > 200) * 3
    cases = CASES[first % 5 :: 5]
    assert not mw.simulate(lambda: compare(DP, mode, bucket_bytes, cases), DP)[0]


# -- only one rank ----------------------------------------------------------------------------------------

TORN = r"different values of 0.weight.*: rank 0: digest .*; parameters were not written to .*\(0 on rank 0, 3 on rank 1"


def alone(where: str, **options: Any) -> tuple[int, str]:
    """Rank 0 raises in its second step, and goes on: the steps that were taken after that, and the error."""
    torch.manual_seed(1)
    # Buckets that look alike: a rank that is one behind would add its gradients to those of another layer.
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    model = mw.shard_module(model, DP, bucket_bytes=1, **options)
    opt, x = torch.optim.SGD(model.parameters(), 0.1), mw.shard_tensor(torch.ones(4, 4), DP, {"dp": mw.Shard(0)})
    for k in range(4):
        mine = k == 1 and runtime.RT.rank == 0
        handle = on_output(model[1]) if mine and where == "backward" else None
        try:
            opt.zero_grad()
            model(x).sum().backward()
            if not (mine and where == "optimizer"):
                opt.step()
            if mine and where == "written":  # by this rank alone, and put back
                with torch.no_grad():
                    model[0].weight.mul_(2).div_(2)
        except Boom:
            handle.remove()
        except DesyncError as error:
            return k - 2, str(error)
    return 2, ""


@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_a_step_that_one_rank_left_out_is_an_error_before_the_next_one(where: str) -> None:
    for rank, (steps, error) in enumerate(mw.simulate(lambda: alone(where), DP)):
        assert where == "backward" or re.search(TORN, error), error
        assert error, rank
        assert steps <= 0, (rank, steps, error)


def test_a_rank_may_write_what_changes_nothing() -> None:
    assert mw.simulate(lambda: alone("written"), DP) == [(2, "")] * 2


def test_a_step_of_stored_parameters_that_one_rank_left_out_is_said() -> None:
    with pytest.warns(RuntimeWarning, match=r"last backward \(0 on rank 0, 3 on rank 1\): did one rank leave out"):
        mw.simulate(lambda: alone("optimizer", fsdp="dp"), DP)


def on_processes() -> list[str]:
    mesh = mw.init_mesh({"dp": 2})
    return [w for k, mode in enumerate(MODES) for w in compare(mesh, mode, 200, CASES[k::12])]


@pytest.mark.processes
def test_training_goes_on_on_real_processes() -> None:
    assert not run_processes(on_processes, 2)[0]
