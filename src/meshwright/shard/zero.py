"""Parameters that are stored split over an axis and seen whole by the ops (ZeRO-3).

Modules are grouped into *units* (a block of a transformer, say).  Before the forward of a unit one
all-gather brings its parameters, the next unit's is started, and the gathered tensors stand in for the
parameters while the forward runs.  What autograd saves of them is a reference: the backward gathers again.
Gradients arrive whole, one node per unit and forward, add up on each rank, and are reduce-scattered once per
backward.

After Rajbhandari et al., ZeRO (2020), and PyTorch's FSDP (Zhao et al., 2023).
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from .. import collective, convert, runtime
from ..dispatch import disabled, tie
from ..errors import ShardError
from ..layout import Spec, chunk_bounds
from ..mesh import Mesh
from ..raw import bare
from ..reshard import plan as plan_conversion
from ..tensor import OPEN, DistTensor, GradientHook, held, hold, stamp
from .buckets import STORED
from .changes import aliased, state_of
from .flights import Flight, Scattering, partial_axes
from .packing import Packing, whole_over
from .saved import Saver, may_save_references
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
        """The unit whose backward comes after that of ``unit``."""
        place = self.order.index(unit) if unit in self.order else 0
        return self.order[place - 1] if place else None

    def ahead(self) -> dict[Unit, Any]:
        """Gathers under way: those of the backward that runs in this thread, else of its forward."""
        return self.sync.backward().ahead if in_backward() else self.way.ahead

    # -- gradients ------------------------------------------------------------------------------------

    def scatter(self, params: Sequence[DistTensor]) -> list[Flight]:
        """Start the reduce-scatter of the contributions that are held for these parameters."""
        groups: dict[Any, list[DistTensor]] = {}
        for p in params:
            g = held(p)
            if g is not None and g._spec.layout.partial:
                groups.setdefault((stored_axis(p), partial_axes(g._spec), g.dtype), []).append(p)
        flights: list[Flight] = []
        for (axis, axes, _), members in groups.items():
            grads = [bare(g) for g in map(held, members) if g is not None]
            for p in members:
                hold(p, None)
            with torch.no_grad(), disabled():
                packing = self.packing(axis, members, [g.shape for g in grads])
                specs = [p._spec.with_(reduced=0, undecided=0, stored=False) for p in members]
                others = tuple(a for a in axes if a != axis)
                flights.append(Scattering(members, grads, specs, packing, axis, others))
        return flights

    def packing(self, axis: int, params: Sequence[DistTensor], shapes: Sequence[Sequence[int]]) -> Packing:
        """How these parameters travel together."""
        key = (axis, *((id(p), p._spec.shape, p._spec.layout) for p in params))
        found = self.packings.get(key)
        if found is None:
            found = Packing(shapes, [stored_dim(p, axis) for p in params], self.mesh.sizes[axis])
            self.packings[key] = found
        return found


def in_backward() -> bool:
    """Whether this thread runs a node of a backward."""
    return torch._C._current_graph_task_id() != -1


def stored_axis(p: Tensor) -> int:
    """Index of the axis that a parameter is stored over."""
    return int(p.__dict__[STORED])


def stored_dim(p: DistTensor, axis: int) -> int:
    """The dim that the axis cuts."""
    return int(p._spec.layout.placements[axis].dim)  # type: ignore[union-attr]


def seen_spec(p: DistTensor, learning: bool = True) -> Spec:
    """Spec of a stored parameter as the ops see it; its gradient is Partial on the axis that it is stored
    over."""
    axis, spec = stored_axis(p), p._spec
    layout = whole_over(spec, axis)
    if not learning:
        return Spec(spec.shape, spec.dtype, layout, undecided=spec.mesh.everywhere)
    return Spec(spec.shape, spec.dtype, layout, spec.reduced | 1 << axis, spec.undecided)


class Unit:
    """Modules whose parameters are gathered together.

    Args:
        zero: the model's.
        params: the stored parameters of its modules.
        stored: id of a parameter to the axis that it is stored over.
        spans: all modules that run inside the unit's forward belong to it.  Only then are its parameters gathered
            again for the backward: other units' forwards would keep them whole for long anyway.
    """

    def __init__(
        self,
        zero: Zero,
        params: Sequence[DistTensor],
        stored: Mapping[int, int],
        spans: bool,
    ) -> None:
        self.zero = zero
        self.params = list({id(p): p for p in params}.values())
        self.axes = [stored[id(p)] for p in self.params]
        self.spans = spans
        self._start()

    def _start(self) -> None:
        self.index = {id(p): i for i, p in enumerate(self.params)}
        for p, axis in zip(self.params, self.axes, strict=True):
            p.__dict__[STORED] = axis
            p._spec = p._spec.with_(stored=True)

    def __getstate__(self) -> dict[str, Any]:
        return {k: self.__dict__[k] for k in ("zero", "params", "axes", "spans")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    # -- gathering ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to gather ahead of use, unless that is under way or may be in vain."""
        ahead = self.zero.ahead()
        if self not in ahead and not any(aliased(p) for p in self.params):
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
            groups.setdefault((stored_axis(p), p.dtype), []).append(p)
        return [(axis, members) for (axis, _), members in groups.items()]

    def _send(self, axis: int, members: list[DistTensor]) -> tuple[list[DistTensor], Packing, Any]:
        mesh = self.zero.mesh
        here = mesh.coordinate(runtime.RT.rank)
        shapes = [p._spec.with_(layout=whole_over(p._spec, axis)).local_shape(here) for p in members]
        packing = self.zero.packing(axis, members, shapes)
        row = packing.pack_row([bare(p) for p in members])
        return members, packing, collective.all_gather_async(row, 0, packing.sizes, collective.group(mesh, (axis,)))

    def gather(self) -> list[Tensor]:
        """The whole parameters, as new plain tensors."""
        ahead = self.zero.ahead()
        if self in ahead and ahead[self][0] != self.state():
            self.forget(ahead)  # the parameters have changed since
        _, parts = ahead.pop(self, None) or self._begin()
        with torch.inference_mode(False), torch.no_grad(), disabled():
            made: dict[int, Tensor] = {}
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

    # -- the forward ----------------------------------------------------------------------------------

    def enter(self, frame: Any) -> None:
        """The forward begins, in a call with this frame: gathered tensors stand in for the parameters."""
        running = _frames() if OPEN.scopes else ()
        while OPEN.scopes and id(OPEN.scopes[-1].frame) not in running:
            OPEN.scopes.pop().close()  # of a forward that was interrupted
        found = next((s for s in OPEN.scopes if s.unit is self), None)
        if found is None:
            self.zero.follow(self)
        OPEN.scopes.append(found or Seen(self, frame))

    def leave(self) -> None:
        """The forward ends."""
        while OPEN.scopes:
            scope = OPEN.scopes.pop()
            if scope not in OPEN.scopes:
                scope.close()
            if scope.unit is self:
                return


def _frames() -> set[int]:
    found: set[int] = set()
    frame: Any = sys._getframe()
    while frame is not None:
        found.add(id(frame))
        frame = frame.f_back
    return found


_VIEWED = "a view of a leaf Variable that requires grad is being used in an in-place operation."


class Seen:
    """One forward of a unit in one thread: what stands in for its parameters, gathered at their first use.

    Args:
        frame: of the call of the module: while that runs, so does the forward.
    """

    def __init__(self, unit: Unit, frame: Any) -> None:
        self.unit, self.frame = unit, frame
        self.wholes: list[Tensor] = []
        self.states: list[Any] = []  # of the parameters, and versions of the wholes, when they were alike
        self.versions: list[int] = []
        self.made: dict[bool, list[Tensor]] = {}  # by whether gradients are recorded
        self.node: Any = None  # of autograd, that gave the stand-ins which have a history
        self.saver: Saver | None = None
        if torch.is_grad_enabled() and may_save_references():
            self.saver = Saver(unit, self.keep, again=unit.spans and unit.zero.regather)
            self.saver.push()

    def find(self, p: Tensor) -> Tensor | None:
        """What stands in for a parameter, if it is one of the unit's."""
        i = self.unit.index.get(id(p))
        if i is None or self.unit.params[i] is not p:
            return None
        if self.wholes and self.wholes[i]._version != self.versions[i]:
            self.keep()
        if not self.wholes or self.states[i] != state_of(p) or aliased(p):
            self._gather()
        recorded = torch.is_grad_enabled()
        made = self.made.get(recorded)
        if made is None or made[i].requires_grad != (recorded and p.requires_grad):
            made = self.made[recorded] = self._stand_ins(recorded)
        return made[i]

    def held(self, p: Tensor) -> Tensor | None:
        """What stands in for a parameter, if something does already."""
        return self.find(p) if self.wholes else None

    def keep(self) -> None:
        """Bring to the parameters what was written to what stands in for them: through a view, by a lookup that scales
        the rows that it reads.  Each rank has the whole, so nothing is sent.

        Raises:
            RuntimeError: the write is part of what gradients are recorded of, as on one device.
            ShardError: the parameter was written to by itself in between.
        """
        changed = [i for i, t in enumerate(self.wholes) if t._version != self.versions[i]]
        here = self.unit.zero.mesh.coordinate(runtime.RT.rank) if changed else ()
        for i in changed:
            p, t = self.unit.params[i], self.wholes[i]
            if state_of(p) != self.states[i]:
                raise ShardError(
                    f"{p.__dict__.get('_param_name', 'a parameter')} is stored split, and in one forward was written "
                    "to both through a view of it and through its detach() or data: say one of them"
                )
            stand_in = self.made[True][i] if True in self.made else t
            if stand_in.requires_grad and stand_in.grad_fn is not self.node:
                raise RuntimeError(f"{_VIEWED} ({p.__dict__.get('_param_name', 'a parameter')})")
            axis = stored_axis(p)
            dim = stored_dim(p, axis)
            lo, hi = chunk_bounds(t.shape[dim], self.unit.zero.mesh.sizes[axis], here[axis])
            with torch.no_grad(), disabled():
                bare(p).copy_(t.narrow(dim, lo, hi - lo))
            self.states[i], self.versions[i] = state_of(p), t._version
        if changed and self.saver is not None:
            self.saver.note(self.wholes)

    def _gather(self) -> None:
        self.keep()
        unit = self.unit
        known = unit.zero.sync.backward().wholes.get(unit) if in_backward() and not self.wholes else None
        old, states = self.wholes, self.states
        self.states, self.made = unit.state(), {}
        self.wholes = unit.gather() if known is None else known
        for i, t in enumerate(old):  # of which there may be views
            if states[i] != self.states[i]:
                with torch.no_grad():
                    t.copy_(self.wholes[i])
            if not aliased(unit.params[i]):
                self.wholes[i] = t
        self.versions = [t._version for t in self.wholes]
        if self.saver is not None:
            self.saver.note(self.wholes)

    def _stand_ins(self, recorded: bool) -> list[Tensor]:
        unit = self.unit
        made = [t.detach() for t in self.wholes]
        learning = [i for i, p in enumerate(unit.params) if recorded and p.requires_grad]
        if learning:
            params = [unit.params[i] for i in learning]
            with disabled():
                out = _Gather.apply(unit, params, [made[i] for i in learning], *params)
            self.node = out[0].grad_fn
            for i, t in zip(learning, out, strict=True):
                made[i] = t
        for i, (p, t) in enumerate(zip(unit.params, made, strict=True)):
            spec = seen_spec(p, i in learning)
            stamp(t, spec)
            if spec.undecided and i in learning:
                tie([p, t])
        return made

    def again(self, fn: Callable[[], Any]) -> Any:
        """Call ``fn``, which runs a part of the forward again."""
        self.unit.enter(sys._getframe())
        try:
            return fn()
        finally:
            self.unit.leave()

    def close(self) -> None:
        """The forward is over."""
        if self.saver is not None:
            self.saver.pop()
        self.keep()


class _Gather(torch.autograd.Function):
    """Identity on the gathered parameters; its backward hands their gradients over."""

    @staticmethod
    def forward(
        ctx: Any, unit: Unit, params: list[DistTensor], wholes: list[Tensor], *stored: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.unit, ctx.params = unit, params
        ctx.set_materialize_grads(False)
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        unit: Unit = ctx.unit
        backward = unit.zero.sync.backward()
        backward.wholes.pop(unit, None)
        nodes = [node for node, _ in ctx.next_functions if node is not None]
        back: list[Tensor | None] = [None] * len(grads)
        params, specs, kept = [], [], []
        for i, (p, g, node) in enumerate(zip(ctx.params, grads, nodes, strict=True)):
            spec = seen_spec(p).grad()  # only now: the forward may have been what decided the types
            how = _wanted(node)
            # Hooks of the user are autograd's business: they get the gradient as it is stored.
            native = torch.is_grad_enabled() or p.__dict__["_after"] or _hooked(p)
            if g is not None and (how == "returned" or (how == "kept" and native)):
                source, target = spec.with_(dtype=g.dtype), p._spec.with_(undecided=0).grad()
                with disabled():
                    back[i] = convert.apply(plan_conversion(source, target.with_(dtype=g.dtype)).steps, g)
                g = None
            params.append(p)
            specs.append(spec)
            kept.append(g if how == "kept" and p.requires_grad else None)  # it may be frozen since the forward
        backward.collect(params, specs, kept)
        return (None, None, None, *back)


def _hooked(p: Tensor) -> bool:
    with disabled():
        return any(isinstance(h, GradientHook) for h in (p._backward_hooks or {}).values())


def _wanted(node: Any) -> str:
    """What the running backward does with the gradient of a leaf: keep it, return it, or nothing."""
    try:
        return "kept" if torch._C._will_engine_execute_node(node) else "dropped"
    except RuntimeError:  # torch.autograd.grad, and this leaf is among its inputs
        return "returned"


# ---------------------------------------------------------------------------------------------- units


@dataclass
class _Enter:
    unit: Unit

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.unit.enter(sys._getframe(1))


@dataclass
class _Leave:
    unit: Unit

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.unit.leave()


@dataclass
class _Begin:
    zero: Zero

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.zero.begin_forward()


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def install(model: nn.Module, mesh: Mesh, sync: GradSync, stored: Mapping[int, int], *, regather: bool = True) -> Zero:
    """Have the stored parameters of a model gathered for its forwards.

    Args:
        stored: id of a parameter to the axis that it is stored over.
        regather: gather again for the backward, instead of keeping what was gathered.
    """
    zero = Zero(mesh, sync, regather)
    for module, members in units_of(model):
        params: list[Any] = [p for m in members for p in m._parameters.values() if id(p) in stored]
        if params:
            spans = len(members) == sum(1 for _ in module.modules())
            unit = Unit(zero, params, stored, spans)
            zero.units.append(unit)
            module.register_forward_pre_hook(_Enter(unit), prepend=True)  # other hooks may use parameters
            module.register_forward_hook(_Leave(unit), always_call=True)
    model.register_forward_pre_hook(_Begin(zero), prepend=True)
    return zero


def units_of(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Each unit: the module whose forward it spans, and the modules whose parameters belong to it.

    Entries of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` are units with all that is in them, unless
    they are such containers themselves.  Other modules are units of their own parameters.
    """
    taken: set[int] = set()

    def visit(module: nn.Module, entry: bool) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
        if id(module) in taken:
            return
        container = isinstance(module, _CONTAINERS)
        if entry and not container:
            inside = [m for m in module.modules() if id(m) not in taken]
            taken.update(id(m) for m in inside)
            yield module, inside
            return
        taken.add(id(module))
        yield module, [module]
        for child in module.children():
            yield from visit(child, container)

    yield from visit(model, False)


__all__ = ["Unit", "Zero", "install", "stored_axis", "units_of"]
