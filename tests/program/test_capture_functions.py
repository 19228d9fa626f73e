"""``torch.autograd.Function`` in captured steps: the user's backward, on every layout, as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.dispatch import plans
from meshwright.errors import CaptureError, DesyncError
from meshwright.ranks import runtime

Tensor = torch.Tensor
pytestmark = pytest.mark.filterwarnings("ignore:.*has no rule")


class Gelu(torch.autograd.Function):
    """BLOOM's: by its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        return (0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)) * g


class Reversed(torch.autograd.Function):
    """Returns what it is given; a number and a string beside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, how: str) -> Tensor:
        ctx.factor = factor
        assert how == "reverse"
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        return -ctx.factor * g, None, None


class Rounded(torch.autograd.Function):
    """Straight through, with ``setup_context``; its second result has no gradient."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        steps = (x / scale).round()
        return steps * scale, steps.long()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        return g * (x.abs() < 3 * scale), (g * ((x / scale).round() - x / scale)).sum()


class Mixed(torch.autograd.Function):
    """A product whose gradients are neither of the two's, of some inputs only; a list is not differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, others: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w + others[0].detach().mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return (g @ w.t() * 0.5 if ctx.needs_input_grad[0] else None), x.flatten(0, -2).t() @ g.flatten(0, -2) * 2, None


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 2


class Net(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.scale, self.mix = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.randn(6, 6) / 3)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self, self.up(x)))  # type: ignore[no-any-return]


def rounded(net: Net, h: Tensor) -> Tensor:
    y, steps = Rounded.apply(h, net.scale)
    return y + steps.abs().clamp(max=1)  # type: ignore[no-any-return]


def mixed(net: Net, h: Tensor) -> Tensor:
    a, b = h.chunk(2, -1)
    return torch.cat([Mixed.apply(a, net.mix, [net.scale, b]), b], -1)


ACTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "gelu": lambda net, h: Gelu.apply(h),
    "reversed": lambda net, h: Reversed.apply(h * 1.5, 0.3, "reverse"),
    "rounded": rounded,
    "mixed": mixed,
    "twice": lambda net, h: Gelu.apply(Reversed.apply(Gelu.apply(h), 0.7, "reverse")),
    "checkpointed": lambda net, h: checkpoint(Gelu.apply, h, use_reentrant=False),
    "without gradients": lambda net, h: h * Gelu.apply(h.detach()).detach(),
    "noisy": lambda net, h: Noisy.apply(h),
    "of a parameter": lambda net, h: h @ Reversed.apply(torch.eye(12, dtype=h.dtype) * net.scale, 2.0, "reverse"),
}
PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp": ({"dp": 3}, {}),
    "zero-3": ({"dp": 2}, {"fsdp": "dp"}),
    "dp-tp": (
        {"dp": 2, "tp": 2},
        {"layouts": {"up.*": {"tp": mw.Shard(0)}, "down.weight": {"tp": mw.Shard(1)}}},
    ),
}


def data(i: int) -> Tensor:
    return torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(i))


def loss_of(net: Net, x: Tensor) -> Tensor:
    return net(x).square().mean()


def trained(act: str, plan: str | None) -> Any:
    torch.manual_seed(0)
    net = Net(ACTS[act]).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    if plan is None:
        losses = []
        for i in range(3):
            loss = loss_of(net, data(i))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, copy.deepcopy(net.state_dict())
    axes, more = PLANS[plan]
    mesh = mw.init_mesh(axes)
    step = mw.compile_step(net, loss_of, optimizer, data(0), mesh=mesh, batch={"dp": mw.Shard(0)}, **more)
    return [float(step(data(i))) for i in range(3)], {n: mw.unshard(t) for n, t in net.state_dict().items()}


@pytest.mark.thin(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("act", ACTS)
def test_equals_one_device(act: str, plan: str) -> None:
    losses, state = trained(act, None)
    for made, own in mw.simulate(lambda: trained(act, plan), mw.Mesh(PLANS[plan][0])):
        assert made == pytest.approx(losses, rel=1e-12)
        for name, t in state.items():
            torch.testing.assert_close(own[name], t, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


# -- what a captured step cannot do, and what goes with it -------------------------------------------------


class Branches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


def step_with(act: Callable[[Any, Tensor], Tensor], **more: Any) -> Any:
    torch.manual_seed(0)
    net = Net(act).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    mesh = mw.init_mesh({"dp": 2})
    return mw.compile_step(net, loss_of, optimizer, data(0), mesh=mesh, batch={"dp": mw.Shard(0)}, **more)


@pytest.mark.parametrize(
    ("function", "text"),
    [(Writes, "Writes writes to what it is given"), (Branches, "cannot be captured")],
)
def test_refused(function: Any, text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        mw.simulate(lambda: step_with(lambda net, h: function.apply(h * 1.0)), mw.Mesh({"dp": 2}))


def test_numbers_that_differ_by_rank_are_told() -> None:
    def run() -> None:
        factor = 1.0 + runtime.RT.rank
        step_with(lambda net, h: Reversed.apply(h, factor, "reverse"))

    with pytest.raises(DesyncError, match=r"Reversed\(None, 2.0, 'reverse'\)"):
        mw.simulate(run, mw.Mesh({"dp": 2}))


@pytest.mark.parametrize(
    "passes", [["data-parallel-optimization"], ["gradient-merge:k_steps=2,weighted=false"]], ids=str
)
def test_passes_and_files(passes: list[str], tmp_path: Path) -> None:
    """A step is recorded with what the Functions do: its file needs none of them."""

    def run() -> Any:
        step = step_with(ACTS["gelu"], passes=passes)
        losses = [float(step(data(i))) for i in range(4)]
        mw.save_program(step.program, tmp_path / f"{runtime.RT.rank}")
        again = mw.load_program(tmp_path / f"{runtime.RT.rank}")
        return losses, [str(n.target) for n in again.graph.nodes]

    for losses, targets in mw.simulate(run, mw.Mesh({"dp": 2})):
        assert all(a > b for a, b in pairwise(losses[::2]))
        assert not any("functions" in t for t in targets)


def test_what_is_gathered_is_told() -> None:
    plans._WARNED.clear()
    with pytest.warns(UserWarning, match=r"the autograd.Function Gelu has no rule: .*bytes sent.*custom_op"):
        mw.simulate(lambda: step_with(ACTS["gelu"]), mw.Mesh({"dp": 2}))


class Scaled(Tensor):
    """A tensor class that wraps another, as float8 tensors do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[a.inner if isinstance(a, Scaled) else a for a in args], **(kwargs or {}))


class Wrapping(torch.autograd.Function):
    """Computes by a tensor class of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Scaled(x * 2).reshape(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


def test_a_tensor_class_of_another_library_is_named() -> None:
    mesh, x = mw.Mesh({"dp": 2}), torch.ones(4, 3)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return Wrapping.apply(model(x)).sum()  # type: ignore[no-any-return]

    def run() -> None:
        mw.compile_step(nn.Linear(3, 3), loss, None, x, mesh=mesh, batch={"dp": mw.Shard(0)})

    with pytest.raises(CaptureError, match=r"a Scaled of shape .* with PyTorch's own ops, or train eagerly"):
        mw.simulate(run, mesh)
