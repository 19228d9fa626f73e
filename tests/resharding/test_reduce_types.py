"""Every reduction that a Partial can have: conversions, ops, gradients; and that every plan is the cheapest."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
import torch

import meshwright as mw
from meshwright.errors import ConversionError, LayoutError
from meshwright.layout import REDUCE_OPS, Layout, Partial, Replicate, Shard, Spec, commute, unreducible
from meshwright.resharding import conversions
from meshwright.resharding.cost import step_bytes
from meshwright.resharding.planner import plan
from meshwright.testing import check_conversion
from tests.support.compare import FOUR, GRID, S0, R, on_ranks, same

THREE = mw.Mesh({"x": 3})
MESHES = {"2": ({"a": 2}, (4, 2)), "3": ({"a": 3}, (4, 2)), "3 empty": ({"a": 3}, (1, 2))}


def types(ndim, dtype):
    partial = [(Partial(op), 0) for op in REDUCE_OPS if not unreducible(op, dtype)]
    return [(Replicate(), 0), (Replicate(), 1), *[(Shard(d), 0) for d in range(ndim)], *partial]


def specs(mesh, shape, dtype):
    for combo in itertools.product(types(len(shape), dtype), repeat=mesh.ndim):
        if commute(*(p for p, _ in combo)):
            yield Spec(shape, dtype, Layout(mesh, [p for p, _ in combo]), sum(r << a for a, (_, r) in enumerate(combo)))


@pytest.mark.parametrize("mesh", MESHES)
def test_every_conversion_on_one_axis(mesh):
    axes, shape = MESHES[mesh]
    for src, dst in itertools.product(list(specs(mw.Mesh(axes), shape, torch.float64)), repeat=2):
        check_conversion(src, dst)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_conversions_of_what_has_no_gradient(dtype):
    given = [s for s in specs(mw.Mesh({"a": 3}), (4, 2), dtype) if not s.grad_partial_mask]
    for src, dst in itertools.product(given, repeat=2):
        check_conversion(src, dst)


def test_conversions_on_two_axes():
    given = list(specs(mw.Mesh({"a": 2, "b": 2}), (5, 1), torch.float64))
    for src, dst in random.Random(0).sample(list(itertools.product(given, repeat=2)), 80):
        check_conversion(src, dst)


# ------------------------------------------------------------------------------------------ made, mixed, refused


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_a_replicated_value_becomes_any_partial(op):
    """One rank keeps a product's value and the others bring ones; it read back as its n-th power."""
    x = torch.tensor([3.0, -5.0, 0.5], dtype=torch.float64)

    def run():
        leaf = mw.shard_tensor(x.clone().requires_grad_(), FOUR, [R])
        made = mw.reshard(leaf, [Partial(op)])
        (mw.reshard(made, [R]) * x).sum().backward()
        return mw.unshard(made.detach()), mw.unshard(leaf.grad)

    def run_on_two():
        leaf = mw.shard_tensor(x.clone().requires_grad_(), GRID, [R, R])
        made = mw.reshard(leaf, [Partial(op), Partial(op)])
        (mw.reshard(made, [R, R]) * x).sum().backward()
        return mw.unshard(made.detach()), mw.unshard(leaf.grad)

    for value, grad in (*on_ranks(run), *on_ranks(run_on_two, GRID)):
        torch.testing.assert_close(value, x)
        torch.testing.assert_close(grad, x)


OPS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: b - a,
    "where": lambda a, b: torch.where(b > 0, a, b),
    "cat": lambda a, b: torch.cat([b, a]),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "matmul": lambda a, b: a @ b.t(),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 0) + 0 * b,
    "masked_fill with a tensor": lambda a, b: a.masked_fill(b > 0, b[0, 0]),
    "scatter_add": lambda a, b: a.scatter_add(0, torch.tensor([[1, 0], [1, 3]]), b[:2] + 0 * b[2:]),
    "select_scatter": lambda a, b: torch.select_scatter(a, b[0], 0, 1),
    "slice_scatter": lambda a, b: torch.slice_scatter(a, b[:2], 0, 1, 3),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("op", ["avg", "max", "product"])
def test_with_any_other_layout(name, op):
    """Without gradients, where a change of reduction alone is free, and with them."""
    x, y = torch.randn(4, 2, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)

    def run(a, b):
        with torch.no_grad():
            first = OPS[name](a, b)
        a, b = (a.sin(), b.sin()) if op == "product" else (a, b)
        made = OPS[name](a, b)
        wanted = [t for t in (a, b) if t.requires_grad]
        return first, made, *(torch.autograd.grad((made * made).sum(), wanted) if wanted else ())

    for q in (Partial(), R, S0, Partial(op)):
        grads = [op != "product", q != Partial("product")]
        leaves = [(t.clone().requires_grad_(g), (p,)) for t, p, g in zip((x, y), (Partial(op), q), grads, strict=True)]
        same(run, *leaves, mesh=THREE)


@pytest.mark.parametrize("op", ["avg", "max", "min"])
def test_the_gradient_of_a_leaf_is_that_of_its_value(op):
    """Its parts have their shares, which sum up to it: they may differ by rank, so it is no Replicate."""
    parts = torch.tensor([[1.0, 7.0], [4.0, 2.0], [4.0, 3.0], [0.0, 7.0]], dtype=torch.float64)
    fold = {"avg": lambda t: t.mean(0), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0)}[op]

    def run():
        x = mw.from_local(parts[mw.ranks.runtime.RT.rank], FOUR, [Partial(op)]).requires_grad_()
        seen = []
        x.register_hook(lambda g: seen.append(mw.unshard(g)))
        (x.sin() * 3).sum().backward()
        (g,) = torch.autograd.grad((x.sin() * 3).sum(), x)
        assert x.grad.placements == (Partial(),)
        seed = torch.tensor([2.0, 3.0], dtype=torch.float64)
        (of_itself,) = torch.autograd.grad(x * 1, x, seed)
        torch.testing.assert_close(mw.unshard(of_itself), seed)
        return mw.unshard(x.grad), mw.unshard(g), seen[0]

    want = fold(parts).cos() * 3
    for got in on_ranks(run):
        for g in got:
            torch.testing.assert_close(g, want)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_the_gradient_of_parts_with_ties_and_zeros(op):
    """Below zero, several that hold an extremum, and a product of which one factor, or two, are zero."""
    parts = torch.tensor([[-1.0, -7, 2, 0], [-4, -2, 2, 3], [-4, -2, 0.5, 0], [-3, -9, 2, 5]], dtype=torch.float64)
    w = torch.tensor([2.0, 3, -1, 4], dtype=torch.float64)
    whole = parts.clone().requires_grad_()
    folds = {"sum": whole.sum(0), "avg": whole.mean(0), "max": whole.amax(0), "min": whole.amin(0)}
    (folds.get(op, whole.prod(0)) * w).sum().backward()

    def run():
        local = parts[mw.ranks.runtime.RT.rank].clone().requires_grad_()
        found = []
        for to in (R, S0):
            y = mw.reshard(mw.from_local(local * 1, FOUR, [Partial(op)]), [to])
            found += torch.autograd.grad((y * w).sum(), local)
        return found

    for rank, found in enumerate(on_ranks(run)):
        for got in found:
            torch.testing.assert_close(got, whole.grad[rank])


def test_a_leaf_that_is_a_product_has_no_gradient():
    def run():
        x = mw.from_local(torch.full((2,), 2.0), FOUR, [Partial("product")]).requires_grad_()
        x.sin().sum().backward()
        for ask in (lambda: x.grad, lambda: torch.autograd.grad(x.sin().sum(), x), lambda: x.register_hook(print)):
            with pytest.raises(LayoutError, match=r"leaf has no gradient. Reduce it with mw.reshard first"):
                ask()

    on_ranks(run)


def test_reductions_that_do_not_commute_are_refused():
    with pytest.raises(LayoutError, match="reductions by sum and by max do not commute, so the value would depend on"):
        Layout(GRID, [Partial(), Partial("max")])
    Layout(GRID, [Partial(), Partial("avg")])
    three = mw.Mesh({"a": 2, "b": 2, "c": 2})
    for p, q in itertools.product(REDUCE_OPS, repeat=2):
        for places in (lambda a, b: [a, b, R], lambda a, b: [a, R, b]):
            if p == q or {p, q} == {"sum", "avg"}:
                Layout(three, places(Partial(p), Partial(q)))
                continue
            with pytest.raises(LayoutError, match=f"reductions by {p} and by {q} do not commute"):
                Layout(three, places(Partial(p), Partial(q)))

    def run():
        x = mw.shard_tensor(torch.ones(2), GRID, [Partial(), R])
        try:
            mw.reshard(x, {"tp": Partial("max")})
        except LayoutError as error:
            return str(error)

    assert all("do not commute" in told for told in on_ranks(run, GRID))


def test_ops_never_mix_them():
    """A gather from a split dim would leave a sum on one axis where a maximum is on the other."""
    x, i = torch.randn(4, 2, dtype=torch.float64), torch.tensor([[0, 1], [3, 2]])
    for p in ((Partial("max"), S0), (S0, Partial("min")), (S0, Partial("product"))):
        same(lambda x: [x.gather(0, i), x.sum(0), x.amax(0), x.index_select(0, i[1])], (x, p), mesh=GRID)
    y = torch.randn(4, 2, dtype=torch.float64)
    for op in ("max", "min", "product"):  # one of the two is reduced first
        same(lambda x, y: [x + y, y - x, torch.cat([x, y]), x.lerp(y, 0.5)], (x, (Partial(),)), (y, (Partial(op),)))


@pytest.mark.parametrize(
    ("op", "dtype", "told"),
    [("any", torch.float32, "compare first"), ("all", torch.int64, "compare first"), ("avg", torch.int64, "not exact"),
     ("max", torch.complex64, "not supported"), ("product", torch.complex64, "not supported")],
)  # fmt: skip
def test_wrong_dtypes_are_refused_when_made(op, dtype, told):
    x = torch.ones(2, dtype=dtype)

    def run():
        for make in (
            lambda: mw.from_local(x, FOUR, [Partial(op)]),
            lambda: mw.shard_tensor(x, FOUR, [Partial(op)]),
            lambda: mw.reshard(mw.shard_tensor(x, FOUR, [R]), [Partial(op)]),
        ):
            with pytest.raises(LayoutError, match=told):
                make()

    on_ranks(run)


# ------------------------------------------------------------------------------------------------ cheapest plans


def layouts(mesh, ndim):
    kinds = [Replicate(), Partial(), *(Shard(d) for d in range(ndim))]
    for placements in itertools.product(kinds, repeat=mesh.ndim):
        axes = [[a for a, p in enumerate(placements) if p == Shard(d)] for d in range(ndim)]
        for orders in itertools.product(*(itertools.permutations(split) for split in axes)):
            yield Layout(mesh, placements, order=dict(enumerate(orders)), ndim=ndim)


def everything(mesh, shape):
    """Every spec of a shape, and from each all steps of convert that there are."""
    found = {}
    for layout in layouts(mesh, len(shape)):
        for mask in range(1 << mesh.ndim):
            found[Spec(shape, torch.float32, layout, mask)] = []
    kinds = [(Replicate(), 0), (Replicate(), 1), (Partial(), 0), *((Shard(d), 0) for d in range(len(shape)))]
    for spec, steps in found.items():
        for k in range(1, mesh.ndim + 1):
            for axes, (to, reduced) in itertools.product(itertools.combinations(range(mesh.ndim), k), kinds):
                placements = spec.layout.placements
                if k > 1 and (isinstance(to, Shard) or len({placements[a] for a in axes}) > 1):
                    continue
                split = placements[axes[0]]
                if isinstance(split, Shard) and (
                    k > 1 or to == split or spec.layout.dim_axes()[split.dim][-1] != axes[0]
                ):
                    continue
                layout, mask = spec.layout, spec.grad_partial_mask
                for a in axes:
                    layout, mask = layout.replace(a, to), mask & ~(1 << a) | reduced << a
                target = Spec(shape, torch.float32, layout, mask)
                if k > 1 and len({spec.grad_partial_mask >> a & 1 for a in axes}) > 1:
                    continue
                try:
                    step = conversions.between(spec, target, axes)
                except ConversionError:
                    continue
                steps.append((target, step_bytes(step) + step_bytes(step.transpose())))
    return found


def distances(graph, start):
    best, queue, count = {start: 0.0}, [(0.0, 0, start)], itertools.count(1)
    while queue:
        cost, _, here = heapq.heappop(queue)
        if cost > best[here]:
            continue
        for to, price in graph[here]:
            if cost + price < best.get(to, float("inf")):
                best[to] = cost + price
                heapq.heappush(queue, (cost + price, next(count), to))
    return best


@pytest.mark.parametrize(
    ("sizes", "shape"), [((4,), (4, 8)), ((2, 3), (6, 6, 6)), ((2, 2, 2), (8, 8))], ids=["4", "2x3", "2x2x2"]
)
def test_no_sequence_of_steps_is_cheaper(sizes, shape):
    mesh = mw.Mesh({f"a{i}": n for i, n in enumerate(sizes)})
    graph, draw = everything(mesh, shape), random.Random(0)
    for src in draw.choices(list(graph), k=8):
        best = distances(graph, src)
        for dst in draw.choices(list(graph), k=40):
            made = plan(src, dst)
            assert made.bytes == pytest.approx(best[dst]), (src, dst, made.steps, best[dst])


def test_plans_that_were_dear():
    mesh = mw.Mesh({"a": 2, "b": 2})
    whole = 8 * 8 * 4

    def spec(*p, order=None):
        return Spec((8, 8), torch.float32, Layout(mesh, p, order=order, ndim=2))

    # The minor axis goes to another dim for a while: nothing is gathered.
    assert plan(spec(S0, S0), spec(Partial(), S0)).forward_bytes == pytest.approx(whole / 4)
    swapped = plan(spec(S0, S0), spec(S0, S0, order={0: ("b", "a")}))
    assert swapped.bytes < plan(spec(S0, S0), spec(R, R)).forward_bytes * 1.5
