"""Pruning: a factor on every gradient becomes one on the loss gradient, or one for all gradients of an update.

Hand-written data parallelism sums each gradient over n ranks and divides each by n.  Sum and factor are linear, and so
is the backward in what it starts from: where that leaves all else as it is, each backward starts from a factor.

A factor is a number of one rank's program, and other ranks may have others, or other ops around it.  A factor ahead of
a sum may go up to where this rank's backward starts; one behind a sum only where all ranks have the same one; over a
sum only what is the same on all ranks moves.  Which of these is done, all ranks decide together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
from .agreement import alike_in_groups
from .gradients import chain_up, is_reduction, parameter_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Scaled:
    """A reduction with the factors around it.

    Attributes:
        node: the reduction; ``number``: of it among the collectives of the program.
        ahead, behind: the nodes that multiply what goes in, and what comes out, nearest first.
        degree: ranks that are summed over.
        averages: whether the reduction divides by them itself.
    """

    node: fx.Node
    number: int
    ahead: tuple[fx.Node, ...]
    behind: tuple[fx.Node, ...]
    degree: int
    averages: bool

    @property
    def scales(self) -> tuple[fx.Node, ...]:
        """All nodes that multiply."""
        return self.ahead + self.behind

    @property
    def factor(self) -> float:
        """By which the gradient is multiplied in all."""
        return _product(self.scales) * (1 / self.degree if self.averages else 1.0)

    @property
    def scaled(self) -> bool:
        """Whether there is a factor."""
        return bool(self.scales) or self.averages

    @property
    def moves(self) -> bool:
        """Whether the sum may be multiplied by the factor afterwards."""
        dtype = checked_value(self.node).dtype
        return _holds(dtype, self.factor, dtype)

    @property
    def axes(self) -> list[str]:
        """Over which it sums."""
        return str(self.node.args[-2]).split(",")

    @property
    def name(self) -> str:
        """Of the parameter."""
        return ", ".join(parameter_of(self.node)) or self.node.name

    def near(self) -> Scaled:
        """Without factors on the other side of a cast: the sum has fewer digits than they are applied to."""
        dtype = checked_value(self.node).dtype
        ahead, behind = (
            tuple(n for n in nodes if checked_value(n).dtype is dtype) for nodes in (self.ahead, self.behind)
        )
        return replace(self, ahead=ahead, behind=behind)


def _product(scales: tuple[fx.Node, ...]) -> float:
    return math.prod(scale_of(n) or 1.0 for n in scales)


def _same(a: float, b: float) -> bool:
    """Whether two products of the same numbers are one, whatever the order in which they were multiplied."""
    return math.isclose(a, b, rel_tol=1e-13)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 1.0


def _holds(dtype: torch.dtype, factor: float, like: torch.dtype) -> bool:
    """Whether a dtype holds a factor as precisely as numbers of another dtype are: kernels round a factor to the dtype
    of what they multiply, and all gradients would be off by that."""
    held = torch.tensor(factor, dtype=dtype).real.item()
    return bool(held == factor) or (_eps(like) < 1e-4 and math.isclose(held, factor, rel_tol=_eps(like)))


@dataclass
class Pruned:
    """What was done.

    Attributes:
        removed: scale nodes that are gone.
        folded: the factors that backwards now start from; empty if none.
        rescaled: factor to how many gradients are multiplied with it, together, before their update.
        why: where ``rescaled``, why the backward does not start from the factor.
        decisions: what became of each sum, the same on all ranks.
    """

    removed: int = 0
    folded: tuple[float, ...] = ()
    rescaled: dict[float, int] = field(default_factory=dict)
    why: str = ""
    decisions: tuple[str, ...] = ()

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


_BEHIND, _AHEAD, _MOVES = 1, 2, 3  # places in the first view of a sum, behind its number
_TAILS = 4  # each costs a walk through the program


class Pruning:
    """Takes the factors off the gradients of a program, in two rounds: what ranks have, and what each of them could do.

    Args:
        program: its graph is changed by :meth:`apply`.

    Raises:
        PassError: a gradient that is scaled as if it were summed over ranks, but is not.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        taken = set[fx.Node]()
        sums = ((i, n) for i, n in enumerate(program.collectives()) if is_reduction(n) and is_sum(n))
        self.found = [_scaled(n, i, taken) for i, n in sums]
        degrees = {s.degree for s in self.found if s.scaled and math.isclose(s.factor, 1 / s.degree)}
        _all_summed(program, self.found, degrees)
        self.starts: SeedSolver | None = None
        self.near: list[Scaled] = []
        self.why = ""

    @property
    def factors(self) -> tuple[Any, ...]:
        """The first view: of each sum its number, whether it averages, the factors behind it and ahead of it, and
        whether these may be behind it together."""
        near = [s.near() for s in self.found]
        return tuple(
            (s.number, s.averages, _product(s.behind), _product(n.ahead), n.moves)
            for s, n in zip(self.found, near, strict=True)
        )

    def look(self, views: Mapping[int, tuple[Any, ...]]) -> tuple[Any, ...]:
        """The second view: from the factors of all ranks, which sums this rank's backward could take the factors of,
        which multiples it would then bring to collectives, and why there are none."""
        known = [{v[0]: v[1:] for v in view} for view in views.values()]

        def same(s: Scaled, side: int) -> bool:
            """Whether in each group of ranks that it sums over a factor is one."""
            of = {r: sums[s.number] for r, sums in zip(views, known, strict=True) if s.number in sums}
            alike = {r: (v[0], v[side]) for r, v in of.items()}
            return len(of) == len(views) and alike_in_groups(self.program, s.axes, alike)

        movable = [s for s in self.found if same(s, _AHEAD) and all(v[s.number][_MOVES] for v in known)]
        self.near = [n for s in movable if (n := s.near()).scaled]
        self._look([s for s in self.found if s.scaled and same(s, _BEHIND)])
        if self.starts is None:
            return (), (), self.why
        number = {n: i for i, n in enumerate(self.program.collectives())}
        # As many digits as are the same whatever the order in which a rank multiplies.
        brought = tuple((number[n], float(f"{by:.12e}")) for n, by in self.starts.wanted.items() if n in number)
        return tuple(s.number for s in self.starts.moved), brought, ""

    def _look(self, pruned: list[Scaled]) -> None:
        program = self.program
        seeds = [n for n in program.graph.nodes if info_of(n).seed] if not program.parts else []
        # Gradients that are part of the loss (a penalty) have seeds in the forward: then the later ones alone will do.
        for k in range(min(len(seeds), _TAILS)):
            starts = SeedSolver(program, seeds[k:], pruned)
            if starts.possible:
                self.starts, self.why = starts, ""
                return
            self.why = self.why or starts.why

    def apply(self, views: Mapping[int, tuple[Any, ...]]) -> Pruned:
        """Do what all ranks can do; ``views`` are the second ones."""
        if self.starts is not None and len({v[0] for v in views.values()}) == 1 and self._meet(views):
            return self._fold(self.starts)
        others = [f"on rank {r} {v[2]}" for r, v in views.items() if v[2]]
        why = self.why or next(iter(others), "" if self.starts is None else "ranks meet in it with other factors")
        made = Pruned(_count(self.near), why=why)
        moved = [s for s in self.near if s.averages or not _same(_product(s.ahead), 1.0)]
        made.decisions = tuple(f"the factor of the gradient of {s.name} is behind its sum" for s in moved)
        _rescale(self.program, self.near, made)
        return made

    def _meet(self, views: Mapping[int, tuple[Any, ...]]) -> bool:
        """Whether ranks bring the same multiple to each collective on the way."""
        brought = {r: dict(v[1]) for r, v in views.items()}
        return all(
            alike_in_groups(self.program, str(n.args[-2]).split(","), {r: b.get(i, 1.0) for r, b in brought.items()})
            for i, n in enumerate(self.program.collectives())
        )

    def _fold(self, starts: SeedSolver) -> Pruned:
        names = tuple(f"the backward starts from the factor of the gradient of {s.name}" for s in starts.moved)
        for s in starts.moved:
            _unscale(s)
        follow(self.program.graph)
        for seed, factor in starts.found.items():  # ``full(shape, 1.0)``
            seed.args = (seed.args[0], seed.args[1] * factor, *seed.args[2:])  # type: ignore[operator]
        return Pruned(_count(starts.moved), tuple(dict.fromkeys(starts.found.values())), decisions=names)


def _count(pruned: list[Scaled]) -> int:
    return sum(len(s.scales) + s.averages for s in pruned)


# ---------------------------------------------------------------------------------------------- finding


def _scaled(node: fx.Node, number: int, taken: set[fx.Node]) -> Scaled:
    """A reduction with the factors around it that no other one has (``taken``)."""
    *_, axes, text = node.args
    mesh = mesh_of_text(str(text))
    degree = math.prod(mesh.axis_size(a) for a in str(axes).split(","))
    averages = node.args[1] == "avg" and not _narrow(node)
    ahead, behind = list[fx.Node](), list[fx.Node]()
    for n in list(chain_up(node.args[0]))[:-1]:  # type: ignore[arg-type]
        # Who divides halves in front of a sum does so that they do not overflow in it.
        if len(n.users) > 1 or n in taken or _narrow(n):
            break
        if scale_of(n) is not None:
            ahead.append(n)
    below = node
    while len(below.users) == 1:
        (below,) = below.users
        if not is_linear(below):
            break
        if scale_of(below) is not None:
            behind.append(below)
    taken.update(ahead, behind)
    return Scaled(node, number, tuple(ahead), tuple(behind), degree, averages)


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


class SeedSolver:
    """From what backwards have to start so that factors around reductions may go and all else stays as it is.

    Each value that follows on the seeds may then be another multiple of what it was.  Which one it has to be is known
    at the end of the program (1 of what updates and returns read), and from there upwards: a removed factor has to be
    in what it was applied to; where a node is linear in operands, they have to be the multiple that the result is, all
    of them; all else has to be 1.

    Args:
        seeds: from which backwards start; others stay.

    Attributes:
        moved: the reductions that follow on the seeds.
        possible: whether all factors around these may go.
        found: each seed that changes to its factor.
        why: why they may not.
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
        reached = bool(self.moved) and all(self._upwards(n, set(seeds)) for n in reversed(self.graph.nodes))
        self.possible = reached and all(self._held(n) for n in seeds)
        if self.possible:
            self.found = {n: self.wanted[n] for n in seeds if not _same(self.wanted.get(n, 1.0), 1.0)}

    def _held(self, seed: fx.Node) -> bool:
        """Whether a seed's dtype holds its factor as precisely as the gradients that follow on it are."""
        dtypes = [checked_value(s.node).dtype for s in self.moved]
        finest, own = min(dtypes, key=_eps), checked_value(seed).dtype
        if _holds(own, self.wanted.get(seed, 1.0), finest):
            return True
        return self._not(seed, f"is {own}, which rounds the factor")

    def _upwards(self, node: fx.Node, seeds: set[fx.Node]) -> bool:
        """Pass on what multiple a node has to be to what it is made of; False if that cannot be."""
        want = self.wanted.get(node, 1.0)
        same = _same(want, 1.0)
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
            if not _same(self.wanted.setdefault(n, want), want):
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
    factors = {s: s.factor for s in pruned}
    for s, factor in factors.items():
        if not _same(factor, 1.0):
            known = next((f for f in by_factor if _same(f, factor)), factor)
            by_factor.setdefault(known, []).append(s)
        _unscale(s)
    follow(program.graph)
    for factor, listed in by_factor.items():
        order: dict[Any, int] = {n: i for i, n in enumerate(program.graph.nodes)}
        together = list[fx.Node]()
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
    if not readers:  # here nobody needs what all ranks sum
        return
    with program.graph.inserting_before(min(readers)):
        call(program.graph, aten._foreach_mul_.Scalar, (list(nodes), factor), UPDATE)


__all__ = ["Pruned", "Pruning"]
