"""Blocks that repeat: a model with fewer of them, and what a number of the whole model is from numbers of these.

A list of modules that are alike (same classes, options and shapes) is cut to a few of them while a step is captured or
built.  What a step sends, computes and holds grows by the same for each block more, so few builds tell it of any depth.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

_SCALARS = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class BlockRun:
    """Blocks of a list that are alike and follow each other.

    Attributes:
        path: name of the list.
        first: number of the first one, ``count``: how many there are.
    """

    path: str
    first: int
    count: int

    @property
    def prefix(self) -> str:
        """What names of blocks begin with; empty where the model itself is the list."""
        return f"{self.path}." if self.path else ""


@dataclass(frozen=True)
class Repeats:
    """The runs of a model, and how many blocks of each stay.

    Attributes:
        runs: in the order of the model.
        kept: how many of each run stay.
    """

    runs: tuple[BlockRun, ...]
    kept: tuple[int, ...]

    def counts(self, more: int | None = None) -> tuple[int, ...]:
        """How many blocks of each run the whole model has, or the cut one with one more of a run."""
        if more is None:
            return tuple(run.count for run in self.runs)
        return tuple(
            min(run.count, n + (i == more)) for i, (run, n) in enumerate(zip(self.runs, self.kept, strict=True))
        )

    def blocks(self, counts: Sequence[int]) -> list[str]:
        """Names of the blocks of lists that have a run, in a model with so many of each run."""
        every: dict[str, int] = {}
        for run, n in zip(self.runs, counts, strict=True):
            every[run.prefix] = every.get(run.prefix, 0) + n
        return [f"{prefix}{i}" for prefix, n in every.items() for i in range(n)]

    def names(self, name: str, counts: Sequence[int]) -> list[str]:
        """The names that one of the cut model stands for in a model with so many blocks of each run.

        The first block and the last one of a run stand for themselves, what lies between for all between.
        """
        here = there = 0
        for run, kept, count in zip(self.runs, self.kept, counts, strict=True):
            match = re.match(rf"{re.escape(run.prefix)}(\d+)(?=\.|$)", name)
            if run.first == 0:
                here = there = 0
            if match and here <= int(match[1]) < here + kept:
                i = int(match[1]) - here
                first, last = (i, i + 1) if i < kept - 2 or kept == count else (i, count - 1)
                if i == kept - 1 and kept != count:
                    first, last = count - 1, count
                return [f"{run.prefix}{there + n}{name[match.end() :]}" for n in range(first, last)]
            here, there = here + kept, there + count
        return [name]

    def total(self, base: float, more: Sequence[float]) -> float:
        """A number of the whole model, from that of the cut one and of those with one block more of each run."""
        steps = (run.count - kept for run, kept in zip(self.runs, self.kept, strict=True))
        return base + sum(n * (m - base) for n, m in zip(steps, more, strict=True) if n > 0)


def repeats_of(model: nn.Module, keep: int) -> Repeats:
    """The outermost lists of a model with more than ``keep`` blocks that are alike."""
    runs: list[BlockRun] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(r.prefix) for r in runs)
        if inside or not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        numbers = _numbers_of(module)
        alike = [_signature(child, numbers) for child in module]
        first, found = 0, list[BlockRun]()
        for i in range(1, len(alike) + 1):
            if i == len(alike) or alike[i] != alike[first]:
                found.append(BlockRun(path, first, i - first))
                first = i
        if any(run.count > keep for run in found):
            runs += found
    return Repeats(tuple(runs), tuple(min(run.count, keep) for run in runs))


def _options(block: nn.Module) -> Iterator[tuple[str, str, Any]]:
    for name, module in block.named_modules():
        for key, value in sorted(vars(module).items()):
            if isinstance(value, _SCALARS) and not key.startswith("_"):
                yield name, key, value


def _numbers_of(blocks: nn.Module) -> set[tuple[str, str]]:
    """The options of blocks that are their number in the list, of each of them."""
    found: dict[tuple[str, str], bool] = {}
    for i, block in enumerate(blocks.children()):
        for name, key, value in _options(block):
            found[name, key] = found.get((name, key), True) and type(value) is int and value == i
    return {k for k, is_number in found.items() if is_number}


def _signature(block: nn.Module, numbers: Collection[tuple[str, str]]) -> Any:
    """What two blocks have in common that compute the same."""
    said = [(name, key, value) for name, key, value in _options(block) if (name, key) not in numbers]
    own = []
    for name, module in block.named_modules():
        tensors = [
            (k, tuple(t.shape), t.dtype, t.requires_grad) for k, t in module._parameters.items() if t is not None
        ]
        tensors += [(k, tuple(t.shape), t.dtype, False) for k, t in module._buffers.items() if t is not None]
        own.append((name, type(module), tuple(tensors)))
    return tuple(said), tuple(own)


@contextlib.contextmanager
def cut_to(model: nn.Module, repeats: Repeats, counts: Sequence[int]) -> Iterator[None]:
    """Inside, lists of a model have so many blocks of each run."""
    kept: dict[str, list[int]] = {}
    for run, count in zip(repeats.runs, counts, strict=True):
        kept.setdefault(run.path, []).extend(range(run.first, run.first + count))
    before: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for path, numbers in kept.items():
            module = model.get_submodule(path)
            blocks = list(module.children())
            before.append((module, dict(module._modules)))
            module._modules.clear()
            module._modules.update({str(k): blocks[n] for k, n in enumerate(numbers)})
        yield
    finally:
        for module, modules in before:
            module._modules.clear()
            module._modules.update(modules)


__all__ = ["BlockRun", "Repeats", "cut_to", "repeats_of"]
