"""Bytes on the wire of a step, by the ring model.

All-gather and reduce-scatter move (n-1)/n of the gathered bytes, all-reduce twice that, all-to-all (n-1)/n of
the local bytes; slicing, padding and retyping move nothing.
"""

from __future__ import annotations

import math
from functools import lru_cache

from ..collective import KINDS
from ..layout import Spec, bytes_each, cuts
from .conversions import ConversionStep, lowered


def held_bytes(spec: Spec, *, without: tuple[int, ...] = ()) -> float:
    """Mean bytes that one rank holds, taking the shards of the axes ``without`` as gathered."""
    split = 1
    for a, p in enumerate(spec.layout.placements):
        if cuts(p) and a not in without:
            split *= spec.mesh.sizes[a]
    return spec.nbytes / split


def passes(kind: str) -> tuple[int, int]:
    """How often (n-1)/n of what a rank holds before a step, and of what it holds after it, goes over the wire."""
    found = KINDS.get(kind)
    return found.passes if found is not None else (0, 0)


@lru_cache(maxsize=2048)
def step_bytes(step: ConversionStep) -> float:
    """Bytes that each rank sends for one step as it runs."""
    before, after = passes(step.kind)
    if not before and not after:
        return 0.0
    n = math.prod(step.src.mesh.sizes[a] for a in step.axes)
    src, dst = step.src, step.dst
    sent = (
        1.0
        if src.comm_format is None or not KINDS[step.kind].wired
        else bytes_each(src.comm_format) / src.dtype.itemsize
    )
    return (n - 1) / n * sent * (before * held_bytes(src) + after * held_bytes(dst))


def bytes_of(steps: tuple[ConversionStep, ...]) -> float:
    """Bytes that each rank sends for a sequence of steps, in the dtypes in which they run."""
    return sum(step_bytes(s) for s in lowered(steps))
