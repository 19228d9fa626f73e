"""A save goes on in a thread while training does: what is saved is what was there; nothing is lost without a word."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from meshwright.checkpoint import files
from meshwright.checkpoint.saving import Save
from meshwright.errors import CheckpointError


class Held(files.Disk):
    """Waits before the first byte until it may go on; fails where it is told to."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.fails = False

    def write(self, file: int, data: object) -> None:
        assert self.may_go_on.wait(300)
        if self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(file, data)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    made = Held()
    monkeypatch.setattr(files, "DISK", made)
    return made


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)


def value_of(model: nn.Module) -> set[float]:
    return {x for p in model.parameters() for x in p.detach().flatten().tolist()}


def test_training_goes_on_while_it_is_written(held: Held, tmp_path: Path) -> None:
    model, store = nn.Linear(3, 2), mw.Checkpoints(tmp_path)
    fill(model, 1.0)
    saved = store.save(1, model=model)
    assert not saved.done
    assert "under way" in repr(saved)
    assert store.steps == []
    fill(model, 2.0)
    held.may_go_on.set()
    saved.wait()
    assert saved.done
    assert store.steps == [1]
    assert store.load(model=model) == 1
    assert value_of(model) == {1.0}


def test_the_memory_of_the_copy_is_used_again(tmp_path: Path) -> None:
    """Never while it is still written from; and not for what has another shape by then."""
    model, store = nn.Linear(3, 2), mw.Checkpoints(tmp_path)
    for step in range(1, 4):
        fill(model, float(step))
        last = store.save(step, model=model)
    fill(model, 9.0)
    last.wait()
    copies = {n: t.data_ptr() for n, t in store._staging.items()}
    other = nn.Linear(4, 2)
    fill(other, 4.0)
    store.save(4, model=other).wait()
    assert copies["bias"] == store._staging["bias"].data_ptr()
    for step in range(1, 4):
        assert store.load(model=model, step=step) == step
        assert value_of(model) == {float(step)}
    assert store.load(model=other) == 4
    assert value_of(other) == {4.0}


def test_a_save_that_is_waited_for_makes_no_copy(tmp_path: Path) -> None:
    model, store = nn.Linear(3, 2), mw.Checkpoints(tmp_path / "a")
    model.weight = nn.Parameter(torch.arange(6.0).view(3, 2).t())  # not row by row in memory
    assert store.save(1, model=model, wait=True).done
    assert (store.steps, store._staging) == ([1], {})
    other = nn.Linear(3, 2)
    assert store.load(model=other) == 1
    assert torch.equal(other.weight, model.weight)
    (tmp_path / "b").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"step 1 was not saved: .*cannot be written: File exists"):
        mw.Checkpoints(tmp_path / "b").save(1, model=model, wait=True)


def test_one_save_is_under_way_at_a_time(held: Held, tmp_path: Path) -> None:
    model, store = nn.Linear(3, 2), mw.Checkpoints(tmp_path)
    first = store.save(1, model=model)
    threading.Timer(0.1, held.may_go_on.set).start()
    second = store.save(2, model=model)
    assert first.done
    second.wait()
    held.may_go_on.clear()
    store.save(3, model=model)
    threading.Timer(0.1, held.may_go_on.set).start()
    assert store.load(model=model) == 3  # it waited


def test_the_first_rank_may_end_before_the_others_have_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(post: collective.StoreMailbox, word: str) -> str:
        raise RuntimeError("connection closed by peer")

    model, store = nn.Linear(3, 2), mw.Checkpoints(tmp_path)
    monkeypatch.setattr(collective.StoreMailbox, "announce", gone)
    monkeypatch.setattr(Save, "_commit", lambda save, words: "")
    with pytest.raises(CheckpointError, match="step 1 was not saved: connection closed by peer"):
        store.save(1, model=model).wait()
    monkeypatch.undo()
    monkeypatch.setattr(collective.StoreMailbox, "announce", gone)
    store.save(2, model=model).wait()
    assert store.steps == [2]


def test_a_save_that_failed_is_said_once(held: Held, tmp_path: Path) -> None:
    model, store = nn.Linear(3, 2), mw.Checkpoints(tmp_path)
    held.may_go_on.set()
    store.save(1, model=model).wait()
    held.fails = True
    failed = store.save(2, model=model)
    with pytest.raises(CheckpointError, match=r"step 2 was not saved: rank 0: .*No space left on device; check"):
        failed.wait()
    store.save(3, model=model)
    with pytest.raises(CheckpointError, match="step 3 was not saved"):  # nobody waited for it
        store.save(4, model=model)
    held.fails = False
    assert store.load(model=model) == 1
    store.save(5, model=model).wait()
    assert store.steps == [5, 1]
    assert len(list(tmp_path.iterdir())) == 2
