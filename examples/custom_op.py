"""A custom op and its rule: what it does to layouts, in one line, checked against the single device.

python examples/custom_op.py
torchrun --nproc-per-node 2 examples/custom_op.py
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from meshwright.rules import Arg, Rule, notation


@torch.library.custom_op("examples::tempered_softmax", mutates_args=())
def tempered_softmax(scores: Tensor, temperature: float) -> Tensor:
    """Softmax over the last dim; stands for a kernel that PyTorch cannot look into."""
    return torch.softmax(scores / temperature, -1)


@tempered_softmax.register_fake
def _(scores: Tensor, temperature: float) -> Tensor:
    return torch.empty_like(scores)


def _save(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.temperature = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (y,) = ctx.saved_tensors
    return y * (grad - (grad * y).sum(-1, keepdim=True)) / ctx.temperature, None


tempered_softmax.register_autograd(_backward, setup_context=_save)


@mw.rule("examples::tempered_softmax")
def tempered_softmax_rule(scores: Arg, temperature: float) -> Rule:
    """Any dim may be split but the last: a rank needs all of a row."""
    return notation("... d -> ... d", scores, whole="d")


def main() -> None:
    """Check the rule, then use the op on the processes that are there."""
    rank = mw.rank()
    # 5 rows over 4 ranks: even, uneven and empty parts, values and gradients.
    report = mw.check_rule("examples::tempered_softmax", torch.randn(5, 3, dtype=torch.float64), 2.0)
    if rank == 0:
        print(report)

    mesh = mw.init_mesh({"dp": int(os.environ.get("WORLD_SIZE", 1))})
    torch.manual_seed(0)
    x = mw.shard_tensor(torch.randn(6, 4), mesh, {"dp": mw.Shard(0)})
    with mw.explain() as why:
        y = tempered_softmax(x, 0.5)
    whole = mw.unshard(y)
    if rank == 0:
        print(f"split by rows: {y.spec.layout!r}, {why}")
        print(f"rows sum to {whole.sum(1).tolist()}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
