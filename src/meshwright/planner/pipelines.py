"""Pipelines: where blocks that are alike are cut into stages, and what their steps take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A stage: how many blocks it has, and seconds of one micro-batch, forward and backward."""

    blocks: int
    seconds: float


def cut(blocks: int, stages: int, per_block: float, ends: float) -> list[Stage]:
    """Blocks cut into stages whose slowest is the fastest possible, by dynamic programming over cuts.

    The last stage also has what lies behind the blocks, ``ends``; each has a block at least.
    """
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for s in range(stages):
        reached: dict[int, tuple[float, int]] = {}
        extra = ends if s == stages - 1 else 0.0
        for before, (slowest, _) in best[-1].items():
            left = blocks - before - (stages - s - 1)
            for n in range(1, left + 1) if s < stages - 1 else (left,):
                if n < 1:
                    continue
                found = max(slowest, n * per_block + extra)
                if before + n not in reached or found < reached[before + n][0]:
                    reached[before + n] = found, n
        best.append(reached)
    made: list[Stage] = []
    at = blocks
    for s in range(stages, 0, -1):
        n = best[s][at][1]
        made.append(Stage(n, n * per_block + (ends if s == stages else 0.0)))
        at -= n
    return made[::-1]


def piped_seconds(stages: Sequence[float], micro_batches: int) -> float:
    """A step of 1F1B: each stage once, and all further micro-batches at the pace of the slowest."""
    return sum(stages) + (micro_batches - 1) * max(stages)


__all__ = ["Stage", "cut", "piped_seconds"]
