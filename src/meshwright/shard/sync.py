"""Gradient synchronisation: gradients born Partial are reduced once per backward, in buckets, while it runs.

A parameter that rank-dependent work used on an axis gets, on each rank, that rank's contribution.
Contributions are copied into flat buffers ("buckets"), each reduced by one collective as soon as its last
gradient is there, in an order that is the same on all ranks.  When the backward ends ``p.grad`` is a view of
the reduced buffer.  Nothing is divided
by the number of ranks: the loss is the global one, so the sum of the contributions is its gradient.

The idea of buckets that follow the order of the backward is that of PyTorch's DistributedDataParallel (Li et
al., 2020).
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn

from .. import collective, convert, runtime
from ..dispatch import disabled
from ..errors import ShardError
from ..layout import Shard, Spec
from ..mesh import Mesh
from ..reshard import plan as plan_conversion
from ..tensor import DistTensor, held, in_spec, stamp
from .flights import Reduction, Scattering
from .packing import Packing
from .raw import bare, get_grad, set_grad

Tensor = torch.Tensor
BUCKET_BYTES = 8 << 20  # small enough for most of the work to overlap with the backward, large enough for bandwidth

_unflatten = torch._C._nn.unflatten_dense_tensors
_engine: Any = torch.autograd.Variable._execution_engine


def bits(mask: int) -> tuple[int, ...]:
    """Indices of the bits that are set."""
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


class Bucket:
    """Gradients that travel together: same axes, same dtype.

    ``left`` counts the gradients that this backward has not brought yet.  The flat buffer is kept from one
    backward to the next, and reused when nobody holds a view of it any more.
    """

    __slots__ = ("axes", "flat", "left", "members", "scatter")

    def __init__(self, axes: tuple[int, ...], members: Sequence[int], scatter: int | None = None) -> None:
        self.axes, self.members = axes, tuple(members)
        self.scatter = scatter  # the axis that is reduce-scattered over, if one is
        self.left = len(self.members)
        self.flat: Tensor | None = None

    def buffer(self, grads: Sequence[Tensor]) -> Tensor:
        """A flat tensor with room for ``grads`` that nobody else looks at."""
        size, like = sum(Tensor.numel(g) for g in grads), grads[0]
        flat = self.flat
        if flat is None or flat.numel() < size or flat.dtype is not like.dtype or flat.device != like.device:
            flat = self.flat = like.new_empty(size)
        elif _users(flat) > 1:  # gradients of an earlier backward are still alive
            flat = self.flat = torch.empty_like(flat)
        return flat if flat.numel() == size else flat[:size]


def _cut_dim(spec: Spec, axis: int) -> int:
    p = spec.layout.placements[axis]
    assert isinstance(p, Shard)
    return p.dim


def _users(flat: Tensor) -> int:
    storage = flat.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # one of them is ``storage``


class GradSync:
    """Reduces the gradients of a set of parameters; one per sharded model.

    Args:
        mesh: the mesh that the parameters lie on.
        names, params: the parameters, each once, in the order of the model.
        bucket_bytes: gradients are collected up to this size; larger ones travel alone and are not copied.
    """

    def __init__(
        self, mesh: Mesh, names: Sequence[str], params: Sequence[DistTensor], bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.mesh, self.names, self.params = mesh, list(names), list(params)
        self.bucket_bytes = bucket_bytes
        self.enabled = True
        self.apart: set[int] = set()  # parameters whose gradients come another way (see zero)
        self._start()

    def _start(self) -> None:
        self.active = False
        self.specs: list[Spec | None] = [None] * len(self.params)  # those that the buckets were made for
        self.synced: list[Spec] = []  # specs of the gradients after and
        self.partial: list[Spec] = []  # before their reduction
        self.where: list[Bucket | None] = [None] * len(self.params)
        self.buckets: list[Bucket] = []
        self.launched = 0
        self.flights: list[Reduction | Scattering] = []
        self.order: list[int] | None = []  # in which gradients came, until the buckets follow it
        self.followed: list[int] | None = None
        for i, p in enumerate(self.params):
            _install(self, i, p)
            p.__dict__["_sync"] = weakref.ref(self)
            p.__dict__["_param_name"] = self.names[i]  # for messages

    def replan(self) -> None:
        """Divide anew before the next backward: what is wanted of the gradients has changed."""
        self.specs = [None] * len(self.params)

    # -- copies of the model --------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        kept = ("mesh", "names", "params", "bucket_bytes", "enabled", "apart")
        return {k: self.__dict__[k] for k in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    # -- the backward ---------------------------------------------------------------------------------

    def ready(self, i: int) -> None:
        """The gradient of parameter ``i`` was accumulated (called inside the backward)."""
        if not self.active:
            self._begin()
        if self.order is not None:
            self.order.append(i)
        bucket = self.where[i]
        if bucket is not None:
            bucket.left -= 1
            if not bucket.left:
                self._advance()

    def _begin(self) -> None:
        _engine.queue_callback(self._finish)
        self.active = True
        if any(p._spec is not s for p, s in zip(self.params, self.specs, strict=True)):
            self._plan()
        for bucket in self.buckets:
            bucket.left = len(bucket.members)
        self.launched = 0

    def abandon(self) -> None:
        """Forget a backward that did not end (it raised)."""
        for flight in self.flights:
            with contextlib.suppress(RuntimeError):
                flight.pending.wait()
        self.flights, self.active = [], False

    def _plan(self) -> None:
        """Divide the parameters into buckets, by the order in which their gradients come."""
        self.specs = [p._spec for p in self.params]
        self.synced = [p._spec.with_(reduced=0, undecided=0) for p in self.params]
        self.partial = [p._spec.grad() for p in self.params]
        self.where = [None] * len(self.params)
        self.buckets = []
        order = self.followed or range(len(self.params) - 1, -1, -1)
        open_: dict[Any, list[int]] = {}
        filled: dict[Any, int] = {}
        first = (0,) * self.mesh.ndim
        for i in order:
            spec = self.params[i]._spec
            if not spec.reduced:
                continue
            axes = self._axes(spec)
            # Sizes of the first rank, so that uneven shards cannot make the ranks divide differently.
            size = math.prod(spec.local_shape(first)) * spec.dtype.itemsize
            scatter = self._scatter(i, axes)
            key = (axes, scatter, spec.dtype)
            if size >= self.bucket_bytes or not axes or i in self.apart:
                self._close(axes, scatter, [i])
                continue
            open_.setdefault(key, []).append(i)
            filled[key] = filled.get(key, 0) + size
            if filled[key] >= self.bucket_bytes:
                self._close(axes, scatter, open_.pop(key))
                del filled[key]
        for (axes, scatter, _), members in open_.items():
            self._close(axes, scatter, members)
        # A bucket is complete when its last gradient is there: launch in that order.
        place = {i: k + len(order) * (i in self.apart) for k, i in enumerate(order)}
        self.buckets.sort(key=lambda b: max(place[i] for i in b.members))

    def _scatter(self, i: int, axes: tuple[int, ...]) -> int | None:
        """The axis over which the gradient of a parameter is wanted in chunks, if it has to be reduced
        there."""
        chunk: Spec | None = self.params[i].__dict__.get("_chunk")
        if chunk is not None:
            for a in axes:
                if isinstance(chunk.layout.placements[a], Shard):
                    self.synced[i] = chunk.with_(dtype=self.params[i]._spec.dtype)
                    return a
        return None

    def _axes(self, spec: Spec) -> tuple[int, ...]:
        return tuple(a for a in bits(spec.reduced) if self.mesh.sizes[a] > 1)

    def _close(self, axes: tuple[int, ...], scatter: int | None, members: list[int]) -> None:
        bucket = Bucket(axes, members, scatter)
        self.buckets.append(bucket)
        for i in members:
            self.where[i] = bucket

    def _advance(self) -> None:
        """Launch the buckets that are complete, in order: the same order on all ranks."""
        buckets = self.buckets
        while self.launched < len(buckets) and buckets[self.launched].left <= 0:
            self.launched += 1
            self._launch(buckets[self.launched - 1])

    def _launch(self, bucket: Bucket) -> None:
        """Take the gradients of a bucket from their parameters and start their reduction."""
        with torch.no_grad(), disabled():
            grads: list[Tensor] = []
            members: list[int] = []
            for i in bucket.members:
                p = self.params[i]
                g = get_grad(p)
                if g is None or g.requires_grad or not self._is_partial(i, g):
                    continue  # unused, or to be differentiated again (see _finish)
                if g.is_sparse:
                    raise ShardError(
                        f"{self.names[i]} has a sparse gradient, which cannot be synchronised: use sparse=False"
                    )
                grads.append(g)
                members.append(i)
                # What comes later in this backward starts a new gradient and is added at the end.
                set_grad(p, None)
            if grads:
                self.flights.append(self._flight(bucket, members, grads))

    def _flight(self, bucket: Bucket, members: list[int], grads: list[Tensor]) -> Reduction | Scattering:
        """Start the reduction of gradients that were taken from their parameters."""
        params, specs = [self.params[i] for i in members], [self.synced[i] for i in members]
        if bucket.scatter is not None:
            axis = bucket.scatter
            dims = [_cut_dim(s, axis) for s in specs]
            packing = Packing([Tensor.size(g) for g in grads], dims, self.mesh.sizes[axis])
            others = tuple(a for a in bucket.axes if a != axis)
            return Scattering(params, [bare(g) for g in grads], specs, packing, axis, others, True)
        group = collective.group(self.mesh, bucket.axes)
        if len(grads) == 1:
            return Reduction(params, specs, grads, collective.all_reduce_async(grads[0], "sum", group))
        flat = bucket.buffer(grads)
        views = _unflatten(flat, grads)
        torch._foreach_copy_(views, grads)
        return Reduction(params, specs, views, collective.all_reduce_async(flat, "sum", group))

    def _finish(self) -> None:
        """End of the backward: launch what is left, wait, and give the parameters their gradients."""
        try:
            while self.launched < len(self.buckets):
                self.launched += 1
                self._launch(self.buckets[self.launched - 1])
            flights, self.flights = self.flights, []
            with torch.no_grad(), disabled():
                late = self._take(flights)
                for flight in flights:
                    flight.land()
                for i, g in late:
                    self._add_late(i, g)
            self._finish_differentiable()
        finally:
            self.active = False
        if self.order is not None:
            self._follow()

    def _is_partial(self, i: int, g: Tensor) -> bool:
        """Whether a gradient still waits for its reduction."""
        own = g.__dict__.get("_spec")
        return own is None or own.layout == self.partial[i].layout

    def _take(self, flights: Sequence[Reduction | Scattering]) -> list[tuple[int, Tensor]]:
        """Gradients that came after the bucket of their parameter had left (by a nested backward)."""
        gone = {id(p) for f in flights for p in f.params}
        taken = []
        for i, p in enumerate(self.params):
            g = get_grad(p) if id(p) in gone else None
            if g is not None and not g.requires_grad and self._is_partial(i, g):
                taken.append((i, g))
                set_grad(p, None)
        return taken

    def _add_late(self, i: int, g: Tensor) -> None:
        p = self.params[i]
        made = in_spec(g, self.partial[i], self.synced[i])
        total = held(p) if held(p) is not None else get_grad(p)
        assert total is not None
        Tensor.add_(total, made)

    def _finish_differentiable(self) -> None:
        """Gradients made with ``create_graph=True`` are reduced one by one, differentiably."""
        for i, p in enumerate(self.params):
            with disabled():
                g = get_grad(p)
            if g is None or not g.requires_grad or not p._spec.reduced or not self._is_partial(i, g):
                continue
            with disabled(), torch.enable_grad():
                source = g.__dict__.get("_spec") or p._spec.grad()
                target = p._spec.with_(reduced=0, undecided=0)
                made = convert.apply(plan_conversion(source, target).steps, g)
                set_grad(p, stamp(made.view_as(made) if made is g else made, target))

    def _follow(self) -> None:
        """From now on buckets follow the order of the first backward, as the first rank saw it."""
        assert self.order is not None
        seen = list(dict.fromkeys(self.order))
        self.order = None
        group = collective.group(self.mesh, tuple(range(self.mesh.ndim)))
        seen = collective.all_gather_object(seen, group)[0]
        known = set(seen)
        self.followed = seen + [i for i in range(len(self.params) - 1, -1, -1) if i not in known]
        self.replan()

    def before(self, i: int) -> None:
        """Something will be added to the gradient of parameter ``i``: make a reduced one Partial again.

        Kept on the first rank of the group and zero on the others, it may take further contributions.
        """
        p = self.params[i]
        with disabled():
            g = get_grad(p)
            own = g.__dict__.get("_spec") if g is not None else None
            if g is None or own is None or not p._spec.reduced:
                return
            partial = p._spec.grad()
            if own.layout == partial.layout or not _accumulates(p):
                return
            if g.requires_grad or own.layout != p._spec.layout:
                made = convert.apply(plan_conversion(own.with_(undecided=0), partial).steps, g)
                set_grad(p, stamp(made.clone() if made is g else made, partial))
                return
            with torch.no_grad():
                here = self.mesh.coordinate(runtime.RT.rank)
                if any(here[a] for a in bits(p._spec.reduced)):
                    g.zero_()
            stamp(g, partial)


def _accumulates(p: Tensor) -> bool:
    """Whether the running backward will add to the gradient of a leaf (``torch.autograd.grad`` does not)."""
    node = torch.autograd.graph.get_gradient_edge(p).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def _install(sync: GradSync, i: int, p: DistTensor) -> None:
    ref = weakref.ref(sync)

    def ready(_: Tensor) -> None:
        own = ref()
        if own is not None and own.enabled:
            own.ready(i)

    def before(grad: Tensor | None) -> None:
        own = ref()
        if own is not None and grad is not None:
            own.before(i)

    with disabled():
        if p.is_floating_point() or p.is_complex():
            kept = p.requires_grad
            p.requires_grad_(True)  # hooks of a frozen parameter serve when it is thawed
            Tensor.register_post_accumulate_grad_hook(p, ready)
            Tensor.register_hook(p, before)
            p.requires_grad_(kept)


def syncs_of(model: nn.Module) -> list[GradSync]:
    """The gradient synchronisations of a model and of its parts."""
    found = [m.__dict__["_gradient_sync"] for m in model.modules() if "_gradient_sync" in m.__dict__]
    if not found:
        raise ShardError("no_sync: this model was not sharded; call mw.shard_module(model, mesh, placements) first")
    return found


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, gradients stay Partial and accumulate on each rank; nothing is sent.

    The next backward outside synchronises the accumulated total, once.

    Raises:
        ShardError: the model was not sharded by ``shard_module``.
    """
    syncs = syncs_of(model)
    before = [s.enabled for s in syncs]
    for s in syncs:
        s.enabled = False
    try:
        yield
    finally:
        for s, was in zip(syncs, before, strict=True):
            s.enabled = was


__all__ = ["BUCKET_BYTES", "GradSync", "no_sync", "syncs_of"]
