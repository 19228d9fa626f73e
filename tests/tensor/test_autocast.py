"""Autocast on distributed tensors is autocast on one device, op by op, over PyTorch's own lists of what it casts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw

lists = pytest.importorskip("torch.testing._internal.autocast_test_lists")
Tensor = torch.Tensor
LISTS = ("torch_expect_builtin_promote", "torch_16", "torch_fp32", "nn_16", "nn_fp32", "torch_need_autocast_promote")


def _calls() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    made = lists.AutocastCPUTestLists(torch.device("cpu"))
    for kind in LISTS:
        for name, args, *more in getattr(made, kind):
            fn = getattr(torch, name, None) if kind.startswith("torch") else None
            fn = fn or getattr(torch._C._nn, name, None) or getattr(torch, name)
            kwargs = more[0] if more and isinstance(more[0], dict) else {}
            yield f"{kind}: {name}", fn, args, {"reduction": 1} if "loss" in name or "entropy" in name else kwargs
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    mixed = (x.bfloat16(), y), (x, y.bfloat16()), (x, y)
    for fn in (torch.matmul, torch.mm, F.linear, torch.add, torch.minimum, F.mse_loss, torch.outer):
        for a, b in mixed:
            pair = (a[0], b[0]) if fn is torch.outer else (a, b)
            yield f"{fn.__name__} of {a.dtype} and {b.dtype}", fn, pair, {}
    for a, b in mixed:
        yield "cat", torch.cat, ([a, b],), {}
        yield "addmm", torch.addmm, (b[0], a, b), {}
        yield "layer_norm", F.layer_norm, (a, (6,), b[0], b[1]), {}
        yield "attention", F.scaled_dot_product_attention, (a[None], b[None], b[None]), {}
        yield "softmax", F.softmax, (a, 1), {}
        yield "cross_entropy", F.cross_entropy, (a, torch.arange(6)), {}
        yield "double", torch.mm, (a.double(), a.double()), {}


def _placed(value: Any, mesh: mw.Mesh, dim: int | None) -> Any:
    if isinstance(value, Tensor):
        split = dim is not None and value.ndim > dim
        return mw.shard_tensor(value.detach(), mesh, [mw.Shard(dim) if split else mw.Replicate()])
    return type(value)(_placed(v, mesh, dim) for v in value) if type(value) in (list, tuple) else value


def _outputs(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else [t for t in made if isinstance(t, Tensor)]


def _outcome(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return [mw.unshard(t) for t in _outputs(fn(*args, **kwargs))]
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error)


def _slack(name: str) -> float:
    return 1.0 if "conv" in name else 0.05  # their samples add up to hundreds: one bit of bfloat16


@pytest.mark.parametrize("dim", [0, 1, None])
def test_op_by_op(dim: int | None) -> None:
    """Under autocast, and before and after it, when the plans of the other way are there."""
    mesh = mw.Mesh({"x": 2})

    def run() -> list[str]:
        wrong = []
        for name, fn, args, kwargs in _calls():
            for enabled in (False, True, False, True):
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    want = _outcome(fn, args, kwargs)
                    if isinstance(want, type):  # not without autocast, or not in this build of PyTorch
                        continue
                    got = _outcome(fn, _placed(args, mesh, dim), _placed(kwargs, mesh, dim))
                if isinstance(got, type):
                    wrong.append(f"{name}: {got}")
                    continue
                pairs = list(zip(got, want, strict=True))
                if [t.dtype for t in got] != [t.dtype for t in want]:
                    wrong.append(f"{name}, {enabled}: {[t.dtype for t in got]} for {[t.dtype for t in want]}")
                elif not all(
                    torch.allclose(g.float(), w.float(), rtol=0.03, atol=1.0 if "conv" in name else 0.05)
                    for g, w in pairs
                ):
                    wrong.append(f"{name}, {enabled}: another value")
        return wrong

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        assert mw.simulate(run, mesh)[0] == []


def test_mixed_operands_are_not_gathered() -> None:
    """A row-parallel linear in bf16 of a weight in fp32: local work, half the bytes, gradients in fp32."""
    mesh = mw.Mesh({"tp": 2})
    x, w = torch.randn(4, 6), torch.randn(8, 6)

    def run() -> Any:
        a = mw.shard_tensor(x.bfloat16(), mesh, [mw.Shard(1)]).requires_grad_()
        b = mw.shard_tensor(w, mesh, [mw.Shard(1)]).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("error")
            with mw.explicit():
                y = F.linear(a, b)
            assert y.placements == (mw.Partial(),)
            assert y.dtype == torch.bfloat16
            y.float().square().sum().backward()
        return mw.unshard(y), mw.unshard(a.grad), mw.unshard(b.grad)

    a, b = x.bfloat16().requires_grad_(), w.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(a, b)
        y.float().square().sum().backward()
    for got, want in zip(mw.simulate(run, mesh)[0], (y, a.grad, b.grad), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.float(), want.detach().float(), rtol=0.05, atol=0.1)


class _Weights(TorchDispatchMode):
    """Counts casts of tensors to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16
        return func(*args, **(kwargs or {}))


def _leaves(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.requires_grad_() if value.dtype is torch.float32 else value
    return type(value)(_leaves(v) for v in value) if type(value) in (list, tuple) else value


def _twice(fn: Callable[..., Any], args: Any, kwargs: Any, meet: Callable[[], Any] = tuple) -> int | type:
    """Casts of an op called twice in one region, all that it is given being leaves that need gradients.

    ``meet``: simulated ranks leave the region together, since the first one that does clears the cache of all.
    """
    try:
        with _Weights() as casts, torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                fn(*_leaves(args), **_leaves(kwargs))
            count = casts.count
            meet()
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error)
    return count


@pytest.mark.parametrize("dim", [1, None])
def test_casts_of_leaves_are_counted_as_on_one_device(dim: int | None) -> None:
    mesh = mw.Mesh({"x": 2})

    def run() -> list[str]:
        wrong = []
        for name, fn, args, kwargs in _calls():
            args = [a.detach().clone() if isinstance(a, Tensor) else a for a in args]
            want = _twice(fn, args, kwargs)
            if isinstance(want, type) or not want:
                continue
            whole = mw.shard_tensor(torch.ones(2), mesh, [mw.Shard(0)])
            got = _twice(fn, _placed(args, mesh, dim), _placed(kwargs, mesh, dim), lambda x=whole: mw.unshard(x))
            if got != want:
                wrong.append(f"{name}: {got} for {want}")
        return wrong

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert mw.simulate(run, mesh)[0] == []


@pytest.mark.parametrize("equation", ["bij,bjk->bik", "bi,bi->b", "bi,bj->bij"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_an_einsum_of_two_dtypes_keeps_what_both_are_split_by(equation: str, dtypes: tuple[Any, Any]) -> None:
    """Without autocast PyTorch refuses it: so what autocast casts is told by the dtype of the result alone."""
    shapes = {"bij,bjk->bik": ((4, 3, 5), (4, 5, 2)), "bi,bi->b": ((4, 3), (4, 3)), "bi,bj->bij": ((4, 3), (4, 2))}
    x, y = (torch.randn(s).to(d) for s, d in zip(shapes[equation], dtypes, strict=True))
    mesh = mw.Mesh({"dp": 2})

    def made(*given: Any) -> list[Any]:
        leaves = [t.requires_grad_() for t in given]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = torch.einsum(equation, *leaves)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    def rank() -> list[Any]:
        given = [mw.shard_tensor(t.clone(), mesh, {"dp": mw.Shard(0)}) for t in (x, y)]
        with mw.explain() as report, torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            torch.einsum(equation, *given)
        assert not report.records
        return [mw.unshard(t) for t in made(*given)]

    for have in mw.simulate(rank, mesh):
        torch.testing.assert_close(have, made(x.clone(), y.clone()), atol=0.05, rtol=0.05)
