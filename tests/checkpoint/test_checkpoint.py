"""Checkpoints: saved and loaded on meshes of any kind, bitwise; what is wrong is said on every rank."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.checkpoint import arrays, files, saving
from meshwright.errors import CheckpointError, DesyncError
from meshwright.layout import pieces
from meshwright.ranks import runtime

ONE = mw.Mesh({"dp": 1})


class Net(nn.Module):
    """Split and whole parameters, a tied one, a frozen one, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.down.bias.requires_grad_(False)
        self.register_buffer("table", torch.randn(3, 5))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(self.up(self.embed(x)).relu())))


TP = {"up.*": {"tp": mw.Shard(0)}, "down.weight": {"tp": mw.Shard(1)}, "embed.weight": {"tp": mw.Shard(0)}}
DP = mw.Mesh({"dp": 3})
BOTH = mw.Mesh({"dp": 2, "tp": 2})
ONLY_TP = mw.Mesh({"tp": 3})
# name to mesh, arguments of shard_module, of shard_optimizer
PLANS: dict[str, tuple[mw.Mesh, dict[str, Any], dict[str, Any]]] = {
    "one": (ONE, {}, {}),
    "dp": (DP, {}, {}),
    "zero1": (DP, {}, {"shard_states": "dp"}),
    "zero3": (DP, {"fsdp": "dp"}, {}),
    "dp-tp": (BOTH, {"placements": TP}, {"shard_states": "dp"}),
    "tp": (ONLY_TP, {"placements": TP}, {}),
}


def built(plan: str, seed: int = 0, kind: Any = torch.optim.AdamW, model: Callable[[], nn.Module] = Net) -> Any:
    """A model and its optimizer, laid out."""
    mesh, how, states = PLANS[plan]
    torch.manual_seed(seed)
    made = mw.shard_module(model(), mesh, **how)
    params = [p for p in made.parameters() if p.requires_grad]
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "lr": 0.02}]
    return made, mw.shard_optimizer(kind(groups, lr=0.01), **states)


def stepped(model: nn.Module, optimizer: Any, mesh: mw.Mesh) -> None:
    x = mw.shard_tensor(torch.arange(12).remainder(11), mesh, {a: mw.Shard(0) for a in mesh.axes if a == "dp"})
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values_of(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """All that training has, whole."""
    names = {id(p): n for n, p in model.named_parameters()}
    made = {n: mw.unshard(t.detach()).clone() for n, t in model.state_dict().items()}
    for p, entry in optimizer.state.items():
        made |= {f"{names[id(p)]}/{k}": mw.unshard(v.detach()).clone() for k, v in entry.items()}
    for i, group in enumerate(optimizer.param_groups):
        made |= {f"{i}/{k}": torch.tensor(group[k]) for k in ("lr", "weight_decay")}
    made["random"] = torch.random.get_rng_state()
    return made


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(one) == set(other)
    assert [n for n in one if not torch.equal(one[n], other[n])] == []


def saved_on(plan: str, folder: Path, **more: Any) -> dict[str, torch.Tensor]:
    """Train a little and save; what was saved."""

    def run() -> dict[str, torch.Tensor]:
        model, optimizer = built(plan)
        for _ in range(2):
            stepped(model, optimizer, PLANS[plan][0])
        mw.Checkpoints(folder).save(2, model=model, optimizer=optimizer, **more).wait()
        return values_of(model, optimizer)

    return mw.simulate(run, PLANS[plan][0])[0]


def loaded_on(plan: str, folder: Path, before: int = 0) -> list[dict[str, torch.Tensor]]:
    """Load into other values; what is there then, of all ranks."""

    def run() -> dict[str, torch.Tensor]:
        model, optimizer = built(plan, seed=7)
        for _ in range(before):
            stepped(model, optimizer, PLANS[plan][0])
        assert mw.Checkpoints(folder).load(model=model, optimizer=optimizer) == 2
        found = values_of(model, optimizer)
        stepped(model, optimizer, PLANS[plan][0])  # it can go on
        return found

    return mw.simulate(run, PLANS[plan][0])


@pytest.mark.thin(2)
@pytest.mark.parametrize("source", PLANS)
def test_loads_onto_any_mesh(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SMALL", 8)  # so that small tensors too are cut among ranks that hold the same
    monkeypatch.setattr(files, "BLOCK", 16)
    monkeypatch.setattr(files, "STRETCH", 48)
    monkeypatch.setattr(arrays, "STRETCH", 48)
    monkeypatch.setattr(files, "NEAR", 32)
    monkeypatch.setattr(pieces, "FEW", 64)
    pieces.overlapping.cache_clear()
    saved = saved_on(source, tmp_path)
    for i, target in enumerate(PLANS):
        for found in loaded_on(target, tmp_path, before=i % 2):
            assert_same(saved, found)
    pieces.overlapping.cache_clear()


def test_a_file_of_each_rank_holds_its_own_parts_once(tmp_path: Path) -> None:
    """Read by the library whose format it is; and nothing is there twice."""
    saved = saved_on("dp-tp", tmp_path)
    (folder,) = tmp_path.iterdir()
    count = {name: torch.zeros(t.shape) for name, t in saved.items()}
    for file in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as opened:
            offsets = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                part, own = opened.get_tensor(name), name.removeprefix("optimizer/")
                if own not in saved:
                    continue
                start = offsets[name]["saved_offsets"]
                box = tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))
                assert torch.equal(saved[own][box], part)
                count[own][box] += 1
    tied = {"head.weight", "random"}
    assert all((count[n] == 1).all() for n in count if n not in tied and not n[0].isdigit())
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["aliases"] == {"head.weight": "embed.weight"}
    assert "scratch" not in manifest["tensors"]


def test_torchs_reader_of_safetensors_reads_it(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    saved = saved_on("dp-tp", tmp_path)
    (folder,) = tmp_path.iterdir()
    wanted = {n: torch.zeros_like(t) for n, t in saved.items() if n in ("embed.weight", "up.weight", "table")}
    dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert_same(wanted, {n: saved[n] for n in wanted})


def test_keeps_the_last_ones(tmp_path: Path) -> None:
    def run() -> None:
        model, optimizer = built("dp-tp")
        store = mw.Checkpoints(tmp_path / "deep" / "er", keep=2)
        for step in (1, 2, 9, 3):  # 3: after going back
            store.save(step, model=model, optimizer=optimizer).wait()
        assert store.steps == [3, 9]
        assert store.load(model=model) == 3
        assert store.load(model=model, step=9) == 9
        store.save(3, model=model).wait()
        assert store.steps == [3, 3]
        assert store.load(model=model) == 3
        with pytest.raises(CheckpointError, match="saved without optimizer="):
            store.load(model=model, optimizer=optimizer)
        with pytest.raises(CheckpointError, match="no checkpoint of step 9; complete: 3, 3"):
            store.load(model=model, step=9)

    mw.simulate(run, BOTH)


def test_schedulers_random_numbers_and_states_of_modules(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen, "at": torch.tensor([1.5])}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]
            assert torch.equal(state["at"], torch.tensor([1.5]))

    def parts() -> Any:
        model, optimizer = built("dp", model=lambda: nn.Sequential(Counting(4, 4), nn.Linear(4, 4)))
        milestones = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 3])
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return model, optimizer, [milestones, plateau]

    def run() -> Any:
        store = mw.Checkpoints(tmp_path)
        model, optimizer, schedulers = parts()
        model[0].seen = 5
        for scheduler in schedulers:
            optimizer.step()
            scheduler.step(0.25) if scheduler is schedulers[1] else scheduler.step()
        store.save(0, model=model, optimizer=optimizer, scheduler=schedulers).wait()
        drawn = torch.rand(3)
        rates = [s.state_dict() for s in schedulers], [g["lr"] for g in optimizer.param_groups]

        model, optimizer, schedulers = parts()
        assert store.load(model=model, optimizer=optimizer, scheduler=schedulers) == 0
        assert torch.equal(torch.rand(3), drawn)
        assert model[0].seen == 5
        assert ([s.state_dict() for s in schedulers], [g["lr"] for g in optimizer.param_groups]) == rates
        with pytest.raises(CheckpointError, match="has 2 of scheduler=, and 1 were given"):
            store.load(model=model, scheduler=schedulers[0])
        with pytest.raises(CheckpointError, match=r"was a \S+MultiStepLR when it was saved, and is a \S+Plateau"):
            store.load(model=model, scheduler=schedulers[::-1])

    mw.simulate(run, DP)


def test_generators_of_python_and_numpy(tmp_path: Path) -> None:
    """They are put back where all ranks had the same; otherwise they are left as they are."""
    import random

    import numpy

    def seeded(seed: int) -> None:
        random.seed(seed)
        numpy.random.seed(seed)
        random.gauss(0, 1)
        numpy.random.randn(1)  # half of a pair is kept for the next one

    def drawn() -> list[float]:
        return [random.gauss(0, 1), random.random(), float(numpy.random.randn()), float(numpy.random.rand())]

    before = random.getstate(), numpy.random.get_state()
    model, store = nn.Linear(2, 2), mw.Checkpoints(tmp_path / "one")
    seeded(3)
    store.save(1, model=model).wait()
    expected = drawn()
    seeded(4)
    store.load(model=model)
    assert drawn() == expected

    def split() -> None:
        torch.manual_seed(0)
        mw.Checkpoints(tmp_path / "two", mesh=two).save(1, model=nn.Linear(2, 2)).wait()

    two, real, monkey = mw.Mesh({"ranks": 2}), saving.host_generators, pytest.MonkeyPatch()
    monkey.setattr(saving, "host_generators", lambda: real() | {"rank": runtime.RT.rank})
    mw.simulate(split, two)
    monkey.undo()
    seeded(5)
    expected = drawn()
    seeded(5)
    assert mw.Checkpoints(tmp_path / "two").load(model=model) == 1
    assert drawn() == expected
    random.setstate(before[0])
    numpy.random.set_state(before[1])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adamax])
def test_other_optimizers(kind: Any, tmp_path: Path) -> None:
    def run(plan: str, *, load: bool) -> Any:
        model, optimizer = built(plan, seed=int(load), kind=kind)
        for group in optimizer.param_groups:
            group.update(momentum=0.9)
        if load:
            mw.Checkpoints(tmp_path).load(model=model, optimizer=optimizer)
        else:
            stepped(model, optimizer, PLANS[plan][0])
            mw.Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer).wait()
        stepped(model, optimizer, PLANS[plan][0])
        return values_of(model, optimizer)

    first = mw.simulate(lambda: run("zero1", load=False), DP)[0]
    assert_same(first, mw.simulate(lambda: run("zero1", load=True), DP)[0])
    mw.simulate(lambda: run("tp", load=True), ONLY_TP)


def test_plain_models_of_one_process(tmp_path: Path) -> None:
    """Without a mesh, complex numbers and small dtypes too."""
    model = nn.ParameterDict({
        "c": nn.Parameter(torch.randn(3, 2, dtype=torch.complex128)),
        "z": nn.Parameter(torch.tensor(1 + 2j)),
        "b": nn.Parameter(torch.randn(5).bfloat16()),
        "e": nn.Parameter(torch.zeros(0, 3)),
        "f": nn.Parameter(torch.tensor([True, False]), requires_grad=False),
        "t": nn.Parameter(torch.randn(4, 3).t()),
    })  # fmt: skip
    before = {n: p.detach().clone() for n, p in model.items()}
    mw.Checkpoints(tmp_path).save(0, model=model).wait()
    with torch.no_grad():
        for p in model.values():
            p.zero_()
    version = model["t"]._version
    assert mw.Checkpoints(tmp_path).load(model=model) == 0
    assert_same(before, {n: p.detach() for n, p in model.items()})
    assert model["t"]._version > version
    assert model["t"].stride() == (1, 3)


# ---------------------------------------------------------------------------------------------- what is wrong


def test_there_is_nothing_to_load(tmp_path: Path) -> None:
    store = mw.Checkpoints(tmp_path / "none")
    model = nn.Linear(2, 2)
    assert store.load(model=model) is None
    (tmp_path / "none" / "step-00000007-00001-abcd").mkdir(parents=True)
    (tmp_path / "none" / "step-00000007-00001-abcd" / "rank-00000.safetensors").touch()
    with pytest.warns(UserWarning, match=r"no complete .* step-00000007-00001-abcd \(1 data file and no manifest.json"):
        assert store.load(model=model) is None
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7; .* incomplete: step-00000007-00001-abcd"):
        store.load(model=model, step=7)
    store.save(8, model=model).wait()
    assert store.steps == [8]
    assert len(list(store.folder.iterdir())) == 1  # what the other one left is gone


MISTAKES: list[tuple[str, str]] = [
    ("misnamed", r"lacks 1 of the model's tensors: upp\.weight \(close: up\.weight\); the model lacks 1 .*up\.weight"),
    ("shape", r"down\.weight is torch\.float32 of shape \(6, 10\) here, and was torch\.float32 of shape \(6, 9\)"),
    ("dtype", r"table is torch\.float64 .* and was torch\.float32"),
    ("class", r"optimizer= was a torch\.optim\.adamw\.AdamW when it was saved, and is a torch\.optim\.sgd\.SGD"),
    ("groups", r"had 2 parameter groups, and has 1"),
    ("other groups", r"group 0 of the optimizer lacks up\.weight, which it had"),
    ("untied", r"head\.weight has values of its own here, and was tied to embed\.weight"),
    ("meta", r"on the meta device"),
]


@pytest.mark.parametrize(("what", "message"), MISTAKES)
def test_another_model(what: str, message: str, tmp_path: Path) -> None:
    saved_on("dp", tmp_path)

    def run() -> None:
        torch.manual_seed(1)
        with torch.device("meta" if what == "meta" else "cpu"):
            model = Net()
        if what == "misnamed":
            model.upp = nn.Linear(6, 9)
            model.upp.bias, model.up = None, nn.Linear(6, 9)
            model.up.weight = None
        elif what == "shape":
            model.down = nn.Linear(10, 6)
        elif what == "dtype":
            model.double()
        elif what == "untied":
            model.head.weight = nn.Parameter(torch.zeros(11, 6))
        model = model if what == "meta" else mw.shard_module(model, DP)
        params = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        if what == "groups":
            groups = [{"params": params}]
        elif what == "other groups":
            groups = [{"params": params[:1]}, {"params": params[1:]}]
        optimizer = (torch.optim.SGD if what == "class" else torch.optim.AdamW)(groups, lr=0.1)
        before = None if what == "meta" else {n: mw.unshard(t).clone() for n, t in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=message):
            mw.Checkpoints(tmp_path, mesh=DP).load(model=model, optimizer=optimizer)
        if before is not None:
            assert_same(before, {n: mw.unshard(t) for n, t in model.state_dict().items()})

    mw.simulate(run, DP)


def test_wrong_arguments(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    store = mw.Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="keep=0: at least 1"):
        mw.Checkpoints(tmp_path, keep=0)
    with pytest.raises(CheckpointError, match="folder cannot be an int"):
        mw.Checkpoints(3)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="step=-1"):
        store.save(-1, model=model)
    with pytest.raises(CheckpointError, match="model= cannot be a OrderedDict"):
        store.save(0, model=model.state_dict())
    with pytest.raises(CheckpointError, match="optimizer= needs model="):
        store.save(0, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckpointError, match="updates a parameter of shape"):
        store.save(0, model=model, optimizer=torch.optim.SGD(nn.Linear(3, 3).parameters()))
    with pytest.raises(CheckpointError, match=r"loader= cannot be a list_iterator, .*see mw\.shard_dataloader"):
        store.save(0, model=model, loader=iter([1]))
    with pytest.raises(CheckpointError, match="program= cannot be a Linear"):
        store.save(0, program=model)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
    scheduler.mine = model  # type: ignore[attr-defined]
    with pytest.raises(
        CheckpointError, match=r"other/scheduler/0/mine is a torch\.nn.*Linear, which a checkpoint cann"
    ):
        store.save(0, model=model, scheduler=scheduler)
    with pytest.raises(CheckpointError, match=r"weight is torch\.float8_e4m3fnuz, which a checkpoint cannot hold"):
        store.save(0, model=nn.Linear(2, 2).to(torch.float8_e4m3fnuz))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ("step", "different step: ranks 0, 2, 3: 1; rank 1: 2"),
        ("random", "digest of other/random/cpu: .*seed all ranks alike"),
        ("buffer", "digest of table"),
        ("frozen", "different optimizer: rank.*; rank 1: "),
        ("extra", "save the same step"),
        ("unsaveable", "save.*: .*which a checkpoint cannot hold"),
        ("replica", r"hold different values of up\.bias: rank 1: .*; rank 3: "),
    ],
)
def test_ranks_that_differ(differs: str, message: str, tmp_path: Path) -> None:
    def run() -> None:
        model, optimizer = built("dp-tp")
        odd = runtime.RT.rank == 1
        if odd and differs == "random":
            torch.manual_seed(5)
        elif odd and differs == "buffer":
            model.table[0, 0] += 1
        elif runtime.RT.rank == 3 and differs == "replica":
            with torch.no_grad():
                model.up.bias.to_local()[0] += 1
        elif odd and differs == "frozen":
            optimizer.param_groups[0]["lr"] = 7.0
        elif odd and differs == "extra":
            model.register_buffer("more", torch.zeros(1))
        elif odd and differs == "unsaveable":
            optimizer.param_groups[0]["mine"] = model
        step = 2 if odd and differs == "step" else 1
        with pytest.raises((CheckpointError, DesyncError), match=message):
            mw.Checkpoints(tmp_path).save(step, model=model, optimizer=optimizer)

    mw.simulate(run, BOTH)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("saved", [False, True])
def test_ranks_that_load_different_things(saved: bool, tmp_path: Path) -> None:
    def run(differs: str, save: bool = False) -> None:
        model, optimizer = built("dp", kind=torch.optim.SGD)  # which has no states: its numbers alone
        odd, store = runtime.RT.rank == 1, mw.Checkpoints(tmp_path)
        parts: dict[str, Any] = {
            "model": model,
            "optimizer": [optimizer],
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
            "loader": mw.shard_dataloader([torch.zeros(3)], DP),
        }
        if save:
            store.save(1, **parts)
            return
        if odd:
            parts[differs] = 2 if differs == "step" else None
        with pytest.raises(DesyncError, match=f"the ranks load different things: .*different {differs}=: rank"):
            store.load(**parts)
        assert optimizer.param_groups[1]["lr"] == 0.02

    if saved:
        mw.simulate(lambda: run("", save=True), DP)
    for differs in ("optimizer", "scheduler", "loader", "step"):
        mw.simulate(lambda differs=differs: run(differs), DP)


def test_tied_tensors_by_either_name(tmp_path: Path) -> None:
    """The order in which modules are registered does not matter."""

    class Pair(nn.Module):
        def __init__(self, names: list[str]) -> None:
            super().__init__()
            for name in names:
                setattr(self, name, nn.Linear(3, 3, bias=False))
            self.b.weight = self.a.weight

    def made(names: list[str], value: float) -> Any:
        model = Pair(names)
        with torch.no_grad():
            model.a.weight.fill_(value)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        model.a.weight.sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(["a", "b"], 5.0)
    mw.Checkpoints(tmp_path).save(0, model=model, optimizer=optimizer).wait()
    other, others = made(["b", "a"], 7.0)
    others.state[other.a.weight]["momentum_buffer"].zero_()
    mw.Checkpoints(tmp_path).load(model=other, optimizer=others)
    assert other.b.weight is other.a.weight
    assert torch.equal(other.a.weight, model.a.weight)
    assert torch.equal(others.state[other.a.weight]["momentum_buffer"], torch.ones(3, 3))


def test_numbers_of_numpy_and_other_values(tmp_path: Path) -> None:
    import collections

    import numpy

    class Kept:
        state: Any = None

        def state_dict(self) -> Any:
            return {"given": self.state}

        def load_state_dict(self, state: Any) -> None:
            self.state = state["given"]

    values = [
        float("inf"), -0.0, 1e-320, 2**70, "é\n", b"\x00\xff", (1, [2, {3, 4}]), {"$tensor": 1, 5: (None,)}, 1 - 2j,
        collections.Counter("aab"), collections.OrderedDict(x=1), torch.float16, {}, (), True, collections.deque([1]),
    ]  # fmt: skip
    one, model = Kept(), nn.Linear(1, 1)
    one.state = [*values, numpy.float32(0.5), numpy.int64(7), numpy.bool_(True)]
    mw.Checkpoints(tmp_path).save(0, model=model, scheduler=one).wait()
    other = Kept()
    mw.Checkpoints(tmp_path).load(model=model, scheduler=other)
    assert other.state == [*values, 0.5, 7, True]
    assert [type(a) for a in other.state[: len(values)]] == [type(a) for a in values]


def test_a_manifest_of_another_version_or_damaged(tmp_path: Path) -> None:
    import zlib

    model = nn.Linear(2, 2)
    store = mw.Checkpoints(tmp_path)
    store.save(0, model=model).wait()
    path = next(tmp_path.rglob("manifest.json"))
    whole = path.read_text()
    body = whole.partition(",\n")[2][:-2].replace('"version": 2', '"version": 99')
    path.write_text(f'{{"crc32": {zlib.crc32(body.encode())},\n{body}}}\n')
    with pytest.raises(CheckpointError, match=r"of version 99, .* of version 2 was expected"):
        store.load(model=model)
    for text in (whole.replace("weight", "weighs"), whole[:-9], "", "{}"):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
            store.load(model=model)
    edits = [('"tensors"', '"tense"'), ("[2, 2]", "[NaN, -2]"), ('"shape"', '"shapes"'), ('["replicate"]', "[7]")]
    edits += [
        ('"ranks": [0]', '"ranks": 0'),
        ('.safetensors": [', '.safetensors": [1, '),
        ('"aliases": {}', '"aliases": ['),
    ]
    edits += [('"float32"', '"float33"'), ('"model": {}', '"model": ' + "[" * 9999)]
    for was, now in edits:
        assert was in whole
        body = whole.partition(",\n")[2][:-2].replace(was, now)
        path.write_text(f'{{"crc32": {zlib.crc32(body.encode())},\n{body}}}\n')  # edited by somebody who knows how
        with pytest.raises(CheckpointError, match=r"is no manifest of a checkpoint"):
            store.load(model=model)
    path.write_text(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load(model=model) == 0
