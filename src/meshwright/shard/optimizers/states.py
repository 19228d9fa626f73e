"""Optimizer states: how they are held, and split over an axis on which the parameters are whole (ZeRO-1 and ZeRO-2).

Each rank of the axis updates its own chunk of every parameter.  Gradients are reduce-scattered instead of
reduced, the optimizer sees chunks only, and after its step the updated chunks are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import Optimizer

from ... import collective
from ...collective import serving
from ...dispatch import disabled, refresh
from ...errors import ShardError
from ...layout import Layout, Partial, Replicate, Spec
from ...local_tensor import bare
from ...resharding import executor
from ...resharding.copies import TO_DEVICE, TO_HOST
from ...resharding.planner import plan as plan_conversion
from ...tensor import DistTensor, call_enabled, in_spec, wrap
from ..gradients.sync import BUCKET_BYTES, sync_of
from ..parameters.names import name_of, names_of
from ..parameters.packing import Packing, axes_of, cut, cut_axes, own_part, split_dim
from ..parameters.stored import Axes, on_host
from .kinds import ELEMENTWISE

T = TypeVar("T")

Tensor = torch.Tensor


class Chunks:
    """The own chunks of some parameters.

    Args:
        over: name of the mesh axis that the states are split over, or names of several; none: of no axis.
        on: the host, where states lie there, and chunks are updated there; None: where parameters lie.
        params: the parameters; those that are split over an axis already, or too small, are not split over it.
    """

    def __init__(self, over: Axes, on: str | None, params: Iterable[DistTensor]) -> None:
        self.over, self.on = over, on
        self.specs: dict[int, Spec] = {}
        self.views: dict[int, Tensor] = {}
        self.add(params)

    def add(self, params: Iterable[DistTensor]) -> None:
        """Further parameters."""
        for p in params:
            chunk = None if id(p) in self.specs else chunk_spec(p._spec, self.over)
            if chunk is None:
                if self._leaves(p) and id(p) not in self.specs:
                    self.specs[id(p)] = own_spec(p._spec)
                continue
            self.specs[id(p)] = chunk
            p.__dict__["_chunk"] = self.specs[id(p)]  # the gradient synchronisation reads it
            sync = sync_of(p)
            if sync is not None:
                sync.replan()

    def spec(self, p: DistTensor) -> Spec | None:
        """How the states of a parameter lie; None if they lie as the parameter."""
        found = self.specs.get(id(p))
        if found is not None and (found.dtype is not p._spec.dtype or found.shape != p._spec.shape):
            found = self.specs[id(p)] = Spec(p._spec.shape, p._spec.dtype, found.layout)
        return found

    def _leaves(self, p: DistTensor) -> bool:
        """Whether a parameter is copied to the host for its update."""
        return self.on is not None and not on_host(p)

    def placed(self, state: Tensor) -> Tensor:
        """A state where states lie."""
        with torch.no_grad(), disabled():
            made: Tensor = TO_HOST(bare(state) if isinstance(state, DistTensor) else state)
        return wrap(made, state._spec) if isinstance(state, DistTensor) else made

    def view(self, p: DistTensor) -> Tensor:
        """The own chunk of a parameter: memory of the parameter where the chunk is contiguous, else a
        copy."""
        own = own_part(bare(p), p._spec, self.specs[id(p)])
        if self._leaves(p):
            self.views[id(p)] = TO_HOST(own)
            return self.views[id(p)]
        kept = self.views.get(id(p))
        if kept is None or kept.shape != own.shape or kept.dtype is not own.dtype or kept.device != own.device:
            kept = None
        if own.is_contiguous():
            if kept is None or kept.data_ptr() != own.data_ptr():
                kept = own
        elif kept is None:
            kept = own.clone(memory_format=torch.contiguous_format)
        else:
            kept.copy_(own)
        self.views[id(p)] = kept
        return kept

    def prepare(self, p: DistTensor) -> Tensor:
        """The own chunk with its gradient, for a step."""
        view, g, spec = self.view(p), p.grad, self.specs[id(p)]
        if g is None:
            view.grad = None
            return view
        refresh(g, call_enabled)
        own = bare(g) if g._spec.layout == spec.layout else bare(in_spec(g, g._spec, spec))
        view.grad = TO_HOST(own) if self._leaves(p) else own.to(view.device)
        return view

    def gather(self, params: Sequence[DistTensor]) -> None:
        """Bring the chunks that a step has updated to all ranks."""
        in_flight: list[tuple[Packing, list[DistTensor], collective.Pending]] = []
        with torch.no_grad(), disabled():
            for axes, members in self._buckets(params):
                mesh = members[0]._spec.mesh
                if not axes:
                    for p in members:
                        bare(p).copy_(TO_DEVICE(self.views.pop(id(p)), mesh.device))
                    continue
                shapes = [Tensor.size(p) for p in members]
                dims = [split_dim(self.specs[id(p)], axes) for p in members]
                packing = Packing(shapes, dims, tuple(mesh.sizes[a] for a in axes))
                row = packing.pack_row([self.views[id(p)] for p in members])
                if self._leaves(members[0]):
                    row = TO_DEVICE(row, mesh.device)
                group = collective.group(mesh, axes)
                with serving("", partial(names_of, members)):
                    in_flight.append((packing, members, collective.all_gather_async(row, 0, packing.sizes, group)))
            for packing, members, pending in in_flight:
                packing.unpack(pending.wait(), [bare(p) for p in members])

    def _buckets(self, params: Sequence[DistTensor]) -> Iterator[tuple[tuple[int, ...], list[DistTensor]]]:
        """Parameters that travel together, and the axes: same mesh and dtype, bounded size (of the first rank, as all
        must agree)."""
        groups: dict[Any, list[DistTensor]] = {}
        for p in params:
            axes, alike = cut_axes(p._spec, self.specs[id(p)]), (p._spec.mesh, p._spec.dtype, self._leaves(p))
            groups.setdefault((axes, *alike), []).append(p)
        for (axes, *_), members in groups.items():
            for batch in batched_by(members, lambda p: p._spec.nbytes, BUCKET_BYTES):
                yield axes, batch


def chunk_spec(spec: Spec, over: Axes) -> Spec | None:
    """How the states of a parameter lie that are split over axes on which it is whole; None: as it lies."""
    whole = tuple(a for a in axes_of(spec.mesh, over) if isinstance(spec.layout.placements[a], Replicate))
    own, layout = cut(spec, whole, first=True)
    return spec.with_(layout=layout, grad_partial_mask=0, undecided_mask=0) if own else None


def batched_by(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Items in order, in lists that end with the item that brings them to ``most`` bytes."""
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += nbytes(item)
        if size >= most:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def own_spec(spec: Spec) -> Spec:
    """How gradients and states of a parameter lie for a step."""
    return spec.invariant()


def unfit(p: DistTensor, own: Spec) -> str:
    """Why a gradient of this spec cannot be taken for a step, in words."""
    if any(isinstance(q, Partial) for q in own.layout.placements):
        return (
            f"the gradient of {name_of(p)} is still Partial ({own.layout!r}): each rank holds its own "
            "contribution. "
            "Synchronise it: shard the model with mw.shard_module, leave mw.no_sync before the last "
            "backward, or set "
            "p.grad = mw.reshard(p.grad, p.spec.layout)"
        )
    return (
        f"the gradient of {name_of(p)} lies as {own.layout!r}, the parameter as {p._spec.layout!r}: set "
        "p.grad = mw.reshard(p.grad, p.spec.layout), or have it done with mw.shard_optimizer(optimizer)"
    )


def check_state(value: Tensor, spec: Spec, key: str, p: Tensor, opt: Optimizer) -> None:
    """Refuse a state that is not of its parameter's global shape.

    States of one element fit every parameter, as do those of optimizers that mix elements, whose parameters are whole.

    Raises:
        ShardError: on all ranks alike.
    """
    shape = tuple(value.shape)
    if shape == tuple(spec.shape) or value.numel() == 1:
        return
    if spec.layout.is_replicated() and type(opt).__name__ not in ELEMENTWISE:
        return
    raise ShardError(
        f"the state {key!r} of {name_of(p)} has shape {shape}: expected the global shape {tuple(spec.shape)}, as a "
        "DistTensor of any layout or a plain tensor with the global values"
    )


def held_state(value: Tensor, spec: Spec, key: str, p: Tensor, opt: Optimizer) -> Tensor:
    """A state of one value per element, whole or of any layout, as the DistTensor that an optimizer keeps.

    Args:
        spec: how it is to lie.
        key, p, opt: its name, whose it is, and where; for errors.

    Raises:
        ShardError: of another shape than its parameter; a plain tensor that may be a rank's part.
    """
    shape, whole, distributed = tuple(value.shape), tuple(spec.shape), isinstance(value, DistTensor)
    if shape != whole:
        cut = {d for d in spec.layout.dim_axes() if d < len(shape)}
        like_a_part = len(shape) == len(whole) and all(
            a == b or d in cut for d, (a, b) in enumerate(zip(shape, whole, strict=True))
        )
        if distributed and value.numel() != 1:
            raise ShardError(
                f"{type(opt).__name__}: state {key!r} of {name_of(p)} has shape {shape}, {name_of(p)} has {whole}. "
                "Create a new optimizer, or delete optimizer.state[p]."
            )
        if like_a_part:
            check_state(value, spec, key, p, opt)
        if not distributed:
            return value  # what it is for is the optimizer's own
    with torch.no_grad(), disabled():
        given = value._spec if isinstance(value, DistTensor) else Spec(shape, value.dtype, Layout(spec.mesh))
        target = own_spec(spec) if shape == whole else Spec(shape, value.dtype, Layout(spec.mesh))
        steps = plan_conversion(given.invariant(), target.with_(dtype=value.dtype)).steps
        made = executor.apply(steps, bare(value))
        if steps:
            made = made.clone()  # a part, so that the whole can go
        return wrap(made, target) if shape == whole else made


__all__ = ["Chunks", "check_state", "chunk_spec", "held_state", "own_spec", "unfit"]
