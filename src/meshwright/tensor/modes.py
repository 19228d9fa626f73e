"""Dispatch modes of users around distributed tensors: operation counters, memory trackers, selective checkpoints.

A mode hands the tensors of a native call to Python.  There, a distributed tensor means the global value, while the call
is about the local tensor that it is.  So a mode of ours lies above those of users: what they see is this rank's plain
tensors, in forward and backward.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .. import compat
from ..compat import OpOverload, TorchDispatchMode, disable_current_modes
from ..dispatch import NO_KWARGS, call_disabled, disabled, map_tensors
from ..local_tensor import bare
from .dist_tensor import DistTensor

Tensor = torch.Tensor


class _Locals(TorchDispatchMode):
    """Calls the op on this rank's plain tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with disabled():
            with disable_current_modes():  # an alias is no operation of the user's
                args, kwargs = map_tensors(args, _local), map_tensors(kwargs or NO_KWARGS, _local)
            return func(*args, **kwargs)


def _local(t: Tensor) -> Tensor:
    return bare(t) if isinstance(t, DistTensor) else t


def locals_only() -> contextlib.AbstractContextManager[Any]:
    """The modes that are active see local tensors for a while; nothing where there are none."""
    depth = compat.len_torch_dispatch_stack()
    if not depth or compat.get_dispatch_stack_at(depth - 1).__class__ is _Locals:
        return contextlib.nullcontext()
    return _Locals()


def under(dispatch: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """A call on distributed tensors while a mode is active; NotImplemented where it goes its usual way."""
    if func.__class__ is OpOverload and compat.current_graph_task_id() != -1:
        return call_disabled(func, types, args, kwargs or NO_KWARGS)  # a mode goes on with what autograd saved: locals
    entered = locals_only()
    if not isinstance(entered, _Locals):
        return NotImplemented
    with entered:
        return dispatch(func, types, args, kwargs)


__all__ = ["locals_only", "under"]
