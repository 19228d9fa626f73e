"""Several optimizers in one captured step: each with parameters, options and a schedule of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshwright as mw
from meshwright.errors import CaptureError, PassError
from meshwright.passes import DataParallelOptimization, GradientMerge
from meshwright.ranks import runtime
from tests.support.processes import run_processes
from tests.support.programs import DP, MESH

Tensor = torch.Tensor
FUSED, MERGED = DataParallelOptimization(bucket_bytes=1 << 20), GradientMerge(k_steps=2)


class Nets(nn.Module):
    """An embedding with an optimizer of its own; or a generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
        self.second = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def optimizers(model: Nets) -> list[Any]:
    return [
        torch.optim.Adam(model.first.parameters(), lr=0.02, betas=(0.5, 0.9)),
        torch.optim.SGD(model.second.parameters(), lr=0.05, momentum=0.9),
    ]


def schedules(made: list[Any]) -> list[Any]:
    return [torch.optim.lr_scheduler.StepLR(made[0], 2, 0.5), torch.optim.lr_scheduler.ExponentialLR(made[1], 0.8)]


def data(i: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * i + rank))


# -- compile_step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"passes": [FUSED]}, {"passes": [MERGED, FUSED]}, {"shard_states": "dp"}])
def test_compiled(options: dict[str, Any]) -> None:
    k = 2 if MERGED in options.get("passes", ()) else 1
    model = Nets()
    made = optimizers(model)
    plans = schedules(made)
    for i in range(0, 6, k):
        for j in range(i, i + k):
            (model(data(j)) / k).backward()
        for o, s in zip(made, plans, strict=True):
            o.step()
            o.zero_grad()
            s.step()

    def rank() -> Any:
        own = Nets()
        mine = optimizers(own)
        steps = schedules(mine)
        step = mw.compile_step(own, None, mine, data(0), mesh=MESH, batch=DP, **options)
        for i in range(6):
            step(data(i))
            if i % k == k - 1:
                for s in steps:
                    s.step()
        assert step.optimizer.parts == tuple(mine)
        kinds = {kind for o in mine for state in o.state.values() for kind in state}
        assert kinds == {"exp_avg", "exp_avg_sq", "step", "momentum_buffer"}
        assert "adam on 4" in step.program.update
        assert "sgd on 4" in step.program.update
        return [mw.unshard(p).detach() for p in own.parameters()]

    for got in mw.simulate(rank, MESH):
        for a, b in zip(got, model.parameters(), strict=True):
            assert (a - b).abs().max() < 1e-12


def test_those_behind_the_program() -> None:
    """One that no program can hold: all run behind it."""

    def made(model: Nets) -> list[Any]:
        return [torch.optim.RMSprop(model.first.parameters()), torch.optim.SGD(model.second.parameters(), lr=0.1)]

    model = Nets()
    own = made(model)
    for i in range(3):
        model(data(i)).backward()
        for o in own:
            o.step()
            o.zero_grad()

    def rank() -> Any:
        model = Nets()
        step = mw.compile_step(model, None, made(model), data(0), mesh=MESH, batch=DP)
        for i in range(3):
            step(data(i))
        return [mw.unshard(p).detach() for p in model.parameters()]

    for got in mw.simulate(rank, MESH):
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, model.parameters(), strict=True))


def test_what_is_refused() -> None:
    def rank(make: Any) -> None:
        model = Nets()
        mw.compile_step(model, None, make(model), data(0), mesh=MESH)

    sgd = torch.optim.SGD
    for make, text in (
        (lambda m: [sgd(m.parameters(), lr=0.1), sgd(m.second.parameters(), lr=0.1)], "belongs to two optimizers"),
        (lambda m: [], r"optimizer=\[\]"),
        (lambda m: [m], "torch.optim.Optimizer or a list"),
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS runs the model itself"),
    ):
        with pytest.raises(CaptureError, match=text):
            mw.simulate(lambda make=make: rank(make), MESH)


# -- by hand ---------------------------------------------------------------------------------------------


def adversarial(model: Nets, made: list[Any], n: int) -> Any:
    """A step of a GAN: the second network, then the first one, against what the second has become."""

    def update(params: Any, optimizer: Any) -> None:
        for p in params:
            dist.all_reduce(p.grad)
            p.grad /= n
        optimizer.step()

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        for o in made:
            o.zero_grad()
        apart = model.second(x).square().mean() - model.second(model.first(x).detach()).mean()
        apart.backward()
        update(model.second.parameters(), made[1])
        fooled = model.second(model.first(x)).square().mean()
        fooled.backward()
        update(model.first.parameters(), made[0])
        return apart.detach(), fooled.detach()

    return step


def trained() -> list[tuple[float, dict[str, int]]]:
    mesh, made = mw.init_mesh({"dp": 2}), []
    for passes in ((), (FUSED,)):
        results, kinds = [], {}
        for captured in (False, True):
            model = Nets()
            own = optimizers(model)
            plans = schedules(own)
            step = adversarial(model, own, 2)
            if captured:
                step = mw.capture_local(step, mesh, model=model, optimizer=own, batch=data(0), passes=passes)
                kinds = step.program.kinds
            losses = []
            for i in range(6):
                losses += step(data(i, dist.get_rank()))
                for s in plans:
                    s.step()
            results.append([*losses, *(p.detach() for p in model.parameters())])
        made.append((max((a - b).abs().max().item() for a, b in zip(*results, strict=True)), kinds))
    model = Nets()
    own = optimizers(model)
    with pytest.raises(PassError, match="behind an update of them in the same step"):
        mw.capture_local(
            adversarial(model, own, 2), mesh, model=model, optimizer=own, batch=data(0), passes=[MERGED]
        )  # fmt: skip
    return made


@pytest.mark.processes
def test_adversarial_networks() -> None:
    for (plain, many), (fused, few) in run_processes(trained, 2):
        assert plain < 1e-12
        assert fused < 1e-12
        assert (many, few) == ({"all_reduce": 8}, {"all_reduce": 2})


@pytest.fixture
def alone() -> Iterator[mw.Mesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    runtime.reset()
    yield mw.Mesh({"dp": 1})
    dist.destroy_process_group()
    runtime.reset()


def test_what_the_step_was_not_given(alone: mw.Mesh) -> None:
    model = Nets()
    made = optimizers(model)

    def both(x: Tensor) -> None:
        model(x).backward()
        for o in made:
            o.step()
            o.zero_grad()

    def scaled(x: Tensor) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(x)).backward()
        scaler.step(made[0])

    def unscaled(x: Tensor) -> None:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(model(x)).backward()
        for o in made:
            scaler.step(o)
            o.zero_grad()
        scaler.update()

    def one(x: Tensor) -> None:
        model(x).backward()
        made[0].step()

    def found_inf(x: Tensor) -> None:
        model(x).backward()
        for o in made:
            o.found_inf = torch.zeros(())
            o.step()
            del o.found_inf

    def grad_scale(x: Tensor) -> None:
        model(x).backward()
        made[1].grad_scale = torch.full((), 4.0)
        for o in made:
            o.step()

    for step, given, text in (
        (found_inf, made, "found_inf is set, which a captured update does not read"),
        (grad_scale, made, r"SGD.grad_scale is set.*loss_scale='dynamic'"),
        (both, made[0], "SGD, an optimizer that capture_local was not given"),
        (scaled, made, "loss_scale='dynamic'"),
        (one, made, r"did not call optimizer.step\(\).*SGD"),
        (both, torch.optim.LBFGS(model.parameters()), "LBFGS runs the model itself"),
    ):
        with pytest.raises(CaptureError, match=text):
            mw.capture_local(step, alone, model=model, optimizer=given, batch=data(0))
        assert all(not o.state and "found_inf" not in vars(o) and "grad_scale" not in vars(o) for o in made)  # no fakes
    before = [p.detach().clone() for p in model.parameters()]
    run = mw.capture_local(unscaled, alone, model=model, optimizer=made, batch=data(0))
    run(data(0))
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    made[0].found_inf = torch.ones(())
    with pytest.raises(CaptureError, match="found_inf is set"):
        run(data(0))


def test_gradients_summed_one_by_one_cannot_be_merged() -> None:
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x: Tensor) -> None:
        for half in x.chunk(2):
            grads = torch.autograd.grad(model(half).square().mean(), list(model.parameters()))
            for p, g in zip(model.parameters(), grads, strict=True):
                dist.all_reduce(g)
                p.grad = g if p.grad is None else p.grad + g
        optimizer.step()
        optimizer.zero_grad()

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh, given = mw.Mesh({"dp": 2}), {"model": model, "optimizer": optimizer, "batch": data(0)}
    try:
        with pytest.raises(PassError, match=r"several gradients of weight over ranks.*sum once"):
            mw.simulate(lambda: mw.capture_local(step, mesh, passes=[MERGED], **given), mesh)
    finally:
        dist.destroy_process_group()
