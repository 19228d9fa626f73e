"""Steps written by hand for one rank, with torch.distributed, as programs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshwright as mw
from meshwright import collective
from meshwright.errors import CaptureError, DesyncError, ProgramError
from meshwright.passes import DataParallelOptimization, PassManager
from meshwright.program.capture.local import HandWritten, record_step
from meshwright.program.capture.update import update_of
from meshwright.program.compile import capture_local
from meshwright.program.ir.nodes import info_of
from meshwright.program.step import CompiledStep
from meshwright.ranks import runtime
from meshwright.train.config import TrainConfig
from meshwright.train.model import GPT, loss_of
from tests.support import sweep as sweeps
from tests.support.processes import run_processes

Tensor = torch.Tensor
STEPS = sweeps.steps(20)


class CNN(nn.Module):
    """A small network with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.norm(self.first(x)).relu()).relu().mean((2, 3)))


def network(
    kind: str, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, Callable[..., Tensor], Callable[[int], Any]]:
    """A model, its loss(model, batch), and what makes this rank's i-th batch."""
    torch.manual_seed(0)
    if kind == "cnn":

        def images(i: int) -> Any:
            g = torch.Generator().manual_seed(100 * i + runtime.RT.rank)
            return torch.randn(4, 3, 6, 6, dtype=dtype, generator=g), torch.randint(0, 5, (4,), generator=g)

        return CNN().to(dtype), lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), images
    cfg = TrainConfig(mesh={"dp": 2}, layers=2, hidden=16, heads=2, seq=8, batch=4, tie=kind == "tied")

    def text(i: int) -> Any:
        g = torch.Generator().manual_seed(100 * i + runtime.RT.rank)
        return torch.randint(0, 256, (2, 8), generator=g), torch.randint(0, 256, (2, 8), generator=g)

    return GPT(cfg).to(dtype), lambda m, b: loss_of(m, *b), text


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
}

# How people write it: each takes the parameters once they have gradients.


def one_by_one(params: Sequence[Tensor]) -> None:
    for p in params:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def through_data(params: Sequence[Tensor]) -> None:
    for p in params:
        dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)
        p.grad.data.div_(dist.get_world_size())


def all_at_once(params: Sequence[Tensor]) -> None:
    works = [dist.all_reduce(p.grad, async_op=True) for p in params]
    for work in works:
        work.wait()
    torch._foreach_div_([p.grad for p in params], dist.get_world_size())


def flattened(params: Sequence[Tensor]) -> None:
    flat = torch.cat([p.grad.view(-1) for p in params])
    dist.all_reduce(flat)
    flat.mul_(1 / dist.get_world_size())
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad.copy_(part.view_as(p))


def scattered(params: Sequence[Tensor]) -> None:
    n = dist.get_world_size()
    for p in params:
        flat = nn.functional.pad(p.grad.view(-1), (0, -p.numel() % n))
        own = flat.new_empty(flat.numel() // n)
        dist.reduce_scatter_tensor(own, flat)
        own /= n
        dist.all_gather_into_tensor(flat, own)
        p.grad.copy_(flat[: p.numel()].view_as(p))


SYNCS = {f.__name__: f for f in (one_by_one, through_data, all_at_once, flattened, scattered)}


def by_hand(model: nn.Module, loss: Any, optimizer: Any, sync: Any, *, first: bool = False, clip: float = 0.0) -> Any:
    """A step as it is written by hand; gradients are cleared first or last."""
    params = list(model.parameters())

    def step(batch: Any) -> Tensor:
        if first:
            optimizer.zero_grad()
        out = loss(model, batch)
        out.backward()
        sync(params)
        if clip:
            nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        if not first:
            optimizer.zero_grad()
        return out.detach()

    return step


def both(kind: str, optim: str, sync: str, options: dict[str, Any], passes: Sequence[Any] = ()) -> Any:
    """The largest relative difference, in parameters, buffers and losses, between a step and its capture."""
    mesh = mw.init_mesh({"dp": dist.get_world_size()})
    model, loss, batches = network(kind)
    other = copy.deepcopy(model)
    steps = []
    for m in (model, other):
        optimizer = OPTIMIZERS[optim](m.parameters())
        hand = by_hand(m, loss, optimizer, SYNCS[sync], **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        if m is other:
            before = copy.deepcopy(m.state_dict())
            hand = capture_local(hand, mesh, model=m, optimizer=optimizer, batch=batches(0), passes=passes)
            assert all(torch.equal(a, before[n]) for n, a in m.state_dict().items()), "capturing changed the model"
        steps.append((hand, schedule))
    worst = 0.0
    for i in range(STEPS):
        losses = []
        for step, schedule in steps:
            losses.append(step(batches(i)))
            schedule.step()
        worst = max(worst, ((losses[0] - losses[1]).abs() / losses[0].abs()).item())
    for (n, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert a.dtype == b.dtype, n
        worst = max(worst, ((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item())
    return worst, steps[1][0].program.kinds, len(list(model.parameters()))


@pytest.mark.thin(8)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "optim", "sync", "options"),
    [
        ("gpt", "adamw", "one_by_one", {"clip": 0.5}),
        ("cnn", "sgd", "through_data", {"first": True}),
        ("tied", "sgd", "all_at_once", {"first": True, "clip": 0.1}),
        ("cnn", "rmsprop", "flattened", {}),
        ("gpt", "adamw", "scattered", {}),
    ],
)
def test_same_as_by_hand(kind: str, optim: str, sync: str, options: dict[str, Any]) -> None:
    for worst, kinds, params in run_processes(both, 2, kind, optim, sync, options):
        assert worst < 1e-9
        if sync == "flattened":
            assert kinds == {"all_reduce": 1}
        elif sync == "scattered":
            assert kinds == {"reduce_scatter": params, "all_gather": params}
        else:
            assert kinds == {"all_reduce": params}


# -- passes ----------------------------------------------------------------------------------------------


def optimized(kind: str, sync: str, bucket: int, options: dict[str, Any]) -> Any:
    worst, kinds, params = both(kind, "adamw", sync, options, [DataParallelOptimization(bucket_bytes=bucket)])
    return worst, kinds, params


@pytest.mark.thin(6)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "sync", "options", "bucket"),
    [
        ("gpt", "one_by_one", {"clip": 0.5}, 1 << 24),
        ("gpt", "through_data", {"first": True}, 60_000),
        ("cnn", "all_at_once", {}, 1 << 24),
        ("tied", "one_by_one", {"first": True}, 1 << 24),
        ("cnn", "flattened", {}, 1 << 24),
    ],
)
def test_optimized_steps(kind: str, sync: str, options: dict[str, Any], bucket: int) -> None:
    for worst, kinds, _ in run_processes(optimized, 2, kind, sync, bucket, options):
        assert worst < 1e-9
        assert kinds["all_reduce"] == 1 if bucket == 1 << 24 else kinds["all_reduce"] > 1


def fewest(sizes: Sequence[int], limit: int) -> int:
    """Buckets of neighbours, filled as far as the limit allows; what is larger than the limit goes alone."""
    made, room = 0, 0
    for size in sizes:
        if size >= limit:
            made += 1
        elif size <= room:
            room -= size
        else:
            made, room = made + 1, limit - size
    return made


@pytest.mark.thin(2)
@pytest.mark.parametrize("limit", [1 << 10, 20_000, 60_000, 1 << 24])
@pytest.mark.parametrize("sync", ["one_by_one", "through_data", "all_at_once"])
def test_fewest_collectives_and_no_scaling(alone: mw.Mesh, sync: str, limit: int) -> None:
    model, loss, batches = network("gpt")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    hand = by_hand(model, loss, optimizer, SYNCS[sync])
    local = HandWritten(hand, alone, 0, model, optimizer, batches(0), update_of(optimizer, names(model)))
    program, _ = record_step(local)
    made, (record,) = PassManager([DataParallelOptimization(bucket_bytes=limit)]).run(program)
    order = [n for bucket in record.details["buckets"] for n in bucket["gradients"]]
    sizes = {n: p.nbytes for n, p in model.named_parameters()}
    assert sorted(order) == sorted(sizes)
    assert made.kinds == {"all_reduce": fewest([sizes[n] for n in order], limit)}
    assert scalings(program) == len(sizes)
    assert scalings(made) == 0


def names(model: nn.Module) -> dict[int, str]:
    return {id(p): n for n, p in model.named_parameters()}


def scalings(program: Any) -> int:
    """Nodes that multiply gradients by 1/n: what divides by a number behind the backward."""
    reduced = ancestors_until_update(program)
    found = [n for n in reduced if "div" in str(n.target) or "mul" in str(n.target)]
    return len(found)


def ancestors_until_update(program: Any) -> list[Any]:
    """What lies between the sums of gradients and the update."""
    after, found = set(program.collectives()), []
    for node in program.graph.nodes:
        if node not in after and any(n in after for n in node.all_input_nodes) and "_fused_" not in str(node.target):
            after.add(node)
            found.append(node)
    return found


def unusual(kind: str, passes: Sequence[Any]) -> float:
    """All-reduces in hooks during the backward, or a loss with a gradient in it."""
    mesh, n = mw.init_mesh({"dp": 2}), dist.get_world_size()
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        works: list[Any] = []
        if kind == "hooks":
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(
                    lambda p, w=works: w.append(dist.all_reduce(p.grad, async_op=True))
                )

        def step(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer, works: Any = works) -> Tensor:
            optimizer.zero_grad()
            if kind == "penalty":
                x = x.clone().requires_grad_()
            loss = model(x).square().mean()
            if kind == "penalty":
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = loss + slope.square().sum()
            loss.backward()
            for work in works:
                work.wait()
            works.clear()
            for p in model.parameters():
                if kind == "penalty":
                    dist.all_reduce(p.grad)
                p.grad /= n
            optimizer.step()
            return loss.detach()

        def data(i: int) -> Tensor:
            g = torch.Generator().manual_seed(10 * i + dist.get_rank())
            return torch.randn(4, 6, dtype=torch.float64, generator=g)

        run: Any = step
        if captured:
            run = capture_local(step, mesh, model=model, optimizer=optimizer, batch=data(0), passes=passes)
            assert scalings(run.program) == (0 if passes else 4)
            assert run.program.kinds == {"all_reduce": 1 if passes else 4}
        losses = torch.stack([run(data(i)) for i in range(STEPS)])
        results.append(torch.cat([losses, *(p.detach().view(-1) for p in model.parameters())]))
    return ((results[0] - results[1]).abs() / results[0].abs()).max().item()


@pytest.mark.thin(3)
@pytest.mark.processes
@pytest.mark.thin(3)  # each kind and each list of passes once
@pytest.mark.parametrize("passes", [(), (DataParallelOptimization(bucket_bytes=1 << 20),)], ids=["plain", "optimized"])
@pytest.mark.parametrize("kind", ["hooks", "penalty"])
def test_hooks_and_double_backward(kind: str, passes: Any) -> None:
    assert max(run_processes(unusual, 2, kind, passes)) < 1e-9


# -- groups, shapes, states ------------------------------------------------------------------------------


class Experts(nn.Module):
    """A block whose experts differ from rank to rank along ``ep``, with a dense part that all share."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.out = nn.Linear(6, 8), nn.Linear(8, 1)
        torch.manual_seed(10 + index)
        self.expert = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.expert(self.dense(x).relu()).relu())


def experts(passes: Sequence[Any]) -> Any:
    """Dense weights are summed over all ranks, an expert's over those that have it."""
    mesh = mw.init_mesh({"dp": 2, "ep": 2})
    rank = dist.get_rank()
    groups = [dist.new_group([i, i + 2]) for i in range(2)]
    mine, worst, models = groups[rank % 2], 0.0, []
    for captured in (False, True):
        model = Experts(rank % 2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            for n, p in model.named_parameters():
                group = mine if n.startswith("expert") else None
                dist.all_reduce(p.grad, group=group)
                p.grad.mul_(1 / dist.get_world_size(group))
            optimizer.step()
            return loss

        def data(i: int) -> Tensor:
            return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * i + rank))

        run: Any = step
        if captured:
            run = capture_local(step, mesh, model=model, optimizer=optimizer, batch=data(0), passes=passes)
            together = [n for n in run.program.graph.nodes if n.target is torch.ops.aten._foreach_mul_.Scalar]
            assert sorted(len(n.args[0]) for n in together) == ([2, 4] if passes else []), "one op per factor"
            assert scalings(run.program) == (2 if passes else 6)
            layouts = {n: repr(s.layout) for n, s in grads_of(run)}
            assert layouts["expert.weight"] == "<dp: Partial(), ep: Replicate()>"
            assert layouts["dense.weight"] == "<dp: Partial(), ep: Partial()>"
        for i in range(STEPS):
            run(data(i))
        models.append(model)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        worst = max(worst, ((a - b).abs().max() / a.abs().max()).item())
    return worst


def grads_of(step: CompiledStep) -> list[Any]:
    return [pair for n in step.program.graph.nodes for pair in info_of(n).grad_of]


@pytest.mark.processes
@pytest.mark.parametrize(
    "passes",
    [[DataParallelOptimization(bucket_bytes=1 << 20)], pytest.param([], marks=pytest.mark.long)],
    ids=["optimized", "plain"],
)
def test_groups_of_different_size(passes: list[Any]) -> None:
    assert max(run_processes(experts, 4, passes)) < 1e-9


def several_shapes() -> Any:
    mesh = mw.init_mesh({"dp": 2})
    model, loss, batches = network("cnn")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    hand = by_hand(model, loss, optimizer, one_by_one)
    step = capture_local(hand, mesh, model=model, optimizer=optimizer, batch=batches(0))
    step(batches(1))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    smaller = tuple(x[:3] for x in batches(2))
    first = step(smaller)  # captured again
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    assert torch.equal(step(smaller), first)  # the states that were loaded are those in use
    after = copy.deepcopy(model.state_dict())
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    hand(smaller)
    return max((after[n] - a).abs().max().item() for n, a in model.state_dict().items())


@pytest.mark.processes
def test_shapes_and_loaded_states() -> None:
    assert max(run_processes(several_shapes, 2)) < 1e-12


# -- bad input -------------------------------------------------------------------------------------------


def skips_one() -> str:
    mesh = mw.init_mesh({"dp": 2})
    model, loss, batches = network("cnn")
    optimizer = OPTIMIZERS["sgd"](model.parameters())

    def sync(params: Sequence[Tensor]) -> None:
        one_by_one(params[runtime.RT.rank :])  # rank 1 forgets the first one

    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DesyncError) as caught, collective.counting() as counts:
        capture_local(by_hand(model, loss, optimizer, sync), mesh, model=model, optimizer=optimizer, batch=batches(0))
    assert counts.total == 0
    assert all(torch.equal(a, before[n]) for n, a in model.state_dict().items())
    return str(caught.value)


@pytest.mark.processes
def test_a_skipped_collective() -> None:
    for text in run_processes(skips_one, 2):
        assert "captured different steps" in text


@pytest.fixture
def alone() -> Iterator[mw.Mesh]:
    """A process group without processes: enough for capturing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    runtime.reset()
    yield mw.Mesh({"dp": 2})
    dist.destroy_process_group()
    runtime.reset()


def captured(mesh: mw.Mesh, change: Callable[[Any], Any], **options: Any) -> Any:
    """Capture of a step that ``change`` made of the usual one; ranks are not asked."""
    model = nn.Linear(3, 2)
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    step = change((model, optimizer))
    try:
        return record_step(
            HandWritten(step, mesh, 0, model, optimizer, torch.ones(4, 3), update_of(optimizer, names(model)))
        )
    finally:
        assert type(model.weight) is nn.Parameter
        assert model.weight.grad is None
        assert model.weight.sum().item() == model.weight.sum().item()  # real again


def reads_value(given: Any) -> Any:
    model, optimizer = given

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        if loss.item() > 3:
            loss.backward()
        optimizer.step()
        return loss

    return step


def accumulates(given: Any) -> Any:
    model, optimizer = given

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


def never_updates(given: Any) -> Any:
    model, _ = given
    return lambda x: model(x).sum().backward()


def updates_twice(given: Any) -> Any:
    model, optimizer = given

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.step()

    return step


def reduces_to_one(given: Any) -> Any:
    model, optimizer = given

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        dist.reduce(model.weight.grad, 0)
        optimizer.step()

    return step


def returns_number(given: Any) -> Any:
    model, optimizer = given

    def step(x: Tensor) -> float:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return 3.0

    return step


def clips_after(given: Any) -> Any:
    model, optimizer = given

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.weight.data.clamp_(-1, 1)

    return step


def turns_gradient(given: Any) -> Any:
    model, optimizer = given

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        model.weight.grad.t_()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        (turns_gradient, {}, r"weight.grad has the shape \(\d, \d\) at optimizer.step"),
        (reads_value, {}, "reads the value of a tensor"),
        (accumulates, {}, "the step before left"),
        (never_updates, {}, "did not call optimizer.step"),
        (updates_twice, {}, "more than once"),
        (reduces_to_one, {}, "reduce cannot be part"),
        (returns_number, {}, "return tensors only"),
        (clips_after, {"optimizer": torch.optim.RMSprop}, "after optimizer.step"),
    ],
)
def test_bad_steps(alone: mw.Mesh, change: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        captured(alone, change, **options)


def test_what_is_written_after_the_update_is_kept(alone: mw.Mesh) -> None:
    program, _ = captured(alone, clips_after)
    assert any("clamp_" in str(n.target) for n in program.graph.nodes)


def test_a_group_that_is_no_axis(alone: mw.Mesh) -> None:
    def step(given: Any) -> Any:
        model, optimizer = given

        def run(x: Tensor) -> None:
            model(x).sum().backward()
            dist.all_reduce(model.weight.grad)
            optimizer.step()
            optimizer.zero_grad()

        return run

    with pytest.raises(CaptureError, match="no axes of Mesh"):
        captured(mw.Mesh({"dp": 3}), step)


def test_other_arguments(alone: mw.Mesh) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match="parameters that the model has not"):
        capture_local(lambda x: x, alone, model=model, optimizer=optimizer, batch=torch.ones(4, 3))
    with pytest.raises(ProgramError, match="inductor"):
        capture_local(lambda x: x, alone, model=other, optimizer=optimizer, batch=torch.ones(4, 3), backend="x")


def test_gradients_are_named(alone: mw.Mesh) -> None:
    def step(given: Any) -> Any:
        model, optimizer = given

        def run(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            through_data(list(model.parameters()))
            optimizer.step()
            return loss

        return run

    program, _ = captured(alone, step)
    nodes = list(program.graph.nodes)
    named = {name: spec for n in nodes for name, spec in info_of(n).grad_of}
    assert named.keys() == {"weight", "bias"}
    assert all(repr(spec.layout) == "<dp: Partial()>" for spec in named.values())
    assert sorted(info_of(n).sync for n in program.collectives()) == ["bias", "weight"]
    assert {info_of(n).line.partition(":")[0] for n in program.collectives()} == {"test_capture_local.py"}
    assert not any("copy_" in str(n.target) or "div_" in str(n.target) for n in nodes)  # values, no writes
    assert {info_of(n).role for n in nodes if n.op == "call_function"} == {"forward", "backward", "optimizer"}


def test_a_shape_that_is_new_to_some_ranks_alone() -> None:
    """Five rows over three ranks after three: two ranks have two rows, the last one has one as before.  All capture."""
    mesh, rows = mw.Mesh({"dp": 3}), torch.arange(20.0, dtype=torch.float64).view(5, 4) / 10
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)

    def run() -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 2, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step_fn(x: Tensor) -> Tensor:
            loss = model(x).square().sum()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = capture_local(step_fn, mesh, model=model, optimizer=optimizer, batch=rows[:1])
        for n in (3, 5, 3):
            step(rows[:n].split(-(-n // 3))[mw.rank()])
        return model.weight.detach().clone()

    try:
        found = mw.simulate(run, mesh)
    finally:
        dist.destroy_process_group()
    torch.manual_seed(0)
    model = nn.Linear(4, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for n in (3, 5, 3):
        optimizer.zero_grad()
        model(rows[:n]).square().sum().backward()
        optimizer.step()
    for weight in found:
        torch.testing.assert_close(weight, model.weight.detach())


class AddedWeights(nn.Module):
    """A parameter that is used alone and added to another one: autograd gives both one gradient, and copies it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((4, 4), 0.3, dtype=torch.float64))
        self.delta = nn.Parameter(torch.full((4, 4), 0.1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ (self.first + self.delta)


def halve(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def clamp(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.1, 0.1)


def replace(p: Tensor) -> None:
    assert p.grad is not None
    p.grad = p.grad * 0.5


@pytest.mark.parametrize("hook", [halve, clamp, replace])
def test_a_copied_gradient_is_written_to_alone(hook: Callable[[Tensor], None]) -> None:
    """A hook that writes to the copy of a shared gradient does not reach the gradient that was copied."""
    x = torch.arange(8.0, dtype=torch.float64).reshape(2, 4) / 8

    def run(captured: bool) -> list[Tensor]:
        model = AddedWeights()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(batch: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        mesh = mw.Mesh({"dp": 1})
        taken: Any = capture_local(step, mesh, model=model, optimizer=optimizer, batch=x) if captured else step
        for _ in range(2):
            taken(x)
        return [p.detach().clone() for p in model.parameters()]

    (found,) = mw.simulate(lambda: run(True), mw.Mesh({"dp": 1}))
    for a, b in zip(found, run(False), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
