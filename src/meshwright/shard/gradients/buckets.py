"""Which gradients travel together: buckets, divided by the order in which the backward brings gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ... import compat
from ...layout import Spec, Wire, block_of
from ...tensor import DistTensor
from ..parameters.packing import aligned, cut_axes
from ..parameters.stored import reduce_dtype, stored

Tensor = torch.Tensor
_unflatten = compat.C_NN.unflatten_dense_tensors
# What gradients that travel together have alike, but for the axes: those that are scattered over, dtype and wire.
Alike = tuple[tuple[int, ...], torch.dtype, Wire | None]


def bits(mask: int) -> tuple[int, ...]:
    """Indices of the bits that are set."""
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


class Bucket:
    """Gradients that travel together: same axes, same dtype, same wire.

    The flat buffer is kept from one backward to the next, and reused when nobody holds a view of it any more.
    """

    __slots__ = ("axes", "dtype", "flat", "members", "scatter", "wire")

    def __init__(self, members: Sequence[int], axes: tuple[int, ...], alike: Alike) -> None:
        self.axes, self.members = axes, tuple(members)
        self.scatter, self.dtype, self.wire = alike  # the axes that are reduce-scattered over
        self.flat: Tensor | None = None

    def filled(self, grads: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """A flat tensor with ``grads`` in it, and views of it of their shapes."""
        sizes = [Tensor.numel(g) for g in grads]
        offsets, end = aligned(sizes, block_of(self.wire))
        flat = self._buffer(end, grads[0])
        if end == sum(sizes):
            views = list(_unflatten(flat, grads))
        else:
            flat.zero_()  # what lies between would be encoded with the rest
            views = [flat[o : o + n].view(Tensor.size(g)) for o, n, g in zip(offsets, sizes, grads, strict=True)]
        torch._foreach_copy_(views, grads)
        return flat, views

    def _buffer(self, size: int, like: Tensor) -> Tensor:
        """A flat tensor that nobody else looks at."""
        flat = self.flat
        if flat is None or flat.numel() < size or flat.device != like.device:
            flat = self.flat = like.new_empty(size, dtype=self.dtype)
        elif _users(flat) > 1:  # gradients of an earlier backward are still alive
            flat = self.flat = torch.empty_like(flat)
        return flat if flat.numel() == size else flat[:size]


def _users(flat: Tensor) -> int:
    storage = flat.untyped_storage()
    return int(compat.storage_use_count(storage._cdata)) - 1  # one of them is ``storage``


class Buckets:
    """A division of parameters into buckets, for the specs that they have now.

    Args:
        params: the parameters.
        order: their indices, as the backward brings their gradients.
        bucket_bytes: gradients are collected up to this size; larger ones travel alone.
        apart: parameters whose gradients come another way too (see zero): each has a bucket of its own, and these
            come last.
    """

    def __init__(self, params: Sequence[DistTensor], order: Sequence[int], bucket_bytes: int, apart: set[int]) -> None:
        self.params = params
        self.specs = [p._spec for p in params]  # those that this was made for
        self.synced = [s.invariant() for s in self.specs]  # of reduced gradients
        self.partial = [s.grad() for s in self.specs]  # of gradients that wait for it
        self.where: list[int | None] = [None] * len(self.specs)
        self.buckets = self._divide(order, bucket_bytes, apart)
        for k, bucket in enumerate(self.buckets):
            for i in bucket.members:
                self.where[i] = k
        # Axes of the groups that have gradients to reduce.
        over = {axes for i in apart if (axes := stored(params[i]).axes)}
        self.groups = sorted({b.axes for b in self.buckets if b.axes} | over)

    def fits(self) -> bool:
        """Whether the parameters still have the specs that this was made for."""
        return all(p._spec is s for p, s in zip(self.params, self.specs, strict=True))

    def _divide(self, order: Sequence[int], bucket_bytes: int, apart: set[int]) -> list[Bucket]:
        made: list[Bucket] = []
        open_: dict[Any, list[int]] = {}
        filled: dict[Any, int] = {}
        for i in order:
            spec = self.specs[i]
            dtype = reduce_dtype(self.params[i])
            if not spec.grad_partial_mask and dtype is spec.dtype:
                continue
            axes = tuple(a for a in bits(spec.grad_partial_mask) if spec.mesh.sizes[a] > 1)
            # Sizes of the first rank, so that uneven shards cannot make the ranks divide differently.
            size = math.prod(spec.local_shape((0,) * spec.mesh.ndim)) * dtype.itemsize
            key = (axes, (self._scatter(i, axes), dtype, spec.grad_comm_format))
            if size >= bucket_bytes or not axes or i in apart:
                made.append(Bucket([i], *key))
                continue
            open_.setdefault(key, []).append(i)
            filled[key] = filled.get(key, 0) + size
            if filled[key] >= bucket_bytes:
                made.append(Bucket(open_.pop(key), *key))
                del filled[key]
        made += [Bucket(members, *key) for key, members in open_.items()]
        # A bucket is complete when its last gradient is there: launch in that order.
        place = {i: k + len(order) * (i in apart) for k, i in enumerate(order)}
        return sorted(made, key=lambda b: max(place[i] for i in b.members))

    def _scatter(self, i: int, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The axes over which the gradient of a parameter is wanted in chunks, if it has to be reduced on them all."""
        chunk: Spec | None = self.params[i].__dict__.get("_chunk")
        own = self.specs[i]
        if chunk is None:
            return ()
        cut = cut_axes(own, chunk)
        if not cut or not set(cut) <= set(axes):
            return ()
        self.synced[i] = Spec(own.shape, own.dtype, chunk.layout, comm_formats=own.comm_formats)
        return cut


__all__ = ["Bucket", "Buckets", "bits"]
