"""Subgraphs of a program: what a value needs, the part that some nodes are, nodes that run a second time.

Recomputation, gathers that are repeated for the backward, checkpoints that keep parts and merged micro-steps are said
in these verbs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.fx as fx

from ...collective import COLLECTIVES, bytes_of
from ...resharding.record import Record
from .edit import Edit
from .inplace import follow, returned, storages, written
from .nodes import Value, annotate, call, checked_value, info_of, is_mutating
from .program import Output, Program

aten = torch.ops.aten
RECOMPUTATION = "recomputation"  # the role of what runs again
_LATER = ("backward", RECOMPUTATION)


def of_forward(node: fx.Node) -> bool:
    """Whether a node computes a value of the forward, for the first time or again."""
    return info_of(node).role in ("forward", RECOMPUTATION)


def needed(
    graph: fx.Graph,
    roots: Iterable[fx.Node],
    writes: Callable[[fx.Node], bool | None],
    instead: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
) -> set[fx.Node]:
    """Nodes that must run so that ``roots`` have their values and the wanted writes happen.

    Args:
        writes: whether a node that writes is wanted for what it leaves behind when the program has ended; None: never,
            whoever reads that memory.
        instead: nodes to what they need, in place of their inputs.
    """
    live, read = set(roots), set[int]()
    for node in reversed(graph.nodes):
        if node.op == "output":
            continue
        if node not in live and is_mutating(node):
            wanted = writes(node)
            if wanted or (wanted is not None and not read.isdisjoint(written(node))):
                live.add(node)
        if node in live:
            for used in (instead[node],) if node in instead else node.all_input_nodes:
                live.add(used)
                read.update(storages(used))
    return live


def copied(program: Program) -> Program:
    """The same program with a graph of its own."""
    return part_of(program, set(program.graph.nodes), program.outputs)


def part_of(
    program: Program,
    nodes: set[fx.Node],
    outputs: Iterable[Output],
    instead: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
) -> Program:
    """The part of a program that ``nodes`` are, with these of its outputs.

    Args:
        instead: nodes to others of the same shape, whose values they have in this part.
    """
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node not in nodes or node.op == "output":
            continue
        if node in instead:
            args = (made[instead[node]], list(checked_value(node).shape))
            made[node] = call(graph, aten.view.default, args, info_of(node))
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
    inputs = [i for i, n in zip(program.inputs, program.placeholders, strict=True) if n in nodes]
    kept = list(outputs)
    results = dict(zip(program.outputs, program.results, strict=True))
    graph.output(tuple(made[results[o]] for o in kept))
    return replace(program, graph=graph, inputs=tuple(inputs), outputs=tuple(kept))


class Rewrite(Edit):
    """A program while its graph is changed.

    Attributes:
        program: as it was, but for its graph.
        causes: of its collectives; more are added.
        order: places of the nodes that the program had.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program.graph, program.mesh.device)
        self.program, self.causes = program, list(program.causes)
        self.order = {n: i for i, n in enumerate(self.graph.nodes)}

    def readers(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """What of the backward reads these nodes, in order."""
        found = {u for n in nodes for u in n.users if info_of(u).role in _LATER}
        return sorted(found, key=self.order.__getitem__)

    def again(
        self, nodes: Iterable[fx.Node], before: fx.Node, role: str, why: str, writes: bool = True
    ) -> dict[fx.Node, fx.Node]:
        """Repeat nodes in front of another one: each node with its repetition, which reads those of the others.

        What they make is in memory of its own; what they send is said to be sent again.

        Args:
            nodes: in order.
            role: of the repetitions.
            why: before the reason why something was sent.
            writes: False: what was written is in what the others read; nothing is written again.
        """
        made: dict[fx.Node, fx.Node] = {}
        moved = dict[int, int]()  # storages to those of the repetitions
        served: dict[int, list[fx.Node]] = defaultdict(list)
        for node in nodes:
            if not writes and is_mutating(node):
                made[node] = made[returned(node)]
                continue
            seen = {s for n in node.all_input_nodes for s in storages(n)}
            moved.update((s, next(self.storages)) for s in storages(node) if s not in seen and s not in moved)
            with self.graph.inserting_before(before):
                copy = made[node] = self.graph.node_copy(node, lambda n: made.get(n, n))
            annotate(copy, role=role, value=_moved(info_of(node).value, moved), writes=False)
            if (cause := info_of(node).cause) is not None:
                served[cause].append(copy)
        for cause, copies in served.items():
            self.causes.append(_sent_again(self.causes[cause], copies, role, why))
            for copy in copies:
                annotate(copy, cause=len(self.causes) - 1)
        return made

    def sent_together(
        self, members: Sequence[fx.Node], started: fx.Node, op: str, ends: tuple[str, str], why: str, phase: str = ""
    ) -> int:
        """Number of a record that says what one collective in place of several serves.

        Args:
            op, ends, why: of the record; the first of the reasons why the others were sent is put behind ``why``.
            phase: of the record; that of the first of the others unless given.
        """
        numbers = [i for n in members if (i := info_of(n).cause) is not None]
        known, kind = [self.causes[i] for i in numbers], COLLECTIVES[started.target].name
        for i, cause in zip(numbers, known, strict=True):
            self.causes[i] = cause.without(kind)
        value = checked_value(started.args[0])
        *_, axes, _ = started.args
        moved = bytes_of(started.target, value.shape, value.dtype, started.args[1:])
        line, first, before = (known[0].line, known[0].reason, known[0].phase) if known else ("", "", "forward")
        reason = why + (f"; of the first: {first}" if first else "")
        on = tuple(str(axes).split(","))
        self.causes.append(
            Record(op, 0, (kind,), on, value.shape, *ends, moved, 0.0, line, reason, phase or before, True)
        )
        return len(self.causes) - 1

    def done(self) -> Program:
        """The program as it is now."""
        follow(self.graph)
        return replace(self.program, causes=tuple(self.causes))


def read_instead(readers: Iterable[fx.Node], made: Mapping[fx.Node, fx.Node]) -> None:
    """Let nodes read others in place of these, each node at once: an update reads as many as there are parameters."""
    for reader in readers:
        reader.args = fx.map_arg(reader.args, lambda n: made.get(n, n))
        reader.kwargs = fx.map_arg(reader.kwargs, lambda n: made.get(n, n))


def _moved(value: Any, storage: Mapping[int, int]) -> Any:
    """What a node gives, in the memory of its repetition."""
    if isinstance(value, tuple):
        return tuple(_moved(v, storage) for v in value)
    return replace(value, storage=storage.get(value.storage, value.storage)) if isinstance(value, Value) else value


def _sent_again(cause: Record, nodes: list[fx.Node], role: str, why: str) -> Record:
    """The record of a conversion that runs again, as far as it does."""
    kinds = {COLLECTIVES[n.target].name for n in nodes if n.target in COLLECTIVES}
    made = replace(cause, reason=why + cause.reason, phase=role)
    if kinds.issuperset(cause.kinds):
        return made
    kept = [i for i, k in enumerate(cause.kinds) if k in kinds]
    sent: dict[str, Any] = {
        name: tuple(v[i] for i in kept if v) for name in ("kinds", "dtypes", "sums") for v in [getattr(cause, name)]
    }
    return replace(made, **sent, src="", dst="")
