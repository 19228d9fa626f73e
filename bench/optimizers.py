"""Optimizers and clipping on the parameters of four small blocks, beside the same on plain local tensors.

Muon on sharded matrices, each whole at its owner, beside torch's on whole matrices in each of two processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn

import meshwright as mw

from .block import CONTENDERS as BLOCKS
from .block import DP, TP
from .core import DTENSOR, LOCAL, OURS, Benchmark, Effort, Row, Samples, fake_group, interleave, ratio, ratios

COPIES = 4
TARGETS = {"AdamW, foreach": 1.05, "AdamW, fused": 1.1, "clip_grad_norm_": 1.5}


def parameters(name: str) -> list[Any]:
    """Of one contender, with gradients that lie as they do."""
    made = [p for _ in range(COPIES) for p in BLOCKS[name]()[0].parameters()]
    for p in made:
        p.grad = torch.zeros_like(p.detach()) + 1e-4
    return made


def clipping(of: list[Any]) -> Callable[[], Any]:
    """The norm is computed, and nothing is cut."""
    return lambda: torch.nn.utils.clip_grad_norm_(of, 1e9, foreach=True)


CASES: dict[str, Callable[[list[Any]], Callable[[], Any]]] = {
    "AdamW, foreach": lambda of: torch.optim.AdamW(of, foreach=True).step,
    "AdamW, fused": lambda of: torch.optim.AdamW(of, fused=True).step,
    "clip_grad_norm_": clipping,
}


def measure(effort: Effort) -> Samples:
    """Steps on parameters that the contenders have laid out."""
    with fake_group(DP * TP):
        held = {name: parameters(name) for name in (LOCAL, DTENSOR, OURS)}
        return {
            case: interleave({name: make(of) for name, of in held.items()}, effort, target_ms=15)
            for case, make in CASES.items()
        }


def rows(samples: Samples) -> Iterator[Row]:
    """Beside plain local tensors."""
    for case, target in TARGETS.items():
        found = ratios(samples, case, (OURS, DTENSOR), LOCAL)
        yield Row(f"{case} / plain local", found.pop(OURS), target, found)


def matrices(side: int) -> list[torch.Tensor]:
    """Those of three blocks: four of attention, three of a gated MLP."""
    rng = torch.Generator().manual_seed(0)
    shapes = 3 * ([(side, side)] * 4 + [(3 * side, side)] * 2 + [(side, 3 * side)])
    return [torch.randn(*shape, generator=rng) for shape in shapes]


def measure_muon(effort: Effort) -> Samples:
    """CPU seconds of this process for a step, of both in turn."""
    values = matrices(effort.pick(512, 128, 16))
    mesh = mw.init_mesh({"dp": 2})
    split = [nn.Parameter(mw.shard_tensor(v, mesh, {"dp": mw.Shard(0)})) for v in values]
    held = {OURS: split, LOCAL: [nn.Parameter(v.clone()) for v in values]}
    steps: dict[str, Callable[[], Any]] = {}
    for name, params in held.items():
        for p in params:
            p.grad = p.detach().clone()
        steps[name] = torch.optim.Muon(params).step
        for _ in range(effort.pick(3, 1, 1)):  # until memory is taken from what was freed before
            steps[name]()
    found: dict[str, list[float]] = {name: [] for name in steps}
    rng = effort.rng()
    for _ in range(effort.pick(5, 3, 2)):
        for name in rng.sample(sorted(steps), len(steps)):
            start = time.process_time()
            steps[name]()
            found[name].append(time.process_time() - start)
    return {"Muon": found}


def muon_rows(samples: Samples) -> Iterator[Row]:
    """Beside torch's."""
    yield Row("Muon, two processes / on whole matrices", ratio(samples, "Muon", OURS, LOCAL), 0.65)


BENCHMARKS = [
    Benchmark("optimizers", "us", measure, rows),
    Benchmark("muon", "s", measure_muon, muon_rows, processes=2),
]
