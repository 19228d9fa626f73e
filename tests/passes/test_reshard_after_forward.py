"""What reshard-after-forward makes of programs that are written by hand, and the order in which passes run."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.fx as fx

from meshwright.collective import OPERATORS
from meshwright.passes import DataParallelOptimization, GradientMerge, PassManager
from meshwright.passes.recompute import Recompute
from meshwright.passes.reshard_after_forward import ReshardAfterForward
from meshwright.passes.split_checkpoints import SplitCheckpoints
from meshwright.program.ir.nodes import checked_value, info_of, value_of
from meshwright.program.ir.program import Program
from tests.support.graphs import Written, lines

aten = torch.ops.aten


def gathered(w: Written, p: fx.Node, name: str, **info: Any) -> fx.Node:
    """A stored parameter, whole: cast, as it were, then gathered, then laid as the model has it."""
    value = value_of(p)
    assert value is not None
    said = {"role": "forward", "gather": name, **info}
    cast = w.op(aten.mul.Tensor, p, 1.0, **said)
    args = (cast, 0, [2, 2], "a", w.text)
    whole = w.op(OPERATORS["all_gather"].default, *args, shape=(4, *value.shape[1:]), cause=w.cause("a"), **said)
    return w.op(aten.view.default, whole, [4, 4], shape=(4, 4), **said)


def short(program: Program) -> list[str]:
    return [line.replace(", a=2@cpu", "") for line in lines(program)]


def of(program: Program) -> tuple[Program, Any]:
    assert ReshardAfterForward().applies(program)
    made, record = ReshardAfterForward().apply(program)
    made.graph.lint()
    return made, record


def test_a_gather_for_the_backward() -> None:
    w = Written({"a": 2})
    p, q, x = w.given("p", 2, 4), w.given("q", 2, 4), w.given("x", 4, 4, kind="batch")
    one, two = gathered(w, p, "p"), gathered(w, q, "q")
    turned = w.op(aten.t.default, one, role="forward")
    y = w.op(aten.mm.default, x, turned, role="forward")
    z = w.op(aten.mm.default, y, two, role="forward")
    g = w.op(aten.neg.default, z)
    h = w.op(aten.mm.default, g, one)
    k = w.op(aten.sub.Tensor, h, turned)
    made, record = of(w.program(k))
    assert [line.partition(" = ")[2] for line in short(made)] == [
        "mul(p, 1.0)", "all_gather(mul, 0, [2, 2], a)", "view(all_gather, [4, 4])",
        "mul(q, 1.0)", "all_gather(mul_1, 0, [2, 2], a)", "view(all_gather_1, [4, 4])",
        "t(view)", "mm(x, t)", "mm(mm, view_1)", "neg(mm_1)",
        "mul(p, 1.0)", "all_gather(mul_2, 0, [2, 2], a)", "view(all_gather_2, [4, 4])", "t(view_2)",
        "mm(neg, view_2)", "sub(mm_2, t_1)",
    ]  # fmt: skip
    nodes = {n.name: n for n in made.graph.nodes}
    for name in ("mul_2", "all_gather_2", "view_2", "t_1"):
        assert info_of(nodes[name]).role == "backward", name
    assert info_of(nodes["all_gather_2"]).gather == "p"
    stores = [checked_value(nodes[n]).storage for n in ("all_gather", "all_gather_2", "view_2", "t_1", "mul_2", "mul")]
    assert stores[1] == stores[2] == stores[3], "one memory"
    assert len({stores[0], stores[1], stores[4], stores[5]}) == 4, "of its own"
    cause = made.cause(nodes["all_gather_2"])
    assert cause is not None
    assert cause.reason == "gathered again for the backward: why"
    assert made.cause(nodes["all_gather"]) == made.causes[0]
    assert record.summary == "1 parameters are gathered again for the backward"
    assert record.lines == ("128 bytes on this rank are not kept from the forward to the backward",)
    assert record.details == {"gathers": 1, "bytes": 128}


def test_what_the_forward_wrote_is_in_what_is_gathered_again() -> None:
    """It was brought to the stored parameter, too; who read behind the write reads the new memory."""
    w = Written({"a": 2})
    p, x = w.given("p", 2, 4), w.given("x", 4, 4, kind="batch")
    whole = gathered(w, p, "p")
    clamped = w.op(aten.mul_.Tensor, whole, 0.5, role="forward")
    w.op(aten.copy_.default, p, w.op(aten.slice.Tensor, clamped, 0, 0, 2, shape=(2, 4), role="forward"), role="forward")
    y = w.op(aten.mm.default, x, clamped, role="forward")
    g = w.op(aten.mm.default, w.op(aten.neg.default, y), clamped)
    made, record = of(w.program(g))
    behind = [line.partition(" = ")[2] for line in short(made)]
    assert behind[-5:] == [
        "neg(mm)", "mul(p, 1.0)", "all_gather(mul_1, 0, [2, 2], a)", "view(all_gather_1, [4, 4])", "mm(neg, view_1)",
    ]  # fmt: skip
    assert sum("mul_(" in line for line in behind) == 1, "nothing is written again"
    assert record.details["gathers"] == 1


def test_what_else_writes_and_looks_is_no_view() -> None:
    """What a product gives, or a write that only reads the parameter, is the forward's own."""
    w = Written({"a": 2})
    p, x = w.given("p", 2, 4), w.given("x", 4, 4, kind="batch")
    buffer = w.given("buffer", 4, 4, kind="buffer")
    whole = gathered(w, p, "p")
    kept = w.op(aten.mul_.Tensor, buffer, whole, role="forward")
    own = w.op(aten.mm.default, x, whole, role="forward")
    g = w.op(aten.mm.default, own, w.op(aten.neg.default, kept))
    made, record = of(w.program(g))
    assert record.details == {"gathers": 0, "bytes": 0}
    assert [line.partition(" = ")[2] for line in short(made)][3:] == [
        "mul_(buffer, view)", "mm(x, view)", "neg(mul_)", "mm(mm, neg)",
    ]  # fmt: skip


def test_a_view_that_the_backward_makes_is_made_of_the_second_gather() -> None:
    w = Written({"a": 2})
    p, x = w.given("p", 2, 4), w.given("x", 4, 4, kind="batch")
    whole = gathered(w, p, "p")
    y = w.op(aten.mm.default, x, whole, role="forward")
    late = w.op(aten.t.default, whole)
    g = w.op(aten.mm.default, w.op(aten.neg.default, y), late)
    made, _ = of(w.program(g))
    assert [line.partition(" = ")[2] for line in short(made)][3:] == [
        "mm(x, view)", "mul(p, 1.0)", "all_gather(mul_1, 0, [2, 2], a)", "view(all_gather_1, [4, 4])", "t(view_1)",
        "neg(mm)", "mm(neg, t)",
    ]  # fmt: skip


def test_when_there_is_something_to_do() -> None:
    for gather, role, backward, want in (
        ("p", "forward", True, True), ("p", "forward", False, False), ("", "forward", True, False),
        ("p", "optimizer", True, False), ("", "optimizer", False, False),
    ):  # fmt: skip
        w = Written({"a": 2})
        p = w.given("p", 4, 4)
        y = w.op(aten.neg.default, p, role=role, gather=gather)
        if backward:
            w.op(aten.neg.default, y)
        assert ReshardAfterForward().applies(w.program()) == want
    w = Written({"a": 2})
    y = w.op(aten.neg.default, w.given("p", 4, 4), role="forward", gather="p")
    w.op(aten.neg.default, w.op(aten.abs.default, y, role="backward", gather="p"))
    assert not ReshardAfterForward().applies(w.program()), "the backward goes on with the gather"


def test_the_order_of_passes() -> None:
    """Whatever the order in which they are given, and whichever are left out."""
    ordered = [Recompute(), SplitCheckpoints(), ReshardAfterForward(), GradientMerge(2), DataParallelOptimization()]
    for n in range(1, 4):
        for some in itertools.combinations(ordered, n):
            for given in itertools.permutations(some):
                assert PassManager(given).passes == some
