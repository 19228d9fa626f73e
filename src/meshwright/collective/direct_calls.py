"""Collectives that the user's code calls by itself: of distributed tensors they are refused, before anything is sent.

``torch.distributed`` knows nothing of layouts: it would take the part that this rank holds for the whole.  All that it
is asked for in Python passes the methods of a process group, and so does what other libraries ask.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .. import compat, torch_changes
from ..errors import DispatchError
from ..ranks import runtime

Tensor = torch.Tensor

METHODS = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
# Operators of torch.distributed that programs hold, by where they are.
OPERATORS = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "_dtensor", "symm_mem")
SENT = "_meshwright_sent"

_TARGETS = tuple(f"torch.distributed.ProcessGroup.{name}" for name in METHODS)
_OBJECTS = "torch.distributed.distributed_c10d._object_to_tensor"
torch_changes.note(
    *(*_TARGETS, _OBJECTS),
    why="a collective of the user's own would send the part of a rank for the whole: refused for DistTensors",
    since="the first process group of a mesh",
    until=torch_changes.NEVER,
)


def refuse_by_hand(what: str, spec: Any) -> NoReturn:
    """Raise for a collective of the user's own, on the same line of all ranks.

    Raises:
        DispatchError: with what to write instead.
    """
    raise DispatchError(
        f"{what} of torch.distributed at {runtime.user_line()} was given a DistTensor, {spec!r}: it would take the "
        "part that each rank holds for the whole. Ops on a DistTensor give what one device gives, on all ranks "
        "together, so nothing is left to reduce or gather: leave the call out and read the value with .item() or "
        "mw.unshard(x). To send the parts themselves give it x.to_local()"
    )


def guard() -> None:
    """Have process groups refuse distributed tensors; plain ones pass, and so does what is called on locals."""
    group: Any = dist.ProcessGroup
    if getattr(group.allreduce, SENT, False):
        return
    for target in _TARGETS:
        torch_changes.put(target, _guarded)
    torch_changes.put(_OBJECTS, _packed)


def _guarded(original: Any, name: str) -> Any:
    enabled = compat.is_torch_function_enabled

    @functools.wraps(original, updated=())
    def method(*args: Any, **kwargs: Any) -> Any:
        if enabled() and (found := _held((*args[1:], *kwargs.values()))) is not None:  # else called on locals
            refuse_by_hand(name, found.__dict__.get("_spec"))
        return original(*args, **kwargs)

    setattr(method, SENT, True)
    return method


def _held(given: Any) -> Tensor | None:
    """The first distributed tensor among arguments, which are tensors and lists of them."""
    for a in given:
        if isinstance(a, (list, tuple)):
            if (found := _held(a)) is not None:
                return found
        elif getattr(type(a), "class_set", False):
            return a
    return None


# ---------------------------------------------------------------------------------------------- objects


class _Sending(threading.local):
    objects = False


_SENDING = _Sending()


@contextmanager
def _objects() -> Iterator[None]:
    before, _SENDING.objects = _SENDING.objects, True
    try:
        yield
    finally:
        _SENDING.objects = before


def sends_objects() -> bool:
    """Whether an object is pickled for other ranks, by a collective of the user's own."""
    return _SENDING.objects


def _packed(pack: Any, name: str) -> Any:
    """What a tensor among objects is, is known when they are pickled: before anything is sent."""

    @functools.wraps(pack)
    def packed(*args: Any, **kwargs: Any) -> Any:
        with _objects():
            return pack(*args, **kwargs)

    return packed


__all__ = ["OPERATORS", "guard", "refuse_by_hand", "sends_objects"]
