"""Loads that read what a rank needs in ranges, without an exchange: where that costs few bytes more."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from meshwright.checkpoint import arrays, files, loading
from meshwright.errors import CheckpointError
from meshwright.layout import Spec, pieces
from meshwright.ranks import runtime

from .test_checkpoint import PLANS, assert_same, loaded_on, saved_on

PAIR = mw.Mesh({"dp": 2})
FOUR = mw.Mesh({"dp": 2, "tp": 2})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks and stretches of a few bytes, so that small tensors have many."""
    for module, name, size in (
        (pieces, "SMALL", 8), (pieces, "BLOCK", 16), (pieces, "FEW", 64), (files, "BLOCK", 16), (files, "NEAR", 32),
        (files, "STRETCH", 48), (arrays, "STRETCH", 48),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, size)
    for table in (pieces.overlapping, pieces.bytes_to_read):
        table.cache_clear()
    yield
    for table in (pieces.overlapping, pieces.bytes_to_read):
        table.cache_clear()


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Spec, Spec, Spec]]:
    """One page cache; what was stored, wanted, and read in place of an exchange."""
    found: list[tuple[Spec, Spec, Spec]] = []

    def read_spec(stored: Spec, target: Spec, one_machine: bool = False) -> Spec:
        made = pieces.read_spec(stored, target, one_machine)
        if made != pieces.read_spec(stored, target):
            found.append((stored, target, made))
        return made

    monkeypatch.setattr(collective, "on_one_machine", lambda mesh: True)
    monkeypatch.setattr(loading, "read_spec", read_spec)
    return found


@pytest.mark.parametrize("source", list(PLANS)[::2])
def test_loads_onto_any_mesh_of_one_machine(source: str, tmp_path: Path, small: None, direct: Any) -> None:
    saved = saved_on(source, tmp_path)
    for target in PLANS:
        for found in loaded_on(target, tmp_path):
            assert_same(saved, found)
    assert direct
    assert all(made.layout == target.layout for _, target, made in direct)


class Experts(nn.Module):
    """A tensor whose second dim has long stretches of bytes, and one whose last has short ones."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.long = nn.Parameter(torch.randn(4, 256, 512, generator=rng))
        self.short = nn.Parameter(torch.randn(512, 128, generator=rng))


def save_rows(folder: Path) -> None:
    def run() -> None:
        model = mw.shard_module(Experts(0), PAIR, {"*": {"dp": mw.Shard(0)}})
        mw.Checkpoints(folder).save(1, model=model).wait()

    mw.simulate(run, PAIR)


def load_columns(folder: Path, mesh: mw.Mesh = PAIR) -> list[tuple[int, int]]:
    """What each rank received by collectives of data, and bytes that it read."""

    def run() -> tuple[int, int]:
        model = mw.shard_module(Experts(1), mesh, {"*": {mesh.axes[-1]: mw.Shard(1)}})
        read: list[int] = []
        close = loading.Reader.close

        def closing(self: loading.Reader) -> None:
            read.append(self.bytes_read)
            close(self)

        before = runtime.RT.counts.copy()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loading.Reader, "close", closing)
            mw.Checkpoints(folder).load(model=model)
        want = Experts(0)
        for name, p in model.named_parameters():
            assert torch.equal(mw.unshard(p.detach()), want.get_parameter(name))
        return runtime.RT.counts.since(before).kinds.get("all_to_all", 0), read[0]

    return mw.simulate(run, mesh)


def test_long_stretches_are_read_in_place(tmp_path: Path) -> None:
    """On any machines; short ones are read by rows and exchanged, and on one machine they are read in place, too."""
    save_rows(tmp_path)
    share = [p.nbytes // 2 for p in Experts(0).parameters()]
    headers = 2 << 12
    for sent, read in load_columns(tmp_path):
        assert sent == 1
        assert sum(share) <= read <= pieces.EXTRA * share[0] + share[1] + headers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "on_one_machine", lambda mesh: True)
        for sent, read in load_columns(tmp_path):
            assert sent == 0
            assert read <= pieces.EXTRA_ON_ONE_MACHINE * sum(share) + headers


def test_what_costs_too_much_is_exchanged(tmp_path: Path) -> None:
    """Whole tensors of 4 ranks would be read 4 times."""
    save_rows(tmp_path)
    mesh = mw.Mesh({"tp": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "on_one_machine", lambda mesh: True)
        assert [sent for sent, _ in load_columns(tmp_path, mesh)] == [1] * 4


def test_damage_in_a_range_is_an_error_on_all_ranks(tmp_path: Path, direct: Any) -> None:
    save_rows(tmp_path)
    paths = sorted(tmp_path.rglob("*.safetensors"))
    rng = random.Random(0)
    for turn in range(16):
        path = paths[turn % 2]
        whole = path.read_bytes()
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)

        def run() -> str:
            model = mw.shard_module(Experts(1), PAIR, {"*": {"dp": mw.Shard(1)}})
            with pytest.raises(CheckpointError) as caught:
                mw.Checkpoints(tmp_path).load(model=model)
            return str(caught.value)

        one, other = mw.simulate(run, PAIR)
        assert path.name in one
        assert path.name in other
        path.write_bytes(whole)
    assert direct


def random_box(rng: random.Random, shape: tuple[int, ...]) -> pieces.Box:
    return tuple(sorted((rng.randint(0, n), rng.randint(0, n))) for n in shape)  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(4))
def test_parts_of_arrays_are_what_indices_give(seed: int, small: None) -> None:
    """Of 1 to 4 dims, in few bytes or many at a time, far apart or not."""
    rng = random.Random(seed)
    for _ in range(200):
        shape = tuple(rng.choice([1, 2, 3, 5, 9, 17]) for _ in range(rng.randint(1, 4)))
        array = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        data, box = array.numpy().tobytes(), random_box(rng, shape)
        read = 0

        def fetch(at: int, into: memoryview, data: bytes = data) -> None:
            nonlocal read
            into[:] = data[at : at + len(into)]
            read += len(into)

        part = array[tuple(slice(a, b) for a, b in box)]
        into = torch.full(part.shape, -1.0)
        arrays.read_box(shape, torch.float32, box, into, fetch)
        assert torch.equal(into, part), (shape, box)
        lengths = [b - a for a, b in box]
        if pieces.far_apart(shape, lengths, 4):
            assert read == part.numel() * 4
