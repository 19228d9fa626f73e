"""Wrong arguments of public functions: the error is ours, the same on every rank, and says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import MeshwrightError

MESH = mw.Mesh({"dp": 2})
S = {"dp": mw.Shard(0)}
T = torch.ones(4, 4)
SPEC = mw.Spec((4, 4), torch.float32, mw.Layout(MESH, S))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def laid() -> nn.Module:
    return mw.shard_module(net(), MESH, {"0.weight": S})


def x() -> mw.DistTensor:
    return mw.shard_tensor(T, MESH, S)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def compiled(**given: Any) -> Any:
    model = net()
    wanted = {"model": model, "loss_fn": lambda m, b: m(b).sum(), "optimizer": None, "example_batch": T, "mesh": MESH}
    return mw.compile_step(**{**wanted, **given})


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "Mesh list": (lambda: mw.Mesh([2, 2]), r"\[2, 2\] names no axes.*Mesh\(\{\"dp\": 2, \"tp\": 2\}\)"),
    "Mesh ranks": (lambda: mw.Mesh({"dp": 2}, ranks=2), "ranks=2: the global ranks"),
    "Mesh device": (lambda: mw.Mesh({"dp": 2}, device=3), "device=3: the type of device as a word"),
    "init_mesh": (lambda: mw.init_mesh(2), "2 names no axes"),
    "clip_grad_norm": (lambda: compiled(clip_grad_norm="a"), "clip_grad_norm cannot be a str: give the largest norm"),
    "clip_grad_norm sign": (lambda: compiled(clip_grad_norm=-1.0), "clip_grad_norm=-1.0: give the largest norm"),
    "reshard plain": (lambda: mw.reshard(T, S), "reshard: x cannot be a Tensor: mw.shard_tensor"),
    "reshard list": (lambda: mw.reshard([x()], S), "x cannot be a list.*one at a time"),
    "reshard order": (lambda: mw.reshard(x(), S, order=["dp"]), r"order=\['dp'\]: dim to the axes"),
    "reshard axis": (lambda: mw.reshard(x(), {0.5: mw.Shard(0)}), "unknown axis 0.5"),
    "shard_tensor ndarray": (lambda: mw.shard_tensor(np.ones(4), MESH, S), r"t cannot be an? ndarray: torch.as_tensor"),
    "shard_tensor swapped": (lambda: mw.shard_tensor(MESH, T, S), "shard_tensor: t cannot be a Mesh"),
    "shard_tensor mesh": (lambda: mw.shard_tensor(T, {"dp": 2}, S), "mesh cannot be a dict: take mw.init_mesh"),
    "from_local": (lambda: mw.from_local(x(), MESH, S), "from_local takes the plain tensor"),
    "from_local shape": (lambda: mw.from_local(T, MESH, S, shape=5), "shape cannot be an int: give one size per dim"),
    "sharded factory": (lambda: mw.sharded("randn", (4,), MESH, S), "factory cannot be a str"),
    "sharded shape": (lambda: mw.sharded(torch.randn, 4, MESH, S), "shape cannot be an int"),
    "shard_module list": (lambda: mw.shard_module([net()], MESH), "takes an nn.Module, not list.*ModuleList"),
    "shard_module mesh": (lambda: mw.shard_module(net(), {"dp": 2}), "mesh cannot be a dict"),
    "shard_module globs": (lambda: mw.shard_module(net(), MESH, ["0.weight"]), "placements cannot be a list"),
    "shard_module inputs": (lambda: mw.shard_module(net(), MESH, inputs=["0"]), "inputs cannot be a list"),
    "shard_module stored": (lambda: mw.shard_module(net(), MESH, fsdp=1), "fsdp cannot be an int"),
    "shard_module counter": (
        lambda: mw.shard_module(net(), MESH, {"1.num_batches_tracked": S}),
        "1.num_batches_tracked, of shape.*nothing to split",
    ),
    "shard_optimizer states": (lambda: mw.shard_optimizer(sgd(laid()), shard_states=3), "shard_states cannot be"),
    "shard_optimizer other": (lambda: mw.shard_optimizer(sgd(net())), "PEFT.* comes before both"),
    "loader axis": (lambda: next(iter(mw.shard_dataloader([T], MESH, {"pd": mw.Shard(0)}))), "'pd' is no axis of Mesh"),
    "loader key": (
        lambda: next(iter(mw.shard_dataloader([{"x": T}], MESH, {"x": S, "pd": mw.Shard(0)}))),
        "'pd' is no axis of .* has the keys 'x'",
    ),
    "loader mesh": (lambda: mw.shard_dataloader([T], {"dp": 2}), "mesh cannot be a dict"),
    "loader placements": (lambda: mw.shard_dataloader([T], MESH, "dp"), "placements cannot be a str"),
    "unshard list": (lambda: mw.unshard([x()]), "unshard: x cannot be a list: of several, one at a time"),
    "unshard module": (lambda: mw.unshard(laid()), "unshard: x cannot be a Sequential"),
    "constrain": (lambda: mw.constrain([T], S), "constrain: x cannot be a list"),
    "to_dtensor": (lambda: mw.to_dtensor(T), "to_dtensor: x cannot be a Tensor"),
    "from_dtensor": (lambda: mw.from_dtensor(T), "from_dtensor takes a DTensor of PyTorch, not Tensor"),
    "Layout mesh": (lambda: mw.Layout({"dp": 2}, S), "is no mesh"),
    "Spec shape": (lambda: mw.Spec(4, torch.float32, mw.Layout(MESH)), "a tuple, a torch.dtype and a mw.Layout"),
    "Spec dtype": (lambda: mw.Spec((4,), "float32", mw.Layout(MESH)), "'float32' is no dtype"),
    "infer_forward": (lambda: mw.infer_forward(torch.add, SPEC, SPEC), "op cannot be a builtin_function"),
    "infer_backward": (lambda: mw.infer_backward("add", SPEC, SPEC, outputs=SPEC), "outputs cannot be a Spec"),
    "rule": (lambda: mw.rule(lambda a: None), "rule takes names of ops"),
    "no_sync": (lambda: mw.no_sync([laid()]), "model cannot be a list"),
    "explain": (lambda: mw.explain(5), "fn cannot be an int"),
    "check_conversion": (lambda: mw.check_conversion(T, SPEC), "src cannot be a Tensor"),
    "check_program": (lambda: mw.check_program([1]), "takes programs"),
    "load_program": (lambda: mw.load_program("x", mesh={"dp": 2}), "mesh cannot be a dict"),
    "compile_step optimizer": (lambda: compiled(optimizer=sgd(net())), "none of the model's: make the optimizer"),
    "compile_step class": (lambda: compiled(optimizer=torch.optim.SGD), "optimizer cannot be a type"),
    "compile_step model": (lambda: compiled(model=[net()]), "model cannot be a list"),
    "compile_step passes": (lambda: compiled(passes="gradient-merge"), "passes cannot be a str: give a list"),
    "compile_step layouts": (lambda: compiled(layouts=["x"]), "layouts cannot be a list"),
    "torch.compile": (lambda: torch.compile(laid()), "torch.compile: mw.shard_module sharded this.*compile_step"),
    "Module.compile": (lambda: laid().compile(), "torch.compile: mw.shard_module sharded this module"),
    "DistTensor": (lambda: mw.DistTensor(T), "take mw.shard_tensor"),
}  # fmt: skip


def test_wrong_arguments() -> None:
    def run() -> None:
        for name, (call, message) in WRONG.items():
            try:
                call()
                found = "no error"
            except MeshwrightError as error:
                found = str(error)
            assert re.search(message, found), (name, found)

    mw.simulate(run, MESH)
    for call in (lambda: mw.simulate(5, MESH), lambda: mw.simulate(lambda: 1, {"dp": 2})):
        with pytest.raises(MeshwrightError, match=r"simulate: (fn|mesh) cannot be an? "):
            call()


def test_a_pattern_for_weights_leaves_counters_alone() -> None:
    def run() -> None:
        model = mw.shard_module(net(), MESH, {"1.*": S})
        assert type(model[1].num_batches_tracked) is torch.Tensor
        assert model[1].running_mean.placements == (mw.Shard(0),)

    mw.simulate(run, MESH)


def test_keys_of_nested_batches() -> None:
    batch = [{"outer": {"x": T}, "y": T}]

    def run() -> None:
        (made,) = mw.shard_dataloader(batch, MESH, {"x": S})
        assert made["outer"]["x"].placements == (mw.Shard(0),)
        assert type(made["y"]) is torch.Tensor

    mw.simulate(run, MESH)
