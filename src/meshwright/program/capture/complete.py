"""Completion: layouts for every value of a captured graph, from the few that the user gave.

Layouts travel along the factors of the ops' rules, from operands to results and back, one mesh axis at a time, until
nothing changes: the propagation of GSPMD (Xu et al., 2021) and Shardy, on the notation that dispatch reads.  What
the user said is never changed.  Where operands disagree, those that the user named decide, then bytes, then the order
of the operands.  What nothing reaches stays replicated; what lies between is then decided by dispatch, forward.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ... import compat
from ...dispatch import make_rule, map_tensors, resolve, tensors_in
from ...errors import LayoutError, MeshwrightError
from ...layout import REPLICATE, Layout, Placement, Shard, Spec, crowded
from ...mesh import Mesh
from ...resharding.cost import held_bytes
from ...rules import Rule, Strategy
from ...strategy_selection import Search, Wanted
from ...tensor.graph_marks import CONSTRAIN, read_placements
from ..ir.program import Origin
from .export import Captured
from .source_lines import line_of

Tensor = torch.Tensor
Key = tuple[str, int]  # a node and which of its outputs
_Known = tuple[tuple[Placement | None, ...], ...]  # of the inputs, and of the outputs of an op
_Users = tuple[tuple[bool, ...], ...]

USER, REACHED = "user", "propagated"


@dataclass(frozen=True, slots=True)
class Decided:
    """A placement on one axis and where it came from."""

    placement: Placement
    source: str
    reason: str
    lost: tuple[str, ...] = ()


class Completing:
    """What is known of one value: per axis an entry, or None."""

    __slots__ = ("dtype", "entries", "mesh", "shape")

    def __init__(self, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.entries: list[Decided | None] = [None] * mesh.ndim
        self.mesh, self.shape, self.dtype = mesh, shape, dtype

    @property
    def placements(self) -> tuple[Placement | None, ...]:
        """What is known on each axis."""
        return tuple(None if e is None else e.placement for e in self.entries)

    @property
    def layout(self) -> Layout:
        """What is known, and replicated where nothing is."""
        return Layout(self.mesh, [p or REPLICATE for p in self.placements], ndim=len(self.shape))

    def spec(self) -> Spec:
        """The same as a spec; what is replicated may be taken in parts, which sends nothing."""
        return Spec(self.shape, self.dtype, self.layout, grad_partial_mask=self.mesh.everywhere)


@dataclass(frozen=True, slots=True)
class RuledNode:
    """One op: its rule, and the keys of the values that it reads and makes."""

    name: str
    where: str
    rule: Rule
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]


@dataclass(frozen=True)
class Completed:
    """Layouts of the graph's inputs, and where the layout of each value that has one came from.

    Attributes:
        layouts: name of a placeholder to its layout.
        constraints: name of a node to placements that the user gave it.
        origins: for every value that got a layout here.
        rounds: how often the graph was swept.
    """

    layouts: dict[str, Layout]
    constraints: dict[str, Any]
    origins: tuple[Origin, ...]
    rounds: int


def complete(captured: Captured, mesh: Mesh, constraints: Mapping[str, Any]) -> Completed:
    """Propagate what the user said.

    Args:
        constraints: name of a placeholder or node of the captured graph to placements; a ``Layout`` or a sequence fixes
            every axis, a mapping those that it names (for an input: the others too).

    Raises:
        LayoutError: placements that do not fit a value, or two users' words that contradict each other.
    """
    return Completion(captured, mesh).run(constraints)


class Completion:
    """The values, the ops between them, and the sweeps."""

    def __init__(self, captured: Captured, mesh: Mesh) -> None:
        self.captured, self.mesh = captured, mesh
        self.states: dict[Key, Completing] = {}
        self.same: dict[Key, Key] = {}  # tied inputs, and what getitem picks
        self.facts: list[RuledNode] = []
        self.constraints: dict[str, Any] = {}
        self._rules: dict[Any, Rule | None] = {}
        self._solved: dict[Any, Any] = {}
        self._values()

    # -- the graph as facts ---------------------------------------------------------------------------

    def _values(self) -> None:
        first: dict[int, str] = {}
        for source in self.captured.sources:
            known = first.setdefault(id(source.fake), source.node)
            if known != source.node:
                self.same[source.node, 0] = (known, 0)
            else:
                self._add((source.node, 0), source.fake)
        for node in self.captured.graph.nodes:
            if node.op != "call_function":
                continue
            value = node.meta.get("val")
            if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
                self.same[node.name, 0] = (node.args[0].name, int(node.args[1]))
            elif isinstance(value, Tensor):
                self._add((node.name, 0), value)
            elif isinstance(value, (tuple, list)):
                for i, v in enumerate(value):
                    if isinstance(v, Tensor):
                        self._add((node.name, i), v)
            fact = self._fact(node)
            if fact is not None:
                self.facts.append(fact)

    def _add(self, key: Key, t: Tensor) -> None:
        self.states[key] = Completing(self.mesh, tuple(t.shape), t.dtype)

    def _key(self, node: fx.Node) -> Key:
        key = (node.name, 0)
        return self.same.get(key, key)

    def _fact(self, node: fx.Node) -> RuledNode | None:
        if not isinstance(node.target, compat.OpOverload) or node.target is CONSTRAIN.default:
            return self._identity(node) if node.target is CONSTRAIN.default else None
        inputs: list[Key] = []
        fx.map_arg((node.args, node.kwargs), lambda n: inputs.append(self._key(n)))
        if not inputs or any(k not in self.states for k in inputs):
            return None
        rule = self._rule(node)
        if rule is None:
            return None
        outputs = [(node.name, i) for i in range(len(rule.outputs))]
        if any(k not in self.states for k in outputs):
            return None
        return RuledNode(node.name, line_of(node), rule, tuple(inputs), tuple(outputs))

    def _identity(self, node: fx.Node) -> RuledNode | None:
        assert isinstance(node.args[0], fx.Node)
        source, made = self._key(node.args[0]), (node.name, 0)
        letters = tuple((f"d{i}",) for i in range(len(self.states[made].shape)))
        sizes = {f"d{i}": n for i, n in enumerate(self.states[made].shape)}
        return RuledNode(
            node.name, line_of(node), Rule((letters,), (letters,), sizes, text="constrain"), (source,), (made,)
        )

    def _rule(self, node: fx.Node) -> Rule | None:
        """The rule of a call; repeated layers ask once."""
        target: Any = node.target
        key: Any = (target, _signature(node.args), _signature(node.kwargs))
        try:
            if key in self._rules:
                return self._rules[key]
        except TypeError:
            key = None
        op = resolve(target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        tensors = tensors_in((args, kwargs))
        whole = Layout(self.mesh)
        specs = [Spec(t.shape, t.dtype, whole) for t in tensors]
        made = None
        if op.composite is None and op.rule is not None:
            stand_in = map_tensors((tuple(args), dict(kwargs)), lambda t: t)
            made = make_rule(op, specs, *stand_in)
        if made is not None and len(made.inputs) != len(tensors):
            made = None
        if key is not None:
            self._rules[key] = made
        return made

    # -- the user's words -----------------------------------------------------------------------------

    def run(self, constraints: Mapping[str, Any]) -> Completed:
        """Take in what the user said, sweep until nothing changes, and read the inputs."""
        inputs = {s.node: s.name for s in self.captured.sources}
        for name, placements in constraints.items():
            self._say(name, placements, all_axes=name in inputs, label=inputs.get(name, name))
            if name not in inputs:
                self.constraints[name] = placements
        for node in self.captured.graph.find_nodes(op="call_function", target=CONSTRAIN.default):
            self._say(node.name, read_placements(node.args[1]), all_axes=False, label=f"constrain at {line_of(node)}")
        rounds = self._sweep()
        layouts = {s.node: self._layout((s.node, 0)) for s in self.captured.sources}
        return Completed(layouts, self.constraints, tuple(self._origins(inputs)), rounds)

    def _say(self, name: str, placements: Any, *, all_axes: bool, label: str) -> None:
        key = self.same.get((name, 0), (name, 0))
        state = self.states[key]
        try:
            layout = Layout(self.mesh, placements, ndim=len(state.shape))
        except MeshwrightError as error:
            error.args = (f"{label}, of shape {state.shape}: {error}",)
            raise
        some = isinstance(placements, Mapping) and not all_axes
        for a in sorted(map(self.mesh.axis_index, placements)) if some else range(self.mesh.ndim):
            p, old = layout.placements[a], state.entries[a]
            if old is not None and old.placement != p:
                raise LayoutError(
                    f"contradiction: {label} is said to be {p!r} on {self.mesh.axes[a]!r}, but {old.reason} says "
                    f"{old.placement!r}: name one of them only (tied weights have one layout)"
                )
            state.entries[a] = Decided(p, USER, label)

    # -- sweeping -------------------------------------------------------------------------------------

    def _sweep(self) -> int:
        rounds = 0
        dirty = True
        while dirty:
            dirty = False
            for facts in (self.facts, self.facts[::-1]):
                rounds += 1
                changed = False
                for fact in facts:
                    for a in range(self.mesh.ndim):
                        changed |= self._propagate(fact, a)
                dirty |= changed
        return rounds

    def _propagate(self, fact: RuledNode, axis: int) -> bool:
        states = [self.states[k] for k in fact.inputs], [self.states[k] for k in fact.outputs]
        known = tuple(tuple(s.placements[axis] for s in side) for side in states)
        if not any(isinstance(p, Shard) for side in known for p in side):
            return False
        if all(p is not None for side in known for p in side):
            return False
        users = tuple(
            tuple(e is not None and e.source == USER for e in (s.entries[axis] for s in side)) for side in states
        )
        key = (id(fact.rule), axis, tuple(tuple(s.placements for s in side) for side in states), users)
        found = self._solved.get(key)
        if found is None:
            found = self._solved[key] = self._solve(fact.rule, axis, known, users, states)
        strategy, lost = found
        if strategy is None:
            return False
        changed = False
        for side, wanted in zip(states, (strategy.inputs, strategy.outputs), strict=True):
            for state, p in zip(side, wanted, strict=True):
                if crowded([*(q for q in state.placements if q is not None), p]):
                    continue
                if state.entries[axis] is None and isinstance(p, Shard):
                    reason = f"{fact.name} ({fact.rule.text}) by {strategy.factor}" + (
                        f" at {fact.where}" if fact.where else ""
                    )
                    state.entries[axis] = Decided(p, REACHED, reason, lost)
                    changed = True
        return changed

    def _solve(
        self,
        rule: Rule,
        axis: int,
        known: _Known,
        users: _Users,
        states: tuple[Sequence[Completing], Sequence[Completing]],
    ) -> tuple[Strategy | None, tuple[str, ...]]:
        """The strategy that what is known suggests, and those that lost.

        First come those with which most of the user's own placements agree, then the cheapest.
        """
        given, hints = ([p or REPLICATE for p in side] for side in known)
        made = [s for s in rule.axis_strategies(given, hints) if s.factor]
        if not made:
            return None, ()
        ins, outs = ([s.spec() for s in side] for side in states)
        hint = Wanted(tuple(None if p is None else s for p, s in zip(known[1], outs, strict=True)))
        search = Search(rule, ins, [(s.shape, s.dtype) for s in outs], hint=hint)
        held = [held_bytes(s, without=(axis,)) for s in outs]
        priced = []
        for i, s in enumerate(made):
            agree = sum(_agree(*side) for side in zip(known, users, (s.inputs, s.outputs), strict=True))
            priced.append((-agree, search.price(s, axis, held, index=i), s))
        priced.sort(key=lambda p: p[:2])
        lost = tuple(f"by {s.factor}: {-n} named by the user agree, {p[0]:.0f} bytes" for n, p, s in priced[1:])
        return priced[0][2], lost

    # -- reading the result ---------------------------------------------------------------------------

    def _layout(self, key: Key) -> Layout:
        return self.states[self.same.get(key, key)].layout

    def _origins(self, inputs: Mapping[str, str]) -> Iterator[Origin]:
        for key, state in self.states.items():
            known = [e for e in state.entries if e is not None]
            name = inputs.get(key[0], key[0]) + (f"[{key[1]}]" if key[1] else "")
            if not known:
                if key[0] in inputs:
                    yield Origin(name, self._layout(key), "default", "nothing reached it")
                continue
            source = USER if any(e.source == USER for e in known) else REACHED
            reason = "; ".join(dict.fromkeys(e.reason for e in known))
            lost = tuple(dict.fromkeys(x for e in known for x in e.lost))
            yield Origin(name, self._layout(key), source, reason, lost)


def _agree(known: Sequence[Placement | None], users: Sequence[bool], made: Sequence[Placement]) -> int:
    """How many shards that the user named a strategy keeps."""
    return sum(u and isinstance(p, Shard) and p == q for p, u, q in zip(known, users, made, strict=True))


def _signature(a: Any) -> Any:
    """What of an argument a rule may read."""
    if isinstance(a, fx.Node):
        value = a.meta["val"]
        return ("t", tuple(value.shape), value.dtype) if isinstance(value, Tensor) else a.name
    if isinstance(a, (tuple, list)):
        return tuple([_signature(x) for x in a])
    if isinstance(a, dict):
        return tuple([(k, _signature(v)) for k, v in a.items()])
    return a
