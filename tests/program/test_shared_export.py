"""Simulated ranks that capture the same step share one export; whatever a rank does differently, it exports itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import DesyncError, MeshwrightError, PassError
from meshwright.passes import GradientMerge
from meshwright.program.capture import build, shared_export
from meshwright.program.capture import export as exporting
from meshwright.ranks import runtime

MESH = mw.Mesh({"dp": 2})
X = torch.arange(12.0).reshape(4, 3)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that exported."""
    ranks: list[int] = []
    original = exporting.export

    def noted(*args: Any, **options: Any) -> Any:
        ranks.append(vars(runtime.RT)["rank"])  # asking for it would count
        return original(*args, **options)

    monkeypatch.setattr(exporting, "export", noted)
    return ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.scale = nn.Linear(3, 2), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).tanh() * self.scale


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def train(change: Callable[[nn.Module], Any] = lambda m: None, loss: Any = loss_of) -> list[float]:
    """Two steps by SGD on this rank; the losses."""
    model = Net()
    own = change(model) or loss
    step = mw.compile_step(
        model, own, torch.optim.SGD(model.parameters(), lr=0.1), X, mesh=MESH, batch={"dp": mw.Shard(0)}
    )
    return [step(X).item() for _ in range(2)]


def test_ranks_with_equal_steps_export_once(exports: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    shared = mw.simulate(train, MESH)
    assert exports == [0]
    monkeypatch.setattr(shared_export, "is_shared", lambda: False)
    assert mw.simulate(train, MESH) == shared
    assert exports == [0, 0, 1]


def test_lists_that_are_called_like_hooks_are_no_hooks(exports: list[int]) -> None:
    """Such as ``_require_grads_hooks`` of Transformers."""
    mw.simulate(lambda: train(lambda m: setattr(m, "own_hooks", [1])), MESH)
    assert len(exports) == 1


def test_each_rank_may_export_for_itself(exports: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As real processes do."""
    monkeypatch.setattr(shared_export, "is_shared", lambda: False)
    mw.simulate(train, MESH)
    assert exports == [0, 1]


def attribute(model: Any) -> None:
    model.scale = 2.0 + runtime.RT.rank


def closure(model: Any) -> Any:
    factor = 1.0 + runtime.RT.rank
    return lambda m, x: m(x).square().mean() * factor


def default(model: Any) -> Any:
    def loss(m: nn.Module, x: torch.Tensor, factor: float = 1.0 + runtime.RT.rank) -> torch.Tensor:
        return m(x).square().mean() * factor

    return loss


def hook(model: Any) -> None:
    if runtime.RT.rank:
        model.a.register_forward_hook(lambda module, args, output: output * 2)


def module(model: Any) -> None:
    if runtime.RT.rank:
        model.a = nn.Sequential(model.a, nn.ReLU())


def method(model: Any) -> None:
    if runtime.RT.rank:
        model.forward = lambda x: model.a(x).tanh()


def asks(model: Any) -> Any:
    """A loss that is the same on all ranks, and asks in the forward which one it is on."""
    return loss_by_rank


def loss_by_rank(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return m(x).square().mean() * (1.0 + runtime.RT.rank)


def container(model: Any) -> Any:
    factors = {"loss": [1.0, float(runtime.RT.rank)]}
    return lambda m, x: m(x).square().mean() * (factors["loss"][0] + factors["loss"][1])


@pytest.mark.parametrize("change", [attribute, closure, default, hook, module, method, asks, container])
def test_ranks_that_differ_are_found(change: Any, exports: list[int]) -> None:
    """The other rank exports itself, and what it has otherwise is an error on all ranks, as on real processes."""
    with pytest.raises(MeshwrightError):
        mw.simulate(lambda: train(change), MESH)
    assert exports == [0, 1]


def counts_calls(model: Any) -> Any:
    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.calls = getattr(m, "calls", 0) + 1
        return m(x).square().mean()

    return loss


def test_code_that_changes_the_model_runs_on_each_rank(exports: list[int]) -> None:
    mw.simulate(lambda: train(counts_calls), MESH)
    assert exports == [0, 1]


def test_constants_are_those_of_the_rank(exports: list[int]) -> None:
    """Tensors that a step closes over, those that a module has as attributes and those that code makes."""

    def run() -> tuple[list[float], list[float]]:
        model, table = Net(), torch.full((2,), 3.0)
        model.offset = torch.ones(2)  # type: ignore[assignment]

        def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
            return (m(x) * table + m.offset + torch.tensor([0.5, 0.25])).square().mean()

        step = mw.compile_step(model, loss, None, X, mesh=MESH, batch={"dp": mw.Shard(0)})
        first = step(X).item()
        table.mul_(2)  # the program shares the rank's memory: both ranks see their own
        model.offset.add_(1)  # type: ignore[operator]
        return [first, step(X).item()], [loss(model_of(model), X).item()]

    def model_of(trained: Any) -> Any:
        plain = Net()
        plain.offset = trained.offset
        return plain

    for found, want in mw.simulate(run, MESH):
        assert found[1] == pytest.approx(want[0])
        assert found[0] != found[1]
    assert exports == [0]


FACTOR = [1.0]


def by_global(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return m(x).square().mean() * FACTOR[0]


def test_a_rank_that_captures_again_sees_what_changed(exports: list[int]) -> None:
    """A global list is not compared: no rank takes an export twice."""

    def run() -> list[float]:
        losses = []
        for factor in (1.0, 3.0):
            FACTOR[0] = factor
            step = mw.compile_step(Net(), by_global, None, X, mesh=MESH, batch={"dp": mw.Shard(0)})
            losses.append(step(X).item())
        return losses

    for first, second in mw.simulate(run, MESH):
        assert second == pytest.approx(3 * first)
    assert len(exports) == 2


def test_ranks_keep_nothing_alive(exports: list[int]) -> None:
    """The export that others take does not hold the model of the rank that made it."""
    import gc
    import weakref

    def run() -> bool:
        model = Net()
        held = weakref.ref(model.a.weight)
        step = mw.compile_step(model, loss_of, None, X, mesh=MESH, batch={"dp": mw.Shard(0)})
        step(X)
        del model, step
        gc.collect()
        return held() is None

    assert mw.simulate(run, MESH) == [True, True]


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that found out what a loss is a mean over."""
    ranks: list[int] = []
    original = build.find_weight

    def noted(*args: Any) -> Any:
        ranks.append(vars(runtime.RT)["rank"])
        return original(*args)

    monkeypatch.setattr(build, "find_weight", noted)
    return ranks


def merged(loss: Any) -> list[float]:
    """Two micro-steps; the losses."""
    model = Net()
    step = mw.compile_step(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.1), X, mesh=MESH, batch={"dp": mw.Shard(0)},
        passes=[GradientMerge(2)],
    )  # fmt: skip
    return [step(X).item() for _ in range(2)]


def test_what_a_loss_is_a_mean_over_is_found_once(weighed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    shared = mw.simulate(lambda: merged(loss_of), MESH)
    assert weighed == [0]
    monkeypatch.setattr(shared_export, "is_shared", lambda: False)
    assert mw.simulate(lambda: merged(loss_of), MESH) == shared
    assert weighed == [0, 0, 1]


def with_offset(values: list[float]) -> None:
    offset = torch.full((2,), values[runtime.RT.rank])
    merged(lambda m, x: (m(x) + offset).square().mean())


def test_ranks_with_other_constants_find_it_themselves(weighed: list[int], exports: list[int]) -> None:
    """Values of constants say whether two micro-batches see the same."""
    mw.simulate(lambda: with_offset([1.0, 1.0]), MESH)
    assert weighed == [0]
    assert exports == [0, 0]  # the second one for twice the rows
    with pytest.raises(DesyncError, match="different values of a plain tensor"):
        mw.simulate(lambda: with_offset([1.0, 2.0]), MESH)
    assert weighed == [0, 0, 1]


def test_a_loss_that_is_no_mean_is_refused_in_the_same_words(
    weighed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = []
    for _ in range(2):
        with pytest.raises(PassError) as caught:
            mw.simulate(lambda: merged(lambda m, x: m(x).sum().exp()), MESH)
        words.append(str(caught.value))
        monkeypatch.setattr(shared_export, "is_shared", lambda: False)
    assert weighed == [0, 0, 1]
    assert words[0] == words[1]


def test_two_batches_and_evaluation(exports: list[int]) -> None:
    """Each capture is shared: another shape, and the forward alone."""

    def run() -> list[float]:
        model = Net()
        step = mw.compile_step(
            model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), X, mesh=MESH, batch={"dp": mw.Shard(0)}
        )
        return [step(X).item(), step(X[:3]).item(), step.eval(X).item()]

    first, second = mw.simulate(run, MESH)
    assert first == second
    assert len(exports) == 3
