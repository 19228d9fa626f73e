"""The cheapest assignment that is found where variables share too many tables for an exact elimination.

Few variables, with many neighbours each, make tables large: a weight that many ops read, a value that is added in every
block.  They are the hubs.  At first each hub has only its values of lowest bounds, and the first one.  All other
variables are solved exactly for them.  Then each hub gets all of its values, while the others keep theirs: this is
repeated as long as it becomes cheaper.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..errors import PlanError
from .solve import NEVER, Elimination, Optimum, Problem, TooWide, solve

_FEW = (16, 8, 4, 2, 1, 0)  # values of each hub at first; the first number that is not too large
_ROUNDS = 4
_MOST = 1 << 20  # entries of a joined table: many problems are solved, each in milliseconds


def cheapest(problem: Problem) -> Optimum:
    """The optimum; where tables would be too large, the cheapest assignment that is found.

    Raises:
        TooWide: If tables would be too large, and no assignment is found without them.
        PlanError: If no assignment is possible.
    """
    try:
        return solve(problem)
    except TooWide as error:
        hubs = _hubs(problem, error)
        best = _first(problem, hubs, error)
    for _ in range(_ROUNDS):
        before = best.price
        for hub in hubs:
            fixed = {h: [best.values[h]] for h in hubs}
            best = _freed(problem, hub, fixed, best)
        if best.price == before:
            break
    return best


def _freed(problem: Problem, hub: int, fixed: dict[int, list[int]], best: Optimum) -> Optimum:
    """The cheapest assignment with any value of one hub; values are tried in parts where all are too many."""
    parts = [list(range(problem.sizes[hub]))]
    while parts:
        some = parts.pop()
        try:
            found = _solved(problem, {**fixed, hub: some})
        except TooWide:
            if len(some) > 1:
                half = len(some) // 2
                parts += [some[half:], some[:half]]
            continue
        except PlanError:
            continue
        best = found if found.price < best.price else best
    return best


def _hubs(problem: Problem, error: TooWide) -> list[int]:
    """Variables without which no table is too large."""
    hubs: dict[int, list[int]] = {}
    while len(hubs) < len(problem.sizes):
        run = Elimination(problem.restricted(hubs), _MOST)
        wide = _too_wide(run)
        if wide is None:
            return list(hubs)
        hubs[run.widest(wide)] = [0]
    raise error


def _too_wide(run: Elimination) -> int | None:
    """The first variable whose elimination would join too large a table."""
    while run.left:
        v = run.next()
        try:
            run.eliminate(v)
        except TooWide:
            return v
    return None


def _first(problem: Problem, hubs: list[int], error: TooWide) -> Optimum:
    """An assignment for few values of each hub.

    Raises:
        TooWide: If none is found.
    """
    likely = {h: np.argsort(_bounds(problem, h), kind="stable").tolist() for h in hubs}
    for few in _FEW:
        try:
            return _solved(problem, {h: list(dict.fromkeys([0, *likely[h][:few]])) for h in hubs})
        except PlanError:
            continue
    try:
        return _solved(problem, {h: likely[h][:1] for h in hubs})
    except PlanError:
        raise error from None


def _bounds(problem: Problem, v: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The least that tables of a variable cost for each of its values."""
    total = np.zeros(problem.sizes[v], dtype=np.int64)
    for scope, table in problem.factors.items():
        if v in scope:
            least = table.min(axis=tuple(i for i, w in enumerate(scope) if w != v))
            total = np.minimum(total + least, NEVER)
    return total


def _solved(problem: Problem, domains: dict[int, list[int]]) -> Optimum:
    """The optimum for some of the values of some variables, as values of the problem itself."""
    found = solve(problem.restricted(domains), _MOST)
    values = tuple(domains[v][k] if v in domains else k for v, k in enumerate(found.values))
    return replace(found, values=values, exact=False)


__all__ = ["cheapest"]
