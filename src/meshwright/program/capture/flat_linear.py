"""Linear layers between a flatten and its inverse, as ``nn.MultiheadAttention`` has one, keep the dims apart."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx as fx

from .out_arguments import called

aten = torch.ops.aten
_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}


def keep_dims_apart(graph: fx.Graph) -> None:
    """``linear(x.view(t * b, k), w).view(t, b, n)`` becomes ``linear(x, w)``.

    A split of ``b`` cannot be one of ``t * b``, where it lies inside: rows would be gathered for nothing.
    """
    for node in list(graph.nodes):
        if node.target is not aten.linear.default or not isinstance(node.args[0], fx.Node):
            continue
        flat = node.args[0]
        lead = _lead(flat)
        users = list(node.users)
        if not lead or not all(u.target in _RESHAPES and _shape(u)[: len(lead)] == lead for u in users):
            continue
        with graph.inserting_before(node):
            apart: Any = called(flat, aten.reshape.default, (flat.args[0], [*lead, _shape(flat)[1]]))
            made = called(node, aten.linear.default, (apart, *node.args[1:]))
        for user in users:
            with graph.inserting_before(user):
                user.replace_all_uses_with(called(user, aten.reshape.default, (made, list(_shape(user)))))
            graph.erase_node(user)
        graph.erase_node(node)
        if not flat.users:
            graph.erase_node(flat)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _lead(flat: fx.Node) -> tuple[int, ...]:
    """The dims that a flatten to two dims put together, two or more; none of another node."""
    if flat.target not in _RESHAPES or len(_shape(flat)) != 2:
        return ()
    before = _shape(flat.args[0])  # type: ignore[arg-type]
    for d in range(2, len(before)):
        if (math.prod(before[:d]), math.prod(before[d:])) == _shape(flat):
            return before[:d]
    return ()


__all__ = ["keep_dims_apart"]
