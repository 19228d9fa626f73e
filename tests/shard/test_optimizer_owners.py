"""Optimizers that take whole parameters (each at one owner), or the whole model, against one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.errors import ShardError
from tests.support.optimizers import SOAP, Lamb, Mixer, Prodigy, Shampoo
from tests.support.processes import run_processes

Tensor = torch.Tensor
MESHES = {
    "dp=2": mw.Mesh({"dp": 2}),
    "tp=2": mw.Mesh({"tp": 2}),
    "dp=2,tp=2": mw.Mesh({"dp": 2, "tp": 2}),
    "dp=3": mw.Mesh({"dp": 3}),
}
TP = {"up.*": {"tp": mw.Shard(0)}, "down.weight": {"tp": mw.Shard(1)}}


class Net(nn.Module):
    """Matrices of different sizes, vectors, and a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(5, 8), nn.Linear(8, 6, bias=False), nn.Linear(6, 7)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.down(torch.tanh(self.up(x)))) * self.scale
        return made


def net() -> Net:
    torch.manual_seed(1)
    return Net().double()


def data(n: int) -> list[Tensor]:
    seeds = torch.Generator().manual_seed(3)
    return [torch.randn(7, 5, generator=seeds, dtype=torch.float64) for _ in range(n)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), torch.ones((), dtype=torch.float64))


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(model.parameters(), lr=0.05)]


def transformers_adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    kind = pytest.importorskip("transformers.optimization").Adafactor
    return [kind(model.parameters(), lr=None, relative_step=True, warmup_init=False)]


def own(kind: Any, **options: Any) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    return lambda model: [kind(model.parameters(), **options)]


KINDS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "Muon": muon,
    "Adafactor": adafactor,
    "transformers.Adafactor": transformers_adafactor,
    "Lamb": own(Lamb),
    "Shampoo": own(Shampoo),
    "Prodigy": own(Prodigy, lr=0.5),
    "Mixer": own(Mixer),
}


def one_device(make: Any, n: int) -> dict[str, Tensor]:
    model = net()
    opts = make(model)
    for x in data(n):
        steps(model, opts, x)
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def steps(model: nn.Module, opts: Any, x: Tensor) -> None:
    for opt in opts:
        opt.zero_grad()
    loss_of(model, x).backward()
    for opt in opts:
        opt.step()


def on(mesh: mw.Mesh, x: Tensor) -> Any:
    return mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)} if "dp" in mesh.axes else {})


def layouts(mesh: mw.Mesh) -> dict[str, Any]:
    return TP if "tp" in mesh.axes else {}


def off(model: nn.Module, want: dict[str, Tensor]) -> float:
    return max((mw.unshard(v.detach()) - want[k]).abs().max().item() for k, v in model.state_dict().items())


def cases(kinds: Iterable[str], others: Iterable[str], everywhere: str) -> list[Any]:
    """Each kind with each of the others; in short runs one kind with all of them, and all kinds with one."""
    kept = list(others)
    return [
        pytest.param(k, o, marks=[] if k == everywhere or o == kept[0] else [pytest.mark.long])
        for k in kinds
        for o in kept
    ]


ALL = ("dp=2,tp=2", "dp=2", "tp=2", "dp=3")


@pytest.mark.parametrize(("kind", "name"), cases(KINDS, ALL, "Shampoo"))
def test_twenty_eager_steps(kind: str, name: str) -> None:
    mesh, want = MESHES[name], one_device(KINDS[kind], 20)

    def run() -> float:
        model = mw.shard_module(net(), mesh, layouts(mesh))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opts = [mw.shard_optimizer(o) for o in KINDS[kind](model)]
        for x in data(20):
            steps(model, opts, on(mesh, x))
        return off(model, want)

    assert max(mw.simulate(run, mesh)) <= 1e-12


def stored(mesh: mw.Mesh) -> dict[str, Any]:
    return {"fsdp": "dp"} if "dp" in mesh.axes else {}


@pytest.mark.parametrize(("kind", "name"), cases(["Muon", "Shampoo", "Mixer"], ALL, "Shampoo"))
def test_twenty_captured_steps(kind: str, name: str) -> None:
    mesh, want = MESHES[name], one_device(KINDS[kind], 20)

    def run(said: dict[str, Any]) -> float:
        model = net()
        opts = KINDS[kind](model)
        batch = {"dp": mw.Shard(0)} if "dp" in mesh.axes else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = mw.compile_step(
                model, loss_of, opts, data(1)[0], mesh=mesh, layouts=layouts(mesh), batch=batch, **said
            )
        for x in data(20):
            step(x)
        return off(model, want)

    for said in ({}, stored(mesh)):
        assert max(mw.simulate(lambda said=said: run(said), mesh)) <= 1e-12


@pytest.mark.parametrize("said", [{"shard_states": "dp"}, {"offload_states": "cpu"}, {"clip_grad_norm": 0.1}], ids=str)
@pytest.mark.parametrize("kind", ["Muon", "Adafactor"])
def test_options_of_captured_steps(kind: str, said: dict[str, Any]) -> None:
    mesh, one = MESHES["dp=2,tp=2"], net()
    opts = KINDS[kind](one)
    for x in data(3):
        for opt in opts:
            opt.zero_grad()
        loss_of(one, x).backward()
        if "clip_grad_norm" in said:
            nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        for opt in opts:
            opt.step()
    want = {k: v.detach() for k, v in one.state_dict().items()}

    def run() -> float:
        model = net()
        more: dict[str, Any] = {"layouts": TP, "batch": {"dp": mw.Shard(0)}, **said}
        step = mw.compile_step(model, loss_of, KINDS[kind](model), data(1)[0], mesh=mesh, **more)
        with mw.explain() as why:
            for x in data(3):
                step(x)
        assert why.counts.kinds["exchange_rows"] == 6
        return off(model, want)

    assert max(mw.simulate(run, mesh)) <= 1e-12


def test_a_step_by_hand_and_one_of_stages() -> None:
    mesh, want = mw.Mesh({"pp": 2}), one_device(own(Lamb), 3)

    def stages() -> float:
        model = net()
        more: Any = {"stages": {"pp": {"up": 0, "down": 1, "out": 1}}}
        step = mw.compile_step(model, loss_of, Lamb(model.parameters()), data(1)[0], mesh=mesh, **more)
        for x in data(3):
            step(x)
        return off(model, want)

    assert max(mw.simulate(stages, mesh)) <= 1e-12


@pytest.mark.parametrize("how", ["shard_states", "fsdp", "offload", "offload_states"])
@pytest.mark.parametrize("kind", ["Muon", "Adafactor", "Lamb", "Shampoo", "Prodigy"])
def test_storage(kind: str, how: str) -> None:
    want = one_device(KINDS[kind], 3)

    def run(mesh: mw.Mesh) -> float:
        options: Any = {how: "cpu" if "offload" in how else "dp"}
        ours, its = (options, {}) if how.endswith("states") else ({}, options)
        model = mw.shard_module(net(), mesh, layouts(mesh), **its)
        opts = [mw.shard_optimizer(o, **ours) for o in KINDS[kind](model)]
        for x in data(3):
            steps(model, opts, on(mesh, x))
        return off(model, want)

    for name in ("dp=2,tp=2", "dp=3"):
        if kind == "Prodigy" and how == "shard_states":
            with pytest.raises(ShardError, match=r"updates the whole model together.*Leave shard_states out"):
                mw.simulate(lambda name=name: run(MESHES[name]), MESHES[name])
            continue
        assert max(mw.simulate(lambda name=name: run(MESHES[name]), MESHES[name])) <= 1e-12


@pytest.mark.parametrize(
    ("kind", "meshes"),
    cases(
        ["Muon", "Adafactor", "transformers.Adafactor", "Lamb", "Shampoo", "Prodigy"],
        ["dp=2,tp=2 to dp=3", "dp=3 to tp=2"],
        "Shampoo",
    ),
)
def test_resumed_on_another_mesh(kind: str, meshes: str, tmp_path: Path) -> None:
    want, (first, then) = one_device(KINDS[kind], 20), meshes.split(" to ")

    def run(mesh: mw.Mesh, batches: list[Tensor], resumed: bool) -> float:
        model = mw.shard_module(net(), mesh, layouts(mesh), **stored(mesh))
        opts = [mw.shard_optimizer(o) for o in KINDS[kind](model)]
        store = mw.Checkpoints(tmp_path)
        if resumed:
            store.load(model=model, optimizer=opts)
        for x in batches:
            steps(model, opts, on(mesh, x))
        if not resumed:
            store.save(len(batches), model=model, optimizer=opts)
        return off(model, want)

    mw.simulate(lambda: run(MESHES[first], data(20)[:9], False), MESHES[first])
    assert max(mw.simulate(lambda: run(MESHES[then], data(20)[9:], True), MESHES[then])) <= 1e-12


@pytest.mark.parametrize("kind", ["Muon", "Shampoo"])
def test_captured_steps_resume_on_another_mesh(kind: str, tmp_path: Path) -> None:
    want = one_device(KINDS[kind], 20)

    def run(mesh: mw.Mesh, batches: list[Tensor], resumed: bool) -> float:
        model = net()
        more: Any = {"layouts": layouts(mesh), "batch": {"dp": mw.Shard(0)}, **stored(mesh)}
        step = mw.compile_step(model, loss_of, KINDS[kind](model), data(1)[0], mesh=mesh, **more)
        store = mw.Checkpoints(tmp_path)
        if resumed:
            store.load(program=step)
        for x in batches:
            step(x)
        if not resumed:
            store.save(len(batches), program=step)
        return off(model, want)

    first, then = MESHES["dp=2,tp=2"], MESHES["dp=3"]
    mw.simulate(lambda: run(first, data(20)[:9], False), first)
    assert max(mw.simulate(lambda: run(then, data(20)[9:], True), then)) <= 1e-12


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_soap_has_the_bits_of_one_device_with_equal_gradients(mesh: mw.Mesh) -> None:
    """Its steps are chaotic: gradients that were rounded differently would end elsewhere, on one device too."""
    seeds = torch.Generator().manual_seed(5)
    grads = [[torch.randn(p.shape, generator=seeds, dtype=p.dtype) for p in net().parameters()] for _ in range(20)]

    def run(model: nn.Module, opt: torch.optim.Optimizer) -> list[Tensor]:
        for now in grads:
            for p, g in zip(model.parameters(), now, strict=True):
                p.grad = mw.shard_tensor(g, p.mesh, p.spec.layout) if isinstance(p, mw.DistTensor) else g.clone()
            opt.step()
        return [mw.unshard(p.detach()) for p in model.parameters()]

    model = net()
    want = run(model, SOAP(model.parameters()))

    def ranks() -> list[Tensor]:
        model = mw.shard_module(net(), mesh, layouts(mesh), **stored(mesh))
        return run(model, mw.shard_optimizer(SOAP(model.parameters())))

    for found in mw.simulate(ranks, mesh):
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def trained_in_processes(kind: str) -> dict[str, Any]:
    mesh = mw.init_mesh({"dp": 2})
    model = mw.shard_module(net(), mesh, fsdp="dp")
    opts = [mw.shard_optimizer(o) for o in KINDS[kind](model)]
    for x in data(3):
        steps(model, opts, on(mesh, x))
    return {k: mw.unshard(v.detach()) for k, v in model.state_dict().items()}


@pytest.mark.processes
def test_on_processes() -> None:
    want = one_device(KINDS["Shampoo"], 3)
    for found in run_processes(trained_in_processes, 2, "Shampoo"):
        assert all((found[k] - w).abs().max() <= 1e-12 for k, w in want.items())
