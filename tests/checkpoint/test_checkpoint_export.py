"""``meshwright checkpoint export``: what others read of it, and what is left of one that failed."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from safetensors.torch import load_file
from typer.testing import CliRunner

import meshwright as mw
from meshwright.checkpoint import arrays, files
from meshwright.cli import app
from meshwright.layout import pieces
from tests.support.shard_networks import Weights

MESH = mw.Mesh({"dp": 2, "tp": 2})


class Net(Weights):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 3))


def export(*words: Any) -> Any:
    return CliRunner().invoke(app, ["checkpoint", "export", *map(str, words)], env={"COLUMNS": "200"})


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    monkeypatch.setattr(pieces, "SMALL", 8)
    monkeypatch.setattr(arrays, "STRETCH", 32)

    def run() -> Any:
        torch.manual_seed(1)
        layouts = {"up.*": {"tp": mw.Shard(0)}, "down.weight": {"tp": mw.Shard(1)}}
        model = mw.shard_module(Net(), MESH, layouts, fsdp="dp")
        optimizer = mw.shard_optimizer(torch.optim.AdamW(model.parameters()))
        store = mw.Checkpoints(tmp_path / "run")
        for step in (1, 2):
            with torch.no_grad():
                model.scale.mul_(2)
            store.save(step, model=model, optimizer=optimizer).wait()
        return {n: mw.unshard(t.detach()).clone() for n, t in model.state_dict().items()}

    found: dict[str, torch.Tensor] = mw.simulate(run, MESH)[0]
    return found


def test_a_folder_and_a_file(saved: dict[str, torch.Tensor], tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    run, right = tmp_path / "run", {n: t for n, t in saved.items() if n != "head.weight"}
    done = export(run, tmp_path / "höhe 1", "--shard-bytes", 300)
    assert (done.exit_code, done.stderr.strip()) == (0, "")
    assert done.stdout.startswith("step 2 is model-00001-of-0000")
    index = json.loads((tmp_path / "höhe 1/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in right.values())
    parts = {
        n: t for f in sorted(set(index["weight_map"].values())) for n, t in load_file(tmp_path / "höhe 1" / f).items()
    }
    assert all((tmp_path / "höhe 1" / f).stat().st_size < 1500 for f in index["weight_map"].values())
    assert export(run, tmp_path / "one.safetensors", "--step", 2).exit_code == 0
    assert export(run, tmp_path / "old", "--step", 1).exit_code == 0
    assert load_file(tmp_path / "old/model.safetensors")["scale"] == 6
    for found in (parts, load_file(tmp_path / "one.safetensors")):
        assert set(found) == set(right)
        assert all(torch.equal(found[n], t) for n, t in right.items())
    wanted = {n: torch.zeros_like(t) for n, t in right.items() if t.numel()}
    dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "höhe 1")), no_dist=True)
    assert all(torch.equal(t, right[n]) for n, t in wanted.items())
    net = Net()
    mw.load_weights(net, tmp_path / "höhe 1")
    assert all(torch.equal(t, saved[n]) for n, t in net.state_dict().items())


def test_what_cannot_be_exported(saved: dict[str, torch.Tensor], tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"

    def fails(code: int, message: str, *words: Any) -> None:
        there = sorted(tmp_path.iterdir())
        done = export(*words)
        assert done.exit_code == code
        assert message in done.stderr
        assert sorted(tmp_path.iterdir()) == there

    fails(2, "no checkpoint in", tmp_path / "none", out)
    fails(2, "no complete checkpoint of step 7 (complete: 2, 1)", run, out, "--step", 7)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/x").write_text("kept")
    fails(2, "there is there already: give a name that is not", run, tmp_path / "there")
    fails(2, "x is there already", run, tmp_path / "there/x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    fails(2, "link is there already", run, tmp_path / "link")
    newest = max(run.iterdir())
    (newest / "manifest.json").rename(tmp_path / "manifest")
    assert export(run, tmp_path / "first").stdout.startswith("step 1 is model.safetensors in ")
    fails(2, "incomplete: step-00000002", newest, out)
    (tmp_path / "manifest").rename(newest / "manifest.json")
    file = newest / "rank-00001.safetensors"
    whole = file.read_bytes()
    at = (
        json.loads(whole[8 : 8 + whole[0] + 256 * whole[1]])["up.weight"]["data_offsets"][0]
        + 8
        + whole[0]
        + 256 * whole[1]
    )
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    fails(1, "rank-00001.safetensors is damaged: tensor 'up.weight'", run, out)
    fails(1, "rank-00001.safetensors is damaged: tensor 'up.weight'", run, tmp_path / "out.safetensors")
    mw.Checkpoints(tmp_path / "empty").save(0).wait()
    fails(1, "was saved without model=: there are no weights in it", tmp_path / "empty", out)
    assert (tmp_path / "there/x").read_text() == "kept"


@pytest.mark.parametrize("kind", ["make_folder", "create", "append", "write", "sync", "sync_folder", "rename"])
def test_a_disk_that_fails_leaves_nothing(
    kind: str, saved: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(files.Disk):
        count = 0

    def fail(self: Any, *arguments: Any) -> Any:
        Full.count += 1
        if Full.count == (1 if kind in ("make_folder", "sync_folder") else 2):
            raise OSError(errno.ENOSPC, "No space left on device")
        return getattr(files.Disk, kind)(self, *arguments)

    setattr(Full, kind, fail)
    monkeypatch.setattr(files, "DISK", Full())
    done = export(tmp_path / "run", tmp_path / "out", "--shard-bytes", 300)
    assert (done.exit_code, Full.count > 0) == (1, True)
    assert "out cannot be written: No space left on device" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_transformers_reads_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2)

    def run() -> Any:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        mw.shard_module(model, MESH, {"*.c_attn.weight": {"tp": mw.Shard(1)}}, fsdp="dp")
        mw.Checkpoints(tmp_path / "run").save(5, model=model).wait()
        return {n: mw.unshard(t.detach()).clone() for n, t in model.state_dict().items()}

    saved = mw.simulate(run, MESH)[0]
    assert (
        "config.json, generation_config.json in "
        in export(tmp_path / "run", tmp_path / "out", "--shard-bytes", 4000).stdout
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is GPT2LMHeadModel
    assert all(torch.equal(t, saved[n]) for n, t in again.state_dict().items())
