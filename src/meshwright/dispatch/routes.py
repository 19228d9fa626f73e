"""The way of a call: its key, the plan that is kept for it, and the route that this takes.

The commonest calls do not come here: ``tensor.calls`` knows those that are one native op with one output (``RT.fast``)
by their key alone.  All plans are in ``RT.plans``.  A plan never changes: what a first run shows of it makes another,
which takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.overrides import redispatch_function

from .. import runtime
from ..rules import Native
from . import autocast
from .binding import Args, Kwargs
from .calls import NO, OPS, QUESTIONS, call_disabled, disabled, op_name, resolve, tensors_in
from .execution import Execution, Wrap, convert_then_native
from .leaves import any_linked
from .plans import CallPlan, Route, plan_call, warn_gathered
from .views import Call, before, write_through

Tensor = torch.Tensor
Special = Callable[[Any, Args, Kwargs], Any]
_MAX_PLANS = 16384
NATIVE, NATIVE_WITHOUT_GRAD, RETYPE_THEN_NATIVE, CONVERT_THEN_NATIVE, EXECUTE, FUNCTION, REDISPATCH, STAND_IN = Route
# Composites over long lists of tensors (torch._foreach_*): no plan, so no key of all their specs either.
LISTED: dict[Any, Callable[..., Any]] = {}


@dataclass(frozen=True, slots=True)
class Frontend:
    """Whose tensors a call is on: eager ones, or the fakes of a step that is captured.

    ``wrap`` gives a local tensor its spec.  ``call`` calls a function on such tensors, where dispatch is disabled too.
    ``special`` has, for names of functions that are no ops, what to call in their place with them and their arguments:
    NotImplemented where they are ops after all.
    ``stand_ins`` gives the arguments with what stands in for them, or None.
    """

    wrap: Wrap
    call: Call
    special: Mapping[str, Special]
    stand_ins: Callable[[Any, Args, Kwargs], tuple[Any, Any] | None]


INTO_PLAIN = "into_plain"  # among what is special: an op that writes to a plain tensor
# Of the object, or properties of it: no ops.
_ASKED = {*QUESTIONS, "__get__", "__set__", "__delete__"}

# ---------------------------------------------------------------------------------------------- keys

_T, _F, _ZERO = object(), object(), object()


def _key_bool(a: bool, func: Any) -> Any:
    return _T if a else _F


def _key_int(a: int, func: Any) -> Any:
    op = OPS.get(func)
    return int if op is not None and op.pointwise and a else a  # zero is a part of a sum, other numbers are not


def _key_float(a: float, func: Any) -> Any:
    return float if a else _ZERO


def _key_type(a: Any, func: Any) -> Any:
    return type(a)


def _key_self(a: Any, func: Any) -> Any:
    return a


def _key_sequence(a: Sequence[Any], func: Any) -> Any:
    # Numbers in a list are sizes or factors of sizes, floats too (interpolate's scale_factors).
    return (type(a), *[x if x.__class__ is float else key_part(x, func) for x in a])


def _key_slice(a: slice, func: Any) -> Any:
    return (slice, key_part(a.start, func), key_part(a.stop, func), key_part(a.step, func))


def _key_plain(a: Tensor, func: Any) -> Any:
    return (Tensor, a.shape, a.dtype, a.requires_grad)


_KEYS: dict[type, Callable[[Any, Any], Any]] = {
    bool: _key_bool, int: _key_int, float: _key_float, complex: _key_type, tuple: _key_sequence, list: _key_sequence,
    torch.Size: _key_sequence, slice: _key_slice, Tensor: _key_plain, torch.nn.Parameter: _key_plain,
    torch.Generator: _key_type,
}  # fmt: skip
for _plain_type in (str, type(None), torch.dtype, torch.device, type(...), torch.memory_format, torch.layout, type):
    _KEYS[_plain_type] = _key_self


def key_part(a: Any, func: Any) -> Any:
    """What of an argument decides the plan: specs, shapes, flags; never values that cannot change a layout."""
    make = _KEYS.get(a.__class__)
    if make is not None:
        return make(a, func)
    if isinstance(a, Tensor):
        spec = a.__dict__.get("_spec")
        return spec if spec is not None else _key_plain(a, func)
    if isinstance(a, dict):
        return (dict, *[(k, key_part(v, func)) for k, v in a.items()])
    try:
        hash(a)
    except TypeError:
        return type(a)
    return a


def key_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What decides the plan of a call, autocast aside."""
    first = (func, *[key_part(a, func) for a in args])
    return (first, *[(k, key_part(v, func)) for k, v in kwargs.items()]) if kwargs else first


# ---------------------------------------------------------------------------------------------- the cache


def forget_ops() -> None:
    """Drop what was resolved and planned (a rule was added)."""
    OPS.clear()
    runtime.RT.plans.clear()
    runtime.RT.fast.clear()


def _kept(key: Any, func: Any, args: Args, kwargs: Kwargs, fresh: CallPlan | None = None) -> tuple[Any, CallPlan]:
    """The plan for a key, made where there is none, and its own key: of some, what needs gradients is part of that."""
    plans = runtime.RT.plans
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = fresh = fresh or plan_call(func, args, kwargs)
    if plan.graded:
        key = (key, *[t.requires_grad for t in tensors_in((args, kwargs))])
        plan = plans.get(key)
        if plan is None:
            plan = plans[key] = fresh or plan_call(func, args, kwargs)
    return key, plan


def _first_plan(func: Any, args: Args, kwargs: Kwargs) -> tuple[Any, CallPlan]:
    op = resolve(func)  # before the key, which depends on whether the op is pointwise
    key = key_of(func, args, kwargs)
    if any("_spec" in t.__dict__ and t.__dict__["_spec"].stored for t in tensors_in((args, kwargs))):
        plan = CallPlan(op, STAND_IN)
    else:
        plan = plan_call(func, args, kwargs)
    if plan.fn is not None and plan.fn is op.composite and args and args[0].__class__ is list:
        LISTED[func] = plan.fn
    if autocast.active() and not plan.plain:
        key = (autocast.state(), key)
    if len(runtime.RT.plans) >= _MAX_PLANS:
        runtime.RT.plans.clear()
        runtime.RT.fast.clear()
    return _kept(key, func, args, kwargs, plan)


# ---------------------------------------------------------------------------------------------- the routes


def call(front: Frontend, key: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A call that is not known to be one native op, with the key of :func:`key_of`."""
    plans = runtime.RT.plans
    own, plan = key, plans.get(key)
    if autocast.active() and (plan is None or not plan.plain):  # a plain op is right with autocast or without
        own = (autocast.state(), key)
        plan = plans.get(own)
    if plan is None:
        name = op_name(func)
        if name in _ASKED:
            return call_disabled(func, (), args, kwargs)
        op = resolve(func)
        if op.inplace and not op.python and args and isinstance(args[0], Tensor) and "_spec" not in args[0].__dict__:
            name = INTO_PLAIN
        if name in front.special and (made := front.special[name](func, args, kwargs)) is not NotImplemented:
            return made
        own, plan = _first_plan(func, args, kwargs)
    elif plan.graded:
        own, plan = _kept(own, func, args, kwargs)
    route = plan.route
    if route is STAND_IN:
        found = front.stand_ins(func, args, kwargs)
        if found is not None:
            made = front.call(func, *found)
            return args[0] if args and made is found[0][0] else made  # an op in place returns what it was given
        own, plan = _kept((own, STAND_IN), func, args, kwargs)
        route = plan.route
    if runtime.RT.records is None:  # who listens is told of all
        if route is CONVERT_THEN_NATIVE or (route is RETYPE_THEN_NATIVE and torch.is_grad_enabled()):
            with disabled():
                made = convert_then_native(plan, func, args, kwargs)
            return front.wrap(made, plan.outputs[0]) if made.__class__ is Tensor else _wrapped(plan, made, front.wrap)
        if route is NATIVE or (route in _NATIVE_WITHOUT_GRAD and not torch.is_grad_enabled()):
            made = _native(plan, key if own is key else None, func, args, kwargs, front.wrap)
            if made is not NotImplemented:
                return made
    if route is FUNCTION:
        return front.call(plan.fn, args, kwargs)
    if route is REDISPATCH:
        return front.call(redispatch_function, (func, (), args, kwargs), NO)
    return _execute(front, own, plan, func, args, kwargs)


_NATIVE_WITHOUT_GRAD = (RETYPE_THEN_NATIVE, NATIVE_WITHOUT_GRAD)


def _native(plan: CallPlan, key: Any, func: Any, args: Args, kwargs: Kwargs, wrap: Wrap) -> Any:
    """The op on locals, known by its key from now on; NotImplemented where more has to be done."""
    if plan.untyped == 2 and any_linked(args):
        return NotImplemented
    native = cast("Native | None", plan.fn)
    try:
        if native is None:
            out = call_disabled(func, (), args, kwargs)
        else:
            out = call_disabled(native.fn, (), (args[0], *native.static), NO)
    except (RuntimeError, IndexError, TypeError):  # such as a view that this shard's strides do not allow
        return NotImplemented
    if key is not None and plan.route is NATIVE and isinstance(out, Tensor):
        runtime.RT.fast[key] = (plan.outputs[0], plan.untyped, native)
    if plan.untyped and any(t.__class__ is Tensor and t.requires_grad for t in tensors_in(out)):
        return resolve_after(plan, func, args, kwargs, out, wrap)
    return _wrapped(plan, out, wrap)


def _wrapped(plan: CallPlan, out: Any, wrap: Wrap) -> Any:
    if out.__class__ is Tensor:
        return wrap(out, plan.outputs[0])
    if not isinstance(out, Tensor):  # else an op that returned its input
        for t, spec in zip(out, plan.outputs, strict=True):
            wrap(t, spec)
    return out


def _execute(front: Frontend, key: Any, plan: CallPlan, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """All that a plan says, which a first run may replace."""
    warn_gathered(plan)
    if plan.watched:
        before(plan, tensors_in((args, kwargs)), front.call)
    with disabled():
        run = Execution(plan, func, args, kwargs, front.wrap)
        out = run.run()
    if run.plan is not plan:
        runtime.RT.plans[key] = run.plan
    if plan.watched and plan.op.inplace:
        write_through(out, front.call)
    return out


def resolve_after(plan: CallPlan, func: Any, args: Args, kwargs: Kwargs, out: Any, wrap: Wrap) -> Any:
    """What a native op gave, wrapped, with the types that the call implies for its leaves."""
    with disabled():
        return Execution(plan, func, args, kwargs, wrap).resolve_after(out)
