"""Sharded training on real processes: the last word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from tests.support.processes import run_processes
from tests.support.shard_networks import TP, batches, loss_of, net, same_values, trained

CASES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {}, {}),
    "stored over dp": ({"dp": 2}, {"fsdp": "dp"}, {}),
    "stored on the host": ({"dp": 2}, {"fsdp": "dp", "offload": "cpu"}, {}),
    "whole on the host": ({"dp": 2}, {"offload": "cpu"}, {"shard_states": "dp"}),
    "states over dp": ({"dp": 2}, {}, {"shard_states": "dp"}),
    "small buckets": ({"dp": 2}, {"bucket_bytes": 500}, {}),
    "dp x tp": ({"dp": 2, "tp": 2}, {"placements": TP}, {}),
    "dp x tp, stored": ({"dp": 2, "tp": 2}, {"placements": TP, "fsdp": "dp"}, {}),
    "dp x tp, states": ({"dp": 2, "tp": 2}, {"placements": TP}, {"shard_states": "dp"}),
}


def backward(model: nn.Module, ids: torch.Tensor) -> None:
    if isinstance(model.scale, mw.DistTensor):
        with mw.no_sync(model):
            loss_of(model, ids).backward()
    else:
        loss_of(model, ids).backward()
    loss_of(model, ids).backward()


def train_all(world: int) -> dict[str, Any]:
    counted = {}
    data = batches()
    one = net()
    trained(one, torch.optim.AdamW(one.parameters(), lr=0.01), data, backward, 0.1)
    for name, (axes, options, states) in CASES.items():
        if torch.Size(axes.values()).numel() != world:
            continue
        mesh = mw.init_mesh(axes)
        model = mw.shard_module(net(), mesh, **options)
        opt = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), **states)
        split = [mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)}) for x in data]
        trained(model, opt, split, backward, 0.1)
        same_values(model, one)
        model.zero_grad()
        loss = loss_of(model, split[0])
        with collective.counting() as counts:
            loss.backward()
        counted[name] = counts.table
    return counted


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.thin(2)
def test_training_equals_one_device(world: int) -> None:
    counted = run_processes(train_all, world, world)
    assert all(c == counted[0] for c in counted)
    if world == 2:
        size = sum(p.numel() for p in net().parameters()) * 8
        assert counted[0]["dp"] == {("all_reduce", ("dp",)): [1, size]}
        assert counted[0]["small buckets"]["all_reduce", ("dp",)][1] == size
        assert counted[0]["stored over dp"]["reduce_scatter", ("dp",)][1] == size // 2
