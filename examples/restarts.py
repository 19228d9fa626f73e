"""A run that outlives its processes: it goes on from the newest checkpoint, on however many there are.

    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/restarts.py

Kill one of the ranks: torchrun starts all of them anew.  On several machines, ``--nnodes 2:4`` and the like, it goes on
with those that are left.  The losses are those of a run that nobody stopped.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="runs/restarts", help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    given = parser.parse_args()

    mesh = mw.init_mesh({"dp": int(os.environ.get("WORLD_SIZE", "1"))})
    torch.manual_seed(0)
    points = torch.randn(96, 8, dtype=torch.float64)
    data = TensorDataset(points, points.sin().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1)).double()
    model = mw.shard_module(model, mesh)
    optimizer = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = mw.shard_dataloader(DataLoader(data, batch_size=12, shuffle=True), mesh)

    store = mw.Checkpoints(given.folder, keep=2)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    step = store.load(**parts) or 0
    first = mw.rank() == 0
    if first:
        print(f"from step {step} on {mesh.size} ranks", flush=True)
    while step < given.steps:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            value = float(loss)  # on all ranks together
            if first:
                print(f"step {step} loss {value!r}", flush=True)
            store.save(step, **parts).wait()
            time.sleep(given.pause)
            if step == given.steps:
                break


if __name__ == "__main__":
    main()
