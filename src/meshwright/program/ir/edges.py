"""Edges of a pipeline: the values that go from the nodes of one stage to those of another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx

from .nodes import annotate, checked_value, info_of, value_of
from .program import Program

aten = torch.ops.aten
_UNWRITTEN = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}


@dataclass(frozen=True)
class Edge:
    """A value that crosses from one stage to another.

    Attributes:
        node: what gives it.
        src, dst: the stages.
        nbytes: of this rank's part.
    """

    node: fx.Node
    src: int
    dst: int
    nbytes: int


def put_stages(graph: fx.Graph, params: set[fx.Node], stages: Mapping[str, int], device: str) -> None:
    """Note the stage of each node of forward and backward: that of the captured node that it serves.

    What needs no parameter (masks, positions, the draws of a dropout) belongs to none: every stage has it by itself.
    New memory is made from sizes alone, not from the value that it is like: so every stage draws what one of them
    fills it with, and the numbers that follow are the same for all.

    Args:
        params: the placeholders of parameters.
        stages: of captured nodes and of parameters, by name.
        device: of the mesh.
    """
    for node in params:
        annotate(node, stage=stages.get(node.name))
    needing = set(params)
    for node in graph.nodes:
        if node.target in _UNWRITTEN:
            made, where = checked_value(node), node.kwargs.get("device") or device
            node.target, node.args = aten.empty_strided.default, (list(made.shape), list(made.strides))
            node.kwargs = {"dtype": made.dtype, "device": where}
        if node.op == "call_function" and not needing.isdisjoint(node.all_input_nodes):
            needing.add(node)
            if info_of(node).role != "optimizer" and info_of(node).source in stages:
                annotate(node, stage=stages[info_of(node).source])


def edges(program: Program) -> Iterator[Edge]:
    """The values that cross, each once for a stage that takes it, in the order in which they are made."""
    for node in program.graph.nodes:
        src, value = info_of(node).stage, value_of(node)
        if src is None or value is None:
            continue
        takers = {stage for user in node.users if (stage := info_of(user).stage) is not None}
        for dst in sorted(takers - {src}):
            yield Edge(node, src, dst, math.prod(value.shape) * value.dtype.itemsize)


__all__ = ["Edge", "edges", "put_stages"]
