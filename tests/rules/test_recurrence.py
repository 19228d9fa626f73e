"""The gated delta rule along a split sequence: position by position on one device, and at once on many."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright import collective
from meshwright.errors import DispatchError
from meshwright.rules.recurrence import gated_delta_rule

F64 = torch.float64


def given(t: int, k: int = 3, v: int = 5) -> list[Tensor]:
    draw = torch.Generator().manual_seed(t)
    q, key, value = (torch.randn(2, t, 4, n, dtype=F64, generator=draw) for n in (k, k, v))
    decay, beta = (torch.rand(2, t, 4, dtype=F64, generator=draw) for _ in range(2))
    return [q, F.normalize(key, dim=-1), value, -decay, beta]


def one_by_one(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    state = query.new_zeros(query.shape[0], query.shape[2], key.shape[-1], value.shape[-1])
    made = []
    for i in range(query.shape[1]):
        state = state * decay[:, i, :, None, None].exp()
        known = torch.einsum("bhkv,bhk->bhv", state, key[:, i])
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, i], (value[:, i] - known) * beta[:, i, :, None])
        made.append(torch.einsum("bhkv,bhk->bhv", state, query[:, i]))
    return torch.stack(made, 1)


def results(fn: Any, *inputs: Tensor) -> list[Tensor]:
    made = fn(*inputs)
    first = torch.autograd.grad(made.tanh().sum(), inputs, create_graph=True)
    return [made, *first, *torch.autograd.grad(sum((g * g).sum() for g in first), inputs)]


MESHES = [
    (mw.Mesh({"a": 3}), {"a": mw.Shard(1)}),
    (mw.Mesh({"a": 2, "b": 3}), {"a": mw.Shard(2), "b": mw.Shard(1)}),
    (mw.Mesh({"a": 2, "b": 2, "c": 2}), {"a": mw.Shard(1), "b": mw.Shard(0), "c": mw.Shard(1)}),
]


@pytest.mark.parametrize(("t", "chunk"), [(4, 4), (17, 4), (32, 3)])  # of 4, ranks have nothing
@pytest.mark.thin(2)
def test_like_position_by_position(t: int, chunk: int) -> None:
    inputs = given(t)
    want = results(one_by_one, *(x.clone().requires_grad_() for x in inputs))
    alone = results(partial(gated_delta_rule, chunk=chunk), *(x.clone().requires_grad_() for x in inputs))
    torch.testing.assert_close(alone, want, rtol=1e-9, atol=1e-9)

    def run(mesh: mw.Mesh, laid: dict[str, mw.Shard]) -> list[Tensor]:
        own = [mw.shard_tensor(x, mesh, laid).requires_grad_() for x in inputs]
        made = results(partial(gated_delta_rule, chunk=chunk), *own)
        assert made[0].placements == own[0].placements
        return [mw.unshard(x) for x in made]

    for mesh, laid in MESHES:
        for made in mw.simulate(partial(run, mesh, laid), mesh):
            torch.testing.assert_close(made, want, rtol=1e-9, atol=1e-9)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(6, 4 * 13).double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, g, b = self.into(x).unflatten(-1, (4, 13)).split([3, 3, 5, 1, 1], -1)
        made = gated_delta_rule(q, F.normalize(k, dim=-1), v, F.logsigmoid(g[..., 0]), b[..., 0].sigmoid(), 4)
        return made.square().mean()


def test_captured() -> None:
    x, mesh = torch.randn(2, 18, 6, dtype=F64, generator=torch.Generator().manual_seed(1)), mw.Mesh({"cp": 4})
    alone = Layer()
    loss = alone(x)
    loss.backward()

    def run() -> tuple[float, Tensor, dict[str, int]]:
        model = Layer()
        before = model.into.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step = mw.compile_step(model, lambda m, x: m(x), optimizer, x, mesh=mesh, batch={"cp": mw.Shard(1)})
        return float(step(x)), before - mw.unshard(model.into.weight), step.program.kinds

    for found, grad, kinds in mw.simulate(run, mesh):
        assert found == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(grad, alone.into.weight.grad, rtol=1e-9, atol=1e-12)
        assert kinds["exchange_rows"] == 2
        assert set(kinds) == {"exchange_rows", "all_reduce"}


def test_what_is_passed_on_does_not_hang_on_the_length() -> None:
    mesh = mw.Mesh({"cp": 4})

    def run(t: int) -> int:
        own = [mw.shard_tensor(x, mesh, {"cp": mw.Shard(1)}).requires_grad_() for x in given(t)]
        with collective.counting() as counts:
            gated_delta_rule(*own, chunk=4)
        return counts.total_bytes

    for t in (16, 48):
        found = mw.simulate(partial(run, t), mesh)
        assert found == [after * 2 * 4 * 3 * (5 + 3) * 8 for after in (3, 2, 1, 0)]


def test_shapes_that_do_not_fit() -> None:
    q, k, v, g, b = given(4)
    with pytest.raises(DispatchError, match=r"gated_delta_rule: .* do not fit: give query and key"):
        gated_delta_rule(q, k, v, g[:, :3], b)
