"""An update in parts: what has arrived is updated while the last sums are still under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from .. import compat
from ..collective import WAIT_OP
from ..program.ir.nodes import call, info_of

PARTS = 4  # into which an update is cut at most: each is a call of its own


def split_updates(graph: fx.Graph, waits: Sequence[fx.Node], sums: Mapping[fx.Node, fx.Node]) -> int:
    """Cut fused updates in front of the last waits; how many calls were added.

    Parameters are independent of each other in an update, so nothing but the order of work changes.

    Args:
        waits: of all sums.
        sums: the sum of a gradient to the wait that it comes from.
    """
    waits = sorted(waits)  # one that several updates read is ahead of the first of them
    place = {w: i for i, w in enumerate(waits)}
    added = 0
    for node in [n for n in graph.nodes if _is_update(n)]:
        numbers = [place.get(sums.get(g), -1) for g in node.args[1]]  # type: ignore[arg-type]
        last = sorted(set(numbers))[1:][-(PARTS - 1) :]
        if last and _nothing_else(waits[last[0]], node):
            added += _cut(graph, node, numbers, [(number, waits[number]) for number in last])
    return added


def _is_update(node: fx.Node) -> bool:
    """Whether a node updates a list of parameters from a list of gradients."""
    if not isinstance(node.target, compat.OpOverload) or not node.target._schema.is_mutable:
        return False
    return [a.name for a in node.target._schema.arguments[:2]] == ["self", "grads"]


def _nothing_else(first: fx.Node, last: fx.Node) -> bool:
    """Whether from a wait on to an update there are only waits and views of what they give."""
    node = first
    while node is not last:
        if node.op != "call_function" or node.target not in (WAIT_OP, torch.ops.aten.as_strided.default):
            return False
        node = node.next
    return True


def _cut(graph: fx.Graph, node: fx.Node, numbers: list[int], last: list[tuple[int, fx.Node]]) -> int:
    """Parts of an update in front of these waits; the rest stays where it is."""
    below = -2
    for number, wait in last:
        with graph.inserting_before(wait):
            call(graph, node.target, _entries(node, numbers, below, number), info_of(node), dict(node.kwargs))
        below = number - 1
    node.args = _entries(node, numbers, below, len(numbers) + max(numbers) + 1)
    return len(last)


def _entries(node: fx.Node, numbers: list[int], above: int, below: int) -> tuple[Any, ...]:
    """The arguments of an update for the entries whose numbers lie between two."""
    chosen = [i for i, n in enumerate(numbers) if above < n < below]
    return tuple([a[i] for i in chosen] if isinstance(a, (list, tuple)) and len(a) else a for a in node.args)


__all__ = ["split_updates"]
