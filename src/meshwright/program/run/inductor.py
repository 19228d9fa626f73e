"""Local ops compiled by Inductor: what lies between two collectives becomes one compiled function.

Collectives stay where they are, in the order of the program, which is the same on all ranks; a compiler that saw them
might order them differently where shards have other sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from ... import compat
from ..ir.nodes import NodeInfo, call, draws, info_of, value_of
from ..ir.program import Program
from ..ir.subgraphs import RECOMPUTATION

Tensor = torch.Tensor
_WHOLE = ("aten._fused", "aten._foreach", "aten._amp")
SMALLEST = 2  # nodes that are worth a function of their own


class Segment:
    """A stretch of local ops; compiled when it is first called, for the tensors that it is called with.

    Attributes:
        module: the ops as a module of their own.
    """

    def __init__(self, module: fx.GraphModule, name: str) -> None:
        self.module, self.__name__ = module, name
        self._compiled: Any = None

    def __call__(self, *tensors: Tensor) -> Any:
        if self._compiled is None:
            from ...compat import compile_fx

            self._compiled = compile_fx(self.module, list(tensors))
        return self._compiled(*tensors)


def with_inductor(program: Program) -> Program:
    """The program with each stretch of local ops as one call of a compiled function."""
    graph = fx.Graph()
    placed: dict[fx.Node, fx.Node] = {}
    stretch: list[fx.Node] = []
    count = 0

    def flush() -> None:
        nonlocal count
        count += _place(graph, stretch, placed, f"segment_{count}")
        stretch.clear()

    role = ""
    for node in program.graph.nodes:
        before, role = role, info_of(node).role
        if role == RECOMPUTATION != before:
            flush()  # a compiler that saw what runs again beside the first run would let it run once
        if node.op == "call_function" and _compilable(node):
            stretch.append(node)
            continue
        flush()
        placed[node] = graph.node_copy(node, placed.__getitem__)
    return replace(program, graph=graph)


def _compilable(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, compat.OpOverload) or draws(node):
        return False
    # Ops of our own move data or keep to one kernel; updates are fused already.
    return node.target.namespace == "aten" and not str(node.target).startswith(_WHOLE)


def _place(graph: fx.Graph, stretch: Sequence[fx.Node], placed: dict[fx.Node, fx.Node], name: str) -> int:
    """Put a stretch into the graph: as one function where it is worth it; how many functions were made."""
    if sum(n.target is not operator.getitem for n in stretch) < SMALLEST:
        for node in stretch:
            placed[node] = graph.node_copy(node, placed.__getitem__)
        return 0
    inside = set(stretch)
    given = list(dict.fromkeys(n for node in stretch for n in node.all_input_nodes if n not in inside))
    taken = [n for n in stretch if any(u not in inside for u in n.users) and not isinstance(info_of(n).value, tuple)]
    # Several values at once cannot leave a function as one: what is picked from them does, where it is used.
    picked = [n for n in stretch if isinstance(info_of(n).value, tuple) and any(u not in inside for u in n.users)]
    if picked or not given or not taken:
        for node in stretch:
            placed[node] = graph.node_copy(node, placed.__getitem__)
        return 0
    body, copies = fx.Graph(), {}
    for n in given:
        copies[n] = body.placeholder(n.name)
    for node in stretch:
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output(tuple(copies[n] for n in taken))
    segment = Segment(fx.GraphModule(torch.nn.Module(), body), name)
    info = NodeInfo(info_of(stretch[0]).role, value=tuple(value_of(n) for n in taken))
    made = call(graph, segment, tuple(placed[n] for n in given), info)
    for i, n in enumerate(taken):
        placed[n] = call(graph, operator.getitem, (made, i), info_of(n))
    return 1
