"""shard_dataloader(batch_size=): each rank reads its own rows of an order that is the same on every mesh."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import meshwright as mw
from meshwright.errors import DesyncError, ShardError
from meshwright.ranks import runtime
from meshwright.shard.data.order import RowOrder, _walked, mix, place_to_row

ROWS = {"dp": mw.Shard(0)}
MESHES: list[tuple[dict[str, int], Any]] = [
    ({"dp": 1}, ROWS),
    ({"dp": 2}, ROWS),
    ({"dp": 3}, ROWS),
    ({"dp": 4}, ROWS),
    ({"tp": 2}, {}),
    ({"dp": 2, "tp": 2}, ROWS),
    ({"pod": 2, "dp": 2}, {"pod": mw.Shard(0), "dp": mw.Shard(0)}),
    ({"dp": 2, "cp": 2}, {"dp": mw.Shard(0), "cp": mw.Shard(1)}),
]


class Counted(Dataset[Any]):
    """Rows of two columns, and which of them a rank reads."""

    def __init__(self, rows: int) -> None:
        self.rows, self.read = rows, {}

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.read.setdefault(runtime.RT.rank, []).append(i)
        return {"x": torch.tensor([i, 2 * i]), "name": f"row {i}"}


class Iterated(IterableDataset[Any]):
    """The same rows, which can only be gone through."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        yield from ({"x": torch.tensor([i, 2 * i])} for i in range(self.rows))


def batches(loader: Any, count: int = 1 << 30) -> list[list[int]]:
    """The rows of the next batches."""
    seen = []
    for _, batch in zip(range(count), loader, strict=False):
        x = mw.unshard(batch["x"])
        assert torch.equal(x[:, 1], 2 * x[:, 0])
        seen.append(x[:, 0].tolist())
    return seen


# ---------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 63, 64, 65, 1000, 1023, 4097])
def test_both_networks_are_permutations(rows: int) -> None:
    places = torch.arange(rows)
    for made in (_walked(places, rows, 7), place_to_row(places, rows, 7)):
        assert made.sort().values.tolist() == list(range(rows))


def test_an_order_without_a_list() -> None:
    order = RowOrder(1_000_003, seed=3)
    rows = order.at(0, 8000, 40000)  # over several blocks
    assert len({*rows}) == 32000
    assert rows[:300] == RowOrder(1_000_003, seed=3).at(0, 8000, 8300)
    assert rows[200:] == RowOrder(1_000_003, seed=3).at(0, 8200, 40000)
    assert rows[:100] != order.at(1, 8000, 8100)
    half = sum(row < 500_001 for row in rows) / 32000
    assert abs(half - 0.5) < 0.02


def test_permutations_of_few_rows_are_equally_frequent() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(12000):
        key = tuple(place_to_row(torch.arange(4), 4, mix(1, epoch)).tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 24
    assert sum((n - 500) ** 2 / 500 for n in counts.values()) < 60  # 23 degrees of freedom: p = 4e-5


# ---------------------------------------------------------------------------------------------- on every mesh


@pytest.mark.parametrize("rows", [45, 33, 3])
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_the_order_is_the_same_on_every_mesh(kind: str, rows: int) -> None:
    seen, reads = [], []
    for sizes, placements in MESHES:
        mesh, data = mw.Mesh(sizes), Counted(rows) if kind == "map" else Iterated(rows)
        more = {"shuffle": True, "seed": 5} if kind == "map" else {}

        def fn(mesh: Any = mesh, data: Any = data, placements: Any = placements, more: Any = more) -> Any:
            loader = mw.shard_dataloader(data, mesh, {"x": placements}, batch_size=8, **more)
            assert len(loader) == -(-rows // 8) if kind == "map" else True
            return [batches(loader), batches(loader)]

        everyone = mw.simulate(fn, mesh)
        assert all(made == everyone[0] for made in everyone)
        seen.append(everyone[0])
        if kind == "map":
            reads.append([len(data.read[r]) for r in range(mesh.size)])
    assert all(made == seen[0] for made in seen)
    for epoch in seen[0]:
        assert sorted(chain(*epoch)) == list(range(rows))
        assert [len(batch) for batch in epoch] == [8] * (rows // 8) + [rows % 8]
    assert (seen[0][0] != seen[0][1]) == (kind == "map")
    if kind == "map" and rows == 45:
        assert reads[2] == [34, 34, 22]  # of 2 epochs over dp=3: 17 + 17 + 11


def test_a_run_goes_on_on_other_meshes_and_reads_its_own_rows_only() -> None:
    whole = Counted(45)

    def one() -> Any:
        loader = mw.shard_dataloader(whole, mw.Mesh({"dp": 1}), batch_size=8, shuffle=True, seed=2)
        return batches(loader) + batches(loader)

    expected = mw.simulate(one, mw.Mesh({"dp": 1}))[0]
    state, seen = None, []
    for size, count in ((4, 2), (3, 5), (1, 3), (2, 2)):
        mesh, data = mw.Mesh({"dp": size}), Counted(45)

        def fn(mesh: Any = mesh, data: Any = data, count: int = count, state: Any = state) -> Any:
            loader = mw.shard_dataloader(data, mesh, ROWS, batch_size=8, shuffle=True, seed=2)
            if state is not None:
                loader.load_state_dict(state)
            made: list[list[int]] = []
            while len(made) < count:
                for batch in loader:
                    made.append(mw.unshard(batch["x"])[:, 0].tolist())
                    if len(made) == count:
                        return made, loader.state_dict()
            return made, loader.state_dict()

        made, state = mw.simulate(fn, mesh)[0]
        assert max(len(read) for read in data.read.values()) <= -(-8 // size) * count
        seen += made
    assert seen == expected


def test_one_batch_is_read_to_go_on() -> None:
    data = Counted(8000)

    def fn() -> list[int]:
        loader = mw.shard_dataloader(data, mw.Mesh({"dp": 2}), ROWS, batch_size=32, shuffle=True)
        loader.load_state_dict({**loader.state_dict(), "row": 200 * 32})
        return batches(loader, 1)[0]

    assert len(mw.simulate(fn, mw.Mesh({"dp": 2}))[0]) == 32
    assert {rank: len(read) for rank, read in data.read.items()} == {0: 16, 1: 16}


def test_the_batch_size_may_change_on_the_way() -> None:
    def fn() -> Any:
        def loader(size: int) -> Any:
            return mw.shard_dataloader(Counted(30), mw.Mesh({"dp": 2}), ROWS, batch_size=size, shuffle=True)

        first, second = loader(4), loader(7)
        rows = batches(first, 3)
        state = first.state_dict()
        second.load_state_dict(state)
        return sorted(chain(*rows, *batches(second)))

    assert mw.simulate(fn, mw.Mesh({"dp": 2}))[0] == list(range(30))


def test_epochs_and_passes_that_are_left() -> None:
    def fn() -> None:
        def loader() -> Any:
            return mw.shard_dataloader(Counted(20), mw.Mesh({"dp": 2}), ROWS, batch_size=8, shuffle=True)

        first, second = loader(), loader()
        epochs = [batches(first) for _ in range(3)]
        second.set_epoch(2)
        assert batches(second) == epochs[2]
        second.set_epoch(0)
        for _ in second:
            break
        assert batches(second) == epochs[1]
        second.load_state_dict({**second.state_dict(), "epoch": 1, "row": 8})
        second.set_epoch(1)  # as loops over epochs do: it is the epoch of the state
        assert batches(second) == epochs[1][1:]
        assert second.state_dict()["epoch"] == 2

    mw.simulate(fn, mw.Mesh({"dp": 2}))


def test_drop_last() -> None:
    def fn() -> Any:
        data = torch.arange(20.0)
        loader = mw.shard_dataloader(data, mw.Mesh({"dp": 3}), ROWS, batch_size=8, drop_last=True)
        assert len(loader) == 2
        return [mw.unshard(x).tolist() for x in loader]

    assert mw.simulate(fn, mw.Mesh({"dp": 3}))[0] == [list(range(8)), list(range(8, 16))]


# ---------------------------------------------------------------------------------------------- random transforms


class Noisy(Dataset[Any]):
    """Rows with noise of three generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([i, torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_transforms_belong_to_rows(workers: int) -> None:
    seen = []
    for sizes, placements in (({"dp": 1}, ROWS), ({"dp": 2, "tp": 2}, ROWS), ({"dp": 3}, ROWS)):
        if workers and sizes["dp"] == 3:
            continue
        mesh = mw.Mesh(sizes)

        def fn(mesh: Any = mesh, placements: Any = placements) -> Any:
            before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[2]
            loader = mw.shard_dataloader(Noisy(), mesh, placements, batch_size=4, num_workers=workers)
            made = torch.cat([mw.unshard(x) for _ in range(2) for x in loader])
            assert torch.equal(before[0], torch.random.get_rng_state())
            assert before[1:] == (random.getstate(), np.random.get_state()[2])
            return made

        seen.append(mw.simulate(fn, mesh)[0])
    assert all(torch.equal(made, seen[0]) for made in seen)
    assert not torch.equal(seen[0][:12], seen[0][12:])  # other noise in the next epoch
    assert len({*seen[0][:, 1].tolist()}) == 24


# ---------------------------------------------------------------------------------------------- workers, forms, padding


def test_workers_read_the_same_rows() -> None:
    def fn() -> Any:
        def loader(**more: Any) -> Any:
            return mw.shard_dataloader(Counted(21), mw.Mesh({"dp": 1}), batch_size=4, shuffle=True, **more)

        plain, workers = loader(), loader(num_workers=2, persistent_workers=True)
        assert [batches(plain), batches(plain)] == [batches(workers), batches(workers)]
        streams = [mw.shard_dataloader(Iterated(9), mw.Mesh({"dp": 1}), batch_size=4, num_workers=n) for n in (0, 1)]
        assert batches(streams[0]) == batches(streams[1])

    mw.simulate(fn, mw.Mesh({"dp": 1}))


def test_rows_of_several_lengths_are_padded_or_an_error() -> None:
    mesh = mw.Mesh({"dp": 2})
    data = [torch.full((n,), n) for n in (3, 3, 3, 3, 2, 5, 5, 5)]

    def collate(rows: list[Any]) -> Any:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def fn(**more: Any) -> Any:
        loader = mw.shard_dataloader(data, mesh, ROWS, batch_size=4, collate_fn=collate, **more)
        return [(tuple(x.shape), mw.unshard(x)[:, 0].tolist()) for x in loader]

    padded = mw.simulate(lambda: fn(pad_to=[4, 8], pad_value=0), mesh)
    assert padded == [[((4, 4), [3] * 4), ((4, 8), [2, 5, 5, 5])]] * 2
    with pytest.raises(ShardError, match=r"rows of batch 1.* are \(5,\).*pad_to="):
        mw.simulate(fn, mesh)


def test_padding_of_a_split_sequence() -> None:
    mesh = mw.Mesh({"dp": 2, "cp": 2})

    def fn() -> Any:
        data = [torch.arange(5) + 10 * i for i in range(3)]
        placements = {"dp": mw.Shard(0), "cp": mw.Shard(1)}
        loader = mw.shard_dataloader(data, mesh, placements, batch_size=4, pad_to=[6], pad_value=-1)
        return [(x.to_local().shape, mw.unshard(x).tolist()) for x in loader]

    (shape, rows), *_ = mw.simulate(fn, mesh)[3]
    assert shape == (1, 3)
    assert rows == [[*range(10 * i, 10 * i + 5), -1] for i in range(3)]


def test_keys_that_are_not_named_stay_plain() -> None:
    mesh = mw.Mesh({"dp": 2})

    def fn() -> Any:
        (batch,) = mw.shard_dataloader(Counted(1), mesh, {"x": ROWS}, batch_size=4)
        return batch["x"].to_local().shape, batch["name"]

    assert mw.simulate(fn, mesh) == [((1, 2), ["row 0"]), ((0, 2), [])]


def test_a_model_trains_as_on_one_device() -> None:
    data = TensorDataset(torch.randn(22, 6, dtype=torch.float64), torch.randn(22, 2, dtype=torch.float64))

    def losses(mesh: mw.Mesh, captured: bool = False) -> list[float]:
        torch.manual_seed(0)
        model: Any = torch.nn.Linear(6, 2).double()
        loader = mw.shard_dataloader(data, mesh, ROWS, batch_size=8, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(model: Any, batch: Any) -> Any:
            return (model(batch[0]) - batch[1]).square().mean()

        if captured:
            example = (torch.zeros(8, 6, dtype=torch.float64), torch.zeros(8, 2, dtype=torch.float64))
            step = mw.compile_step(model, loss_of, optimizer, example, mesh=mesh, batch=ROWS)
            return [float(step(batch)) for _ in range(2) for batch in loader]
        mw.shard_module(model, mesh)
        optimizer, seen = mw.shard_optimizer(optimizer), []
        for _ in range(2):
            for batch in loader:
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(float(loss))
        return seen

    one, four = mw.Mesh({"dp": 1}), mw.Mesh({"dp": 4})
    expected = mw.simulate(lambda: losses(one), one)[0]
    assert len(expected) == 6
    for captured in (False, True):
        assert mw.simulate(lambda captured=captured: losses(four, captured), four)[0] == pytest.approx(expected, 1e-12)


def test_checkpoints_hold_the_place(tmp_path: Any) -> None:
    def setup(mesh: mw.Mesh) -> tuple[Any, Any]:
        loader = mw.shard_dataloader(Counted(20), mesh, ROWS, batch_size=4, shuffle=True)
        return loader, mw.shard_module(torch.nn.Linear(2, 2), mesh)

    def first() -> Any:
        loader, model = setup(mw.Mesh({"dp": 2}))
        for k, batch in enumerate(loader):
            if k == 1:
                mw.Checkpoints(tmp_path).save(1, model=model, loader=loader).wait()
            if k == 2:
                return mw.unshard(batch["x"])[:, 0].tolist()
        return None

    def second() -> Any:
        loader, model = setup(mw.Mesh({"dp": 3}))
        mw.Checkpoints(tmp_path).load(model=model, loader=loader)
        return batches(loader, 1)[0]

    assert mw.simulate(first, mw.Mesh({"dp": 2}))[0] == mw.simulate(second, mw.Mesh({"dp": 3}))[0]


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"batch_size": 2, "local": True}, "local=True is for loaders"),
        ({"batch_size": 2, "sampler": []}, "sampler= is set by"),
        ({"batch_size": 40, "drop_last": True}, "20 rows, fewer than batch_size=40"),
        ({"num_workers": 2}, "num_workers= is for a dataset"),
        ({"shuffle": True}, "shuffle= is for a dataset"),
        ({}, "pass batch_size= to read a dataset"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardError, match=message):
        mw.shard_dataloader(Counted(20), mw.Mesh({"dp": 1}), **options)


def test_datasets_that_do_not_fit() -> None:
    mesh = mw.Mesh({"dp": 1, "tp": 1})
    for data, options, message in (
        (Counted(0), {}, "no rows"),
        (DataLoader(Counted(3)), {}, "its .dataset"),
        (3, {}, "a int has neither"),
        (Iterated(3), {"shuffle": True}, "only be iterated"),
        (iter(Iterated(3)), {}, "only once"),
        (Iterated(3), {"num_workers": 2}, "num_workers=1"),
        (Counted(3), {"placements": {"dp": mw.Partial()}}, "Shard or Replicate"),
        (Counted(3), {"placements": {"x": ROWS, "y": {"tp": mw.Shard(0)}}}, "'x' and 'y' split dim 0"),
    ):
        with pytest.raises(ShardError, match=message):
            mw.shard_dataloader(data, mesh, batch_size=2, **options)


def test_passes_that_overlap_are_an_error() -> None:
    mesh = mw.Mesh({"dp": 2})
    again = {
        "pass": lambda loader: next(iter(loader)),
        "epoch": lambda loader: loader.set_epoch(0),
        "state": lambda loader: loader.load_state_dict(loader.state_dict()),
    }
    for change in again.values():

        def fn(change: Any = change) -> None:
            loader = mw.shard_dataloader(torch.arange(20.0), mesh, ROWS, batch_size=8, shuffle=True)
            for _ in loader:
                change(loader)

        with pytest.raises(ShardError, match="Make a second loader"):
            mw.simulate(fn, mesh)


def test_a_number_for_the_rows_of_a_rank_is_an_error() -> None:
    def collate(rows: list[Any]) -> Any:
        return {"x": torch.stack(rows), "n": torch.tensor(len(rows))}

    def fn(mesh: mw.Mesh) -> Any:
        loader = mw.shard_dataloader(torch.arange(20.0), mesh, batch_size=8, collate_fn=collate)
        return [int(batch["n"]) for batch in loader]

    one, two = mw.Mesh({"dp": 1}), mw.Mesh({"dp": 2})
    assert mw.simulate(lambda: fn(one), one) == [[8, 8, 4]]
    with pytest.raises(ShardError, match=r"batch\['n'\] is one number"):
        mw.simulate(lambda: fn(two), two)


def test_states_of_other_data() -> None:
    def loader(rows: int = 20, **more: Any) -> Any:
        return mw.shard_dataloader(Counted(rows), mw.Mesh({"dp": 1}), batch_size=4, **{"shuffle": True, **more})

    state = loader().state_dict()
    for other, message in (
        (loader(21), "number of rows"),
        (loader(seed=1), "order"),
        (loader(shuffle=False), "order"),
        (mw.shard_dataloader([torch.ones(2)], mw.Mesh({"dp": 1})), "with batch_size="),
    ):
        with pytest.raises(ShardError, match=message):
            other.load_state_dict(state)
    with pytest.raises(ShardError, match="without batch_size="):
        loader().load_state_dict(other.state_dict())


@pytest.mark.parametrize("what", ["seed", "rows", "values", "stream", "keys"])
def test_ranks_that_differ(what: str) -> None:
    mesh = mw.Mesh({"dp": 2, "tp": 2})

    def fn() -> None:
        other = runtime.RT.rank == 3
        data: Any = Counted(20 - (other and what == "rows"))
        if what == "values":
            data = [torch.tensor(float(i + other)) for i in range(20)]
        if what == "stream":
            data = Iterated(20 - 5 * other)
        if what == "keys":
            data = [{"y" if other else "x": torch.tensor(i)} for i in range(20)]
        for _ in mw.shard_dataloader(
            data, mesh, ROWS, batch_size=6, seed=int(other and what == "seed"), shuffle=what == "seed"
        ):
            pass

    with pytest.raises(DesyncError, match=r"rank 3"):
        mw.simulate(fn, mesh)
