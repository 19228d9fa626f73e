"""The explanation of a program, from its nodes: no device and no process is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch.fx as fx

from ..collective import ADDS, COLLECTIVES, bytes_of, rounds
from ..layout import dtype_name, wire_name
from ..program import Program, value_of
from ..program.capture.ledger import Asked
from ..program.ir.edges import Edge, edges
from ..program.ir.nodes import NodeInfo, checked_value, info_of
from ..ranks import runtime
from ..record import Record
from ..resharding.copies import TO_DEVICE, TO_HOST
from .entries import Collective, Laid
from .explanation import Explanation
from .memory import memory_of

_SHOWN = ("param", "buffer", "batch")


def explain_program(program: Program, ledger: tuple[Asked, ...] = ()) -> Explanation:
    """Every collective of a rank's step and why, where layouts came from, totals and memory; and what was asked."""
    names = {n.name: i.name for n, i in zip(program.placeholders, program.inputs, strict=True)}
    places = {n: i for i, n in enumerate(n for n in program.graph.nodes if n.op not in ("placeholder", "output"))}
    listed = tuple(_collective(program, i, node, names, places[node]) for i, node in enumerate(program.collectives()))
    counts = runtime.Counts()
    for c in listed:
        counts.add(c.kind, c.axes, int(c.bytes))
    for node in program.graph.nodes:
        if node.target in (TO_DEVICE, TO_HOST):
            counts.add_copy("to_device" if node.target is TO_DEVICE else "to_host", checked_value(node).size)
    served = dict.fromkeys(i for n in program.collectives() if (i := info_of(n).cause) is not None)
    return Explanation(
        [program.causes[i] for i in served], counts, None, program.mesh, program.rank, listed, _laid(program),
        memory_of(program), program.update, _notes(program), ledger,
    )  # fmt: skip


def _notes(program: Program) -> tuple[str, ...]:
    passes = tuple(r if isinstance(r, str) else f"{r.name}: {r.summary}" for r in program.passes)
    passes += tuple(_crossings(program))
    if len(program.step) == 1:
        return passes
    kinds = program.parts[program.step[0]].kinds
    each = ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in kinds.items()) or "no collective"
    return (*passes, f"the last of {len(program.step)} micro-steps; each of the others runs {each}")


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
    op, argument, parameter, tensor = _what(info, cause, names)
    nbytes = bytes_of(node.target, given.shape, given.dtype, options)
    mesh, ranks = program.mesh, math.prod(program.mesh.sizes[program.mesh.axis_index(a)] for a in axes)
    kind = COLLECTIVES[node.target]
    added = kind.reduces and not kind.wired and kind.named(options[:-2])["op"] in ADDS
    return Collective(
        number, info.role, kind.name, op, argument, parameter, tensor,
        given.shape if cause is None else cause.shape, given.shape, wire_name(kind.format(given.dtype, options[:-2])),
        "" if cause is None else cause.src, "" if cause is None else cause.dst, nbytes, axes,
        mesh.group_ranks(program.rank, [mesh.axis_index(a) for a in axes]), info.line,
        "" if cause is None else cause.reason, node.name, cause is not None and cause.asked, place,
        ranks if added and rounds(given.dtype, ranks) else 0,
    )  # fmt: skip


def _what(info: NodeInfo, cause: Record | None, names: dict[str, str]) -> tuple[str, int, str, str]:
    """The op served, which of its arguments, the parameter that moves, and what moves in words."""
    if cause is None:
        return info.source, 0, "", info.source
    backward = cause.phase == "backward"
    parameter = info.sync or names.get(cause.op, "")
    if not parameter:
        if cause.asked and not backward:
            return cause.op, cause.argument, "", cause.op
        gradient = "gradient of " if backward else ""
        return cause.op, cause.argument, "", f"{gradient}{cause.op} argument {cause.argument}"
    whole = info.gather or not (backward or info.sync)
    return names.get(cause.op, cause.op), 0, parameter, parameter if whole else _gradients(parameter.split(", "))


def _gradients(names: list[str]) -> str:
    return f"gradient of {names[0]}" if len(names) == 1 else f"{len(names)} gradients: {names[0]} … {names[-1]}"


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
