"""Covering arrays: cases in which each pair (or each three) of values that go together meets at least once.

``covertable`` makes them.  Ours are how it is asked whether values go together, which it would work out from
expressions in minutes, and how it fills a row: its own criterion looks at all that is left for each choice, which is
hours for three-way meetings of this table.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, islice
from typing import Any

import covertable
import numpy as np

from .factors import DEFAULTS, FACTORS, MESHES, Case
from .limits import APART, REFUSED, Refusal, Values, meets

# How many times as long a case takes.
PRICES = {
    "mode": {"captured": 4, "data-parallel": 5, "by hand": 4, "by hand, data-parallel": 5, "stages": 8, "pipeline": 12},
    "second": {"more": 1.5, "one on the last": 1.5, "one": 1.5},
    "lengths": {"two": 1.5, "many": 3},
    "resumed": {"same mesh": 2, "other layout": 2},
    "context": {"frozen in between": 1.5, "eval in between": 1.5, "inference in between": 1.5},
}
# Of a case, in those of the cheapest: what takes long comes into cases of its own, and not into one with all the rest.
DEAREST = 12.0


def _price(name: str, value: str) -> float:
    if name == "mesh":
        return float(np.prod([*MESHES[value].values()])) / 2
    return PRICES.get(name, {}).get(value, 1.0)


def _fill(controller: _Controller) -> Iterator[tuple[int, ...]]:
    """A criterion: the next meeting that is left, then of each factor the value with which most are met."""
    seed = controller.next_seed()
    if seed is None:
        return
    yield seed
    row, parents = controller.row, controller.parents
    names = [name for name in controller.serials if name not in row]
    controller.draw.shuffle(names)
    for name in names:
        gains = np.zeros(len(controller.serials[name]), dtype=np.int64)
        for others in combinations(sorted(row.values()), controller.strength - 1):
            gains += controller.left_with(others, name)
        prices, spent = controller.prices[name], controller.price()
        gains = np.where((prices > 1) & (spent * prices > DEAREST), -1.0, gains / prices)
        for index in np.argsort(-gains, kind="stable"):  # of equals the first: the default
            serial = controller.serials[name][index]
            if controller.storable([(name, serial)]) is not None:
                row[name] = serial
                break
    assert all(parents[s] == n for n, s in row.items())


class _Controller(covertable.Controller):  # type: ignore[misc]
    """As the library's, with constraints as values that never meet."""

    def __init__(self, never: list[Values], strength: int, salt: str) -> None:
        self.never, self.rules = never, list[dict[str, frozenset[int]]]()
        self.left: dict[tuple[str, ...], Any] = {}
        self.draw, self.last, self.hopeless = random.Random(salt), None, set[tuple[int, ...]]()
        self.prices = {name: np.array([_price(name, v) for v in values]) for name, values in FACTORS.items()}
        factors = {name: list(values) for name, values in FACTORS.items()}
        super().__init__(factors, strength=strength, criterion=_Criterion, salt=salt)
        for pair in self.incomplete:
            self._note(pair, True)

    def _resolve_constraints(self, constraints: Any) -> None:
        for when in self.never:
            values = {k: (v,) if isinstance(v, str) else v for k, v in when.items()}
            self.rules.append(
                {k: frozenset(self.serials[k][self.factors[k].index(v)] for v in vs) for k, vs in values.items()}
            )

    def _storable_check(self, candidate: Any, row: Mapping[str, int] | None = None) -> bool:
        have = {**(self.row if row is None else row), **dict(candidate)}
        return not any(all(have.get(k) in serials for k, serials in rule.items()) for rule in self.rules)

    def set_pair(self, pair: tuple[int, ...]) -> bool:
        candidate = self.get_candidate(pair)
        if not self._storable_check(candidate):
            return False
        self.row.update(candidate)
        return True

    def _place(self, pair: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        names = tuple(self.parents[s] for s in pair)
        return names, tuple(s - self.serials[n][0] for s, n in zip(pair, names, strict=True))

    def _note(self, pair: tuple[int, ...], left: bool) -> None:
        names, index = self._place(pair)
        if names not in self.left:
            self.left[names] = np.zeros([len(self.serials[n]) for n in names], dtype=np.int64)
        self.left[names][index] = left

    def consume_pairs(self, row: Any) -> None:
        super().consume_pairs(row)
        for pair in combinations(sorted(row.values()), self.strength):
            self._note(pair, False)

    def price(self) -> float:
        """Of the row so far."""
        return float(np.prod([self.prices[n][s - self.serials[n][0]] for n, s in self.row.items()]))

    def next_seed(self) -> tuple[int, ...] | None:
        """The first meeting that is left; not one for which no row was found."""
        if self.last in self.incomplete:
            self.hopeless.add(self.last)
        self.last = next((p for p in self.incomplete if p not in self.hopeless), None)
        if self.last is None:
            self.incomplete.clear()
        return self.last

    def left_with(self, others: tuple[int, ...], name: str) -> Any:
        """For each value of a factor, whether its meeting with these is left."""
        first = self.serials[name][0]
        before = tuple(s for s in others if s < first)
        names, index = self._place((*before, first, *others[len(before) :]))
        left = self.left.get(names)
        return 0 if left is None else left[(*index[: len(before)], slice(None), *index[len(before) + 1 :])]


class _Criterion:
    extract = staticmethod(_fill)


def array(strength: int, salt: str) -> Iterator[Case]:
    """Cases in which all values meet that go together; another salt gives others."""
    never = [row.when for row in (*APART, *(r for r in REFUSED if r.always))]
    controller = _Controller(never, strength, salt)
    yield from controller.make_async()
    for meeting in sorted(controller.hopeless):  # no row was found around it: the defaults are one
        names, index = controller._place(meeting)
        values = {n: list(FACTORS[n])[i] for n, i in zip(names, index, strict=True)}
        tries = ({**DEFAULTS, "mode": mode, **values} for mode in FACTORS["mode"])
        yield from islice((made for made in tries if not any(meets(made, when) for when in never)), 1)


def refused_cases(row: Refusal, salt: str, factors: Iterable[str] = FACTORS) -> Iterator[Case]:
    """Cases that a refusal is about, in which each value of the other factors is met once, where it may be."""
    others = [r.when for r in (*APART, *(r for r in REFUSED if r.always)) if r is not row]
    chosen = {n: v for n, v in FACTORS.items() if n in factors and n not in row.when}
    draw = random.Random(salt)
    refused = {n: (v,) if isinstance(v, str) else v for n, v in row.when.items()}
    left = [(name, value) for name, values in chosen.items() for value in values]
    draw.shuffle(left)
    failed = 0
    while left and failed < 20:  # draws of refused values beside which none of the others may stand
        made, added = {**DEFAULTS, **{n: draw.choice(v) for n, v in refused.items()}}, list[tuple[str, str]]()
        for name, value in left:
            tried = {**made, name: value}
            if all(n != name for n, _ in added) and not any(meets(tried, when) for when in others):
                made = tried
                added.append((name, value))
        if not added:
            failed += 1
            continue
        left = [at for at in left if at not in added]
        yield made


def meetings(cases: list[Case], strength: int) -> set[tuple[tuple[str, str], ...]]:
    """All that meet in these cases."""
    return {m for made in cases for m in combinations(sorted(made.items()), strength)}
