"""Reductions of gradients that are under way, and what becomes of them when they land."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import collective
from ..layout import Partial, Spec
from ..mesh import Mesh
from ..tensor import DistTensor, held, hold, in_spec, stamp
from .packing import Packing
from .raw import get_grad, set_grad

Tensor = torch.Tensor


class Reduction:
    """An all-reduce: afterwards each gradient is a view of the buffer, in the layout of its parameter."""

    __slots__ = ("params", "pending", "specs", "views")

    def __init__(
        self,
        params: Sequence[DistTensor],
        specs: Sequence[Spec],
        views: Sequence[Tensor],
        pending: collective.Pending,
    ) -> None:
        self.params, self.specs, self.views, self.pending = params, specs, views, pending

    def land(self) -> None:
        """Wait, and put the gradients in place.  Dispatch must be disabled."""
        self.pending.wait()
        for p, spec, view in zip(self.params, self.specs, self.views, strict=True):
            set_grad(p, stamp(view, spec))


class Scattering:
    """A reduce-scatter: afterwards each rank has its chunk of each gradient.

    Args:
        params: the parameters.
        grads: their gradients, Partial on ``axis`` (and on ``others``).
        specs: of the chunks.
        axis: the axis that is scattered over.
        others: further axes to reduce over, once the chunks are there.
        beside: the chunks do not fit the parameters' gradient slots and are held beside them.
    """

    __slots__ = ("beside", "group", "others", "packing", "params", "pending", "specs")

    def __init__(
        self,
        params: Sequence[DistTensor],
        grads: Sequence[Tensor],
        specs: Sequence[Spec],
        packing: Packing,
        axis: int,
        others: tuple[int, ...],
        beside: bool,
    ) -> None:
        mesh: Mesh = specs[0].mesh
        self.params, self.specs, self.packing, self.beside = params, specs, packing, beside
        self.group = collective.group(mesh, (axis,))
        self.others = collective.group(mesh, others) if others else None
        flat = packing.pack(grads)
        self.pending = collective.reduce_scatter_async(flat, 0, packing.sizes, "sum", self.group)

    def land(self) -> None:
        """Wait, and put the gradients in place.  Dispatch must be disabled."""
        row = self.pending.wait()
        if self.others is not None:
            collective.all_reduce(row, "sum", self.others, out_of_place=False)
        chunks = self.packing.chunks(row, self.group.index)
        for p, spec, chunk in zip(self.params, self.specs, chunks, strict=True):
            before = held(p) if self.beside else get_grad(p)
            if before is not None:
                own: Spec = before.__dict__.get("_spec") or p._spec.grad()
                if own.layout == spec.layout:
                    Tensor.add_(before, chunk)
                    continue
                chunk = Tensor.add(in_spec(before, own, spec), chunk)
                hold(p, None)
            if self.beside:
                hold(p, stamp(chunk, spec))
            else:
                set_grad(p, stamp(chunk, spec))


def partial_axes(spec: Spec) -> tuple[int, ...]:
    """Axes of more than one rank on which a value is Partial."""
    sizes = spec.mesh.sizes
    return tuple(a for a, p in enumerate(spec.layout.placements) if isinstance(p, Partial) and sizes[a] > 1)


__all__ = ["Reduction", "Scattering", "partial_axes"]
