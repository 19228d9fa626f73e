"""Placements, layouts and specs: how a tensor lies on a mesh.  Pure and hashable; never communicates.

A *placement* says what one mesh axis does to a tensor.  A *layout* has one placement per axis, and the
order of the axes where several split the same dim.  A *spec* is global shape, dtype and layout.

Uneven shards follow ``torch.chunk``: 10 over 4 is 3, 3, 3, 1; over 6 it is 2, 2, 2, 2, 2, 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Union
from weakref import WeakValueDictionary

import torch

from .errors import LayoutError
from .mesh import Mesh

REDUCE_OPS = ("sum", "avg", "max", "min", "product", "any", "all")


def unreducible(op: str, dtype: torch.dtype) -> str:
    """Why tensors of this dtype have no reduction ``op``; empty where they have."""
    if op in ("any", "all") and dtype is not torch.bool:
        return f"{op} reduces bool tensors, not {dtype}: compare first, e.g. x != 0"
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        return f"avg of {dtype} is not exact: convert to a floating dtype or reduce by sum"
    if dtype is torch.uint64 and op in ("max", "min"):
        return f"{op} of uint64 is not supported: convert to int64"
    if dtype.is_complex and op not in ("sum", "avg"):
        return f"{op} of {dtype} is not supported: complex tensors reduce by sum or avg"
    return ""


def neutral(op: str, dtype: torch.dtype) -> Any:
    """The value that changes nothing in a reduction: what a rank brings that has no part in it."""
    if op in ("sum", "avg", "any"):
        return False if dtype is torch.bool else 0
    if op in ("product", "all"):
        return True if dtype is torch.bool else 1
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


def commute(*placements: Placement) -> bool:
    """Whether the reductions among these placements of one tensor may be done in any order."""
    return len({"sum" if p.op == "avg" else p.op for p in placements if isinstance(p, Partial)}) < 2


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis splits ``dim`` into ``torch.chunk`` parts, one per rank."""

    dim: int

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise LayoutError(f"Shard takes a dim number, not {self.dim!r}")

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the same values."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction (``op``) over what the ranks of the axis hold."""

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCE_OPS:
            raise LayoutError(f"unknown reduction {self.op!r} for Partial: take one of {', '.join(REDUCE_OPS)}")

    def __repr__(self) -> str:
        return "Partial()" if self.op == "sum" else f"Partial({self.op!r})"


Placement = Shard | Replicate | Partial
Placements = Union[Mapping[str, Any], Sequence[Any], "Layout", Placement]
REPLICATE = Replicate()
_STRIDED_HASH = hash(torch.strided)


def as_placement(value: Any) -> Placement:
    """A placement of ours from ours or from one of torch's.  Raises LayoutError for anything else."""
    if isinstance(value, (Shard, Replicate, Partial)):
        return value
    kind = type(value).__name__
    if type(value).__module__.startswith("torch.distributed"):
        if kind == "Shard":
            return Shard(value.dim)
        if kind == "Replicate":
            return REPLICATE
        if kind == "Partial":
            return Partial("sum" if value.reduce_op is None else str(value.reduce_op))
    raise LayoutError(f"{value!r} is not a placement: take mw.Shard(dim), mw.Replicate() or mw.Partial(op)")


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part ``index`` of ``size`` things in ``parts`` ``torch.chunk`` parts."""
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(start + step, size)


def chunk_sizes(size: int, parts: int) -> list[int]:
    """Lengths of all parts, empty ones included: ``chunk_sizes(10, 4) == [3, 3, 3, 1]``."""
    return [b - a for a, b in (chunk_bounds(size, parts, i) for i in range(parts))]


class Layout:
    """All placements of a tensor on a mesh.

    Args:
        mesh: the mesh.
        placements: a mapping from axis name (axes not named are Replicate), or one placement per axis.
        order: dim to the axes that split it, major first; default: mesh order.
        ndim: number of dims of the tensor, where known; lets negative dims be resolved.

    Raises:
        LayoutError: a placement for a dim that does not exist, an order that names other axes, Partial by reductions
            that do not commute.
        MeshError: an unknown axis.
    """

    __slots__ = ("__weakref__", "mesh", "ndim", "order", "placements")

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
        return self if self.ndim == ndim else Layout(self.mesh, self, ndim=ndim)

    def replace(self, axis: int, placement: Placement) -> Layout:
        """The same layout with another placement on one axis (which becomes the minor one on its dim)."""
        placements = list(self.placements)
        placements[axis] = placement
        order = {d: [a for a in axes if a != axis] for d, axes in self.dim_axes().items()}
        if isinstance(placement, Shard):
            order.setdefault(placement.dim, []).append(axis)
        return Layout(self.mesh, placements, order=order, ndim=self.ndim)

    def without_partial(self, axes: Iterable[int] | None = None) -> Layout:
        """The same layout once what is Partial, on these axes or on all, has been reduced."""
        made = self
        for a in self.partial if axes is None else axes:
            made = made.replace(a, REPLICATE)
        return made

    def local_bounds(self, shape: Sequence[int], coordinate: Sequence[int]) -> list[tuple[int, int]]:
        """Per dim (start, stop) of what the rank at ``coordinate`` holds of a tensor of this global shape."""
        bounds = [(0, n) for n in shape]
        for d, axes in self.dim_axes().items():
            start, stop = bounds[d]
            for a in axes:
                lo, hi = chunk_bounds(stop - start, self.mesh.sizes[a], coordinate[a])
                start, stop = start + lo, start + hi
            bounds[d] = (start, stop)
        return bounds

    def local_shape(self, shape: Sequence[int], coordinate: Sequence[int]) -> tuple[int, ...]:
        """Shape that the rank at ``coordinate`` holds of a tensor of this global shape."""
        return tuple(b - a for a, b in self.local_bounds(shape, coordinate))

    def local_offset(self, shape: Sequence[int], coordinate: Sequence[int]) -> tuple[int, ...]:
        """Global index of the first element that the rank at ``coordinate`` holds."""
        return tuple(a for a, _ in self.local_bounds(shape, coordinate))

    def is_replicated(self) -> bool:
        """Whether every rank holds the whole value."""
        return all(isinstance(p, Replicate) for p in self.placements)

    def to_torch(self) -> list[Any]:
        """One of torch's placement objects per axis.

        Raises LayoutError where axes split a dim in another order than the mesh's (torch has no word for it).
        """
        from torch.distributed.tensor import Partial as TPartial
        from torch.distributed.tensor import Replicate as TReplicate
        from torch.distributed.tensor import Shard as TShard

        if self.order:
            raise LayoutError(f"torch's placements cannot express {self!r}: its axes are not in mesh order")
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
            bounds = self.local_bounds(shape, at)
            cut = ", ".join(":" if b == (0, n) else f"{b[0]}:{b[1]}" for b, n in zip(bounds, shape, strict=True))
            empty = " (empty)" if any(a == b for a, b in bounds) else ""
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
            # Library code that asks ``x.layout == torch.strided`` means the memory of x, which is strided.
            return other is torch.strided or NotImplemented
        return self.placements == other.placements and self.order == other.order and self.mesh == other.mesh

    def __hash__(self) -> int:
        # One hash for all: torch.strided, which all are equal to, must be found in a set of memory layouts too.
        # Layouts are looked up together with shapes and dtypes, when plans are made, so collisions are few.
        return _STRIDED_HASH

    def __repr__(self) -> str:
        inner = ", ".join(f"{a}: {p!r}" for a, p in zip(self.mesh.axes, self.placements, strict=True))
        if self.order:
            inner += "; " + ", ".join(f"dim {d} by {' then '.join(self.dims[d])}" for d, _ in self.order)
        return f"<{inner}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_layout, (self.mesh, self.placements, dict(self.order), self.ndim)


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
    listed = [as_placement(p) for p in placements]
    if listed and len(listed) != mesh.ndim:
        raise LayoutError(
            f"{len(listed)} placements for the {mesh.ndim} axes of {mesh!r}: give one per axis, or name them: "
            f'{{"{mesh.axes[0]}": mw.Shard(0)}}'
        )
    return listed or [REPLICATE] * mesh.ndim


def _in_range(p: Placement, ndim: int | None, mesh: Mesh, axis: int) -> Placement:
    if not isinstance(p, Shard) or ndim is None:
        return p
    if not -ndim <= p.dim < ndim:
        raise LayoutError(
            f"{p!r} on axis {mesh.axes[axis]!r}: the tensor has {ndim} dim{'s' if ndim != 1 else ''}"
            + (f", so dims {-ndim} to {ndim - 1} exist" if ndim else ", nothing to split")
        )
    return p if p.dim >= 0 else Shard(p.dim + ndim)


def _canonical_order(
    layout: Layout, order: Mapping[int, Sequence[str | int]]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Only the dims whose axes are not in mesh order, sorted: equal layouts get equal orders."""
    kept = []
    for d, axes in order.items():
        d = d + layout.ndim if d < 0 and layout.ndim is not None else d
        given = tuple(layout.mesh.axis_index(a) for a in axes)
        split = tuple(a for a, p in enumerate(layout.placements) if p == Shard(d))
        if sorted(given) != sorted(split):
            names = [layout.mesh.axes[a] for a in split]
            raise LayoutError(f"order of dim {d} names {list(axes)}, but the axes that split it are {names}")
        if given != split:
            kept.append((d, given))
    return tuple(sorted(kept))


def dual(p: Placement, reduced: bool) -> tuple[Placement, bool]:
    """The type of a gradient on one axis, from that of its primal: placement, and whether a Replicate is reduced."""
    if isinstance(p, Partial):
        # The gradient of a sum is whole on every rank; as a value it may itself be differentiated, and then each rank
        # uses its copy for its own part: its cotangent is Partial, so it is of the reduced kind.  Of another reduction
        # each rank has its part's share of the gradient: what a maximum's holder gets, 1/n for an average.
        return (REPLICATE, True) if p.op == "sum" else (Partial(), False)
    return (Partial(), False) if reduced else (p, False)


class Spec:
    """Global shape, dtype and layout of a tensor.  Interned: equal specs are the same object.

    ``reduced`` and ``undecided`` are bit masks over mesh axes and refine ``Replicate`` for gradients (see the
    design page, *types of Replicate*): bit set in ``reduced``: the gradient is born Partial on that axis;
    clear: the gradient is replicated.  ``undecided`` axes (leaves that no op has used yet) may become either.
    ``copied`` marks the result of a view that had to be a copy: writing to it would not reach its base.
    ``known`` is set on the spec of a Partial that was reduced: its value is at hand in that spec too.
    ``stored`` marks a parameter for which another tensor may stand in (see ``tensor.standin``).
    """

    __slots__ = (
        "__weakref__",
        "_grad",
        "copied",
        "dtype",
        "known",
        "layout",
        "mesh",
        "ndim",
        "reduced",
        "shape",
        "stored",
        "undecided",
    )

    layout: Layout
    shape: torch.Size
    dtype: torch.dtype
    mesh: Mesh
    ndim: int
    reduced: int
    undecided: int
    copied: bool
    known: Spec | None
    stored: bool
    _grad: Spec | None

    _made: ClassVar[WeakValueDictionary[tuple[Any, ...], Spec]] = WeakValueDictionary()

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        layout: Layout,
        reduced: int = 0,
        undecided: int = 0,
        copied: bool = False,
        known: Spec | None = None,
        stored: bool = False,
    ) -> Spec:
        try:
            layout = layout.with_ndim(len(shape))
        except (AttributeError, TypeError):
            raise LayoutError(
                f"Spec({shape!r}, {dtype!r}, {layout!r}): a tuple, a torch.dtype and a mw.Layout were expected"
            ) from None
        mask = sum(1 << a for a, p in enumerate(layout.placements) if isinstance(p, Replicate))
        reduced &= mask
        undecided &= mask & ~reduced
        key = (tuple(shape), dtype, layout, reduced, undecided, copied, known, stored)
        found = cls._made.get(key)
        if found is None:
            if not isinstance(dtype, torch.dtype):
                raise LayoutError(f"Spec: {dtype!r} is no dtype: take one of torch's, e.g. torch.float32")
            for op in layout.partial.values():
                if why := unreducible(op, dtype):
                    raise LayoutError(f"{layout!r}: {why}")
            found = super().__new__(cls)
            found.shape, found.dtype, found.layout = torch.Size(shape), dtype, layout
            found.mesh, found.ndim = layout.mesh, len(shape)
            found.reduced, found.undecided, found.copied = reduced, undecided, copied
            found.known, found.stored, found._grad = known, stored, None
            cls._made[key] = found
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the global value."""
        return self.shape.numel() * self.dtype.itemsize

    def local_shape(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Shape that the rank at ``coordinate`` holds."""
        return self.layout.local_shape(self.shape, coordinate)

    def local_offset(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Global index of the first element that the rank at ``coordinate`` holds."""
        return self.layout.local_offset(self.shape, coordinate)

    def grad(self) -> Spec:
        """Spec of the gradient of a tensor of this spec (the table of the design page).

        Raises LayoutError for Partial("product"): from the gradients of factors that of the product cannot be told.
        """
        if "product" in self.layout.partial.values():
            raise LayoutError(
                f"{self!r} has no gradient as a whole, only its factors have: reduce it first (mw.reshard), or "
                "differentiate the parts that you give to mw.from_local"
            )
        return self.dual()

    def dual(self) -> Spec:
        """Spec of the cotangents that ranks exchange for a tensor of this spec: ``grad``, of products too."""
        if self._grad is None:
            self._grad = self._make_grad()
        return self._grad

    def _make_grad(self) -> Spec:
        pairs = [dual(p, bool(self.reduced >> a & 1)) for a, p in enumerate(self.layout.placements)]
        layout = Layout(self.mesh, [p for p, _ in pairs], order=dict(self.layout.order), ndim=self.ndim)
        return Spec(self.shape, self.dtype, layout, sum(1 << a for a, (_, reduced) in enumerate(pairs) if reduced))

    def with_(
        self,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        layout: Layout | None = None,
        reduced: int | None = None,
        undecided: int | None = None,
        copied: bool | None = None,
        known: Spec | None = None,
        stored: bool | None = None,
    ) -> Spec:
        """The same spec with some parts replaced; what is known of the value is forgotten unless it is given."""
        return Spec(
            self.shape if shape is None else shape,
            self.dtype if dtype is None else dtype,
            self.layout if layout is None else layout,
            self.reduced if reduced is None else reduced,
            self.undecided if undecided is None else undecided,
            self.copied if copied is None else copied,
            known,
            self.stored if stored is None else stored,
        )

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, self.shape))}] {self.layout!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Spec, (tuple(self.shape), self.dtype, self.layout, self.reduced, self.undecided)


# ---------------------------------------------------------------------------------------------- in files


def spec_data(spec: Spec) -> dict[str, Any]:
    """A spec as files have it, without its mesh: dicts, lists, words and numbers."""
    layout = spec.layout
    made: dict[str, Any] = {"shape": list(spec.shape), "dtype": str(spec.dtype).removeprefix("torch.")}
    made["placements"] = [_placement_data(p) for p in layout.placements]
    if layout.order:
        made["order"] = [[dim, list(axes)] for dim, axes in layout.order]
    made.update({k: v for k in ("reduced", "undecided", "copied") if (v := getattr(spec, k))})
    return made


def _placement_data(p: Placement) -> str | list[Any]:
    if isinstance(p, Shard):
        return ["shard", p.dim]
    return ["partial", p.op] if isinstance(p, Partial) else "replicate"


def spec_from(data: Mapping[str, Any], mesh: Mesh) -> Spec:
    """The spec that :func:`spec_data` wrote."""
    shape, order = data["shape"], dict(data.get("order", ()))
    layout = Layout(mesh, [_placement_from(p) for p in data["placements"]], order=order, ndim=len(shape))
    kinds = {k: data.get(k, 0) for k in ("reduced", "undecided")}
    return Spec(shape, dtype_from(data["dtype"]), layout, copied=data.get("copied", False), **kinds)


def _placement_from(data: Any) -> Placement:
    if data == "replicate":
        return REPLICATE
    kind, argument = data
    return Shard(argument) if kind == "shard" else Partial(argument)


def dtype_from(name: str) -> torch.dtype:
    """A dtype by its name.  Raises ValueError where there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found
