"""The explanation of a program, from its nodes: no device and no process is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch.fx as fx

from ..collective import ADDS, COLLECTIVES, SEND, bytes_of, rounds
from ..layout import dtype_name, wire_name
from ..program import Program, value_of
from ..program.capture.ledger import Asked
from ..program.ir.edges import Edge, edges
from ..program.ir.nodes import checked_value, info_of
from ..program.ir.program import WHOLE, Message, Output, Staging, of_stages
from ..program.ir.purposes import Purpose
from ..ranks import runtime
from ..resharding.copies import TO_DEVICE, TO_HOST
from ..resharding.record import Record
from .entries import Collective, Laid
from .explanation import Explanation
from .memory import Memory, memory_of

_WIDEST = 160  # columns of a schedule that is drawn
_SHOWN = ("param", "buffer", "batch")


def explain_program(program: Program, ledger: tuple[Asked, ...] = ()) -> Explanation:
    """Every collective of a rank's step and why, where layouts came from, totals and memory; and what was asked."""
    how, counts, listed = program.pipeline, runtime.Counts(), list[Collective]()
    served: dict[Record, None] = {}
    runs = {WHOLE: (program, 1)}
    if how is not None:
        here = program.mesh.coordinate(program.rank)[how.axis]
        runs = {name: (part, how.times(name, here)) for name, part in program.parts.items()}
    for part, times in runs.values():
        _one(part, times, counts, listed, served)
    memory = memory_of(program) if how is None else _of_stage(program, how, counts)
    return Explanation(
        list(served), counts, None, program.mesh, program.rank, tuple(listed), _laid(program), memory,
        program.update, _notes(program), ledger,
    )  # fmt: skip


def _one(
    program: Program, times: int, counts: runtime.Counts, listed: list[Collective], served: dict[Record, None]
) -> None:
    """Add the collectives of a program that a step runs so often."""
    names = {n.name: i.name for n, i in zip(program.placeholders, program.inputs, strict=True)}
    places = {n: i for i, n in enumerate(n for n in program.graph.nodes if n.op not in ("placeholder", "output"))}
    for node in program.collectives():
        made = _collective(program, len(listed), node, names, places[node])
        listed.append(made)
        for _ in range(times):
            counts.add(made.kind, made.axes, int(made.bytes))
    for node in program.graph.nodes:
        if node.target in (TO_DEVICE, TO_HOST):
            for _ in range(times):
                counts.add_copy("to_device" if node.target is TO_DEVICE else "to_host", checked_value(node).size)
    served.update((program.causes[i], None) for n in program.collectives() if (i := info_of(n).cause) is not None)


def _of_stage(program: Program, how: Staging, counts: runtime.Counts) -> Memory:
    """What a rank of a pipeline holds at most: in one part, and of the other micro-batches under way.  What it sends is
    added to the counts."""
    axis, here = program.mesh.axes[how.axis], program.mesh.coordinate(program.rank)[how.axis]
    homes = how.schedule.homes
    for message, size in _sent(program, how):
        if homes[message.src] == here != homes[message.dst]:
            for _ in range(1 if message.once else how.schedule.micro_batches):
                counts.add(SEND, (axis,), size)
    most = max((memory_of(part) for part in program.parts.values()), key=lambda m: m.peak)
    held = {checked_value(n).storage: checked_value(n).nbytes for n, o in _passed(program) if o.kind == "held"}
    ahead = [part for name, part in program.parts.items() if of_stages(name) and name[0] == "F"]
    inputs = {checked_value(n).storage for part in ahead for n in part.placeholders}
    one = sum(size for storage, size in held.items() if storage not in inputs)  # a micro-batch, of all stages here
    more = one * (how.schedule.held(here) - 1) // max(1, len(ahead))
    at_peak = {**most.at_peak, "activations": most.at_peak.get("activations", 0) + more}
    return replace(most, peak=most.peak + more, at_peak=at_peak)


def _passed(program: Program) -> Iterator[tuple[fx.Node, Output]]:
    """What parts of a rank's stage hand on."""
    for name, part in program.parts.items():
        if of_stages(name):
            yield from zip(part.results, part.outputs, strict=True)


def _sent(program: Program, how: Staging) -> Iterator[tuple[Message, int]]:
    """The messages that this rank sends or receives for each micro-batch, and their bytes."""
    sizes = {o.name: checked_value(n).size for n, o in _passed(program) if o.kind == "edge"}
    for name, part in program.parts.items():
        for n, i in zip(part.placeholders, part.inputs, strict=True) if of_stages(name) else ():
            if i.kind == "edge":
                sizes[i.name] = checked_value(n).size
    return ((m, sizes[m.name]) for m in how.messages if m.name in sizes)


def _notes(program: Program) -> tuple[str, ...]:
    passes = tuple(r if isinstance(r, str) else f"{r.name}: {r.summary}" for r in program.passes)
    if program.pipeline is not None:
        return (*passes, *_scheduled(program, program.pipeline))
    passes += tuple(_crossings(program))
    if len(program.step) == 1:
        return passes
    kinds = program.parts[program.step[0]].kinds
    each = ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in kinds.items()) or "no collective"
    return (*passes, f"the last of {len(program.step)} micro-steps; each of the others runs {each}")


def _scheduled(program: Program, how: Staging) -> Iterator[str]:
    """Who computes what when, what is held and what is sent."""
    if not how.messages:
        yield f"{how.schedule.micro_batches} micro-batches, of which every rank computes all stages"
        return
    order = how.schedule
    lines = str(order).splitlines()
    yield f"{order.name}: {order.micro_batches} micro-batches through {order.stages} stages; {lines[-1]}"
    if len(lines[0]) <= _WIDEST:
        yield from lines[:-1]
    whose = "stages" if order.stages == len(order.orders) else "ranks, each stage by itself"
    yield f"micro-batches held by the {whose}: {', '.join(str(order.held(r)) for r in range(len(order.orders)))}"
    ways: dict[tuple[bool, int, int], list[int]] = {}
    for message, size in _sent(program, how):
        ways.setdefault((message.once, message.src, message.dst), []).append(size)
    for (once, src, dst), sizes in sorted(ways.items()):
        values = f"{len(sizes)} value{'s' if len(sizes) > 1 else ''}"
        often = "once for all micro-batches" if once else "for each micro-batch"
        yield f"from stage {src} to stage {dst}: {values}, {sum(sizes)} bytes {often}"


def _crossings(program: Program) -> Iterator[str]:
    """What crosses from one stage to another, where the program would be cut."""
    found: dict[tuple[int, int], list[Edge]] = {}
    names = {n.name: i.name for n, i in zip(program.placeholders, program.inputs, strict=True)}

    def said(node: fx.Node) -> str:
        info = info_of(node)
        if info.gather:  # of a tied weight the name of the node that reads it
            return names.get(info.gather, info.gather)
        return f"{info.source} at {info.line}" if info.line else info.source

    for edge in edges(program):
        found.setdefault((edge.src, edge.dst), []).append(edge)
    for (src, dst), crossing in sorted(found.items()):
        what = ", ".join(dict.fromkeys(said(e.node) for e in crossing))
        values = f"{len(crossing)} value{'s' if len(crossing) > 1 else ''}"
        yield f"from stage {src} to stage {dst}: {values}, {sum(e.nbytes for e in crossing)} bytes ({what})"


def _collective(program: Program, number: int, node: fx.Node, names: dict[str, str], place: int) -> Collective:
    x, *options = node.args
    given, info = checked_value(x), info_of(node)
    axes = tuple(str(options[-2]).split(","))
    cause = program.cause(node)
    what = Purpose.of(program, node, names)
    nbytes = bytes_of(node.target, given.shape, given.dtype, options)
    mesh, ranks = program.mesh, math.prod(program.mesh.sizes[program.mesh.axis_index(a)] for a in axes)
    kind = COLLECTIVES[node.target]
    added = kind.reduces and not kind.wired and kind.named(options[:-2])["op"] in ADDS
    return Collective(
        number, info.role, kind.name, what.op, what.argument, what.parameter, what.tensor,
        given.shape if cause is None else cause.shape, given.shape, wire_name(kind.format(given.dtype, options[:-2])),
        "" if cause is None else cause.src, "" if cause is None else cause.dst, nbytes, axes,
        mesh.group_ranks(program.rank, [mesh.axis_index(a) for a in axes]), info.line,
        "" if cause is None else cause.reason, node.name, cause is not None and cause.asked, place,
        ranks if added and rounds(given.dtype, ranks) else 0,
    )  # fmt: skip


def _laid(program: Program) -> tuple[Laid, ...]:
    origins = {o.value: o for o in program.origins}
    states: dict[str, int] = {}
    for node, given in zip(program.placeholders, program.inputs, strict=True):
        value = value_of(node)
        if given.kind == "state" and value is not None:
            states[given.owner] = states.get(given.owner, 0) + value.nbytes
    made = []
    for node, given in zip(program.placeholders, program.inputs, strict=True):
        value = value_of(node)
        if given.kind not in _SHOWN or given.spec is None or value is None:
            continue
        origin = origins.get(given.name)
        stored = given.spec.layout
        made.append(
            Laid(
                given.name, given.kind, tuple(given.spec.shape), dtype_name(value.dtype), stored,
                stored if origin is None else origin.layout, value.shape, math.prod(value.shape) * value.dtype.itemsize,
                states.get(given.name, 0), "default" if origin is None else origin.source,
                "" if origin is None else origin.reason, () if origin is None else origin.lost,
            )
        )  # fmt: skip
    return tuple(made)
