"""What data-parallel-optimization makes of programs that are written by hand, line by line, and what it says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx as fx

from meshwright.collective import OPERATORS, WAIT_OP
from meshwright.errors import PassError
from meshwright.passes import DataParallelOptimization
from meshwright.passes.splitting import split_updates
from meshwright.program.ir.nodes import checked_value, info_of
from meshwright.program.ir.program import Program
from tests.support.graphs import Shard, Written, lines

aten = torch.ops.aten
AXES = {"a": 2, "b": 3}
MESH = "a=2,b=3@cpu"


def three(turned: str = "q", reader: str = "", write: str = "") -> Program:
    """Three gradients of 4 x 4, each the product of a batch with itself: 128 bytes."""
    w = Written(AXES)
    ps = [w.given(n, 4, 4) for n in "pqr"]
    x, sums = w.given("x", 4, 4, kind="batch"), list[fx.Node]()
    made = {}
    for n in "pqr":
        g = made[n] = w.gradient(x, x, n)
        sums.append(w.op(aten.t.default, g) if n == turned else g)
    sums = [w.sum(g, "a", sync=n, cause=w.cause("a")) for g, n in zip(sums, "pqr", strict=True)]
    if reader:
        w.op(aten.abs.default, made[reader], role="forward")
    if write:
        w.op(aten.mul_.Tensor, made[write], 2.0)
    w.update(*zip(ps, sums, strict=True))
    return w.program()


def of(program: Program, **options: Any) -> tuple[Program, Any]:
    made, record = DataParallelOptimization(**options).apply(program)
    made.graph.lint()
    return made, record


def short(program: Program) -> list[str]:
    """The lines, with the names of nodes by their operator and number, and buffers without their mesh."""
    text = "\n".join(lines(program)).replace(f", {MESH}", "")
    for long, name in (
        ("empty_memory_format", "buffer"), ("as_strided_default", "part"), ("copy__default", "copy"),
        ("all_reduce_start_default", "sent"), ("reduce_scatter_start_default", "sent"), ("wait_default", "sum"),
    ):  # fmt: skip
        text = text.replace(long, name)
    return text.splitlines()


def test_all_in_one() -> None:
    """Two gradients are written where they are sent from; the third, which lies otherwise, is copied there."""
    made, record = of(three(), bucket_bytes=1000)
    assert short(made) == [
        "buffer = empty([80])",  # each begins at a multiple of 256 bytes
        "part = as_strided(buffer, [4, 4], [4, 1], 0)",
        "mm = mm(x, x)",
        "mm_1 = mm(x, x)",
        "t = t(mm_1)",
        "part_1 = as_strided(buffer, [4, 4], [4, 1], 32)",
        "copy = copy_(part_1, t)",
        "part_2 = as_strided(buffer, [4, 4], [4, 1], 64)",
        "mm_2 = mm(x, x)",
        "sent = all_reduce_start(buffer, sum, a)",
        "sum = wait(sent)",
        "part_3 = as_strided(sum, [4, 4], [4, 1], 0)",
        "part_4 = as_strided(sum, [4, 4], [4, 1], 32)",
        "part_5 = as_strided(sum, [4, 4], [4, 1], 64)",
        "add_ = add_(p, part_3)",
        "add__1 = add_(q, part_4)",
        "add__2 = add_(r, part_5)",
    ]
    nodes = {n.name: n for n in made.graph.nodes}
    assert nodes["mm"].kwargs == {"out": nodes["as_strided_default"]}
    assert nodes["mm_2"].kwargs == {"out": nodes["as_strided_default_2"]}
    assert not nodes["mm_1"].kwargs
    assert nodes["empty_memory_format"].kwargs == {"dtype": torch.float64, "device": torch.device("cpu")}
    inside = {
        n for n, node in nodes.items() if n.startswith(("as_", "wait", "all_", "copy", "empty", "mm")) and node.meta
    }
    at = {checked_value(nodes[n]).storage for n in inside - {"mm_1"}}
    assert len(at) == 1, "one memory"
    assert {checked_value(nodes[n]).nbytes for n in inside - {"mm_1"}} == {640}
    assert checked_value(nodes["t"]).storage not in at
    sent = nodes["all_reduce_start_default"]
    assert info_of(sent).sync == "p, q, r"
    cause = made.cause(sent)
    assert cause is not None
    assert (cause.op, cause.bytes, cause.src, cause.dst) == ("gradients of p ... r", 640, "Partial", "summed")
    assert cause.reason == "3 gradients are summed over a together; of the first: why"
    assert record.summary == (
        "3 reductions of gradients became 1: 1 fused, 0 alone; 2 gradients are written where they are sent from"
    )
    assert record.lines == ("3 gradients over a, 384 bytes: p ... r",)
    assert record.details == {
        "before": 3, "after": 1, "alone": {}, "pruned": 0, "folded": 1.0, "rescaled": {}, "written_in_place": 2,
        "joined": 0, "gathers": (0, 0), "buckets": [{"gradients": ["p", "q", "r"], "bytes": 384}],
    }  # fmt: skip


TWO = [
    "buffer = empty([48])",
    "part = as_strided(buffer, [4, 4], [4, 1], 0)",
    "mm = mm(x, x)",
    "mm_1 = mm(x, x)",
    "t = t(mm_1)",
    "part_1 = as_strided(buffer, [4, 4], [4, 1], 32)",
    "copy = copy_(part_1, t)",
    "sent = all_reduce_start(buffer, sum, a)",
    "buffer_1 = empty([16])",
    "part_4 = as_strided(buffer_1, [4, 4], [4, 1], 0)",
    "mm_2 = mm(x, x)",
    "sent_1 = all_reduce_start(buffer_1, sum, a)",
    "sum = wait(sent)",
    "part_2 = as_strided(sum, [4, 4], [4, 1], 0)",
    "part_3 = as_strided(sum, [4, 4], [4, 1], 32)",
    "add_ = add_(p, part_2)",
    "add__1 = add_(q, part_3)",
    "sum_1 = wait(sent_1)",
    "part_5 = as_strided(sum_1, [4, 4], [4, 1], 0)",
    "add__2 = add_(r, part_5)",
]


def test_what_travels_otherwise() -> None:
    """Gradients whose elements are encoded by eights, and the zeros between them with them."""

    def made_of(*sizes: int, block: int = 8) -> list[str]:
        w = Written(AXES, torch.float32)
        x = w.given("x", 1, 4, kind="batch")
        ps = [w.given(f"p{i}", 1, n) for i, n in enumerate(sizes)]
        ys = [w.given(f"y{i}", 4, n, kind="batch") for i, n in enumerate(sizes)]
        gs = [w.gradient(x, y, f"p{i}") for i, y in enumerate(ys)]
        wired, wire = OPERATORS["wire_all_reduce"].default, f"float8/{block}"
        w.update(*((p, w.op(wired, g, "sum", wire, "b", w.text, sync=p.name)) for p, g in zip(ps, gs, strict=True)))
        made, record = of(w.program(), bucket_bytes=10000)
        assert record.lines[0] == f"{len(sizes)} gradients over b, {4 * sum(sizes)} bytes: p0 ... p{len(sizes) - 1}"
        return [line for line in short(made) if line.startswith(("empty", "buffer", "zeros"))]

    assert made_of(64, 64) == ["buffer = empty([128])"]
    assert made_of(64, 60) == ["buffer = empty([124])"]
    assert made_of(60, 64) == ["zeros_default = zeros([128])"]
    assert made_of(60, 64, block=2) == ["zeros_default = zeros([128])"]


def test_two_are_started_as_soon_as_they_can_be() -> None:
    made, record = of(three(), bucket_bytes=256)
    assert short(made) == TWO
    assert record.lines == (
        "2 gradients over a, 256 bytes: p ... q", "alone: r (no other gradient of its group and dtype is left)",
    )  # fmt: skip
    nodes = {n.name: n for n in made.graph.nodes}
    alone = nodes["all_reduce_start_default_1"]
    assert info_of(alone).sync == "r"
    assert made.cause(alone) == three().causes[2]
    assert record.details["buckets"] == [{"gradients": ["p", "q"], "bytes": 256}, {"gradients": ["r"], "bytes": 128}]


def test_without_overlap_sums_start_behind_the_backward_and_are_waited_for_at_once() -> None:
    made, _ = of(three(), bucket_bytes=256, overlap=False)
    found = short(made)
    at = [i for i, line in enumerate(found) if "all_reduce_start" in line]
    assert [found[i + 1] for i in at] == ["sum = wait(sent)", "sum_1 = wait(sent_1)"]
    assert at[0] > found.index("mm_2 = mm(x, x)")
    assert sorted(found) == sorted(TWO)


def test_each_alone() -> None:
    made, record = of(three(""), fuse=False)
    found = short(made)
    assert (
        found[:9]
        == [
            line
            for i, (n, k) in enumerate((("", 0), ("_1", 2), ("_2", 4)))
            for line in (
                f"buffer{n} = empty([16])",
                f"part{f'_{k}' if k else ''} = as_strided(buffer{n}, [4, 4], [4, 1], 0)",
                f"mm{n} = mm(x, x)",
                f"sent{n} = all_reduce_start(buffer{n}, sum, a)",
            )
            if i < 3
        ][:9]
    )
    assert [line for line in found if "wait" in line] == [f"sum{n} = wait(sent{n})" for n in ("", "_1", "_2")]
    assert record.details["alone"] == dict.fromkeys("pqr", "fuse=False")
    assert record.lines == tuple(f"alone: {n} (fuse=False)" for n in "pqr")
    assert record.details["written_in_place"] == 3


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (three("", reader="p"), 2),  # who reads a gradient behind its sum would read the sum
        (three("", reader="r"), 2),
        (three("p"), 2),
        (three(""), 3),
    ],
)
def test_which_gradients_are_written_where_they_are_sent_from(given: Program, count: int) -> None:
    for options in ({"bucket_bytes": 1000}, {"bucket_bytes": 128}):
        made, record = of(given, **options)
        assert record.details["written_in_place"] == count
        assert sum("copy_" in line for line in short(made)) == 3 - count


def test_what_cannot_be_written_where_it_is_sent_from() -> None:
    def made_by(gradient: Any, spec_of: tuple[int, ...] = (4, 4)) -> int:
        w = Written(AXES)
        p, x = w.given("p", *spec_of), w.given("x", 4, 4, kind="batch")
        g = gradient(w, x)
        w.update((p, w.sum(g, "a", sync="p")))
        made: int = of(w.program(), bucket_bytes=1000)[1].details["written_in_place"]
        return made

    assert made_by(lambda w, x: w.gradient(x, x, "p")) == 1
    assert made_by(lambda w, x: w.op(aten.view.default, w.gradient(x, x, "p"), [16], shape=(16,)), (16,)) == 1
    assert made_by(lambda w, x: w.op(aten.slice.Tensor, w.gradient(x, x, "p"), 0, 0, 2, shape=(2, 4)), (2, 4)) == 0
    assert made_by(lambda w, x: x) == 0
    assert made_by(lambda w, x: w.op(aten.t.default, x)) == 0
    assert made_by(lambda w, x: w.op(aten.add.Tensor, x, x)) == 1
    assert made_by(lambda w, x: w.op(aten.sin.default, x)) == 1
    assert made_by(lambda w, x: w.op(aten.dropout.default, x, 0.0, False)) == 0, "has no such overload"


def test_what_is_scattered_alone_and_together() -> None:
    def scattered(*units: str) -> Program:
        w = Written(AXES)
        ps = [w.given(f"p{i}", 2, 4) for i, _ in enumerate(units)]
        x = w.given("x", 4, 4, kind="batch")
        for p, unit in zip(ps, units, strict=True):
            w.op(aten.mul.Tensor, p, 2.0, role="forward", unit=unit)
        gs = [w.op(aten.mm.default, x, x, transposed=True) for _ in ps]
        cut = [
            w.scatter(g, "a", [2, 2], cause=w.cause("a"), grad_of=((p.name, w.spec((4, 4), a=Shard(0))),))
            for g, p in zip(gs, ps, strict=True)
        ]
        w.update(*zip(ps, cut, strict=True))
        return w.program()

    made, record = of(scattered("u"), bucket_bytes=8)
    assert short(made)[2:] == [
        "sent = reduce_scatter_start(mm, sum, 0, [2, 2], 0, a)", "sum = wait(sent)", "add_ = add_(p0, sum)",
    ]  # fmt: skip
    nodes = {n.name: n for n in made.graph.nodes}
    assert made.cause(nodes["reduce_scatter_start_default"]) == made.causes[0]
    assert made.cause(nodes["wait_default"]) is None
    assert record.lines == ("alone: p0 (the only one of its unit and dtype)",)
    made, record = of(scattered("u", "u"))
    assert short(made)[2:] == [
        "buffer = empty([32])",
        "mm = mm(x, x)",
        "pack__default = pack_(buffer, mm, 0, 2, 0)",
        "mm_1 = mm(x, x)",
        "pack__default_1 = pack_(buffer, mm_1, 0, 2, 8)",
        "sent = reduce_scatter_start(buffer, sum, 0, [16, 16], 0, a)",
        "sum = wait(sent)",
        "part = as_strided(sum, [2, 4], [4, 1], 0)",
        "part_1 = as_strided(sum, [2, 4], [4, 1], 8)",
        "add_ = add_(p0, part)",
        "add__1 = add_(p1, part_1)",
    ]
    sent = {n.name: n for n in made.graph.nodes}["reduce_scatter_start_default"]
    cause = made.cause(sent)
    assert cause is not None
    assert (cause.op, info_of(sent).sync, checked_value(sent).shape) == ("gradients of p0 ... p1", "p0, p1", (16,))
    assert record.details["after"] == 1


def test_records_of_what_is_fused_keep_what_travels_by_itself() -> None:
    program = three()
    both = ("all_reduce", "all_to_all")
    program = replace(program, causes=tuple(replace(c, kinds=both) for c in program.causes))
    made, _ = of(program, bucket_bytes=1000)
    assert [c.kinds for c in made.causes] == [("all_to_all",)] * 3 + [("all_reduce",)]


def test_sums_over_several_axes_are_said_to_be_joined() -> None:
    w = Written(AXES)
    p, x = w.given("p", 4, 4), w.given("x", 4, 4, kind="batch")
    w.update((p, w.sum(w.sum(w.gradient(x, x, "p"), "b", sync="p"), "a", sync="p")))
    made, record = of(w.program(), bucket_bytes=1000)
    assert record.details["joined"] == 1
    assert record.lines[0] == "1 sums over one axis after another became one over all"
    assert "sent = all_reduce_start(buffer, sum, a,b)" in short(made)


def test_nothing_is_summed() -> None:
    w = Written(AXES)
    p, x = w.given("p", 4, 4), w.given("x", 4, 4, kind="batch")
    w.update((p, w.gradient(x, x, "p")))
    made, record = of(w.program())
    assert short(made) == ["mm = mm(x, x)", "add_ = add_(p, mm)"]
    assert record.summary == "no gradient is summed over ranks: nothing to do"
    assert record.details == {"before": 0, "after": 0}


def test_the_model_of_time() -> None:
    """A gradient takes 1.28 s on the wire and, at 1.28 operations per second, 100 s to compute."""

    def buckets(**options: float) -> int:
        count: int = of(three(), gb_per_s=1e-7, **options)[1].details["after"]
        return count

    assert buckets(alpha_us=1.0) == 3, "together they would take more than a twelfth of all"
    assert buckets(alpha_us=1e6, gflops=1.28e-9) == 2, "the last one does not wait"
    assert buckets(alpha_us=1e6, gflops=1.0) == 1, "all are there at once"
    assert buckets(alpha_us=0.5e6, gflops=1.0) == 3
    assert of(three(), alpha_us=1e6, gflops=1.28e-9, gb_per_s=1.0)[1].details["after"] == 1, "the wire is fast"


def test_the_least_bucket_is_an_element() -> None:
    assert of(three(), bucket_bytes=8)[1].details["after"] == 3
    with pytest.raises(PassError, match=r"bucket_bytes=7 is smaller than one element of the gradient of p"):
        of(three(), bucket_bytes=7)
    assert DataParallelOptimization(bucket_bytes=1).bucket_bytes == 1
    for wrong in (0, -1, True, 1.5, "many"):
        with pytest.raises(PassError, match="a number of bytes or 'auto' was expected"):
            DataParallelOptimization(bucket_bytes=wrong)  # type: ignore[arg-type]


# -- updates in parts ------------------------------------------------------------------------------------


def updated(count: int, constant: int = -1, between: bool = False, whole: int = -1) -> tuple[Written, Any, Any]:
    """An update of ``count`` parameters, each from a sum of its own."""
    w = Written(AXES)
    ps, gs = [w.given(f"p{i}", 4) for i in range(count)], [w.given(f"g{i}", 4) for i in range(count)]
    waits, sums = list[fx.Node](), dict[fx.Node, fx.Node]()
    given = []
    for i, g in enumerate(gs):
        if i == constant:
            given.append(g)
            continue
        if i == whole:
            sums[g] = waits[-1]
            given.append(g)
            continue
        wait = w.op(WAIT_OP, g)
        part = w.op(aten.as_strided.default, wait, [4], [1], 0)
        waits.append(wait)
        sums[part] = wait
        given.append(part)
        if between and i == count - 1:
            w.op(aten.neg.default, g, role="optimizer")
    w.op(aten._fused_sgd_.default, ps, given, [], role="optimizer")
    w.program()
    return w, waits, sums


def parts(w: Written) -> list[str]:
    return [
        " ".join(p.name for p in n.args[0])  # type: ignore[union-attr]
        for n in w.graph.nodes
        if n.target is aten._fused_sgd_.default
    ]


@pytest.mark.parametrize(
    ("count", "options", "want"),
    [
        (1, {}, ["p0"]),
        (2, {}, ["p0", "p1"]),
        (4, {}, ["p0", "p1", "p2", "p3"]),
        (6, {}, ["p0 p1 p2", "p3", "p4", "p5"]),
        (4, {"constant": 0}, ["p0", "p1", "p2", "p3"]),
        (4, {"constant": 3}, ["p3", "p0", "p1", "p2"]),
        (3, {"between": True}, ["p0 p1 p2"]),
        (3, {"whole": 2}, ["p0", "p1 p2"]),
    ],
)
def test_an_update_in_parts(count: int, options: Any, want: list[str]) -> None:
    w, waits, sums = updated(count, **options)
    assert split_updates(w.graph, waits[::-1], sums) == len(want) - 1
    assert parts(w) == want
    w.graph.lint()
    for node in w.graph.nodes:
        if node.target is aten._fused_sgd_.default:
            assert len(node.args[1]) == len(node.args[0])
            assert [g.name for g in node.args[1]] and node.args[2] == []  # noqa: PT018
            assert info_of(node).role == "optimizer"
    ahead = {n: i for i, n in enumerate(w.graph.nodes)}
    for wait in waits:
        assert ahead[wait] < max(i for n, i in ahead.items() if n.target is aten._fused_sgd_.default)
