"""Gather stored parameters again for the backward, instead of keeping them whole in between (ZeRO-3).

A view of a gathered parameter that the backward reads is made again from a second gather, right before its first use.
What the forward wrote to it is part of that: it was brought to the stored parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace

import torch.fx as fx

from ...record import Record
from ..ir.inplace import returned, storages
from ..ir.nodes import VIEWS, call, info_of, is_mutating, move_to_storage, value_of
from .recompute import RECOMPUTATION

_LATER = ("backward", RECOMPUTATION)


def regather(graph: fx.Graph, causes: list[Record]) -> int:
    """Give the backward gathers of its own; how many were added."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    above = 1 + max((s for n in graph.nodes for s in storages(n)), default=0)
    added = 0
    for node in list(graph.nodes):
        info = info_of(node)
        if info.gather and info.role == "forward" and _ends(node):
            added += _again(graph, node, order, causes, above)
    return added


def _ends(node: fx.Node) -> bool:
    """Whether a node is the last one of the steps that gather a parameter."""
    return not any(info_of(u).gather == info_of(node).gather for u in node.users)


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """A node and the views of it that the forward made, what its writes give included."""
    yield node
    for user in node.users:
        looks = (
            user.target in VIEWS or user.target is operator.getitem or (is_mutating(user) and returned(user) is node)
        )
        if looks and info_of(user).role == "forward":
            yield from _views(user)


def _again(graph: fx.Graph, gathered: fx.Node, order: dict[fx.Node, int], causes: list[Record], above: int) -> int:
    whole = dict.fromkeys(_views(gathered))
    readers = sorted({u for n in whole for u in n.users if info_of(u).role in _LATER}, key=order.__getitem__)
    if not readers:
        return 0
    made: dict[fx.Node, fx.Node] = {}
    name = info_of(gathered).gather

    def clone(node: fx.Node) -> fx.Node:
        if node not in whole and info_of(node).gather != name:
            return node
        if is_mutating(node):
            return clone(returned(node))
        if node not in made:
            args = fx.map_arg(node.args, clone)
            info = replace(info_of(node), role="backward")
            if info.cause is not None:
                old = causes[info.cause]
                causes.append(replace(old, reason="gathered again for the backward: " + old.reason, phase="backward"))
                info = replace(info, cause=len(causes) - 1)
            made[node] = call(graph, node.target, args, info, dict(node.kwargs))
        return made[node]

    with graph.inserting_before(readers[0]):
        for reader in readers:
            reader.args = fx.map_arg(reader.args, clone)
            reader.kwargs = fx.map_arg(reader.kwargs, clone)
    for node in made:
        value = value_of(node)
        if value is not None:
            move_to_storage(made[node], above + value.storage)
    return 1
