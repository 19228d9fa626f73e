"""Bad input of captured steps: found before anything runs, on all ranks, with a message that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from meshwright.errors import CaptureError, DesyncError, LayoutError, MeshwrightError, ProgramError
from meshwright.program import build
from meshwright.ranks import runtime

MESH = mw.Mesh({"dp": 2})
BATCH = torch.ones(4, 8)


def loss_of(model: nn.Module, x: Any) -> Any:
    return model(x).square().mean()


def compiled(loss: Any = loss_of, batch: Any = BATCH, optimizer: Any = None, **options: Any) -> Any:
    model = nn.Linear(8, 6)
    given = (optimizer or (lambda p: torch.optim.AdamW(p, lr=0.1)))(model.parameters())
    return mw.compile_step(model, loss, given, batch, mesh=MESH, **{"batch": {"dp": mw.Shard(0)}, **options})


def refused(fn: Callable[[], Any], kind: type[Exception], message: str) -> None:
    """Every rank raises it, and nothing was sent before."""

    def run() -> None:
        with collective.counting() as counts, pytest.raises(kind, match=message):
            fn()
        assert not counts.total

    mw.simulate(run, MESH)


def by_value(model: nn.Module, x: Any) -> Any:
    y = model(x).mean()
    return y if y > 0 else -y


def by_item(model: nn.Module, x: Any) -> Any:
    return model(x).mean() * float(x.sum().item())


def by_shape(model: nn.Module, x: Any) -> Any:
    return model(x[x.sum(1) > 0]).mean()


@pytest.mark.parametrize("loss", [by_value, by_item, by_shape], ids=lambda f: f.__name__)
def test_steps_that_depend_on_values(loss: Any) -> None:
    refused(
        lambda: compiled(loss), CaptureError,
        r"Linear cannot be captured: it branches on the value .*torch.where.*test_program_errors.py:\d+",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, x: m(x), "must return a scalar tensor"),
        (lambda m, x: 3.0, "must return a scalar tensor"),
        (lambda m, x: m(x.T).mean(), r"cannot be captured: RuntimeError: .*test_program_errors.py:\d+"),
        (lambda m, x: x.mean(), "does not depend on any parameter that requires a gradient"),
    ],
    ids=["no scalar", "no tensor", "a mistake of the model", "no parameters"],
)
def test_losses_that_are_none(loss: Any, message: str) -> None:
    refused(lambda: compiled(loss), CaptureError, message)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            (BATCH, BATCH),
            "the batch is a tuple of a tensor, a tensor, the step was captured for a tensor: give",
        ),
        (BATCH.double(), r"batch tensor 0 is torch.float64 .*captured for torch.float32 of shape \(4, 8\)"),
        (torch.ones(4, 1, 8), "number of dims must be the same"),
    ],
    ids=["other structure", "other dtype", "other dims"],
)
def test_batches_that_do_not_fit(batch: Any, message: str) -> None:
    steps: dict[int, Any] = {}

    def run() -> None:
        step = steps[runtime.RT.rank] = compiled()
        with collective.counting() as counts, pytest.raises(ProgramError, match=message):
            step(batch)
        assert not counts.total

    mw.simulate(run, MESH)


def test_a_batch_that_lies_otherwise() -> None:
    def run() -> None:
        step = compiled()
        whole = mw.shard_tensor(BATCH, MESH, {})
        with pytest.raises(ProgramError, match=r"lies as <dp: Replicate\(\)>, the program expects <dp: Shard\(0\)>"):
            step(whole)

    mw.simulate(run, MESH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o.param_groups[0].update(weight_decay=0.5), r"weight_decay=0.01 in group 0 and has 0.5"),
        (lambda o: o.param_groups[0].update(betas=(0.5, 0.9)), r"betas=\(0.9, 0.999\) in group 0"),
        (lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "1 parameter groups and has 2"),
    ],
    ids=["weight decay", "betas", "a group more"],
)
def test_an_optimizer_that_was_changed(change: Any, message: str) -> None:
    def run() -> None:
        step = compiled()
        step(BATCH)
        change(step.optimizer)
        before = [p.detach().clone() for p in step.model.parameters()]
        with pytest.raises(ProgramError, match=f"changed after the step was captured: it had {message}"):
            step(BATCH)
        assert all(
            torch.equal(p.to_local(), q.to_local()) for p, q in zip(step.model.parameters(), before, strict=True)
        )

    mw.simulate(run, MESH)


def test_the_learning_rate_may_change() -> None:
    def run() -> None:
        step = compiled()
        step(BATCH)
        step.optimizer.param_groups[0]["lr"] = 0.5
        step(BATCH)

    mw.simulate(run, MESH)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"layouts": {"wieght": {"dp": mw.Shard(0)}}}, MeshwrightError, "matches no parameter.*close ones: weight"),
        ({"layouts": {"weight": {"dp": mw.Partial()}}}, LayoutError, "weight: a parameter cannot be Partial"),
        ({"layouts": {"weight": {"dp": mw.Shard(5)}}}, LayoutError, r"weight, of shape \(6, 8\): Shard\(5\)"),
        ({"fsdp": "tp"}, MeshwrightError, "unknown axis 'tp'"),
        ({"shard_states": "tp"}, MeshwrightError, "unknown axis 'tp'"),
        ({"backend": "xla"}, ProgramError, "'inductor' or 'cudagraphs' was expected"),
    ],
    ids=["unknown name", "Partial parameter", "no such dim", "stored over", "states over", "backend"],
)
def test_bad_options(options: dict[str, Any], kind: Any, message: str) -> None:
    refused(lambda: compiled(**options), kind, message)


def test_no_mesh() -> None:
    model = nn.Linear(8, 6)
    with pytest.raises(ProgramError, match=r"mesh={'dp': 2}: a mw.Mesh was expected"):
        mw.compile_step(model, loss_of, None, BATCH, mesh={"dp": 2})  # type: ignore[arg-type]


def test_a_mistake_of_one_rank_is_raised_on_all() -> None:
    def run() -> None:
        bad = {"layouts": {"wieght": {"dp": mw.Shard(0)}}} if runtime.RT.rank else {}
        kind, message = (
            (MeshwrightError, "matches no") if runtime.RT.rank else (DesyncError, "failed on rank 1: .*wieght")
        )
        with pytest.raises(kind, match=message):
            compiled(**bad)

    mw.simulate(run, MESH)


def test_ranks_that_capture_different_steps() -> None:
    def run() -> None:
        wide = 10 if runtime.RT.rank else 8
        model = nn.Linear(wide, 6)
        with pytest.raises(DesyncError, match=r"rank 1: the capture of a step for the global batch \(4, 10\)"):
            mw.compile_step(
                model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, wide), mesh=MESH,
                batch={"dp": mw.Shard(0)},
            )  # fmt: skip

    mw.simulate(run, MESH)


def test_a_rank_that_is_given_a_batch_of_another_shape() -> None:
    def run() -> None:
        step = compiled()
        step(BATCH)
        with pytest.raises(DesyncError) as told:
            step(BATCH[: 4 - runtime.RT.rank])
        assert "rank 0: a captured step for the global batch (4, 8)" in str(told.value)
        assert "rank 1: the capture of a step for the global batch (3, 8)" in str(told.value)

    mw.simulate(run, MESH)


def test_a_saved_program_of_another_mesh(tmp_path: Path) -> None:
    program = build(nn.Linear(8, 6), loss_of, None, BATCH, MESH).program
    mw.save_program(program, tmp_path / "step.mw")
    assert str(mw.load_program(tmp_path / "step.mw", mesh=MESH)) == str(program)
    with pytest.raises(MeshwrightError, match=r"saved on the mesh dp=2 .*this is Mesh\(dp=4\)"):
        mw.load_program(tmp_path / "step.mw", mesh=mw.Mesh({"dp": 4}))
