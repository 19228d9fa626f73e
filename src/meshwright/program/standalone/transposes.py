"""Transposed matrices of a step: ``.t()`` stands where the matrix is used, and two of them cancel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.fx as fx

from ..ir.nodes import info_of
from .statements import HOLE, Statement


def without_transposes(
    statements: Sequence[Statement], results: Sequence[fx.Node]
) -> tuple[list[Statement], dict[fx.Node, fx.Node]]:
    """Leave out the statements that only transpose a matrix: a view, which shares its memory.

    Returns:
        The statements that are left, and for a matrix the gradient whose name it takes.
    """
    sources: dict[fx.Node, tuple[fx.Node, bool]] = {}  # a transposed value to its matrix, and whether it is flipped
    named: dict[fx.Node, fx.Node] = {}
    left = []
    for s in statements:
        if s.code == f"{HOLE}.t()":
            matrix, flipped = sources.get(s.reads[0], (s.reads[0], False))
            sources[s.node] = matrix, not flipped
            if flipped and info_of(s.node).grad_of and not info_of(matrix).grad_of and matrix.op != "placeholder":
                named.setdefault(matrix, s.node)
            if s.node not in results:
                continue
            code = HOLE if flipped else f"{HOLE}.t()"
            left.append(replace(s, code=code, reads=(matrix,)))
            continue
        read = [sources.get(ref, (ref, False)) for ref in s.reads]
        parts = s.code.split(HOLE)
        code = parts[0] + "".join(
            HOLE + (".t()" if flipped else "") + part for (_, flipped), part in zip(read, parts[1:], strict=True)
        )
        left.append(replace(s, code=code, reads=tuple(matrix for matrix, _ in read)))
    return left, named


__all__ = ["without_transposes"]
