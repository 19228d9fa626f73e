"""Late ranks: they find what is wrong between a start and a wait, and what is right they leave alone."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import meshwright as mw
from meshwright import collective
from meshwright.collective import claims
from meshwright.errors import DesyncError
from meshwright.program.run import pipeline, runner
from meshwright.shard.gradients import reductions
from meshwright.shard.parameters import host
from meshwright.shard.parameters.packing import Packing
from tests.support import late, streams
from tests.support.processes import run_processes
from tests.support.programs import DP, MLP, compare, pairs, squares

TWO = mw.Mesh({"dp": 2})
LATE_TESTS = (  # of each asynchronous way a few, which need no fixture; `make test-long` runs whole files
    "shard.test_shard_zero:test_gathers_and_scatters_are_counted",
    "shard.test_shard_zero:test_accumulation_scatters_once",
    "shard.test_shard_zero:test_accumulation_on_top_of_a_synchronised_gradient",
    "shard.test_shard_zero:test_parameters_used_outside_their_module",
    "shard.test_shard_zero:test_a_step_between_forward_and_prefetch",
    "shard.test_shard_sync:test_small_buckets",
    "shard.test_shard_sync:test_backward_on_top_of_a_synchronised_gradient",
    "shard.test_shard_sync:test_a_backward_that_raises_leaves_nothing_behind",
    "shard.test_shard_sync:test_gradients_of_an_earlier_backward_stay_as_they_were",
    "shard.test_offload:test_a_module_that_runs_twice_and_a_backward_that_raises",
    "shard.test_wires:test_accumulated_in_float32_and_sent_once",
    "shard.test_wires:test_with_dtypes_and_globs",
    "passes.test_data_parallel_optimization:test_with_gradient_merge_in_either_order",
)


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    with late.ranks():
        yield


# ---------------------------------------------------------------------------------------------- the ways themselves


def each_start(group: collective.Group) -> list[tuple[str, Callable[[Tensor], collective.Pending]]]:
    n = group.size
    return [
        ("all_reduce", lambda t: collective.all_reduce_async(t, "sum", group)),
        ("all_gather", lambda t: collective.all_gather_async(t, 0, [4] * n, group)),
        ("reduce_scatter", lambda t: collective.reduce_scatter_async(t, 0, [3] + [1] * (n - 1), "sum", group)),
        ("gather in float8", lambda t: collective.gather_async(t, [4] * n, group, mw.Float8())),
        ("scatter in bfloat16", lambda t: collective.scatter_sum_async(t, [2] * n, group, torch.bfloat16)),
        ("sum in bfloat16", lambda t: collective.sum_async(t, group, torch.bfloat16)),
    ]


def holds_each(group: collective.Group) -> None:
    """Nothing arrives before the wait, and all of it then."""
    for name, start in each_start(group):
        t = torch.arange(4.0) + mw.rank()
        started = start(t)
        assert not started.done()
        if name == "all_reduce":
            assert t.isnan().all()  # it works there: nobody may read it
        assert started.wait().isfinite().all()


def finds(name: str, start: Callable[[Tensor], collective.Pending]) -> str:
    """What late ranks say of a tensor that is written to under way."""
    t = torch.arange(4.0) + mw.rank()
    started = start(t)
    t[0] = 5
    try:
        started.wait()
    except late.LateError as error:
        return f"{name}: {str(error).rpartition(': ')[2]}"
    return f"{name}: nothing"


def test_simulated_ranks_find_what_changes_under_way() -> None:
    changed = "its input changed before the wait"
    written = "its output was written to before the wait"

    def fn() -> list[str]:
        group = collective.group(TWO)
        holds_each(group)
        return [finds(*way) for way in each_start(group)]

    for found in mw.simulate(fn, TWO):
        assert found == [
            f"all_reduce: {written}",
            f"all_gather: {changed}",
            f"reduce_scatter: {changed}",
            "gather in float8: nothing",  # what is encoded may change
            f"scatter in bfloat16: {changed}",
            f"sum in bfloat16: {written}",
        ]


def on_processes() -> tuple[bool, str, str]:
    mesh = mw.init_mesh({"dp": 2})
    group = collective.group(mesh)
    holds_each(group)
    differ = _claims_differ(mesh)
    return group.scatters and not group.gloo, differ, finds(*each_start(group)[1])  # which breaks the group


def _claims_differ(mesh: mw.Mesh) -> str:
    x = mw.shard_tensor(torch.ones(4), mesh, {"dp": mw.Shard(0)})
    try:
        x = x * torch.full((4,), 1.0 + mw.rank())
        for _ in range(20):
            float(x.sum())
    except DesyncError as error:
        return str(error)
    return "nothing"


@pytest.mark.processes
def test_real_ranks_find_what_changes_under_way_and_compare_in_a_group_beside() -> None:
    """Two ranks, on NCCL's ways: claims of plain tensors are compared in a gloo group beside the backend's."""
    for late_ways, differ, found in run_processes(on_processes, 2):
        assert late_ways
        assert "the ranks gave different values of a plain tensor" in differ
        assert found == "all_gather: its input changed before the wait"


def test_claims_of_a_device_are_compared_one_meeting_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their digests are on their way to the CPU until then: ranks without claims take part all the same."""
    window = claims.Window
    monkeypatch.setattr(claims, "Window", lambda uses=(): window(dict(uses), leaving=claims._Leaving({})))
    for differ in mw.simulate(lambda: _claims_differ(TWO), TWO):
        assert "the ranks gave different values of a plain tensor" in differ
    own = claims.Window({("add", torch.Size([2]), torch.float32): claims._Use(torch.tensor(7), "here.py:3")})
    assert own.take() == []
    assert own.take() == [("float32[2] of add", 1, 7, "here.py:3")]


def test_starts_wait_for_nobody_and_ranks_may_wait_in_any_order() -> None:
    def fn() -> float:
        group, tensors = collective.group(TWO), [torch.ones(2), torch.ones(3)]
        started = [collective.all_reduce_async(t, "sum", group) for t in tensors]
        for one in started if mw.rank() else reversed(started):
            one.wait()
        return sum(float(t.sum()) for t in tensors)

    assert mw.simulate(fn, TWO) == [10.0, 10.0]


def test_other_orders_of_starts_are_told() -> None:
    def fn() -> None:
        group, t = collective.group(TWO), torch.ones(2)
        if mw.rank():
            collective.all_reduce(t.clone(), "sum", group)
        started = collective.all_reduce_async(t, "sum", group)
        if not mw.rank():
            collective.all_reduce(t.clone(), "sum", group)
        started.wait()

    with pytest.raises(DesyncError, match=r"started \[1, 0\] collectives before it"):
        mw.simulate(fn, TWO)


# ---------------------------------------------------------------------------------------------- broken on purpose


def trains(**options: Any) -> None:
    """A model of two linears, with an all-reduce of each gradient or stored split, against one device."""

    def steps(model: nn.Module, optimizer: Any, x: Any) -> Any:
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model(x).square().mean().item()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one = model()
    want = steps(one, torch.optim.SGD(one.parameters(), lr=0.1), x)

    def fn() -> None:
        made = mw.shard_module(model(), TWO, bucket_bytes=100, **options)
        laid = mw.shard_tensor(x, TWO, {"dp": mw.Shard(0)})
        found = steps(made, mw.shard_optimizer(torch.optim.SGD(made.parameters(), lr=0.1)), laid)
        assert found == pytest.approx(want, rel=1e-12)

    mw.simulate(fn, TWO)


def captures(*passes: str) -> None:
    """A captured step whose collectives start early, against one device."""
    compare(MLP, squares, pairs(2), TWO, batch=DP, passes=list(passes))


def sends() -> None:
    """One rank sends to the other, as stages of a pipeline do."""

    def fn() -> None:
        lane, t = collective.lane(TWO, 0, 0, 1), torch.arange(3.0)
        assert lane is not None
        if mw.rank() == 0:
            pipeline.collective.send(t, "activations", lane).wait()
        else:
            assert collective.receive("activations", (3,), torch.float32, lane).wait().equal(t)

    mw.simulate(fn, TWO)


def no_wait_for_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reductions.Reduction, "arrived", lambda self, k: self.views[k])


def no_wait_for_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(late.LateLeaving, "wait", lambda self: self.made)


def one_row_for_all_gathers(patch: pytest.MonkeyPatch) -> None:
    pack, kept = Packing.pack_row, dict[Any, Tensor]()

    def reused(self: Packing, *args: Any) -> Tensor:
        row = pack(self, *args)
        whole = kept.setdefault((mw.rank(), row.dtype), row.new_empty(100))
        return whole[: row.numel()].copy_(row)

    patch.setattr(Packing, "pack_row", reused)


def gradients_freed_under_way(patch: pytest.MonkeyPatch) -> None:
    """What is scattered goes back to a pool, from which the next one takes it."""
    pack, kept = Packing.pack, dict[Any, Tensor]()

    def reused(self: Packing, *args: Any) -> Tensor:
        flat = pack(self, *args)
        whole = kept.setdefault((mw.rank(), flat.dtype), flat.new_empty(100))
        return whole[: flat.numel()].copy_(flat)

    patch.setattr(Packing, "pack", reused)


def no_wait_in_the_program(patch: pytest.MonkeyPatch) -> None:
    call = runner._call

    def without(node: Any, nodes: Any, names: dict[str, Any], *rest: Any) -> str:
        if node.target is not collective.WAIT_OP:
            return call(node, nodes, names, *rest)
        names["peek"] = lambda pending: pending._work.flight.writes[0]  # the tensor that the collective works in
        return f"peek({nodes[node.args[0]]})"

    patch.setattr(runner, "_call", without)


def sent_memory_used_again(patch: pytest.MonkeyPatch) -> None:
    send = collective.send

    def reused(t: Tensor, *args: Any) -> collective.Pending:
        started = send(t, *args)
        t.zero_()
        return started

    patch.setattr(pipeline.collective, "send", reused)


ZERO_3 = functools.partial(trains, fsdp="dp")
BREAKS: list[tuple[Callable[[], None], Callable[[pytest.MonkeyPatch], None], str]] = [
    (trains, no_wait_for_gradients, "nan"),
    (functools.partial(trains, offload="cpu"), no_wait_for_the_host, "nan"),
    (ZERO_3, one_row_for_all_gathers, "all_gather.* its input changed before the wait"),
    (ZERO_3, gradients_freed_under_way, "reduce_scatter.* its input changed before the wait"),
    (functools.partial(captures, "data-parallel-optimization:bucket_bytes=100"), no_wait_in_the_program, "nan"),
    (sends, sent_memory_used_again, "send.* its input changed before the wait"),
]


@pytest.mark.parametrize(("run", "breaks", "told"), BREAKS, ids=[b[1].__name__ for b in BREAKS])
def test_what_is_broken_is_found(
    run: Callable[[], None], breaks: Callable[[pytest.MonkeyPatch], None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    with pytest.raises(AssertionError, match=f"(?s){told}"):
        run()


@pytest.mark.parametrize("run", list({id(b[0]): b[0] for b in BREAKS}.values()))
def test_unbroken_they_hold(run: Callable[[], None]) -> None:
    run()


# ---------------------------------------------------------------------------------------------- other tests


@pytest.mark.parametrize("name", LATE_TESTS)
def test_on_late_ranks(name: str) -> None:
    module, test = name.split(":")
    getattr(importlib.import_module(f"tests.{module}"), test)()


WHOLE_FILES = (
    "dispatch/test_plain_tensors.py",
    "shard/test_shard_zero.py",
    "shard/test_shard_sync.py",
    "shard/test_wires.py",
    "shard/test_offload.py",
    "shard/test_gathers_on_wires.py",
    "passes/test_buckets.py",
    "passes/test_gradient_merge.py",
    "passes/test_pipeline.py",
    "program/test_captured_zero.py",
)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", WHOLE_FILES)
def test_whole_files_on_late_ranks(file: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "--late", "-p", "no:cacheprovider", f"tests/{file}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


# ---------------------------------------------------------------------------------------------- clocks of streams


def counts(run: Callable[[], None]) -> int:
    """Run on two ranks with a clock for each stream; how many accesses were checked."""

    def fn() -> int:
        with streams.counted() as clocks:
            run()
        return clocks.checked

    return min(mw.simulate(fn, TWO))


def steps_of(**options: Any) -> Callable[[], None]:
    """Two training steps of two linears."""

    def run() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        module = mw.shard_module(model, TWO, bucket_bytes=100, **options)
        optimizer = mw.shard_optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
        x = mw.shard_tensor(torch.ones(6, 4, dtype=torch.float64), TWO, {"dp": mw.Shard(0)})
        for _ in range(2):
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        module(x)

    return run


STREAMED: dict[str, dict[str, Any]] = {
    "overlapped reductions": {},
    "ZeRO-3": {"fsdp": "dp"},
    "offload": {"offload": "cpu"},
    "offload, ZeRO-3": {"fsdp": "dp", "offload": "cpu"},
    "offload, gathered again": {"fsdp": "dp", "offload": "cpu", "reshard_after_forward": True},
}


@pytest.mark.parametrize("case", STREAMED)
def test_streams_wait_for_each_other(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams.install(monkeypatch)
    assert counts(steps_of(**STREAMED[case])) > 200


def no_wait_for_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(host.CopyStream, "wait", lambda self, made=(): None)


def copies_that_begin_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(streams.Stream, "wait_stream", lambda self, other: None)


def copies_whose_memory_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(host, "keep_for", lambda t, stream: None)


def waits_on_another_stream(patch: pytest.MonkeyPatch) -> None:
    end = streams.end

    def beside(seen: streams.Clock) -> None:
        with streams.entered(streams.Stream("another")):
            end(seen)

    patch.setattr(streams, "end", beside)


HOSTED = {"fsdp": "dp", "offload": "cpu"}
STREAM_BREAKS: list[tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any], str]] = [
    (no_wait_for_copies, {"offload": "cpu"}, "uses, and has not waited"),
    (no_wait_for_copies, HOSTED, "uses, and has not waited"),
    (copies_that_begin_at_once, {"offload": "cpu"}, "'copies back' reads memory of .* that 'ops' uses"),
    (copies_whose_memory_is_not_kept, {"offload": "cpu"}, "record_stream"),
    (waits_on_another_stream, {}, "that 'collectives' uses"),
    (waits_on_another_stream, {"fsdp": "dp"}, "that 'collectives' uses"),
]


@pytest.mark.parametrize(("breaks", "options", "message"), STREAM_BREAKS)
def test_streams_that_do_not_wait_are_found(
    breaks: Callable[[pytest.MonkeyPatch], None], options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams.install(monkeypatch)
    breaks(monkeypatch)
    with pytest.raises(streams.StreamError, match=f"(?s){message}"):
        counts(steps_of(**options))
