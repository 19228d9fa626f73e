"""The weight of a micro-batch: what its loss is a mean over.

The loss of a whole batch is ``(N1 + N2 + ...) / (D1 + D2 + ...)``, where ``Ni / Di`` is that of a micro-batch: a sum
over its rows by how many of them count, or how much.  What the loss is divided by is found in the program, behind ops
that are linear, so that it does not matter how the mean was written.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
import torch.fx as fx

from ..collective import COLLECTIVES
from ..collective.graph import KEEP_ONE
from ..errors import PassError
from ..program.ir.linear import linear_in, scale_of
from ..program.ir.nodes import (
    VIEWS,
    NodeInfo,
    annotate,
    call,
    checked_value,
    info_of,
    is_sum,
    reduces,
    target_name,
    value_of,
)
from ..program.ir.program import WEIGHT, Program
from ..program.ir.rows import of_twice_the_rows
from ..program.ir.subgraphs import read_instead
from .batch_rows import RANGES, followed

aten = torch.ops.aten

_MEANS = {aten.mean.default, aten.mean.dim}
_SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default}  # of bools as well: no linear op
_ADDS = {aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar}
_NLL = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
_MEAN = 1  # of the argument ``reduction`` of PyTorch's losses
_MOVES = {*VIEWS, *COLLECTIVES, KEEP_ONE.default}
_STACKS = {*VIEWS, aten.stack.default, aten.cat.default} - {aten.expand.default}  # each element is in it once
_DIVIDES = {aten.div.Tensor, aten.div.Scalar}
# Keeps a divisor from zero: what is summed over micro-batches lies below it.
_BOUNDS = {aten.clamp.default, aten.clamp_min.default, aten.add.Tensor, aten.add.Scalar}
_NUMBERS = {"number", "float", "Scalar", "Optional[number]", "Optional[float]"}  # of a schema's arguments
_HINT = "give weighted=False for the plain mean of the micro-steps, or take the step on the whole batch"


@dataclass(frozen=True)
class Weight:
    """What a loss is a mean over.

    Attributes:
        number: how many, as the shapes say; 1 of a sum.  With a divisor: of how many that is the mean.
        mean: shapes say it; else it is a sum, or ``divisor`` says it.
        others: of a loss of several means, of how many more each is, for one of the first.
        divisor: where values say it, the number that the loss is divided by.
        counted: what of it is summed over micro-batches: itself, or what lies below a bound.
    """

    number: float = 1.0
    mean: bool = False
    others: frozenset[float] = frozenset()
    divisor: fx.Node | None = None
    counted: fx.Node | None = None

    @property
    def name(self) -> str:
        """Of its sum: programs of other shapes add to the same if what they are means over has the same ratios."""
        return " ".join([WEIGHT, *(f"{n:.6g}" for n in sorted(self.others))])

    @property
    def weighs(self) -> bool:
        """Whether micro-batches count by it: the losses of others are added up."""
        return self.mean or self.divisor is not None

    def bounds(self) -> list[fx.Node]:
        """What keeps the divisor from zero, in order: the sum of the weights is kept from it so, too."""
        at, found = self.divisor, list[fx.Node]()
        while at is not None and at is not self.counted:
            found += [at] if at.target in _BOUNDS else []
            at = at.all_input_nodes[0]
        return found[::-1]


def weight_of(program: Program, hint: str = _HINT, added_up: bool = False) -> Weight | None:
    """The weight of the micro-batch of a program; None where the loss is that of one rank.

    Args:
        hint: what to do about a loss that is no weighted mean.
        added_up: sums of micro-batches are added up to that of the batch, and not averaged.

    Raises:
        PassError: the loss is no weighted mean over what micro-batches consist of.
    """
    out, loss = next(
        (p for p in zip(program.outputs, program.results, strict=True) if p[0].kind == "loss"), (None, None)
    )
    if out is None or loss is None or out.spec is None:
        return None
    of = _Loss(program, hint, added_up)
    found = of.of(loss)
    if mixed := of.followed.but(of.counted):
        node, how = mixed
        raise PassError(
            f"{_where(node)}: {target_name(node.target)} takes {how}, which micro-batches do not have: the loss is "
            f"no weighted mean of theirs; {hint}"
        )
    of.check_numbers(program)
    return Weight() if found is None else found


class _Loss:
    def __init__(self, program: Program, hint: str, added_up: bool) -> None:
        self.hint, self.followed, self.added_up = hint, followed(program), added_up
        batch = {n for n, i in zip(program.placeholders, program.inputs, strict=True) if i.kind == "batch"}
        self.counted: set[fx.Node] = set()  # what was looked at: terms of the loss and what it is divided by
        self.rows = max((s[0] for n in batch if (s := _shape(n))), default=0)
        self.twice: dict[str, fx.Node] | None = None  # by name, of the step for twice as many rows
        self.scaled: set[fx.Node] = set()  # by numbers that are known to be sizes, or not
        self.varies = batch  # what a batch decides
        for node in program.graph.nodes:
            if not self.varies.isdisjoint(node.all_input_nodes):
                self.varies.add(node)

    def of(self, node: Any) -> Weight | None:
        """What a term of the loss is a mean over; None of one that is the same for all batches."""
        if not isinstance(node, fx.Node) or node not in self.varies:
            return None
        given = [n for n in node.all_input_nodes if n in self.varies]
        first, single = given[0] if given else node, not checked_value(node).shape if value_of(node) else False
        loss = first if node.target is operator.getitem else node
        self.counted |= {node, loss}
        if node.target in _DIVIDES and isinstance(node.args[1], fx.Node) and node.args[1] in self.varies:
            return self._divided(node, node.args[0], node.args[1])
        if node.target in _ADDS and (len(node.all_input_nodes) == 2 or single):
            return self._both(node, *(self.of(a) for a in node.args[:2]))
        by = scale_of(node)
        if by is not None:
            found = self.of(first)
            if found is None or single:
                return found if found is None else self._scaled(node, found, by)
            if node.target not in _DIVIDES or found.weighs or not self._over_rows(node):
                return found
            self.scaled.add(node)  # a mean over rows of each column
            return Weight(1 / abs(by), mean=True)
        reduction = _argument(loss, "reduction")
        if single and reduction is not None:
            return self._reduced(loss, reduction)
        if node.target in _MEANS and single and not _are_terms(first, self.varies):
            return Weight(_count(first), mean=True)
        if node.target in _MEANS and self._over_rows(node):
            return Weight(_count(first) / _count(node), mean=True)
        averaged = node.target in _MEANS and single
        moved = node.target in _MOVES and (is_sum(node) or not reduces(node))
        if averaged or moved or node.target in _SUMS or frozenset(given) in linear_in(node):
            found = reduce(partial(self._both, node), map(self.of, given))
            if averaged and found is not None and found.weighs:
                return replace(found, number=found.number * _count(first))
            kept = found is None or single or found.mean or _are_terms(node, self.varies)
            return found if kept else replace(found, number=1.0, mean=False)  # type: ignore[type-var]
        self.counted -= {node, loss}  # what it does with rows is no part of a sum
        if single and given:  # the rules tell what is a sum over rows: this is none
            while node.target in _MOVES:  # what of an op of the user's goes over ranks
                (node,) = node.all_input_nodes
            raise self._refused(node, f"{target_name(node.target)} over the batch")
        return Weight()

    def _reduced(self, loss: fx.Node, reduction: Any) -> Weight:
        """A loss of PyTorch's that reduces rows itself: a sum, or a mean over what it is given."""
        if reduction != _MEAN:
            return Weight()
        if loss.target in _NLL:
            weight = next((u for u in loss.users if u.target is operator.getitem and u.args[1] == 1), None)
            return Weight() if weight is None else Weight(divisor=weight, counted=weight)
        return Weight(max(_count(n) for n in loss.all_input_nodes if n in self.varies), mean=True)

    def _scaled(self, node: fx.Node, found: Weight, by: float) -> Weight:
        """A term times a number.  A sum that is divided by how many rows, or elements, it has is a mean."""
        source = info_of(node).source
        by_rule = bool(source) and source == info_of(node.all_input_nodes[0]).source
        if found.weighs:
            kept = replace(found, number=found.number / abs(by))
            if by_rule:  # a mean over a rank's part of the rows, times what part of all they are
                self.scaled.add(node)
                return kept
            return self._times_rows(node, found) if self._may_grow(by) and self._grows(node, by, 2.0) else kept
        if node.target in _DIVIDES and by_rule:
            self.scaled.add(node)
            return replace(found, number=1 / abs(by), mean=True)  # a mean of PyTorch's: its rule divides a sum
        grows, count = self._grows(node, by, 0.5), 1 / abs(by)
        if grows is not None:
            return replace(found, number=count, mean=True) if grows else found
        rows = self._summed(node)
        if rows is None or abs(count - round(count)) > 1e-9 * count or round(count) % rows[0] or rows[1] % round(count):
            return found
        if node.target not in _DIVIDES:
            raise PassError(
                f"{_where(node)}: a sum over the batch times 1/{round(count)}, which may be a number or how many rows "
                f"there are: write .mean(), or divide by the number; {self.hint}"
            )
        return replace(found, number=float(round(count)), mean=True)

    def _over_rows(self, node: fx.Node) -> bool:
        """Whether a mean of the user's, of which this is the end, is one over rows."""
        source, at, rows = info_of(node).source, node, self.followed.rows
        while at is node or info_of(at).source == source:
            given = [n for n in at.all_input_nodes if n in self.varies]
            if not given:
                return False
            at = given[0]
        return bool(source) and at in rows and node not in rows

    def _may_grow(self, by: float) -> bool:
        """Whether a number is a multiple of how many rows there are."""
        return bool(self.rows) and float(abs(by) / self.rows).is_integer()

    def _grows(self, node: fx.Node, by: float, ratio: float) -> bool | None:
        """Whether the number that a term is scaled by depends on how many rows there are, or is the user's; None where
        nobody knows.  The same step for twice as many rows tells.

        Args:
            ratio: of the number there to the one here, if it does.

        Raises:
            PassError: it depends on them otherwise.
        """
        if self.twice is None:
            made = of_twice_the_rows()
            self.twice = {} if made is None else {n.name: n for n in made.graph.nodes}
        self.scaled.add(node)
        other = self.twice.get(node.name)
        more = None if other is None or other.target is not node.target else scale_of(other)
        if more is None:
            return None
        if math.isclose(more, by) or math.isclose(more, ratio * by):
            return not math.isclose(more, by)
        raise self._refused(
            node, f"a term of the loss is scaled by {abs(by):g}, and by {abs(more):g} for twice as many rows"
        )

    def check_numbers(self, program: Program) -> None:
        """Raises PassError for a number anywhere in the forward that depends on how many rows there are: micro-batches
        have others.  Sizes of what is made and viewed may."""
        made = of_twice_the_rows()
        for name, there in {} if made is None else made.constants.items():
            here = program.constants.get(name)
            if here is not None and here.shape == there.shape and not torch.equal(here, there):
                node = next((n for n in program.graph.nodes if n.target == name or n.name == name), None)
                raise PassError(f"{'a tensor' if node is None else _where(node)}: {self._by_rows(here, there)}")
        others = _numbers([] if made is None else made.graph.nodes)
        for key, found in _numbers(program.graph.nodes).items():
            for (at, mine), (_, other) in zip(found, others.get(key, []), strict=False):
                if mine != other and at not in self.scaled:
                    raise PassError(f"{_where(at)}: {target_name(at.target)} {self._by_rows(mine, other)}")

    def _by_rows(self, here: Any, there: Any) -> str:
        here, there = (
            ", ".join(f"{x:g}" for x in n) if isinstance(n, tuple) else str(n.tolist()) for n in (here, there)
        )
        return (
            f"takes the number {here}, and {there} for twice as many rows, which micro-batches have others of: the "
            f"loss is no weighted mean of theirs; {self.hint}"
        )

    def _times_rows(self, node: fx.Node, found: Weight) -> Weight:
        """A mean times how many rows it is over is a sum."""
        if found.divisor is None and not found.others:
            return Weight()
        raise self._refused(node, "a mean over what the values of a batch say is multiplied by how many rows there are")

    def _summed(self, node: fx.Node) -> tuple[int, int] | None:
        """How many rows, and elements, on all ranks, a sum is over that was scaled; None of one row, or none."""
        at = node
        while info_of(at).spec is None or _are_terms(
            at, self.varies
        ):  # to what a value of the user's program was summed
            given = [n for n in at.all_input_nodes if n in self.varies]
            if not given:
                return None
            at = given[0]
        shape = _shape(at)
        return (shape[0], math.prod(shape)) if shape and shape[0] > 1 else None

    def _divided(self, node: fx.Node, x: Any, by: fx.Node) -> Weight | None:
        value, inner, source = checked_value(by), self.of(x), info_of(node).source
        if value.shape and math.prod(value.shape) != 1:
            return Weight()  # each row by a number of its own
        if inner is not None and inner.divisor is not None:
            raise self._refused(node, "a mean over what the values of a batch say is divided by such a number again")
        counted = at = by
        while at.target in _BOUNDS | VIEWS | {aten._to_copy.default} and len(at.all_input_nodes) == 1:
            bound, at = at.target in _BOUNDS, at.all_input_nodes[0]
            self.counted.add(at)
            counted = at if bound else counted
        below = self.of(at)
        self.counted |= {by, at}
        if inner is None or below is None or below.divisor is not None or below.mean is not inner.mean:
            raise self._refused(node, "what is divided by a sum over the batch is none: divide a sum by a sum")
        backward = [n for n in node.graph.nodes if info_of(n).role == "backward" and info_of(n).source == source]
        if source and not {x, node}.isdisjoint(i for n in backward for i in n.all_input_nodes):
            raise self._refused(node, "the gradient goes through what a sum over the batch is divided by, too")
        if below.mean and counted is not by:
            raise self._refused(node, "a mean over the batch is divided by one that is kept from zero: divide sums")
        return Weight(number=below.number if below.mean else 1.0, divisor=by, counted=counted)

    def _refused(self, node: fx.Node, why: str) -> PassError:
        """The error of a loss that is no weighted mean, with the line that makes it so."""
        return PassError(f"{_where(node)}: {why}: the loss is no weighted mean of those of micro-batches; {self.hint}")

    def _both(self, node: fx.Node, a: Weight | None, b: Weight | None) -> Weight | None:
        if a is None or b is None:
            found = b if a is None else a
            if self.added_up and found is not None and not found.weighs:
                raise PassError(
                    f"{_where(node)}: what is the same for all rows, a penalty say, is added to a sum over the batch, "
                    f"which micro-batches would add each: the loss is no weighted mean of theirs; {self.hint}"
                )
            return found
        if a.divisor is None and b.divisor is None and a.mean is b.mean:
            ratio = {b.number / a.number, *(n * b.number / a.number for n in b.others)} - {1.0}
            return replace(a, others=frozenset(round(n, 9) for n in {*a.others, *ratio}))
        if (
            a.divisor is not None
            and b.divisor is not None
            and (_same(a.divisor, b.divisor) or _labels(a.divisor) == (_labels(b.divisor) or ()))
        ):
            return a
        if a.weighs is not b.weighs:
            raise PassError(
                f"{_where(node)}: a sum over the batch and a mean over it are added, so the loss is no weighted mean "
                f"of those of micro-batches; {self.hint}"
            )
        raise PassError(
            f"{_where(node)}: two means over different numbers of things are added, of which the values of a batch say "
            f"how many: no one weight of a micro-batch is that of both; {self.hint}"
        )


def _numbers(nodes: Iterable[fx.Node]) -> dict[Any, list[tuple[fx.Node, tuple[Any, ...]]]]:
    """The numbers that ops of the forward compute with, by the op of the user's program that they serve."""
    found: dict[Any, list[tuple[fx.Node, tuple[Any, ...]]]] = {}
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or info_of(node).role != "forward" or schema.name in RANGES:
            continue
        if not any(v.dtype.is_floating_point for v in info_of(node).values):  # places of rows, which a rule computes
            continue
        kinds = {a.name for a in schema.arguments if str(a.type) in _NUMBERS}
        given = [*zip([a.name for a in schema.arguments], node.args, strict=False), *node.kwargs.items()]
        numbers = tuple(v for k, v in given if isinstance(v, int | float) and k in kinds)
        numbers += tuple(v for k, v in given if isinstance(v, int | float) and k == "other" and k not in kinds)
        if numbers:
            found.setdefault((info_of(node).source, node.target), []).append((node, numbers))
    return found


def _count(node: fx.Node) -> float:
    """How many elements a value has on this rank, which are what it takes the mean over."""
    return float(math.prod(checked_value(node).shape))


def _shape(node: fx.Node) -> tuple[int, ...]:
    """The global shape of a value, which all ranks know alike; that of the local one where no spec says it."""
    spec = info_of(node).spec
    return tuple(spec.shape if spec is not None else checked_value(node).shape)


def _are_terms(node: fx.Node, varies: Collection[fx.Node]) -> bool:
    """Whether a value consists of numbers that were reduced each by itself: it has no rows."""
    if value_of(node) is None:
        return False
    given = [n for n in node.all_input_nodes if n in varies]
    return not checked_value(node).shape or (
        node.target in _STACKS and bool(given) and all(_are_terms(n, varies) for n in given)
    )


def _same(a: Any, b: Any) -> bool:
    """Whether two nodes compute the same of the same."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
        return bool(a == b)
    if isinstance(a.target, str) or a.target is not b.target or a.kwargs != b.kwargs or len(a.args) != len(b.args):
        return False
    return all(_same(x, y) for x, y in zip(a.args, b.args, strict=True))


def _labels(node: fx.Node) -> tuple[fx.Node, Any] | None:
    """The labels of which a node counts those that are not ignored, and which are; None of any other node.

    PyTorch's smoothed loss counts them twice: in the kernel of its one term, and by a mask for the other.
    """
    if node.target is operator.getitem:
        loss: Any = node.args[0]
        counts = loss.target in _NLL and node.args[1] == 1 and _argument(loss, "weight") is None
        return (_seen(loss.args[1]), _argument(loss, "ignore_index")) if counts else None
    if node.target not in _SUMS:
        return None
    at, kept = _seen(node.all_input_nodes[0]), aten.ne.Scalar
    if at.target in (aten.bitwise_not.default, aten.logical_not.default):
        at, kept = at.all_input_nodes[0], aten.eq.Scalar
    return (_seen(at.args[0]), at.args[1]) if at.target is kept else None


def _seen(node: Any) -> fx.Node:
    """What a node is a view or a cast of."""
    while node.op == "call_function" and node.target in VIEWS | {aten._to_copy.default}:
        node = node.all_input_nodes[0]
    found: fx.Node = node
    return found


def _argument(node: fx.Node, name: str) -> Any:
    """The argument of an op by its name, its default where none is given; None where it has no such argument."""
    schema = getattr(node.target, "_schema", None)
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def _where(node: fx.Node) -> str:
    return info_of(node).line or f"%{node.name}"


def keep_from_zero(divisor: fx.Node, storage: int) -> None:
    """Let a backward divide by one in place of a zero: a micro-batch of which nothing counts has no gradient."""
    later = [u for u in divisor.users if info_of(u).role in ("backward", "recomputation")]
    read_instead(later, {divisor: one_for_zero(divisor, storage, info_of(divisor))})


def one_for_zero(node: fx.Node, storage: int, info: NodeInfo) -> fx.Node:
    """A number, or 1 where it is zero; takes two storages."""
    graph, value = node.graph, checked_value(node)
    with graph.inserting_after(node):
        zero = call(graph, aten.eq.Scalar, (node, 0), info.beside(value.fresh(storage, torch.bool)))
    with graph.inserting_after(zero):
        made = call(graph, aten.masked_fill.Scalar, (node, zero, 1), info.beside(value.fresh(storage + 1)))
    annotate(made, role=info.role)
    return made


__all__ = ["Weight", "keep_from_zero", "one_for_zero", "weight_of"]
