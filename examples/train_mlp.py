"""Trains a small classifier; the model and the loop are those of one device.

torchrun --nproc-per-node 4 examples/train_mlp.py --tp 2    # 2 x 2: the batch over dp, the layers over tp
python examples/train_mlp.py                                # one process, the same losses
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw


class Classifier(nn.Module):
    """Two hidden layers.  Nothing in it knows about meshes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(2, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, 2]`` points to ``[batch, 2]`` logits."""
        h = F.gelu(self.embed(x))
        h = h + self.down(F.gelu(self.up(h)))
        return self.head(h)


# Megatron's pair of layers: split by outputs, then by inputs.  All other parameters are replicated.
LAYOUTS = {
    "up.*": {"tp": mw.Shard(0)},
    "down.weight": {"tp": mw.Shard(1)},
}


def spirals(count: int) -> TensorDataset:
    """Points on two spirals, and which of them each lies on."""
    which = torch.arange(count) % 2
    angle = torch.linspace(0.5, 7.0, count)
    turned = angle + which * torch.pi
    points = torch.stack([turned.cos(), turned.sin()], dim=1) * angle[:, None] / 7
    return TensorDataset(points + 0.01 * torch.randn(count, 2), which)


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="processes that share each layer (default: 1)")
    parser.add_argument("--steps", type=int, default=150, help="steps of the optimizer (default: 150)")
    given = parser.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))

    mesh = mw.init_mesh({"dp": world // given.tp, "tp": given.tp})
    torch.manual_seed(0)  # on every rank: they build the same model and load the same batches
    loader = DataLoader(spirals(512), batch_size=100, shuffle=True)  # the last batch has 12 points: fine
    model = mw.shard_module(Classifier(), mesh, LAYOUTS)
    optimizer = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    batches = mw.shard_dataloader(loader, mesh, {"dp": mw.Shard(0)})

    step = 0
    while step < given.steps:
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)  # the mean over the whole batch, on all ranks
            loss.backward()  # gradients are summed over dp meanwhile
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            value = loss.item()  # every rank must ask: a collective
            if rank == 0 and step % 25 == 0:
                print(f"step {step:4d}  loss {value:.6f}")
            step += 1
            if step == given.steps:
                break
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in batches)
    if rank == 0:
        print(f"{mesh}: {right} of 512 points right")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
