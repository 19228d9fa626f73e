"""Pipelines and stored parameters: gathered once per run of a stage, reduced once; what stages share goes once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from tests.support import stages
from tests.support.stages import DP, TP, Block, captured, ignoring, one_device, steps, whole

Tensor = torch.Tensor
Counts = dict[tuple[str, tuple[str, ...]], list[int]]


def counted(axes: dict[str, int], how: str, rows: int, **options: Any) -> list[tuple[Counts, Counts, Any]]:
    """What each rank sends in a step, what ``explain`` says that it sends, and its program."""
    mesh = mw.Mesh(axes)

    def run() -> Any:
        step, _, _ = captured(mesh, passes=[f"pipeline:{how}"], **options)
        step(ignoring(0, rows))
        with collective.counting() as counts:
            step(ignoring(0, rows))
        return dict(counts.table), dict(step.explain().counts.table), step.program

    return mw.simulate(run, mesh)


@pytest.mark.parametrize(
    ("how", "blocks", "runs"),
    [
        ("schedule=1f1b", 3, (1, 1)),
        pytest.param("schedule=looped", 4, (11, 5), marks=pytest.mark.long),
        pytest.param("schedule=looped,gather=step", 4, (2, 2), marks=pytest.mark.long),
    ],
)
def test_gathered_once_per_run_and_reduced_once(how: str, blocks: int, runs: tuple[int, int]) -> None:
    """With one stage on a rank that is once per step, whatever the number of micro-batches."""
    options: dict[str, Any] = {"batch": DP, "fsdp": "dp", "blocks": (Block,) * blocks}
    for counts, explained, program in counted({"pp": 2, "dp": 2}, f"micro_batches=4,{how}", 8, **options):
        here, pipeline = program.mesh.coordinate(program.rank)[0], program.pipeline
        gathers = {n: p for n, p in program.parts.items() if n[0] == "G"}
        stored = 4 * [(blocks + 1) // 2, blocks // 2][here] + [1, 3][here]  # of this rank's stages
        assert sum(pipeline.times(n, here) for n in gathers) == runs[here]
        expected = sum(len(p.outputs) * pipeline.times(n, here) for n, p in gathers.items())
        assert counts["all_gather", ("dp",)][0] == expected
        assert counts["reduce_scatter", ("dp",)][0] == stored == sum(len(p.outputs) for p in gathers.values())
        assert all(explained[k] == v for k, v in counts.items() if k[1] == ("dp",))


def test_the_way_with_the_least_memory_gathers_in_each_micro_batch() -> None:
    options: dict[str, Any] = {"batch": DP, "fsdp": "dp", "tie": True}
    losses, wanted = one_device([ignoring(0, 8)], tie=True)
    how = "micro_batches=4,gather=micro-batch"
    for counts, _, program in counted({"pp": 2, "dp": 2}, how, 8, **options):
        assert counts["reduce_scatter", ("dp",)][0] % 4 == 0
        assert counts["all_gather", ("dp",)][0] > 4 * sum(i.kind == "param" for i in program.parts["F"].inputs)
    mesh = mw.Mesh({"pp": 2, "dp": 2})
    for found, params in mw.simulate(lambda: steps(mesh, [ignoring(0, 8)], how, **options), mesh):
        assert found == pytest.approx(losses, rel=1e-15)
        assert max((params[n] - wanted[n]).abs().max().item() for n in wanted) < 1e-14


@pytest.mark.parametrize(
    ("axes", "options", "share"),
    [
        ({"pp": 2}, {}, 1),
        pytest.param({"pp": 2, "dp": 2}, {"batch": DP, "fsdp": "dp"}, 2, marks=pytest.mark.long),
    ],
    ids=["pp", "zero-3"],
)
def test_a_tied_weight_goes_once_each_way(axes: dict[str, int], options: Any, share: int) -> None:
    """``V·h`` elements from where it is, ``V·h`` of its gradient back, in a step of however many micro-batches."""
    for micro_batches in (2, 4):
        found = counted(axes, f"micro_batches={micro_batches}", 8, tie=True, **options)
        ranks, activations = len(found) // 2, 8 // ranks_of(axes) * 5 * 6 * 8
        ways = [c[collective.SEND, ("pp",)] for c, _, _ in found]
        assert (
            ways
            == [[micro_batches + 1, activations + 11 * 6 * 8 // share]] * ranks
            + [
                [micro_batches + 1, activations + 11 * 6 * 8]  # its gradient is still a sum
            ]
            * ranks
        )
        assert [e[collective.SEND, ("pp",)] for _, e, _ in found] == ways


def ranks_of(axes: dict[str, int]) -> int:
    return axes.get("dp", 1)


class Thrice(stages.Net):
    """One weight at three stages, and the module of a first stage's parameter that only the last stage uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].up.weight = self.layers[0].up.weight
        self.layers[2].up.weight = self.layers[0].up.weight
        self.layers[0].extra = nn.Parameter(torch.ones(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h) * self.layers[0].extra.sum(0))


class Shared(nn.Module):
    """A module that is called at both stages, and an activation that all blocks have."""

    def __init__(self) -> None:
        super().__init__()
        block, act = stages.Block(), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.tokens, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        others = [nn.Sequential(nn.Linear(6, 6), act) for _ in range(2)]
        self.layers = nn.ModuleList([block, others[0], block, others[1]])

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def trained(make: Callable[[], nn.Module], mesh: mw.Mesh | None, schedule: str, **options: Any) -> Any:
    """Losses and parameters of two steps."""
    torch.manual_seed(0)
    model, given = make().double(), [ignoring(i, 7) for i in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if mesh is not None:
        step = mw.compile_step(
            model, stages.loss_of, optimizer, given[0], mesh=mesh, stages=stages.STAGES,
            passes=[f"pipeline:micro_batches=3,schedule={schedule}"], **options,
        )  # fmt: skip
        return [step(b).item() for b in given], whole(model)
    losses = []
    for batch in given:
        loss = stages.loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("make", "axes", "options"),
    [
        (Thrice, {"pp": 3}, {}),
        pytest.param(Thrice, {"pp": 3, "dp": 2}, {"batch": DP, "fsdp": "dp"}, marks=pytest.mark.long),
        (Shared, {"pp": 2}, {}),
    ],
    ids=["thrice", "thrice, zero-3", "shared"],
)
def test_what_several_stages_use(make: Callable[[], nn.Module], axes: dict[str, int], options: Any) -> None:
    """One device's numbers, the uncut step's bits; nothing but an activation crosses in each micro-batch."""
    losses, wanted = trained(make, None, "")
    mesh, bits = mw.Mesh(axes), None
    for schedule in ("uncut", "1f1b"):
        for found, params in mw.simulate(lambda s=schedule: trained(make, mesh, s, **options), mesh):
            bits = bits or (found, params)
            assert found == pytest.approx(losses, rel=1e-14)
            assert max((params[n] - wanted[n]).abs().max().item() for n in wanted) < 1e-14
            assert found == bits[0]
            assert all(torch.equal(params[n], bits[1][n]) for n in wanted)


PRECISE = mw.Precision(compute=torch.bfloat16, reduce=torch.float16)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"pp": 2, "dp": 2}, {"batch": DP, "shard_states": "dp", "precision": PRECISE}),
        ({"pp": 2, "tp": 2}, {"layouts": {**TP, "tokens.weight": {"tp": mw.Shard(0)}}}),
        pytest.param(
            {"pp": 2, "dp": 2},
            {"batch": DP, "fsdp": "dp", "precision": mw.Precision(compute=torch.bfloat16)},
            marks=pytest.mark.long,
        ),
    ],
    ids=["half", "vocabulary", "bfloat16"],
)
def test_tied_with_everything_else(axes: dict[str, int], options: Any) -> None:
    """The bits of the uncut step, and no number that half precision does not reach."""
    mesh, given, found = mw.Mesh(axes), [ignoring(i, 7) for i in range(2)], []
    for schedule in ("uncut", "zero-bubble"):
        how = f"micro_batches=3,schedule={schedule}"
        found.append(mw.simulate(lambda h=how: steps(mesh, given, h, tie=True, **options), mesh))
    losses, wanted = one_device(given, tie=True)
    rounded = "precision" in options
    for (a, ours), (b, theirs) in zip(*found, strict=True):
        assert a == b
        assert all(torch.equal(t, theirs[n]) for n, t in ours.items())
        assert a == pytest.approx(losses, rel=0.05 if rounded else 1e-15)
        assert max((ours[n] - wanted[n]).abs().max().item() for n in wanted) < (0.03 if rounded else 1e-14)


def test_what_users_do_between_steps() -> None:
    """Frozen and thawed parameters, another learning rate, a shorter batch, an evaluation: one device's numbers."""
    mesh = mw.Mesh({"pp": 2})

    def train(on: mw.Mesh | None) -> Any:
        torch.manual_seed(0)
        model, losses = stages.Net(True, (Block,) * 4).double(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = on and mw.compile_step(
            model, stages.loss_of, optimizer, ignoring(0, 8), mesh=on, stages=stages.STAGES,
            passes=["pipeline:micro_batches=3,schedule=looped"],
        )  # fmt: skip
        for i, rows in enumerate((8, 5, 8)):
            frozen, batch = (model.layers[3].up.weight, model.layers[0].up.bias), ignoring(i, rows)  # type: ignore
            for p in frozen:
                p.requires_grad_(i != 1)
            optimizer.param_groups[0]["lr"] = 0.01 / (i + 1)
            losses.append((step.eval(batch) if step else stages.loss_of(model, batch)).item())
            if step is None:
                loss = stages.loss_of(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append((step(batch) if step else loss).item())
        return losses, whole(model) if step else {n: p.detach().clone() for n, p in model.named_parameters()}

    losses, wanted = train(None)
    found, params = mw.simulate(lambda: train(mesh), mesh)[0]
    assert found == pytest.approx(losses, rel=1e-14)
    assert max((params[n] - wanted[n]).abs().max().item() for n in wanted) < 1e-14


class TwoWeightsAdded(nn.Linear):
    """One gradient is that of two parameters, and one reduction serves both."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.delta = nn.Parameter(torch.zeros(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.tanh(), self.weight + self.delta, self.bias)


def _weights(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """After two steps; with options of a pipeline, or on one device."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    if not options:
        for _ in range(2):
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]
    step = mw.compile_step(
        model, loss, optimizer, x, batch={"dp": mw.Shard(0)}, stages={"pp": "layers"},
        passes=["pipeline:micro_batches=2"], **options,
    )  # fmt: skip
    for _ in range(2):
        step(x)
    return [mw.unshard(p).detach() for p in model.parameters()]


def test_parameters_that_share_a_gradient() -> None:
    def stepped(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(6, 6), TwoWeightsAdded())
        model, x = nn.Sequential(OrderedDict(layers=layers)).double(), torch.randn(4, 6, dtype=torch.float64)
        return _weights(model, torch.optim.AdamW(model.parameters(), lr=0.1), x, **options)

    mesh = mw.Mesh({"pp": 2, "dp": 2})
    for made in mw.simulate(lambda: stepped(mesh=mesh, fsdp="dp"), mesh):
        torch.testing.assert_close(made, stepped())


class FirstWeightAdded(nn.Module):
    """A weight of the first stage, used at the last one in a sum with others of both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        for layer in self.layers:
            h = h + layer(h).tanh()
        weight = self.head.weight + self.enter.weight + self.layers[0].weight
        return nn.functional.linear(h, weight, self.head.bias + self.enter.bias)


@pytest.mark.parametrize("options", [{}, {"fsdp": "dp"}], ids=str)
def test_parameters_of_two_stages_that_share_a_gradient(options: dict[str, Any]) -> None:
    def stepped(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = FirstWeightAdded().double(), torch.randn(4, 4, dtype=torch.float64)
        return _weights(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), x, **options)

    mesh = mw.Mesh({"pp": 2, "dp": 2})
    for made in mw.simulate(lambda: stepped(mesh=mesh, **options), mesh):
        torch.testing.assert_close(made, stepped())
