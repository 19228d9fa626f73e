"""The way of a call: its key, the plan that is kept for it, and the route that this takes.

All plans are in ``RT.plans``.  A plan never changes: what a first run shows of it makes another, which takes its place.
One of the native op, with conversions before it or without, becomes a function of the call (:func:`known_call`) that is
kept in ``RT.fast``: such calls do not come here again, ``tensor.torch_function`` finds it by their key alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..compat import redispatch_function
from ..layout import Spec, marks_of
from ..ranks import runtime
from ..rules import Native
from . import autocast
from .binding import Args, Kwargs
from .calls import METADATA_METHODS, NO_KWARGS, OPS, call_disabled, disabled, op_name, resolve, saving, tensors_in
from .execution import Execution, Wrap, convert_tensor, still
from .keys import key_of
from .leaves import any_linked
from .plans import CallPlan, Route, casts_of, plan_call, warn_gathered
from .views import Call, before, count_write, remember_pieces, write_through

Tensor = torch.Tensor
FunctionOverride = Callable[[Any, Args, Kwargs], Any]
NATIVE, NATIVE_WITHOUT_GRAD, RETYPE_THEN_NATIVE, CONVERT_THEN_NATIVE, *_LATER = Route
EXECUTE, FUNCTION, REDISPATCH, CAST, STAND_IN = _LATER
# Composites over long lists of tensors (torch._foreach_*): no plan, so no key of all their specs either.
FOREACH_OVERRIDES: dict[Any, Callable[..., Any]] = {}


@dataclass(frozen=True, slots=True)
class Frontend:
    """Whose tensors a call is on: eager ones, or the fakes of a step that is captured.

    ``wrap`` gives a local tensor its spec.  ``call`` calls a function on such tensors, where dispatch is disabled too.
    ``compute`` does so of a function that computes an op by other calls, whose values nobody sees on the way.
    ``special`` has, for names of functions that are no ops, what to call in their place with them and their arguments:
    NotImplemented where they are ops after all.
    ``claim`` is told of plain tensors among the arguments, which stand for what all ranks have.
    ``stand_ins`` gives the arguments with what stands in for them, or None.
    """

    wrap: Wrap
    call: Call
    compute: Call
    function_overrides: Mapping[str, FunctionOverride]
    stand_ins: Callable[[Any, Args, Kwargs], tuple[Any, Any] | None]
    claim: Callable[[Any, Args, Kwargs], None]


INTO_PLAIN = "into_plain"  # among what is special: an op that writes to a plain tensor
_OWN = __name__.partition(".")[0]
# Of the object, or properties of it: no ops.
ASKED = {*METADATA_METHODS, "__get__", "__set__", "__delete__"}

# ---------------------------------------------------------------------------------------------- the cache


def forget_ops() -> None:
    """Drop what was resolved and planned (a rule was added)."""
    OPS.clear()
    runtime.RT.plans.clear()
    runtime.RT.fast.clear()


def _cached_plan(
    key: Any, func: Any, args: Args, kwargs: Kwargs, fresh: CallPlan | None = None
) -> tuple[Any, CallPlan]:
    """The plan for a key, made where there is none, and its own key: of some, what needs gradients is part of that."""
    plans = runtime.RT.plans
    plan = plans.find(key)
    if plan is None:
        plan = fresh = fresh or plan_call(func, args, kwargs)
        plans.keep(key, plan)
    if plan.graded:
        key = (key, *[t.requires_grad for t in tensors_in((args, kwargs))])
        plan = plans.find(key)
        if plan is None:
            plan = fresh or plan_call(func, args, kwargs)
            plans.keep(key, plan)
    return key, plan


def _first_plan(func: Any, args: Args, kwargs: Kwargs) -> tuple[Any, CallPlan]:
    op = resolve(func)  # before the key, which depends on whether the op is pointwise
    key = key_of(func, args, kwargs)
    if any("_spec" in t.__dict__ and marks_of(t.__dict__["_spec"]).stored for t in tensors_in((args, kwargs))):
        plan = CallPlan(op, STAND_IN, casts=casts_of(func, args, kwargs))
    else:
        plan = plan_call(func, args, kwargs)
    if plan.fn is not None and plan.fn is op.composite and args and args[0].__class__ is list:
        FOREACH_OVERRIDES[func] = plan.fn
    if autocast.active() and not plan.plain:
        key = (autocast.state(), key)
    return _cached_plan(key, func, args, kwargs, plan)


# ---------------------------------------------------------------------------------------------- the routes


def call(front: Frontend, key: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A call that is not known to be one native op, with the key of :func:`key_of`."""
    plans = runtime.RT.plans
    own, plan = key, plans.get(key) or plans.find(key)
    if autocast.active() and (plan is None or not plan.plain):  # a plain op is right with autocast or without
        own = (autocast.state(), key)
        plan = plans.find(own)
    if plan is None:
        name = op_name(func)
        if name in ASKED:
            return call_disabled(func, (), args, kwargs)
        op = resolve(func)
        if op.inplace and not op.python and args and isinstance(args[0], Tensor) and "_spec" not in args[0].__dict__:
            name = INTO_PLAIN
        if (
            name in front.function_overrides
            and (made := front.function_overrides[name](func, args, kwargs)) is not NotImplemented
        ):
            return made
        own, plan = _first_plan(func, args, kwargs)
    elif plan.graded:
        own, plan = _cached_plan(own, func, args, kwargs)
    if plan.op.inplace and torch.is_inference_mode_enabled():
        count_write(args[0] if args and isinstance(args[0], Tensor) else None)
    route = plan.route
    if route is STAND_IN:
        found = front.stand_ins(func, args, kwargs)
        if found is not None:
            if plan.casts is not None:
                found = front.call(plan.casts.once, found, NO_KWARGS)
            made = front.call(func, *found)
            return args[0] if args and made is found[0][0] else made  # an op in place returns what it was given
        own, plan = _cached_plan((own, STAND_IN), func, args, kwargs)
        route = plan.route
    rt = runtime.RT
    if route in _OF_THE_OP and rt.records is None and not rt.explicit:  # who listens is told of all
        known = rt.fast.get(own)
        if known is None:
            known = rt.fast[own] = known_call(plan, func, front, tensors_in((args, kwargs)), own is key)
        spec, run = known
        made = call_disabled(func, (), args, kwargs) if run is None else run(args, kwargs)
        if made is not NotImplemented:
            return front.wrap(made, spec) if made.__class__ is Tensor else made
    if plan.mixed:
        front.claim(func, args, kwargs)
    if route is CAST and plan.casts is not None:
        return front.call(plan.casts.first, (func, front.wrap, args, kwargs), NO_KWARGS)
    if route is FUNCTION:
        by = plan.op.composite or plan.op.rule  # of others somebody may read as numbers what they make on the way
        ours = by is not None and str(by.__module__).startswith(_OWN)
        return (front.compute if ours else front.call)(plan.fn, args, kwargs)
    if route is REDISPATCH:
        return front.call(redispatch_function, (func, (), args, kwargs), NO_KWARGS)
    return _execute(front, own, plan, func, args, kwargs)


_OF_THE_OP = {NATIVE, NATIVE_WITHOUT_GRAD, RETYPE_THEN_NATIVE, CONVERT_THEN_NATIVE}
# The spec of an output that is one tensor, and what gives it, still as a local one; None: the op itself.  It gives
# NotImplemented where more has to be done, and what is wrapped already where that is not one new tensor.
Known = tuple[Spec, Callable[[Args, Kwargs], Any] | None]


def known_call(plan: CallPlan, func: Any, front: Frontend, tensors: Sequence[Tensor], shared: bool) -> Known:
    """What a plan of the native op becomes, where nobody listens.

    ``tensors``: of a call that it is for.  ``shared``: its key does not say whether there is autocast, for which there
    is another plan.
    """
    changes = (*plan.known, *plan.conversions)
    fn, route, untyped = cast("Native | None", plan.fn), plan.route, plan.untyped
    shared = shared and not plan.plain
    several = len(plan.outputs) > 1
    wraps = several or not plan.outputs[0].shape  # numbers are looked at when they are wrapped
    specs = [t.__dict__["_spec"] for t in tensors if "_spec" in t.__dict__]
    decides = bool(untyped) or (bool(plan.known) and any(s.undecided_mask for s in specs))

    def native(args: Args, kwargs: Kwargs) -> Any:
        if route is NATIVE_WITHOUT_GRAD and (torch.is_grad_enabled() or (shared and autocast.active())):
            return NotImplemented
        if untyped == 2 and any_linked(args):
            return NotImplemented
        if plan.mixed:
            front.claim(func, args, kwargs)
        if fn is None:
            out = call_disabled(func, (), args, kwargs)
        else:
            try:
                out = call_disabled(fn.fn, (), (args[0], *fn.static), NO_KWARGS)
            except (RuntimeError, IndexError, TypeError):  # such as a view that this shard's strides do not allow
                return NotImplemented
        if plan.pieces and out.__class__ is Tensor:
            with disabled():
                remember_pieces(func, args, kwargs, args[0], [out], image=True)
        if untyped and True in [t.requires_grad for t in (out if several else (out,)) if t.__class__ is Tensor]:
            with disabled():  # leaves get their types now
                return Execution(plan, func, args, kwargs, front.wrap, front.call).resolve_after(out)
        return _wrapped(plan, out, front.wrap) if wraps else out

    def on_locals(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for i, steps in changes:
            given[i] = convert_tensor(given[i], steps)
        return func(*given, **kwargs) if fn is None else fn(given[0])

    def converting(args: Args, kwargs: Kwargs) -> Any:
        if (shared and autocast.active()) or (plan.known and saving()) or (decides and torch.is_grad_enabled()):
            return NotImplemented
        if plan.mixed:
            front.claim(func, args, kwargs)
        out = call_disabled(on_locals, (), args, kwargs)
        return _wrapped(plan, out, front.wrap) if wraps else out

    if route in (RETYPE_THEN_NATIVE, CONVERT_THEN_NATIVE):
        return plan.outputs[0], converting
    simple = route is NATIVE and fn is None and not (untyped or wraps or plan.mixed or plan.pieces)
    return plan.outputs[0], None if simple else native


def _wrapped(plan: CallPlan, out: Any, wrap: Wrap) -> Any:
    if len(plan.outputs) == 1:
        return wrap(out, plan.outputs[0]) if out.__class__ is Tensor else out
    for t, spec in zip(out, plan.outputs, strict=True):
        wrap(t, still(t, spec))
    return out


def _execute(front: Frontend, key: Any, plan: CallPlan, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """All that a plan says, which a first run may replace."""
    warn_gathered(plan)
    if plan.watched:
        before(plan, tensors_in((args, kwargs)), front.call)
    with disabled():
        run = Execution(plan, func, args, kwargs, front.wrap, front.call)
        out = run.run()
    if run.plan is not plan:
        runtime.RT.plans.keep(key, run.plan)
    if plan.watched and plan.op.inplace:
        write_through(out, front.call)
    return out
