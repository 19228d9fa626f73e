"""Whether what a model does with one row of a batch depends on the others: then no loss of micro-batches is its loss.

Rows are followed through the forward by the rules of its ops, as a factor of their dims.  An op that needs the whole of
them (batch norm, a softmax over the batch), pairs of them (contrastive losses), or a sum over them that is no part of
the mean that the loss is, mixes them.  What no rule tells is not followed: where nothing is known nothing is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from ..collective import COLLECTIVES
from ..program.ir.linear import rule_of
from ..program.ir.nodes import VIEWS, info_of, value_of
from ..program.ir.program import Program
from ..rules import RULES, Rule

_OF_BATCH = {"native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"}
_BESIDE, _PLACES = "rows of the batch that lie beside each other, or some of them", "the places of rows in the batch"
_NEVER = {_BESIDE, _PLACES}  # also where what is made so is summed
RANGES = {"aten::arange", "aten::linspace", "aten::range"}
_TRAINING = 5  # the place of the argument that says whether they take statistics of the batch


@dataclass(frozen=True)
class Followed:
    """Where rows of a batch are, and what mixes them.

    Attributes:
        rows: node to its dim whose major factor are the rows.
        mixed: ops that mix rows, in order, and how.
    """

    rows: dict[fx.Node, int] = field(default_factory=dict)
    mixed: list[tuple[fx.Node, str]] = field(default_factory=list)

    def but(self, counted: Collection[fx.Node]) -> tuple[fx.Node, str] | None:
        """The first op of the forward that mixes rows of a batch, and how; None if none is known to.

        Args:
            counted: nodes that sum rows to what the loss is, or is divided by.
        """
        return next(((n, how) for n, how in self.mixed if n not in counted or how in _NEVER), None)


def followed(program: Program) -> Followed:
    """Follow the rows of a batch through a forward."""
    made = Followed()
    rows = made.rows
    counts: dict[fx.Node, tuple[fx.Node, str]] = {}  # whole numbers that mix rows, and what they are made in
    for node, given in zip(program.placeholders, program.inputs, strict=True):
        value = value_of(node)
        if given.kind == "batch" and value is not None and value.shape and value.shape[0] > 1:
            rows[node] = 0
    for node in program.graph.nodes:
        if node.op != "call_function" or info_of(node).role != "forward":
            continue
        # A conversion changes where rows are: its slices are not the user's.
        if node.target is operator.getitem or node.target in COLLECTIVES or info_of(node).cause is not None:
            source: Any = next(iter(node.all_input_nodes), None)
            value, d = value_of(node), rows.get(source)
            if d is not None and value is not None and len(value.shape) > d and value.shape[d] > 1:
                rows[node] = d
            if source in counts:
                counts[node] = counts[source]
            continue
        mixed = next((counts[n] for n in node.all_input_nodes if n in counts), None)
        if not rows.keys().isdisjoint(node.all_input_nodes) and (found := _mixes(node, rows)):
            if _is_float(node):
                made.mixed.append((node, found))
            else:
                mixed = mixed or (node, found)
        # Whole numbers may say where rows lie, as the order of tokens by their experts does: by that no row computes
        # with another.  What computes with them does.
        if mixed and _is_float(node):
            if torch.Tag.pointwise in node.target.tags or node.target is torch.ops.aten._to_copy.default:
                made.mixed.append(mixed)
        elif mixed:
            counts[node] = mixed
    return made


def _mixes(node: fx.Node, rows: dict[fx.Node, int]) -> str:
    """How a node mixes rows, or nothing; where they are in what it gives is noted."""
    name = getattr(node.target, "_schema", None) and node.target._schema.name.removeprefix("aten::")  # type: ignore
    if name in _OF_BATCH:
        return "the statistics of the batch" if len(node.args) > _TRAINING and node.args[_TRAINING] is True else ""
    # A native op goes by the rule of what it is part of: ``_softmax`` has the arguments of ``softmax``.
    part_of = name if name is None or name in RULES or name[0] != "_" else name[1:].removesuffix("_forward")
    rule, tensors = rule_of(node, part_of)
    if rule is None:  # as far as one can see they are where they were
        first = next(n for n in node.all_input_nodes if n in rows)
        given, d = next(info_of(first).values), rows[first]
        if any(len(v.shape) > d and v.shape[: d + 1] == given.shape[: d + 1] for v in info_of(node).values):
            rows[node] = d
        return ""
    own = [(i, f) for i, n in enumerate(tensors) if n in rows and (f := _major(rule.inputs[i], rows[n], rule))]
    if any(f in rule.crossing for _, f in own) or (name == "slice" and _cuts_rows(node, rows)):
        return _BESIDE
    for i, n in enumerate(tensors):
        if n not in rows and any(dim[:1] == (f,) for dim in rule.inputs[i] for _, f in own) and _counts_rows(n):
            return _PLACES
    factors = {f for _, f in own}
    outputs = {f for dims in rule.outputs for dim in dims for f in dim}
    if len(factors & outputs) > 1:
        return "pairs of rows of the batch"
    for f in factors:
        if f in rule.whole:
            return "all rows of the batch together"
        if f in rule.reduced and f not in outputs:
            return "a sum over the rows of the batch"
    if len(rule.outputs) and own:
        for d, dim in enumerate(rule.outputs[0]):
            if dim and dim[0] == own[0][1]:
                rows[node] = d
    return ""


def _cuts_rows(node: fx.Node, rows: Mapping[fx.Node, int]) -> bool:
    """Whether a slice means some rows, though it takes all of a micro-batch that has few."""
    given: Any = node.args
    x, dim, start, end = (*given, *(None, 0, None, None)[len(given) :])[:4]
    value = value_of(x)
    if value is None or rows.get(x) != dim % len(value.shape):
        return False
    return start not in (None, 0) or not (end is None or end == value.shape[dim] or end > 1 << 60)


def _counts_rows(node: fx.Node) -> bool:
    """Whether a value is one number after the other."""
    while len(node.all_input_nodes) == 1 and (node.target in VIEWS or node.target is torch.ops.aten._to_copy.default):
        (node,) = node.all_input_nodes
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name in RANGES


def _major(dims: Any, dim: int, rule: Rule) -> str:
    """The factor that the rows are, of a dim."""
    return next((f for f in dims[dim] if rule.sizes[f] != 1), "") if dim < len(dims) else ""


def _is_float(node: fx.Node) -> bool:
    return any(v.dtype.is_floating_point for v in info_of(node).values)


__all__ = ["RANGES", "Followed", "followed"]
