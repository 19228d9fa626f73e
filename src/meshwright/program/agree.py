"""Ranks agree before they run: a mistake on one is an error on all, and all meet in the same collectives."""

from __future__ import annotations

import hashlib
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from .. import collective
from ..collective import COLLECTIVES
from ..errors import DesyncError
from ..mesh import Mesh
from .trace import Value

if TYPE_CHECKING:
    from .core import Program


class together:
    """A mistake found on one rank is raised on all, before any of them runs the program."""

    def __init__(self, mesh: Mesh, what: str) -> None:
        self.mesh, self.what = mesh, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.mesh.size == 1 or not isinstance(error, Exception | None):
            return
        group = collective.group(self.mesh, tuple(range(self.mesh.ndim)))
        seen = collective.all_gather_object(str(error or ""), group)
        if error is None:
            for rank, text in zip(self.mesh.ranks, seen, strict=True):
                if text:
                    raise DesyncError(f"{self.what} failed on rank {rank}: {text}")


def meetings(program: Program) -> list[str]:
    """What ranks must do alike: the inputs and outputs, and every collective in order with all that they agree on.

    Local ops may differ: a rank with an empty shard takes other kernels.
    """
    lines = [f"input {i.kind} {i.name}" for i in program.inputs]
    for node in program.collectives():
        value = node.all_input_nodes[0].meta.get("value")
        dtype = value.dtype if isinstance(value, Value) else None
        kind = COLLECTIVES[node.target]
        options = [a for i, a in enumerate(node.args[1:-1]) if (kind, i) not in _OWN_PLACE]
        lines.append(f"{kind}{options} of {dtype}")
    lines += [f"output {o.kind} {o.name}" for o in program.outputs]
    merged = program.merged
    if merged is not None:
        lines += [f"an update every {merged.k_steps} calls", *meetings(merged.accumulate), *meetings(merged.flush)]
    return lines


_OWN_PLACE = {("reduce_scatter", 3), ("all_to_all", 4)}  # the argument that says which rank this is


def agree(program: Program) -> None:
    """All ranks must meet in the same collectives, in one order."""
    mesh = program.mesh
    if mesh.size == 1:
        return
    lines = meetings(program)
    group = collective.group(mesh, tuple(range(mesh.ndim)))
    seen = collective.all_gather_object(hashlib.sha1("\n".join(lines).encode()).hexdigest(), group)
    if len(set(seen)) == 1:
        return
    everyone = collective.all_gather_object(lines, group)
    for rank, other in zip(mesh.ranks[1:], everyone[1:], strict=True):
        for a, b in zip_longest(everyone[0], other, fillvalue="nothing more"):
            if a != b:
                raise DesyncError(
                    f"the ranks captured different steps: where rank {mesh.ranks[0]} has {a}, rank {rank} has {b}; "
                    "build the same model, loss and batch shapes on all ranks"
                )


__all__ = ["agree", "meetings", "together"]
