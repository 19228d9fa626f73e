"""The graphs of a step for one micro-batch and for two, side by side: a number that differs is a number of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ...errors import PassError
from ...tensor.graph_marks import GRAD
from ..ir.nodes import ancestors, target_name
from .export import Captured
from .loss_terms import constant, pairs_of

aten = torch.ops.aten
Tensor = torch.Tensor
Refused = Callable[[fx.Node, str], PassError]

_VALUES = {"number", "float", "Scalar", "Optional[number]", "Optional[float]"}
_RANGES = {"aten::arange", "aten::linspace", "aten::range"}
# Ops that change strides alone.  Whether code calls them depends on strides, and a dim of one row has any stride.
_STRIDES_ONLY = {aten.contiguous.default, aten.clone.default}
_SAME_OP: dict[Any, Any] = {aten.reshape.default: aten.view.default}


@dataclass(frozen=True)
class Compared:
    """One micro-batch beside two.

    Attributes:
        degrees: captured node that multiplies with a number to the power of how many rows there are that this is.
        by_row: captured nodes whose values have a dim of rows.
        row_counts: captured nodes that give how many rows there are, whatever the batch, to that number.
        repeated: captured nodes that repeat one row for all rows, to the dim of the rows.
        counterparts: captured nodes of two micro-batches that have another name in the graph of one, to that.
    """

    degrees: dict[str, int]
    by_row: frozenset[str]
    row_counts: dict[str, float]
    repeated: dict[str, int]
    counterparts: dict[str, str]


def compared_sizes(one: Captured, two: Captured, refused: Refused) -> Compared:
    """Raises PassError where what the loss needs depends otherwise on how many rows there are than as a factor."""
    mine, theirs = ([n for n in of.graph.nodes if n.target not in _STRIDES_ONLY] for of in (one, two))
    (output,) = two.graph.find_nodes(op="output")
    needed = ancestors(n for n in output.args[0][:1] if isinstance(n, fx.Node))
    batch = {s.node for s in two.sources if s.kind == "batch"}
    missing = _missing_repeats(mine, theirs)
    theirs = [n for n in theirs if n not in missing]
    for a, b in zip(mine, theirs, strict=False):
        if (a.op, _op(a)) != (b.op, _op(b)) and not a.op == b.op == "placeholder":
            raise refused(
                b, f"{target_name(b.target)} is called for twice as many rows, {target_name(a.target)} for these"
            )
    if len(mine) != len(theirs):
        raise refused(theirs[-2], "other ops are called for twice as many rows")
    place = {n: i for i, n in enumerate(mine)} | {n: i for i, n in enumerate(theirs)}
    pairs = list(zip(mine, theirs, strict=True))
    for b in sorted(missing):  # which one row is for itself
        source = _without_strides(b.all_input_nodes[0])
        place[b] = place[source]
        pairs.insert(next(i for i, (_, n) in enumerate(pairs) if n > b), (mine[place[b]], b))
    degrees: dict[str, int] = {}
    by_row: set[str] = set()
    row_counts: dict[str, float] = {}
    repeated: dict[str, int] = {}
    varies: set[fx.Node] = set()
    values = {s.node: s.value for s in one.sources if s.value is not None}
    for s in two.sources:
        if s.value is not None and s.node in values:
            _check_constant(values[s.node], s.value, next(n for n in theirs if n.name == s.node), needed, refused)
    for a, b in pairs:
        inputs = [_without_strides(n) for n in b.all_input_nodes]
        if b.name in batch or not varies.isdisjoint(inputs):
            varies.add(b)
        if _grew(a, b, b in needed, refused):
            by_row.add(b.name)
            if (dim := _repeated_dim(a, b)) is not None and inputs[0].name not in by_row:
                repeated[b.name] = dim
        if b.op != "call_function" or b not in needed or b in missing:
            continue
        if (degree := _degree(a, b, place, refused)) is not None:
            degrees[b.name] = degree
        if b not in varies and b.name not in by_row and any(n.name in by_row for n in inputs):
            rows = _row_count(a, b, {s.node: s.value for s in two.sources}, values, refused)
            row_counts.update({} if rows is None else {b.name: rows})
    by_row |= {n.name for n in two.graph.nodes if _without_strides(n).name in by_row}
    if any(n.target is GRAD.default for n in theirs):  # gradients in the loss are typed by what autograd went through
        repeated = {}
    counterparts = {b.name: a.name for a, b in pairs if a.name != b.name}
    return Compared(degrees, frozenset(by_row), row_counts, repeated, counterparts)


def _missing_repeats(mine: list[fx.Node], theirs: list[fx.Node]) -> set[fx.Node]:
    """What code calls for several rows only: it repeats one row, which for one is that row."""
    found, one = set[fx.Node](), iter(mine)
    a = next(one, None)
    for b in theirs:
        if a is not None and b.target is aten.expand.default and _op(a) != _op(b):
            x, made = (n.meta["val"].shape for n in (b.all_input_nodes[0], b))
            if x[:1] == (1,) and made == (2, *x[1:]):
                found.add(b)
                continue
        a = next(one, None)
    return found


def _without_strides(node: fx.Node) -> fx.Node:
    """The node whose value this is, with other strides."""
    while node.target in _STRIDES_ONLY:
        node = node.all_input_nodes[0]
    return node


def _op(node: fx.Node) -> Any:
    """What a node calls; ops that differ in strides alone are one."""
    return _SAME_OP.get(node.target, node.target)


def _grew(a: fx.Node, b: fx.Node, needed: bool, refused: Refused) -> bool:
    """Whether a value has a dim of rows."""
    grew = False
    for x, y in pairs_of(a.meta.get("val"), b.meta.get("val")):
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            continue
        if needed and (x.ndim != y.ndim or any(n not in (m, 2 * m) for m, n in zip(x.shape, y.shape, strict=True))):
            raise refused(b, f"a value has shape {tuple(x.shape)}, and {tuple(y.shape)} for twice as many rows")
        grew = grew or x.shape != y.shape
    return grew


def _repeated_dim(a: fx.Node, b: fx.Node) -> int | None:
    """The dim of rows that a node makes of one row, as ``expand`` and ``repeat`` do; None of others."""
    if b.target not in (aten.expand.default, aten.repeat.default):
        return None
    nodes: list[Any] = [b.args[0], b, a]
    x, made, of_one = (n.meta["val"] for n in nodes)
    (dim, *more) = (d for d in range(made.ndim) if made.shape[d] != of_one.shape[d])
    before = dim - (made.ndim - x.ndim)
    return dim if not more and (before < 0 or x.shape[before] == 1) else None


def _check_constant(x: Tensor, y: Tensor, node: fx.Node, needed: set[fx.Node], refused: Refused) -> None:
    if node in needed and x.shape == y.shape and not x.is_meta and not torch.equal(x, y):
        user = next(iter(node.users), node)
        raise refused(user, _numbers_differ("a tensor", x.tolist(), y.tolist()))


def _row_count(
    a: fx.Node, b: fx.Node, two: Mapping[str, Tensor | None], one: Mapping[str, Tensor],
    refused: Refused,
) -> float | None:  # fmt: skip
    """How many rows there are, where a value that no batch says is that; None of one that does not depend on it.

    Raises PassError where it depends on it otherwise.
    """
    x, y = (constant(n, {p: v for p in ancestors([n]) if (v := of.get(p.name)) is not None})
            for n, of in ((a, one), (b, two)))  # fmt: skip
    if x is not None and y is not None and x.numel() == 1 and bool(y == 2 * x) and bool(x != 0):
        return float(x)
    if x is None or y is None or not torch.equal(x, y):
        raise refused(b, f"{target_name(b.target)} adds up what is the same for all rows, over how many there are")
    return None


def _degree(a: fx.Node, b: fx.Node, place: Mapping[fx.Node, int], refused: Refused) -> int | None:
    """The power of how many rows there are with which a node multiplies; None of one without such a number."""
    schema = getattr(b.target, "_schema", None)
    kinds = {arg.name: str(arg.type) for arg in schema.arguments} if schema is not None else {}
    names = [arg.name for arg in schema.arguments] if schema is not None else []
    given = [(n, x, y) for n, x, y in zip(names, a.args, b.args, strict=False)]
    given += [(k, a.kwargs.get(k), v) for k, v in b.kwargs.items()]
    for name, x, y in given:
        for p, q in pairs_of(x, y):
            if isinstance(p, fx.Node) and isinstance(q, fx.Node):
                if place[_without_strides(p)] != place[_without_strides(q)]:
                    raise refused(b, "takes another value for twice as many rows")
                continue
            if type(p) is type(q) and (p == q or p != p):
                continue
            number = isinstance(p, int | float) and isinstance(q, int | float)
            if number and schema is not None and schema.name in _RANGES:
                continue
            scales = number and b.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
            if scales and not b.kwargs and q in (2 * p, p / 2):
                up = 1 if q == 2 * p else -1
                return up if b.target in (aten.mul.Tensor, aten.mul.Scalar) else -up
            if number and kinds.get(name) not in _VALUES and name != "other":
                continue  # a size: shapes say whether it may be
            raise refused(b, _numbers_differ(target_name(b.target), p, q))
    return None


def _numbers_differ(what: str, here: Any, there: Any) -> str:
    here, there = (f"{x:g}" if isinstance(x, int | float) else str(x) for x in (here, there))
    return f"{what} takes the number {here}, and {there} for twice as many rows, which micro-batches have others of"


__all__ = ["Compared", "Refused", "compared_sizes"]
