"""Tensors without elements, and dims of one element or fewer than ranks: as on one device, alike on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw

OPS: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda x: x.flatten(),
    "flatten two": lambda x: x.flatten(0, 1),
    "view": lambda x: x.view(x.shape[0], x.shape[1] * x.shape[2]),
    "view, first dims": lambda x: x.view(x.shape[0] * x.shape[1], x.shape[2]),
    "view to more": lambda x: x.view(*x.shape[:2], 1, x.shape[2]),
    "reshape": lambda x: x.reshape(x.shape[2], x.shape[0] * x.shape[1]),
    "unflatten": lambda x: x.unflatten(0, (x.shape[0], 1)),
    "softmax 0": lambda x: x.softmax(0),
    "softmax 1": lambda x: x.softmax(1),
    "log_softmax 2": lambda x: x.log_softmax(2),
    "logsumexp": lambda x: x.logsumexp(0),
    "take_along_dim": lambda x: torch.take_along_dim(x, torch.zeros(x.shape, dtype=torch.int64), 1),
    "take_along_dim flat": lambda x: torch.take_along_dim(x, torch.zeros(x.numel(), dtype=torch.int64)),
    "embedding": lambda x: F.embedding(torch.zeros(0 if 0 in x.shape else 2, dtype=torch.int64), x.flatten(1)),
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(0),
    "cat": lambda x: torch.cat([x, x], 1),
    "group_norm": lambda x: F.group_norm(x, 1),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True) if x.numel() > x.shape[1] else x * 1,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "slice": lambda x: x[:, 1:],
    "cumsum": lambda x: x.cumsum(0),
    "chunk": lambda x: x.chunk(2, 0)[0],
    "expand": lambda x: x[None].expand(2, *x.shape),
    "matmul": lambda x: x @ x.transpose(1, 2),
    "pad": lambda x: F.pad(x, (1, 1)),
    "repeat": lambda x: x.repeat(1, 2, 1),
}
SHAPES = [(0, 2, 3), (4, 0, 3), (2, 3, 0), (0, 0, 2), (1, 2, 3), (2, 1, 2), (4, 4, 2)]


def _outcome(fn: Callable[[Any], Any], x: Any) -> Any:
    try:
        y = fn(x)
        (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        return y, g
    except (RuntimeError, IndexError, ValueError) as error:
        return type(error)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradient(shape: tuple[int, ...]) -> None:
    mesh = mw.Mesh({"x": 3})
    base = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)

    def run() -> list[str]:
        wrong = []
        for name, fn in OPS.items():
            want = _outcome(fn, base.clone().requires_grad_())
            for d in range(3):
                got = _outcome(fn, mw.shard_tensor(base.clone(), mesh, [mw.Shard(d)]).requires_grad_())
                if isinstance(want, type) or isinstance(got, type):
                    if want is not got:
                        wrong.append(f"{name}, Shard({d}): {got} for {want}")
                    continue
                for g, w, what in zip(got, want, ("value", "gradient"), strict=True):
                    if g.shape != w.shape or not torch.allclose(mw.unshard(g), w, equal_nan=True):
                        wrong.append(f"{name}, Shard({d}): {what}")
                if got[0].requires_grad != want[0].requires_grad:
                    wrong.append(f"{name}, Shard({d}): requires_grad")
        return wrong

    for found in mw.simulate(run, mesh):
        assert found == []


def test_embedding_of_empty_shards_twice() -> None:
    """The backward of a backward has the same structure on a rank that holds no row."""
    mesh = mw.Mesh({"x": 4})
    w, ids, v = torch.randn(3, 2).double(), torch.tensor([0, 2, 2]), torch.randn(3, 2).double()

    def twice(w: Any, ids: Any) -> Any:
        y = F.embedding(ids, w)
        (g,) = torch.autograd.grad((y**3).sum(), w, create_graph=True)
        return g.requires_grad, torch.autograd.grad((g * v).sum(), w)[0]

    want = twice(w.clone().requires_grad_(), ids)

    def run() -> Any:
        tracked, g = twice(mw.shard_tensor(w.clone(), mesh, [mw.Shard(0)]).requires_grad_(), ids)
        return tracked, mw.unshard(g)

    for tracked, g in mw.simulate(run, mesh):
        assert tracked == want[0]
        torch.testing.assert_close(g, want[1])


def _filled(x: Any, where: Any) -> Any:
    x[where] = 2.0
    return x.exp() * x


TWICE: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "conv": (lambda x, w: F.conv1d(x, w, padding=1), (2, 2, 4), (2, 2, 3)),
    "conv_transpose": (lambda x, w: F.conv_transpose1d(x, w), (2, 2, 4), (2, 2, 3)),
    "conv of groups": (lambda x, w: F.conv1d(x, w, groups=2), (2, 4, 4), (2, 2, 3)),
    "prelu": (F.prelu, (2, 2, 3), (2,)),
    "grid_sample": (lambda x, w: F.grid_sample(x, w, align_corners=False), (2, 1, 3, 3), (2, 2, 2, 2)),
    "interpolate": (lambda x, w: F.interpolate(x, scale_factor=2), (2, 2, 3), (1,)),
    "avg_pool": (lambda x, w: F.avg_pool1d(x, 2), (2, 2, 4), (1,)),
    "max_pool": (lambda x, w: F.max_pool1d(x, 2), (2, 2, 4), (1,)),
    "unfold": (lambda x, w: F.unfold(x, 2), (2, 2, 3, 3), (1,)),
    "fold": (lambda x, w: F.fold(x, (3, 3), 2), (2, 8, 4), (1,)),
    "embedding": (lambda x, w: F.embedding(torch.tensor([1]), (x * w).sum(2)), (2, 2, 2), (1,)),
    "pad": (lambda x, w: F.pad(x * w, (1, 1), "reflect"), (2, 2, 3), (1,)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (3,)), (2, 2, 3), (1,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (3,)), (2, 2, 3), (1,)),
    "batch_norm": (lambda x, w: F.batch_norm(x, None, None, w, training=True), (2, 2, 3), (2,)),
    "instance_norm": (lambda x, w: F.instance_norm(x, weight=w), (2, 2, 3), (2,)),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), (2, 4, 3), (4,)),
    "group_norm, eps 0": (lambda x, w: F.group_norm(x, 2, w, eps=0.0), (2, 4, 3), (4,)),
    "instance_norm, eps 0": (lambda x, w: F.instance_norm(x, weight=w, eps=0.0), (2, 2, 3), (2,)),
    "layer_norm, eps 0": (lambda x, w: F.layer_norm(x, (3,), w, eps=0.0), (2, 2, 3), (3,)),
    "rms_norm, eps 0": (lambda x, w: F.rms_norm(x, (3,), w, eps=0.0), (2, 2, 3), (3,)),
    "cosine_similarity": (lambda x, w: F.cosine_similarity(x, w, dim=-1, eps=0.0), (2, 2, 3), (3,)),
    "cumprod": (lambda x, w: x.cumprod(1), (2, 2), (1,)),
    "scatter": (lambda x, w: x.scatter(0, torch.tensor([1]), w), (2,), (1,)),
    "scatter, add_": (lambda x, w: x.scatter(0, torch.tensor([1]), w).add_(x).logsumexp(0), (2,), (1,)),
    "index_put, add_": (lambda x, w: x.index_put((torch.tensor([1]),), w).add_(x).logsumexp(0), (2,), (1,)),
    "rows written": (lambda x, w: _filled(x * x, slice(0, -1)), (2, 2), (1,)),
    "row written": (lambda x, w: _filled(x * x, 0), (2, 2), (1,)),
    "view written": (lambda x, w: (x * w).view(-1, 1).add_(x.flatten()[:, None]).exp(), (2, 2), (1,)),
    "matmul written": (lambda x, w: torch.tensordot(w, x, dims=([-1], [-1])).cumsum_(0).exp(), (2, 2), (3, 2)),
    "norm": (lambda x, w: torch.linalg.vector_norm(x, dim=1), (2, 2, 3), (1,)),
    "cross_entropy": (lambda x, w: F.cross_entropy(x, torch.tensor([1, 0]), label_smoothing=0.1), (2, 2), (1,)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_an_empty_part_has_the_graph_of_the_others(dtype: torch.dtype) -> None:
    """Values, gradients, which gradients require one, and gradients of these: alike on a rank without anything."""
    mesh = mw.Mesh({"x": 3})
    names = [n for n in TWICE if dtype is torch.float64 or n.startswith("conv")]

    def twice(fn: Callable[..., Any], x: Any, w: Any) -> list[Any]:
        y = fn(x, w)
        grads = torch.autograd.grad(y.sum().real, [x, w], create_graph=True, allow_unused=True)
        told = [g is not None and g.requires_grad for g in grads]
        again = [g.abs().pow(2).sum() for g in grads if g is not None and g.requires_grad]
        more = torch.autograd.grad(sum(again), [x, w], allow_unused=True) if again else ()
        return [told, *[None if t is None else mw.unshard(t).detach() for t in (y, *grads, *more)]]

    def run() -> None:
        for name in names:
            fn, *shapes = TWICE[name]
            base = [torch.randn(s, dtype=dtype, generator=torch.Generator().manual_seed(5)) for s in shapes]
            want = twice(fn, *[t.clone().requires_grad_() for t in base])
            for d, e in [(d, e) for d in range(min(base[0].ndim, 2)) for e in (None, 0)]:
                x = mw.shard_tensor(base[0].clone(), mesh, [mw.Shard(d)]).requires_grad_()
                w = mw.shard_tensor(base[1].clone(), mesh, [mw.Replicate() if e is None else mw.Shard(e)])
                got = twice(fn, x, w.requires_grad_())
                assert got[0] == want[0], (name, d, e)
                for g, t in zip(got[1:], want[1:], strict=True):
                    torch.testing.assert_close(g, t, msg=lambda m: f"{name}, {d}, {e}: {m}")  # noqa: B023

    mw.simulate(run, mesh)


def _of_features(kind: str) -> torch.nn.Module:
    parts = {"linear": (), "norm": (torch.nn.LayerNorm(4),), "linears": (torch.nn.Linear(4, 4),)}[kind]
    return torch.nn.Sequential(*parts, torch.nn.Linear(4, 7)).double()


@pytest.mark.parametrize("axes", [{"a": 3}, {"a": 3, "b": 2}], ids=["3", "3x2"])
@pytest.mark.parametrize("kind", ["linear", "norm", "linears"])
def test_a_rank_without_features_gathers_stored_parameters_as_often_as_the_others(
    kind: str, axes: dict[str, int]
) -> None:
    """Its part of a weight is contiguous, and those of the others are not."""
    mesh, data = mw.Mesh(axes), torch.randn(4, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = {"*.weight": {"b": mw.Shard(0)}} if "b" in axes and kind == "linears" else {}

    def step(on: mw.Mesh | None) -> list[Any]:
        torch.manual_seed(0)
        model, x = _of_features(kind), data
        if on is not None:
            model = mw.shard_module(model, on, weight, fsdp="a")
            x = mw.shard_tensor(data, on, {"a": mw.Shard(2)})
        model(x).square().mean().backward()
        return [mw.unshard(p.grad) if isinstance(p, mw.DistTensor) else p.grad for p in model.parameters()]

    want = step(None)
    for got in mw.simulate(lambda: step(mesh), mesh):
        torch.testing.assert_close(got, want)


UNITS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "conv": (lambda: torch.nn.Conv1d(3, 4, 2), (2, 3, 4)),
    "conv_transpose": (lambda: torch.nn.ConvTranspose1d(3, 4, 2), (2, 3, 4)),
    "group_norm": (lambda: torch.nn.GroupNorm(2, 4), (2, 4, 4)),
    "prelu": (lambda: torch.nn.PReLU(3), (2, 3, 4)),
    "conv, batch_norm": (lambda: torch.nn.Sequential(torch.nn.Conv1d(3, 4, 2), torch.nn.BatchNorm1d(4)), (2, 3, 4)),
}


@pytest.mark.parametrize("name", UNITS)
def test_a_rank_without_rows_gathers_stored_parameters_as_often_as_the_others(name: str) -> None:
    mesh = mw.Mesh({"dp": 3})
    make, shape = UNITS[name]
    data = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def step(on: mw.Mesh | None, captured: bool = False) -> list[Any]:
        torch.manual_seed(0)
        model: Any = make().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_fn = lambda m, x: m(x).square().sum()  # noqa: E731
        if captured:
            run = mw.compile_step(model, loss_fn, optimizer, data, mesh=mesh, batch={"dp": mw.Shard(0)}, fsdp="dp")
            run(data)
        else:
            x: Any = data
            if on is not None:
                model, x = mw.shard_module(model, on, fsdp="dp"), mw.shard_tensor(data, on, {"dp": mw.Shard(0)})
                optimizer = mw.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            loss_fn(model, x).backward()
            optimizer.step()
        return [mw.unshard(p.detach()) if isinstance(p, mw.DistTensor) else p.detach() for p in model.parameters()]

    want = step(None)
    for got in mw.simulate(lambda: step(mesh), mesh):
        torch.testing.assert_close(got, want)
    for got in mw.simulate(lambda: step(mesh, captured=True), mesh):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("over", ["fsdp", "shard_states"])
def test_a_rank_all_of_whose_parts_are_empty_packs_none(over: str) -> None:
    """Of a column over tp, its five rows over dp: one rank in each pair has no element to copy."""
    mesh, x = mw.Mesh({"dp": 2, "tp": 2}), torch.randn(6, 1, generator=torch.Generator().manual_seed(0))

    def train(distributed: bool) -> list[float]:
        torch.manual_seed(0)
        model, losses = torch.nn.Linear(1, 5, bias=False), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if distributed:
            stored = {"fsdp": "dp"} if over == "fsdp" else {}
            mw.shard_module(model, mesh, {"weight": {"tp": mw.Shard(1)}}, **stored)  # type: ignore[arg-type]
            mw.shard_optimizer(optimizer, shard_states=None if stored else "dp")
        for _ in range(3):
            loss = model(mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)}) if distributed else x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    for made in mw.simulate(lambda: train(True), mesh):
        assert made == pytest.approx(train(False), abs=1e-6)


def test_an_empty_part_of_a_call_by_name_in_any_order() -> None:
    mesh = mw.Mesh({"x": 3})
    x, weight, bias = torch.randn(2, 4, 5), torch.randn(6, 4, 3), torch.randn(6)

    def body() -> tuple[torch.Tensor, torch.Tensor]:
        w, b = (mw.shard_tensor(t, mesh, {}).requires_grad_() for t in (weight, bias))
        y = F.conv1d(mw.shard_tensor(x, mesh, {"x": mw.Shard(0)}), bias=b, weight=w)
        y.square().sum().backward()
        assert w.grad is not None
        return mw.unshard(y.detach()), mw.unshard(w.grad)

    w = weight.clone().requires_grad_()
    want = F.conv1d(x, w, bias)
    want.square().sum().backward()
    for y, grad in mw.simulate(body, mesh):
        torch.testing.assert_close(y, want.detach())
        torch.testing.assert_close(grad, w.grad)


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_batch_norm_learns_nothing_of_nothing(shape: tuple[int, ...], dim: int) -> None:
    def run() -> Any:
        mesh, norm = mw.Mesh({"x": 2}), torch.nn.BatchNorm1d(3)
        mw.shard_module(norm, mesh)
        norm(mw.shard_tensor(torch.zeros(shape), mesh, [mw.Shard(dim)]))
        return [mw.unshard(t).tolist() for t in (norm.running_mean, norm.running_var)]

    assert mw.simulate(run, mw.Mesh({"x": 2}))[0] == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("shape", [(4, 3, 1), (4, 1, 3), (1, 3, 2), (4, 2, 2)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_second_derivatives_of_cumprod_are_there_on_all_ranks_or_on_none(shape: tuple[int, ...], dim: int) -> None:
    """Along a dim of one its derivative is a constant, on ranks without a row too: they would wait alone."""
    base = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)

    def run(x: Any) -> Any:
        (g,) = torch.autograd.grad((x.cumprod(dim) + x * x).sum(), x, create_graph=True)
        return torch.autograd.grad((g * g).sum(), x)[0]

    mesh = mw.Mesh({"a": 3})
    for split in range(3):
        place = mw.Shard(split)
        got = mw.simulate(lambda: mw.unshard(run(mw.shard_tensor(base, mesh, [place]).requires_grad_())), mesh)[0]  # noqa: B023
        torch.testing.assert_close(got, run(base.clone().requires_grad_()))


@pytest.mark.parametrize("placement", [mw.Replicate(), mw.Partial(), mw.Shard(0), mw.Shard(1), mw.Shard(3)], ids=str)
def test_a_write_after_attention_to_nothing(placement: mw.Placement) -> None:
    """Nothing is kept for the backward of attention without queries, so what it read may change."""

    def run() -> Any:
        x = mw.shard_tensor(torch.zeros(2, 3, 0, 3), mw.init_mesh({"a": 3}), [placement]).requires_grad_()
        y = x * 1.0
        out = torch.cat([y, F.scaled_dot_product_attention(y, y, y)])
        y[:1] += 1.0
        out.sum().backward()
        return tuple(x.grad.shape)

    assert set(mw.simulate(run, mw.Mesh({"a": 3}))) == {(2, 3, 0, 3)}


@pytest.mark.parametrize("op", ["var", "std", "var_mean"])
def test_more_correction_than_rows_where_a_rank_has_none(op: str) -> None:
    """Not a number where all are alike, infinite elsewhere: what a rank without rows adds to it is nothing."""
    x = torch.tensor([[0.0, 1], [0, 2], [0, 3], [0, 4], [0, 5]], dtype=torch.float64)
    mesh = mw.Mesh({"a": 4})

    def moment(t: torch.Tensor) -> torch.Tensor:
        made = getattr(torch, op)(t, dim=0, correction=5)
        return made[0] if isinstance(made, tuple) else made

    assert moment(x)[1].isposinf()
    for got in mw.simulate(lambda: mw.unshard(moment(mw.shard_tensor(x, mesh, {"a": mw.Shard(0)}))), mesh):
        torch.testing.assert_close(got, moment(x), equal_nan=True)


@pytest.mark.parametrize("loss", ["squares", "cross_entropy"])
@pytest.mark.parametrize("held_back", [False, True], ids=["", "after no_sync"])
def test_a_backward_that_only_gathers_weights_again_ends_alike(held_back: bool, loss: str) -> None:
    """Of frozen weights, of which a rank has nothing to gather; gradients of another part of the model wait."""
    mesh, x, ids = mw.Mesh({"dp": 2, "tp": 3}), torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1])

    def run(mesh: mw.Mesh | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"frozen": nn.Linear(4, 2, bias=False), "own": nn.Linear(4, 4)}).double()
        model.frozen.weight.requires_grad_(False)
        given, labels = x.double(), ids
        if mesh is not None:
            mw.shard_module(model, mesh, {"frozen.weight": {"tp": mw.Shard(0)}}, fsdp="dp")
            given, labels = (mw.shard_tensor(t, mesh, {"dp": mw.Shard(0)}) for t in (given, labels))
        if held_back:
            with mw.no_sync(model) if mesh is not None else torch.enable_grad():
                model.own(given).square().sum().backward()
        leaf = given.detach().requires_grad_()
        made = model.frozen(leaf)
        (made.square().sum() if loss == "squares" else torch.nn.functional.cross_entropy(made, labels)).backward()
        model.own(given).sum().backward()
        grads = [leaf.grad, *(p.grad for p in model.own.parameters())]
        return grads if mesh is None else [mw.unshard(g) for g in grads]

    want = run(None)
    for found in mw.simulate(lambda: run(mesh), mesh):
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "op", [torch.view_as_real, lambda x: torch.view_as_real(x.conj() * 2).permute(1, 0, 2) + 1, lambda x: x.real]
)
def test_complex_values_as_real_ones_where_a_rank_has_none(op: Callable[[Any], Any]) -> None:
    """Also under a gradient that was expanded, as that of a sum is."""
    x, mesh = torch.randn(4, 2, dtype=torch.complex64), mw.Mesh({"dp": 3})

    def gradient(x: Any) -> Any:
        (g,) = torch.autograd.grad(op(x.requires_grad_()).sum(), x)
        return g

    for dim in (0, 1):
        made = mw.simulate(lambda d=dim: mw.unshard(gradient(mw.shard_tensor(x, mesh, {"dp": mw.Shard(d)}))), mesh)
        for g in made:
            torch.testing.assert_close(g, gradient(x.clone()))
