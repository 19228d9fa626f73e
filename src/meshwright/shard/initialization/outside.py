"""Writes to meta tensors where nothing is recorded, which a version counter does not show by itself.

``shard_module`` compares a tensor's version counter with the writes of its recording (``recording.Recording``).
PyTorch gives ``t.data`` a counter of its own, and ``t.data = x`` counts nothing.  So ``t.data`` of a meta tensor shares
its counter here, and the setter notes what it puts there.  Functions of ``torch.nn.init`` that return at once from a
meta tensor count as writes, too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.autograd.graph import increment_version

from ... import compat, torch_changes
from .recording import INITIALISERS, KINDS, Initialisers, OpRecorder, Recording, Ref, lose, recorded, recording_now

Tensor = torch.Tensor


class _State(threading.local):
    converts = False  # whether Module._apply sets what it computed from the tensor


_STATE = _State()


def _recorders() -> list[OpRecorder] | None:
    """The recorders among dispatch modes; None where there are other modes."""
    modes = [compat.get_dispatch_stack_at(i) for i in range(compat.len_torch_dispatch_stack())]
    found = [m for m in modes if isinstance(m, OpRecorder)]
    return found if len(found) == len(modes) else None


@torch_changes.replace(
    "torch.Tensor.data",
    why="what is written through .data of a meta tensor, and not recorded, has no values: shard_module refuses it",
)
def _counted(original: Any, name: str) -> Any:
    get, put = original.__get__, original.__set__

    def read(self: Tensor) -> Tensor:
        if type(self) in KINDS and not compat.is_torch_function_mode_enabled() and self.is_meta:
            return get(self) if _recorders() is None else self.detach()
        return get(self)

    def write(self: Tensor, value: Any) -> None:
        plain = type(self) in KINDS and type(value) in KINDS
        if plain and not compat.is_torch_function_mode_enabled() and self.is_meta:
            before = recorded(self)
            put(self, value)
            _note_set(self, value, before)
        else:
            put(self, value)

    return property(read, write, original.__delete__)


def _note_set(t: Tensor, value: Tensor, before: tuple[Ref, Recording] | None) -> None:
    """Note that ``t``, of which ``before`` was known, has the memory of ``value`` now."""
    recorders = _recorders()
    if recorders is None:
        return
    known = recorded(value)
    if known is not None and known[1].has_all_of(value, known[0].memory):
        versions, at = known[1].versions, known[0].memory
        versions[at] = max(versions.get(at, 0), t._version)  # t goes on with its own counter
    elif recorders:
        lose(t, recorders[-1].into.current())
    elif before is not None:
        lose(t, before[1])
    elif not _STATE.converts:
        increment_version(t)


@torch_changes.replace(
    "torch.nn.Module._apply", why="what a module converts itself (to(dtype)) is no write of the user to its tensors"
)
def _converting(original: Callable[..., Any], name: str) -> Any:
    @functools.wraps(original)
    def converted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before, _STATE.converts = _STATE.converts, True
        try:
            return original(self, *args, **kwargs)
        finally:
            _STATE.converts = before

    return converted


@torch_changes.replace(
    *(f"torch.nn.init.{func.__name__}" for func in INITIALISERS),
    why="it does nothing to a meta tensor: where that is not recorded, shard_module refuses the tensor",
)
def _skipping(original: Callable[..., Any], name: str) -> Any:
    @functools.wraps(original)
    def skipped(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) in KINDS and tensor.is_meta and not _noted():
            increment_version(tensor)
        return original(tensor, *args, **kwargs)

    return skipped


def _noted() -> bool:
    """Whether functions that skip meta tensors are recorded now."""
    modes = compat.get_current_function_mode_stack()
    return recording_now() is not None or any(isinstance(m, Initialisers) for m in modes)
