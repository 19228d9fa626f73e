"""A loop written for Accelerate, on a mesh: only the three lines with ``mw`` are new.

torchrun --nproc-per-node 4 examples/accelerate_loop.py --tp 2
python examples/accelerate_loop.py                             # one process, the same losses
"""

from __future__ import annotations

import argparse
import os

import accelerate
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from meshwright.integrations.accelerate import one_device

LAYOUTS = {"0.*": {"tp": mw.Shard(0)}, "3.weight": {"tp": mw.Shard(1)}}


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="processes that share each layer (default: 1)")
    given = parser.parse_args()

    mesh = mw.init_mesh({"dp": int(os.environ.get("WORLD_SIZE", 1)) // given.tp, "tp": given.tp})
    one_device()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerate.utils.set_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 3)).double()
    data = TensorDataset(torch.randn(50, 5, dtype=torch.float64), torch.randint(0, 3, (50,)))

    model = mw.shard_module(model, mesh, LAYOUTS)
    optimizer = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(data, 7, shuffle=True), schedule
    )
    for epoch in range(2):
        for x, y in mw.shard_dataloader(loader, mesh, {"dp": mw.Shard(0)}):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {accelerator.gather_for_metrics(loss.detach()).item():.6f}")


if __name__ == "__main__":
    main()
