"""Layouts: all placements of a tensor on a mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Union

from .. import drawing
from ..errors import LayoutError
from ..mesh import Mesh
from .placement import (
    REPLICATE,
    At,
    Partial,
    Placement,
    Replicate,
    Shard,
    as_placement,
    commute,
    cuts,
    own_ranges,
)

Placements = Union[Mapping[str, Any], Sequence[Any], "Layout", Placement]


class Layout:
    """The placements of a tensor on all axes of a mesh.

    DTensor: the `placements` of a `DTensor`, with the mesh.

    Args:
        mesh: The mesh.
        placements: Axis name to placement, or one placement per axis. Axes that are not named are `Replicate()`.
        order: Dim to the axes that shard it, major first. Default: mesh order.
        ndim: Number of dims of the tensor. With it, negative dims are resolved.

    Raises:
        LayoutError: If a dim does not exist, `order` names other axes, or Partial reductions do not commute.
        MeshError: If an axis does not exist.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2, "tp": 2})
        layout = mw.Layout(mesh, {"dp": mw.Shard(0), "tp": mw.Shard(1)})
        assert layout.local_shape((5, 4), (0, 1)) == (3, 2)  # of the rank at dp=0, tp=1
        ```
    """

    __slots__ = ("__weakref__", "_hash", "blocks", "mesh", "ndim", "order", "placements", "replicated", "whole")

    def __init__(
        self,
        mesh: Mesh,
        placements: Placements = (),
        *,
        order: Mapping[int, Sequence[str | int]] | None = None,
        ndim: int | None = None,
    ) -> None:
        if not isinstance(mesh, Mesh):
            raise LayoutError(f"{mesh!r} is no mesh: take mw.init_mesh({{...}}), or mw.Mesh({{...}}) without processes")
        if order is not None and not isinstance(order, Mapping):
            raise LayoutError(f"order={order!r}: dim to the axes that split it was expected, major first")
        if isinstance(placements, Layout):
            order = order or dict(placements.order)
            placements = placements.placements
        self.mesh = mesh
        self.ndim = ndim
        per_axis = _per_axis(mesh, placements)
        self.placements: tuple[Placement, ...] = tuple(_in_range(p, ndim, mesh, i) for i, p in enumerate(per_axis))
        self.order: tuple[tuple[int, tuple[int, ...]], ...] = _canonical_order(self, order or {})
        # The axes on which it is replicated, as a mask; the hash, as most layouts are asked for theirs again and again.
        self.replicated = sum(1 << a for a, p in enumerate(self.placements) if isinstance(p, Replicate))
        self.whole = not any(map(cuts, self.placements))  # no rank has less than all of a tensor, or of its summands
        self._hash = hash((mesh, self.placements, self.order))
        # Each dim that is split by blocks, to the axis that does.
        self.blocks = {p.dim: a for a, p in enumerate(self.placements) if isinstance(p, Shard) and p.blocks}
        for d in self.blocks:
            if len(self.dim_axes()[d]) > 1:
                raise LayoutError(f"{self!r}: a dim that is split by blocks is split by no other axis")
        if not commute(*self.placements):
            ops = " and by ".join(dict.fromkeys(self.partial.values()))
            raise LayoutError(
                f"{self!r}: reductions by {ops} do not commute, so the value would depend on which comes first; "
                "reduce one of them before: mw.reshard(x, {axis: mw.Replicate()})"
            )

    @property
    def dims(self) -> dict[int, tuple[str, ...]]:
        """Dim to the names of the axes that split it, major first."""
        return {d: tuple(self.mesh.axes[a] for a in axes) for d, axes in self.dim_axes().items()}

    def dim_axes(self) -> dict[int, tuple[int, ...]]:
        """Dim to the indices of the axes that split it, major first."""
        found: dict[int, tuple[int, ...]] = {}
        for a, p in enumerate(self.placements):
            if isinstance(p, Shard):
                found[p.dim] = (*found.get(p.dim, ()), a)
        found.update(self.order)
        return found

    def place(self, axis: int) -> int:
        """Place of an axis among those that split its dim: 0 for the major one, and for one that splits none."""
        p = self.placements[axis]
        return self.dim_axes()[p.dim].index(axis) if isinstance(p, Shard) else 0

    @property
    def dims_mapping(self) -> list[int]:
        """Paddle's view: per tensor dim the index of the axis that splits it, or -1.

        Raises LayoutError where several axes split one dim, which that view cannot express.
        """
        by_dim = self.dim_axes()
        n = self.ndim if self.ndim is not None else max(by_dim, default=-1) + 1
        for d, axes in by_dim.items():
            if len(axes) > 1:
                raise LayoutError(f"dims_mapping cannot express {self!r}: dim {d} is split by {len(axes)} axes")
        return [by_dim.get(d, (-1,))[0] for d in range(n)]

    @property
    def partial(self) -> dict[int, str]:
        """Paddle's view: index of each axis on which the tensor is Partial, to the reduction."""
        return {a: p.op for a, p in enumerate(self.placements) if isinstance(p, Partial)}

    def with_ndim(self, ndim: int) -> Layout:
        """The same layout checked against, and resolved for, a tensor of ``ndim`` dims."""
        return self if self.ndim == ndim else _with_ndim(self, ndim)

    def replace(self, axis: int, placement: Placement) -> Layout:
        """The same layout with another placement on one axis (which becomes the minor one on its dim)."""
        return _replaced(self, axis, placement, self.ndim)

    def without_partial(self, axes: Iterable[int] | None = None) -> Layout:
        """The same layout once what is Partial, on these axes or on all, has been reduced."""
        made = self
        for a in self.partial if axes is None else axes:
            made = made.replace(a, REPLICATE)
        return made

    def local_bounds(self, shape: Sequence[int], coordinate: Sequence[int]) -> list[tuple[int, int]]:
        """Per dim (start, stop) of what the rank at ``coordinate`` holds of a tensor of this global shape."""
        bounds = [(0, n) for n in shape]
        if self.whole:
            return bounds
        for d, axes in self.dim_axes().items():
            start, stop = bounds[d]
            for a in axes:
                ranges = own_ranges(self.placements[a], stop - start, self.mesh.sizes[a], coordinate[a])
                if len(ranges) > 1:
                    raise LayoutError(f"what a rank holds of {self!r} lies in {len(ranges)} places of dim {d}")
                start, stop = start + ranges[0][0], start + ranges[0][1]
            bounds[d] = (start, stop)
        for p, i in zip(self.placements, coordinate, strict=True):
            if p.__class__ is At and p.index != i:
                bounds[0] = (bounds[0][0], bounds[0][0])
        return bounds

    def local_ranges(self, shape: Sequence[int], coordinate: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Per dim all (start, stop) of what the rank at ``coordinate`` holds: several where it is split by blocks."""
        if not self.blocks:
            return [[bounds] for bounds in self.local_bounds(shape, coordinate)]
        found = [[bounds] for bounds in self.without_blocks().local_bounds(shape, coordinate)]
        for d, a in self.blocks.items():
            if d or found[0][0][0] < found[0][0][1] or not any(p.__class__ is At for p in self.placements):
                found[d] = own_ranges(self.placements[a], shape[d], self.mesh.sizes[a], coordinate[a])
        return found

    def local_boxes(
        self, shape: Sequence[int], coordinate: Sequence[int]
    ) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """The boxes of a tensor of this global shape that a rank holds, each with where it lies in what the rank has.

        One, but where dims are split by blocks.
        """
        dims = []
        for ranges in self.local_ranges(shape, coordinate):
            ends = list(itertools.accumulate((b - a for a, b in ranges), initial=0))
            own = [slice(*at) for at in itertools.pairwise(ends)]
            dims.append(list(zip([slice(*r) for r in ranges], own, strict=True)))
        return [(tuple(g for g, _ in box), tuple(o for _, o in box)) for box in itertools.product(*dims)]

    def local_shape(self, shape: Sequence[int], coordinate: Sequence[int]) -> tuple[int, ...]:
        """Shape that the rank at ``coordinate`` holds of a tensor of this global shape."""
        if self.whole:
            return tuple(shape)
        if not self.blocks:
            return tuple([b - a for a, b in self.local_bounds(shape, coordinate)])
        return tuple(sum(b - a for a, b in ranges) for ranges in self.local_ranges(shape, coordinate))

    def even(self, shape: Sequence[int]) -> bool:
        """Whether all ranks hold parts of one shape of a tensor of this global shape, which are not empty."""
        if self.whole:
            return True
        if any(isinstance(p, At) for p in self.placements):
            return False
        parts = {d: math.prod(self.mesh.sizes[a] for a in axes) for d, axes in self.dim_axes().items()}
        return all(shape[d] and shape[d] % n == 0 for d, n in parts.items())

    def without_blocks(self) -> Layout:
        """The same layout with dims split as a whole that are split by blocks."""
        made = self
        for d, a in self.blocks.items():
            made = made.replace(a, Shard(d))
        return made

    def local_offset(self, shape: Sequence[int], coordinate: Sequence[int]) -> tuple[int, ...]:
        """Global index of the first element that the rank at ``coordinate`` holds."""
        return tuple(a for a, _ in self.local_bounds(shape, coordinate))

    def is_replicated(self) -> bool:
        """Whether every rank holds the whole value."""
        return all(isinstance(p, Replicate) for p in self.placements)

    def to_torch(self) -> list[Any]:
        """One of torch's placement objects per axis.

        Raises LayoutError where axes split a dim in another order than the mesh's, and for ``At`` (torch has no words
        for them).
        """
        from torch.distributed.tensor import Partial as TPartial
        from torch.distributed.tensor import Replicate as TReplicate
        from torch.distributed.tensor import Shard as TShard

        if self.order:
            raise LayoutError(f"torch's placements cannot express {self!r}: its axes are not in mesh order")
        if any(isinstance(p, At) for p in self.placements):
            raise LayoutError(f"torch's placements cannot express {self!r}: a value on one rank of an axis")
        if self.blocks:
            raise LayoutError(f"torch's placements cannot express {self!r}: a dim that is split by blocks")
        made: list[Any] = []
        for p in self.placements:
            if isinstance(p, Shard):
                made.append(TShard(p.dim))
            else:
                made.append(TPartial(p.op) if isinstance(p, Partial) else TReplicate())
        return made

    def picture(self, shape: Sequence[int]) -> str:
        """A small text picture of which rank holds what of a tensor of this global shape."""
        lines = [f"{tuple(shape)} on {self.mesh!r}: {self!r}"]
        for rank, at in zip(self.mesh.ranks, self.mesh.coordinates(), strict=True):
            where = ",".join(f"{a}{c}" for a, c in zip(self.mesh.axes, at, strict=True))
            ranges = self.local_ranges(shape, at)
            cut = ", ".join(
                ":" if some == [(0, n)] else " and ".join(f"{a}:{b}" for a, b in some)
                for some, n in zip(ranges, shape, strict=True)
            )
            empty = " (empty)" if 0 in self.local_shape(shape, at) else ""
            kind = "".join(
                f" part of {p.op} over {self.mesh.axes[a]}"
                for a, p in enumerate(self.placements)
                if isinstance(p, Partial)
            )
            lines.append(f"  rank {rank} ({where})  [{cut}]{empty}{kind}")
        return "\n".join(lines)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return self.placements == other.placements and self.order == other.order and self.mesh == other.mesh

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        inner = ", ".join(f"{a}: {p!r}" for a, p in zip(self.mesh.axes, self.placements, strict=True))
        if self.order:
            inner += "; " + ", ".join(f"dim {d} by {' then '.join(self.dims[d])}" for d, _ in self.order)
        return f"<{inner}>"

    def _repr_html_(self) -> str:
        """A table of axes and placements, for notebooks; `mw.visualize` draws it for a shape."""
        rows = [
            (axis, str(n), repr(p))
            for axis, n, p in zip(self.mesh.axes, self.mesh.sizes, self.placements, strict=True)
        ]  # fmt: skip
        return drawing.table(("axis", "ranks", "placement"), rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_layout, (self.mesh, self.placements, dict(self.order), self.ndim)


# What differs between equal layouts, the number of dims, is among the arguments.
@lru_cache(maxsize=4096)
def _with_ndim(layout: Layout, ndim: int) -> Layout:
    return Layout(layout.mesh, layout, ndim=ndim)


@lru_cache(maxsize=4096)
def _replaced(layout: Layout, axis: int, placement: Placement, ndim: int | None) -> Layout:
    placements = list(layout.placements)
    placements[axis] = placement
    order = {d: [a for a in axes if a != axis] for d, axes in layout.dim_axes().items()}
    if isinstance(placement, Shard):
        order.setdefault(placement.dim, []).append(axis)
    return Layout(layout.mesh, placements, order=order, ndim=ndim)


def _rebuild_layout(
    mesh: Mesh, placements: tuple[Placement, ...], order: dict[int, tuple[int, ...]], ndim: int | None
) -> Layout:
    return Layout(mesh, placements, order=order, ndim=ndim)


def _per_axis(mesh: Mesh, placements: Placements) -> list[Placement]:
    if isinstance(placements, Mapping):
        made: list[Placement] = [REPLICATE] * mesh.ndim
        for axis, p in placements.items():
            made[mesh.axis_index(axis)] = as_placement(p)
        return made
    if not isinstance(placements, Iterable):
        placements = [placements]
    if isinstance(placements, str):
        raise LayoutError(f"{placements!r} does not say what an axis does: give {{{placements!r}: mw.Shard(0)}}, say")
    listed = [as_placement(p) for p in placements]
    if listed and len(listed) != mesh.ndim:
        raise LayoutError(
            f"{len(listed)} placements for the {mesh.ndim} axes of {mesh!r}: give one per axis, or name them: "
            f'{{"{mesh.axes[0]}": mw.Shard(0)}}'
        )
    return listed or [REPLICATE] * mesh.ndim


def _in_range(p: Placement, ndim: int | None, mesh: Mesh, axis: int) -> Placement:
    if isinstance(p, At) and p.index >= mesh.sizes[axis]:
        n = mesh.sizes[axis]
        raise LayoutError(f"{p!r} on axis {mesh.axes[axis]!r}, which has {n} rank{'s' if n != 1 else ''}, from 0")
    if isinstance(p, At) and ndim == 0:
        raise LayoutError(f"{p!r} of a tensor without dims: a number is on all ranks; take mw.Replicate()")
    if not isinstance(p, Shard) or ndim is None:
        return p
    if not -ndim <= p.dim < ndim:
        raise LayoutError(
            f"{p!r} on axis {mesh.axes[axis]!r}: the tensor has {ndim} dim{'s' if ndim != 1 else ''}"
            + (f", so dims {-ndim} to {ndim - 1} exist" if ndim else ", nothing to split")
        )
    return p if p.dim >= 0 else p.on(p.dim + ndim)


def _canonical_order(
    layout: Layout, order: Mapping[int, Sequence[str | int]]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Only the dims whose axes are not in mesh order, sorted: equal layouts get equal orders."""
    kept = []
    for d, axes in order.items():
        d = d + layout.ndim if d < 0 and layout.ndim is not None else d
        given = tuple(layout.mesh.axis_index(a) for a in axes)
        split = tuple(a for a, p in enumerate(layout.placements) if isinstance(p, Shard) and p.dim == d)
        if sorted(given) != sorted(split):
            names = [layout.mesh.axes[a] for a in split]
            raise LayoutError(f"order of dim {d} names {list(axes)}, but the axes that split it are {names}")
        if given != split:
            kept.append((d, given))
    return tuple(sorted(kept))
