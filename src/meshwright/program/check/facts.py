"""What the programs of all ranks have alike, so that they meet in the same collectives."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
import torch.fx as fx

from ...collective import COLLECTIVES, STARTS, WAIT_OP, Fact
from ..ir.nodes import info_of, target_name, value_of
from ..ir.program import Program, Staging, part_named

_STARTED = set(STARTS.values())
CAPTURED = "the ranks captured different steps: {}"
REBUILD = "build the same model, loss and batch shapes on all ranks"


def program_facts(program: Program, *, inputs: bool = True) -> list[Fact]:
    """What ranks must do alike: the inputs and outputs, and every collective in order with all that they agree on; and
    where they wait for one, if that runs another.

    Local ops may differ: a rank with an empty shard takes other kernels.  Where a dim is split over other axes too than
    a collective runs over, sizes differ from group to group.

    Args:
        inputs: not of a part of a program, which has those of the whole that this rank's local ops read.
    """
    found = [Fact(f"input {i.kind} {i.name}") for i in program.inputs if inputs]
    for node in program.graph.nodes:
        if node.target is WAIT_OP and COLLECTIVES[node.args[0].target].staged:
            found.append(Fact(f"a wait for {COLLECTIVES[node.args[0].target]}"))
        if node.target not in COLLECTIVES:
            continue
        value = value_of(node.all_input_nodes[0])
        dtype = None if value is None else value.dtype
        kind = COLLECTIVES[node.target]
        *options, axes, _ = node.args[1:]
        alike = [a for n, a in kind.named(options).items() if n != "index" and n not in kind.tensors]
        fixed = [a for a in alike if not isinstance(a, (list, tuple))]
        sizes = [a for a in alike if isinstance(a, (list, tuple))]
        along = sorted(program.mesh.axis_index(a) for a in str(axes).split(","))
        lead = program.mesh.group_ranks(program.rank, along)[0]
        # What a pass has started says for which gradients: they must be the same on the ranks that meet.
        names = f" for {info_of(node).sync}" if node.target in _STARTED and info_of(node).sync else ""
        found.append(Fact(f"{kind}{[*fixed, axes]} of {dtype}", f"{sizes}{names}", lead))
    # What a rank holds for a backward its own kernels decide.
    found += [Fact(f"output {o.kind} {o.name}") for o in program.outputs if o.kind not in ("held", "gathered")]
    for name, part in program.parts.items():
        if program.pipeline is not None and any(map(part_named, program.parts)):
            continue  # of this rank's stage
        found += [Fact(f"the part {name}"), *program_facts(part, inputs=False)]
    if program.parts:
        found.append(Fact(f"schedules {dict(program.schedules)}"))
    if program.pipeline is not None:
        found += _of_stages(program, program.pipeline)
    return found


def decided(program: Program) -> list[Fact]:
    """What passes decided that reaches a collective; of a pipeline that is cut, by stage."""
    how, found = program.pipeline, list[Fact]()
    staged = how is not None and any(map(part_named, program.parts))
    for record in program.passes:
        texts = [f"{record.name}: {d}" for d in record.decisions]
        if staged and how is not None:
            here = program.mesh.coordinate(program.rank)[how.axis]
            found.append(Fact(f"decisions of {record.name}", texts, ("stage", here)))
        else:
            found += map(Fact, texts)
    return found


def _of_stages(program: Program, how: Staging) -> Iterator[Fact]:
    """The schedule, what crosses, and what the ranks of a stage have alike: parts differ from stage to stage."""
    yield Fact(f"the schedule {how.schedule.name}", zlib.crc32(repr(how.schedule.orders).encode()))
    yield Fact(f"messages between stages {[m.name for m in how.messages]}")
    if not any(map(part_named, program.parts)):
        return
    of = [f for part in program.parts.values() for f in program_facts(part, inputs=False)]
    here, axis = program.mesh.coordinate(program.rank)[how.axis], program.mesh.axes[how.axis]
    for node in program.parts["flush"].collectives():
        if axis in str(node.args[-2]).split(","):
            yield Fact(f"the update: {COLLECTIVES[node.target]} over {node.args[-2]}")
    yield Fact("the parts of a stage", [str(f[:2]) for f in of], ("stage", here))


def numbers(options: Sequence[Mapping[str, Any]], module: fx.GraphModule | None = None) -> list[Fact]:
    """What else is the same on all ranks: options of the update, and the numbers in the graph of one device.

    Args:
        options: of each parameter group.
        module: with the graph of global ops; a rank's own have the sizes of its parts.
    """
    found = [Fact(f"an update with {_plain(list(o.items()))}") for o in options]
    nodes = [] if module is None else [n for n in module.graph.nodes if n.op == "call_function"]
    return found + [Fact(f"{target_name(n.target)}{_plain((*n.args, *n.kwargs.items()))}") for n in nodes]


def _plain(a: Any) -> str:
    """An argument as every process writes it: without addresses."""
    if isinstance(a, (list, tuple)):
        return f"({', '.join(map(_plain, a))})"
    return repr(a) if isinstance(a, (bool, int, float, complex, str, NoneType, torch.dtype)) else type(a).__name__


__all__ = ["CAPTURED", "REBUILD", "decided", "numbers", "program_facts"]
