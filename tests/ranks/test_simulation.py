"""Simulated ranks: order, random numbers, thread-local modes, and every way to go wrong."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from meshwright import collective
from meshwright.errors import CollectiveError, DesyncError
from meshwright.mesh import Mesh
from meshwright.ranks import runtime, simulation
from meshwright.ranks.simulation import Call, simulate

FOUR = Mesh({"dp": 2, "tp": 2})
TWO = Mesh({"dp": 2})


def everyone(mesh: Mesh) -> collective.Group:
    return collective.group(mesh, tuple(range(mesh.ndim)))


def rank() -> int:
    return runtime.RT.rank


def meet(mesh: Mesh, *shape: int) -> torch.Tensor:
    return collective.all_reduce(torch.ones(shape), "sum", everyone(mesh))


def test_each_rank_runs_once_as_itself() -> None:
    outer = runtime.RT
    result = simulate(lambda: (rank(), runtime.RT.world, runtime.RT.sim is not None), FOUR)
    assert result == [(r, 4, True) for r in range(4)]
    assert runtime.RT is outer
    assert outer.sim is None


def test_ranks_are_those_of_the_mesh() -> None:
    mesh = Mesh({"dp": 2}, ranks=[5, 3])

    def fn() -> tuple[int, int, list[int]]:
        group = everyone(mesh)
        return rank(), group.index, collective.all_gather_object(rank(), group)

    assert simulate(fn, mesh) == [(5, 0, [5, 3]), (3, 1, [5, 3])]


def test_one_rank_runs_at_a_time_in_a_fixed_order() -> None:
    def once() -> list[str]:
        log: list[str] = []
        running = [0]

        def fn() -> None:
            for step in range(3):
                running[0] += 1
                time.sleep(0.001)
                log.append(f"{rank()}.{step}")
                assert running[0] == 1
                running[0] -= 1
                collective.barrier(collective.group(FOUR, (step % 2,)))

        simulate(fn, FOUR)
        return log

    first = once()
    # 0 and 1 wait along dp; 2 completes the group of 0 and goes on until it waits along tp; then 3.
    assert first[:5] == ["0.0", "1.0", "2.0", "2.1", "3.0"]
    assert once() == first


def test_runtime_state_is_per_rank() -> None:
    def fn() -> list[int]:
        runtime.RT.memo["x"] = rank()
        meet(FOUR, 2)
        return [runtime.RT.memo["x"], runtime.RT.counts.total]

    assert simulate(fn, FOUR) == [[r, 1] for r in range(4)]
    assert "x" not in runtime.RT.memo


def test_explicit_and_records_come_from_the_caller() -> None:
    outer = runtime.RT
    outer.explicit, outer.records = True, []
    try:
        seen = simulate(lambda: (runtime.RT.explicit, runtime.RT.records is outer.records), TWO)
    finally:
        outer.explicit, outer.records = False, None
    assert seen == [(True, True), (True, False)]


def test_each_rank_has_its_own_generator() -> None:
    def fn() -> list[float]:
        draws = [torch.rand(1).item()]
        if rank() == 1:
            draws.append(torch.rand(1).item())  # must not disturb the others
        meet(FOUR, 1)
        draws.append(torch.rand(1).item())
        return draws

    torch.manual_seed(7)
    expected = [torch.rand(1).item() for _ in range(3)]
    torch.manual_seed(7)
    got = simulate(fn, FOUR)
    assert got[0] == got[2] == got[3] == expected[:2]
    assert got[1] == expected
    assert torch.rand(1).item() == expected[2]  # where rank 0 stopped


def test_generator_is_restored_after_an_error() -> None:
    def fn() -> None:
        torch.rand(1)
        meet(TWO, 1)
        raise ValueError("no")

    torch.manual_seed(3)
    expected = torch.rand(2)[1:]
    torch.manual_seed(3)
    with pytest.raises(ValueError, match="no"):
        simulate(fn, TWO)
    assert torch.equal(torch.rand(1), expected)


def test_modes_of_the_caller_hold_in_the_ranks() -> None:
    def fn() -> tuple[bool, bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

    assert simulate(fn, TWO) == [(True, False, False)] * 2
    with torch.no_grad():
        assert simulate(fn, TWO) == [(False, False, False)] * 2
    with torch.inference_mode():
        assert simulate(fn, TWO) == [(False, True, False)] * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert simulate(fn, TWO) == [(True, False, True)] * 2


def test_backward_meets_in_collectives() -> None:
    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return collective.all_reduce(g, "sum", everyone(FOUR))

    def fn() -> float:
        x = torch.ones(1, requires_grad=True)
        (Reduce.apply(x) * (rank() + 1)).sum().backward()
        assert x.grad is not None
        return x.grad.item()

    assert simulate(fn, FOUR) == [10.0] * 4


# -- what goes wrong ------------------------------------------------------------------------------------


def test_the_error_of_one_rank_names_it_and_wakes_the_others() -> None:
    seen: list[str] = []

    def fn() -> None:
        if rank() == 2:
            raise ValueError("bad batch")
        try:
            meet(FOUR, 1)
        except DesyncError as e:
            seen.append(str(e))
            raise

    with pytest.raises(ValueError, match="bad batch") as caught:
        simulate(fn, FOUR)
    assert caught.value.__notes__ == ["[simulated rank 2]"]
    assert seen == ["rank 2 failed: ValueError: bad batch"] * 3


def test_the_same_error_on_all_ranks_has_no_note() -> None:
    def fn() -> None:
        raise ValueError("all of us")

    with pytest.raises(ValueError, match="all of us") as caught:
        simulate(fn, FOUR)
    assert not getattr(caught.value, "__notes__", [])


def test_an_error_caught_by_the_rank_is_not_an_error() -> None:
    def fn() -> str:
        try:
            collective.all_reduce(torch.ones(2 + rank()), "sum", everyone(TWO))
        except DesyncError:
            return "caught " + str(meet(TWO, 1).item())
        return "no"

    assert simulate(fn, TWO) == ["caught 2.0"] * 2


def test_mismatch_lists_what_each_rank_called() -> None:
    seen: list[str] = []

    def fn() -> None:
        group = everyone(TWO)
        try:
            if rank() == 0:
                collective.all_reduce(torch.ones(2, 3), "sum", group)
            else:
                collective.all_gather(torch.ones(4, dtype=torch.int64), 0, [4, 4], group)
        except DesyncError as e:
            seen.append(str(e))
            raise

    with pytest.raises(DesyncError) as caught:
        simulate(fn, TWO)
    first = fn.__code__.co_firstlineno
    assert str(caught.value) == (
        "ranks (0, 1) disagree in one collective"
        f"\n  rank 0: all_reduce(sum) of float32[2, 3] at test_simulation.py:{first + 4}"
        f"\n  rank 1: all_gather(dim=0, sizes=(4, 4)) of int64[4] at test_simulation.py:{first + 6}"
    )
    assert seen == [str(caught.value)] * 2


@pytest.mark.parametrize("what", ["op", "dtype", "shape", "dim", "sizes"])
def test_each_difference_is_a_mismatch(what: str) -> None:
    def fn() -> None:
        group, odd = everyone(TWO), rank() == 1
        t = torch.ones(4, 4 if what != "shape" or not odd else 5)
        if what == "dim":
            collective.all_gather(t, int(odd), [4, 4], group)
        elif what == "sizes":
            collective.reduce_scatter(t, 0, [1, 3] if odd else [2, 2], "sum", group)
        else:
            t = t.double() if what == "dtype" and odd else t
            collective.all_reduce(t, "max" if what == "op" and odd else "sum", group)

    with pytest.raises(DesyncError, match="disagree in one collective"):
        simulate(fn, TWO)


def test_deadlock_lists_where_each_rank_waits() -> None:
    def fn() -> None:
        if rank() == 0:
            collective.all_reduce(torch.ones(3), "sum", collective.group(FOUR, (0,)))
        else:
            collective.barrier(everyone(FOUR))

    with pytest.raises(DesyncError) as caught:
        simulate(fn, FOUR)
    first = fn.__code__.co_firstlineno
    assert str(caught.value) == (
        "deadlock: every rank waits for another one"
        f"\n  rank 0: waits in all_reduce(sum) of float32[3] over ranks (0, 2) at test_simulation.py:{first + 2}"
        f"\n  rank 1: waits in barrier over ranks (0, 1, 2, 3) at test_simulation.py:{first + 4}"
        f"\n  rank 2: waits in barrier over ranks (0, 1, 2, 3) at test_simulation.py:{first + 4}"
        f"\n  rank 3: waits in barrier over ranks (0, 1, 2, 3) at test_simulation.py:{first + 4}"
    )


@pytest.mark.parametrize("early", [0, 3])
def test_a_rank_that_finishes_early_is_named(early: int) -> None:
    def fn() -> None:
        if rank() != early:
            meet(FOUR, 2)

    message = rf"rank {early} finished without all_reduce\(sum\) of float32\[2\] over ranks \(0, 1, 2, 3\)"
    with pytest.raises(DesyncError, match=message):
        simulate(fn, FOUR)


def test_an_error_inside_the_collective_reaches_all_ranks() -> None:
    seen: list[int] = []

    def fn() -> None:
        sim = runtime.RT.sim
        assert sim is not None
        try:
            group = everyone(TWO)
            t = torch.ones(2)
            sim.rendezvous(group.ranks, Call("odd"), t, lambda parts: [parts[0].view(3)])
        except DesyncError:
            seen.append(rank())
            raise

    with pytest.raises(DesyncError, match=r"odd over ranks \(0, 1\) failed: RuntimeError"):
        simulate(fn, TWO)
    assert sorted(seen) == [0, 1]


def test_nested_simulation_is_refused() -> None:
    with pytest.raises(CollectiveError, match="simulate was called inside simulate"):
        simulate(lambda: simulate(rank, TWO), TWO)


def test_ranks_outside_the_simulation_are_refused() -> None:
    with pytest.raises(CollectiveError, match=r"ranks \[2, 3\] are not simulated"):
        simulate(lambda: meet(Mesh({"x": 4}), 1), TWO)


def test_a_rank_that_never_meets_is_reported() -> None:
    release = threading.Event()

    def fn() -> None:
        if rank() == 1:
            release.wait(5)

    outer = runtime.RT
    with pytest.raises(DesyncError, match=r"rank 1 has been running for 0\.2 s"):
        simulate(fn, TWO, timeout=0.2)
    release.set()
    assert runtime.RT is outer


def test_no_simulation_is_left_behind() -> None:
    before = threading.active_count()
    for _ in range(3):
        simulate(lambda: meet(FOUR, 1), FOUR)
    end = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_a_single_process_is_told_what_to_do() -> None:
    with pytest.raises(CollectiveError, match=r"torchrun .* or run the function on simulated ranks"):
        meet(FOUR, 1)
    with pytest.raises(CollectiveError, match="this is a single process"):
        collective.connect(FOUR)


# -- left before the end --------------------------------------------------------------------------------


def simulated_threads() -> list[str]:
    end = time.monotonic() + 60
    while time.monotonic() < end and (found := [t.name for t in threading.enumerate() if "simulated" in t.name]):
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("what", ["loops", "sleeps", "meets", "swallows"])
@pytest.mark.thin(2)
def test_ctrl_c_ends_all_ranks_and_the_next_run_works(what: str) -> None:
    held = weakref.WeakSet[torch.nn.Module]()

    def fn() -> None:
        model = torch.nn.Linear(2, 2)
        held.add(model)
        meet(FOUR, 1)
        if rank() == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        end = time.monotonic() + 300
        while time.monotonic() < end:
            if what == "meets":
                meet(FOUR, 1)
            elif what == "sleeps":
                time.sleep(2.5)
            elif what == "swallows":
                with contextlib.suppress(Exception):
                    meet(FOUR, 1)

    outer, start = runtime.RT, time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        simulate(fn, FOUR)
    assert runtime.RT is outer
    assert [t.item() for t in simulate(lambda: meet(FOUR, 1).sum(), FOUR)] == [4.0] * 4
    assert time.monotonic() - start < 150
    assert simulated_threads() == []
    gc.collect()
    assert not held


def test_a_rank_of_a_run_that_was_left_cannot_disturb_the_next_one() -> None:
    reached: list[str] = []

    def orphan() -> None:
        if rank() == 0:
            time.sleep(0.5)
            reached.append("woke")
            meet(TWO, 1)
            reached.append("met")

    with pytest.raises(DesyncError, match="has been running for"), mock.patch.object(simulation, "LEAVE", 0.05):
        simulate(orphan, TWO, timeout=0.05)
    assert simulate(lambda: [time.sleep(0.4), meet(TWO, 1).item()][1], TWO) == [2.0, 2.0]
    assert simulated_threads() == []
    assert "met" not in reached


def flags() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("end", ["well", "error", "interrupt"])
@pytest.mark.parametrize("outside", [False, True])
def test_flags_of_the_process_are_each_ranks_own(end: str, outside: bool) -> None:
    def fn() -> None:
        assert flags() == before
        with torch.autograd.detect_anomaly(check_nan=bool(rank() % 2)):
            meet(FOUR)
            assert flags()[1:3] == (True, bool(rank() % 2))
        if rank() == 1:
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True, warn_only=True)
            own = flags()
        else:
            own = before
        meet(FOUR)
        assert flags() == own
        torch.set_anomaly_enabled(True)
        if rank() == 2 and end != "well":
            raise KeyError("a rank") if end == "error" else KeyboardInterrupt
        meet(FOUR)

    with torch.autograd.set_detect_anomaly(outside):
        before = flags()
        with contextlib.suppress(KeyError, KeyboardInterrupt, DesyncError):
            simulate(fn, FOUR)
        assert flags() == before


def test_ranks_have_the_callers_autocast_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    def autocast(device: str, dtype: Any, cache_enabled: bool) -> Any:
        entered.append((device, dtype))
        return contextlib.nullcontext()

    enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *of: of == ("cuda",) or enabled(*of))
    monkeypatch.setattr(torch, "autocast", autocast)  # without a GPU PyTorch would not turn it on
    simulate(lambda: None, Mesh({"x": 2}))
    assert entered == [("cuda", torch.get_autocast_dtype("cuda"))] * 2


def test_ranks_keep_their_own_parametrized_weights() -> None:
    """``cached()`` counts for the process: a rank that leaves it early must not go on with the weights of before."""

    class Twice(torch.nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w * 2

    shared = torch.nn.Linear(1, 1, bias=False)
    parametrize.register_parametrization(shared, "weight", Twice())

    def fn() -> list[float]:
        layer, found = torch.nn.Linear(1, 1, bias=False), []
        parametrize.register_parametrization(layer, "weight", Twice())
        for step in range(3):
            if rank() == 0:
                meet(TWO)
            with parametrize.cached():
                layer.parametrizations.weight.original.data.fill_(step + rank())
                found.append(layer.weight.item())
                assert layer.weight is layer.weight
                shared.weight  # noqa: B018
                if rank() == 1:
                    meet(TWO)
        return found

    assert simulate(fn, TWO) == [[0.0, 2.0, 4.0], [2.0, 4.0, 6.0]]
    with parametrize.cached():
        kept = shared.weight
        simulate(fn, TWO)
        assert shared.weight is kept
    assert shared.weight is not kept


def test_ranks_choose_their_own_attention_kernels() -> None:
    def fn() -> None:
        if rank() == 1:
            meet(TWO)
        with sdpa_kernel(SDPBackend.MATH):
            meet(TWO)
            assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        if rank() == 0:
            meet(TWO)

    simulate(fn, TWO)
    assert torch.backends.cuda.flash_sdp_enabled()
