"""Pipelines with everything else: context, experts, uneven micro-batches, low precision, draws; on real ranks too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from tests.support import stages
from tests.support.processes import run_processes
from tests.support.stages import (
    DP,
    TP,
    Attention,
    Block,
    Checkpointed,
    Dropped,
    Experts,
    Noisy,
    Sampled,
    data,
    ignoring,
    one_device,
    steps,
)

CP = {"cp": mw.Shard(1)}
EP = {"layers.*.gate_up": {"ep": mw.Shard(0)}, "layers.*.down": {"ep": mw.Shard(0)}}
BF16 = mw.Precision(compute=torch.bfloat16, reduce=torch.bfloat16)
ATTENTION, EXPERTS = (Attention,) * 2, (Experts, Block)

CASES: list[Any] = [
    ({"pp": 2, "cp": 2}, 2, 4, {"blocks": ATTENTION, "batch": CP}),
    ({"pp": 2, "ep": 2}, 2, 4, {"blocks": EXPERTS, "batch": {"ep": mw.Shard(0)}, "layouts": EP}),
    ({"pp": 2, "ep": 2}, 3, 13, {"blocks": EXPERTS, "batch": {"ep": mw.Shard(0)}, "layouts": EP}),
    ({"pp": 2, "tp": 2}, 3, 7, {"layouts": TP}),  # of 3 and of 2 rows, whose gradients lie otherwise
    pytest.param({"pp": 2, "cp": 3}, 3, 7, {"blocks": ATTENTION, "batch": CP}, marks=pytest.mark.long),
    pytest.param(
        {"pp": 2, "dp": 2, "tp": 2, "cp": 2}, 2, 8,
        {"blocks": ATTENTION, "batch": DP | CP, "layouts": TP, "fsdp": "dp"},
        marks=pytest.mark.long,
    ),
]  # fmt: skip


@pytest.mark.thin(2)
@pytest.mark.parametrize(("axes", "micro_batches", "rows", "options"), CASES, ids=str)
def test_bits(axes: dict[str, int], micro_batches: int, rows: int, options: dict[str, Any]) -> None:
    """One device's numbers; the cut step has the bits of the uncut one."""
    given = [ignoring(i, rows) for i in range(2)]
    losses, wanted = one_device(given, blocks=options.get("blocks", (Block,) * 3))
    found = {}
    for schedule in ("uncut", "zero-bubble"):
        how = f"micro_batches={micro_batches},schedule={schedule}"
        found[schedule] = mw.simulate(lambda h=how: steps(mw.Mesh(axes), given, h, **options), mw.Mesh(axes))
        for here, params in found[schedule]:
            assert here == pytest.approx(losses, rel=1e-15)
            assert max((params[n] - wanted[n]).abs().max().item() for n in wanted) < 1e-14
    for (a, ours), (b, theirs) in zip(*found.values(), strict=True):
        assert a == b
        assert all(torch.equal(t, theirs[n]) for n, t in ours.items())


def test_ranks_of_other_stages_do_not_help_to_sum() -> None:
    """Of 2 x 3 ranks a sum over 3, forward and backward, costs least by way of halves over the 2."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = [(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)) for _ in range(2)]
            self.layers = torch.nn.ModuleList(torch.nn.Sequential(*pair) for pair in both)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x))

    def run() -> float:
        torch.manual_seed(0)
        step = mw.compile_step(
            Net(), lambda net, x: net(x).square().mean(), None, torch.ones(12, 6), mesh=mesh, stages={"pp": "layers"},
            layouts={"layers.*.0.*": {"tp": mw.Shard(0)}}, passes=["pipeline:micro_batches=2"],
        )  # fmt: skip
        return float(step(torch.ones(12, 6)))

    mesh = mw.Mesh({"pp": 2, "tp": 3})
    torch.manual_seed(0)
    alone = float(Net()(torch.ones(12, 6)).square().mean())
    assert mw.simulate(run, mesh) == [pytest.approx(alone, rel=1e-6)] * 6


@pytest.mark.parametrize(
    ("options", "schedules"),
    [
        ({"precision": BF16}, ("zero-bubble",)),
        pytest.param({"blocks": (Dropped,) * 2}, ("1f1b", "zero-bubble"), marks=pytest.mark.long),
        ({"blocks": (Dropped,) * 4, "clip": None}, ("looped",)),
        pytest.param({"blocks": (Noisy,) * 2}, ("1f1b",), marks=pytest.mark.long),
        ({"blocks": (Dropped, Noisy)}, ("1f1b", "zero-bubble")),  # each draws at one stage
    ],
    ids=["bfloat16", "dropout", "dropout, several stages of a rank", "noise", "dropout and noise"],
)
def test_rounded_and_drawn(options: dict[str, Any], schedules: tuple[str, ...]) -> None:
    """The bits of the uncut step, whose masks are those of micro-batches, on ranks with several stages, too."""
    mesh, found = mw.Mesh({"pp": 2}), []
    for schedule in ("uncut", *schedules):

        def run(how: str = f"micro_batches=3,schedule={schedule}") -> Any:
            torch.manual_seed(3)
            return steps(mesh, [ignoring(i, 7) for i in range(2)], how, **options)

        found.append(mw.simulate(run, mesh)[0])
    for losses, params in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(t, found[0][1][n]) for n, t in params.items())
    assert found[0][0][0] != found[0][0][1]


@pytest.mark.parametrize("blocks", [(Attention, Block), (Block, Noisy), (Dropped, Block)])
def test_what_one_stage_draws_is_drawn_by_all(blocks: Any) -> None:
    """Ranks' generators stay in step: what is drawn, or saved, later is the same."""
    mesh = mw.Mesh({"pp": 2})

    def run() -> Any:
        torch.manual_seed(3)
        steps(mesh, [ignoring(0, 6)], "micro_batches=2", blocks=blocks)
        return torch.get_rng_state()

    first, second = mw.simulate(run, mesh)
    assert torch.equal(first, second)


def test_checkpointed_layers_run_again_at_their_stage() -> None:
    """The first residual of a layer adds a value of the stage before, and is needed again in the backward."""
    axes = {"pp": 2, "tp": 2}
    how: dict[str, Any] = {"layouts": TP, "blocks": (Checkpointed,) * 2}
    losses, wanted = one_device([data(0, 3)], blocks=how["blocks"])
    for found, params in mw.simulate(
        lambda: steps(mw.Mesh(axes), [data(0, 3)], "micro_batches=2", **how), mw.Mesh(axes)
    ):
        assert found == pytest.approx(losses, abs=1e-13)
        assert max((params[n] - wanted[n]).abs().max().item() for n in wanted) < 1e-14


def test_what_a_checkpoint_runs_again_runs_at_the_stage_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "Net", stages.Regions)
    losses, wanted = one_device([data(0, 3)])
    mesh = mw.Mesh({"pp": 2})
    for found, params in mw.simulate(lambda: steps(mesh, [data(0, 3)], "micro_batches=2,schedule=zero-bubble"), mesh):
        assert found == pytest.approx(losses, abs=1e-13)
        assert max((params[n] - wanted[n]).abs().max().item() for n in wanted) < 1e-14


def test_numbers_drawn_by_values_of_one_stage_are_refused() -> None:
    mesh = mw.Mesh({"pp": 2})
    said = "multinomial.default draws random numbers by values that stage 0 alone has"
    with pytest.raises(mw.errors.PassError, match=said):
        mw.simulate(lambda: steps(mesh, [ignoring(0, 6)], "micro_batches=2", blocks=(Sampled, Block)), mesh)


@pytest.mark.thin(2)
@pytest.mark.parametrize(("ranks", "blocks", "schedule"), [(2, 5, "looped"), (3, 6, "v"), (2, 6, "looped,chunks=3")])
def test_several_stages_of_a_rank(ranks: int, blocks: int, schedule: str) -> None:
    """Round and round, there and back, with a tied weight, which V has on one rank; one device's numbers and GPipe's
    bits."""
    mesh, given = mw.Mesh({"pp": ranks}), [ignoring(i, 7) for i in range(2)]
    options: dict[str, Any] = {"blocks": (Block,) * blocks, "tie": True, "clip": None}
    losses, wanted = one_device(given, **options)
    bits: Any = None
    for how in ("gpipe", schedule):
        made = mw.simulate(lambda h=how: steps(mesh, given, f"micro_batches=3,schedule={h}", **options), mesh)
        for found, params in made:
            bits = bits or (found, params)
            assert found == pytest.approx(losses, rel=1e-15)
            assert max((params[n] - wanted[n]).abs().max().item() for n in wanted) < 1e-14
            assert found == bits[0]
            assert all(torch.equal(params[n], bits[1][n]) for n in wanted)


GRID: list[tuple[dict[str, int], int, dict[str, Any]]] = [
    ({"pp": 2}, 3, {}),
    ({"pp": 2}, 7, {}),
    ({"pp": 4}, 3, {"blocks": (Block,) * 8}),
    ({"pp": 4}, 2, {"blocks": (Block,) * 8}),
    ({"pp": 2, "tp": 2}, 3, {"layouts": TP}),
    ({"pp": 2, "dp": 2}, 3, {"batch": DP, "shard_states": "dp"}),
    ({"pp": 2, "dp": 2}, 3, {"batch": DP, "fsdp": "dp"}),
    ({"pp": 2, "dp": 3}, 3, {"batch": DP, "fsdp": "dp", "tie": True}),
    ({"pp": 2, "cp": 2}, 3, {"blocks": (Attention,) * 4, "batch": CP}),
    ({"pp": 2, "ep": 2}, 3, {"blocks": EXPERTS * 2, "batch": {"ep": mw.Shard(0)}, "layouts": EP}),
    ({"pp": 2}, 3, {"precision": BF16}),
    ({"pp": 2, "dp": 2}, 3, {"precision": BF16, "batch": DP, "fsdp": "dp"}),
    ({"pp": 2}, 3, {"tie": True}),
    ({"pp": 2}, 3, {"blocks": (Dropped,) * 4}),
]


@pytest.mark.long
@pytest.mark.parametrize(("axes", "micro_batches", "options"), GRID, ids=str)
def test_every_schedule_has_the_bits_of_gpipe(axes: dict[str, int], micro_batches: int, options: Any) -> None:
    """One device's numbers where nothing is rounded or drawn; GPipe's bits in all orders."""
    mesh, given = mw.Mesh(axes), [ignoring(i, 13) for i in range(2)]
    options = {"blocks": (Block,) * 4, "clip": None} | options
    exact = "precision" not in options and options["blocks"][0] is not Dropped
    losses, wanted = one_device(given, **{k: options[k] for k in ("blocks", "clip", "tie") if k in options})
    bits: Any = None
    for how in ("gpipe", "uncut", "1f1b", "zero-bubble", "looped", "v"):

        def run(how: str = f"micro_batches={micro_batches},schedule={how}") -> Any:
            torch.manual_seed(3)
            return steps(mesh, given, how, **options)

        for found, params in mw.simulate(run, mesh):
            bits = bits or (found, params)
            assert found == bits[0], how
            assert all(torch.equal(params[n], bits[1][n]) for n in wanted), how
            if exact:
                assert found == pytest.approx(losses, rel=1e-15)
                assert max((params[n] - wanted[n]).abs().max().item() for n in wanted) < 1e-14


REAL: list[Any] = [
    ({"pp": 4}, "zero-bubble", {"blocks": (Block,) * 4}),
    ({"pp": 2, "tp": 2}, "v", {"layouts": TP, "blocks": (Block,) * 4}),
    pytest.param({"pp": 2, "cp": 2}, "looped", {"blocks": (Attention,) * 4, "batch": CP}, marks=pytest.mark.long),
]


def real(axes: dict[str, int], schedule: str, options: dict[str, Any]) -> Any:
    how = f"micro_batches=3,schedule={schedule}"
    return steps(mw.init_mesh(axes), [ignoring(i, 7) for i in range(2)], how, **options)


@pytest.mark.processes
@pytest.mark.parametrize(("axes", "schedule", "options"), REAL, ids=str)
def test_real_processes(axes: dict[str, int], schedule: str, options: dict[str, Any]) -> None:
    losses, wanted = one_device([ignoring(i, 7) for i in range(2)], blocks=options.get("blocks", (Block,) * 3))
    for found, params in run_processes(real, 4, axes, schedule, options, timeout=240):
        assert found == pytest.approx(losses, rel=1e-15)
        assert max((params[n] - wanted[n]).abs().max().item() for n in wanted) < 1e-14
