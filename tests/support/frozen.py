"""Imported last by the server that forks ranks: they share its memory, and no collection writes to it.

It has captured a step, which takes each process a second the first time.
"""

from __future__ import annotations

import torch

import meshwright as mw
from meshwright.train.config import StepConfig
from meshwright.train.model import GPT, loss_of
from tests.support import cheap


def _capture() -> None:
    torch.manual_seed(0)
    model, ids = GPT(StepConfig(layers=1, hidden=8, heads=2, seq=4)), torch.zeros(4, 4, dtype=torch.long)
    options = {"batch": {"dp": mw.Shard(0)}, "layouts": {"*.up.weight": {"tp": mw.Shard(0)}}, "clip_grad_norm": 1.0}
    optimizer = torch.optim.AdamW(model.parameters())
    step = mw.compile_step(model, lambda m, b: loss_of(m, b, b), optimizer, ids, mesh=MESH, **options)
    step(ids)


MESH = mw.Mesh({"dp": 2, "tp": 2})
torch.set_num_threads(1)  # a rank has one; threads would not be there after a fork
with torch.random.fork_rng():
    mw.simulate(_capture, MESH)
cheap.freeze()
