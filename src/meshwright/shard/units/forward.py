"""A forward of a unit: gathered tensors stand in for its parameters, and bring their gradients back."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch

from ... import compat
from ...dispatch import CONVERT_WITH_GRAD_DTYPE, ONCE, CachedCast, disabled, link
from ...local_tensor import bare, same_storage
from ...ranks import runtime
from ...resharding import executor
from ...resharding.conversions import ConversionStep
from ...resharding.planner import ConversionPlan, in_dtype
from ...resharding.planner import plan as plan_conversion
from ...tensor import OPEN, DistTensor, GradientHook, wrap
from ..parameters.stored import home, on_host, reduce_dtype, seen_spec, stored
from ..parameters.versions import aliased, state_of
from .saved_tensors import Saver, may_save_references
from .unit import ParamGroup
from .wholes import UnshardedParam, under_way

Tensor = torch.Tensor


def enter(unit: ParamGroup, frame: FrameType | None) -> None:
    """A forward begins: gathered tensors stand in for the parameters.

    ``frame``: of the call of the module, which ends where the forward does; None where :func:`leave` is sure to be
    called, whatever is raised.
    """
    running = _running_frames() if OPEN.scopes else ()
    while OPEN.scopes and (top := OPEN.scopes[-1].frame) is not None and id(top) not in running:
        OPEN.scopes.pop().close()  # of a forward that was interrupted
    found = next((s for s in OPEN.scopes if s.unit is unit), None)
    if found is None:
        unit.check_places()
        unit.zero.follow(unit)
    OPEN.scopes.append(found or Seen(unit, frame))


def leave(unit: ParamGroup) -> None:
    """The forward ends."""
    while OPEN.scopes:
        scope = OPEN.scopes.pop()
        if scope not in OPEN.scopes:
            scope.close()
        if scope.unit is unit:
            return


def _running_frames() -> set[int]:
    """The calls of this thread that have not ended, by the identity of their frames.

    By nothing else it can be told that a forward was interrupted.  A module calls its hooks after an Exception
    (``always_call``), and not after Ctrl-C or another BaseException, so :func:`leave` is not called then.  Nothing of
    ours is on the stack while the module's own code runs, so no context ends either, unless its ``forward`` or its
    class were replaced, which users see.  Autograd's graph task tells of backwards; most forwards are part of none.
    """
    found: set[int] = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found.add(id(frame))
        frame = frame.f_back
    return found


class Seen:
    """One forward of a unit in one thread: what stands in for its parameters, gathered at their first use.

    Args:
        frame: of the call of the module: while that runs, so does the forward; None: until it is closed.
        saves: let autograd save references to the parameters of the unit.
    """

    def __init__(self, unit: ParamGroup, frame: FrameType | None, saves: bool = True) -> None:
        self.unit, self.frame = unit, frame
        self.wholes: list[UnshardedParam] = []
        self.aliased: list[bool] = []  # whether something else may have the memory of a parameter
        self.made: dict[bool, list[Tensor]] = {}  # by whether gradients are recorded
        self.node: Any = None  # of autograd, that gave the stand-ins which have a history
        self.saver: Saver | None = None
        self.casts: dict[int, CachedCast] = {}  # by autocast, of those that have a history
        self.lent: dict[ParamGroup, Seen] = {}  # of other units, whose parameters are used outside of their forward
        if saves and unit.params and torch.is_grad_enabled() and may_save_references():
            self.saver = Saver(unit, self.keep, again=unit.spans and unit.zero.reshard_after_forward)
            self.saver.push()

    def find(self, p: Tensor) -> Tensor | None:
        """What stands in for a parameter, if it is one of the unit's."""
        i = self.unit.index.get(id(p))
        if i is None or self.unit.params[i] is not p:
            other = self.unit.zero.casting(p) if self.unit.whole else None
            if other is not None and other not in self.lent:
                self.lent[other] = Seen(other, self.frame, saves=False)
            return None if other is None else self.lent[other].find(p)
        if self.wholes:
            self.wholes[i].keep()
        held = aliased(p, self.unit.zero.mesh)  # first: it may count as a write
        if not self.wholes or held or self.wholes[i].state != state_of(p):
            self._gather()
        recorded = torch.is_grad_enabled()
        made = self.made.get(recorded)
        if made is None or made[i].requires_grad != (recorded and p.requires_grad):
            made = self.made[recorded] = self._stand_ins(recorded)
        return made[i]

    def dtype(self, p: Tensor) -> torch.dtype | None:
        """In which ops see a parameter, if it is one of the unit's, or seen so wherever the unit's forward uses it."""
        known = id(p) in self.unit.index or (self.unit.whole and self.unit.zero.casting(p) is not None)
        found = stored(p).dtypes
        return found.compute if known and found is not None else None

    def device(self, p: Tensor) -> torch.device | None:
        """Where ops see a parameter that is stored elsewhere, if it is one of the unit's or its forward uses it."""
        known = id(p) in self.unit.index or (self.unit.whole and self.unit.zero.casting(p) is not None)
        return torch.empty(0, device=self.unit.zero.mesh.device).device if known and on_host(p) else None

    def held(self, p: Tensor) -> Tensor | None:
        """What stands in for a parameter, if something does already."""
        return self.find(p) if self.wholes or self.lent else None

    def keep(self) -> None:
        """Bring to the parameters what was written to what stands in for them."""
        for other in self.lent.values():
            other.keep()
        for whole in self.wholes:
            whole.keep()

    def recorded(self, whole: UnshardedParam) -> bool:
        """Whether gradients are recorded of what was written to the stand-in of a parameter."""
        made = self.made.get(True)
        stand_in = None if made is None else made[self.unit.index[id(whole.p)]]
        return stand_in is not None and stand_in.requires_grad and stand_in.grad_fn is not self.node

    def _gather(self) -> None:
        for scope in OPEN.scopes:
            scope.keep()
        unit = self.unit
        unit.check_autocast()
        self.aliased = [aliased(p, unit.zero.mesh) for p in unit.params]
        states, self.made = unit.versions(), {}
        made = unit.gather(again=bool(self.wholes))
        there = {id(w.p): w for w in self.wholes} or under_way()
        self.wholes = []
        for p, t, state, held in zip(unit.params, made, states, self.aliased, strict=True):
            whole = there.get(id(p))
            if whole is not None:
                whole.refresh_from_shard(t, state, uncounted=held)
            self.wholes.append(UnshardedParam(p, t, state) if whole is None else whole)
            self.wholes[-1].shown.add(self)
        if self.saver is not None:
            self.saver.note(self.wholes)

    def _stand_ins(self, recorded: bool) -> list[Tensor]:
        unit = self.unit
        made = [w.seen.detach() for w in self.wholes]
        learning = [i for i, p in enumerate(unit.params) if recorded and p.requires_grad]
        if learning:
            params = [unit.params[i] for i in learning]
            with disabled():
                out = _Gather.apply(unit, params, [made[i] for i in learning], (), *params)
            self.node = out[0].grad_fn
            for i, t in zip(learning, out, strict=True):
                made[i] = t
        for i, (p, t) in enumerate(zip(unit.params, made, strict=True)):
            spec = seen_spec(p, i in learning)
            wrap(t, spec)
            if i in learning and stored(p).dtypes:
                t.__dict__[CONVERT_WITH_GRAD_DTYPE] = _Bring(unit, p)
            if p.requires_grad and t.dtype is torch.float32:
                t.__dict__[ONCE] = self._cast(i)
            if spec.undecided_mask and i in learning:
                link([p, t])
        return made

    def _cast(self, i: int) -> CachedCast:
        """The cast of a parameter, which is kept as that of a leaf is where it is gathered again."""
        if i not in self.casts:
            # What an alias may write to meanwhile is cast as it was, and not again from what it is in the backward.
            noted = None if self.saver is None or self.aliased[i] else partial(self.saver.note_cast, i)
            self.casts[i] = CachedCast(self.unit.zero.mesh.device, noted)
        return self.casts[i]

    def again(self, fn: Callable[[], Any]) -> Any:
        """Call ``fn``, which runs a part of the forward again."""
        enter(self.unit, None)
        try:
            return fn()
        finally:
            leave(self.unit)

    def close(self) -> None:
        """The forward is over."""
        if self.saver is not None:
            self.saver.pop()
        for cast in (*self.casts.values(), *(c for other in self.lent.values() for c in other.casts.values())):
            cast.forget()
        self.keep()


@dataclass(frozen=True)
class _Bring:
    """Conversions of what stands in for a parameter: their backward is in the dtype that gradients are reduced in."""

    unit: ParamGroup
    p: DistTensor

    def __call__(self, t: Tensor, steps: ConversionPlan, value: Tensor | None) -> Tensor:
        with torch.no_grad():
            value = executor.apply(steps.steps, t) if value is None else value
        dtype = reduce_dtype(self.p)
        wide = in_dtype(steps, dtype).steps
        made: tuple[Tensor] = _Gather.apply(self.unit, [self.p], [bare(value)], wide, self.p)
        return made[0]


class _Gather(torch.autograd.Function):
    """Identity on the gathered parameters, converted by ``steps`` since; its backward hands their gradients over."""

    @staticmethod
    def forward(
        ctx: Any,
        unit: ParamGroup,
        params: list[DistTensor],
        wholes: list[Tensor],
        steps: tuple[ConversionStep, ...],
        *stored: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.unit, ctx.params, ctx.steps, ctx.cause = unit, params, steps, runtime.RT.cause
        ctx.set_materialize_grads(False)
        for p in filter(on_host, params):
            unit.zero.uses.setdefault(id(p), weakref.WeakSet()).add(ctx)
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        unit: ParamGroup = ctx.unit
        backward = unit.zero.sync.backward()
        unit.free()
        nodes = [node for node, _ in ctx.next_functions if node is not None]
        back: list[Tensor | None] = [None] * len(grads)
        params, specs, kept = [], [], []
        for i, (p, g, node) in enumerate(zip(ctx.params, grads, nodes, strict=True)):
            if g is not None:
                with disabled():
                    g = executor.back(ctx.steps, g.to(reduce_dtype(p)), ctx.cause)
            spec = seen_spec(p).grad().summed_as(reduce_dtype(p))  # the forward may have been what decided the types
            # Of one that is stored on the host contributions are held on the device until they are reduced.
            how, whole = _wanted(node), not stored(p).axes and not (on_host(p) and spec.layout.partial)
            # Hooks of the user are autograd's business: they get the gradient as its parameter lies, in ``reduce``.
            native = torch.is_grad_enabled() or p.__dict__["_after"] or _hooked(p)
            if g is not None and (how == "returned" or (how == "kept" and (native or whole))):
                target = p._spec.decided().grad()
                with disabled():
                    made = executor.apply(plan_conversion(spec, target.with_(dtype=g.dtype)).steps, g)
                    # Others may hold that memory, which autograd cannot see: two that are added get one gradient.
                    made = home(p, made)
                    back[i] = made.clone() if _shares(made, grads[i]) else made
                g = None
            if whole:
                continue
            params.append(p)
            specs.append(spec)
            kept.append(g if how == "kept" and p.requires_grad else None)  # it may be frozen since the forward
        backward.collect(params, specs, kept)
        backward.ran.add(ctx)
        for p in filter(on_host, params):  # their leaves are served in another thread: what is sent is started in this
            if not any(_to_come(node, backward.ran) for node in unit.zero.uses[id(p)]):
                backward.complete(p)
        return (None, None, None, None, *back)


def _shares(a: Tensor, b: Tensor | None) -> bool:
    """Whether two local tensors are in one storage."""
    return b is not None and same_storage(a, b)


def _to_come(node: Any, ran: set[Any]) -> bool:
    """Whether the running backward will come to a node."""
    return node not in ran and bool(compat.will_engine_execute_node(node))


def _hooked(p: Tensor) -> bool:
    with disabled():
        return any(isinstance(h, GradientHook) for h in (p._backward_hooks or {}).values())


def _wanted(node: Any) -> str:
    """What the running backward does with the gradient of a leaf: keep it, return it, or nothing."""
    try:
        return "kept" if compat.will_engine_execute_node(node) else "dropped"
    except RuntimeError:  # torch.autograd.grad, and this leaf is among its inputs
        return "returned"


__all__ = ["Seen", "enter", "leave"]
