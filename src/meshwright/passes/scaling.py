"""Pruning: a factor on every gradient becomes one on the loss gradient, or one for all gradients of an update.

Hand-written data parallelism sums each gradient over n ranks and divides each by n.  Sum and factor are linear, and so
is the backward in what it starts from: where all gradients have one factor, the backward starts from that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from ..collective import mesh_of_text
from ..errors import PassError
from ..program.ir.inplace import follow, storages, written
from ..program.ir.nodes import UPDATE, annotate, call, checked_value, info_of, is_mutating
from ..program.ir.program import Program
from .gradients import chain_up, is_linear, is_reduction, scale_of
from .slicing import new_storage

aten = torch.ops.aten

_ADDS = {aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default}  # linear in all operands together


@dataclass(frozen=True)
class Scaled:
    """A reduction with the factors around it.

    Attributes:
        node: the reduction; ``factor``: by which its result is multiplied; ``scales``: the nodes that do it.
        degree: ranks that are summed over.
        born: where its gradient leaves autograd.
    """

    node: fx.Node
    factor: float
    scales: tuple[fx.Node, ...]
    degree: int
    born: fx.Node


@dataclass
class Pruned:
    """What was done.

    Attributes:
        removed: scale nodes that are gone.
        folded: the factor that the backward now starts from; 1.0 if none.
        rescaled: factor to how many gradients are multiplied with it, together, before their update.
    """

    removed: int = 0
    folded: float = 1.0
    rescaled: dict[float, int] = field(default_factory=dict)

    def text(self) -> str:
        """In words; empty if there was nothing to do."""
        if not self.removed:
            return ""
        if not self.rescaled:
            return f"{self.removed} scale ops pruned: the backward starts from {self.folded:g}"
        each = ", ".join(f"{n} by {f:g}" for f, n in self.rescaled.items())
        return f"{self.removed} scale ops pruned: gradients are scaled together at the update ({each})"


_TAILS = 4  # each costs a walk through the program


def prune(program: Program) -> Pruned:
    """Take the factors off the gradients of a program, whose graph is changed.

    Raises:
        PassError: a gradient that is scaled as if it were summed over ranks, but is not.
    """
    found = [_scaled(n) for n in program.graph.nodes if is_reduction(n) and n.args[1] in ("sum", "avg")]
    pruned = [s for s in found if s.factor != 1.0]
    _all_summed(program, found, {s.degree for s in pruned if math.isclose(s.factor, 1 / s.degree)})
    made = Pruned(removed=sum(len(s.scales) + (s.node.args[1] == "avg") for s in pruned))
    if not pruned:
        return made
    factor = pruned[0].factor
    one = all(math.isclose(s.factor, factor) and s.degree == pruned[0].degree for s in found)
    seeds = [n for n in program.graph.nodes if info_of(n).seed] if one and program.merged is None else []
    # Gradients that are part of the loss (a penalty) have seeds in the forward: then the later ones alone will do.
    tails = (seeds[k:] for k in range(min(len(seeds), _TAILS)))
    seeds = next((tail for tail in tails if _linear(program, tail, {s.node for s in found})), [])
    if seeds:
        for s in pruned:
            _unscale(s)
        follow(program.graph)
        for seed in seeds:
            _fold(seed, factor)
        made.folded = factor
        return made
    _rescale(program, pruned, made)
    return made


# ---------------------------------------------------------------------------------------------- finding


def _scaled(node: fx.Node) -> Scaled:
    *_, axes, text = node.args
    mesh = mesh_of_text(str(text))
    degree = math.prod(mesh.axis_size(a) for a in str(axes).split(","))
    factor, scales = (1 / degree if node.args[1] == "avg" else 1.0), []
    above = list(chain_up(node.args[0]))  # type: ignore[arg-type]
    for n in above[:-1]:
        by = scale_of(n)
        if len(n.users) > 1:
            break
        if by is not None:
            scales.append(n)
            factor *= by
    below = node
    while len(below.users) == 1:
        (below,) = below.users
        if not is_linear(below):
            break
        by = scale_of(below)
        if by is not None:
            scales.append(below)
            factor *= by
    return Scaled(node, factor, tuple(scales), degree, above[-1])


def _all_summed(program: Program, found: list[Scaled], degrees: set[int]) -> None:
    """No gradient is divided by a number of ranks without having been summed over them."""
    if not degrees:
        return
    known = {s.born for s in found}
    for born in program.graph.nodes:
        if not info_of(born).grad_of or born in known:
            continue
        node, factor = born, 1.0
        while len(node.users) == 1 and is_linear(next(iter(node.users))):
            (node,) = node.users
            factor *= scale_of(node) or 1.0
        degree = next((n for n in degrees if math.isclose(factor, 1 / n)), None)
        if degree is not None:
            names = ", ".join(name for name, _ in info_of(born).grad_of)
            raise PassError(
                f"the gradient of {names} is scaled by 1/{degree} at {info_of(node).line or node.name} but never "
                "summed over ranks, as the others are: all-reduce it too, or leave out the factor"
            )


def _linear(program: Program, seeds: list[fx.Node], ends: set[fx.Node]) -> bool:
    """Whether ``ends`` are linear in ``seeds`` alone, and all that the program does with seeds goes through them."""
    kept = {s for n in program.placeholders for s in storages(n)}
    found = set(seeds)
    for node in program.graph.nodes:
        given: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), given.append)
        scaled = [n in found for n in given]
        if not any(scaled):
            continue
        if node.op == "output" or is_mutating(node) or not kept.isdisjoint(written(node)):
            return False
        if node in ends:
            continue
        alone = scaled.count(True) == 1 and (info_of(node).transposed or is_linear(node))
        if not alone and not (node.target in _ADDS and all(scaled)):
            return False
        found.add(node)
    return all(end.args[0] in found for end in ends)


# ---------------------------------------------------------------------------------------------- changing


def _unscale(s: Scaled) -> None:
    for node in s.scales:
        node.replace_all_uses_with(node.all_input_nodes[0])
        node.graph.erase_node(node)
    if s.node.args[1] == "avg":
        s.node.args = (s.node.args[0], "sum", *s.node.args[2:])


def _fold(seed: fx.Node, factor: float) -> None:
    if seed.target is aten.full.default:
        seed.args = (seed.args[0], seed.args[1] * factor, *seed.args[2:])  # type: ignore[operator]
        return
    with seed.graph.inserting_after(seed):
        made = call(seed.graph, aten.mul.Tensor, (seed, factor), info_of(seed))
    seed.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    # Views of the seed become views of what takes its place.
    annotate(seed, value=replace(checked_value(seed), storage=new_storage(seed.graph)))


def _rescale(program: Program, pruned: list[Scaled], made: Pruned) -> None:
    """Multiply the sums of one factor together, right before the first of them is used."""
    by_factor: dict[float, list[Scaled]] = {}
    for s in pruned:
        by_factor.setdefault(round(s.factor, 15), []).append(s)
        _unscale(s)
    follow(program.graph)
    for listed in by_factor.values():
        order: dict[Any, int] = {n: i for i, n in enumerate(program.graph.nodes)}
        factor, together = listed[0].factor, list[fx.Node]()
        first = len(order)
        for s in sorted(listed, key=lambda s: order[s.node]):
            if order[s.node] > first:  # the others are used before this one is there
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
