"""Gradients and what reduces them, in a program: where each is complete, where its sum is first needed.

This is what one rank sees.  Others may run other local ops: what ranks must do alike is decided in ``order``, from what
all of them see.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from ..collective import COLLECTIVES, STARTS, Kind
from ..layout import block_of, wire_from
from ..program.ir.inplace import storages, written
from ..program.ir.linear import is_linear
from ..program.ir.nodes import checked_value, draws, info_of, is_mutating, is_sum
from ..program.ir.program import Program


@dataclass(frozen=True)
class SentGradient:
    """A collective that sums a gradient over ranks.

    Attributes:
        node: the collective; ``gradient``: what goes in.
        name: of the parameter.
        kind: an all-reduce or a reduce-scatter.
        nbytes: of what goes in; once ranks have agreed, on the rank that has most.
        key: place in the order of the backward; ends with the number among the reductions.
        ready: place of the last node that writes the gradient on this rank.
        needed: place of the first node that reads the sum on this rank.
        unit: whose parameters are gathered together (ZeRO-3): their gradients are scattered together.
    """

    node: fx.Node
    gradient: fx.Node
    name: str
    kind: Kind
    nbytes: int
    key: tuple[int, ...]
    ready: int
    needed: int
    unit: str = ""

    @property
    def index(self) -> int:
        """Number among the reductions of the program, the same on every rank."""
        return self.key[-1]

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
        numbers: which of the collectives; None: of sums of what others sum, the first.

    Attributes:
        reductions: in the order of the program.
        later: whether there are such others: look again when these have been dealt with.
        order: the nodes; ``place``: of each of them; ``inputs``: how many of them are inputs.
    """

    def __init__(self, program: Program, numbers: Collection[int] | None = None) -> None:
        self.program, self.graph = program, program.graph
        self._given = {n: storages(n) for n in self.graph.nodes}
        self._written = {n: written(n) for n in self.graph.nodes if is_mutating(n)}
        every, first = sums_of(program)
        chosen = first if numbers is None else numbers
        found = [n for i, n in enumerate(program.collectives()) if i in chosen]
        self.later = len(found) < len(every)
        self._units = units_of(program)
        self._index()
        self._hoist(found)
        self._sink(found)
        self._index()
        self.reductions = [self._reduction(n, i) for i, n in enumerate(found)]

    def _index(self) -> None:
        self.order: list[fx.Node] = list(self.graph.nodes)
        self.place = {n: i for i, n in enumerate(self.order)}
        self.inputs = sum(n.op == "placeholder" for n in self.order)
        self.touched: dict[int, list[int]] = defaultdict(list)  # storage to the places of nodes that read or make it
        self.writes: dict[int, list[int]] = defaultdict(list)
        for i, node in enumerate(self.order):
            given, read = self._given[node], {s for n in node.all_input_nodes for s in self._given[n]}
            for s in read.union(given):
                self.touched[s].append(i)
            # What a node makes, it writes; a view makes nothing.
            for s in self._written.get(node, () if read.issuperset(given) else given):
                self.writes[s].append(i)

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
        ready = max(self.last_write(gradient, self.place[node]), self.inputs - 1)
        needed = min((self.place[u] for u in node.users), default=len(self.order) - 1)
        unit = self._units.get(grad_below(node), "")
        name, nbytes = ", ".join(parameter_of(node)) or gradient.name, checked_value(gradient).size
        return SentGradient(node, gradient, name, COLLECTIVES[node.target], nbytes, (ready, index), ready, needed, unit)

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


def sums_of(program: Program) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers, among the collectives, of the reductions of a program, and of those that sum no sum of another."""
    every = {n: i for i, n in enumerate(program.collectives()) if is_reduction(n)}
    first = (i for n, i in every.items() if list(chain_up(n.args[0], autograd=True))[-1] not in every)  # type: ignore[arg-type]
    return tuple(every.values()), tuple(first)


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


__all__ = ["Gradients", "SentGradient", "chain_up", "is_reduction", "parameter_of", "sums_of", "units_of"]
