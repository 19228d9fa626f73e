"""What torch.compile fuses in a model that is sharded: the arithmetic of a block, on the part that a rank holds.

torchrun --nproc-per-node 4 examples/compiled_blocks.py --tp 2
python examples/compiled_blocks.py                          # one process, the same losses
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.rules import Arg, Rule, notation


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _gate_back(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(gate)
    return grad * up * s * (1 + gate * (1 - s)), grad * gate * s


COMPILED = {f: torch.compile(f, dynamic=True) for f in (_gate, _gate_back)}


@torch.library.custom_op("examples::gated", mutates_args=())
def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in one kernel.  Whatever the layout, what is compiled meets the plain parts of a rank."""
    return COMPILED[_gate](gate.detach(), up.detach())  # nobody differentiates inside of an op


@torch.library.custom_op("examples::gated_back", mutates_args=())
def gated_back(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Its gradients, in one kernel."""
    return COMPILED[_gate_back](grad.detach(), gate.detach(), up.detach())


@gated.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@gated_back.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


gated.register_autograd(
    lambda ctx, grad: gated_back(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@mw.rule("examples::gated")
def gated_rule(gate: Arg, up: Arg) -> Rule:
    """Elementwise: any dim may be split, and the gradients follow."""
    return notation("..., ... -> ...", gate, up)


class Block(nn.Module):
    """A gated MLP with a residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and what the MLP adds."""
        return x + self.down(gated(self.gate(x), self.up(x)))


LAYOUTS = {
    "*.gate.weight": {"tp": mw.Shard(0)},
    "*.up.weight": {"tp": mw.Shard(0)},
    "*.down.weight": {"tp": mw.Shard(1)},
}


def loss_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Mean squared error."""
    x, y = batch
    return F.mse_loss(model(x), y)


def make_step(model: nn.Module, optimizer: Any, example: Any, mesh: mw.Mesh, captured: bool) -> Callable[[Any], Tensor]:
    """A training step: eager, or one program."""
    batch = {"dp": mw.Shard(0)}
    if captured:
        return mw.compile_step(model, loss_fn, optimizer, example, mesh=mesh, layouts=LAYOUTS, batch=batch)
    mw.shard_module(model, mesh, LAYOUTS)

    def step(given: tuple[Tensor, Tensor]) -> Tensor:
        loss = loss_fn(model, tuple(mw.shard_tensor(t, mesh, batch) for t in given))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def main() -> None:
    """Train a few steps, eagerly or as a captured program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="processes that share each layer (default: 1)")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: inductor)")
    parser.add_argument("--captured", action="store_true", help="as one program, with mw.compile_step")
    given = parser.parse_args()
    for function in list(COMPILED):
        COMPILED[function] = torch.compile(function, dynamic=True, backend=given.backend)
    mesh = mw.init_mesh({"dp": int(os.environ.get("WORLD_SIZE", 1)) // given.tp, "tp": given.tp})

    torch.manual_seed(0)
    model = nn.Sequential(Block(6, 10), Block(6, 10)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = tuple(torch.randn(2, 5, 6, dtype=torch.float64))
    step = make_step(model, optimizer, batch, mesh, given.captured)
    for number in range(4):
        value = step(batch).item()  # every rank asks
        if mw.rank() == 0:
            print(f"step {number} loss {value:.6f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
