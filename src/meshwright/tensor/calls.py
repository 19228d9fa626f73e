"""A call on distributed tensors: the plan of an earlier one, or the way to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import redispatch_function
from torch.utils import _python_dispatch as torchs

from .. import runtime
from ..dispatch import (
    QUESTIONS,
    CallPlan,
    autocast,
    before,
    by_grad,
    call_disabled,
    disabled,
    execute,
    execute_swift,
    key_part,
    op_name,
    plan_call,
    resolve,
    settle_after,
    tensors_in,
    warn_gathered,
    write_through,
)
from ..errors import DispatchError
from . import modes
from .carrier import NO, DistTensor, call_enabled, stamp
from .memory import into_plain
from .special import SPECIAL
from .standin import with_stand_ins

Tensor = torch.Tensor
_MAX_PLANS = 16384
# Composites over long lists of tensors (torch._foreach_*): no plan, so no key of all their specs either.
LISTED: dict[Any, Callable[..., Any]] = {}


def dispatch(func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Look up the plan of this call; where it needs nothing, run the native op on locals and stamp the result."""
    key: Any
    if torchs._is_in_non_infra_torch_dispatch_mode:
        made = modes.under(dispatch, func, types, args, kwargs)
        if made is not NotImplemented:
            return made
    if len(args) == 2 and args[0].__class__ is DistTensor and args[1].__class__ is DistTensor:
        key = (func, args[0]._spec, args[1]._spec)
    else:
        if args and args[0].__class__ is list and func in LISTED:
            args, kwargs = with_stand_ins(func, args, kwargs or NO) or (args, kwargs)
            return LISTED[func](*args, **kwargs or NO)
        key = (func, *[a._spec if a.__class__ is DistTensor else key_part(a, func) for a in args])
    if kwargs:
        key = (key, *[(k, key_part(v, func)) for k, v in kwargs.items()])
    entry = runtime.RT.fast.get(key)
    if entry is None:
        return _general(key, func, types, args, kwargs or NO)
    spec, untyped, native = entry
    if untyped == 2 and _any_tied(args):
        return _general(key, func, types, args, kwargs or NO, typed=False)
    if native is None:
        out = call_disabled(func, types, args, kwargs or NO)
    else:
        try:
            out = call_disabled(native.fn, types, (args[0], *native.static), NO)
        except RuntimeError:  # a view that this shard's strides do not allow
            return _general(key, func, types, args, kwargs or NO)
    if out.__class__ is not Tensor:  # in place, or an op that returned its input
        return out
    if untyped and out.requires_grad:  # leaves get their types now
        return settle_after(runtime.RT.plans[key], func, args, kwargs, out, stamp)
    if out.dtype is not spec.dtype:  # autocast
        spec = spec.with_(dtype=out.dtype)
    out.__class__ = DistTensor
    out._spec = spec  # type: ignore[attr-defined]
    return out


def _general(key: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], typed: bool = True) -> Any:
    """A call that is not (yet) known to be one native op with one output."""
    plan = runtime.RT.plans.get(key)
    if autocast.active() and (plan is None or not plan.plain):  # a plain native op is right with autocast or without
        plan = runtime.RT.plans.get((autocast.state(), key))
    if plan is not None and plan.graded:
        plan = runtime.RT.plans.get(by_grad(_in_autocast(key, plan), args, kwargs))
    if plan is None:
        return _slow(key, func, types, args, kwargs)
    if plan.stored:
        return _stored(plan, func, types, args, kwargs)
    if (
        typed
        and plan.fast
        and runtime.RT.records is None  # somebody listens: what makes a value Partial is noted
        and (plan.plain or not torch.is_grad_enabled())
        and not (plan.untyped == 2 and _any_tied(args))
    ):
        native = plan.native
        try:
            if native is None:
                out = call_disabled(func, types, args, kwargs)
            else:
                out = call_disabled(native.fn, types, (args[0], *native.static), NO)
        except (RuntimeError, IndexError, TypeError):
            return _run(plan, func, types, args, kwargs)
        if out.__class__ is DistTensor:
            if plan.plain and not plan.graded:
                runtime.RT.fast[key] = (plan.spec, plan.untyped, native)
            return out
        if plan.plain and not plan.graded and out.__class__ is Tensor:
            runtime.RT.fast[key] = (plan.spec, plan.untyped, native)
        many = out if out.__class__ is not Tensor else (out,)
        if plan.untyped and any(t.requires_grad for t in many):
            return settle_after(plan, func, args, kwargs, out, stamp)
        for t, spec in zip(many, plan.outputs, strict=True):
            stamp(t, spec)
        return out
    if plan.swift and plan.checked and runtime.RT.records is None:
        with disabled():
            out = execute_swift(plan, func, args, kwargs)
        if out.__class__ is Tensor:
            return stamp(out, plan.spec)
        if out.__class__ is DistTensor:  # an op that returned its input
            return out
        for t, spec in zip(out, plan.outputs, strict=True):
            stamp(t, spec)
        return out
    return _run(plan, func, types, args, kwargs)


def _stored(plan: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call on tensors for which others may stand in: here and now, so that it is never one known native op."""
    found = with_stand_ins(func, args, kwargs)
    if found is not None:
        return _instead(func, types, args, found)
    written = [a for a in args[:1] if plan.op.inplace and a.__class__ is DistTensor and a._spec.stored]
    made = _run(plan, func, types, args, kwargs)
    for t in written:
        t._spec = t._spec.with_(stored=True)
    return made


def _instead(func: Any, types: Any, args: tuple[Any, ...], found: tuple[Any, Any]) -> Any:
    """The call with stand-ins; an op in place returns what the user gave it."""
    made = dispatch(func, types, *found)
    return args[0] if args and made is found[0][0] and made is not args[0] else made


def _any_tied(args: Any) -> bool:
    return any(a.__class__ is DistTensor and "_tied" in a.__dict__ for a in args)


def _slow(key: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = op_name(func)
    if name in ("__get__", "__set__", "__delete__") or name in QUESTIONS:
        return call_disabled(func, types, args, kwargs)
    special = SPECIAL.get(name)
    if special is not None:
        return special(func, types, args, kwargs)
    if kwargs.get("out") is not None:
        return _with_out(func, args, kwargs)
    if name == "__getitem__" and (index := _without_scalars(args[1])) is not None:
        return func(args[0], index)
    swift = all(isinstance(a, Tensor) for a in args[: len(tensors_in(args))]) and not tensors_in(kwargs)
    stored = any(isinstance(t, DistTensor) and t._spec.stored for t in tensors_in((args, kwargs)))
    if stored:
        found = with_stand_ins(func, args, kwargs)
        if found is not None:
            return _instead(func, types, args, found)
    op = resolve(func)  # here, so that the key of the next call knows whether the op is pointwise
    if op.inplace and not op.python and args and isinstance(args[0], Tensor) and not isinstance(args[0], DistTensor):
        plan = CallPlan(op, run=into_plain(func))
    else:
        plan = plan_call(func, args, kwargs)
    if plan.run is not None and plan.run is op.composite and args and args[0].__class__ is list:
        LISTED[func] = plan.run
    plan.swift, plan.stored = plan.swift and swift, stored
    plans = runtime.RT.plans
    if len(plans) >= _MAX_PLANS:
        plans.clear()
        runtime.RT.fast.clear()
    full = _full_key(func, args, kwargs)
    with contextlib.suppress(TypeError):  # an unhashable argument: planned anew each time
        plans[full := _in_autocast(full, plan)] = plan  # of a graded one: only that the next key is asked for
        if plan.graded:
            plans[by_grad(full, args, kwargs)] = plan
    return (_stored if stored else _run)(plan, func, types, args, kwargs)


def _in_autocast(key: Any, plan: CallPlan) -> Any:
    return (autocast.state(), key) if autocast.active() and not plan.plain else key


def _full_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = (func, *[key_part(a, func) for a in args])
    return (first, *[(k, key_part(v, func)) for k, v in kwargs.items()]) if kwargs else first


def _run(plan: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if plan.run is not None:
        return plan.run(*args, **kwargs)
    if plan.redispatch:
        return redispatch_function(func, types, args, kwargs)
    if plan.gathered:
        warn_gathered(plan)
    if plan.watched:
        before(plan, tensors_in((args, kwargs)), call_enabled)
    with disabled():
        out = execute(plan, func, args, kwargs, stamp)
    if plan.watched and plan.op.inplace:
        write_through(out, call_enabled)
    return out


def _without_scalars(index: Any) -> Any:
    """An index with integer tensors of no dim as ints, which select as PyTorch has it; None where there are none."""
    items = index if isinstance(index, tuple) else (index,)
    scalar = [isinstance(a, Tensor) and not a.ndim and a.dtype not in _NO_INTS for a in items]
    if not any(scalar) or any(isinstance(a, Tensor) and (a.is_floating_point() or a.is_complex()) for a in items):
        return None
    return tuple(int(a) if s else a for a, s in zip(items, scalar, strict=True))


_NO_INTS = (torch.bool, torch.uint8)


def _with_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``out=``: compute, convert to the layout that ``out`` has, and copy into it."""
    given, name = kwargs["out"], op_name(func)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs))):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )
    made = func(*args, **{k: v for k, v in kwargs.items() if k != "out"})
    for target, value in zip(tensors_in(given), tensors_in(made), strict=True):
        if not torch.can_cast(value.dtype, target.dtype):
            raise RuntimeError(f"{name}: result type {value.dtype} can't be cast to the desired type {target.dtype}")
        if target.shape != value.shape:
            if isinstance(target, DistTensor) or target.numel():
                raise DispatchError(
                    f"{name}: out= has shape {tuple(target.shape)}, the result {tuple(value.shape)}; only an empty "
                    "plain tensor is resized"
                )
            target.resize_(value.shape)
        with torch.no_grad():
            target.copy_(value)
    return given


DistTensor.__torch_function__ = staticmethod(dispatch)  # type: ignore[method-assign]
