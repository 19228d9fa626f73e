"""Optimizers whose states are quantised by blocks: right on every rank's part, never saved as one value per element."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import CheckpointError, ShardError

BLOCK = 8
TWO, FOUR = mw.Mesh({"dp": 2}), mw.Mesh({"dp": 2, "tp": 2})
TP = {"0.*": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}}
WAYS: dict[str, tuple[mw.Mesh, dict[str, Any], dict[str, Any]]] = {
    "dp": (TWO, {}, {}),
    "tp": (FOUR, {"layouts": TP}, {"by": "element"}),
    "zero-1": (TWO, {}, {"shard_states": "dp", "by": "element"}),
    "zero-3": (TWO, {"fsdp": "dp"}, {"by": "element"}),
}


class Scaled(torch.optim.Optimizer):
    """Momentum in 8 bits: codes of the parameter's shape, and a scale for each block of them."""

    def __init__(self, params: Any, lr: float = 1e-2, least: int = 0) -> None:
        self.least = least
        super().__init__(params, {"lr": lr})

    def fresh(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        if p.numel() % BLOCK or p.numel() < self.least:
            return {"momentum": torch.zeros_like(p)}
        return {"codes": torch.zeros_like(p, dtype=torch.int8), "scales": torch.zeros(p.numel() // BLOCK)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(self.fresh(p))
                if "momentum" in state:
                    m = state["momentum"].mul_(0.9).add_(p.grad)
                else:
                    m = self.momentum(state).view(p.shape).mul(0.9) + p.grad
                    self.keep(state, m)
                p.sub_(group["lr"] * m)

    def momentum(self, state: dict[str, Any]) -> torch.Tensor:
        return state["codes"].view(-1, BLOCK).to(torch.float32) * state["scales"][:, None] / 127

    def keep(self, state: dict[str, Any], m: torch.Tensor) -> None:
        blocks = m.reshape(-1, BLOCK)
        state["scales"].copy_(blocks.abs().amax(1))
        state["codes"].copy_(
            (blocks / state["scales"][:, None].clamp_min(1e-30) * 127).round().to(torch.int8).view_as(m)
        )


class Codes(torch.Tensor):
    """A state that is a tensor of a class of its own: it looks like its values, and holds codes and scales."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Codes:
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)
        made.codes, made.scales = torch.zeros_like(like, dtype=torch.int8), torch.zeros(like.numel() // BLOCK)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of codes")


class Wrapped(Scaled):
    """The same with one state."""

    def fresh(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"momentum": torch.zeros_like(p)} if p.numel() % BLOCK else {"packed": Codes(p)}

    def momentum(self, state: dict[str, Any]) -> torch.Tensor:
        return super().momentum(vars(state["packed"]))

    def keep(self, state: dict[str, Any], m: torch.Tensor) -> None:
        super().keep(vars(state["packed"]), m)


def network(hidden: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, hidden), nn.GELU(), nn.Linear(hidden, 16))


def batches(steps: int) -> list[torch.Tensor]:
    return [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(steps)]


def trained(make: Callable[[Any], Any], steps: int = 6, hidden: int = 16) -> list[torch.Tensor]:
    model = network(hidden)
    opt = make(model.parameters())
    for x in batches(steps):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()]


def prepared(way: str, make: Callable[[Any], Any], hidden: int = 16) -> tuple[mw.Mesh, nn.Module, Any]:
    mesh, sharding, options = WAYS[way]
    sharding = dict(sharding)
    model = mw.shard_module(network(hidden), mesh, sharding.pop("layouts", {}), **sharding)
    return mesh, model, mw.shard_optimizer(make(model.parameters()), **options)


def train(mesh: mw.Mesh, model: nn.Module, opt: Any, steps: int = 6) -> list[torch.Tensor]:
    for x in batches(steps):
        model(mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)})).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return [mw.unshard(p.detach()) for p in model.parameters()]


def distance(way: str, make: Callable[[Any], Any], hidden: int = 16) -> float:
    """The largest difference to one device, relative to how far the parameters have moved."""
    want, start = trained(make, hidden=hidden), trained(make, steps=0, hidden=hidden)
    found = mw.simulate(lambda: train(*prepared(way, make, hidden)), WAYS[way][0])
    moved = max((w - s).abs().max().item() for w, s in zip(want, start, strict=True))
    return max((a - b).abs().max().item() for rank in found for a, b in zip(rank, want, strict=True)) / moved


@pytest.mark.parametrize("kind", [Scaled, Wrapped])
@pytest.mark.parametrize("way", WAYS)
def test_training_is_that_of_one_device_up_to_blocks(way: str, kind: Any) -> None:
    """Rows are cut between blocks, but for the columns of a row-parallel weight (tp), whose blocks are others."""
    assert distance(way, kind) < (1e-2 if way == "tp" else 1e-5)


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", [Scaled, Wrapped])
@pytest.mark.parametrize("hidden", [17, 3, 1])
@pytest.mark.parametrize("way", ["zero-1", "zero-3"])
def test_uneven_parts_of_which_some_are_quantised(way: str, kind: Any, hidden: int) -> None:
    """A rank whose part has no whole blocks keeps plain states: all ranks refuse to give them as whole, together."""
    assert distance(way, kind, hidden) < 2e-2

    def refused() -> None:
        mesh, model, opt = prepared(way, kind, hidden)
        train(mesh, model, opt, 2)
        with pytest.raises(ShardError, match="is not one value per element"):
            opt.state_dict()

    mw.simulate(refused, WAYS[way][0])


@pytest.mark.parametrize("kind", [Scaled, Wrapped])
@pytest.mark.parametrize("way", ["tp", "zero-1", "zero-3"])
def test_states_of_parts_are_not_given_as_whole(way: str, kind: Any) -> None:
    def refused(folder: str) -> None:
        mesh, model, opt = prepared(way, kind)
        opt.state_dict()  # there is nothing yet
        train(mesh, model, opt, 2)
        with pytest.raises(ShardError, match=r"keeps of 0.weight is not one value per element.*state_dict\(\)"):
            opt.state_dict()
        store = mw.Checkpoints(folder)
        with pytest.raises(CheckpointError, match=r"a checkpoint cannot join the parts. Save the model without"):
            store.save(2, model=model, optimizer=opt)
        store.save(2, model=model, wait=True)
        given = {
            k: v.clone() if isinstance(v, torch.Tensor) and v.__class__ is torch.Tensor else v
            for k, v in opt.state[model[0].weight].items()
        }
        opt.state[model[0].weight] = given
        if kind is Scaled:
            with pytest.raises(ShardError, match="cannot be sharded as"):
                train(mesh, model, opt, 1)

    with tempfile.TemporaryDirectory() as folder:
        mw.simulate(lambda: refused(folder), WAYS[way][0])


def test_whole_states_are_saved_and_not_cut() -> None:
    """With plain data parallel all ranks have all of them: a checkpoint goes on bit by bit, but not onto split ones."""

    def run(folder: str) -> list[torch.Tensor]:
        mesh, model, opt = prepared("dp", Scaled)
        store = mw.Checkpoints(folder)
        train(mesh, model, opt, 3)
        store.save(3, model=model, optimizer=opt, wait=True)
        last = train(mesh, model, opt, 2)
        _, model, opt = prepared("dp", Scaled)
        store.load(model=model, optimizer=opt)
        assert all(torch.equal(a, b) for a, b in zip(train(mesh, model, opt, 2), last, strict=True))
        for way in ("zero-1", "zero-3"):
            _, model, opt = prepared(way, Scaled)
            with pytest.raises(CheckpointError, match="cannot be cut for a parameter whose states are split"):
                store.load(model=model, optimizer=opt)
            saved = prepared("dp", Scaled)
            train(*saved, 1)
            with pytest.raises(ShardError, match=r"has shape|not one value per element"):
                opt.load_state_dict(saved[2].state_dict())
        return last

    with tempfile.TemporaryDirectory() as folder:
        mw.simulate(lambda: run(folder), TWO)


def test_a_class_of_its_own_is_not_saved() -> None:
    def run(folder: str) -> None:
        mesh, model, opt = prepared("dp", Wrapped)
        train(mesh, model, opt, 1)
        with pytest.raises(CheckpointError, match="packed is a Codes, which holds several tensors"):
            mw.Checkpoints(folder).save(1, model=model, optimizer=opt)

    with tempfile.TemporaryDirectory() as folder:
        mw.simulate(lambda: run(folder), TWO)


@pytest.mark.filterwarnings("ignore:.*is an unknown optimizer class")
@pytest.mark.parametrize("kind", [Scaled, Wrapped])
def test_without_a_word_split_parameters_are_updated_whole(kind: Any) -> None:
    def run() -> list[torch.Tensor]:
        model = mw.shard_module(network(), FOUR, TP)
        return train(FOUR, model, mw.shard_optimizer(kind(model.parameters())), 3)

    for found in mw.simulate(run, FOUR):
        torch.testing.assert_close(found, trained(kind, 3), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_captured(way: str) -> None:
    """Its update runs behind the program, on parts; the captured step is told of ZeRO."""
    mesh, sharding, _ = WAYS[way]
    zero = {"zero-1": {"shard_states": "dp"}, "zero-3": {"fsdp": "dp"}}.get(way, {})

    def capture(model: nn.Module, opt: Any, **options: Any) -> Any:
        loss = lambda m, x: m(x).square().mean()  # noqa: E731
        return mw.compile_step(model, loss, opt, batches(1)[0], mesh=mesh, batch={"dp": mw.Shard(0)}, **options)

    def run() -> tuple[list[torch.Tensor], Any]:
        if zero:
            _, model, opt = prepared(way, Scaled)
            for options in ({}, zero):
                if way == "zero-3" or not options:
                    with pytest.raises(mw.errors.CaptureError, match="which prepares eager steps"):
                        capture(model, opt, **options)
        model = network()
        if way == "dp":  # either way of saying it
            model = mw.shard_module(model, mesh)
            opt = mw.shard_optimizer(Scaled(model.parameters()), by="element")
            step = capture(model, opt)
        else:
            opt = Scaled(model.parameters())
            step = capture(model, opt, layouts=sharding.get("layouts"), by="element", **zero)
        for x in batches(6):
            step(x)
        step.flush()
        return [mw.unshard(p.detach()) for p in model.parameters()], opt.state[model[0].weight]["codes"]

    found, codes = mw.simulate(run, mesh)[0]
    assert tuple(codes.shape) == ((16, 16) if way == "dp" else (8, 16))
    for a, b in zip(found, trained(Scaled), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


PACKAGES = {
    "torchao.optim": ["AdamW8bit", "AdamW4bit", "AdamWFp8"],
    "bitsandbytes.optim": ["AdamW8bit", "Adam8bit", "Lion8bit", "PagedAdamW8bit"],
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("package", "kind"),
    [(p, k) for p, kinds in PACKAGES.items() for k in kinds if importlib.util.find_spec(p.partition(".")[0])],
)
@pytest.mark.parametrize("way", WAYS)
def test_those_of_packages(way: str, package: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are installed.  torchao's compile their step: here it runs as it is written, which is the same."""
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    made = getattr(importlib.import_module(package), kind)
    far = distance(way, lambda params: made(params, lr=1e-3), 1024)
    assert far < 0.05

    def refused() -> None:
        mesh, model, opt = prepared(way, lambda params: made(params, lr=1e-3), 1024)
        train(mesh, model, opt, 1)
        if way != "dp":
            with pytest.raises(ShardError, match="is not one value per element"):
                opt.state_dict()

    mw.simulate(refused, WAYS[way][0])


class OpaqueStates(torch.optim.Optimizer):
    """Momentum whose values lie in a float8 tensor beside one scale, in a list, or beside one number of the part."""

    def __init__(self, params: Any, how: str) -> None:
        super().__init__(params, {"lr": 0.05})
        self.how = how

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state, last = self.state[p], torch.zeros_like(p)
            if state:
                last = {"float8": self.decoded, "list": lambda s: s["all"][0], "number": lambda s: s["m"]}[self.how](
                    state
                )
            m = 0.9 * last + p.grad
            if self.how == "float8":
                state["scale"] = (m.abs().max() / 400).clamp_min(1e-30)
                state["m"] = (m / state["scale"]).to(torch.float8_e4m3fn)
            elif self.how == "list":
                state["all"] = [m]
            else:
                state["m"], state["largest"] = m, m.abs().max()
            p.sub_(m, alpha=0.05)

    @staticmethod
    def decoded(state: dict[str, Any]) -> torch.Tensor:
        return state["m"].to(torch.float32) * state["scale"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["float8", "list", "number"])
@pytest.mark.parametrize("way", ["zero-1", "zero-3"])
def test_values_that_mean_something_on_their_rank_alone_are_not_joined(way: str, how: str) -> None:
    def run() -> None:
        mesh, model, opt = prepared(way, lambda p: OpaqueStates(p, how))
        train(mesh, model, opt, 2)
        with pytest.raises(ShardError, match=r"is not one value per element.* state_dict\(\) cannot join the parts"):
            opt.state_dict()

    mw.simulate(run, WAYS[way][0])
