"""What PyTorch keeps of a capture for good: steps of many lengths would grow a process by it."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Iterator

from ...compat import FakeTensorMode, graph_sources

_MOST_ANSWERS = 4096  # of ops on fake tensors, which are by shapes


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Behind a capture, drop the sources of the graphs that it made on its way, and the answers of fakes when many."""
    kept = graph_sources.eval_cache
    before = set(kept)
    try:
        yield
    finally:
        for name in kept.keys() - before:
            kept.pop(name, None)
            linecache.cache.pop(name, None)
        if len(FakeTensorMode.cache) > _MOST_ANSWERS:
            FakeTensorMode.cache_clear()
