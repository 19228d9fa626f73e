"""The space of a captured step on a mesh: what each op, parameter and tensor of the batch can be, and what it costs.

A variable is the strategy of an op, the layout of a parameter or of the batch, or the layout in which a value that
several ops read is read.  Tables over pairs of them are conversions.  All follows from the rules.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from ..errors import PlanError
from ..layout import commute
from ..mesh import Mesh
from ..program.capture.complete import Completion, Key
from ..program.capture.export import Captured
from ..program.capture.source_lines import line_of
from ..program.capture.work import Counted, OpWork
from .graph import PlannedOp, PlannedValue, Way
from .prices import INVARIANT, PICO, REDUCED, SUM, State, Wires, split
from .repeats import Repeats
from .solve import NEVER, Prices, Problem
from .ways import Ways, crowded, parts_of

Tensor = torch.Tensor
_SMALL = 1 << 20  # bytes of a buffer up to which it is replicated without asking
_UNLIKE = 2e-5  # seconds that it costs if tensors of the batch are not split alike
_HELD_PER_SECOND = 1e9  # bytes of a batch that is not split: what it costs to bring them to every rank
Fits = Mapping[str, Callable[[State], bool]]  # name of a parameter to whether it may have a state


class Space:
    """The problem of a captured step on a mesh.

    Args:
        captured: of the cut model, whose blocks ``repeats`` counts.
        wires: the mesh as links.
        held: picoseconds that a byte of memory is worth.
    """

    def __init__(
        self,
        captured: Captured,
        wires: Wires,
        repeats: Repeats,
        *,
        held: float = 0.0,
        work: OpWork | None = None,
    ) -> None:
        self.captured, self.wires, self.repeats = captured, wires, repeats
        self.sizes, self.held = wires.sizes, held
        self.mesh = Mesh({f"a{i}": n for i, n in enumerate(self.sizes)})
        self.graph = Completion(captured, self.mesh)
        self.work = work or OpWork(saving=True)
        self.values: dict[Key, PlannedValue] = {}
        self.ops: list[PlannedOp] = []
        self.problem = Problem()  # without the sums of gradients
        self._sums: list[tuple[int, int, Prices]] = []
        self._problems: dict[float, Problem] = {}
        self._columns: dict[Any, tuple[State, ...]] = {}  # each is one object, so that its id is a key
        self._known: dict[Any, Any] = {}
        self.ways = Ways(wires, self.mesh, self.values)
        self._blocks = _block_of(captured, repeats)
        self._read_values()
        self._read_ops()
        self._pose()

    # -- the graph ------------------------------------------------------------------------------------

    def _read_values(self) -> None:
        learnt = {s.node for s in self.captured.sources if s.kind == "param" and s.fake.requires_grad}
        for node in self.captured.graph.nodes:
            if any(n.name in learnt for n in node.all_input_nodes):
                learnt.add(node.name)
        for key, known in self.graph.states.items():
            floats = known.dtype.is_floating_point or known.dtype.is_complex
            nbytes = math.prod(known.shape) * known.dtype.itemsize
            self.values[key] = PlannedValue(key, known.shape, known.dtype, nbytes, floats and key[0] in learnt)
        for s in self.captured.sources:
            value = self.values.get((s.node, 0))
            if value is not None:
                value.kind, value.label = s.kind, s.name
                value.times = self._times_of_name(s.name)

    def _times_of_name(self, name: str) -> int:
        return len(self.repeats.names(name, self.repeats.counts()))

    def _read_ops(self) -> None:
        facts = {f.name: f for f in self.graph.facts}
        for node in self.captured.graph.nodes:
            if node.op != "call_function" or node.target is operator.getitem:
                continue
            outputs = tuple(k for k in ((node.name, i) for i in range(64)) if k in self.values)
            if not outputs:
                continue
            fact = facts.get(node.name)
            inputs = fact.inputs if fact is not None else tuple(self._keys(node))
            if fact is not None:
                outputs = fact.outputs
            counted = self.work.of(node)
            ways = self.ways.of(node, fact, inputs, outputs)
            op = PlannedOp(
                node.name,
                line_of(node),
                inputs,
                outputs,
                ways,
                self._seconds(node, counted),
                self._times(node),
                counted,
            )
            self.ops.append(op)
            for i, key in enumerate(inputs):
                self.values[key].readers.append((op, i))
                self.values[key].saved |= i in counted.saved and self.values[key].learnt
            for k, key in enumerate(outputs):
                self.values[key].maker = op, k
                self.values[key].times = op.times
                self.values[key].saved |= k in counted.made

    def _times(self, node: fx.Node) -> int:
        block = self._blocks.get(node)
        if block is None:
            return 1
        i, number = block
        run, kept = self.repeats.runs[i], self.repeats.kept[i]
        return run.count - kept + 1 if kept < run.count and number == kept - 2 else 1

    def _keys(self, node: fx.Node) -> Iterator[Key]:
        for n in node.all_input_nodes:
            key = self.graph.same.get((n.name, 0), (n.name, 0))
            if key in self.values:
                yield key

    def _seconds(self, node: fx.Node, counted: Counted) -> tuple[float, float]:
        if not counted.flops and not counted.moved:
            return 0.0, 0.0
        dtype = next(
            (v.dtype for k in self._keys(node) if (v := self.values[k]).dtype.is_floating_point), torch.float32
        )
        speed = self.wires.hardware.network(1, 1, str(dtype).removeprefix("torch."))
        again = any(self.values[k].learnt for k in self._keys(node))
        there = speed.compute(counted.flops, counted.moved)
        return there, speed.compute(2 * counted.flops, 2 * counted.moved) if again else 0.0

    def block_of(self, op: PlannedOp) -> tuple[int, int] | None:
        """The run and the block in it that an op is part of."""
        return self._by_name.get(op.name)

    def in_block(self, op: PlannedOp) -> bool:
        """Whether an op is part of a block that repeats."""
        return op.name in self._by_name

    # -- the problem ----------------------------------------------------------------------------------

    def _pose(self) -> None:
        for value in self.values.values():
            if value.kind and value.maker is None:
                self._leaf(value)
        activations = {v.key for v in self.values.values() if v.kind == "param"}  # and what is computed with one
        for op in self.ops:
            if any(k in activations for k in op.inputs):
                activations.update(op.outputs)
            elif any(len(self.values[k].readers) > 1 for k in op.outputs):
                op.ways = op.ways[:1]  # tables of positions, masks: a layout would tie together all that read them
            prices = [self._price(op, way) for way in op.ways]
            op.variable = self.problem.variable(prices)
        boundary = self._boundary()
        for value in self.values.values():
            self._connect(value, value.key in boundary)
        for here, there in boundary.items():
            self._same(self.values[here], self.values[there])
        batch = [v for v in self.values.values() if v.kind == "batch" and v.variable >= 0]
        for one, other in itertools.pairwise(batch):  # alike, unless that costs more
            table = [[0 if s == t else round(_UNLIKE * PICO) for t in other.states] for s in one.states]
            self._table(one.variable, other.variable, np.array(table, dtype=np.int64))

    def problem_of(self, shown: float, fixed: Fits | None = None) -> Problem:
        """The problem where nothing hides this part of the time of gradients' sums.

        Raises:
            PlanError: If a parameter can have none of the states that are fixed.
        """
        if shown not in self._problems:
            made = self.problem.pinned({})
            for source, op, summed in self._sums:
                made.add((source, op), np.minimum(np.rint(summed * shown).astype(np.int64), NEVER))
            self._problems[shown] = made
        allowed: dict[int, list[int]] = {}
        for value in self.values.values():
            fits = (fixed or {}).get(value.label)
            if fits is None or value.variable < 0 or value.maker is not None:
                continue
            some = allowed[value.variable] = [i for i, s in enumerate(value.states) if fits(s)]
            if not some:
                raise PlanError(
                    f"plan: fix= of {value.label}: a mesh of {' × '.join(map(str, self.sizes))} ranks cannot split its "
                    f"shape {value.shape} so. Fix another dim, or give mesh= with this axis and fewer ranks on it."
                )
        return self._problems[shown].pinned(allowed) if allowed else self._problems[shown]

    def _price(self, op: PlannedOp, way: Way) -> int:
        forward, backward = op.seconds
        launch = self.wires.hardware.launch
        least = (launch if forward else 0.0) + (launch if backward else 0.0)
        seconds = max((forward + backward) * way.work, least) + way.sent
        return min(round(seconds * PICO) * op.times, NEVER)

    def _leaf(self, value: PlannedValue) -> None:
        whole: State = tuple([INVARIANT] * len(self.sizes))
        states = [whole]
        if value.kind in ("param", "batch") or value.nbytes > _SMALL:
            types = [INVARIANT, *(split(d) for d, n in enumerate(value.shape))]
            states = [
                s for s in itertools.product(types, repeat=len(self.sizes)) if not crowded(s, value.shape, self.sizes)
            ]
            if value.kind == "batch":
                states = [s for s in states if all(t == INVARIANT or t[0].dim < 2 for t in s)]  # type: ignore[union-attr]
        value.states = self._columns.setdefault(tuple(states or [whole]), tuple(states or [whole]))
        prices = []
        for s in value.states:
            local = value.nbytes / parts_of(s, self.sizes)
            price = local / _HELD_PER_SECOND * PICO if value.kind == "batch" else local * self.held
            prices.append(min(round(price) * value.times, NEVER))
        value.variable = self.problem.variable(prices)

    def _boundary(self) -> dict[Key, Key]:
        """Values that a block of a run gives to the next one, where blocks were cut out: to what the next one gives."""
        made: dict[Key, Key] = {}
        for i, (run, kept) in enumerate(zip(self.repeats.runs, self.repeats.kept, strict=True)):
            if kept >= run.count:
                continue
            crossing = [
                [
                    k
                    for k, v in self.values.items()
                    if self._in(v, i, b) and any(self._reads(r, i, b + 1) for r, _ in v.readers)
                ]
                for b in (kept - 3, kept - 2)
            ]
            if len(crossing[0]) == len(crossing[1]):
                made.update(zip(*crossing, strict=True))
        return made

    def _in(self, value: PlannedValue, run: int, block: int) -> bool:
        return value.maker is not None and self._reads(value.maker[0], run, block)

    def _reads(self, op: PlannedOp, run: int, block: int) -> bool:
        return self._by_name.get(op.name) == (run, block)

    @property
    def _by_name(self) -> dict[str, tuple[int, int]]:
        if not hasattr(self, "_named"):
            self._named = {n.name: b for n, b in self._blocks.items()}
        return self._named

    def _connect(self, value: PlannedValue, boundary: bool) -> None:
        """Tables between who makes a value and who reads it."""
        if value.maker is None and value.variable < 0:
            return
        source = value.variable if value.maker is None else value.maker[0].variable
        made = value.states if value.maker is None else self._column(*value.maker, "outputs")
        needs = [self._column(op, i, "inputs") for op, i in value.readers]
        if value.kind == "param":
            for (op, _), need in zip(value.readers, needs, strict=True):
                key = id(made), id(need), value.nbytes, value.learnt, value.times
                if key not in self._known:
                    self._known[key] = self._of_param(value, made, need)
                possible, summed = self._known[key]
                self._table(source, op.variable, possible)
                if summed.any():
                    self._sums.append((source, op.variable, summed))
            return
        # Of what is replicated and has no gradient each reader takes its part.
        alone = len(needs) < 2 or (len(made) == 1 and not value.learnt)
        if alone and not boundary:
            for (op, _), need in zip(value.readers, needs, strict=True):
                table = self._between(value, made, need, op.times) + self._kept(value, need)[None]
                self._table(source, op.variable, table)
            return
        union = tuple(map(id, (made, *needs)))
        if union not in self._columns:
            self._columns[union] = tuple(dict.fromkeys([*made, *(s for need in needs for s in need)]))
        value.states = self._columns[union]
        kept = self._kept(value, value.states)
        value.variable = self.problem.variable(map(int, kept))
        self._table(source, value.variable, self._between(value, made, value.states, value.times))
        for (op, _), need in zip(value.readers, needs, strict=True):
            self._table(value.variable, op.variable, self._between(value, value.states, need, op.times))

    def _column(self, op: PlannedOp, i: int, which: str) -> tuple[State, ...]:
        """The states of one input or output in all ways of an op; ops of one rule have the same ways."""
        key = id(op.ways), i, which
        if key not in self._columns:
            self._columns[key] = tuple(getattr(way, which)[i] for way in op.ways)
        return self._columns[key]

    def _kept(self, value: PlannedValue, states: Sequence[State]) -> Prices:
        """What holding a value for the backward costs."""
        if not self.held or not value.saved:
            return np.zeros(len(states), dtype=np.int64)
        each = [value.nbytes / parts_of(s, self.sizes) * self.held * value.times for s in states]
        return np.rint(each).astype(np.int64)

    def _table(self, a: int, b: int, table: Prices) -> None:
        if a != b:
            self.problem.add((a, b), np.minimum(table, NEVER))

    def _between(self, value: PlannedValue, src: tuple[State, ...], dst: tuple[State, ...], times: int) -> Prices:
        key = id(src), id(dst), len(value.shape), value.nbytes, value.learnt, times
        if key not in self._known:
            self._known[key] = self._converted(value, src, dst, times)
        found: Prices = self._known[key]
        return found

    def _converted(self, value: PlannedValue, src: Sequence[State], dst: Sequence[State], times: int) -> Prices:
        states = _around(len(value.shape), len(self.sizes), (*src, *dst))
        place = {s: i for i, s in enumerate(states)}
        closed = self.wires.conversions(states, float(value.nbytes), value.learnt)
        found = closed[np.ix_([place[s] for s in src], [place[s] for s in dst])]
        return np.where(found >= NEVER, NEVER, np.minimum(found, NEVER // max(times, 1)) * times)

    def _of_param(self, value: PlannedValue, stored: Sequence[State], needs: Sequence[State]) -> tuple[Prices, Prices]:
        """A parameter is seen as it is stored, and where ranks use it for different work its gradient is summed: which
        pairs are possible, and what the sums take."""
        made = np.full((len(stored), len(needs)), NEVER, dtype=np.int64)
        summed = np.zeros_like(made)
        for i, s in enumerate(stored):
            for k, need in enumerate(needs):
                axes = [a for a, (have, want) in enumerate(zip(s, need, strict=True)) if have != want]
                if any(s[a] != INVARIANT or need[a] not in (REDUCED, SUM) for a in axes):
                    continue
                made[i, k] = 0
                axes = [a for a in axes if need[a] == REDUCED]  # a bias that one rank adds costs nothing
                if axes and value.learnt:
                    n = math.prod(self.sizes[a] for a in axes)
                    seconds = self.wires.seconds(axes, 2 * (n - 1) / n * value.nbytes / parts_of(s, self.sizes))
                    summed[i, k] = min(round(seconds * PICO) * value.times, NEVER)
        return made, summed

    def _same(self, a: PlannedValue, b: PlannedValue) -> None:
        """What a block reads, the next one reads: so it can stand for all between."""
        if a.variable < 0 or b.variable < 0 or a.variable == b.variable:
            return
        places = {s: i for i, s in enumerate(b.states)}
        table = np.full((len(a.states), len(b.states)), NEVER, dtype=np.int64)
        for i, s in enumerate(a.states):
            if s in places:
                table[i, places[s]] = 0
        self._table(a.variable, b.variable, table)


def _block_of(captured: Captured, repeats: Repeats) -> dict[fx.Node, tuple[int, int]]:
    """Node to its run, and to the number of its block in it; what no module says of is of the block before it."""
    starts: dict[str, list[tuple[int, int, int]]] = {}
    for i, (run, kept) in enumerate(zip(repeats.runs, repeats.kept, strict=True)):
        before = starts.setdefault(run.path, [])
        first = before[-1][1] if before else 0
        before.append((first, first + kept, i))
    made: dict[fx.Node, tuple[int, int]] = {}
    for node in captured.graph.nodes:
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            name = str(path).removeprefix("model").removeprefix(".")
            head, _, number = name.rpartition(".")
            if head in starts and number.isdigit():
                for first, last, i in starts[head]:
                    if first <= int(number) < last:
                        made[node] = i, int(number) - first
    return made


def _around(ndim: int, axes: int, some: Sequence[State]) -> tuple[State, ...]:
    """States that ways between some may lead over: all of sums and splits, and what else occurs."""
    return _states(ndim, axes, frozenset(t for s in some for t in s))


@lru_cache(maxsize=1024)
def _states(ndim: int, axes: int, others: frozenset[Any]) -> tuple[State, ...]:
    usual = (INVARIANT, REDUCED, SUM, *(split(d) for d in range(ndim)))
    types = list(dict.fromkeys([*usual, *sorted(others, key=repr)]))
    return tuple(s for s in itertools.product(types, repeat=axes) if commute(*(t[0] for t in s)))


__all__ = ["Space"]
