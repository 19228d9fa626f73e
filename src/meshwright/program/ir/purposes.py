"""What a collective of a program is for, in words: explanations and profiles say it alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.fx as fx

from ...collective import several
from .nodes import info_of
from .program import Program


@dataclass(frozen=True)
class Purpose:
    """What a collective serves.

    Attributes:
        op, argument: the op and which of its tensors; or what is moved.
        parameter: name of the parameter that moves, or whose gradient does; empty for none.
        tensor: what moves.
        line: of the user's code.
    """

    op: str
    argument: int
    parameter: str
    tensor: str
    line: str

    @classmethod
    def of(cls, program: Program, node: fx.Node, names: Mapping[str, str]) -> Purpose:
        """That of a node of a program, of whose inputs these are the ``names`` by those of their nodes."""
        info, cause = info_of(node), program.cause(node)
        if cause is None:
            return cls(info.source, 0, "", info.source, info.line)
        backward = cause.phase == "backward"
        parameter = info.sync or names.get(cause.op, "")
        if not parameter:
            tensor = cause.op if cause.asked and not backward else cause.tensor
            return cls(cause.op, cause.argument, "", tensor, info.line)
        whole = info.gather or not (backward or info.sync)
        tensor = parameter if whole else several("gradient", parameter.split(", "))
        return cls(names.get(cause.op, cause.op), 0, parameter, tensor, info.line)

    @property
    def words(self) -> str:
        """As a profile says it."""
        return self.tensor if self.parameter or not self.line else f"{self.tensor} at {self.line}"


__all__ = ["Purpose"]
