"""Pipelines: cut as uncut, bit by bit, in every schedule; uncut as one device; what crosses, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright import collective
from meshwright.errors import MeshwrightError, PassError, ProgramError
from meshwright.passes import Pipeline
from meshwright.program import Action, Schedule
from meshwright.program.run.pipeline import _cut_specs
from tests.support import stages
from tests.support.processes import run_processes
from tests.support.stages import DP, TP, captured, ignoring, one_device, steps, whole

Tensor = torch.Tensor
STEPS = 2


def batches(rows: int) -> list[Any]:
    return [ignoring(i, rows) for i in range(STEPS)]


CASES: list[tuple[dict[str, int], int, int, dict[str, Any]]] = [
    ({"pp": 2}, 7, 17, {"clip": None}),  # of 3 and of 2 rows
    ({"pp": 3}, 2, 8, {"tie": True}),  # fewer than stages; a weight at both ends
    ({"pp": 2}, 1, 3, {}),
    # Of gradients that are cut in `W` some come from `I`.
    (
        {"pp": 2, "dp": 2},
        2,
        8,
        {"batch": DP, "fsdp": "dp", "tie": True, "passes": ["data-parallel-optimization"]},
    ),
    ({"pp": 2, "tp": 2}, 4, 8, {"layouts": TP}),
    ({"pp": 4}, 2, 8, {"blocks": (stages.Block,) * 4}),
    ({"dp": 2, "pp": 2}, 4, 11, {"batch": DP, "shard_states": "dp"}),
    ({"pp": 2, "dp": 3}, 2, 12, {"batch": DP, "fsdp": "dp", "tie": True}),
    ({"pp": 2, "dp": 2}, 2, 8, {"batch": DP, "loss_scale": 64.0, "passes": ["data-parallel-optimization"]}),
    ({"pp": 3, "dp": 2, "tp": 2}, 3, 12, {"batch": DP, "layouts": TP, "fsdp": {"layers.*": "dp"}}),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize(("axes", "micro_batches", "rows", "options"), CASES, ids=str)
def test_bits(axes: dict[str, int], micro_batches: int, rows: int, options: dict[str, Any]) -> None:
    """One device's numbers; the cut step has the bits of the uncut one, whatever the schedule."""
    its = {k: v for k, v in options.items() if k in ("clip", "tie", "blocks")}
    losses, wanted = one_device(batches(rows), **its)
    bits: Any = None
    for schedule in ("uncut", *(("gpipe", "1f1b") if len(axes) == 1 else ()), "zero-bubble"):
        how = f"micro_batches={micro_batches},schedule={schedule}"
        for found, params in mw.simulate(
            lambda h=how: steps(mw.Mesh(axes), batches(rows), h, **options), mw.Mesh(axes)
        ):
            bits = bits or (found, params)
            assert found == pytest.approx(losses, abs=1e-13)
            assert max((params[n] - wanted[n]).abs().max().item() for n in wanted) < 1e-14
            assert found == bits[0]
            assert all(torch.equal(params[n], bits[1][n]) for n in wanted)


def real(how: str, options: Any) -> Any:
    return steps(mw.init_mesh({"pp": 2, "dp": 2}), batches(8), how, batch=DP, **options)


@pytest.mark.processes
def test_real_processes() -> None:
    losses, wanted = one_device(batches(8), tie=True)
    how = "micro_batches=4,schedule=zero-bubble"
    for found, params in run_processes(real, 4, how, {"tie": True, "shard_states": "dp"}, timeout=120):
        assert found == pytest.approx(losses, abs=1e-13)
        assert max((params[n] - wanted[n]).abs().max().item() for n in wanted) < 1e-14


def test_bytes_and_work_of_a_stage() -> None:
    """What a rank sends is b·t·h of each micro-batch and way, as explained; it computes its own stage alone."""
    mesh, micro_batches, rows = mw.Mesh({"pp": 3, "dp": 2}), 3, 12

    def run() -> Any:
        passes = [f"pipeline:micro_batches={micro_batches}"]
        step, _, _ = captured(mesh, passes=passes, batch=DP, example=ignoring(0, rows))
        step(ignoring(0, rows))
        with collective.counting() as counts:
            step(ignoring(0, rows))
        parts = step.program.parts
        linear = sum("addmm" in str(n.target) for n in parts["F"].graph.nodes)
        return (
            counts.table.get((collective.SEND, ("pp",)), [0, 0]),
            linear,
            parts["F"].kinds,
            parts["B"].kinds,
            step.explain().counts.kinds,
        )

    size = rows // micro_batches // 2 * 5 * 6 * 8
    for rank, (sent, linear, forward, backward, explained) in enumerate(mw.simulate(run, mesh)):
        assert explained.get(collective.SEND) == sent[0]
        ways = [1, 2, 1][mesh.coordinate(rank)[0]]
        assert sent == [ways * micro_batches, ways * micro_batches * size]
        assert linear == 2  # of one block
        assert sum(forward.values()) + sum(backward.values()) <= 2  # the number of labels, over dp


def test_held_micro_batches_are_those_of_the_schedule() -> None:
    """The most micro-batches of which a rank keeps something, counted while it runs."""
    from meshwright.program.run import pipeline as run_pipeline

    seen = dict[int, int]()

    class Counted(dict[int, Any]):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

        def setdefault(self, key: int, default: Any = None) -> Any:
            found = super().setdefault(key, default)
            seen[self.rank] = max(seen.get(self.rank, 0), len(self))
            return found

    for schedule, ranks in (("1f1b", 3), ("zero-bubble", 3), ("looped", 2), ("v", 2)):
        seen.clear()
        mesh = mw.Mesh({"pp": ranks})

        def run(name: str = schedule, mesh: mw.Mesh = mesh) -> Any:
            how = f"pipeline:micro_batches=6,schedule={name}"
            step, _, _ = captured(mesh, passes=[how], blocks=(stages.Block,) * 4, example=ignoring(0, 6))
            init = run_pipeline._Run.__init__

            def counted(self: Any, of: Any) -> None:
                init(self, of)
                self.held = Counted(of.here)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(run_pipeline._Run, "__init__", counted)
                step(ignoring(0, 6))
            return step.program.pipeline.schedule

        order = mw.simulate(run, mesh)[0]
        assert seen == {rank: order.held(rank) for rank in range(ranks)}


def test_what_users_do_to_it() -> None:
    """Other sizes, evaluation between steps, a distributed batch, gradients, an optimizer behind the program."""
    mesh = mw.Mesh({"pp": 2})

    def run() -> None:
        step, model, _ = captured(mesh, passes=["pipeline:micro_batches=2"], gradients=True, clip=None)
        alone = stages.net()
        for rows in (8, 5):
            given = ignoring(rows, rows)
            assert step.eval(given).item() == pytest.approx(stages.loss_of(alone, given).item(), abs=1e-13)
            alone.load_state_dict(whole(model))
            alone.zero_grad()
            stages.loss_of(alone, given).backward()
            step(given)
            for name, p in alone.named_parameters():
                grad = model.get_parameter(name).grad
                assert (mw.unshard(grad) - p.grad).abs().max() < 1e-14, name
            alone.load_state_dict(whole(model))
        given = ignoring(3, 8)
        lies = tuple(mw.shard_tensor(t, mesh, mw.Replicate()) for t in given)
        assert step(lies).item() == pytest.approx(stages.loss_of(alone, given).item(), abs=1e-13)

    mw.simulate(run, mesh, check=True)


class Between(stages.Net):
    """A module of no stage, called between blocks beside one: what it takes and gives is at several stages."""

    def __init__(self) -> None:
        super().__init__(tie=True)
        self.extra = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        for layer in self.layers:
            h = layer(h) + self.extra(h)
        return self.head(self.norm(h))


def test_modules_of_no_stage() -> None:
    """Gradients of every step, of weights too that a module of no stage and one of a later stage have."""
    mesh, said = mw.Mesh({"pp": 2, "dp": 2}), {"layers.0": 0, "layers.[12]": 1, "head": 1}

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Between().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    alone, update = made()
    wanted = []
    for batch in batches(8):
        update.zero_grad()
        stages.loss_of(alone, batch).backward()
        update.step()
        wanted.append({n: p.grad.clone() for n, p in alone.named_parameters() if p.grad is not None})

    def run() -> None:
        model, optimizer = made()
        how: dict[str, Any] = {"stages": {"pp": said}, "batch": DP, "passes": ["pipeline:micro_batches=2"]}
        step = mw.compile_step(model, stages.loss_of, optimizer, batches(8)[0], mesh=mesh, gradients=True, **how)
        for batch, grads in zip(batches(8), wanted, strict=True):
            step(batch)
            for name, grad in grads.items():
                assert (mw.unshard(model.get_parameter(name).grad) - grad).abs().max() < 1e-14, name

    mw.simulate(run, mesh)


def test_autocast_in_the_loss_function() -> None:
    """Which the modules are still seen in."""
    mesh = mw.Mesh({"pp": 2})

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return stages.loss_of(model, batch)

    def run(*passes: str) -> float:
        model = stages.net().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile_step(
            model, loss_of, optimizer, ignoring(0, 8), mesh=mesh, stages=stages.STAGES, passes=passes
        )
        assert {p.placements[0] for p in model.parameters()} >= {mw.At(0), mw.At(1)}
        return [step(ignoring(0, 8)).item() for _ in range(2)][-1]

    whole_batch, cut = (mw.simulate(lambda p=p: run(*p), mesh)[0] for p in ((), ("pipeline:micro_batches=2",)))
    assert cut == pytest.approx(whole_batch, abs=1e-2)


class Lent(torch.nn.Module):
    """A weight that only a later stage uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (torch.nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(self.b(x), self.a.weight).square().mean()


@pytest.mark.filterwarnings("ignore:stages. stage 0")
def test_sums_that_all_come_from_other_stages() -> None:
    mesh, x = mw.Mesh({"pp": 2}), torch.arange(16.0, dtype=torch.float64).view(4, 4) / 9

    def run(*passes: str) -> Any:
        model = Lent()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile_step(
            model, lambda m, b: m(b), optimizer, x, mesh=mesh, stages={"pp": {"a": 0, "b": 1}}, passes=passes
        )
        return [step(x).item() for _ in range(3)], model.a.weight.placements

    one = Lent()
    optimizer, losses = torch.optim.SGD(one.parameters(), lr=0.1), []
    for _ in range(3):
        losses.append(one(x))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    for found, home in mw.simulate(lambda: run("pipeline:micro_batches=2"), mesh):
        assert home == (mw.At(0),)
        assert found == pytest.approx([loss.item() for loss in losses], rel=1e-12)


class Statistics(stages.Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)


class Counted(stages.Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1  # type: ignore[operator,assignment]
        return super().forward(x) * self.seen.clamp(max=1)  # type: ignore[operator]


def test_a_loss_that_is_a_sum() -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")

    def run() -> tuple[float, dict[str, Tensor]]:
        model = stages.net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = mw.compile_step(
            model, loss_of, optimizer, ignoring(0, 7), mesh=mw.Mesh({"pp": 2}), stages=stages.STAGES,
            passes=["pipeline:micro_batches=3"],
        )  # fmt: skip
        return step(ignoring(0, 7)).item(), whole(model)

    alone = stages.net()
    loss = loss_of(alone, ignoring(0, 7))
    loss.backward()
    torch.optim.SGD(alone.parameters(), lr=0.01).step()
    for found, params in mw.simulate(run, mw.Mesh({"pp": 2})):
        assert found == pytest.approx(loss.item(), abs=1e-12)
        assert max((params[n] - p).abs().max().item() for n, p in alone.named_parameters()) < 1e-14


def test_a_schedule_of_ones_own() -> None:
    """A table or a function, in float32; micro-batches in another order at each stage; what is wrong with one."""
    mesh = mw.Mesh({"pp": 2})

    def orders(*ranks: str) -> Schedule:
        return Schedule(
            tuple(tuple(Action(a[0], r, int(a[1])) for a in o.split()) for r, o in enumerate(ranks)), "mine"
        )

    mine = orders("F2 F0 F1 B0 B2 B1", "F0 F1 F2 B2 B0 B1")

    def run(how: Any) -> float:
        model = stages.Net()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.01)
        step = mw.compile_step(
            model, stages.loss_of, torch.optim.SGD(model.parameters(), lr=0.1), ignoring(0, 6), mesh=mesh,
            stages=stages.STAGES, passes=[how],
        )  # fmt: skip
        step(ignoring(0, 6))
        return step(ignoring(1, 6)).item()

    ways = [Pipeline(3, mine), Pipeline(3, lambda p, m: mine), Pipeline(3, "uncut")]
    own, made, uncut = [mw.simulate(lambda h=h: run(h), mesh)[0] for h in ways]
    assert own == made
    assert own == pytest.approx(uncut, rel=1e-5)
    for how, message in (
        (Pipeline(4, mine), "mine has 2 stages on 2 ranks and 3 micro-batches; this step has 2 on 2 and 4"),
        (Pipeline(3, mine, limit=2), "mine: rank 0 holds 3 micro-batches, more than 2"),
        (
            Pipeline(3, lambda p, m: orders("B0 F0", "F0 B0")),
            r"mine never ends: rank 0 waits in B0 .* for F0 of stage 0",
        ),
    ):
        with pytest.raises(MeshwrightError, match=message):
            mw.simulate(lambda h=how: run(h), mesh)


AXES = {"pp": 2, "dp": 2}
BAD: list[tuple[Any, type[MeshwrightError], str]] = [
    ({"stages": None}, PassError, r'the step has no stages: give compile_step\(stages='),
    ({"rows": 3}, ProgramError, "a batch of 3 rows cannot be cut into 4 micro-batches"),
    (
        {"axes": AXES, "batch_of": lambda *b: tuple(mw.shard_tensor(t[:6], mw.Mesh(AXES), DP) for t in b)},
        ProgramError, "a batch of 6 rows, of which each rank has at most 3, cannot be cut into 4 micro-batches",
    ),
    ({"passes": ["pipeline:micro_batches=0"]}, PassError, "micro_batches=0: a whole number of at least 1"),
    ({"passes": ["pipeline:micro_batches=4,schedule=2f2b"]}, PassError, "schedule='2f2b': one of gpipe, 1f1b"),
    ({"passes": ["pipeline:micro_batches=4,schedule=gpipe,limit=2"]}, PassError, "gpipe holds all 4 micro-batches"),
    (
        {"passes": ["pipeline:micro_batches=4", "gradient-merge:k_steps=2"]},
        PassError, "pipeline and gradient-merge cannot be used together",
    ),
    ({"model": Statistics}, PassError, r"batch_norm.default uses a sum .* take the step on the whole batch"),
    ({"model": Counted}, PassError, r"test_pipeline.py:\d+ writes to the buffer seen: in a pipeline"),
    ({"batch_of": lambda x, y: (x, y[:3])}, ProgramError, "tensor 0 has 8 of them, tensor 1 has 3"),
    ({"passes": ["pipeline:micro_batches=4,gather=never"]}, PassError, "gather='never': 'run' or 'step' or"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=[message[:30] for _, _, message in BAD])
def test_bad_input(options: Any, error: type[MeshwrightError], message: str) -> None:
    given = dict(options)
    mesh = mw.Mesh(given.pop("axes", {"pp": 2}))
    rows, kind, of = given.pop("rows", 8), given.pop("model", stages.Net), given.pop("batch_of", lambda *x: x)

    def run() -> None:
        with pytest.raises(error, match=message):
            mw.compile_step(
                kind(), stages.loss_of, None, of(*ignoring(0, rows)), mesh=mesh,
                **{"stages": stages.STAGES, "passes": ["pipeline:micro_batches=4"], **given},
            )  # fmt: skip

    mw.simulate(run, mesh)


def test_other_rows_on_one_stage_are_named_before_anything_is_sent() -> None:
    mesh = mw.Mesh({"pp": 2})
    text = r"batch tensor 0 has 8 rows on rank 0 \(stage rank 0\) and 12 rows on rank 1 \(stage rank 1\)"

    def run() -> None:
        step = mw.compile_step(
            stages.Net(), stages.loss_of, None, ignoring(0, 8), mesh=mesh, stages=stages.STAGES,
            passes=["pipeline:micro_batches=4"],
        )  # fmt: skip
        with pytest.raises(mw.errors.DesyncError, match=text):
            step(ignoring(0, 12 if collective.group(mesh).index else 8))
        step(ignoring(0, 8))

    mw.simulate(run, mesh)


def test_a_receive_that_never_comes_is_told() -> None:
    """Ranks that wait for each other's sends, and a sender that ends."""
    mesh = mw.Mesh({"pp": 2})

    def crossed() -> None:
        here = collective.group(mesh).index
        lanes = [collective.lane(mesh, 0, 0, 1), collective.lane(mesh, 0, 1, 0)]
        came = collective.receive("x", (2,), torch.float32, lanes[1 - here]).wait()
        collective.send(came, "x", lanes[here])

    with pytest.raises(mw.errors.DesyncError, match=r"deadlock: every rank waits .*\n.*waits in send\(what=x\)"):
        mw.simulate(crossed, mesh)

    def ended() -> None:
        lane = collective.lane(mesh, 0, 0, 1)
        if collective.group(mesh).index:
            collective.receive("x", (2,), torch.float32, lane).wait()

    with pytest.raises(mw.errors.DesyncError, match=r"rank 0 finished without send\(what=x\)"):
        mw.simulate(ended, mesh)

    def other() -> None:
        lane = collective.lane(mesh, 0, 0, 1)
        if collective.group(mesh).index:
            collective.receive("x", (2,), torch.float32, lane).wait()
        else:
            collective.send(torch.ones(3), "y", lane)

    with pytest.raises(mw.errors.DesyncError, match=r"rank 0 sent send\(what=y\) of float32\[3\], rank 1 waits"):
        mw.simulate(other, mesh)


def _sum(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


SCALED: dict[str, Any] = {
    "rows": lambda model, batch: _sum(model, batch) / len(batch[1]),
    "tokens": lambda model, batch: _sum(model, batch) * (1 / batch[1].numel()),
    "a number that is the tokens of a micro-batch": lambda model, batch: _sum(model, batch) / 10,
    "smoothed": lambda model, batch: F.cross_entropy(
        model(batch[0]).flatten(0, 1), batch[1].flatten(), label_smoothing=0.1
    ),
    "one minus a mean": lambda model, batch: 1 - model(batch[0]).square().mean(),
    "a mean times rows": lambda model, batch: model(batch[0]).square().mean() * len(batch[1]),
    "a number of the batch": lambda model, batch: _sum(model, batch) / batch[2],
    "a number of the batch, one at least": lambda model, batch: _sum(model, batch) / batch[2].clamp(min=1),
    "a mean and a number of the batch": lambda model, batch: model(batch[0]).square().mean() * batch[2],
}


@pytest.mark.parametrize("how", SCALED)
def test_numbers_that_are_sizes_are_told_from_the_users_own(how: str) -> None:
    """Micro-batches of two rows, of ten tokens: one device's loss and gradients, whichever number it is."""
    loss_of, given = SCALED[how], (*ignoring(0, 6), torch.tensor(30.0, dtype=torch.float64))

    def run() -> tuple[float, dict[str, Tensor]]:
        model = stages.net()
        step = mw.compile_step(
            model, loss_of, torch.optim.SGD(model.parameters(), lr=0.01), given, mesh=mw.Mesh({"pp": 2}),
            stages=stages.STAGES, passes=["pipeline:micro_batches=3"],
        )  # fmt: skip
        return step(given).item(), whole(model)

    alone = stages.net()
    loss = loss_of(alone, given)
    loss.backward()
    torch.optim.SGD(alone.parameters(), lr=0.01).step()
    found, params = mw.simulate(run, mw.Mesh({"pp": 2}))[0]
    assert found == pytest.approx(loss.item(), rel=1e-14)
    assert max((params[n] - p).abs().max().item() for n, p in alone.named_parameters()) < 1e-14


def test_a_number_that_depends_on_rows_otherwise_is_refused() -> None:
    def run() -> None:
        with pytest.raises(
            PassError, match=r"div.Tensor takes the number 4, and 16 for twice as many rows.* no weighted mean"
        ):
            mw.compile_step(
                stages.net(), lambda m, b: _sum(m, b) / len(b[1]) ** 2, None, ignoring(0, 6), mesh=mw.Mesh({"pp": 2}),
                stages=stages.STAGES, passes=["pipeline:micro_batches=3"],
            )  # fmt: skip

    mw.simulate(run, mw.Mesh({"pp": 2}))


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2, "dp": 3}, {"dp": 2, "fsdp": 2, "tp": 2}], ids=str)
def test_each_rank_cuts_its_own_rows(axes: dict[str, int]) -> None:
    """Also of a batch that the ranks do not divide; the parts are layouts of their own, or it is an error."""
    mesh = mw.Mesh(axes)
    layout = mw.Layout(mesh, {a: mw.Shard(0) for a in axes if a in ("dp", "fsdp")})
    for rows in range(1, 20):
        for n in range(1, 5):
            spec = mw.Spec((rows, 2), torch.float32, layout)
            held = [spec.local_shape(mesh.coordinate(rank))[0] for rank in mesh.ranks]
            try:
                parts = _cut_specs(spec, n)
            except ProgramError:
                assert max(held) < n
                continue
            assert sum(p.shape[0] for p in parts) == rows
            for rank, own in enumerate(held):
                sizes = [t.shape[0] for t in torch.empty(own).tensor_split(n)]
                assert [p.local_shape(mesh.coordinate(rank))[0] for p in parts] == sizes


def test_one_row_for_which_other_code_runs_is_named() -> None:
    """Such a step is no weighted mean for a reason that has nothing to do with the loss."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return _sum(model, batch) if len(batch[1]) == 1 else _sum(model, batch).square().sqrt()

    def run() -> None:
        with pytest.raises(PassError, match=r"has one row here: .* use fewer micro-batches"):
            mw.compile_step(
                stages.net(), loss, None, ignoring(0, 6), mesh=mw.Mesh({"pp": 2}), stages=stages.STAGES,
                passes=["pipeline:micro_batches=6"],
            )  # fmt: skip

    mw.simulate(run, mw.Mesh({"pp": 2}))
