"""The way of a call: which route a plan promises, takes after its first run, and where it is kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.dispatch import execution, plan_call, plans, routes
from meshwright.dispatch.plans import CallPlan, Route
from meshwright.errors import ExplicitError
from meshwright.ranks import runtime
from meshwright.ranks.runtime import Recent
from meshwright.tensor import DistTensor, torch_function

MESH = mw.Mesh({"a": 2})
EVEN, WHOLE = {"a": mw.Shard(0)}, {"a": mw.Replicate()}


def given(*shape: int, at: Any, grad: bool = False) -> DistTensor:
    made = mw.shard_tensor(torch.ones(*shape), MESH, at)
    made.requires_grad_(grad)
    return made


def plans_of(func: Any) -> list[CallPlan]:
    """Those kept for calls of a function, autocast or not."""

    def has(key: Any) -> bool:
        return key is func or (isinstance(key, tuple) and any(map(has, key)))

    return [p for key, p in runtime.RT.plans.items() if has(key)]


def after(func: Any, *args: Any, times: int = 1, **kwargs: Any) -> list[tuple[str, bool]]:
    """Route of each plan kept for a function after some calls, and whether it was seen to be right."""
    runtime.RT.plans.clear()
    runtime.RT.fast.clear()
    for _ in range(times):
        func(*args, **kwargs)
    return [(p.route.name, p.candidate_route is None) for p in plans_of(func)]


def on_all_ranks(fn: Any) -> None:
    mw.simulate(fn, MESH)


def test_the_route_is_what_a_first_run_showed() -> None:
    def run() -> None:
        x, across = given(4, 6, at=EVEN), given(4, 6, at={"a": mw.Shard(1)})
        w = given(3, 6, at=EVEN, grad=True)
        assert after(torch.relu, x) == [("NATIVE", True)]
        assert after(torch.max, x, 1) == [("NATIVE", True)]
        assert after(torch.add, x, across) == [("CONVERT_THEN_NATIVE", True)]
        assert after(torch.stack, [x, across]) == [("EXECUTE", True)]  # not by position
        alike = mw.reshard(w, WHOLE)  # on all ranks, so that linear changes its type
        assert after(F.linear, x, alike) == [("RETYPE_THEN_NATIVE", True)]
        with torch.no_grad():
            assert after(Tensor.add_, x, given(4, 6, at=EVEN)) == [("NATIVE", True)]
        assert after(Tensor.add_, x, across) == [("EXECUTE", True)]
        assert after(torch.nonzero, x)[0][0] == "EXECUTE"  # gathered

    on_all_ranks(run)


def test_calls_by_other_calls_and_stand_ins_have_routes() -> None:
    def run() -> None:
        x = given(4, 6, at=EVEN)
        out = mw.shard_tensor(torch.zeros(4, 6), MESH, EVEN)
        assert after(torch.add, x, x, out=out, times=2)[0] == ("FUNCTION", True)
        torch.testing.assert_close(mw.unshard(out), torch.full((4, 6), 2.0))
        torch.ops.aten.add.out(x, out, out=out)
        torch.testing.assert_close(mw.unshard(out), torch.full((4, 6), 3.0))
        assert after(F.normalize, x) == [("REDISPATCH", True)]

    on_all_ranks(run)


def test_a_plan_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CallPlan(None).route = Route.NATIVE  # type: ignore[misc,arg-type]


def test_known_calls_are_those_of_the_native_op() -> None:
    def run() -> None:
        x = given(4, 6, at=EVEN)
        assert after(torch.relu, x, times=2) == [("NATIVE", True)]
        assert len(runtime.RT.fast) == 1
        after(torch.add, x, given(4, 6, at={"a": mw.Shard(1)}), times=3)
        assert len(runtime.RT.fast) == 1
        after(torch.stack, [x, given(4, 6, at=WHOLE)], times=3)
        assert not runtime.RT.fast
        with mw.explain() as why:  # who listens is told of all
            assert after(torch.relu, x, times=3) == [("NATIVE", True)]
            assert not runtime.RT.fast
        assert not why.records

    on_all_ranks(run)


def test_known_calls_are_refused_where_communication_must_be_asked_for() -> None:
    def run() -> None:
        rows, columns = given(4, 6, at=EVEN), {"a": mw.Shard(1)}
        for _ in range(3):
            rows + given(4, 6, at=columns)
        with mw.explicit():
            for _ in range(3):
                with pytest.raises(ExplicitError):
                    rows + given(4, 6, at=columns)
            torch.relu(rows)
        assert (rows + given(4, 6, at=columns)).shape == (4, 6)

    on_all_ranks(run)


def test_known_calls_of_reduced_values() -> None:
    """What was reduced for one consumer, for others: known calls, checkpoints, writes and second derivatives."""
    x, w = (torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(2))

    def values(x: Tensor, w: Tensor, again: bool) -> list[Tensor]:
        def step(x: Tensor) -> Tensor:
            made = x @ w.T  # Partial where its columns are split
            return F.layer_norm(made, (4,)) + F.layer_norm(made * 1.0, (4,)) * made.exp()

        found = []
        for _ in range(4):
            out = checkpoint(step, x, use_reentrant=False) if again else step(x)
            (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=not again)
            found += [out, first]
            if not again:
                found += torch.autograd.grad(first.square().sum(), x)
        with torch.no_grad():
            found.append(step(x))
        return found

    def run(again: bool) -> list[Tensor]:
        across = {"a": mw.Shard(1)}
        given = [mw.shard_tensor(t, MESH, across).requires_grad_() for t in (x, w)]
        return [mw.unshard(t).detach() for t in values(*given, again)]

    for again in (False, True):
        want = values(x.clone().requires_grad_(), w.clone().requires_grad_(), again)
        for made, t in zip(mw.simulate(lambda again=again: run(again), MESH)[1], want, strict=True):
            torch.testing.assert_close(made, t.detach())


def test_a_kind_of_call_is_planned_once_and_then_one_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []
    looked_at: list[Any] = []

    def plan(func: Any, *rest: Any, **named: Any) -> CallPlan:
        planned.append(func)
        return plan_call(func, *rest, **named)

    def call(front: Any, key: Any, func: Any, *rest: Any) -> Any:
        looked_at.append(func)
        return routes.call(front, key, func, *rest)

    monkeypatch.setattr(routes, "plan_call", plan)
    monkeypatch.setattr(torch_function, "call", call)

    def run() -> None:
        for _ in range(5):
            torch.relu(given(4, 6, at=EVEN))
        for number in (2.0, 3.0, -0.5):
            torch.mul(given(4, 6, at=EVEN), number)
            torch.logsumexp(given(4, 6, at=EVEN), 0)  # computed by other calls

    monkeypatch.setattr(plans, "_DECIDED", Recent(64))
    on_all_ranks(run)
    for func in (torch.relu, torch.mul, torch.logsumexp):
        assert planned.count(func) == 2  # once on each rank
    assert looked_at.count(torch.relu) == 4  # the third call is known by its key


def test_of_another_size_nothing_is_shown_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    learn = execution.Execution._learn

    def counted(self: Any, *rest: Any) -> None:
        shown.append(self.func)
        learn(self, *rest)

    monkeypatch.setattr(plans, "_DECIDED", Recent(64))
    monkeypatch.setattr(execution.Execution, "_learn", counted)

    def run() -> None:
        for rows in (8, 10, 12, 9, 11):  # of two ranks
            assert torch.relu(given(rows, 6, at=EVEN)).shape == (rows, 6)

    on_all_ranks(run)
    # Once on each rank where all parts are alike, and where they are not for each size anew.
    assert shown.count(torch.relu) == 2 * 3


def test_under_autocast_only_plain_plans_serve_both() -> None:
    def run() -> None:
        x, w = given(4, 6, at=EVEN), given(3, 6, at={"a": mw.Shard(1)})
        # Of linear: without, with, and the one in that of bfloat16.
        for func, args, kept in ((torch.relu, (x,), 1), (F.linear, (x, w), 3)):
            after(func, *args)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for _ in range(2):
                    func(*args)
            assert len(plans_of(func)) == kept, func

    on_all_ranks(run)
