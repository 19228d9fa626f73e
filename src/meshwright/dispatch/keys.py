"""Keys of calls: what of their arguments decides the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch

from .calls import OPS

Tensor = torch.Tensor

_T, _F = object(), object()


def _key_bool(a: bool, func: Any) -> Any:
    return _T if a else _F


def _key_int(a: int, func: Any) -> Any:
    op = OPS.get(func)
    return int if op is not None and op.pointwise and a else a  # zero is a part of a sum, other numbers are not


def _key_float(a: complex, func: Any) -> Any:
    # A pointwise op takes all finite numbers but zero alike; of others a number may be the order of a norm.
    op = OPS.get(func)
    if a and a - a == 0 and op is not None and op.pointwise:
        return a.__class__
    return (a.__class__, a if a == a else "nan")  # which is not equal to itself


def _key_type(a: Any, func: Any) -> Any:
    return type(a)


def _key_self(a: Any, func: Any) -> Any:
    return a


def _key_sequence(a: Sequence[Any], func: Any) -> Any:
    # Numbers in a list are sizes or factors of sizes, floats too (interpolate's scale_factors).
    return (type(a), *[(float, x) if x.__class__ is float else key_part(x, func) for x in a])


class TensorBounds(Exception):
    """A slice is bounded by tensors: numbers, of which the plan must know the values."""


def _key_slice(a: slice, func: Any) -> Any:
    return (slice, _bound(a.start, func), _bound(a.stop, func), _bound(a.step, func))


def _bound(x: Any, func: Any) -> Any:
    if x is None or x.__class__ is int:
        return x
    if isinstance(x, Tensor):
        raise TensorBounds
    return key_part(x, func)


def with_numbers(a: Any) -> Any:
    """Arguments of a call with the tensors that bound slices read, once and on all ranks."""
    if isinstance(a, slice):
        parts = (a.start, a.stop, a.step)
        return slice(*[index(x) if isinstance(x, Tensor) else x for x in parts])
    return type(a)(map(with_numbers, a)) if a.__class__ in (tuple, list) else a


def _key_plain(a: Tensor, func: Any) -> Any:
    return (Tensor, a.shape, a.dtype, a.requires_grad)


_KEYS: dict[type, Callable[[Any, Any], Any]] = {
    bool: _key_bool, int: _key_int, float: _key_float, complex: _key_float, tuple: _key_sequence, list: _key_sequence,
    torch.Size: _key_sequence, slice: _key_slice, Tensor: _key_plain, torch.nn.Parameter: _key_plain,
    torch.Generator: _key_type,
}  # fmt: skip
for _plain_type in (str, type(None), torch.dtype, torch.device, type(...), torch.memory_format, torch.layout, type):
    _KEYS[_plain_type] = _key_self


def key_part(a: Any, func: Any) -> Any:
    """What of an argument decides the plan: specs, shapes, flags; values but for those that cannot change a layout."""
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
        return object()  # what is in it may decide: the plan is for this call alone
    return (a.__class__, a)  # 2 is equal to np.float64(2), and promotes otherwise


def key_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What decides the plan of a call, autocast aside."""
    first = (func, *[key_part(a, func) for a in args])
    return (first, *[(k, key_part(v, func)) for k, v in kwargs.items()]) if kwargs else first
