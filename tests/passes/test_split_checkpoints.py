"""What checkpointed calls read, kept in parts: programs that are written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx as fx

import meshwright as mw
from meshwright.passes.split_checkpoints import SplitCheckpoints
from meshwright.program.ir.nodes import annotate, checked_value, info_of
from meshwright.program.ir.program import Program
from meshwright.program.ir.regions import Region
from tests.support.graphs import Written, lines

aten = torch.ops.aten
FIRST, AXES = Region(1, split={"a": mw.Shard(0)}), {"a": 2}
KEPT = ["slice_tensor = slice(sin, 0, 0, 2)", "clone_default = clone(slice_tensor)"]


def of(w: Written, *results: fx.Node) -> tuple[Program, Any]:
    program = w.program(*results)
    assert SplitCheckpoints().applies(program)
    made, record = SplitCheckpoints().apply(program)
    made.graph.lint()
    assert not SplitCheckpoints().applies(made)
    assert all(not info_of(n).regions for n in made.graph.nodes)
    return made, record


def step(
    w: Written, shape: tuple[int, ...] = (4, 4), region: Region = FIRST, spec: Any = None, **info: Any
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """A value, what a region makes of it, and the gradient, which reads both."""
    x = w.given("x", *shape, kind="batch")
    y = w.op(aten.sin.default, x, role="forward", spec=w.spec(shape) if spec is None else spec, **info)
    z = w.op(aten.exp.default, y, role="forward", regions=(region,), spec=w.spec(shape))
    e = w.op(aten.cos.default, z, role="forward")
    h = w.op(aten.mul.Tensor, e, y)
    return y, z, w.op(aten.mul.Tensor, h, z)


@pytest.mark.parametrize(
    ("rows", "axes", "mine", "sizes"), [(4, 2, 2, [2, 2]), (5, 2, 3, [3, 2]), (5, 4, 2, [2, 2, 1, 0])], ids=str
)
def test_a_part_until_the_backward(rows: int, axes: int, mine: int, sizes: list[int]) -> None:
    """What the region itself makes is none of it."""
    w = Written({"a": axes})
    made, record = of(w, step(w, (rows, 4))[2])
    assert lines(made) == [
        "sin = sin(x)", f"slice_tensor = slice(sin, 0, 0, {mine})", "clone_default = clone(slice_tensor)",
        "exp = exp(sin)", "cos = cos(exp)",
        f"all_gather_default = all_gather(clone_default, 0, {sizes}, a, a={axes}@cpu)",
        "mul = mul(cos, all_gather_default)", "mul_1 = mul(mul, exp)",
    ]  # fmt: skip
    nodes = {n.name: n for n in made.graph.nodes}
    assert [info_of(nodes[n]).role for n in ("slice_tensor", "clone_default")] == ["forward"] * 2
    assert info_of(nodes["all_gather_default"]).role == "recomputation"
    assert nodes["clone_default"].kwargs == {"memory_format": torch.contiguous_format}
    view, part, whole = (checked_value(nodes[n]) for n in ("slice_tensor", "clone_default", "all_gather_default"))
    assert [v.shape for v in (view, part, whole)] == [(mine, 4), (mine, 4), (rows, 4)]
    assert view.storage == checked_value(nodes["sin"]).storage
    assert len({v.storage for v in (view, part, whole)}) == 3
    cause = made.cause(nodes["all_gather_default"])
    assert cause is not None
    assert (cause.op, cause.argument, cause.phase, cause.backward_bytes) == (
        "shard_checkpoint_inputs",
        0,
        "recomputation",
        0.0,
    )
    assert (
        cause.reason == "a checkpoint kept its input split (shard_checkpoint_inputs), and runs again for the backward"
    )
    held, full = mine * 32, rows * 32
    assert record.summary == f"1 inputs of checkpointed calls are kept split: {held} bytes for {full}"
    assert record.details == {"inputs": 1, "bytes": held, "whole": full}


def test_lines_and_sources_are_those_of_what_is_kept() -> None:
    w = Written(AXES)
    made, _ = of(w, step(w, line="model.py:3", source="sin_7")[2])
    for name in ("slice_tensor", "clone_default", "all_gather_default"):
        node = next(n for n in made.graph.nodes if n.name == name)
        assert (info_of(node).line, info_of(node).source) == ("model.py:3", "sin_7"), name
    assert made.causes[-1].line == "model.py:3"


def test_over_two_axes() -> None:
    """In parts of parts, gathered from the last axis on; another dim as well."""
    both = Region(1, split={"a": mw.Shard(1), "b": mw.Shard(1)})
    w = Written({"a": 2, "b": 3})
    made, record = of(w, step(w, (2, 7), both)[2])
    said = [line for line in lines(made) if " = slice(" in line or "gather(" in line]
    assert said == [
        "slice_tensor = slice(sin, 1, 0, 4)", "slice_tensor_1 = slice(slice_tensor, 1, 0, 2)",
        "all_gather_default = all_gather(clone_default, 1, [2, 2, 0], b, a=2,b=3@cpu)",
        "all_gather_default_1 = all_gather(all_gather_default, 1, [4, 3], a, a=2,b=3@cpu)",
    ]  # fmt: skip
    assert record.details == {"inputs": 1, "bytes": 2 * 2 * 8, "whole": 2 * 7 * 8}


@pytest.mark.parametrize(
    "why", ["read by none", "split already", "no such dim", "no spec", "asked for nothing", "a gather"]
)
def test_what_is_kept_as_it_is(why: str) -> None:
    w = Written(AXES)
    region = {"no such dim": Region(1, split={"a": mw.Shard(2)}), "asked for nothing": Region(1)}.get(why, FIRST)
    spec = w.spec((8, 4), a=mw.Shard(0)) if why == "split already" else None
    y, z, g = step(w, region=region, spec=spec, gather="p" if why == "a gather" else "")
    if why == "no spec":
        annotate(y, spec=None)
    if why == "read by none":
        g = w.op(aten.mul.Tensor, z, z)
        for name in ("mul_1", "mul"):
            w.graph.erase_node(next(n for n in w.graph.nodes if n.name == name))
    made, record = of(w, g)
    assert not any("slice" in line or "all_gather" in line for line in lines(made))
    assert record.summary == "0 inputs of checkpointed calls are kept split: 0 bytes for 0"
    assert record.details == {"inputs": 0, "bytes": 0, "whole": 0}


@pytest.mark.parametrize("when", ["before", "in the region", "later"])
def test_what_is_written_to_is_kept_as_it_is(when: str) -> None:
    """Not where it was written to before it is read."""
    w = Written(AXES)
    x = w.given("x", 4, 4, kind="batch")
    made_of = w.op(aten.cos.default, x, role="forward")
    y = w.op(aten.sin.default if when != "before" else aten.sin_.default, made_of, role="forward", spec=w.spec((4, 4)))
    z = w.op(aten.exp.default, y, role="forward", regions=(FIRST,))
    if when == "in the region":
        w.op(aten.zero_.default, y, role="forward", regions=(FIRST,))
    h = w.op(aten.mul.Tensor, z, y)
    if when == "later":
        w.op(aten.zero_.default, y)
    _, record = of(w, h)
    assert record.details["inputs"] == int(when == "before")


def test_each_value_once() -> None:
    """Two regions that read one value keep one part; values of both are each kept."""
    w = Written(AXES)
    y, z, g = step(w)
    other = w.op(aten.tan.default, y, role="forward", regions=(Region(2, split={"a": mw.Shard(1)}),))
    third = w.op(aten.tan.default, z, role="forward", regions=(Region(3, split={"a": mw.Shard(1)}),))
    made, record = of(w, w.op(aten.add.Tensor, w.op(aten.add.Tensor, g, other), third))
    said = [line.partition(" = ")[2] for line in lines(made) if "slice" in line.partition(" = ")[2]]
    assert said == ["slice(sin, 0, 0, 2)", "clone(slice_tensor)", "slice(exp, 1, 0, 2)", "clone(slice_tensor_1)"]
    assert record.details == {"inputs": 2, "bytes": 128, "whole": 256}
    assert "mul_1 = mul(mul, all_gather_default_1)" in lines(made)


def test_strides_are_those_that_it_had() -> None:
    w = Written(AXES)
    x = w.given("x", 4, 4, kind="batch")
    y = w.op(aten.sin.default, x, role="forward", spec=w.spec((4, 4)), line="model.py:5")
    annotate(y, value=replace(checked_value(y), given=(1, 4)))
    z = w.op(aten.exp.default, y, role="forward", regions=(FIRST,))
    made, record = of(w, w.op(aten.mul.Tensor, z, y))
    assert [line.partition(" = ")[2].partition("(")[0] for line in lines(made)][-3:-1][0] == "all_gather"
    (laid,) = [n for n in made.graph.nodes if n.args[1:] == ([1, 4],)]
    assert checked_value(laid).strides == (1, 4)
    assert (info_of(laid).role, info_of(laid).line) == ("recomputation", "model.py:5")
    view = next(n for n in made.graph.nodes if n.name == "slice_tensor")
    assert checked_value(view).strides == (1, 4)
    assert record.details["inputs"] == 1
