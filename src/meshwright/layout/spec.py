"""Specs: global shape, dtype and layout of a tensor; as objects, and as files have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch

from ..errors import LayoutError
from ..mesh import Mesh
from .layout import Layout
from .placement import REPLICATE, At, Partial, Placement, Shard, dual, unreducible
from .wire import Wire, wire_from, wire_name

CommFormats = tuple[Wire | None, Wire | None]
_AS_IT_IS: CommFormats = (None, None)


class Spec:
    """Global shape, dtype and layout of a tensor. Equal specs are the same object.

    `x.spec` is that of a DistTensor. `infer_forward` takes specs in place of tensors.

    DTensor: `DTensorSpec`.

    Attributes:
        shape: Global shape.
        dtype: Dtype.
        layout: Mesh and placements.
        grad_partial_mask: Bit mask over axes: the gradient starts Partial on them. See *types of Replicate* in
            the design.
        undecided_mask: Bit mask over axes on which either is still possible, as for leaves that no op has used.
        accumulate_dtype: Least dtype in which the value and its gradient are summed over ranks. Default: their own.
        comm_formats: Communication formats of the value (`comm_format`) and of its gradient (`grad_comm_format`).
            Default: their own dtype.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})
        spec = mw.Spec((4, 2), torch.float32, mw.Layout(mesh, {"dp": mw.Shard(0)}))
        assert spec.local_shape((1,)) == (2, 2)
        ```
    """

    __slots__ = (
        "__weakref__",
        "_grad",
        "accumulate_dtype",
        "comm_formats",
        "dtype",
        "grad_partial_mask",
        "layout",
        "mesh",
        "ndim",
        "shape",
        "undecided_mask",
    )

    layout: Layout
    shape: torch.Size
    dtype: torch.dtype
    mesh: Mesh
    ndim: int
    grad_partial_mask: int
    undecided_mask: int
    accumulate_dtype: torch.dtype | None
    comm_formats: CommFormats
    _grad: Spec | None

    _made: ClassVar[WeakValueDictionary[tuple[Any, ...], Spec]] = WeakValueDictionary()

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        layout: Layout,
        grad_partial_mask: int = 0,
        undecided_mask: int = 0,
        accumulate_dtype: torch.dtype | None = None,
        comm_formats: CommFormats = _AS_IT_IS,
    ) -> Spec:
        try:
            layout = layout.with_ndim(len(shape))
        except (AttributeError, TypeError):
            raise LayoutError(
                f"Spec({shape!r}, {dtype!r}, {layout!r}): a tuple, a torch.dtype and a mw.Layout were expected"
            ) from None
        several = layout.mesh.everywhere  # over an axis of one rank there is nothing to add up
        grad_partial_mask &= layout.replicated & several
        undecided_mask &= layout.replicated & several & ~grad_partial_mask
        if accumulate_dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            accumulate_dtype = None
        key = (tuple(shape), dtype, layout, grad_partial_mask, undecided_mask, accumulate_dtype, comm_formats)
        found = cls._made.get(key)
        if found is None:
            if not isinstance(dtype, torch.dtype):
                raise LayoutError(f"Spec: {dtype!r} is no dtype: take one of torch's, e.g. torch.float32")
            for op in layout.partial.values():
                if why := unreducible(op, dtype):
                    raise LayoutError(f"{layout!r}: {why}")
            for d, a in layout.blocks.items():
                p = layout.placements[a]
                if isinstance(p, Shard) and sum(p.blocks) != shape[d]:
                    raise LayoutError(
                        f"{p!r}: the blocks are {sum(p.blocks)} together, and dim {d} of {tuple(shape)} is not"
                    )
            found = super().__new__(cls)
            found.shape, found.dtype, found.layout = torch.Size(shape), dtype, layout
            found.mesh, found.ndim = layout.mesh, len(shape)
            found.grad_partial_mask, found.undecided_mask = grad_partial_mask, undecided_mask
            found.accumulate_dtype, found.comm_formats, found._grad = accumulate_dtype, comm_formats, None
            cls._made[key] = found
        return found

    @property
    def comm_format(self) -> Wire | None:
        """The format in which the shards of the value are sent where they are summed; None: their dtype."""
        return self.comm_formats[0]

    @property
    def grad_comm_format(self) -> Wire | None:
        """The format in which the shards of its gradient are sent; None: their dtype."""
        return self.comm_formats[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the global value."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which the value, or its gradient, is summed over ranks: the wider of ``dtype`` and
        ``accumulate_dtype``."""
        return self.dtype if self.accumulate_dtype is None else wider(self.dtype, self.accumulate_dtype)

    def local_shape(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Shape that the rank at ``coordinate`` holds."""
        return self.layout.local_shape(self.shape, coordinate)

    def local_offset(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Global index of the first element that the rank at ``coordinate`` holds."""
        return self.layout.local_offset(self.shape, coordinate)

    def part(self, whole: torch.Tensor, coordinate: Sequence[int]) -> torch.Tensor:
        """What the rank at ``coordinate`` holds of a whole tensor: a view of it, but where dims are split by blocks."""
        boxes = self.layout.local_boxes(self.shape, coordinate)
        if len(boxes) == 1:
            return whole[boxes[0][0]]
        made = whole.new_empty(self.local_shape(coordinate))
        for there, here in boxes:
            made[here] = whole[there]
        return made

    def grad(self) -> Spec:
        """Spec of the gradient of a tensor of this spec (the table of the design page).

        Raises LayoutError for Partial("product"): from the gradients of factors that of the product cannot be told.
        """
        if "product" in self.layout.partial.values():
            raise LayoutError(
                f"{self!r}: a Partial('product') leaf has no gradient. Reduce it with mw.reshard first, or "
                "differentiate the local tensors that you pass to mw.from_local."
            )
        return self.dual().decided()

    def dual(self) -> Spec:
        """Spec of the cotangents that ranks exchange for a tensor of this spec: ``grad``, of products too.

        Axes that are undecided are so in both: what is not known of the one is not known of the other.
        """
        if self._grad is None:
            self._grad = self._make_grad()
        return self._grad

    def _make_grad(self) -> Spec:
        layout, mask = _dual(self.layout, self.grad_partial_mask, self.ndim)
        return Spec(
            self.shape,
            self.dtype,
            layout,
            mask,
            self.undecided_mask,
            accumulate_dtype=self.accumulate_dtype,
            comm_formats=self.comm_formats[::-1],
        )

    def with_(
        self,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        layout: Layout | None = None,
        grad_partial_mask: int | None = None,
        undecided_mask: int | None = None,
        accumulate_dtype: torch.dtype | None = None,
        comm_formats: CommFormats | None = None,
    ) -> Spec:
        """The same spec with some parts replaced."""
        return Spec(
            self.shape if shape is None else shape,
            self.dtype if dtype is None else dtype,
            self.layout if layout is None else layout,
            self.grad_partial_mask if grad_partial_mask is None else grad_partial_mask,
            self.undecided_mask if undecided_mask is None else undecided_mask,
            self.accumulate_dtype if accumulate_dtype is None else accumulate_dtype,
            self.comm_formats if comm_formats is None else comm_formats,
        )

    def summed_as(self, dtype: torch.dtype) -> Spec:
        """The same spec of values of another dtype, which are summed over ranks in that and no other."""
        return Spec(
            self.shape, dtype, self.layout, self.grad_partial_mask, self.undecided_mask, comm_formats=self.comm_formats
        )

    def decided(self) -> Spec:
        """The same spec, invariant on the axes that were undecided: as if nobody asked for a gradient."""
        return self.with_(undecided_mask=0) if self.undecided_mask else self

    def invariant(self) -> Spec:
        """The same spec, invariant on every replicated axis: its gradient is whole, or nothing is differentiated."""
        return (
            self.with_(grad_partial_mask=0, undecided_mask=0) if self.grad_partial_mask or self.undecided_mask else self
        )

    def untyped(self) -> Spec:
        """The same spec, undecided on every replicated axis: of a new leaf, that no op has used yet."""
        return self.with_(grad_partial_mask=0, undecided_mask=self.mesh.everywhere)

    def __repr__(self) -> str:
        dtype = dtype_name(self.dtype)
        sums = "" if self.reduce_dtype is self.dtype else f", summed in {dtype_name(self.reduce_dtype)}"
        formats = zip(("sent as", "gradient sent as"), self.comm_formats, strict=True)
        wire = "".join(f", {how} {wire_name(w)}" for how, w in formats if w is not None)
        return f"{dtype}[{', '.join(map(str, self.shape))}] {self.layout!r}{sums}{wire}"

    def __reduce__(self) -> tuple[Any, ...]:
        types = (self.grad_partial_mask, self.undecided_mask)
        return Spec, (tuple(self.shape), self.dtype, self.layout, *types, self.accumulate_dtype, self.comm_formats)


@lru_cache(maxsize=4096)
def _dual(layout: Layout, reduced: int, ndim: int) -> tuple[Layout, int]:
    pairs = [dual(p, bool(reduced >> a & 1)) for a, p in enumerate(layout.placements)]
    made = Layout(layout.mesh, [p for p, _ in pairs], order=dict(layout.order), ndim=ndim)
    return made, sum(1 << a for a, (_, reduced) in enumerate(pairs) if reduced)


def wider(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The least dtype that has the values of both, of which PyTorch knows none for 8 bits."""
    return b if a.itemsize == 1 else a if b.itemsize == 1 else torch.promote_types(a, b)


def widest_accumulate_dtype(specs: Iterable[Spec]) -> torch.dtype | None:
    """The dtype in which what is made of values of these specs is summed at least; None: its own."""
    found: torch.dtype | None = None
    for s in specs:
        if s.accumulate_dtype is not None and s.accumulate_dtype is not found:
            found = s.accumulate_dtype if found is None else wider(found, s.accumulate_dtype)
    return found


# ---------------------------------------------------------------------------------------------- in files


def spec_data(spec: Spec) -> dict[str, Any]:
    """A spec as files have it, without its mesh: dicts, lists, words and numbers."""
    made: dict[str, Any] = {"shape": list(spec.shape), "dtype": dtype_name(spec.dtype)}
    masks = {"reduced": spec.grad_partial_mask, "undecided": spec.undecided_mask}
    types = {k: v for k, v in masks.items() if v}
    sums = {} if spec.accumulate_dtype is None else {"sums": dtype_name(spec.accumulate_dtype)}
    wires = {"wires": [w and wire_name(w) for w in spec.comm_formats]} if any(spec.comm_formats) else {}
    return made | layout_data(spec.layout) | types | sums | wires


def layout_data(layout: Layout) -> dict[str, Any]:
    """A layout as files have it, without its mesh and the number of dims."""
    made: dict[str, Any] = {"placements": [_placement_data(p) for p in layout.placements]}
    return made | {"order": [[dim, list(axes)] for dim, axes in layout.order]} if layout.order else made


def _placement_data(p: Placement) -> str | list[Any]:
    if isinstance(p, Shard):
        return ["shard", p.dim, list(p.blocks)] if p.blocks else ["shard", p.dim]
    if isinstance(p, At):
        return ["at", p.index]
    return ["partial", p.op] if isinstance(p, Partial) else "replicate"


def spec_from(data: Mapping[str, Any], mesh: Mesh) -> Spec:
    """The spec that :func:`spec_data` wrote."""
    shape = data["shape"]
    layout = layout_from(data, mesh, len(shape))
    types = data.get("reduced", 0), data.get("undecided", 0)
    sums = dtype_from(data["sums"]) if "sums" in data else None
    own, gradient = (w and wire_from(w) for w in data.get("wires", _AS_IT_IS))
    return Spec(shape, dtype_from(data["dtype"]), layout, *types, accumulate_dtype=sums, comm_formats=(own, gradient))


def layout_from(data: Mapping[str, Any], mesh: Mesh, ndim: int | None) -> Layout:
    """The layout that :func:`layout_data` wrote."""
    placements = [_placement_from(p) for p in data["placements"]]
    return Layout(mesh, placements, order=dict(data.get("order", ())), ndim=ndim)


def _placement_from(data: Any) -> Placement:
    if data == "replicate":
        return REPLICATE
    kind, *arguments = data
    return {"shard": Shard, "at": At, "partial": Partial}[kind](*arguments)


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"``: what :func:`dtype_from` reads."""
    return str(dtype).removeprefix("torch.")


def dtype_from(name: str) -> torch.dtype:
    """A dtype by its name.  Raises ValueError where there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found
