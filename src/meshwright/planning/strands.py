"""Strands: dims of values that one axis of a mesh splits together, found by the rules' factors.

Where an op's rule can be split by a factor, the dims that the factor leads are split together: the outputs of a
weight, the heads that come of them, the inputs of the weight that follows.  Uniting such dims through the whole
captured graph gives strands, the "named dimensions" of TOAST (Alabed et al., 2025).  What a strand sends follows from
its ends: sums that ranks hold in parts, and ops that cannot be split by it.
"""

from __future__ import annotations

import itertools
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

_FEW = 8  # factors in front of another one in a dim, up to which they may be what is fused: queries, keys, values


@dataclass
class Strand:
    """Dims that are split together on one axis, and what that costs in bytes that each rank sends in a step.

    Attributes:
        slots: value to how it is split.
        contractions: ops that contract and are split: name to whether the contracted factor is (the end of a pair).
        work: products that are split.
        begins: whole values that ranks read for their own part: their gradients are summed.
        ends: values of which ranks hold parts of a sum, which are summed.
        gathered: values that an op needs whole.
        cut: whole values of which an op takes this rank's part.
        taken: the ops that are split.
    """

    slots: dict[Key, Shard] = field(default_factory=dict)
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
        self._ways: dict[tuple[int, bool, int, Shard], list[Strategy]] = {}
        self._uses: dict[Key, dict[int, tuple[bool, int]]] = defaultdict(dict)  # by op: whether it makes it, and where
        for n, fact in enumerate(self.facts):
            for made, keys in ((False, fact.inputs), (True, fact.outputs)):
                for i, key in enumerate(keys):
                    self._uses[key].setdefault(n, (made, i))
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
        self._blind = self._unruled()
        if returned:
            self._blind |= {self.same.get((n.name, 0), (n.name, 0)): "output" for n in captured.outputs[1:]}

    def found(self) -> list[Strand]:
        """Strands that have a parameter in them, each priced."""
        inputs = {(s.node, 0) for s in self.captured.sources if s.kind in ("batch", "constant")}
        seen: set[tuple[Key, Shard]] = set()
        made = []
        whole = ((key, Shard(d)) for key in self.params for d in range(len(self.values[key].shape)))
        for key, p in (*self._fused(), *whole):
            if (key, p) not in seen:
                slots = self._spread(key, p)
                seen.update(slots.items())
                if slots.keys() & self.params.keys() and not slots.keys() & inputs:
                    made.append(self._priced(slots, self._of(slots)))
        return made

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

    # -- spreading ------------------------------------------------------------------------------------

    def _spread(self, key: Key, p: Shard) -> dict[Key, Shard]:
        """All values that are split if one is, each as it is met first."""
        slots, todo = {key: p}, [key]
        while todo:
            key = todo.pop()
            for n in self._uses[key]:
                fact = self.facts[n]
                for s in self._keeping(fact, *self._uses[key][n], slots[key]):
                    for other, q in _split(fact, s):
                        if other not in slots:
                            slots[other] = q
                            todo.append(other)
        return slots

    def _fused(self) -> Iterator[tuple[Key, Shard]]:
        """Values of which ops take parts, or dims of several factors, split by the blocks that they are taken for."""
        cuts: dict[tuple[Key, int], set[int]] = defaultdict(set)
        for fact in self.facts:
            for key, dims in zip(fact.inputs, fact.rule.inputs, strict=True):
                for d, names in enumerate(dims):
                    parts = fact.rule.joined.get(names[0], ()) if len(names) == 1 else ()
                    cuts[key, d].update(itertools.accumulate(n for _, n in parts))
                    before = 1
                    for k, f in enumerate(names):
                        if 1 < before <= _FEW and fact.rule.takes_blocks and fact.rule.shardable(f):
                            n = math.prod(fact.rule.sizes[g] for g in names[k:])
                            yield key, Shard(d, (n,) * before)
                        before *= fact.rule.sizes[f]
        for (key, d), ends in cuts.items():
            at = sorted({0, *ends})
            if len(at) > 2 and at[-1] == self.values[key].shape[d]:
                yield key, Shard(d, tuple(b - a for a, b in itertools.pairwise(at)))

    def _of(self, slots: dict[Key, Shard]) -> list[RuledNode]:
        """The ops that read or make values."""
        return [self.facts[n] for n in sorted({n for key in slots for n in self._uses[key]})]

    def _keeping(self, fact: RuledNode, made: bool, i: int, p: Shard) -> list[Strategy]:
        """The strategies by which an operand or a result stays split as it is, so that nobody sends."""
        key = id(fact.rule), made, i, p
        if key not in self._ways:
            rule = fact.rule
            dims = (rule.outputs if made else rule.inputs)[i]
            free = (s for s in rule.keeping(dims, p) if s.blocked or s.factor not in rule.crossing)
            found = [s for s in free if self._aligned(rule, s)]
            lead = next((f for f in dims[p.dim] if rule.sizes[f] != 1), None)
            if (
                not found
                and lead
                and lead not in rule.crossing
                and not p.blocks
                and rule.decompose is not None
                and not rule.heavy
            ):
                along = _along(rule, lead)  # computed along the factor in steps that reduce little
                found = [along] if along is not None and self._aligned(rule, along) else []
            self._ways[key] = found
        return self._ways[key]

    def _aligned(self, rule: Rule, s: Strategy) -> bool:
        sizes = s.blocks or (rule.sizes[s.factor or ""],)
        return rule.aligned(s.factor or "", self.mesh, (self.axis,), s.blocks) and min(sizes) >= self.ranks

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

    def _priced(self, slots: dict[Key, Shard], ops: list[RuledNode]) -> Strand:
        strand = Strand(dict(slots))
        readers = Counter(key for fact in ops for key in fact.inputs)
        self._alone = {k for k in slots if k in self.params and readers[k] == 1}
        for key in sorted(slots.keys() & self._blind.keys()):  # alike on all ranks
            strand.gathered[key] = self._sent(key), self._blind[key]
        for fact in ops:
            trials = [self._trial(strand, fact, s) for s in (None, *self._options(fact, strand.slots))]
            self._take(strand, fact, min(trials, key=lambda t: t[:2])[2])
        return strand

    def _options(self, fact: RuledNode, slots: dict[Key, Shard]) -> list[Strategy]:
        found: list[Strategy] = []
        for made, keys in ((False, fact.inputs), (True, fact.outputs)):
            for i, key in enumerate(keys):
                if key in slots:
                    found += [s for s in self._keeping(fact, made, i, slots[key]) if s not in found]
        return found

    def _trial(self, strand: Strand, fact: RuledNode, s: Strategy | None) -> tuple[float, int, Strategy | None]:
        price = 0.0
        for i, key in enumerate(fact.inputs):
            have, want = strand.slots.get(key), _shard(s.inputs[i] if s else None)
            if have is not None and have != want and i not in fact.rule.lends:
                price += self._sent(key)
            elif have is None and want is not None:
                price += self._sent(key, 1)
        for i, key in enumerate(fact.outputs):
            have, made = strand.slots.get(key), s.outputs[i] if s else None
            if isinstance(made, Partial):
                price += self._sent(key, 1 if have is not None else 2)
            elif have != _shard(made):
                price += self._sent(key, 1)
        return price, s is None, s

    def _take(self, strand: Strand, fact: RuledNode, s: Strategy | None) -> None:
        """Add to a strand what an op sends that is split so."""
        if s is not None and not any(strand.slots.get(key) == p for key, p in _split(fact, s)):
            s = None
        for i, key in enumerate(fact.inputs):
            have, want = strand.slots.get(key), _shard(s.inputs[i] if s else None)
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
            elif key in strand.slots and strand.slots[key] != _shard(s.outputs[i] if s else None):
                strand.cut[key] = self._sent(key)
        if s is None:
            return
        strand.taken.add(fact.name)
        shared = [f for f, op in fact.rule.reduced.items() if sum(any(f in d for d in t) for t in fact.rule.inputs) > 1]
        if fact.rule.heavy and (shared or not fact.rule.reduced):
            strand.work += math.prod(map(float, fact.rule.sizes.values()))
            if any(k in self._weights and k in strand.slots for k in fact.inputs):
                strand.contractions[fact.name] = s.factor in fact.rule.reduced


def _shard(p: Placement | None) -> Shard | None:
    return p if isinstance(p, Shard) else None


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


def _split(fact: RuledNode, s: Strategy) -> Iterator[tuple[Key, Shard]]:
    for keys, placements in ((fact.inputs, s.inputs), (fact.outputs, s.outputs)):
        for key, p in zip(keys, placements, strict=True):
            if isinstance(p, Shard):
                yield key, p


__all__ = ["Strand", "Strands"]
