"""What one rank holds along a step: the storages that are alive at each node of a program.

The generated code frees a value after its last use, so which storages are alive follows from the order of the nodes;
inputs live throughout, views share the storage of what they look at.  Memory that a kernel takes for itself while it
runs is not known.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from ..program import Program, last_uses
from ..program.ir.host import host_storages
from ..program.ir.nodes import info_of

CATEGORIES = ("parameters", "states", "gradients", "activations", "temporaries", "inputs")

OF_INPUT = {
    "param": "parameters", "state": "states", "accumulator": "gradients", "reduced": "gradients",
    "gathered": "parameters", "held": "activations",
}  # fmt: skip
_OF_ROLE = {
    "forward": "activations",
    "recomputation": "activations",
    "backward": "temporaries",
    "optimizer": "gradients",
}  # scaled ones: clipping
_POINTS = 240


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds.

    Attributes:
        peak: most bytes at one time, on the mesh's device.
        host: bytes of parameters and states that lie in memory of the host instead.
        node, role, line: the op at which that is, its role and the user's line.
        at_peak: category to bytes at that time.  Categories: ``parameters``, optimizer ``states``, ``gradients``,
            ``activations`` (made by the forward, or again for the backward),
            ``temporaries`` (made by the backward, gradients of activations),
            ``inputs`` (batch, buffers, constants, what other stages sent).
        highest: category to the most that it takes at any time.
        along: bytes per category, in this order, after each op (or the highest of several ops: at most 240 points).
        ops: how many ops a step runs.
        starts: role to the number of its first op.
    """

    peak: int
    node: str
    role: str
    line: str
    at_peak: dict[str, int]
    highest: dict[str, int]
    along: tuple[tuple[int, ...], ...]
    ops: int
    starts: dict[str, int]
    host: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)


def memory_of(program: Program) -> Memory:
    """What the rank of a program holds along a step."""
    category, hosted = _categories(program), host_storages(program)
    freed = last_uses(program.graph)
    held: Counter[int] = Counter()  # storage to how many values look at it
    now: Counter[str] = Counter()
    steps: list[tuple[fx.Node, tuple[int, ...]]] = []

    def take(node: fx.Node) -> None:
        for v in (v for v in info_of(node).values if v.storage not in hosted):
            held[v.storage] += 1
            if held[v.storage] == 1:
                now[category[v.storage]] += v.nbytes

    def free(node: fx.Node) -> None:
        for v in (v for v in info_of(node).values if v.storage not in hosted):
            held[v.storage] -= 1
            if held[v.storage] == 0:
                now[category[v.storage]] -= v.nbytes

    for node in program.graph.nodes:
        if node.op == "output":
            break
        take(node)
        if node.op == "placeholder":
            continue
        steps.append((node, tuple(now[c] for c in CATEGORIES)))
        for old in (*freed.get(node, ()), *(() if node.users else (node,))):
            if old.op != "placeholder":
                free(old)
    kept = {v.storage: v.nbytes for node in program.placeholders for v in info_of(node).values if v.storage in hosted}
    return dataclasses.replace(_summary(steps), host=sum(kept.values()))


def _categories(program: Program) -> dict[int, str]:
    """Storage to what it holds."""
    made: dict[int, str] = {}
    for node, given in zip(program.placeholders, program.inputs, strict=True):
        for v in info_of(node).values:
            made.setdefault(v.storage, OF_INPUT.get(given.kind, "inputs"))
    fixed = set(made)
    gradients = {n for n, o in zip(program.results, program.outputs, strict=True) if o.kind == "grad"}
    for node in program.graph.nodes:
        info = info_of(node)
        of_gradient = info.grad_of or info.sync or node in gradients
        for v in info.values:
            if of_gradient and v.storage not in fixed:
                made[v.storage] = "gradients"
            else:
                made.setdefault(v.storage, _OF_ROLE.get(info.role, "temporaries"))
    return made


def _summary(steps: list[tuple[fx.Node, tuple[int, ...]]]) -> Memory:
    if not steps:
        return Memory(0, "", "", "", {}, {}, (), 0, {})
    node, most = max(steps, key=lambda step: sum(step[1]))
    highest = [max(column) for column in zip(*(held for _, held in steps), strict=True)]
    width = -(-len(steps) // _POINTS)
    bins = [steps[i : i + width] for i in range(0, len(steps), width)]
    starts: dict[str, int] = {}
    for i, (at, _) in enumerate(steps):
        role = info_of(at).role
        starts.setdefault("backward" if role == "recomputation" else role, i)
    return Memory(
        sum(most), node.name, info_of(node).role, info_of(node).line, _named(most), _named(highest),
        tuple(max((held for _, held in part), key=sum) for part in bins), len(steps), starts,
    )  # fmt: skip


def _named(held: Any) -> dict[str, int]:
    return dict(zip(CATEGORIES, held, strict=True))
