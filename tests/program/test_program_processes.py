"""Captured steps on real processes, 20 steps against one device: the last word."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright import collective
from meshwright.program import load_program
from meshwright.program.run.bind import local, part
from meshwright.program.run.runner import compile_program
from meshwright.ranks import runtime
from tests.program.test_program import CNN, classes, images
from tests.support import sweep as sweeps
from tests.support.processes import run_processes
from tests.support.programs import DP, MLP, TP, captured, compare, on_one_device, pairs, squares

CASES: dict[str, tuple[dict[str, int], Any, Any, Any, dict[str, Any]]] = {
    "dp": ({"dp": 2}, MLP, squares, pairs, {"batch": DP}),
    "tp": ({"tp": 2}, MLP, squares, pairs, {"layouts": TP}),
    "stored": ({"dp": 2}, MLP, squares, pairs, {"batch": DP, "fsdp": "dp", "clip_grad_norm": 0.1}),
    "states": ({"dp": 2}, MLP, squares, pairs, {"batch": DP, "shard_states": "dp"}),
    "batch norm": ({"dp": 2}, CNN, classes, images, {"batch": DP}),
    "dp x tp": ({"dp": 2, "tp": 2}, MLP, squares, pairs, {"batch": DP, "layouts": TP, "clip_grad_norm": 0.1}),
    "dp x tp, stored": ({"dp": 2, "tp": 2}, MLP, squares, pairs, {"batch": DP, "layouts": TP, "fsdp": "dp"}),
    "batch norm on four": ({"dp": 4}, CNN, classes, images, {"batch": DP}),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train_all(world: int, steps: int) -> list[str]:
    """Every case of this many ranks, in one set of processes; the names of those that were compared."""
    done = []
    for name, (axes, make, loss_fn, data, options) in CASES.items():
        if torch.Size(axes.values()).numel() != world:
            continue
        torch.manual_seed(0)
        model = make()
        own, batches = copy.deepcopy(model), data(steps)
        want = on_one_device(model, loss_fn, adamw, batches, clip=options.get("clip_grad_norm"))
        got = captured(own, loss_fn, adamw, batches, mw.init_mesh(axes), **options)
        assert got.losses == pytest.approx(want.losses, rel=1e-9), name
        for key, t in want.tensors.items():
            torch.testing.assert_close(got.tensors[key], t, rtol=1e-8, atol=1e-10, msg=f"{name}: {key}")
        done.append(name)
    return done


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.thin(2)
def test_steps_equal_one_device(world: int) -> None:
    expected = [n for n, case in CASES.items() if torch.Size(case[0].values()).numel() == world]
    assert run_processes(train_all, world, world, sweeps.steps(20), timeout=120) == [expected] * world


def saved_and_loaded(folder: str) -> list[float]:
    """A saved program runs as the one that was saved; gives the losses of both."""
    mesh, batch = mw.init_mesh({"dp": 2}), pairs(1)[0]
    torch.manual_seed(0)
    model = MLP()
    step = mw.compile_step(model, squares, None, batch, mesh=mesh, batch=DP)
    path = Path(folder) / f"rank{runtime.RT.rank}.mwp"
    mw.save_program(step.program, path)
    loaded = load_program(path, mesh=mesh, rank=runtime.RT.rank)
    assert str(loaded) == str(step.program)
    tensors = dict(model.named_parameters())
    leaves = iter(batch)
    given = [
        part(next(leaves), i.spec) if i.kind == "batch" and i.spec else local(tensors[i.name]) for i in loaded.inputs
    ]
    with collective.counting() as counts:
        made = compile_program(loaded)(given)
    assert counts.kinds == loaded.kinds
    grads = {o.name: t for o, t in zip(loaded.outputs, made, strict=True) if o.kind == "grad"}
    whole = collective.all_reduce(made[0].clone(), "sum", collective.group(mesh, (0,)))
    loss = step(batch).item()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert torch.equal(grads[name], local(p.grad)), name
    return [float(whole), float(loss)]


@pytest.mark.processes
def test_a_loaded_program_runs_as_the_one_that_was_saved() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for loaded, own in run_processes(saved_and_loaded, 2, folder, timeout=60):
            assert loaded == own


def test_simulated_ranks_run_the_same_cases() -> None:
    """What the processes run, step for step, without processes: the helpers themselves are sound."""
    axes, make, loss_fn, data, options = CASES["dp x tp"]
    more = {k: v for k, v in options.items() if k != "clip_grad_norm"}
    compare(make, loss_fn, data(3), mw.Mesh(axes), adamw, clip=options["clip_grad_norm"], **more)


def called_with_another_shape(known: bool) -> str:
    """One rank has a row less: where all have seen that shape before, and where it has to be captured."""
    mesh = mw.init_mesh({"dp": 2})
    model, x = torch.nn.Linear(8, 6), torch.ones(4, 8)
    step = mw.compile_step(
        model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters()), x, mesh=mesh, batch=DP
    )
    step(x)
    if known:
        step(x[:3])
    try:
        step(x[: 4 - runtime.RT.rank])
    except mw.errors.DesyncError as error:
        return str(error)
    return ""


@pytest.mark.processes
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_a_rank_that_is_given_another_shape(known: bool) -> None:
    doing = "a captured step" if known else "the capture of a step"
    for told in run_processes(called_with_another_shape, 2, known, timeout=60):
        assert "rank 0: a captured step for the global batch (4, 8); now " in told
        assert f"rank 1: {doing} for the global batch (3, 8); now " in told
