"""TensorBoard and Weights & Biases beside a sharded model: every rank computes what is logged, the first one writes it.

torchrun --nproc-per-node 4 examples/logged_values.py --tp 2 --tensorboard runs/tb --wandb runs/wandb
python examples/logged_values.py --tensorboard runs/tb          # one process, the same values
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw

LAYOUTS = {"0.*": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}}


class Log:
    """What the first rank writes to; on the others it takes values and forgets them."""

    def __init__(self, tensorboard: str | None, wandb_folder: str | None, first: bool) -> None:
        self.writer: Any = None
        self.run: Any = None
        if tensorboard and first:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(tensorboard)
        if wandb_folder and first:
            import wandb

            os.makedirs(wandb_folder, exist_ok=True)
            settings = wandb.Settings(silent=True)
            self.run = wandb.init(project="meshwright", mode="offline", dir=wandb_folder, settings=settings)

    def write(self, step: int, numbers: dict[str, float], tensors: dict[str, torch.Tensor]) -> None:
        """One step: plain numbers, and plain tensors as histograms."""
        if self.writer is not None:
            for name, number in numbers.items():
                self.writer.add_scalar(name, number, step)
            for name, tensor in tensors.items():
                self.writer.add_histogram(name, tensor, step)
        if self.run is not None:
            import wandb

            self.run.log({**numbers, **{name: wandb.Histogram(t.numpy()) for name, t in tensors.items()}}, step=step)

    def close(self) -> None:
        """Write what is left."""
        if self.writer is not None:
            self.writer.close()
        if self.run is not None:
            self.run.finish()


def main() -> None:
    """Train, and log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="processes that share each layer (default: 1)")
    parser.add_argument("--tensorboard", metavar="DIR", help="where event files go")
    parser.add_argument("--wandb", metavar="DIR", help="where runs of Weights & Biases go, offline")
    given = parser.parse_args()
    mesh = mw.init_mesh({"dp": int(os.environ.get("WORLD_SIZE", 1)) // given.tp, "tp": given.tp})
    first = mw.rank() == 0

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 3)).double()
    data, labels = torch.randn(14, 5, dtype=torch.float64), torch.randint(0, 3, (14,))
    model = mw.shard_module(model, mesh, LAYOUTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = (mw.shard_tensor(t, mesh, {"dp": mw.Shard(0)}) for t in (data, labels))

    log = Log(given.tensorboard, given.wandb, first)
    for step in range(3):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # A loss over a split batch, a norm over split gradients and a split weight are in pieces: to read one is a
        # collective, which every rank calls.  What comes out is plain, and one rank may write it.
        numbers = {"loss": loss.item(), "gradient norm": norm.item()}
        tensors = {"first weight": mw.unshard(model.get_parameter("0.weight")).detach()}
        log.write(step, numbers, tensors)
        if first:
            print(f"step {step} loss {numbers['loss']:.6f}")
        optimizer.step()
        optimizer.zero_grad()
    log.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
