"""Parameters gathered in a format of their own: ops see what arrives, gradients and masters are as without it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from meshwright.errors import CollectiveError, ShardError
from meshwright.explanation.step import explain_program
from meshwright.layout import Wire, chunk_sizes, wire_bytes, wire_name
from meshwright.ranks import runtime
from tests.support.processes import run_processes
from tests.support.shard_networks import TP, Net, loss_of
from tests.support.wire_values import F32, WIRES, parts_of, through

BF16, F64 = torch.bfloat16, torch.float64
Tensor = torch.Tensor
EIGHT = mw.Float8(16)

# -- the collective ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
@pytest.mark.parametrize("wire", WIRES, ids=wire_name)
@pytest.mark.parametrize(("shape", "dim", "ranks"), [((16, 8), 0, 2), ((7, 3), 0, 3), ((5, 9), 1, 4), ((2, 3), 0, 3)])
def test_parts_arrive_as_they_travelled(
    wire: Wire, dtype: torch.dtype, shape: tuple[int, ...], dim: int, ranks: int
) -> None:
    """On all ranks, the own part too; of values of all sizes, uneven and empty parts; with the bytes counted."""
    mesh = mw.Mesh({"dp": ranks})
    whole = parts_of(1, shape, 3)[0].to(dtype)
    sizes = chunk_sizes(shape[dim], ranks)
    parts = whole.split(sizes, dim)

    def run() -> Any:
        own = parts[runtime.RT.rank]
        with collective.counting() as counts:
            made = collective.wire_all_gather(own, dim, sizes, wire_name(wire), collective.group(mesh, (0,)))
        return made, counts.table

    want = torch.cat([through(p.float(), wire).to(dtype) for p in parts], dim)
    sent = sum(wire_bytes(wire, p.numel()) for p in parts)
    for made, counts in mw.simulate(run, mesh):
        assert made.dtype is dtype
        assert torch.equal(made, want)
        assert counts == {("wire_all_gather", ("dp",)): [1, (ranks - 1) * sent // ranks]}


def test_only_values_are_rounded() -> None:
    def run() -> None:
        group = collective.group(mw.Mesh({"dp": 2}), (0,))
        with pytest.raises(CollectiveError, match="floating-point values do"):
            collective.wire_all_gather(torch.ones(2, dtype=torch.int64), 0, [2, 2], "bfloat16", group)

    mw.simulate(run, mw.Mesh({"dp": 2}))


# -- training ---------------------------------------------------------------------------------------------

CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "zero 3": ({"dp": 2}, {}),
    "uneven": ({"dp": 3}, {}),
    "hybrid": ({"dp": 2, "shard": 2}, {"fsdp": "shard"}),
    "tp": ({"dp": 2, "tp": 2}, {"placements": TP}),
}
PASSES = ("data-parallel-optimization",)
STEPS = 3
IDS = torch.randint(0, 11, (STEPS, 12, 5), generator=torch.Generator().manual_seed(3))


def net(dtype: torch.dtype = F64) -> Net:
    torch.manual_seed(1)
    made = Net().to(dtype)
    made.offset = made.offset.float()  # which asks for no wider sum
    return made


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def batch_of(mesh: mw.Mesh) -> dict[str, Any]:
    return {a: mw.Shard(0) for a in mesh.axes if a != "tp"}


def rounded(t: Tensor, cuts: list[tuple[int, int]], wire: Wire, dtype: torch.dtype) -> Tensor:
    """As ops see a parameter: each rank's chunk, by dim and number of ranks, as it travelled."""
    if not cuts:
        return through(t.to(dtype).float(), wire).to(dtype)
    (dim, n), *rest = cuts
    return torch.cat([rounded(part, rest, wire, dtype) for part in t.split(chunk_sizes(t.shape[dim], n), dim)], dim)


def one_device(cuts: dict[str, list[tuple[int, int]]], wire: Wire, dtype: torch.dtype) -> dict[str, Tensor]:
    """Trained on one device, with ops that see each gathered parameter rounded, and gradients that pass that by."""
    model = net()
    optimizer = optimizer_of(model)
    for ids in IDS:
        seen = {}
        for name, p in model.named_parameters():
            low = p.to(dtype)
            value = rounded(p.detach(), cuts[name], wire, dtype) if cuts[name] else low.detach()
            seen[name] = low + (value - low.detach())
            assert torch.equal(seen[name], value)
        optimizer.zero_grad()
        tied = {"head.weight": seen["emb.weight"]}
        logits = torch.func.functional_call(model, {**seen, **tied}, (ids,))
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def cuts_of(model: nn.Module, mesh: mw.Mesh, over: str) -> dict[str, list[tuple[int, int]]]:
    """Of each parameter that is gathered: the dims that axes split, and into how many."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name, p in model.named_parameters():
        laid = dict(zip(mesh.axes, p.placements, strict=True))  # type: ignore[attr-defined]
        split = [(q.dim, mesh.axis_size(a)) for a, q in laid.items() if isinstance(q, mw.Shard)]
        found[name] = split if isinstance(laid[over], mw.Shard) else []
    return found


def eagerly(mesh: mw.Mesh, case: str, precision: Any, **more: Any) -> Any:
    options = {"fsdp": "dp", **CASES[case][1], **more}
    model = mw.shard_module(net(), mesh, precision=precision, **options)
    optimizer = mw.shard_optimizer(optimizer_of(model))
    with collective.counting() as counts:
        for ids in IDS:
            optimizer.zero_grad()
            loss_of(model, mw.shard_tensor(ids, mesh, batch_of(mesh))).backward()
            optimizer.step()
    made = {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}
    return made, cuts_of(model, mesh, options["fsdp"]), counts.table


def captured(mesh: mw.Mesh, case: str, precision: Any, passes: tuple[str, ...]) -> Any:
    model, options = net(), dict(CASES[case][1])
    step = mw.compile_step(
        model, loss_of, optimizer_of(model), IDS[0], mesh=mesh, batch=batch_of(mesh), precision=precision,
        layouts=options.pop("placements", None), passes=passes, **{"fsdp": "dp", **options},
    )  # fmt: skip
    mw.check_program(step.program)
    with collective.counting() as counts:
        for ids in IDS:
            step(ids)
    assert {k: [STEPS * x for x in v] for k, v in explain_program(step.program).counts.table.items()} == counts.table
    return {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}, counts.table, step.program


def close(found: dict[str, Tensor], want: dict[str, Tensor], by: float) -> None:
    for name, w in want.items():
        assert (found[name] - w).abs().max() <= by * w.abs().max(), name


def wired(counts: dict[Any, Any]) -> dict[Any, Any]:
    return {k: n for k, n in counts.items() if k[0].startswith("wire_")}


@pytest.mark.thin(7)
@pytest.mark.parametrize("wire", [EIGHT, mw.Float8(), BF16], ids=wire_name)
@pytest.mark.parametrize("compute", [None, F32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_as_one_device_that_sees_what_arrives(case: str, compute: torch.dtype | None, wire: Wire) -> None:
    """Masters in float64, ops in float64 or float32, 3 steps of AdamW; eager and captured, with and without passes."""
    mesh = mw.Mesh(CASES[case][0])
    precision = mw.Precision(compute=compute, gather=wire)
    ranks = mw.simulate(lambda: eagerly(mesh, case, precision), mesh)
    made, cuts, _ = ranks[0]
    want, by = one_device(cuts, wire, compute or F64), 1e-9 if compute is None else 1e-4
    assert any(cuts.values())
    for found, _, _ in ranks:
        close(found, want, by)
    plain = mw.simulate(lambda: eagerly(mesh, case, None), mesh)[0][0]
    assert any((plain[n] - w).abs().max() > 1e-3 * w.abs().max() for n, w in want.items() if cuts[n])
    for passes in ((), PASSES):
        for found, *_ in mw.simulate(lambda p=passes: captured(mesh, case, precision, p), mesh):
            close(found, want, by)
    hosted = mw.simulate(lambda: eagerly(mesh, case, precision, offload="cpu"), mesh)[0][0]
    assert all(torch.equal(hosted[n], t) for n, t in made.items())


def test_bytes_by_hand() -> None:
    """A block of 16 elements is 17 bytes; of embeddings, which come first, no second gather is made."""
    mesh, precision = mw.Mesh({"dp": 2}), mw.Precision(gather=EIGHT)
    _, _, counts = mw.simulate(lambda: eagerly(mesh, "zero 3", precision), mesh)[0]
    found = wired(counts)
    assert set(found) == {("wire_all_gather", ("dp",))}
    assert ("all_gather", ("dp",)) not in counts
    plain = mw.simulate(lambda: eagerly(mesh, "zero 3", None), mesh)[0][2]["all_gather", ("dp",)]
    messages, sent = found["wire_all_gather", ("dp",)]
    assert messages == plain[0]
    assert sent < plain[1] * (17 / 16) / 8 * 1.5  # float64 parameters, and chunks filled up to whole blocks
    fused = mw.simulate(lambda: captured(mesh, "zero 3", precision, PASSES), mesh)[0][1]
    assert wired(fused)["wire_all_gather", ("dp",)][0] < messages * 2
    assert ("all_gather", ("dp",)) not in fused


def test_only_what_is_gathered_is_rounded() -> None:
    """Plain data parallelism, what shard_states leaves to gather, masters, unshard and state_dict are exact."""
    mesh, precision = mw.Mesh({"dp": 2}), mw.Precision(gather=EIGHT)

    def run(precision: Any, **options: Any) -> Any:
        model = mw.shard_module(net(), mesh, precision=precision, **options)
        optimizer = mw.shard_optimizer(optimizer_of(model), shard_states=None if options else "dp")
        loss_of(model, mw.shard_tensor(IDS[0], mesh, batch_of(mesh))).backward()
        optimizer.step()
        return {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}

    plain, found = (mw.simulate(lambda p=p: run(p), mesh)[0] for p in (None, precision))
    assert all(torch.equal(found[n], t) for n, t in plain.items())

    def untouched() -> None:
        start = net()
        want = {n: t.clone() for n, t in start.state_dict().items()}
        model = mw.shard_module(start, mesh, precision=precision, fsdp="dp")
        with torch.no_grad():
            model(mw.shard_tensor(IDS[0], mesh, batch_of(mesh)))
        for n, p in model.named_parameters():
            assert torch.equal(mw.unshard(p), want[n])
            assert p.dtype is F64
        for n, t in model.state_dict().items():
            assert torch.equal(mw.unshard(t) if isinstance(t, mw.DistTensor) else t, want[n])

    mw.simulate(untouched, mesh)


class Clamped(nn.Module):
    """Writes to its weight in the forward, as clipping weights does, and to a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(64, dtype=F32).view(8, 8) / 37)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight[:, 2:4] = 0.3
            self.weight.clamp_(max=1.0)
        return x @ self.weight


def test_what_a_forward_writes_reaches_the_parameter_and_nothing_else_is_rounded() -> None:
    mesh, x = mw.Mesh({"dp": 2}), torch.ones(4, 8)
    one = Clamped()
    with torch.no_grad():
        one(x)

    def eager() -> Tensor:
        model = mw.shard_module(Clamped(), mesh, fsdp="dp", precision=mw.Precision(gather=EIGHT))
        with torch.no_grad():
            model(mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)}))
        return mw.unshard(model.weight.detach())

    def program() -> Tensor:
        model = Clamped()
        options: dict[str, Any] = {"fsdp": "dp", "precision": mw.Precision(gather=EIGHT)}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        mw.compile_step(model, lambda m, x: m(x).sum(), optimizer, x, mesh=mesh, batch={"dp": mw.Shard(0)}, **options)(
            x
        )
        return mw.unshard(model.weight.detach())

    start = torch.arange(64, dtype=F32).view(8, 8) / 37
    clear = (start <= 1) | (start > 1 + 2**-4)  # what is above the limit is so too once it is rounded
    for run in (eager, program):
        for made in mw.simulate(run, mesh):
            assert torch.equal(made[clear], one.weight.detach()[clear])
            assert ((made == start) | (made == 1))[~clear].all()


def habits(mesh: mw.Mesh, precision: Any) -> list[Tensor]:
    """Accumulation, a frozen and an unfrozen weight, evaluation in between, a copy, a pickle, checkpointed blocks."""
    model = net(F32)
    model.checkpointed = True
    mw.shard_module(model, mesh, precision=precision, fsdp="dp")
    optimizer = mw.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    ids = [mw.shard_tensor(i, mesh, batch_of(mesh)) for i in IDS]
    with mw.no_sync(model):
        loss_of(model, ids[0]).backward()
    loss_of(model, ids[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.blocks[0].up.weight.requires_grad_(False)
    with torch.no_grad():
        losses = [loss_of(model, ids[2])]
    loss_of(model, ids[2]).backward()
    assert model.blocks[0].up.weight.grad is None
    model.blocks[0].up.weight.requires_grad_(True)
    optimizer.step()
    other = copy.deepcopy(model)
    losses += [loss_of(m, ids[0]).detach() for m in (model, other)]
    losses += [mw.unshard(p.detach()) for p in model.parameters()]
    return [mw.unshard(t) for t in losses]


def test_habits() -> None:
    """In units, which gather ahead and again, the same as without, but for what is rounded."""
    mesh = mw.Mesh({"dp": 2})
    plain, *_ = mw.simulate(lambda: habits(mesh, None), mesh)
    found, other = mw.simulate(lambda: habits(mesh, mw.Precision(gather=EIGHT)), mesh)
    for a, b, c in zip(found, other, plain, strict=True):
        assert torch.equal(a, b)
        assert (a - c).norm() < 0.15 * c.norm()
    assert torch.equal(found[1], found[2])
    assert not torch.equal(found[0], plain[0])


def test_said_of_one_parameter_in_two_ways() -> None:
    mesh = mw.Mesh({"dp": 2})

    def run() -> None:
        with pytest.raises(ShardError, match=r"gather=3: .*mw.Float8\(\) was expected"):
            mw.Precision(gather=3)  # type: ignore[arg-type]
        policy = {"*": mw.Precision(), "head*": mw.Precision(gather=EIGHT)}
        with pytest.raises(ShardError, match=r"tied.*gathered as float8/16"):
            mw.shard_module(net(), mesh, fsdp="dp", precision=policy)
        model = mw.shard_module(nn.Linear(4, 4), mesh, fsdp="dp", precision=mw.Precision(gather=EIGHT))
        mw.shard_module(model, mesh, precision=mw.Precision(gather=EIGHT))
        with pytest.raises(ShardError, match=r"is sharded already.*gathered as float8/16"):
            mw.shard_module(model, mesh, precision=mw.Precision(gather=BF16))
        whole = mw.shard_module(nn.Linear(4, 4), mesh, precision=mw.Precision(gather=EIGHT))
        mw.shard_module(whole, mesh, precision=mw.Precision(gather=EIGHT))
        mw.shard_module(whole, mesh)

    mw.simulate(run, mesh)


def test_a_program_is_a_file(tmp_path: Any) -> None:
    mesh, precision = mw.Mesh({"dp": 2}), mw.Precision(gather=EIGHT)
    program = mw.simulate(lambda: captured(mesh, "zero 3", precision, PASSES), mesh)[1][2]
    mw.save_program(program, tmp_path / "p.zip")
    again = mw.load_program(tmp_path / "p.zip")
    assert str(again) == str(program)
    assert {c.dtype for c in explain_program(again).collectives if "gather" in c.kind} == {"float8/16"}


def _worker(ranks: int) -> None:
    mesh = mw.init_mesh({"dp": ranks})
    precision = mw.Precision(compute=F32, gather=EIGHT)
    made, cuts, counts = eagerly(mesh, "zero 3", precision)
    close(made, one_device(cuts, EIGHT, F32), 1e-4)
    for passes in ((), PASSES):
        found, *_ = captured(mesh, "zero 3", precision, passes)
        close(found, made, 1e-4)
    assert ("wire_all_gather", ("dp",)) in counts


@pytest.mark.processes
@pytest.mark.thin(2)
@pytest.mark.parametrize("ranks", [3, 2])
def test_between_processes(ranks: int) -> None:
    run_processes(_worker, ranks, ranks)
