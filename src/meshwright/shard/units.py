"""Units: modules whose stored parameters are gathered together, and the order in which a forward uses them."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn

from .. import collective, compat, runtime
from ..dispatch import disabled
from ..errors import ShardError
from ..layout import Spec, block_of
from ..mesh import Mesh
from ..raw import bare
from ..tensor import DistTensor, held, hold
from .buckets import STORED
from .changes import aliased, state_of
from .in_flight import InFlight, Scattering, partial_axes
from .packing import Packing, split_dim, whole_over
from .precision import PRECISION, Dtypes, check_autocast, compute_dtype
from .sync import GradSync

Tensor = torch.Tensor


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
        """The unit of a parameter that ops see in another dtype, wherever in the model's forward they do."""
        if self.owners is None:
            self.owners = {id(p): u for u in self.units for p in u.params if is_cast(p)}
        return self.owners.get(id(p))

    # -- gradients ------------------------------------------------------------------------------------

    def scatter(self, params: Sequence[DistTensor]) -> list[InFlight]:
        """Start the reduce-scatter of the contributions that are held for these parameters."""
        groups: dict[Any, list[DistTensor]] = {}
        for p in params:
            g = held(p)
            if g is not None and g._spec.layout.partial:
                groups.setdefault((p.__dict__[STORED], partial_axes(g._spec), g.dtype, p._spec.grad_wire), []).append(p)
        started: list[InFlight] = []
        for (axis, axes, *_), members in groups.items():
            grads = [bare(g) for g in map(held, members) if g is not None]
            for p in members:
                hold(p, None)
            with torch.no_grad(), disabled():
                packing = self.packing(axis, members, block_of(members[0]._spec.grad_wire))
                specs = [p._spec.with_(reduced=0, undecided=0, stored=False) for p in members]
                others = tuple(a for a in axes if a != axis)
                started.append(Scattering(members, grads, specs, packing, axis, others))
        return started

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
        spans: bool,
        whole: bool,
    ) -> None:
        self.zero = zero
        self.params = list({id(p): p for p in params}.values())
        self.axes = [stored.get(id(p)) for p in self.params]
        self.casts = [cast.get(id(p)) for p in self.params]
        self.spans, self.whole = spans, whole
        self.places: list[tuple[nn.Module, str, Dtypes]] = []  # of parameters that are cast
        self._start()

    def _start(self) -> None:
        self.again = False  # autograd has saved a reference to its parameters, which gathers them for the backward
        self.index = {id(p): i for i, p in enumerate(self.params)}
        for p, axis, dtypes in zip(self.params, self.axes, self.casts, strict=True):
            if axis is not None:
                p.__dict__[STORED] = axis
            if dtypes is not None:
                p.__dict__[PRECISION] = dtypes
                if dtypes.reduce is not p.dtype:
                    with disabled():
                        p.grad_dtype = None  # the slot takes contributions in the dtype that they are reduced in
            p._spec = p._spec.with_(stored=True)

    def __getstate__(self) -> dict[str, Any]:
        return {k: self.__dict__[k] for k in ("zero", "params", "axes", "casts", "spans", "whole", "places")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def check_places(self) -> None:
        """Raises ShardError where a parameter that is cast was replaced by a tensor that is not."""
        for module, name, dtypes in self.places:
            p = module._parameters.get(name)
            if p is not None and id(p) not in self.index and p.dtype is not dtypes.compute:
                raise ShardError(
                    f"{name} of {type(module).__name__} was replaced after shard_module(precision=), by a tensor in "
                    f"{p.dtype} where {dtypes.compute} is computed in: write to the parameter that is there "
                    "(load_state_dict without assign=True, p.copy_()), or cast what you put in its place"
                )

    # -- gathering ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to gather ahead of use, unless that is under way or may be in vain."""
        ahead = self.zero.ahead()
        if self not in ahead and not any(aliased(p, self.zero.mesh) for p in self.params):
            ahead[self] = self._begin()

    def _begin(self) -> tuple[Any, list[Any]]:
        with torch.inference_mode(False), torch.no_grad(), disabled():  # that versions are counted
            return self.state(), [self._send(axis, members) for axis, members in self._parts()]

    def state(self) -> list[Any]:
        """What changes when a parameter is written to."""
        return [state_of(p) for p in self.params]

    def _parts(self) -> list[tuple[int, list[DistTensor]]]:
        """Parameters that travel together: same axis, same dtype."""
        groups: dict[Any, list[DistTensor]] = {}
        for p in self.params:
            axis = stored_axis(p)
            if axis is not None:
                groups.setdefault((axis, compute_dtype(p)), []).append(p)
        return [(axis, members) for (axis, _), members in groups.items()]

    def _send(self, axis: int, members: list[DistTensor]) -> tuple[list[DistTensor], Packing, Any]:
        packing, group = self.zero.packing(axis, members), collective.group(self.zero.mesh, (axis,))
        row = packing.pack_row([bare(p) for p in members], compute_dtype(members[0]))
        return members, packing, collective.all_gather_async(row, 0, packing.sizes, group)

    def check_autocast(self) -> None:
        """Raises ShardError where autocast would compute in another dtype than the parameters' precision says."""
        named = zip((p.__dict__.get("_param_name", "a parameter") for p in self.params), self.casts, strict=True)
        check_autocast(((n, d) for n, d in named if d is not None), self.zero.mesh.device)

    def gather(self) -> list[Tensor]:
        """The whole parameters as the ops see them, as new plain tensors."""
        ahead = self.zero.ahead()
        if self in ahead and ahead[self][0] != self.state():
            self.forget(ahead)  # the parameters have changed since
        _, parts = ahead.pop(self, None) or self._begin()
        with torch.inference_mode(False), torch.no_grad(), disabled():
            made = {id(p): bare(p).to(compute_dtype(p), copy=True) for p in self.params if stored_axis(p) is None}
            for members, packing, pending in parts:
                flat = pending.wait()
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
        for _, _, pending in ahead.pop(self)[1]:
            pending.wait()

    def regathered(self) -> list[Tensor]:
        """The whole parameters, for the backward."""
        if not in_backward():
            return self.gather()
        backward = self.zero.sync.backward()
        if self not in backward.wholes:
            backward.wholes[self] = self.gather()
        return backward.wholes[self]


__all__ = ["Unit", "Zero", "in_backward", "is_cast", "seen_spec", "stored_axis"]
