"""Weights in and out of Hugging Face directories: from and to any mesh, in parts, with errors on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from safetensors.torch import load_file, save_file

import meshwright as mw
from meshwright.checkpoint import files
from meshwright.errors import CheckpointError, DesyncError
from meshwright.layout import pieces
from meshwright.ranks import runtime
from tests.support.shard_networks import Weights

ONE = mw.Mesh({"dp": 1})
BOTH = mw.Mesh({"dp": 2, "tp": 2})
ONLY_TP = mw.Mesh({"tp": 3})
TP = {"up.*": {"tp": mw.Shard(0)}, "down.weight": {"tp": mw.Shard(1)}, "embed.weight": {"tp": mw.Shard(0)}}
PLANS: dict[str, tuple[mw.Mesh, dict[str, Any]]] = {
    "one": (ONE, {}),
    "dp-tp": (BOTH, {"placements": TP}),
    "zero3": (BOTH, {"placements": TP, "fsdp": "dp"}),
    "rows": (ONLY_TP, {"placements": {"*": {"tp": mw.Shard(0)}}}),
}


def built(plan: str, seed: int) -> nn.Module:
    mesh, how = PLANS[plan]
    torch.manual_seed(seed)
    model = Weights()
    if plan == "rows":
        how = {"placements": {n: {"tp": mw.Shard(0)} for n, t in model.state_dict().items() if t.ndim}}
    return mw.shard_module(model, mesh, **how)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: mw.unshard(t.detach()).clone() for n, t in model.state_dict().items()}


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are dealt with as large ones."""
    monkeypatch.setattr(pieces, "SMALL", 8)
    monkeypatch.setattr(pieces, "FEW", 64)
    monkeypatch.setattr("meshwright.checkpoint.hugging_face.SMALL", 8)
    monkeypatch.setattr("meshwright.checkpoint.hugging_face.STRETCH", 64)
    monkeypatch.setattr("meshwright.checkpoint.arrays.STRETCH", 64)


@pytest.mark.usefixtures("cut")
def read_into(model: Any, path: Path) -> Any:
    assert mw.load_weights(model, path) == ([], [])
    return model


@pytest.mark.parametrize("source", PLANS)
def test_out_and_in_on_other_meshes(source: str, tmp_path: Path) -> None:
    def out() -> Any:
        model = built(source, 1)
        mw.save_weights(model, tmp_path, shard_bytes=300)
        mw.save_weights(model, tmp_path / "single")
        return whole(model)

    saved = mw.simulate(out, PLANS[source][0])[0]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    read = {n: t for file in sorted(set(index.values())) for n, t in load_file(tmp_path / file).items()}
    assert set(read) == set(index) == set(saved) - {"head.weight"}
    assert len(set(index.values())) > 1
    assert all(torch.equal(t, saved[n]) for n, t in read.items())
    assert all(torch.equal(t, saved[n]) for n, t in load_file(tmp_path / "single" / "model.safetensors").items())
    for target in PLANS:
        for path in (tmp_path, tmp_path / "single" / "model.safetensors"):

            def back(target: str = target, path: Path = path) -> Any:
                return whole(read_into(built(target, 2), path))

            for found in mw.simulate(back, PLANS[target][0]):
                assert all(torch.equal(found[n], saved[n]) for n in saved)


def test_from_checkpoints_and_other_dtypes(tmp_path: Path) -> None:
    def run() -> None:
        model = built("dp-tp", 1)
        mw.Checkpoints(tmp_path).save(1, model=model).wait()
        other = mw.shard_module(Weights().double(), BOTH, TP)
        mw.load_weights(other, tmp_path)
        assert torch.equal(mw.unshard(other.down.weight), mw.unshard(model.down.weight).double())
        with pytest.raises(CheckpointError, match=r"there are no weights at .*none: model\.safetensors, "):
            mw.load_weights(model, tmp_path / "none")

    mw.simulate(run, BOTH)


def test_another_model(tmp_path: Path) -> None:
    tensors = {n: t.clone() for n, t in Weights().state_dict().items() if n != "head.weight"}

    def run(strict: bool = True) -> None:
        model = built("dp-tp", 1)
        before = whole(model)
        try:
            mw.load_weights(model, tmp_path, strict=strict)
        except CheckpointError:
            assert all(torch.equal(t, before[n]) for n, t in whole(model).items())
            raise

    def fails(message: str, **changed: torch.Tensor | None) -> None:
        given = {n: t for n, t in (tensors | changed).items() if t is not None}
        save_file(given, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            mw.simulate(run, BOTH)

    fails(r"lacks 1 .*up\.bias \(close: up\.bia\); the model lacks 1 .*up\.bia .*strict=False leaves both out", **{
        "up.bias": None, "up.bia": torch.zeros(9),
    })  # fmt: skip
    with pytest.warns(
        UserWarning, match=r"strict=False: it lacks 1 .*up\.bias \(close: up\.bia\); the model lacks 1"
    ) as said:
        mw.simulate(lambda: run(strict=False), BOTH)
    assert len(said) == 1
    fails(r"up\.bias is torch\.float32 of shape \(9,\) here, and torch\.float32 of \(8,\) there", **{
        "up.bias": torch.zeros(8),
    })  # fmt: skip
    fails(r"count is torch\.int64 .*, and torch\.float32", count=torch.zeros(5))
    save_file(tensors, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-3])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: "):
        mw.simulate(run, BOTH)


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    """As torch's load_state_dict returns it; files of another model load nothing, and not without a word."""
    save_file({"weight": torch.ones(4, 2)}, tmp_path / "model.safetensors")
    model = nn.Linear(2, 4)
    with pytest.warns(UserWarning, match=r"strict=False: it lacks 1 of the model's tensors: bias$") as said:
        left = mw.load_weights(model, tmp_path, strict=False)
    assert said[0].filename == __file__
    assert (left.missing_keys, left.unexpected_keys) == (["bias"], [])
    assert left == model.load_state_dict({"weight": torch.ones(4, 2)}, strict=False)
    assert model.weight.eq(1).all()
    other = {"layer.weight": torch.ones(4, 2), "layer.bias": torch.ones(4)}
    save_file(other, tmp_path / "model.safetensors")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.warns(UserWarning, match=r"no name fits, so nothing was loaded: it lacks 2 .*weight \(close: layer"):
        left = mw.load_weights(model, tmp_path, strict=False)
    assert [*map(sorted, left)] == [*map(sorted, model.load_state_dict(other, strict=False))]
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_tied_here_and_apart_there(tmp_path: Path) -> None:
    """Both names may be there, with the same values; other values are not left out without a word."""
    tensors = {n: t.clone() for n, t in Weights().state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    for found in mw.simulate(lambda: whole(read_into(built("dp-tp", 2), tmp_path)), BOTH):
        assert all(torch.equal(found[n], t) for n, t in tensors.items())
    tensors["head.weight"][7, 3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"head\.weight is tied to another tensor here, and has values"):
        mw.simulate(lambda: mw.load_weights(built("dp-tp", 2), tmp_path), BOTH)
    mw.load_weights(Weights(), tmp_path, strict=False)


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turned", torch.randn(3, dtype=torch.complex64).conj())


def test_tensors_that_are_conjugated_when_they_are_read(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    first = Conjugated()
    mw.Checkpoints(tmp_path / "own").save(1, model=first).wait()
    dcp.save(first.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    again = read_into(Conjugated(), tmp_path / "own")
    assert torch.equal(again.get_buffer("turned"), first.get_buffer("turned"))
    with pytest.raises(CheckpointError, match=r"its numbers are not those of the tensor: {'conj': True"):
        mw.load_weights(Conjugated(), tmp_path / "dcp")
    dcp.save({"turned": first.get_buffer("turned").resolve_conj()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    again = read_into(Conjugated(), tmp_path / "dcp")
    assert torch.equal(again.get_buffer("turned"), first.get_buffer("turned"))


def test_ranks_with_other_models(tmp_path: Path) -> None:
    def run() -> None:
        model = built("dp-tp", 1)
        if runtime.RT.rank == 2:
            model.register_buffer("more", torch.zeros(2))
        with pytest.raises(DesyncError, match="all ranks must save the same model"):
            mw.save_weights(model, tmp_path / "out")

    mw.simulate(run, BOTH)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("differs", "message"),
    [("strict", "strict=: ranks 0, 2, 3: True; rank 1: False"), ("seed", "the files: ranks 0, 2, 3: digest"),
     ("checkpoint", "the files: ranks 0, 2, 3: step-.*; rank 1: step-"), ("shard_bytes", "")],
)  # fmt: skip
def test_ranks_that_load_and_save_otherwise(differs: str, message: str, tmp_path: Path) -> None:
    for seed in (1, 2):
        if differs == "checkpoint":
            mw.Checkpoints(tmp_path / str(seed)).save(seed, model=built("one", seed)).wait()
        else:
            mw.save_weights(built("one", seed), tmp_path / str(seed))

    def run() -> None:
        model, odd = built("dp-tp", 3), runtime.RT.rank == 1
        if differs == "shard_bytes":
            with pytest.raises(DesyncError, match="all ranks must save the same model"):
                mw.save_weights(model, tmp_path / "out", shard_bytes=50 if odd else 200)
            return
        before = whole(model)
        with pytest.raises(DesyncError, match=f"the ranks load different things: .*different {message}"):
            mw.load_weights(
                model, tmp_path / ("2" if odd and differs != "strict" else "1"), strict=not odd or differs != "strict"
            )
        assert all(torch.equal(before[n], t) for n, t in whole(model).items())

    mw.simulate(run, BOTH)


def test_models_of_transformers(tmp_path: Path) -> None:
    """In from ``save_pretrained``, out to ``from_pretrained``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    torch.manual_seed(0)
    first = GPT2LMHeadModel(config)
    first.save_pretrained(tmp_path / "in")

    def run() -> None:
        torch.manual_seed(1)
        model = GPT2LMHeadModel(config)
        layouts = {"*.c_attn.weight": {"tp": mw.Shard(1)}, "*.c_fc.*": {"tp": mw.Shard(-1)}}
        mw.shard_module(model, BOTH, layouts, fsdp="dp")
        mw.load_weights(model, tmp_path / "in")
        mw.save_weights(model, tmp_path / "out", shard_bytes=4000)

    mw.simulate(run, BOTH)
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(t, first.state_dict()[n]) for n, t in again.state_dict().items())


class Dying(files.Disk):
    """Dies before the nth of what changes names on the disk, and does nothing more."""

    def __init__(self, last: int) -> None:
        self.left = last

    def die(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def create(self, path: Path) -> int:
        self.die()
        return super().create(path)

    def rename(self, path: Path, to: Path) -> None:
        self.die()
        super().rename(path, to)

    def remove(self, path: Path) -> None:
        self.die()
        super().remove(path)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (4, 4), (1, 4), (4, 1), (2, 4)])
def test_weights_that_are_replaced_are_whole_at_any_time(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filled(value: float) -> nn.Module:
        model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(value)
        return model

    def found(path: Path) -> set[float]:
        return set(torch.cat([p.flatten() for p in read_into(filled(0.0), path).parameters()]).tolist())

    size, last, seen = 4 * 4 * 4 * 4, 0, []
    died = True
    while died:
        folder = tmp_path / str(last)
        mw.save_weights(filled(1.0), folder, shard_bytes=size // before)
        with monkeypatch.context() as patched:
            patched.setattr(files, "DISK", Dying(last))
            try:
                mw.save_weights(filled(2.0), folder, shard_bytes=size // after)
                died = False
            except KeyboardInterrupt:
                pass
        seen.append(found(folder))
        mw.save_weights(filled(3.0), folder, shard_bytes=size // after)
        assert found(folder) == {3.0}
        assert len(list(folder.iterdir())) == after + (after > 1)
        last += 1
    assert set(map(frozenset, seen)) == {frozenset([1.0]), frozenset([2.0])}
    assert seen == sorted(seen, key=sum)


def test_an_index_says_which_file_a_tensor_is_in(tmp_path: Path) -> None:
    """Another file may have one of the same name, of older weights."""
    new, old = torch.full((2, 2), 1.0), torch.full((2, 2), 2.0)
    save_file({"weight": new}, tmp_path / "a.safetensors")
    save_file({"bias": torch.zeros(2), "weight": old}, tmp_path / "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "a.safetensors", "bias": "b.safetensors"}}))
    assert torch.equal(read_into(nn.Linear(2, 2), tmp_path).weight, new)
    index.write_text(json.dumps({"weight_map": {"bias": "b.safetensors", "other": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"weight is in .*a.safetensors and in .*b.safetensors: which is meant"):
        mw.load_weights(nn.Linear(2, 2), tmp_path)
    index.write_text(json.dumps({"weight_map": {"weight": "a\0.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"which is not in its folder"):
        mw.load_weights(nn.Linear(2, 2), tmp_path)
    index.write_text(json.dumps({"weight_map": {"weight": "a.safetensors", "bias": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"a\.safetensors lacks bias, which the index says it has"):
        mw.load_weights(nn.Linear(2, 2), tmp_path)


def test_of_one_file_and_an_index_the_one_file_is_read(tmp_path: Path) -> None:
    """As transformers does."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=9, n_positions=4, eos_token_id=1))

    made(1).save_pretrained(tmp_path / "a", max_shard_size=500)
    made(2).save_pretrained(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").rename(tmp_path / "a" / "model.safetensors")
    ours = read_into(made(3), tmp_path / "a").state_dict()
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "a").state_dict()
    assert [n for n, t in theirs.items() if not torch.equal(t, ours[n])] == []


def test_tensors_that_overlap_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"bias": torch.zeros(2), "weight": torch.ones(2, 2)}, path)
    whole = path.read_bytes()
    for was, now in ((b"[0,8]", b"[4,12]"), (b"[8,24]", b"[0,16]"), (b"[0,8]", b"[8,16]")):
        assert was in whole
        path.write_bytes(whole.replace(was, now + b" " * 0))
        length = int.from_bytes(whole[:8], "little") + len(now) - len(was)
        path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
        with pytest.raises(CheckpointError, match=r"(weight|bias) begins at byte \d+, and what is before it ends at"):
            mw.load_weights(nn.Linear(2, 2), path)


def test_elements_that_are_one_in_memory(tmp_path: Path) -> None:
    """They are saved; to be filled they need memory of their own."""
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.arange(3.0).expand(4, 3))
    store = mw.Checkpoints(tmp_path / "a")
    store.save(1, model=model).wait()
    mw.save_weights(model, tmp_path / "b")
    for load in (lambda: store.load(model=model), lambda: mw.load_weights(model, tmp_path / "b")):
        with pytest.raises(CheckpointError, match=r"table cannot be filled here: .*\.contiguous\(\)"):
            load()
    model.table = torch.zeros(4, 3)
    store.load(model=model)
    assert torch.equal(model.table, torch.arange(3.0).expand(4, 3))
