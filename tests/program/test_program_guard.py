"""What changes after a step was captured: it is followed, or refused by name, on every rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import meshwright as mw
from meshwright.errors import CaptureError, DesyncError, ProgramError
from meshwright.generator import reproducible_random
from meshwright.program.compile import capture_local
from meshwright.ranks import runtime
from tests.support.programs import DP, MESH, MLP, TP, pairs, squares

Change = Callable[[Any, Any], Any]
BATCHES = pairs(5)
OTHER = {n: t + 0.5 for n, t in MLP().state_dict().items()}


def start() -> tuple[MLP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MLP(dropout=0.5)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def eager(changes: dict[int, Change]) -> list[float]:
    model, optimizer = start()
    losses = []
    for i, batch in enumerate(BATCHES):
        if i in changes:
            changes[i](model, optimizer)
        torch.manual_seed(i)
        with reproducible_random():
            loss = squares(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def captured(changes: dict[int, Change]) -> tuple[list[float], int]:
    """Losses, and how many programs were made."""

    def rank() -> tuple[list[float], int]:
        model, optimizer = start()
        step = mw.compile_step(model, squares, optimizer, BATCHES[0], mesh=MESH, layouts=TP, batch=DP)
        losses, programs = [], set()
        for i, batch in enumerate(BATCHES):
            if i in changes:
                changes[i](model, optimizer)
            torch.manual_seed(i)
            losses.append(step(batch).item())
            programs.add(id(step.program))
        return losses, len(programs)

    found: list[tuple[list[float], int]] = mw.simulate(rank, MESH)
    assert all(f == found[0] for f in found)
    return found[0]


def halve(model: Any, optimizer: Any) -> None:
    model.up.weight.data = model.up.weight.data.clone() * 0.5


def hooked(model: Any, optimizer: Any) -> None:
    model.up.register_forward_hook(lambda module, args, out: out * 2)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("changes", "programs"),
    [
        ({2: lambda m, o: m.up.weight.requires_grad_(False), 4: lambda m, o: m.up.weight.requires_grad_(True)}, 2),
        ({2: lambda m, o: m.eval(), 4: lambda m, o: m.train()}, 2),
        ({1: lambda m, o: m.drop.eval()}, 2),
        ({2: hooked}, 2),
        ({1: lambda m, o: setattr(m, "drop", nn.Tanh())}, 2),
        ({2: halve}, 1),
        ({2: lambda m, o: m.load_state_dict(OTHER)}, 1),
        ({2: lambda m, o: o.state.clear()}, 1),
        ({2: lambda m, o: o.param_groups[0].__setitem__("lr", 0.1)}, 1),
    ],
    ids=["freeze", "eval", "eval part", "hook", "module", "data", "load", "states", "lr"],
)
def test_followed(changes: dict[int, Change], programs: int) -> None:
    got, made = captured(changes)
    assert got == pytest.approx(eager(changes), rel=1e-9)
    assert made == programs


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m, o: m.load_state_dict(OTHER, assign=True), "up.weight was replaced since the step was captured"),
        (lambda m, o: setattr(m, "up", nn.Linear(8, 32)), "up.weight was replaced .* optimizer anew"),
        (lambda m, o: setattr(m, "more", nn.Linear(8, 32)), "more.weight is new"),
        (lambda m, o: delattr(m, "up"), "up.weight is gone"),
        (lambda m, o: m.up.weight.register_hook(lambda g: g * 2), "parameter up.weight has a hook"),
        (lambda m, o: m.up.weight.register_post_accumulate_grad_hook(print), "parameter up.weight has a hook"),
        (lambda m, o: m.up.register_full_backward_hook(lambda *a: None), "module up has a backward hook"),
        (lambda m, o: o.param_groups[0].__setitem__("betas", (0.5, 0.6)), "betas=.* and has"),
        (lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(3))]}), "1 parameter groups and has 2"),
        (lambda m, o: o.param_groups[0]["params"].pop(), "4 parameters in group 0 and has 3"),
    ],
    ids=["assign", "module", "added", "removed", "hook", "post hook", "backward hook", "betas", "group", "params"],
)
def test_refused(change: Change, text: str) -> None:
    with pytest.raises(ProgramError, match=text):
        captured({2: change})


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.up.weight.register_hook(lambda g: g * 2),
        lambda m: m.up.register_full_backward_hook(lambda *a: None),
    ],
)
def test_hooks_before_capture(change: Callable[[Any], Any]) -> None:
    def rank() -> None:
        model, optimizer = start()
        change(model)
        mw.compile_step(model, squares, optimizer, BATCHES[0], mesh=MESH)

    with pytest.raises(CaptureError, match=r"has a .*hook, which a captured step does not run"):
        mw.simulate(rank, MESH)


def test_buffers() -> None:
    """A buffer that was replaced by one like it is followed, another is refused."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8, 8, dtype=torch.float64))
            self.register_buffer("by", torch.full((8,), 2.0, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w * self.by

    def rank() -> tuple[float, float]:
        model: Any = Scaled()
        step = mw.compile_step(model, squares, torch.optim.SGD(model.parameters(), lr=0.0), BATCHES[0], mesh=MESH)
        first = step((BATCHES[0][0], BATCHES[0][0] * 0)).item()
        model.by = torch.ones(8, dtype=torch.float64)
        second = step((BATCHES[0][0], BATCHES[0][0] * 0)).item()
        model.by = torch.ones(8)
        with pytest.raises(ProgramError, match=r"the buffer by is .*float32.* now, the step was captured for"):
            step(BATCHES[0])
        return first, second

    for first, second in mw.simulate(rank, MESH):
        assert first == pytest.approx(4 * second)


def test_batches_by_key() -> None:
    """Keys are matched by name, whatever their order; other keys and structures are refused."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return ((model(batch["x"]) - batch["y"]) ** 2).mean() * batch["k"]

    x, y = BATCHES[0]

    def rank() -> list[float]:
        torch.manual_seed(0)
        model = MLP()
        step = mw.compile_step(
            model, loss, torch.optim.SGD(model.parameters(), lr=0.0), {"x": x, "y": y, "k": 1}, mesh=MESH
        )
        found = [
            step(b).item() for b in ({"x": x, "y": y, "k": 1}, {"y": y, "k": 1, "x": x}, {"k": 2.0, "x": x, "y": y})
        ]
        for wrong in ({"x": x, "z": y, "k": 1}, {"x": x, "k": 1}, (x, y, 1)):
            with pytest.raises(ProgramError, match="give it what it was captured for"):
                step(wrong)
        return found

    for a, b, c in mw.simulate(rank, MESH):
        assert a == b
        assert c == pytest.approx(2 * a)


def test_a_merge_under_way() -> None:
    def rank() -> None:
        model, optimizer = start()
        step = mw.compile_step(model, squares, optimizer, BATCHES[0], mesh=MESH, passes=["gradient-merge:k_steps=2"])
        step(BATCHES[0])
        model.up.weight.requires_grad_(False)
        with pytest.raises(ProgramError, match=r"up.weight has a gradient in one micro-step .* step.flush"):
            step(BATCHES[1])

    mw.simulate(rank, MESH)


def test_steps_by_hand() -> None:
    """Hooks are part of what is captured there, and of what is captured again."""
    one = mw.Mesh({"dp": 1})

    def run(capture: bool) -> list[float]:
        model, optimizer = start()
        model.eval()

        def by_hand(batch: Any) -> Tensor:
            loss = squares(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step: Any = by_hand
        if capture:
            step = capture_local(by_hand, one, model=model, optimizer=optimizer, batch=BATCHES[0])
        found = [step(BATCHES[0]).item()]
        model.up.weight.register_hook(lambda g: g * 0)
        found.append(step(BATCHES[1]).item())
        model.down.weight.requires_grad_(False)
        found.append(step(BATCHES[2]).item())
        halve(model, optimizer)
        return [*found, step(BATCHES[3]).item()]

    assert mw.simulate(lambda: run(True), one)[0] == pytest.approx(run(False), rel=1e-9)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("shard_states", [None, "a"])
def test_uneven_layouts_agree_group_by_group(order: tuple[int, int], shard_states: str | None) -> None:
    """Where two axes split a weight unevenly, sizes differ from group to group, and that is right."""
    mesh = mw.Mesh({"a": 2, "b": 3})
    x = torch.randn(6, 5, dtype=torch.float64)

    class Times(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.arange(20, dtype=torch.float64).reshape(5, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) ** 2).mean()

    one = Times()
    wanted = loss(one, x)
    wanted.backward()

    def rank() -> tuple[float, Tensor]:
        model = Times()
        step = mw.compile_step(
            model,
            loss,
            torch.optim.SGD(model.parameters(), lr=1.0),
            x,
            mesh=mesh,
            layouts={"w": {"a": mw.Shard(order[0]), "b": mw.Shard(order[1])}},
            shard_states=shard_states,
        )
        return step(x).item(), mw.unshard(model.w).detach().clone()

    for value, w in mw.simulate(rank, mesh):
        assert value == pytest.approx(wanted.item())
        torch.testing.assert_close(w, (one.w - one.w.grad).detach())


@pytest.mark.parametrize("passes", [(), ("data-parallel-optimization",)], ids=str)
def test_another_size_of_a_step_whose_parameters_are_stored_split(passes: tuple[str, ...]) -> None:
    """It is captured again, from parameters that now lie as they are stored; no other step is."""
    mesh = mw.Mesh({"dp": 2, "tp": 2})
    layouts = {"0.weight": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}}
    batches = [torch.arange(6.0 * n, dtype=torch.float64).view(n, 6) / 10 for n in (4, 4, 6, 4, 6)]

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    def run() -> tuple[list[float], int, torch.Tensor]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = mw.compile_step(
            model, loss_fn, optimizer, batches[0], mesh=mesh, layouts=layouts, batch={"dp": mw.Shard(0)},
            fsdp="dp", clip_grad_norm=0.5, gradients=True, passes=list(passes),
        )  # fmt: skip
        losses = [float(step(b)) for b in batches]
        return losses, len(step._ready), mw.unshard(model[0].weight).detach()

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    want = []
    for b in batches:
        optimizer.zero_grad()
        loss = loss_fn(model, b)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        want.append(float(loss))
    for losses, captured, weight in mw.simulate(run, mesh):
        assert losses == pytest.approx(want, rel=1e-10)
        assert captured == 2
        torch.testing.assert_close(weight, model[0].weight.detach(), rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------------------------------- modes of the process

BFLOAT16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)
FLOAT16 = functools.partial(torch.autocast, "cpu", torch.float16)
CPU = {"dp": mw.Shard(0)}


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Third(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()) * torch.full((2,), 1 / 3)


def under(modes: list[Any], mesh: mw.Mesh | None) -> tuple[list[float], list[float], int]:
    """Losses and last weights of steps, each under its mode; the first one is that of the capture."""
    torch.manual_seed(0)
    model, x = Third(), torch.linspace(-1.0, 1.0, 15).view(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().sum()

    losses, programs, step = [], set(), None
    if mesh is not None:
        with modes[0]():
            step = mw.compile_step(model, loss_fn, optimizer, x, mesh=mesh, batch=CPU)
    for mode in modes:
        with mode():
            if step is not None:
                losses.append(step(x).item())
                programs.add(id(step.program))
                continue
            with torch.enable_grad():
                loss = loss_fn(model, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, mw.unshard(model.up.weight).flatten().tolist(), len(programs)


@pytest.mark.parametrize(
    ("modes", "programs", "size"),  # of five rows: even, uneven and empty parts
    [
        ([contextlib.nullcontext, BFLOAT16, FLOAT16, contextlib.nullcontext, BFLOAT16], 3, 6),
        ([BFLOAT16, contextlib.nullcontext, BFLOAT16], 2, 3),
        ([contextlib.nullcontext, default_dtype, contextlib.nullcontext], 2, 3),
        ([contextlib.nullcontext, deterministic, contextlib.nullcontext], 2, 2),
        ([contextlib.nullcontext, torch.no_grad, BFLOAT16, torch.no_grad], 2, 1),
    ],
    ids=["autocast", "captured under autocast", "default dtype", "deterministic", "no_grad"],
)
@pytest.mark.thin(2)
def test_modes_around_a_step(modes: list[Any], programs: int, size: int) -> None:
    losses, weight, _ = under(modes, None)
    for found in mw.simulate(lambda: under(modes, mw.Mesh({"dp": size})), mw.Mesh({"dp": size})):
        close = 2e-2 if BFLOAT16 in modes else 1e-5  # parts are rounded one by one
        assert found[0] == pytest.approx(losses, rel=close)
        assert found[1] == pytest.approx(weight, rel=close, abs=1e-3)
        assert found[2] == programs


def test_modes_on_one_device_are_exact() -> None:
    modes = [contextlib.nullcontext, BFLOAT16, FLOAT16, contextlib.nullcontext]
    mesh = mw.Mesh({"dp": 1})
    (found,) = mw.simulate(lambda: under(modes, mesh), mesh)
    losses, weight, _ = under(modes, None)
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert found[1] == pytest.approx(weight, rel=1e-6)


@pytest.mark.parametrize("modes", [[torch.inference_mode] * 2, [torch.inference_mode, BFLOAT16, torch.no_grad]])
def test_inference_mode_around_a_step_does_nothing(modes: list[Any]) -> None:
    plain = [BFLOAT16 if m is BFLOAT16 else contextlib.nullcontext for m in modes]
    mesh = mw.Mesh({"dp": 2})
    assert mw.simulate(lambda: under(modes, mesh), mesh) == mw.simulate(lambda: under(plain, mesh), mesh)


@pytest.mark.parametrize("kept", [False, True])
def test_modes_on_one_rank_only(kept: bool) -> None:
    """Its gradients would be rounded otherwise, in collectives that are the same."""
    mesh = mw.Mesh({"dp": 2})

    def fn() -> None:
        model = Third()
        step = mw.compile_step(
            model, lambda m, x: m(x).float().sum(), torch.optim.SGD(model.parameters()), torch.ones(4, 3), mesh=mesh,
            batch=CPU,
        )  # fmt: skip
        if kept:
            with BFLOAT16():
                step(torch.ones(4, 3))
        with BFLOAT16() if runtime.RT.rank else contextlib.nullcontext():
            step(torch.ones(4, 3))

    with pytest.raises(DesyncError, match="autocast.*rank 1: .*bfloat16" if kept else "disagree"):
        mw.simulate(fn, mesh)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_around_a_step(by_hand: bool) -> None:
    """A capture has no values that it could look at, neither has the backward of a program nodes."""

    def fn(anomaly: bool) -> list[float]:
        torch.manual_seed(0)
        model, x, mesh = Third(), torch.ones(4, 3), mw.Mesh({"dp": 2})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def hand(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autograd.detect_anomaly() if anomaly else contextlib.nullcontext():
                loss = model(x).square().mean()
                loss.backward()
            optimizer.step()
            return loss

        with torch.autograd.set_detect_anomaly(anomaly):
            if by_hand:
                step = capture_local(hand, mesh, model=model, optimizer=optimizer, batch=x)
            else:
                step = mw.compile_step(
                    model, lambda m, x: m(x).square().mean(), optimizer, x, mesh=mesh, batch={"dp": mw.Shard(0)}
                )
            assert torch.is_anomaly_enabled() is anomaly
            return [step(x[:n]).item() for n in (4, 2, 4)]

    mesh = mw.Mesh({"dp": 2})
    assert mw.simulate(lambda: fn(True), mesh) == mw.simulate(lambda: fn(False), mesh)
    assert not torch.is_anomaly_enabled()


ONE_RANK: dict[str, Any] = {
    "weight": lambda m, o: m.weight.mul_(1.5),
    "weight, by its data": lambda m, o: m.weight.data.mul_(1.5),
    "weight, anew": lambda m, o: setattr(m.weight, "data", m.weight.to_local() * 1.5),
    "state": lambda m, o: o.state[m.weight]["exp_avg"].mul_(2),
    "state, by its data": lambda m, o: o.state[m.weight]["exp_avg"].data.zero_(),
    "state, anew": lambda m, o: o.state[m.weight].update(exp_avg=o.state[m.weight]["exp_avg"] * 2),
    "steps": lambda m, o: o.state[m.weight]["step"].fill_(1),
}


@pytest.mark.parametrize("all_ranks", [False, True])
@pytest.mark.parametrize("name", ONE_RANK)
def test_what_one_rank_writes_between_two_steps(name: str, all_ranks: bool) -> None:
    """To what is replicated, whichever way: an error at the next update; written by all ranks it is none."""
    mesh = mw.Mesh({"dp": 2})

    def run() -> None:
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer, x = torch.optim.AdamW(model.parameters(), lr=0.01), torch.ones(4, 6)
        step = mw.compile_step(
            model, lambda m, x: m(x).square().mean(), optimizer, x, mesh=mesh, batch={"dp": mw.Shard(0)}
        )
        for _ in range(3):
            step(x)
        if all_ranks or mw.rank() == 1:
            with torch.no_grad():
                ONE_RANK[name](model, optimizer)
        step(x)

    if all_ranks:
        mw.simulate(run, mesh)
        return
    with pytest.raises(DesyncError, match="the ranks hold different values of "):
        mw.simulate(run, mesh)
