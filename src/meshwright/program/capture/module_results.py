"""Results of modules in a captured graph, and their constraints, as hooks of a plan leave them in an export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from ...tensor.graph_marks import CONSTRAIN, placements_text
from .export import Captured
from .loss_sums import Editor, copied


def modules_of(node: fx.Node) -> list[str]:
    """The modules whose forward a node is part of, outermost first."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return [str(path).removeprefix("model").removeprefix(".") for path, _ in stack]


def leaving(node: fx.Node) -> list[str]:
    """The modules of which a node is a result: a node outside of them reads it."""
    users = [modules_of(user) if user.op != "output" else [] for user in node.users]
    return [path for path in modules_of(node) if any(path not in inside for inside in users) or not users]


def with_constrained_outputs(captured: Captured, outputs: Mapping[str, Any]) -> Captured | None:
    """The step in which results of modules are constrained, as if ``Plan.outputs`` had been there when it was captured.

    Args:
        outputs: name of a module to placements.

    Returns:
        None where a module does not have exactly one tensor as its result: then hooks have to say it.
    """
    if not outputs:
        return captured
    made = copied(captured)
    editor, results = Editor(made), dict[str, list[fx.Node]]()
    for node in made.graph.nodes:
        for path in leaving(node) if node.op == "call_function" else ():
            results.setdefault(path, []).append(node)
    for path, placements in outputs.items():
        nodes = results.get(path, [])
        value = nodes[0].meta.get("val") if len(nodes) == 1 else None
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or modules_of(nodes[0])[-1] != path:
            return None
        (node,) = nodes
        outside = [user for user in node.users if user.op == "output" or path not in modules_of(user)]
        with made.graph.inserting_after(node):
            mark = editor.emit(node, CONSTRAIN.default, node, placements_text(placements))
        for user in outside:
            user.replace_input_with(node, mark)
    (output,) = made.graph.find_nodes(op="output")
    return replace(made, outputs=tuple(output.args[0]))


__all__ = ["leaving", "modules_of", "with_constrained_outputs"]
