"""A loop written for Lightning Fabric, on a mesh: only the strategy is new.

torchrun --nproc-per-node 4 examples/fabric_loop.py --tp 2
python examples/fabric_loop.py                             # one process, the same losses
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from meshwright.integrations.fabric import MeshStrategy

LAYOUTS = {"0.*": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}}


def main() -> None:
    """Train, report, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="processes that share each layer (default: 1)")
    parser.add_argument("--save", metavar="FILE", help="where the trained model goes")
    given = parser.parse_args()

    axes = {"dp": int(os.environ.get("WORLD_SIZE", 1)) // given.tp, "tp": given.tp}
    fabric = Fabric(accelerator="cpu", strategy=MeshStrategy(axes, LAYOUTS, {"dp": mw.Shard(0)}))
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3)).double()
    data = TensorDataset(torch.randn(50, 5, dtype=torch.float64), torch.randint(0, 3, (50,)))

    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(data, 7, shuffle=True))
    for epoch in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        value = loss.item()  # every rank must ask: a collective
        fabric.print(f"epoch {epoch} loss {value:.6f}")
    if given.save:
        fabric.save(given.save, {"model": model, "optimizer": optimizer})


if __name__ == "__main__":
    main()
