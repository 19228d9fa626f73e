"""What a rule says about one call, and the strategies that follow from it; nothing is written twice.

Per mesh axis a factor may be sharded where it leads a dim in every tensor that has it; outputs without it are then
Partial (``reduced``).  *whole* factors must not be split.  Groups of tensors in which the op is jointly linear let
Partial pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch

from ..errors import DispatchError
from ..layout import REPLICATE, Partial, Placement, Shard, Spec, chunk_bounds
from ..mesh import Mesh

Dim = tuple[str, ...]  # the factors that make up one dim, major first; () for a dim of size 1
Dims = tuple[Dim, ...]


class Local:
    """What a rule's ``local`` may ask about the rank it runs on, when a plan is made.

    In the call, a local function communicates with ``comm``, a :class:`~meshwright.dispatch.local_comm.LocalComm`.
    """

    def __init__(
        self, rule: Rule, inputs: Sequence[Spec], outputs: Sequence[Spec], here: tuple[int, ...], comm: Any = None
    ) -> None:
        self.rule, self.inputs, self.outputs, self.here = rule, tuple(inputs), tuple(outputs), here
        self.comm: Any = comm

    def out_shape(self, i: int = 0) -> tuple[int, ...]:
        """Shape of this rank's part of output ``i``."""
        return self.outputs[i].local_shape(self.here)

    def in_shape(self, i: int = 0) -> tuple[int, ...]:
        """Shape of this rank's part of input ``i``, after its conversion."""
        return self.inputs[i].local_shape(self.here)

    def is_empty(self) -> bool:
        """Whether this rank's part of an input or output has no elements."""
        return any(0 in spec.local_shape(self.here) for spec in (*self.inputs, *self.outputs))

    def place(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Global shape of the first output, and where in it this rank's part begins."""
        return tuple(self.outputs[0].shape), self.outputs[0].local_offset(self.here)

    def axes(self, factor: str) -> tuple[int, ...]:
        """Mesh axes that split a factor, major first."""
        for dims, spec in zip(self.rule.inputs, self.inputs, strict=True):
            for d, names in enumerate(dims):
                if factor == next((f for f in names if self.rule.sizes[f] != 1), None):
                    return spec.layout.dim_axes().get(d, ())
        return ()

    def bounds(self, factor: str) -> tuple[int, int]:
        """This rank's (start, stop) of a factor."""
        self._as_one(factor)
        return nested_bounds(self.rule.sizes.get(factor, 1), self.inputs[0].mesh, self.axes(factor), self.here)

    def _as_one(self, factor: str) -> None:
        """Raises DispatchError for a factor that is split by blocks: no range is what a rank has of it."""
        for dims, spec in zip(self.rule.inputs, self.inputs, strict=True):
            if any(factor in dims[d] for d in spec.layout.blocks):
                raise DispatchError(f"{self.rule.text}: this op's own function takes no dims that are split by blocks")

    def own(self, dim: int, start: int, stop: int) -> tuple[int, int]:
        """Where in this rank's part of the first input that lies which it has of a range of a dim."""
        spec = self.inputs[0]
        ranges = spec.layout.local_ranges(spec.shape, self.here)[dim]
        lo, hi = (sum(max(min(b, at) - a, 0) for a, b in ranges) for at in (start, stop))
        return lo, hi

    def parts(self, factor: str) -> list[int]:
        """Which part of a factor each rank has that shares all coordinates but those of its axes, in their order."""
        found = []
        for at in self._places(factor):
            part = 0
            for a in self.axes(factor):
                part = part * self.inputs[0].mesh.sizes[a] + at[a]
            found.append(part)
        return found

    def spans(self, factor: str, size: int | None = None, among: str | None = None) -> list[tuple[int, int]]:
        """(start, stop) of a factor on each rank that shares all coordinates but those of its axes, in their order.

        ``size``: of as many things as that, split as the factor is; ``among``: on each rank of the group of another
        factor's axes, which may be others.
        """
        self._as_one(factor)
        n = self.rule.sizes[factor] if size is None else size
        mesh, axes, here = self.inputs[0].mesh, self.axes(factor), dict(enumerate(self.here))
        return [nested_bounds(n, mesh, axes, here | at) for at in self._places(among or factor)]

    def group(self, factor: str) -> list[tuple[int, ...]]:
        """Coordinates of the ranks that share all but those of a factor's axes, in their order."""
        return [tuple(at.get(a, here) for a, here in enumerate(self.here)) for at in self._places(factor)]

    def place_in(self, factor: str) -> int:
        """The place of this rank among these."""
        axes = sorted(self.axes(factor))
        return self._places(factor).index({a: self.here[a] for a in axes})

    def _places(self, factor: str) -> list[dict[int, int]]:
        axes = sorted(self.axes(factor))
        sizes = self.inputs[0].mesh.sizes
        return [dict(zip(axes, at, strict=True)) for at in product(*(range(sizes[a]) for a in axes))]

    def is_split(self, *factors: str) -> bool:
        """Whether any of the factors is split on this mesh."""
        return any(self.axes(f) for f in factors)


class AllToAllSpec(NamedTuple):
    """Dims and lengths of an all-to-all, as the collective has them."""

    split: int
    split_sizes: tuple[int, ...]
    concat: int
    concat_sizes: tuple[int, ...]

    def back(self) -> AllToAllSpec:
        """What undoes it."""
        return AllToAllSpec(self.concat, self.concat_sizes, self.split, self.split_sizes)


LocalFn = Callable[..., Any]
Spans = Sequence[Sequence[tuple[int, int]]]  # of each rank of a group: (start, stop) of what it has, in order


class Native:
    """A local function that is one native call: ``fn(first tensor, *static)`` whatever the call's other arguments.

    Dispatch may run it without entering Python; ``otherwise(x, *static)`` serves where ``fn`` refuses (a view of a
    shard whose strides do not allow it).
    """

    __slots__ = ("fn", "otherwise", "static")

    def __init__(self, fn: Callable[..., Any], *static: Any, otherwise: Callable[..., Any] | None = None) -> None:
        self.fn, self.static, self.otherwise = fn, static, otherwise

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.otherwise is None:
            return self.fn(x, *self.static)
        try:
            return self.fn(x, *self.static)
        except (RuntimeError, ValueError):  # the latter of fake tensors
            return self.otherwise(x, *self.static)


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule for one call: factors of each input and output, and how each factor behaves.

    Inputs in ``lends`` only lend their shape: they hint at splits and stay as they are, whatever a strategy says.
    ``joint``: for some axes a strategy that splits several factors at once, whose local function sends what it needs.
    ``crossing``: factors that may be split though values cross the borders of parts, which the local function then
    brings; to each, its size in the outputs.
    ``joined``: factor to the factors, with their sizes, of which it is a sequence (``""``: of what is dropped): it is
    split with them, by blocks.  ``blockwise``: ``local`` serves dims that are split by blocks.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    reduced: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    moves: bool = False
    heavy: bool = False
    padded: bool = False
    lends: frozenset[int] = frozenset()
    local: Callable[[Local], LocalFn | None] | None = None
    decompose: Callable[..., Any] | None = None
    text: str = ""
    joint: tuple[tuple[int, Strategy], ...] = ()
    crossing: Mapping[str, int] = field(default_factory=dict)
    joined: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    blockwise: bool = False

    def out_shape(self, i: int) -> tuple[int, ...]:
        """Global shape of output ``i`` as the notation gives it."""
        return tuple(math.prod(self.crossing.get(f, self.sizes[f]) for f in dim) for dim in self.outputs[i])

    def shardable(self, factor: str) -> bool:
        """Whether a factor may be split at all."""
        return factor not in self.whole and self.sizes[factor] != 1

    def axis_strategies(self, suggested: Sequence[Placement], outputs: Sequence[Placement] = ()) -> list[Strategy]:
        """Strategies for one axis that the inputs' (and, backward, the outputs') placements suggest.

        The first one replicates everything.
        """
        found = [self._replicated()]
        for dims, p, i in self._occurrences(suggested, outputs):
            if isinstance(p, Shard) and p.dim < len(dims):
                found += [s for s in self.keeping(dims, p) if s not in found]
            elif isinstance(p, Partial):
                found += [s for s in self.by_partial(p, i, suggested) if s not in found]
        return found

    def keeping(self, dims: Dims, p: Shard) -> list[Strategy]:
        """The strategies by which a tensor of these dims stays split as it is."""
        return [s for s in self._keeping([f for f in dims[p.dim] if self.sizes[f] != 1], p.blocks) if s is not None]

    def _keeping(self, names: Sequence[str], blocks: tuple[int, ...]) -> Iterator[Strategy | None]:
        if not blocks and names and self.shardable(names[0]):
            yield self.by_factor(names[0])
            return
        for f, own in self._led(names, blocks) if self.takes_blocks else ():
            whole = next((w for w, parts in self.joined.items() if any(p == f for p, _ in parts)), "")
            if whole and len(names) == 1:
                sizes = ((own or (n,)) if p == f else (n,) for p, n in self.joined[whole])
                yield self.by_factor(whole, tuple(n for some in sizes for n in some))
            elif blocks and (f in self.joined or self.shardable(f)):
                yield self.by_factor(f, own, inside=True)

    def _led(self, names: Sequence[str], blocks: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The factors of a dim that a split by these blocks may be one of, with their own blocks."""
        before = 1
        for k, f in enumerate(names):
            after, each = math.prod(self.sizes[g] for g in names[k + 1 :]), blocks[: len(blocks) // before]
            if each * before != blocks or (before > 1 and not blocks):
                return
            if not blocks or (
                sum(each) == self.sizes[f] * after > len(each) * after and all(n % after == 0 for n in each)
            ):
                yield f, tuple(n // after for n in each)
            before *= self.sizes[f]

    @property
    def takes_blocks(self) -> bool:
        """Whether dims may be split by blocks: each index of a factor is then dealt with as any other."""
        return self.local is None or self.blockwise

    def instead_of(self, i: int, p: Placement) -> Iterator[Strategy]:
        """Where a split of input ``i`` can go that cannot stay: the other factors of its dims, the outermost first.

        Only for what just moves elements: an op that computes along a dim wants it whole, and its layout as it was.
        """
        dims = self.inputs[i]
        if not self.moves or not isinstance(p, Shard) or p.dim >= len(dims):
            return
        here = [f for f in dims[p.dim] if self.sizes[f] != 1][:1]
        if here and self.shardable(here[0]) and self.by_factor(here[0]):
            return
        for dim in dims:
            for f in dim[:1]:
                if f not in here and self.shardable(f) and f not in self.reduced:
                    strategy = self.by_factor(f)
                    if strategy is not None:
                        yield strategy

    def _occurrences(
        self, suggested: Sequence[Placement], outputs: Sequence[Placement]
    ) -> Iterator[tuple[Dims, Placement, int | None]]:
        for i, (dims, p) in enumerate(zip(self.inputs, suggested, strict=True)):
            yield dims, p, i
        for dims, p in zip(self.outputs, outputs, strict=False):
            yield dims, p, None

    def all_strategies(self, partials: Sequence[Partial] = (Partial(),)) -> list[Strategy]:
        """Every strategy for one axis: replicate, each factor, each linear group as each of these Partials."""
        found = [self._replicated()]
        for f in self.sizes:
            s = self.by_factor(f) if self.shardable(f) else None
            if s is not None and s not in found:
                found.append(s)
        found += [s for p in partials for s in self.by_partial(p, None) if s not in found]
        return found

    def _replicated(self) -> Strategy:
        return Strategy((REPLICATE,) * len(self.inputs), (REPLICATE,) * len(self.outputs), None)

    def by_factor(self, factor: str, blocks: tuple[int, ...] = (), *, inside: bool = False) -> Strategy | None:
        """The strategy that splits one factor, or None where it cannot be split.

        Args:
            blocks: lengths of the blocks of the factor that are split each by itself.
            inside: also where it does not lead a dim, which is then split by blocks.
        """
        units = self._units(factor, blocks)
        if units is None:
            return None
        holders = {i for i, dims in enumerate(self.inputs) if any(factor in dim for dim in dims)}
        if self.reduced.get(factor) == "sum" and not self._terms_are_known(holders):
            return None
        inputs: list[Placement] = []
        for i, dims in enumerate(self.inputs):
            p = self._split(dims, units, inside)
            if p is None:
                return None
            if (
                p is REPLICATE
                and self.reduced.get(factor) == "sum"
                and any(i in g and g & holders for g in self.linear)
            ):
                # An input without the factor that is *added* to terms with it would be counted on every rank.
                p = Partial()
            inputs.append(p)
        outputs: list[Placement] = []
        left = self._left(factor, units)
        for dims in self.outputs:
            p = self._split(dims, left, inside)
            if p is None:
                return None
            if p is REPLICATE:
                if factor not in self.reduced:
                    return None
                p = Partial(self.reduced[factor])
            outputs.append(p)
        return Strategy(tuple(inputs), tuple(outputs), factor, units[factor])

    def _left(self, factor: str, units: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
        """The blocks in the outputs: of a crossing factor those of the part that is taken of it."""
        if factor not in self.crossing or not units[factor]:
            return units
        return {factor: next((units[name] for name, _ in self.joined[factor] if name), ())}

    def _units(self, factor: str, blocks: tuple[int, ...]) -> dict[str, tuple[int, ...]] | None:
        """The blocks of a factor and of those that it is a sequence of; None where one begins within a block."""
        units: dict[str, tuple[int, ...]] = {}
        if factor in self.crossing and blocks and factor not in self.joined:
            return None
        parts = self.joined.get(factor, ())
        rest = list(blocks or (n for _, n in parts if n))
        for name, size in parts:
            own: list[int] = []
            while sum(own) < size and rest:
                own.append(rest.pop(0))
            if sum(own) != size:
                return None
            if name:
                units[name] = tuple(own) if len(own) > 1 else ()
        return {**units, factor: blocks or (() if factor in self.crossing else tuple(n for _, n in parts if n))}

    def _terms_are_known(self, holders: AbstractSet[int]) -> bool:
        """Whether it is clear which terms the ranks add up.

        In ``index_put(x, index, number, accumulate=True)`` only the index has the factor.  Nothing tells that the
        number goes with it, and that x is added once.
        """
        added = set().union(*(g for g in self.linear if g & holders))
        return all(len(g) == 1 or g & added for g in self.linear)

    def _split(self, dims: Dims, units: Mapping[str, tuple[int, ...]], inside: bool) -> Placement | None:
        """Shard where a factor leads a dim, or may be inside one; Replicate where it is absent; else None."""
        place: Placement = REPLICATE
        for d, names in enumerate(dims):
            for k, factor in enumerate(names):
                if factor not in units:
                    continue
                before, after = (math.prod(self.sizes[f] for f in some) for some in (names[:k], names[k + 1 :]))
                leads = next((f for f in names if self.sizes[f] != 1), factor) == factor
                if place is not REPLICATE or not (leads or (inside and before)):
                    return None
                each = units[factor] or (self.sizes[factor],)
                place = Shard(d, tuple(n * after for n in each) * before if len(each) * before > 1 else ())
        return place

    def by_partial(self, p: Partial, index: int | None, others: Sequence[Placement] = ()) -> Iterator[Strategy]:
        """Strategies that keep one linear group Partial (with input ``index`` in it, if given).

        An average among ``others`` of another kind becomes a sum, which for the rest is free in the backward too.
        """
        if p.op not in ("sum", "avg") and not self.moves:
            return
        for group in self.linear:
            if index is None or index in group:
                kept = Partial() if p.op == "avg" and any(others[i] != p for i in group if others) else p
                ins = tuple(kept if i in group else REPLICATE for i in range(len(self.inputs)))
                yield Strategy(ins, (kept,) * len(self.outputs), None)

    def aligned(self, factor: str, mesh: Mesh, axes: Sequence[int], blocks: tuple[int, ...] = ()) -> bool:
        """Whether splitting ``factor`` over ``axes`` cuts every dim that has it at whole multiples of what it is major
        to."""
        parts = tuple(mesh.sizes[a] for a in axes)
        for dims in (*self.inputs, *self.outputs):
            for names in dims:
                if factor in names and len(names) > 1:
                    rest = math.prod(self.sizes[f] for f in names[names.index(factor) + 1 :])
                    if rest != 1 and not all(_aligned(n, rest, parts) for n in blocks or (self.sizes[factor],)):
                        return False
        return True


@dataclass(frozen=True, slots=True)
class Strategy:
    """What one mesh axis does to each input and output of an op."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: str | None
    blocks: tuple[int, ...] = ()

    @property
    def blocked(self) -> bool:
        """Whether a dim is split by blocks."""
        return any(isinstance(p, Shard) and p.blocks for p in (*self.inputs, *self.outputs))


@lru_cache(maxsize=4096)
def _aligned(size: int, rest: int, parts: tuple[int, ...]) -> bool:
    if size % math.prod(parts) == 0:
        return True
    spans = [(0, size, 0, size * rest)]
    for n in parts:
        finer = []
        for a, b, c, d in spans:
            for i in range(n):
                lo, hi = chunk_bounds(b - a, n, i)
                low, high = chunk_bounds(d - c, n, i)
                finer.append((a + lo, a + hi, c + low, c + high))
        spans = finer
    return all((a * rest, b * rest) == (c, d) for a, b, c, d in spans)


def nested_bounds(
    size: int, mesh: Mesh, axes: Sequence[int], here: Sequence[int] | Mapping[int, int]
) -> tuple[int, int]:
    """(start, stop) of ``size`` things split over ``axes`` one after the other, at coordinate ``here``."""
    start, stop = 0, size
    for a in axes:
        lo, hi = chunk_bounds(stop - start, mesh.sizes[a], here[a])
        start, stop = start + lo, start + hi
    return start, stop
