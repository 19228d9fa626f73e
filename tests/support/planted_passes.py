"""Errors in passes, each planted as a pass that leaves a well-formed program with a wrong gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from meshwright.collective import COLLECTIVES, STARTS, WAIT_OP
from meshwright.passes import Pass, PassRecord, copied
from meshwright.program import Program
from meshwright.program.check.flow import updates
from meshwright.program.ir.edit import new_storage
from meshwright.program.ir.inplace import follow
from meshwright.program.ir.nodes import annotate, call, checked_value, draws, info_of, is_mutating, is_sum
from meshwright.program.ir.subgraphs import read_instead

aten = torch.ops.aten
Edit = Callable[[Program], None]


@dataclass(frozen=True)
class Planted(Pass):
    """Applies an edit to a copy of the program, on some ranks.

    Attributes:
        edit: changes the graph; raises where there is nothing to change.
        ranks: None: on all.
    """

    name = "planted"
    after = ("data-parallel-optimization", "gradient-merge", "pipeline")

    edit: Edit
    ranks: tuple[int, ...] | None = None

    def apply(self, program: Program) -> tuple[Program, PassRecord]:
        made = copied(program)
        made = replace(made, parts={name: copied(part) for name, part in made.parts.items()})
        if self.ranks is None or program.rank in self.ranks:
            self.edit(made)
        return made, PassRecord(f"planted: {self.edit.__name__}")


def _update(program: Program) -> tuple[fx.Node, dict[str, fx.Node]]:
    """The node that updates, and the gradients that it reads."""
    names = {n: i.name for n, i in zip(program.placeholders, program.inputs, strict=True)}
    node = next(n for n in program.graph.nodes if any(True for _ in updates(n)))
    return node, {names[p]: g for p, g in updates(node)}


def _emit(
    program: Program, before: fx.Node, target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any
) -> fx.Node:
    """A call in memory of its own."""
    value = checked_value(like).fresh(new_storage(program.graph))
    with program.graph.inserting_before(before):
        return call(program.graph, target, args, info_of(before).beside(value), kwargs or None)


def _instead(program: Program, name: str, make: Callable[[fx.Node, fx.Node], fx.Node]) -> None:
    """Let the update read another gradient of a parameter."""
    update, gradients = _update(program)
    gradient = gradients[name]
    read_instead([update], {gradient: make(update, gradient)})


def scaled(program: Program, by: float = 1.002) -> None:
    """A factor is wrong."""
    _instead(program, "up.weight", lambda u, g: _emit(program, u, aten.mul.Tensor, (g, by), g))


def swapped(program: Program) -> None:
    """The update reads two gradients of one shape in each other's place."""
    update, g = _update(program)
    read_instead([update], {g["up.weight"]: g["mid.weight"], g["mid.weight"]: g["up.weight"]})


def _views(program: Program) -> dict[str, fx.Node]:
    """Parts of buckets that the update reads."""
    return {n: g for n, g in _update(program)[1].items() if g.target is aten.as_strided.default}


def wrong_bucket(program: Program) -> None:
    """A gradient is read from the place of another one in the bucket."""
    views = _views(program)
    a, b = views["up.bias"], views["mid.bias"]
    a.args = (*a.args[:3], b.args[3])


def shifted(program: Program) -> None:
    """A gradient is read one element further on."""
    view = _views(program)["up.bias"]
    view.args = (*view.args[:3], view.args[3] + 1)


def missing_wait(program: Program) -> None:
    """What was sent is read, and not what has arrived."""
    wait = next(n for n in program.graph.nodes if n.target is WAIT_OP)
    sent = wait.args[0].args[0]
    copy = _emit(program, wait.args[0], aten.clone.default, (sent,), sent)
    read_instead(list(wait.users), {wait: copy})
    follow(program.graph)


def own_part_twice(program: Program) -> None:
    """A rank's own part is added to the sum once more."""
    start = next(n for n in program.graph.nodes if n.target in STARTS.values() and is_sum(n))
    wait, sent = next(n for n in start.users if n.target is WAIT_OP), start.args[0]
    own = _emit(program, start, aten.clone.default, (sent,), sent)
    with program.graph.inserting_before(wait.next):
        call(program.graph, aten.add_.Tensor, (wait, own), info_of(wait).beside(checked_value(wait)))


def largest(program: Program) -> None:
    """Ranks are reduced by their largest value in place of their sum."""
    node = next(
        n for n in program.graph.nodes if n.target in COLLECTIVES and is_sum(n) and info_of(n).role != "forward"
    )
    node.args = (node.args[0], "max", *node.args[2:])


def averaged(program: Program) -> None:
    """Ranks are averaged in place of summed."""
    node = next(
        n for n in program.graph.nodes if n.target in COLLECTIVES and is_sum(n) and info_of(n).role != "forward"
    )
    node.args = (node.args[0], "avg", *node.args[2:])


def rounded(program: Program) -> None:
    """A gradient is cast to bfloat16 on its way."""

    def narrow(u: fx.Node, g: fx.Node) -> fx.Node:
        low = _emit(program, u, aten._to_copy.default, (g,), g, dtype=torch.bfloat16)
        annotate(low, value=checked_value(low).fresh(checked_value(low).storage, torch.bfloat16))
        return _emit(program, u, aten._to_copy.default, (low,), g, dtype=checked_value(g).dtype)

    _instead(program, "up.weight", narrow)


def empty(program: Program) -> None:
    """A gradient is zeros."""
    _instead(program, "up.weight", lambda u, g: _emit(program, u, aten.zeros_like.default, (g,), g))


def one_row_left_out(program: Program) -> None:
    """One row of a gradient is not there."""

    def without(u: fx.Node, g: fx.Node) -> fx.Node:
        made = _emit(program, u, aten.clone.default, (g,), g)
        value = checked_value(made)
        row = replace(value, shape=value.shape[1:], given=None)
        with program.graph.inserting_before(u):
            first = call(program.graph, aten.select.int, (made, 0, 0), info_of(u).beside(row))
            call(program.graph, aten.zero_.default, (first,), info_of(u).beside(row))
        return made

    _instead(program, "up.weight", without)


def another_mask(program: Program) -> None:
    """The backward of a dropout draws its mask again."""
    mask = next(n for n in program.graph.nodes if draws(n) or "dropout" in str(n.target))
    later = [u for u in _behind(mask) if info_of(u).role == "backward" and not is_mutating(u)]
    reader = next(u for u in later if mask in u.all_input_nodes)
    with program.graph.inserting_before(reader):
        again = program.graph.node_copy(mask)
    annotate(again, value=checked_value(mask).fresh(new_storage(program.graph)), role="backward")
    read_instead([reader], {mask: again})


def _behind(node: fx.Node) -> list[fx.Node]:
    seen: dict[fx.Node, None] = {}
    stack = list(node.users)
    while stack:
        at = stack.pop()
        if at not in seen:
            seen[at] = None
            stack.extend(at.users)
    return list(seen)


def written_over(program: Program) -> None:
    """What the backward reads is written over."""
    node = next(n for n in program.graph.nodes if n.target is aten.tanh.default)
    later = next(n for n in program.graph.nodes if info_of(n).role == "backward")
    with program.graph.inserting_before(later):
        call(program.graph, aten.mul_.Tensor, (node, 1.5), info_of(later).beside(checked_value(node)))


def statistics_twice(program: Program) -> None:
    """The statistics of a batch norm are counted once more."""
    places = dict(zip(program.placeholders, program.inputs, strict=True))
    counter = next(n for n, i in places.items() if i.kind == "buffer" and "num_batches" in i.name)
    with program.graph.inserting_before(next(n for n in program.graph.nodes if info_of(n).role == "backward")):
        info = info_of(counter).beside(checked_value(counter))
        call(program.graph, aten.add_.Tensor, (counter, 1), replace(info, role="forward", writes=True))


PLANTED: Mapping[str, Edit] = {
    f.__name__: f
    for f in (
        scaled, swapped, wrong_bucket, shifted, missing_wait, own_part_twice, largest, averaged, rounded, empty,
        one_row_left_out, written_over, another_mask, statistics_twice,
    )
}  # fmt: skip


def uneven(program: Program) -> None:
    """A factor is wrong where ranks have other numbers of rows."""
    rows = {i.spec.shape[0] for i in program.inputs if i.kind == "batch" and i.spec is not None}
    if any(n % program.mesh.size for n in rows):
        scaled(program)


def unaveraged(program: Program) -> None:
    """A step by hand divides no longer by the number of ranks."""
    divisions = [n for n in program.graph.nodes if n.target is aten.div.Tensor and n.args[1] == program.mesh.size]
    node = divisions[-1]
    node.args = (node.args[0], 1)


@dataclass(frozen=True)
class Early(Planted):
    """The same, ahead of the others."""

    name = "planted-early"
    after = ()
    before = ("data-parallel-optimization", "gradient-merge", "pipeline")
