"""Attention in sliding windows over a split sequence: of other ranks come only the keys that windows reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch

from .attention_blocks import QueryRows
from .factor_notation import Arg, Local, LocalFn
from .head_groups import sequence_axes
from .strategies import Strategy

Tensor = torch.Tensor


def reached(reach: int, key: Arg, value: Arg) -> int:
    """How many bytes of other ranks a window brings."""
    specs = [s for s in (key.spec, value.spec) if s is not None]
    shapes = [s.local_shape((0,) * s.mesh.ndim) for s in specs]
    return sum(reach * math.prod(s[:-2]) * s[-1] for s in shapes) * key.dtype.itemsize


def near(query: Arg, key: Arg, value: Arg, moved: Mapping[str, str]) -> Iterator[tuple[int, Strategy]]:
    """The axes over which each rank gets only the keys that its rows' windows reach."""
    if 0 in (*query.shape, *key.shape, *value.shape):
        return
    for a, cut in sequence_axes(query, key, value):
        if key.spec is not None and key.spec.mesh.axes[a] not in moved:
            yield a, Strategy(cut, cut[:1], "t")


def reaching(ctx: Local, attended: Callable[..., Tensor]) -> LocalFn:
    """Attention in windows of rows whose keys are split too: those before them come from other ranks.

    Rows may be split over more axes than keys: a group of the keys' axes has the rows of its coordinate on the others.
    """
    spans, place, held = ctx.spans("t", among="s"), ctx.place_in("s"), [[span] for span in ctx.spans("s")]
    axes = ctx.axes("s")

    def run(
        query: Tensor, key: Tensor, value: Tensor, documents: None, causal: bool, window: int, scale: float | None
    ) -> Tensor:
        wanted = [[(max(a - window + 1, 0), b)] if a < b else [] for a, b in spans]
        why = f"rows see the last {window} keys, of which other ranks have those before their own"
        key, value = (ctx.comm.fetch_rows(t, t.ndim - 2, axes, held, wanted, why) for t in (key, value))
        first, last = spans[place]
        before = wanted[place][0][0] if wanted[place] else first
        which = QueryRows((0, first - before, last - first), None, None, causal, window)
        return attended(query, key, value, None, which, scale)

    return run
