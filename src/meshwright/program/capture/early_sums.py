"""Which Partial values of a captured step are reduced earlier than at their first non-linear consumer.

Eager code sees one call after the other, and reduces each value where it is first needed whole. A captured step sees
the whole forward: where several reductions go back, through linear ops, to the same Partial values, it reduces these
instead if that sends less. Values and linear ops are a graph, and the values to reduce are its cheapest cut between
those that become Partial and those that are needed reduced. All of it follows from specs, so ranks agree.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...dispatch import Execution, disabled, reduce_early, tensors_in
from ...layout import Spec
from ...ranks import runtime
from ...resharding.planner import plan as plan_conversion
from ...resharding.record import LOCAL
from ..ir.trace import Recorder

Tensor = torch.Tensor
Key = tuple[str, int]  # a captured node, and which of the Partial values that it makes


@dataclass(slots=True, eq=False)
class PartialValue:
    """A Partial value of the forward.

    ``sources``: Partial values that it is linear in; ``consumers``: ops that needed it reduced, and ``reduced``: the
    axes on which the gradient of what they needed is Partial; ``bytes``: what bringing it there sends, both ways.
    """

    key: Key
    spec: Spec
    sources: list[PartialValue]
    consumers: list[str] = field(default_factory=list)
    reduced: int = 0
    bytes: float = 0.0

    @property
    def axes(self) -> int:
        """The axes on which it is Partial."""
        return sum(1 << a for a in self.spec.layout.partial)

    def price(self, reduced: int) -> float:
        """Bytes of reducing it to a value whose gradient is Partial on these axes."""
        src = self.spec.decided()
        layout = src.layout.without_partial()
        return plan_conversion(
            src, src.with_(layout=layout, grad_partial_mask=src.grad_partial_mask | (reduced & self.axes))
        ).bytes


@dataclass(frozen=True)
class EarlySum:
    """How to reduce a value when it is made.

    ``reduced``: the axes on which its gradient is Partial then; ``ops``: that needed it, or what is linear in it,
    reduced; ``instead``: how many reductions they needed.
    """

    reduced: int
    ops: str
    instead: int

    @property
    def reason(self) -> str:
        """In words."""
        return f"once, in place of {self.instead} reductions of what is linear in it"


class PartialFlow:
    """Follows the Partial values of one run of the forward, and reduces those that are listed.

    Attributes:
        early: the values to reduce when they are made.
    """

    def __init__(self, recorder: Recorder, early: Mapping[Key, EarlySum]) -> None:
        self.recorder, self.early = recorder, early
        self.values: list[PartialValue] = []
        self._of: dict[int, tuple[Tensor, PartialValue]] = {}
        self._counts: dict[str, int] = {}

    def __enter__(self) -> None:
        runtime.RT.after_call = self._after_call

    def __exit__(self, *_: object) -> None:
        runtime.RT.after_call = None

    def add_input(self, name: str, t: Tensor) -> None:
        """A value that comes into the step, which may be Partial."""
        if id(t) not in self._of:  # tied ones are one value
            self._add(name, t, [])

    def _after_call(self, run: Execution, made: Any) -> None:
        tensors, plan = run.tensors, run.plan
        for i, steps in (*plan.known, *plan.conversions):
            value = self._value(tensors[i])
            if value is not None and value.axes & ~sum(1 << a for a in steps.dst.layout.partial):
                value.consumers.append(plan.op.name)
                value.reduced |= steps.dst.grad_partial_mask & value.axes
                value.bytes = max(value.bytes, steps.bytes)
        for t in tensors_in(made):
            spec: Spec = t.__dict__["_spec"]
            if not spec.layout.partial:
                self._of.pop(id(t), None)  # it was written to
                continue
            # What is written to stays Partial, whatever was known of it.
            choice = None if plan.op.inplace else plan.choice
            linear = () if choice is None else zip(tensors, choice.inputs, strict=True)
            sources = [v for x, s in linear if s.layout.partial == spec.layout.partial and (v := self._value(x))]
            self._add(self.recorder.source, t, sources)

    def _value(self, t: Tensor) -> PartialValue | None:
        found = self._of.get(id(t))
        return None if found is None else found[1]

    def _add(self, name: str, t: Tensor, sources: list[PartialValue]) -> None:
        spec: Spec = t.__dict__["_spec"]
        if not spec.layout.partial:
            return
        number = self._counts[name] = self._counts.get(name, -1) + 1
        value = PartialValue((name, number), spec, sources)
        self.values.append(value)
        self._of[id(t)] = t, value
        early = self.early.get(value.key)
        if early is not None:
            with disabled():
                reduce_early(t, tuple(spec.layout.partial), early.reduced & value.axes, early.ops, early.reason)


def cheapest_sums(values: Sequence[PartialValue]) -> dict[Key, EarlySum]:
    """The values to reduce when they are made: that sends fewer bytes, or as many in fewer messages."""
    found: dict[Key, EarlySum] = {}
    for group in _connected(values):
        needed = [v for v in group if v.consumers]
        if len(needed) > 1:
            found |= _of_group(group, needed)
    return found


def _of_group(group: Sequence[PartialValue], needed: Sequence[PartialValue]) -> dict[Key, EarlySum]:
    below: dict[Key, dict[PartialValue, None]] = {v.key: {v: None} if v.consumers else {} for v in group}
    for v in reversed(group):  # in the order in which they were made
        for s in v.sources:
            below[s.key] |= below[v.key]
    asked = [v for v in group if below[v.key]]
    reduced = {v.key: _union(d.reduced for d in below[v.key]) for v in asked}
    prices = {v.key: v.bytes if [*below[v.key]] == [v] else v.price(reduced[v.key]) for v in asked}
    cut = _cut(asked, prices)
    if not sends_less((sum(prices[v.key] for v in cut), len(cut)), (sum(v.bytes for v in needed), len(needed))):
        return {}
    made = {}
    for v in cut:
        served = below[v.key]
        if [*served] == [v]:
            continue  # its consumer reduces it
        ops = ", ".join(dict.fromkeys(op for d in served for op in d.consumers))
        made[v.key] = EarlySum(reduced[v.key], ops, len(served))
    return made


def sends_less(a: tuple[float, int], b: tuple[float, int]) -> bool:
    """Whether these bytes and messages are less than those: bytes that are equal but for rounding are equal."""
    return a[1] < b[1] if math.isclose(a[0], b[0], rel_tol=1e-9) else a[0] < b[0]


def bytes_sent() -> tuple[float, int]:
    """Bytes and messages of what was recorded on this rank, but for what functions of rules send by themselves."""
    listed = [r for r in runtime.RT.records or () if r.src != LOCAL]
    return sum(r.bytes for r in listed), sum(len(r.kinds) for r in listed)


def _union(masks: Iterable[int]) -> int:
    made = 0
    for m in masks:
        made |= m
    return made


def _connected(values: Sequence[PartialValue]) -> list[list[PartialValue]]:
    """Values in groups that no linear op connects, each in the order in which they were made."""
    group: dict[Key, list[PartialValue]] = {}
    for v in values:
        mine = [v]
        for s in v.sources:
            other = group[s.key]
            if other is not mine:
                mine = other + mine
                for x in mine:
                    group[x.key] = mine
        group[v.key] = mine
    order = {v.key: i for i, v in enumerate(values)}
    found = {id(g): g for g in group.values()}
    return [sorted(g, key=lambda v: order[v.key]) for g in found.values()]


# ---------------------------------------------------------------------------------------------- the cheapest cut

_IN, _OUT = 0, 1
Side = tuple[Key, int]
_BYTE, _MESSAGE = 1 << 40, 1  # of equal bytes the fewest messages decide; whole numbers, so that equal is equal


def _cut(values: Sequence[PartialValue], prices: Mapping[Key, float]) -> list[PartialValue]:
    """Values that all ways from a first value to a needed one pass, of the least price; of equals the latest.

    The cheapest cut of vertices, by augmenting paths (Ford and Fulkerson; Edmonds and Karp).
    """
    start, end = (("", 0), _OUT), (("", 1), _IN)
    left: dict[Side, dict[Side, int]] = {start: {}, end: {}}

    def price(v: PartialValue) -> int:
        return round(prices[v.key] * 1e3) * _BYTE + _MESSAGE

    for v in values:
        left[v.key, _IN], left[v.key, _OUT] = {(v.key, _OUT): price(v)}, {(v.key, _IN): 0}
    infinite = 1 + sum(map(price, values))

    def edge(a: Side, b: Side) -> None:
        left[a][b] = infinite
        left[b].setdefault(a, 0)

    for v in values:
        if not v.sources:
            edge(start, (v.key, _IN))
        for s in v.sources:
            edge((s.key, _OUT), (v.key, _IN))
        if v.consumers:
            edge((v.key, _OUT), end)
    while (way := _way(left, start, end)) is not None:
        least = min(left[a][b] for a, b in way)
        for a, b in way:
            left[a][b] -= least
            left[b][a] += least
    # From the end backwards: what still reaches it lies behind the latest of the cheapest cuts.
    behind, queue = {end}, deque([end])
    while queue:
        b = queue.popleft()
        for a in left[b]:
            if a not in behind and left[a].get(b, 0) > 0:
                behind.add(a)
                queue.append(a)
    return [v for v in values if (v.key, _OUT) in behind and (v.key, _IN) not in behind]


def _way(left: Mapping[Side, Mapping[Side, int]], start: Side, end: Side) -> list[tuple[Side, Side]] | None:
    """The shortest way with something left on each edge."""
    came: dict[Side, Side] = {start: start}
    queue = deque([start])
    while queue:
        a = queue.popleft()
        for b, n in left[a].items():
            if b not in came and n > 0:
                came[b] = a
                if b == end:
                    way = []
                    while b != start:
                        way.append((came[b], b))
                        b = came[b]
                    return way[::-1]
                queue.append(b)
    return None


__all__ = ["EarlySum", "PartialFlow", "PartialValue", "bytes_sent", "cheapest_sums", "sends_less"]
