"""What PyTorch keeps of a capture for good: steps of many lengths would grow a process by it."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Iterator

import torch.fx.graph_module
from torch._subclasses.fake_tensor import FakeTensorMode

_MOST_ANSWERS = 8192  # of ops on fake tensors, which are by shapes


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Behind a capture, drop the sources of the graphs that it made on its way, and the answers of fakes when many."""
    loader = torch.fx.graph_module._loader
    before = set(loader.eval_cache)
    try:
        yield
    finally:
        for name in loader.eval_cache.keys() - before:
            loader.eval_cache.pop(name, None)
            linecache.cache.pop(name, None)
        if len(FakeTensorMode.cache) > _MOST_ANSWERS:
            FakeTensorMode.cache_clear()
