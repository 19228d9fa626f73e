"""Sums over ranks, and gathers, on a wire: parts travel in the wire's format; what is summed is added where it arrives.

A backend would add in the format that it sends: 8 bits are too few for that.  Here each rank gets its piece of what
every rank brings, decodes all of them and adds them up in float32, in the order of the ranks.  An all-reduce sends the
sums on, encoded again, and every rank decodes the same bytes, those of its own piece too: results are the same bits on
all ranks, whichever rank owns which piece, so they do not hang on what shares a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..errors import CollectiveError
from ..layout import Wire, block_of, wire_bytes, wire_from, wire_name
from ..ranks.simulation import Call
from . import checking, ops
from .codec import added, decode, encode, units, wide
from .groups import Group
from .kinds import Cut, Kind
from .monitor import started
from .transport import EXCHANGE, MOVABLE, Pending, Sizes, check_sizes, checked_dim, contiguous, even, resized

Tensor = torch.Tensor


class Staged(Pending):
    """Two collectives, of which the second needs what the first brings; ``advance`` starts the second."""

    __slots__ = ("_begin",)

    def __init__(self, first: Pending, begin: Callable[[Tensor], Pending]) -> None:
        super().__init__(None, first)
        self._begin: Callable[[Tensor], Pending] | None = begin

    @property
    def staged(self) -> bool:
        """It is several collectives."""
        return True

    def advance(self) -> None:
        """Wait for the first collective and start the second; all ranks must do so in one order."""
        begin, self._begin = self._begin, None
        if begin is not None:
            self._result = begin(self._result.wait())

    def done(self) -> bool:
        """Whether nothing is waited for any more."""
        return self._begin is None and super().done()

    def wait(self) -> Tensor:
        """Block until the result is there and return it."""
        self.advance()
        made: Tensor = self._result.wait()
        return made


def wire_all_reduce(t: Tensor, op: str, wire: str, group: Group) -> Tensor:
    """The sum of ``t`` (same shape on all ranks) over the group, on every rank, as a new tensor.

    Args:
        op: ``sum``.
        wire: the name of the format in which contributions, and then sums, travel.

    Raises:
        CollectiveError: another reduction, or a dtype that is not of floating point.
        DesyncError: the ranks disagree (simulated ranks only).
    """
    return t if group.size == 1 else _start_all_reduce(t, op, wire_from(wire), group, True).wait()


def wire_all_reduce_async(t: Tensor, op: str, wire: str, group: Group) -> Pending:
    """As ``wire_all_reduce`` in place on ``t``, without waiting."""
    return Pending(None, t) if group.size == 1 else _start_all_reduce(t, op, wire_from(wire), group, False)


def _start_all_reduce(t: Tensor, op: str, wire: Wire, group: Group, fresh: bool) -> Pending:
    x, n, count = _checked(t, op, "wire_all_reduce"), group.size, t.numel()
    ops._count(WIRE_ALL_REDUCE, group, wire_bytes(wire, count), 0)
    call = ops._call(group, "wire_all_reduce", op, x, (("wire", wire_name(wire)),))
    dtype = wide(x.dtype)

    def put(values: Tensor) -> Tensor:
        made = values.view(x.shape).to(x.dtype)
        return made if fresh else ops._into(t, made)

    if group.pg is None:

        def compute(parts: list[Tensor]) -> list[Tensor]:
            total = added([encode(p.reshape(-1), wire) for p in parts], count, wire, dtype)
            return ops._copies(decode(encode(total, wire), count, wire, dtype).view(x.shape).to(x.dtype), n)

        return checking.met(
            group, call, x, compute, (lambda out: out) if fresh else (lambda out: ops._into(t, out)),
            sync=fresh, writes=None if fresh else t,
        )  # fmt: skip
    if not count:
        return Pending(None, x.clone() if fresh else t)
    pieces = _pieces(count, block_of(wire), n)
    lengths = [units(wire, m) for m in pieces]
    own = pieces[group.index]

    def begin(sent: Tensor) -> Pending:
        total = added(sent.view(n, -1).unbind(0), own, wire, dtype)
        again = _gathered(encode(total, wire), lengths, group, call)
        return Pending(None, again, lambda p: put(decode(p.wait(), count, wire, dtype)))

    return Staged(_exchanged(encode(x.reshape(-1), wire), lengths, group, call), begin)


def wire_reduce_scatter(t: Tensor, op: str, dim: int, sizes: Sizes, wire: str, group: Group) -> Tensor:
    """This rank's part, along ``dim``, of the sum of ``t`` over the group.

    Args:
        t: same shape on all ranks; its length along ``dim`` is ``sum(sizes)``.
        op: ``sum``.
        sizes: length of each rank's part; may differ and may be 0.
        wire: the name of the format in which contributions travel, each part encoded by itself.

    Raises:
        CollectiveError: ``sizes`` does not fit, another reduction, or a dtype that is not of floating point.
        DesyncError: the ranks disagree (simulated ranks only).
    """
    return wire_reduce_scatter_async(t, op, dim, sizes, wire, group).wait()


def wire_reduce_scatter_async(t: Tensor, op: str, dim: int, sizes: Sizes, wire: str, group: Group) -> Pending:
    """As ``wire_reduce_scatter``, without waiting: ``t`` must not change until then."""
    dim = checked_dim(t, dim, "wire_reduce_scatter")
    check_sizes("wire_reduce_scatter", "sizes", sizes, group, sum(sizes), t.shape[dim])
    if group.size == 1:
        return Pending(None, t)
    x, how = _checked(t, op, "wire_reduce_scatter"), wire_from(wire)
    shapes = [resized(x.shape, dim, size) for size in sizes]
    counts = [math.prod(shape) for shape in shapes]
    ops._count(WIRE_REDUCE_SCATTER, group, sum(wire_bytes(how, m) for m in counts), 0)
    call = ops._call(group, "wire_reduce_scatter", op, x, (("dim", dim), ("sizes", tuple(sizes)), ("wire", wire)))
    dtype, own = wide(x.dtype), group.index

    def encoded(whole: Tensor) -> list[Tensor]:
        return [encode(part.reshape(-1), how) for part in whole.split(list(sizes), dim)]

    def total(sent: list[Tensor], to: int) -> Tensor:
        return added(sent, counts[to], how, dtype).view(shapes[to]).to(x.dtype)

    if group.pg is None:

        def compute(parts: list[Tensor]) -> list[Tensor]:
            rows = [encoded(part) for part in parts]
            return [total([row[to] for row in rows], to) for to in range(group.size)]

        return checking.met(group, call, x, compute, lambda out: out, sync=False)
    if not x.numel():
        return Pending(None, x.new_empty(shapes[own]))
    if dim == 0 and counts[0] % block_of(how) == 0 and even(sizes):
        payload = encode(x.reshape(-1), how)
    else:
        payload = torch.cat(encoded(x))
    lengths = [units(how, m) for m in counts]
    exchange = _exchanged(payload, lengths, group, call)
    return Pending(None, exchange, lambda p: total(list(p.wait().view(group.size, lengths[own]).unbind(0)), own))


def wire_all_gather(t: Tensor, dim: int, sizes: Sizes, wire: str, group: Group) -> Tensor:
    """The parts of all ranks as they arrive, the own one too, concatenated along ``dim``.

    Args:
        t: own part; its shape equals that of the others but for ``dim``.
        sizes: length of each rank's part along ``dim``; may differ and may be 0.
        wire: the name of the format in which parts travel, each encoded by itself.

    Raises:
        CollectiveError: ``sizes`` does not fit the group or ``t``, or a dtype that is not of floating point.
        DesyncError: the ranks disagree (simulated ranks only).
    """
    return wire_all_gather_async(t, dim, sizes, wire, group).wait()


def wire_all_gather_async(t: Tensor, dim: int, sizes: Sizes, wire: str, group: Group) -> Pending:
    """As ``wire_all_gather``, without waiting: ``t`` may change."""
    dim, n = checked_dim(t, dim, "wire_all_gather"), group.size
    check_sizes("wire_all_gather", "sizes", sizes, group, sizes[min(group.index, len(sizes) - 1)], t.shape[dim])
    if n == 1:
        return Pending(None, t)
    x, how = _checked(t, "sum", "wire_all_gather"), wire_from(wire)
    shapes = [resized(x.shape, dim, size) for size in sizes]
    full, counts = resized(x.shape, dim, sum(sizes)), [math.prod(shape) for shape in shapes]
    ops._count(WIRE_ALL_GATHER, group, 0, sum(wire_bytes(how, m) for m in counts))
    call = ops._call(group, "wire_all_gather", "", x, (("dim", dim), ("sizes", tuple(sizes)), ("wire", wire)), (dim,))
    lengths = [units(how, m) for m in counts]
    whole_blocks = dim == 0 and all(m % block_of(how) == 0 for m in counts)

    def joined(sent: Tensor) -> Tensor:
        if whole_blocks:
            return decode(sent, sum(counts), how, x.dtype).view(full)
        each = zip(sent.split(lengths), counts, shapes, strict=True)
        return contiguous(torch.cat([decode(part, m, how, x.dtype).view(shape) for part, m, shape in each], dim))

    if group.pg is None:

        def compute(parts: list[Tensor]) -> list[Tensor]:
            return ops._copies(joined(torch.cat([encode(p.reshape(-1), how) for p in parts])), n)

        return checking.met(group, call, x, compute, lambda out: out, sync=False)
    if not sum(counts):
        return Pending(None, x.new_empty(full))
    sent = _gathered(encode(x.reshape(-1), how), lengths, group, call)
    return Pending(None, sent, lambda p: joined(p.wait()))


def travelled(t: Tensor, wire: Wire) -> Tensor:
    """What others get of a part that is sent to them."""
    return decode(encode(t.reshape(-1), wire), t.numel(), wire, t.dtype).view(t.shape)


def _checked(t: Tensor, op: str, kind: str) -> Tensor:
    if op != "sum":
        raise CollectiveError(f"{kind}: {op!r}; only a sum is made on a wire")
    if not t.is_floating_point():
        raise CollectiveError(f"{kind}: {t.dtype} does not travel on a wire, floating-point values do")
    return t.detach() if t.requires_grad else t


def _pieces(count: int, block: int, n: int) -> list[int]:
    """Elements that each rank adds up: whole blocks, as far as they go."""
    each = math.ceil(math.ceil(count / block) / n) * block
    return [min(each, max(0, count - i * each)) for i in range(n)]


def _exchanged(payload: Tensor, lengths: list[int], group: Group, call: Call) -> Pending:
    """Start it: what all ranks have for this one, one after the other."""
    own = lengths[group.index]
    raw = payload if payload.dtype in MOVABLE else payload.view(torch.uint8)
    if not group.plain:  # a Python group: gather everything, keep the own part
        work, out, finish = ops._gather_parts(raw, 0, [raw.numel()] * group.size, group, True, call)
        start = sum(lengths[: group.index])
        return Pending(
            work, out, lambda o: finish(o).view(group.size, -1)[:, start : start + own].contiguous().view(-1)
        )
    out = raw.new_empty(group.size * own)
    incoming = [own] * group.size
    return Pending(started(group, call, group.pg.alltoall_base, out, raw, incoming, lengths, EXCHANGE[False]), out)


def _gathered(own: Tensor, lengths: list[int], group: Group, call: Call) -> Pending:
    return Pending(*ops._gather_parts(own, 0, lengths, group, False, call))


def sum_async(t: Tensor, group: Group, wire: Wire | None) -> Pending:
    """Start the sum of a gradient over ranks, in place."""
    if wire is None:
        return ops.all_reduce_async(t, "sum", group)
    return wire_all_reduce_async(t, "sum", wire_name(wire), group)


def scatter_sum_async(t: Tensor, sizes: Sizes, group: Group, wire: Wire | None) -> Pending:
    """Start the sum of flat gradients over ranks, of which each rank gets a part."""
    if wire is None:
        return ops.reduce_scatter_async(t, 0, sizes, "sum", group)
    return wire_reduce_scatter_async(t, "sum", 0, sizes, wire_name(wire), group)


def gather_async(t: Tensor, sizes: Sizes, group: Group, wire: Wire | None) -> Pending:
    """Start to gather flat parts of parameters."""
    if wire is None:
        return ops.all_gather_async(t, 0, sizes, group)
    return wire_all_gather_async(t, 0, sizes, wire_name(wire), group)


def _scatter(way: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, op, dim, sizes, index, wire, group: way(x, op, dim, sizes, wire, group)


WIRE_ALL_REDUCE = Kind(
    "wire_all_reduce", "str op, str wire", wire_all_reduce, wire_all_reduce_async, start_writes=True, passes=(2, 0)
)
WIRE_REDUCE_SCATTER = Kind(
    "wire_reduce_scatter", "str op, int dim, int[] sizes, int index, str wire", _scatter(wire_reduce_scatter),
    _scatter(wire_reduce_scatter_async), cuts=(Cut("dim", "sizes", "scatters"),),
)  # fmt: skip
WIRE_ALL_GATHER = Kind(
    "wire_all_gather", "int dim, int[] sizes, str wire", wire_all_gather, wire_all_gather_async,
    cuts=(Cut("dim", "sizes", "gathers", joins=True),), passes=(0, 1),
)  # fmt: skip
