"""Cutting a program into parts: which nodes a value needs, writes included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.fx as fx

from ..program.ir.inplace import storages, written
from ..program.ir.nodes import call, checked_value, info_of, is_mutating
from ..program.ir.program import Output, Program

aten = torch.ops.aten


def new_storage(graph: fx.Graph) -> int:
    """A number that no storage of a program has, nor any number above it."""
    return 1 + max((s for n in graph.nodes for s in storages(n)), default=0)


def needed(
    graph: fx.Graph,
    roots: Iterable[fx.Node],
    writes: Callable[[fx.Node], bool | None],
    instead: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
) -> set[fx.Node]:
    """Nodes that must run so that ``roots`` have their values and the wanted writes happen.

    Args:
        writes: whether a node that writes is wanted for what it leaves behind when the program has ended; None: never,
            whoever reads that memory.
        instead: nodes to what they need, in place of their inputs.
    """
    live, read = set(roots), set[int]()
    for node in reversed(graph.nodes):
        if node.op == "output":
            continue
        if node not in live and is_mutating(node):
            wanted = writes(node)
            if wanted or (wanted is not None and not read.isdisjoint(written(node))):
                live.add(node)
        if node in live:
            for used in (instead[node],) if node in instead else node.all_input_nodes:
                live.add(used)
                read.update(storages(used))
    return live


def copied(program: Program) -> Program:
    """The same program with a graph of its own."""
    return part_of(program, set(program.graph.nodes), program.outputs)


def part_of(
    program: Program,
    nodes: set[fx.Node],
    outputs: Iterable[Output],
    instead: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
) -> Program:
    """The part of a program that ``nodes`` are, with these of its outputs.

    Args:
        instead: nodes to others of the same shape, whose values they have in this part.
    """
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node not in nodes or node.op == "output":
            continue
        if node in instead:
            args = (made[instead[node]], list(checked_value(node).shape))
            made[node] = call(graph, aten.view.default, args, info_of(node))
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
    inputs = [i for i, n in zip(program.inputs, program.placeholders, strict=True) if n in nodes]
    kept = list(outputs)
    results = dict(zip(program.outputs, program.results, strict=True))
    graph.output(tuple(made[results[o]] for o in kept))
    return replace(program, graph=graph, inputs=tuple(inputs), outputs=tuple(kept))
