"""Weights from ``torch.distributed.checkpoint``: in parts, onto any mesh, and nothing in its pickles is run."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import meshwright as mw
from meshwright.checkpoint.dcp import unpickled
from meshwright.errors import CheckpointError
from tests.support.shard_networks import Weights

ONE, BOTH, THREE = mw.Mesh({"dp": 1}), mw.Mesh({"dp": 2, "tp": 2}), mw.Mesh({"tp": 3})
TP: dict[str, Any] = {"up.*": {"tp": mw.Shard(0)}, "down.weight": {"tp": mw.Shard(1)}}


class Net(Weights):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("turned", torch.randn(5, 3, 2).permute(2, 0, 1))


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return Net().state_dict()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def loaded(mesh: mw.Mesh, path: Path, **how: Any) -> dict[str, torch.Tensor]:
    def run() -> dict[str, torch.Tensor]:
        torch.manual_seed(7)
        model = mw.shard_module(Net(), mesh, TP if "tp" in mesh.axes else {}, **how)
        mw.load_weights(model, path)
        return {n: mw.unshard(t.detach()).clone() for n, t in model.state_dict().items()}

    return mw.simulate(run, mesh)[-1]


@pytest.mark.parametrize("prefix", ["", "model"])
def test_onto_any_mesh(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.layout.pieces.SMALL", 8)
    monkeypatch.setattr("meshwright.layout.pieces.FEW", 64)
    monkeypatch.setattr("meshwright.checkpoint.arrays.STRETCH", 32)
    right = state(1)
    saved = {"model": right, "optim": {"lr": 0.1, "embed.weight": torch.ones(3)}, "step": 3} if prefix else right
    dcp.save(saved, checkpoint_id=tmp_path)
    for mesh, how in ((ONE, {}), (BOTH, {}), (BOTH, {"fsdp": "dp"}), (THREE, {})):
        found = loaded(mesh, tmp_path, **how)
        assert all(torch.equal(found[n], t) for n, t in right.items())


def written(folder: Path, tensors: dict[str, torch.Tensor], cuts: dict[str, list[slice]], sure: bool = True) -> None:
    """As several ranks write it: each tensor in chunks of rows, or of columns, in a file of its own."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    about: dict[str, Any] = {"lr": BytesStorageMetadata()}
    where: dict[MetadataIndex, Any] = {}
    for n, t in tensors.items():
        chunks = []
        for i, cut in enumerate(cuts.get(n, [slice(None)])):
            part, dim = (t, 0) if not t.ndim else (t[cut], 0) if cut.step is None else (t[:, cut], 1)
            offset = torch.Size(cut.start or 0 if d == dim else 0 for d in range(t.ndim))
            chunks.append(ChunkStorageMetadata(offset, part.shape))
            file = folder / f"__{i}_0.distcp"
            with file.open("ab") as opened:
                begin = opened.tell()
                torch.save(part.clone(memory_format=torch.preserve_format), opened)
                if sure or i:
                    where[MetadataIndex(n, offset, i)] = _StorageInfo(file.name, begin, opened.tell() - begin)
        about[n] = TensorStorageMetadata(TensorProperties.create_from_tensor(t), t.shape, chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(about, storage_data=where)))


CUTS = {"up.weight": [slice(0, 2), slice(2, 7), slice(7, 9)], "embed.weight": [slice(0, 4, 1), slice(4, 6, 1)],
        "turned": [slice(0, 1), slice(1, 2)]}  # fmt: skip


def test_chunks_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.layout.pieces.SMALL", 8)
    right = state(2)
    written(tmp_path / "it", right, CUTS)
    for mesh in (ONE, BOTH, THREE):
        found = loaded(mesh, tmp_path / "it")
        assert all(torch.equal(found[n], t) for n, t in right.items())
    written(tmp_path / "it", right, CUTS, sure=False)
    with pytest.raises(CheckpointError, match=r"it is damaged: the chunks of '.*' do not make up \["):
        loaded(BOTH, tmp_path / "it")


def test_each_rank_reads_what_it_needs(tmp_path: Path) -> None:
    """A quarter of the numbers, and samples of the files, by which ranks find out whether they have the same."""
    model = nn.Linear(1000, 1000, bias=False)
    written(tmp_path, model.state_dict(), {"weight": [slice(0, 700), slice(700, 1000)]})
    read = [0] * 4
    plain = os.preadv

    def run() -> None:
        def counted(file: int, views: Any, at: int) -> int:
            n = plain(file, views, at)
            read[mw.ranks.runtime.RT.rank] += n
            return n

        monkey.setattr(os, "preadv", counted)
        mw.load_weights(mw.shard_module(nn.Linear(1000, 1000, bias=False), BOTH, {"*": {"tp": mw.Shard(1)}}), tmp_path)

    with pytest.MonkeyPatch.context() as monkey:
        mw.simulate(run, BOTH)
    assert max(read) < 1.05 * 1_000_000 + 2 * 64 * 4096


def fails(message: str, path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        loaded(BOTH, path)


def test_another_model(tmp_path: Path) -> None:
    path, right = tmp_path / "it", state(1)
    written(path, {**{n: t for n, t in right.items() if n != "up.bias"}, "up.bia": torch.zeros(9)}, {})
    fails(r"lacks 1 .*up\.bias \(close: up\.bia\); the model lacks 1 .*up\.bia ", path)
    written(path, right | {"up.bias": torch.zeros(8)}, {})
    fails(r"up\.bias is torch\.float32 of shape \(9,\) here, and torch\.float32 of \(8,\) there", path)
    written(path, right | {"count": torch.zeros(5)}, {})
    fails(r"count is torch\.int64 .*, and torch\.float32", path)
    written(path, {f"{p}.{n}": t for p in ("model", "average") for n, t in right.items()}, {})
    fails(r"has the model several times, as 'average\.', 'model\.'", path)
    written(path, right | {"up.bias": torch.zeros(9, dtype=torch.float64)}, {})
    assert loaded(BOTH, path)["up.bias"].sum() == 0


class Hostile:
    """What its bytes ask for when they are unpickled in the usual way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["builtins.eval", "os.system", "torch.load", "builtins.getattr", "torch.Tensor.numpy"])
def test_other_names_are_refused(name: str) -> None:
    module, _, word = name.partition(".")
    with pytest.raises(CheckpointError, match=rf"x cannot be read: it names {name}, which no such file has"):
        unpickled(f"c{module}\n{word}\n(S'1'\ntR.".encode(), "x")


def test_a_hostile_file_runs_nothing(tmp_path: Path) -> None:
    path, ran = tmp_path / "it", tmp_path / "ran"
    message = r"cannot be read: it names (pathlib|builtins|_io)\.\S+, which no such file has: it was not run"
    written(path, state(1), {})
    (path / ".metadata").write_bytes(pickle.dumps(Hostile(ran)))
    fails(message, path)
    meta = Metadata({"w": Hostile(ran)}, planner_data=Hostile(ran))  # type: ignore[dict-item]
    (path / ".metadata").write_bytes(pickle.dumps(meta))
    fails(message, path)
    written(path, state(1), {})
    data = (path / "__0_0.distcp").read_bytes()
    with zipfile.ZipFile(path / "bad", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Hostile(ran)))
    bad = (path / "bad").read_bytes()
    (path / "__0_0.distcp").write_bytes(bad + bytes(len(data)))
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    about = pickle.loads((path / ".metadata").read_bytes())
    about.storage_data = {k: _StorageInfo("__0_0.distcp", 0, len(bad)) for k in about.storage_data}
    (path / ".metadata").write_bytes(pickle.dumps(about))
    fails(message, path)
    for outside in ("../it/__0_0.distcp", "/etc/passwd"):
        about.storage_data = {k: _StorageInfo(outside, 0, len(bad)) for k in about.storage_data}
        (path / ".metadata").write_bytes(pickle.dumps(about))
        fails("which is not in its folder", path)
    assert not ran.exists()


def test_changed_bytes_are_an_error_or_harmless(tmp_path: Path) -> None:
    """There are no checksums of parts, so numbers may change; whatever else does is an error, and runs nothing."""
    written(tmp_path, {"weight": torch.randn(3, 2), "bias": torch.randn(3)}, {"weight": [slice(0, 1), slice(1, 3)]})
    files = {p: p.read_bytes() for p in tmp_path.iterdir()}
    rng, failed = random.Random(0), 0
    for _ in range(250):
        path = rng.choice(sorted(files))
        data = bytearray(files[path])
        data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)
        try:
            mw.load_weights(nn.Linear(2, 3), tmp_path)
        except CheckpointError:
            failed += 1
        path.write_bytes(files[path])
    assert failed > 60
