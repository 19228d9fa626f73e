"""Units: modules whose stored parameters are gathered together, and the order in which a forward uses them."""

from __future__ import annotations

import enum
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from ... import collective, compat
from ...collective import serving
from ...dispatch import disabled
from ...errors import ShardError
from ...layout import Marks, Spec, block_of, marked
from ...local_tensor import bare
from ...mesh import Mesh
from ...ranks import runtime
from ...resharding import executor
from ...tensor import OPEN, DistTensor, held, hold
from ..gradients.backward import Backward
from ..gradients.buckets import Bucket
from ..gradients.reductions import PendingReduction, Reduction, Scattering, partial_axes
from ..gradients.sync import GradSync
from ..parameters.chain import Chain, chain
from ..parameters.host import HOST, CopyStream, check_place
from ..parameters.names import names_of
from ..parameters.packing import Packing, split_dim, whole_over
from ..parameters.precision import check_autocast
from ..parameters.stored import STORED, Stored, compute_dtype, on_host, stored
from ..parameters.versions import aliased, state_of

Tensor = torch.Tensor


Part = tuple[list[DistTensor], Packing, collective.Pending]


class PendingGather(NamedTuple):
    """Parameters of a unit on their way: what they were, all-gathers, those that need none, and where that runs."""

    state: Any
    parts: list[Part]
    own: dict[int, Tensor]
    lane: CopyStream

    def wait(self) -> list[Tensor]:
        """What was gathered, which others than the lane may read from now on."""
        flats = [pending.wait() for _, _, pending in self.parts]
        self.lane.wait([*flats, *self.own.values()])
        return flats


class _Way(threading.local):
    """A forward on its way through the units, in one thread."""

    def __init__(self) -> None:
        self.cursor = 0
        self.seen: list[ParamGroup] = []
        self.ahead: dict[ParamGroup, PendingGather] = {}  # gathers under way
        self.wholes: dict[ParamGroup, tuple[Any, list[Tensor]]] = {}  # what was gathered and kept, and of which state


class FSDPState:
    """All units of a model and the order in which its forward uses them.

    Args:
        sync: says whether gradients are to be synchronised.
        reshard_after_forward: gather again for the backward.
    """

    def __init__(self, mesh: Mesh, sync: GradSync, reshard_after_forward: bool) -> None:
        self.mesh, self.sync, self.reshard_after_forward = mesh, sync, reshard_after_forward
        self.units: list[ParamGroup] = []
        self.order: list[ParamGroup] = []  # of the first forward
        self._start()

    def _start(self) -> None:
        self.way = _Way()
        self.packings: dict[Any, Packing] = {}
        # Id of a parameter that is stored on the host to the nodes of autograd that bring contributions to it.
        self.uses: dict[int, weakref.WeakSet[Any]] = {}
        self.owners: dict[int, ParamGroup] | None = None
        self.sync.reduce = self.reduce

    def __getstate__(self) -> dict[str, Any]:
        return {k: self.__dict__[k] for k in ("mesh", "sync", "reshard_after_forward", "units", "order")}

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
        while way.ahead:  # nobody asked for them after all
            way.ahead.popitem()[1].wait()

    def follow(self, unit: ParamGroup) -> None:
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

    def before(self, unit: ParamGroup) -> ParamGroup | None:
        """The unit whose parameters are gathered after those of ``unit`` in a backward: an embedding's are not."""
        place = self.order.index(unit) if unit in self.order else 0
        return next((u for u in reversed(self.order[:place]) if u.again), None)

    def running(self) -> Backward | _Way:
        """What has the gathers of this thread, under way and made: the backward that runs in it, else its forwards."""
        return self.sync.backward() if in_backward() else self.way

    def casting(self, p: Tensor) -> ParamGroup | None:
        """The unit of a parameter that ops see in another dtype or place, wherever in the model's forward they do."""
        if self.owners is None:
            self.owners = {id(p): u for u in self.units for p in u.params if stored(p).dtypes or on_host(p)}
        return self.owners.get(id(p))

    # -- gradients ------------------------------------------------------------------------------------

    def reduce(self, params: Sequence[DistTensor]) -> list[PendingReduction]:
        """Start the reduction of the contributions that are held for these parameters: each rank keeps its chunk."""
        groups: dict[Any, list[DistTensor]] = {}
        for p in params:
            g = held(p)
            if g is not None and g._spec.layout.partial:
                alike = (
                    stored(p).axes,
                    partial_axes(g._spec),
                    g.dtype,
                    p._spec.grad_comm_format,
                    on_host(p) and p._spec.dtype,
                )
                groups.setdefault(alike, []).append(p)
        started: list[PendingReduction] = []
        for (own, axes, *_), members in groups.items():
            grads = [bare(g) for g in map(held, members) if g is not None]
            for p in members:
                hold(p, None)
            specs = [p._spec.invariant() for p in members]
            with torch.no_grad(), disabled(), serving("gradient", partial(names_of, members)):
                if not own:
                    started.append(self._sum(members, grads, specs, axes))
                    continue
                packing = self.packing(own, members, block_of(members[0]._spec.grad_comm_format))
                others = tuple(a for a in axes if a not in own)
                started.append(Scattering(members, grads, specs, packing, own, others))
        return started

    def _sum(
        self, params: list[DistTensor], grads: list[Tensor], specs: list[Spec], axes: tuple[int, ...]
    ) -> Reduction:
        """Start the all-reduce of contributions to parameters that are stored on the host, and whole."""
        wire = specs[0].grad_comm_format
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


class State(enum.Enum):
    """Where the parameters of a unit are, to a thread, in its forwards or in the backward that it runs.

    ``STORED``: as they are stored and nowhere else.  ``COMING``: on their way.  ``SEEN``: as ops see them, as well.
    """

    STORED = "stored"
    COMING = "coming"
    SEEN = "seen"


class ParamGroup:
    """Modules whose parameters are cast and gathered together.

    Four verbs, which hooks of forwards and nodes of backwards call, and a schedule may call ahead of them::

        STORED --start--> COMING --gather--> SEEN --free--> STORED
        STORED ------------gather----------> SEEN

    and ``reduce``, which starts what brings contributions to their gradients home.  All ranks call them in one order,
    since each may communicate.  The idea is that of FSDP2's parameter groups.

    Args:
        zero: the model's.
        places: modules and names in them, their stored parameters, and the records of these.
        spans: all modules that run inside the unit's forward belong to it.  Only then are its parameters gathered
            again for the backward: other units' forwards would keep them whole for long anyway.
        whole: its forward is that of the model: what other units cast is seen so wherever it is used in there.
    """

    def __init__(
        self, zero: FSDPState, places: Sequence[tuple[nn.Module, str, DistTensor, Stored]], spans: bool, whole: bool
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
            p._spec = marked(p._spec, Marks(stored=True))

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
                    f"{name} of {type(module).__name__} was replaced after shard_module(offload=), by a tensor on "
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

    @property
    def state(self) -> State:
        """Where its parameters are, to this thread."""
        if self.known() is not None or any(s.unit is self and s.wholes for s in OPEN.scopes):
            return State.SEEN
        return State.COMING if self in self.zero.running().ahead else State.STORED

    def start(self) -> None:
        """Begin to gather, ahead of use, unless that is under way or may be in vain: its parameters are ``COMING``."""
        ahead = self.zero.running().ahead
        if self not in ahead and self.known() is None and not any(aliased(p, self.zero.mesh) for p in self.params):
            ahead[self] = self._begin()

    def _begin(self) -> PendingGather:
        # That versions are counted; and no checkpoint takes what is gathered early for a part of its forward.
        with torch.inference_mode(False), torch.no_grad(), disabled(), compat.outside_modes():
            device, state = self.zero.mesh.device, self.versions()
            with CopyStream(device if any(how.device for how in self.kept) else HOST) as lane:
                ways = {id(p): chain(p._spec, stored(p)) for p in self.params}
                near = {id(p): executor.ready(ways[id(p)].copy).run(bare(p)) for p in self.params}
                parts = [self._send(members, ways[id(members[0])], near) for members in self._parts(ways)]
                # What needs nothing to be started is made where it is asked for.
                own = {i: executor.ready(w.cast).run(near[i]) for i, w in ways.items() if w.copy and not w.gather}
            return PendingGather(state, parts, own, lane)

    def versions(self) -> list[Any]:
        """What changes when a parameter is written to."""
        return [state_of(p) for p in self.params]

    def _parts(self, ways: Mapping[int, Chain]) -> list[list[DistTensor]]:
        """Parameters that travel together: same axes, same dtype, same format."""
        groups: dict[Any, list[DistTensor]] = {}
        for p in self.params:
            for step in ways[id(p)].gather:
                groups.setdefault((step.axes, step.travels, step.src.dtype), []).append(p)
        return list(groups.values())

    def _send(self, members: list[DistTensor], way: Chain, near: Mapping[int, Tensor]) -> Part:
        """Start the gather of parameters that travel together; they are cast on their way into its buffer."""
        (step,) = way.gather
        packing = self.zero.packing(step.axes, members, block_of(step.src.comm_format))
        row = packing.pack_row([near[id(p)] for p in members], step.src.dtype)
        group = collective.group(self.zero.mesh, step.axes)
        with serving("", partial(names_of, members)):
            return members, packing, collective.gather_async(row, packing.sizes, group, step.src.comm_format)

    def check_autocast(self) -> None:
        """Raises ShardError where autocast would compute in another dtype than the parameters' precision says."""
        named = ((p.__dict__.get("_param_name", "a parameter"), stored(p).dtypes) for p in self.params)
        check_autocast(((n, d) for n, d in named if d is not None), self.zero.mesh.device)

    def gather(self, *, keep: bool = False, again: bool = False) -> list[Tensor]:
        """The whole parameters as ops see them, as plain tensors: new ones, or those that were kept.

        Args:
            keep: until they are freed, forwards of this thread (in a backward: what else runs in that) take these.
            again: new ones in any case, where what was kept may not be what is stored.
        """
        found = None if again else self.known()
        if found is None:
            found = self._gathered()
            if keep:
                self.zero.running().wholes[self] = self.versions(), found
        return found

    def _gathered(self) -> list[Tensor]:
        ahead = self.zero.running().ahead
        if self in ahead and ahead[self].state != self.versions():
            ahead.pop(self).wait()  # the parameters have changed since
        begun = ahead.pop(self, None) or self._begin()
        with torch.inference_mode(False), torch.no_grad(), disabled(), compat.outside_modes():
            flats = begun.wait()
            made = dict(begun.own)
            for (members, packing, _), flat in zip(begun.parts, flats, strict=True):
                if len(members) == 1 and packing.dims[0] == 0 and math.prod(packing.shapes[0]) == flat.numel():
                    wholes = [flat.view(packing.shapes[0])]
                else:
                    wholes = [flat.new_empty(shape) for shape in packing.shapes]
                    packing.unpack(flat, wholes)
                made |= {id(p): t for p, t in zip(members, wholes, strict=True)}
            for p in self.params:
                if id(p) not in made:  # whole, on the device: memory of its own, which may be written to
                    made[id(p)] = bare(p).to(compute_dtype(p), copy=True)
        before = self.zero.before(self) if in_backward() else None
        if before is not None:
            before.start()
        return [made[id(p)] for p in self.params]

    def known(self) -> list[Tensor] | None:
        """The whole parameters as they are now, where they were kept."""
        versions, found = self.zero.running().wholes.get(self, (None, None))
        return found if versions == self.versions() else None

    def free(self) -> None:
        """Drop what was gathered and kept, or is on its way: its parameters are ``STORED``, but for open forwards."""
        running = self.zero.running()
        running.wholes.pop(self, None)
        if self in running.ahead:
            running.ahead.pop(self).wait()

    def reduce(self) -> list[PendingReduction]:
        """Start to reduce the contributions to its gradients that are held, as ``no_sync`` leaves them: who reads one
        waits for it."""
        return self.zero.reduce(self.params)


__all__ = ["FSDPState", "ParamGroup", "State", "in_backward"]
