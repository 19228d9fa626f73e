"""The cut: a micro-step of all stages becomes the parts that one stage runs, and what they send each other.

What needs no parameter (masks, positions, the seed of the backward) belongs to no stage: each runs it by itself.  What
is made of stored parameters alone (gathers, casts) is the same for all micro-batches.  All else has one stage, and is
part of the forward or of the backward.  What a backward needs of its forward is held.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from ...collective import ALL_GATHER, COLLECTIVES
from ...errors import PassError
from ...layout import At
from .inplace import follow, storages, written
from .nodes import VIEWS, NodeInfo, annotate, checked_value, draws, info_of, is_mutating, target_name, value_of
from .program import Input, Message, Output, Program
from .schedules import StagePart
from .subgraphs import RECOMPUTATION, of_forward

aten = torch.ops.aten


@dataclass(frozen=True)
class StageParts:
    """What a step of micro-batches falls into.

    Attributes:
        parts: of each stage that was asked for, by name.
        messages: between all stages.
        gathered: of each stage, the bytes of what is made of stored parameters for several micro-batches.
        left: of each stage, the bytes that ``F`` leaves for the backward of its micro-batch, and ``I`` besides.
    """

    parts: Mapping[int, Mapping[StagePart, Program]]
    messages: tuple[Message, ...]
    gathered: Mapping[int, int]
    left: Mapping[int, tuple[int, int]]


def cut(program: Program, axis: str, stages: Sequence[int], split: bool, gathers: bool = True) -> StageParts:
    """Cut the program of a micro-step, which adds up gradients.

    Args:
        program: is changed.
        axis: over which the stages are.
        stages: whose parts are made.
        split: whether the backward is cut into ``I``, what is sent on needs, and ``W``, the rest.
        gathers: whether gathers of stored parameters are taken out of the parts that each micro-batch runs.

    Raises:
        PassError: what cannot be cut, with the user's line.
    """
    made = _Cut(program, axis, gathers)
    sent = list(made.messages())
    parts = {s: made.run(s, split, sent) for s in stages}
    left = {s: made.left(s, split, sent) for s in made.by_stage if s is not None}
    return StageParts(parts, (*made.stored_sent, *(m for m, _ in sent)), made.gathered(), left)


@dataclass(frozen=True)
class _Stored:
    """What was made of a stored parameter alone: nodes of which this is the same make the same.

    Attributes:
        name: the parameter, and what was done to it.
        home: the stage that has the parameter; None: all of them.
        way: the nodes, from the placeholder on.
    """

    name: str
    home: int | None
    way: tuple[fx.Node, ...]

    @property
    def made(self) -> bool:
        """Whether anything was done to it."""
        return any(n.target is not aten.alias.default for n in self.way[1:])


@dataclass(frozen=True)
class _Nodes:
    """What a stage computes of a micro-batch.

    Attributes:
        first, later: nodes of the forward and of the backward; ``sending``: of the latter, what is sent on needs.
        came, back: what other stages send; ``ahead``, ``behind``: what is sent to them.
        held: what the backward reads of the forward; ``kept``: and what follows ``I`` of that.
    """

    first: set[fx.Node]
    later: set[fx.Node]
    sending: set[fx.Node]
    came: Mapping[fx.Node, Input]
    back: Mapping[fx.Node, Input]
    held: Mapping[fx.Node, Input]
    kept: Mapping[fx.Node, Input]
    ahead: Sequence[tuple[Output, fx.Node]]
    behind: Sequence[tuple[Output, fx.Node]]


class _Cut:
    def __init__(self, program: Program, axis: str, gathers: bool) -> None:
        self.program, self.axis = program, axis
        given = list(zip(program.placeholders, program.inputs, strict=True))
        self.sums = {n: i for n, i in given if i.kind == "accumulator"}
        self.at_stage = {i.name: s for n, i in given if i.kind == "param" and (s := info_of(n).stage) is not None}
        self._stored_where_used()
        self.nodes = [n for n in program.graph.nodes if n.op == "call_function"]
        self.at: dict[fx.Node, int | None] = {}
        self.forward: dict[fx.Node, bool] = {}
        for node in self.nodes:
            self._place(node)
        self._check_draws()
        views = self._views()
        for node in reversed(self.nodes):
            sends = node.target in COLLECTIVES and bool(info_of(node).gather) and not gathers
            if sends or node in views or node.target is aten.expand.default or self._seen_against(node):
                self._gather_at_use(node)
            elif self._runs_again_later(node):
                self._gather_at_use(node, later=True)
        self.stored = self._stored(gathers)
        self.nodes = [n for n in program.graph.nodes if n.op == "call_function" and n not in self.stored]
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.by_stage: dict[int | None, list[fx.Node]] = {}
        for node in self.nodes:
            self.by_stage.setdefault(self.at[node], []).append(node)
        self.given = {s for n in program.placeholders for s in storages(n)}
        self.wanted = self._wanted()
        # Of a parameter that goes to another stage, by that and by what goes there.
        self.sent = dict[tuple[int, str], tuple[Message, _Stored]]()
        for stage, wanted in self.wanted.items():
            for one in wanted.values():
                self._send(one, stage)
        self._check_writes()

    @property
    def stored_sent(self) -> list[Message]:
        """Parameters that stages send to others, once for all micro-batches."""
        return [m for m, _ in self.sent.values()]

    def gathered(self) -> dict[int, int]:
        """Bytes of what each stage makes of stored parameters."""
        found: dict[int, dict[int, int]] = {}
        for stage, wanted in self.wanted.items():
            ends = [w.way[-1] for w in wanted.values() if w.made and (stage, w.name) not in self.sent]
            found[stage] = {v.storage: v.size for v in map(checked_value, ends)}
        return {stage: sum(sizes.values()) for stage, sizes in found.items()}

    def run(self, stage: int, split: bool, sent: Sequence[tuple[Message, fx.Node]]) -> dict[StagePart, Program]:
        """The parts of a stage."""
        of = self._nodes_of(stage, split, sent)
        made = {
            **self._once(stage),
            StagePart.FORWARD: self._part(stage, of.first, of.came, [*of.ahead, *_outputs(of.held)]),
        }
        if not split:
            made[StagePart.BACKWARD] = self._part(stage, of.later, {**of.held, **of.back}, of.behind)
            return made
        made[StagePart.BACKWARD_INPUT] = self._part(
            stage, of.sending, {**of.held, **of.back}, [*of.behind, *_outputs(of.kept)]
        )
        made[StagePart.BACKWARD_WEIGHT] = self._part(stage, of.later - of.sending, {**of.held, **of.kept}, [])
        return made

    def left(self, stage: int, split: bool, sent: Sequence[tuple[Message, fx.Node]]) -> tuple[int, int]:
        """Bytes that ``F`` of a stage leaves for the backward of its micro-batch, and ``I`` besides."""
        of, given = self._nodes_of(stage, split, sent), {*self.given, *(s for n in self.stored for s in storages(n))}
        ahead = {v.storage: v.nbytes for v in map(checked_value, of.held)}
        between = {v.storage: v.nbytes for v in map(checked_value, of.kept) if v.storage not in ahead}
        first, then = (sum(n for s, n in found.items() if s not in given) for found in (ahead, between))
        return first, then

    def _nodes_of(self, stage: int, split: bool, sent: Sequence[tuple[Message, fx.Node]]) -> _Nodes:
        came = {n: Input(m.name, "edge") for m, n in sent if m.dst == stage and m.part is StagePart.FORWARD}
        back = {n: Input(m.name, "edge") for m, n in sent if m.dst == stage and m.part is StagePart.BACKWARD}
        ahead = [(Output(m.name, "edge"), n) for m, n in sent if m.src == stage and m.part is StagePart.FORWARD]
        behind = [(Output(m.name, "edge"), n) for m, n in sent if m.src == stage and m.part is StagePart.BACKWARD]
        mine, free = self.by_stage.get(stage, []), self.by_stage.get(None, [])
        later = self._live([n for n in mine if not self.forward[n]], {n for n in free if not self.forward[n]}, behind)
        first = self._live(
            [*(n for n in mine if self.forward[n]), *(n for n in free if draws(n) and self.forward[n]),
             *(n for n in self._read(later, behind) if n in self.forward and self.forward[n] and self.at[n] is None)],
            {n for n in free if self.forward[n]}, ahead,
        )  # fmt: skip
        held = self._held(first | came.keys(), self._read(later, behind))
        sending, kept = set[fx.Node](), dict[fx.Node, Input]()
        if split:
            sending = self._live([], later, behind)
            sending |= {n for n in later if n.target is operator.getitem and n.args[0] in sending}
            kept = self._held(sending | back.keys(), self._read(later - sending, ()))
        return _Nodes(first, later, sending, came, back, held, kept, ahead, behind)

    # -- which stage ----------------------------------------------------------------------------------

    def _stored_where_used(self) -> None:
        """A stage has its parameters: nothing is gathered over the axis."""
        seen: dict[Any, fx.Node] = {}
        for node in list(self.program.graph.nodes):
            axes = str(node.args[-2]).split(",") if node.target in COLLECTIVES else []
            if self.axis not in axes:
                continue
            if COLLECTIVES[node.target] is not ALL_GATHER or not info_of(node).gather or len(axes) > 1:
                raise PassError(
                    f"{_where(node)}: {target_name(node.target)} over {self.axis}, the axis of the stages: a pipeline "
                    "sends activations over it, and nothing else"
                )
            source: Any = node.args[0]
            way = [source]  # copies and casts, back to what is stored
            while way[-1].op == "call_function":
                way.append(way[-1].all_input_nodes[0])
            home = info_of(way[-1]).stage
            if source in seen:
                node.replace_all_uses_with(seen[source])
                self.program.graph.erase_node(node)
                continue
            node.target, node.args = aten.alias.default, (source,)
            annotate(node, stage=home, cause=None)
            for other in way[:-1]:
                annotate(other, stage=home)
            if source is way[-1]:
                annotate(node, role="forward")
                seen[source] = node
        follow(self.program.graph)

    def _check_draws(self) -> None:
        """Raises PassError for numbers that one stage alone can draw: then the others would draw other ones behind."""
        for node in self.nodes:
            own = self.forward[node] and self.at[node] is not None and draws(node)
            if own and str(node.target).startswith("aten."):
                raise PassError(
                    f"{_where(node)}: {target_name(node.target)} draws random numbers by values that stage "
                    f"{self.at[node]} alone has, so the stages would draw different numbers from there on. Draw from "
                    "fixed sizes (torch.rand) and compute what you need of that, or take schedule=uncut."
                )

    def _views(self) -> set[fx.Node]:
        """Views of what is made of stored parameters."""
        params = {n for n, i in zip(self.program.placeholders, self.program.inputs, strict=True) if i.kind == "param"}
        found: set[fx.Node] = set()
        for node in self.nodes:
            (source, *more) = node.all_input_nodes or [node]
            stored = source in found or source in params or info_of(source).gather
            if stored and not more and node.target in VIEWS and not info_of(node).gather:
                found.add(node)
        return found

    def _gather_at_use(self, node: fx.Node, later: bool = False) -> None:
        """Each stage that uses a parameter gathers it over other axes, and looks at it: what is stored crosses, and no
        whole.  So does a number that is repeated.

        Args:
            later: only stages behind the one that has the node.
        """
        at = self.at[node]
        others = {s for u in node.users if (s := self.at.get(u)) is not None} - {at}
        others = {s for s in others if at is None or s > at or not later}
        for stage in sorted(others) if self.at[node] is not None else ():
            with self.program.graph.inserting_after(node):
                made = self.program.graph.node_copy(node)
            annotate(made, stage=stage)
            self.at[made], self.forward[made] = stage, self.forward[node]
            for user in list(node.users):
                if user is not made and self.at[user] == stage:
                    user.replace_input_with(node, made)

    def _runs_again_later(self, node: fx.Node) -> bool:
        """Whether a node runs again for backwards of later stages: they run first, and have its inputs."""
        return info_of(node).role == RECOMPUTATION and not (draws(node) or is_mutating(node))

    def _seen_against(self, node: fx.Node) -> bool:
        """Whether a node looks at a value in the way of a stage that runs later: others, which run before, look too."""
        at = self.at[node]
        if at is None or node.target not in VIEWS or len(node.all_input_nodes) != 1:
            return False
        users = [s for u in node.users if (s := self.at.get(u)) is not None]
        return any(s < at if self.forward[node] else s > at for s in users)

    def _place(self, node: fx.Node) -> None:
        """The stage of a node, and whether it is part of the forward."""
        info = info_of(node)
        self.forward[node] = info.role == "forward"
        if node.target is operator.getitem:
            source: Any = node.args[0]
            self.at[node], self.forward[node] = self.at[source], self.forward[source]
            return
        known = [s for n in node.all_input_nodes if (s := self.at.get(n)) is not None]
        if info.stage is not None:
            self.at[node] = info.stage
        else:
            known = known or self._summed_at(node)
            self.at[node] = None if not known else max(known) if of_forward(node) else min(known)

    def _summed_at(self, node: fx.Node) -> list[int]:
        """Where a gradient is added up that no value of a stage is part of: the same number for all batches."""
        held = [self.sums[n] for n in node.all_input_nodes if n in self.sums] if is_mutating(node) else []
        return [self.at_stage.get(given.owner or given.name, 0) for given in held]

    def _check_writes(self) -> None:
        """Raises PassError for what is written at one stage and seen at another one."""
        seen: dict[int, set[int]] = {}
        held = {s: i for n, i in zip(self.program.placeholders, self.program.inputs, strict=True) for s in storages(n)}
        for node in self.nodes:
            stage = self.at[node]
            for s in {s for n in (node, *node.all_input_nodes) for s in storages(n)}:
                if stage is not None:
                    seen.setdefault(s, set()).add(stage)
        for node in self.nodes:
            for s in written(node):
                given = held.get(s)
                if given is not None and given.kind not in ("accumulator", "batch"):
                    raise PassError(
                        f"{_where(node)} writes to the {given.kind} {given.name}: in a pipeline other stages would not "
                        "see it: running statistics and the like cannot be cut yet"
                    )
                if len(seen.get(s, ())) > 1 and given is None:
                    raise PassError(
                        f"{_where(node)} writes to a value that stages {sorted(seen[s])} share: a write does not cross "
                        "a border; compute a new value there"
                    )

    # -- stored parameters ----------------------------------------------------------------------------

    def _stored(self, gathers: bool) -> dict[fx.Node, _Stored]:
        """What is made of stored parameters alone; without ``gathers`` in front of what other ranks have part in."""
        made: dict[fx.Node, _Stored] = {}
        for node, given in zip(self.program.placeholders, self.program.inputs, strict=True):
            if given.kind == "param":
                at = self.program.mesh.axis_index(self.axis)
                everywhere = given.spec is None or not isinstance(given.spec.layout.placements[at], At)
                made[node] = _Stored(given.name, None if everywhere else info_of(node).stage, (node,))
        for node in self.program.graph.nodes:
            (source, *more) = node.all_input_nodes or [None]
            if more or source not in made or not info_of(node).gather or is_mutating(node):
                continue
            before = made[source]
            if node.target is aten.alias.default:
                made[node] = replace(before, way=(*before.way, node))
            elif gathers or node.target not in COLLECTIVES:
                said = target_name(node.target), fx.map_arg((node.args, node.kwargs), lambda n: "")
                made[node] = _Stored(f"{before.name} {said}", before.home, (*before.way, node))
        return {n: one for n, one in made.items() if n.op == "call_function"}

    def _wanted(self) -> dict[int, dict[str, _Stored]]:
        """What of stored parameters each stage uses, by name."""
        found: dict[int, dict[str, _Stored]] = {}
        for node, one in self.stored.items():
            users = [u for u in node.users if u not in self.stored]
            stages = {s for u in users if (s := self.at.get(u)) is not None}
            if not node.users and node.target in COLLECTIVES:  # others of the stage may have a use for it
                stages = {s for s in (self.at[node],) if s is not None}
            for stage in sorted(stages):
                found.setdefault(stage, {}).setdefault(one.name, one)
        return found

    def _crossing(self, one: _Stored, stage: int) -> _Stored | None:
        """What of it comes to a stage from another one: what is there in front of a gather; None where it is made of
        the stage's own."""
        if one.home is None or one.home == stage:
            return None
        way = one.way  # behind the alias it is whole along the axis of the stages
        seen = next(i for i, n in enumerate(way) if n.target is aten.alias.default)
        gathered = next((i for i, n in enumerate(way) if n.target in COLLECTIVES), len(way))
        return self.stored[way[max(seen, gathered - 1)]]

    def _send(self, one: _Stored, stage: int) -> None:
        what = self._crossing(one, stage)
        if what is not None and what.home is not None and (stage, what.name) not in self.sent:
            number = sum((m.src, m.dst) == (what.home, stage) for m, _ in self.sent.values())
            size = checked_value(what.way[-1]).size
            self.sent[stage, what.name] = (
                Message(f"P {what.home}>{stage}.{number}", StagePart.SEND_PARAMS, what.home, stage, size),
                what,
            )

    def _source(self, node: fx.Node, stage: int) -> fx.Node | Input:
        """What a part of a stage reads in place of what is made of a stored parameter: the parameter, or an input."""
        one = self.stored[node]
        came = self.sent.get((stage, one.name))
        if came is not None:
            return Input(came[0].name, "gathered")
        return Input(one.name, "gathered") if one.made else one.way[0]

    def _once(self, stage: int) -> dict[StagePart, Program]:
        """The parts that a stage runs for all micro-batches together."""
        wanted = self.wanted.get(stage, {}).values()
        made = [(Output(w.name, "gathered"), w) for w in wanted if w.made and (stage, w.name) not in self.sent]
        sent = [(Output(m.name, "edge"), what) for m, what in self.sent.values() if m.src == stage]
        return {
            part: self._of_stored(stage, of)
            for part, of in ((StagePart.SEND_PARAMS, sent), (StagePart.UNSHARD, made))
            if of
        }

    def _of_stored(self, stage: int, wanted: Sequence[tuple[Output, _Stored]]) -> Program:
        """Some of what is made of stored parameters, as a program."""
        graph, inputs, made = fx.Graph(), list[Input](), dict[str, fx.Node]()
        own = dict(zip(self.program.placeholders, self.program.inputs, strict=True))
        ways: list[tuple[str, tuple[fx.Node, ...]]] = []
        for _, one in wanted:
            came = self._crossing(one, stage)
            start = one.way[0] if came is None else came.way[-1]
            given = own[start] if came is None else Input(self.sent[stage, came.name][0].name, "gathered")
            if given.name not in made:
                made[given.name] = graph.placeholder(start.name)
                annotate(made[given.name], role="input", value=checked_value(start))
                inputs.append(given)
            ways.append((given.name, one.way[one.way.index(start) + 1 :]))
        for (out, _), (name, way) in zip(wanted, ways, strict=True):
            for node in way:
                source, name = made[name], name if node.target is aten.alias.default else self.stored[node].name
                if name not in made:
                    copies = dict.fromkeys(node.all_input_nodes, source)
                    made[name] = graph.node_copy(node, copies.__getitem__)
            made[out.name] = made[name]
        graph.output(tuple(made[out.name] for out, _ in wanted))
        return replace(self.program, graph=graph, inputs=tuple(inputs), outputs=tuple(out for out, _ in wanted))

    # -- what crosses ---------------------------------------------------------------------------------

    def messages(self) -> Iterable[tuple[Message, fx.Node]]:
        """What crosses, and what gives it."""
        counts: dict[tuple[str, int, int], int] = {}
        for node in self.nodes:
            src = self.at[node]
            if src is None:
                continue
            for dst in sorted({s for u in node.users if (s := self.at.get(u)) is not None} - {src}):
                if not self.forward[node] and dst > src:
                    what = f"{info_of(node).gather}, seen for the backward" if info_of(node).gather else "a gradient"
                    raise PassError(
                        f"{_where(node)}: {what} at stage {src}, is used by stage {dst}, whose backward runs first: it "
                        "cannot cross (of a parameter: give reshard_after_forward=False, or use it at one stage)"
                    )
                if value_of(node) is None:
                    raise PassError(f"{_where(node)}: {target_name(node.target)}, several values, crosses a border")
                key = (StagePart.FORWARD if self.forward[node] and dst > src else StagePart.BACKWARD, src, dst)
                number = counts[key] = counts.get(key, -1) + 1
                yield Message(f"{key[0]} {src}>{dst}.{number}", *key, checked_value(node).size), node

    def _live(
        self, own: Iterable[fx.Node], others: Iterable[fx.Node], outputs: Sequence[tuple[Output, fx.Node]]
    ) -> set[fx.Node]:
        """Nodes, and what of others they need."""
        eligible, live = set(others), set(own)
        live.update(n for _, n in outputs if n in eligible)
        read = {s for _, n in outputs for s in storages(n)}
        for node in sorted(live | eligible, key=self.order.__getitem__, reverse=True):
            if node not in live and node in eligible and is_mutating(node) and not read.isdisjoint(written(node)):
                live.add(node)
            if node in live:
                for used in node.all_input_nodes:
                    read.update(storages(used))
                    if used in eligible:
                        live.add(used)
        return live

    def _read(self, nodes: set[fx.Node], outputs: Sequence[tuple[Output, fx.Node]]) -> list[fx.Node]:
        """What nodes read that is none of them, in order, but inputs of the program."""
        read = {u for n in nodes for u in n.all_input_nodes} | {n for _, n in outputs}
        return sorted((n for n in read - nodes if n in self.order), key=self.order.__getitem__)

    def _held(self, there: set[fx.Node], wanted: Iterable[fx.Node]) -> dict[fx.Node, Input]:
        return {n: Input(n.name, "held") for n in wanted if n in there}

    # -- parts ----------------------------------------------------------------------------------------

    def _part(
        self,
        stage: int,
        nodes: set[fx.Node],
        given: Mapping[fx.Node, Input],
        outputs: Sequence[tuple[Output, fx.Node]],
    ) -> Program:
        """Some nodes as a program.

        Args:
            given: values that others made, as inputs.
        """
        program, graph, inputs, made = self.program, fx.Graph(), list[Input](), dict[fx.Node, fx.Node]()
        read = {u for n in nodes for u in n.all_input_nodes} | {n for _, n in outputs}
        own: dict[fx.Node, Input] = dict(zip(program.placeholders, program.inputs, strict=True))
        stored = {n: self._source(n, stage) for n in self.stored if n in read}
        read.update(n for n in stored.values() if isinstance(n, fx.Node))
        places: dict[Input, fx.Node] = {}
        gathered = {n: one for n, one in stored.items() if isinstance(one, Input)}
        for node, one in {**own, **given, **gathered}.items():
            if node in read and node not in nodes:
                if one not in places:
                    places[one] = graph.placeholder(node.name)
                    annotate(places[one], role="input", value=checked_value(node))
                    inputs.append(one)
                made[node] = places[one]
        made.update((n, made[one]) for n, one in stored.items() if isinstance(one, fx.Node))
        for node in program.graph.nodes:
            if node in nodes:
                made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(tuple(made[n] for _, n in outputs))
        return replace(program, graph=graph, inputs=tuple(inputs), outputs=tuple(o for o, _ in outputs))


def _outputs(held: Mapping[fx.Node, Input]) -> list[tuple[Output, fx.Node]]:
    return [(Output(i.name, i.kind), n) for n, i in held.items()]


def _where(node: fx.Node) -> str:
    info: NodeInfo = info_of(node)
    return info.line or f"%{node.name}"


__all__ = ["StageParts", "cut"]
