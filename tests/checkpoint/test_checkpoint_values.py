"""What is beside the model: values of any kind come back as they were, each tensor its own; what a call was given."""

from __future__ import annotations

import collections
import secrets
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.checkpoint import files, saving
from meshwright.errors import CheckpointError, DesyncError, ShardError
from meshwright.ranks import runtime
from tests.support.processes import run_processes

MESH = mw.Mesh({"dp": 2})


class Kept:
    """Has a state of any kind, as a scheduler."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["given"]


def through(folder: Path, state: Any) -> Any:
    """A state as it is after it was saved and loaded."""
    mw.Checkpoints(folder).save(0, scheduler=Kept(state)).wait()
    other = Kept()
    assert mw.Checkpoints(folder).load(scheduler=other) == 0
    return other.state


def test_tensors_whose_names_meet(tmp_path: Path) -> None:
    given = {0: torch.tensor(1.0), "0": torch.tensor(2.0), "a": {"b": torch.tensor(3.0)}, "a/b": torch.tensor(4.0)}
    found = through(tmp_path, given)
    assert found == given
    assert [float(t) for t in (found[0], found["0"], found["a"]["b"], found["a/b"])] == [1.0, 2.0, 3.0, 4.0]


def test_two_optimizers_of_a_kind(tmp_path: Path) -> None:
    """Each has rates, and states of the same parameters, of its own."""
    model = nn.Linear(3, 3)
    rates = [torch.tensor(0.1), torch.tensor(0.001)]
    both = [torch.optim.Adam(model.parameters(), lr=lr, betas=(b, b)) for lr, b in zip(rates, (0.9, 0.5), strict=True)]
    for one in both:
        model(torch.randn(2, 3)).sum().backward()
        one.step()
    states = [one.state[model.weight]["exp_avg"].clone() for one in both]
    store = mw.Checkpoints(tmp_path)
    store.save(0, model=model, optimizer=both).wait()
    for one in both:
        one.param_groups[0]["lr"] = torch.tensor(9.0)
        one.state[model.weight]["exp_avg"].zero_()
    store.load(model=model, optimizer=both)
    assert [one.param_groups[0]["lr"] for one in both] == rates
    assert all(torch.equal(one.state[model.weight]["exp_avg"], was) for one, was in zip(both, states, strict=True))
    assert not torch.equal(*states)


def test_a_module_that_is_called_as_a_part_of_checkpoints(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = torch.full((5056,), 7, dtype=torch.uint8)  # as long as the state of a generator

        def get_extra_state(self) -> Any:
            return {"cpu": self.own}

        def set_extra_state(self, state: Any) -> None:
            self.own = state["cpu"]

    model = nn.ModuleDict({"random": Own(), "sum": nn.Linear(1, 1)})
    store = mw.Checkpoints(tmp_path)
    store.save(0, model=model).wait()
    before = torch.random.get_rng_state()
    model["random"].own = torch.zeros(3)
    torch.rand(3)
    store.load(model=model)
    assert set(model["random"].own.tolist()) == {7}
    assert torch.equal(torch.random.get_rng_state(), before)


def test_containers_and_numbers_keep_what_they_are(tmp_path: Path) -> None:
    window = collections.deque([1.0, 2.0], maxlen=2)
    given = [window, collections.deque([1]), numpy.float32(0.1), numpy.int8(-3), numpy.complex64(1 - 2j)]
    found = through(tmp_path, [*given, collections.defaultdict(list, {"a": [1], 5: []})])
    assert found[:-1] == given
    assert [type(a) for a in found[:-1]] == [type(a) for a in given]
    assert (found[0].maxlen, found[1].maxlen) == (2, None)
    assert found[-1]["new"] == []
    with pytest.raises(CheckpointError, match=r"given is a defaultdict of .*lambda"):
        through(tmp_path, collections.defaultdict(lambda: 1))


def test_sets_are_alike_on_all_ranks(tmp_path: Path) -> None:
    """Each process has them in an order of its own: that of words by the seed of hashes, that of these as they came."""

    def run() -> None:
        state = {0, 8} if runtime.RT.rank else {8, 0}
        assert (list(state) == [0, 8]) == bool(runtime.RT.rank)
        mw.Checkpoints(tmp_path, mesh=MESH).save(0, scheduler=Kept(state)).wait()

    mw.simulate(run, MESH)


def test_a_call_that_differs_by_rank(tmp_path: Path) -> None:
    def run() -> None:
        model = mw.shard_module(nn.Linear(2, 2), MESH)
        odd, store = runtime.RT.rank == 1, mw.Checkpoints(tmp_path)
        with pytest.raises(DesyncError, match="different gradients=: rank 0: False; rank 1: True"):
            store.save(1, model=model, gradients=odd)
        with pytest.raises(CheckpointError, match=r"step=-1: a whole number of at least 0 was expected"):
            store.save(-1 if odd else 1, model=model)
        with pytest.raises(CheckpointError, match=r"gradients='no': True or False was expected"):
            store.save(1, model=model, gradients="no")  # type: ignore[arg-type]

    torch.manual_seed(0)
    mw.simulate(run, MESH)
    assert not list(tmp_path.iterdir())


def test_a_loader_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    def run() -> None:
        def of(n: int, generator: Any = None) -> Any:
            data = torch.utils.data.DataLoader([torch.zeros(2)] * n, batch_size=2, shuffle=True, generator=generator)
            return mw.shard_dataloader(data, MESH)

        torch.manual_seed(0)
        model = mw.shard_module(filled(1.0), MESH)
        store = mw.Checkpoints(tmp_path)
        store.save(0, model=model, loader=of(8)).wait()
        with torch.no_grad():
            model.weight.fill_(2.0)
        own = mw.shard_dataloader(torch.utils.data.DataLoader([0]), MESH)
        own.loader.state_dict, own.loader.load_state_dict = dict, print  # type: ignore[attr-defined]
        for other, message in (
            (of(10), "4 batches when its state was taken and has 5"),
            (of(8, torch.Generator()), "has 1 generators and had 0"),
            (own, "saved with a stateless loader, and this loader has a state_dict"),
        ):
            with pytest.raises(ShardError, match=message):
                store.load(model=model, loader=other)
        assert set(mw.unshard(model.weight.detach()).flatten().tolist()) == {2.0}

    mw.simulate(run, MESH)


def test_a_folder_that_was_renamed(tmp_path: Path) -> None:
    store = mw.Checkpoints(tmp_path)
    path = store.save(1, model=filled(1.0), wait=True).path
    path.rename(path.with_name(path.name.replace("0001-", "0002-", 1)))
    with pytest.raises(
        CheckpointError, match=r"step-00000002-.* has what was saved as step 1: it was copied or renamed"
    ):
        store.load(model=filled(0.0))


def test_names_of_parameters_stay_those_of_their_group(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    store = mw.Checkpoints(tmp_path)
    store.save(0, model=model, optimizer=torch.optim.SGD(model.named_parameters())).wait()
    other = torch.optim.SGD([*model.named_parameters()][::-1], lr=9.0)
    store.load(model=model, optimizer=other)
    assert (other.param_groups[0]["param_names"], other.param_groups[0]["lr"]) == (["bias", "weight"], 0.001)


# ---------------------------------------------------------------------------------------------- one save at a time


class Held(files.Disk):
    """Waits before the first byte until it may go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def write(self, file: int, data: Any) -> None:
        assert self.may_go_on.wait(300)
        super().write(file, data)


def filled(value: float) -> nn.Linear:
    model = nn.Linear(300, 300)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def test_an_interrupt_while_the_save_before_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written then is not overwritten by the next one, and both are whole."""
    held, store = Held(), mw.Checkpoints(tmp_path)
    monkeypatch.setattr(files, "DISK", held)
    store.save(1, model=filled(1.0))
    with monkeypatch.context() as interrupted:

        def join(thread: threading.Thread) -> None:
            raise KeyboardInterrupt

        interrupted.setattr(threading.Thread, "join", join)
        with pytest.raises(KeyboardInterrupt):
            store.save(2, model=filled(2.0))
    threading.Timer(0.1, held.may_go_on.set).start()
    store.save(3, model=filled(3.0)).wait()
    model = filled(0.0)
    for step in (1, 3):
        assert store.load(model=model, step=step) == step
        assert set(model.weight.flatten().tolist()) == {float(step)}


def test_several_of_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save of another object waits too: it would take the one under way for one that was interrupted."""
    held = Held()
    monkeypatch.setattr(files, "DISK", held)
    first = mw.Checkpoints(tmp_path, keep=1).save(1, model=filled(1.0))
    threading.Timer(0.1, held.may_go_on.set).start()
    (tmp_path / "link").symlink_to(tmp_path)
    second = mw.Checkpoints(tmp_path / "link", keep=2).save(2, model=filled(2.0))
    assert first.done
    model = filled(0.0)
    assert mw.Checkpoints(tmp_path).load(model=model) == 2
    assert second.done
    assert mw.Checkpoints(tmp_path).steps == [2, 1]


def _no_memory_on_one(folder: str) -> str:
    mesh = mw.init_mesh({"dp": 2})
    torch.manual_seed(0)
    model = mw.shard_module(nn.Linear(8, 8), mesh, {"weight": {"dp": mw.Shard(0)}})

    def staged(value: torch.Tensor, held: Any) -> torch.Tensor:
        raise MemoryError("no memory")

    store, whole = mw.Checkpoints(folder), saving.staged
    if mesh.ranks[1] == runtime.RT.rank:
        saving.staged = staged  # type: ignore[assignment]
    saved = store.save(1, model=model)
    try:
        saved.wait()
    except CheckpointError as error:
        saving.staged = whole
        store.save(2, model=model).wait()
        return f"{error} {store.steps}"
    return "no error"


@pytest.mark.processes
def test_no_memory_for_a_copy_on_one_rank(tmp_path: Path) -> None:
    for said in run_processes(_no_memory_on_one, 2, str(tmp_path)):
        assert "rank 1: what is saved cannot be copied: no memory; save(..., wait=True) needs no copy" in said
        assert said.endswith("[2]")


def _same_names(folder: str) -> list[float]:
    mesh = mw.init_mesh({"dp": 2})
    secrets_of, found = secrets.token_hex, []
    secrets.token_hex = lambda n=None: "abcd" if n == 2 else secrets_of(n)  # type: ignore[assignment]
    for value in (1.0, 2.0):  # the folders of both are called alike
        model = mw.shard_module(filled(value), mesh, {"weight": {"dp": mw.Shard(0)}})
        store = mw.Checkpoints(f"{folder}/{value}")
        saved = store.save(1, model=model)
        saved.wait()
        assert saved.path.name.endswith("abcd")
        assert store.load(model=model) == 1
        found += model.weight.to_local().flatten().unique().tolist()
    return found


@pytest.mark.processes
def test_folders_that_are_called_alike(tmp_path: Path) -> None:
    assert run_processes(_same_names, 2, str(tmp_path)) == [[1.0, 2.0]] * 2
