"""shard_dataloader: global and local batches, nested ones, uneven ones, and what goes through to the loader."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import meshwright as mw
from meshwright import runtime
from meshwright.errors import DesyncError, ShardError
from meshwright.shard import shard_dataloader

MESH = mw.Mesh({"dp": 3})
DATA = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10))
ROWS = {"dp": mw.Shard(0)}


def test_every_rank_keeps_its_part_of_the_global_batch() -> None:
    def fn() -> list[Any]:
        loader = shard_dataloader(DataLoader(DATA, batch_size=4), MESH, ROWS)
        assert len(loader) == 3
        assert loader.dataset is DATA
        seen = []
        for x, y in loader:
            assert isinstance(x, mw.DistTensor)
            assert x.placements == (mw.Shard(0),)
            seen.append((tuple(x.shape), tuple(x.to_local().shape), mw.unshard(y).tolist()))
        return seen

    first, _, last = mw.simulate(fn, MESH)
    assert first == [((4, 2), (2, 2), [0, 1, 2, 3]), ((4, 2), (2, 2), [4, 5, 6, 7]), ((2, 2), (1, 2), [8, 9])]
    assert [local for _, local, _ in last] == [(0, 2)] * 3


def test_local_batches() -> None:
    def fn() -> list[Any]:
        rank = runtime.RT.rank
        sampler = DistributedSampler(DATA, 3, rank, shuffle=False)
        loader = shard_dataloader(DataLoader(DATA, batch_size=2, sampler=sampler), MESH, ROWS, local=True)
        loader.set_epoch(3)
        assert sampler.epoch == 3
        return [(tuple(x.shape), tuple(x.to_local().shape), mw.unshard(y).tolist()) for x, y in loader]

    assert mw.simulate(fn, MESH)[1] == [((6, 2), (2, 2), [0, 3, 1, 4, 2, 5]), ((6, 2), (2, 2), [6, 9, 7, 0, 8, 1])]


def test_local_parts_of_other_lengths_are_rearranged() -> None:
    def fn() -> list[Any]:
        loader = shard_dataloader([torch.arange(runtime.RT.rank + 1.0)], MESH, ROWS, local=True)
        return [(tuple(x.to_local().shape), mw.unshard(x).tolist()) for x in loader]

    assert mw.simulate(fn, MESH) == [[((2,), [0.0, 0.0, 1.0, 0.0, 1.0, 2.0])]] * 3


def test_nested_batches() -> None:
    pair = namedtuple("pair", "x name")

    def fn() -> None:
        batch = {"a": pair(torch.ones(3, 2), "text"), "b": [torch.ones(6), None], "n": torch.tensor(5)}
        (made,) = shard_dataloader([batch], MESH)
        assert isinstance(made["a"], pair)
        assert made["a"].name == "text"
        assert made["a"].x.to_local().shape == (1, 2)
        assert made["b"][1] is None
        assert made["n"].spec.layout.is_replicated()
        assert made["n"].item() == 5
        (made,) = shard_dataloader([batch], MESH, {"b": ROWS})
        assert type(made["a"].x) is torch.Tensor
        assert made["b"][0].placements == (mw.Shard(0),)

    mw.simulate(fn, MESH)


def test_ranks_with_different_batches() -> None:
    def fn() -> None:
        for _ in shard_dataloader([torch.ones(runtime.RT.rank + 1)], MESH):
            pass

    with pytest.raises(DesyncError, match=r"rank 1: .*same seed"):
        mw.simulate(fn, MESH)


def test_a_tensor_that_cannot_be_laid_out_so() -> None:
    def fn() -> None:
        for _ in shard_dataloader([{"x": [torch.ones(3)]}], MESH, {"dp": mw.Shard(1)}):
            pass

    with pytest.raises(ShardError, match=r"batch\['x'\]\[0\], of shape \(3,\)"):
        mw.simulate(fn, MESH)
    with pytest.raises(ShardError, match="not int"):
        shard_dataloader(3, MESH)  # type: ignore[arg-type]
