"""Optimizers and clipping on the parameters of four small blocks, beside the same on plain local tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .block import CONTENDERS as BLOCKS
from .block import DP, TP
from .core import DTENSOR, LOCAL, OURS, Benchmark, Effort, Row, Samples, fake_group, interleave, ratios

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


BENCHMARKS = [Benchmark("optimizers", "us", measure, rows)]
