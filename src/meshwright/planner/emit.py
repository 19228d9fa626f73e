"""From the optimum of a space to a plan in the user's words: layouts, batch, and wishes where values change theirs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch.fx as fx

from ..layout import LayoutLine, LayoutTable, Partial, Placement, Replicate, Shard
from ..program.capture.module_results import leaving, modules_of
from .folding import folded
from .graph import PlannedOp, PlannedValue
from .prices import PICO, REDUCED, State, Wires
from .solve import Optimum
from .space import Space
from .ways import parts_of

PIPELINE_AXIS = "pp"
Names = Callable[[str], Sequence[str]]  # what a name of the cut model stands for


@dataclass(frozen=True)
class Keeping:
    """How parameters and optimizer states are kept over the axes of the batch.

    Attributes:
        kind: ``"replicated"``, ``"states"`` (ZeRO-1/2), ``"fsdp"`` (ZeRO-3) or ``"kept"`` (ZeRO-3 that keeps what it
            gathered for the backward).
        axes: over which.
        recompute: blocks run again for the backward.
        stages, micro_batches: of a pipeline.
    """

    kind: str = "replicated"
    axes: tuple[str, ...] = ()
    recompute: bool = False
    stages: int = 1
    micro_batches: int = 1

    def __str__(self) -> str:
        words = {
            "replicated": "parameters replicated", "states": "states sharded (ZeRO-1/2)",
            "fsdp": "parameters sharded (ZeRO-3)", "kept": "parameters sharded, gathered once (ZeRO-3)",
        }  # fmt: skip
        over = f" over {','.join(self.axes)}" if self.axes else ""
        piped = f", {self.stages} stages with {self.micro_batches} micro-batches" if self.stages > 1 else ""
        return words[self.kind] + over + (", blocks recomputed" if self.recompute else "") + piped


@dataclass
class Layouts:
    """The optimum of a space, read.

    Attributes:
        space, optimum: of which it is.
        axes: names of the mesh's axes, by what they do.
        inner: the outermost axis, of the batch, is two: of so many ranks the inner one (hybrid sharding); 0: one.
        shown: part of the time of gradients' sums that the optimum counts.
        roles: of each axis: ``"dp"``, ``"cp"``, ``"ep"`` or ``"tp"``.
        sizes: of each axis.
    """

    space: Space
    optimum: Optimum
    axes: tuple[str, ...] = ()
    inner: int = 0
    shown: float = 0.0
    roles: tuple[str, ...] = field(init=False)
    sizes: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.roles, self.sizes = tuple(self._role(a) for a in range(len(self.space.sizes))), self.space.sizes
        if self.inner:
            self.roles = self.roles[:1] + self.roles
            self.sizes = (self.sizes[0] // self.inner, self.inner, *self.sizes[1:])
            self.axes = (f"{self.axes[0]}2", *self.axes) if self.axes else ()
        if not self.axes:
            self.axes = _named(self.roles)

    def hybrid(self, inner: int) -> Layouts:
        """The same with the outermost axis as two."""
        return Layouts(self.space, self.optimum, (), inner, self.shown)

    def spread(self, state: State) -> State:
        """A state by the axes that there are."""
        return state[:1] + state if self.inner else state

    def stored(self, value: PlannedValue) -> State:
        """The state of a parameter, a buffer or a tensor of the batch."""
        return value.states[self.optimum.values[value.variable]]

    def made(self, value: PlannedValue) -> State:
        """The state in which a value is made, or stored."""
        if value.maker is None:
            return self.stored(value)
        op, k = value.maker
        return self.way(op).outputs[k]

    @cached_property
    def wires(self) -> Wires:
        """The axes as links."""
        return Wires(self.sizes, self.space.wires.hardware)

    def way(self, op: PlannedOp) -> Any:
        """How an op runs."""
        return op.ways[self.optimum.values[op.variable]]

    def read(self, value: PlannedValue) -> State:
        """The state in which a value is read, where several read it in one; else that of its first reader."""
        if value.maker is not None and value.variable >= 0:
            return value.states[self.optimum.values[value.variable]]
        for op, i in value.readers:
            need: State = self.way(op).inputs[i]
            return need
        return self.made(value)

    def _role(self, axis: int) -> str:
        """What an axis does mostly: of experts and other parameters by bytes, else of the batch."""
        experts = {op.inputs[i] for op in self.space.ops for i in self._experts(op)}
        params = [v for v in self.space.values.values() if v.kind == "param"]
        mine = [v for v in params if self._splits(v, axis)]
        batch = [self.stored(v)[axis][0] for v in self.space.values.values() if v.kind == "batch"]
        dims = {p.dim for p in batch if isinstance(p, Shard)}
        of_experts = sum(v.nbytes * v.times for v in mine if v.key in experts)
        if dims and of_experts > sum(v.nbytes * v.times for v in mine) / 2:
            return "ep"
        large = sum(v.nbytes * v.times for v in mine) > sum(v.nbytes * v.times for v in params) / 2
        if large or not dims:
            return "tp"
        return "dp" if 0 in dims else "cp"

    def _splits(self, value: PlannedValue, axis: int) -> bool:
        return isinstance(self.stored(value)[axis][0], Shard)

    def _experts(self, op: PlannedOp) -> Iterator[int]:
        if op.name.startswith("experts"):
            yield from (i for i in (3, 4) if i < len(op.inputs))

    def of_param(self, value: PlannedValue) -> tuple[int, ...]:
        """Axes over which the gradient of a parameter is summed."""
        state = self.spread(self.stored(value))
        needs = [self.spread(self.way(op).inputs[i]) for op, i in value.readers]
        return tuple(
            a for a in range(len(self.sizes)) if state[a][0] == REDUCED[0] and any(need[a] == REDUCED for need in needs)
        )

    # -- in words -------------------------------------------------------------------------------------

    def placements(self, state: State) -> dict[str, Placement]:
        """A state by axes' names, without what is replicated."""
        return {
            name: t[0]
            for name, t in zip(self.axes, self.spread(state), strict=True)
            if not isinstance(t[0], (Replicate, Partial))
        }

    def lines(self, names: Names) -> dict[str, LayoutLine]:
        """What is split of parameters and buffers, with why."""
        made = {}
        for value in self.space.values.values():
            if value.kind in ("param", "buffer"):
                placements = self.placements(self.stored(value))
                if placements or value.kind == "param":
                    for name in names(value.label):
                        made[name] = LayoutLine(placements, self._why(value, placements))
        return made

    def _why(self, value: PlannedValue, placements: Mapping[str, Placement]) -> str:
        readers = [op for op, _ in value.readers]
        if not readers:
            return "not used"
        op = readers[0]
        at = f" ({op.name.rstrip('_0123456789')} at {op.where})" if op.where else ""
        out = self.spread(self.way(op).outputs[0])
        said = []
        for name in placements:
            t = out[self.axes.index(name)][0]
            word = "summed" if isinstance(t, Partial) else "by outputs" if isinstance(t, Shard) else "whole"
            said.append(f"over {name} {word}")
        summed = [self.axes[a] for a in self.of_param(value)]
        said += [f"gradient summed over {','.join(summed)}"] if summed else []
        return "; ".join(said) + at

    def batch(self) -> dict[str, Any]:
        """Placements of the tensors of the batch."""
        found = {
            v.label.removeprefix("batch."): self.placements(self.stored(v))
            for v in self.space.values.values()
            if v.kind == "batch"
        }
        first = next(iter(found.values()), {})
        return dict(first) if found and all(p == first for p in found.values()) else found

    def wishes(self, names: Names) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs and outputs of modules that have to be brought to a layout which dispatch would not choose.

        What is summed where it is whole, or read as it is made, dispatch does by itself.
        """
        inputs: dict[str, Any] = {}
        outputs: dict[str, Any] = {}
        nodes = {n.name: n for n in self.space.captured.graph.nodes}
        returned = Counter(
            path for v in self.space.values.values() if v.maker is not None for path in leaving(nodes[v.key[0]])
        )
        for value in self.space.values.values():
            if value.maker is None or not value.dtype.is_floating_point:
                continue
            made, read = self.spread(self.made(value)), self.spread(self.read(value))
            axes = [a for a in range(len(made)) if made[a][0] != read[a][0]]
            wanted = {self.axes[a]: read[a][0] for a in axes if self._wished(made[a][0], read[a][0])}
            module = self._module(nodes[value.key[0]])
            if wanted and module and returned[module] == 1:  # of several results a wish would be for all
                outputs.update({name: {**outputs.get(name, {}), **wanted} for name in names(module)})
        return inputs, outputs

    @staticmethod
    def _wished(made: Placement, read: Placement) -> bool:
        if isinstance(made, Partial):
            return isinstance(read, Shard)
        return isinstance(made, Shard) and not isinstance(read, Partial)

    def _module(self, node: fx.Node) -> str:
        """The innermost module whose output a node is; empty where it is that of none."""
        stack = modules_of(node)
        inside = any(stack[-1:] and stack[-1] in modules_of(user) for user in node.users if user.op != "output")
        return stack[-1] if stack and not inside else ""

    # -- estimates ------------------------------------------------------------------------------------

    def seconds(self, micro_batches: int = 1) -> tuple[float, float]:
        """Of ops, and of collectives on activations; each micro-batch launches all of them."""
        compute = self._computing(micro_batches)
        critical = self.optimum.price / PICO - self._computing(1) - sum(s for s, *_ in self.summed) * self.shown
        return compute, critical + (micro_batches - 1) * self._latencies

    def _computing(self, micro_batches: int) -> float:
        launch = self.space.wires.hardware.launch * micro_batches
        return sum(times * max(seconds, launches * launch) for times, seconds, launches in self._computed)

    @cached_property
    def _computed(self) -> list[tuple[int, float, int]]:
        """Of each op: how many it stands for, seconds, and its launches, forward and backward."""
        return [(op.times, sum(op.seconds) * self.way(op).work, sum(map(bool, op.seconds))) for op in self.space.ops]

    @cached_property
    def _latencies(self) -> float:
        """Seconds that collectives on activations take whatever they send."""
        total, wires = 0.0, self.wires
        for value in self.space.values.values():
            if value.maker is None or not value.learnt:
                continue
            for a, (made, read) in enumerate(
                zip(self.spread(self.made(value)), self.spread(self.read(value)), strict=True)
            ):
                both = not isinstance(made[0], Replicate), isinstance(read[0], Shard)  # forward, backward
                if made[0] != read[0] and not isinstance(read[0], Partial):
                    total += sum(both) * wires.seconds((a,), 0.0) * value.times
        return total

    @cached_property
    def summed(self) -> list[tuple[float, float, tuple[int, ...], int]]:
        """Of each parameter: seconds of the sum of its gradient, bytes on a rank, axes, and how many there are."""
        made = []
        for value in self.space.values.values():
            if value.kind == "param":
                axes, state = self.of_param(value), self.stored(value)
                local = value.nbytes / parts_of(state, self.space.sizes)
                n = math.prod(self.sizes[a] for a in axes)
                sent = self.wires.seconds(axes, 2 * (n - 1) / n * local) if axes and value.learnt else 0.0
                made.append((sent * value.times, local * value.times, axes, value.times))
        return made

    @cached_property
    def crossing(self) -> float:
        """Bytes of what blocks give to those behind them, of all blocks."""
        space, total = self.space, 0.0
        for value in space.values.values():
            here = space.block_of(value.maker[0]) if value.maker is not None else None
            if here is not None and value.learnt and any(space.block_of(op) != here for op, _ in value.readers):
                total += value.nbytes / parts_of(self.read(value), space.sizes) * value.times
        return total

    @cached_property
    def activations(self) -> tuple[float, float]:
        """Bytes that are held for the backward, roughly: of all ops, and of those outside of blocks that repeat."""
        space = self.space
        return self._activations(), self._activations(lambda op: not space.in_block(op))

    def _activations(self, of: Callable[[PlannedOp], bool] | None = None) -> float:
        roots: dict[Any, Any] = {}
        for op in self.space.ops:
            for k, i in op.counted.views:
                if k < len(op.outputs) and i < len(op.inputs):
                    roots[op.outputs[k]] = roots.get(op.inputs[i], op.inputs[i])
        held: dict[Any, float] = {}
        for key, value in self.space.values.items():
            root = roots.get(key, key)
            if of is not None and (value.maker is None or not of(value.maker[0])):
                continue
            if value.saved and not value.kind and not self.space.values[root].kind:
                local = value.nbytes / parts_of(self.read(value), self.space.sizes) * value.times
                held[root] = max(held.get(root, 0.0), local)
        return sum(held.values())


def _named(roles: Sequence[str]) -> tuple[str, ...]:
    """Names of axes by their roles; of several with one role the outer ones get a number."""
    made: list[str] = []
    for a, role in enumerate(roles):
        later = roles[a + 1 :].count(role)
        made.append(role if not later else f"{role}{later + 1}")
    return tuple(made)


def table_of(
    layouts: Layouts, storage: Keeping, repeats_names: Names, every: Sequence[str] = (), *, wishes: bool = True,
    blocks: Sequence[str] = (), made_for: Mapping[str, str] | None = None, notes: tuple[str, ...] = (),
    fold: bool = True,
) -> LayoutTable:  # fmt: skip
    """The plan as a table, for a model of which the names are given."""
    lines = layouts.lines(repeats_names)
    inputs, outputs = layouts.wishes(repeats_names) if wishes else ({}, {})
    options: dict[str, Any] = {}
    if storage.kind in ("fsdp", "kept"):
        options["fsdp"] = storage.axes[0] if len(storage.axes) == 1 else list(storage.axes)
        split = {n: [a for a in storage.axes if a not in line.placements] for n, line in lines.items()}
        if any(len(v) < len(storage.axes) for v in split.values()):
            over = {n: v for n, v in split.items() if v}
            options["fsdp"] = folded(over, every) if fold else over
        options["reshard_after_forward"] = storage.kind == "fsdp"
    elif storage.kind == "states":
        options["shard_states"] = storage.axes[0] if len(storage.axes) == 1 else list(storage.axes)
    if storage.recompute and blocks:
        options["recompute"] = list(blocks)
    sizes = dict(zip(layouts.axes, layouts.sizes, strict=True))
    if storage.stages > 1:
        sizes = {PIPELINE_AXIS: storage.stages, **sizes}
        options["stages"] = {PIPELINE_AXIS: "auto"}
        options["passes"] = [f"pipeline:micro_batches={storage.micro_batches},schedule=1f1b"]
    if fold:
        lines = folded(lines, every)
        outputs = folded(outputs, every)
    return LayoutTable(
        sizes, lines, layouts.batch(), notes, inputs=inputs, outputs=outputs, options=options, made_for=made_for
    )


__all__ = ["PIPELINE_AXIS", "Keeping", "Layouts", "table_of"]
