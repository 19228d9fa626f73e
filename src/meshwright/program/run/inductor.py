"""Local ops compiled by Inductor: the ops between two collectives become one compiled function.

A compiler that saw collectives might order them differently where shards have other sizes, so they stay outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from ... import compat
from ..ir.nodes import draws
from ..ir.program import Program
from .segments import Segment, Stretch, with_segments

Tensor = torch.Tensor
_WHOLE = ("aten._fused", "aten._foreach", "aten._amp")


class CompiledSegment(Segment):
    """A segment that is compiled when it is first called, for the tensors that it is called with."""

    def __init__(self, module: fx.GraphModule, name: str) -> None:
        super().__init__(module, name)
        self._compiled: Any = None

    def __call__(self, *tensors: Tensor) -> Any:
        """The tensors that leave the stretch."""
        if self._compiled is None:
            from ...compat import compile_fx

            self._compiled = compile_fx(self.module, list(tensors))
        return self._compiled(*tensors)


def with_inductor(program: Program) -> Program:
    """The program with each stretch of local ops as one call of a compiled function."""
    return with_segments(program, _compilable, _segment)


def _segment(stretch: Stretch, name: str) -> Segment:
    return CompiledSegment(stretch.module(), name)


def _compilable(node: fx.Node, before: Sequence[fx.Node]) -> bool:
    if not isinstance(node.target, compat.OpOverload) or draws(node):
        return False
    # Ops of our own move data or keep to one kernel; updates are fused already.
    return node.target.namespace == "aten" and not str(node.target).startswith(_WHOLE)


__all__ = ["CompiledSegment", "with_inductor"]
