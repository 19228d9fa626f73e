"""Gradients on wires: the same bits on all ranks, eager and captured, and the bytes that were predicted."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from meshwright.collective import STARTS, WAIT_OP
from meshwright.errors import DesyncError, ShardError
from meshwright.explanation.step import explain_program
from meshwright.layout import Wire, wire_from, wire_name
from meshwright.program.check.verify import verify_together
from meshwright.ranks import runtime
from tests.support.device import DEVICE
from tests.support.processes import run_processes
from tests.support.shard_networks import TP, Net, loss_of
from tests.support.wire_values import summed, values

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

# -- training ---------------------------------------------------------------------------------------------

CASES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {}, {}),
    "dp tp": ({"dp": 2, "tp": 2}, {"placements": TP}, {}),
    "zero 1": ({"dp": 2}, {}, {"shard_states": "dp"}),
    "zero 3": ({"dp": 2}, {"fsdp": "dp"}, {}),
    "zero 3, uneven": ({"dp": 3}, {"fsdp": "dp"}, {}),
    "hybrid": ({"dp": 2, "shard": 2}, {"fsdp": "shard"}, {}),
    "zero 3 tp": ({"dp": 2, "tp": 2}, {"placements": TP, "fsdp": "dp"}, {}),
}
ROUNDED = ("zero 3, uneven", "zero 3 tp")  # without a wire too contributions are rounded otherwise in captured steps
IDS = torch.randint(0, 11, (12, 5), generator=torch.Generator().manual_seed(3))
SPLIT = {"dp": mw.Shard(0)}
HYBRID = {"dp": mw.Shard(0), "shard": mw.Shard(0)}


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def batch_of(mesh: mw.Mesh) -> dict[str, Any]:
    return HYBRID if "shard" in mesh.axes else SPLIT


def eager_step(mesh: mw.Mesh, case: str, precision: Any, micro: int = 1, **more: Any) -> Any:
    """Gradients, and what was sent."""
    _, options, states = CASES[case]
    model = mw.shard_module(net(), mesh, precision=precision, **options, **more)
    mw.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), **states)
    with collective.counting() as counts:
        for i, rows in enumerate(IDS.chunk(micro)):
            with mw.no_sync(model) if i < micro - 1 else torch.enable_grad():
                (loss_of(model, mw.shard_tensor(rows, mesh, batch_of(mesh))) / micro).backward()
        assert all(p.grad.placements == p.placements or states for p in model.parameters())
    return {n: mw.unshard(p.grad) for n, p in model.named_parameters()}, counts.table


def captured_step(mesh: mw.Mesh, case: str, precision: Any, passes: tuple[str, ...]) -> Any:
    """And the program."""
    _, options, states = CASES[case]
    laid = {k: v for k, v in options.items() if k != "placements"}
    model = net()
    step = mw.compile_step(
        model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), IDS, mesh=mesh, batch=batch_of(mesh),
        layouts=options.get("placements"), gradients=True, precision=precision, passes=passes, **laid, **states,
    )  # fmt: skip
    with collective.counting() as counts:
        step(IDS)
    assert explain_program(step.program).counts.table == counts.table
    return {n: mw.unshard(p.grad) for n, p in model.named_parameters()}, counts.table, step.program


def eager(case: str, precision: Any, **more: Any) -> list[Any]:
    """Of each rank."""
    mesh = mw.Mesh(CASES[case][0])
    return mw.simulate(lambda: eager_step(mesh, case, precision, **more), mesh)


def captured(case: str, precision: Any, passes: tuple[str, ...]) -> list[Any]:
    mesh = mw.Mesh(CASES[case][0])
    return mw.simulate(lambda: captured_step(mesh, case, precision, passes), mesh)


def equal(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, g in want.items():
        assert torch.equal(found[name], g), name


@pytest.mark.parametrize("wire", [BF16, mw.Float8(16)], ids=wire_name)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.thin(5)
def test_the_same_numbers_wherever_they_are_reduced(case: str, wire: Wire) -> None:
    precision = mw.Precision(grad_comm=wire)
    full, sent = eager(case, None)[0]
    ranks = eager(case, precision)
    found, counts = ranks[0]
    for other, _ in ranks[1:]:
        equal(other, found)
    for name, g in full.items():
        off = (found[name] - g).norm() / g.norm()
        assert 0 < off < (2**-8 if wire is BF16 else 2**-4) * 2, (name, off)
    equal(eager(case, precision, bucket_bytes=256)[0][0], found)  # whatever shares a buffer
    for passes in ((), ("data-parallel-optimization",)):
        made, ran, program = captured(case, precision, passes)[-1]
        for name, g in found.items():
            if case in ROUNDED:
                assert (made[name] - g).norm() <= (2**-8 if wire is BF16 else 2**-4) * g.norm()
            else:
                assert torch.equal(made[name], g), name
        assert any(kind.startswith("wire_") for kind, _ in ran)
        mw.check_program(program)
    # Nothing but gradients: weights are gathered, and activations summed, as they are.
    plain = {k: n for k, n in sent.items() if k[0] == "all_gather"}
    assert {k: n for k, n in counts.items() if k in plain} == plain
    assert (("all_reduce", ("tp",)) in counts) == ("tp" in case)
    assert sum(n for _, n in counts.values()) < sum(n for _, n in sent.values())


def wired(counts: dict[Any, Any]) -> dict[Any, Any]:
    return {k: n for k, n in counts.items() if k[0].startswith("wire_")}


def test_bytes_by_hand() -> None:
    """Whole blocks of each gradient; an all-reduce sends twice half of what two ranks hold, a reduce-scatter once."""
    sizes = [p.numel() for p in net().parameters()]
    (_, counts), *_ = eager("dp", mw.Precision(grad_comm=BF16))
    assert wired(counts) == {("wire_all_reduce", ("dp",)): [1, 2 * sum(sizes)]}
    (_, counts), *_ = eager("dp", mw.Precision(grad_comm=mw.Float8(8)))
    assert wired(counts) == {("wire_all_reduce", ("dp",)): [1, sum(n + n // 8 for n in sizes)]}
    (_, counts), *_ = eager("zero 1", mw.Precision(grad_comm=BF16))
    assert wired(counts) == {("wire_reduce_scatter", ("dp",)): [1, sum(sizes) + 8]}  # of 11 rows one rank has 6


def test_accumulated_in_float32_and_sent_once() -> None:
    for case in ("dp", "zero 3", "dp tp"):
        want, once = eager(case, mw.Precision(grad_comm=mw.Float8()))[0]
        found, counts = eager(case, mw.Precision(grad_comm=mw.Float8()), micro=2)[0]
        assert wired(counts) == wired(once)
        for name, g in want.items():
            assert (found[name] - g).norm() < 0.1 * g.norm()


def test_with_dtypes_and_globs() -> None:
    """Contributions computed in bfloat16, summed in float32 behind a wire; another wire, and none, for some."""
    policy = {
        "*": mw.Precision(compute=BF16, reduce=F32, grad_comm=mw.Float8()),
        "blocks.0": mw.Precision(grad_comm=BF16),
        "blocks.1": mw.Precision(),
    }
    for case in ("dp", "zero 3"):
        (_, counts), *_ = eager(case, policy)
        kind = "reduce_scatter" if case == "zero 3" else "all_reduce"
        assert counts[kind, ("dp",)][0] >= 1
        assert counts[f"wire_{kind}", ("dp",)][0] >= 2
        made, ran, _ = captured(case, policy, ("data-parallel-optimization",))[0]
        assert all(g.dtype is F32 for g in made.values())
        assert ran[kind, ("dp",)]
        assert ran[f"wire_{kind}", ("dp",)]
    with pytest.raises(ShardError, match="tied"):
        eager("dp", {"*": mw.Precision(), "head*": mw.Precision(grad_comm=BF16)})


def test_a_wire_is_said_where_a_parameter_is_sharded_first() -> None:
    def run() -> None:
        mesh = mw.Mesh({"dp": 2})
        model = mw.shard_module(nn.Linear(4, 4), mesh, precision=mw.Precision(grad_comm=BF16))
        mw.shard_module(model, mesh, precision=mw.Precision(grad_comm=BF16))
        with pytest.raises(ShardError, match="sent as bfloat16"):
            mw.shard_module(model, mesh, precision=mw.Precision(grad_comm=mw.Float8()))

    mw.simulate(run, mw.Mesh({"dp": 2}))


@pytest.mark.parametrize("wire", [BF16, mw.Float8()], ids=wire_name)
@pytest.mark.parametrize("options", [{}, {"fsdp": "dp"}], ids=["dp", "zero 3"])
def test_overflow_is_seen(wire: Wire, options: dict[str, Any]) -> None:
    """A contribution that is not finite, of one rank, on all: by clipping and by the scaler."""
    mesh = mw.Mesh({"dp": 2})

    def run() -> None:
        torch.manual_seed(0)
        model = mw.shard_module(nn.Linear(8, 8), mesh, precision=mw.Precision(grad_comm=wire), **options)
        optimizer = mw.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        before = mw.unshard(model.weight.detach()).clone()
        data = torch.ones(2, 8)
        data[1, 3] = torch.inf
        scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
        scaler.scale(model(mw.shard_tensor(data, mesh, {"dp": mw.Shard(0)})).sum()).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert torch.equal(mw.unshard(model.weight.detach()), before)

    mw.simulate(run, mesh)


def test_a_program_with_wires_is_a_file(tmp_path: Any) -> None:
    _, _, program = captured("zero 3", mw.Precision(grad_comm=mw.Float8(16)), ("data-parallel-optimization",))[0]
    mw.save_program(program, tmp_path / "p.zip")
    again = mw.load_program(tmp_path / "p.zip")
    assert str(again) == str(program)
    assert "float8/16" in str(again)
    assert {c.dtype for c in explain_program(again).collectives if c.kind.startswith("wire_")} == {"float8/16"}
    spec = next(i.spec for i in again.inputs if i.kind == "param")
    assert spec is not None
    assert (spec.comm_format, spec.grad_comm_format) == (None, mw.Float8(16))


def test_ranks_wait_in_one_order() -> None:
    """The wait for an all-reduce on a wire runs its second half: among other collectives it has a place."""
    passes = ("data-parallel-optimization:bucket_bytes=256",)
    programs = [made[2] for made in captured("dp", mw.Precision(grad_comm=BF16), passes)]
    verify_together(programs)
    graph = programs[1].graph
    started = next(n for n in graph.nodes if n.target in STARTS.values())
    waited = next(n for n in started.users if n.target is WAIT_OP)
    started.append(waited)
    with pytest.raises(DesyncError, match="wait for wire_all_reduce"):
        verify_together(programs)


def test_no_warning_of_few_bits() -> None:
    """More than 8 ranks are summed in float32, whatever travels."""
    mesh = mw.Mesh({"dp": 9})

    def run() -> Any:
        model = mw.shard_module(nn.Linear(3, 3), mesh, precision=mw.Precision(reduce=BF16, grad_comm=BF16))
        with mw.explain() as why:
            model(mw.shard_tensor(torch.ones(9, 3), mesh, SPLIT)).sum().backward()
        return why.warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mw.simulate(run, mesh)[0] == ()


def test_gradients_of_gradients() -> None:
    mesh = mw.Mesh({"dp": 2})

    def run() -> Any:
        torch.manual_seed(0)
        model = mw.shard_module(nn.Linear(4, 1), mesh, precision=mw.Precision(grad_comm=BF16))
        made = model(mw.shard_tensor(torch.ones(2, 4), mesh, SPLIT)).square().sum()
        (g,) = torch.autograd.grad(made, [model.weight], create_graph=True)
        g.square().sum().backward()
        return mw.unshard(model.weight.grad)

    torch.manual_seed(0)
    one = nn.Linear(4, 1)
    made = one(torch.ones(2, 4)).square().sum()
    (g,) = torch.autograd.grad(made, [one.weight], create_graph=True)
    g.square().sum().backward()
    for found in mw.simulate(run, mesh):
        torch.testing.assert_close(found, one.weight.grad, rtol=2**-6, atol=0)


@pytest.mark.thin(5)
@pytest.mark.parametrize("read", ["norm", "zero", "multiplied", "unshard"])
@pytest.mark.parametrize("wire", [None, BF16, mw.Float8(4)], ids=str)
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 3}, {"dp": 2}], ids=str)
def test_a_gradient_that_is_read_between_micro_steps(axes: dict[str, int], wire: Any, read: str) -> None:
    """It has the shape of the whole then, and travels alone."""
    mesh, x = mw.Mesh(axes), torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

    def run(mesh: mw.Mesh | None) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 6, bias=False)
        given = x
        if mesh is not None:
            laid = {"weight": {"tp": mw.Shard(0)}} if "tp" in axes else {}
            mw.shard_module(model, mesh, laid, precision=mw.Precision(grad_comm=wire))
            given = mw.shard_tensor(x, mesh, SPLIT)
        with mw.no_sync(model) if mesh is not None else contextlib.nullcontext():
            model(given).square().sum().backward()
        if read == "norm":
            model.weight.grad.norm()
        elif read == "zero":
            model.weight.grad.zero_()
        elif read == "multiplied":
            model.weight.grad.mul_(2)
        elif mesh is not None:
            mw.unshard(model.weight.grad)
        model(given).square().sum().backward()
        return model.weight.grad if mesh is None else mw.unshard(model.weight.grad)

    want = run(None)
    for found in mw.simulate(lambda: run(mesh), mesh):
        assert (found - want).norm() <= (0.08 if wire is not None else 1e-6) * want.norm()


def test_copies_keep_the_wire() -> None:
    mesh = mw.Mesh({"dp": 2})

    def run() -> Any:
        model = copy.deepcopy(mw.shard_module(nn.Linear(4, 4), mesh, precision=mw.Precision(grad_comm=BF16)))
        with collective.counting() as counts:
            model(mw.shard_tensor(torch.ones(2, 4), mesh, SPLIT)).sum().backward()
        return counts.kinds

    assert mw.simulate(run, mesh)[0] == {"wire_all_reduce": 1}


# -- real processes ---------------------------------------------------------------------------------------

NUMELS = (0, 5, 129)
TRAINED = ("zero 3, uneven", "plain, 3")
CASES["plain, 3"] = ({"dp": 3}, {}, {})


def collectives(mesh: mw.Mesh) -> list[torch.Tensor]:
    """Results on this rank for all wires, lengths and dims."""
    me, group, made = runtime.RT.rank, collective.group(mesh), []
    for wire in map(wire_name, (BF16, mw.Float8(), mw.Float8(5))):
        for n in NUMELS:
            own = values(n + me, n, 3.0)
            made.append(collective.wire_all_reduce(own, "sum", wire, group))
            made.append(collective.sum_async(own, group, wire_from(wire)).wait())
            assert made[-1] is own  # in place
        for dim, lengths in ((0, [4, 4, 2]), (1, [2, 2, 2]), (1, [6, 0, 0])):
            own = values(me, 60, 3.0).view(10, 6)
            made.append(collective.wire_reduce_scatter(own, "sum", dim, lengths, wire, group))
        first, second = (collective.sum_async(values(me + k, 300, 1.0), group, wire_from(wire)) for k in (0, 9))
        first.advance()
        second.advance()
        made += [second.wait(), first.wait()]
    return made


def on_processes(axes: dict[str, int]) -> Any:
    mesh = mw.init_mesh(axes)
    steps = {}
    for case in TRAINED:
        precision = mw.Precision(grad_comm=mw.Float8(16))
        steps[case] = eager_step(mesh, case, precision, bucket_bytes=256)
        steps[f"{case}, captured"] = captured_step(mesh, case, precision, ("data-parallel-optimization",))[:2]
    return collectives(mesh), steps


@pytest.mark.processes
def test_real_processes_have_the_same_bits() -> None:
    mesh = mw.Mesh({"dp": 3})
    wanted = mw.simulate(lambda: collectives(mesh), mesh)
    for rank, (made, steps) in enumerate(run_processes(on_processes, 3, {"dp": 3})):
        for found, want in zip(made, wanted[rank], strict=True):
            assert torch.equal(found, want)
        for case in TRAINED:
            found, sent = steps[case]
            want, predicted = eager(case, mw.Precision(grad_comm=mw.Float8(16)), bucket_bytes=256)[rank]
            assert sent == predicted
            equal(found, want)
            found, _ = steps[f"{case}, captured"]
            equal(
                found, captured(case, mw.Precision(grad_comm=mw.Float8(16)), ("data-parallel-optimization",))[rank][0]
            )


class Twins(dist.ProcessGroup):
    """A process group in Python, whose other rank has the same values."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Any:
        for out in outputs[0]:
            out.copy_(inputs[0])
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return torch._C._distributed_c10d._create_work_from_future(future)


def test_a_process_group_in_python() -> None:
    group, x = collective.Group.from_process_group(Twins()), values(1, 40, 1.0)
    found = collective.wire_reduce_scatter(x, "sum", 0, [20, 20], "float8/8", group)
    assert torch.equal(found, summed([x[:20], x[:20]], mw.Float8(8)))


@pytest.mark.parametrize("options", [{}, {"fsdp": "dp"}], ids=["dp", "zero 3"])
def test_optimizers_and_checkpoints_know_nothing_of_it(options: dict[str, Any], tmp_path: Any) -> None:
    """Clipping, AdamW, and a run without a wire that goes on from what one with a wire saved."""
    mesh = mw.Mesh({"dp": 2})

    def made(precision: Any) -> Any:
        model = mw.shard_module(net(), mesh, precision=precision, **options)
        return model, mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = loss_of(model, mw.shard_tensor(IDS, mesh, SPLIT))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm.isfinite()
        optimizer.step()
        optimizer.zero_grad()
        return float(mw.unshard(loss.detach()))

    def run() -> Any:
        losses = []
        for precision in (None, mw.Precision(grad_comm=mw.Float8())):
            model, optimizer = made(precision)
            losses.append([step(model, optimizer) for _ in range(5)])
        mw.Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer, wait=True)
        again, other = made(None)
        mw.Checkpoints(tmp_path).load(model=again, optimizer=other)
        for name, p in again.named_parameters():
            assert torch.equal(mw.unshard(p), mw.unshard(dict(model.named_parameters())[name]))
        return *losses, step(again, other), step(model, optimizer)

    full, sent, on, off = mw.simulate(run, mesh)[0]
    assert full[-1] < full[0]
    assert sent == pytest.approx(full, rel=0.05)
    assert on == off


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, mw.Float8(16)], ids=str)
def test_what_is_only_moved_is_not_rounded(wire: Any) -> None:
    """Gradients of ``torch.autograd.grad``, hooks and ``no_sync`` have their wire still: for what is summed of them."""
    mesh = mw.Mesh({"dp": 1, "tp": 2})

    def grads(on: mw.Mesh | None) -> list[Any]:
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        x: Any = torch.randn(4, 8)
        if on is not None:
            layouts = {"0.*": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}}
            net = mw.shard_module(net, on, layouts, precision=mw.Precision(grad_comm=wire))
            x = mw.shard_tensor(x, on, {})
        found: list[Any] = []
        net[0].weight.register_hook(lambda g: found.append(mw.unshard(g) if on else g))
        found += torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
        with contextlib.nullcontext() if on is None else mw.no_sync(net):
            net(x).square().mean().backward()
        found += [p.grad for p in net.parameters()]
        return [mw.unshard(g) if isinstance(g, mw.DistTensor) else g for g in found]

    want = grads(None)
    for found in mw.simulate(lambda: grads(mesh), mesh):
        torch.testing.assert_close(found, want)
