"""Float8 linears on sharded weights: one scale for the whole weight, whatever each rank holds of it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw

E4M3 = torch.float8_e4m3fn
CASES: dict[str, tuple[dict[str, int], Any, dict[str, Any]]] = {
    "dp": ({"dp": 2}, None, {}),
    "zero 3": ({"dp": 2}, None, {"fsdp": "dp"}),
    "columns": ({"tp": 2}, {"0.weight": {"tp": mw.Shard(0)}}, {}),
    "rows": ({"tp": 2}, {"0.weight": {"tp": mw.Shard(1)}}, {}),
    "both": ({"dp": 2, "tp": 2}, {"0.weight": {"tp": mw.Shard(0)}}, {"fsdp": "dp"}),
}
DATA = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))


def as_float8(t: torch.Tensor) -> torch.Tensor:
    """Values as float8 has them with one scale for the tensor, as dynamic tensorwise scaling has it."""
    scale = 448 / t.detach().abs().amax().clamp(min=1e-12)
    return (t * scale).to(E4M3).to(t.dtype) / scale


class Scaled(torch.autograd.Function):
    """A matmul of what was cast, with a backward of its own: what Float8Linear of torchao calls."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return as_float8(x) @ as_float8(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return as_float8(grad) @ as_float8(weight), as_float8(grad).t() @ as_float8(x)


class Wrapped(torch.Tensor):
    """Float8 values and their scale as a class of tensors, as torchao has one; known is a product of two."""

    values: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Wrapped:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Wrapped = make(cls, values.shape, dtype=dtype, device=values.device, strides=values.stride())
        made.values, made.scale = values, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], self.dtype

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.t.default:
            return cls(args[0].values.t(), args[0].scale, args[0].dtype)
        assert func is torch.ops.aten.mm.default, func
        a, b = args
        return (a.values.to(a.dtype) / a.scale) @ (b.values.to(b.dtype) / b.scale)


def wrapped(t: torch.Tensor) -> Wrapped:
    scale = 448 / t.detach().abs().amax().clamp(min=1e-12)
    return Wrapped((t * scale).to(E4M3), scale, t.dtype)


class ScaledByClass(torch.autograd.Function):
    """The same with a class of tensors inside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return wrapped(x) @ wrapped(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return wrapped(grad) @ wrapped(weight), wrapped(grad).t() @ wrapped(x)


class ByClass(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = ScaledByClass.apply(x, self.weight)
        return made


class ByFunction(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Scaled.apply(x, self.weight)
        return made


class ByOps(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight + (as_float8(self.weight) - self.weight).detach()).t()


def net(kind: type[nn.Linear]) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(kind(8, 8, bias=False), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight[6, 5] = 5.3  # on one rank only, however it is cut
    return model


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


@pytest.mark.parametrize("static", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [ByOps, ByFunction, ByClass])
@pytest.mark.filterwarnings("ignore:the autograd.Function")
def test_one_scale_for_the_whole_weight(kind: type[nn.Linear], case: str, static: bool) -> None:
    sizes, placements, options = CASES[case]
    mesh, batch = mw.Mesh(sizes), {"dp": mw.Shard(0)} if "dp" in sizes else {}
    one = net(kind)
    loss_of(one, DATA).backward()

    def run() -> dict[str, torch.Tensor]:
        model = net(kind)
        if static:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            step = mw.compile_step(
                model, loss_of, optimizer, DATA, mesh=mesh, layouts=placements, batch=batch, gradients=True, **options
            )
            step(DATA)
        else:
            mw.shard_module(model, mesh, placements, **options)
            loss_of(model, mw.shard_tensor(DATA, mesh, batch)).backward()
        return {n: mw.unshard(p.grad) for n, p in model.named_parameters()}

    for found in mw.simulate(run, mesh):
        for name, p in one.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-5, atol=1e-5)


def test_the_scale_of_a_shard_is_another() -> None:
    """What the others would catch."""
    whole = net(ByOps)[0].weight.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not torch.equal(as_float8(whole)[:4], as_float8(whole[:4]))
