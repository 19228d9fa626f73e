"""data-parallel-optimization: the same parameters with fewer reductions, started early; hard cases; bad input."""

from __future__ import annotations

import cProfile
import math
import pstats
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright import collective
from meshwright.errors import PassError
from meshwright.passes import DataParallelOptimization, PassManager
from meshwright.program import Plan, Program, build
from meshwright.program.check.verify import verify_together
from meshwright.program.ir.nodes import VIEWS, checked_value, info_of
from meshwright.train.config import TrainConfig
from meshwright.train.model import GPT, loss_of
from meshwright.train.plan import plan_for
from tests.support import sweep as sweeps
from tests.support.alone import passed_together
from tests.support.processes import run_processes

Tensor = torch.Tensor
STEPS = sweeps.steps(20)
SMALL = "data-parallel-optimization:bucket_bytes=20000"


# ---------------------------------------------------------------------------------------------- steps


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.a(x)))
        return self.head(F.relu(self.b(x)).flatten(1))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Two experts, split over ``ep``; the rest of the model sees both axes as data parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 6)
        self.expert = nn.Parameter(torch.randn(2, 6, 6) / 3)
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:  # x: expert, row, feature
        return self.out(torch.tanh(torch.bmm(torch.tanh(self.inside(x)), self.expert)))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One weight used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 12)
        self.head = nn.Linear(12, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(torch.tanh(x @ self.table.weight.T @ self.table.weight))  # type: ignore[no-any-return]


def penalty(model: nn.Module, batch: Any) -> Tensor:
    """A loss with a gradient in it: double backward."""
    x = batch[0].detach().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    made: Tensor = (out - batch[1]).square().mean() + 0.1 * (grad.square().sum(1) - 1).square().mean()
    return made


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def regression(model: nn.Module, batch: Any) -> Tensor:
    made: Tensor = F.mse_loss(model(batch[0]), batch[1])
    return made


def classes(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out.flatten(0, -2), batch[1].flatten())


def gpt(axes: dict[str, int], tie: bool = False) -> tuple[Any, ...]:
    cfg = TrainConfig(mesh=tuple(axes.items()), layers=2, hidden=48, heads=6, seq=12, batch=8, dtype="float64", tie=tie)
    plan = plan_for(mw.Mesh(axes), sequence_parallel=False, tie=tie)
    options = {"layouts": plan.layouts, "batch": plan.batch, "inputs": plan.inputs, "outputs": plan.outputs}
    ids = [torch.randint(0, 256, (8, 12)) for _ in range(2)]
    return GPT(cfg), (lambda m, b: loss_of(m, *b)), tuple(ids), options


def case(name: str, axes: dict[str, int]) -> tuple[Any, ...]:
    """Model, loss function, batch and options of one case."""
    torch.manual_seed(3)
    over_dp = {"batch": {"dp": mw.Shard(0)}}
    rows = 8
    if name in ("gpt", "gpt-tied"):
        return gpt(axes, tie=name == "gpt-tied")
    if name == "cnn":
        return Cnn().double(), classes, (torch.randn(rows, 3, 8, 8).double(), torch.randint(0, 5, (rows,))), over_dp
    if name == "tied":
        return Tied().double(), classes, (torch.randint(0, 16, (rows, 4)), torch.randint(0, 16, (rows, 4))), over_dp
    if name == "penalty":
        return critic().double(), penalty, (torch.randn(rows, 6).double(), torch.randn(rows, 1).double()), over_dp
    if name == "experts":
        layouts = {"expert": {"ep": mw.Shard(0)}}
        options = {"layouts": layouts, "batch": {"ep": mw.Shard(0), "dp": mw.Shard(1)}}
        return (
            Experts().double(),
            regression,
            (torch.randn(2, rows, 6).double(), torch.randn(2, rows, 1).double()),
            options,
        )
    assert name == "clip"
    model, loss, batch, options = case("cnn", axes)
    return model, loss, batch, {**options, "clip_grad_norm": 0.05}


def train(
    name: str, axes: dict[str, int], passes: list[Any], connect: bool = False, **more: Any
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Global parameters after STEPS steps, and the collectives of the last one."""
    mesh = mw.init_mesh(axes) if connect else mw.Mesh(axes)
    model, loss, batch, options = case(name, axes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = mw.compile_step(model, loss, optimizer, batch, mesh=mesh, passes=passes, **{**options, **more})
    for i in range(STEPS):
        torch.manual_seed(i)
        fresh = tuple(t + 0.1 * torch.randn_like(t) if t.is_floating_point() else t.roll(i, 0) for t in batch)
        with collective.counting() as counts:
            step(fresh)
    assert counts.kinds == step.program.kinds
    return {n: mw.unshard(p.detach()).clone() for n, p in model.named_parameters()}, counts.kinds


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def both(
    name: str, axes: dict[str, int], passes: list[Any], **more: Any
) -> tuple[float, dict[str, int], dict[str, int]]:
    """Largest difference of a parameter with and without passes, and the collectives of both."""
    plain, kinds = trained(name, axes, [], **more)
    made, fewer = trained(name, axes, passes, **more)
    return furthest(plain, made), kinds, fewer


def trained(name: str, axes: dict[str, int], passes: list[Any], **more: Any) -> Any:
    """What the first rank has in the end, and its collectives."""
    return mw.simulate(lambda: train(name, axes, passes, **more), mw.Mesh(axes), timeout=300)[0]


# ---------------------------------------------------------------------------------------------- the same parameters

CASES = [
    ("gpt", {"dp": 2, "tp": 2}),
    ("gpt-tied", {"dp": 2, "tp": 2}),
    ("gpt", {"dp": 3}),
    ("cnn", {"dp": 4}),
    ("clip", {"dp": 2}),
    ("tied", {"dp": 2}),
    ("penalty", {"dp": 2}),
    ("experts", {"dp": 2, "ep": 2}),
]


@pytest.mark.thin(8)
@pytest.mark.parametrize(("name", "axes"), CASES, ids=[f"{n}-{'x'.join(map(str, a.values()))}" for n, a in CASES])
def test_same_parameters_bit_for_bit(name: str, axes: dict[str, int]) -> None:
    """Simulated ranks add in the order of the ranks, whatever shares a buffer: only the order of issue changes."""
    plain, kinds = trained(name, axes, [])
    for passes in (["data-parallel-optimization"], [SMALL]):
        made, fewer = trained(name, axes, passes)
        assert furthest(plain, made) == 0
        assert sum(fewer.values()) <= sum(kinds.values())
    assert sum(fewer.values()) < sum(kinds.values()) or name == "tied"


@pytest.mark.thin(3)
@pytest.mark.parametrize("more", [{"fsdp": "dp"}, {"shard_states": "dp"}, {"gradients": True}], ids=str)
def test_sharded_parameters_and_states(more: dict[str, Any]) -> None:
    apart, kinds, fewer = both("gpt", {"dp": 2, "tp": 2}, [SMALL], **more)
    assert apart == 0
    assert sum(fewer.values()) < sum(kinds.values())
    if "reduce_scatter" in kinds:  # fused as well
        assert 0 < fewer["reduce_scatter"] < kinds["reduce_scatter"]


@pytest.mark.thin(2)
@pytest.mark.parametrize("option", ["fuse=false", "overlap=false", "prune=false", "fuse=false,overlap=false"])
def test_each_part_can_be_left_out(option: str) -> None:
    given = f"data-parallel-optimization:bucket_bytes=2000,{option}"
    apart, kinds, fewer = both("cnn", {"dp": 2}, [given])
    assert apart == 0
    assert (kinds == fewer) == ("fuse=false" in option)
    (program, *_) = programs("cnn", {"dp": 2}, given)
    place = places(program)
    backward = max(i for n, i in place.items() if info_of(n).role == "backward" and not info_of(n).sync)
    assert (min(place[n] for n in starts(program)) < backward) == ("overlap=false" not in option)


def test_with_gradient_merge_in_either_order() -> None:
    merge = "gradient-merge:k_steps=2,weighted=false"  # batch norm takes the statistics of a micro-batch
    results = [
        mw.simulate(partial(train, "cnn", {"dp": 2}, p), mw.Mesh({"dp": 2}), timeout=300)[0]
        for p in ([merge], [merge, SMALL], [SMALL, merge])
    ]
    (plain, kinds), (one, fewer), (other, also) = results
    assert furthest(plain, one) == furthest(plain, other) == 0
    assert fewer == also
    assert fewer["all_reduce"] < kinds["all_reduce"]


def test_all_programs_of_a_merge_are_optimized() -> None:
    """Micro-steps gather and scatter for stored parameters, a flush sums and scales as the last micro-step does."""

    def run(name: str, passes: list[Any], options: dict[str, Any]) -> Any:
        model, loss, batch, layouts = case(name, {"dp": 2})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        mesh, options = mw.Mesh({"dp": 2}), {**layouts, **options, "passes": passes}
        step = mw.compile_step(model, loss, optimizer, batch, mesh=mesh, **options)
        for i in range(5):
            step(tuple(t.roll(i, 0) for t in batch))
        step.flush()
        programs = {"last": step.program, **step.program.parts}
        kinds = {n: (sum(p.kinds.values()), len(list(starts(p)))) for n, p in programs.items()}
        scaled = {n: sum(m.target is torch.ops.aten.mul.Tensor and bool(info_of(m).grad_of) for m in p.graph.nodes)
                  for n, p in programs.items()}  # fmt: skip
        return {n: mw.unshard(p.detach()).clone() for n, p in model.named_parameters()}, kinds, scaled

    merge = "gradient-merge:k_steps=3,weighted=false"
    for name, options, other in (("gpt", {"fsdp": "dp"}, "accumulate"), ("cnn", {}, "flush")):
        (plain, kinds, _), (made, fewer, scaled) = (
            mw.simulate(lambda: run(name, passes, options), mw.Mesh({"dp": 2}))[0]  # noqa: B023
            for passes in ([merge], [merge, SMALL])
        )
        assert furthest(plain, made) == 0
        for part in ("last", other):
            assert 0 < fewer[part][0] < kinds[part][0], (name, part)
            assert fewer[part][1] > kinds[part][1] == 0
        assert scaled == dict.fromkeys(scaled, 0)


def on_processes(name: str, axes: dict[str, int], passes: list[Any]) -> tuple[dict[str, Tensor], dict[str, int]]:
    return train(name, axes, passes, connect=True)


@pytest.mark.processes
@pytest.mark.thin(3)
@pytest.mark.parametrize(("name", "axes"), [("gpt", {"dp": 2}), ("gpt", {"dp": 2, "tp": 2}), ("cnn", {"dp": 2})])
def test_real_processes(name: str, axes: dict[str, int]) -> None:
    world = math.prod(axes.values())
    plain = run_processes(on_processes, world, name, axes, [], timeout=180)
    made = run_processes(on_processes, world, name, axes, [SMALL], timeout=180)
    assert furthest(plain[0][0], made[0][0]) == 0  # two ranks: a sum of two has one order
    assert made[0][1]["all_reduce"] < plain[0][1]["all_reduce"]
    for other in made[1:]:
        assert furthest(made[0][0], other[0]) == 0


# ---------------------------------------------------------------------------------------------- the program


def programs(name: str, axes: dict[str, int], *passes: Any) -> list[Program]:
    """The programs of all ranks."""
    mesh = mw.Mesh(axes)
    made = []
    for rank in mesh.ranks:
        model, loss, batch, options = case(name, axes)
        plan = Plan(**options)
        built = build(model, loss, torch.optim.AdamW(model.parameters()), batch, mesh, plan, rank=rank)
        made.append(built.program)
    return passed_together(made, passes)


def places(program: Program) -> dict[Any, int]:
    return {n: i for i, n in enumerate(program.graph.nodes)}


def starts(program: Program) -> list[Any]:
    return [n for n in program.graph.nodes if n.target in collective.STARTS.values()]


def test_each_starts_when_its_last_gradient_exists_and_is_waited_for_at_its_first_use() -> None:
    (program, *_) = programs("gpt", {"dp": 2}, SMALL)
    place = places(program)
    first = min(i for n, i in place.items() if info_of(n).role == "optimizer")
    found = starts(program)
    assert len(found) > 3
    for node in found:
        buffer = node.args[0]
        parts = [u for u in buffer.users if u is not node]
        written = max(place[w] for p in parts for w in p.users)
        behind = [n for n, i in place.items() if written < i < place[node]]
        assert all(n.target in VIEWS for n in behind), "something runs between"
        (wait,) = node.users
        assert wait.target is collective.WAIT_OP
        read = min(place[u] for part in wait.users for u in part.users)
        assert place[wait] < read
        assert not [n for n, i in place.items() if place[wait] < i < read and info_of(n).role == "backward"
                    and n.target is not torch.ops.aten.as_strided.default
                    and n.target is not collective.WAIT_OP]  # fmt: skip
    spread = [place[n] for n in found]
    assert spread[0] < first / 2 + spread[-1] / 2, "they are spread over the backward"
    assert sum("_fused_adamw_" in str(n.target) for n in place) > 1, "what has arrived is updated meanwhile"


def test_nobody_touches_a_buffer_under_way() -> None:
    for program in programs("gpt-tied", {"dp": 2, "tp": 2}, SMALL):
        place, meanwhile = places(program), 0
        for node in starts(program):
            (wait,) = node.users
            storage = checked_value(node).storage
            between = [n for n, i in place.items() if place[node] < i < place[wait]]
            meanwhile += len([n for n in between if "aten.mm." in str(n.target)])
            for n in between:
                touched = [x for x in (n, *n.all_input_nodes) if getattr(info_of(x).value, "storage", None) == storage]
                assert not touched or n.target in VIEWS, f"{n} touches {node}"
        assert meanwhile, "the backward goes on while they are under way"


@pytest.mark.thin(6)
@pytest.mark.parametrize(
    ("name", "axes"), [("gpt", {"dp": 2, "tp": 4}), ("gpt", {"dp": 3, "tp": 4}), ("cnn", {"dp": 5})]
)
@pytest.mark.parametrize("passes", [SMALL, "data-parallel-optimization"])
def test_ranks_meet_in_one_order_whatever_their_shards(name: str, axes: dict[str, int], passes: str) -> None:
    """48 hidden units and 6 heads over 4 ranks, 8 rows over 3 and 5: parts differ, some are empty."""
    verify_together(programs(name, axes, passes))


def test_limits_and_reasons() -> None:
    (before, *_) = programs("gpt", {"dp": 2})
    manager = PassManager([DataParallelOptimization(bucket_bytes=40_000)])
    after, (record,) = manager.run(before)
    sizes = [b["bytes"] for b in record.details["buckets"]]
    alone = record.details["alone"]
    for bucket in record.details["buckets"]:
        assert bucket["bytes"] <= 40_000 or len(bucket["gradients"]) == 1
    assert sum(sizes) == sum(p.numel() * 8 for p in case("gpt", {"dp": 2})[0].parameters())
    assert "tokens.weight" in alone
    assert alone["tokens.weight"].endswith("bytes fill a bucket")
    assert record.details["before"] == 29
    assert f"29 reductions of gradients became {len(sizes)}" in record.summary
    assert before.kinds["all_reduce"] - after.kinds["all_reduce"] == 29 - len(sizes)
    one = PassManager([DataParallelOptimization(bucket_bytes=1 << 30)]).run(before)[1][0]
    assert one.details["after"] == 1


class Mixed(Experts):
    """Experts, whose other weights are of two dtypes."""

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.tanh(self.inside(x.float())).double()
        return self.out(torch.tanh(torch.bmm(inside, self.expert)))  # type: ignore[no-any-return]


def test_what_shares_a_bucket() -> None:
    """It is summed over the same ranks, and of one dtype."""
    model, (_, loss, batch, options) = Mixed().double(), case("experts", {"dp": 2, "ep": 2})
    model.inside.float()
    plan = Plan(**options)
    built = build(model, loss, torch.optim.SGD(model.parameters()), batch, mw.Mesh({"dp": 2, "ep": 2}), plan)
    for size in (1 << 30, "auto"):
        program, (record,) = PassManager([DataParallelOptimization(bucket_bytes=size)]).run(built.program)
        buckets = sorted(sorted(b["gradients"]) for b in record.details["buckets"])
        assert buckets == [["expert"], ["inside.bias", "inside.weight"], ["out.bias", "out.weight"]]
        sent = {(n.args[-2], checked_value(n).dtype) for n in starts(program)}
        assert sent == {("dp", torch.float64), ("dp,ep", torch.float32), ("dp,ep", torch.float64)}


def test_nothing_to_do() -> None:
    model, plan = nn.Linear(4, 4), Plan(layouts={"*weight": {"tp": mw.Shard(0)}, "*bias": {"tp": mw.Shard(0)}})
    built = build(model, lambda m, b: m(b).sum(), None, torch.zeros(2, 4), mw.Mesh({"tp": 2}), plan)
    _, (record,) = PassManager(["data-parallel-optimization"]).run(built.program)
    assert "nothing to do" in record.summary


def test_a_bucket_smaller_than_an_element() -> None:
    with pytest.raises(PassError, match=r"bucket_bytes=4 is smaller than one element of the gradient of .*float64"):
        programs("cnn", {"dp": 2}, "data-parallel-optimization:bucket_bytes=4")


# ---------------------------------------------------------------------------------------------- steps by hand

Sync = Callable[[nn.Module], None]


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def divided(model: nn.Module) -> None:
    for grad in grads(model):
        torch.distributed.all_reduce(grad)
        grad /= torch.distributed.get_world_size()


def before(model: nn.Module) -> None:
    for grad in grads(model):
        grad.mul_(1 / 2)
        torch.distributed.all_reduce(grad)


def mixed(model: nn.Module) -> None:
    for i, grad in enumerate(grads(model)):
        torch.distributed.all_reduce(grad)
        grad /= 2 if i % 2 else 4


def clipped(model: nn.Module) -> None:
    """Each rank clips before it divides: not linear, so nothing may move in front of it."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    divided(model)


def forgetful(model: nn.Module) -> None:
    for i, grad in enumerate(grads(model)):
        if i != 2:
            torch.distributed.all_reduce(grad)
        grad /= 2


SYNCS = {f.__name__: f for f in (divided, before, mixed, clipped, forgetful)}


def by_hand(sync: str, passes: list[Any] | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A hand-written step, run as it is (None) or captured."""
    model, loss, batch, _ = case("cnn", {"dp": 2})
    mesh = mw.init_mesh({"dp": 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rank = torch.distributed.get_rank()

    def step(b: Any) -> Tensor:
        made: Tensor = loss(model, b)
        made.backward()  # type: ignore[no-untyped-call]
        SYNCS[sync](model)
        optimizer.step()
        optimizer.zero_grad()
        return made.detach()

    records: list[Any] = []
    run: Any = step
    local = tuple(t[rank::2].clone() for t in batch)
    if passes is not None:
        manager = PassManager(passes, after_each=lambda r, *_: records.append(r))
        run = mw.capture_local(step, mesh, model=model, optimizer=optimizer, batch=local, passes=manager)
    for i in range(STEPS):
        torch.manual_seed(i)
        fresh = tuple(t + 0.1 * torch.randn_like(t) if t.is_floating_point() else t for t in batch)
        run(tuple(t[rank::2].clone() for t in fresh))
    details = dict(records[0].details) if records else {}
    if passes:
        details["text"] = str(run.program)
    return {n: p.detach().clone() for n, p in model.named_parameters()}, details


@pytest.mark.processes
@pytest.mark.thin(4)
@pytest.mark.parametrize("sync", ["divided", "before", "mixed", "clipped"])
def test_steps_by_hand(sync: str) -> None:
    passes = ["data-parallel-optimization:bucket_bytes=1000000"]
    plain = run_processes(by_hand, 2, sync, None)
    made = run_processes(by_hand, 2, sync, passes)
    assert furthest(plain[0][0], made[0][0]) < 1e-12
    details = made[0][1]
    assert details["pruned"] == details["before"] == 8
    assert details["after"] == 1
    if sync in ("divided", "before"):
        assert details["folded"] == 0.5
        assert not details["rescaled"]
    else:
        assert details["folded"] == 1.0
        assert details["rescaled"] == ({0.5: 4, 0.25: 4} if sync == "mixed" else {0.5: 8})


@pytest.mark.processes
def test_scaled_but_not_summed_is_an_error_that_names_the_gradient() -> None:
    with pytest.raises(
        AssertionError, match=r"the gradient of b.weight is scaled by 1/2 .* but never summed over ranks"
    ):
        run_processes(by_hand, 2, "forgetful", ["data-parallel-optimization"])


@pytest.mark.processes
def test_a_step_by_hand_with_gradient_merge() -> None:
    plain = run_processes(by_hand, 2, "divided", ["gradient-merge:k_steps=2"])
    made = run_processes(by_hand, 2, "divided", ["data-parallel-optimization", "gradient-merge:k_steps=2"])
    assert furthest(plain[0][0], made[0][0]) < 1e-12


# ---------------------------------------------------------------------------------------------- time


@pytest.mark.long
def test_work_is_linear_in_the_layers() -> None:
    def made(layers: int) -> Program:
        cfg = TrainConfig(mesh=(("dp", 2),), layers=layers, hidden=32, heads=2, seq=8, batch=4)
        model, mesh = GPT(cfg, "meta"), mw.Mesh({"dp": 2})
        batch = (torch.zeros(4, 8, dtype=torch.long),) * 2
        plan = Plan(batch={"dp": mw.Shard(0)})
        return build(
            model, lambda m, b: loss_of(m, *b), torch.optim.AdamW(model.parameters()), batch, mesh, plan
        ).program

    def calls(program: Program, size: Any) -> int:
        with cProfile.Profile() as counted:
            PassManager([DataParallelOptimization(bucket_bytes=size)]).run(program)
        return int(pstats.Stats(counted).total_calls)  # type: ignore[attr-defined]

    listed = [made(layers) for layers in (6, 12, 24)]
    for size in (20000, "auto"):
        calls(listed[0], size)  # what is looked up once
        few, some, many = (calls(program, size) for program in listed)
        assert many - some < 1.03 * 2 * (some - few)


class Head(nn.Module):
    """A weight and a bias of which a rank has nothing, last or first among the parameters."""

    def __init__(self, rows: int, first: bool) -> None:
        super().__init__()
        if not first:
            self.pre = nn.Parameter(torch.randn(4, 4))
        self.weight, self.bias = nn.Parameter(torch.randn(rows, 4)), nn.Parameter(torch.randn(rows))
        if first:
            self.pre = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x @ self.pre, self.weight, self.bias).square().sum()


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_parameters_without_elements_on_a_rank_share_a_place_in_a_buffer(rows: int, first: bool, kind: Any) -> None:
    mesh = mw.Mesh({"dp": 2, "tp": 3})
    x = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(2))

    def trained(on: mw.Mesh | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Head(rows, first)
        optimizer = kind(model.parameters(), lr=0.01)
        if on is None:
            for one in x:
                optimizer.zero_grad()
                model(one).backward()
                optimizer.step()
            return [p.detach() for p in model.parameters()]
        layouts = {"weight": {"tp": mw.Shard(0)}, "bias": {"tp": mw.Shard(0)}}
        step = mw.compile_step(
            model, lambda m, b: m(b), optimizer, x[0], mesh=on, layouts=layouts, batch={"dp": mw.Shard(0)},
            passes=["data-parallel-optimization"],
        )  # fmt: skip
        for one in x:
            step(one)
        return [mw.unshard(p.detach()) for p in model.parameters()]

    want = trained(None)
    for found in mw.simulate(lambda: trained(mesh), mesh):
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b)
