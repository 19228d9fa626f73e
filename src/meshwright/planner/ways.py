"""The ways to run an op on a mesh: a strategy of its rule for each axis, with the types of what is replicated."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx

from ..layout import Partial, Replicate, Shard, commute
from ..mesh import Mesh
from ..program.capture.complete import Key, RuledNode
from ..resharding.planner import Type
from ..rules import Rule, Strategy
from .graph import PlannedValue, Way
from .prices import INVARIANT, REDUCED, SUM, State, Wires, split

_MOST = 128  # of one op


@dataclass
class Ways:
    """Finds the ways of ops, once for rules that are shared.

    Attributes:
        wires: the mesh as links; ``mesh``: the same as a description.
        values: of the graph.
    """

    wires: Wires
    mesh: Mesh
    values: Mapping[Key, PlannedValue]
    _known: dict[Any, list[Way]] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the axes."""
        return self.wires.sizes

    def of(self, node: fx.Node, fact: RuledNode | None, inputs: tuple[Key, ...], outputs: tuple[Key, ...]) -> list[Way]:
        learnt = tuple(self.values[k].learnt or self.values[k].dtype.is_floating_point for k in (*inputs, *outputs))
        if fact is None:
            if str(node.target).startswith("meshwright.experts"):
                return self._experts(inputs, outputs, learnt)
            whole = tuple([INVARIANT] * len(self.sizes))
            return [Way((whole,) * len(inputs), (whole,) * len(outputs), 1.0)]
        key = id(fact.rule), learnt
        if key not in self._known:
            axes = [self._on_one_axis(fact.rule, a) for a in range(len(self.sizes))]
            self._known[key] = self._together(fact.rule, axes, learnt)
        return self._known[key]

    def _on_one_axis(self, rule: Rule, axis: int) -> list[Strategy]:
        n = self.sizes[axis]
        found = [s for s in rule.all_strategies() if not s.factor or rule.sizes[s.factor] >= n]
        if rule.heavy:  # what is multiplied is not summed later than need be
            found = [s for s in found if s.factor or not any(isinstance(p, Partial) for p in s.inputs)]
        found += [s for a, s in rule.joint if a == axis]
        if rule.decompose is not None and not rule.heavy:
            for f, size in rule.sizes.items():
                if size >= n and not any(f in dim for dims in rule.outputs for dim in dims):
                    along = _along(rule, f) if not any(s.factor == f for s in found) else None
                    found += [along] if along is not None else []
        return found

    def _together(self, rule: Rule, axes: Sequence[Sequence[Strategy]], learnt: Sequence[bool]) -> list[Way]:
        made: dict[Any, Way] = {}
        for picks in itertools.product(*axes):
            if not all(commute(*p) for p in zip(*(s.inputs + s.outputs for s in picks), strict=True)):
                continue
            factors: dict[str, list[int]] = {}
            for a, s in enumerate(picks):
                if s.factor:
                    factors.setdefault(s.factor, []).append(a)
            if not all(self._fits(rule, f, some) for f, some in factors.items()):
                continue
            work = 1.0
            for f, some in factors.items():
                n = math.prod(self.sizes[a] for a in some)
                work *= math.ceil(rule.sizes[f] / n) / max(rule.sizes[f], 1)
            plain = [a for a, s in enumerate(picks) if all(isinstance(p, Replicate) for p in (*s.inputs, *s.outputs))]
            for reduced in itertools.product((False,) if rule.heavy else (False, True), repeat=len(plain)):
                chosen = {a for a, r in zip(plain, reduced, strict=True) if r}
                way = replace(_typed(picks, chosen, learnt, work), sent=self._composed(rule, picks))
                known = made.get((way.inputs, way.outputs))
                if known is None or way.work < known.work:
                    made[way.inputs, way.outputs] = way
        first, *others = made.values()  # the first one replicates everything; of too many those that divide most stay
        return [first, *(sorted(others, key=lambda w: w.work)[: _MOST - 1] if len(made) > _MOST else others)]

    def _composed(self, rule: Rule, picks: Sequence[Strategy]) -> float:
        """Seconds of the sums with which compositions compute along a factor: three of a number for each row."""
        axes = [a for a, s in enumerate(picks) if s.factor and s.factor in rule.whole]
        rows = math.prod(n for f, n in rule.sizes.items() if f not in rule.whole)
        return 3 * self.wires.seconds(axes, 2.0 * 4 * rows) if axes else 0.0

    def _fits(self, rule: Rule, factor: str, axes: Sequence[int]) -> bool:
        n = math.prod(self.sizes[a] for a in axes)
        return rule.sizes[factor] >= n and rule.aligned(factor, self.mesh, axes)

    def _experts(self, inputs: tuple[Key, ...], outputs: tuple[Key, ...], learnt: tuple[bool, ...]) -> list[Way]:
        """Experts have no line of factors: their tokens are split, or they themselves, or their width, or both."""
        x, gate_up, down = (self.values[inputs[i]] for i in (0, 3, 4))
        rest, ids_shape = len(inputs) - 5, self.values[inputs[1]].shape
        options: list[list[tuple[tuple[Type, ...], Type, float, float]]] = []
        for a, n in enumerate(self.sizes):
            row, ids = REDUCED, INVARIANT
            plain = (INVARIANT,) * 5 + (INVARIANT,) * rest
            found = [(plain, INVARIANT, 1.0, 0.0)]
            for d in range(len(x.shape) - 1):
                if x.shape[d] >= n:
                    s = split(d)
                    found.append(((s, s, s, row, row, *(REDUCED,) * rest), s, 1 / n, 0.0))
                    if gate_up.shape[0] >= n:
                        tokens = 4 * _copies(n, gate_up.shape[0], ids_shape[-1]) / n * x.nbytes / self._other_parts(a)
                        weights = 3 * (n - 1) / n * (gate_up.nbytes + down.nbytes)
                        sent = self.wires.seconds((a,), min(tokens, weights)) + 3 * self.wires.seconds((a,), 0.0)
                        e = split(0)
                        found.append(((s, s, s, e, e, *(e,) * rest), s, 1 / n, sent))
            if gate_up.shape[0] >= n:
                found.append(((row, ids, row, split(0), split(0), *(split(0),) * rest), SUM, 1 / n, 0.0))
            if len(gate_up.shape) == 4 and gate_up.shape[2] >= n and not rest:
                found.append(((row, ids, row, split(2), split(2)), SUM, 1 / n, 0.0))
            options.append(found)
        ways = []
        for picks in itertools.product(*options):
            states = [tuple(p[0][i] for p in picks) for i in range(len(inputs))]
            out = tuple(p[1] for p in picks)
            if any(
                crowded(s, v.shape, self.sizes)
                for s, v in zip([*states, out], [*(self.values[k] for k in inputs), x], strict=True)
            ):
                continue
            states = [plain_types(s, float_) for s, float_ in zip(states, learnt, strict=False)]
            ways.append(
                Way(tuple(states), (out,) * len(outputs), math.prod(p[2] for p in picks), sum(p[3] for p in picks))
            )
        return ways

    def _other_parts(self, axis: int) -> int:
        return math.prod(n for a, n in enumerate(self.sizes) if a != axis)


def _copies(ranks: int, experts: int, each: int) -> float:
    """To how many other ranks a token goes, of so many evenly chosen experts that the ranks share."""
    mine = max(experts // ranks, 1)
    if each > experts - mine:
        return float(ranks - 1)
    return (ranks - 1) * (1 - math.comb(experts - mine, each) / math.comb(experts, each))


def _along(rule: Rule, factor: str) -> Strategy | None:
    """An op that its composition computes along a factor: what has it is split, the rest is whole."""
    made: list[Any] = []
    for dims in (*rule.inputs, *rule.outputs):
        at = [d for d, names in enumerate(dims) if factor in names]
        if len(at) > 1 or any(dims[d] != (factor,) for d in at):
            return None
        made.append(Shard(at[0]) if at else INVARIANT[0])
    n = len(rule.inputs)
    return Strategy(tuple(made[:n]), tuple(made[n:]), factor)


def _typed(picks: Sequence[Strategy], reduced: set[int], learnt: Sequence[bool], work: float) -> Way:
    """The states of inputs and outputs: a replicated input of work that is divided is reduced there."""
    n = len(picks[0].inputs)
    inputs, outputs = [], []
    for i in range(n):
        state = list[Type]()
        for a, s in enumerate(picks):
            p = s.inputs[i]
            divided = any(not isinstance(q, Replicate) for q in s.outputs) or a in reduced
            state.append((p, int(divided)) if isinstance(p, Replicate) else (p, 0))
        inputs.append(plain_types(tuple(state), learnt[i]))
    for k in range(len(picks[0].outputs)):
        state = list[Type]()
        state += [
            (s.outputs[k], int(a in reduced)) if isinstance(s.outputs[k], Replicate) else (s.outputs[k], 0)
            for a, s in enumerate(picks)
        ]
        outputs.append(plain_types(tuple(state), learnt[n + k]))
    return Way(tuple(inputs), tuple(outputs), work)


def plain_types(state: State, floats: bool) -> State:
    """Of what has no gradient the types of what is replicated are one."""
    return state if floats else tuple(INVARIANT if t == REDUCED else t for t in state)


def parts_of(state: State, sizes: Sequence[int]) -> int:
    return math.prod(n for t, n in zip(state, sizes, strict=True) if isinstance(t[0], Shard))


def crowded(state: State, shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a dim would be split into more parts than it has."""
    parts: Counter[int] = Counter()
    for t, n in zip(state, sizes, strict=True):
        if isinstance(t[0], Shard):
            parts[t[0].dim] = max(parts[t[0].dim], 1) * n
    return any(d >= len(shape) or shape[d] < n for d, n in parts.items())


__all__ = ["Ways", "crowded", "parts_of"]
