"""The collectives.  What is not written in place comes out contiguous, however what goes in lies in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..compat import BarrierOptions, BroadcastOptions
from ..errors import CollectiveError
from ..ranks import runtime
from ..ranks.simulation import Call
from . import checking
from .groups import Group
from .kinds import ADDS, Cut, Kind, rounds
from .monitor import Underway, started
from .transport import (
    BASIC,
    GATHER,
    MOVABLE,
    REDUCE,
    REDUCIBLE,
    SCATTER,
    Pending,
    Sizes,
    as_bytes,
    carrier,
    check_sizes,
    checked_dim,
    contiguous,
    even,
    from_wire,
    numel,
    reduced,
    resized,
    to_wire,
    wire_op,
)

SMALL = 64  # bytes up to which an all-reduce on gloo carries a signature: there only the number of messages counts
SIGNED = {torch.float32, torch.float64, torch.int32, torch.int64}


@contextmanager
def counting() -> Iterator[runtime.Counts]:
    """Count the collectives of this rank inside the block; the counts are filled in when it ends."""
    before = runtime.RT.counts.copy()
    made = runtime.Counts()
    try:
        yield made
    finally:
        since = runtime.RT.counts.since(before)
        made.table, made.narrow, made.copies = since.table, since.narrow, since.copies


_signature = lru_cache(maxsize=4096)(Call)


def _call(
    group: Group, kind: str, op: str, x: Tensor, args: tuple[tuple[str, Any], ...] = (), free: tuple[int, ...] = ()
) -> Call:
    """The signature of a collective that is about to run."""
    rt = runtime.RT
    call = _signature(kind, op, x.dtype, x.shape, args, free, rt.tag)
    if rt.check:
        checking.about_to(group, call)
    checking.beside(group, call)
    return call


def _count(kind: Kind, group: Group, before: int, after: int, summed: torch.dtype | None = None) -> None:
    """Note a collective: bytes of what this rank brings, or ends with; ``summed``: the dtype of what is added up."""
    runtime.RT.counts.add(kind.name, group.axes, kind.bytes(before, after, group.size))
    if summed is not None and rounds(summed, group.size):
        runtime.RT.counts.add_narrow(kind.name, group.axes, summed, group.size)


# -- all-reduce ------------------------------------------------------------------------------------------


def all_reduce(t: Tensor, op: str, group: Group, *, out_of_place: bool = True) -> Tensor:
    """The reduction of ``t`` (same shape on all ranks) over the group, on every rank.

    Args:
        op: one of ``sum``, ``avg``, ``max``, ``min``, ``product``, and for bool ``any``, ``all``.
        out_of_place: False: the result is written to ``t``, which is returned.

    As everywhere here, a group of one rank returns ``t`` itself and counts nothing.

    Raises:
        CollectiveError: the op has no meaning for the dtype.
        DesyncError: the ranks disagree (simulated ranks only: real ones cannot know).
    """
    if group.size == 1:
        return t
    return _start_all_reduce(t, op, group, out_of_place, True).wait()


def all_reduce_async(t: Tensor, op: str, group: Group) -> Pending:
    """As ``all_reduce`` in place on ``t``, without waiting."""
    if group.size == 1:
        return Pending(None, t)
    return _start_all_reduce(t, op, group, False, False)


def carries_signature(group: Group, dtype: torch.dtype, op: str) -> bool:
    """Whether an all-reduce of a few bytes also compares what the ranks did so far."""
    return group.gloo and dtype in SIGNED and op in BASIC


def _start_all_reduce(t: Tensor, op: str, group: Group, fresh: bool, sync: bool) -> Pending:
    n = group.size
    x = t.detach() if t.requires_grad else t
    dtype, nbytes = x.dtype, x.nbytes
    direct = dtype in REDUCIBLE and op in BASIC
    if not direct:
        carrier(dtype, op)  # complain before any rank acts
    _count(ALL_REDUCE, group, nbytes, 0, dtype if op in ADDS else None)
    call = _call(group, "all_reduce", op, x)
    if group.pg is None:
        return checking.met(
            group, call, x, lambda parts: _copies(contiguous(reduced(parts, op)), n),
            (lambda out: out) if fresh else (lambda out: _into(t, out)), sync=sync, writes=None if fresh else t,
        )  # fmt: skip
    if not nbytes:  # same shape everywhere: nothing moves on any rank
        return Pending(None, _fresh(x) if fresh else t)
    if sync and nbytes <= SMALL and carries_signature(group, dtype, op):
        value = checking.small_all_reduce(x, op, group, call)
        return Pending(None, value if fresh else _into(t, value))
    wire = x if direct else to_wire(x, op)
    if fresh and (wire is x or dtype.is_complex):
        wire = _fresh(wire)
    elif not wire.is_contiguous():
        wire = wire.contiguous()
    work = started(group, call, group.pg.allreduce, [wire], REDUCE[sync][wire_op(dtype, op)])
    if direct and (fresh or wire is x):
        return Pending(work, wire if fresh else t)

    def finish(filled: Tensor) -> Tensor:
        value = from_wire(filled, dtype, op, n)
        return contiguous(value) if fresh else _into(t, value)

    return Pending(work, wire, finish)


def _into(t: Tensor, value: Tensor) -> Tensor:
    if t is not value:
        t.detach().copy_(value)
    return t


def _copies(t: Tensor, n: int) -> list[Tensor]:
    """One tensor per simulated rank: nobody may write into another rank's result."""
    return [t, *(_fresh(t) for _ in range(n - 1))]


# -- all-gather ------------------------------------------------------------------------------------------


def all_gather(t: Tensor, dim: int, sizes: Sizes, group: Group) -> Tensor:
    """The parts of all ranks, concatenated along ``dim``.

    Args:
        t: own part; its shape equals that of the others but for ``dim``.
        sizes: length of each rank's part along ``dim``; may differ and may be 0.

    Raises:
        CollectiveError: ``sizes`` does not fit the group or ``t``.
        DesyncError: the ranks disagree (simulated ranks only).
    """
    return _start_all_gather(t, dim, sizes, group, True).wait()


def all_gather_async(t: Tensor, dim: int, sizes: Sizes, group: Group) -> Pending:
    """As ``all_gather``, without waiting: ``t`` must not change until then."""
    return _start_all_gather(t, dim, sizes, group, False)


def _start_all_gather(t: Tensor, dim: int, sizes: Sizes, group: Group, sync: bool) -> Pending:
    n = group.size
    dim = checked_dim(t, dim, "all_gather")
    check_sizes("all_gather", "sizes", sizes, group, sizes[min(group.index, len(sizes) - 1)], t.shape[dim])
    if n == 1:
        return Pending(None, t)
    x = t.detach() if t.requires_grad else t
    full = resized(x.shape, dim, sum(sizes))
    nbytes = math.prod(full) * x.element_size()
    _count(ALL_GATHER, group, 0, nbytes)
    call = _call(group, "all_gather", "", x, (("dim", dim), ("sizes", tuple(sizes))), (dim,))
    if group.pg is None:
        return checking.met(
            group, call, x, lambda parts: _copies(contiguous(torch.cat(parts, dim)), n), lambda out: out, sync=sync
        )
    if not nbytes:
        return Pending(None, x.new_empty(full))
    if sizes.count(sum(sizes)) == 1:  # one rank has all
        return _start_broadcast(_fresh(x) if x.nbytes else x.new_empty(full), sizes.index(sum(sizes)), group, call)
    if dim == 0 and group.plain and x.dtype in MOVABLE and even(sizes):  # nothing to rearrange
        out = x.new_empty(full)
        return Pending(started(group, call, group.pg._allgather_base, out, x.contiguous(), GATHER[sync]), out)
    if x.dtype not in MOVABLE:
        dtype = x.dtype
        work, out, finish = _gather_parts(as_bytes(x), dim, sizes, group, sync, call)
        return Pending(work, out, lambda o: contiguous(finish(o).view(dtype).squeeze(-1)))
    return Pending(*_gather_parts(x, dim, sizes, group, sync, call))


def _gather_parts(
    x: Tensor, dim: int, sizes: Sizes, group: Group, sync: bool, call: Call
) -> tuple[Any, Tensor, Callable[[Tensor], Tensor]]:
    """Start it: (work, buffer, function from the filled buffer to the result)."""
    n, shape = group.size, tuple(x.shape)
    x = x.contiguous()
    if even(sizes):
        out = x.new_empty((n * shape[0], *shape[1:]))
        work = _gather_flat(out, x, group, sync, call)
        full = resized(shape, dim, sum(sizes))
        # Where parts have one element in a dim, reshape would give a view with odd strides.
        return work, out, lambda o: contiguous(o.view(n, *shape).movedim(0, dim).reshape(full))
    # Uneven: each part is sent flat, padded to the largest; the padding is never read.
    numels = [numel(shape, dim, s) for s in sizes]
    longest = max(numels)
    padded = x.view(-1)
    if x.numel() < longest:
        padded = x.new_empty(longest)
        padded[: x.numel()] = x.view(-1)
    out = x.new_empty(n * longest)

    def cut(o: Tensor) -> Tensor:
        rows = o.view(n, longest)
        parts = [rows[i, : numels[i]].view(resized(shape, dim, s)) for i, s in enumerate(sizes)]
        return contiguous(torch.cat(parts, dim))

    return _gather_flat(out, padded, group, sync, call), out, cut


def _gather_flat(out: Tensor, x: Tensor, group: Group, sync: bool, call: Call) -> Underway:
    if group.plain:
        return started(group, call, group.pg._allgather_base, out, x, GATHER[sync])
    parts = list(out.view(group.size, *x.shape).unbind(0))
    return started(group, call, group.pg.allgather, [parts], [x], GATHER[sync])


# -- reduce-scatter --------------------------------------------------------------------------------------


def reduce_scatter(t: Tensor, dim: int, sizes: Sizes, op: str, group: Group) -> Tensor:
    """This rank's part, along ``dim``, of the reduction of ``t`` over the group.

    Args:
        t: same shape on all ranks; its length along ``dim`` is ``sum(sizes)``.
        sizes: length of each rank's part; may differ and may be 0.
        op: as for ``all_reduce``.

    Raises:
        CollectiveError: ``sizes`` does not fit, or the op has no meaning for the dtype.
        DesyncError: the ranks disagree (simulated ranks only).
    """
    return _start_reduce_scatter(t, dim, sizes, op, group, True).wait()


def reduce_scatter_async(t: Tensor, dim: int, sizes: Sizes, op: str, group: Group) -> Pending:
    """As ``reduce_scatter``, without waiting: ``t`` must not change until then."""
    return _start_reduce_scatter(t, dim, sizes, op, group, False)


def _start_reduce_scatter(t: Tensor, dim: int, sizes: Sizes, op: str, group: Group, sync: bool) -> Pending:
    n = group.size
    dim = checked_dim(t, dim, "reduce_scatter")
    check_sizes("reduce_scatter", "sizes", sizes, group, sum(sizes), t.shape[dim])
    if n == 1:
        return Pending(None, t)
    x = t.detach() if t.requires_grad else t
    dtype = x.dtype
    direct = dtype in REDUCIBLE and op in BASIC
    if not direct:
        carrier(dtype, op)  # complain before any rank acts
    _count(REDUCE_SCATTER, group, x.nbytes, 0, dtype if op in ADDS else None)
    call = _call(group, "reduce_scatter", op, x, (("dim", dim), ("sizes", tuple(sizes))))
    if group.pg is None:
        return checking.met(
            group, call, x, lambda parts: _split(reduced(parts, op), dim, sizes), lambda out: out, sync=sync
        )
    own = sizes[group.index]
    if not x.nbytes:
        return Pending(None, x.new_empty(resized(x.shape, dim, own)))
    if direct and dim == 0 and group.scatters and even(sizes):  # nothing to rearrange
        out = x.new_empty((own, *x.shape[1:]))
        work = started(group, call, group.pg._reduce_scatter_base, out, x.contiguous(), SCATTER[sync][op])
        return Pending(work, out)
    wire = to_wire(x, op)
    backend_op = wire_op(dtype, op)
    if not group.scatters:
        if wire is x or dtype.is_complex:
            wire = _fresh(wire)
        wire = wire.contiguous()
        work = started(group, call, group.pg.allreduce, [wire], REDUCE[sync][backend_op])
        # A copy, so that the part does not keep the whole alive.
        part = wire.narrow(dim, sum(sizes[: group.index]), own)
        return Pending(work, part, lambda o: contiguous(from_wire(_fresh(o), dtype, op, n)))
    packed, longest = _packed(wire, dim, sizes)
    out = wire.new_empty(longest)
    shape = resized(wire.shape, dim, own)
    work = started(group, call, group.pg._reduce_scatter_base, out, packed, SCATTER[sync][backend_op])
    return Pending(work, out, lambda o: contiguous(from_wire(o[: math.prod(shape)].view(shape), dtype, op, n)))


def _fresh(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _split(t: Tensor, dim: int, sizes: Sizes) -> list[Tensor]:
    """The parts of ``t`` along ``dim``, as tensors of their own."""
    return [_fresh(part) for part in t.split(list(sizes), dim)]


def _packed(t: Tensor, dim: int, sizes: Sizes) -> tuple[Tensor, int]:
    """The parts along ``dim`` one after the other, flat, each padded to the largest; and that length."""
    n, longest = len(sizes), numel(t.shape, dim, max(sizes))
    if even(sizes):
        if dim == 0:
            return t.contiguous().view(-1), longest
        return t.unflatten(dim, (n, sizes[0])).movedim(dim, 0).reshape(-1), longest
    rows = t.new_zeros(n, longest)
    for row, part in zip(rows, t.split(list(sizes), dim), strict=True):
        row[: part.numel()] = part.reshape(-1)
    return rows.view(-1), longest


def _gather_now(x: Tensor, dim: int, sizes: Sizes, group: Group, call: Call) -> Tensor:
    """``all_gather`` of a dtype that backends move, on real ranks, neither checked nor counted."""
    return Pending(*_gather_parts(x, dim, sizes, group, True, call)).wait()


# -- broadcast, barrier, objects -------------------------------------------------------------------------


def broadcast(t: Tensor, src_index: int, group: Group) -> Tensor:
    """The tensor of the rank at position ``src_index``, on every rank, as a new tensor.

    Args:
        t: same shape and dtype on all ranks; only the value on the source matters.

    Raises:
        CollectiveError: no such position.
        DesyncError: the ranks disagree (simulated ranks only).
    """
    n = group.size
    if not 0 <= src_index < n:
        raise CollectiveError(f"broadcast: no position {src_index} in a group of {n} ranks")
    if n == 1:
        return t
    x = t.detach() if t.requires_grad else t
    _count(BROADCAST, group, x.nbytes, 0)
    call = _call(group, "broadcast", "", x, (("src_index", src_index),))
    if group.pg is None:
        sent: Tensor = checking.rendezvous(group, call, x, lambda parts: [_fresh(parts[src_index]) for _ in parts])
        return sent
    if not x.nbytes:
        return _fresh(x)
    return _start_broadcast(_fresh(x), src_index, group, call).wait()


def _start_broadcast(out: Tensor, src_index: int, group: Group, call: Call) -> Pending:
    """Fill ``out`` with that of one rank."""
    wire = out if out.dtype in MOVABLE else as_bytes(out)
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = src_index, 0, False
    work = started(group, call, group.pg.broadcast, [wire], options)
    if wire is out:
        return Pending(work, out)
    return Pending(work, wire, lambda filled: contiguous(filled.view(out.dtype).squeeze(-1)))


def barrier(group: Group) -> None:
    """Return when every rank of the group is here.  Not counted."""
    if group.size == 1:
        return
    call = Call("barrier")
    if group.pg is None:
        checking.rendezvous(group, call, None, lambda parts: parts)
    elif group.gloo:
        started(group, call, group.pg.barrier, BarrierOptions()).wait()
    else:  # elsewhere a barrier guesses the device
        t = torch.zeros(1, device=group.device)
        started(group, call, group.pg.allreduce, [t], REDUCE[True]["sum"]).wait()
        t.item()


def all_gather_object(obj: Any, group: Group, doing: str = "") -> list[Any]:
    """The picklable objects of all ranks, in the order of the group; for small metadata.  Not counted.

    A simulated rank gets the other ranks' objects themselves, not copies.

    Args:
        doing: what they do together, for errors.

    Raises:
        DesyncError: on every rank, if they ran different collectives before.
    """
    if group.size == 1:
        return [obj]
    if group.pg is not None:
        return checking.objects(obj, group, doing)
    return checking.simulated(obj, group, Call(doing or "all_gather_object"))


# -- what there is ---------------------------------------------------------------------------------------


def _scatter(way: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, op, dim, sizes, index, group: way(x, dim, sizes, op, group)


ALL_REDUCE = Kind("all_reduce", "str op", all_reduce, all_reduce_async, start_writes=True, passes=(2, 0))
ALL_GATHER = Kind(
    "all_gather", "int dim, int[] sizes", all_gather, all_gather_async,
    cuts=(Cut("dim", "sizes", "gathers", joins=True),), passes=(0, 1),
)  # fmt: skip
REDUCE_SCATTER = Kind(
    "reduce_scatter", "str op, int dim, int[] sizes, int index", _scatter(reduce_scatter),
    _scatter(reduce_scatter_async), cuts=(Cut("dim", "sizes", "scatters"),),
)  # fmt: skip
BROADCAST = Kind("broadcast", "int src_index", broadcast, whole=True)
KINDS: dict[str, Kind] = {}  # by name; filled by ``graph.add``
