"""A word that tells steps apart: the same on all ranks, on a laptop and on the cluster."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch
import torch.fx as fx

from ..ir.nodes import target_name
from ..ir.program import Input, Output, Program
from .facts import numbers, program_facts


def digest_of(program: Program, module: fx.GraphModule, options: Sequence[Mapping[str, Any]] = ()) -> str:
    """What tells a step from others: the ops of one device with their numbers, shapes and what they are given, options
    of the update, and of a rank's program inputs, outputs, their layouts and the collectives; not values, nor lines.

    Args:
        program: this rank's, after the passes.
        module: the graph of one device that it was made of.
        options: of each parameter group.
    """
    given: tuple[Input | Output, ...] = (*program.inputs, *program.outputs)
    laid = [f"{x.kind} {x.name} {x.spec!r}" for x in given]
    facts = [f.text for f in (*program_facts(program), *numbers(options))]
    text = "\n".join([repr(program.mesh), program.update, *laid, *facts, *_ops(module.graph)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _ops(graph: fx.Graph) -> list[str]:
    places = {n: i for i, n in enumerate(graph.nodes)}

    def said(a: Any) -> str:
        if isinstance(a, fx.Node):
            return f"%{places[a]}"
        if isinstance(a, torch.Tensor):
            return f"{a.dtype}{list(a.shape)}"
        if isinstance(a, (list, tuple)):
            return f"({', '.join(map(said, a))})"
        return repr(a) if isinstance(a, (bool, int, float, complex, str, NoneType, torch.dtype)) else type(a).__name__

    return [
        f"{target_name(n.target)}{said((*n.args, *n.kwargs.items()))} {said(n.meta.get('val'))}"
        for n in graph.nodes if n.op in ("call_function", "output")
    ]  # fmt: skip


__all__ = ["digest_of"]
