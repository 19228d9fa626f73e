"""Writes in a graph: where they go, and how to do without those into values that nobody else sees."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx

from .nodes import VIEWS, annotate, call, checked_value, info_of, is_mutating, value_of
from .strides import same

aten = torch.ops.aten


def storages(node: fx.Node) -> tuple[int, ...]:
    """Numbers of the storages of what a node gives."""
    value = info_of(node).value
    if isinstance(value, tuple):
        return tuple([v.storage for v in value if v is not None])
    return () if value is None else (value.storage,)


def written(node: fx.Node) -> set[int]:
    """Storages that a node writes to."""
    found: set[int] = set()
    if not is_mutating(node):
        return found
    for i, arg in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if not _is_write(arg) or (arg.name == "grads" and node.kwargs.get("grad_scale") is None):
            continue  # fused updates write to gradients only to take a scale off them
        given = node.args[i] if i < len(node.args) else node.kwargs.get(arg.name)
        fx.map_arg(given, lambda n: found.update(storages(n)))
    return found


def note_writes(graph: fx.Graph) -> None:
    """Note of what the recorded forward writes to inputs that it does (``writes``): parameters that a model averages
    or clamps, say.  Nobody else may have a forward write to a parameter."""
    held = {s for n in graph.nodes if n.op == "placeholder" for s in storages(n)}
    for node in graph.nodes:
        if info_of(node).role == "forward" and not held.isdisjoint(written(node)):
            annotate(node, writes=True)


def functional(graph: fx.Graph, writes: Iterable[fx.Node]) -> int:
    """Turn writes into values of their own: ``div_(g, 4)`` becomes ``h = div(g, 4)``, and who reads g later reads h.

    A write stays where something else sees it: memory of an input, or another view of the same memory that is read
    later.

    Args:
        writes: the nodes to look at, in order.

    Returns:
        How many were turned.
    """
    made = _Functional(graph)
    return sum(made.turn(node) for node in writes)


def follow(graph: fx.Graph) -> None:
    """Say of every view that it lies in the memory of what it is a view of, after inputs of views were replaced."""
    for node in graph.nodes:
        source = _viewed(node)
        if source is not None and storages(source):
            _lies_in(node, source)


def _viewed(node: fx.Node) -> fx.Node | None:
    """Whose memory a node gives, if it is not its own."""
    source = node.args[0] if node.args else None
    if is_mutating(node):
        source = returned(node)
    elif node.target is operator.getitem:
        source = source if isinstance(source, fx.Node) and len(set(storages(source))) == 1 else None
    elif node.target not in VIEWS:
        source = None
    return source if isinstance(source, fx.Node) else None


def returned(node: fx.Node) -> Any:
    """The argument that a write returns; None if it returns something else."""
    schema = node.target._schema  # type: ignore[union-attr]
    back = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    for i, arg in enumerate(schema.arguments):
        if back is not None and arg.alias_info is not None and arg.alias_info.before_set == back.before_set:
            return node.args[i] if i < len(node.args) else node.kwargs.get(arg.name)
    return None


def _lies_in(node: fx.Node, source: fx.Node) -> None:
    of, had = next(info_of(source).values), info_of(node).value
    if isinstance(had, tuple):
        annotate(node, value=tuple(v and replace(v, storage=of.storage, nbytes=of.nbytes) for v in had))
    elif had is not None:
        annotate(node, value=replace(had, storage=of.storage, nbytes=of.nbytes))


class _Functional:
    """Values and their memory, while writes are replaced one after the other."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.order = {n: float(i) for i, n in enumerate(graph.nodes)}
        self.aliases: dict[int, list[fx.Node]] = {}
        self.fixed: set[int] = set()
        for node in graph.nodes:
            for s in storages(node):
                self.aliases.setdefault(s, []).append(node)
                if node.op == "placeholder":
                    self.fixed.add(s)
        self.next = 1 + max(self.aliases, default=0)

    def turn(self, node: fx.Node) -> bool:
        """Turn one write, if nobody else sees it."""
        schema = node.target._schema  # type: ignore[union-attr]
        targets: list[Any] = list(node.args[0]) if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
        if not schema.arguments[0].alias_info or sum(_is_write(a) for a in schema.arguments) != 1:
            return False
        if not all(isinstance(t, fx.Node) and self._alone(t, node) for t in targets):
            return False
        values = self._values(node, targets)
        if values is None:
            return False
        at = self.order[node]

        def later(user: fx.Node) -> bool:
            return self.order[user] > at

        for old, new in zip(targets, values, strict=True):
            if old.target in _EMPTY and node.target is aten.copy_.default and not info_of(new).grad_of:
                # Where autograd copies a gradient that two parameters share, what it copies is the gradient.
                annotate(new, grad_of=info_of(old).grad_of)
                annotate(old, grad_of=())
            old.replace_all_uses_with(new, delete_user_cb=later)
            if targets[0] is node.args[0]:  # what it returns is what it wrote to
                node.replace_all_uses_with(new)
            self._moved(new)
        self.graph.erase_node(node)
        return True

    def _alone(self, target: fx.Node, write: fx.Node) -> bool:
        """Whether nothing reads this memory after the write but through ``target`` itself."""
        at = self.order[write]
        for s in storages(target):
            if s in self.fixed:
                return False
            for other in self.aliases[s]:
                if other in (target, write) or self.order[other] > at:
                    continue
                if any(self.order[u] > at for u in other.users):
                    return False
        return value_of(target) is not None

    def _values(self, node: fx.Node, targets: list[Any]) -> list[fx.Node] | None:
        """What the targets are after the write, as nodes that come before it."""
        if node.target is aten.copy_.default:
            source, target = node.args[1], targets[0]
            if not isinstance(source, fx.Node) or not self._same(source, target) or self._written_later(source, node):
                return None
            # What is written to the copy is not written to what was copied, where that is read again.
            both = self._written_later(target, node) and self._read_later(source, node)
            return [self._before(node, aten.clone.default, (source,), target) if both else source]
        one = _SINGLE.get(node.target)
        if one is not None:
            return [self._one(node, one, i, t) for i, t in enumerate(targets)]
        target = counterpart(node.target)
        if target is None or not self._keeps_dtype(node, targets[0]):
            return None
        if not isinstance(node.args[0], (list, tuple)):
            return [self._before(node, target, node.args, targets[0], node.kwargs)]
        with self.graph.inserting_before(node):
            made = call(self.graph, target, node.args, info_of(node), node.kwargs)
            self.order[made] = self.order[node] - 0.5
            items = [call(self.graph, operator.getitem, (made, i), info_of(node)) for i in range(len(targets))]
        for item, old in zip(items, targets, strict=True):
            self.order[item] = self.order[made]
            self._new(item, old)
        annotate(made, value=tuple(value_of(item) for item in items))
        return items

    def _one(self, node: fx.Node, target: Any, i: int, of: fx.Node) -> fx.Node:
        """What a write to many does to the i-th of them."""
        args = tuple(a[i] if isinstance(a, (list, tuple)) else a for a in node.args)
        return self._before(node, target, args, of, node.kwargs)

    def _before(self, node: fx.Node, target: Any, args: Any, like: fx.Node, kwargs: Any = None) -> fx.Node:
        """An op in front of a write, that gives what ``like`` looks like in memory of its own."""
        with self.graph.inserting_before(node):
            made = call(self.graph, target, args, info_of(node), kwargs)
        self.order[made] = self.order[node] - 0.5
        self._new(made, like)
        return made

    def _new(self, node: fx.Node, like: fx.Node) -> None:
        annotate(node, value=checked_value(like).fresh(self.next))
        self.aliases[self.next] = [node]
        self.next += 1

    @staticmethod
    def _same(a: fx.Node, b: fx.Node) -> bool:
        x, y = value_of(a), value_of(b)
        if x is None or y is None or (x.shape, x.dtype) != (y.shape, y.dtype):
            return False
        return same(x.shape, x.strides, y.strides)

    def _written_later(self, source: fx.Node, write: fx.Node) -> bool:
        """Whether the memory of ``source`` may change after the write that copies it."""
        own = set(storages(source))
        if own & self.fixed:
            return True
        for s in own:
            for alias in self.aliases[s]:
                if any(self.order[u] > self.order[write] and own & written(u) for u in alias.users):
                    return True
        return False

    def _read_later(self, source: fx.Node, write: fx.Node) -> bool:
        """Whether the memory of ``source`` is read after the write that copies it."""
        at = self.order[write]
        return any(self.order[u] > at for s in storages(source) for alias in self.aliases[s] for u in alias.users)

    @staticmethod
    def _keeps_dtype(node: fx.Node, target: fx.Node) -> bool:
        dtype = checked_value(target).dtype
        others = [value_of(n) for n in node.all_input_nodes]
        return all(v is not None and (v.dtype is dtype or not v.shape) for v in others)

    def _moved(self, new: fx.Node) -> None:
        """Views that are now of ``new`` have its storage."""
        (storage,) = set(storages(new))
        for user in new.users:
            if _viewed(user) is new and set(storages(user)) - {storage}:
                _lies_in(user, new)
                self.aliases[storage].append(user)
                self._moved(user)


_EMPTY = {
    aten.new_empty_strided.default, aten.new_empty.default, aten.empty_like.default, aten.empty_strided.default,
    aten.empty.memory_format,
}  # fmt: skip
# A number for all: what is known of single ops (that they are linear, say) is then known of these too.
# And each is there as soon as what it is made of.
_SINGLE: dict[Any, Any] = {
    aten._foreach_div_.Scalar: aten.div.Tensor, aten._foreach_mul_.Scalar: aten.mul.Tensor,
    aten._foreach_add_.Scalar: aten.add.Tensor, aten._foreach_add_.List: aten.add.Tensor,
}  # fmt: skip


def _is_write(argument: Any) -> bool:
    return bool(argument.alias_info is not None and argument.alias_info.is_write)


@lru_cache(maxsize=1024)
def counterpart(target: Any) -> Any:
    """``aten.div.Tensor`` for ``aten.div_.Tensor``; None where there is none.

    By what they take: ``pow.Scalar`` is a number to the power of a tensor, ``pow_.Scalar`` the other way round.
    """
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    takes = _taken(target)
    found = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    found.sort(key=lambda f: f._overloadname != target._overloadname)
    return next((f for f in found if _taken(f) == takes), None)


def _taken(target: Any) -> list[tuple[str, bool]]:
    """Types of the arguments of an op, and which must be named."""
    return [(str(a.real_type), a.kwarg_only) for a in target._schema.arguments]


__all__ = ["counterpart", "follow", "functional", "note_writes", "returned", "storages", "written"]
