"""Partial values: they flow through linear ops, are reduced once and as late as it pays, and count nothing twice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright import collective
from meshwright.ranks import runtime
from meshwright.strategy_selection import search
from tests.support.compare import FOUR, GRID, S0, S1, P, R, laid, on_ranks, plain, ramp, same

X, Y = ramp(8, 4), ramp(8, 4).flip(0).contiguous() + 0.5


def dist(t, *p, mesh=FOUR):
    return laid(t, mesh, p)


def kinds(fn):
    """Result of ``fn`` and the collectives that ran in it."""
    with collective.counting() as counts:
        made = fn()
    return made, counts.kinds


# ------------------------------------------------------------------------------------------ stays Partial

LINEAR = {
    "add": lambda x: x + x,
    "scale": lambda x: x * 3.0,
    "factor": lambda x: torch.mul(ramp(8, 4), x),
    "divide": lambda x: x / 2,
    "neg": lambda x: -x,
    "sub": lambda x: x - 2 * x,
    "transpose": lambda x: x.t(),
    "view": lambda x: x.view(4, 8),
    "slice": lambda x: x[1:3, ::2],
    "cast": lambda x: x.float(),
    "matmul": lambda x: x @ ramp(4, 1),
    "linear": lambda x: F.linear(x, ramp(1, 4), ramp(1)),
    "sum of a dim": lambda x: x.sum(0),
    "mean": lambda x: x.mean(1),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "cumsum": lambda x: x.cumsum(0),
    "flip": lambda x: x.flip(0),
    "index_select": lambda x: x.index_select(0, torch.tensor([1, 1, 2])),
    "where of parts": lambda x: torch.where(ramp(8, 4) > 0, x, x),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_ops_keep_it(name):
    fn = LINEAR[name]

    def run():
        values = []
        for p in (P, mw.Partial("avg")):
            made, sent = kinds(lambda p=p: fn(dist(X, p)))
            # What a bias is added to becomes a sum.
            assert made.placements == ((P,) if name == "linear" else (p,)), made.spec
            assert sent == {}
            values.append(mw.unshard(made))
        return values

    for values in on_ranks(run):
        for got in values:
            torch.testing.assert_close(got, fn(X))


NON_LINEAR = [
    torch.relu,
    torch.exp,
    lambda x: x * x,
    lambda x: x.abs(),
    lambda x: x + 1,
    lambda x: x.amax(),
    lambda x: x.norm(),
    lambda x: F.softmax(x, 0),
    lambda x: F.layer_norm(x, (4,)),
    lambda x: x > 0,
    lambda x: 1 / (x + 9),
    lambda x: x.long(),
    lambda x: x.argmax(1),
    lambda x: x.sort(0)[0],
]


@pytest.mark.parametrize("fn", NON_LINEAR)
def test_the_first_non_linear_op_reduces_it(fn):
    def run():
        made, sent = kinds(lambda: fn(dist(X, P)))
        assert sum(sent.values()) == 1, sent
        assert made.placements != (P,)
        return mw.unshard(made)

    for got in on_ranks(run):
        torch.testing.assert_close(got, fn(X))


def test_linear_ops_of_several_send_nothing_and_the_first_other_op_all():
    def run():
        x, y, odd = dist(X, P), dist(Y, P), ramp(8, 4) % 0.25 > 0
        joined = [
            lambda x, y: torch.cat([x, y, x]), lambda x, y: torch.stack([x, y], 1),
            lambda x, y: torch.where(odd, x, y), lambda x, y: torch.lerp(x, y, 0.25),
            lambda x, y: torch.sub(x, y, alpha=2),
        ]  # fmt: skip
        for fn in joined:
            made, sent = kinds(lambda fn=fn: fn(x, y))
            assert (made.placements, sent) == ((P,), {})
            torch.testing.assert_close(mw.unshard(made), fn(X, Y))
        x, y = dist(X, P), dist(Y, P)
        made, sent = kinds(lambda: (x + y) * 2 - x)
        assert (made.placements, sent) == ((P,), {})
        done, sent = kinds(made.exp)
        assert (done.placements, sent) == ((R,), {"all_reduce": 1})
        return mw.unshard(done)

    for got in on_ranks(run):
        torch.testing.assert_close(got, ((X + Y) * 2 - X).exp())


def test_it_is_reduced_before_something_grows_it():
    """(8, 1) is reduced before it becomes (8, 64)."""

    def run():
        x = dist(ramp(8, 1), P)
        grown, sent = kinds(lambda: x @ ramp(1, 64))
        assert sent == {"all_reduce": 1}
        assert grown.placements == (R,)
        for grow in (
            lambda x: x.expand(8, 64), lambda x: x.expand(8, 3), lambda x: F.pad(x, (1, 60)), lambda x: x.repeat(3, 3),
        ):  # fmt: skip
            made, sent = kinds(lambda grow=grow: grow(dist(ramp(8, 1), P)))
            assert sent == {"all_reduce": 1}
            torch.testing.assert_close(mw.unshard(made), grow(ramp(8, 1)))
        shrunk, sent = kinds(lambda: dist(ramp(8, 64), P) @ ramp(64, 1))
        assert sent == {}
        assert shrunk.placements == (P,)
        return mw.unshard(grown), mw.unshard(shrunk)

    for grown, shrunk in on_ranks(run):
        torch.testing.assert_close(grown, ramp(8, 1) @ ramp(1, 64))
        torch.testing.assert_close(shrunk, ramp(8, 64) @ ramp(64, 1))


# ------------------------------------------------------------------------------------------ nothing twice


@pytest.mark.parametrize("q", [R, S0, S1, P], ids=repr)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x + y,
        lambda x, y: y + x,
        lambda x, y: x - y,
        lambda x, y: torch.add(y, x, alpha=2),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.stack([y, x], 1),
        lambda x, y: F.linear(x, y),
        lambda x, y: F.linear(x, y, y[:, 0]),
        lambda x, y: torch.addmm(y @ y.t(), x, y.t()),
        lambda x, y: x * y,
        lambda x, y: torch.where(y > 0, x, y),
        lambda x, y: torch.lerp(x, y, 0.25),
        lambda x, y: torch.addcmul(y, x, y, value=0.5),
        lambda x, y: torch.div(x, 3, rounding_mode="floor") * y,
        lambda x, y: x @ y.t() + x[0, 0] + y.sum(),
        lambda x, y: (x + y).sum() + 1.0 + y.mean(),
    ],
)
def test_partial_with_another_layout(fn, q):
    def run(x, y):
        made = fn(x, y)
        g = torch.autograd.grad(made.sin().sum(), [x, y])
        return made, *g

    same(run, (X.clone().requires_grad_(), (P,)), (Y.clone().requires_grad_(), (q,)))


def test_bias_after_a_row_parallel_linear_counts_once():
    def run():
        x, w, b = dist(X, S1), dist(ramp(6, 4), S1), dist(ramp(6), R).requires_grad_()
        for made in (F.linear(x, w, b), F.linear(x, w) + b, x @ w.t() + b):
            assert made.placements == (P,)
            torch.testing.assert_close(mw.unshard(made).detach(), F.linear(X, ramp(6, 4), ramp(6)))
            (g,) = torch.autograd.grad(made.sum(), b)
            assert mw.unshard(g).tolist() == [8.0] * 6

    on_ranks(run)


# ------------------------------------------------------------------------------------------ several axes


@pytest.mark.parametrize("p", [(P, P), (P, S0), (S1, P), (P, R), (R, P)], ids=repr)
def test_several_axes(p):
    def run(x, y):
        h = (x * 2 + y).t()
        return h, h.tanh(), h.sum(), (h @ y).relu()

    same(run, (X, p), (Y, (R, R)), mesh=GRID)

    def graded(x, y):
        y = mw.constrain(y * 1, {"dp": R, "tp": R})  # invariant: its gradient is reduced once over all axes
        return torch.autograd.grad((x * 2 + y).tanh().sum(), [x, y])

    same(graded, (X.clone().requires_grad_(), p), (Y.clone().requires_grad_(), (S0, R)), mesh=GRID)


def test_two_partial_axes_reduce_once():
    def run():
        x = dist(X, P, P, mesh=GRID)
        with collective.counting() as counts:
            x.exp()
        assert counts.table.keys() == {("all_reduce", ("dp", "tp"))}
        with collective.counting() as counts:
            dist(X, P, P, mesh=GRID).sum().item()
        return counts.table

    for table in on_ranks(run, GRID):
        assert table == {("all_reduce", ("dp", "tp")): [1, 2 * 3 * 8 // 4]}


def test_a_sum_over_two_split_dims_is_one_reduction():
    def run():
        x = dist(X, S0, S1, mesh=GRID).requires_grad_()
        with collective.counting() as counts:
            loss = (x * x).sum()
            assert loss.placements == (P, P)
            assert counts.total == 0
            loss.backward()
            assert counts.total == 0
        loss.item()
        return mw.unshard(x.grad)

    for got in on_ranks(run, GRID):
        torch.testing.assert_close(got, 2 * X)


OVER = {
    "sum": (P, lambda x: x.sum((0, 1))), "mean": (P, lambda x: x.mean((0, 1))), "sum of a dim": (P, lambda x: x.sum(0)),
    "amax": (mw.Partial("max"), lambda x: x.amax((0, 1))), "amin": (mw.Partial("min"), lambda x: x.amin((0, 1))),
    "prod": (mw.Partial("product"), lambda x: x.prod()), "any": (mw.Partial("any"), lambda x: (x > 1).any()),
    "all": (mw.Partial("all"), lambda x: (x < 9).all()), "count": (P, lambda x: (x > 0).count_nonzero()),
    "norm": (P, lambda x: torch.linalg.vector_norm(x, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", OVER)
def test_reductions_over_split_dims_are_partial_by_their_kind(name):
    p, fn = OVER[name]
    rest = R if name == "sum of a dim" else p

    def run():
        made, sent = kinds(lambda: fn(dist(X + 0.3, S0, S1, mesh=GRID)))
        assert made.placements == (p, S0 if rest == R else rest)
        assert sent == {}
        return mw.unshard(made)

    for got in on_ranks(run, GRID):
        torch.testing.assert_close(got, fn(X + 0.3))


# ------------------------------------------------------------------------------------------ losses


def test_a_partial_loss_is_seeded_without_communication():
    """Of parts that are added up each gets 1; of parts that are averaged 1/n."""

    def run():
        x = dist(X, S0).requires_grad_()
        _, sent = kinds(lambda: (x * x).mean().backward())
        assert sent == {}
        part = ramp(3)[:] * 0 + runtime.RT.rank
        local = part.requires_grad_()
        loss = mw.from_local((local * local).sum(), FOUR, [mw.Partial("avg")])
        _, sent = kinds(loss.backward)
        assert sent == {}
        assert local.grad.tolist() == [2 * runtime.RT.rank / 4] * 3
        w = dist(ramp(4), R).requires_grad_()
        (dist(X, S0) @ w).sum().backward()  # from here on each rank has its part of the gradient
        w.grad = None
        (w * w).sum().backward()
        torch.testing.assert_close(mw.unshard(w.grad), 2 * ramp(4))
        return mw.unshard(x.grad), loss.item()

    for grad, loss in on_ranks(run):
        torch.testing.assert_close(grad, 2 * X / X.numel())
        assert loss == 3 * (0 + 1 + 4 + 9) / 4


LOSSES = {
    "mse": lambda x, y: F.mse_loss(x, y),
    "huber": lambda x, y: F.huber_loss(x, y, reduction="sum"),
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "cross entropy": lambda x, y: F.cross_entropy(x, y.argmax(1)),
    "weighted": lambda x, y: F.cross_entropy(x, y.argmax(1), weight=ramp(x.shape[1]).abs() + 1),
    "some ignored": lambda x, y: F.cross_entropy(x, y.argmax(1), ignore_index=int(y[0].argmax())),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_over_an_uneven_batch(name):
    """Sums and counts of parts, which are added up: never a mean of means."""
    fn, x, y = LOSSES[name], ramp(10, 3).sin(), ramp(10, 3).cos()
    leaf = x.clone().requires_grad_()
    want = fn(leaf, y)
    want.backward()

    def run():
        found = []
        for p in (S0, S1) if name in ("mse", "huber", "bce") else (S0,):
            given = dist(x, p).requires_grad_()
            made = fn(given, dist(y, p))
            assert made.placements == ((R,) if name == "weighted" else (P,))  # the sum of the weights divides
            _, sent = kinds(made.backward)
            assert sent == {}
            found.append((made.item(), mw.unshard(given.grad)))
        return found

    for found in on_ranks(run):
        for got, grad in found:
            torch.testing.assert_close(got, want.item())
            torch.testing.assert_close(grad, leaf.grad)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_losses_of_every_kind(op):
    """Replicated, sum and average of parts: the same gradients."""

    def run():
        out = []
        for p in ([R], [mw.Partial(op)]):
            x = dist(X, S0).requires_grad_()
            loss = mw.reshard((x.tanh() * Y).sum(), p)
            assert loss.placements == tuple(p)
            loss.backward(retain_graph=True)
            (loss * 2 + 1).backward()
            out.append(mw.unshard(x.grad))
        return out

    leaf = X.clone().requires_grad_()
    ((leaf.tanh() * Y).sum() * 3).backward()
    for got in on_ranks(run):
        for g in got:
            torch.testing.assert_close(g, leaf.grad)


def test_max_partials_give_their_gradient_to_the_holders():
    def run():
        x = dist(X, S0).requires_grad_()
        top = x.amax(0)
        assert dist(X, S0).amax(0).placements == (mw.Partial("max"),)
        (top * ramp(4)).sum().backward()
        return plain(x.grad)

    leaf = X.clone().requires_grad_()
    (leaf.amax(0) * ramp(4)).sum().backward()
    for got in on_ranks(run):
        torch.testing.assert_close(got, leaf.grad)


def test_other_reductions_are_not_added():
    """Partial(max) does not pass through sums, nor mix with Partial(sum)."""

    def run(x, y):
        m = x.amax(0)
        return [
            m + m,
            m * 2,
            m + y.sum(0),
            m - y.amin(0),
            m.sum(),
            m.relu(),
            -m,
            m[1:],
            m.float(),
            torch.maximum(m, y.amax(0)),
        ]

    for q in (R, S0, S1, P):
        same(run, (X, (S0,)), (Y, (q,)))


def test_operands_without_a_gradient_and_zeros_leave_it_partial():
    c, s, m = ramp(8, 4), ramp(8, 4).cos(), ramp(8, 4) > 0

    def fn(p, q):
        return (
            (p * c + q * s).relu(),
            (p.masked_fill(m, 0) + torch.where(m, q, 0.0) / c.exp() + 0).sin(),
            p + 0.0,
            p + 2.0,
        )

    def run():
        p, q = (dist(t.clone().requires_grad_(), P) * 1 for t in (X, Y))
        made, sent = kinds(lambda: fn(p, q)[:3])
        assert sent == {"all_reduce": 3}  # one for each of relu, sin and + 2.0
        assert made[2].placements == (P,)
        # A number that is not zero must not find the plan of one that is.
        return mw.unshard((p + 2).detach()), mw.unshard((p + 2.0).detach()), mw.unshard(p.masked_fill(m, 1).detach())

    for a, b, c_ in on_ranks(run):
        torch.testing.assert_close(a, X + 2)
        torch.testing.assert_close(b, X + 2)
        torch.testing.assert_close(c_, X.masked_fill(m, 1))

    def both(p, q):
        made = fn(p, q)
        return *made, *torch.autograd.grad(sum(t.sum() for t in made), [p, q])

    same(both, (X.clone().requires_grad_(), (P,)), (Y.clone().requires_grad_(), (P,)))


# ------------------------------------------------------------------------------------------ reduced once


def _normed(x, w):
    """A root-mean-square norm by hand and a residual: two of the consumers of ``h`` take it for linear."""
    h = F.linear(x, w)
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1)
    return h.view(-1).sin().sum() + (h + y).cos().sum() + (h * 2).sum()


@pytest.mark.parametrize("w_layout", [S1, R], ids=repr)
def test_a_value_that_was_reduced_is_not_reduced_again(w_layout):
    x, w = X.clone().requires_grad_(), ramp(6, 4).requires_grad_()

    def run():
        a, b = dist(x.detach().clone().requires_grad_(), S1), dist(w.detach().clone().requires_grad_(), w_layout)
        made, sent = kinds(lambda: _normed(a, b))
        assert sent == {"all_reduce": 1}
        _, sent = kinds(made.backward)
        assert sum(sent.values()) <= (w_layout == R)  # the gradient of a whole weight
        return mw.unshard(made).detach(), mw.unshard(a.grad), mw.unshard(b.grad)

    want = _normed(x, w)
    want.backward()
    for got in on_ranks(run):
        for g, expected in zip(got, (want.detach(), x.grad, w.grad), strict=True):
            torch.testing.assert_close(g, expected)


def _of_leaf(x):
    """Consumers that are not linear, and one that is linear in the leaf and in what it was reduced to."""
    return x.exp().sum() + x.sigmoid().square().sum() + (x.amax(0) - x + 1e-300).sqrt().detach().sum() + x.cos().sum()


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("learning", [True, False])
def test_a_leaf_is_reduced_once_for_all_its_consumers(op, learning):
    parts = torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = {"sum": parts.sum(0), "avg": parts.mean(0), "max": parts.amax(0), "min": parts.amin(0)}[op]
    x = whole.requires_grad_(learning)
    want = [_of_leaf(x), _of_leaf(3 * x.detach())]
    (first,) = torch.autograd.grad(want[0], x, create_graph=True) if learning else (x,)
    (second,) = torch.autograd.grad(first.square().sum(), x) if learning else (x,)

    def run():
        x = mw.from_local(parts[mw.rank()].clone(), FOUR, (mw.Partial(op),)).requires_grad_(learning)
        made, sent = kinds(lambda: _of_leaf(x))
        if not learning or op == "sum":
            assert sent == {"all_reduce": 1}
        # Twice: what is kept of the first time has no graph that a second backward would find freed.
        grads = [torch.autograd.grad(_of_leaf(x), x, create_graph=True)[0] for _ in range(2 * learning)]
        if learning and op == "sum":
            torch.testing.assert_close(mw.unshard(torch.autograd.grad(grads[1].square().sum(), x)[0]), second)
            for g in grads:
                torch.testing.assert_close(mw.unshard(g.detach()), first.detach())
        with torch.no_grad():
            x.mul_(3)
        return mw.unshard(made).detach(), mw.unshard(_of_leaf(x)).detach()

    for got in on_ranks(run):
        torch.testing.assert_close(list(got), [t.detach() for t in want])


def _changed(x, change):
    h = x * 2
    first = h.relu()
    change(h)
    return first, h * 1, h.exp(), h.sum(0), torch.cat([h, h]).sigmoid()


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.mul_(3),
        lambda h: h.add_(h),
        lambda h: h.relu_(),
        lambda h: h.data.mul_(3),
        lambda h: h.detach().mul_(3),
        lambda h: h.zero_(),
        lambda h: h.requires_grad,
    ],
)
def test_what_was_reduced_and_then_written_is_reduced_again(change):
    """The write must not find the reduced value in the way, whatever alias it goes through."""

    for q in (P, mw.Partial("max")):
        same(lambda x: _changed(x, change), (X, (q,)))


@pytest.mark.parametrize("known", [lambda s: s == 0, lambda s: s.exp().detach(), lambda s: s.item()])
@pytest.mark.parametrize("write", [lambda y, v: y.add_(v), lambda y, v: y.mul_(v), lambda y, v: y + v])
def test_what_is_read_as_reduced_has_the_type_of_all_that_it_is_tied_to(known, write):
    """A leaf whose gradient is still of either type is used for a reduced value, then beside a split tensor."""
    v = ramp(4, 6)

    def run(sharded):
        x = ramp(4, 6) - 2.0
        x = (dist(x, R, S1, mesh=GRID) if sharded else x).requires_grad_()
        s = (x * x).sum()
        known(s)
        norm = s.masked_fill(s == 0, 1.0).sqrt()
        y = x * 2.0
        write(y, dist(v, S0, S1, mesh=GRID) if sharded else v)
        (g,) = torch.autograd.grad(norm * 3, x, retain_graph=True)
        (both,) = torch.autograd.grad(norm * y.sum(), x)
        return (mw.unshard(g), mw.unshard(both)) if sharded else (g, both)

    want = run(False)
    for got in on_ranks(lambda: run(True), GRID):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("op", ["avg", "max", "min"])
def test_a_checkpoint_saves_as_often_in_both_runs(op):
    """Reductions that have shares of the gradient save them."""
    from torch.utils.checkpoint import checkpoint

    def fn(x, again):
        def region(t):
            return (F.gelu(t) * t + t.sin()).sum()

        y = x * 1.0
        made = again(region, y) + y.exp().sum() + again(region, y)
        return torch.autograd.grad(made, x)[0]

    def run(again):
        return mw.unshard(fn(dist(X.clone(), mw.Partial(op)).requires_grad_(), again))

    want = on_ranks(lambda: run(lambda f, t: f(t)))
    got = on_ranks(lambda: run(lambda f, t: checkpoint(f, t, use_reentrant=False)))
    torch.testing.assert_close(got, want)
    if op == "avg":
        torch.testing.assert_close(got[0], fn(X.clone().requires_grad_(), lambda f, t: f(t)))


def test_a_checkpoint_finds_its_inputs_as_they_were():
    """A value is reduced after the first run of a region, or within: the second run must do what the first did."""
    from torch.utils.checkpoint import checkpoint

    def fn(x, w, again):
        h = F.linear(x, w)

        def region(h, w):
            return ((h @ w).sigmoid() + (h * 3).cos().sum(1, keepdim=True) + (h * w.sum()).sin()).sum()

        made = again(region, h, w) + h.exp().sum() + again(region, h, w)
        return torch.autograd.grad(made, [x, w])

    def run():
        return [
            mw.unshard(g)
            for g in fn(
                dist(X.clone().requires_grad_(), S1),
                dist(ramp(4, 4).requires_grad_(), S1),
                lambda f, *args: checkpoint(f, *args, use_reentrant=False),
            )
        ]

    want = fn(X.clone().requires_grad_(), ramp(4, 4).requires_grad_(), lambda f, *args: f(*args))
    for got in on_ranks(run):
        for g, expected in zip(got, want, strict=True):
            torch.testing.assert_close(g, expected)


def test_without_gradients_too_and_by_name():
    def run():
        h = dist(X, P) * 2
        _, sent = kinds(lambda: [h.relu(), h * h, mw.reshard(h, [R]), mw.reshard(h, [S0]), h + 1])
        assert sent == {"all_reduce": 1}
        with torch.no_grad():
            g = dist(X.clone().requires_grad_(), P) * 2
            g.relu()
        made, sent = kinds(lambda: g * g)
        assert sent == {}
        return mw.unshard(made), mw.unshard(mw.reshard(h, [S0]))

    for square, sliced in on_ranks(run):
        torch.testing.assert_close(square, (X * 2) ** 2)
        torch.testing.assert_close(sliced, X * 2)


# ------------------------------------------------------------------------- partners that need no gradient

C = ramp(8, 4).add(0.5)
BESIDE = {
    "mul": lambda p, c: p * c,
    "rmul": lambda p, c: c * p,
    "matmul": lambda p, c: p @ c[:4].T,
    "div": lambda p, c: p / (c.abs() + 1),
    "mul_": lambda p, c: p.clone().mul_(c),
    "addcmul": lambda p, c: torch.addcmul(p, p, c),
}
FROZEN = {
    "never": lambda c: c,
    "a buffer": lambda c: c.detach(),
    "frozen": lambda c: c.requires_grad_().requires_grad_(False),
    "a frozen parameter": lambda c: torch.nn.Parameter(c, requires_grad=False),
}


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("frozen", FROZEN)
def test_a_partner_without_a_gradient_costs_nothing(name, frozen):
    """Replicated, a DistTensor: the product stays Partial; once the partner needs a gradient all is right too."""
    fn = BESIDE[name]

    def run():
        x, c = dist(X.clone().requires_grad_(), P), FROZEN[frozen](dist(C, R))
        made, sent = kinds(lambda: fn(x, c))
        assert sent == {}
        assert made.placements == (P,)
        (g,) = torch.autograd.grad(made.sin().sum(), [x])
        trained = dist(C.clone().requires_grad_(), R)
        both = torch.autograd.grad(fn(x, trained).sin().sum(), [x, trained])
        c.requires_grad_()
        later = torch.autograd.grad(fn(x, c).sin().sum(), [x, c])
        c.requires_grad_(False)
        assert kinds(lambda: fn(x, c))[1] == {}
        return [mw.unshard(t) for t in (made, g, *both, *later)]

    x, c = X.clone().requires_grad_(), C.clone().requires_grad_()
    made = fn(x, c)
    gx, gc = torch.autograd.grad(made.sin().sum(), [x, c])
    for got in on_ranks(run):
        for t, expected in zip(got, (made, gx, gx, gc, gx, gc), strict=True):
            torch.testing.assert_close(t, expected)


def test_what_is_chosen_beside_a_constant_and_beside_a_weight(monkeypatch):
    """A choice that holds in all sizes is kept for such partners alone; and on two axes, of which one moves."""
    monkeypatch.setattr(search, "VERIFY", True)  # what is known is compared with a search
    t = ramp(12, 4)

    def run():
        for fn in BESIDE.values():
            for graded in (False, True):
                fn(dist(t.clone().requires_grad_(), P), dist(t + 0.5, R).requires_grad_(graded))

    def on_two_axes():
        x, c = dist(t.clone().requires_grad_(), P, S0, mesh=GRID), dist(t + 0.5, R, S1, mesh=GRID)
        with collective.counting() as counts:
            made = x * c
        assert made.placements[0] == P
        assert set(counts.bytes_by_axes) == {("tp",)}

    on_ranks(run)
    on_ranks(on_two_axes, GRID)


class Rotated(torch.nn.Module):
    """Position embeddings on a row-parallel product, with tables that need no gradient."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(ramp(4, 4) * 0.3)
        self.register_buffer("c", C.cos())
        self.register_buffer("s", C.sin())

    def forward(self, x):
        p, q = x @ self.w, x.sin() @ self.w  # of one value a reduction would serve both terms
        return (p * self.c + q.roll(1, -1) * self.s).relu()


def _rotated_eager():
    model = mw.shard_module(Rotated(), FOUR, {"w": {"x": S0}})
    made, sent = kinds(lambda: model(dist(X, S1)))
    loss = made.square().sum()
    loss.backward()
    assert sent == {"all_reduce": 1}
    return loss.item(), mw.unshard(model.w - 0.1 * model.w.grad)


def _rotated_captured():
    model = Rotated()
    step = mw.compile_step(
        model, lambda m, x: m(x).square().sum(), torch.optim.SGD(model.parameters(), lr=0.1), X, mesh=FOUR,
        layouts={"w": {"x": S0}}, batch={"x": S1},
    )  # fmt: skip
    loss = step(X)
    assert step.program.kinds == {"all_reduce": 1}
    return loss.item(), mw.unshard(model.w)


@pytest.mark.parametrize("rank", [_rotated_eager, _rotated_captured])
def test_a_rotation_of_a_partial_is_one_all_reduce(rank):
    one = Rotated()
    loss = one(X).square().sum()
    loss.backward()
    for got, w in on_ranks(rank):
        assert got == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(w, one.w - 0.1 * one.w.grad)


# ------------------------------------------------------------------------------------------ numbers that are no factors

NO_FACTORS = {
    "mul": lambda x, v: x * v,
    "mul by name": lambda x, v: torch.mul(x, other=v),
    "in place": lambda x, v: x.clone().mul_(v),
    "div": lambda x, v: x / (1 / v if v else v),
    "lerp": lambda x, v: torch.lerp(x, x * 2, v),
}


@pytest.mark.parametrize("name", NO_FACTORS)
def test_numbers_that_are_not_finite_meet_the_whole_sum(name: str) -> None:
    """Of a maximum all ranks but one have a zero, of which infinity would make NaN; also behind a finite one."""
    op = NO_FACTORS[name]
    x = torch.arange(1.0, 17.0, dtype=torch.float64).view(8, 2)

    def run():
        found = []
        for v in (2.0, float("inf"), 3.0, float("-inf"), float("inf")):
            largest = dist(x, S0).requires_grad_().amax(0)
            assert largest.placements == (P,)
            found.append(mw.unshard(op(largest, v)).detach())
        return found

    expected = [op(x.amax(0), v) for v in (2.0, float("inf"), 3.0, float("-inf"), float("inf"))]
    for found in mw.simulate(run, FOUR):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


def test_a_sum_is_divided_by_zero_once_it_is_whole() -> None:
    x = torch.arange(1.0, 9.0).view(4, 2)
    for zero in (0.0, 0):
        for found in mw.simulate(lambda v=zero: mw.unshard(dist(x, S0).requires_grad_().amax(0) / v), FOUR):
            assert found.tolist() == [float("inf")] * 2
