"""The exact optimum of a sum of tables, by eliminating one variable after the other.  Knows only tables.

A problem is a graph: each variable takes one of a few values, each has a price, and so have pairs of values of two
variables that share a table.  Eliminating a variable replaces it, and its tables, by one table over its neighbours:
what it costs at best for each of their values.  Prices are whole numbers, so that ties are the same on every machine;
of equals the first value is taken.

Steps that are alike are done once: tables are interned by their content, and what an elimination gives is remembered
for the tables that went in.  So the layers of a model, which repeat, cost as much as one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError

Prices = NDArray[np.int64]
Choice = NDArray[np.unsignedinteger[Any]]  # the best value of a variable, in as few bytes as its number takes
NEVER = 10**17  # a price that nothing reaches, and sums of tens of which still fit
_MOST = 1 << 26  # entries of a joined table, beyond which elimination is given up
_SMALL = 1 << 22
_REMEMBERED = 1 << 26  # bytes of eliminations that the next problem of the same tables may use
_SLICE = 1 << 15  # entries of a joined table that are summed at one time
Scope = tuple[int, ...]


class Tables:
    """Tables by their content: the same content is the same object."""

    def __init__(self) -> None:
        self._known: dict[Any, Prices] = {}
        self._numbers: dict[int, int] = {}
        self._counter = itertools.count()
        self._lasting: set[int] = set()
        self.eliminated: dict[Any, tuple[Prices, Choice]] = {}

    def intern(self, table: Prices, lasting: bool = False) -> Prices:
        """The table that stands for all with this content.

        Args:
            lasting: it is one of a problem, which :meth:`forget` keeps.
        """
        found = self._interned(table)
        if lasting:
            self._lasting.add(id(found))
        return found

    def forget(self, most: int) -> None:
        """Drop what eliminations gave, where that is more than so many bytes."""
        if sum(least.nbytes + best.nbytes for least, best in self.eliminated.values()) <= most:
            return
        self.eliminated.clear()
        for key, table in list(self._known.items()):
            if id(table) not in self._lasting:
                del self._known[key], self._numbers[id(table)]

    def _interned(self, table: Prices) -> Prices:
        if id(table) in self._numbers:
            return table
        table = np.ascontiguousarray(table)
        key = table.shape, blake2b(table.data, digest_size=16).digest()
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = table
            found.flags.writeable = False
            self._numbers[id(found)] = next(self._counter)
        return found

    def number(self, table: Prices) -> int:
        """Of an interned one."""
        return self._numbers[id(table)]


@dataclass
class Problem:
    """Variables, and the tables that say what their values cost.

    Attributes:
        sizes: of each variable, how many values it has.
        factors: variables in rising order, to the table over them, an axis for each.
        tables: by content.
    """

    sizes: list[int] = field(default_factory=list)
    factors: dict[Scope, Prices] = field(default_factory=dict)
    tables: Tables = field(default_factory=Tables)

    def variable(self, prices: Iterable[int]) -> int:
        """A new variable, from the price of each of its values."""
        table = _whole(np.asarray(list(prices), dtype=np.int64))
        self.sizes.append(len(table))
        self.factors[len(self.sizes) - 1,] = self.tables.intern(table, lasting=True)
        return len(self.sizes) - 1

    def add(self, scope: Sequence[int], table: Prices) -> None:
        """Add a table over variables, an axis for each in the given order.

        Raises:
            PlanError: If a table does not fit the variables.
        """
        if table.shape != tuple(self.sizes[v] for v in scope) or len({*scope}) != len(scope):
            raise PlanError(f"solve: a table of {table.shape} over variables {tuple(scope)}: the shapes differ")
        order = sorted(range(len(scope)), key=lambda i: scope[i])
        key, made = tuple(scope[i] for i in order), _whole(table.transpose(order))
        known = self.factors.get(key)
        total = made if known is None else np.minimum(known + made, NEVER)
        self.factors[key] = self.tables.intern(total, lasting=True)

    def price(self, values: Sequence[int]) -> int:
        """What an assignment costs: a value for each variable."""
        return sum(int(t[tuple(values[v] for v in scope)]) for scope, t in self.factors.items())

    def pinned(self, values: Mapping[int, Iterable[int]]) -> Problem:
        """The same problem in which variables take only some of their values."""
        made = Problem(self.sizes, dict(self.factors), self.tables)
        for v, allowed in values.items():
            more = np.full(self.sizes[v], NEVER, dtype=np.int64)
            more[list(allowed)] = 0
            made.add((v,), more)
        return made

    def restricted(self, values: Mapping[int, Sequence[int]]) -> Problem:
        """The problem in which variables have only some of their values, numbered anew; tables become smaller."""
        sizes = [len(values[v]) if v in values else n for v, n in enumerate(self.sizes)]
        made = Problem(sizes, dict(self.factors), self.tables)
        for scope, table in self.factors.items():
            if any(v in values for v in scope):
                picks = [values.get(v, range(self.sizes[v])) for v in scope]
                made.factors[scope] = self.tables.intern(table[np.ix_(*picks)])
        return made


@dataclass(frozen=True)
class Optimum:
    """The cheapest assignment.

    Attributes:
        price: of all tables together.
        values: of each variable.
        steps: how many eliminations there were; ``distinct``: how many were computed.
        exact: False: the cheapest that was found, where tables to be joined were too large.
    """

    price: int
    values: tuple[int, ...]
    steps: int
    distinct: int
    exact: bool = True


class TooWide(PlanError):
    """Tables that have to be joined are too large."""


def solve(problem: Problem, most: int | None = None) -> Optimum:
    """The cheapest assignment, exactly.

    Args:
        most: entries of a table that is joined; None: as many as fit in half a gigabyte.

    Raises:
        TooWide: If tables that have to be joined are too large.
        PlanError: If no assignment costs less than ``NEVER``.
    """
    run = Elimination(problem, most)
    while run.left:
        run.eliminate(run.next())
    values = run.values()
    problem.tables.forget(_REMEMBERED)
    price = problem.price(values)
    if price >= NEVER:
        raise PlanError("solve: no assignment is possible: some variable has no value that fits the others")
    return Optimum(price, values, len(run.trail), run.computed)


class Elimination:
    """Variables that are eliminated one after the other, and how each is found again."""

    def __init__(self, problem: Problem, most: int | None = None) -> None:
        self.problem, self.tables, self.most = problem, problem.tables, _MOST if most is None else most
        self.of: list[dict[Scope, Prices]] = [{} for _ in problem.sizes]
        self.left = dict.fromkeys(v for v, n in enumerate(problem.sizes) if n > 1)
        for scope, table in problem.factors.items():
            self._add(scope, table)
        self.trail: list[tuple[int, Scope, Choice]] = []
        self.computed = 0
        self._heap: dict[int, dict[int, None]] = {}
        self._rank: dict[int, int] = {}
        for v in self.left:
            self._note(v)

    def _add(self, scope: Scope, table: Prices) -> None:
        """Take a table over what is left of its variables: one with a single value would join all its neighbours."""
        rest = tuple(v for v in scope if self.problem.sizes[v] > 1)
        if len(rest) < len(scope):
            table = self.tables.intern(table.reshape([self.problem.sizes[v] for v in rest]))
        if rest:
            known = self.of[rest[0]].get(rest)
            if known is not None:
                table = self.tables.intern(np.minimum(known + table, NEVER))
            for v in rest:
                self.of[v][rest] = table

    def _neighbours(self, v: int) -> Scope:
        return tuple(sorted({w for scope in self.of[v] for w in scope if w != v}))

    def _note(self, v: int) -> None:
        """Keep variables by how large a table their elimination gives.

        Those with two neighbours or fewer, whose elimination adds no neighbours to others, are taken in rounds: a chain
        is halved by each, and halves that are alike are computed once.
        """
        around = self._neighbours(v)
        size = math.prod((self.problem.sizes[w] for w in around), start=self.problem.sizes[v])
        old = self._rank.get(v)
        if old is not None:
            self._heap[old].pop(v)
        rank = 0 if len(around) < 3 and size <= _SMALL else size.bit_length()
        self._rank[v] = rank
        self._heap.setdefault(rank, {})[v] = None

    def entries(self, v: int) -> int:
        """Of the table that the elimination of a variable joins."""
        return math.prod((self.problem.sizes[w] for w in self._neighbours(v)), start=self.problem.sizes[v])

    def widest(self, v: int) -> int:
        """The neighbour of a variable, or itself, that most others share tables with."""
        return max((v, *self._neighbours(v)), key=lambda w: (len(self._neighbours(w)), self.problem.sizes[w], -w))

    def next(self) -> int:
        """The variable to be eliminated next."""
        return next(iter(self._heap[min(r for r, some in self._heap.items() if some)]))

    def eliminate(self, v: int) -> None:
        """Replace a variable by a table over its neighbours."""
        around = self._neighbours(v)
        scope = (*around, v)
        if self.entries(v) > self.most:
            raise TooWide(
                f"solve: {len(around)} neighbours of a variable would be joined in one table of more than {self.most} "
                "entries. Take fewer axes, or fix= some layouts."
            )
        place = {w: i for i, w in enumerate(scope)}
        parts = sorted(
            ((tuple(place[w] for w in s), t) for s, t in self.of[v].items()),
            key=lambda p: (p[0], self.tables.number(p[1])),
        )
        key = tuple((s, self.tables.number(t)) for s, t in parts)
        found = self.tables.eliminated.get(key)
        if found is None:
            found = self.tables.eliminated[key] = self._joined(parts, scope)
            self.computed += 1
        least, best = found
        self.trail.append((v, around, best))
        for s in list(self.of[v]):
            for w in s:
                self.of[w].pop(s)
        self._add(around, least)
        self._heap[self._rank.pop(v)].pop(v)
        del self.left[v]
        for w in around:
            self._note(w)

    def _joined(self, parts: Sequence[tuple[Scope, Prices]], scope: Scope) -> tuple[Prices, Choice]:
        """The table without the last variable of a scope, and that variable's best values.

        The joined table itself is never whole: it is summed and searched in slices that fit a cache.
        """
        shape = tuple(self.problem.sizes[w] for w in scope)
        every, first = np.zeros((1,) * len(scope), dtype=np.int64), list[Prices]()
        for places, table in parts:
            wide = [1] * len(scope)
            order = sorted(range(len(places)), key=places.__getitem__)
            for axis in order:
                wide[places[axis]] = table.shape[axis]
            aligned = table.transpose(order).reshape(wide)
            if len(scope) > 1 and 0 in places:
                first.append(aligned)
            else:
                every = every + aligned  # the same in all slices
        least = np.empty(shape[:-1], dtype=np.int64)
        best = np.empty(shape[:-1], dtype=np.min_scalar_type(shape[-1]))
        if len(scope) == 1:
            k = int(every.argmin())
            least[()], best[()] = min(int(every[k]), NEVER), k
            return self.tables.intern(least), best
        step = max(1, _SLICE // math.prod(shape[1:]))
        slices = np.empty((min(step, shape[0]), *shape[1:]), dtype=np.int64)
        for i in range(0, shape[0], step):
            total = slices[: min(step, shape[0] - i)]
            total[...] = every
            for table in first:
                total += table[i : i + step]
            found = total.argmin(-1)
            best[i : i + step] = found
            np.minimum(np.take_along_axis(total, found[..., None], -1)[..., 0], NEVER, out=least[i : i + step])
        return self.tables.intern(least), best

    def values(self) -> tuple[int, ...]:
        """Each variable's value, from the last one that was eliminated backwards."""
        made = [0] * len(self.problem.sizes)
        for v, around, best in reversed(self.trail):
            made[v] = int(best[tuple(made[w] for w in around)])
        return tuple(made)


def _whole(table: Prices) -> Prices:
    return np.minimum(np.ascontiguousarray(table, dtype=np.int64), NEVER)


__all__ = ["NEVER", "Elimination", "Optimum", "Prices", "Problem", "Tables", "TooWide", "solve"]
