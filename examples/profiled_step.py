"""A profile of training on a mesh: ranges of ops and of collectives, named by what they are for.

torchrun --nproc-per-node 4 examples/profiled_step.py --tp 2 --trace runs/trace.json
torchrun --nproc-per-node 4 examples/profiled_step.py --tp 2 --trace runs/trace.json --captured
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import meshwright as mw

LAYOUTS = {"0.*": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}}
BATCH = {"dp": mw.Shard(0)}


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def ranges(trace: str) -> Counter[str]:
    """The collectives of a trace by name: those that are counted, and so have bytes."""
    names = [event.get("name", "") for event in json.loads(Path(trace).read_text())["traceEvents"]]
    return Counter(n for n in names if re.match(r"meshwright::(?!wait)\w+ over .* bytes", n))


def main() -> None:
    """Train four steps, of which a schedule chooses two, and say what the trace has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="processes that share each layer (default: 1)")
    parser.add_argument("--trace", required=True, metavar="FILE", help="where the first rank writes what it saw")
    parser.add_argument("--captured", action="store_true", help="one program, with mw.compile_step")
    given = parser.parse_args()
    mesh = mw.init_mesh({"dp": int(os.environ.get("WORLD_SIZE", 1)) // given.tp, "tp": given.tp})
    first = mw.rank() == 0

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.randn(16, 5), torch.randint(0, 3, (16,))
    if given.captured:
        step: Any = mw.compile_step(model, loss_fn, optimizer, batch, mesh=mesh, layouts=LAYOUTS, batch=BATCH)
    else:
        mw.shard_module(model, mesh, LAYOUTS)

        def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            laid = tuple(mw.shard_tensor(t, mesh, BATCH) for t in batch)
            with record_function("forward"):
                loss = loss_fn(model, laid)  # type: ignore[arg-type]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

    with mw.explain() as why:  # eager code counts what it sends; a captured step knows it beforehand
        step(batch)
    # A profile changes nothing of what is sent, so one rank may have it alone.
    profiler = profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=2),
        on_trace_ready=lambda done: done.export_chrome_trace(given.trace),
    ) if first else None  # fmt: skip
    if profiler is not None:
        profiler.start()
    for _ in range(4):
        step(batch)
        if profiler is not None:
            profiler.step()
    if profiler is not None:
        profiler.stop()
        sent = (step.explain() if given.captured else why).counts.total
        print(f"{sent} collectives in each step")
        for name, times in ranges(given.trace).items():
            print(f"{times} × {name}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
