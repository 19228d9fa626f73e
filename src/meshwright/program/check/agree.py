"""Ranks agree before they run: a mistake on one is an error on all, and all meet in the same collectives."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import NoneType
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from ... import collective
from ...collective import COLLECTIVES
from ...errors import DesyncError
from ...mesh import Mesh
from ..ir.nodes import target_name, value_of
from ..ir.program import Program


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


class Meeting(NamedTuple):
    """One thing that ranks must do alike.

    Attributes:
        everywhere: what all ranks of the mesh have alike.
        along: axes of the group that the collective runs over, and what its ranks have alike besides: where a dim is
            split over other axes too, sizes differ from group to group.
    """

    everywhere: str
    along: str = ""
    sizes: str = ""


def meetings(program: Program, *, inputs: bool = True) -> list[Meeting]:
    """What ranks must do alike: the inputs and outputs, and every collective in order with all that they agree on.

    Local ops may differ: a rank with an empty shard takes other kernels.

    Args:
        inputs: not of a part of a program, which has those of the whole that this rank's local ops read.
    """
    found = [Meeting(f"input {i.kind} {i.name}") for i in program.inputs if inputs]
    for node in program.collectives():
        value = value_of(node.all_input_nodes[0])
        dtype = None if value is None else value.dtype
        kind = COLLECTIVES[node.target]
        *options, axes, _ = node.args[1:]
        alike = [a for n, a in kind.named(options).items() if n != "index"]
        fixed = [a for a in alike if not isinstance(a, (list, tuple))]
        sizes = [a for a in alike if isinstance(a, (list, tuple))]
        found.append(Meeting(f"{kind}{[*fixed, axes]} of {dtype}", str(axes), str(sizes)))
    found += [Meeting(f"output {o.kind} {o.name}") for o in program.outputs]
    merged = program.merged
    if merged is not None:
        found.append(Meeting(f"an update every {merged.k_steps} calls"))
        found += [*meetings(merged.accumulate, inputs=False), *meetings(merged.flush, inputs=False)]
    return found


def compare(mesh: Mesh, everyone: Mapping[int, Sequence[Meeting]]) -> None:
    """Raise DesyncError where ranks would not meet: the same on every rank, as all compare all.

    Args:
        everyone: rank to what it does.
    """
    first = mesh.ranks[0]
    for rank in mesh.ranks[1:]:
        for i, (a, b) in enumerate(zip_longest(everyone[first], everyone[rank], fillvalue=_NOTHING)):
            if a.everywhere != b.everywhere:
                raise _apart(first, a.everywhere, rank, b.everywhere)
            if a.along:
                axes = sorted(mesh.axis_index(x) for x in a.along.split(","))
                lead = mesh.group_ranks(rank, axes)[0]
                wanted = everyone[lead][i]
                if wanted != b:
                    raise _apart(lead, f"{wanted.everywhere}{wanted.sizes}", rank, f"{b.everywhere}{b.sizes}")


_NOTHING = Meeting("nothing more")


def _apart(one: int, a: str, other: int, b: str) -> DesyncError:
    return DesyncError(
        f"the ranks captured different steps: where rank {one} has {a}, rank {other} has {b}; "
        "build the same model, loss and batch shapes on all ranks"
    )


def numbers(options: Sequence[Mapping[str, Any]], module: fx.GraphModule | None = None) -> list[Meeting]:
    """What else is the same on all ranks: options of the update, and the numbers in the graph of one device.

    Args:
        options: of each parameter group.
        module: with graphs of global ops; a rank's own have the sizes of its parts.
    """
    found = [Meeting(f"an update with {_plain(list(o.items()))}") for o in options]
    graphs = [] if module is None else [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    nodes = [n for graph in graphs for n in graph.nodes if n.op == "call_function"]
    return found + [Meeting(f"{target_name(n.target)}{_plain((*n.args, *n.kwargs.items()))}") for n in nodes]


def _plain(a: Any) -> str:
    """An argument as every process writes it: without addresses."""
    if isinstance(a, (list, tuple)):
        return f"({', '.join(map(_plain, a))})"
    return repr(a) if isinstance(a, (bool, int, float, complex, str, NoneType, torch.dtype)) else type(a).__name__


def agree(program: Program, more: Sequence[Meeting] = ()) -> None:
    """All ranks must meet in the same collectives, in one order, and have alike what is said besides."""
    mesh = program.mesh
    if mesh.size == 1:
        return
    found = [*more, *meetings(program)]
    group = collective.group(mesh, tuple(range(mesh.ndim)))
    seen = collective.all_gather_object(hashlib.sha1("\n".join(map(str, found)).encode()).hexdigest(), group)
    if len(set(seen)) > 1:
        compare(mesh, dict(zip(mesh.ranks, collective.all_gather_object(found, group), strict=True)))


__all__ = ["Meeting", "agree", "compare", "meetings", "numbers", "together"]
