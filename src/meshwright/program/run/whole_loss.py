"""The loss of a whole batch, of which a merged step has the micro-batches; without a backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ... import collective
from ...errors import MeshwrightError
from ...layout import Layout, Shard, Spec
from ...mesh import Mesh
from ...resharding.executor import apply
from ...resharding.planner import plan as plan_conversion
from ...tensor import DistTensor
from ..ir.inplace import storages
from ..ir.nodes import draws, info_of, value_of
from ..ir.program import Program
from .bind import StepState
from .proof import WHAT, Before, PlainRun, uncounted
from .watched import GRADIENT, points_of, written_inputs

Tensor = torch.Tensor
_LITTLE = 1 << 20  # bytes that nobody misses
Recording = tuple[Program, Mapping[str, int], Any]  # a program of the loss, and how it takes and gives trees
Record = Callable[[Sequence[Any]], Recording]


def joined(micros: Sequence[Sequence[Any]], plain: Program, dim: int | None) -> list[Any] | None:
    """The leaves of a batch of all rows of micro-batches; None where they cannot be put together.

    Args:
        plain: the program of one.
        dim: of the rows; None: the first one, if the mesh shards no other (which may be a sequence, or the rows).
    """
    sharded = {d for i in plain.inputs if i.kind == "batch" for d in _sharded(i.spec)}
    if dim is None and not sharded <= {0}:
        return None
    leaves: list[Any] = []
    for parts in zip(*micros, strict=True):
        first = parts[0]
        if not isinstance(first, Tensor):
            if any(p != first for p in parts):
                return None
            leaves.append(first)
            continue
        rows = dim or 0
        shapes = {(*p.shape[:rows], *p.shape[rows + 1 :]) for p in parts}
        if isinstance(first, DistTensor) or first.ndim <= rows or len(shapes) > 1:
            return None
        leaves.append(torch.cat(parts, rows))
    return leaves


def _sharded(spec: Spec | None) -> set[int]:
    return {p.dim for p in (() if spec is None else spec.layout.placements) if isinstance(p, Shard)}


def whole_loss(record: Record, leaves: list[Any] | None, plain: Program, carrier: StepState) -> float | None:
    """The loss of a batch; None where it is not the sum of losses of micro-batches, where no program can be made, or
    where that needs more memory than the step and one gradient.  All ranks call it together, and get the same.

    A loss that draws random numbers, or that changes buffers, is another one for micro-batches.
    """
    recording: Recording | None = None
    if leaves is not None:
        try:
            recording = record(leaves)
        except MeshwrightError:
            recording = None
    most = _peak(plain) + max(_gradients(plain), _LITTLE)
    possible = recording is not None and _comparable(recording[0]) and _peak(recording[0]) <= most
    mesh = plain.mesh
    if not all(collective.all_gather_object(possible, collective.group(mesh), WHAT)):
        return None
    assert recording is not None
    assert leaves is not None
    program, *how = recording
    run = PlainRun(program, carrier, (how[0], how[1]))
    run(leaves, Before(mesh.device))
    return value_of_loss(run.loss, next(o.spec for o in program.outputs if o.kind == "loss"))


def value_of_loss(t: Tensor | None, spec: Spec | None) -> float | None:
    """The value of a loss, on all ranks; None of a step by hand."""
    if t is None or spec is None:
        return None
    mesh: Mesh = spec.mesh
    with torch.no_grad(), uncounted():
        return float(apply(plan_conversion(spec, Spec(spec.shape, spec.dtype, Layout(mesh))).steps, t))


def _comparable(program: Program) -> bool:
    return not any(draws(n) for n in program.graph.nodes) and not written_inputs(program, buffers=False)


def _gradients(program: Program) -> int:
    """Bytes of those of all parameters."""
    return sum(v.nbytes for p in points_of(program) if p.name.startswith(GRADIENT) and (v := value_of(p.node)))


def _peak(program: Program) -> int:
    """The most bytes that values of a program need at once, beside its inputs."""
    last: dict[int, int] = {}
    sizes: dict[int, int] = {}
    begins: list[list[int]] = []
    held = {s for n in program.placeholders for s in storages(n)}
    for place, node in enumerate(program.graph.nodes):
        begins.append([])
        for value in info_of(node).values:
            if value.storage not in sizes and value.storage not in held:
                sizes[value.storage] = value.nbytes
                begins[-1].append(value.storage)
        for used in (node, *node.all_input_nodes):
            last.update((s, place) for s in storages(used))
    ends: dict[int, list[int]] = {}
    for storage in sizes:
        ends.setdefault(last[storage], []).append(storage)
    most = now = 0
    for place, begun in enumerate(begins):
        now += sum(sizes[s] for s in begun)
        most = max(most, now)
        now -= sum(sizes[s] for s in ends.get(place, ()))
    return most


__all__ = ["Record", "joined", "value_of_loss", "whole_loss"]
