"""Ops and values of the graph that is planned, and the ways to run an op."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..program.capture.complete import Key
from ..program.capture.work import Counted
from .prices import State


@dataclass(frozen=True)
class Way:
    """One way to run an op: what each axis does to its inputs and outputs.

    Attributes:
        inputs, outputs: their states.
        work: how much of the op each rank computes.
        sent: seconds of what the op itself sends.
    """

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    work: float
    sent: float = 0.0


@dataclass
class PlannedOp:
    """An op of the graph.

    Attributes:
        name, where: node, and the user's line.
        inputs, outputs: the values that it reads and makes.
        ways: how it can run.
        seconds: forward and backward, of the whole op on one rank.
        times: how many ops it stands for.
        counted: its work.
        variable: in the problem.
    """

    name: str
    where: str
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    ways: list[Way]
    seconds: tuple[float, float]
    times: int
    counted: Counted
    variable: int = -1


@dataclass
class PlannedValue:
    """A value of the graph.

    Attributes:
        key, shape, dtype, nbytes: which, and of the whole.
        learnt: it has a gradient.
        maker: the op that makes it, and which result it is; None of an input.
        readers: ops that read it, and as which argument.
        kind, label: of an input: ``"param"``, ``"buffer"``, ``"batch"``, ``"constant"``, and its name.
        times: how many values it stands for.
        states: of an input, or where it is read: what a variable of it may be; ``variable``: that one, or -1.
        saved: the backward reads it.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    learnt: bool
    maker: tuple[PlannedOp, int] | None = None
    readers: list[tuple[PlannedOp, int]] = field(default_factory=list)
    kind: str = ""
    label: str = ""
    times: int = 1
    states: tuple[State, ...] = ()
    variable: int = -1
    saved: bool = False


__all__ = ["PlannedOp", "PlannedValue", "Way"]
