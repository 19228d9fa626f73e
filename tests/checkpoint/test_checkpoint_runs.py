"""Who saves to a folder, and what is left of a save that failed: two runs in one folder, a disk that is full."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.checkpoint import files, runs
from meshwright.checkpoint.export import chosen
from meshwright.checkpoint.runs import Run
from meshwright.errors import CheckpointError
from meshwright.ranks import runtime
from tests.support.processes import run_processes

DP = mw.Mesh({"dp": 2})
SOMEBODY = "somebody else saved step {} in step-.* there after this run began.*give each a folder of its own"


def filled(value: float, size: int = 3) -> nn.Linear:
    model = nn.Linear(size, size)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model


class Job:
    """A job, as its processes are: what it knows of a folder is not known to another one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, keep: int | None = 2) -> None:
        self.patch, self.known, self.store = monkeypatch, dict[tuple[int, str], Run](), mw.Checkpoints(folder, keep)

    @contextmanager
    def runs(self) -> Iterator[mw.Checkpoints]:
        with self.patch.context() as patched:
            patched.setattr(runs, "_RUNS", self.known)
            yield self.store

    def save(self, step: int, value: float) -> None:
        with self.runs() as store:
            store.save(step, model=filled(value)).wait()

    def load(self, step: int | None = None) -> tuple[int | None, float]:
        model = filled(0.0)
        with self.runs() as store:
            return store.load(model=model, step=step), float(model.bias[0])


def test_two_that_begin_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is told, and the first goes on; neither loses a checkpoint, or goes on from one of the other."""
    a, b = Job(monkeypatch, tmp_path), Job(monkeypatch, tmp_path)
    assert a.load() == b.load() == (None, 0.0)
    a.save(1, 1.0)
    for step in (1, 2):
        with pytest.raises(
            CheckpointError, match=r"it has checkpoints that this run did not load .*: load\(\) one to go on"
        ):
            b.save(step, 2.0)
        a.save(step + 1, 1.0)
    assert a.store.steps == [3, 2]
    assert a.load() == (3, 1.0)
    assert {p.name for p in tmp_path.iterdir()} == {s.path.name for s in runs.saves_in(tmp_path)}


def test_one_that_goes_on_while_the_other_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Job(monkeypatch, tmp_path), Job(monkeypatch, tmp_path)
    a.save(1, 1.0)
    assert b.load() == (1, 1.0)
    a.save(2, 1.0)
    with pytest.raises(CheckpointError, match=SOMEBODY.format(2)):
        b.save(2, 2.0)
    assert a.store.steps == [2, 1]
    assert b.load() == (2, 1.0)  # the other one has ended
    b.save(3, 2.0)
    assert b.store.steps == [3, 2]
    with pytest.raises(CheckpointError, match=SOMEBODY.format(3)):  # it had not
        a.save(3, 1.0)


def test_one_that_saves_while_the_other_is_about_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both found an empty folder; who is complete first has it."""
    a, b, go_on = Job(monkeypatch, tmp_path), Job(monkeypatch, tmp_path), threading.Event()

    class Held(files.Disk):
        def create(self, path: Path) -> int:
            if threading.current_thread() is not threading.main_thread() and path.name.startswith("rank"):
                assert go_on.wait(60)
            return super().create(path)

    with b.runs() as store:
        whole = files.DISK
        monkeypatch.setattr(files, "DISK", Held())
        saved = store.save(1, model=filled(2.0))
        with monkeypatch.context() as other:
            other.setattr("meshwright.checkpoint.saving._UNDER_WAY", {})
            other.setattr(runs, "_RUNS", a.known)
            a.store.save(1, model=filled(1.0), wait=True)
        go_on.set()
        with pytest.raises(CheckpointError, match=r"it has checkpoints that this run did not load|somebody else saved"):
            saved.wait()
    monkeypatch.setattr(files, "DISK", whole)
    assert a.store.steps == [1]
    assert len(list(tmp_path.iterdir())) == 1
    a.save(2, 1.0)
    assert a.load() == (2, 1.0)


def test_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs one after the other, from an older step too: they are one run, and keep as many as one."""
    for job, (step, at) in enumerate([(None, 0), (None, 1), (None, 2), (2, 2), (None, 3)]):
        made = Job(monkeypatch, tmp_path, keep=3)
        assert made.load(step)[0] == (at or None)
        made.save(at + 1, float(job))
    assert made.store.steps == [4, 3, 3]
    assert made.load() == (4, 4.0)
    assert len({runs._run_of(p / "manifest.json") for p in tmp_path.iterdir()}) == 1


def test_on_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def job(mesh: mw.Mesh, at: int) -> None:
        monkeypatch.setattr(runs, "_RUNS", {})

        def run() -> None:
            store, model = mw.Checkpoints(tmp_path, keep=2, mesh=mesh), mw.shard_module(filled(0.0), mesh)
            assert (store.load(model=model) or 0) == at
            for step in (at + 1, at + 2):
                store.save(step, model=model).wait()

        mw.simulate(run, mesh)

    for at, mesh in enumerate([mw.Mesh({"dp": 4}), DP, mw.Mesh({"dp": 1}), mw.Mesh({"dp": 2, "tp": 2})]):
        job(mesh, 2 * at)
    assert mw.Checkpoints(tmp_path).steps == [8, 7]


def test_a_folder_with_checkpoints_of_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is the newest says nothing of whose it is."""
    for name in "ab":
        job = Job(monkeypatch, tmp_path / name)
        for step in (1, 2):
            job.save(step, float(step))
    for path in (tmp_path / "b").iterdir():
        shutil.copytree(path, tmp_path / "a" / path.name)
    (tmp_path / "c").mkdir()
    message = r"has checkpoints of 2 runs \(steps [12, ]+; steps [12, ]+\): which is meant\? Leave those of one there"
    job = Job(monkeypatch, tmp_path / "a")
    uses: list[Any] = [job.load, lambda: job.load(1), lambda: chosen(tmp_path / "a", None)]
    uses.append(lambda: mw.load_weights(filled(0.0), tmp_path / "a"))
    for use in uses:
        with pytest.raises(CheckpointError, match=message):
            use()
    for path in (tmp_path / "b").iterdir():
        shutil.rmtree(tmp_path / "a" / path.name)
    assert job.load() == (2, 2.0)
    for path in (tmp_path / "a").iterdir():  # as an earlier version wrote it
        forget(path / "manifest.json")
    assert job.load() == (2, 2.0)
    job.save(3, 3.0)
    assert job.load() == (3, 3.0)


def forget(path: Path) -> None:
    import re
    import zlib

    rest = re.sub(r'"run": "\w+",\n', "", path.read_text()).partition(",\n")[2][:-2]
    path.write_text(f'{{"crc32": {zlib.crc32(rest.encode())},\n{rest}}}\n')


def _goes_on(folder: str, begin: int) -> list[int]:
    mesh = mw.init_mesh({"dp": 2})
    store, model = mw.Checkpoints(folder, keep=2), mw.shard_module(filled(1.0), mesh)
    assert (store.load(model=model) or 0) == begin
    store.save(begin + 1, model=model)
    store.save(begin + 2, model=model).wait()
    return store.steps


@pytest.mark.processes
def test_processes_that_go_on(tmp_path: Path) -> None:
    assert run_processes(_goes_on, 2, str(tmp_path), 0) == [[2, 1]] * 2
    assert run_processes(_goes_on, 2, str(tmp_path), 2) == [[4, 3]] * 2


# ---------------------------------------------------------------------------------------------- a disk that is full


class Quota(files.Disk):
    """A disk that has so many bytes for a folder."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size

    def write(self, file: int, data: Any) -> None:
        used = sum(p.stat().st_size for p in self.folder.rglob("*") if p.is_file())
        left, data = max(0, self.size - used), bytes(data)
        super().write(file, data[:left])
        if len(data) > left:
            raise OSError(errno.ENOSPC, "No space left on device")


def usage(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@pytest.mark.parametrize("wait", [False, True])
def test_a_save_that_a_full_disk_ended(wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves nothing, on no rank; the next one has the room."""

    def run() -> None:
        store = mw.Checkpoints(tmp_path / "run", keep=1)
        model = mw.shard_module(filled(1.0, 100), DP, {"weight": {"dp": mw.Shard(0)}})
        store.save(1, model=model, wait=wait).wait()
        there, size = usage(tmp_path), sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
        if runtime.RT.rank == 0:
            monkeypatch.setattr(files, "DISK", Quota(tmp_path, size + size // 2))
        for step in (2, 3):
            with pytest.raises(CheckpointError, match=r"No space left on device.*complete before still are"):
                store.save(step, model=model, wait=wait).wait()
            if runtime.RT.rank == 1:
                assert usage(tmp_path) == there
        if runtime.RT.rank == 0:
            monkeypatch.setattr(files, "DISK", Quota(tmp_path, 2 * size + 100))
        store.save(4, model=model, wait=wait).wait()
        assert store.steps == [4]

    mw.simulate(run, DP)


def test_what_a_job_that_was_killed_left_is_no_loss_of_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is removed before the next save, not after it."""
    Job(monkeypatch, tmp_path).save(1, 1.0)
    whole = next(tmp_path.iterdir())
    shutil.copytree(whole, tmp_path / "step-00000002-00002-abcd")
    (tmp_path / "step-00000002-00002-abcd/manifest.json").unlink()
    size = sum(p.stat().st_size for p in whole.iterdir())
    monkeypatch.setattr(files, "DISK", Quota(tmp_path, 2 * size + 100))
    job = Job(monkeypatch, tmp_path, keep=1)
    assert job.load() == (1, 1.0)
    job.save(2, 2.0)
    assert job.load() == (2, 2.0)
    assert len(list(tmp_path.iterdir())) == 1


def _full_on_one(folder: str, victim: int) -> list[Any]:
    """Rank ``victim`` cannot write, twice, in a thread; then it can."""
    mesh = mw.init_mesh({"dp": 2})
    model = mw.shard_module(filled(1.0, 50), mesh, {"weight": {"dp": mw.Shard(0)}})
    store, said = mw.Checkpoints(folder, keep=1), []
    store.save(1, model=model).wait()
    there = usage(Path(folder))
    whole = files.DISK
    if mesh.ranks[victim] == runtime.RT.rank:
        files.DISK = Quota(Path(folder), 0)
    for step in (2, 3):
        try:
            store.save(step, model=model).wait()
        except CheckpointError as error:
            said.append(str(error))
    mw.init_mesh({"dp": 2})  # both have removed what they wrote when they meet again
    said.append(usage(Path(folder)) == there)
    files.DISK = whole
    store.save(4, model=model).wait()
    return [*said, store.steps, len(os.listdir(folder))]


@pytest.mark.processes
@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_of_real_ranks(victim: int, tmp_path: Path) -> None:
    for *said, clean, steps, count in run_processes(_full_on_one, 2, str(tmp_path), victim):
        assert all(f"rank {victim}: " in text and "No space left on device" in text for text in said)
        assert (len(said), clean, steps, count) == (2, True, [4], 1)


class FullAt(files.Disk):
    """A disk that is full from one of its operations on; only removing works."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __getattribute__(self, name: str) -> Any:
        if name in ("make_folder", "create", "write", "sync", "rename", "sync_folder"):
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("shard_bytes", [100, 10**9])
@pytest.mark.parametrize("there", [False, True])
def test_weights_on_a_full_disk(there: bool, shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any operation: nothing of the new ones is left, or all, and what was there is whole."""
    values = lambda model: {float(p.flatten()[0]) for p in model.parameters()}  # noqa: E731
    old, new, read = (nn.ModuleList(filled(value, 4) for _ in range(3)) for value in (1.0, 2.0, 0.0))
    for at in range(100):
        path = tmp_path / str(at)
        monkeypatch.undo()
        if there:
            mw.save_weights(old, path, shard_bytes=shard_bytes)
        before = usage(tmp_path)
        monkeypatch.setattr(files, "DISK", FullAt(at))
        said = ""
        try:
            mw.save_weights(new, path, shard_bytes=shard_bytes)
            break
        except CheckpointError as error:
            said = str(error)
        assert "No space left on device" in said
        after = usage(tmp_path)
        assert not [name for name in after if name.endswith(".tmp")]
        if there or path.exists():
            mw.load_weights(read, path)
            assert values(read) in ({1.0}, {2.0})
        if not path.exists() or values(read) == {1.0}:
            assert after == before
    assert at > 5


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_cannot_be_written_is_found_at_the_start(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(files.Disk):
        def write(self, file: int, data: Any) -> None:
            if runtime.RT.rank == rank:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(file, data)

    def check(folder: Path) -> None:
        mw.Checkpoints(folder).check()

    mw.simulate(lambda: check(tmp_path / "run"), DP)
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file/run", Path("/proc/none")):
        with pytest.raises(
            CheckpointError, match=rf"save to {folder}.* cannot be written: (File exists|Not a directory|No such file)"
        ):
            mw.simulate(lambda folder=folder: check(folder), DP)
    monkeypatch.setattr(files, "DISK", Full())
    with pytest.raises(CheckpointError, match=rf"save to .*check-0000{rank}\.tmp cannot be written: No space left"):
        mw.simulate(lambda: check(tmp_path / "run"), DP)
    assert usage(tmp_path) == {"run", "file"}
