"""From one layout to another: the cheapest sequence of steps, forward and backward bytes together.

``plan`` searches (Dijkstra) over the layouts that lie between source and target.  Each axis may take its
placement at the source, at the target, or be replicated; each move is one step of ``convert``.  The plan is
data; ``convert.apply`` executes it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from . import convert
from .convert import Step
from .cost import step_bytes, step_bytes_both
from .errors import ConversionError
from .layout import REPLICATE, Layout, Partial, Placement, Replicate, Shard, Spec


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Steps from ``src`` to ``dst`` with their cost in bytes sent per rank.

    ``moves``: data crosses between ranks in the forward; ``free``: only types change.
    """

    src: Spec
    dst: Spec
    steps: tuple[Step, ...]
    forward_bytes: float
    backward_bytes: float
    moves: bool = field(init=False)
    free: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "moves", any(s.moves for s in self.steps))
        object.__setattr__(self, "free", all(s.kind == "retype" for s in self.steps))

    @property
    def bytes(self) -> float:
        """Forward and backward bytes together."""
        return self.forward_bytes + self.backward_bytes


@lru_cache(maxsize=16384)
def plan(src: Spec, dst: Spec) -> Plan:
    """The cheapest plan from ``src`` to ``dst``.  Undecided axes must have been decided before.

    Raises ConversionError for different shapes or meshes, or where no sequence of steps exists.
    """
    if src.shape != dst.shape or src.mesh != dst.mesh:
        raise ConversionError(f"cannot convert {src!r} on {src.mesh!r} into {dst!r} on {dst.mesh!r}")
    src, dst = _decided(src), _decided(dst)
    if src is dst:
        return Plan(src, dst, (), 0.0, 0.0)
    count = itertools.count()
    queue: list[tuple[float, int, Spec, tuple[Step, ...]]] = [(0.0, next(count), src, ())]
    done: set[Spec] = set()
    while queue:
        cost, _, here, steps = heapq.heappop(queue)
        if here is dst:
            forward = sum(step_bytes(s) for s in steps)
            return Plan(src, dst, steps, forward, sum(step_bytes(s.transpose()) for s in steps))
        if here in done:
            continue
        done.add(here)
        for step in _neighbours(here, src, dst):
            if step.dst not in done:
                # The tiny term per step makes fewer steps win among equals.
                price = sum(step_bytes_both(step)) + 1e-3
                heapq.heappush(queue, (cost + price, next(count), step.dst, (*steps, step)))
    raise ConversionError(f"no sequence of conversions leads from {src!r} to {dst!r}")


def _decided(spec: Spec) -> Spec:
    return spec.with_(undecided=0, copied=False) if spec.undecided or spec.copied else spec


Token = tuple[Placement, bool]  # placement, and for Replicate whether its gradient is Partial


def _token(spec: Spec, axis: int) -> Token:
    return spec.layout.placements[axis], bool(spec.reduced >> axis & 1)


def _neighbours(here: Spec, src: Spec, dst: Spec) -> Iterator[Step]:
    for a in range(here.mesh.ndim):
        now = _token(here, a)
        for token in dict.fromkeys((_token(dst, a), _token(src, a), (REPLICATE, False))):
            if token != now or _misplaced(here, dst, a):
                yield from _single(here, a, token)
    yield from _flattened(here, dst)


def _misplaced(here: Spec, dst: Spec, axis: int) -> bool:
    p = here.layout.placements[axis]
    return isinstance(p, Shard) and here.layout.dim_axes()[p.dim] != dst.layout.dim_axes().get(p.dim)


def _single(here: Spec, axis: int, token: Token) -> Iterator[Step]:
    now, (want, reduced) = here.layout.placements[axis], token
    if isinstance(now, Shard) and here.layout.dim_axes()[now.dim][-1] != axis:
        return  # only the minor axis of a dim can leave it: the others hold interleaved parts
    if isinstance(now, Shard) and now == want:
        return
    mask = here.reduced & ~(1 << axis) | (reduced << axis)
    target = Spec(here.shape, here.dtype, here.layout.replace(axis, want), mask)
    try:
        yield convert.between(here, target, (axis,))
    except ConversionError:
        return


def _flattened(here: Spec, dst: Spec) -> Iterator[Step]:
    """Reductions over several axes at once, and changes of type whose transpose is one."""
    groups: dict[tuple[str, bool], list[int]] = {}
    for a in range(here.mesh.ndim):
        p, q = here.layout.placements[a], dst.layout.placements[a]
        if not isinstance(q, Replicate):
            continue
        to_reduced = bool(dst.reduced >> a & 1)
        if isinstance(p, Partial):
            groups.setdefault((p.op, to_reduced), []).append(a)
        elif isinstance(p, Replicate) and bool(here.reduced >> a & 1) != to_reduced:
            groups.setdefault(("retype", to_reduced), []).append(a)
    for (_, to_reduced), axes in groups.items():
        if len(axes) > 1:
            layout: Layout = here.layout
            mask = here.reduced
            for a in axes:
                layout = layout.replace(a, REPLICATE)
                mask = mask & ~(1 << a) | (to_reduced << a)
            target = Spec(here.shape, here.dtype, layout, mask)
            yield convert.between(here, target, tuple(axes))
