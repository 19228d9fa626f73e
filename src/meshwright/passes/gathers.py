"""Gathers of parameters (ZeRO) in a program: those of a unit as one, started while the unit before computes.

Ranks must start collectives in one order, so a gather starts where one of the recorded gathers was: for what is
gathered for use, where the unit before is first used; for what an update leaves, behind that update, on the rank where
that is latest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from ..collective import ALL_GATHER, COLLECTIVES, STARTS, WAIT_OP, WIRE_ALL_GATHER, Fact
from ..layout import Wire, block_of, chunk_sizes, wire_from
from ..program.ir.inplace import storages, written
from ..program.ir.nodes import annotate, checked_value, info_of
from ..program.ir.packed import ROW, UNPACK
from ..program.ir.program import Program
from ..program.ir.subgraphs import Rewrite
from ..resharding.copies import TO_DEVICE
from ..shard.parameters.packing import Packing
from .agreement import check_alike
from .buckets import FusedBucket
from .order import is_fence

_WAY = (torch.ops.aten._to_copy.default, TO_DEVICE)  # what a parameter passes before it is gathered


class GatherView(NamedTuple):
    """The gather of a parameter as one rank sees it.

    Attributes:
        name: of the parameter; ``role``: of the gather.
        even: whether its parts are.
        ready: place of the last write to what is gathered; ``place``: of the gather.
    """

    name: str
    role: str
    even: bool
    ready: int
    place: int


GathersView = tuple[tuple[int, ...], tuple[GatherView, ...]]  # places of the other collectives, and the gathers


class Gathers(Rewrite):
    """Gathers of parameters, which run together and early.

    Args:
        program: its graph is changed by :meth:`run`.
        buckets: gradients that were reduced together: what their update leaves is gathered together.
        fuse: let a unit's parameters share a gather.
        overlap: start gathers early.
    """

    def __init__(self, program: Program, buckets: Sequence[FusedBucket], fuse: bool, overlap: bool) -> None:
        super().__init__(program)
        self.fuse, self.overlap = fuse, overlap
        self.bucket = {r.name: i for i, b in enumerate(buckets) for r in b.members}
        self.places: dict[fx.Node, fx.Node] = {}  # a gather to where starts that take its place go
        self.replaced: list[fx.Node] = []
        self.found = [
            n for n in self.graph.nodes
            if COLLECTIVES.get(n.target) in (ALL_GATHER, WIRE_ALL_GATHER) and info_of(n).gather
            # Behind another conversion it is left where it is.
            and (info_of(n).role == "optimizer" or _held(n).op == "placeholder")
        ]  # fmt: skip

    @property
    def view(self) -> GathersView:
        """As this rank sees them."""
        writes: dict[int, list[int]] = {}
        for node, i in self.order.items():
            for storage in written(node):
                writes.setdefault(storage, []).append(i)

        def ready(node: fx.Node) -> int:
            """Place of the last write ahead of a gather to what it reads."""
            place, found = self.order[node], self.order[_held(node)]
            for storage in storages(_held(node)):
                listed = writes.get(storage, [])
                if k := bisect_left(listed, place):
                    found = max(found, listed[k - 1])
            return found

        moved = {n for n in self.found if info_of(n).role == "optimizer"}
        fences = tuple(i for n, i in self.order.items() if is_fence(n) and n not in moved)
        return fences, tuple(
            GatherView(info_of(n).gather, info_of(n).role, _even(n), ready(n), self.order[n]) for n in self.found
        )

    def run(self, views: Mapping[int, GathersView]) -> tuple[Program, tuple[int, int], list[str]]:
        """The program with gathers that run as all ranks decide; how many it had and has, and those, in words.

        Args:
            views: of all ranks.

        Raises:
            DesyncError: ranks do not gather the same parameters.
        """
        check_alike({r: [Fact(f"{g.name} is gathered for the {g.role}") for g in v] for r, (_, v) in views.items()})
        even = {n: all(v[i].even for _, v in views.values()) for i, n in enumerate(self.found)}
        groups = self._groups(even)
        before: dict[str, list[fx.Node]] = {}
        for members in groups:
            role = info_of(members[0]).role
            if role != "optimizer":
                ahead = before.get(role, members)[0] if self.overlap else members[0]
                self._run(members, self.graph.inserting_before(self.places.get(ahead, ahead)))
                before[role] = members
        self._updated([g for g in groups if info_of(g[0]).role == "optimizer"], views)
        for node in self.replaced:
            self.graph.erase_node(node)
        words = [f"{' and '.join(info_of(n).gather for n in g)}: gathered for the {info_of(g[0]).role}" for g in groups]
        return self.done(), (sum(map(len, groups)), len(groups)), words

    def _groups(self, even: Mapping[fx.Node, bool]) -> list[list[fx.Node]]:
        """Gathers that run as one, in the order of the first of each.

        Args:
            even: of each, whether it has even parts on all ranks.
        """
        made: dict[Any, list[fx.Node]] = {}
        for node in self.found:
            info = info_of(node)
            shared: Any = info.unit or info.gather
            if info.role == "optimizer":
                shared = self.bucket.get(info.gather, info.gather)
            key = (info.role, shared if self.fuse and even[node] else node, checked_value(node).dtype, *node.args[3:])
            made.setdefault(key, []).append(node)
        return list(made.values())

    def _updated(self, groups: list[list[fx.Node]], views: Mapping[int, GathersView]) -> None:
        """Gathers of what updates leave: each starts behind its update."""
        number, nodes = {n: i for i, n in enumerate(self.found)}, list(self.order)
        of = [[number[n] for n in members] for members in groups]
        slots = [max(bisect_right(f, max(g[k].ready for k in ks)) for f, g in views.values()) for ks in of]
        listed = sorted(range(len(groups)), key=lambda i: (slots[i], i))
        places = {r: _places(view, [(slots[i], of[i]) for i in listed]) for r, view in views.items()}
        own, tail = places[self.program.rank], dict[int, fx.Node]()
        if not self.overlap or own is None or None in places.values():
            for members in groups:
                self._run(members, self.graph.inserting_before(members[0]))
            return
        for i, place in zip(listed, own, strict=True):
            tail[place] = self._run(groups[i], self.graph.inserting_after(tail.get(place, nodes[place])))

    def _run(self, members: list[fx.Node], where: Any) -> fx.Node:
        """Let gathers run as one, which starts where the graph inserts; the start."""
        first = members[0]
        values = [checked_value(n) for n in members]
        dims = [int(n.args[1]) for n in members]  # type: ignore[arg-type]
        n = len(first.args[2])  # type: ignore[arg-type]
        packing = Packing([v.shape for v in values], dims, (n,), block_of(_wire(first)))
        with where:
            started = self._start(members, packing)
        with self.before(first, info_of(first).beside()) as emit:
            waited = emit(WAIT_OP, started)
        self.places[first] = waited  # others start ahead of this wait
        if len(members) == 1:
            self._instead(first, waited)
            return started
        for node, value, dim, offset in zip(members, values, dims, packing.offsets, strict=True):
            with self.before(node, info_of(node).beside()) as emit:
                whole = emit(UNPACK.default, waited, list(value.shape), dim, n, offset)
            self._instead(node, whole)
        return started

    def _start(self, members: list[fx.Node], packing: Packing) -> fx.Node:
        first = members[0]
        info = info_of(first).beside()
        if len(members) == 1:
            made = self.emit(info, STARTS[first.target], *first.args)
            annotate(made, cause=info_of(first).cause)
            self._bring(first.all_input_nodes, made)
            return made
        chunks = [n.all_input_nodes[0] for n in members]
        row = self.emit(info, ROW.default, chunks, packing.offsets, packing.row)
        self._bring(chunks, row)
        with self.after(row, info) as emit:
            made = emit(STARTS[first.target], row, 0, packing.sizes, *first.args[3:])
        names = [info_of(n).gather for n in members]
        op, why = f"{names[0]} ... {names[-1]}", f"{len(names)} parameters are gathered together"
        annotate(made, cause=self.sent_together(members, made, op, ("split", "whole"), why))
        return made

    def _bring(self, chunks: Sequence[fx.Node], user: fx.Node) -> None:
        """Have copies and casts of what is gathered come with what sends it."""
        for node in chunks:
            for passed in reversed(_way(node)):
                user.prepend(passed)

    def _instead(self, node: fx.Node, made: fx.Node) -> None:
        annotate(made, spec=info_of(node).spec)
        node.replace_all_uses_with(made)
        self.replaced.append(node)


def _even(gather: fx.Node) -> bool:
    sizes, dim = list(gather.args[2]), gather.args[1]  # type: ignore[arg-type]
    return sizes == chunk_sizes(checked_value(gather).shape[dim], len(sizes))  # type: ignore[index]


def _places(view: GathersView, groups: Sequence[tuple[int, Sequence[int]]]) -> list[int] | None:
    """Places behind which gathers start on a rank, one after the other; None where one would be too late.

    Args:
        groups: the fences behind which each starts, and the numbers of its members.
    """
    (fences, gathers), at, made = view, -1, list[int]()
    for slot, members in groups:
        at = max([at, *(gathers[k].ready for k in members), *fences[max(slot - 1, 0) : slot]])
        if at >= min(gathers[k].place for k in members):
            return None
        made.append(at)
    return made


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


__all__ = ["GatherView", "Gathers"]
