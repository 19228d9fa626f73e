"""A distributed tensor while this package works on its part: plain for the thread that does, as ever for all others.

Code that works on a part reads ``.shape`` and means that of the part, while another thread, which looks at the same
tensor (``state_dict()`` beside the training), means that of the whole.  So the class does not become ``Tensor``, but
one whose members ask which thread it is.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch

from ..dispatch import NO_KWARGS, call_disabled
from ..local_tensor import OPEN, mine, open_as
from .dist_tensor import DistTensor
from .torch_function import dispatch

Tensor = torch.Tensor


class OpenTensor(DistTensor):
    """See the module; ``DistTensor`` to whoever asks."""


def _either_property(ours: Any, base: Any) -> property:
    read, read_ours, thread = base.__get__, ours.__get__, threading.get_ident

    def get(self: Any) -> Any:  # as `mine` asks, without a call of it: the step of an optimizer reads thousands
        space = self.__dict__
        return read(self) if OPEN in space and thread() in space[OPEN] else read_ours(self, DistTensor)

    def put(self: Any, value: Any) -> None:
        (base if mine(self) else ours).__set__(self, value)

    def delete(self: Any) -> None:
        (base if mine(self) else ours).__delete__(self)

    return property(get, put, delete)


def _either_method(ours: Any, base: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (base if mine(self) else ours)(self, *args, **kwargs)

    return method


def _dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if any(issubclass(t, OpenTensor) for t in types) and any(map(_is_mine, args)):
        return call_disabled(func, types, args, kwargs or NO_KWARGS)
    return dispatch(func, types, args, kwargs)


def _is_mine(a: Any) -> bool:
    return any(map(_is_mine, a)) if isinstance(a, (list, tuple)) else isinstance(a, OpenTensor) and mine(a)


for _name, _ours in vars(DistTensor).items():
    _base = inspect.getattr_static(Tensor, _name, None)
    if _base is None or _name in ("__new__", "__torch_function__", "__doc__", "__module__", "__dict__", "__weakref__"):
        continue
    if isinstance(_ours, property):
        setattr(OpenTensor, _name, _either_property(_ours, _base))
    elif callable(_ours):
        setattr(OpenTensor, _name, _either_method(_ours, getattr(Tensor, _name)))
OpenTensor.__torch_function__ = staticmethod(_dispatch)  # type: ignore[method-assign]
open_as(DistTensor, OpenTensor)

__all__ = ["OpenTensor"]
