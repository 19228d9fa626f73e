"""Units: modules whose stored parameters are gathered together, and the order in which a forward uses them."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Mapping, Sequence, Set
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
from ..gradients.buckets import STORED, Bucket
from ..gradients.reductions import InFlight, Reduction, Scattering, partial_axes
from ..gradients.sync import GradSync
from ..parameters.host import HOST, ON, Lane, brought, check_place, on_host
from ..parameters.packing import Packing, split_dim, whole_over
from ..parameters.precision import PRECISION, Dtypes, check_autocast, compute_dtype, gather_wire
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
            self.owners = {id(p): u for u in self.units for p in u.params if is_cast(p) or on_host(p)}
        return self.owners.get(id(p))

    # -- gradients ------------------------------------------------------------------------------------

    def scatter(self, params: Sequence[DistTensor]) -> list[InFlight]:
        """Start the reduction of the contributions that are held for these parameters: each rank keeps its chunk."""
        groups: dict[Any, list[DistTensor]] = {}
        for p in params:
            g = held(p)
            if g is not None and g._spec.layout.partial:
                alike = stored_axis(p), partial_axes(g._spec), g.dtype, p._spec.grad_wire, on_host(p) and p._spec.dtype
                groups.setdefault(alike, []).append(p)
        started: list[InFlight] = []
        for (axis, axes, *_), members in groups.items():
            grads = [bare(g) for g in map(held, members) if g is not None]
            for p in members:
                hold(p, None)
            specs = [p._spec.with_(reduced=0, undecided=0, stored=False) for p in members]
            with torch.no_grad(), disabled():
                if axis is None:
                    started.append(self._sum(members, grads, specs, axes))
                    continue
                packing = self.packing(axis, members, block_of(members[0]._spec.grad_wire))
                others = tuple(a for a in axes if a != axis)
                started.append(Scattering(members, grads, specs, packing, axis, others))
        return started

    def _sum(
        self, params: list[DistTensor], grads: list[Tensor], specs: list[Spec], axes: tuple[int, ...]
    ) -> Reduction:
        """Start the all-reduce of contributions to parameters that are stored on the host, and whole."""
        wire = specs[0].grad_wire
        flat, views = Bucket((), axes, (None, grads[0].dtype, wire)).filled(grads)
        group = collective.group(self.mesh, axes) if axes else None
        sent = collective.Pending(None, flat) if group is None else collective.sum_async(flat, group, wire)
        return Reduction(params, specs, views, sent)

    def packing(self, axis: int, params: Sequence[DistTensor], step: int = 1) -> Packing:
        """How these parameters, or what they are brought as gradients, travel together."""
        key = (axis, step, *((id(p), p._spec.shape, p._spec.layout) for p in params))
        found = self.packings.get(key)
        if found is None:
            here = self.mesh.coordinate(runtime.RT.rank)
            shapes = [p._spec.with_(layout=whole_over(p._spec, axis)).local_shape(here) for p in params]
            found = Packing(shapes, [split_dim(p._spec, axis) for p in params], self.mesh.sizes[axis], step)
            self.packings[key] = found
        return found


def in_backward() -> bool:
    """Whether this thread runs a node of a backward."""
    return compat.current_graph_task_id() != -1


def stored_axis(p: Tensor) -> int | None:
    """Index of the axis that a parameter is stored over, if it is."""
    axis: int | None = p.__dict__.get(STORED)
    return axis


def is_cast(p: Tensor) -> bool:
    """Whether ops see a parameter in another dtype than it is stored in, or its gradient is reduced in another."""
    return PRECISION in p.__dict__


def seen_spec(p: DistTensor, learning: bool = True) -> Spec:
    """Spec of a stored parameter as the ops see it; its gradient is Partial on the axis that it is stored
    over."""
    axis, spec, dtype = stored_axis(p), p._spec, compute_dtype(p)
    layout, split = (spec.layout, 0) if axis is None else (whole_over(spec, axis), 1 << axis)
    if not learning:
        return Spec(spec.shape, dtype, layout, undecided=spec.mesh.everywhere)
    return Spec(spec.shape, dtype, layout, spec.reduced | split, spec.undecided, wires=spec.wires)


class Unit:
    """Modules whose parameters are cast and gathered together.

    Args:
        zero: the model's.
        params: the stored parameters of its modules.
        stored: id of a parameter to the axis that it is stored over.
        cast: id of a parameter to the dtypes that it is seen and reduced in.
        hosted: ids of parameters that are stored on the host.
        spans: all modules that run inside the unit's forward belong to it.  Only then are its parameters gathered
            again for the backward: other units' forwards would keep them whole for long anyway.
        whole: its forward is that of the model: what other units cast is seen so wherever it is used in there.
    """

    def __init__(
        self,
        zero: Zero,
        params: Sequence[DistTensor],
        stored: Mapping[int, int],
        cast: Mapping[int, Dtypes],
        hosted: Set[int],
        spans: bool,
        whole: bool,
    ) -> None:
        self.zero = zero
        self.params = list({id(p): p for p in params}.values())
        self.axes = [stored.get(id(p)) for p in self.params]
        self.casts = [cast.get(id(p)) for p in self.params]
        self.hosted = [id(p) in hosted for p in self.params]
        self.spans, self.whole = spans, whole
        # Of each parameter: its module and name there, what it is cast to, whether it is stored on the host.
        self.places: list[tuple[nn.Module, str, Dtypes | None, bool]] = []
        self._start()

    def _start(self) -> None:
        self.again = False  # autograd has saved a reference to its parameters, which gathers them for the backward
        self.index = {id(p): i for i, p in enumerate(self.params)}
        for p, axis, dtypes, hosted in zip(self.params, self.axes, self.casts, self.hosted, strict=True):
            if hosted:
                p.__dict__[ON] = HOST
            if axis is not None:
                p.__dict__[STORED] = axis
            if dtypes is not None:
                p.__dict__[PRECISION] = dtypes
                if dtypes.reduce is not p.dtype:
                    with disabled():
                        p.grad_dtype = None  # the slot takes contributions in the dtype that they are reduced in
            p._spec = p._spec.with_(stored=True)

    def __getstate__(self) -> dict[str, Any]:
        return {k: self.__dict__[k] for k in ("zero", "params", "axes", "casts", "hosted", *_SAID)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def check_places(self) -> None:
        """Raises ShardError where a parameter that is cast was replaced by a tensor that is not, or one that is stored
        on the host by one that lies there, or was moved away."""
        for module, name, dtypes, hosted in self.places:
            p = module._parameters.get(name)
            if p is not None and id(p) in self.index:
                self._check_marks(p, name, module)
                if hosted:
                    check_place(p)
                continue
            if p is not None and hosted and p.device.type != self.zero.mesh.device:
                raise ShardError(
                    f"{name} of {type(module).__name__} was replaced after shard_module(stored_on=), by a tensor on "
                    f"{p.device} where {self.zero.mesh.device} computes: write to the parameter that is there "
                    "(load_state_dict without assign=True, p.copy_()), or move what you put in its place"
                )
            if p is not None and dtypes is not None and p.dtype is not dtypes.compute:
                raise ShardError(
                    f"{name} of {type(module).__name__} was replaced after shard_module(precision=), by a tensor in "
                    f"{p.dtype} where {dtypes.compute} is computed in: write to the parameter that is there "
                    "(load_state_dict without assign=True, p.copy_()), or cast what you put in its place"
                )

    def _check_marks(self, p: nn.Parameter, name: str, module: nn.Module) -> None:
        """Raises ShardError where a parameter is the object that it was and has become another tensor."""
        i, space = self.index[id(p)], p.__dict__
        said = {STORED: self.axes[i] is not None, PRECISION: self.casts[i] is not None, ON: self.hosted[i]}
        if any(was and mark not in space for mark, was in said.items()):
            raise ShardError(
                f"{name} of {type(module).__name__} was swapped for another tensor (torch.utils.swap_tensors) after "
                "shard_module, which is not stored, cast and reduced as that says: write to the parameter (p.copy_() "
                "under torch.no_grad()), or swap before shard_module"
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
            with Lane(device if any(self.hosted) else HOST) as lane:
                near = {id(p): brought(p, device) for p in self.params if on_host(p)}
                parts = [self._send(axis, members, near) for axis, members in self._parts()]
                # A copy also where the host is the device: what stands in for a parameter may be written to.
                own = {p: near[p].to(compute_dtype(q), copy=device == HOST) for p, q in self._whole(near)}
            return Begun(state, parts, own, lane)

    def _whole(self, near: Mapping[int, Tensor]) -> list[tuple[int, DistTensor]]:
        """Parameters that are stored on the host and whole, by their ids."""
        return [(id(p), p) for p in self.params if id(p) in near and stored_axis(p) is None]

    def state(self) -> list[Any]:
        """What changes when a parameter is written to."""
        return [state_of(p) for p in self.params]

    def _parts(self) -> list[tuple[int, list[DistTensor]]]:
        """Parameters that travel together: same axis, same dtype, same format."""
        groups: dict[Any, list[DistTensor]] = {}
        for p in self.params:
            axis = stored_axis(p)
            if axis is not None:
                groups.setdefault((axis, compute_dtype(p), gather_wire(p)), []).append(p)
        return [(axis, members) for (axis, *_), members in groups.items()]

    def _send(
        self, axis: int, members: list[DistTensor], near: Mapping[int, Tensor]
    ) -> tuple[list[DistTensor], Packing, Any]:
        wire, group = gather_wire(members[0]), collective.group(self.zero.mesh, (axis,))
        packing = self.zero.packing(axis, members, block_of(wire))
        parts = [near[id(p)] if id(p) in near else bare(p) for p in members]
        row = packing.pack_row(parts, compute_dtype(members[0]))
        return members, packing, collective.gather_async(row, packing.sizes, group, wire)

    def check_autocast(self) -> None:
        """Raises ShardError where autocast would compute in another dtype than the parameters' precision says."""
        named = zip((p.__dict__.get("_param_name", "a parameter") for p in self.params), self.casts, strict=True)
        check_autocast(((n, d) for n, d in named if d is not None), self.zero.mesh.device)

    def gather(self) -> list[Tensor]:
        """The whole parameters as the ops see them, as new plain tensors."""
        ahead = self.zero.ahead()
        if self in ahead and ahead[self].state != self.state():
            self.forget(ahead)  # the parameters have changed since
        begun = ahead.pop(self, None) or self._begin()
        with torch.inference_mode(False), torch.no_grad(), disabled(), compat.outside_modes():
            kept = [p for p in self.params if stored_axis(p) is None and not on_host(p)]
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


_SAID = ("spans", "whole", "places")

__all__ = ["Unit", "Zero", "in_backward", "is_cast", "seen_spec", "stored_axis"]
