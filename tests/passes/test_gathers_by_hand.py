"""Gathers of parameters in programs that are written by hand: which run as one, and where they start."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.fx as fx

from meshwright.collective import OPERATORS
from meshwright.program.ir.nodes import info_of, value_of
from meshwright.program.ir.program import Program
from meshwright.resharding.copies import TO_DEVICE
from tests.support.alone import gathered
from tests.support.graphs import Written, lines

aten = torch.ops.aten
CAST = aten._to_copy.default


def gather(
    w: Written, p: fx.Node, name: str, dim: int = 0, sizes: tuple[int, ...] = (2, 2), axis: str = "a",
    cause: bool = True, role: str = "forward", by: Any = None, **info: Any,
) -> fx.Node:  # fmt: skip
    """A parameter, whole; cast before ``by`` an op."""
    value = value_of(p)
    assert value is not None
    shape = [*value.shape[:dim], sum(sizes), *value.shape[dim + 1 :]]
    args = (w.op(by, p, role=role) if by else p, dim, list(sizes), axis, w.text)
    number = w.cause(axis) if cause else None
    if number is not None:
        w.causes[number] = replace(w.causes[number], kinds=("all_gather",))
    return w.op(OPERATORS["all_gather"].default, *args, shape=shape, role=role, gather=name, cause=number, **info)


def short(program: Program) -> list[str]:
    """Its lines, with names of a word."""
    long = {"_default": "", ", a=2@cpu": "", "all_gather_start": "start", "_to_copy": "cast", "unpack": "cut"}
    made = lines(program)
    for was, now in long.items():
        made = [line.replace(was, now) for line in made]
    return made


def of(w: Written, *results: fx.Node, buckets: Any = (), fuse: bool = True, overlap: bool = True) -> Any:
    program, counts = gathered(w.program(*results), buckets, fuse, overlap)
    program.graph.lint()
    return program, counts


def units(w: Written) -> fx.Node:
    """Four matrices, of which each other one is cast: two units of two."""
    y = w.given("x", 4, 4, kind="batch")
    stored = [w.given(f"p{i}", 2, 4) for i in range(4)]
    for i, p in enumerate(stored):
        whole = gather(w, p, f"p{i}", by=CAST if i % 2 else None, unit=f"u{i // 2}")
        y = w.op(aten.mm.default, y, whole, role="forward")
    return y


def test_a_unit_at_once_while_the_one_before_computes() -> None:
    w = Written({"a": 2})
    made, counts = of(w, units(w))
    assert counts == (4, 2)
    assert short(made) == [
        "cast = cast(p1)", "row = row([p0, cast], [0, 8], 16)", "start = start(row, 0, [16, 16], a)",
        "cast_1 = cast(p3)", "row_1 = row([p2, cast_1], [0, 8], 16)", "start_1 = start(row_1, 0, [16, 16], a)",
        "wait = wait(start)", "cut = cut(wait, [4, 4], 0, 2, 0)", "mm = mm(x, cut)",
        "cut_1 = cut(wait, [4, 4], 0, 2, 8)", "mm_1 = mm(mm, cut_1)",
        "wait_1 = wait(start_1)", "cut_2 = cut(wait_1, [4, 4], 0, 2, 0)", "mm_2 = mm(mm_1, cut_2)",
        "cut_3 = cut(wait_1, [4, 4], 0, 2, 8)", "mm_3 = mm(mm_2, cut_3)",
    ]  # fmt: skip
    nodes = {n.name: n for n in made.graph.nodes}
    assert {info_of(n).role for n in nodes.values() if n.op == "call_function"} == {"forward"}
    rows = [value_of(nodes[n]) for n in ("row_default", "all_gather_start_default", "unpack_default_1")]
    assert [r.shape for r in rows if r is not None] == [(16,), (32,), (4, 4)]
    assert len({r.storage for r in rows if r is not None}) == 3
    cause = made.cause(nodes["all_gather_start_default_1"])
    assert cause is not None
    assert (cause.op, cause.shape, cause.src, cause.dst) == ("p2 ... p3", (16,), "split", "whole")
    assert cause.reason == "2 parameters are gathered together; of the first: why"
    assert [c.bytes for c in made.causes[4:]] == [128.0] * 2, "of a rank: the row of the other one"


def test_parameters_that_are_cut_along_columns() -> None:
    w = Written({"a": 2})
    stored = [w.given(f"p{i}", 3, 2) for i in range(2)]
    made, counts = of(w, *(gather(w, p, p.name, dim=1, unit="u") for p in stored))
    assert counts == (2, 1)
    assert short(made) == [
        "row = row([p0, p1], [0, 6], 12)", "start = start(row, 0, [12, 12], a)", "wait = wait(start)",
        "cut = cut(wait, [3, 4], 1, 2, 0)", "cut_1 = cut(wait, [3, 4], 1, 2, 6)",
    ]  # fmt: skip


def test_a_unit_at_once_where_it_is_used() -> None:
    w = Written({"a": 2})
    made, counts = of(w, units(w), overlap=False)
    assert counts == (4, 2)
    assert short(made)[:5] == [
        "cast = cast(p1)", "row = row([p0, cast], [0, 8], 16)", "start = start(row, 0, [16, 16], a)",
        "wait = wait(start)", "cut = cut(wait, [4, 4], 0, 2, 0)",
    ]  # fmt: skip
    assert short(made)[8:12] == [
        "cast_1 = cast(p3)", "row_1 = row([p2, cast_1], [0, 8], 16)", "start_1 = start(row_1, 0, [16, 16], a)",
        "wait_1 = wait(start_1)",
    ]  # fmt: skip


def test_each_by_itself() -> None:
    """One starts where the one before would have: its cast comes with it."""
    w = Written({"a": 2})
    made, counts = of(w, units(w), fuse=False)
    assert counts == (4, 4)
    assert short(made)[:8] == [
        "start = start(p0, 0, [2, 2], a)", "cast = cast(p1)", "start_1 = start(cast, 0, [2, 2], a)",
        "wait = wait(start)", "mm = mm(x, wait)", "start_2 = start(p2, 0, [2, 2], a)",
        "wait_1 = wait(start_1)", "mm_1 = mm(mm, wait_1)",
    ]  # fmt: skip
    said = [made.cause(n) for n in made.graph.nodes if "start" in n.name]
    assert said == list(made.causes), "each has the record that it had"
    w = Written({"a": 2})
    made, counts = of(w, units(w), fuse=False, overlap=False)
    assert counts == (4, 4)
    assert short(made)[3:6] == ["cast = cast(p1)", "start_1 = start(cast, 0, [2, 2], a)", "wait_1 = wait(start_1)"]


def test_what_an_update_leaves_starts_behind_it() -> None:
    """Together where the gradients were reduced together."""
    buckets = [SimpleNamespace(members=[SimpleNamespace(name=n) for n in names]) for names in (("p0", "p1"), ("q",))]

    def written() -> tuple[Written, list[fx.Node]]:
        w = Written({"a": 2})
        ps = [w.given(f"p{i}", 2, 4) for i in range(4)]
        gs = [w.given(f"g{i}", 2, 4, kind="batch") for i in range(4)]
        w.update(*zip(ps, gs, strict=True))
        wholes = [gather(w, p, f"p{i}", role="optimizer", unit="all") for i, p in enumerate(ps)]
        w.op(aten.zero_.default, ps[0], role="optimizer")
        return w, wholes

    w, wholes = written()
    made, counts = of(w, *wholes, buckets=buckets)
    assert counts == (4, 3)
    assert short(made) == [
        "add_ = add_(p0, g0)", "add__1 = add_(p1, g1)", "row = row([p0, p1], [0, 8], 16)",
        "start = start(row, 0, [16, 16], a)", "add__2 = add_(p2, g2)", "start_1 = start(p2, 0, [2, 2], a)",
        "add__3 = add_(p3, g3)", "start_2 = start(p3, 0, [2, 2], a)",
        "wait = wait(start)", "cut = cut(wait, [4, 4], 0, 2, 0)", "cut_1 = cut(wait, [4, 4], 0, 2, 8)",
        "wait_1 = wait(start_1)", "wait_2 = wait(start_2)", "zero_ = zero_(p0)",
    ]  # fmt: skip
    w, wholes = written()
    made, counts = of(w, *wholes, buckets=buckets, overlap=False)
    assert counts == (4, 3)
    assert short(made)[4:8] == [
        "row = row([p0, p1], [0, 8], 16)", "start = start(row, 0, [16, 16], a)", "wait = wait(start)",
        "cut = cut(wait, [4, 4], 0, 2, 0)",
    ]  # fmt: skip
    w, wholes = written()
    assert of(w, *wholes, buckets=buckets, fuse=False)[1] == (4, 4)


@pytest.mark.parametrize(
    ("other", "together"),
    [
        ({}, True),
        ({"unit": "v"}, False),
        ({"sizes": (3, 1)}, False),
        ({"axis": "b"}, False),
        ({"dim": 1, "sizes": (4, 4)}, True),
        ({"by": CAST}, True),
        ({"by": TO_DEVICE}, True),
        ({"by": aten.neg.default}, None),
        ({"role": "backward"}, False),
        ({"name": ""}, None),
        ({"cause": False}, True),
    ],
    ids=str,
)
def test_what_runs_as_one(other: dict[str, Any], together: bool | None) -> None:
    """Of a unit, in even parts, over the same ranks; what passes another op before, or is no parameter, stays."""
    w = Written({"a": 2, "b": 2})
    one, two = w.given("p", 2, 4), w.given("q", 2, 4)
    first = gather(w, one, "p", unit="u")
    second = gather(w, two, **{"name": "q", "unit": "u", **other})
    made, counts = of(w, first, second)
    assert counts == ((1, 1) if together is None else (2, 1 if together else 2))
    assert sum("all_gather(" in line for line in lines(made)) == (together is None)
    if other == {"dim": 1, "sizes": (4, 4)}:
        assert any(line.endswith("([p, q], [0, 8], 16)") for line in lines(made))
        assert [line.partition("wait_default, ")[2] for line in lines(made)[-2:]] == [
            "[4, 4], 0, 2, 0)",
            "[2, 8], 1, 2, 8)",
        ]


def test_without_units() -> None:
    """Parameters by themselves, and what they had been annotated with."""
    w = Written({"a": 2})
    spec = w.spec((4, 4))
    stored = [w.given(n, 2, 4) for n in "pq"]
    wholes = [gather(w, p, p.name, spec=spec) for p in stored]
    made, counts = of(w, *wholes)
    assert counts == (2, 2)
    assert [info_of(n).spec for n in made.results] == [spec, spec]
    w = Written({"a": 2})
    assert of(w, w.given("x", 4, 4))[1] == (0, 0)
