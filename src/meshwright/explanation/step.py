"""The explanation of a program, from its nodes: no device and no process is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch.fx as fx

from ..collective import ADDS, COLLECTIVES, SEND, bytes_of, rounds
from ..layout import dtype_name, wire_name
from ..machines import Hardware
from ..program import Program, value_of
from ..program.capture.ledger import OptionUse
from ..program.ir.edges import Edge, edges
from ..program.ir.nodes import checked_value, info_of
from ..program.ir.program import WHOLE, Staging
from ..program.ir.purposes import Purpose
from ..ranks import runtime
from ..resharding.copies import TO_DEVICE, TO_HOST
from ..resharding.record import Record
from ..rules.attention_blocks import ROWS
from ..rules.attention_kernels import HeadSizes, told
from .entries import Collective, InputLayout
from .explanation import Explanation
from .memory import memory_of
from .pipeline import memory_of_stages, pipeline_of
from .timeline import timeline_of

_WIDEST = 160  # columns of a schedule that is drawn
_SHOWN = ("param", "buffer", "batch")


def explain_program(
    program: Program, ledger: tuple[OptionUse, ...] = (), hardware: Hardware | None = None
) -> Explanation:
    """Every collective of a rank's step and why, where layouts came from, totals and memory; and what was asked.

    With hardware also the time that the step is predicted to take there.
    """
    how, counts, listed = program.pipeline, runtime.Counts(), list[Collective]()
    served: dict[Record, None] = {}
    runs = {WHOLE: (program, 1)}
    if how is not None:
        here, homes = program.mesh.coordinate(program.rank)[how.axis], how.schedule.homes
        runs = {name: (part, how.times(name, here)) for name, part in program.parts.items()}
        for message in (m for m in how.messages if homes[m.src] == here != homes[m.dst]):
            for _ in range(1 if message.once else how.schedule.micro_batches):
                counts.add(SEND, (program.stages,), message.nbytes)
    for part, times in runs.values():
        _one(part, times, counts, listed, served)
    memory = memory_of(program) if how is None else memory_of_stages(program, how)
    return Explanation(
        list(served), counts, None, program.mesh, program.rank, tuple(listed), _input_layouts(program), memory,
        program.update, _notes(program), ledger, pipeline_of(program),
        None if hardware is None else timeline_of(program, hardware),
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


def _notes(program: Program) -> tuple[str, ...]:
    passes = tuple(r if isinstance(r, str) else f"{r.name}: {r.summary}" for r in program.passes)
    passes += tuple(dict.fromkeys(_attention(program)))
    if program.pipeline is not None:
        return (*passes, *_scheduled(program, program.pipeline))
    passes += tuple(_crossings(program))
    if len(program.step) == 1:
        return passes
    kinds = program.parts[program.step[0]].kinds
    each = ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in kinds.items()) or "no collective"
    return (*passes, f"the last of {len(program.step)} micro-steps; each of the others runs {each}")


def _attention(program: Program) -> Iterator[str]:
    """Which kernels attend the rows of split sequences."""
    for part in (program, *program.parts.values()):
        for node in part.graph.nodes:
            if node.op == "call_function" and node.target is ROWS.default:
                query, key, value = (checked_value(n) for n in node.args[:3])
                (b, h, _, size), device = query.shape, program.mesh.device
                yield told(query.shape, key.shape[2], HeadSizes(device, query.dtype, b, h, size, value.shape[3]))


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
    account = pipeline_of(program)
    yield from () if account is None else map(str, account.own)


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
    shape, even = kind.padded(given.shape, options[:-2])
    padding = 0 if mesh.device == "cpu" else bytes_of(node.target, shape, given.dtype, [*even, *options[-2:]]) - nbytes
    added = kind.reduces and not kind.wired and kind.named(options[:-2])["op"] in ADDS
    return Collective(
        number, info.role, kind.name, what.op, what.argument, what.parameter, what.tensor,
        given.shape if cause is None else cause.shape, given.shape, wire_name(kind.format(given.dtype, options[:-2])),
        "" if cause is None else cause.src, "" if cause is None else cause.dst, nbytes, axes,
        mesh.group_ranks(program.rank, [mesh.axis_index(a) for a in axes]), info.line,
        "" if cause is None else cause.reason, node.name, cause is not None and cause.asked, place,
        ranks if added and rounds(given.dtype, ranks) else 0, max(padding, 0),
    )  # fmt: skip


def _input_layouts(program: Program) -> tuple[InputLayout, ...]:
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
            InputLayout(
                given.name, given.kind, tuple(given.spec.shape), dtype_name(value.dtype), stored,
                stored if origin is None else origin.layout, value.shape, math.prod(value.shape) * value.dtype.itemsize,
                states.get(given.name, 0), "default" if origin is None else origin.source,
                "" if origin is None else origin.reason, () if origin is None else origin.lost,
            )
        )  # fmt: skip
    return tuple(made)
