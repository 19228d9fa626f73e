"""Ranks that train on different batches: an error at that very step, which names the batches."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import meshwright as mw
from meshwright.errors import DesyncError
from meshwright.ranks import runtime

from ..support.processes import run_processes

DP, TP, BOTH = mw.Mesh({"dp": 2}), mw.Mesh({"tp": 2}), mw.Mesh({"dp": 2, "tp": 2})
SPLIT = {"0.weight": {"tp": mw.Shard(0)}, "0.bias": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}}
PLANS: dict[str, tuple[mw.Mesh, dict[str, Any], dict[str, Any]]] = {
    "dp": (DP, {}, {}),
    "zero1": (DP, {}, {"shard_states": "dp"}),
    "zero3": (DP, {"fsdp": "dp"}, {}),
    "host": (DP, {"fsdp": "dp", "offload": "cpu"}, {}),
    "replicated": (TP, {}, {}),  # no gradient is reduced
    "tp": (TP, {"placements": SPLIT}, {}),
    "both": (BOTH, {"placements": SPLIT}, {}),
}
DATA = torch.arange(80.0).view(20, 4) / 40 - 1
ROWS = {"dp": mw.Shard(0)}
Heard = list[tuple[int, int, str]]  # rank, updates, error


def model_of(mesh: mw.Mesh, **how: Any) -> nn.Module:
    torch.manual_seed(0)
    return mw.shard_module(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), mesh, **how)


def rows_of(mesh: mw.Mesh) -> dict[str, Any]:
    return {a: mw.Shard(0) for a in mesh.axes if a == "dp"}


def loader_of(mesh: mw.Mesh, rows: int = 4) -> Any:
    return mw.shard_dataloader(DataLoader(TensorDataset(DATA), batch_size=rows), mesh, rows_of(mesh))


def run(plan: str, loop: Callable[[mw.Mesh, nn.Module, Any], Iterator[None]]) -> Heard:
    """Train; ``loop`` yields after each backward.  What each rank hears."""
    mesh, how, states = PLANS[plan]
    heard: Heard = []

    def rank() -> None:
        model = model_of(mesh, **how)
        opt = mw.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), **states)
        updates = 0
        try:
            for _ in loop(mesh, model, loader_of(mesh)):
                opt.step()
                opt.zero_grad()
                updates += 1
        except DesyncError as error:
            heard.append((runtime.RT.rank, updates, str(error)))
            raise

    with contextlib.suppress(DesyncError):
        mw.simulate(rank, mesh)
    return heard


def last() -> bool:
    """Whether this is the last rank of the job."""
    return bool(runtime.RT.rank == runtime.RT.world - 1)


def backward(model: nn.Module, x: Any) -> None:
    model(x).square().mean().backward()


def skips(mesh: mw.Mesh, model: nn.Module, loader: Any) -> Iterator[None]:
    for i, (x,) in enumerate(loader):
        if i == 2 and last():
            continue
        backward(model, x)
        yield


def skips_after_the_forward(mesh: mw.Mesh, model: nn.Module, loader: Any) -> Iterator[None]:
    for i, (x,) in enumerate(loader):
        loss = model(x).square().mean()
        if i == 2 and last():
            continue
        loss.backward()
        yield


def takes_one_alone(mesh: mw.Mesh, model: nn.Module, loader: Any) -> Iterator[None]:
    batches = iter(loader)
    for i, (x,) in enumerate(batches):
        if i == 1 and last():
            next(batches)
        backward(model, x)
        yield


def accumulates(mesh: mw.Mesh, model: nn.Module, loader: Any) -> Iterator[None]:
    for i, (x,) in enumerate(loader_of(mesh, 2)):
        if i == 5 and last():
            continue
        if i % 2 == 0:
            with mw.no_sync(model):
                backward(model, x)
        else:
            backward(model, x)
            yield


def skips_an_evaluation(mesh: mw.Mesh, model: nn.Module, loader: Any) -> Iterator[None]:
    other = loader_of(mesh, 5)
    for i, (x,) in enumerate(loader):
        backward(model, x)
        yield
        if i == 1:
            for j, (y,) in enumerate(other):
                if j == 2 and last():
                    break
                with torch.no_grad():
                    model(y)


def goes_on(mesh: mw.Mesh, model: nn.Module, loader: Any) -> Iterator[None]:
    """From a saved place, and one rank skips there."""
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    resumed = loader_of(mesh)
    resumed.load_state_dict(state)
    for i, (x,) in enumerate(resumed):
        if i == 1 and last():
            continue
        backward(model, x)
        yield


def zips(mesh: mw.Mesh, model: nn.Module, loader: Any) -> Iterator[None]:
    """Beside a list that is shorter on one rank, in two epochs."""
    for _ in range(2):
        for (x,), _ in zip(loader, range(3 - last()), strict=False):
            backward(model, x)
            yield


WRONG = {
    skips: ("batch 2 of a DataLoader, its number 3", "batch 3 of a DataLoader, its number 4", 2),
    skips_after_the_forward: ("batch 2 of a DataLoader, its number 3", "batch 3 of a DataLoader, its number 4", 2),
    takes_one_alone: ("batch 1 of a DataLoader, its number 2", "batch 2 of a DataLoader, its number 3", 1),
    accumulates: ("batch 5 of a DataLoader, its number 6", "batch 7 of a DataLoader, its number 8", 2),
    skips_an_evaluation: ("batch 2 of a DataLoader, its number 7", "batch 2 of a DataLoader, its number 6", 2),
    goes_on: ("batch 2 of a DataLoader, its number 3", "batch 3 of a DataLoader, its number 4", 1),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loop", WRONG, ids=lambda loop: loop.__name__)
def test_a_batch_that_one_rank_skips_is_an_error_at_that_step(loop: Any, plan: str) -> None:
    heard = run(plan, loop)
    assert sorted(r for r, *_ in heard) == list(PLANS[plan][0].ranks)
    here, there, updates = WRONG[loop]
    for _, done, text in heard:
        assert done == updates
        # Ranks may meet in other collectives first: those of the forward, or of another epoch.
        if not re.search("different collectives|disagree in one collective|deadlock", text):
            assert f"{here}; rank" in text
            assert f": {there}. Did one rank skip a batch" in text


def again(mesh: mw.Mesh, model: nn.Module, loader: Any) -> Iterator[None]:
    """One backward more on one rank."""
    for i, (x,) in enumerate(loader):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        if i == 1 and last():
            loss.backward()
        yield


@pytest.mark.parametrize("plan", ["dp", "both"])
def test_a_backward_more_is_an_error(plan: str) -> None:
    heard = run(plan, again)
    size = PLANS[plan][0].size
    assert sorted((r, done) for r, done, _ in heard) == [(r, 1 + (r < size - 1)) for r in range(size)]
    assert plan == "both" or "batch 2 of a DataLoader, its number 3; rank" in heard[0][2], heard


def breaks(mesh: mw.Mesh, model: nn.Module, loader: Any) -> Iterator[None]:
    for _ in range(2):
        for i, (x,) in enumerate(loader):
            if i == 3 and last():
                break
            backward(model, x)
            yield


@pytest.mark.parametrize("loop", [breaks, zips])
@pytest.mark.parametrize("plan", ["dp", "both"])
def test_a_rank_that_begins_another_pass_is_an_error(loop: Any, plan: str) -> None:
    heard = run(plan, loop)
    assert heard
    assert "shard_dataloader, batch 0" in heard[0][2], heard[0][2]


def parts(mesh: mw.Mesh, local: bool) -> Iterator[Any]:
    """Parts of a DistributedSampler: by a loader of ours, or without one."""
    sampler = DistributedSampler(DATA, 2, runtime.RT.rank, shuffle=False)  # type: ignore[arg-type]
    loader = DataLoader(TensorDataset(DATA), batch_size=2, sampler=sampler)
    if local:
        yield from mw.shard_dataloader(loader, mesh, ROWS, local=True)
    else:
        yield from (([mw.from_local(x, mesh, ROWS, check=False)]) for (x,) in loader)


@pytest.mark.parametrize(
    ("local", "words"),
    [
        (True, "shard_dataloader, batch 3"),
        (False, "different numbers of parts: rank 0: 3 calls of from_local; rank 1: 4"),
    ],
)
def test_parts_of_each_rank(local: bool, words: str) -> None:
    def skips_one(mesh: mw.Mesh, model: nn.Module, loader: Any) -> Iterator[None]:
        yield from skips(mesh, model, parts(mesh, local))

    heard = run("dp", skips_one)
    assert [done for _, done, _ in heard] == [2, 2]
    assert all(words in text for *_, text in heard), heard


CAPTURED: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero": {"fsdp": "dp"},
    "fused": {"passes": ["data-parallel-optimization"]},
    "merged": {"passes": ["gradient-merge:k_steps=2"]},
    "pipeline": {
        "passes": ["pipeline:micro_batches=2"],
        "stages": {"pp": {"0*": 0, "1*": 1}},
        "mesh": mw.Mesh({"pp": 2}),
    },
}


@pytest.mark.parametrize("how", CAPTURED)
def test_captured_steps(how: str) -> None:
    said = dict(CAPTURED[how])
    mesh = said.pop("mesh", DP)
    heard: Heard = []

    def rank() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 2)))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = lambda m, x: m(x).square().mean()  # noqa: E731
        step = mw.compile_step(model, loss, opt, DATA[:4], mesh=mesh, batch=rows_of(mesh) or None, **said)
        done = 0
        try:
            for i, (x,) in enumerate(loader_of(mesh)):
                if i == 2 and last():
                    continue
                step(x)
                done += 1
        except DesyncError as error:
            heard.append((runtime.RT.rank, done, str(error)))
            raise

    with pytest.raises(DesyncError):
        mw.simulate(rank, mesh)
    merged = how == "merged"
    assert [done for _, done, _ in heard] == [3 if merged else 2] * 2
    for *_, text in heard:
        assert f"batch {2 + merged} of a DataLoader, its number {3 + merged}; rank 1: batch {3 + merged}" in text


@pytest.mark.parametrize("plan", ["dp", "tp"])
def test_what_is_right(plan: str) -> None:
    """Threads that load ahead, batches that all ranks skip, and a decision that they share."""

    def right(mesh: mw.Mesh, model: nn.Module, loader: Any) -> Iterator[None]:
        for i, (x,) in enumerate(loader):
            skip = mw.from_local(torch.tensor(i == 2 and last()), mesh, {a: mw.Partial("any") for a in mesh.axes})
            if bool(skip):
                continue
            backward(model, x)
            yield
        batches = iter(loader)
        next(batches)
        ahead: list[Any] = []
        thread = threading.Thread(target=lambda: ahead.extend(islice(batches, 2 + last())))
        thread.start()
        thread.join()
        for (x,) in ahead[:2]:
            backward(model, x)
            yield

    assert run(plan, right) == []


def test_once_told_ranks_go_on_when_they_are_in_step() -> None:
    def later(mesh: mw.Mesh, model: nn.Module, loader: Any) -> Iterator[None]:
        batches = enumerate(loader)
        for i, (x,) in batches:
            if i == 1 and last():
                continue
            if i - last() == 1:
                with pytest.raises(DesyncError, match="Did one rank skip"):
                    backward(model, x)
                model.zero_grad()
                if not last():
                    next(batches)
                continue
            backward(model, x)
            yield

    assert run("dp", later) == []


def _processes() -> str:
    mesh = mw.init_mesh({"dp": 2})
    model = model_of(mesh)
    opt = mw.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    done = 0
    try:
        for _ in skips(mesh, model, loader_of(mesh)):
            opt.step()
            opt.zero_grad()
            done += 1
    except DesyncError as error:
        return f"after {done}: {error}"
    return "nothing"


@pytest.mark.processes
def test_real_processes() -> None:
    for text in run_processes(_processes, 2):
        assert text.startswith("after 2: the ranks add up gradients of different batches: rank 0: batch 2"), text
