"""Calls with ``out=`` in a captured graph."""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx

from ... import compat

aten = torch.ops.aten


def copy_into_out(graph: fx.Graph) -> None:
    """``add(x, y, out=z)`` becomes ``copy_(z, add(x, y))``, so that rules need not know of ``out``."""
    for node in list(graph.nodes):
        plain, outs = _without_out(node.target)
        if plain is None:
            continue
        given = [node.kwargs[k] for k in outs]
        with graph.inserting_before(node):
            made = called(node, plain, node.args, {k: a for k, a in node.kwargs.items() if k not in outs})
            several = (
                [made] if len(outs) == 1 else [called(node, operator.getitem, (made, i)) for i, _ in enumerate(outs)]
            )
            for i, (target, value) in enumerate(zip(given, several, strict=True)):
                if target.meta["val"].shape != value.meta["val"].shape:  # an empty one, which gets what there is
                    given[i] = value
                    at = list(graph.nodes).index(node)
                    later = set(list(graph.nodes)[at + 1 :])
                    target.replace_all_uses_with(value, delete_user_cb=later.__contains__)
                else:
                    called(node, aten.copy_.default, (target, value))
        for user in list(node.users) if len(outs) > 1 else ():
            user.replace_all_uses_with(given[user.args[1]])
            graph.erase_node(user)
        node.replace_all_uses_with(given[0])
        graph.erase_node(node)


def called(like: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
    """A call in the place of a node, and what it gives."""
    node = like.graph.call_function(target, args, kwargs)
    given = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    node.meta = {**like.meta, "val": target(*given[0], **given[1])}
    return node


@lru_cache(maxsize=1024)
def _without_out(target: Any) -> tuple[Any, tuple[str, ...]]:
    """The overload that gives new tensors, and the names under which ``target`` takes those to write to; else None."""
    arguments = target._schema.arguments if isinstance(target, compat.OpOverload) else ()
    outs = tuple(a.name for a in arguments if a.is_out)
    rest = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    for name in target.overloadpacket.overloads() if outs else ():
        other = getattr(target.overloadpacket, name)
        if [(a.name, str(a.type)) for a in other._schema.arguments] == rest:
            return other, outs
    return None, ()


__all__ = ["called", "copy_into_out"]
