"""shard_dataloader: global and local batches, nested ones, uneven ones, and what goes through to the loader."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import meshwright as mw
from meshwright.errors import DesyncError, ShardError
from meshwright.ranks import runtime
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


# ---------------------------------------------------------------------------------------------- padding

VALUES = {"ids": 0, "mask": False, "labels": -100, "kind": None}


def batch_of(length: int, first: int = 0, rows: int = 3) -> dict[str, Any]:
    ids = torch.arange(first, first + rows * length).view(rows, length)
    made = {
        "ids": ids,
        "mask": ids >= 0,
        "labels": ids.clone(),
        "kind": torch.ones(rows, length),
        "n": torch.arange(rows),
    }
    return {"in": made, "text": "x"}


def test_batches_are_padded_to_the_next_size() -> None:
    def fn() -> list[Any]:
        given = [batch_of(n) for n in (3, 4, 5, 8)]
        seen = []
        for batch, raw in zip(shard_dataloader(given, MESH, ROWS, pad_to=[8, 4], pad_value=VALUES), given, strict=True):
            made = {k: mw.unshard(v) for k, v in batch["in"].items()}
            n = raw["in"]["ids"].shape[1]
            for key, behind in (("ids", 0), ("mask", 0), ("labels", -100)):
                assert torch.equal(made[key][:, :n], raw["in"][key])
                assert (made[key][:, n:] == behind).all()
                assert made[key].dtype == raw["in"][key].dtype
            assert made["kind"].shape == (3, n)
            assert made["n"].shape == (3,)
            seen.append(made["ids"].shape[1])
        return seen

    assert mw.simulate(fn, MESH) == [[4, 4, 8, 8]] * 3


def test_the_mean_over_labels_is_that_of_what_was_there() -> None:
    logits, labels = torch.randn(3, 5, 7, dtype=torch.float64), torch.randint(0, 7, (3, 5))
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def fn() -> None:
        loader = shard_dataloader([(logits, labels)], MESH, ROWS, pad_to=[16], pad_value={0: 0.0, 1: -100})
        for x, y in loader:
            assert x.shape == (3, 16, 7)
            loss = torch.nn.functional.cross_entropy(x.flatten(0, 1), y.flatten())
            torch.testing.assert_close(mw.unshard(loss), want)

    mw.simulate(fn, MESH)


def test_parts_are_padded_to_the_longest() -> None:
    def fn() -> list[Any]:
        lengths = [[2, 5, 4], [6, 1, 3]]
        given = [batch_of(of[runtime.RT.rank], rows=1) for of in lengths]
        loader = shard_dataloader(given, MESH, ROWS, local=True, pad_to=[4, 5, 6], pad_value=VALUES | {"kind": 0})
        return [tuple(mw.unshard(batch["in"]["ids"]).shape) for batch in loader]

    assert mw.simulate(fn, MESH) == [[(3, 5), (3, 6)]] * 3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"pad_to": [4], "pad_value": VALUES}, r"batch\['in'\]\['ids'\] has 5 along dim 1, pad_to goes up to 4"),
        ({"pad_to": [8]}, "say what each tensor is padded with"),
        ({"pad_to": [8], "pad_value": 0}, "for batches with one tensor that has a dim 1, this one has 4: name them"),
        ({"pad_to": [8], "pad_value": {"ids": 0}}, r"batch\['in'\]\['kind'\] has a dim 1, and pad_value does not name"),
        ({"pad_to": [8], "pad_value": VALUES | {"n": 0}}, "names 'n', and the batch has no tensor of that name with a"),
        ({"pad_to": [], "pad_value": 0}, "the sizes to pad to"),
        ({"pad_to": 8, "pad_value": 0}, "the sizes to pad to"),
        ({"pad_to": [8], "pad_value": 0, "pad_dim": "seq"}, "the number of a dim was expected"),
        ({"pad_to": [8], "pad_value": VALUES | {"kind": "x"}}, "is torch.float32 and cannot hold pad_value 'x'"),
        ({"pad_value": 0}, "pad_to is not: to which sizes"),
        ({"pad_to": [8], "pad_value": VALUES, "pad_dim": 0, "local": True}, "padding would come between the parts"),
    ],
)  # fmt: skip
def test_what_cannot_be_padded(more: dict[str, Any], said: str) -> None:
    def fn() -> None:
        with pytest.raises(ShardError, match=said):
            list(shard_dataloader([batch_of(5)], MESH, ROWS, **more))

    mw.simulate(fn, MESH)


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        (torch.uint8, -100, False), (torch.bool, -100, False), (torch.bool, True, True), (torch.int8, 300, False),
        (torch.int64, 0.5, False), (torch.int64, math.nan, False), (torch.int32, -100, True), (torch.int64, 2.0, True),
        (torch.float32, 0.1, True), (torch.float32, math.inf, True), (torch.float32, math.nan, True),
        (torch.float16, 1e6, False), (torch.bfloat16, -100, True), (torch.float32, "0", False),
    ],
)  # fmt: skip
def test_what_is_padded_with_is_what_was_asked_for(dtype: torch.dtype, value: Any, fits: bool) -> None:
    def fn() -> Any:
        loader = shard_dataloader([torch.ones(3, 2).to(dtype)], MESH, ROWS, pad_to=[3], pad_value=value)
        return mw.unshard(next(iter(loader)))[:, 2]

    if fits:
        want = torch.full((3,), value).to(dtype)
        torch.testing.assert_close(mw.simulate(fn, MESH)[0], want, equal_nan=True)
    else:
        with pytest.raises(ShardError, match="cannot hold pad_value"):
            mw.simulate(fn, MESH)


@pytest.mark.parametrize("pad", [False, True])
def test_keys_may_come_in_another_order_on_each_rank(pad: bool) -> None:
    def fn() -> Any:
        r = runtime.RT.rank
        parts = {"a": torch.ones(2 + r, 5 + 4 * r) * (r + 1), "b": torch.ones(2 + r, 1) * 10 * (r + 1)}
        parts["a"] = parts["a"] if pad else parts["a"][:, :5]
        turned = {k: parts[k] for k in (("b", "a") if r == 1 else ("a", "b"))}
        more = {"pad_to": [16], "pad_value": {"a": 0, "b": None}} if pad else {}
        seen = list(mw.shard_dataloader([parts, turned], MESH, ROWS, local=True, **more))
        assert list(seen[1]) == list(turned)
        assert seen[1]["a"].shape == (9, 16 if pad else 5)
        return [mw.unshard(b[k])[:, 0].tolist() for b in seen for k in "ab"]

    a = [1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0]
    assert mw.simulate(fn, MESH) == [[a, [10 * n for n in a]] * 2] * 3


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (lambda r: torch.ones(2, 5 + r), "sizes of batch along dims that are not split: rank 0: .None, 5"),
        (lambda r: torch.ones(2, 5).to([torch.float32, torch.float64, torch.float32][r]), "shapes of batch .*float64"),
        (lambda r: torch.ones([(2, 5), (2, 5), (2, 5, 1)][r]), "3 dims"),
        (lambda r: {"x": torch.ones(2)} | ({"y": torch.ones(2)} if r else {}), "batch.'y'"),
        (lambda r: None, "no more batch"),
    ],
)
def test_later_parts_that_do_not_fit(part: Any, said: str) -> None:
    def fn() -> None:
        r, first = runtime.RT.rank, torch.ones(2, 5)
        given = [first, first, part(r)] if part(r) is not None else [first] * (2 + r)
        for _ in mw.shard_dataloader(iter(given), MESH, ROWS, local=True):
            pass

    with pytest.raises(DesyncError, match=r"different batches \(batch \d\).*" + said):
        mw.simulate(fn, MESH)


def test_ranks_of_one_part_bring_it_in_one_shape() -> None:
    mesh = mw.Mesh({"dp": 2, "tp": 2})

    def fn() -> None:
        given = [torch.ones(2, 5), torch.ones(2 + (runtime.RT.rank == 3), 5)]
        list(mw.shard_dataloader(given, mesh, ROWS, local=True))

    with pytest.raises(DesyncError, match=r"shapes of the same part of batch: rank 2: \[2, 5\]; rank 3: \[3, 5\]"):
        mw.simulate(fn, mesh)


def test_fields_of_named_tuples_have_names() -> None:
    pair = namedtuple("pair", "x y")

    def fn() -> Any:
        batch = pair(torch.ones(3, 2), torch.ones(3, 2, dtype=torch.int64))
        loader = mw.shard_dataloader([batch], MESH, ROWS, pad_to=[4], pad_value={"x": 0, "y": -100})
        return mw.unshard(next(iter(loader)).y)[0].tolist()

    assert mw.simulate(fn, MESH)[0] == [1, 1, -100, -100]
