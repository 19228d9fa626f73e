"""What runs again for the backward, of programs that are written by hand."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.fx as fx

import meshwright as mw
from meshwright.passes.recompute import Recompute
from meshwright.program.ir.nodes import info_of, value_of
from meshwright.program.ir.program import Program
from meshwright.program.ir.regions import Region
from tests.support.graphs import Written, lines

aten = torch.ops.aten
OUTER, INNER = Region(1), Region(2)
INSIDE: dict[str, Any] = {"role": "forward", "regions": (OUTER,)}
BACK: dict[str, Any] = {"role": "backward", "regions": (OUTER,)}
BOTH: dict[str, Any] = {"role": "forward", "regions": (OUTER, INNER)}
BATCH_NORM = aten.native_batch_norm.default


def of(w: Written, *results: fx.Node) -> tuple[Program, Any]:
    """What the pass makes of a program, and what it says."""
    program = w.program(*results)
    assert Recompute().applies(program)
    made, record = Recompute().apply(program)
    made.graph.lint()
    assert not Recompute().applies(made), "nothing is left to do"
    return made, record


def again(program: Program) -> list[str]:
    """What runs again, in order."""
    roles = {n.name: info_of(n).role for n in program.graph.nodes}
    return [line for line in lines(program) if roles[line.partition(" = ")[0]] == "recomputation"]


def test_what_the_backward_needs() -> None:
    """From the inputs on, in front of the first that reads it; what nobody needs does not run again."""
    w = Written({"a": 2})
    x = w.given("x", 4, 4, kind="batch")
    sin = w.op(aten.sin.default, x, **INSIDE)
    exp = w.op(aten.exp.default, sin, **INSIDE)
    log = w.op(aten.log.default, exp, **INSIDE)
    y = w.op(aten.neg.default, log, role="forward")
    g = w.op(aten.mul.Tensor, y, 2.0)
    h = w.op(aten.mul.Tensor, g, exp, **BACK)
    made, record = of(w, w.op(aten.mul.Tensor, h, sin, **BACK))
    assert lines(made) == [
        "sin = sin(x)", "exp = exp(sin)", "log = log(exp)", "neg = neg(log)", "mul = mul(neg, 2.0)",
        "sin_1 = sin(x)", "exp_1 = exp(sin_1)", "mul_1 = mul(mul, exp_1)", "mul_2 = mul(mul_1, sin_1)",
    ]  # fmt: skip
    assert again(made) == ["sin_1 = sin(x)", "exp_1 = exp(sin_1)"]
    assert record.summary == "2 nodes of 1 checkpointed calls run again for the backward"
    assert record.lines == ("they make 256 bytes again on this rank",)
    assert record.details == {"calls": 1, "nodes": 2, "bytes": 256}
    stored = [v.storage for n in made.graph.nodes if (v := value_of(n)) is not None]
    assert len(stored) == len(set(stored)) == 10, "memory of its own"
    assert all(not info_of(n).regions and not info_of(n).saved for n in made.graph.nodes)


def test_views_of_the_backward_are_of_what_runs_again() -> None:
    w = Written({"a": 2})
    x = w.given("x", 4, 4, kind="batch")
    sin = w.op(aten.sin.default, x, **INSIDE)
    turned = w.op(aten.t.default, sin, **INSIDE)
    y = w.op(aten.exp.default, turned, role="forward")
    g = w.op(aten.mul.Tensor, y, 2.0)
    own = w.op(aten.t.default, sin, **BACK)
    h = w.op(aten.mm.default, g, own, **BACK)
    made, record = of(w, w.op(aten.mm.default, h, w.op(aten.t.default, y)))
    assert lines(made)[-5:] == [
        "sin_1 = sin(x)", "t_3 = t(sin_1)", "mm = mm(mul, t_3)", "t_2 = t(exp)", "mm_1 = mm(mm, t_2)",
    ]  # fmt: skip
    assert record.details == {"calls": 1, "nodes": 2, "bytes": 128}, "a view makes nothing"


def test_a_region_without_a_backward_runs_once() -> None:
    w = Written({"a": 2})
    x = w.given("x", 4, 4, kind="batch")
    other: dict[str, Any] = {"role": "forward", "regions": (INNER,)}
    alone = w.op(aten.cos.default, x, **other)
    sin = w.op(aten.sin.default, x, **INSIDE)
    y = w.op(aten.mul.Tensor, alone, sin, role="forward")
    made, record = of(w, w.op(aten.mul.Tensor, y, sin, **BACK))
    assert again(made) == ["sin_1 = sin(x)"]
    assert record.details == {"calls": 2, "nodes": 1, "bytes": 128}


def test_what_a_policy_saves_is_kept() -> None:
    w = Written({"a": 2})
    x = w.given("x", 4, 4, kind="batch")
    sin = w.op(aten.sin.default, x, saved=(OUTER,), **INSIDE)
    exp = w.op(aten.exp.default, sin, saved=(INNER,), **INSIDE)
    y = w.op(aten.neg.default, exp, role="forward")
    h = w.op(aten.mul.Tensor, y, sin, **BACK)
    made, _ = of(w, w.op(aten.mul.Tensor, h, exp, **BACK))
    assert again(made) == ["exp_1 = exp(sin)"]
    assert lines(made)[-2:] == ["mul = mul(neg, sin)", "mul_1 = mul(mul, exp_1)"]


def drawing(rows: int, **info: Any) -> tuple[Program, Any]:
    """Draws ``4 * rows`` numbers twice in a region, once outside."""
    w = Written({"a": 2})
    x = w.given("x", 4, rows, kind="batch")
    cos = w.op(aten.cos.default, x, **INSIDE)
    one = w.op(aten.bernoulli.p, cos, 0.5, **INSIDE)
    outside = w.op(aten.bernoulli.p, x, 0.5, role="forward")
    two = w.op(aten.bernoulli.p, one, 0.5, **{**INSIDE, **info})
    both = w.op(aten.mul.Tensor, one, two, **INSIDE)
    y = w.op(aten.exp.default, both, role="forward")
    h = w.op(aten.mul.Tensor, y, both, **BACK)
    return of(w, h, outside)


def test_few_random_numbers_are_kept() -> None:
    made, record = drawing(79)  # 2 x 4 x 79 doubles, as many bytes as a generator's state
    assert torch.get_rng_state().numel() == 2 * 4 * 79 * 8
    assert again(made) == ["mul_2 = mul(bernoulli, bernoulli_2)"]
    assert record.details == {"calls": 1, "nodes": 1, "bytes": 4 * 79 * 8}


def test_many_random_numbers_are_drawn_again() -> None:
    """Behind the state in front of the first; afterwards the generator goes on from where it was."""
    made, record = drawing(80)
    assert lines(made) == [
        "cos = cos(x)", "random_state_default = random_state(cpu)", "bernoulli = bernoulli(cos, 0.5)",
        "bernoulli_1 = bernoulli(x, 0.5)", "bernoulli_2 = bernoulli(bernoulli, 0.5)",
        "mul = mul(bernoulli, bernoulli_2)", "exp = exp(mul)",
        "random_state_default_1 = random_state(cpu)",
        "set_random_state_default = set_random_state(random_state_default, cpu)",
        "cos_1 = cos(x)", "bernoulli_3 = bernoulli(cos_1, 0.5)", "bernoulli_4 = bernoulli(bernoulli_3, 0.5)",
        "mul_2 = mul(bernoulli_3, bernoulli_4)",
        "set_random_state_default_1 = set_random_state(random_state_default_1, cpu)", "mul_1 = mul(exp, mul_2)",
    ]  # fmt: skip
    roles = {n.name: info_of(n).role for n in made.graph.nodes}
    assert roles["random_state_default"] == "forward"
    assert {roles[n] for n in roles if n.startswith("set") or n == "random_state_default_1"} == {"recomputation"}
    state = next(n for n in made.graph.nodes if n.name == "random_state_default")
    value = value_of(state)
    assert value is not None
    assert (value.shape, value.dtype) == ((torch.get_rng_state().numel(),), torch.uint8)
    assert record.details["nodes"] == 7


def test_all_draw_again_or_none() -> None:
    made, _ = drawing(80, saved=(OUTER,))
    assert again(made) == ["mul_2 = mul(bernoulli, bernoulli_2)"]


def test_writes() -> None:
    """To what the region made they are made again; to memory from outside once, and what was read of it before a
    write is kept."""
    w = Written({"a": 2})
    x = w.given("x", 4, 4, kind="batch")
    state, other, early = (w.given(n, 4, 4, kind="buffer") for n in ("state", "other", "early"))
    w.op(aten.zero_.default, early, role="forward")
    sin = w.op(aten.sin.default, x, **INSIDE)
    twice = w.op(aten.mul_.Tensor, sin, 2.0, **INSIDE)
    w.op(aten.add_.Tensor, state, twice, **INSIDE)
    exp = w.op(aten.exp.default, other, **INSIDE)
    cos = w.op(aten.cos.default, state, **INSIDE)
    tan = w.op(aten.tan.default, early, **INSIDE)
    y = w.op(aten.mul.Tensor, twice, exp, role="forward")
    w.op(aten.zero_.default, other, role="forward")
    g = w.op(aten.mul.Tensor, y, 2.0)
    for read in (twice, exp, cos, tan):
        g = w.op(aten.sub.Tensor, g, read, **BACK)
    w.op(aten.zero_.default, early, role="optimizer")
    made, record = of(w, g)
    assert again(made) == ["sin_1 = sin(x)", "mul__1 = mul_(sin_1, 2.0)", "cos_1 = cos(state)", "tan_1 = tan(early)"]
    assert [line.partition("sub")[2].partition("= ")[2] for line in lines(made)[-5:-1]] == [
        "sub(mul_1, mul__1)", "sub(sub, exp)", "sub(sub_1, cos_1)", "sub(sub_2, tan_1)",
    ]  # fmt: skip
    assert sum("zero_(other)" in line or "add_(" in line for line in lines(made)) == 2, "once each"
    assert record.details == {"calls": 1, "nodes": 4, "bytes": 3 * 128}, "a write makes nothing"


def test_a_write_between_reads_is_repeated_with_what_it_writes_to() -> None:
    """Nobody reads what the write gives, only the memory."""
    w = Written({"a": 2})
    x = w.given("x", 4, 4, kind="batch")
    sin = w.op(aten.sin.default, x, **INSIDE)
    unread = w.op(aten.cos.default, x, **INSIDE)
    w.op(aten.add_.Tensor, sin, x, **INSIDE)
    w.op(aten.add_.Tensor, unread, x, **INSIDE)
    y = w.op(aten.mul.Tensor, sin, unread, role="forward")
    made, _ = of(w, w.op(aten.mul.Tensor, y, sin, **BACK))
    assert again(made) == ["sin_1 = sin(x)", "add__2 = add_(sin_1, x)"]


def test_what_shares_memory_with_what_is_kept_is_kept() -> None:
    w = Written({"a": 2})
    x, state = w.given("x", 4, 4, kind="batch"), w.given("state", 4, 4, kind="buffer")
    sin = w.op(aten.mul.Tensor, x, state, **INSIDE)
    turned = w.op(aten.t.default, sin, **INSIDE)
    exp = w.op(aten.exp.default, turned, **INSIDE)
    y = w.op(aten.neg.default, exp, role="forward")
    w.op(aten.zero_.default, state, role="forward")
    h = w.op(aten.mm.default, y, turned, **BACK)
    made, _ = of(w, w.op(aten.mm.default, h, exp, **BACK))
    assert again(made) == ["exp_1 = exp(t)"]


@pytest.mark.parametrize("inner_needs", [True, False])
def test_regions_in_regions(inner_needs: bool) -> None:
    """The inner one runs again from what the outer one's second run gave; what only that had needed goes."""
    w = Written({"a": 2})
    x = w.given("x", 4, 4, kind="batch")
    sin = w.op(aten.sin.default, x, **INSIDE)
    cos = w.op(aten.cos.default, sin, **BOTH)
    exp = w.op(aten.exp.default, cos, **BOTH)
    y = w.op(aten.neg.default, exp, role="forward")
    g = w.op(aten.mul.Tensor, y, 2.0)
    deep: dict[str, Any] = {"role": "backward", "regions": (OUTER, INNER)}
    h = w.op(aten.sub.Tensor, g, exp if inner_needs else g, **deep)
    made, record = of(w, w.op(aten.sub.Tensor, h, sin, **BACK))
    want = ["sin_1 = sin(x)"]
    if inner_needs:
        want += ["cos_2 = cos(sin_1)", "exp_2 = exp(cos_2)"]
    assert again(made) == want
    assert record.details["nodes"] == len(want)
    assert lines(made)[-1].endswith("= sub(sub, sin_1)")


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_written_once(training: bool) -> None:
    w = Written({"a": 2})
    x, p = w.given("x", 4, 4, kind="batch"), w.given("p", 4)
    mean, var = w.given("mean", 4, kind="buffer"), w.given("var", 4, kind="buffer")
    sin = w.op(aten.sin.default, x, **INSIDE)
    normed = w.op(BATCH_NORM, sin, p, p, mean, var, training, 0.1, 1e-5, **INSIDE)
    first = w.op(operator.getitem, normed, 0, **INSIDE)
    y = w.op(aten.exp.default, first, role="forward")
    made, record = of(w, w.op(aten.mul.Tensor, y, first, **BACK))
    where = "None, None" if training else "mean, var"
    (copy,) = [line for line in again(made) if "= native_batch_norm(" in line]
    assert copy.endswith(f"(sin_1, p, p, {where}, {training}, 0.1, 1e-05)")
    (kept,) = [line for line in lines(made) if "= native_batch_norm(" in line and line not in again(made)]
    assert "mean, var" in kept
    assert record.details["nodes"] == 3


def test_what_another_pass_needs_to_know_stays() -> None:
    split = Region(3, split={"a": mw.Shard(0)})
    w = Written({"a": 2})
    x = w.given("x", 4, 4, kind="batch")
    sin = w.op(aten.sin.default, x, role="forward", regions=(split, OUTER), saved=(OUTER,))
    y = w.op(aten.exp.default, sin, role="forward")
    program = w.program(w.op(aten.mul.Tensor, y, sin, role="backward", regions=(split,)))
    made, _ = Recompute().apply(program)
    assert [info_of(n).regions for n in made.graph.nodes if n.name == "sin"] == [(split,)]
    assert all(not info_of(n).saved for n in made.graph.nodes)
    assert [info_of(n).regions for n in program.graph.nodes if n.name == "sin"] == [(split, OUTER)], "a copy"


def test_several_that_are_kept() -> None:
    """What shares memory with any of them is kept, whichever was found first."""
    w = Written({"a": 2})
    x, state = w.given("x", 4, 4, kind="batch"), w.given("state", 4, 4, kind="buffer")
    one = w.op(aten.mul.Tensor, x, state, **INSIDE)
    two = w.op(aten.add.Tensor, x, state, **INSIDE)
    turned = w.op(aten.t.default, one, **INSIDE)
    y = w.op(aten.mul.Tensor, turned, two, role="forward")
    w.op(aten.zero_.default, state, role="forward")
    h = w.op(aten.mul.Tensor, y, turned, **BACK)
    made, _ = of(w, w.op(aten.mul.Tensor, h, two, **BACK))
    assert again(made) == []
