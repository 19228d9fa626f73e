"""Errors in merged steps, each planted in the parts of a pipeline or of ``gradient-merge``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.fx as fx

from meshwright.collective import WAIT_OP
from meshwright.program import Program
from meshwright.program.ir.edit import new_storage
from meshwright.program.ir.nodes import call, checked_value, info_of
from meshwright.program.ir.program import WEIGHT
from meshwright.program.ir.subgraphs import read_instead
from meshwright.program.run.pipeline import _Run

aten = torch.ops.aten
Edit = Callable[[Program], None]


def _of(program: Program, kind: str, part: str) -> Iterator[tuple[Program, fx.Node, str]]:
    """Places of a kind of input in parts whose names begin so, with the names of inputs."""
    for name, made in program.parts.items():
        if name.startswith(part):
            yield from (
                (made, n, i.name) for n, i in zip(made.placeholders, made.inputs, strict=True) if i.kind == kind
            )


def _sums(program: Program, part: str = "B") -> list[tuple[fx.Node, str]]:
    """The ops that add to sums of gradients, and of which parameter."""
    places = [(n, name) for _, n, name in _of(program, "accumulator", part) if name.endswith(("weight", "bias"))]
    return [(u, name) for n, name in places for u in n.users if u.target is aten.add_.Tensor and u.args[0] is n]


def _factor(node: fx.Node, by: float) -> None:
    node.kwargs = {**node.kwargs, "alpha": node.kwargs.get("alpha", 1) * by}


def skipped_sum(program: Program) -> None:
    """Micro-batches of a stage add nothing to the sum of a parameter."""
    _factor(_sums(program)[0][0], 0)


def twice_added(program: Program) -> None:
    """Micro-batches of a stage count twice, in one parameter."""
    _factor(_sums(program)[-1][0], 2)


def slightly_more(program: Program) -> None:
    """All of a stage is a two-thousandth too large."""
    for node, _ in _sums(program):
        _factor(node, 1.0005)


def unweighted(program: Program) -> None:
    """All micro-batches weigh alike."""
    for _, n, name in _of(program, "accumulator", "B"):
        if name.startswith(WEIGHT):
            for node in [u for u in n.users if u.target is aten.add_.Tensor]:
                _ones(node.args[1])


def _ones(node: Any) -> None:
    graph = node.graph
    with graph.inserting_after(node):
        value = checked_value(node).fresh(new_storage(graph))
        ones = call(graph, aten.ones_like.default, (node,), info_of(node).beside(value))
    read_instead([u for u in node.users if u is not ones], {node: ones})


def weight_left_out(program: Program) -> None:
    """What micro-batches weigh is not added to the sum that gradients are divided by."""
    for _, n, name in _of(program, "accumulator", "B"):
        if name.startswith(WEIGHT):
            for node in [u for u in n.users if u.target is aten.add_.Tensor]:
                _factor(node, 0.5)


def last_alone(program: Program) -> None:
    """A sum is written over, so that only the last micro-batch counts."""
    node, _ = _sums(program)[0]
    node.target = aten.copy_.default
    node.kwargs = {}


def undivided(program: Program) -> None:
    """Sums are not divided by what micro-batches weigh."""
    for name in ("flush", *(n for n in program.parts if n.startswith("R"))):
        for node in [n for n in program.parts[name].graph.nodes if n.target is aten._foreach_div_.Tensor]:
            node.graph.erase_node(node)


def not_emptied(program: Program) -> None:
    """Sums are left as they are, for the next step."""
    for part in program.parts.values():
        for node in [n for n in part.graph.nodes if n.target is aten._foreach_zero_.default]:
            node.graph.erase_node(node)


def swapped_sums(program: Program) -> None:
    """The sums of two parameters of one shape are added to in each other's place."""
    found = [(n, p) for n, p in _sums(program) if p.endswith("bias")]
    (a, _), (b, _) = found[:2]
    a.args, b.args = (b.args[0], a.args[1]), (a.args[0], b.args[1])


def own_part_again(program: Program) -> None:
    """A stage's bucket gets its own part twice."""
    part = next(p for n, p in program.parts.items() if n.startswith("R"))
    wait = next(n for n in part.graph.nodes if n.target is WAIT_OP)
    start: Any = wait.args[0]
    sent = start.args[0]
    with part.graph.inserting_before(start):
        value = checked_value(sent).fresh(new_storage(part.graph))
        own = call(part.graph, aten.clone.default, (sent,), info_of(wait).beside(value))
    with part.graph.inserting_before(wait.next):
        call(part.graph, aten.add_.Tensor, (wait, own), info_of(wait).beside(checked_value(wait)))


def other_place(program: Program) -> None:
    """A stage's gradient is read from the place of another one in the bucket."""
    part = next(p for n, p in program.parts.items() if n.startswith("R"))
    views = [u for n in part.graph.nodes if n.target is WAIT_OP for u in n.users if u.target is aten.as_strided.default]
    a, b = [v for v in views if len(v.args[1]) == 1][:2]  # type: ignore[arg-type]
    a.args = (*a.args[:3], b.args[3])


def other_activation(program: Program) -> None:
    """A backward reads another activation of the same shape."""
    part = next(p for n, p in program.parts.items() if n.startswith("B"))
    held = [n for n, i in zip(part.placeholders, part.inputs, strict=True) if i.kind == "held"]
    a, b = next((a, b) for a in held for b in held if a is not b and checked_value(a).shape == checked_value(b).shape)
    read_instead(list(a.users), {a: b})


def flush_of_others(program: Program) -> None:
    """A flush reads two sums in each other's place."""
    part = program.parts["flush"]
    sums = {i.name: n for n, i in zip(part.placeholders, part.inputs, strict=True) if i.kind == "accumulator"}
    a, b = sums["layers.0.weight"], sums["layers.1.weight"]
    for user in dict.fromkeys((*a.users, *b.users)):
        user.args = fx.map_arg(user.args, lambda x: b if x is a else a if x is b else x)


def not_emptied_at_the_end(program: Program) -> None:
    """Sums are left as they are by the call that updates."""
    for node in [n for n in program.graph.nodes if n.target is aten._foreach_zero_.default]:
        node.graph.erase_node(node)


PIPELINES: Mapping[str, Edit] = {
    f.__name__: f
    for f in (
        skipped_sum, twice_added, slightly_more, unweighted, weight_left_out, last_alone, undivided, not_emptied,
        swapped_sums, own_part_again, other_place, other_activation,
    )
}  # fmt: skip


def wrong_micro_batch(send: Any = _Run._send) -> Callable[..., None]:
    """In place of ``_Run._send``: gradients of the first two micro-batches are sent in each other's place."""
    waiting: dict[tuple[int, str], Any] = {}

    def sends(run: _Run, m: Any, micro: int, t: torch.Tensor) -> None:
        if not m.name.startswith("B") or micro > 1:
            return send(run, m, micro, t)
        key = id(run), m.name
        if key not in waiting:
            waiting[key] = t
        else:
            send(run, m, 0, t)
            send(run, m, 1, waiting.pop(key))
        return None

    return sends
