"""Run checkpointed regions again for the backward, instead of keeping in between what they computed.

Where the backward of a region begins, its nodes are repeated from the region's inputs, as far as the backward needs
what they give.  What cannot be had again is kept: what a policy saves, what was computed from memory that has been
written to since.  Random numbers are kept where they are few (the seed of a dropout), else drawn again from the state
in which the generator was.  Writes to memory from outside (running statistics) happen once.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ..operators import operator as operator_of
from ..program.ir.inplace import storages, written
from ..program.ir.nodes import VIEWS, NodeInfo, annotate, info_of, is_mutating, remove_dead
from ..program.ir.nodes import draws as random
from ..program.ir.program import Program
from ..program.ir.subgraphs import RECOMPUTATION, Rewrite, copied, read_instead
from ..ranks.generators import random_states, set_random_states
from .pass_manager import Pass, PassRecord, register

aten = torch.ops.aten
Tensor = torch.Tensor

# Training, they write to their arguments 3 and 4, running statistics, without saying so.
_STATISTICS = {
    aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default,
    aten.batch_norm_gather_stats.default, aten.batch_norm_gather_stats_with_counts.default,
}  # fmt: skip

_STATE = torch.default_generator.get_state().numel()
_SEEDED = torch.Tag.nondeterministic_seeded  # they keep their place among what draws


def _get_state(device: str) -> Tensor:
    return torch.cat([*random_states(device).values()])


def _set_state(state: Tensor, device: str) -> None:
    set_random_states({"cpu": state[:_STATE], **({} if device == "cpu" else {device: state[_STATE:]})})


GET_STATE = operator_of(
    "random_state(str device) -> Tensor", _get_state,
    lambda device: torch.empty(_STATE, dtype=torch.uint8, device="cpu"), _SEEDED,
)  # fmt: skip
SET_STATE = operator_of(
    "set_random_state(Tensor state, str device) -> ()", _set_state, lambda state, device: None, _SEEDED
)  # fmt: skip


@register
@dataclass(frozen=True)
class Recompute(Pass):
    """Run checkpointed calls again for the backward.  Every captured step has it, where the model has such calls."""

    name = "recompute"
    before = ("split-checkpoints", "reshard-after-forward", "gradient-merge", "data-parallel-optimization")

    def applies(self, program: Program) -> bool:
        """Whether there are checkpointed calls that nothing was done with."""
        return any(info_of(n).regions for n in program.graph.nodes)

    def apply(self, program: Program) -> tuple[Program, PassRecord]:
        """The program in which the backward of each checkpointed call begins with a repetition of it."""
        made = Rewrite(copied(program))
        depth = max((len(info_of(n).regions) for n in made.graph.nodes), default=0)
        for d in range(depth):  # what an inner region needs is there once the outer one runs again
            _Depth(made, d).run(program.mesh.device == "cpu")  # elsewhere no random numbers are drawn again
        _sweep(made.graph)
        remove_dead(made.graph)
        calls = {info_of(n).regions[:1] for n in made.graph.nodes} - {()}
        for node in made.graph.nodes:  # what split-checkpoints needs to know stays
            annotate(node, regions=tuple([r for r in info_of(node).regions[:1] if r.split]), saved=())
        again = [n for n in made.graph.nodes if info_of(n).role == RECOMPUTATION]
        nbytes = sum(_bytes(n) for n in again if not _looks(n) and not is_mutating(n))
        summary = f"{len(again)} nodes of {len(calls)} checkpointed calls run again for the backward"
        details = {"calls": len(calls), "nodes": len(again), "bytes": nbytes}
        return made.done(), PassRecord(summary, (f"they make {nbytes} bytes again on this rank",), details)


class _Depth:
    """The regions of one depth of nesting."""

    def __init__(self, rewrite: Rewrite, depth: int) -> None:
        self.rewrite, self.graph = rewrite, rewrite.graph
        self.order = {n: i for i, n in enumerate(self.graph.nodes)}
        self.born: dict[int, fx.Node] = {}  # storage to the first node that has it
        self.writes: dict[int, list[int]] = defaultdict(list)  # and to the places at which it is written
        self.members: dict[Any, dict[fx.Node, None]] = defaultdict(dict)  # region to what its forward made
        self.readers: dict[Any, list[fx.Node]] = defaultdict(list)  # and to its backward
        home: dict[Any, Any] = {}  # node to its region
        for node, i in self.order.items():
            for s in storages(node):
                self.born.setdefault(s, node)
            for s in written(node):
                self.writes[s].append(i)
            regions = info_of(node).regions
            region = regions[depth] if len(regions) > depth else None
            backward = info_of(node).role == "backward"
            if backward and _looks(node) and node.args[0] in home:
                region = home[node.args[0]]  # the backward's view of what the region made
            elif backward:
                self.readers[region].append(node)
                continue
            if region is not None:
                self.members[region][node] = None
                home[node] = region

    def run(self, draw: bool) -> None:
        """Repeat every region that has a backward.

        Args:
            draw: draw random numbers again, if there are many.
        """
        for region, members in self.members.items():
            readers = self.readers.get(region)
            if not readers:
                continue
            at, drawn = self.order[readers[0]], _drawn(members) if draw else []
            if sum(map(_bytes, drawn)) <= _STATE:
                drawn = []
            kept = self._not_recomputed(region, members, at, drawn)
            if not kept.isdisjoint(drawn):  # all or none: each draws behind the one before
                drawn = []
                kept = self._not_recomputed(region, members, at, drawn)
            self._repeat(self._needed(members, kept, readers, drawn), readers, drawn)

    def _not_recomputed(self, region: Any, members: dict[fx.Node, None], at: int, drawn: list[fx.Node]) -> set[fx.Node]:
        """What is not computed again at a place, where these draw their numbers again."""
        fresh = {s for n in members for s in storages(n) if self.born[s] in members}
        held, kept = set[int](), set[fx.Node]()
        more = True
        while more:
            more = False
            for node in members:
                own = {*storages(node), *written(node)}
                if node in kept or not (
                    (random(node) and node not in drawn) or region in info_of(node).saved
                    or not written(node) <= fresh or not own.isdisjoint(held)
                    or self._changed(node, fresh - held, at)
                ):  # fmt: skip
                    continue
                kept.add(node)
                held |= own & fresh
                more = True
        return kept

    def _changed(self, node: fx.Node, again: set[int], at: int) -> bool:
        """Whether memory that a node read, and that nobody makes again, is written to before a place."""
        for s in {s for n in node.all_input_nodes for s in storages(n)} - again:
            places = self.writes.get(s, ())
            i = bisect_right(places, self.order[node])
            if i < len(places) and places[i] < at:
                return True
        return False

    def _needed(
        self, members: dict[fx.Node, None], kept: set[fx.Node], readers: list[fx.Node], drawn: list[fx.Node]
    ) -> list[fx.Node]:
        """What must run again for the readers, writes and what else draws included, in order."""
        wanted = {n for r in readers for n in r.all_input_nodes if n in members and n not in kept}.union(drawn)
        read = {s for n in wanted for s in storages(n)}
        found = []
        for node in reversed(members):
            if node in kept or not (node in wanted or (is_mutating(node) and not read.isdisjoint(written(node)))):
                continue
            found.append(node)
            for used in node.all_input_nodes:
                if used in members and used not in kept:
                    wanted.add(used)
                    read.update(storages(used))
        return found[::-1]

    def _repeat(self, again: list[fx.Node], readers: list[fx.Node], drawn: list[fx.Node]) -> None:
        with self._drawing_again(drawn, readers[0]):
            made = self.rewrite.again(again, readers[0], RECOMPUTATION, "run again for the backward: ")
        for node, copy in made.items():
            if node.target in _STATISTICS and node.args[5]:
                copy.args = (*copy.args[:3], None, None, *copy.args[5:])
        read_instead(readers, made)

    @contextmanager
    def _drawing_again(self, drawn: list[fx.Node], reader: fx.Node) -> Iterator[None]:
        """Around new nodes in front of a reader: they draw the numbers that these drew."""
        if not drawn:
            yield
            return
        before, now = self._state(drawn[0], info_of(drawn[0]).role), self._state(reader, RECOMPUTATION)
        self._set(reader, before)
        yield
        self._set(reader, now)

    def _state(self, node: fx.Node, role: str) -> fx.Node:
        """The generator's state in front of a node."""
        with self.rewrite.before(node, NodeInfo(role)) as emit:
            return emit(GET_STATE.default, self.rewrite.device)

    def _set(self, node: fx.Node, state: fx.Node) -> None:
        with self.rewrite.before(node, NodeInfo(RECOMPUTATION)) as emit:
            emit(SET_STATE.default, state, self.rewrite.device)


def _drawn(members: Iterable[fx.Node]) -> list[fx.Node]:
    """What draws random numbers, in the last run of a region that there is: an outer one may run again already."""
    found = [n for n in members if random(n)]
    return [n for n in found if info_of(n).role == info_of(found[-1]).role]


def _bytes(node: fx.Node) -> int:
    return sum(v.nbytes for v in info_of(node).values)


def _looks(node: fx.Node) -> bool:
    """Whether a node gives a part or a view of its first input."""
    return node.target in VIEWS or node.target is operator.getitem


def _sweep(graph: fx.Graph) -> None:
    """Remove repetitions that only others had needed which are gone: of regions inside of regions."""
    read = set[int]()
    for node in reversed(list(graph.nodes)):
        if info_of(node).role == RECOMPUTATION and not (node.users or random(node)) and read.isdisjoint(written(node)):
            graph.erase_node(node)
        else:
            read.update(s for n in node.all_input_nodes for s in storages(n))


__all__ = ["Recompute"]
