"""Views in captured steps: every one is known to lie in the memory that it looks at, whatever a pass put there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.program.capture import naming
from meshwright.program.ir.nodes import LINEAR_VIEWS, VIEWS

Tensor = torch.Tensor
MESH = mw.Mesh({"dp": 2})
NOT_DENSE = {"values", "indices", "crow_indices", "ccol_indices", "row_indices", "col_indices"}  # of sparse tensors
LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "diagonal": lambda w: w.mT.diagonal(),
    "einsum": lambda w: torch.einsum("jj->j", w),
    "unfold": lambda w: w.unfold(0, 2, 1).sum((0, 2)),
    "complex": lambda w: torch.view_as_complex(w.view(4, 2, 2)).conj().imag.sum(),
    "bits": lambda w: w.view(torch.int64).view(torch.float64)[0],
}


def test_every_view_of_torch_is_known() -> None:
    """What is not composite and returns the memory of its input: sparse, nested and forward-mode tensors aside."""
    unknown = set()
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or base.startswith("_") or base in NOT_DENSE:
            continue
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        if op.is_view and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            unknown.add(op)
    assert unknown > {torch.ops.aten.diagonal.default, torch.ops.aten.unfold.default}
    assert unknown <= VIEWS


class Looking(nn.Module):
    def __init__(self, look: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.v = (nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(2))
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w + self.look(self.v)).square().mean()


@pytest.mark.parametrize("linear", [naming._PASSED, LINEAR_VIEWS])
def test_what_may_be_exchanged_with_a_sum_are_all_views_but_those_of_bits(linear: set[object]) -> None:
    assert VIEWS - linear == {torch.ops.aten.view.dtype}


@pytest.mark.parametrize("look", LOOKS)
def test_views_of_gathered_parameters(look: str) -> None:
    torch.manual_seed(1)
    data = torch.randn(5, 4, dtype=torch.float64)

    def alone() -> list[Tensor]:
        model = Looking(LOOKS[look])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(data).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    def rank() -> list[Tensor]:
        model = Looking(LOOKS[look])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile_step(
            model,
            None,
            optimizer,
            data,
            mesh=MESH,
            batch={"dp": mw.Shard(0)},
            fsdp="dp",
            passes=["data-parallel-optimization"],
        )
        for _ in range(2):
            step(data)
        return [mw.unshard(p.detach()) for p in model.parameters()]

    for got in mw.simulate(rank, MESH):
        torch.testing.assert_close(got, alone(), rtol=1e-12, atol=1e-12)


class Quantiser(nn.Module):
    """The values that two convolutions make lie with channels last, as those of an attention do; so ``contiguous`` does
    nothing on one device, and is not captured.  What is summed over ranks lies row by row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Conv2d(6, 12, 1), nn.Conv2d(12, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x.transpose(1, 2).unflatten(2, (4, 4))).relu()).tanh().permute(0, 2, 3, 1).contiguous()
        return torch.cdist(y.view(-1, 6), self.up.weight[:, :, 0, 0]).square().mean()


def test_a_view_of_what_lies_with_channels_last() -> None:
    mesh, x = mw.Mesh({"tp": 2}), torch.randn(3, 16, 6, dtype=torch.float64)
    layouts = {"up.*": {"tp": mw.Shard(0)}, "down.weight": {"tp": mw.Shard(1)}}
    model = Quantiser().double()
    loss = model(x)
    loss.backward()

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        made = Quantiser().double()
        step = mw.compile_step(made, lambda m, x: m(x), None, x, mesh=mesh, layouts=layouts, gradients=True)
        return mw.unshard(step(x)), {n: mw.unshard(p.grad) for n, p in made.named_parameters() if p.grad is not None}

    for found in mw.simulate(run, mesh):
        torch.testing.assert_close(found, (loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
