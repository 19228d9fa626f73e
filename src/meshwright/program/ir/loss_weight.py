"""What a loss is a mean over, as data: how much a micro-batch counts beside others.

The loss of a whole batch is ``(S1 + S2 + ...) / f(N1 + N2 + ...)``, where ``Si / f(Ni)`` is that of a micro-batch: sums
over its rows by a function of how many of them count, or how much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

COUNT = "count"  # name of the output, of kind WEIGHT_OUTPUT, that gives Ni
WEIGHT_OUTPUT = "weight"


@dataclass(frozen=True)
class Weighing:
    """Who asks what a loss is a mean over.

    Attributes:
        hint: what to do about a loss that is no weighted mean.
        rows_dim: the dim of the batch's tensors that has rows; None: as they are sharded, else the first.
        cuts: whether the pass cuts batches, so that a number of the batch is that of all its micro-batches.
    """

    hint: str
    rows_dim: int | None = None
    cuts: bool = False


@dataclass(frozen=True)
class Earlier:
    """In the arguments of a step: the count (-1), or what an earlier step gives."""

    step: int


@dataclass(frozen=True)
class ScalarStep:
    """One op on numbers, of dtype ``dtype``; ``args`` name earlier ones as :class:`Earlier`."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dtype: torch.dtype

    def takes_tensor(self, i: int, value: Any) -> bool:
        """Whether an argument that is a number must be given as a tensor."""
        schema = self.target._schema.arguments
        return isinstance(value, int | float) and i < len(schema) and str(schema[i].type) == "Tensor"


@dataclass(frozen=True)
class LossWeight:
    """What a loss is a mean over.

    Attributes:
        number: how many, as sizes say; 1 of a sum.  Of a loss that values divide: of how many the count is the mean.
        mean: sizes say it; else it is a sum, or the output ``count`` of the program says it.
        others: of a loss of several means, of how many more each is, for one of the first.
        counted: values say it: the program has the output ``count``.
        dtype: of the count.
        function: from the count to what the loss is divided by; empty: the count itself.
        line: the user's, where it is divided.
    """

    number: float = 1.0
    mean: bool = False
    others: frozenset[float] = frozenset()
    counted: bool = False
    dtype: torch.dtype = torch.float64
    function: tuple[ScalarStep, ...] = field(default=())
    line: str = ""

    @property
    def weighs(self) -> bool:
        """Whether micro-batches count by it: the losses of others are added up."""
        return self.mean or self.counted


def applied(function: tuple[ScalarStep, ...], count: Any, emit: Callable[[ScalarStep, tuple[Any, ...]], Any]) -> Any:
    """The function of a count: ``emit`` makes each step, given its arguments."""
    made: list[Any] = []

    def read(a: Any) -> Any:
        if isinstance(a, Earlier):
            return count if a.step < 0 else made[a.step]
        return [read(x) for x in a] if isinstance(a, list) else a

    for step in function:
        made.append(emit(step, tuple(map(read, step.args))))
    return made[-1] if made else count


def value_at(function: tuple[ScalarStep, ...], dtype: torch.dtype, count: float) -> float:
    """The function of a number."""

    def emit(step: ScalarStep, args: tuple[Any, ...]) -> Any:
        given = [torch.tensor(a, dtype=step.dtype) if step.takes_tensor(i, a) else a for i, a in enumerate(args)]
        return step.target(*given, **step.kwargs)

    with torch.no_grad():
        return float(applied(function, torch.tensor(count).to(dtype), emit))


__all__ = ["COUNT", "WEIGHT_OUTPUT", "Earlier", "LossWeight", "ScalarStep", "Weighing", "applied", "value_at"]
