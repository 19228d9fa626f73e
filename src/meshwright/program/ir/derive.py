"""What an op gives for tensors that look like these: shape, dtype, strides and whose memory it is, without data.

Repeated layers ask once: the answer depends on the op, what its tensors look like and its other arguments only.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from ... import compat
from ...compat import FakeTensorMode
from ...local_tensor import storage_of
from .nodes import Value

Tensor = torch.Tensor
aten = torch.ops.aten


class LocalValue(NamedTuple):
    """What a local tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class DerivedValue(NamedTuple):
    """What an op gives: a local tensor, and the number of the tensor among its arguments whose memory it is."""

    local: LocalValue
    alias: int | None


_MOST_PARTS = 1 << 20


class _Typed(NamedTuple):
    """A number that equals one of another type."""

    kind: type
    value: Any


def local_values(value: Any) -> Any:
    """What tensors of a node look like."""
    if isinstance(value, tuple):
        return tuple(local_values(v) for v in value)
    return LocalValue(value.shape, value.strides, value.dtype) if isinstance(value, Value) else None


class _OfThread(threading.local):
    """The mode of stand-ins: one each costs more than most ops do, as PyTorch notes the stack at which it was made."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()


_of_thread = _OfThread()


def derive(
    target: Any, args: Any, kwargs: Mapping[str, Any], known: Mapping[fx.Node, Any], device: str
) -> tuple[tuple[DerivedValue | None, ...], list[fx.Node]]:
    """What an op gives for nodes, and the nodes among its arguments in the order to which ``alias`` refers.

    Args:
        known: what tensors of nodes look like (:func:`local_values`).

    Raises:
        Exception: of any kind, where the arguments do not fit.
    """
    tensors: list[fx.Node] = []
    given = _hashable(args, known, tensors)
    named = tuple([(k, _hashable(v, known, tensors)) for k, v in kwargs.items()]) if kwargs else ()
    return _derived(target, given, named, device, torch.get_default_dtype()), tensors


@lru_cache(maxsize=16384)
def _derived(
    target: Any, args: Any, kwargs: Any, device: str, default_dtype: torch.dtype
) -> tuple[DerivedValue | None, ...]:
    """What an op gives for tensors that look like these, with this default dtype (which a new tensor may have)."""
    if target is aten.as_strided.default:  # may reach beyond the part of memory that a stand-in has
        first = args[0]
        return (DerivedValue(LocalValue(tuple(args[1]), tuple(args[2]), first.dtype), 0),)
    _refuse_many(target, args)
    stand_ins: list[Tensor] = []
    with _of_thread.mode, torch.no_grad(), compat.AutoDispatchBelowAutograd():
        made = target(*_thawed(args, stand_ins, device), **{k: _thawed(v, stand_ins, device) for k, v in kwargs})
    memory = {storage_of(t): i for i, t in reversed(list(enumerate(stand_ins)))}
    listed = made if isinstance(made, (tuple, list)) else (made,)
    return tuple([_derived_value(t, memory) if isinstance(t, Tensor) else None for t in listed])


def _refuse_many(target: Any, args: Any) -> None:
    """A program from a file must not have verification make tensors without end."""
    returns = target._schema.returns
    if not returns or str(returns[0].type) != "List[Tensor]" or not args or not isinstance(args[0], LocalValue):
        return
    longest, numbers = max((1, *args[0].shape)), [a for a in args[1:] if type(a) is int]
    parts = max(longest, *numbers, 1)
    if "split.Tensor" in str(target) and numbers:
        parts = -(-longest // max(numbers[0], 1))
    elif any(isinstance(a, tuple) for a in args):  # as many as are listed
        parts = 1
    if parts > _MOST_PARTS:
        raise ValueError(f"it would give {parts} tensors")


def _derived_value(t: Tensor, memory: dict[int, int]) -> DerivedValue:
    return DerivedValue(LocalValue(tuple(t.shape), tuple(t.stride()), t.dtype), memory.get(storage_of(t)))


def _hashable(a: Any, known: Mapping[fx.Node, Any], tensors: list[fx.Node]) -> Any:
    """An argument as a value that can be looked up; its tensors are appended."""
    kind = type(a)
    if kind is fx.Node:
        tensors.append(a)
        return known[a]
    if kind is int or kind is str or a is None:
        return a
    if isinstance(a, (list, tuple)):
        return tuple([_hashable(x, known, tensors) for x in a])
    return _Typed(kind, a)


def _thawed(a: Any, stand_ins: list[Tensor], device: str) -> Any:
    if isinstance(a, LocalValue):
        stand_ins.append(torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=device))
        return stand_ins[-1]
    if isinstance(a, _Typed):
        return a.value
    if isinstance(a, tuple):
        return [_thawed(x, stand_ins, device) for x in a]
    return a


__all__ = ["DerivedValue", "LocalValue", "derive", "local_values"]
