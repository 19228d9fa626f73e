"""Gradients and their sums, in programs that are written by hand: where each is complete, needed, and how large."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.fx as fx

from meshwright.errors import DesyncError
from meshwright.layout import Partial, Shard
from meshwright.passes.buckets import FusedBucket
from meshwright.passes.gradients import (
    Gradients,
    chain_up,
    grad_below,
    is_reduction,
    is_view,
    parameter_of,
    units_of,
)
from meshwright.program.ir.nodes import annotate
from meshwright.program.ir.program import Program
from tests.support.alone import ordered
from tests.support.graphs import Written

aten = torch.ops.aten
AXES = {"a": 2, "b": 3}


def a_step(*names: str) -> tuple[Written, list[fx.Node], fx.Node]:
    w = Written(AXES)
    return w, [w.given(n, 4, 4) for n in names], w.given("x", 4, 4, kind="batch")


def order_of(found: Gradients) -> list[str]:
    return [n.name for n in found.order]


def test_where_gradients_are_complete_and_needed() -> None:
    w, (p, q), x = a_step("p", "q")
    g, h = w.gradient(x, x, "p"), w.gradient(x, x, "q")
    s, t = w.sum(g, "a"), w.sum(h, "a,b")
    w.update((q, t), (p, s))
    w.op(aten.mul_.Tensor, p, 0.5, role="optimizer")
    found = Gradients(w.program(w.op(aten.mul.Tensor, t, 2.0, role="optimizer")))
    assert order_of(found) == [
        "p", "q", "x", "mm", "mm_1", "all_reduce", "all_reduce_1", "add_", "add__1", "mul_", "mul", "output",
    ]  # fmt: skip
    first, second = found.reductions
    assert (first.node, first.gradient, first.name, first.nbytes, first.unit) == (s, g, "p", 128, "")
    assert (first.key, first.ready, first.needed) == ((3, 0), 3, 8)
    assert (second.node, second.gradient, second.name, second.nbytes) == (t, h, "q", 128)
    assert (second.key, second.ready, second.needed) == ((4, 1), 4, 7)
    assert first.kind.name == "all_reduce"
    assert (found.inputs, found.later) == (3, False)
    assert first.group != second.group
    assert first.group == (first.kind, torch.float64, "sum", None, "a", w.text, "")
    assert [found.place[n] for n in (p, q, x, g)] == [0, 1, 2, 3]


def test_the_order_is_that_of_the_backward() -> None:
    w, (p, q), x = a_step("p", "q")
    h, g = w.gradient(x, x, "q"), w.gradient(x, x, "p")
    s, t = w.sum(g, "a"), w.sum(h, "a")
    w.update((p, s), (q, t))
    program = w.program()
    assert [(r.name, r.key) for r in Gradients(program).reductions] == [("p", (4, 0)), ("q", (3, 1))]
    assert [(r.name, r.key) for r in ordered(program).sums()] == [("q", (0, 0, 1)), ("p", (0, 1, 0))]


def test_a_sum_that_nobody_reads_is_needed_at_the_end() -> None:
    w, _, x = a_step("p")
    w.sum(w.gradient(x, x, "p"), "a")
    (r,) = Gradients(w.program()).reductions
    assert (r.ready, r.needed) == (2, 4)


def test_a_gradient_that_is_written_to_is_complete_behind_the_last_write() -> None:
    w, (p,), x = a_step("p")
    g = w.gradient(x, x, "p")
    view = w.op(aten.t.default, g)
    other = w.op(aten.mul.Tensor, x, 2.0, role="forward")
    w.op(aten.mul_.Tensor, view, 0.5)
    w.op(aten.mul.Tensor, other, 2.0, role="forward")
    w.update((p, w.sum(g, "a")))
    found = Gradients(w.program())
    (r,) = found.reductions
    assert found.order[r.ready].name == "mul_"
    assert r.key == (r.ready, 0)
    assert [found.last_write(g, n) for n in (3, 4, 6, 99)] == [2, 2, 5, 5]
    assert found.touched[3] == [2, 3, 5, 7], "what reads or makes that storage"


def test_an_input_that_is_summed_is_there_behind_all_inputs() -> None:
    w, (p,), x = a_step("p")
    annotate(x, grad_of=(("p", w.spec((4, 4))),))
    y = w.given("y", 4, 4, kind="batch")
    w.op(aten.mul.Tensor, y, 2.0, role="forward")
    w.update((p, w.sum(x, "a")))
    (r,) = Gradients(w.program()).reductions
    assert (r.ready, r.key) == (2, (2, 0))


def test_what_prepares_a_gradient_moves_to_where_it_is_complete() -> None:
    w, (p, q), x = a_step("p", "q")
    g, h = w.gradient(x, x, "p"), w.gradient(x, x, "q")
    w.op(aten.mul.Tensor, x, 3.0, role="forward")
    decayed = w.op(aten.add.Tensor, g, w.op(aten.mul.Tensor, p, 0.1, role="optimizer"), role="optimizer")
    scaled = w.op(aten.mul.Tensor, h, 0.5)
    w.update((p, w.sum(w.op(aten.t.default, decayed), "a", sync="p")), (q, w.sum(scaled, "a")))
    found = Gradients(w.program())
    assert order_of(found) == [
        "p", "q", "x", "mul_1", "mm", "add", "t", "mm_1", "mul_2", "mul", "all_reduce", "all_reduce_1",
        "add_", "add__1", "output",
    ]  # fmt: skip
    assert [(r.name, r.ready, r.gradient.name) for r in found.reductions] == [("p", 6, "t"), ("q", 8, "mul_2")]


def test_what_stays_where_it_is() -> None:
    """A random number, a write, and what serves the backward itself."""
    for op, info in (
        (lambda w, g: w.op(aten.bernoulli.default, g), {}),
        (lambda w, g: w.op(aten.mul.Tensor, g, g, source="a"), {}),
        (lambda w, g: w.op(aten.mul.Tensor, g, g, transposed=True), {}),
        (lambda w, g: w.op(aten.mul.Tensor, g, g, seed=True), {}),
        (lambda w, g: w.op(aten.mul.Tensor, g, g, role="forward"), {}),
        (lambda w, g: w.op(aten.mul_.Tensor, g, g), {}),
        (lambda w, g: w.sum(g, "b"), {}),
    ):
        w, (p,), x = a_step("p")
        g = w.gradient(x, x, "p")
        w.op(aten.neg.default, x, role="forward")
        made = op(w, g)
        w.update((p, w.sum(made, "a", sync="p", **info)))
        order = order_of(Gradients(w.program()))
        assert order.index("neg") < order.index(made.name), made
    w, (p,), x = a_step("p")
    g = w.gradient(x, x, "p")
    w.op(aten.neg.default, x, role="forward")
    w.update((p, w.sum(w.op(aten.mul.Tensor, g, g), "a", sync="p")))
    order = order_of(Gradients(w.program()))
    assert order.index("neg") > order.index("mul")


def test_factors_of_a_sum_move_to_where_a_later_backward_adds_to_it() -> None:
    def orders(role: str, twice: bool = False, write: bool = False) -> list[str]:
        w, (p,), x = a_step("p")
        s = w.sum(w.gradient(x, x, "p"), "a")
        halved = w.op(aten.div.Tensor, s, 2.0, role="optimizer")
        turned = w.op(aten.t.default, halved, role="optimizer")
        w.op(aten.neg.default, x, role="forward")
        if twice:
            w.op(aten.abs.default, s, role="backward")
        if write:
            w.op(aten.mul_.Tensor, s, 3.0)
        w.update((p, w.op(aten.add.Tensor, turned, x, role=role, source="again")))
        return order_of(Gradients(w.program()))

    rest = ["p", "x", "mm", "all_reduce"]
    assert orders("backward") == [*rest, "neg", "div", "t", "add", "add_", "output"]
    assert orders("optimizer") == [*rest, "div", "t", "neg", "add", "add_", "output"]
    assert orders("backward", twice=True) == [*rest, "div", "t", "neg", "abs_1", "add", "add_", "output"]
    assert orders("backward", write=True) == [*rest, "div", "t", "neg", "mul_", "add", "add_", "output"]


def test_sums_of_sums_come_later() -> None:
    w, (p,), x = a_step("p")
    s = w.sum(w.gradient(x, x, "p"), "a", sync="p")
    t = w.sum(w.op(aten.mul.Tensor, s, 0.5), "b", sync="p")
    w.update((p, t))
    found = Gradients(w.program())
    assert [r.node for r in found.reductions] == [s]
    assert found.later


# -- sizes, ranks with others ----------------------------------------------------------------------------


def rank_with(*lines: str, rank: int = 0, rows: int = 4, sums: str = "pq") -> Program:
    """A program of a rank with so many rows: gradients (``"p"``, ``"q"``), meetings (``"meet"``), reads of sums
    (``"read p"``), in this order; the sums that are not read before come last."""
    w = Written(AXES)
    x, y = w.given("x", rows, 4, kind="batch"), w.given("y", 4, 4, kind="batch")
    made: dict[str, fx.Node] = {}
    reads: dict[str, fx.Node] = {}
    for line in lines:
        if line == "meet":
            w.sum(y, "b", role="backward")
        elif line.startswith("read "):
            n = line[-1]
            reads[n] = w.sum(made[n], "a", sync=n)
            w.op(aten.neg.default, reads[n], role="backward")
        elif line == "own":
            w.op(aten.neg.default, x)
        else:
            made[line] = w.gradient(w.op(aten.t.default, x, shape=(4, rows)), x, line)
    for n in sums:
        if n not in reads:
            w.op(aten.neg.default, w.sum(made[n], "a", sync=n), role="optimizer")
    return replace(w.program(), rank=rank)


def test_bytes_are_those_of_the_rank_that_has_most() -> None:
    def part(rank: int, rows: int) -> Program:
        w = Written(AXES, torch.float32)
        x, y = w.given("x", rows, 1, kind="batch"), w.given("y", 1, 4, kind="batch")
        w.sum(w.gradient(x, y, "p", w.spec((3, 4), b=Shard(0), a=Partial())), "a", sync="p")
        return replace(w.program(), rank=rank)

    assert [r.nbytes for r in Gradients(part(2, 1)).reductions] == [16]
    for given in ((part(0, 2), part(2, 1)), (part(2, 1), part(0, 2))):
        assert [r.nbytes for r in ordered(*given).sums()] == [32]


def starts_of(*programs: Program, overlap: bool = True) -> list[list[tuple[str, int, str]]]:
    """On each rank, of each start the parameter, the meetings ahead of it, and behind which node it is."""
    made = []
    for i, program in enumerate(programs):
        order = ordered(program, *programs[:i], *programs[i + 1 :])
        starts = order.starts([FusedBucket((r,)) for r in order.sums()], overlap)
        nodes = order.gradients.order
        made.append([(s.bucket.members[0].name, s.slot, nodes[s.place].name) for s in starts])
    return made


def test_ranks_start_in_one_order_whatever_their_local_ops() -> None:
    one, other = rank_with("p", "own", "q"), rank_with("q", "own", "p", rank=1, rows=1)
    assert starts_of(one) == [[("p", 0, "mm"), ("q", 0, "mm_1")]]
    assert starts_of(other) == [[("q", 0, "mm"), ("p", 0, "mm_1")]]
    assert starts_of(one, other) == [
        [("p", 0, "mm"), ("q", 0, "mm_1")],
        [("p", 0, "mm_1"), ("q", 0, "mm_1")],
    ]
    # Most of the ranks of three have q first, but on one it is last.
    assert [[n for n, *_ in s] for s in starts_of(other, one, replace(other, rank=2))] == [["p", "q"]] * 3


def test_what_starts_between_two_meetings_on_one_rank_does_on_all() -> None:
    early, late = rank_with("p", "meet", "q", "meet"), rank_with("own", "meet", "p", "q", "meet", rank=1)
    assert starts_of(early)[0] == [("p", 0, "mm"), ("q", 1, "mm_1")]
    assert starts_of(early, late) == [
        [("p", 1, "all_reduce"), ("q", 1, "mm_1")],
        [("p", 1, "mm"), ("q", 1, "mm_1")],
    ]


def test_a_sum_that_some_rank_needs_early_starts_ahead_of_others_on_all() -> None:
    # On the second rank q is complete, summed and read before p is there.
    one, other = rank_with("p", "q", "read q"), rank_with("q", "read q", "own", "p", rank=1)
    assert starts_of(one) == [[("p", 0, "mm"), ("q", 0, "mm_1")]]
    assert starts_of(one, other) == [
        [("q", 0, "mm_1"), ("p", 0, "mm_1")],
        [("q", 0, "mm"), ("p", 0, "mm_1")],
    ]


def test_buckets_whose_sums_ranks_need_at_other_places_come_apart() -> None:
    one, other = rank_with("p", "q", "read p", "read q"), rank_with("p", "read p", "q", "read q", rank=1)
    order = ordered(one, other)
    p, q = order.sums()
    fits = order.fitting()
    assert [fits(r) for r in (p, q)] == [True, False]
    assert [fits(r) for fits in (ordered(one).fitting(),) for r in (p, q)] == [True, True]
    starts = order.starts([FusedBucket((p, q))], True)
    assert [[r.name for r in s.bucket.members] for s in starts] == [["p"], ["q"]]


def test_ranks_that_sum_different_gradients_are_named() -> None:
    with pytest.raises(DesyncError, match=r"different steps: rank 0: the gradient of q is .*; rank 1: nothing more"):
        ordered(rank_with("p", "q"), rank_with("p", rank=1, sums="p"))
    with pytest.raises(DesyncError, match="rank 0: all_reduce over b; rank 1: nothing more"):
        ordered(rank_with("p", "q", "meet"), rank_with("p", "q", rank=1))


def test_without_overlap_sums_start_where_they_were_recorded() -> None:
    one, other = rank_with("p", "own", "q", "meet"), rank_with("q", "own", "p", "own", "meet", rank=1)
    for made in starts_of(one, other, overlap=False):
        assert made == [("p", 1, "all_reduce_1"), ("q", 1, "all_reduce_2")]


# -- what a node is --------------------------------------------------------------------------------------


def test_what_is_a_sum_of_a_gradient() -> None:
    w, _, x = a_step("p")
    g = w.gradient(x, x, "p")
    found = {
        w.sum(g, "a"): True, w.sum(w.op(aten.mul.Tensor, g, 0.5), "a", "avg"): True, w.sum(g, "a", "max"): False,
        w.sum(x, "a"): False, w.sum(x, "a", sync="p"): True, w.sum(w.op(aten.mul.Tensor, g, g), "a"): False,
        g: False, w.scatter(g, "a", [2, 2]): True, w.scatter(x, "a", [2, 2]): False,
        w.op(aten.neg.default, g): False,
    }  # fmt: skip
    below = w.scatter(x, "a", [2, 2])
    w.op(aten.mul.Tensor, below, 0.5, grad_of=(("p", w.spec((4, 4))),))
    assert is_reduction(below), "what it gives is a gradient, but for a factor"
    squared = w.scatter(x, "a", [2, 2])
    w.op(aten.mul.Tensor, squared, squared, grad_of=(("p", w.spec((4, 4))),))
    assert not is_reduction(squared)
    for node, want in found.items():
        assert is_reduction(node) == want, node


def test_whose_gradient_it_is() -> None:
    w, _, x = a_step("p")
    g = w.gradient(x, x, "p")
    half = w.op(aten.mul.Tensor, g, 0.5)
    s = w.sum(half, "a", sync="q")
    assert [n.name for n in chain_up(half)] == ["mul", "mm"]
    assert parameter_of(s) == ("p",)
    assert parameter_of(w.sum(x, "a", sync="q")) == ("q",)
    lost = w.sum(x, "a")
    assert parameter_of(lost) == ()
    w.op(aten.mul.Tensor, lost, 0.5, grad_of=(("r", w.spec((4, 4))), ("s", w.spec((4, 4)))))
    assert (parameter_of(lost), grad_below(lost)) == (("r",), "r")
    assert grad_below(g) == "p"
    assert grad_below(x) == "", "several read it"
    both = w.op(
        aten.mul.Tensor, w.op(aten.t.default, g), 2.0, grad_of=(("both", w.spec((4, 4))), ("p", w.spec((4, 4))))
    )
    assert parameter_of(w.sum(both, "b")) == ("both", "p")
    assert [n.name for n in chain_up(both)] == [both.name]
    assert [n.name for n in chain_up(both, autograd=True)] == [both.name, "t", "mm"]


def test_units() -> None:
    w = Written(AXES)
    p, q, r = (w.given(n, 2, 4) for n in "pqr")
    for node, unit in ((p, "u"), (q, "v"), (w.op(aten.neg.default, r), "w")):
        w.op(aten.mul.Tensor, node, 2.0, role="forward", unit=unit, gather="yes")
    w.op(aten.mul.Tensor, r, 2.0, role="forward")
    x = w.given("x", 4, 4, kind="batch")
    one, two = w.gradient(x, x, "p"), w.gradient(x, x, "r")
    w.update((p, w.scatter(one, "a", [2, 2])), (r, w.scatter(two, "a", [2, 2])))
    program = w.program()
    assert units_of(program) == {"p": "u", "q": "v"}


def test_the_unit_of_a_sum_is_that_of_what_it_becomes() -> None:
    w = Written(AXES)
    p, x = w.given("p", 2, 4), w.given("x", 4, 4, kind="batch")
    w.op(aten.mul.Tensor, p, 2.0, role="forward", unit="u")
    s = w.scatter(w.op(aten.mm.default, x, x), "a", [2, 2])
    w.update((p, w.op(aten.mul.Tensor, s, 0.5, grad_of=(("p", w.spec((4, 4))),))))
    (r,) = Gradients(w.program()).reductions
    assert (r.unit, r.name, r.kind.name, r.nbytes, r.group[-1]) == ("u", "p", "reduce_scatter", 128, "u")


def test_views_and_who_touches_memory() -> None:
    w, (p,), x = a_step("p")
    g = w.gradient(x, x, "p")
    view = w.op(aten.t.default, g)
    write = w.op(aten.mul_.Tensor, g, 2.0)
    s = w.sum(g, "a")
    w.update((p, s))
    found = Gradients(w.program())
    assert [is_view(n) for n in (p, g, view, write, s)] == [False, False, True, False, False]
    at = found.place
    assert found.alone_after(g, at[write], s)
    assert found.alone_after(g, at[s], s)
    assert not found.alone_after(g, at[view], s)
    assert found.alone_after(view, at[view], write) is False
    assert isinstance(found.program, Program)
