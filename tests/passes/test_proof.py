"""Programs prove themselves: an error in a pass is found at the first call, before anything is updated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import PassError, ProgramError
from meshwright.passes import PassManager, pass_manager
from meshwright.program import Plan
from meshwright.program.run.sketches import sketch
from meshwright.program.step import CompiledStep
from meshwright.ranks import runtime
from tests.support import by_hand
from tests.support import planted_passes as plants
from tests.support.by_hand import Captured, Case, all_reduce

Tensor = torch.Tensor
DP = mw.Mesh({"dp": 2})
FUSED = "data-parallel-optimization"


@pytest.fixture(autouse=True)
def compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledStep, "compares", True)


class Net(nn.Module):
    """Linears of one shape, a batch norm and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.2)
        self.down = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(torch.tanh(self.up(x))))
        return self.down(torch.tanh(self.mid(x)))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def batch(rows: int) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))


def trained(
    passes: list[Any],
    rows: tuple[int, ...] = (4, 4, 5),
    mesh: mw.Mesh = DP,
    scales: tuple[float, ...] = (),
    **options: Any,
) -> dict[str, Any]:
    """What a user sees of a few steps, on the first rank."""

    def rank() -> dict[str, Any]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = mw.compile_step(
            model, loss_of, optimizer, batch(rows[0]), mesh=mesh, batch={"dp": mw.Shard(0)}, passes=passes, **options
        )
        seen: dict[str, Any] = {"losses": [], "step": step, "before": _state(model, optimizer)}
        try:
            for n, scale in zip(rows, scales or (1.0,) * len(rows), strict=True):
                seen["losses"].append(step(batch(n) * scale).item())
        except PassError as error:
            seen["error"] = str(error)
        return {**seen, "after": _state(model, optimizer), "random": torch.rand(3)}

    made: list[dict[str, Any]] = mw.simulate(rank, mesh)
    assert len({m.get("error") for m in made}) == 1  # on all ranks, in the same words
    return made[0]


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    held = {n: t.to_local() if isinstance(t, mw.DistTensor) else t for n, t in model.state_dict().items()}
    for i, states in enumerate(optimizer.state.values()):
        held |= {f"{i}.{k}": t.to_local() if isinstance(t, mw.DistTensor) else t for k, t in states.items()}
    return {n: t.detach().clone() for n, t in held.items()}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(t, b[n]) for n, t in a.items())


def test_nothing_is_seen_of_a_comparison() -> None:
    """Losses, weights, states, statistics, random numbers and what is counted are the same to the bit."""
    compared, plain = trained([FUSED]), trained([FUSED], check=False)
    assert compared["losses"] == plain["losses"]
    assert _same(compared["after"], plain["after"])
    assert torch.equal(compared["random"], plain["random"])
    (entry,) = [e for e in compared["step"].ledger if e.option == "check"]
    assert entry.applied
    assert "of 2 captures" in entry.why
    assert FUSED in entry.why
    assert not [e for e in plain["step"].ledger if e.option == "check"]


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are not looked at when they are captured: some errors are found there."""
    monkeypatch.setattr(pass_manager, "checked", lambda program, what: None)


@pytest.mark.parametrize("name", plants.PLANTED)
@pytest.mark.thin(3)
def test_planted_errors_are_found_at_the_first_call(name: str, unverified: None) -> None:
    seen = trained([FUSED, plants.Planted(plants.PLANTED[name])])
    assert "pass planted changes" in seen["error"], seen
    assert not seen["losses"]
    assert _same(seen["before"], seen["after"])


def test_the_rank_is_named() -> None:
    assert "on rank 1: on rank 1" in trained([FUSED, plants.Planted(plants.scaled, ranks=(1,))], rows=(4,))["error"]


def test_each_capture_is_compared() -> None:
    """An error that only uneven batches have."""
    seen = trained([FUSED, plants.Planted(plants.uneven)], rows=(4, 4, 5))
    assert len(seen["losses"]) == 2
    assert "gradient that updates up.weight" in seen["error"]


def test_of_several_passes_the_first_that_errs_is_named() -> None:
    assert "pass planted-early changes" in trained([FUSED, plants.Early(plants.scaled)], rows=(4,))["error"]
    assert "pass planted changes" in trained([FUSED, plants.Planted(plants.scaled)], rows=(4,))["error"]


@pytest.mark.parametrize("check", ["first", "always", False])
def test_how_often(check: Any) -> None:
    """An error that a batch of zeros does not show."""
    seen = trained([plants.Planted(plants.scaled)], rows=(4, 4), scales=(0.0, 1.0), check=check)
    assert ("error" in seen) is (check == "always")


def test_a_word_that_check_does_not_know() -> None:
    with pytest.raises(ProgramError, match=r"check='later'\. Pass 'first', 'always' or False"):
        trained([FUSED], rows=(4,), check="later")


def test_values_that_are_not_finite_are_compared_again() -> None:
    """NaN is NaN with and without passes, and proves nothing: the next call is compared as well."""
    options = {"rows": (4, 4), "loss_scale": "dynamic"}  # which skips the first update
    late = trained([plants.Planted(plants.scaled)], scales=(float("nan"), 1.0), **options)
    assert len(late["losses"]) == 1
    assert "compile_step: pass planted" in late["error"]
    seen = trained([FUSED], rows=(4, 4), scales=(float("nan"), float("inf")))
    (entry,) = [e for e in seen["step"].ledger if e.option == "check"]
    assert "not finite" in entry.why
    assert len(seen["losses"]) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sketches_leave_values_as_they_are(dtype: torch.dtype) -> None:
    t = torch.tensor([1.0, float("nan"), 2.0, float("inf")], dtype=dtype)
    before = t.clone()
    made = sketch(t)
    assert not made.finite
    torch.testing.assert_close(t, before, equal_nan=True)


def buffers(made: Captured, passes: list[Any], check: Any) -> dict[str, Tensor]:
    """Of the model of a step by hand, after two calls."""
    model, optimizer = made.case.made()
    rank = runtime.RT.rank
    source = by_hand._Kept(model, optimizer, made.case.mesh, Plan(), made.recorded[rank])
    step = CompiledStep(source, made.case.data(0, rank), transform=PassManager(passes), check=check)
    for i in range(2):
        step(made.case.data(i, rank))
    return dict(model.named_buffers())


def test_steps_by_hand() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            all_reduce(p.grad)
            p.grad /= 2
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    made = Captured(Case(step, Net, {"dp": 2}))
    for passes in ([FUSED], ["gradient-merge:k_steps=2"]):  # kernels write statistics of batch norms unseen
        compared, plain = [mw.simulate(lambda c=c, p=passes: buffers(made, p, c), DP) for c in ("first", False)]
        assert all(_same(a, b) for a, b in zip(compared, plain, strict=True))
    with pytest.raises(PassError, match="kept: pass planted changes"):
        made.run([FUSED, plants.Planted(plants.scaled)])
    with pytest.raises(PassError, match="kept: pass planted changes"):
        made.run([plants.Planted(plants.unaveraged)])


class Vain(Net):
    """A bias in front of a batch norm: its gradient is zero but for rounding."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.norm(self.mid(torch.tanh(self.up(x))))))  # type: ignore[no-any-return]


PRECISIONS = {
    "float32": None,
    "float8 on the wire": mw.Precision(grad_comm=mw.Float8(block=4)),
    "bfloat16": mw.Precision(compute=torch.bfloat16),
}


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.thin(3)
def test_differences_that_are_rounding(name: str) -> None:
    mesh = mw.Mesh({"dp": 3})

    def rank() -> str:
        torch.manual_seed(0)
        model = Vain()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        step = mw.compile_step(
            model, loss_of, optimizer, batch(7), mesh=mesh, batch={"dp": mw.Shard(0)}, passes=[FUSED],
            precision=PRECISIONS[name],
        )  # fmt: skip
        step(batch(7))
        return step.ledger[-1].why

    assert "1 capture equal" in mw.simulate(rank, mesh)[0]


class Plain(nn.Module):
    """Linears of one shape, without a batch norm: micro-batches have no statistics in common."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def merged(passes: list[Any], clip: float | None = None) -> tuple[str, str]:
    """The error of two cycles of micro-steps of uneven rows and ignored labels, and what the ledger says."""

    def rank() -> tuple[str, str]:
        torch.manual_seed(0)
        model = Plain()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def data(n: int) -> tuple[Tensor, Tensor]:
            y = torch.arange(n) % 5
            y[: n - 3] = -100
            return batch(n), y

        def loss_fn(m: nn.Module, b: Any) -> Tensor:
            return nn.functional.cross_entropy(m(b[0]), b[1])

        step = mw.compile_step(
            model, loss_fn, optimizer, data(4), mesh=DP, batch={"dp": mw.Shard(0)}, passes=passes, clip_grad_norm=clip
        )
        try:
            for n in (4, 7, 4, 7):
                step(data(n))
        except PassError as error:
            return str(error), ""
        return "", step.ledger[-1].why

    made: list[tuple[str, str]] = mw.simulate(rank, DP)
    return made[0]


def wrong_weight(program: Any) -> None:
    """The last micro-step counts twice."""
    added = next(n for n in program.graph.nodes if n.target is torch.ops.aten.addcmul_.default)
    added.kwargs = {"value": 2.0}


def dropped(program: Any) -> None:
    """What the last micro-step adds is not added."""
    added = next(n for n in program.graph.nodes if n.target is torch.ops.aten.addcmul_.default)
    added.kwargs = {"value": 0.0}


def kept(program: Any) -> None:
    """The micro-steps before the last one add nothing."""
    part = program.parts["accumulate"]
    for node in [n for n in part.graph.nodes if n.target is torch.ops.aten.addcmul_.default]:
        node.kwargs = {"value": 0.0}


MERGED: dict[str, Any] = {f.__name__: f for f in (plants.scaled, wrong_weight, dropped, kept)}


@pytest.mark.parametrize("clip", [None, 0.01])
def test_merged_steps(clip: float | None) -> None:
    error, why = merged(["gradient-merge:k_steps=2", FUSED], clip)
    assert not error
    assert "equal those without gradient-merge" in why


@pytest.mark.parametrize("name", MERGED)
@pytest.mark.thin(3)
def test_planted_errors_in_merged_steps(name: str, unverified: None) -> None:
    error, _ = merged(["gradient-merge:k_steps=2", plants.Planted(MERGED[name])])
    assert "one of the passes gradient-merge, planted " in error  # or in step.flush(), which is compared first
    assert "changes the" in error
