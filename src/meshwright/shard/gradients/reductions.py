"""Reductions of gradients that are in flight, and how they are finalized."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import collective
from ...dispatch import disabled
from ...layout import NO_MARKS, Partial, Spec, marked, marks_of
from ...local_tensor import get_grad, set_grad
from ...mesh import Mesh
from ...ranks import runtime
from ...tensor import DistTensor, PendingGradient, beside_slot, fits, held, hold, in_spec, wrap
from ..parameters.host import AsyncOffload
from ..parameters.packing import Packing
from ..parameters.stored import on_host

Tensor = torch.Tensor


class PendingReduction:
    """One collective with the gradients of some parameters, each of which holds it in the place of its gradient."""

    pending: collective.Pending

    def __init__(self, params: Sequence[DistTensor], specs: Sequence[Spec]) -> None:
        self.cause = runtime.RT.cause
        self.specs = {id(p): (k, spec) for k, (p, spec) in enumerate(zip(params, specs, strict=True))}
        for p in params:
            hold(p, _Seat(self, beside_slot(p).held))

    def settle(self) -> None:
        """Wait, if what is kept until somebody reads it is smaller then.  Dispatch must be disabled."""

    def advance(self) -> None:
        """Start what is to come after the first of several collectives; all ranks must do so in one order."""
        self.pending.advance()

    def arrived(self, k: int) -> Tensor:
        """The reduced gradient of the ``k``-th parameter, after a wait.  Dispatch must be disabled."""
        raise NotImplementedError


class _Seat:
    """The gradient of one parameter on its way, and what its parameter held beside its slot before."""

    __slots__ = ("kept", "source")

    def __init__(self, source: PendingReduction, kept: DistTensor | PendingGradient | None) -> None:
        self.source, self.kept = source, kept

    def finalize(self, p: DistTensor) -> None:
        """Wait, and add it to what is there."""
        k, spec = self.source.specs[id(p)]
        with torch.no_grad(), disabled():
            made = self.source.arrived(k)
            hold(p, self.kept)
            give(p, made, spec)


def give(p: DistTensor, made: Tensor, spec: Spec) -> None:
    """Add a reduced gradient to what a parameter has, in its dtype: in place, as it lies.  Dispatch must be disabled.

    Where contributions came meanwhile, the sum is one more of them, which sends nothing.
    """
    earlier, slot, made = held(p), get_grad(p), made.to(spec.dtype)
    hold(p, None)
    set_grad(p, None)
    for before in (earlier, slot):
        if before is None:
            continue
        own: Spec = before.__dict__.get("_spec") or p._spec.grad()
        more = (made if own.layout == spec.layout else in_spec(made, spec, own)).to(before.device)
        # A view that is a copy gets its values from its base: what is written to it alone is lost.
        made = Tensor.add(before, more) if marks_of(own).copied else Tensor.add_(before, more)
        spec = marked(own, NO_MARKS)
    if fits(p, spec):
        set_grad(p, wrap(made.to(p.device), spec))
    else:
        hold(p, wrap(made, spec))


def hold_beside(p: DistTensor, g: DistTensor) -> None:
    """Hold a reduced gradient beside what is held already: contributions, or their sum on its way.

    Of a parameter on the host these may be there before its leaf is served.  Dispatch must be disabled.
    """
    kept = beside_slot(p).held
    seat: _Seat | None = None
    while isinstance(kept, _Seat):
        seat, kept = kept, kept.kept
    if isinstance(kept, DistTensor):
        g = wrap(Tensor.add(kept, in_spec(g, g._spec, kept._spec).to(kept.device)), kept._spec)
    if seat is None:
        hold(p, g)
    else:
        seat.kept = g


class Reduction(PendingReduction):
    """An all-reduce: afterwards each gradient is a view of the buffer, in the layout of its parameter.

    Those of parameters that are stored on the host are views of a copy of it there; they travel with no others.
    """

    def __init__(
        self,
        params: Sequence[DistTensor],
        specs: Sequence[Spec],
        views: Sequence[Tensor],
        pending: collective.Pending,
    ) -> None:
        self.views, self.pending = views, pending
        self.leaving: list[AsyncOffload] | None = None
        self.hosted = on_host(params[0])
        super().__init__(params, specs)

    def settle(self) -> None:
        """Start the copies to the host, where gradients go there."""
        if self.hosted and self.leaving is None:
            self.pending.wait()
            device = next(iter(self.specs.values()))[1].mesh.device
            specs = [spec for _, spec in self.specs.values()]
            self.leaving = [AsyncOffload(v.to(s.dtype), device) for v, s in zip(self.views, specs, strict=True)]

    def arrived(self, k: int) -> Tensor:
        self.settle()
        if self.leaving is not None:
            return self.leaving[k].wait()
        self.pending.wait()
        return self.views[k]


class Scattering(PendingReduction):
    """A reduce-scatter: afterwards each rank has its chunk of each gradient.

    Args:
        params: the parameters.
        grads: their gradients, Partial on ``axes`` (and on ``others``).
        specs: of the chunks.
        axes: those that are scattered over.
        others: further axes to reduce over, once the chunks are there (every rank must then read one).
    """

    def __init__(
        self,
        params: Sequence[DistTensor],
        grads: Sequence[Tensor],
        specs: Sequence[Spec],
        packing: Packing,
        axes: tuple[int, ...],
        others: tuple[int, ...],
    ) -> None:
        mesh: Mesh = specs[0].mesh
        self.packing, self.chunks = packing, list[Tensor]()
        self.leaving: AsyncOffload | None = None
        self.to_host, self.dtype, self.device = on_host(params[0]), specs[0].dtype, mesh.device
        self.group = collective.group(mesh, axes)
        self.others = collective.group(mesh, others) if others else None
        self.wire = specs[0].grad_comm_format
        flat = packing.pack(grads)
        self.pending = collective.scatter_sum_async(flat, packing.sizes, self.group, self.wire)
        super().__init__(params, specs)

    def settle(self) -> None:
        """Keep this rank's chunks, in place of whole gradients; start their copy to the host, where they go there."""
        if self.chunks or self.leaving is not None:
            return
        row = self.pending.wait()
        if self.others is not None:
            with runtime.serving(self.cause):
                collective.sum_async(row, self.others, self.wire).wait()
        if self.to_host:
            self.leaving = AsyncOffload(row.to(self.dtype), self.device)
        else:
            self.chunks = self.packing.chunks(row, self.group.index)

    def arrived(self, k: int) -> Tensor:
        self.settle()
        if self.leaving is not None:
            self.chunks, self.leaving = self.packing.chunks(self.leaving.wait(), self.group.index), None
        return self.chunks[k]


def partial_axes(spec: Spec) -> tuple[int, ...]:
    """Axes of more than one rank on which a value is Partial."""
    sizes = spec.mesh.sizes
    return tuple(a for a, p in enumerate(spec.layout.placements) if isinstance(p, Partial) and sizes[a] > 1)


__all__ = ["PendingReduction", "Reduction", "Scattering", "give", "hold_beside", "partial_axes"]
