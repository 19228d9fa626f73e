"""Pruning: a factor on every gradient becomes one on the loss gradient, or one for all gradients of an update.

Hand-written data parallelism sums each gradient over n ranks and divides each by n.  Sum and factor are linear, and so
is the backward in what it starts from: where that leaves all else as it is, each backward starts from a factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from ..collective import mesh_of_text
from ..errors import PassError
from ..layout import Partial
from ..program.ir.inplace import follow, storages, written
from ..program.ir.linear import is_linear, is_zero, lends_shape, linear_in, scale_of
from ..program.ir.nodes import UPDATE, annotate, call, checked_value, info_of, is_mutating, is_sum, target_name
from ..program.ir.program import Program
from .gradients import chain_up, is_reduction, parameter_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Scaled:
    """A reduction with the factors around it.

    Attributes:
        node: the reduction; ``factor``: by which its result is multiplied; ``scales``: the nodes that do it.
        degree: ranks that are summed over.
        averages: whether the reduction divides by them itself.
    """

    node: fx.Node
    factor: float
    scales: tuple[fx.Node, ...]
    degree: int
    averages: bool


@dataclass
class Pruned:
    """What was done.

    Attributes:
        removed: scale nodes that are gone.
        folded: the factors that backwards now start from; empty if none.
        rescaled: factor to how many gradients are multiplied with it, together, before their update.
        why: where ``rescaled``, why the backward does not start from the factor.
    """

    removed: int = 0
    folded: tuple[float, ...] = ()
    rescaled: dict[float, int] = field(default_factory=dict)
    why: str = ""

    def text(self) -> str:
        """In words; empty if there was nothing to do."""
        if not self.removed:
            return ""
        if not self.rescaled:
            starts = " and ".join(f"{f:g}" for f in self.folded)
            return f"{self.removed} scale ops pruned: the backward starts from {starts}"
        each = ", ".join(f"{n} by {f:g}" for f, n in self.rescaled.items())
        why = f"; the backward cannot start from that: {self.why}" if self.why else ""
        return f"{self.removed} scale ops pruned: gradients are scaled together at the update ({each}){why}"


_TAILS = 4  # each costs a walk through the program


def prune(program: Program) -> Pruned:
    """Take the factors off the gradients of a program, whose graph is changed.

    Raises:
        PassError: a gradient that is scaled as if it were summed over ranks, but is not.
    """
    taken = set[fx.Node]()
    found = [_scaled(n, taken) for n in program.graph.nodes if is_reduction(n) and is_sum(n)]
    pruned = [s for s in found if s.scales or s.averages]
    _all_summed(program, found, {s.degree for s in pruned if math.isclose(s.factor, 1 / s.degree)})
    if not pruned:
        return Pruned()
    seeds = [n for n in program.graph.nodes if info_of(n).seed] if not program.parts else []
    why = ""
    # Gradients that are part of the loss (a penalty) have seeds in the forward: then the later ones alone will do.
    for k in range(min(len(seeds), _TAILS)):
        starts = Starts(program, seeds[k:], pruned)
        if starts.found:
            for s in starts.moved:
                _unscale(s)
            follow(program.graph)
            for seed, factor in starts.found.items():  # ``full(shape, 1.0)``
                seed.args = (seed.args[0], seed.args[1] * factor, *seed.args[2:])  # type: ignore[operator]
            return Pruned(_count(starts.moved), tuple(dict.fromkeys(starts.found.values())))
        why = why or starts.why
    made = Pruned(_count(pruned), why=why)
    _rescale(program, pruned, made)
    return made


def _count(pruned: list[Scaled]) -> int:
    return sum(len(s.scales) + s.averages for s in pruned)


# ---------------------------------------------------------------------------------------------- finding


def _scaled(node: fx.Node, taken: set[fx.Node]) -> Scaled:
    """A reduction with the factors around it that no other one has (``taken``)."""
    *_, axes, text = node.args
    mesh = mesh_of_text(str(text))
    degree = math.prod(mesh.axis_size(a) for a in str(axes).split(","))
    averages = node.args[1] == "avg" and not _narrow(node)
    factor, scales = (1 / degree if averages else 1.0), []
    for n in list(chain_up(node.args[0]))[:-1]:  # type: ignore[arg-type]
        # Who divides halves in front of a sum does so that they do not overflow in it.
        if len(n.users) > 1 or n in taken or _narrow(n):
            break
        if (by := scale_of(n)) is not None:
            scales.append(n)
            factor *= by
    below = node
    while len(below.users) == 1:
        (below,) = below.users
        if not is_linear(below):
            break
        if (by := scale_of(below)) is not None:
            scales.append(below)
            factor *= by
    taken.update(scales)
    return Scaled(node, factor, tuple(scales), degree, averages)


def _narrow(node: fx.Node) -> bool:
    """Whether what a node gives is of a dtype in which a factor earlier or later makes numbers vanish or overflow."""
    return any(v.dtype.is_floating_point and torch.finfo(v.dtype).max < 1e30 for v in info_of(node).values)


def _all_summed(program: Program, found: list[Scaled], degrees: set[int]) -> None:
    """No gradient is divided by a number of ranks without having been summed over them."""
    if not degrees:
        return
    known = {name for s in found for name in parameter_of(s.node)}
    for born in program.graph.nodes:
        named = info_of(born).grad_of
        if not named or any(name in known or any(isinstance(p, Partial) for p in spec.layout.placements)
                            for name, spec in named):  # fmt: skip
            continue
        node, factor = born, 1.0
        while len(node.users) == 1 and is_linear(next(iter(node.users))):
            (node,) = node.users
            factor *= scale_of(node) or 1.0
        degree = next((n for n in degrees if math.isclose(factor, 1 / n)), None)
        if degree is not None:
            names = ", ".join(name for name, _ in named)
            raise PassError(
                f"the gradient of {names} is scaled by 1/{degree} at {info_of(node).line or node.name} but never "
                "summed over ranks, as the others are: all-reduce it too, or leave out the factor"
            )


# ---------------------------------------------------------------------------------------------- where backwards start


class Starts:
    """From what backwards have to start so that factors around reductions may go and all else stays as it is.

    Each value that follows on the seeds may then be another multiple of what it was.  Which one it has to be is known
    at the end of the program (1 of what updates and returns read), and from there upwards: a removed factor has to be
    in what it was applied to; where a node is linear in operands, they have to be the multiple that the result is, all
    of them; all else has to be 1.

    Args:
        seeds: from which backwards start; others stay.

    Attributes:
        moved: the reductions that follow on the seeds.
        found: each seed that changes to its factor; empty where there is none.
        why: why there is none.
    """

    def __init__(self, program: Program, seeds: list[fx.Node], pruned: list[Scaled]) -> None:
        self.graph, self.why = program.graph, ""
        self.reached = set(seeds)  # what follows on the seeds
        for node in self.graph.nodes:
            if not self.reached.isdisjoint(node.all_input_nodes) and not lends_shape(node):
                self.reached.add(node)
        self.moved = [s for s in pruned if s.node in self.reached]
        self.factors: dict[fx.Node, float] = {}
        for s in self.moved:
            self.factors.update((n, scale_of(n) or 1.0) for n in s.scales)
            if s.averages:
                self.factors[s.node] = 1 / s.degree
        self.dirty = {x for n in self.graph.nodes for x in written(n)}
        self.wanted: dict[fx.Node, float] = {}
        self.found: dict[fx.Node, float] = {}
        if self.moved and all(self._upwards(n, set(seeds)) for n in reversed(self.graph.nodes)):
            self.found = {n: self.wanted[n] for n in seeds if not math.isclose(self.wanted.get(n, 1.0), 1.0)}

    def _upwards(self, node: fx.Node, seeds: set[fx.Node]) -> bool:
        """Pass on what multiple a node has to be to what it is made of; False if that cannot be."""
        want = self.wanted.get(node, 1.0)
        same = math.isclose(want, 1.0)
        if node in seeds:
            return True
        if node not in self.reached:
            return True
        carriers = set(node.all_input_nodes) & self.reached
        if not same:
            made = self._carriers(node)
            if made is None:
                return self._not(node, "is not linear in gradients alone")
            if _narrow(node):
                return self._not(node, f"is {checked_value(node).dtype}, of which small numbers vanish")
            carriers = made
        want *= self.factors.get(node, 1.0)
        for n in carriers:
            if n not in self.reached and not (is_zero(n) and self.dirty.isdisjoint(storages(n))):
                return self._not(node, "adds what does not follow on the backward")
            if not math.isclose(self.wanted.setdefault(n, want), want):
                return self._not(n, "is used with another factor, or with none")
        return True

    def _carriers(self, node: fx.Node) -> set[fx.Node] | None:
        """The operands, of those that follow on the seeds all, in which a node is jointly linear."""
        if node.op == "output" or is_mutating(node):
            return None
        given: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), given.append)
        above = [n for n in given if n in self.reached]
        # Autograd's own ops are linear in the gradient that they are given; where it adds two, in both.
        if (is_sum(node) or (info_of(node).transposed and node.target is not aten.add.Tensor)) and len(above) == 1:
            return set(above)
        return next((set(group) for group in linear_in(node) if group.issuperset(above)), None)

    def _not(self, node: fx.Node, what: str) -> bool:
        line = info_of(node).line
        self.why = f"{target_name(node.target)}{f' ({line})' if line else ''} {what}"
        return False


# ---------------------------------------------------------------------------------------------- changing


def _unscale(s: Scaled) -> None:
    for node in s.scales:
        (given,) = node.all_input_nodes
        annotate(given, grad_of=(*info_of(given).grad_of, *info_of(node).grad_of))
        node.replace_all_uses_with(given)
        node.graph.erase_node(node)
    if s.averages:
        s.node.args = (s.node.args[0], "sum", *s.node.args[2:])


def _rescale(program: Program, pruned: list[Scaled], made: Pruned) -> None:
    """Multiply the sums of one factor together, right before the first of them is used."""
    by_factor: dict[float, list[Scaled]] = {}
    for s in pruned:
        if s.factor != 1.0:
            by_factor.setdefault(round(s.factor, 15), []).append(s)
        _unscale(s)
    follow(program.graph)
    for listed in by_factor.values():
        order: dict[Any, int] = {n: i for i, n in enumerate(program.graph.nodes)}
        factor, together = listed[0].factor, list[fx.Node]()
        first = len(order)
        for s in sorted(listed, key=lambda s: order[s.node]):
            if order[s.node] >= first:  # the others are used before this one is there
                _multiply(program, together, factor)
                together, first = [], len(order)
            together.append(s.node)
            first = min([first, *(order[u] for u in s.node.users)])
        _multiply(program, together, factor)
        made.rescaled[factor] = len(listed)


def _multiply(program: Program, nodes: list[fx.Node], factor: float) -> None:
    """One op that multiplies values in place, ahead of all that reads one of them."""
    readers = {u for n in nodes for u in n.users}
    with program.graph.inserting_before(min(readers)):
        call(program.graph, aten._foreach_mul_.Scalar, (list(nodes), factor), UPDATE)


__all__ = ["Pruned", "prune"]
