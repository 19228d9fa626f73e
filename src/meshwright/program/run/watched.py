"""Programs that show what their updates read: each gradient where it is complete, before anything is updated."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from ...collective import COLLECTIVES, WAIT_OP
from ..check.flow import updates
from ..ir.inplace import storages, written
from ..ir.linear import is_linear
from ..ir.nodes import ancestors, draws, info_of, is_mutating, is_sum, reduces
from ..ir.program import Program
from ..ir.subgraphs import needed
from .segments import Segment

Tensor = torch.Tensor
Show = Callable[[str, Tensor], None]

LOSS, GRADIENT = "the loss", "the gradient"  # how names of points begin
_HELD = ("param", "buffer", "constant", "state", "scale")  # kinds of inputs that outlive a step


@dataclass(frozen=True)
class Point:
    """A value of a program that is shown.

    Attributes:
        name: ``"the loss"``, ``"the gradient of up.weight"``, ``"the buffer running_mean"``.
        node: that gives it.
        reader: that reads it: what is shown is what this one sees.
    """

    name: str
    node: fx.Node
    reader: fx.Node


def points_of(program: Program, unclipped: bool = False) -> list[Point]:
    """What of a program is shown: what it returns, what its updates read, and buffers that it writes to.

    Args:
        unclipped: gradients before their norm is clipped.
    """
    (output,) = program.graph.find_nodes(op="output")
    points: list[Point] = []
    names = {n: i.name for n, i in zip(program.placeholders, program.inputs, strict=True)}
    count: dict[str, int] = {}
    for out, node in zip(program.outputs, program.results, strict=True):
        words = {"loss": LOSS, "grad": f"{GRADIENT} of {out.name}", "aux": f"{out.name} beside the loss"}
        if out.kind in words:
            points.append(Point(words[out.kind], node, output))
    for reader in program.graph.nodes:
        for param, gradient in updates(reader):
            name = names.get(_source(param), param.name)
            count[name] = count.get(name, 0) + 1
            again = f", update {count[name]}" if count[name] > 1 else ""
            points.append(Point(f"{GRADIENT} that updates {name}{again}", gradient, reader))
    if unclipped:
        points = [_unclipped(p) if p.name.startswith(GRADIENT) else p for p in points]
    touched = {s for n in program.graph.nodes if info_of(n).role != "optimizer" for s in written(n)}
    points += [
        Point(f"the {'parameter' if i.kind == 'param' else i.kind} {i.name} after the forward", n, output)
        for n, i in zip(program.placeholders, program.inputs, strict=True)
        if i.kind in ("param", "buffer", "constant") and not touched.isdisjoint(storages(n))
    ]
    return points


def _unclipped(point: Point) -> Point:
    """The point in front of the factor of a clip."""
    at: Any = point.node
    while at.op == "call_function" and info_of(at).role == "optimizer" and len(at.all_input_nodes) == 1:
        (before,) = at.all_input_nodes
        if at.target is operator.getitem and before.target is torch.ops.aten._foreach_mul.Tensor:
            return Point(point.name, before.args[0][at.args[1]], before)
        at = before
    return point


def is_added_up(point: Point) -> bool:
    """Whether a gradient is what autograd gave, by linear ops alone: that of a mean of steps is the mean of theirs."""
    at = point.node
    while not info_of(at).grad_of:
        sent = at.target in COLLECTIVES and (is_sum(at) or not reduces(at))
        if at.op != "call_function" or not (sent or is_linear(at) or at.target is WAIT_OP):
            return False
        at = at.all_input_nodes[0]
    return True


def written_inputs(program: Program, buffers: bool = True) -> list[int]:
    """Places of the inputs that a program writes to.

    Args:
        buffers: all buffers, too: kernels of batch norms write to them, and their schemas do not say so.
    """
    touched = {s for n in program.graph.nodes for s in written(n)}
    pairs = enumerate(zip(program.placeholders, program.inputs, strict=True))
    return [i for i, (n, of) in pairs if (buffers and of.kind == "buffer") or not touched.isdisjoint(storages(n))]


def watched(
    program: Program,
    show: Show,
    verdict: Callable[[], None] | None = None,
    seed: Callable[[Tensor], Tensor] | None = None,
    unclipped: bool = False,
) -> Program:
    """The same program, in which ``show(name, value)`` is called with each of its points.

    Args:
        seed: what becomes of the number that a backward starts from.
        unclipped: as of :func:`points_of`.
        verdict: called when all points have been shown, and before anything is updated; None: the program ends there,
            and updates nothing.
    """
    points = points_of(program, unclipped)
    first = _needed(program, points)
    if verdict is not None:
        first = _before(program, first)
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    shown: dict[fx.Node, list[Point]] = {}
    order = {n: i for i, n in enumerate(program.graph.nodes)}
    writers: dict[int, list[fx.Node]] = {}
    for node in first:
        for storage in written(node):
            writers.setdefault(storage, []).append(node)
    for p in points:
        shown.setdefault(_complete(p, order, writers), []).append(p)
    nodes = [n for n in program.graph.nodes if n.op != "output"]
    updated = {s for n, i in zip(program.placeholders, program.inputs, strict=True)
               if i.kind in ("param", "state") for s in storages(n)}  # fmt: skip

    def place(node: fx.Node) -> None:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if seed is not None and info_of(node).seed:
            copies[node] = graph.call_function(seed, (copies[node],))

    for node in nodes:  # inputs come first, in their order
        if node.op == "placeholder" and (verdict is not None or node in first):
            place(node)
            _show(graph, shown, node, copies, show)
    for node in nodes:
        if node.op == "placeholder" or node not in first:
            continue
        if verdict is not None and info_of(node).role == "optimizer" and not updated.isdisjoint(written(node)):
            graph.call_function(verdict)
        place(node)
        _show(graph, shown, node, copies, show)
    if verdict is None:
        graph.output(())
        inputs = tuple(i for i, n in zip(program.inputs, program.placeholders, strict=True) if n in first)
        return replace(program, graph=graph, inputs=inputs, outputs=(), parts={})
    graph.call_function(verdict)
    for node in nodes:
        if node not in copies:
            place(node)
    graph.output(tuple(copies[n] for n in program.results))
    return replace(program, graph=graph)


def _show(
    graph: fx.Graph, shown: dict[fx.Node, list[Point]], node: fx.Node, copies: dict[fx.Node, Any], show: Show
) -> None:
    for p in shown.get(node, ()):
        graph.call_function(show, (p.name, copies[p.node]))


def _source(node: fx.Node) -> fx.Node:
    """The input that a value is, or is a part or a copy of."""
    while node.op != "placeholder" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _needed(program: Program, points: Iterable[Point]) -> set[fx.Node]:
    """What must run for the points, and for other ranks: not the update, unless something is computed from it."""
    held = {s for n, i in zip(program.placeholders, program.inputs, strict=True)
            if i.kind in _HELD for s in storages(n)}  # fmt: skip
    before = [n for n in program.graph.nodes if info_of(n).role != "optimizer"]
    met = [n for n in before if n.target in COLLECTIVES or draws(n) or isinstance(n.target, Segment)]

    place = {n: i for i, n in enumerate(program.graph.nodes)}
    read: dict[int, int] = {}  # storages to where a point is last read
    for p in points:
        read.update((s, max(read.get(s, 0), place[p.reader])) for s in storages(p.node))

    def writes(node: fx.Node) -> bool:
        memory = written(node)
        if not held.isdisjoint(memory):
            return info_of(node).role != "optimizer"
        return any(place[node] < read.get(s, 0) for s in memory)

    return needed(program.graph, [*(p.node for p in points), *met], writes)


def _before(program: Program, first: set[fx.Node]) -> set[fx.Node]:
    """``first``, and what cannot run behind it: what it reads or writes is written by it later on."""
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    reads = {n: {s for u in n.all_input_nodes for s in storages(u)} | set(storages(n)) for n in nodes}
    while True:
        late = set[int]()  # storages that what comes later, and stays where it is, writes; and reads
        seen = set[int]()
        draw = False
        moved: list[fx.Node] = []
        for node in reversed(nodes):
            if node in first:
                late |= written(node)
                seen |= reads[node]
                draw |= draws(node)
            elif (
                not reads[node].isdisjoint(late)
                or (is_mutating(node) and not written(node).isdisjoint(seen))
                or (draws(node) and draw)
            ):
                moved.append(node)
        if not moved:
            return first
        first = first | ancestors(moved)


def _complete(point: Point, place: Mapping[fx.Node, int], writers: Mapping[int, Sequence[fx.Node]]) -> fx.Node:
    """The last node that makes or writes the value that a point's reader reads.

    Args:
        place: of each node in the graph.
        writers: storages to the nodes that write to them.
    """
    by = (w for s in storages(point.node) for w in writers.get(s, ()) if place[w] < place[point.reader])
    return max([point.node, *by], key=place.__getitem__)


__all__ = ["GRADIENT", "LOSS", "Point", "is_added_up", "points_of", "watched", "written_inputs"]
