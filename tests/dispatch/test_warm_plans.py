"""Calls that differ in a number alone: the plan of one must not serve the other where the number decides.

A norm's order, a fill value, an exponent: each op of PyTorch's database that takes numbers is called with several, one
after the other, and compared with one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import meshwright as mw
from tests.rules.test_opdb import GROUPS, INAPPLICABLE, op_db, samples
from tests.rules.test_opdb import op_name as name_of_case

Tensor = torch.Tensor
MESH = mw.Mesh({"x": 2})
# Random ones, ones with several right answers, ones for whose numbers PyTorch has no meaning and no error.
DRAWN = [
    *("dropout", "rrelu", "fractional", "empty", "attention", "bernoulli", "multinomial", "normal", "rand", "uniform"),
    *("exponential", "geometric", "cauchy", "lobpcg", "svd", "eig", "lowrank", "grid_sampler", "sparse"),
]


def other_numbers(args: Any) -> Iterator[Any]:
    """The same arguments with one number changed."""
    leaves, tree = tree_flatten(args)
    for i, leaf in enumerate(leaves):
        if type(leaf) not in (int, float, complex):
            continue
        for other in {leaf * 2, leaf + 1, type(leaf)(3)} | ({math.inf, 1.0, 2.0} if type(leaf) is float else set()):
            yield tree_unflatten([*leaves[:i], other, *leaves[i + 1 :]], tree)


def result(op: Any, args: Any, make: Any) -> list[Tensor] | str:
    given, kwargs = tree_map(lambda t: make(t.clone()) if isinstance(t, Tensor) else t, args)
    try:
        made = op.op(*given, **kwargs)
    except Exception as error:
        return type(error).__name__
    return [
        mw.unshard(t).detach() if isinstance(t, mw.DistTensor) else t
        for t in tree_leaves(made)
        if isinstance(t, Tensor)
    ]


def split(t: Tensor) -> Tensor:
    return mw.shard_tensor(t, MESH, {"x": mw.Shard(0) if t.ndim else mw.Replicate()})


def differences(op: Any, sample: Any) -> list[str]:
    first = ((sample.input, *sample.args), sample.kwargs)
    calls = [first, *other_numbers(first)]
    want = [result(op, args, lambda t: t) for args in calls]
    calls, want = (
        [c for c, w in zip(calls, want, strict=True) if not isinstance(w, str)],
        [w for w in want if w.__class__ is list],
    )
    got = mw.simulate(lambda: [result(op, args, split) for args in calls], MESH)[0]
    found = []
    for args, a, b in zip(calls, want, got, strict=True):
        numbers = [x for x in tree_leaves(args) if isinstance(x, (int, float, complex))]
        if isinstance(b, str):
            found.append(f"{name_of_case(op)} {numbers}: {b}")
            continue
        alike = len(a) == len(b) and all(
            x.shape == y.shape and x.dtype == y.dtype and torch.allclose(x, y, 1e-3, 1e-4, equal_nan=True)
            for x, y in zip(a, b, strict=True)
        )
        if not alike:
            found.append(f"{name_of_case(op)} {numbers}: {str(a)[:80]} is {str(b)[:80]}")
    return found


@pytest.mark.thin(12)
@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.filterwarnings("ignore")
def test_one_number_after_another(group: int) -> None:
    found = []
    for op in op_db[group::GROUPS]:
        if name_of_case(op) in INAPPLICABLE or any(word in op.name for word in DRAWN):
            continue
        for sample in samples(op, 6):
            if next(other_numbers((sample.args, sample.kwargs)), None) is not None:
                found += differences(op, sample)
                break
    assert not found, "\n".join(found)


@pytest.mark.parametrize("norm", [Tensor.norm, torch.linalg.vector_norm, torch.linalg.norm])
def test_orders_of_norms(norm: Any) -> None:
    x = torch.arange(1.0, 5.0)
    orders = (1.0, 2.0, 3, 3.0, 0.5, math.inf, -math.inf, 0.0, 1.0)
    got = mw.simulate(lambda: [float(norm(split(x), p)) for p in orders], MESH)[0]
    assert got == pytest.approx([float(norm(x, p)) for p in orders])


def test_numbers_that_are_equal_and_promote_otherwise() -> None:
    numbers: list[Any] = [0, 0.0, 0j, np.float64(0), 1, True, 1.0, np.float64(1), np.int64(1), 1 + 0j]
    x = torch.arange(4)
    got = mw.simulate(lambda: [(split(x) + n).dtype for n in numbers], MESH)[0]
    assert got == [(x + n).dtype for n in numbers]


def test_what_has_no_hash_is_looked_into() -> None:
    x = torch.arange(12.0).reshape(4, 3)
    lists = [np.array([0, 1]), np.array([3]), np.array([[2, 1], [0, 0]]), np.array([True, False, True, False])]
    got = mw.simulate(lambda: [mw.unshard(split(x)[n]).tolist() for n in lists], MESH)[0]
    assert got == [x[n].tolist() for n in lists]


def test_lists_of_numbers_that_are_equal_and_mean_something_else() -> None:
    x = torch.arange(8.0).reshape(1, 2, 4)

    def refused(make: Any, scale: list[Any]) -> bool:
        try:
            torch.nn.functional.interpolate(make(x), size=scale)
        except (TypeError, RuntimeError):
            return True
        return False

    sizes: list[list[Any]] = [[2], [2.0], [True], [2]]
    got = mw.simulate(lambda: [refused(split, size) for size in sizes], MESH)[0]
    assert got == [refused(lambda t: t, size) for size in sizes]
