"""Keys of calls: two calls have one key only where one plan is right for both, and have it where it is."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.dispatch.calls import resolve
from meshwright.dispatch.keys import key_of

T = torch.Tensor


class Named(T):
    """A class of a user's, of which nothing is known."""


def a_named(*shape: int) -> Named:
    return torch.zeros(shape).as_subclass(Named)


class Unhashable:
    __hash__ = None  # type: ignore[assignment]


GENERATOR = torch.Generator()
S = slice
# Of one function: calls that need plans of their own, each from each other one.
APART: list[tuple[Any, list[tuple[Any, ...]]]] = [
    (T.__getitem__, [
        (S(None),), (S(0, None),), (S(1, None),), (S(None, 1),), (S(None, 2),), (S(None, None, 2),), (S(1, 2, 2),),
        (S(1, None, 2),), (S(None, 1, 2),), (0,), (1,), (-1,), (None,), (...,), (True,), (False,), ((0, 1),), ([0, 1],),
        ((S(0, 1), 1),), ((S(1, 2), 1),), (([0], 1),), ((..., 0),), ((None, 0),), (1.0,), ((),),
    ]),
    (T.sum, [
        (), (0,), (1,), ((0, 1),), ([0, 1],), (0, True), (0, False), (None,), (None, True), (torch.float64,),
    ]),
    (T.to, [
        (torch.float64,), (torch.float32,), (torch.device("cpu"),), (torch.device("meta"),), ("cpu",), ("meta",),
        (torch.strided,), (torch.channels_last,), (torch.contiguous_format,), (torch.float64, True),
    ]),
    (T.new_full, [((2,), 1.0), ((2,), 2.0), ((2, 2), 1.0), ((2,), 1), ((2,), True), ((2,), 1j), ((2,), 2j)]),
    (torch.nn.functional.interpolate, [([2],), ([2.0],), ([3],), ((2,),), (None, [2.0]), (None, [3.0])]),
    # A pointwise op takes all finite numbers alike but zero; classes promote otherwise.
    (T.add, [(0,), (1,), (0.0,), (1.0,), (0j,), (1j,), (True,), (False,), (np.float64(1),), (np.int64(1),)]),
    (T.mul, [(2.0,), (math.inf,), (-math.inf,), (math.nan,), (complex(math.inf, 0),), (complex(1, -math.inf),)]),
    (T.add, [
        (torch.zeros(2),), (torch.zeros(3),), (torch.zeros(2, 1),), (torch.zeros(2, dtype=torch.int64),),
        (torch.zeros(2, requires_grad=True),), (a_named(4),), (a_named(5),), (torch.nn.Parameter(torch.zeros(6)),),
    ]),
    (torch.isin, [({"a": 1},), ({"a": 2},), ({"b": 1},), ({"a": 1, "b": 1},), ({"a": torch.zeros(2)},), ({},), ([],)]),
    (T.sum, [(int,), (float,), (type(None),), (S,)]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(APART)))
def test_calls_that_need_plans_of_their_own(number: int) -> None:
    func, calls = APART[number]
    resolve(func)
    keys = [key_of(func, args, {}) for args in calls]
    named = [key_of(func, (), {"given": args}) for args in calls]
    for found in (keys, named):
        for i, a in enumerate(found):
            alike = [calls[j] for j, b in enumerate(found) if a == b and hash(a) == hash(b) and i != j]
            assert not alike, (calls[i], alike)


def test_names_of_arguments_and_functions_are_in_the_key() -> None:
    keys = [
        key_of(T.sum, (), {"dim": 0}), key_of(T.sum, (), {"keepdim": 0}), key_of(T.sum, (0,), {}),
        key_of(T.mean, (), {"dim": 0}), key_of(T.sum, (), {"dim": 0, "keepdim": 0}), key_of(T.sum, (), {}),
    ]  # fmt: skip
    assert len({*keys}) == len(keys)


def test_calls_that_share_a_plan() -> None:
    for func in (T.add, torch.mul, T.pow):
        resolve(func)
        for alike in ((1, 2, -7), (1.0, 2.5, -1e300), (1j, 2 + 1j)):
            assert len({key_of(func, (x,), {}) for x in alike}) == 1
            assert len({key_of(func, (), {"other": x}) for x in alike}) == 1
    assert key_of(T.mul, (float("nan"),), {}) == key_of(T.mul, (-float("nan"),), {})  # which are not equal
    other = torch.Generator()
    assert key_of(torch.bernoulli, (GENERATOR,), {}) == key_of(torch.bernoulli, (other,), {})
    assert key_of(torch.bernoulli, (GENERATOR,), {}) != key_of(torch.bernoulli, (T,), {})
    assert key_of(T.add, (torch.zeros(2),), {}) == key_of(T.add, (torch.ones(2),), {})
    assert key_of(T.add, (torch.zeros(2),), {}) == key_of(T.add, (torch.nn.Parameter(torch.zeros(2), False),), {})
    named = [OrderedDict(a=1), OrderedDict(a=1)]
    assert key_of(torch.isin, (named[0],), {}) == key_of(torch.isin, (named[1],), {})


def test_what_has_no_hash_shares_with_nothing() -> None:
    given = Unhashable()
    assert key_of(T.add, (given,), {}) != key_of(T.add, (given,), {})


def test_specs_are_in_the_key() -> None:
    mesh = mw.Mesh({"a": 2})

    def run() -> None:
        x = torch.zeros(4, 4)
        made = [mw.shard_tensor(x, mesh, {"a": p}) for p in (mw.Shard(0), mw.Shard(1), mw.Replicate())]
        made += [made[0].double(), mw.shard_tensor(torch.zeros(4, 2), mesh, {"a": mw.Shard(0)})]
        for where in (lambda t: (t,), lambda t: ([t],), lambda t: ({"x": t},)):  # type: ignore[no-untyped-call]
            assert len({key_of(T.add, where(t), {}) for t in made}) == len(made)

    mw.simulate(run, mesh)


class BoundProgram(int):
    """A number of a class of its own, as of numpy, which bounds a slice."""


def test_slices_bounded_by_other_numbers() -> None:
    x = torch.arange(24.0).reshape(6, 4)
    mesh = mw.Mesh({"a": 2})
    slices = [S(np.int64(a), BoundProgram(b), np.int64(c)) for a in (0, 1, 2) for b in (3, 5, 6) for c in (1, 2)]
    slices += [S(torch.tensor(a), torch.tensor(b), torch.tensor(c)) for a in (0, 2) for b in (3, 5) for c in (1, 2)]

    def run() -> list[Any]:
        y = mw.shard_tensor(x, mesh, {"a": mw.Shard(0)})
        return [mw.unshard(y[s]).tolist() for s in slices] + [mw.unshard(y[:, s]).tolist() for s in slices]

    want = [x[s].tolist() for s in slices] + [x[:, s].tolist() for s in slices]
    assert mw.simulate(run, mesh)[0] == want
