"""From one layout to another: the cheapest sequence of steps, forward and backward bytes together.

``plan`` searches (Dijkstra) over all sequences of steps of ``conversions``: each axis may split any dim on the way, or
be replicated.  Bytes are in proportion to the tensor's, so a way is found once for all shapes.  The plan is data;
``executor.apply`` executes it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from ..collective import ADDS
from ..errors import ConversionError
from ..layout import (
    REPLICATE,
    At,
    CommFormats,
    Layout,
    Partial,
    Placement,
    Shard,
    Spec,
    bytes_each,
    commute,
    crowded,
    cuts,
    dual,
    widest_accumulate_dtype,
)
from ..ranks import runtime
from . import conversions
from .conversions import ConversionStep
from .cost import bytes_of, passes


@dataclass(frozen=True, slots=True, eq=False)
class ConversionPlan:
    """Steps from ``src`` to ``dst`` with their cost in bytes sent per rank.

    ``moves``: data crosses between ranks in the forward; ``reduces``: and the source is Partial; ``free``: only types
    change; ``weighted``: parts have shares of the gradient that depend on the data; ``ends``: ``src`` and ``dst``
    without the types of axes that no step touches, as any type is right there.
    """

    src: Spec
    dst: Spec
    steps: tuple[ConversionStep, ...]
    forward_bytes: float
    backward_bytes: float
    moves: bool = field(init=False)
    reduces: bool = field(init=False)
    free: bool = field(init=False)
    weighted: bool = field(init=False)
    ends: tuple[Spec, Spec] = field(init=False)

    def __post_init__(self) -> None:
        touched = sum(1 << a for a in {a for s in self.steps for a in s.axes})
        ends = [
            s.with_(grad_partial_mask=s.grad_partial_mask & touched, undecided_mask=0) for s in (self.src, self.dst)
        ]
        object.__setattr__(self, "ends", tuple(ends))
        object.__setattr__(self, "moves", any(s.moves for s in self.steps))
        object.__setattr__(self, "reduces", self.moves and bool(self.src.layout.partial))
        object.__setattr__(self, "free", all(s.kind == "retype" for s in self.steps))
        object.__setattr__(self, "weighted", any(conversions.weighted(s) for s in self.steps))

    @property
    def bytes(self) -> float:
        """Forward and backward bytes together."""
        return self.forward_bytes + self.backward_bytes


def plan(src: Spec, dst: Spec) -> ConversionPlan:
    """The cheapest plan from ``src`` to ``dst``.  No step touches an axis that is undecided in both.

    One that is undecided in one of them alone counts as invariant there: of values whose gradient nobody asks for.
    Nor does a step touch an axis that is the same in both and spared (``runtime.RT.spared``): of a step with stages
    that of these, whose ranks compute other things once it is cut.

    Raises ConversionError for different shapes or meshes, or where no sequence of steps exists.
    """
    return _plan(src, dst, runtime.RT.spared)


@lru_cache(maxsize=2048)
def _plan(src: Spec, dst: Spec, spared: int) -> ConversionPlan:
    if src.shape != dst.shape or src.mesh != dst.mesh:
        raise ConversionError(f"cannot convert {src!r} on {src.mesh!r} into {dst!r} on {dst.mesh!r}")
    sums, wires, open_ = widest_accumulate_dtype((src, dst)), src.comm_formats, src.undecided_mask & dst.undecided_mask
    src, dst = _value(src, sums, wires, open_), _value(dst, sums, wires, open_)
    if src is dst:
        return ConversionPlan(src, dst, (), 0.0, 0.0)
    steps: list[ConversionStep] = []
    here = src
    for axes, (placement, reduced) in _moves(src, dst, spared):
        layout, mask = here.layout, here.grad_partial_mask
        for a in axes:
            layout, mask = layout.replace(a, placement), mask & ~(1 << a) | (reduced << a)
        steps.append(conversions.between(here, here.with_(layout=layout, grad_partial_mask=mask), axes))
        here = steps[-1].dst
    assert here is dst, (here, dst)
    way = tuple(steps)
    return ConversionPlan(src, dst, way, bytes_of(way), bytes_of(conversions.transpose(way)))


def in_dtype(conversion: ConversionPlan, dtype: torch.dtype) -> ConversionPlan:
    """The plan of the same conversion of values of another dtype, which are summed in that."""
    return plan(conversion.src.summed_as(dtype), conversion.dst.summed_as(dtype))


def _value(spec: Spec, sums: torch.dtype | None, wires: CommFormats, open_: int) -> Spec:
    return spec.with_(undecided_mask=open_, accumulate_dtype=sums, comm_formats=wires)


# ---------------------------------------------------------------------------------------------- the search

Type = tuple[Placement, int]  # placement, and of Replicate what its gradient is
_INVARIANT, _REDUCED, _UNDECIDED = 0, 1, 2  # whole, Partial, not known yet: then no step may touch the axis
Move = tuple[tuple[int, ...], Type]  # these axes become this
# A state is one number for each axis: the index of its type times _ORDERS, plus its place among the axes of its dim.
State = tuple[int, ...]
_ORDERS = 16
_SPARE = 2  # dims that neither side splits and that may be split on the way


def _moves(src: Spec, dst: Spec, spared: int) -> list[Move]:
    """The cheapest way, which spares these axes where it can.  Raises ConversionError where there is none."""
    # A dim shorter than the mesh would put more on some ranks than bytes on average tell.
    used = {*src.layout.dim_axes(), *dst.layout.dim_axes()}
    spare = tuple([d for d, n in enumerate(src.shape) if n >= src.mesh.size and d not in used][:_SPARE])
    # A wire rounds: it is no reason to sum what could be moved, however few bytes that would send.
    sent = (
        src.reduce_dtype.itemsize if w is None else max(bytes_each(w), src.dtype.itemsize) for w in src.comm_formats
    )
    there, back = (n / src.dtype.itemsize for n in sent)
    try:
        return _between((src.layout, _types(src)), (dst.layout, _types(dst)), spare, (there, back), spared)
    except ConversionError:
        raise ConversionError(f"no sequence of conversions leads from {src!r} to {dst!r}") from None


def _types(spec: Spec) -> tuple[int, ...]:
    return tuple(
        _UNDECIDED if spec.undecided_mask >> a & 1 else spec.grad_partial_mask >> a & 1 for a in range(spec.mesh.ndim)
    )


@lru_cache(maxsize=4096)
def _between(
    src: tuple[Layout, tuple[int, ...]],
    dst: tuple[Layout, tuple[int, ...]],
    spare: tuple[int, ...],
    wide: Wide,
    spared: int,
) -> list[Move]:
    """The cheapest way, found for dims by number of appearance: shapes do not matter to it."""
    dims = [*sorted({*src[0].dim_axes(), *dst[0].dim_axes()}), *spare]
    ends = tuple(
        tuple(
            (p.on(dims.index(p.dim)) if isinstance(p, Shard) else p, types[a], layout.place(a))
            for a, p in enumerate(layout.placements)
        )
        for layout, types in (src, dst)
    )
    found = _cheapest(src[0].mesh.sizes, *ends, len(dims), wide, spared)
    return [(axes, (p.on(dims[p.dim]) if isinstance(p, Shard) else p, r)) for axes, (p, r) in found]


Wide = tuple[float, float]
End = tuple[tuple[Placement, int, int], ...]


@lru_cache(maxsize=16384)
def _cheapest(sizes: tuple[int, ...], src: End, dst: End, ndim: int, wide: Wide, spared: int = 0) -> list[Move]:
    """Dijkstra over all layouts of ``ndim`` dims, with the reductions that occur at the ends, by bytes of both ways.

    ``wide``: bytes that are sent in a sum for each byte of tensor, forward and backward; ``spared``: axes that no step
    touches where both ends are the same.
    """
    still = {a for a, (here, there) in enumerate(zip(src, dst, strict=True)) if spared >> a & 1 and here == there}
    ends = dict.fromkeys((p, r) for p, r, _ in (*dst, *src))
    others: list[Type] = [(REPLICATE, _INVARIANT), (REPLICATE, _REDUCED), (Partial(), _INVARIANT)]
    types: list[Type] = list(dict.fromkeys([*ends, *others, *((Shard(d), _INVARIANT) for d in range(ndim))]))
    table = _prices(tuple(types), wide)
    mixed = not commute(*(p for p, _ in types))
    blocks = any(isinstance(p, Shard) and p.blocks for p, _ in types)
    first, last = (tuple(types.index((p, r)) * _ORDERS + place for p, r, place in end) for end in (src, dst))
    queue: list[tuple[float, int, State]] = [(0.0, 0, first)]
    count = 0
    best: dict[State, float] = {first: 0.0}
    came: dict[State, tuple[State, Move]] = {}
    while queue:
        cost, _, here = heapq.heappop(queue)
        if here == last:
            return _way(came, last)
        if cost > best[here]:
            continue
        for axes, to, price in _steps(here, sizes, types, table):
            if isinstance(types[to][0], At) and any(last[a] // _ORDERS != to for a in axes):
                continue  # no way leads over a single rank
            if not still.isdisjoint(axes):
                continue
            state = _moved(here, axes, to, types)
            if mixed and not commute(*(types[code // _ORDERS][0] for code in state)):
                continue
            if blocks and crowded([types[code // _ORDERS][0] for code in state]):
                continue
            # The tiny term per step makes fewer steps win among equals.
            total = cost + price + 1e-7
            if total < best.get(state, math.inf):
                best[state], came[state] = total, (here, (axes, types[to]))
                count += 1
                heapq.heappush(queue, (total, count, state))
    raise ConversionError("no sequence of conversions")


@lru_cache(maxsize=4096)
def on_one_axis(src: Type, dst: Type, n: int, wide: float) -> tuple[float, float]:
    """How often (n-1)/n of the gathered bytes go over the wire, forward and backward, where one axis of ``n`` ranks
    changes its type alone; ``wide`` of these where they are summed."""
    dims = list(dict.fromkeys(p.dim for p, _ in (src, dst) if isinstance(p, Shard)))
    ends = [((p.on(dims.index(p.dim)) if isinstance(p, Shard) else p, r, 0),) for p, r in (src, dst)]
    there = back = 0.0
    here = ends[0][0][:2]
    for _, to in _cheapest((n,), *ends, len(dims), (wide, wide)):
        held, made = (1 / n if isinstance(p, Shard) else 1.0 for p, _ in (here, to))
        (before, after), (before_back, after_back) = both_ways(here, to, (wide, wide))
        there += before * held + after * made
        back += before_back * made + after_back * held
        here = to
    return there, back


def _way(came: dict[State, tuple[State, Move]], at: State) -> list[Move]:
    moves = []
    while at in came:
        at, move = came[at]
        moves.append(move)
    return moves[::-1]


# Index of a type to become; passes of what is held before and after, both ways together.
Price = tuple[int, float, float]


@lru_cache(maxsize=1024)
def _prices(types: tuple[Type, ...], wide: Wide) -> list[list[Price]]:
    """For each type what it may become in one step, by the kinds of the step and of its transpose."""
    table: list[list[Price]] = []
    for p, r in types:
        table.append([])
        for i, (q, s) in enumerate(types):
            if (p, r) == (q, s) or _UNDECIDED in (r, s):
                continue
            try:
                there, back = both_ways((p, r), (q, s), wide)
            except ConversionError:
                continue
            table[-1].append((i, there[0] + back[1], there[1] + back[0]))
    return table


def both_ways(src: Type, dst: Type, wide: Wide) -> tuple[tuple[float, float], tuple[float, float]]:
    """Of one step and of its transpose: see ``cost.passes``.  A reduction is transposed as a sum is.

    Raises:
        ConversionError: no single step leads from one to the other.
    """
    there = _passes(src[0], dst[0], wide[0])
    source = (Partial(), _INVARIANT) if isinstance(src[0], Partial) else src
    return there, _passes(dual(dst[0], bool(dst[1]))[0], dual(source[0], bool(source[1]))[0], wide[1])


def _passes(p: Placement, q: Placement, wide: float) -> tuple[float, float]:
    """Of the step from one placement to another: see ``cost.passes``."""
    before, after = passes(conversions.kind_of(p, q))
    sums = isinstance(p, Partial) and p.op in ADDS
    return (before * wide, after * wide) if sums else (before, after)


def _steps(
    here: State, sizes: tuple[int, ...], types: list[Type], table: list[list[Price]]
) -> Iterator[tuple[tuple[int, ...], int, float]]:
    """All steps from a state: axes, index of the type that they get, bytes of both ways for one byte of tensor."""
    now = [code // _ORDERS for code in here]
    shard = [cuts(types[i][0]) for i in now]
    held = 1.0 / math.prod(n for n, s in zip(sizes, shard, strict=True) if s)
    groups: dict[int, list[int]] = {}
    for a, i in enumerate(now):
        if not shard[a]:
            groups.setdefault(i, []).append(a)
        elif any(now[b] == i and here[b] > here[a] for b in range(len(here))):
            continue  # only the minor axis of a dim can leave it: the others hold interleaved parts
        n = sizes[a]
        gathered = held * n if shard[a] else held
        for i_to, before, after in table[i]:
            after_held = gathered / n if cuts(types[i_to][0]) else gathered
            yield (a,), i_to, (n - 1) / n * (before * held + after * after_held)
    for i, alike in groups.items():
        for k in range(2, len(alike) + 1):
            for axes in itertools.combinations(alike, k):  # one collective over several axes
                n = math.prod(sizes[a] for a in axes)
                for i_to, before, after in table[i]:
                    if (before or after) and not cuts(types[i_to][0]):
                        yield axes, i_to, (n - 1) / n * (before + after) * held


def _moved(here: State, axes: tuple[int, ...], to: int, types: list[Type]) -> State:
    state = list(here)
    split = isinstance(types[to][0], Shard)
    for a in axes:
        state[a] = to * _ORDERS + (sum(c // _ORDERS == to for c in here) if split else 0)
    return tuple(state)
