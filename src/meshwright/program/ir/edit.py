"""Ops put into a graph: a pass says where, which op and for what; what the op gives follows from its arguments."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from .derive import DerivedValue, derive, local_values
from .inplace import storages
from .nodes import NodeInfo, Value, Values, annotate, call, info_of
from .strides import unless_row_major

Emit = Callable[..., fx.Node]  # emit(op, *args, **kwargs)
NUMBER = Value.alone((), torch.float64, 0)


class Edit:
    """A graph while ops are put into it.

    Shapes, dtypes, strides and storages of new nodes are inferred, as they are when a program is checked: no pass says
    them.  One edit of a graph at a time: it hands out the numbers of storages.

    Args:
        graph: is changed.
        device: of the mesh: ``program.mesh.device``.
        beside: another graph, whose nodes are copied to this one: new storages are none of its either.

    Example:
        >>> edit = Edit(program.graph, program.mesh.device)  # doctest: +SKIP
        >>> with edit.after(gradient, UPDATE) as emit:  # doctest: +SKIP
        ...     half = emit(aten.mul.Tensor, gradient, 0.5)
        ...     emit(aten.add_.Tensor, place, half)
    """

    def __init__(self, graph: fx.Graph, device: str, beside: fx.Graph | None = None) -> None:
        self.graph, self.device = graph, device
        graphs = (graph,) if beside is None else (graph, beside)
        self.storages: Iterator[int] = itertools.count(max(map(new_storage, graphs)))
        self._first: fx.Node | None = None  # behind the inputs

    @contextmanager
    def after(self, node: fx.Node, info: NodeInfo) -> Iterator[Emit]:
        """Inside, ops are put behind ``node``, one after the other.

        Args:
            info: of the new nodes, but for what they give.
        """
        with self.graph.inserting_before(node.next):
            yield partial(self.emit, info)

    @contextmanager
    def before(self, node: fx.Node, info: NodeInfo) -> Iterator[Emit]:
        """Inside, ops are put in front of ``node``, one after the other."""
        with self.graph.inserting_before(node):
            yield partial(self.emit, info)

    def emit(self, info: NodeInfo, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """An op where the graph inserts.

        Raises:
            Exception: of any kind, where the arguments do not fit the op.
        """
        node = call(self.graph, target, args, info, kwargs or None)
        node.meta["info"] = replace(info, value=self._inferred(node))
        return node

    def input(self, name: str, like: Value = NUMBER, dtype: torch.dtype | None = None) -> fx.Node:
        """An input more, behind the others, in memory of its own.

        Args:
            name: of the node, from which the graph may deviate.
            like: what it looks like but for its ``dtype``; a number in float64 unless given.
        """
        if self._first is None or self._first.prev.op != "placeholder":
            self._first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        with contextlib.nullcontext() if self._first is None else self.graph.inserting_before(self._first):
            node = self.graph.placeholder(name)
        annotate(node, role="input", value=like.fresh(next(self.storages), dtype))
        return node

    def _inferred(self, node: fx.Node) -> Values:
        target: Any = node.target
        if target is operator.getitem:
            values: Any = info_of(node.args[0]).value  # type: ignore[arg-type]
            return values[node.args[1]]
        if not target._schema.returns:
            return None
        known = {n: local_values(info_of(n).value) for n in node.all_input_nodes}
        given, tensors = derive(target, node.args, node.kwargs, known, self.device)
        made = tuple([None if g is None else self._value(g, tensors) for g in given])
        return made[0] if len(made) == 1 else made

    def _value(self, given: DerivedValue, tensors: Sequence[fx.Node]) -> Value:
        shape, stride, dtype = given.local
        strides = unless_row_major(shape, stride)
        if given.alias is None:
            return Value.alone(shape, dtype, next(self.storages), strides)
        of = next(info_of(tensors[given.alias]).values)
        return Value(shape, dtype, of.storage, of.nbytes, strides)


def new_storage(graph: fx.Graph) -> int:
    """A number that no storage of a graph has, nor any number above it."""
    return 1 + max((s for n in graph.nodes for s in storages(n)), default=0)


__all__ = ["Edit", "Emit", "new_storage"]
