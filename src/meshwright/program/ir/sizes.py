"""Sizes as inputs of a program: one program in place of those that differ in the sizes of their batches alone.

Programs of a few batches are laid side by side, node by node.  What of their numbers is not the same depends on the
sizes: a polynomial of small degree, with whole coefficients, is fitted to it exactly, and one program more than it has
coefficients must agree.  A dim of ``c * n + d`` elements that is cut into ``k`` parts has parts of ``c / k * n`` and
something: that is whole only where ``k`` divides ``c``, and then no rank's part depends on a remainder of ``n``.  Where
it is not, sizes of one remainder are looked at alone, as multiples of a step.  What the user's own code does with sizes
``capture.conditions`` knows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.fx as fx

from ...layout import Spec
from .nodes import Value, info_of
from .program import Input, Output, Program
from .strides import Strides, is_dense

Tensor = torch.Tensor
Exponents = tuple[int, ...]
Variables = tuple[int, ...]
End = TypeVar("End", Input, Output)


class Unlike(Exception):
    """Programs differ in more than sizes; says in what."""


class Size(int):
    """A number that depends on sizes; as a number, what it is in the first program.

    Attributes:
        terms: exponents of the variables to a coefficient; the variables are 0 in the first program.
    """

    terms: Mapping[Exponents, int]

    def __new__(cls, terms: Mapping[Exponents, int]) -> Size:
        """Of a polynomial."""
        made = super().__new__(cls, sum(c for e, c in terms.items() if not any(e)))
        made.terms = terms
        return made

    def at(self, variables: Variables) -> int:
        """What it is at these variables."""
        return sum(c * math.prod(map(pow, variables, e)) for e, c in self.terms.items())

    def source(self) -> str:
        """As Python, of ``u0``, ``u1``, ..."""
        of = ["*".join([str(c), *(f"u{i}**{n}" for i, n in enumerate(e) if n)]) for e, c in self.terms.items()]
        return f"({'+'.join(of).replace('**1', '')})"

    def __reduce__(self) -> Any:
        return Size, (dict(self.terms),)


def times(a: int, b: int) -> int:
    """The product of two numbers, of which either may depend on sizes."""
    if not isinstance(a, Size):
        a, b = b, a
    if not isinstance(a, Size):
        return a * b
    n = len(next(iter(a.terms)))
    others = b.terms if isinstance(b, Size) else {(0,) * n: int(b)}
    made: dict[Exponents, int] = {}
    for (e, c), (f, d) in itertools.product(a.terms.items(), others.items()):
        both = tuple(map(sum, zip(e, f, strict=True)))
        made[both] = made.get(both, 0) + c * d
    return Size(made)


def at(given: Any, variables: Variables) -> Any:
    """Numbers, or tuples of them, at these variables."""
    if isinstance(given, tuple):
        return tuple([at(x, variables) for x in given])
    return given.at(variables) if isinstance(given, Size) else given


def value_at(value: Value, variables: Variables) -> Value:
    """What a node gives at these variables."""
    shape, given = at(value.shape, variables), at(value.given, variables)
    return replace(value, shape=shape, given=given) if variables else value


class Fit:
    """Numbers of several programs as polynomials.

    Args:
        points: the variables of each program; those of the first are 0.
    """

    def __init__(self, points: Sequence[Variables]) -> None:
        n, few = len(points[0]), len(points) - 1  # one more checks
        squares = [e for e in itertools.product(range(3), repeat=n) if max(e) == 2]
        flat = list(itertools.product(range(2), repeat=n))
        self.exponents = flat + squares if few >= len(flat) + len(squares) else flat
        rows = [[math.prod(map(pow, p, e)) for e in self.exponents] for p in points]
        self.matrix = np.array(rows, dtype=np.float64)
        if few < len(self.exponents) or np.linalg.matrix_rank(self.matrix) < len(self.exponents):
            raise Unlike("more batches of other sizes are needed")
        self.points, self._known = points, dict[tuple[int, ...], int]()

    def number(self, values: tuple[int, ...]) -> int:
        """One number for those of all programs.

        Raises Unlike: no polynomial gives them.
        """
        if len(set(values)) == 1:
            return values[0]
        found = self._known.get(values)
        if found is None:
            solved = np.linalg.lstsq(self.matrix, np.array(values, dtype=np.float64), rcond=None)[0]
            terms = {e: round(float(c)) for e, c in zip(self.exponents, solved, strict=True)}
            made = Size({e: c for e, c in terms.items() if c or not any(e)})
            if any(made.at(p) != v for p, v in zip(self.points, values, strict=True)):
                raise Unlike(f"{values} is no polynomial of the sizes")
            found = self._known[values] = made
        return found

    def numbers(self, values: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """One tuple for those of all programs."""
        if len({len(v) for v in values}) > 1:
            raise Unlike("tensors differ in their number of dims")
        return tuple([self.number(v) for v in zip(*values, strict=True)])

    def strides(self, shape: tuple[int, ...], values: Sequence[Value]) -> Strides | None:
        """Strides of a value, as the product of sizes where it has no gaps."""
        given = [v.strides for v in values]
        orders = {tuple(sorted(range(len(s)), key=lambda d, s=s: (s[d], -d))) for s in given}  # type: ignore[misc]
        if len(orders) > 1 or not all(is_dense(v.shape, s) for v, s in zip(values, given, strict=True)):
            return self.numbers(given)
        made, step = [0] * len(shape), 1
        for d in next(iter(orders)):
            made[d], step = step, times(step, shape[d] or 1)
        # What is empty passes for dense, also where it was cut out of something.
        cut = 0 in shape and [at(tuple(made), p) for p in self.points] != given
        return self.numbers(given) if cut else tuple(made)


@dataclass(frozen=True)
class ManySizes:
    """A program for batches of many sizes.

    Attributes:
        program: its numbers are :class:`Size` where they depend on them; specs are those of the first program.
        inputs, outputs: global shapes of what goes in and comes out; None where there is no spec.
        parts: the same of the program's parts.
    """

    program: Program
    inputs: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[tuple[int, ...] | None, ...]
    parts: Mapping[str, ManySizes]

    def at(self, variables: Variables) -> Program:
        """For one size, with the graph for all."""
        p = self.program
        inputs = tuple([_with(i, s, variables) for i, s in zip(p.inputs, self.inputs, strict=True)])
        outputs = tuple([_with(o, s, variables) for o, s in zip(p.outputs, self.outputs, strict=True)])
        parts = {name: part.at(variables) for name, part in self.parts.items()}
        return replace(p, inputs=inputs, outputs=outputs, parts=parts)


def _with(given: End, shape: tuple[int, ...] | None, variables: Variables) -> End:
    if shape is None or given.spec is None:
        return given
    return replace(given, spec=given.spec.with_(shape=at(shape, variables)))


def many_sizes(programs: Sequence[Program], fit: Fit) -> ManySizes:
    """The programs of several batches as one.

    Raises Unlike: they differ in more than numbers that follow from the sizes.
    """
    first = programs[0]
    if any(_words(p) != _words(first) for p in programs):
        raise Unlike("inputs, outputs, constants or passes differ")
    inputs, outputs = (
        [_shape([g.spec for g in given], fit) for given in zip(*all_of, strict=True)]
        for all_of in ([p.inputs for p in programs], [p.outputs for p in programs])
    )
    graph = _Together(programs, fit).graph
    parts = {name: many_sizes([p.parts[name] for p in programs], fit) for name in first.parts}
    return ManySizes(replace(first, graph=graph), tuple(inputs), tuple(outputs), parts)


def _words(p: Program) -> Any:
    """What of programs is the same whatever the sizes."""
    named = [(x.name, x.kind, x.spec and x.spec.with_(shape=(2,) * x.spec.ndim)) for x in _ends(p)]
    held = [(n, t.dtype, tuple(t.shape), None if t.numel() > 64 else t.tolist()) for n, t in p.constants.items()]
    return named, held, p.update, p.schedules, list(p.parts), len(p.passes), len(p.graph.nodes)


def _ends(p: Program) -> list[Input | Output]:
    return [*p.inputs, *p.outputs]


def _shape(specs: Sequence[Spec | None], fit: Fit) -> tuple[int, ...] | None:
    return None if specs[0] is None else fit.numbers([s.shape for s in specs if s is not None])


@dataclass
class _Together:
    """The nodes of several programs, side by side."""

    programs: Sequence[Program]
    fit: Fit
    graph: fx.Graph = field(default_factory=fx.Graph)

    def __post_init__(self) -> None:
        self.places: dict[fx.Node, fx.Node] = {}  # of any of the programs
        for nodes in zip(*[p.graph.nodes for p in self.programs], strict=True):
            first = nodes[0]
            if any(n.op != first.op or n.target != first.target for n in nodes):
                raise Unlike(f"%{first.name} is another op")
            args, kwargs = (self.one([getattr(n, what) for n in nodes]) for what in ("args", "kwargs"))
            made = self.graph.create_node(first.op, first.target, args, kwargs, first.name)
            made.meta = {**first.meta, "info": replace(info_of(first), value=self._value(nodes))}
            self.places.update(dict.fromkeys(nodes, made))

    def one(self, given: Sequence[Any]) -> Any:
        """An argument for those of all programs."""
        first = given[0]
        if any(type(x) is not type(first) for x in given):
            raise Unlike("arguments differ in kind")
        if isinstance(first, fx.Node):
            found = {self.places[x] for x in given}
            if len(found) > 1:
                raise Unlike(f"%{first.name} has another place")
            return found.pop()
        if isinstance(first, (list, tuple)):
            if len({len(x) for x in given}) > 1:
                raise Unlike("arguments differ in number")
            return type(first)([self.one(xs) for xs in zip(*given, strict=True)])
        if isinstance(first, dict):
            if any(list(x) != list(first) for x in given):
                raise Unlike("arguments differ in name")
            return {k: self.one([x[k] for x in given]) for k in first}
        if type(first) is int:
            return self.fit.number(tuple(given))
        if any(x is not first and repr(x) != repr(first) for x in given):
            raise Unlike(f"{first!r} and {given[-1]!r}, which is no size")
        return first

    def _value(self, nodes: Sequence[fx.Node]) -> Any:
        values = [info_of(n).value for n in nodes]
        whole = [v for v in values if isinstance(v, Value)]
        if len(whole) < len(values):  # of several tensors, which the runner does not ask for
            return values[0]
        shape = self.fit.numbers([v.shape for v in whole])
        if any(isinstance(n, Size) and min(v.shape[d] for v in whole) < 2 for d, n in enumerate(shape)):
            raise Unlike(f"%{nodes[0].name} has a size of 0 or 1")  # autograd does otherwise there
        if not any(isinstance(n, Size) for n in shape) and len({v.given for v in whole}) == 1:
            return whole[0]
        return replace(whole[0], shape=shape, given=self.fit.strides(shape, whole))


__all__ = ["Fit", "ManySizes", "Size", "Unlike", "Variables", "at", "many_sizes", "value_at"]
