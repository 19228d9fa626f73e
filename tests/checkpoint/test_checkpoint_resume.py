"""A run that is stopped and goes on elsewhere has the losses of the run that never stopped.

In float64, to 1e-12; on the same mesh bitwise.  With dropout, clipping, a schedule, AdamW and a shuffling loader.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from meshwright.errors import CheckpointError, DesyncError, ShardError
from meshwright.ranks import runtime
from tests.support import processes

STEPS = 3  # of each leg
TP = {"up.*": {"tp": mw.Shard(0)}, "down.weight": {"tp": mw.Shard(1)}, "embed.weight": {"tp": mw.Shard(0)}}
ONE = mw.Mesh({"dp": 1})
DP = mw.Mesh({"dp": 4})
BOTH = mw.Mesh({"dp": 2, "tp": 2})
ONLY_TP = mw.Mesh({"tp": 3})
# name to mesh, whether captured, and options of shard_module or compile_step
LEGS: dict[str, tuple[mw.Mesh, bool, dict[str, Any]]] = {
    "dp": (DP, False, {}),
    "dp-tp": (BOTH, False, {"layouts": TP, "shard_states": "dp"}),
    "tp": (ONLY_TP, False, {"layouts": TP}),
    "one": (ONE, False, {}),
    "zero3": (DP, False, {"fsdp": "dp"}),
    "captured dp": (DP, True, {}),
    "captured dp-tp": (BOTH, True, {"layouts": TP, "shard_states": "dp"}),
    "captured zero3": (DP, True, {"fsdp": "dp"}),
    "captured one": (ONE, True, {}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        return self.head(h + self.drop(self.down(torch.relu(self.up(h)))))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


class Run:
    """A run on a mesh, from step 0 or from a checkpoint."""

    def __init__(self, leg: str, folder: Path, **more: Any) -> None:
        self.mesh, self.captured, how = LEGS[leg]
        how, torch_seed = dict(how), 3
        torch.manual_seed(torch_seed)
        model = Block().double()
        tokens = torch.randint(0, 12, (22, 5), generator=torch.Generator().manual_seed(1))
        data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
        batch = {a: mw.Shard(0) for a in self.mesh.axes if a == "dp"}
        self.loader = mw.shard_dataloader(DataLoader(data, batch_size=4, shuffle=True), self.mesh, batch)
        self.step: Any = None
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        if self.captured:
            example = (tokens[:4, :-1], tokens[:4, 1:])
            self.step = mw.compile_step(
                model, loss_of, self.optimizer, example, mesh=self.mesh, batch=batch, clip_grad_norm=0.5, **how, **more
            )
        else:
            states = how.pop("shard_states", None)
            mw.shard_module(model, self.mesh, how.pop("layouts", None), **how)
            mw.shard_optimizer(self.optimizer, shard_states=states)
        self.model = model
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.store = mw.Checkpoints(folder, keep=2)
        self.parts = {"model": model, "optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader}
        if self.captured:
            self.parts["program"] = self.step
        self.done = self.store.load(**self.parts) or 0

    def batches(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def train(self, steps: int) -> list[float]:
        losses = []
        for _, batch in zip(range(steps), self.batches(), strict=False):
            if self.captured:
                loss = self.step(batch)
            else:
                loss = loss_of(self.model, batch)
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it comes before the first update of a merge
                self.scheduler.step()
            losses.append(float(loss))
        self.done += steps
        self.store.save(self.done, **self.parts).wait()
        return losses


def trained(leg: str, folder: Path, steps: int) -> list[float]:
    return mw.simulate(lambda: Run(leg, folder).train(steps), LEGS[leg][0])[0]


def never_stopped(folder: Path, steps: int) -> list[float]:
    return trained("dp", folder / "whole", steps)


def test_on_the_same_mesh_bitwise(tmp_path: Path) -> None:
    """In the middle of a pass, and from pass to pass."""
    whole = never_stopped(tmp_path, 14)
    assert [x for n in (3, 5, 6) for x in trained("dp", tmp_path / "run", n)] == whole


@pytest.mark.parametrize(
    "legs",
    [
        ["dp", "dp-tp", "tp", "one", "zero3"],
        ["dp", "captured dp-tp", "tp", "captured one", "zero3"],
        pytest.param(
            ["captured dp", "dp-tp", "captured zero3", "one", "captured dp-tp", "zero3", "captured one"],
            marks=pytest.mark.long,
        ),
    ],
    ids=["eager", "captured", "more"],
)
def test_from_mesh_to_mesh(legs: list[str], tmp_path: Path) -> None:
    whole = never_stopped(tmp_path, STEPS * len(legs))
    losses = [x for leg in legs for x in trained(leg, tmp_path / "run", STEPS)]
    off = [abs(a - b) / abs(b) for a, b in zip(losses, whole, strict=True)]
    assert max(off) <= 1e-12, off


def _process(leg: str, folder: str) -> list[float]:
    mesh = LEGS[leg][0]
    mw.init_mesh(dict(zip(mesh.axes, mesh.sizes, strict=True)))
    return Run(leg, Path(folder)).train(STEPS)


@pytest.mark.processes
def test_real_processes(tmp_path: Path) -> None:
    """Saved by 4 simulated ranks, then by 3 real ones, then by 4 real ones, then read by one."""
    legs = ["dp", "tp", "captured dp-tp"]
    whole = never_stopped(tmp_path, STEPS * 4)
    losses = trained("dp", tmp_path / "run", STEPS)
    for leg in legs[1:]:
        losses += processes.run_processes(_process, LEGS[leg][0].size, leg, str(tmp_path / "run"), timeout=200)[0]
    losses += trained("one", tmp_path / "run", STEPS)
    off = [abs(a - b) / abs(b) for a, b in zip(losses, whole, strict=True)]
    assert max(off) <= 1e-12, off


def test_in_the_middle_of_a_merge(tmp_path: Path) -> None:
    """Sums of gradients that are Partial, saved on one mesh, loaded on another."""
    merge = {"passes": ["gradient-merge:k_steps=3"]}

    def leg(name: str, folder: Path, steps: int) -> list[float]:
        return mw.simulate(lambda: Run(name, folder, **merge).train(steps), LEGS[name][0])[0]

    whole = leg("captured dp", tmp_path / "whole", 13)
    names = ["captured dp", "captured dp-tp", "captured zero3"]
    losses = [x for name, n in zip(names, (2, 5, 6), strict=True) for x in leg(name, tmp_path / "run", n)]
    off = [abs(a - b) / abs(b) for a, b in zip(losses, whole, strict=True)]
    assert max(off) <= 1e-12, off
    mid = tmp_path / "mid"
    leg("captured one", mid, 1)
    with pytest.raises(CheckpointError, match="after micro-step 1 of a merge, and this step updates every 1"):
        trained("captured one", mid, 1)
    with pytest.raises(CheckpointError, match=r"after micro-step 1 of a merge, with sums of gradients: give program="):
        trained("one", mid, 1)


@pytest.mark.thin(6)
@pytest.mark.parametrize("late", [True, False], ids=["no_sync", "each"])
@pytest.mark.parametrize("legs", [["dp", "dp-tp", "zero3"], ["zero3", "tp", "dp-tp"], ["one", "zero3", "one"]], ids=str)
def test_in_the_middle_of_an_accumulation(legs: list[str], late: bool, tmp_path: Path) -> None:
    """Eager code that updates every third batch, saved after one or two of them: ``.grad`` goes with it."""

    def leg(name: str, folder: Path, steps: int) -> list[float]:
        def run() -> list[float]:
            one, losses = Run(name, folder), []
            for i, batch in zip(range(one.done, one.done + steps), one.batches(), strict=False):
                with mw.no_sync(one.model) if late and i % 3 < 2 else contextlib.nullcontext():
                    loss = loss_of(one.model, batch)
                    loss.backward()
                if i % 3 == 2:
                    nn.utils.clip_grad_norm_(one.model.parameters(), 0.5)
                    one.optimizer.step()
                    one.optimizer.zero_grad()
                losses.append(float(loss))
            one.store.save(one.done + steps, **one.parts, gradients=True).wait()
            return losses

        return mw.simulate(run, LEGS[name][0])[0]

    whole = leg("dp", tmp_path / "whole", 13)
    losses = [x for name, n in zip(legs, (2, 5, 6), strict=True) for x in leg(name, tmp_path / "run", n)]
    off = [abs(a - b) / abs(b) for a, b in zip(losses, whole, strict=True)]
    assert max(off) <= 1e-12, off


def test_gradients_that_were_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    store = mw.Checkpoints(tmp_path)
    model[0](torch.ones(1, 2)).sum().backward()
    right = model[0].weight.grad
    store.save(1, model=model).wait()
    model[0].weight.grad = right + 1
    assert store.load(model=model) == 1
    assert model[0].weight.grad is not None  # what was not saved is left as it is
    store.save(2, model=model, gradients=True).wait()
    model(torch.ones(1, 2)).sum().backward()
    assert store.load(model=model) == 2
    assert torch.equal(model[0].weight.grad, right + 1)
    assert model[1].weight.grad is None

    def run() -> None:
        split = mw.shard_module(nn.Linear(2, 2), DP)
        split(mw.shard_tensor(torch.ones(4, 2), DP, [mw.Replicate()])).sum().backward()
        if runtime.RT.rank == 1:
            split.weight.grad = None
        mw.Checkpoints(tmp_path / "other").save(1, model=split, gradients=True)

    with pytest.raises(DesyncError, match=r"save: the ranks disagree: .*the gradient of weight"):
        mw.simulate(run, DP)


# ---------------------------------------------------------------------------------------------- loaders


def seen_after(make: Any, before: int, more: int) -> tuple[list[Any], list[Any]]:
    """What a loader gives after ``before`` batches, and what one gives that goes on from its state there."""

    def run(resume: Any) -> Any:
        torch.manual_seed(0)
        loader = mw.shard_dataloader(make(), ONE)
        if resume is not None:
            loader.load_state_dict(resume[0])
            torch.random.set_rng_state(resume[1])
        batches = (batch for _ in range(9) for batch in loader)
        for _ in range(0 if resume else before):
            next(batches)
        state = loader.state_dict(), torch.random.get_rng_state()
        return state, [next(batches)[0].tolist() for _ in range(more)], torch.rand(2).tolist()

    state, *expected = run(None)
    _, *found = run(state)
    return expected, found


DATA = TensorDataset(torch.arange(10))


@pytest.mark.parametrize("before", [0, 1, 3, 4, 6])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(DATA, batch_size=3),
        lambda: DataLoader(DATA, batch_size=3, shuffle=True),
        lambda: DataLoader(DATA, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(4)),
        lambda: DataLoader(
            DATA, batch_size=3, sampler=torch.utils.data.RandomSampler(DATA, generator=torch.Generator().manual_seed(4))
        ),
        lambda: [(torch.arange(3) + i,) for i in range(4)],
    ],
    ids=["in order", "shuffled", "own generator", "sampler's generator", "list"],
)
def test_loaders_go_on(make: Any, before: int) -> None:
    expected, found = seen_after(make, before, 6)
    assert expected == found


def test_loaders_with_workers_go_on() -> None:
    expected, found = seen_after(lambda: DataLoader(DATA, batch_size=3, shuffle=True, num_workers=1), 2, 4)
    assert expected == found


def test_epochs_go_on() -> None:
    def make() -> Any:
        sampler = torch.utils.data.DistributedSampler(DATA, num_replicas=1, rank=0, shuffle=True)
        return mw.shard_dataloader(DataLoader(DATA, batch_size=3, sampler=sampler), ONE)

    loader = make()
    loader.set_epoch(5)
    batches = iter(loader)
    next(batches)
    state, expected = loader.state_dict(), next(batches)[0].tolist()
    other = make()
    other.load_state_dict(state)
    assert next(iter(other))[0].tolist() == expected


def test_loaders_that_cannot_go_on() -> None:
    import random

    with pytest.raises(ShardError, match="the place in a generator cannot be saved: it can be iterated only once"):
        mw.shard_dataloader((x for x in [torch.zeros(2)]), ONE).state_dict()
    loader = mw.shard_dataloader(DataLoader(DATA, batch_size=3), ONE)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    with pytest.raises(ShardError, match="had 4 batches when its state was taken and has 2"):
        mw.shard_dataloader(DataLoader(DATA, batch_size=5), ONE).load_state_dict(state)
    shorter = mw.shard_dataloader(DataLoader(TensorDataset(torch.arange(10) + 1), batch_size=3), ONE)
    shorter.load_state_dict(state)
    with pytest.raises(ShardError, match="batch 0 of this pass is another one than when the state was taken"):
        next(iter(shorter))

    class Drawn(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(random.sample(range(10), 10))

        def __len__(self) -> int:
            return 10

    random.seed(0)
    loader = mw.shard_dataloader(DataLoader(DATA, batch_size=3, sampler=Drawn()), ONE)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ShardError, match="order is drawn from neither torch's default generator"):
        next(iter(loader))


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("before", [0, 2])
def test_a_loader_with_other_rows_and_as_many_batches(before: int, local: bool) -> None:
    """A row less is an order drawn anew, or rows that are never seen: whatever the number of batches."""

    def made(rows: int, sampler: Any = None) -> Any:
        data = TensorDataset(torch.arange(rows))
        drawn = None if sampler is None else torch.utils.data.SubsetRandomSampler(range(sampler))
        loader = DataLoader(data, batch_size=8, shuffle=sampler is None, sampler=drawn)
        return mw.shard_dataloader(loader, ONE, local=local)

    loader = made(40)
    batches = iter(loader)
    for _ in range(before):
        next(batches)
    state = loader.state_dict()
    assert len(made(39)) == len(loader)
    with pytest.raises(
        ShardError, match="its dataset had 40 rows when the state was taken and has 39: the data must be"
    ):
        made(39).load_state_dict(state)
    made(40).load_state_dict(state)
    made(39).load_state_dict({k: v for k, v in state.items() if k != "rows"})  # which earlier versions did not write
    if not local:  # then a sampler draws the part of a rank, and meshes may differ
        with pytest.raises(ShardError, match="its sampler had 40 rows when the state was taken and has 39"):
            made(40, 39).load_state_dict(state)


def test_a_loader_with_a_state_of_its_own() -> None:
    class Stateful(list):  # type: ignore[type-arg]
        def state_dict(self) -> dict[str, int]:
            return {"at": 7}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    loader = mw.shard_dataloader(Stateful([torch.zeros(2)]), ONE)
    assert loader.state_dict() == {"own": {"at": 7}}
    loader.load_state_dict(loader.state_dict())
    assert loader.loader.at == 7
    with pytest.raises(ShardError, match=r"saved with a stateful loader, and this loader has no state_dict"):
        mw.shard_dataloader([torch.zeros(2)], ONE).load_state_dict({"own": {}})
