"""Writes: in place, into parts, through views; the right value and gradient whatever layout the target has."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from tests.support.compare import FOUR, S0, S1, P, R, on_ranks, ramp, same
from tests.support.sweep import sweep


def r(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


ROWS = torch.arange(6) % 2 == 0
PLACES = (torch.arange(18) % 4 == 1).reshape(6, 3)


def item(index: Any, value: Any) -> Callable[..., Tensor]:
    def write(x: Tensor, v: Tensor) -> Tensor:
        x = x * 1.0
        x[index] = value(v) if callable(value) else value
        return x

    return write


def added(x: Tensor, v: Tensor) -> Tensor:
    x = x * 1.0
    x[ROWS] += v[ROWS]
    return x


def from_mask_of_values(x: Tensor, v: Tensor) -> Tensor:
    x = x * 1.0
    x[v > 0] = v[v > 0] * 2.0
    return x


def gathered(name: str, *args: Any, **kwargs: Any) -> Callable[..., Tensor]:
    """A method in place, on a tensor that has a history."""
    return lambda x, *more: getattr(x * 1.0, name)(*args, *more, **kwargs)


WRITES: dict[str, tuple[Any, ...]] = {
    "rows by mask": (item(ROWS, lambda v: v[:3]), r(6, 3), r(6, 3, seed=1)),
    "rows of another by mask": (item(ROWS, lambda v: v[ROWS]), r(6, 3), r(6, 3, seed=1)),
    "elements by mask": (item(PLACES, lambda v: v[:5, 0]), r(6, 3), r(6, 3, seed=1)),
    "mask and int": (item((ROWS, 1), 7.0), r(6, 3), r(6, 3, seed=1)),
    "mask and ellipsis": (item((..., torch.tensor([True, False, True])), lambda v: v[:, :2]), r(6, 3), r(6, 3, seed=1)),
    "True": (item(True, lambda v: v), r(6, 3), r(6, 3, seed=1)),
    "empty mask": (item(ROWS & ~ROWS, lambda v: v[:0]), r(6, 3), r(6, 3, seed=1)),
    "mask of values": (from_mask_of_values, r(6, 3), r(6, 3, seed=1)),
    "+= by mask": (added, r(6, 3), r(6, 3, seed=1)),
    "uneven": (item(torch.tensor([True, False, True]), lambda v: v), r(3, 5), r(5, seed=1)),
    "masked_scatter_": (gathered("masked_scatter_", PLACES), r(6, 3), r(6, 3, seed=1)),
    "put_": (gathered("put_", torch.tensor([0, 7, 3])), r(6, 3), r(3, seed=1)),
    "put_ accumulate": (gathered("put_", torch.tensor([0, 7, 0]), accumulate=True), r(6, 3), r(3, seed=1)),
    "index_add_": (gathered("index_add_", 0, torch.tensor([0, 3, 3])), r(6, 3), r(3, 3, seed=1)),
    "relu_": (gathered("relu_"), r(6, 3)),
    "add_ a number": (gathered("add_", 1.0), r(6, 3)),
    "cumsum_": (gathered("cumsum_", 0), r(6, 3)),
    "renorm_": (gathered("renorm_", 2, 0, 1.0), r(6, 3)),
    "fill_diagonal_": (gathered("fill_diagonal_", 3.0), r(5, 5)),
    "addmm_": (gathered("addmm_"), r(5, 3), r(5, 4, seed=1), r(4, 3, seed=2)),
    "mul_": (gathered("mul_"), r(5, 3), r(3, seed=1)),
    "t_": (lambda x: (x * 1.0).t_() * r(5, 3), r(3, 5)),
    "unsqueeze_ twice": (lambda x: (x * 1.0).unsqueeze_(0).unsqueeze_(0) * (x * 2.0).unsqueeze_(0), r(3, 5)),
    "squeeze_ twice": (lambda x: (x * 1.0).squeeze_() * (x * 2.0).squeeze_(), r(3, 1, 5)),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_in_any_layout(name: str) -> None:
    fn, *inputs = WRITES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sweep(fn, *inputs, cases=5)


# ------------------------------------------------------------------------------------------ indices in any layout

I4 = torch.tensor([3, 0, 4, 1])
INDEXED: dict[str, tuple[Any, ...]] = {
    "index_put a number": (lambda x, i, v: x.index_put((i,), v, accumulate=True), r(5, 3), I4, r(seed=1)),
    "index_put one row": (lambda x, i, v: x.index_put((i,), v, accumulate=True), r(5, 3), I4, r(1, 3, seed=1)),
    "index_put rows": (lambda x, i, v: x.index_put((i,), v, accumulate=True), r(5, 3), I4, r(4, 3, seed=1)),
    "index_put_": (lambda x, i, v: (x * 1.0).index_put_((i,), v, accumulate=True), r(5, 3), I4, r(seed=1)),
    "index_add alpha": (lambda x, i, v: x.index_add(0, i, v, alpha=0.5), r(5, 3), I4, r(4, 3, seed=1)),
    "index_copy": (lambda x, i, v: x.index_copy(0, i, v), r(5, 3), I4, r(4, 3, seed=1)),
    "index_reduce": (lambda x, i, v: x.index_reduce(0, i, v, "mean"), r(5, 3), I4, r(4, 3, seed=1)),
    "scatter_reduce": (lambda x, i, v: x.scatter_reduce(0, i, v, "sum"), r(5), I4, r(4, seed=1)),
    "put": (lambda x, i, v: x.put(i, v, accumulate=True), r(5, 3), I4, r(4, seed=1)),
    "to itself": (lambda x, i: x.index_add(0, i, x), r(5, 3), torch.tensor([3, 0, 4, 1, 2])),
}


@pytest.mark.parametrize("name", INDEXED)
def test_indices_and_values_in_any_layout(name: str) -> None:
    fn, *inputs = INDEXED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sweep(fn, *inputs, meshes=((3,),), cases=10)


def test_a_tensor_that_is_two_operands_has_one_type() -> None:
    """Added on one rank and cut on all: the gradient of a leaf, or of what is tied to it, is of one type."""

    def run(i: Tensor, x: Tensor) -> list[Tensor]:
        y = x.index_add(0, i, x.t().t()) * r(5, 1, seed=2)
        return list(torch.autograd.grad(y[1:].sum(), [x]))

    same(run, (torch.tensor([2, 1, 3, 0, 4]), (S0,)), (r(5, 1).requires_grad_(), (R,)))


@pytest.mark.parametrize("p", [S0, S1])
def test_what_gave_an_extremum_may_be_written_to(p: Any) -> None:
    """On one device only positions are kept for the backward, of which dims ever are split."""

    def run(x: Tensor) -> list[Tensor]:
        made = []
        for pick in ("max", "min", "median"):
            y = x * 2.0
            values = getattr(y, pick)(0).values
            y.zero_()
            made += [values, *torch.autograd.grad((values * values).sum(), [x])]
        return made

    same(run, (r(5, 3).requires_grad_(), (p,)))


# ------------------------------------------------------------------------------------------ types of what is written


def zeros_like(x: Tensor) -> Tensor:
    """Zeros that are whole on every rank and of no type yet."""
    zeros = torch.zeros(*x.shape, dtype=x.dtype)
    return mw.shard_tensor(zeros, x.mesh, [R]) if isinstance(x, mw.DistTensor) else zeros


def into(write: Callable[..., Any]) -> Callable[..., Tensor]:
    def run(x: Tensor, *params: Tensor) -> Tensor:
        h = zeros_like(x)
        write(h, *params)
        return h * x

    return run


def two_views(h: Tensor, a: Tensor, b: Tensor) -> None:
    h[:, 0].copy_(a.expand(8))
    h[:, 1].copy_(b.expand(8))


def a_view_made_before(x: Tensor, a: Tensor) -> Tensor:
    h = zeros_like(x)
    view, other = h[:, 0], h.T
    view.add_(a)
    return other.T * x


UNDECIDED: dict[str, tuple[Any, ...]] = {
    "setitem": (into(lambda h, a: h.__setitem__((slice(None), 0), a)), r()),
    "add_": (into(lambda h, a: h.add_(a)), r(3)),
    "copy_": (into(lambda h, a: h.copy_(a)), r(3)),
    "index_add_": (into(lambda h, a: h.index_add_(0, torch.tensor([1, 1]), a)), r(2, 3)),
    "two writes": (into(lambda h, a, b: h.add_(a).mul_(b)), r(3), r(3, seed=1)),
    "a view": (into(lambda h, a: h[:, 0].add_(a)), r()),
    "a view of a view": (into(lambda h, a: h.T[0].add_(a)), r()),
    "two views": (into(two_views), r(), r(seed=1)),
    "a view made before": (a_view_made_before, r()),
}


@pytest.mark.parametrize("name", UNDECIDED)
@pytest.mark.parametrize("p", [S0, S1, R])
def test_a_parameter_written_into_a_replicated_tensor(name: str, p: Any) -> None:
    """Its gradient is that of every rank's use of what it was written into."""
    fn, *params = UNDECIDED[name]

    def run(x: Tensor, *params: Tensor) -> list[Tensor]:
        y = fn(x, *params)
        return list(torch.autograd.grad((y * r(8, 3, seed=9)).sum(), [x, *params]))

    same(run, (r(8, 3).requires_grad_(), (p,)), *[(t.requires_grad_(), (R,)) for t in params])


@pytest.mark.parametrize("p", [S0, S1, P])
@pytest.mark.parametrize("q", [S0, S1, R])
def test_a_gathered_value_used_in_parts(p: Any, q: Any) -> None:
    """Gathered by name, then sliced for its use: the slice is what is used."""

    def run(x: Tensor, z: Tensor) -> list[Tensor]:
        full = mw.reshard(x * 2.0, [R]) if isinstance(x, mw.DistTensor) else x * 2.0
        y = full * z
        return [y, *torch.autograd.grad((y * r(5, 3, seed=9)).sum(), [x, z])]

    same(run, (r(5, 3).requires_grad_(), (S0 if p == P else p,)), (r(5, 3, seed=1).requires_grad_(), (q,)))


def test_a_write_to_a_leaf_is_refused_everywhere() -> None:
    def run() -> None:
        x = mw.shard_tensor(ramp(8, 3), FOUR, [S0]).requires_grad_()
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
            x[ROWS.repeat(2)[:8]] = 1.0
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
            x.cumsum_(0)
        with torch.no_grad():
            x[torch.arange(8) > 3] = x[torch.arange(8) < 4] * 2.0
        want = ramp(8, 3)
        want[4:] = want[:4] * 2.0
        assert torch.equal(mw.unshard(x), want)

    on_ranks(run)


def test_a_number_of_another_kind_is_refused_as_on_one_device() -> None:
    def run() -> None:
        x = mw.shard_tensor(torch.arange(8), FOUR, [S0])
        with pytest.raises(RuntimeError, match="result type Float can't be cast"):
            x.add_(0.5)
        with pytest.raises(RuntimeError, match="Index put requires the source and destination dtypes match"):
            x[x > 3] = torch.ones(4)

    on_ranks(run)


BETWEEN: list[Any] = [
    (slice(None), torch.tensor([1]), 2, torch.tensor([0, 1, 3])),
    (slice(None), torch.tensor([1, 0, 2]), 2, torch.tensor([0, 1, 3])),
    (torch.tensor([0, 1]), 2, slice(None), torch.tensor([1, 2])),
    (torch.tensor([0, 1]), 2, torch.tensor([1, 2])),
    (slice(None), [0, 2], 2, [1, 3]),
    (slice(None), torch.tensor([0, 1]), None, torch.tensor([1, 2])),
    (slice(0, 1), 2, torch.tensor([1, 2]), 1),
]


@pytest.mark.parametrize("index", BETWEEN, ids=range(len(BETWEEN)))
def test_a_number_between_index_tensors_is_no_gap(index: Any) -> None:
    """PyTorch takes the number first; what index tensors look up stands where they are, and not in front."""
    mesh, full = mw.Mesh({"a": 3}), torch.arange(5 * 3 * 4 * 4.0).reshape(5, 3, 4, 4)

    def run(lay: Any, way: str) -> list[torch.Tensor]:
        x = lay(full.clone()).requires_grad_()
        y = x * 1
        if way == "read":
            y = y[index]
        elif way == "write":
            y[index] = 7.0
        else:
            y[index] *= 3
        (g,) = torch.autograd.grad((y * y).sum(), x)
        return [mw.unshard(t).detach() if isinstance(t, mw.DistTensor) else t.detach() for t in (y, g)]

    def every() -> list[Any]:
        layouts = [mw.Replicate(), *[mw.Shard(d) for d in range(4)]]
        made = {(p, way): run(lambda t, p=p: mw.shard_tensor(t, mesh, [p]), way) for p in layouts for way in WAYS}
        return list(made.items())

    for (_, way), got in mw.simulate(every, mesh)[0]:
        for a, b in zip(got, run(lambda t: t, way), strict=True):
            torch.testing.assert_close(a, b)


WAYS = ("read", "write", "change")


@pytest.mark.thin(3)
@pytest.mark.parametrize("sizes", [{"a": 2, "b": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 4}], ids=str)
@pytest.mark.parametrize("op", ["masked_fill_", "masked_fill_ of a view", "clamp_"])
def test_gradients_of_a_write_that_is_made_elsewhere_and_brought_back(sizes: dict[str, int], op: str) -> None:
    """Brought back by a plan from before the target had its types, gradients were of the first ranks' part alone."""
    mesh, n = mw.Mesh(sizes), 16
    mask = torch.arange(n) % 3 == 0
    weights = torch.arange(1.0, n + 1, dtype=torch.float64)
    whole, split = mw.Replicate(), mw.Shard(0)

    def gradient(x: Any, mask: Any, by: Any) -> Any:
        v = x.clone()
        if op == "clamp_":
            v.clamp_(-0.5, 0.5).mul_(by)
        else:
            (v[:] if "view" in op else v).masked_fill_(mask, 2.0)
        (v * weights).sum().backward()
        return x.grad

    plain = torch.linspace(-1, 1, n, dtype=torch.float64)
    wanted = gradient(plain.clone().requires_grad_(), mask, weights)

    def run(laid: Any, masks: Any) -> Any:
        x = mw.reshard(mw.shard_tensor(plain, mesh, {}), laid).detach().requires_grad_()
        given = (mw.shard_tensor(t, mesh, masks) for t in (mask, weights))
        return mw.unshard(gradient(x, *given))

    for laid in itertools.product((whole, split, mw.Partial(), mw.Partial("avg")), repeat=2):
        for masks in itertools.product((whole, split), repeat=2):
            for found in mw.simulate(functools.partial(run, list(laid), list(masks)), mesh):
                assert torch.allclose(found, wanted, rtol=0, atol=1e-12), (laid, masks)
