"""Strands: dims of values that one axis of a mesh splits together, found by the rules' factors.

Where an op's rule can be split by a factor, the dims that the factor leads are split together: the outputs of a
weight, the heads that come of them, the inputs of the weight that follows.  Uniting such dims through the whole
captured graph gives strands, the "named dimensions" of TOAST (Alabed et al., 2025).  What a strand sends follows from
its ends: sums that ranks hold in parts, and ops that cannot be split by it.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..layout import REPLICATE, Partial, Placement, Shard
from ..mesh import Mesh
from ..program.capture.complete import Completion, Key, RuledNode
from ..program.capture.export import Captured
from ..program.capture.source_lines import line_of
from ..rules import Rule, Strategy

Slot = tuple[Key, int]  # a value, and one of its dims


@dataclass
class Strand:
    """Dims that are split together on one axis, and what that costs in bytes that each rank sends in a step.

    Attributes:
        slots: value to the dim of it.
        contractions: ops that contract and are split: name to whether the contracted factor is (the end of a pair).
        work: products that are split.
        begins: whole values that ranks read for their own part: their gradients are summed.
        ends: values of which ranks hold parts of a sum, which are summed.
        gathered: values that an op needs whole.
        cut: whole values of which an op takes this rank's part.
        taken: the ops that are split.
    """

    slots: dict[Key, int] = field(default_factory=dict)
    contractions: dict[str, bool] = field(default_factory=dict)
    work: float = 0.0
    begins: dict[Key, float] = field(default_factory=dict)
    ends: dict[Key, float] = field(default_factory=dict)
    gathered: dict[Key, tuple[float, str]] = field(default_factory=dict)
    cut: dict[Key, float] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    @property
    def pairs(self) -> bool:
        """Whether it lies between contractions: outputs of some, inputs of others."""
        return len({*self.contractions.values()}) == 2

    @property
    def bytes(self) -> float:
        """What each rank sends in a step, of all of it."""
        return sum((*self.begins.values(), *self.ends.values(), *self.cut.values(), *self.lost))

    @property
    def lost(self) -> list[float]:
        """Bytes of each value that is gathered."""
        return [sent for sent, _ in self.gathered.values()]


class Strands:
    """All strands of a captured step on one axis of a mesh.

    Args:
        returned: what the step returns beside the loss is wanted whole.
    """

    def __init__(self, captured: Captured, mesh: Mesh, axis: int, *, returned: bool = False) -> None:
        self.captured, self.mesh, self.axis = captured, mesh, axis
        graph = Completion(captured, mesh)
        self.facts, self.same, self.values = graph.facts, graph.same, graph.states
        self.ranks = mesh.sizes[axis]
        sources = [s for s in captured.sources if (s.node, 0) in self.values]
        self.params = {(s.node, 0): s.name for s in sources if s.kind == "param"}
        self.inputs = {(s.node, 0): s.name for s in sources}
        self._parents: dict[Slot, Slot] = {}
        self._strategies: dict[tuple[int, str], Strategy | None] = {}
        self._nodes = {n.name: n for n in captured.graph.nodes}
        self._fed = {s.node for s in sources if s.kind == "batch"}
        self._learnt = {s.node for s in captured.sources if s.fake.requires_grad}  # what has a gradient
        for node in captured.graph.nodes:
            for known in (self._fed, self._learnt):
                if any(n.name in known for n in node.all_input_nodes):
                    known.add(node.name)
        self._weights = set(self.params)  # and what is made of these alone: cast, transposed, chosen rows
        for fact in self.facts:
            floats = [k for k in fact.inputs if self.values[k].dtype.is_floating_point]
            if floats and self._weights.issuperset(floats):
                self._weights.update(fact.outputs)
        self._unite()
        self._blind = self._unruled()
        if returned:
            self._blind |= {self.same.get((n.name, 0), (n.name, 0)): "output" for n in captured.outputs[1:]}

    def found(self) -> list[Strand]:
        """Strands that have a parameter in them, each priced."""
        made: dict[Slot, dict[Key, int]] = defaultdict(dict)
        ops: dict[Slot, dict[str, RuledNode]] = defaultdict(dict)
        for slot in sorted(self._parents):
            made[self._root(slot)].setdefault(slot[0], slot[1])
        for fact in self.facts:
            for key in (*fact.inputs, *fact.outputs):
                for d in range(len(self.values[key].shape)):
                    if (key, d) in self._parents:
                        ops[self._root((key, d))][fact.name] = fact
        inputs = {(s.node, 0) for s in self.captured.sources if s.kind in ("batch", "constant")}
        kept = [r for r, slots in made.items() if slots.keys() & self.params.keys() and not slots.keys() & inputs]
        return [self._priced(made[root], list(ops[root].values())) for root in kept]

    def size(self, key: Key) -> int:
        """Bytes of a value."""
        t = self.values[key]
        return math.prod(t.shape) * t.dtype.itemsize

    def fed(self, op: str) -> bool:
        """Whether an op reads something that depends on the batch."""
        return op in self._fed

    def at(self, op: str) -> str:
        """An op or an input, and the user's line."""
        node = self._nodes[op]
        line = line_of(node) if node.op == "call_function" else ""
        name = re.sub(r"_\d+$", "", op)
        return f"{name} at {line}" if line else name

    # -- uniting --------------------------------------------------------------------------------------

    def _root(self, slot: Slot) -> Slot:
        while (above := self._parents.setdefault(slot, slot)) != slot:
            self._parents[slot] = self._parents[above]
            slot = above
        return slot

    def _unite(self) -> None:
        for key in self.params:
            for d in range(len(self.values[key].shape)):
                self._root((key, d))
        for fact in self.facts:
            for factor in fact.rule.sizes:
                strategy = self._by(fact.rule, factor)
                if strategy is not None:
                    slots = list(_split(fact, strategy))
                    for slot in slots:
                        a, b = self._root(slots[0]), self._root(slot)
                        if a != b:
                            self._parents[max(a, b)] = min(a, b)

    def _by(self, rule: Rule, factor: str) -> Strategy | None:
        """The strategy that splits a factor on the axis, None where nothing can be split so that nobody sends."""
        key = id(rule), factor
        if key not in self._strategies:
            made = None
            apart = rule.decompose is not None and not rule.heavy
            free = factor not in rule.crossing and (rule.shardable(factor) or apart)
            if rule.sizes[factor] > 1 and free and self._aligned(rule, factor):
                made = rule.by_factor(factor)
                if made is None and apart:  # computed along the factor in steps that reduce little
                    made = _along(rule, factor)
            self._strategies[key] = made
        return self._strategies[key]

    def _aligned(self, rule: Rule, factor: str) -> bool:
        return rule.aligned(factor, self.mesh, (self.axis,)) and rule.sizes[factor] >= self.ranks

    def _unruled(self) -> dict[Key, str]:
        """Values that ops without a rule read, to one such op."""
        ruled = {f.name for f in self.facts}
        found = {}
        for node in self.captured.graph.nodes:
            if node.op != "call_function" or node.name in ruled or node.target is operator.getitem:
                continue
            if "val" in node.meta and node.meta["val"] is not None:
                for n in node.all_input_nodes:
                    found[self.same.get((n.name, 0), (n.name, 0))] = node.name
        return found

    # -- prices ---------------------------------------------------------------------------------------

    def _sent(self, key: Key, passes: int = 2) -> float:
        """Bytes that each rank sends to sum a value over the axis (a gather: half of it)."""
        return passes * (self.ranks - 1) / self.ranks * self.size(key)

    def _priced(self, slots: dict[Key, int], ops: list[RuledNode]) -> Strand:
        strand = Strand(dict(slots))
        readers = Counter(key for fact in ops for key in fact.inputs)
        self._alone = {k for k in slots if k in self.params and readers[k] == 1}
        for key in sorted(slots.keys() & self._blind.keys()):  # alike on all ranks
            strand.gathered[key] = self._sent(key), self._blind[key]
        for fact in ops:
            options = [None, *(self._by(fact.rule, f) for f in fact.rule.sizes)]
            trials = [self._trial(strand, fact, s) for i, s in enumerate(options) if not i or s is not None]
            self._take(strand, fact, min(trials, key=lambda t: t[:2])[2])
        return strand

    def _trial(self, strand: Strand, fact: RuledNode, s: Strategy | None) -> tuple[float, int, Strategy | None]:
        price = 0.0
        for i, key in enumerate(fact.inputs):
            have, want = strand.slots.get(key), _dim(s.inputs[i] if s else None)
            if have is not None and have != want and i not in fact.rule.lends:
                price += self._sent(key)
            elif have is None and want is not None:
                price += self._sent(key, 1)
        for i, key in enumerate(fact.outputs):
            have, made = strand.slots.get(key), s.outputs[i] if s else None
            if isinstance(made, Partial):
                price += self._sent(key, 1 if have is not None else 2)
            elif have != _dim(made):
                price += self._sent(key, 1)
        return price, s is None, s

    def _take(self, strand: Strand, fact: RuledNode, s: Strategy | None) -> None:
        """Add to a strand what an op sends that is split so."""
        if s is not None and not any(strand.slots.get(key) == d for key, d in _split(fact, s)):
            s = None
        for i, key in enumerate(fact.inputs):
            have, want = strand.slots.get(key), _dim(s.inputs[i] if s else None)
            if i in fact.rule.lends:
                continue
            if have is not None and have != want and key in self._alone:
                del strand.slots[key]  # its one reader wants it whole: so it stays
            elif have is not None and have != want:
                strand.gathered[key] = self._sent(key), fact.name
            elif s is not None and have is None and key[0] in self._learnt and self.values[key].dtype.is_floating_point:
                if want is not None:
                    strand.cut[key] = self._sent(key)
                elif not isinstance(s.inputs[i], Partial):
                    strand.begins[key] = self._sent(key)
        for i, key in enumerate(fact.outputs):
            if s is not None and isinstance(s.outputs[i], Partial):
                strand.ends[key] = self._sent(key)
            elif key in strand.slots and strand.slots[key] != _dim(s.outputs[i] if s else None):
                strand.cut[key] = self._sent(key)
        if s is None:
            return
        strand.taken.add(fact.name)
        shared = [f for f, op in fact.rule.reduced.items() if sum(any(f in d for d in t) for t in fact.rule.inputs) > 1]
        if fact.rule.heavy and (shared or not fact.rule.reduced):
            strand.work += math.prod(map(float, fact.rule.sizes.values()))
            if any(k in self._weights and k in strand.slots for k in fact.inputs):
                strand.contractions[fact.name] = s.factor in fact.rule.reduced


def _dim(p: Placement | None) -> int | None:
    return p.dim if isinstance(p, Shard) else None


def _along(rule: Rule, factor: str) -> Strategy | None:
    """An op that its composition computes along a factor: what has it is split, the rest is whole."""
    made: list[Placement] = []
    for dims in (*rule.inputs, *rule.outputs):
        at = [d for d, names in enumerate(dims) if factor in names]
        if len(at) > 1 or any(dims[d] != (factor,) for d in at):
            return None
        made.append(Shard(at[0]) if at else REPLICATE)
    n = len(rule.inputs)
    return Strategy(tuple(made[:n]), tuple(made[n:]), factor)


def _split(fact: RuledNode, s: Strategy) -> Iterator[Slot]:
    for keys, placements in ((fact.inputs, s.inputs), (fact.outputs, s.outputs)):
        for key, p in zip(keys, placements, strict=True):
            if isinstance(p, Shard):
                yield key, p.dim


__all__ = ["Strand", "Strands"]
