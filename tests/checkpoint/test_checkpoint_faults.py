"""A save that ends at any instant, a full disk, bytes that change: what was announced loads, or an error says why.

``Lossy`` is a disk that knows what would be left of it: what was written and not synced may be there, in part, or not.
"""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.checkpoint import files
from meshwright.errors import CheckpointError
from meshwright.ranks import runtime

MESH = mw.Mesh({"dp": 2})


class Crash(BaseException):
    """The process is gone."""


@dataclass
class Node:
    """A file or a folder, as it is now and as a crash would certainly leave it."""

    data: bytes = b""
    synced: bytes = b""
    entries: dict[str, Node] | None = None
    durable: dict[str, Node] = field(default_factory=dict)


class Lossy(files.Disk):
    """Does what it is told, and keeps account of what is durable.

    Args:
        root: an existing folder.
        fatal: before which operation of rank ``dies`` its process ends; a write is then half done.
    """

    def __init__(self, root: Path, fatal: int = 1 << 30, dies: int = 0) -> None:
        self.base, self.root, self.open = root, Node(entries={}), dict[int, Node]()
        self.fatal, self.dies, self.count, self.dead = fatal, dies, 0, False
        self._adopt(root, self.root)

    def _adopt(self, path: Path, node: Node) -> None:
        assert node.entries is not None
        for child in path.iterdir():
            made = Node(entries={}) if child.is_dir() else Node(child.read_bytes(), child.read_bytes())
            node.entries[child.name] = node.durable[child.name] = made
            if child.is_dir():
                self._adopt(child, made)

    def _node(self, path: Path) -> Node:
        node = self.root
        for part in path.relative_to(self.base).parts:
            assert node.entries is not None
            node = node.entries[part]
        return node

    def _entries(self, path: Path) -> dict[str, Node]:
        found = self._node(path.parent).entries
        assert found is not None
        return found

    def _step(self) -> bool:
        """Whether the process ends here."""
        if runtime.RT.rank != self.dies:
            return False
        if self.dead:
            raise Crash
        self.count += 1
        self.dead = self.count == self.fatal
        return self.dead

    def _act(self) -> None:
        if self._step():
            raise Crash

    def make_folder(self, path: Path) -> None:
        self._act()
        for p in (*reversed(path.relative_to(self.base).parents), path.relative_to(self.base)):
            if p.parts and not (self.base / p).exists():
                self._entries(self.base / p)[p.name] = Node(entries={})
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self._act()
        file = super().create(path)
        self.open[file] = self._entries(path)[path.name] = Node()
        return file

    def write(self, file: int, data: Any) -> None:
        ends, data = self._step(), bytes(data)
        data = data[: len(data) // 2] if ends else data
        super().write(file, data)
        self.open[file].data += data
        if ends:
            raise Crash

    def sync(self, file: int) -> None:
        self._act()
        self.open[file].synced = self.open[file].data

    def sync_folder(self, path: Path) -> None:
        self._act()
        node = self._node(path)
        node.durable = dict(node.entries or {})

    def rename(self, path: Path, to: Path) -> None:
        self._act()
        super().rename(path, to)
        self._entries(to)[to.name] = self._entries(path).pop(path.name)

    def remove(self, path: Path) -> None:
        self._act()
        super().remove(path)
        self._entries(path).pop(path.name, None)

    def after(self, to: Path, how: Callable[[], str]) -> None:
        """What is found after the crash; ``how`` says of each thing that is not durable: "kept", "lost" or "part"."""
        shutil.rmtree(to, ignore_errors=True)
        self._leave(self.root, to, how)

    def _leave(self, node: Node, to: Path, how: Callable[[], str]) -> None:
        if node.entries is None:
            kind = "kept" if node.data == node.synced else how()
            rest = node.data[len(node.synced) :]
            part = rest[: len(rest) // 2] if len(rest) % 2 else b"\0" * len(rest)
            to.write_bytes(node.synced + {"kept": rest, "lost": b"", "part": part}[kind])
            return
        to.mkdir()
        for name in sorted({*node.entries, *node.durable}):
            now, before = node.entries.get(name), node.durable.get(name)
            found = now if now is before or how() == "kept" else before
            if found is not None:
                self._leave(found, to / name, how)


class Quick(files.Disk):
    """Does not wait for the disk."""

    def sync(self, file: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "DISK", Quick())


@contextlib.contextmanager
def disk(made: files.Disk) -> Iterator[None]:
    before, files.DISK = files.DISK, made
    try:
        yield
    finally:
        files.DISK = before


def model_of(value: float, *, sharded: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.arange(p.numel()).view(p.shape) + value + i)
    return mw.shard_module(model, MESH, {"0.weight": {"dp": mw.Shard(0)}}) if sharded else model


def holds(model: nn.Module, value: float) -> bool:
    wanted = model_of(value, sharded=False).state_dict()
    return all(torch.equal(mw.unshard(t), wanted[n]) for n, t in model.state_dict().items())


def crash_at(root: Path, fatal: int, dies: int, hows: list[Callable[[], str]], after: Path) -> bool:
    """Save step 1, then step 2 with a crash; load what is found afterwards.  Whether it came to the crash."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    mw.simulate(lambda: mw.Checkpoints(root).save(1, model=model_of(1)).wait(), MESH)
    lossy, announced = Lossy(root, fatal, dies), [False, False]

    def second() -> None:
        try:
            mw.Checkpoints(root, keep=1).save(2, model=model_of(2)).wait()
            announced[runtime.RT.rank] = True
        except CheckpointError:
            pass

    with disk(lossy), contextlib.suppress(Crash):
        mw.simulate(second, MESH)
    for how in hows:
        lossy.after(after, how)

        def look() -> None:
            model = model_of(-1)
            step = mw.Checkpoints(after).load(model=model)
            assert step in ((2,) if any(announced) else (1, 2)), (fatal, dies)
            assert holds(model, step), (fatal, dies, step)
            mw.Checkpoints(after, keep=1).save(3, model=model_of(3)).wait()
            assert mw.Checkpoints(after).load(model=model) == 3
            assert holds(model, 3)

        mw.simulate(look, MESH)
        assert len([p for p in after.iterdir() if p.is_dir()]) == 1
    return lossy.dead


@pytest.mark.parametrize("dies", [0, 1])
def test_a_crash_at_every_operation_of_a_save(dies: int, tmp_path: Path) -> None:
    rng = random.Random(dies)
    some = lambda: rng.choice(["kept", "lost", "part"])  # noqa: E731
    hows = [lambda: "kept", lambda: "lost", lambda: "part", some]
    fatal = 1
    while crash_at(tmp_path / "disk", fatal, dies, hows, tmp_path / "after"):
        fatal += 1
    assert fatal > (15 if dies == 0 else 4), fatal


@pytest.mark.long
def test_many_crashes(tmp_path: Path) -> None:
    rng = random.Random(3)
    hows = [lambda: rng.choice(["kept", "lost", "part"])] * 30
    for dies in (0, 1):
        fatal = 1
        while crash_at(tmp_path / "disk", fatal, dies, hows, tmp_path / "after"):
            fatal += 1


# ---------------------------------------------------------------------------------------------- a disk that fails


class Failing(Quick):
    """Raises ENOSPC in one kind of operation of one rank."""

    def __init__(self, rank: int, kind: str, at: int) -> None:
        self.rank, self.kind, self.left = rank, kind, at

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "kind") and runtime.RT.rank == self.rank:
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["make_folder", "create", "write", "sync", "sync_folder", "rename", "remove"])
def test_a_disk_that_fails_is_an_error_on_all_ranks(rank: int, kind: str, tmp_path: Path) -> None:
    """And the older checkpoint stays whole.  Old checkpoints that cannot be removed stay."""
    raised = []

    def run(store: mw.Checkpoints) -> None:
        with disk(failing) if runtime.RT.rank == 0 else contextlib.nullcontext():
            try:
                store.save(2, model=model_of(2)).wait()
                raised.append("")
            except CheckpointError as error:
                raised.append(str(error))
        model = model_of(-1)
        step = store.load(model=model)
        assert holds(model, step)
        assert step == 2 or raised[-1]
        store.save(3, model=model_of(3)).wait()
        assert store.steps == [3]

    store = mw.Checkpoints(tmp_path, keep=1)
    for at in range(1, 20):
        shutil.rmtree(tmp_path)
        mw.simulate(lambda: store.save(1, model=model_of(1)).wait(), MESH)
        failing = Failing(rank, kind, at)
        raised.clear()
        mw.simulate(lambda: run(store), MESH)
        if failing.left > 0:
            break
        assert raised[0] == raised[1]
        if raised[0]:
            assert "No space left on device" in raised[0]
            assert (f"on rank {rank}" in raised[0]) or (f"rank {rank}: " in raised[0]) or "manifest.json" in raised[0]
    assert failing.left > 0


# ---------------------------------------------------------------------------------------------- damage


class Damaged:
    """A checkpoint of one process, and how to damage it."""

    def __init__(self, folder: Path) -> None:
        self.store = mw.Checkpoints(folder)
        self.model = model_of(1, sharded=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(2, 5)).sum().backward()
        self.optimizer.step()
        self.store.save(1, model=self.model, optimizer=self.optimizer).wait()
        self.files = sorted(p for p in folder.rglob("*") if p.is_file())
        self.wholes = {p: p.read_bytes() for p in self.files}

    def reported(self, path: Path, data: bytes) -> str:
        """What loading says with other bytes in a file."""
        path.write_bytes(data)
        try:
            with pytest.raises(CheckpointError) as caught:
                self.store.load(model=self.model, optimizer=self.optimizer)
        finally:
            path.write_bytes(self.wholes[path])
        assert path.name in str(caught.value)
        return str(caught.value)


def flips(damaged: Damaged, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        path = rng.choice(damaged.files)
        data = bytearray(damaged.wholes[path])
        kind, at = rng.random(), rng.randrange(len(data))
        if kind < 0.7:
            data[at] ^= 1 << rng.randrange(8)
        elif kind < 0.8:
            del data[at:]
        elif kind < 0.9:
            del data[at]
        else:
            width = rng.choice([1, 8, 4096])
            changed = bytes(data[:at]) + b"\0" * min(width, len(data) - at) + bytes(data[at + width :])
            data = bytearray(changed) if changed != data else data + b"\0"
        damaged.reported(path, bytes(data))


def test_damage_is_reported(tmp_path: Path) -> None:
    damaged = Damaged(tmp_path)
    flips(damaged, 200, 0)
    assert damaged.store.load(model=damaged.model, optimizer=damaged.optimizer) == 1


@pytest.mark.long
def test_ten_thousand_damages_are_reported(tmp_path: Path) -> None:
    flips(Damaged(tmp_path), 10_000, 1)


def test_the_message_names_file_tensor_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK", 16)
    damaged = Damaged(tmp_path)
    path = next(p for p in damaged.files if p.suffix == ".safetensors")
    whole = damaged.wholes[path]
    at = whole.index(damaged.model[0].weight.detach().numpy().tobytes()) + 20
    text = damaged.reported(path, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert f"{path} is damaged: tensor '0.weight', checksum of bytes {at - 4} to {at + 12} of the file" in text
    assert f"it has {len(whole) - 1} bytes, and had {len(whole)}" in damaged.reported(path, whole[:-1])
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors cannot be read: No such file"):
        damaged.store.load(model=damaged.model)


def test_damage_that_one_rank_reads_is_an_error_on_all(tmp_path: Path) -> None:
    def run() -> str:
        store = mw.Checkpoints(tmp_path)
        store.save(1, model=model_of(1)).wait()
        if runtime.RT.rank == 0:
            path = next(tmp_path.rglob("rank-00001.safetensors"))
            path.write_bytes(path.read_bytes()[:-1] + b"!")
        with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is damaged") as caught:
            store.load(model=model_of(2))
        return str(caught.value)

    one, other = mw.simulate(run, MESH)
    assert one == other


def test_a_hostile_file_runs_nothing(tmp_path: Path) -> None:
    """Only JSON and numbers are read: a pickle in the place of each file is damage."""
    import pickle

    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    damaged = Damaged(tmp_path / "store")
    for path in damaged.files:
        damaged.reported(path, pickle.dumps(Hostile()))
    assert not (tmp_path / "ran").exists()
