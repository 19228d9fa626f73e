"""Collectives of ``torch.distributed`` that the user's code calls itself, on distributed tensors and beside them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as dist_nn

import meshwright as mw
from meshwright.errors import DispatchError
from meshwright.ranks import runtime
from tests.support.processes import run_processes

Tensor = torch.Tensor
WORLD = [0, 1]


def empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape)


def to_neighbour(x: Tensor) -> None:
    peer = 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, empty(x), peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def sent(x: Tensor) -> None:
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)


def sent_later(x: Tensor) -> None:
    (dist.isend if dist.get_rank() == 0 else dist.irecv)(x, 1 - dist.get_rank()).wait()


def scattered(x: Tensor) -> None:
    dist.scatter(x, [empty(x)] * 2 if dist.get_rank() == 0 else None)


def gathered(x: Tensor) -> None:
    dist.gather(x, [empty(x)] * 2 if dist.get_rank() == 0 else None)


# What people write, of a tensor x.
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "all_reduce_async": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "metric": lambda x: dist.all_reduce((x > 2).sum()),
    "coalesced": lambda x: dist.all_reduce_coalesced([torch.ones(2), x]),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_gather": lambda x: dist.all_gather([empty(x), empty(x)], x),
    "all_gather_into": lambda x: dist.all_gather([x, empty(x)], empty(x)),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(torch.empty(2 * len(x)), x),
    "reduce_scatter": lambda x: dist.reduce_scatter(empty(x), [x, x]),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(torch.empty(len(x) // 2), x),
    "all_to_all": lambda x: dist.all_to_all([empty(x), empty(x)], [x, x]),
    "all_to_all_single": lambda x: dist.all_to_all_single(empty(x), x),
    "gather": gathered,
    "scatter": scattered,
    "send": sent,
    "isend": sent_later,
    "batch_isend_irecv": to_neighbour,
    "process_group": lambda x: dist.group.WORLD.allreduce([x]),  # type: ignore[union-attr]
    "functional_all_reduce": lambda x: functional.all_reduce(x, "sum", WORLD),
    "functional_all_gather": lambda x: functional.all_gather_tensor(x, 0, WORLD),
    "functional_reduce_scatter": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, WORLD),
    "functional_broadcast": lambda x: functional.broadcast(x, 0, WORLD),
    "functional_all_to_all": lambda x: functional.all_to_all_single(x, None, None, WORLD),
    "functional_coalesced": lambda x: functional.all_reduce_coalesced([x, x], "sum", WORLD),
    "functional_autograd": lambda x: functional.all_gather_tensor_autograd(x, 0, WORLD),
    "nn_all_reduce": dist_nn.all_reduce,
    "nn_all_gather": dist_nn.all_gather,
    "nn_reduce": lambda x: dist_nn.reduce(x, 0),
    "nn_broadcast": lambda x: dist_nn.broadcast(x, 0),
    "nn_all_to_all": lambda x: dist_nn.all_to_all_single(torch.empty(6), x),
    "all_gather_object": lambda x: dist.all_gather_object([None, None], {"loss": [x]}),
    "broadcast_object_list": lambda x: dist.broadcast_object_list([x], 0),
    "gather_object": lambda x: dist.gather_object((x,), [None, None] if dist.get_rank() == 0 else None),
}
SENDER_ALONE = {"broadcast_object_list"}  # the others bring nothing that could be refused


def each_call() -> dict[str, list[str]]:
    mesh = mw.init_mesh({"tp": 2})
    tensors = {
        "split": mw.shard_tensor(torch.arange(6.0), mesh, {"tp": mw.Shard(0)}),
        "uneven": mw.shard_tensor(torch.arange(5.0), mesh, {"tp": mw.Shard(0)}),
        "partial": mw.shard_tensor(torch.arange(36.0).view(6, 6), mesh, {"tp": mw.Shard(1)}).sum(1),
        "whole": mw.shard_tensor(torch.arange(6.0), mesh, {}),
    }
    told: dict[str, list[str]] = {}
    warnings.simplefilter("ignore")
    for name, call in CALLS.items():
        for kind, x in tensors.items():
            if (kind == "whole" and "object" in name) or (name in SENDER_ALONE and dist.get_rank()):
                continue
            if kind == "uneven" and name == "functional_reduce_scatter":  # PyTorch itself refuses 5 for 2 ranks
                x = tensors["split"]
            before = mw.unshard(x).clone() if name not in SENDER_ALONE else None
            try:
                call(x)
                told.setdefault(name, []).append(f"{kind}: nothing")
            except DispatchError as error:
                told.setdefault(name, []).append(str(error))
            if before is not None:
                assert torch.equal(mw.unshard(x), before), (name, kind)
    plain_ones(mesh)
    return told


def plain_ones(mesh: mw.Mesh) -> None:
    """Plain tensors pass, and what ``to_local`` gives."""
    x = mw.shard_tensor(torch.arange(6.0), mesh, {"tp": mw.Shard(0)})
    part = x.to_local().clone()
    dist.all_reduce(part)
    assert part.tolist() == [3, 5, 7]
    both = [torch.empty(3), torch.empty(3)]
    dist.all_gather(both, x.to_local())
    assert torch.cat(both).tolist() == list(range(6))
    assert functional.all_reduce(torch.ones(2), "sum", WORLD).tolist() == [2, 2]
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"loss": x.sum().item(), "whole": mw.shard_tensor(torch.ones(2), mesh, {})})
    assert [o["loss"] for o in objects] == [15, 15]
    (x * 2).sum().item()


@pytest.mark.processes
def test_collectives_by_hand_are_refused_with_what_to_write() -> None:
    for rank, told in enumerate(run_processes(each_call, 2)):
        for name in CALLS.keys() - (SENDER_ALONE if rank else set()):
            assert len(told[name]) == (3 if "object" in name else 4), (name, told[name])
            for message in told[name]:
                assert "of torch.distributed at test_collectives_by_hand.py" in message, (rank, name, message)
                assert all(way in message for way in (".item()", "mw.unshard(x)", "x.to_local()")), message


def test_functional_collectives_are_refused_on_simulated_ranks() -> None:
    mesh = mw.Mesh({"tp": 2})

    def fn() -> None:
        x = mw.shard_tensor(torch.arange(6.0), mesh, {"tp": mw.Shard(0)})
        assert runtime.RT.world == 2
        torch.ops._c10d_functional.all_reduce(x, "sum", "0")

    with pytest.raises(DispatchError, match=r"_c10d_functional::all_reduce of torch.distributed .*mw.unshard"):
        mw.simulate(fn, mesh)
