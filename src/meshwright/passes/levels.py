"""Sums over one axis after another (of a node, then between nodes) as one sum over all of them.

What lies between two sums moves ahead of the first one, where each rank does it to what it has: so it must be the same
on the ranks of that sum, numbers included, and all ranks must join the same sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from ..collective import COLLECTIVES, bytes_of
from ..program.ir.inplace import follow
from ..program.ir.linear import is_linear
from ..program.ir.nodes import annotate, info_of, is_sum, target_name, value_of
from ..program.ir.program import Program
from ..resharding.record import Record
from .agreement import alike_in_groups
from .gradients import is_reduction, parameter_of


@dataclass(frozen=True)
class _Inner:
    """A sum that may become part of a later one.

    Attributes:
        node: the sum; ``axes``: over which it runs, with those of sums that become part of it.
        between: what lies between it and the later one, as text.
    """

    node: fx.Node
    axes: frozenset[str]
    between: str


class Levels:
    """The sums of sums of a program.

    Args:
        program: its graph is changed by :meth:`join`.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._number = {n: i for i, n in enumerate(program.collectives())}
        self._found: dict[fx.Node, _Inner] = {}  # by the later sum, over one level
        axes = {n: frozenset(str(n.args[-2]).split(",")) for n in self._number}
        for node in self._number:
            if is_reduction(node) and not COLLECTIVES[node.target].scatters:
                inner = _inner(node, axes)
                if inner is not None:
                    self._found[node], axes[node] = inner, axes[node] | inner.axes

    @property
    def view(self) -> tuple[Any, ...]:
        """Of each sum over a later level: the numbers of both among the collectives, and what is between them."""
        return tuple((self._number[n], self._number[i.node], i.between) for n, i in self._found.items())

    def join(self, views: Mapping[int, tuple[Any, ...]]) -> tuple[Program, tuple[str, ...]]:
        """The program with one all-reduce where several in a row sum a gradient; the joined sums, in words.

        Args:
            views: of all ranks.
        """
        causes, done = list(self.program.causes), list[str]()
        by_rank = {r: {v[:2]: v[2] for v in view} for r, view in views.items()}
        for node, inner in self._found.items():
            key = self._number[node], self._number[inner.node]
            between = {r: found.get(key) for r, found in by_rank.items()}
            if None in between.values() or not alike_in_groups(self.program, inner.axes, between):
                continue
            self._merge(node, inner, causes)
            done.append(f"the gradient of {', '.join(parameter_of(node))} is summed over {node.args[-2]} at once")
        if done:
            follow(self.program.graph)
        return replace(self.program, causes=tuple(causes)), tuple(done)

    def _merge(self, node: fx.Node, inner: _Inner, causes: list[Record]) -> None:
        inner.node.replace_all_uses_with(inner.node.all_input_nodes[0])
        *given, axes, mesh = node.args
        names = set(f"{axes},{inner.node.args[-2]}".split(","))
        together = ",".join(a for a in self.program.mesh.axes if a in names)
        node.args = (*given, together, mesh)
        value, cause = value_of(node), self.program.cause(node)
        if cause is not None and value is not None:
            moved = bytes_of(node.target, value.shape, value.dtype, node.args[1:])
            causes.append(replace(cause, axes=tuple(together.split(",")), bytes=moved))
            annotate(node, cause=len(causes) - 1)
        self.program.graph.erase_node(inner.node)


def _inner(node: fx.Node, axes: Mapping[fx.Node, frozenset[str]]) -> _Inner | None:
    """The sum over other axes of which a sum is the only reader, through ops that may change places with it.

    Args:
        axes: over which each sum runs.
    """
    at, between, value = node.args[0], list[str](), value_of(node)
    while isinstance(at, fx.Node) and len(at.users) == 1:
        own = value_of(at)
        if value is None or own is None or own.dtype is not value.dtype:
            return None  # each level sums in its own dtype
        if at.target is node.target and at.args[1:-2] == node.args[1:-2] and is_sum(at):
            apart = axes[node].isdisjoint(axes[at]) and not info_of(at).grad_of
            return _Inner(at, axes[at], "; ".join(between)) if apart else None
        if not is_linear(at) or _picks(at):
            return None
        between.append(f"{target_name(at.target)} {at.args[1:]} {sorted(at.kwargs.items())}")
        at = at.args[0]
    return None


_PLACES = {"start", "end", "index", "indices", "length", "pad", "shifts", "split_size", "split_sizes", "storage_offset"}


def _picks(node: fx.Node) -> bool:
    """Whether a node takes elements by their place, which may be this rank's own: other ranks take other ones."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(a.name in _PLACES for a in schema.arguments)


__all__ = ["Levels"]
