"""Gathers of parameters (ZeRO) in a program: those of a unit as one, started while the unit before computes.

Ranks must start collectives in one order, so a gather starts where one of the recorded gathers was: for what is
gathered for use, where the unit before is first used; for what an update leaves, right behind that update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from ..collective import ALL_GATHER, COLLECTIVES, STARTS, WAIT_OP, WIRE_ALL_GATHER
from ..layout import Wire, block_of, chunk_sizes, wire_from
from ..program.ir.inplace import storages, written
from ..program.ir.nodes import Value, annotate, call, checked_value, info_of
from ..program.ir.packed import ROW, UNPACK
from ..program.ir.program import Program
from ..program.ir.subgraphs import Rewrite
from ..resharding.copies import TO_DEVICE
from ..shard.parameters.packing import Packing
from .buckets import FusedBucket


def gathered(
    program: Program, buckets: Sequence[FusedBucket], fuse: bool, overlap: bool
) -> tuple[Program, tuple[int, int]]:
    """The program, whose graph is changed, and how many gathers of parameters it had and has.

    Args:
        buckets: gradients that were reduced together: what their update leaves is gathered together.
        fuse: let a unit's parameters share a gather.
        overlap: start gathers early.
    """
    made = _Gathers(program, {name: i for i, b in enumerate(buckets) for r in b.members for name in (r.name,)})
    groups = made.groups(fuse)
    before: dict[str, list[fx.Node]] = {}
    for members in groups:
        role = info_of(members[0]).role
        made.run(members, before.get(role, members)[0] if overlap and role != "optimizer" else None, overlap)
        before[role] = members
    for node in made.replaced:
        program.graph.erase_node(node)
    return made.done(), (sum(map(len, groups)), len(groups))


_WAY = (torch.ops.aten._to_copy.default, TO_DEVICE)  # what a parameter passes before it is gathered


class _Gathers(Rewrite):
    def __init__(self, program: Program, bucket: dict[str, int]) -> None:
        super().__init__(program)
        self.bucket = bucket
        self.places: dict[fx.Node, fx.Node] = {}  # a gather to where starts that take its place go
        self.replaced: list[fx.Node] = []

    def groups(self, fuse: bool) -> list[list[fx.Node]]:
        """Gathers that run as one, in the order of the first of each."""
        found: dict[Any, list[fx.Node]] = {}
        for node in self.graph.nodes:
            info = info_of(node)
            if COLLECTIVES.get(node.target) not in (ALL_GATHER, WIRE_ALL_GATHER) or not info.gather:
                continue
            value = checked_value(node)
            if info.role == "optimizer":
                shared: Any = self.bucket.get(info.gather, info.gather)
            elif _held(node).op != "placeholder":
                continue  # behind another conversion: left where it is
            else:
                shared = info.unit or info.gather
            even = list(node.args[2]) == chunk_sizes(value.shape[node.args[1]], len(node.args[2]))
            key = (info.role, shared if fuse and even else node, value.dtype, *node.args[3:])  # format, ranks
            found.setdefault(key, []).append(node)
        return list(found.values())

    def run(self, members: list[fx.Node], ahead: fx.Node | None, overlap: bool) -> None:
        """Let gathers run as one.

        Args:
            ahead: start where this gather was; None: as soon as what is gathered is there.
        """
        first = members[0]
        if ahead is not None:
            where = self.graph.inserting_before(self.places.get(ahead, ahead))
        elif overlap:
            where = self.graph.inserting_after(self._last_write(members))
        else:
            where = self.graph.inserting_before(first)
        values = [checked_value(n) for n in members]
        dims = [int(n.args[1]) for n in members]  # type: ignore[arg-type]
        n = len(first.args[2])  # type: ignore[arg-type]
        packing = Packing([v.shape for v in values], dims, (n,), block_of(_wire(first)))
        with where:
            started = self._start(members, packing)
        with self.graph.inserting_before(first):
            waited = self._node(first, WAIT_OP, (started,), checked_value(started))
        self.places[first] = waited  # others start ahead of this wait
        if len(members) == 1:
            self._instead(first, waited)
            return
        for node, value, dim, offset in zip(members, values, dims, packing.offsets, strict=True):
            with self.graph.inserting_before(node):
                args = (waited, list(value.shape), dim, n, offset)
                whole = self._node(node, UNPACK.default, args, self.value(value.shape, value.dtype))
            self._instead(node, whole)

    def _start(self, members: list[fx.Node], packing: Packing) -> fx.Node:
        first, value = members[0], checked_value(members[0])
        if len(members) == 1:
            made = self._node(first, STARTS[first.target], first.args, self.value(value.shape, value.dtype))
            annotate(made, cause=info_of(first).cause)
            self._bring(first.all_input_nodes, made)
            return made
        chunks = [n.all_input_nodes[0] for n in members]
        args = (chunks, packing.offsets, packing.row)
        row = self._node(first, ROW.default, args, self.value((packing.row,), value.dtype))
        self._bring(chunks, row)
        given = (row, 0, packing.sizes, *first.args[3:])
        with self.graph.inserting_after(row):
            whole = self.value((packing.n * packing.row,), value.dtype)
            made = self._node(first, STARTS[first.target], given, whole)
        names = [info_of(n).gather for n in members]
        op, why = f"{names[0]} ... {names[-1]}", f"{len(names)} parameters are gathered together"
        annotate(made, cause=self.sent_together(members, made, op, ("split", "whole"), why))
        return made

    def _bring(self, chunks: Sequence[fx.Node], user: fx.Node) -> None:
        """Have copies and casts of what is gathered come with what sends it."""
        for node in chunks:
            for passed in reversed(_way(node)):
                user.prepend(passed)

    def _last_write(self, members: list[fx.Node]) -> fx.Node:
        read = {s for n in members for s in storages(_held(n))}
        last = max(map(_held, members), key=self.order.__getitem__)
        first = min(self.order[n] for n in members)
        writes = [n for n, i in self.order.items() if i < first and not read.isdisjoint(written(n))]
        return max([last, *writes], key=self.order.__getitem__)

    def _node(self, like: fx.Node, target: Any, args: tuple[Any, ...], value: Value) -> fx.Node:
        return call(self.graph, target, args, info_of(like).beside(value))

    def _instead(self, node: fx.Node, made: fx.Node) -> None:
        annotate(made, spec=info_of(node).spec)
        node.replace_all_uses_with(made)
        self.replaced.append(node)


def _wire(gather: fx.Node) -> Wire | None:
    """In what a gather sends, where that is not as its value is."""
    wire = COLLECTIVES[gather.target].named(gather.args[1:-2]).get("wire")
    return None if wire is None else wire_from(wire)


def _held(gather: fx.Node) -> fx.Node:
    """What a gather reads, in front of copies and casts."""
    node = gather.all_input_nodes[0]
    passed = _way(node)
    return passed[-1].all_input_nodes[0] if passed else node


def _way(node: fx.Node) -> list[fx.Node]:
    """A node and those before it that copy or cast, from the last to the first."""
    found: list[fx.Node] = []
    while node.target in _WAY:
        found.append(node)
        node = node.all_input_nodes[0]
    return found


__all__ = ["gathered"]
