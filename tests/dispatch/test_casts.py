"""What autocast casts for an op, and the casts of weights that are kept, by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.dispatch.autocast import ONCE, CachedCast, InputCasts, casts, state
from meshwright.layout import Layout, Spec

Tensor = torch.Tensor
BF16, F32, F64, I64 = torch.bfloat16, torch.float32, torch.float64, torch.int64
MESH = mw.Mesh({"a": 2})


def region(**options: Any) -> Any:
    return torch.autocast("cpu", BF16, **options)


def after_a_view(a: Tensor, b: Tensor, c: Any = None) -> Tensor:
    return torch.mm(a.t(), b)


@pytest.mark.parametrize(
    ("func", "dtypes", "want", "itself"),
    [
        (torch.mm, (F32, F32), {0: BF16, 1: BF16}, True),
        (torch.mm, (BF16, F32), {1: BF16}, True),
        (torch.mm, (F32, BF16), {0: BF16}, True),
        (torch.mm, (BF16, BF16), None, True),
        (torch.mm, (F64, F64), None, True),
        (torch.add, (F32, F32), None, True),
        (torch.add, (BF16, F32), None, True),
        (F.mse_loss, (BF16, BF16), {0: F32, 1: F32}, True),
        (F.mse_loss, (F32, BF16), {1: F32}, True),
        (after_a_view, (F32, F32), {0: BF16, 1: BF16}, False),
        (after_a_view, (F32, F32, I64), {0: BF16, 1: BF16}, False),
        (after_a_view, (BF16, BF16), None, False),
    ],
)
def test_what_is_cast(func: Callable[..., Any], dtypes: Any, want: Any, itself: bool) -> None:
    specs = [Spec((4, 4), d, Layout(MESH)) for d in dtypes]
    given = [torch.zeros(4, 4, dtype=d) for d in dtypes]
    with region():
        found = casts(func, specs, tuple(given), {}, "cpu")
        if func is torch.mm:
            assert casts(func, specs, (given[0],), {"mat2": given[1]}, "cpu") == found
    assert found == (None if want is None else InputCasts("cpu", want, itself))


def test_a_leaf_that_gets_its_type_where_autocast_casts() -> None:
    """A whole leaf is undecided until a split weight uses it: the call is planned anew, and cast as well."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    x, leaf = torch.randn(2, 3, 4), torch.randn(3, 4)

    def used(one: Any, two: Any, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        with region():
            one(x) + t  # which links the leaf to others
            made = two(x + t)
        made.float().square().sum().backward()
        assert t.grad is not None
        return made, t.grad

    want, of_leaf = used(first, second, x, leaf.clone().requires_grad_())

    def run() -> tuple[Any, Tensor, Tensor]:
        one = mw.shard_module(copy.deepcopy(first), MESH)
        two = mw.shard_module(copy.deepcopy(second), MESH, {"*": {"a": mw.Shard(0)}})
        laid = mw.shard_tensor(x, MESH, {}), mw.shard_tensor(leaf, MESH, {}).requires_grad_()
        made, grad = used(one, two, *laid)
        return made.spec.layout, mw.unshard(made.detach()), mw.unshard(grad)  # type: ignore[attr-defined]

    for layout, made, grad in mw.simulate(run, MESH):
        assert layout == Layout(MESH, {"a": mw.Shard(2)}, ndim=3)
        torch.testing.assert_close(made, want.detach(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(grad, of_leaf, rtol=5e-2, atol=5e-2)


def test_a_call_that_is_planned_anew_where_autocast_casts_in_a_captured_step() -> None:
    """As above: the fakes of a capture are no DistTensors, and their casts are global calls, too."""
    torch.manual_seed(0)
    first, second, table = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Embedding(5, 4)
    model, x = torch.nn.ModuleList([first, table, second]), torch.randn(3, 2, 4)
    ids = torch.arange(6).view(3, 2) % 5

    def loss(m: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        with region():
            h = m[0](batch[0])
            h = h + m[2](h + m[1](batch[1])).tanh()
        return h.float().square().mean()

    want = loss(model, (x, ids)).item()

    def run() -> float:
        mesh = mw.Mesh({"dp": 2, "tp": 2})
        layouts: dict[str, Any] = {n: {} for n, _ in model.named_parameters()}
        layouts |= {"2.weight": {"tp": mw.Shard(0)}, "2.bias": {"tp": mw.Shard(0)}}
        step = mw.compile_step(
            copy.deepcopy(model), loss, None, (x, ids), mesh=mesh, layouts=layouts, batch={"dp": mw.Shard(0)}, fsdp="dp"
        )
        return mw.unshard(step((x, ids))).item()

    for got in mw.simulate(run, mw.Mesh({"dp": 2, "tp": 2})):
        assert abs(got - want) < 2e-2 * want


def test_what_fakes_refuse_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    specs = [Spec((2, 3, 3), d, Layout(MESH)) for d in (F32, BF16)]
    with region():
        assert casts(torch.bmm, specs, tuple(torch.empty(2, 3, 3, dtype=s.dtype) for s in specs), {}, "cpu") is not None
    assert not caplog.records


def test_nothing_is_cast_outside_of_autocast() -> None:
    specs, given = [Spec((4, 4), F32, Layout(MESH))] * 2, (torch.zeros(4, 4),) * 2
    assert casts(torch.mm, specs, given, {}, "cpu") is None
    with region(enabled=False):
        assert casts(torch.mm, specs, given, {}, "cpu") is None
    with region():
        assert casts(torch.mm, specs, (given[0], 3), {}, "cpu") is None, "PyTorch refuses it"


def test_what_plans_depend_on() -> None:
    assert state() == (False, False)
    with region():
        assert state() == (BF16, False)
        with torch.autocast("cpu", torch.float16):
            assert state() == (torch.float16, False)
        with region(enabled=False):
            assert state() == (False, False)


def test_an_op_meets_tensors_of_these_dtypes_outside_of_autocast() -> None:
    x, y, z, n = torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=I64)

    def told(a: Tensor, b: Any, *, c: Tensor) -> Any:
        return a.dtype, b[0].dtype, b[1].dtype, c.dtype, a is x, torch.is_autocast_enabled("cpu")

    with region():
        for at, want in (({0: BF16}, (BF16, F32, I64, F32)), ({1: BF16, 3: F64}, (F32, BF16, I64, F64))):
            found = InputCasts("cpu", at).first(told, lambda t, s: t, (x, [y, n]), {"c": z})
            assert found == (*want, 0 not in at, False)


def test_casts_of_leaves_are_those_that_autocast_keeps() -> None:
    w = torch.ones(3, requires_grad=True)

    def given(kept: InputCasts) -> Tensor:
        made: Tensor = kept.first(lambda t: t, lambda t, s: t, (w,), {})
        return made

    with region():
        weight = InputCasts("cpu", {0: BF16})
        assert given(weight) is given(weight), "by PyTorch's own cache"
        assert given(InputCasts("cpu", {0: BF16}, itself=False)) is not given(
            InputCasts("cpu", {0: BF16}, itself=False)
        )
        assert given(InputCasts("cpu", {0: F64})) is not given(InputCasts("cpu", {0: F64}))
        assert given(InputCasts("cpu", {0: F64})).dtype is F64
        one = given(weight)
    with region():
        assert given(weight) is not one


def test_a_weight_that_is_no_leaf_is_cast_once() -> None:
    leaf, noted = torch.ones(3, requires_grad=True), list[Tensor]()
    w, once = leaf * 2, CachedCast("cpu", noted.append)
    with region():
        a, b = once(w, BF16), once(w, BF16)
        assert (a.dtype, len(noted)) == (BF16, 1)
        assert a is not b
        assert a._base is not None or a.data_ptr() == b.data_ptr() == noted[0].data_ptr()
        with pytest.raises(RuntimeError, match=r"bfloat16 is kept where autocast now asks for torch.float16"):
            once(w, torch.float16)
        with torch.no_grad():
            assert once(w, BF16).data_ptr() == noted[0].data_ptr()
        once.forget()
        assert (once.of, once.made) == (None, None)
        c = once(w, BF16)
        assert len(noted) == 2
        (a.sum() + c.sum()).backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [4.0] * 3
    with region():
        once(w, BF16)
        assert len(noted) == 3, "a region later it is cast anew"
        known = once.made
        plain = once(torch.ones(3), BF16)
        assert (plain.dtype, len(noted), once.made is known) == (BF16, 3, True)
    with region():
        assert once(torch.ones(3), BF16).dtype is BF16
        assert (len(noted), once.made is known) == (3, True), "of what has no gradient nothing is kept"
    assert CachedCast("cpu").noted is None
    with region():
        assert CachedCast("cpu")(w, BF16).dtype is BF16


def test_who_casts_a_weight_once() -> None:
    w, plain, asked = torch.ones(2) * 2, torch.ones(2), list[Any]()

    def once(t: Tensor, dtype: torch.dtype) -> Tensor:
        asked.append((t is w, dtype))
        return t.to(dtype)

    w.__dict__[ONCE] = once
    with region():
        args, kwargs = InputCasts("cpu", {0: BF16, 2: BF16}).once((w, plain), {"x": [w, w]})
        assert [t.dtype for t in (*args, *kwargs["x"])] == [BF16, F32, BF16, F32]
        assert asked == [(True, BF16)] * 2
        for casts_ in (
            InputCasts("cpu", {0: BF16}, itself=False),
            InputCasts("cpu", {0: F64}),
            InputCasts("cpu", {1: BF16}),
        ):
            assert casts_.once((w, plain), {}) == ((w, plain), {})
        half = torch.ones(2, dtype=F64)
        half.__dict__[ONCE] = once
        assert InputCasts("cpu", {0: BF16}).once((half,), {})[0][0] is half, "autocast keeps casts of float32 alone"
    assert len(asked) == 2
