"""Bytes that this rank sends, whoever asks for the collective, on the model of a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GATHERS = ("allgather_", "_allgather_base_", "all_gather_into_tensor", "allgather_into_tensor_coalesced_")
SCATTERS = ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced_")
EXCHANGES = ("alltoall_", "alltoall_base_", "all_to_all_single", "shard_dim_alltoall")
SUMS = ("allreduce_", "all_reduce", "all_reduce_", "allreduce_coalesced_", "all_reduce_coalesced")
WHOLE = ("broadcast_", "broadcast", "send", "scatter_", "gather_", "reduce_")
FREE = ("wait_tensor", "recv_", "recv_any_source_", "barrier", "monitored_barrier_", "_wrap_tensor_autograd")


class Traffic(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        bytes: sent by this rank so far: gather and scatter (n-1)/n of the whole, all-reduce twice that, exchange
            (n-1)/n of what the rank holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __enter__(self) -> Traffic:
        _active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        _active.remove(self)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented  # what a distributed tensor does for it is seen
        made = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self.bytes += _sent(func, args, kwargs or {}, made)
        return made


_active: list[Traffic] = []


def as_exchange(given: torch.Tensor, ranks: int, run: Callable[..., Any], *args: Any) -> Any:
    """``run(*args)``, counted as one exchange of ``given`` among so many ranks, whatever it does."""
    before = [t.bytes for t in _active]
    made = run(*args)
    for t, b in zip(_active, before, strict=True):
        t.bytes = b + (ranks - 1) / ranks * given.nbytes
    return made


def _sent(func: Any, args: Any, kwargs: Any, made: Any) -> float:
    name = func._schema.name.partition("::")[2]
    if name in FREE:
        return 0.0
    held = sum(t.nbytes for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
    out = sum(t.nbytes for t in tree_leaves(made) if isinstance(t, torch.Tensor))
    given = held - out if func.namespace == "c10d" else held  # there, outputs are arguments
    n = _members((*args, *kwargs.values()))
    if name in GATHERS:
        return (n - 1) / n * out
    if name in SCATTERS or name in EXCHANGES:
        return (n - 1) / n * given
    if name in SUMS:
        return 2 * (n - 1) / n * held
    if name in WHOLE:
        return float(held)
    raise NotImplementedError(f"bytes of {name}")


def _members(given: Any) -> int:
    for a in given:
        if isinstance(a, torch.ScriptObject):
            return dist.ProcessGroup.unbox(a).size()
        if isinstance(a, str) and not a.isupper() and a not in ("sum", "avg", "max", "min", "product"):
            return torch._C._distributed_c10d._resolve_process_group(a).size()  # type: ignore[arg-type]
    return dist.get_world_size()


__all__ = ["Traffic", "as_exchange"]
