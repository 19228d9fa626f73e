"""What a loss is made of, over micro-batches: terms that are sums over their rows, and what divides them.

A step is recorded on a mesh of one axis, whose coordinates are micro-batches (:mod:`.micro_batches`).  A value that
does not cross that axis is a function of a micro-batch alone.  A sum over it may divide: then the loss is of degree -1
in it.  So each value has terms, each a product of powers of such sums; what crosses the axis otherwise is *mixed*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from ... import compat
from ...collective import COLLECTIVES
from ...collective.graph import KEEP_ONE
from ...errors import PassError
from ..ir.linear import linear_in
from ..ir.loss_weight import Earlier, ScalarStep
from ..ir.nodes import VIEWS, ancestors, checked_value, draws, info_of, is_sum, target_name, value_of

aten = torch.ops.aten
Key = Any  # what tells a value from others: equal keys compute the same of the same

_TIMES, _OVER = {aten.mul.Tensor, aten.mul.Scalar}, {aten.div.Tensor, aten.div.Scalar}
_PLUS = {aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar}
_POWERS = {aten.reciprocal.default: -1.0, aten.sqrt.default: 0.5, aten.rsqrt.default: -0.5}
_SAME_IF_FINITE = {aten.nan_to_num.default}  # a loss is a number, or nothing counts
_CASTS = {aten._to_copy.default}
_SUMS = {aten.sum.default, aten.count_nonzero.default}
_FLAT = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.squeeze.default,
         aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default}  # fmt: skip


@dataclass(frozen=True)
class Term:
    """A product.

    Attributes:
        rows: it has a factor that a micro-batch computes of its own rows.
        degree: in how many rows there are, as numbers of the step say it; ``count``: what these numbers divide by.
        factors: sums over micro-batches, or functions of them, by key, and their powers.
        once: a value that is the same for all micro-batches, which one of them adds.
    """

    rows: bool = False
    degree: float = 0.0
    count: float = 1.0
    factors: tuple[tuple[Key, float], ...] = ()
    once: bool = False

    @property
    def plain(self) -> bool:
        """Whether nothing of it crosses micro-batches, or depends on how many there are."""
        return not (self.degree or self.factors or self.once)

    def times(self, other: Term, power: float = 1.0) -> Term:
        """The product with a power of another term."""
        powers = dict(self.factors)
        for key, p in other.factors:
            powers[key] = powers.get(key, 0.0) + power * p
        factors = tuple(sorted(((k, p) for k, p in powers.items() if p), key=repr))
        return Term(
            self.rows or other.rows, self.degree + power * other.degree, self.count * other.count**power, factors,
            self.once or other.once,
        )  # fmt: skip


@dataclass(frozen=True)
class Mixed:
    """What is no sum of products: the node that mixes micro-batches, and how it does."""

    node: fx.Node
    how: str


Terms = frozenset[Term] | Mixed
SAME, ROWS = frozenset({Term()}), frozenset({Term(rows=True)})


@dataclass(frozen=True)
class MicroBatch:
    """A forward as one micro-batch computes it.

    Attributes:
        graph, loss: what was recorded, and the node that is the loss.
        batch: inputs that hold rows, or numbers, of a batch.
        constants: values of inputs that are the same always.
        names: node to the captured one whose value it is.
        given: captured node to the nodes of the values that it is given, and whether these have a dim of rows.
        by_row: captured nodes whose values have a dim of rows.
        differentiated: captured node and what it is given, where gradients go through that.
        degrees: captured node to the power of how many rows there are, with which it multiplies.
        row_counts: captured nodes that give how many rows there are, whatever the batch, to that number.
        random: captured nodes that draw numbers.
        ops: captured nodes to what they call.
    """

    graph: fx.Graph
    loss: fx.Node
    batch: frozenset[fx.Node]
    constants: Mapping[fx.Node, torch.Tensor]
    names: Mapping[fx.Node, str]
    given: Mapping[str, tuple[tuple[fx.Node, bool], ...]]
    by_row: frozenset[str]
    differentiated: Mapping[tuple[str, fx.Node], bool]
    degrees: Mapping[str, int] = field(default_factory=dict)
    row_counts: Mapping[str, float] = field(default_factory=dict)
    random: frozenset[str] = frozenset()
    ops: Mapping[str, str] = field(default_factory=dict)

    def op(self, name: str) -> str:
        """What a captured node calls."""
        return self.ops.get(name, name)


class LossTerms:
    """The terms of each value of a recording that the loss needs."""

    def __init__(self, recording: MicroBatch, hint: str) -> None:
        self.recording, self.hint = recording, hint
        self.known: dict[fx.Node, Terms] = {}
        self.keys: dict[fx.Node, Key] = {}
        self.numbered: dict[tuple[Any, ...], Key] = {}
        self.sums: dict[Key, fx.Node] = {}  # all-reduces over micro-batches
        self.alike: dict[Key, list[fx.Node]] = {}  # all-reduces of equal sums
        self.functions: dict[Key, fx.Node] = {}  # of them
        self.divides: dict[Key, fx.Node] = {}  # where the user's code first divides by it
        self.scaled: set[str] = set()  # captured nodes whose numbers were met
        needed = ancestors([recording.loss])
        for node in recording.graph.nodes:
            if node in needed:
                self.known[node] = self._added_up(node, self._terms(node))
        missed = {n for n in recording.degrees if n not in self.scaled}
        for node in needed if isinstance(self.loss, frozenset) else ():
            if info_of(node).source in missed:
                raise self.refused(node, f"{target_name(node.target)} uses how many rows the batch has")

    @property
    def loss(self) -> Terms:
        """Those of the loss."""
        return self.known[self.recording.loss]

    def refused(self, node: fx.Node, why: str) -> PassError:
        """The error of a loss that is no weighted mean, with the line that makes it so."""
        where = info_of(node).line or f"%{node.name}"
        return PassError(f"{where}: {why}: the loss is no weighted mean of those of micro-batches; {self.hint}")

    # -- one node ---------------------------------------------------------------------------------------

    def _terms(self, node: fx.Node) -> Terms:
        if node.op == "placeholder":
            return ROWS if node in self.recording.batch else SAME
        rows = self.recording.row_counts.get(self.recording.names.get(node, ""))
        if rows is not None:
            return frozenset({Term(degree=1.0, count=1 / rows)})
        given = {n: self.known[n] for n in node.all_input_nodes}
        mixed = next((t for t in given.values() if isinstance(t, Mixed)), None)
        if mixed is not None:
            return mixed
        of: dict[fx.Node, frozenset[Term]] = given  # type: ignore[assignment]
        if node.target is KEEP_ONE.default:
            return frozenset(replace(t, once=not t.rows) for t in of[node.args[0]])  # type: ignore[index]
        if node.target in COLLECTIVES:
            return self._crossing(node, of)
        by = self._number(node)
        if by is not None:
            return frozenset(t.times(by) for t in of[node.all_input_nodes[0]])
        if all(t.plain for ts in of.values() for t in ts):
            return ROWS if any(t.rows for ts in of.values() for t in ts) else SAME
        return self._product(node, of)

    def _added_up(self, node: fx.Node, terms: Terms) -> Terms:
        """What is the same for all rows and is added up over them is so many times as much."""
        name = self.recording.names.get(node)
        if name is None or name in self.recording.by_row or isinstance(terms, Mixed):
            return terms
        for x, by_row in self.recording.given.get(name, ()):
            known = self.known.get(x)
            if by_row and isinstance(known, frozenset) and any(not t.rows and not t.plain for t in known):
                crossed = [t for t in terms if not t.rows and not t.plain]
                if crossed:
                    return self._mixed(node, crossed)
        return terms

    def _crossing(self, node: fx.Node, of: Mapping[fx.Node, frozenset[Term]]) -> Terms:
        (x,) = node.all_input_nodes[:1]
        if not any(t.rows or t.factors for t in of[x]):
            return of[x]  # the same everywhere, brought together again
        if not is_sum(node) or COLLECTIVES[node.target].scatters or node.args[1] != "sum":
            return Mixed(node, self._how(node))
        key = ("sum over micro-batches", self.key(x))
        self.sums.setdefault(key, node)
        self.alike.setdefault(key, []).append(node)
        return frozenset({Term(factors=((key, 1.0),))})

    def _how(self, node: fx.Node) -> str:
        return (
            "reduces over all rows of the batch"
            if COLLECTIVES[node.target].reduces
            else "reads rows of other micro-batches"
        )

    def _number(self, node: fx.Node) -> Term | None:
        """The factor of a node that multiplies with a number of rows."""
        degree = self.recording.degrees.get(info_of(node).source)
        if not degree or node.target not in _TIMES | _OVER or len(node.args) != 2:
            return None
        by = node.args[1]
        if isinstance(by, bool) or not isinstance(by, int | float) or not isinstance(node.args[0], fx.Node):
            return None
        self.scaled.add(info_of(node).source)
        # What it divides by with the rows of one micro-batch; these are two.
        count = float(abs(by)) if node.target in _OVER else 1 / float(abs(by))
        return Term(degree=degree, count=count * 2.0**degree)

    def _product(self, node: fx.Node, of: Mapping[fx.Node, frozenset[Term]]) -> Terms:
        """Of an op some of whose inputs hold what crossed micro-batches."""
        if node.target in _SAME_IF_FINITE and not checked_value(node).shape:
            return of[node.all_input_nodes[0]]
        if node.target in _CASTS and checked_value(node).dtype.is_floating_point:
            return of[node.all_input_nodes[0]]
        if node.target in _OVER | _POWERS.keys() | {aten.pow.Tensor_Scalar}:
            return self._power(node, of)
        shifted = node.target in _PLUS and len(node.all_input_nodes) == 1  # by a number
        if shifted:
            return of[node.all_input_nodes[0]] | SAME
        products: list[frozenset[Term]] = []
        used: list[frozenset[fx.Node]] = []
        left = {n for n, ts in of.items() if not all(t.plain for t in ts)}
        for group in linear_in(node):
            if left & group:
                products.append(frozenset(t for n in group for t in of[n]))
                used.append(group)
                left -= group
        if left:
            return self._function(node, of)
        members = set().union(*used)
        rows = any(t.rows for n, ts in of.items() if n not in members for t in ts)
        made = frozenset({Term(rows=rows)})
        for terms in products:
            made = frozenset(a.times(b) for a in made for b in terms)
        return made

    def _power(self, node: fx.Node, of: Mapping[fx.Node, frozenset[Term]]) -> Terms:
        """A division, or a power with a number."""
        power = -1.0
        target: Any = node.target
        x: Any = node.args[0]
        over: Any = node.args[1] if len(node.args) > 1 else None
        if node.target in _OVER:
            if not isinstance(over, fx.Node):
                return of[x] if node.kwargs.get("rounding_mode") is None else self._function(node, of)
            below, above = of[over], of[x] if isinstance(x, fx.Node) else SAME
            if node.kwargs.get("rounding_mode") is not None:
                return self._function(node, of)
        else:
            below, above, over = of[x], SAME, x
            exponent: Any = node.args[1] if node.target is aten.pow.Tensor_Scalar else _POWERS[target]
            power = float(exponent)
        if all(t.plain for t in below):
            rows = any(t.rows for t in below)
            return frozenset(replace(t, rows=t.rows or rows) for t in above)
        if any(t.rows or t.once for t in below):
            return self._function(node, of)
        if len(below) > 1:
            made = self._function(over, {over: below})
            if isinstance(made, Mixed):
                return made
            below = made
        (one,) = below
        for key, _ in one.factors:
            self.divides.setdefault(key, node)
        return frozenset(t.times(one, power) for t in above)

    def _function(self, node: fx.Node, of: Mapping[fx.Node, frozenset[Term]]) -> Terms:
        """Of what crossed micro-batches, and numbers, alone: by itself one factor; else rows are mixed."""
        crossed = [t for ts in of.values() for t in ts if not t.plain]
        if any(t.rows or t.once for ts in of.values() for t in ts) or any(t.degree for t in crossed):
            return self._mixed(node, crossed)
        key = ("function of sums", self.key(node))
        self.functions.setdefault(key, node)
        return frozenset({Term(factors=((key, 1.0),))})

    def _mixed(self, node: fx.Node, crossed: Iterable[Term]) -> Mixed:
        if any(t.once for t in crossed) and not any(t.factors for t in crossed):
            return Mixed(node, "uses a value that is the same for all micro-batches with their sum")
        if not any(t.factors for t in crossed):
            return Mixed(node, "uses how many rows the batch has")
        at = next((self.sums.get(k, node) for t in crossed for k, _ in t.factors), node)
        return Mixed(at, "uses a sum over the rows of the batch")

    # -- equal values -------------------------------------------------------------------------------------

    def key(self, node: fx.Node) -> Key:
        """Equal for values that are computed alike of the same; how a count is written does not matter."""
        if node not in self.keys:
            for n in sorted(ancestors([node]) - self.keys.keys()):  # in order: graphs are deep
                found = self._key(n)
                self.keys[n] = self.numbered.setdefault(found, len(self.numbered))
        return self.keys[node]

    def _key(self, node: fx.Node) -> tuple[Any, ...]:
        if node.op == "placeholder":
            return ("input", node.name)
        x: Any = node.args[0] if node.args else None
        if isinstance(x, fx.Node) and len(node.args) == 1 and node.target in _SUMS and not node.kwargs.get("dtype"):
            return ("sum", self.key(self._of_same_values(x)))
        if isinstance(x, fx.Node) and node.target in _CASTS and _is_whole(x) and not _is_bool(node):
            return self._key(x)
        if node.target in (aten.ne.Scalar, aten.eq.Scalar):
            return ("ne" if node.target is aten.ne.Scalar else "eq", self.key(self._flat(x)), node.args[1])
        if node.target in (aten.bitwise_not.default, aten.logical_not.default) and _is_bool(x):
            kind, *rest = self._key(x)
            return ({"ne": "eq", "eq": "ne"}[kind], *rest) if kind in ("ne", "eq") else ("not", self.key(x))
        return ("drawn", node.name) if _is_impure(node) else self._exactly(node)

    def _exactly(self, node: fx.Node) -> tuple[Any, ...]:
        read = fx.map_arg((node.args, tuple(sorted(node.kwargs.items()))), self.key)
        return (target_name(node.target), repr(read))

    def _of_same_values(self, node: fx.Node) -> fx.Node:
        """What has the same elements, in whatever order."""
        while True:
            x: Any = node.args[0] if node.args else None
            if not isinstance(x, fx.Node):
                return node
            same = node.target in _FLAT | {aten.permute.default, aten.t.default, aten.transpose.int}
            if not same and not (node.target in _CASTS and _is_whole(x) and not _is_bool(node)):
                return node
            node = x

    def _flat(self, node: fx.Node) -> fx.Node:
        while node.target in _FLAT:
            node = node.args[0]  # type: ignore[assignment]
        return node

    # -- functions of a sum -------------------------------------------------------------------------------

    def function(self, key: Key) -> tuple[fx.Node, tuple[ScalarStep, ...]]:
        """The sum over micro-batches that a factor is computed of, and how."""
        if key in self.sums:
            return self.sums[key], ()
        end = self.functions[key]
        order = [n for n in self.recording.graph.nodes if n in ancestors([end])]
        inside = self._after_sums(order)
        bases = {self.key(n): n for n in order if n.target in COLLECTIVES}
        if len(bases) != 1:
            raise self.refused(end, "it is divided by what several sums over the batch make together")
        place: dict[fx.Node, int] = {}
        steps: list[ScalarStep] = []
        for node in order:
            if node.target in COLLECTIVES:
                place[node] = -1
            elif node in inside:
                if node.target in VIEWS or not isinstance(node.target, compat.OpOverload):
                    place[node] = place[node.all_input_nodes[0]]
                    continue
                read = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self._operand(n, place))
                place[node] = len(steps)
                steps.append(ScalarStep(node.target, read[0], read[1], checked_value(node).dtype))
        return next(iter(bases.values())), tuple(steps)

    def _after_sums(self, order: Iterable[fx.Node]) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for node in order:
            if node.target in COLLECTIVES or not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def _operand(self, node: fx.Node, place: Mapping[fx.Node, int]) -> Any:
        if node in place:
            return Earlier(place[node])
        value = constant(node, self.recording.constants)
        if value is None or value.numel() != 1:
            raise self.refused(node, "it is divided by what is no function of a sum over the batch and of numbers")
        return value.item()


def constant(node: fx.Node, constants: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """What a node gives that follows from numbers and constants alone; None for any other."""
    made: dict[fx.Node, Any] = {}
    for n in sorted(ancestors([node])):
        if n.op == "placeholder":
            if n not in constants:
                return None
            made[n] = constants[n].detach()
        elif n.target in COLLECTIVES or _is_impure(n) or n.target is KEEP_ONE.default:
            return None
        else:
            args, kwargs = fx.map_arg((n.args, n.kwargs), made.__getitem__)
            with torch.no_grad():
                on_cpu = {"device": "cpu"} if "device" in kwargs else {}
                made[n] = n.target(*args, **{**kwargs, **on_cpu})  # type: ignore[operator]
    return made[node] if isinstance(made[node], torch.Tensor) else None


def draws_numbers(node: fx.Node, random: frozenset[str]) -> bool:
    """Whether numbers are drawn for what a node is computed of."""
    return any(info_of(n).source in random or _is_impure(n) for n in ancestors([node]))


def _is_impure(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return draws(node) or bool(schema is not None and schema.is_mutable)


def _is_bool(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype is torch.bool


def _is_whole(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and not (value.dtype.is_floating_point or value.dtype.is_complex)


def is_whole_number(node: fx.Node) -> bool:
    """Whether a value can be nothing else: a sum of casts of whole numbers, say."""
    while not _is_whole(node):
        if node.target not in _SUMS | _CASTS | _FLAT | {aten.sum.dim_IntList}:
            return False
        node = node.all_input_nodes[0]
    return True


def pairs_of(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    """Leaves of two structures of arguments, side by side; other structures are one pair."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list) and len(a) == len(b):
        for x, y in zip(a, b, strict=True):
            yield from pairs_of(x, y)
    elif isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for k in a:
            yield from pairs_of(a[k], b[k])
    else:
        yield a, b


__all__ = [
    "LossTerms",
    "MicroBatch",
    "Mixed",
    "Term",
    "Terms",
    "constant",
    "draws_numbers",
    "is_whole_number",
    "pairs_of",
]  # fmt: skip
