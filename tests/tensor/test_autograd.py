"""Gradients as PyTorch users ask for them: hooks, .grad, autograd.grad, twice, checkpoints, plain tensors too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright import collective, compat
from meshwright.errors import DispatchError, LayoutError
from tests.support.compare import FOUR, GRID, S0, S1, P, R, check_equal, fresh, on_ranks, plain, ramp, same
from tests.support.processes import run_processes

TAKES_DICTS = compat.numbers_of(torch.__version__) >= (2, 13)  # torch.autograd.grad does
LAYOUTS = [(R,), (S0,), (S1,)]
WITH_PARTIAL = [*LAYOUTS, (P,)]
X = ramp(6, 4).requires_grad_()
W = (ramp(4, 4) + 0.1).requires_grad_()


def pairs(fn, layouts=WITH_PARTIAL):
    """``fn(x, w)`` for every pair of layouts."""
    for p in layouts:
        for q in layouts:
            same(fn, (X, p), (W, q))


def sharded(t=X, p=(S0,)):
    return mw.shard_tensor(fresh(t), FOUR, p)


# ------------------------------------------------------------------------------------------ .grad


def test_grad_get_set_none_and_accumulation():
    def run(x, w):
        assert x.grad is None
        (x @ w).tanh().sum().backward()
        first = x.grad.clone()
        (x @ w).tanh().sum().backward()
        second = x.grad.clone()
        x.grad = x.grad * 2
        (x * w.sum()).sum().backward()
        third = x.grad
        x.grad = None
        w.grad.zero_()
        (x @ w).sum().backward()
        x.grad.add_(1.0) if not isinstance(x, mw.DistTensor) else None
        out = [first, second, third, x.grad - (0 if isinstance(x, mw.DistTensor) else 1), w.grad]
        del x.grad
        assert x.grad is None
        return out

    pairs(run)


def test_a_gradient_of_any_layout_can_be_put_in_place():
    def run(x, w, g):
        x.grad = g * 1.0
        (x @ w).sum().backward()
        (x @ w).sum().backward()
        return x.grad

    for p in WITH_PARTIAL:
        for q in WITH_PARTIAL:
            for r in WITH_PARTIAL:
                same(run, (X, p), (W, q), (ramp(6, 4), r))


def test_grad_of_another_shape_is_refused():
    def run():
        x = sharded()
        with pytest.raises((RuntimeError, LayoutError)):
            x.grad = torch.zeros(3, 4, dtype=torch.float64)
        with pytest.raises((RuntimeError, LayoutError)):
            x.grad = sharded(ramp(3, 4))
        assert x.grad is None

    on_ranks(run)


def test_requires_grad():
    def run(x, w):
        y = x.detach()
        assert not y.requires_grad
        assert y.is_leaf
        y.requires_grad_()
        (y @ w).square().sum().backward()
        z = (x @ w).detach_()
        assert not z.requires_grad
        x.requires_grad = False
        assert not (x * 2).requires_grad
        with pytest.raises(RuntimeError):
            (w * 2).requires_grad = False
        with pytest.raises(RuntimeError):
            x.long().requires_grad_()
        return y.grad, w.grad

    pairs(run)


def test_retain_grad_and_hooks():
    def run(x, w):
        seen = []
        h = x @ w
        h.retain_grad()
        h.register_hook(lambda g: seen.append(g) or g * 2.0)
        x.register_hook(lambda g: g.clamp(max=1.0))
        w.register_hook(lambda g: seen.append(g.sum().item()))
        after = []
        w.register_post_accumulate_grad_hook(lambda t: after.append(t.grad.clone()))
        gone = h.register_hook(lambda g: g * 0.0)
        gone.remove()
        h.tanh().sum().backward()
        return x.grad, w.grad, h.grad, seen, after

    pairs(run)


def test_a_hook_may_return_any_layout():
    def run(x, w, other):
        h = x @ w
        h.register_hook(lambda g: other)
        x.register_hook(lambda g: mw.reshard(g, [S1]) if isinstance(g, mw.DistTensor) else g)
        h.tanh().sum().backward()
        return x.grad, w.grad

    for p in WITH_PARTIAL:
        for q in WITH_PARTIAL:
            same(run, (X, p), (W, (R,)), (ramp(6, 4), q))


@pytest.mark.parametrize("way", ["eager", "captured"])
def test_a_hook_on_a_value_whose_last_name_is_gone_gets_its_whole_gradient(way):
    """What decides how the gradients of leaves are summed comes later, and tells the hook of what was made of them."""
    mesh = mw.Mesh({"tp": 2})

    class Positions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, shape in {"first": (1, 1, 4), "at": (1, 3, 4), "up": (8, 4)}.items():
                setattr(self, name, torch.nn.Parameter(torch.randn(shape)))

        def forward(self, x):
            h = torch.cat([self.first.expand(len(x), 1, 4), x], 1)
            if way == "eager":
                h.register_hook(lambda g: g.clamp(max=0.1))
            h = h + self.at
            return F.linear(h, self.up).sin().sum()

    torch.manual_seed(0)
    model, x = Positions().double(), torch.randn(3, 2, 4, dtype=torch.float64)
    alone = copy.deepcopy(model)
    alone(x).backward()
    if way == "captured":
        report = mw.verify(model, lambda m, x: m(x), x, mesh, {"up": {"tp": mw.Shard(0)}}, steps=1, save=False)
        assert report.passed, report
        return

    def run():
        own = mw.shard_module(copy.deepcopy(model), mesh, {"up": {"tp": mw.Shard(0)}})
        own(mw.shard_tensor(x, mesh, {})).backward()
        return [mw.unshard(p.grad) for p in own.parameters()]

    for got in mw.simulate(run, mesh):
        for g, p in zip(got, alone.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad)


def test_a_hook_sees_the_global_gradient():
    def run():
        x = sharded()
        shapes = []
        x.register_hook(lambda g: shapes.append((type(g), tuple(g.shape), g.placements)))
        (x * 2).sum().backward()
        assert shapes == [(mw.DistTensor, (6, 4), (S0,))]
        assert type(x.grad) is mw.DistTensor

    on_ranks(run)


# ------------------------------------------------------------------------------------------ backward and grad


def test_backward_of_any_loss():
    losses = [
        lambda x, w: (x @ w).tanh().sum(),
        lambda x, w: (x @ w).tanh().mean(),
        lambda x, w: (x @ w).amax(),
        lambda x, w: (x @ w)[0, 0],
        lambda x, w: (x @ w).tanh().sum() + (w * w).mean(),
        lambda x, w: (x @ w).sum(0).mean() * (w.sum() - x.mean()),
        lambda x, w: F.mse_loss(x @ w, x),
        lambda x, w: torch.stack([x.sum(), w.sum()]).square().sum(),
        lambda x, w: (x @ w).sum().reshape(1),
    ]

    def run(x, w):
        for loss in losses:
            loss(x, w).backward()
        return x.grad, w.grad

    pairs(run)


def test_backward_with_a_gradient():
    def run(x, w, g):
        y = (x @ w).tanh()
        y.backward(g, retain_graph=True)
        y.backward(gradient=ramp(6, 4), retain_graph=True)
        torch.autograd.backward([y, x * 2], [g, g])
        return x.grad, w.grad

    for p in WITH_PARTIAL:
        for q in WITH_PARTIAL:
            same(run, (X, p), (W, (S0,)), (ramp(6, 4) + 1, q))


def test_gradients_of_leaves_share_no_memory():
    """A shard cut out of a cotangent is not the memory of another leaf's gradient."""

    def run(x):
        b = ramp(6).requires_grad_()
        y = b.view(2, 3).unsqueeze(0) + x
        (y * y).sum().backward()
        b.sum().backward()
        return x.grad, b.grad

    for p in ((R,), (S0,), (S1,), (P,)):
        same(run, (ramp(1, 2, 3).requires_grad_(), p))


def test_several_losses_and_inputs():
    def run(x, w):
        y = x @ w
        a, b = y.tanh().sum(), (y * y).mean()
        torch.autograd.backward([a, b], retain_graph=True, inputs=[w])
        assert x.grad is None
        a.backward(retain_graph=True)
        b.backward(inputs=[x])
        return x.grad, w.grad

    pairs(run)


def test_autograd_grad():
    def run(x, w, g):
        y = (x @ w).tanh()
        unused = w * 3
        one = torch.autograd.grad(y, [x, w], g, retain_graph=True)
        two = torch.autograd.grad([y.sum(), y.mean()], [y, x], retain_graph=True)
        three = torch.autograd.grad(y.sum(), [x, unused], allow_unused=True, retain_graph=True)
        assert three[1] is None
        four = torch.autograd.grad(y.sum(), [w, unused], materialize_grads=True, retain_graph=True)
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(y.sum(), [x, unused], retain_graph=True)
        assert x.grad is None
        assert w.grad is None
        named = torch.autograd.grad(y.sum(), {"x": x, "w": w} if TAKES_DICTS else [x, w])
        return one, two, three[0], four, named

    for p in WITH_PARTIAL:
        for q in WITH_PARTIAL:
            same(run, (X, p), (W, q), (ramp(6, 4) + 1, (S1,)))


def test_gradients_of_a_sum_have_each_its_layout():
    """y = a + b: autograd may give one object for both; each is wrapped for itself."""

    def run(a, b):
        ga, gb = torch.autograd.grad((a + b).sum(), [a, b])
        return ga * 2.0, gb

    for p in WITH_PARTIAL:
        for q in WITH_PARTIAL:
            same(run, (X, p), (X, q))


def test_what_cannot_be():
    def run():
        x, w = sharded(), sharded(W)
        y = x @ w
        with pytest.raises(RuntimeError, match="scalar outputs"):
            y.backward()
        with pytest.raises(RuntimeError, match="scalar outputs"):
            torch.autograd.grad(y, x)
        with pytest.raises(RuntimeError, match=r"shape of \(3, 4\) and output has a shape of \(6, 4\)"):
            y.backward(ramp(3, 4))
        with pytest.raises(RuntimeError, match=r"shape of \(3, 4\) and output has a shape of \(6, 4\)"):
            y.backward(mw.shard_tensor(ramp(3, 4), FOUR, (R,)))
        with pytest.raises(DispatchError, match="is_grads_batched"):
            torch.autograd.grad(y, x, torch.stack([ramp(6, 4)] * 2), is_grads_batched=True)
        with pytest.raises(RuntimeError, match="does not require grad"):
            sharded(X.detach()).sum().backward()
        y.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()
        z = w.exp()
        loss = z.sum()
        z.mul_(2)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()

    on_ranks(run)


def test_a_plain_leaf_of_the_graph():
    """Plain tensors that require grad are parameters that every rank holds: each gets the whole gradient."""

    def run(x, w):
        b, c = ramp(4).requires_grad_(), (ramp(4, 4) + 1).requires_grad_()
        y = F.linear(x @ w, c, b) * b
        loss = y.tanh().sum() + b.sum() + (c * w).sum()
        loss.backward()
        assert b.grad.__class__ is torch.Tensor
        ga, gb = torch.autograd.grad((x * b).sum() + (x @ c).tanh().sum(), [b, c])
        assert ga.__class__ is torch.Tensor
        return b.grad, c.grad, x.grad, w.grad, ga, gb

    pairs(run)


# ------------------------------------------------------------------------------------------ twice


NETS = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul gelu": lambda x, w: F.gelu(x @ w),
    "layer_norm": lambda x, w: F.layer_norm(x @ w, (4,), w[0], w[1]),
    "softmax": lambda x, w: F.softmax(x @ w, -1) * x,
    "softmax 0": lambda x, w: F.softmax(x @ w, 0) * x,
    "attention": lambda x, w: F.softmax((x @ w) @ x.t(), -1) @ x,
    "norm": lambda x, w: (x @ w).norm(dim=-1),
    "mean": lambda x, w: (x @ w).square().mean(0),
    "cross entropy": lambda x, w: F.cross_entropy(x @ w, torch.arange(6) % 4, reduction="none"),
    "rms_norm": lambda x, w: F.rms_norm(x @ w, (4,), w[0]),
    "logsumexp": lambda x, w: torch.logsumexp(x @ w, 0),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.thin(2)
def test_gradient_penalty(name):
    """The gradient of a loss that holds the norm of a gradient."""

    def run(x, w):
        y = NETS[name](x, w)
        gx, gw = torch.autograd.grad(y.square().sum(), [x, w], create_graph=True)
        assert gx.requires_grad
        penalty = (gx.square().sum() - 1.0) ** 2 + gw.mean()
        penalty.backward()
        return y, gx, gw, penalty, x.grad, w.grad

    for p in WITH_PARTIAL:
        for q in LAYOUTS:
            same(run, (X, p), (W, q))


def test_three_times_and_on_two_axes():
    def run(x, w):
        y = (x @ w).tanh().sum()
        for _ in range(2):
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            y = (g * g * w.sum(0)).sum()
        return torch.autograd.grad(y, [x, w])

    for p in ((S0, R), (S0, S1), (R, S0), (P, S0), (S1, P), (R, R)):
        for q in ((R, S1), (R, S0), (R, R), (S0, S0)):
            same(run, (X, p), (W, q), mesh=GRID)


def test_create_graph_in_backward():
    def run(x, w):
        (x @ w).tanh().sum().backward(create_graph=True)
        g = x.grad
        x.grad = None
        w.grad = None
        (g * g).sum().backward()
        return x.grad, w.grad

    pairs(run)


def test_hessian_vector_product():
    def run(x, w, v):
        y = ((x @ w).tanh() ** 2).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        (hv,) = torch.autograd.grad(g, x, grad_outputs=v)
        return hv

    for p in WITH_PARTIAL:
        for q in WITH_PARTIAL:
            same(run, (X, p), (W, (S1,)), (ramp(6, 4) - 1, q))


# ------------------------------------------------------------------------------------------ checkpoints


def _block(x, w):
    h = F.gelu(x @ w)
    return F.layer_norm(h, (4,)) @ w + x


def test_checkpoint():
    def run(x, w):
        y = checkpoint(_block, x, w, use_reentrant=False)
        z = checkpoint(lambda a: _block(a, w).softmax(0), y, use_reentrant=False)
        (z * z).sum().backward()
        return z, x.grad, w.grad

    pairs(run)


def test_checkpoint_counts_its_recomputation():
    def run():
        x, w = sharded(), sharded(W, (R,))
        with collective.counting() as plainly:
            (x @ w).softmax(0).square().sum().backward()
        with collective.counting() as twice:
            checkpoint(lambda a: (a @ w).softmax(0), x, use_reentrant=False).square().sum().backward()
        assert twice.total >= plainly.total

    on_ranks(run)


def test_reentrant_checkpoint_says_what_to_do():
    def run():
        x, w = sharded(), sharded(W, (R,))
        y = checkpoint(_block, x, w, use_reentrant=True)
        with pytest.raises(DispatchError, match="use_reentrant=False"):
            y.sum().backward()

    on_ranks(run)


def test_dropout_in_a_checkpoint_is_recomputed():
    def run(x, w):
        torch.manual_seed(5)
        y = checkpoint(lambda a: F.dropout(a @ w, 0.5), x, use_reentrant=False)
        y.sum().backward()
        kept = (y != 0).double()
        return x.grad - 2 * kept @ w.t()

    same(lambda x, w: run(x, w) * 0 if not isinstance(x, mw.DistTensor) else run(x, w), (X, (S0,)), (W, (S1,)))


# ------------------------------------------------------------------------------------------ to local and back


@pytest.mark.parametrize("p", WITH_PARTIAL, ids=[repr(q[0]) for q in WITH_PARTIAL])
def test_to_local_and_from_local(p):
    """Through local tensors and back, whatever type a replicated value had."""

    def run(x, w):
        y = (x @ w).tanh() + x
        if isinstance(y, mw.DistTensor):
            y = mw.from_local(y.to_local(), y.mesh, y.spec.layout, shape=y.shape)
        z = x * w.sum()
        if isinstance(z, mw.DistTensor):
            z = mw.from_local(z.to_local() * 2.0, z.mesh, z.spec.layout, shape=z.shape)
        else:
            z = z * 2.0
        (y @ w).tanh().sum().backward()
        z.square().sum().backward()
        return y, z, x.grad, w.grad

    for q in WITH_PARTIAL:
        same(run, (X, p), (W, q))


def test_to_local_of_a_value_of_the_reduced_type():
    """A replicated value whose gradient is Partial comes out with a whole gradient on each rank."""

    def run(x, w):
        first = (x @ w).tanh().sum()  # decides the type of x
        y = x * 2.0
        if isinstance(y, mw.DistTensor):
            y = mw.from_local(y.to_local(), y.mesh, y.spec.layout, shape=y.shape)
        (y.square().sum() + first).backward()
        return x.grad, w.grad

    for q in WITH_PARTIAL:
        same(run, (X, (R,)), (W, q))


def test_unshard_and_plain_work_in_between():
    def run(x, w):
        y = mw.unshard(x @ w)
        assert y.__class__ is torch.Tensor
        h = torch.tanh(y) * 2.0
        z = h @ w + x
        h.sum().backward(retain_graph=True)
        z.square().sum().backward()
        return x.grad, w.grad

    pairs(run)


def test_reshard_is_differentiable():
    def run(x, w, targets):
        y = x @ w
        for t in targets:
            y = mw.reshard(y, t) * 1.5 if isinstance(y, mw.DistTensor) else y * 1.5
        y.tanh().sum().backward()
        return y, x.grad, w.grad

    for targets in ([[S0]], [[S1], [R]], [[R], [S0], [P]], [[P], [S1]], [[R], [P], [S0], [S1], [R]]):
        pairs(lambda x, w, targets=targets: run(x, w, targets))


# ------------------------------------------------------------------------------------------ types of replicate


def test_a_parameter_used_with_sharded_and_with_replicated_data():
    """Tied uses of one replicated parameter whose gradients are of different types."""

    def run(w, sharded_x, whole_x):
        a = (sharded_x @ w).tanh().sum()
        b = (whole_x @ w).tanh().sum()
        c = (w * w).sum()
        (a * b + c).backward()
        first = w.grad
        w.grad = None
        (whole_x @ w.t().tanh()).sum().backward()
        (sharded_x @ w).sum().backward()
        c2 = (w.view(-1) ** 2).sum() + (w.double().t() @ sharded_x.t()).tanh().sum()
        c2.backward()
        return first, w.grad, torch.autograd.grad((w * 2.0).sum(), w)

    for order in (0, 1):
        data = [(ramp(6, 4), (S0,)), (ramp(5, 4), (R,))]
        if order:
            same(lambda w, b, a: run(w, a, b), (W, (R,)), data[1], data[0])
        else:
            same(run, (W, (R,)), *data)


def test_sums_of_embeddings():
    """Token (split data) plus position (whole) embedding, tied with the output."""

    def run(tokens, table, places):
        x = F.embedding(tokens, table) + places[:3]
        h = F.layer_norm(x, (4,))
        logits = h @ table.t()
        loss = F.cross_entropy(logits.reshape(-1, 7), tokens.reshape(-1))
        loss.backward()
        return loss, table.grad, places.grad

    tokens = torch.arange(24).reshape(8, 3) % 7
    table, places = (ramp(7, 4)).requires_grad_(), (ramp(5, 4) + 1).requires_grad_()
    for p in ((R,), (S0,), (S1,)):
        for q in ((R,), (S0,), (S1,)):
            for r in ((R,), (S1,)):
                same(run, (tokens, p), (table, q), (places, r))


def test_one_conversion_serves_several_consumers():
    """q, k and v of one input: gathered once forward, reduced once backward."""

    def run():
        x = sharded(ramp(8, 6), (S0,)).requires_grad_()
        qkv = [sharded(ramp(16, 6), (S0,)).requires_grad_() for _ in range(3)]
        h = x * 2.0
        with collective.counting() as forward:
            q, k, v = (F.linear(h, w) for w in qkv)
        assert q.placements == k.placements == v.placements == (S1,)
        with collective.counting() as backward:
            (q * k * v).sum().backward()
        return forward.kinds, backward.kinds

    for forward, backward in on_ranks(run):
        assert forward == {"all_gather": 1}
        assert sum(backward.values()) == 1
        assert set(backward) <= {"reduce_scatter", "all_reduce"}


def test_deepcopy_and_state_keep_gradients_apart():
    def run():
        w = sharded(W, (S0,))
        (w * w).sum().backward()
        v = copy.deepcopy(w)
        (v * v).sum().backward()
        return plain(w.grad), plain(v.grad)

    for w, v in on_ranks(run):
        assert torch.equal(w * 2, v)


# ------------------------------------------------------------------------------------------ torch.func


def test_functional_transforms_say_what_to_do():
    """torch.func runs below this level: never a silent local answer."""

    def run():
        x = sharded()
        for call in (
            lambda: torch.func.grad(lambda t: (t * t).sum())(x),
            lambda: torch.func.vmap(lambda t: t * 2)(x),
            lambda: torch.func.vjp(lambda t: t * 2, x),
        ):
            with pytest.raises(DispatchError, match=r"torch\.func does not support DistTensors: use torch\.autograd"):
                call()
        with pytest.raises(DispatchError, match="forward-mode differentiation does not support DistTensors"):
            torch.func.jvp(lambda t: t * 2, (x,), (x,))
        assert torch.func.vmap(lambda t: t * 2)(ramp(2, 2)).shape == (2, 2)

    on_ranks(run)


@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_transforms_of_plain_tensors_that_meet_split_parameters(dim, learning):
    """Each rank would transform its part: conversions refuse it, in our words."""

    def run():
        torch.manual_seed(0)
        model = mw.shard_module(torch.nn.Linear(4, 4).double(), FOUR, {"weight": (mw.Shard(dim),)})
        x = ramp(2, 4)

        def loss(t):
            return model(t).square().sum()

        if learning:
            loss(x).backward()  # what was planned before is refused too
        model.requires_grad_(learning)
        for call in (torch.func.grad(loss), torch.func.vmap(model), torch.func.jacrev(loss)):
            with pytest.raises(DispatchError, match=r"torch\.func does not support DistTensors: use torch\.autograd"):
                call(x)
        torch.autograd.forward_ad.enter_dual_level()
        try:
            with pytest.raises(DispatchError, match="forward-mode differentiation does not support DistTensors"):
                loss(torch.autograd.forward_ad.make_dual(x, x))
        finally:
            torch.autograd.forward_ad.exit_dual_level()

    on_ranks(run)


# ------------------------------------------------------------------------------------------ real processes


def _on_processes() -> list[torch.Tensor]:
    mesh = mw.init_mesh({"dp": 2, "tp": 2})
    x = mw.shard_tensor(ramp(6, 4).requires_grad_(), mesh, {"dp": S0})
    w = mw.shard_tensor((ramp(4, 4) + 0.1).requires_grad_(), mesh, {"tp": S1})
    v = mw.shard_tensor(ramp(4, 4).requires_grad_(), mesh, {"tp": S0})
    h = checkpoint(lambda a: F.gelu(a @ w), x, use_reentrant=False)
    y = F.layer_norm(h @ v, (4,))
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    ((g * g).sum() + y.mean()).backward()
    return plain([y, g, x.grad, w.grad, v.grad])


@pytest.mark.processes
def test_real_processes():
    x, w, v = ramp(6, 4).requires_grad_(), (ramp(4, 4) + 0.1).requires_grad_(), ramp(4, 4).requires_grad_()
    y = F.layer_norm(F.gelu(x @ w) @ v, (4,))
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    ((g * g).sum() + y.mean()).backward()
    for got in run_processes(_on_processes, 4):
        check_equal(got, plain([y, g, x.grad, w.grad, v.grad]))


def _gathered(use: Any) -> Any:
    """``h``, gathered by name from a sharded value, feeds work that depends on the rank: its gradient goes past it."""
    mesh = mw.Mesh({"tp": 3})
    g = torch.Generator().manual_seed(0)
    x, w, v = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((5, 4), (4, 5), (4, 3)))

    def plain() -> Any:
        a = x.clone().requires_grad_()
        return use(a, a * 1.5, w, v)

    def run() -> Any:
        a = mw.shard_tensor(x, mesh, {"tp": mw.Shard(0)}).requires_grad_()
        h = mw.reshard(a * 1.5, {"tp": mw.Replicate()})
        made = use(a, h, mw.shard_tensor(w, mesh, {"tp": mw.Shard(1)}), mw.shard_tensor(v, mesh, {"tp": mw.Shard(1)}))
        return [mw.unshard(t) if isinstance(t, mw.DistTensor) else t for t in made]

    want = plain()
    for found in mw.simulate(run, mesh):
        for a, b in zip(found, want, strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


def _hooked_before(a: Any, h: Any, w: Any, v: Any) -> list[Any]:
    seen: list[Any] = []
    h.register_hook(lambda g: (seen.append(g), g * 2)[1])
    ((h @ w).tanh().sum() + (h @ v).square().sum()).backward()
    return [*seen, a.grad]


def _hooked_after(a: Any, h: Any, w: Any, v: Any) -> list[Any]:
    seen: list[Any] = []
    y = (h @ w).tanh().sum()
    h.register_hook(lambda g: (seen.append(g), g * 2)[1])
    y.backward()
    return [*seen, a.grad]


def _retained(a: Any, h: Any, w: Any, v: Any) -> list[Any]:
    y = (h @ w).tanh().sum()
    h.retain_grad()
    y.backward()
    return [h.grad, a.grad]


def _differentiated(a: Any, h: Any, w: Any, v: Any) -> list[Any]:
    y = (h @ w).tanh().sum()
    both = torch.autograd.grad(y, [h, a], retain_graph=True)
    (own,) = torch.autograd.grad(y, [a], retain_graph=True)
    y.backward(inputs=[a])
    return [*both, own, a.grad]


def _twice(a: Any, h: Any, w: Any, v: Any) -> list[Any]:
    (first,) = torch.autograd.grad((h @ w).tanh().sum(), [h], create_graph=True)
    first.square().sum().backward()
    return [first.detach(), a.grad]


@pytest.mark.parametrize("use", [_hooked_before, _hooked_after, _retained, _differentiated, _twice])
def test_gradients_of_values_that_conversions_go_past(use: Any) -> None:
    """Hooks, ``retain_grad`` and ``autograd.grad`` of them, registered before and after their use."""
    _gathered(use)
