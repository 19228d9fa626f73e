"""Collectives: the same checks on simulated ranks and on real gloo processes."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

import meshwright as mw
from meshwright import collective
from meshwright.collective.monitor import disagreement
from meshwright.errors import CollectiveError
from meshwright.mesh import Mesh
from meshwright.ranks import runtime
from meshwright.ranks.process_group import Link
from meshwright.ranks.simulation import Call, simulate
from tests.support.processes import ProcessError, run_processes

SQUARE = Mesh({"dp": 2, "tp": 2})
WIDE = Mesh({"dp": 2, "tp": 3})
ALL_AXES: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1))

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """The input of a rank: small whole numbers, so that every order of reduction is exact."""
    t = (torch.arange(math.prod(shape)) * (rank + 2) % 5 + rank % 2).reshape(shape)
    if dtype is torch.bool:
        return t > 2
    return torch.complex(t.double(), t.double() - rank).to(dtype) if dtype.is_complex else t.to(dtype)


def expected_reduction(parts: list[Tensor], op: str) -> Tensor:
    stack = torch.stack(parts)
    if stack.dtype is torch.bool:
        return stack.any(0) if op in ("sum", "max", "any") else stack.all(0)
    if op == "avg":
        return stack.to(torch.complex128 if stack.is_complex() else torch.float64).mean(0).to(stack.dtype)
    reduce: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda s: s.sum(0),
        "max": lambda s: s.amax(0),
        "min": lambda s: s.amin(0),
        "product": lambda s: s.prod(0),
    }
    return reduce[op](stack).to(stack.dtype)


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype is torch.bool:
        return "sum", "product", "max", "min", "any", "all"
    if dtype.is_complex:
        return "sum", "avg"
    return ("sum", "max", "min", "product", *(("avg",) if dtype.is_floating_point else ()))


# -- checks that a rank runs ----------------------------------------------------------------------------


def check_all_reduce(mesh: Mesh) -> None:
    for axes in ALL_AXES[: 3 if mesh.ndim == 2 else 1]:
        group = collective.group(mesh, axes)
        for dtype in DTYPES:
            for op in ops_of(dtype):
                mine = value(runtime.RT.rank, (3, 2), dtype)
                want = expected_reduction([value(r, (3, 2), dtype) for r in group.ranks], op)
                got = collective.all_reduce(mine, op, group)
                assert_close(got, want, msg=lambda m, op=op, dtype=dtype: f"{op} {dtype}: {m}")
                assert_close(mine, value(runtime.RT.rank, (3, 2), dtype))
                inplace = mine.clone()
                assert collective.all_reduce(inplace, op, group, out_of_place=False) is inplace
                assert_close(inplace, want)
                inplace = mine.clone()
                pending = collective.all_reduce_async(inplace, op, group)
                assert pending.wait() is inplace
                assert pending.wait() is inplace
                assert_close(inplace, want)


def check_strange_tensors(mesh: Mesh) -> None:
    """Not contiguous, 0-dim, conjugated, requiring grad, empty."""
    group, me = collective.group(mesh, (0,)), runtime.RT.rank
    for op in ("sum", "avg"):
        want = expected_reduction([value(r, (3, 4)) for r in group.ranks], op)
        assert_close(collective.all_reduce(value(me, (3, 4)).t(), op, group), want.t())
        strided = value(me, (3, 4)).repeat_interleave(2, dim=1)[:, ::2]
        collective.all_reduce(strided, op, group, out_of_place=False)
        assert_close(strided, want)
        scalar = collective.all_reduce(torch.tensor(2.0), op, group)
        assert_close(scalar, torch.tensor(2.0 * (group.size if op == "sum" else 1)))
        z = value(me, (3,), torch.complex64)
        want = expected_reduction([value(r, (3,), torch.complex64).conj() for r in group.ranks], op)
        assert_close(collective.all_reduce(z.conj(), op, group), want)
        assert_close(z, value(me, (3,), torch.complex64))
    leaf = value(me, (4,)).requires_grad_()
    assert not collective.all_reduce(leaf, "sum", group).requires_grad
    assert not collective.all_gather(leaf, 0, [4] * group.size, group).requires_grad
    collective.all_reduce(leaf, "max", group, out_of_place=False)
    assert_close(leaf.detach(), expected_reduction([value(r, (4,)) for r in group.ranks], "max"))
    n = group.size
    assert collective.all_reduce(torch.ones(0, 3), "sum", group).shape == (0, 3)
    assert collective.all_gather(torch.ones(0, 3), 0, [0] * n, group).shape == (0, 3)
    assert collective.all_gather(torch.ones(2, 0), 0, [2] * n, group).shape == (2 * n, 0)
    assert collective.reduce_scatter(torch.ones(2 * n, 0), 0, [2] * n, "sum", group).shape == (2, 0)
    assert collective.all_to_all(torch.ones(2 * n, 0), 0, [2] * n, 1, [0] * n, group).shape == (2, 0)
    assert collective.broadcast(torch.ones(0), 0, group).shape == (0,)


def uneven(n: int) -> list[list[int]]:
    """Lengths for n ranks: even, uneven, some empty, all but one empty."""
    return [[2] * n, [i % 3 + 1 for i in range(n)], [(i * 2) % 3 for i in range(n)], [0] * (n - 1) + [3]]


def check_gather_and_scatter(mesh: Mesh) -> None:
    for axes in ALL_AXES[: 3 if mesh.ndim == 2 else 1]:
        group = collective.group(mesh, axes)
        me = group.index
        for sizes in uneven(group.size):
            for dim in (0, 1, -1):
                for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64):
                    shape = [2, 3, 4]
                    shape[dim] = sum(sizes)
                    whole = value(9, tuple(shape), dtype)
                    parts = whole.split(sizes, dim)
                    got = collective.all_gather(parts[me], dim, sizes, group)
                    assert_close(got, whole)
                    assert got.is_contiguous()
                    assert_close(collective.all_gather_async(parts[me], dim, sizes, group).wait(), whole)
                    inputs = [value(r, tuple(shape), dtype) for r in group.ranks]
                    for op in ops_of(dtype)[:2]:
                        want = expected_reduction(inputs, op).split(sizes, dim)[me]
                        got = collective.reduce_scatter(inputs[me], dim, sizes, op, group)
                        assert_close(got, want)
                        pending = collective.reduce_scatter_async(inputs[me], dim, sizes, op, group)
                        assert_close(pending.wait(), want)
                        assert_close(inputs[me], value(runtime.RT.rank, tuple(shape), dtype))


def check_all_to_all(mesh: Mesh) -> None:
    for axes in ALL_AXES[: 3 if mesh.ndim == 2 else 1]:
        group = collective.group(mesh, axes)
        me, n = group.index, group.size
        for split in uneven(n):
            for concat in uneven(n):
                for i, j in ((0, 1), (1, 0), (0, 2), (-1, 1)):
                    shape = [2, 2, 2]
                    shape[i], shape[j] = sum(split), sum(concat)
                    for dtype in (torch.float32, torch.int16):
                        whole = value(5, tuple(shape), dtype)
                        mine = whole.split(concat, j)[me]
                        got = collective.all_to_all(mine, i, split, j, concat, group)
                        assert_close(got, whole.split(split, i)[me])


def check_permute(mesh: Mesh) -> None:
    for axes in ALL_AXES[: 3 if mesh.ndim == 2 else 1]:
        group = collective.group(mesh, axes)
        me, n = group.index, group.size
        for targets in ([n - 1 - i for i in range(n)], [(i + 1) % n for i in range(n)], list(range(n))):
            for dtype in (torch.float32, torch.int16, torch.bool):
                for shape in ((3, 2), (), (0, 2)):
                    mine = value(runtime.RT.rank, shape, dtype)
                    with collective.counting() as c:
                        got = collective.permute(mine, targets, group)
                    assert_close(got, value(group.ranks[targets.index(me)], shape, dtype))
                    assert c.total_bytes == (mine.nbytes if targets[me] != me else 0)
    with pytest.raises(CollectiveError, match="no permutation of the"):
        collective.permute(torch.ones(2), [0] * group.size, group)


def check_broadcast_and_objects(mesh: Mesh) -> None:
    group = collective.group(mesh, tuple(range(mesh.ndim)))
    for src in range(group.size):
        for dtype in (torch.float32, torch.int16, torch.complex64, torch.bool):
            for shape in ((3, 2), ()):
                mine = value(runtime.RT.rank, shape, dtype)
                got = collective.broadcast(mine, src, group)
                assert_close(got, value(group.ranks[src], shape, dtype))
                got.logical_not_() if dtype is torch.bool else got.add_(1)
                assert_close(mine, value(runtime.RT.rank, shape, dtype))
    collective.barrier(group)
    objects = collective.all_gather_object({"rank": runtime.RT.rank, "pad": "x" * runtime.RT.rank}, group)
    assert objects == [{"rank": r, "pad": "x" * r} for r in group.ranks]


def check_bitwise_equal(mesh: Mesh) -> None:
    """All ranks hold the same bits, whatever the rounding."""
    group = collective.group(mesh, tuple(range(mesh.ndim)))
    torch.manual_seed(runtime.RT.rank)
    got = collective.all_reduce(torch.randn(1000, dtype=torch.float32), "sum", group)
    assert len({bytes(b) for b in collective.all_gather_object(got.numpy().tobytes(), group)}) == 1


def check_counts(mesh: Mesh) -> None:
    n, group = mesh.sizes[0], collective.group(mesh, (0,))
    with collective.counting() as c:
        collective.all_reduce(torch.ones(6 * n), "sum", group)
        collective.all_reduce_async(torch.ones(6 * n), "sum", group).wait()
        collective.all_gather(torch.ones(6), 0, [6] * n, group)
        collective.reduce_scatter(torch.ones(6 * n), 0, [6] * n, "sum", group)
        collective.all_to_all(torch.ones(n, 6), 0, [1] * n, 1, [6] * n, group)
        collective.broadcast(torch.ones(5), 0, group)
        collective.barrier(group)
        collective.all_gather_object(1, group)
    assert c.kinds == {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "broadcast": 1}
    full = 24 * (n - 1)
    assert c.bytes == {
        "all_reduce": 4 * full,
        "all_gather": full,
        "reduce_scatter": full,
        "all_to_all": full,
        "broadcast": 20,
    }
    assert c.total == 6
    assert c.bytes_by_axes == {(mesh.axes[0],): c.total_bytes}
    assert c.total_bytes == 7 * full + 20
    with collective.counting() as c:
        pass
    assert c.total == 0


def check_groups(mesh: Mesh) -> None:
    me = runtime.RT.rank
    for axes in ALL_AXES[: 3 if mesh.ndim == 2 else 1]:
        group = collective.group(mesh, axes)
        assert group is collective.group(mesh, axes)
        assert group is collective.group(mesh, tuple(reversed(axes)))
        assert group.ranks == mesh.group_ranks(me, axes)
        assert group.ranks[group.index] == me
        assert group.axes == tuple(mesh.axes[a] for a in axes)
    alone = collective.group(mesh, ())
    t = torch.ones(3)
    assert alone.size == 1
    with collective.counting() as c:
        assert collective.all_reduce(t, "sum", alone) is t
        assert collective.all_reduce_async(t, "sum", alone).wait() is t
        assert collective.all_gather(t, 0, [3], alone) is t
        assert collective.reduce_scatter(t, 0, [3], "sum", alone) is t
        assert collective.all_to_all(torch.ones(3, 2), 0, [3], 1, [2], alone).shape == (3, 2)
        assert collective.broadcast(t, 0, alone) is t
        collective.barrier(alone)
        assert collective.all_gather_object(4, alone) == [4]
    assert c.total == 0


CHECKS = (
    check_groups,
    check_all_reduce,
    check_strange_tensors,
    check_gather_and_scatter,
    check_all_to_all,
    check_permute,
    check_broadcast_and_objects,
    check_bitwise_equal,
    check_counts,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("mesh", [SQUARE, WIDE, Mesh({"x": 3})], ids=repr)
def test_simulated(check: Callable[[Mesh], None], mesh: Mesh) -> None:
    simulate(lambda: check(mesh), mesh)


# -- errors ---------------------------------------------------------------------------------------------

ERRORS: list[tuple[str, Callable[[collective.Group], Any]]] = [
    ("unknown reduction 'mean'", lambda g: collective.all_reduce(torch.ones(2), "mean", g)),
    (
        r"any reduces bool tensors, not torch.float32",
        lambda g: collective.all_reduce(torch.ones(2), "any", g),
    ),
    ("avg of torch.int64 is not exact", lambda g: collective.all_reduce(torch.arange(2), "avg", g)),
    ("max of torch.complex64", lambda g: collective.all_reduce(torch.ones(2) * 1j, "max", g)),
    ("max of uint64", lambda g: collective.all_reduce(torch.ones(2, dtype=torch.uint64), "max", g)),
    (
        "all_gather: no dim 2 in a tensor of shape",
        lambda g: collective.all_gather(torch.ones(2), 2, [2, 2], g),
    ),
    (r"sizes=\[2\] for a group of 2 ranks", lambda g: collective.all_gather(torch.ones(2), 0, [2], g)),
    (
        r"the tensor has length 2 but sizes=\[3, 3\] says 3",
        lambda g: collective.all_gather(torch.ones(2), 0, [3, 3], g),
    ),
    (
        r"reduce_scatter: the tensor has length 2 but sizes=\[2, 2\] says 4",
        lambda g: collective.reduce_scatter(torch.ones(2), 0, [2, 2], "sum", g),
    ),
    (
        "unknown reduction 'mean'",
        lambda g: collective.reduce_scatter(torch.ones(2), 0, [1, 1], "mean", g),
    ),
    (
        "both along dim 1",
        lambda g: collective.all_to_all(torch.ones(2, 2), 1, [1, 1], -1, [2, 2], g),
    ),
    (
        r"all_to_all: the tensor has length 2 but split_sizes=\[2, 2\] says 4",
        lambda g: collective.all_to_all(torch.ones(2, 2), 0, [2, 2], 1, [2, 2], g),
    ),
    (
        r"concat_sizes=\[1, 1\] says 1",
        lambda g: collective.all_to_all(torch.ones(2, 2), 0, [1, 1], 1, [1, 1], g),
    ),
    ("broadcast: no position 2", lambda g: collective.broadcast(torch.ones(2), 2, g)),
]


@pytest.mark.parametrize(("message", "call"), ERRORS, ids=[m for m, _ in ERRORS])
def test_wrong_use_is_an_error_on_all_ranks(message: str, call: Callable[[collective.Group], Any]) -> None:
    with pytest.raises(CollectiveError, match=message) as caught:
        simulate(lambda: call(collective.group(SQUARE, (0,))), SQUARE)
    assert not getattr(caught.value, "__notes__", [])


def test_results_of_simulated_ranks_share_no_memory() -> None:
    def fn() -> Tensor:
        group = collective.group(SQUARE, (0, 1))
        for out in (
            collective.all_reduce(torch.ones(2), "sum", group),
            collective.all_gather(torch.ones(1), 0, [1] * 4, group),
            collective.broadcast(torch.ones(2), 0, group),
        ):
            want = out.clone()
            collective.barrier(group)
            out.add_(runtime.RT.rank + 1)
            collective.barrier(group)
            assert_close(out, want + runtime.RT.rank + 1)
        return out

    simulate(fn, SQUARE)


# -- user's process groups, the fake backend ------------------------------------------------------------


class Doubling(dist.ProcessGroup):
    """A process group of two ranks in Python, the other one being a twin."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        assert opts.reduceOp == dist.ReduceOp.SUM
        tensors[0].mul_(2)
        return self._done()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        for out in outputs[0]:
            out.copy_(inputs[0])
        return self._done()

    @staticmethod
    def _done() -> Any:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([])
        return torch._C._distributed_c10d._create_work_from_future(future)


def test_a_process_group_in_python() -> None:
    group = collective.Group.from_process_group(Doubling())
    assert (group.ranks, group.index, group.size) == ((0, 1), 0, 2)
    t = torch.arange(4.0).view(2, 2)
    assert_close(collective.all_reduce(t, "sum", group), 2 * t)
    assert_close(collective.all_reduce(t, "avg", group), t)
    assert_close(collective.reduce_scatter(t, 1, [1, 1], "sum", group), 2 * t[:, :1])
    assert_close(collective.all_gather(t, 1, [2, 2], group), torch.cat([t, t], 1))
    assert_close(collective.all_to_all(t, 0, [1, 1], 1, [2, 2], group), torch.cat([t, t], 1)[:1])
    assert collective.all_gather_object("a", group) == ["a", "a"]


def test_override_group() -> None:
    mesh = Mesh({"dp": 2, "tp": 1})
    made = collective.override_group(mesh, (0,), Doubling())
    try:
        assert collective.group(mesh, (0,)) is made
        assert made.axes == ("dp",)
        assert collective.all_reduce(torch.ones(1), "sum", collective.group(mesh, (0,))).item() == 2
        with pytest.raises(CollectiveError, match=r"the process group has 2 ranks but tp of .* has 1"):
            collective.override_group(mesh, (1,), Doubling())
    finally:
        runtime.reset()


def test_fake_backend_makes_the_groups() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    runtime.reset()
    try:
        assert (runtime.RT.rank, runtime.RT.world) == (1, 4)
        collective.connect(SQUARE)
        group = collective.group(SQUARE, (0,))
        assert group.ranks == (1, 3)
        assert collective.all_reduce(torch.ones(2), "sum", group).shape == (2,)
        for dim, sizes in ((0, [2, 2]), (1, [2, 1]), (1, [2, 2])):
            part = torch.ones(2, sizes[group.index] if dim else 2)
            full = collective.all_gather(part, dim, sizes, group)
            assert full.shape[dim] == sum(sizes)
            assert collective.reduce_scatter(full, dim, sizes, "avg", group).shape == part.shape
        assert collective.all_to_all(torch.ones(2, 2), 0, [1, 1], 1, [2, 2], group).shape == (1, 4)
        collective.barrier(group)
        with pytest.raises(CollectiveError, match="names rank 7 but there are 4 processes"):
            collective.connect(Mesh({"x": 8}))
    finally:
        dist.destroy_process_group()
        runtime.reset()


def test_nobody_waits_for_the_ranks_of_a_fake_backend() -> None:
    """Its other ranks are none: at its end a process stayed five seconds for them to hear of it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mw.init_mesh({"x": 4})
        assert runtime.RT.watcher is None
    finally:
        dist.destroy_process_group()
        runtime.reset()


@pytest.mark.parametrize("ranks", [range(4), [1, 3]])
def test_groups_are_never_split_off_a_group_bound_to_a_device(
    ranks: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ncclCommSplit`` waits for all ranks of the job: those outside of a gloo group call it and its members do not,
    and of ranks that make a group alone nobody else does."""
    from torch.distributed import distributed_c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def split(pg: dist.ProcessGroup) -> None:
        asked.append(pg.bound_device_id)

    def new_group(*args: Any, **options: Any) -> Any:
        devices.append(options.pop("device_id"))
        return made(*args, **options)

    asked: list[Any] = []
    devices: list[Any] = []
    made = dist.new_group
    bound = torch.device("cuda:1")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    monkeypatch.setattr(distributed_c10d, "_get_split_source", split)
    monkeypatch.setattr(dist, "new_group", functools.update_wrapper(new_group, made))
    try:
        dist.group.WORLD.bound_device_id = bound  # type: ignore[union-attr]
        collective.connect(Mesh({"dp": len(ranks) // 2, "tp": 2}, ranks=list(ranks)))
        assert not asked
        assert devices
        assert set(devices) == {bound}
        assert dist.group.WORLD.bound_device_id == bound  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()
        runtime.reset()


# -- real processes -------------------------------------------------------------------------------------


def on_each_rank() -> list[str]:
    collective.connect(SQUARE)
    shuffled = Mesh({"a": 2, "b": 2}, ranks=[3, 1, 0, 2])
    for check in CHECKS:
        check(shuffled)
    for check in (check_groups, check_broadcast_and_objects, check_bitwise_equal, check_counts):
        check(SQUARE)
    half = Mesh({"x": 2}, ranks=[2, 1])  # ranks 0 and 3 do not take part
    if runtime.RT.rank in half.ranks:
        collective.connect(half)
        check_gather_and_scatter(half)
        check_broadcast_and_objects(half)
    try:
        collective.connect(Mesh({"x": 8}))
    except CollectiveError as e:
        return [str(e), repr(runtime.RT)]
    return []


@pytest.mark.processes
def test_real_processes() -> None:
    results = run_processes(on_each_rank, 4)
    message = (
        "Mesh(x=8) names rank 7 but there are 4 processes: make a mesh of these, and distribute models and tensors anew"
    )
    assert results == [[message, f"Runtime(rank {r} of 4)"] for r in range(4)]


def fails_on_rank_one() -> None:
    if runtime.RT.rank == 1:
        raise ValueError("here")
    collective.barrier(collective.group(Mesh({"x": 2}), (0,)))


@pytest.mark.processes
def test_the_launcher_names_the_rank_that_failed() -> None:
    with pytest.raises(ProcessError, match=r"rank 1 of 2 failed:\n(.|\n)*ValueError: here"):
        run_processes(fails_on_rank_one, 2)


def test_threads_that_share_a_group_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Link, "callers", {})
    link = Link(None, (0, 1), gloo=True)
    link.began(Call("barrier"))
    assert "thread" not in disagreement((0, 1), {0: "a", 1: "b"}, 1)
    other = threading.Thread(target=link.began, args=(Call("barrier"),), name="evaluation")
    other.start()
    other.join()
    assert "several threads communicate (MainThread, evaluation)" in disagreement((0, 1), {0: "a", 1: "b"}, 2)
