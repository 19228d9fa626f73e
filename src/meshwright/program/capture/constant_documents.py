"""Document ids that a model makes of nothing but sizes: of a batch that is not packed, transformers' own are such."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from ...compat import OpOverload, pytree
from ...dispatch import disabled
from ..ir.nodes import draws

Tensor = torch.Tensor
ATTENTION: Any = torch.ops.meshwright.attention.default
WITHOUT: Any = torch.ops.aten.scaled_dot_product_attention.default


def forget_single_documents(graph: fx.Graph) -> None:
    """Attention that is told, whatever the batch, that each sequence is one document, is not told of documents.

    Then no rank has to know lengths to have its share of the work, and keys, queries and results are all that is sent.
    """
    made: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not ATTENTION or not isinstance(node.args[3], fx.Node):
            continue
        ids = value_from_numbers(node.args[3], made)
        if ids is None or node.args[4] or bool((ids != ids[..., :1]).any()):
            continue
        query, key, value, _, lengths, causal, window, *rest = node.args
        if window:
            node.args = (query, key, value, None, lengths, causal, window, *rest)
            continue
        dropout, scale = rest
        node.target, node.args = WITHOUT, (query, key, value, None, dropout, causal)
        grouped = query.meta["val"].shape[-3] != key.meta["val"].shape[-3]
        node.kwargs = {"scale": scale, "enable_gqa": grouped}
    erase_unread(graph, made)


def erase_unread(graph: fx.Graph, made: dict[fx.Node, Any]) -> None:
    """Remove nodes that follow from numbers alone, and that nobody reads any more."""
    for node in reversed(list(graph.nodes)):
        if made.get(node) is not None and not node.users:
            graph.erase_node(node)


def value_from_numbers(node: fx.Node, made: dict[fx.Node, Any]) -> Any:
    """What a node gives that follows from numbers alone; None for any other."""
    waiting = [node]
    while waiting:
        top = waiting[-1]
        before = [n for n in top.all_input_nodes if n not in made]
        if top not in made and before:
            waiting += before
            continue
        waiting.pop()
        made.setdefault(top, None if top in made else _run(top, made))
    return made[node]


def _run(node: fx.Node, made: dict[fx.Node, Any]) -> Any:
    if node.op != "call_function" or any(made[n] is None for n in node.all_input_nodes):
        return None
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return None
    if draws(node):
        return None
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: made[n], (node.args, node.kwargs))
    with torch.no_grad(), disabled():
        return node.target(*args, **kwargs)
