"""Losses that count what they are a mean over, as ops: sums over rows, divided by counts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from ...tensor.graph_marks import CONSTRAIN
from ..ir.loss_weight import LossWeight, value_at
from .export import Captured

aten = torch.ops.aten

COUNTED = "_counted"
_SUM, _NONE = {int: 2, str: "sum"}, {int: 0, str: "none"}


@dataclass(frozen=True)
class MicroBatchWeight:
    """The weight of a micro-batch, and the captured nodes that count it, all alike."""

    weight: LossWeight
    counts: tuple[str, ...] = ()


def copied(captured: Captured) -> Captured:
    """The same step with a graph of its own."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in captured.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], made.__getitem__))
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
    (output,) = graph.find_nodes(op="output")
    return replace(captured, module=fx.GraphModule(captured.module, graph), outputs=tuple(output.args[0]))


class Editor:
    """Puts ops into a captured graph; they are at the user's line of the node that they serve."""

    def __init__(self, captured: Captured) -> None:
        self.captured, self.graph = captured, captured.graph
        self.origins: dict[str, str] = {}

    def emit(self, of: fx.Node, target: Any, *args: Any, name: str = "", **kwargs: Any) -> fx.Node:
        """A node of ``of``, where the graph inserts."""
        node = self.graph.create_node("call_function", target, args, kwargs, name=name or None)
        node.meta = {k: v for k, v in of.meta.items() if k != "val"}
        read = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.captured.mode, torch.no_grad():
            node.meta["val"] = target(*read[0], **read[1])
        self.origins[node.name] = self.origins.get(of.name, of.name)
        return node


def _argument(node: fx.Node, name: str) -> Any:
    """An argument of a call by its name, its default where none is given; None where there is no such argument."""
    schema = getattr(node.target, "_schema", None)
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def _with(node: fx.Node, name: str, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with another value for one of them."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    i = names.index(name)
    if i < len(node.args):
        return (*node.args[:i], value, *node.args[i + 1 :]), dict(node.kwargs)
    return node.args, {**node.kwargs, name: value}


def _counts_targets(node: fx.Node) -> bool:
    """Whether a loss is a mean over its targets that are not ignored."""
    target = _argument(node, "target")
    if _argument(node, "reduction") not in (1, "mean") or not isinstance(target, fx.Node):
        return False
    known = {a.name for a in node.target._schema.arguments}  # type: ignore[union-attr]
    return "ignore_index" in known and not target.meta["val"].dtype.is_floating_point


def counting(captured: Captured) -> tuple[Captured, dict[str, str]]:
    """The step, in which losses that are means over targets are sums by counts; and new nodes to those they serve."""
    made = copied(captured)
    editor = Editor(made)
    for node in list(made.graph.nodes):
        if node.op == "call_function" and _counts_targets(node):
            _count_targets(editor, node)
    return made, editor.origins


def _count_targets(editor: Editor, node: fx.Node) -> None:
    target, weight, ignored = (_argument(node, n) for n in ("target", "weight", "ignore_index"))
    ignored = -100 if ignored is None else ignored
    reduction = _argument(node, "reduction")
    args, kwargs = _with(node, "reduction", _SUM[type(reduction)])
    with editor.graph.inserting_before(node):
        flat = editor.emit(node, aten.reshape.default, target, [-1])
        each = editor.emit(node, aten.ne.Scalar, flat, ignored)
        if weight is not None:
            none = editor.emit(node, aten.eq.Scalar, flat, ignored)
            place = editor.emit(node, aten.masked_fill.Scalar, flat, none, 0)
            of_class = editor.emit(node, aten.index_select.default, weight, 0, place)
            each = editor.emit(node, aten.mul.Tensor, of_class, each)
        count = editor.emit(node, aten.sum.default, each, name=f"{node.name}{COUNTED}")
        total = editor.emit(node, node.target, *args, **kwargs)
        mean = editor.emit(node, aten.div.Tensor, total, count)
        if mean.meta["val"].dtype is not node.meta["val"].dtype:
            mean = editor.emit(node, aten.to.dtype, mean, node.meta["val"].dtype)
    node.replace_all_uses_with(mean)
    editor.graph.erase_node(node)


def as_sums(captured: Captured) -> Captured:
    """The step, all means in which are sums divided by numbers, and which no layout constrains."""
    made, _ = counting(captured)
    editor = Editor(made)
    for node in list(made.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is CONSTRAIN.default:
            node.replace_all_uses_with(node.args[0])
            made.graph.erase_node(node)
        elif (call := _total_of(node)) is not None:
            target, args, kwargs, count = call
            with made.graph.inserting_before(node):
                total = editor.emit(node, target, *args, **kwargs)
                mean = editor.emit(node, aten.div.Tensor, total, count)
            node.replace_all_uses_with(mean)
            made.graph.erase_node(node)
    return made


def _total_of(node: fx.Node) -> tuple[Any, Any, Any, int] | None:
    """Of a mean: the sum, as a call, and over how many it is a mean."""
    made: Any = node.meta.get("val")
    if node.target in (aten.mean.default, aten.mean.dim):
        x: Any = node.args[0]
        over = x.meta["val"].numel() // max(1, made.numel())
        target = aten.sum.default if node.target is aten.mean.default else aten.sum.dim_IntList
        return target, node.args, node.kwargs, over
    schema: Any = getattr(node.target, "_schema", None)
    own = schema is not None and schema.name.startswith(("aten::", "meshwright::"))
    reduction = _argument(node, "reduction") if own else None
    if reduction not in (1, "mean") or isinstance(reduction, bool) or "ctc_loss" in schema.name:
        return None
    args, kwargs = _with(node, "reduction", _NONE[type(reduction)])
    args, kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    each = node.target(*args, **kwargs)  # type: ignore[operator]
    return node.target, *_with(node, "reduction", _SUM[type(reduction)]), each.numel()


def with_count(captured: Captured, found: MicroBatchWeight) -> tuple[Captured, dict[str, str]]:
    """The step that returns the count of a micro-batch, too, and divides by one where nothing counts."""
    made, origins = counting(captured)
    editor = Editor(made)
    editor.origins.update(origins)
    counts = [n for n in made.graph.nodes if n.name in found.counts]
    (output,) = made.graph.find_nodes(op="output")
    zero = value_at(found.weight.function, found.weight.dtype, 0.0)
    for count in counts if zero == 0.0 or not math.isfinite(zero) else ():
        users = [u for u in count.users if u is not output]
        with made.graph.inserting_after(count if count.op != "placeholder" else _last_input(made.graph)):
            none = editor.emit(count, aten.eq.Scalar, count, 0)
        with made.graph.inserting_after(none):
            one = editor.emit(count, aten.masked_fill.Scalar, count, none, 1)
        for user in users:
            user.replace_input_with(count, one)
    output.args = ((*output.args[0], counts[0]),)
    return replace(made, outputs=tuple(output.args[0])), editor.origins


def _last_input(graph: fx.Graph) -> fx.Node:
    return [n for n in graph.nodes if n.op == "placeholder"][-1]


__all__ = ["Editor", "MicroBatchWeight", "as_sums", "copied", "counting", "with_count"]
