"""Types of leaves by hand: what one use decides for the tensors that are linked to what is used."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.dispatch.leaves import (
    any_linked,
    link,
    propagate_type_to_base,
    resolve_from_base,
    resolve_types,
    should_reduce_at_use,
)
from meshwright.layout import Layout, Marks, Spec, marked, marks_of

MESH = mw.Mesh({"a": 2, "b": 2, "c": 2})
A, B, C = 1, 2, 4
ALL = A | B | C
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
R, S0 = mw.Replicate(), mw.Shard(0)


def spec(*shape: int, undecided_mask: int = ALL, placements: Sequence[Any] = (), **more: Any) -> Spec:
    return Spec(shape, F32, Layout(MESH, placements or (R, R, R)), undecided_mask=undecided_mask, **more)


def carrying(t: torch.Tensor, of: Spec) -> torch.Tensor:
    t.__dict__["_spec"] = of
    return t


def leaf(n: int = 4, **more: Any) -> torch.Tensor:
    return carrying(torch.zeros(n, requires_grad=True), spec(n, **more))


def computed(n: int = 4, **more: Any) -> torch.Tensor:
    return carrying(torch.zeros(n, requires_grad=True) * 1, spec(n, **more))


def types(t: torch.Tensor) -> tuple[int, int]:
    """The axes over which its gradient is to be reduced, and those of which it is not known."""
    found: Spec = t.__dict__["_spec"]
    return found.grad_partial_mask, found.undecided_mask


def linked_to(t: torch.Tensor) -> list[torch.Tensor]:
    return t.__dict__["_linked"].alive() if "_linked" in t.__dict__ else []  # type: ignore[no-any-return]


def same(found: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return sorted(map(id, found)) == sorted(map(id, want))


def test_what_is_linked() -> None:
    a, b, c, d, e = (leaf() for _ in range(5))
    link([a, b])
    assert same(linked_to(a), [a, b])
    link([c, d])
    link([e, b, c])
    for t in (a, b, c, d, e):
        assert same(linked_to(t), [a, b, c, d, e])
    known, constant, plain = (
        leaf(undecided_mask=0),
        carrying(torch.zeros(4), spec(4)),
        torch.zeros(4, requires_grad=True),
    )
    link([known, constant, plain, a])
    for t in (known, constant, plain):
        assert not linked_to(t)
    assert any_linked([1, plain, a])
    assert not any_linked([1, plain, known, constant, None])


def test_what_nobody_names_is_forgotten() -> None:
    a = leaf()
    for _ in range(3):
        link([a, computed()])
    gc.collect()
    assert same(linked_to(a), [a])
    assert len(a.__dict__["_linked"].members) == 1, "those that are gone leave nothing"


def test_one_use_decides_for_all() -> None:
    a, b, c = leaf(), computed(2), computed(undecided_mask=A | B, grad_partial_mask=C)
    other = leaf()
    link([a, b, c])
    resolve_types(b, b.__dict__["_spec"].with_(grad_partial_mask=A, undecided_mask=C), "a use")
    assert (types(a), types(b), types(c)) == ((A, C), (A, C), (A | C, 0))
    assert types(other) == (0, ALL)
    assert [t.__dict__.get("_since") for t in (a, b, c)] == ["a use"] * 3
    assert not linked_to(c), "all is known of it"
    assert "_linked" in a.__dict__
    resolve_types(a, a.__dict__["_spec"].with_(undecided_mask=0), "another")
    assert (types(a), types(b), types(c)) == ((A, 0), (A, 0), (A | C, 0))
    assert a.__dict__["_since"] == "a use", "the first that made a gradient Partial"
    assert "_linked" not in a.__dict__
    assert "_linked" not in b.__dict__


def test_who_makes_gradients_partial() -> None:
    a = leaf()
    resolve_types(a, a.__dict__["_spec"].with_(undecided_mask=A), "whole")
    assert types(a) == (0, A)
    assert "_since" not in a.__dict__, "its gradient is reduced already"
    resolve_types(a, a.__dict__["_spec"].with_(grad_partial_mask=A, undecided_mask=0))
    assert types(a) == (A, 0)
    assert "_since" not in a.__dict__, "no words"


def test_what_is_not_undecided_stays() -> None:
    a = leaf(undecided_mask=B, grad_partial_mask=A)
    before = a.__dict__["_spec"]
    resolve_types(a, before)
    assert a.__dict__["_spec"] is before
    resolve_types(a, spec(4, undecided_mask=0, grad_partial_mask=B | C))
    assert types(a) == (A | B, 0), "of c it was known that the gradient is whole"
    plain = torch.zeros(4)
    resolve_types(plain, spec(4))
    assert "_spec" not in plain.__dict__
    resolve_types(None, spec(4))  # type: ignore[arg-type]


def test_in_what_gradients_are_summed() -> None:
    """A parameter says it itself; of all else what is used says it, where anything is decided."""
    value, parameter, known = leaf(accumulate_dtype=BF16), leaf(), leaf(undecided_mask=A, grad_partial_mask=B)
    parameter._is_param = True  # type: ignore[attr-defined]
    link([value, parameter, known])
    resolve_types(value, spec(4, undecided_mask=A, grad_partial_mask=B | C, accumulate_dtype=F64))
    assert value.__dict__["_spec"].accumulate_dtype is F64
    assert parameter.__dict__["_spec"].accumulate_dtype is None
    assert known.__dict__["_spec"].accumulate_dtype is None
    assert (types(value), types(parameter), types(known)) == ((B | C, A), (B | C, A), (B, A))


def test_marks_outlive_a_type_and_what_is_known_of_values_does_not() -> None:
    a = leaf()
    known = spec(4, undecided_mask=0)
    a.__dict__["_spec"] = marked(a.__dict__["_spec"], Marks(known=known))
    resolve_types(a, a.__dict__["_spec"].with_(undecided_mask=0))
    assert types(a) == (0, 0)
    assert marks_of(a.__dict__["_spec"]).known is None


@pytest.mark.parametrize(("size", "leaves", "want"), [(7, (3, 5), True), (8, (3, 5), False), (9, (3, 5), False)])
def test_the_smaller_of_leaves_and_value_is_reduced(size: int, leaves: tuple[int, ...], want: bool) -> None:
    value, wanted = computed(size), spec(size, undecided_mask=0, grad_partial_mask=B)
    assert not should_reduce_at_use(value, wanted), "linked to no leaf"
    link([value, computed(100), *(given := [leaf(n) for n in leaves])])
    assert should_reduce_at_use(value, wanted) == want
    assert not should_reduce_at_use(value, spec(size, undecided_mask=0)), "nothing is reduced"
    assert not should_reduce_at_use(given[0], spec(leaves[0], undecided_mask=0, grad_partial_mask=B)), "a leaf itself"
    resolve_types(value, spec(size, undecided_mask=A | C))
    assert not should_reduce_at_use(value, wanted), "b is decided"
    assert should_reduce_at_use(value, spec(size, undecided_mask=0, grad_partial_mask=A)) == want


def test_a_view_follows_the_memory_that_it_is_of() -> None:
    base = carrying(torch.zeros(4, requires_grad=True) * 1, spec(4, undecided_mask=C, grad_partial_mask=A))
    view = carrying(base[1:], spec(3))
    assert resolve_from_base([view])
    assert types(view) == (A, C)
    assert same(linked_to(view), [base, view]), "and what is not known of both is decided together"
    assert not resolve_from_base([view]), "nothing new"
    assert types(base) == (A, C)


def test_a_view_is_told_of_replicated_axes_alone() -> None:
    base = carrying(torch.zeros(4, requires_grad=True) * 1, spec(4, undecided_mask=0, placements=(S0, R, R)))
    view = carrying(base[1:], spec(3))
    assert resolve_from_base([view])
    assert types(view) == (0, A)


def test_what_follows_nothing() -> None:
    base = torch.zeros(4, requires_grad=True) * 1
    free = carrying(torch.zeros(4), spec(4, undecided_mask=0, grad_partial_mask=A))
    for t in (
        leaf(), computed(), carrying(base[1:], spec(3)), carrying(free[1:], spec(3)), torch.zeros(4)[1:],
        carrying((torch.zeros(4, requires_grad=True) * 1)[1:], spec(3, undecided_mask=0)),
    ):  # fmt: skip
        before = t.__dict__.get("_spec")
        assert not resolve_from_base([t])
        assert t.__dict__.get("_spec") is before
    followed = carrying(carrying(base * 1, spec(4, undecided_mask=0))[1:], spec(3))
    assert resolve_from_base([leaf(), followed, leaf()])


def test_memory_is_told_what_was_written_to_a_view_of_it() -> None:
    base = carrying(torch.zeros(4, requires_grad=True) * 1, spec(4, undecided_mask=A | B))
    view, given = carrying(base[1:], spec(3, undecided_mask=B, grad_partial_mask=A)), leaf(3)
    propagate_type_to_base(view, [given])
    assert types(base) == (A, B)
    assert same(linked_to(given), [given, view, base]), "b is decided for all of them"
    resolve_types(given, spec(3, undecided_mask=0, grad_partial_mask=B))
    assert (types(base), types(view)) == ((A | B, 0), (A | B, 0))
    later, split = leaf(3), carrying(base[:1], spec(1, undecided_mask=0, placements=(S0, R, R)))
    base.__dict__["_spec"] = spec(4)
    propagate_type_to_base(split, [later])
    assert types(base) == (0, A), "of an axis that splits the view nothing is known"
    assert not linked_to(later)


def test_a_write_to_what_is_no_view() -> None:
    t, given = computed(undecided_mask=B), leaf()
    before = t.__dict__["_spec"]
    propagate_type_to_base(t, [given])
    assert t.__dict__["_spec"] is before
    assert same(linked_to(t), [t, given])
    known, other = computed(undecided_mask=0), leaf()
    propagate_type_to_base(known, [other])
    assert not linked_to(other)
    base = torch.zeros(4, requires_grad=True) * 1
    view = carrying(base[1:], spec(3, undecided_mask=A))
    propagate_type_to_base(view, [other])
    assert "_spec" not in base.__dict__
    assert same(linked_to(view), [view, other])


def test_memory_of_another_mesh_is_told_nothing() -> None:
    elsewhere = mw.Mesh({"x": 2})
    base = carrying(torch.zeros(4, requires_grad=True) * 1, Spec((4,), F32, Layout(elsewhere), 0, 1))
    before = base.__dict__["_spec"]
    propagate_type_to_base(carrying(base[1:], spec(3, undecided_mask=0)), [])
    assert base.__dict__["_spec"] is before


def test_memory_keeps_its_marks_and_not_what_is_known_of_its_values() -> None:
    base = carrying(torch.zeros(4, requires_grad=True) * 1, spec(4))
    base.__dict__["_spec"] = marked(base.__dict__["_spec"], Marks(known=spec(4, undecided_mask=0)))
    propagate_type_to_base(carrying(base[1:], spec(3, undecided_mask=0, grad_partial_mask=A)), [])
    assert types(base) == (A, 0)
    assert marks_of(base.__dict__["_spec"]).known is None
