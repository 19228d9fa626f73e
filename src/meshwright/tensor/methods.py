"""Methods of ``DistTensor`` that enter dispatch directly, and properties that are those of the local tensor."""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import compat
from ..dispatch import METADATA_METHODS, NO_KWARGS, call_disabled, resolve
from ..layout import MarkedSpec, Spec
from ..ranks import runtime
from ..rules.strided import ROW_MAJOR
from .dist_tensor import BASE, DistTensor, is_part
from .substitutes import OPEN
from .torch_function import dispatch

Tensor = torch.Tensor
_TYPES = (DistTensor,)
_enabled = compat.is_torch_function_enabled
_modes = compat.len_torch_function_stack


_AS_THEY_ARE = {int, str, type(None), torch.dtype}  # what of these types decides a plan is the argument itself
_NUMBERS = {int, float, complex}


def _method(name: str, func: Any) -> Any:
    """A method of Tensor that enters dispatch directly.

    The same call through C would first parse its arguments, find the overriding type and build a tuple of types: more
    than the op itself where tensors are small.  Inside modes, and with dispatch disabled, it takes the usual way.
    """
    numbers_are_types = resolve(func).pointwise

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _modes() or not _enabled():
            return func(self, *args, **kwargs)
        known = None
        if not kwargs and not numbers_are_types and _AS_THEY_ARE.issuperset(map(type, args)):
            known = runtime.RT.fast.get((func, self._spec, *args))  # the key that dispatch would make, part by part
        return dispatch(func, _TYPES, (self, *args), kwargs, known)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = func.__doc__
    return method


def _operator(name: str, func: Any) -> Any:
    """As :func:`_method`, for ``x + y`` and friends, which answer NotImplemented to what is not a number or tensor."""
    numbers_are_types = resolve(func).pointwise

    def operator(self: Any, other: Any) -> Any:
        if _modes() or not _enabled():
            return func(self, other)
        known, kind = None, other.__class__
        if kind is DistTensor:
            known = runtime.RT.fast.get((func, self._spec, other._spec))
        elif numbers_are_types and kind in _NUMBERS and other and other - other == 0:  # finite, and not zero
            known = runtime.RT.fast.get((func, self._spec, kind))
        elif not isinstance(other, (Tensor, float, int, complex)):
            return func(self, other)
        return dispatch(func, _TYPES, (self, other), NO_KWARGS, known)

    operator.__name__ = operator.__qualname__ = name
    return operator


def _question(name: str, func: Any) -> Any:
    """A method that does the same on the local tensor and on the global one, without a detour through dispatch."""

    def question(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _modes():
            return func(self, *args, **kwargs)
        return call_disabled(func, (), (self, *args), kwargs)

    question.__name__ = question.__qualname__ = name
    question.__doc__ = func.__doc__
    return question


def _getter(name: str) -> Any:
    """A property that says the same of the local tensor and of the global one, without a detour through dispatch."""
    get = getattr(BASE, name).__get__
    return property(lambda self: call_disabled(get, (), (self,), NO_KWARGS), doc=getattr(BASE, name).__doc__)


def _clone(self: Any, *args: Any, **kwargs: Any) -> Any:
    """See torch.Tensor.clone.  A copy in row-major order is new memory of a known order, whatever was copied."""
    made = _CLONE(self, *args, **kwargs)
    if kwargs and kwargs.get("memory_format") is torch.contiguous_format and made.__class__ is DistTensor:
        made.__dict__[ROW_MAJOR] = True
    return made


def _global_strides(spec: Spec, sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the global tensor that has its dims in the order in which a part of these sizes has them.

    Code of users computes with them, as with sizes: those of a part would step over rows that are shorter.
    """
    order = [(step, -d) for d, step in enumerate(strides)]
    made = []
    for own in order:
        inner = [-e for step, e in order if step != 0 and (step, e) < own]
        longer, shorter = (math.prod(max(of[d], 1) for d in inner) for of in (spec.shape, sizes))
        made.append(own[0] * longer // shorter)
    return tuple(made)


def _stride(self: Any, dim: int | None = None) -> Any:
    """Strides of the global tensor."""
    strides = call_disabled(Tensor.stride, (), (self,), NO_KWARGS)
    if _enabled() and is_part(self._spec):
        strides = _global_strides(self._spec, call_disabled(Tensor.size, (), (self,), NO_KWARGS), strides)
    return strides if dim is None else strides[dim]


_SAME = ("layout", "grad_fn", "is_leaf", "is_meta", "is_sparse", "_base", "_version")
for _name in _SAME:
    setattr(DistTensor, _name, _getter(_name))


def _dtype(self: DistTensor) -> torch.dtype:
    """Of the values that ops see: in the forward of a model with a precision, what a parameter is cast to there."""
    spec = self._spec
    if type(spec) is MarkedSpec and spec.marks.stored and OPEN.scopes and _enabled():
        for scope in reversed(OPEN.scopes):
            found: torch.dtype | None = scope.dtype(self)
            if found is not None:
                return found
    return spec.dtype


setattr(DistTensor, "dtype", property(_dtype))  # noqa: B010


def _where(name: str, of: Any) -> None:
    """Have a property that tells where a tensor lies tell where ops see it, in forwards of what is stored elsewhere."""
    get = getattr(BASE, name).__get__

    def where(self: DistTensor) -> Any:
        spec = self._spec
        if type(spec) is MarkedSpec and spec.marks.stored and OPEN.scopes and _enabled():
            for scope in reversed(OPEN.scopes):
                found = scope.device(self)
                if found is not None:
                    return of(found)
        return call_disabled(get, (), (self,), NO_KWARGS)

    setattr(DistTensor, name, property(where, doc=getattr(BASE, name).__doc__))


_where("device", lambda found: found)
_where("is_cpu", lambda found: found.type == "cpu")
_where("is_cuda", lambda found: found.type == "cuda")

_OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "matmul", "pow")
_METHODS = (
    "abs", "add", "add_", "amax", "amin", "bmm", "chunk", "contiguous", "copy_", "cos", "div", "div_", "exp",
    "expand", "flatten", "float", "gather", "log", "masked_fill", "matmul", "mean", "mm", "mul", "mul_", "neg",
    "permute",     "pow", "relu", "reshape", "rsqrt", "select", "sigmoid",
    "sin", "softmax", "split", "sqrt", "squeeze", "sub", "sub_",
    "sum", "tanh", "to", "transpose", "type_as", "unbind", "unsqueeze", "view", "view_as", "zero_", "__getitem__",
    "__neg__",
)  # fmt: skip
for _name in _METHODS:
    setattr(DistTensor, _name, _method(_name, getattr(Tensor, _name)))
for _name in _OPERATORS:
    setattr(DistTensor, f"__{_name}__", _operator(f"__{_name}__", getattr(Tensor, f"__{_name}__")))
for _name in METADATA_METHODS - {"__hash__"}:  # of that PyTorch's own asks nobody
    if callable(_func := getattr(Tensor, _name, None)):
        setattr(DistTensor, _name, _question(_name, _func))
_CLONE = _method("clone", Tensor.clone)
DistTensor.clone = _clone  # type: ignore[method-assign]
DistTensor.stride = _stride  # type: ignore[method-assign]
