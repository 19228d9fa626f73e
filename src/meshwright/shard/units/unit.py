"""Units: modules whose stored parameters are gathered together, and the order in which a forward uses them."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from ... import collective, compat
from ...dispatch import disabled
from ...errors import ShardError
from ...layout import Spec, block_of
from ...local_tensor import bare
from ...mesh import Mesh
from ...ranks import runtime
from ...tensor import DistTensor, held, hold
from ..gradients.buckets import Bucket
from ..gradients.reductions import InFlight, Reduction, Scattering, partial_axes
from ..gradients.sync import GradSync
from ..parameters.host import HOST, Lane, brought, check_place
from ..parameters.packing import Packing, split_dim, whole_over
from ..parameters.precision import check_autocast
from ..parameters.stored import STORED, Stored, compute_dtype, gather_wire, on_host, stored
from ..parameters.versions import aliased, state_of

Tensor = torch.Tensor


class Begun(NamedTuple):
    """Parameters of a unit on their way: what they were, all-gathers, those that need none, and where that runs."""

    state: Any
    parts: list[tuple[list[DistTensor], Packing, collective.Pending]]
    own: dict[int, Tensor]
    lane: Lane

    def wait(self) -> list[Tensor]:
        """What was gathered, which others than the lane may read from now on."""
        flats = [pending.wait() for _, _, pending in self.parts]
        self.lane.wait([*flats, *self.own.values()])
        return flats


class _Way(threading.local):
    """A forward on its way through the units, in one thread."""

    def __init__(self) -> None:
        self.cursor = 0
        self.seen: list[Unit] = []
        self.ahead: dict[Unit, Any] = {}  # gathers under way


class Zero:
    """All units of a model and the order in which its forward uses them.

    Args:
        sync: says whether gradients are to be synchronised.
        regather: gather again for the backward.
    """

    def __init__(self, mesh: Mesh, sync: GradSync, regather: bool) -> None:
        self.mesh, self.sync, self.regather = mesh, sync, regather
        self.units: list[Unit] = []
        self.order: list[Unit] = []  # of the first forward
        self._start()

    def _start(self) -> None:
        self.way = _Way()
        self.packings: dict[Any, Packing] = {}
        # Id of a parameter that is stored on the host to the nodes of autograd that bring contributions to it.
        self.uses: dict[int, weakref.WeakSet[Any]] = {}
        self.owners: dict[int, Unit] | None = None
        self.sync.scatter = self.scatter

    def __getstate__(self) -> dict[str, Any]:
        return {k: self.__dict__[k] for k in ("mesh", "sync", "regather", "units", "order")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    # -- the order of the forward ---------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The whole model's forward begins."""
        if in_backward():
            return
        way = self.way
        self.order = self.order or way.seen
        way.cursor, way.seen = 0, []
        for unit in list(way.ahead):
            unit.forget(way.ahead)

    def follow(self, unit: Unit) -> None:
        """A unit's forward begins: start the gather of the one that followed it before."""
        way = self.way
        if not self.order:
            way.seen.append(unit)
            return
        if in_backward() or way.cursor >= len(self.order):
            return
        if self.order[way.cursor] is not unit:  # another way through the model than in the first forward
            way.cursor = len(self.order)
            return
        way.cursor += 1
        if way.cursor < len(self.order):
            self.order[way.cursor].start()

    def before(self, unit: Unit) -> Unit | None:
        """The unit whose parameters are gathered after those of ``unit`` in a backward: an embedding's are not."""
        place = self.order.index(unit) if unit in self.order else 0
        return next((u for u in reversed(self.order[:place]) if u.again), None)

    def ahead(self) -> dict[Unit, Any]:
        """Gathers under way: those of the backward that runs in this thread, else of its forward."""
        return self.sync.backward().ahead if in_backward() else self.way.ahead

    def casting(self, p: Tensor) -> Unit | None:
        """The unit of a parameter that ops see in another dtype or place, wherever in the model's forward they do."""
        if self.owners is None:
            self.owners = {id(p): u for u in self.units for p in u.params if stored(p).dtypes or on_host(p)}
        return self.owners.get(id(p))

    # -- gradients ------------------------------------------------------------------------------------

    def scatter(self, params: Sequence[DistTensor]) -> list[InFlight]:
        """Start the reduction of the contributions that are held for these parameters: each rank keeps its chunk."""
        groups: dict[Any, list[DistTensor]] = {}
        for p in params:
            g = held(p)
            if g is not None and g._spec.layout.partial:
                alike = stored(p).axes, partial_axes(g._spec), g.dtype, p._spec.grad_wire, on_host(p) and p._spec.dtype
                groups.setdefault(alike, []).append(p)
        started: list[InFlight] = []
        for (own, axes, *_), members in groups.items():
            grads = [bare(g) for g in map(held, members) if g is not None]
            for p in members:
                hold(p, None)
            specs = [p._spec.with_(reduced=0, undecided=0, stored=False) for p in members]
            with torch.no_grad(), disabled():
                if not own:
                    started.append(self._sum(members, grads, specs, axes))
                    continue
                packing = self.packing(own, members, block_of(members[0]._spec.grad_wire))
                others = tuple(a for a in axes if a not in own)
                started.append(Scattering(members, grads, specs, packing, own, others))
        return started

    def _sum(
        self, params: list[DistTensor], grads: list[Tensor], specs: list[Spec], axes: tuple[int, ...]
    ) -> Reduction:
        """Start the all-reduce of contributions to parameters that are stored on the host, and whole."""
        wire = specs[0].grad_wire
        flat, views = Bucket((), axes, ((), grads[0].dtype, wire)).filled(grads)
        group = collective.group(self.mesh, axes) if axes else None
        sent = collective.Pending(None, flat) if group is None else collective.sum_async(flat, group, wire)
        return Reduction(params, specs, views, sent)

    def packing(self, axes: tuple[int, ...], params: Sequence[DistTensor], step: int = 1) -> Packing:
        """How these parameters, or what they are brought as gradients, travel together."""
        key = (axes, step, *((id(p), p._spec.shape, p._spec.layout) for p in params))
        found = self.packings.get(key)
        if found is None:
            here = self.mesh.coordinate(runtime.RT.rank)
            shapes = [p._spec.with_(layout=whole_over(p._spec, axes)).local_shape(here) for p in params]
            cuts = tuple(self.mesh.sizes[a] for a in axes)
            found = Packing(shapes, [split_dim(p._spec, axes) for p in params], cuts, step)
            self.packings[key] = found
        return found


def in_backward() -> bool:
    """Whether this thread runs a node of a backward."""
    return compat.current_graph_task_id() != -1


class Unit:
    """Modules whose parameters are cast and gathered together.

    Args:
        zero: the model's.
        places: modules and names in them, their stored parameters, and the records of these.
        spans: all modules that run inside the unit's forward belong to it.  Only then are its parameters gathered
            again for the backward: other units' forwards would keep them whole for long anyway.
        whole: its forward is that of the model: what other units cast is seen so wherever it is used in there.
    """

    def __init__(
        self, zero: Zero, places: Sequence[tuple[nn.Module, str, DistTensor, Stored]], spans: bool, whole: bool
    ) -> None:
        self.zero, self.spans, self.whole = zero, spans, whole
        self.places = [(module, name, how) for module, name, _, how in places]
        own = {id(p): (p, how) for _, _, p, how in places}
        self.params, self.kept = [p for p, _ in own.values()], [how for _, how in own.values()]
        self._start()

    def _start(self) -> None:
        self.again = False  # autograd has saved a reference to its parameters, which gathers them for the backward
        self.index = {id(p): i for i, p in enumerate(self.params)}
        for p, how in zip(self.params, self.kept, strict=True):
            p.__dict__[STORED] = how
            if how.dtypes is not None and how.dtypes.reduce is not p.dtype:
                with disabled():
                    p.grad_dtype = None  # the slot takes contributions in the dtype that they are reduced in
            p._spec = p._spec.with_(stored=True)

    def __getstate__(self) -> dict[str, Any]:
        return {k: self.__dict__[k] for k in ("zero", "params", "kept", "spans", "whole", "places")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def check_places(self) -> None:
        """Raises ShardError where a parameter that is cast was replaced by a tensor that is not, or one that is stored
        on the host by one that lies there, or was moved away."""
        for module, name, how in self.places:
            p = module._parameters.get(name)
            if p is not None and id(p) in self.index:
                if STORED not in p.__dict__:
                    raise ShardError(
                        f"{name} of {type(module).__name__} was swapped for another tensor (torch.utils.swap_tensors) "
                        "after shard_module, which is not stored, cast and reduced as that says: write to the "
                        "parameter (p.copy_() under torch.no_grad()), or swap before shard_module"
                    )
                if how.device:
                    check_place(p)
                continue
            if p is not None and how.device and p.device.type != self.zero.mesh.device:
                raise ShardError(
                    f"{name} of {type(module).__name__} was replaced after shard_module(stored_on=), by a tensor on "
                    f"{p.device} where {self.zero.mesh.device} computes: write to the parameter that is there "
                    "(load_state_dict without assign=True, p.copy_()), or move what you put in its place"
                )
            if p is not None and how.dtypes is not None and p.dtype is not how.dtypes.compute:
                raise ShardError(
                    f"{name} of {type(module).__name__} was replaced after shard_module(precision=), by a tensor in "
                    f"{p.dtype} where {how.dtypes.compute} is computed in: write to the parameter that is there "
                    "(load_state_dict without assign=True, p.copy_()), or cast what you put in its place"
                )

    # -- gathering ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to gather ahead of use, unless that is under way or may be in vain."""
        ahead = self.zero.ahead()
        if self not in ahead and not any(aliased(p, self.zero.mesh) for p in self.params):
            ahead[self] = self._begin()

    def _begin(self) -> Begun:
        # That versions are counted; and no checkpoint takes what is gathered early for a part of its forward.
        with torch.inference_mode(False), torch.no_grad(), disabled(), compat.outside_modes():
            device, state = self.zero.mesh.device, self.state()
            with Lane(device if any(how.device for how in self.kept) else HOST) as lane:
                near = {id(p): brought(p, device) for p in self.params if on_host(p)}
                parts = [self._send(axes, members, near) for axes, members in self._parts()]
                # A copy also where the host is the device: what stands in for a parameter may be written to.
                own = {p: near[p].to(compute_dtype(q), copy=device == HOST) for p, q in self._whole(near)}
            return Begun(state, parts, own, lane)

    def _whole(self, near: Mapping[int, Tensor]) -> list[tuple[int, DistTensor]]:
        """Parameters that are stored on the host and whole, by their ids."""
        return [(id(p), p) for p in self.params if id(p) in near and not stored(p).axes]

    def state(self) -> list[Any]:
        """What changes when a parameter is written to."""
        return [state_of(p) for p in self.params]

    def _parts(self) -> list[tuple[tuple[int, ...], list[DistTensor]]]:
        """Parameters that travel together: same axes, same dtype, same format."""
        groups: dict[Any, list[DistTensor]] = {}
        for p in self.params:
            if axes := stored(p).axes:
                groups.setdefault((axes, compute_dtype(p), gather_wire(p)), []).append(p)
        return [(axes, members) for (axes, *_), members in groups.items()]

    def _send(
        self, axes: tuple[int, ...], members: list[DistTensor], near: Mapping[int, Tensor]
    ) -> tuple[list[DistTensor], Packing, Any]:
        wire, group = gather_wire(members[0]), collective.group(self.zero.mesh, axes)
        packing = self.zero.packing(axes, members, block_of(wire))
        parts = [near[id(p)] if id(p) in near else bare(p) for p in members]
        row = packing.pack_row(parts, compute_dtype(members[0]))
        return members, packing, collective.gather_async(row, packing.sizes, group, wire)

    def check_autocast(self) -> None:
        """Raises ShardError where autocast would compute in another dtype than the parameters' precision says."""
        named = ((p.__dict__.get("_param_name", "a parameter"), stored(p).dtypes) for p in self.params)
        check_autocast(((n, d) for n, d in named if d is not None), self.zero.mesh.device)

    def gather(self) -> list[Tensor]:
        """The whole parameters as the ops see them, as new plain tensors."""
        ahead = self.zero.ahead()
        if self in ahead and ahead[self].state != self.state():
            self.forget(ahead)  # the parameters have changed since
        begun = ahead.pop(self, None) or self._begin()
        with torch.inference_mode(False), torch.no_grad(), disabled(), compat.outside_modes():
            kept = [p for p in self.params if not stored(p).axes and not on_host(p)]
            made = {id(p): bare(p).to(compute_dtype(p), copy=True) for p in kept} | begun.own
            flats = begun.wait()
            for (members, packing, _), flat in zip(begun.parts, flats, strict=True):
                if len(members) == 1 and packing.dims[0] == 0 and math.prod(packing.shapes[0]) == flat.numel():
                    wholes = [flat.view(packing.shapes[0])]
                else:
                    wholes = [flat.new_empty(shape) for shape in packing.shapes]
                    packing.unpack(flat, wholes)
                made |= {id(p): t for p, t in zip(members, wholes, strict=True)}
        before = self.zero.before(self) if in_backward() else None
        if before is not None and before not in self.zero.sync.backward().wholes:
            before.start()
        return [made[id(p)] for p in self.params]

    def forget(self, ahead: dict[Unit, Any]) -> None:
        """Drop a gather that nobody asked for after all."""
        ahead.pop(self).wait()

    def regathered(self) -> list[Tensor]:
        """The whole parameters, for the backward."""
        if not in_backward():
            return self.gather()
        found = self.known()
        if found is None:
            found = self.gather()
            self.zero.sync.backward().wholes[self] = self.state(), found
        return found

    def known(self) -> list[Tensor] | None:
        """The whole parameters as they are now, where the running backward has them."""
        state, found = self.zero.sync.backward().wholes.get(self, (None, None)) if in_backward() else (None, None)
        return found if state == self.state() else None


__all__ = ["Unit", "Zero", "in_backward"]
