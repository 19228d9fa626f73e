"""Sums over one axis after another as one sum, in programs that are written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx

from meshwright.collective import COLLECTIVES, OPERATORS
from meshwright.program.ir.nodes import info_of, value_of
from meshwright.program.ir.program import Program
from tests.support.alone import flattened
from tests.support.graphs import Written

aten = torch.ops.aten
AXES = {"a": 2, "b": 3, "c": 2}


def sums(program: Program) -> list[tuple[str, str]]:
    return [(n.args[1], n.args[-2]) for n in program.graph.nodes if n.target in COLLECTIVES]


def with_sums(between: Callable[[Written, fx.Node], fx.Node], *sent: tuple[str, str], **info: Any) -> Program:
    """A gradient of 4 x 4 and its sums, with something between two of them."""
    w = Written(AXES)
    p, x = w.given("p", 4, 4), w.given("x", 4, 4, kind="batch")
    at = w.gradient(x, x, "p")
    for i, (axes, op) in enumerate(sent):
        at = w.sum(between(w, at) if i else at, axes, op, sync="p", cause=w.cause(axes), **(info if i == 0 else {}))
    w.update((p, at))
    return w.program()


def nothing(w: Written, x: fx.Node) -> fx.Node:
    return x


def scaled(w: Written, x: fx.Node) -> fx.Node:
    return w.op(aten.t.default, w.op(aten.mul.Tensor, x, 0.5))


def own_rows(w: Written, x: fx.Node) -> fx.Node:
    """As the rank has them that gets all rows: others get none of them, or the next ones."""
    return w.op(aten.slice.Tensor, x, 0, 0, 4)


def squared(w: Written, x: fx.Node) -> fx.Node:
    return w.op(aten.mul.Tensor, x, x)


def read_twice(w: Written, x: fx.Node) -> fx.Node:
    w.update((w.given("q", 4, 4), x))
    return x


@pytest.mark.parametrize(
    ("between", "sent", "want"),
    [
        (nothing, "a b", "a,b"), (nothing, "b a", "a,b"), (nothing, "c a", "a,c"), (nothing, "c a,b", "a,b,c"),
        (nothing, "b c a", "a,b,c"), (nothing, "a", "a"), (scaled, "b a", "a,b"), (scaled, "c b a", "a,b,c"),
        (nothing, "a a", "a a"), (nothing, "a,b b,c", "a,b b,c"), (squared, "a b", "a b"), (squared, "a b c", "a b c"),
        (read_twice, "a b", "a b"), (own_rows, "a b", "a b"), (nothing, "a b a", "a,b a"),
    ],
)  # fmt: skip
def test_sums_in_a_row(between: Callable[..., Any], sent: str, want: str) -> None:
    program = with_sums(between, *((axes, "sum") for axes in sent.split()))
    before = len(program.graph.nodes)
    made, count = flattened(program)
    assert " ".join(axes for _, axes in sums(made)) == want
    assert count == len(sent.split()) - len(want.split())
    assert len(made.graph.nodes) == before - count
    made.graph.lint()


def test_sums_and_means_stay_apart() -> None:
    for ops, want in ((("avg", "avg"), 1), (("avg", "sum"), 2), (("max", "max"), 2), (("max", "sum"), 2)):
        made, count = flattened(with_sums(nothing, ("a", ops[0]), ("b", ops[1])))
        assert (len(sums(made)), count) == (want, 2 - want)
        assert {op for op, _ in sums(made)} == set(ops)


def test_sums_that_travel_otherwise_stay_apart() -> None:
    for wires, want in ((("bfloat16", "bfloat16"), ["a,b"]), (("bfloat16", "float16"), ["a", "b"])):
        w = Written(AXES)
        p, x = w.given("p", 4, 4), w.given("x", 4, 4, kind="batch")
        at = w.gradient(x, x, "p")
        for axis, wire in zip("ab", wires, strict=True):
            at = w.op(OPERATORS["wire_all_reduce"].default, at, "sum", wire, axis, w.text, sync="p")
        w.update((p, at))
        made, _ = flattened(w.program())
        assert [axes for _, axes in sums(made)] == want


def test_a_gradient_as_autograd_gave_it_is_no_step_on_the_way() -> None:
    made, count = flattened(with_sums(nothing, ("a", "sum"), ("b", "sum"), grad_of=(("p", None),)))
    assert count == 0
    assert len(sums(made)) == 2


def test_only_sums_of_gradients() -> None:
    w = Written(AXES)
    x = w.given("x", 4, 4, kind="batch")
    made, count = flattened(w.program(w.sum(w.sum(x, "a", role="forward"), "b", role="forward")))
    assert (len(sums(made)), count) == (2, 0)


def test_a_sum_says_what_it_moves() -> None:
    """2 (n - 1) / n of 128 bytes, of 12 ranks."""
    program = with_sums(scaled, ("c", "sum"), ("b", "sum"), ("a", "sum"))
    made, count = flattened(program)
    (node,) = (n for n in made.graph.nodes if n.target in COLLECTIVES)
    cause = made.cause(node)
    assert count == 2
    assert cause is not None
    assert (cause.axes, cause.bytes, cause.reason) == (("a", "b", "c"), 2 * 128 * 11 // 12, "why")
    assert made.causes[:3] == program.causes
    assert len(made.causes) == 5, "each step has its own"


def test_a_sum_without_a_record_has_none() -> None:
    w = Written(AXES)
    p, x = w.given("p", 4, 4), w.given("x", 4, 4, kind="batch")
    w.update((p, w.sum(w.sum(w.gradient(x, x, "p"), "a"), "b", sync="p")))
    made, count = flattened(w.program())
    assert (count, made.causes, [axes for _, axes in sums(made)]) == (1, (), ["a,b"])


def test_views_lie_where_the_sum_lies() -> None:
    w = Written(AXES)
    p, x = w.given("p", 4, 4), w.given("x", 4, 4, kind="batch")
    gradient = w.gradient(x, x, "p")
    view = w.op(aten.t.default, w.sum(gradient, "a"))
    w.update((p, w.sum(view, "b", sync="p")))
    made, _ = flattened(w.program())
    found, of = value_of(view), value_of(gradient)
    assert found is not None
    assert of is not None
    assert (found.storage, found.nbytes) == (of.storage, 128)
    assert info_of(view).role == "backward"
    assert len(sums(made)) == 1


def test_sums_that_are_cut_stay() -> None:
    w = Written(AXES)
    p, x = w.given("p", 2, 4), w.given("x", 4, 4, kind="batch")
    w.update((p, w.scatter(w.sum(w.gradient(x, x, "p"), "b"), "a", [2, 2], sync="p")))
    made, count = flattened(w.program())
    assert (len(sums(made)), count) == (2, 0)
