"""Gradient clipping and other functions on lists of distributed tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from tests.support.shard_networks import TP, batches, loss_of, net, same_values

BOTH = mw.Mesh({"dp": 2, "tp": 2})
IDS = batches(1)[0]
clip = torch.nn.utils.clip_grad_norm_


def with_gradients(model: nn.Module, ids: torch.Tensor) -> nn.Module:
    (100 * loss_of(model, ids)).backward()
    return model


def split() -> mw.DistTensor:
    return mw.shard_tensor(IDS, BOTH, {"dp": mw.Shard(0)})


@pytest.mark.parametrize("over", [None, "dp"])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("kind", [2.0, 1.0, math.inf, 3.0])
def test_clip_grad_norm(kind: float, foreach: bool | None, over: str | None) -> None:
    one = with_gradients(net(), IDS)
    want = clip(one.parameters(), 0.5, kind, foreach=foreach)

    def fn() -> None:
        model = with_gradients(mw.shard_module(net(), BOTH, TP, fsdp=over), split())
        with collective.counting() as counts:
            got = clip(model.parameters(), 0.5, kind, error_if_nonfinite=True, foreach=foreach)
        torch.testing.assert_close(mw.unshard(got), want)
        same_values(model, one, grads=True)
        if foreach is not False:
            assert counts.total == (1 if over is None else 3), counts  # one for each way of being split

    mw.simulate(fn, BOTH)


def test_mixed_plain_partial_and_distributed() -> None:
    one = net()
    with_gradients(one, IDS)
    extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    extra.grad = torch.ones_like(extra)
    want = clip([*one.parameters(), extra], 0.5)

    def fn() -> None:
        model = mw.shard_module(net(), BOTH, TP)
        plain = nn.Parameter(torch.ones(3, dtype=torch.float64))
        plain.grad = torch.ones_like(plain)
        with mw.no_sync(model):
            with_gradients(model, split())
        got = clip([*model.parameters(), plain], 0.5)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(plain.grad, extra.grad)
        same_values(model, one, grads=True)

    mw.simulate(fn, BOTH)


def test_total_norm_and_non_finite() -> None:
    one = with_gradients(net(), IDS)
    want = torch.nn.utils.get_total_norm([p.grad for p in one.parameters()])

    def fn() -> None:
        model = with_gradients(mw.shard_module(net(), BOTH, TP), split())
        got = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.testing.assert_close(got, want)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, got)
        if mw.ranks.runtime.RT.rank % 2:
            model.blocks[0].up.weight.grad.to_local()[0, 0] = math.nan
        with pytest.raises(RuntimeError, match="non-finite"):
            clip(model.parameters(), 0.5, error_if_nonfinite=True)

    mw.simulate(fn, BOTH)


@pytest.mark.parametrize("foreach", [None, False])
def test_clip_grad_value(foreach: bool | None) -> None:
    one = with_gradients(net(), IDS)
    torch.nn.utils.clip_grad_value_(one.parameters(), 0.01, foreach=foreach)

    def fn() -> None:
        model = with_gradients(mw.shard_module(net(), BOTH, TP), split())
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
        same_values(model, one, grads=True)

    mw.simulate(fn, BOTH)


def test_empty_shards() -> None:
    mesh = mw.Mesh({"dp": 4})
    a, b = torch.randn(5, 3), torch.randn(2)

    def fn() -> None:
        lists = [mw.shard_tensor(t, mesh, {"dp": mw.Shard(0)}) for t in (a, b)]
        for kind in (2, math.inf, 1, 0):
            got = torch._foreach_norm(lists, kind)
            for x, y in zip(got, torch._foreach_norm([a, b], kind), strict=True):
                torch.testing.assert_close(x, y)

    mw.simulate(fn, mesh)


CALLS: dict[str, Any] = {
    "add": lambda f, a, b: torch._foreach_add(a, b, alpha=2),
    "mul scalar": lambda f, a, b: torch._foreach_mul(a, 2.0),
    "mul tensor": lambda f, a, b: torch._foreach_mul(a, torch.tensor(3.0)),
    "mul scalars": lambda f, a, b: torch._foreach_mul(a, [1.0, 2.0]),
    "addcmul": lambda f, a, b: torch._foreach_addcmul(a, b, b, value=0.5),
    "lerp": lambda f, a, b: torch._foreach_lerp(a, b, 0.3),
    "sqrt": lambda f, a, b: torch._foreach_sqrt(torch._foreach_abs(a)),
    "max": lambda f, a, b: torch._foreach_max(a),
    "in place": lambda f, a, b: (torch._foreach_add_(a, b), a)[1],
    "copy": lambda f, a, b: (torch._foreach_copy_(a, b), a)[1],
    "zero": lambda f, a, b: (torch._foreach_zero_(a), a)[1],
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layouts", ["same", "different", "partial", "plain"])
def test_other_functions(name: str, layouts: str) -> None:
    torch.manual_seed(0)
    a, b = ([torch.randn(6, 4), torch.randn(5)] for _ in range(2))
    want = CALLS[name](None, [t.clone() for t in a], [t.clone() for t in b])

    def fn() -> None:
        rows: Any = {"dp": mw.Shard(0)}
        left = [mw.shard_tensor(t, BOTH, rows) for t in a]
        right: list[torch.Tensor] = [mw.shard_tensor(t, BOTH, {} if layouts == "different" else rows) for t in b]
        if layouts == "partial":
            left, right = ([mw.reshard(t, {"tp": mw.Partial()}) for t in side] for side in (left, right))
            if name in ("in place", "copy", "max", "sqrt"):
                pytest.skip("not linear, or done tensor by tensor")
        if layouts == "plain":
            right = [t.clone() for t in b]
        got = CALLS[name](None, left, right)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(mw.unshard(x), y)

    mw.simulate(fn, BOTH)


def test_lists_of_different_lengths() -> None:
    a = [torch.randn(6, 4), torch.randn(5)]

    def fn() -> None:
        left = [mw.shard_tensor(t, BOTH, {"dp": mw.Shard(0)}) for t in a]
        with pytest.raises(RuntimeError, match="same number of tensors"):
            torch._foreach_add_(left, left[:1])
        for x, y in zip(left, a, strict=True):
            torch.testing.assert_close(mw.unshard(x), y)

    mw.simulate(fn, BOTH)


def test_parts_of_a_sum_are_scaled_as_they_are() -> None:
    a = [torch.randn(6, 4), torch.randn(5)]

    def fn() -> None:
        sums = [mw.reshard(mw.shard_tensor(t, BOTH, {}), {"tp": mw.Partial()}) for t in a]
        with collective.counting() as counts:
            torch._foreach_mul_(sums, [2.0, 3.0])
            torch._foreach_div_(sums, torch.tensor(4.0))
        assert counts.total == 0
        for x, y, factor in zip(sums, a, (2.0, 3.0), strict=True):
            assert isinstance(x.placements[1], mw.Partial)
            torch.testing.assert_close(mw.unshard(x), y * factor / 4)

    mw.simulate(fn, BOTH)


ORDS = [-math.inf, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, math.inf]


def norms_of(mesh: mw.Mesh | None, kind: float) -> list[torch.Tensor]:
    """The norm of tensors by every way there is, and what clipping by it leaves."""
    torch.manual_seed(1)
    given = [torch.randn(5, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64), torch.ones(1, 2).double()]
    model = nn.ParameterList([torch.zeros_like(t) for t in given])
    tensors = given
    if mesh is not None:
        mw.shard_module(model, mesh, fsdp="dp")
        tensors = [mw.shard_tensor(t, mesh, p.spec.layout) for t, p in zip(given, model, strict=True)]
    found = [torch.linalg.vector_norm(t, kind) for t in tensors] + list(torch._foreach_norm(tensors, kind))
    for foreach in (None, True, False):
        found.append(torch.nn.utils.get_total_norm(tensors, kind, foreach=foreach))
        for p, t in zip(model, tensors, strict=True):
            p.grad = t.clone()
        found.append(clip(model.parameters(), 0.1, kind, foreach=foreach))
        found += [p.grad for p in model]
    return [mw.unshard(t) for t in found]


@pytest.mark.parametrize("kind", ORDS)
def test_all_orders_of_norms(kind: float) -> None:
    want = norms_of(None, kind)
    for size in (2, 7):  # uneven parts, empty ones
        mesh = mw.Mesh({"dp": size})
        for got in mw.simulate(lambda: norms_of(mesh, kind), mesh):  # noqa: B023
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", [-1.0, -math.inf, math.inf])
def test_norms_of_nothing(kind: float) -> None:
    def fn() -> None:
        with pytest.raises(RuntimeError, match="norm on an empty tensor"):
            torch._foreach_norm([mw.shard_tensor(torch.ones(0, 3), BOTH, {"dp": mw.Shard(0)})], kind)

    mw.simulate(fn, BOTH)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1, 2, 3.0, math.inf])
def test_clipping_with_gradients_that_are_not_there(norm_type: float, foreach: bool | None) -> None:
    def run(on_mesh: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(6, 2, dtype=torch.float64)) for _ in range(4)]
        if on_mesh:
            mesh = mw.Mesh({"dp": 2, "tp": 2})
            cuts: list[Any] = [{"tp": mw.Shard(0)}, {}, {"dp": mw.Shard(0)}]
            laid = [mw.shard_tensor(p.detach(), mesh, cut) for p, cut in zip(params, cuts, strict=False)]
            params = [*map(nn.Parameter, laid), params[3]]
        for p in (params[0], params[1], params[3]):
            p.grad = torch.full_like(p.detach(), 2.0)
        clip = torch.nn.utils.clip_grad_norm_
        norms = [clip(iter(params), 3.0, norm_type, foreach=foreach)]
        params[2].grad = torch.ones_like(params[2].detach())
        norms.append(clip(params, 0.5, norm_type, error_if_nonfinite=True, foreach=foreach))
        params[1].grad.fill_(math.inf)  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="is non-finite"):
            clip(params, 0.5, norm_type, True, foreach)
        return [mw.unshard(t) if isinstance(t, mw.DistTensor) else t for t in (*norms, *(p.grad for p in params))]

    want = run(False)
    for made in mw.simulate(lambda: run(True), mw.Mesh({"dp": 2, "tp": 2})):
        torch.testing.assert_close(made, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [2.0, 3.0, math.inf, -math.inf])
def test_clipping_at_once_is_clipping_in_two_calls(kind: float) -> None:
    """Whether all norms fit into one vector or not: the same bits, and the norm of one device."""
    cuts: list[Any] = [
        {}, {"tp": mw.Shard(0)}, {"dp": mw.Shard(1)}, {"dp": mw.Shard(0), "tp": mw.Shard(0)}, {"tp": mw.Partial()}
    ]  # fmt: skip
    one, two = [torch.float32], [torch.float32, torch.bfloat16]
    sets = [(cuts[:4], one), (cuts[1:2] * 4, one), (cuts[:1] * 4, one), (cuts[:4], [torch.bfloat16]), (cuts, one),
            (cuts[:4], two)]  # fmt: skip

    def made(cuts: list[Any], dtypes: list[torch.dtype]) -> list[nn.Parameter]:
        params = []
        for i, cut in enumerate(cuts):
            values = torch.linspace(-i, 4, 15).view(3, 5).to(dtypes[i % len(dtypes)])
            partial = mw.Partial() in cut.values()
            p = nn.Parameter(mw.shard_tensor(torch.zeros_like(values), BOTH, {} if partial else cut))
            g = mw.shard_tensor(values, BOTH, {} if partial else cut)
            p.grad = mw.reshard(g, cut) if partial else g
            params.append(p)
        return params

    def fn() -> None:
        for cuts, dtypes in sets:
            params, again = made(cuts, dtypes), made(cuts, dtypes)
            local = [nn.Parameter(mw.unshard(p.detach())) for p in params]
            for p, q in zip(params, local, strict=True):
                q.grad = mw.unshard(p.grad)  # type: ignore[arg-type]
            got = clip(params, 1.5, kind)
            norm = nn.utils.get_total_norm([p.grad for p in again], kind)  # type: ignore[misc]
            nn.utils.clip_grads_with_norm_(again, 1.5, norm)
            assert torch.equal(got, norm)
            torch.testing.assert_close(
                got, clip(local, 1.5, kind), rtol=1e-2 if torch.bfloat16 in dtypes else 1e-5, atol=0
            )
            for p, q in zip(params, again, strict=True):
                assert torch.equal(mw.unshard(p.grad), mw.unshard(q.grad))  # type: ignore[arg-type]

    mw.simulate(fn, BOTH)


def test_clipping_of_nothing() -> None:
    with pytest.warns(UserWarning, match="empty generator"):
        assert torch.nn.utils.clip_grad_norm_((p for p in []), 1.0) == 0
