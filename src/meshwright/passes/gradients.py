"""Gradients and what reduces them, in a program: where each is complete, where its sum is first needed.

What ranks must do alike is decided from what all of them know: global shapes and the order of the captured step.  On
ranks with shards of other sizes the same step may consist of other local ops.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from ..collective import COLLECTIVES, STARTS, Kind
from ..layout import At, Shard, Spec, block_of, wire_from
from ..program.ir.inplace import storages, written
from ..program.ir.linear import is_linear
from ..program.ir.nodes import checked_value, draws, info_of, is_mutating, is_sum, value_of
from ..program.ir.program import Program


@dataclass(frozen=True)
class SentGradient:
    """A collective that sums a gradient over ranks.

    Attributes:
        node: the collective; ``gradient``: what goes in.
        name: of the parameter.
        kind: an all-reduce or a reduce-scatter.
        nbytes: of what goes in, on the rank that has most: the same number on every rank.
        key: place in the order of the backward; the same order on every rank.
        ready: place of the last node that writes the gradient.
        needed: place of the first node that reads the sum.
        unit: whose parameters are gathered together (ZeRO-3): their gradients are scattered together.
    """

    node: fx.Node
    gradient: fx.Node
    name: str
    kind: Kind
    nbytes: int
    key: tuple[int, int]
    ready: int
    needed: int
    unit: str = ""

    @property
    def group(self) -> tuple[Any, ...]:
        """What reductions that may share one collective have in common: kind, dtype, op, wire, axes, mesh and unit."""
        said = self.kind.named(self.node.args[1:-2])
        dtype = checked_value(self.gradient).dtype
        return (self.kind, dtype, said["op"], said.get("wire"), *self.node.args[-2:], self.unit)

    @property
    def step(self) -> int:
        """Elements that are encoded together on the wire: at multiples of it gradients begin in a buffer."""
        wire = self.group[3]
        return 1 if wire is None else block_of(wire_from(wire))


def chain_up(node: fx.Node, autograd: bool = False) -> Iterator[fx.Node]:
    """``node`` and what it is computed from by linear ops of one input.

    Args:
        autograd: go on behind the gradient as autograd gave it.
    """
    yield node
    while is_linear(node) and (autograd or not info_of(node).grad_of):
        node = node.all_input_nodes[0]
        yield node


class Gradients:
    """The reductions of a program's gradients.

    Args:
        program: its graph may be changed: what prepares a gradient moves to where the gradient is made.

    Attributes:
        reductions: in the order of the backward; of sums of what others sum, the first.
        later: whether there are such others: look again when these have been dealt with.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.even = is_even(program)
        self._given = {n: storages(n) for n in self.graph.nodes}
        self._written = {n: written(n) for n in self.graph.nodes if is_mutating(n)}
        every = dict.fromkeys(n for n in self.graph.nodes if is_reduction(n))
        found = [n for n in every if list(chain_up(n.args[0], autograd=True))[-1] not in every]
        self.later = len(found) < len(every)
        self._units = units_of(program)
        self._index()
        self._hoist(found)
        self._sink(found)
        self._index()
        self.reductions = sorted((self._reduction(n, i) for i, n in enumerate(found)), key=lambda r: r.key)

    def _index(self) -> None:
        self.order: list[fx.Node] = list(self.graph.nodes)
        self.place = {n: i for i, n in enumerate(self.order)}
        self.inputs = sum(n.op == "placeholder" for n in self.order)
        self.touched: dict[int, list[int]] = defaultdict(list)  # storage to the places of nodes that read or make it
        self.writes: dict[int, list[int]] = defaultdict(list)
        self.first: dict[str, int] = {}  # captured node to the place of the first node that serves its backward
        self.last: dict[str, int] = {}
        self.meets: set[str] = set()  # captured nodes whose backward runs collectives
        for i, node in enumerate(self.order):
            given, read = self._given[node], {s for n in node.all_input_nodes for s in self._given[n]}
            for s in read.union(given):
                self.touched[s].append(i)
            # What a node makes, it writes; a view makes nothing.
            for s in self._written.get(node, () if read.issuperset(given) else given):
                self.writes[s].append(i)
            info = info_of(node)
            if info.role == "backward" and info.source and not info.sync:
                self.first.setdefault(info.source, i)
                self.last[info.source] = i
                if node.target in COLLECTIVES:
                    self.meets.add(info.source)

    def last_write(self, node: fx.Node, before: int) -> int:
        """Place of the last node ahead of a place that writes to the storages of ``node``."""
        found = self.place[node]
        for s in storages(node):
            places = self.writes[s]
            i = bisect_left(places, before)
            if i:
                found = max(found, places[i - 1])
        return found

    def _hoist(self, reductions: list[fx.Node]) -> None:
        """Move what prepares gradients (views, factors, a step's own weight decay) to where they are complete."""
        moved: dict[fx.Node, None] = {}
        for reduction in reductions:
            gradient: Any = reduction.args[0]
            moved.update(dict.fromkeys(list(chain_up(gradient, autograd=True))[:-1]))
            stack = [gradient]
            while stack:
                node = stack.pop()
                if _by_the_step(node):
                    stack += [n for n in node.all_input_nodes if n not in moved]
                    moved[node] = None
        for node in sorted((n for n in moved if not draws(n)), key=self.place.__getitem__):
            given = node.all_input_nodes
            written_last = [self.order[self.last_write(n, self.place[node])] for n in given]
            behind = max([*given, *written_last, *self.order[max(self.inputs - 1, 0) : self.inputs]])
            if behind.next is not node and behind < node:
                behind.append(node)

    def _sink(self, reductions: list[fx.Node]) -> None:
        """Move the factors of sums to where a later backward adds to them: until there they may be under way."""
        for reduction in reductions:
            chain, below = list[fx.Node](), reduction
            while len(below.users) == 1 and is_linear(user := next(iter(below.users))) and _by_the_step(user):
                chain.append(user)
                below = user
            readers = [u for u in below.users if info_of(u).role == "backward"]
            if not chain or not readers or len(readers) < len(below.users):
                continue
            reader = min(readers)
            end = self.place[reader]
            if all(self.last_write(n, end) <= self.place[n] for n in (reduction, *chain)):
                for node in chain:
                    reader.prepend(node)

    def _reduction(self, node: fx.Node, index: int) -> SentGradient:
        gradient = node.args[0]
        assert isinstance(gradient, fx.Node)
        value = checked_value(gradient)
        place = self.place[node]
        ready = max(self.last_write(gradient, place), self.inputs - 1)
        spec = self._spec(gradient)
        nbytes = local_bytes(spec) if spec is not None else math.prod(value.shape) * value.dtype.itemsize
        source = info_of(gradient).source
        stage = ready if self.even else self.first.get(source, ready)
        needed = min((self.place[u] for u in node.users), default=len(self.order) - 1)
        unit = self._units.get(grad_below(node), "")
        name = ", ".join(parameter_of(node)) or gradient.name
        return SentGradient(node, gradient, name, COLLECTIVES[node.target], nbytes, (stage, index), ready, needed, unit)

    def _spec(self, gradient: fx.Node) -> Spec | None:
        value = value_of(gradient)
        for node in chain_up(gradient):
            for _, spec in info_of(node).grad_of:
                here = spec.local_shape(self.program.mesh.coordinate(self.program.rank))
                if value is not None and math.prod(here) == math.prod(value.shape):
                    return spec.with_(dtype=value.dtype)
        return None

    def after(self, reductions: list[SentGradient], earliest: int) -> int:
        """Place behind which all these gradients exist, and at which every rank has met in the same collectives."""
        place = max(earliest, *(r.ready for r in reductions))
        source = info_of(self.order[place]).source
        if not self.even and source in self.meets:
            pushed = max(place, self.last[source])
            place = pushed if pushed < min(r.needed for r in reductions) else place
        return place

    def alone_after(self, node: fx.Node, place: int, reader: fx.Node) -> bool:
        """Whether nobody but ``reader`` touches the storage of ``node`` behind a place."""
        allowed = self.place[reader]
        return all(i <= place or i == allowed for s in storages(node) for i in self.touched[s])


def _by_the_step(node: fx.Node) -> bool:
    """Whether a node is what a step by hand does itself, behind its backward, and may run earlier."""
    info = info_of(node)
    if node.op != "call_function" or info.role not in ("backward", "optimizer") or is_mutating(node) or draws(node):
        return False
    return not (info.transposed or info.source or info.grad_of or info.seed or node.target in COLLECTIVES)


def is_reduction(node: fx.Node) -> bool:
    """Whether a node sums a gradient over ranks."""
    if node.target not in STARTS or not is_sum(node) or not isinstance(node.args[0], fx.Node):
        return False
    if info_of(node).sync or any(info_of(n).grad_of for n in chain_up(node.args[0])):
        return True
    return COLLECTIVES[node.target].scatters and bool(grad_below(node))


def grad_below(node: fx.Node) -> str:
    """The parameter whose gradient what a node gives is, or becomes by linear ops alone; empty if there is none."""
    while not info_of(node).grad_of:
        if len(node.users) != 1 or not is_linear(user := next(iter(node.users))):
            return ""
        node = user
    return info_of(node).grad_of[0][0]


def units_of(program: Program) -> dict[str, str]:
    """Name of a stored parameter to the unit that it is gathered with."""
    given = {n: i.name for n, i in zip(program.placeholders, program.inputs, strict=True)}
    found = ((given.get(n.all_input_nodes[0]), info_of(n).unit) for n in program.graph.nodes if info_of(n).unit)
    return {name: unit for name, unit in found if name is not None}


def is_view(node: fx.Node) -> bool:
    """Whether what a node gives lies in the memory of its input."""
    if is_mutating(node) or not node.all_input_nodes:
        return False
    return bool(storages(node)) and set(storages(node)) <= {s for n in node.all_input_nodes for s in storages(n)}


def parameter_of(node: fx.Node) -> tuple[str, ...]:
    """Names of the parameters whose gradient a reduction sums; empty where they are not known."""
    for n in chain_up(node.args[0]):  # type: ignore[arg-type]
        if info_of(n).grad_of:
            return tuple(name for name, _ in info_of(n).grad_of)
    found = info_of(node).sync or grad_below(node)
    return (found,) if found else ()


def local_bytes(spec: Spec) -> int:
    """Bytes on the rank that holds most."""
    return math.prod(spec.local_shape((0,) * spec.layout.mesh.ndim)) * spec.dtype.itemsize


def is_even(program: Program) -> bool:
    """Whether all ranks hold parts of the same shapes, as far as the program tells: then all run the same local ops."""
    specs = {i.spec for i in program.inputs} | {info_of(n).spec for n in program.graph.nodes}
    return all(_splits_evenly(s) for s in specs if s is not None)


def _splits_evenly(spec: Spec) -> bool:
    first = spec.local_shape((0,) * spec.layout.mesh.ndim)
    parts = [1] * len(first)
    for p, n in zip(spec.layout.placements, spec.layout.mesh.sizes, strict=True):
        if isinstance(p, At) and n > 1:
            return False
        if isinstance(p, Shard):
            parts[p.dim] *= n
    return all(a * b == n for a, b, n in zip(first, parts, spec.shape, strict=True))


__all__ = ["Gradients", "SentGradient", "chain_up", "is_reduction", "parameter_of", "units_of"]
