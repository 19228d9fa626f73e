"""Whether every gradient reaches its parameter's update, summed over the ranks over which it is to be summed."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.fx as fx

from ...errors import ProgramError
from ...layout import Partial, Spec
from ..ir.inplace import storages, written
from ..ir.nodes import checked_value, info_of, is_mutating, is_sum, value_of
from ..ir.program import Input, Program
from .values import described

# Name of a parameter to the axes over which its gradient, which is in a value, is still to be summed.
Owed = Mapping[str, frozenset[str]]

_NOTHING: Owed = {}

# What a node gives, or what a node that writes leaves in the memory of this number: it may write to many at once.
_Held = tuple[fx.Node, int | None]


def owed_of_updates(program: Program) -> list[tuple[str, fx.Node, Owed]]:
    """For each gradient that an update or an output reads: the parameter, the node, and which gradients are in it."""
    return [(name, node, owed) for name, node, _, owed, _ in _Flow(program).used()]


def check_gradients(program: Program) -> None:
    """Follow gradients from where they are used back to where autograd gave them.

    Raises:
        ProgramError: an update or an output that gets a gradient that is not its own, or one that a sum over ranks is
            missing from.
    """
    _Flow(program).check()


class _Flow:
    """The values between autograd's gradients and their uses."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.order = {n: i for i, n in enumerate(program.graph.nodes)}
        self.inputs: dict[fx.Node, Input] = dict(zip(program.placeholders, program.inputs, strict=True))
        self.params = {i.name: i for i in program.inputs if i.kind == "param"}
        self.found: dict[_Held, Owed] = {}
        self.given: dict[fx.Node, Owed] = {}  # what a node that writes a gradient adds to the memory it writes to
        self.writers: dict[int, list[fx.Node]] = {}  # storage to the nodes that write to it, in order
        self.sums: dict[int, list[fx.Node]] = {}  # of these, the sums over ranks and what replaces all that was there

    def check(self) -> None:
        """Look at every use of a gradient."""
        for name, gradient, left, owed, where in self.used():
            self._check(name, gradient, left, owed, where)

    def used(self) -> Iterator[tuple[str, fx.Node, frozenset[str], Owed, str]]:
        """Every use of a gradient: of which parameter, what is used, the axes over which it may still be to be summed,
        the gradients that are in it, and where."""
        self._seeds()
        for node in self.program.graph.nodes:
            if info_of(node).role != "optimizer":
                continue
            for param, gradient in updates(node):
                name = self._owner(param)
                if name is not None:
                    where = f"{described(node)}, the update of {name},"
                    yield name, gradient, frozenset(), self._in(gradient, self.order[node]), where
        for out, node in zip(self.program.outputs, self.program.results, strict=True):
            if out.kind in ("grad", "reduced"):
                left = _partial(out.spec) if out.spec is not None else frozenset()
                where = f"output {out.kind} {out.name} (%{node.name})"
                yield out.name, node, left, self._in(node, len(self.order)), where

    def _in(self, gradient: fx.Node, at: int) -> Owed:
        return _owed_by_result(gradient, [self._owed(s) for s in self._latest(gradient, at)], sums=False)

    def _check(self, name: str, gradient: fx.Node, left: frozenset[str], owed: Owed, where: str) -> None:
        if 0 in checked_value(gradient).shape:
            return  # of several without elements in a buffer none is told from the others
        if name not in owed:
            other = f"that of {', '.join(sorted(owed)[:3])}" if owed else "not one that autograd gave"
            raise ProgramError(f"{where} gets %{gradient.name} as gradient of {name}; it is {other}")
        missing = owed[name] - left
        if missing:
            raise ProgramError(
                f"{where} gets a gradient of {name} that is not summed over {', '.join(sorted(missing))}: no reduction "
                f"lies between %{gradient.name} and where autograd gave it"
            )

    # -- where gradients come from --------------------------------------------------------------------

    def _seeds(self) -> None:
        for node in self.program.graph.nodes:
            given = self.inputs.get(node)
            if given is not None and (
                given.kind in ("accumulator", "reduced") or (given.kind == "edge" and given.owner)
            ):
                left = _partial(given.spec) if given.spec is not None else frozenset()
                self.found[node, None] = {given.owner or given.name: left}
            pairs = info_of(node).grad_of
            if pairs:
                declared = {name: self._declared(node, name, spec) for name, spec in pairs}
                writer = _writer(node)
                if writer is not None:
                    self.given[writer] = {**self.given.get(writer, _NOTHING), **declared}
                if writer is not node:
                    self.found[node, None] = declared
            if node.op == "call_function" and is_mutating(node):
                for storage in written(node):
                    self.writers.setdefault(storage, []).append(node)
                    if is_sum(node) or _replaces(node):
                        self.sums.setdefault(storage, []).append(node)

    def _declared(self, node: fx.Node, name: str, spec: Spec) -> frozenset[str]:
        """Axes over which a gradient is to be summed; its spec must be that of a gradient of the parameter."""
        given = self.params.get(name)  # None in a program that only flushes what others summed
        where = f"{described(node)} is the gradient of {name}"
        if given is not None and given.spec is not None and spec.shape != given.spec.shape:
            raise ProgramError(
                f"{where}, of shape {list(spec.shape)}; the parameter has shape {list(given.spec.shape)}"
            )
        value = checked_value(node)
        here = self.program.mesh.coordinate(self.program.rank)
        if value.shape != spec.local_shape(here):
            raise ProgramError(f"{where}: {spec!r} means {list(spec.local_shape(here))}; it has {list(value.shape)}")
        return _partial(spec)

    def _owner(self, node: fx.Node) -> str | None:
        """Name of the parameter whose memory, or a copy of it, a node gives."""
        while node.op == "call_function" and node.all_input_nodes:
            node = node.all_input_nodes[0]
        given = self.inputs.get(node)
        return given.name if given is not None and given.kind == "param" else None

    # -- what reaches a value -------------------------------------------------------------------------

    def _owed(self, held: _Held) -> Owed:
        """The gradients in a value; iterative, as chains are as long as buffers have entries."""
        stack = [held]
        while stack:
            at = stack[-1]
            if at in self.found:
                stack.pop()
                continue
            sources = list(self._sources(*at))
            open_ = [s for s in sources if s not in self.found]
            if open_:
                stack.extend(open_)
                continue
            self.found[at] = _owed_by_result(
                at[0], [*(self.found[s] for s in sources), self.given.get(at[0], _NOTHING)]
            )
            stack.pop()
        return self.found[held]

    def _sources(self, node: fx.Node, storage: int | None) -> Iterator[_Held]:
        """The values that a value is made of, as they are when it is made."""
        if node.op != "call_function" or info_of(node).role == "forward":
            return
        given = entry(node) if storage is None else _entries(node, storage)
        if _replaces(node):
            given = [n for n in node.all_input_nodes if n is not node.args[0]]
        for source in node.all_input_nodes if given is None else given:
            yield from self._latest(source, self.order[node])

    def _latest(self, source: fx.Node, at: int) -> Iterator[_Held]:
        """What a value holds when it is read at ``at``: itself, and the last write to its memory since it was made.

        That write follows on earlier ones.  A sum over ranks in place leaves nothing of what was there before it.
        """
        made = self.order[source]
        last, where, reduced = source, None, False
        for storage in storages(source):
            listed = self.writers.get(storage)
            if listed is None:
                continue
            i = bisect_left(listed, at, key=self.order.__getitem__)
            if i and self.order[listed[i - 1]] > self.order[last]:
                last, where = listed[i - 1], storage
            j = bisect_left(self.sums.get(storage, ()), at, key=self.order.__getitem__)
            reduced = reduced or bool(j and self.order[self.sums[storage][j - 1]] > made)
        if not reduced:
            yield source, None
        if last is not source:
            yield last, where


def _owed_by_result(node: fx.Node, sources: list[Owed], sums: bool = True) -> Owed:
    """What is in a value that a node makes of others."""
    full = [s for s in sources if s]
    if not full:
        return _NOTHING
    made: Owed = full[0]
    if len(full) > 1:
        merged: dict[str, frozenset[str]] = {}
        for source in full:
            for name, axes in source.items():
                merged[name] = merged.get(name, frozenset()) | axes
        made = merged
    if sums and is_sum(node):
        done = frozenset(str(node.args[-2]).split(","))
        return {name: axes - done for name, axes in made.items()}
    return made


def _writer(node: fx.Node) -> fx.Node | None:
    """The node that writes what a gradient is a view of into memory of others; None where it has memory of its own."""
    while node.op == "call_function" and not is_mutating(node):
        source = next((n for n in node.all_input_nodes if storages(n) and storages(n) == storages(node)), None)
        if source is None:
            return None
        node = source
    return node if node.op == "call_function" else None


def _replaces(node: fx.Node) -> bool:
    """Whether a node copies over all that some memory holds: through a view of a gradient, say."""
    value = value_of(node.args[0]) if node.target is torch.ops.aten.copy_.default else None  # type: ignore[arg-type]
    return value is not None and value.nbytes == torch.Size(value.shape).numel() * value.dtype.itemsize


def _partial(spec: Spec) -> frozenset[str]:
    """Axes over which there is something to sum: not those of one rank."""
    mesh, placements = spec.mesh, spec.layout.placements
    listed = zip(mesh.axes, mesh.sizes, placements, strict=True)
    return frozenset(axis for axis, n, p in listed if isinstance(p, Partial) and n > 1)


def entry(node: fx.Node) -> list[fx.Node] | None:
    """Of what is picked from an op on lists, the entries of its lists that it is made of."""
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or "_foreach_" not in str(source.target):
        return None
    i: Any = node.args[1]
    return [listed[i] for listed in _lists(source)]


def _entries(node: fx.Node, storage: int) -> list[fx.Node] | None:
    """Of an op on lists that writes to some of them, the entries that are what it leaves in this memory."""
    rows = zip(*_lists(node), strict=False)
    return [n for row in rows if any(storage in storages(n) for n in row) for n in row] or None


def _lists(node: fx.Node) -> list[list[fx.Node]]:
    """Its arguments that are lists of tensors."""
    return [a for a in node.args if isinstance(a, (list, tuple)) and a and all(isinstance(x, fx.Node) for x in a)]  # type: ignore[misc]


def updates(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(parameter, gradient) of each parameter that a fused update writes to."""
    names = [a.name for a in node.target._schema.arguments] if is_mutating(node) else []  # type: ignore[union-attr]
    if "grads" not in names or "self" not in names:
        return
    params, grads = (node.args[names.index(n)] for n in ("self", "grads"))
    yield from zip(params, grads, strict=True)  # type: ignore[arg-type]


__all__ = ["check_gradients", "entry", "owed_of_updates", "updates"]
