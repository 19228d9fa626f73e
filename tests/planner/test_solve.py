"""The optimum of tables: that of brute force on small graphs, that of an integer programme on larger ones."""

from __future__ import annotations

import itertools
import random
from typing import Any

import highspy
import numpy as np
import pytest

from meshwright.errors import PlanError
from meshwright.planner.narrow import cheapest
from meshwright.planner.solve import NEVER, Problem, solve


def drawn(draw: random.Random, variables: int, values: int, wide: int, never: float = 0.1) -> Problem:
    """A random graph: a chain with some edges back, some tables over three variables, ties and impossible pairs."""
    made = Problem()
    most = draw.choice([3, 50, 10**9])
    for _ in range(variables):
        made.variable(draw.randrange(most) for _ in range(draw.randint(1, values)))
    edges = [(v, v + 1) for v in range(variables - 1)] + [
        tuple(draw.sample(range(variables), draw.choice([2, 2, 3]))) for _ in range(wide) if variables > 2
    ]
    for scope in edges:
        shape = tuple(made.sizes[v] for v in scope)
        table = np.array([draw.randrange(most) for _ in range(int(np.prod(shape)))], dtype=np.int64).reshape(shape)
        mask = np.array([draw.random() < never for _ in range(table.size)]).reshape(shape)
        mask.flat[0] = False
        made.add(scope, np.where(mask, NEVER, table))
    return made


def brute(problem: Problem) -> int:
    return min(problem.price(values) for values in itertools.product(*map(range, problem.sizes)))


@pytest.mark.parametrize("seed", range(60))
def test_the_optimum_is_that_of_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    problem = drawn(draw, draw.randint(1, 6), 4, draw.randint(0, 3))
    least = brute(problem)
    if least >= NEVER:
        with pytest.raises(PlanError, match="no assignment"):
            solve(problem)
        return
    found = solve(problem)
    assert found.price == least == problem.price(found.values)
    assert solve(problem) == found or solve(problem).values == found.values, "ties are the same again"


def by_highs(problem: Problem) -> int:
    """The optimum by an integer programme: a column for each entry of each table."""
    model = highspy.Highs()
    model.silent()
    ones: list[list[Any]] = []
    for v, size in enumerate(problem.sizes):
        ones.append([model.addBinary(obj=float(problem.factors[v,][k])) for k in range(size)])
        model.addConstr(sum(ones[-1]) == 1)
    for scope, table in problem.factors.items():
        if len(scope) == 1:
            continue
        places = {
            at: model.addVariable(0.0, 0.0 if n >= NEVER else 1.0, obj=float(n if n < NEVER else 0))
            for at, n in np.ndenumerate(table)
        }
        for axis, v in enumerate(scope):
            for k in range(problem.sizes[v]):
                model.addConstr(sum(x for at, x in places.items() if at[axis] == k) == ones[v][k])
    model.setOptionValue("mip_rel_gap", 0.0)
    model.setOptionValue("mip_abs_gap", 0.0)
    model.run()
    if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return NEVER
    return round(model.getInfo().objective_function_value)


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_is_that_of_an_integer_programme(seed: int) -> None:
    for k in range(10):
        draw = random.Random(1000 + 10 * seed + k)
        problem = drawn(draw, draw.randint(4, 10), 4, draw.randint(0, 4), never=0.05)
        least = by_highs(problem)
        if least >= NEVER:
            with pytest.raises(PlanError):
                solve(problem)
        else:
            assert solve(problem).price == least, (seed, k)


def test_layers_that_repeat_are_eliminated_once() -> None:
    draw = np.random.default_rng(0)
    prices, one, two, skip = (draw.integers(0, 99, s) for s in ((9,), (9, 9), (9, 9), (9, 9)))

    def layers(count: int) -> Problem:
        made = Problem()
        last = made.variable(prices)
        for _ in range(count):
            inner, after = made.variable(prices), made.variable(prices)
            made.add((last, inner), one)
            made.add((inner, after), two)
            made.add((last, after), skip)
            last = after
        return made

    few, many = solve(layers(4)), solve(layers(200))
    assert many.steps == 401
    assert few.distinct <= many.distinct < 100, many
    assert len({*many.values[40:-40:2]}) <= 3, "far from the ends they are alike"


def test_a_constant_joins_none_that_read_it() -> None:
    """A table of positions that all layers read: 30 variables of 40 values are joined to it, not to each other."""
    draw = np.random.default_rng(0)
    made = Problem()
    one = made.variable([3])
    others = [made.variable(draw.integers(0, 99, 40)) for _ in range(30)]
    for v in others:
        made.add((one, v), draw.integers(0, 99, (1, 40)))
    least = 3 + sum(int((made.factors[v,] + made.factors[one, v][0]).min()) for v in others)
    assert solve(made).price == least


def test_a_pinned_variable_keeps_its_value() -> None:
    problem = drawn(random.Random(5), 6, 4, 2, never=0.0)
    free = solve(problem)
    for v, size in enumerate(problem.sizes):
        for k in range(size):
            pinned = solve(problem.pinned({v: [k]}))
            assert pinned.values[v] == k
            assert pinned.price >= free.price
    assert solve(problem) == solve(problem)


def test_eliminations_are_forgotten_and_done_again() -> None:
    problem = drawn(random.Random(7), 12, 4, 3, never=0.0)
    first = solve(problem)
    problem.tables.forget(0)
    assert not problem.tables.eliminated
    for v in range(12):
        assert solve(problem.pinned({v: [first.values[v]]})).price == first.price
        problem.tables.forget(0)
    assert solve(problem).values == first.values


def test_a_join_in_slices_is_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [drawn(random.Random(seed), 10, 6, 6) for seed in range(20)]

    def optima() -> list[Any]:
        made = []
        for p in problems:
            p.tables.forget(-1)
            try:
                made.append(solve(p).values)
            except PlanError:
                made.append(None)
        return made

    whole = optima()
    for entries in (1, 7, 40):
        monkeypatch.setattr("meshwright.planner.solve._SLICE", entries)
        assert optima() == whole


def test_tables_that_do_not_fit_are_refused() -> None:
    problem = Problem()
    a, b = problem.variable([0, 1]), problem.variable([0, 1, 2])
    with pytest.raises(PlanError, match="the shapes differ"):
        problem.add((a, b), np.zeros((3, 2), dtype=np.int64))
    with pytest.raises(PlanError, match="the shapes differ"):
        problem.add((a, a), np.zeros((2, 2), dtype=np.int64))
    wide = Problem()
    for _ in range(12):
        wide.variable([0] * 10)
    for v in range(12):
        for w in range(v):
            wide.add((v, w), np.eye(10, dtype=np.int64))
    with pytest.raises(PlanError, match="Take fewer axes"):
        solve(wide)
    found = cheapest(wide)  # 12 of 10 values: two are equal to others at least
    assert not found.exact
    assert found.price == wide.price(found.values) <= 4


def test_without_tables_that_are_too_large_little_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joins of 60 entries at most: what is found is possible, and mostly the optimum."""
    monkeypatch.setattr("meshwright.planner.narrow._MOST", 60)
    monkeypatch.setattr("meshwright.planner.solve._MOST", 60)
    optimal = inexact = 0
    for seed in range(60):
        draw = random.Random(2000 + seed)
        problem = drawn(draw, 8, 4, 8, never=0.05)
        monkeypatch.setattr("meshwright.planner.solve._MOST", 1 << 26)
        try:
            least = solve(problem).price
        except PlanError:
            continue
        monkeypatch.setattr("meshwright.planner.solve._MOST", 60)
        problem.tables.forget(-1)
        found = cheapest(problem)
        assert found.price == problem.price(found.values) >= least
        assert cheapest(problem).values == found.values
        assert found.exact is (found.price == least) or not found.exact
        optimal += found.price == least
        inexact += not found.exact
    assert inexact > 20
    assert optimal > 45, optimal
