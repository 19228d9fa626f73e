"""All benchmarks, in the order of the table."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from .core import Benchmark

# Each has BENCHMARKS; a new one needs no more than its name here.
MODULES = (
    *("ops", "block", "optimizers", "steps", "memory", "wire", "capture", "replay", "lengths", "checkpoint"),
    *("precision", "hand", "context", "experts", "pipeline", "check", "plan"),
)


def benchmarks() -> list[Benchmark]:
    """Of all modules."""
    return [b for name in MODULES for b in importlib.import_module(f".{name}", __package__).BENCHMARKS]


def chosen(listed: Iterable[Benchmark], only: str | None) -> list[Benchmark]:
    """Those named in ``only``, in full or by how they begin.

    Raises:
        ValueError: a word names none of them.
    """
    listed = list(listed)
    if only is None:
        return listed
    names: set[str] = set()
    for word in filter(None, only.split(",")):
        found = {b.name for b in listed if b.name == word} or {b.name for b in listed if b.name.startswith(word)}
        if not found:
            raise ValueError(f"--only {word}: no such benchmark; there are {', '.join(b.name for b in listed)}")
        names |= found
    return [b for b in listed if b.name in names]
