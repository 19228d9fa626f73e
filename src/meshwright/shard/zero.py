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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn as nn

from .. import collective, convert, runtime
from ..dispatch import disabled, tie
from ..layout import Spec
from ..mesh import Mesh
from ..reshard import plan as plan_conversion
from ..tensor import DistTensor, held, hold, stamp
from .flights import Scattering, partial_axes
from .packing import Packing, whole_over
from .raw import bare
from .saved import Saver, may_save_references
from .sync import GradSync

Tensor = torch.Tensor
_engine: Any = torch.autograd.Variable._execution_engine


class Zero:
    """All units of a model and the order in which its forward uses them.

    Args:
        sync: says whether gradients are to be synchronised.
        regather: gather again for the backward.
    """

    def __init__(self, mesh: Mesh, sync: GradSync, regather: bool) -> None:
        self.mesh, self.sync, self.regather = mesh, sync, regather
        self.units: list[Unit] = []
        self.order: list[Unit] = []
        self.recorded = False
        self._start()

    def _start(self) -> None:
        self.cursor = 0
        self.active = False  # inside a backward
        self.flights: list[Scattering] = []
        self.outstanding: dict[int, int] = {}  # id of a parameter to the forwards whose backward is to come
        self.packings: dict[Any, Packing] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {k: self.__dict__[k] for k in ("mesh", "sync", "regather", "units", "order", "recorded")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    # -- the order of the forward ---------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The whole model's forward begins."""
        if torch._C._current_graph_task_id() != -1:
            return
        if self.active:
            self._abandon()
        self.recorded = self.recorded or bool(self.order)
        self.cursor = 0
        for unit in self.units:
            unit.forget()

    def follow(self, unit: Unit) -> None:
        """A unit's forward begins: start the gather of the one that followed it before."""
        if not self.recorded:
            self.order.append(unit)
            return
        if torch._C._current_graph_task_id() != -1 or self.cursor >= len(self.order):
            return
        if self.order[self.cursor] is not unit:  # another way through the model than in the first forward
            self.cursor = len(self.order)
            return
        self.cursor += 1
        if self.cursor < len(self.order):
            self.order[self.cursor].start()

    def before(self, unit: Unit) -> Unit | None:
        """The unit whose backward comes after that of ``unit``."""
        place = self.order.index(unit) if unit in self.order else 0
        return self.order[place - 1] if place else None

    # -- gradients ------------------------------------------------------------------------------------

    def touch(self) -> None:
        """Something happens inside a backward: be called at its end."""
        if not self.active and torch._C._current_graph_task_id() != -1:
            self.active = True
            _engine.queue_callback(self._finish)

    def collect(self, params: Sequence[DistTensor], specs: Sequence[Spec], grads: Sequence[Tensor | None]) -> None:
        """Contributions of one unit: add them up; reduce what no further contribution is expected for."""
        self.touch()
        for p, spec, g in zip(params, specs, grads, strict=True):
            self.outstanding[id(p)] = self.outstanding.get(id(p), 0) - 1
            if g is None:
                continue
            before = held(p)
            with torch.no_grad(), disabled():
                hold(p, stamp(g.detach() if before is None else Tensor.add(before, g), spec))
        if self.sync.enabled:
            self._launch([p for p in params if self.outstanding[id(p)] <= 0])

    def _launch(self, params: Sequence[DistTensor]) -> None:
        """Start the reduce-scatter of what is held for these parameters."""
        groups: dict[Any, list[DistTensor]] = {}
        for p in params:
            g = held(p)
            if g is not None and g._spec.layout.partial:
                groups.setdefault((stored_axis(p), partial_axes(g._spec), g.dtype), []).append(p)
        for (axis, axes, _), members in groups.items():
            grads = [bare(g) for g in map(held, members) if g is not None]
            with torch.no_grad(), disabled():
                packing = self.packing(axis, members, [g.shape for g in grads])
                specs = [p._spec.with_(reduced=0, undecided=0) for p in members]
                others = tuple(a for a in axes if a != axis)
                self.flights.append(Scattering(members, grads, specs, packing, axis, others, False))
            for p in members:
                hold(p, None)

    def packing(self, axis: int, params: Sequence[DistTensor], shapes: Sequence[Sequence[int]]) -> Packing:
        """How these parameters travel together."""
        key = (axis, *((id(p), p._spec.layout) for p in params))
        found = self.packings.get(key)
        if found is None:
            found = Packing(shapes, [stored_dim(p, axis) for p in params], self.mesh.sizes[axis])
            self.packings[key] = found
        return found

    def _finish(self) -> None:
        """End of the backward."""
        self.active = False
        self.outstanding.clear()
        if self.sync.enabled:
            seen: dict[int, DistTensor] = {id(p): p for u in self.units for p in u.params}
            self._launch(list(seen.values()))
        flights, self.flights = self.flights, []
        with torch.no_grad(), disabled():
            for flight in flights:
                flight.land()
        for unit in self.units:
            unit.back = None
            unit.forget()

    def _abandon(self) -> None:
        """Forget a backward that did not end (it raised)."""
        for flight in self.flights:
            flight.pending.wait()
        self._start()
        for unit in self.units:
            unit.back = None
            for p in unit.params:
                hold(p, None)


_AXIS = "_stored_over"


def stored_axis(p: Tensor) -> int:
    """Index of the axis that a parameter is stored over."""
    return int(p.__dict__[_AXIS])


def stored_dim(p: DistTensor, axis: int) -> int:
    """The dim that the axis cuts."""
    return int(p._spec.layout.placements[axis].dim)  # type: ignore[union-attr]


def seen_spec(p: DistTensor, learning: bool = True) -> Spec:
    """Spec of a stored parameter as the ops see it; its gradient is Partial on the axis that it is stored
    over."""
    axis, spec = stored_axis(p), p._spec
    layout = whole_over(spec, axis)
    if not learning:
        return Spec(spec.shape, spec.dtype, layout, undecided=(1 << spec.mesh.ndim) - 1)
    return Spec(spec.shape, spec.dtype, layout, spec.reduced | 1 << axis, spec.undecided)


class Unit:
    """Modules whose parameters are gathered together.

    Args:
        zero: the model's.
        places: (module, attribute, parameter) for every place where the modules hold a stored parameter.
        stored: id of a parameter to the axis that it is stored over.
        spans: all modules that run inside the unit's forward belong to it.  Only then may references be
            saved: what else runs inside (a checkpoint, say) must not meet our hooks.
        what: class of the module, for messages.
    """

    def __init__(
        self,
        zero: Zero,
        places: Sequence[tuple[nn.Module, str, DistTensor]],
        stored: Mapping[int, int],
        spans: bool,
        what: str,
    ) -> None:
        self.zero = zero
        unique = {id(p): p for _, _, p in places}
        self.params = list(unique.values())
        self.axes = [stored[id(p)] for p in self.params]
        self.spans, self.what = spans, what
        at = {key: i for i, key in enumerate(unique)}
        self.places = [(module, key, at[id(p)]) for module, key, p in places]
        self._start()

    def _start(self) -> None:
        self.depth = 0
        self.pending: tuple[Any, list[Any]] | None = None  # a gather under way, and what it was started for
        self.back: list[Tensor] | None = None  # gathered for the backward
        self.saver: Saver | None = None
        for p, axis in zip(self.params, self.axes, strict=True):
            p.__dict__[_AXIS] = axis

    def __getstate__(self) -> dict[str, Any]:
        return {k: self.__dict__[k] for k in ("zero", "params", "axes", "places", "spans", "what")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    # -- gathering ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to gather, unless that is under way."""
        if self.pending is None:
            with torch.no_grad(), disabled():
                self.pending = self._version(), [self._send(axis, members) for axis, members in self._parts()]

    def _version(self) -> Any:
        return [(p._version, p._spec) for p in self.params]

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
        with torch.no_grad(), disabled():
            if self.pending is not None and self.pending[0] != self._version():
                self.forget()  # the parameters have changed since
            self.start()
            assert self.pending is not None
            made: dict[int, Tensor] = {}
            for members, packing, pending in self.pending[1]:
                flat = pending.wait()
                if len(members) == 1 and packing.dims[0] == 0 and math.prod(packing.shapes[0]) == flat.numel():
                    wholes = [flat.view(packing.shapes[0])]
                else:
                    wholes = [flat.new_empty(shape) for shape in packing.shapes]
                    packing.unpack(flat, wholes)
                made |= {id(p): t for p, t in zip(members, wholes, strict=True)}
            self.pending = None
            return [made[id(p)] for p in self.params]

    def forget(self) -> None:
        """Drop a gather that nobody asked for after all."""
        if self.pending is not None:
            for _, _, pending in self.pending[1]:
                pending.wait()
            self.pending = None

    def regathered(self) -> list[Tensor]:
        """The whole parameters, for the backward."""
        if self.back is None:
            self.zero.touch()
            self.back = self.gather()
            before = self.zero.before(self)
            if before is not None and before.back is None and torch._C._current_graph_task_id() != -1:
                before.start()
        return self.back

    # -- the forward ----------------------------------------------------------------------------------

    def enter(self) -> None:
        """Gathered tensors take the place of the parameters."""
        self.depth += 1
        if self.depth > 1:
            return
        again = self.back is not None and torch._C._current_graph_task_id() != -1
        wholes = [t.detach() for t in self.back or ()] if again else self.gather()
        if not again:
            self.zero.follow(self)
        for (module, key, i), t in zip(self.places, self._seen(wholes), strict=True):
            module._parameters[key] = t  # type: ignore[assignment]
            assert i >= 0
        if self.spans and self.zero.regather and torch.is_grad_enabled() and may_save_references():
            self.saver = Saver(self, wholes)
            self.saver.push()

    def _seen(self, wholes: list[Tensor]) -> Iterator[Tensor]:
        """What each place gets."""
        learning = [i for i, p in enumerate(self.params) if p.requires_grad and torch.is_grad_enabled()]
        specs = [seen_spec(p, i in learning) for i, p in enumerate(self.params)]
        made: list[Tensor] = list(wholes)
        if learning:
            params = [self.params[i] for i in learning]
            with disabled():
                out = _Gather.apply(self, params, [wholes[i] for i in learning], *params)
            for i, t in zip(learning, out, strict=True):
                made[i] = t
                out_of = self.zero.outstanding
                out_of[id(self.params[i])] = out_of.get(id(self.params[i]), 0) + 1
        for i, t in enumerate(made):
            stamp(t, specs[i])
            if specs[i].undecided and i in learning:
                tie([self.params[i], t])
        return (made[i] for _, _, i in self.places)

    def leave(self) -> None:
        """The parameters come back."""
        self.depth -= 1
        if self.depth:
            return
        if self.saver is not None:
            self.saver.pop()
            self.saver = None
        for module, key, i in self.places:
            module._parameters[key] = self.params[i]  # type: ignore[assignment]


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
        unit.back = None
        nodes = [node for node, _ in ctx.next_functions if node is not None]
        back: list[Tensor | None] = [None] * len(grads)
        params, specs, kept = [], [], []
        for i, (p, g, node) in enumerate(zip(ctx.params, grads, nodes, strict=True)):
            spec = seen_spec(p).grad()  # only now: the forward may have been what decided the types
            how = _wanted(node)
            if g is not None and (how == "returned" or (how == "kept" and torch.is_grad_enabled())):
                source, target = spec.with_(dtype=g.dtype), p._spec.with_(undecided=0).grad()
                with disabled():
                    back[i] = convert.apply(plan_conversion(source, target.with_(dtype=g.dtype)).steps, g)
                g = None
            params.append(p)
            specs.append(spec)
            kept.append(g if how == "kept" else None)
        unit.zero.collect(params, specs, kept)
        return (None, None, None, *back)


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
        self.unit.enter()


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
    model.register_forward_pre_hook(_Begin(zero), prepend=True)
    for module, members in _units(model):
        places: list[tuple[nn.Module, str, DistTensor]] = []
        for m in members:
            for key, p in cast("dict[str, Any]", m._parameters).items():
                if isinstance(p, DistTensor) and id(p) in stored:
                    places.append((m, key, p))
        if places:
            spans = len(members) == sum(1 for _ in module.modules())
            unit = Unit(zero, places, stored, spans, type(module).__name__)
            zero.units.append(unit)
            module.register_forward_pre_hook(_Enter(unit))
            module.register_forward_hook(_Leave(unit), always_call=True)
    return zero


def _units(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
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


__all__ = ["Unit", "Zero", "install", "stored_axis"]
