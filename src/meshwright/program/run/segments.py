"""Segments of a program: each stretch of local ops between two collectives as one call of a function of its own.

Collectives stay where they are, in the order of the program, which is the same on all ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from ..ir.nodes import NodeInfo, call, info_of, value_of
from ..ir.program import Program
from ..ir.subgraphs import RECOMPUTATION

Tensor = torch.Tensor
SMALLEST = 2  # nodes that are worth a function of their own


class Segment:
    """A stretch of local ops as one function.

    Attributes:
        module: the ops as a module of their own.
    """

    def __init__(self, module: fx.GraphModule, name: str) -> None:
        self.module, self.__name__ = module, name

    def __call__(self, *tensors: Tensor) -> Any:
        """The tensors that leave the stretch."""
        return self.module(*tensors)


@dataclass(frozen=True)
class Stretch:
    """Consecutive local ops of a program.

    Attributes:
        nodes: the ops, in order.
        reads: values from outside that they read; ``gives``: their values that others read.
    """

    nodes: Sequence[fx.Node]
    reads: Sequence[fx.Node]
    gives: Sequence[fx.Node]

    @staticmethod
    def of(nodes: Sequence[fx.Node]) -> Stretch | None:
        """The stretch of some nodes; None where they are no function of tensors, or too few to be worth one."""
        inside = set(nodes)
        if sum(n.target is not operator.getitem for n in nodes) < SMALLEST:
            return None
        reads = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
        gives = [n for n in nodes if any(u not in inside for u in n.users)]
        # Several values at once cannot leave a function as one: what is picked from them does, where it is used.
        several = any(isinstance(info_of(n).value, tuple) for n in gives)
        return None if several or not reads or not gives else Stretch(tuple(nodes), reads, gives)

    def module(self) -> fx.GraphModule:
        """Its ops as a module from what they read to the tuple of what they give."""
        body, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for n in self.reads:
            copies[n] = body.placeholder(n.name)
        for node in self.nodes:
            copies[node] = body.node_copy(node, copies.__getitem__)
        body.output(tuple(copies[n] for n in self.gives))
        return fx.GraphModule(torch.nn.Module(), body)


Takes = Callable[[fx.Node, Sequence[fx.Node]], bool]


def with_segments(program: Program, takes: Takes, segment_of: Callable[[Stretch, str], Segment | None]) -> Program:
    """The program with stretches of local ops as calls of segments.

    Args:
        takes: whether an op belongs into a segment, behind the nodes that are in it already.
        segment_of: the segment of a stretch, by a name; None leaves its ops in the program.
    """
    graph = fx.Graph()
    placed: dict[fx.Node, fx.Node] = {}
    nodes: list[fx.Node] = []
    count = 0

    def flush() -> None:
        nonlocal count
        stretch = Stretch.of(nodes)
        segment = None if stretch is None else segment_of(stretch, f"segment_{count}")
        if stretch is None or segment is None:
            for node in nodes:
                placed[node] = graph.node_copy(node, placed.__getitem__)
        else:
            count += 1
            info = NodeInfo(info_of(nodes[0]).role, value=tuple(value_of(n) for n in stretch.gives))
            results = call(graph, segment, tuple(placed[n] for n in stretch.reads), info)
            for i, n in enumerate(stretch.gives):
                placed[n] = call(graph, operator.getitem, (results, i), info_of(n))
        nodes.clear()

    role = ""
    for node in program.graph.nodes:
        before, role = role, info_of(node).role
        if role == RECOMPUTATION != before:
            flush()  # a compiler that saw what runs again beside the first run would let it run once
        if node.target is operator.getitem:
            if node.args[0] in placed:  # of a tuple, which a function of tensors does not take
                placed[node] = graph.node_copy(node, placed.__getitem__)
            else:
                nodes.append(node)
        elif node.op == "call_function" and takes(node, nodes):
            nodes.append(node)
        else:
            flush()
            placed[node] = graph.node_copy(node, placed.__getitem__)
    return replace(program, graph=graph)


__all__ = ["SMALLEST", "Segment", "Stretch", "with_segments"]
