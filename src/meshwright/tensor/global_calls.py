"""Calls on plain tensors that know what they are globally, as on distributed tensors: for those that have a class.

What a fake is globally is the spec in its dict alone.  Composites, which ask for shapes as code on global tensors does,
run inside a mode that answers with global values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..dispatch import (
    NO_KWARGS,
    ONCE,
    Args,
    Frontend,
    FunctionOverride,
    Kwargs,
    autocast,
    call,
    call_disabled,
    casts_of,
    key_of,
    remember_detached,
    tensors_in,
)
from ..layout import Spec, marked, marks_of
from .dist_tensor import GLOBAL_METHODS, GLOBAL_PROPERTIES, DistTensor
from .graph_marks import brought

Tensor = torch.Tensor


def tell(t: Tensor, spec: Spec) -> Tensor:
    """Say what the local tensor ``t`` is globally."""
    if t.dtype is not spec.dtype:
        spec = marked(spec.with_(dtype=t.dtype), marks_of(spec))
    t.__dict__["_spec"] = spec
    return t


class GlobalCalls:
    """Calls on tensors of which :func:`tell` said what they are."""

    def __init__(self) -> None:
        self.mode = _Global(self)
        self.front = Frontend(tell, self.enabled, self.enabled, _SPECIAL, lambda *_: None, lambda *_: None)

    def call(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """One call, as eager dispatch would run it."""
        tensors = tensors_in((args, kwargs))
        if not any("_spec" in t.__dict__ for t in tensors):
            return func(*args, **kwargs)
        if autocast.active() and any(ONCE in t.__dict__ for t in tensors):
            casts = casts_of(func, args, kwargs)
            args, kwargs = (args, kwargs) if casts is None else self.enabled(casts.once, (args, kwargs), NO_KWARGS)
        return call(self.front, key_of(func, args, kwargs), func, args, kwargs)

    def enabled(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Code that calls ops on such tensors as on the global ones that they stand for."""
        with self.mode:
            return func(*args, **kwargs)


def _detach(func: Any, args: Args, kwargs: Kwargs) -> Any:
    (x,) = args
    made = func(x)
    remember_detached(x, made)
    spec: Spec = x.__dict__["_spec"]
    return tell(made, marked(spec.untyped(), marks_of(spec).after_write()))


def _constrained(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    x, placements = args
    return brought(x, placements, tell, call_disabled)


_SPECIAL: dict[str, FunctionOverride] = {"detach": _detach, "detach_": _detach, "meshwright::constrain": _constrained}


class _Global(TorchFunctionMode):
    """Inside, tensors with a spec answer as the global ones that they stand for."""

    def __init__(self, owner: GlobalCalls) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if isinstance(first, Tensor) and "_spec" in first.__dict__:
            name = getattr(func, "__name__", "")
            if name in GLOBAL_METHODS:
                return getattr(DistTensor, name)(*args, **kwargs or NO_KWARGS)
            name = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
            if name in GLOBAL_PROPERTIES:
                with self:
                    return getattr(DistTensor, name).fget(first)
        return self.owner.call(func, tuple(args), kwargs or NO_KWARGS)


__all__ = ["GlobalCalls", "tell"]
