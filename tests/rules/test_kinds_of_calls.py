"""Kinds of calls, one test each: value, gradient, and that a rule divides the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.dispatch import plans
from tests.rules.test_rules_basic import Case, Gathered, failures, ints, real

Tensor = torch.Tensor


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Compares calls of these tensors with one device, for the placements of three ranks."""

    def compared(*calls: tuple[str, Callable[..., Any], list[Tensor]]) -> None:
        cases = [Case(name, fn, tuple(tensors)) for name, fn, tensors in calls]
        gathered = Gathered()
        monkeypatch.setattr(plans, "_WARNED", gathered)
        wrong = failures(mw.Mesh({"x": 3}), cases)
        assert not wrong, "\n".join(wrong)
        assert not gathered, f"run on whole values: {sorted(gathered)}"

    return compared


def test_a_vector_of_one_tensor_is_no_single_tensor(check):
    x, y = real(4, 3), real(4, 3)
    check(
        ("two", lambda a, b: torch.stack([a, b]), [x, y]),
        ("one", lambda a: torch.stack([a]), [x]),
        ("one along a dim", lambda a: torch.stack([a], 2), [x]),
        ("one in a tuple", lambda a: torch.stack((a,), 1), [x]),
        ("cat of one", lambda a: torch.cat([a], 1), [x]),
        ("cat of one and of two", lambda a, b: (torch.cat([a]), torch.cat([a, b]), torch.cat([a, b, a])), [x, y]),
        ("single", lambda a: torch.cat([a.unsqueeze(0)]), [x]),
        ("einsum", lambda a: torch.einsum("ij->j", a), [x]),
        ("einsum of a list", lambda a: torch.einsum("ij->j", [a]), [x]),
        ("hstack", lambda a: torch.hstack([a]), [x]),
        ("atleast_1d", lambda a: torch.atleast_1d([a])[0] + torch.atleast_1d(a), [x]),
        ("broadcast_tensors", lambda a: torch.broadcast_tensors(a)[0], [x]),
        ("split into one", lambda a: a.split(4)[0], [x]),
        ("index by one", lambda a, i: (a[(i,)], a[i]), [x, ints(4, 2)]),
    )


def test_matmul_of_operands_of_all_ranks_transposed_or_not(check):
    shapes = [(4,), (2, 4), (3, 2, 4), (2, 1, 5, 4)], [(4,), (4, 6), (3, 4, 2), (3, 4, 5)]
    pairs = [(real(*a), real(*b)) for a in shapes[0] for b in shapes[1]]
    products = [(f"{x.ndim} by {y.ndim}", torch.matmul, [x, y]) for x, y in pairs]
    turned = [
        (f"{x.ndim} by {y.ndim}, transposed", lambda a, b: a.mT @ b.mT, [x.mT.contiguous(), y.mT.contiguous()])
        for x, y in pairs
        if min(x.ndim, y.ndim) > 1
    ]
    x, y, term = real(5, 4), real(4, 6), real(6)
    check(
        *products,
        *turned,
        ("addmm", lambda t, a, b: torch.addmm(t, a, b, beta=0.5, alpha=2), [term, x, y]),
        ("addmm transposed", lambda t, a, b: torch.addmm(t, a, b.t()), [term, x, y.t().contiguous()]),
        ("baddbmm", torch.baddbmm, [real(3, 5, 2), real(3, 5, 4), real(3, 4, 2)]),
        ("addmv", torch.addmv, [real(5), x, real(4)]),
    )
