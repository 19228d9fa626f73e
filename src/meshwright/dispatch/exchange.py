"""Rows of a split dim that a local function brings from other ranks: differentiable, recorded as conversions are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from .. import collective
from ..errors import ExplicitError
from ..mesh import Mesh
from ..ranks import runtime
from ..rules.strategies import Spans
from .sending import Send, recorded, sent

Tensor = torch.Tensor


def fetch_rows(
    op: str, mesh: Mesh, x: Tensor, dim: int, axes: tuple[int, ...], held: Spans, wanted: Spans, why: str
) -> Tensor:
    """See :meth:`~meshwright.dispatch.local_comm.LocalComm.fetch_rows`."""
    group = collective.group(mesh, axes)
    table, give, take = _way(_frozen(held), _frozen(wanted), group.index)
    if sum(table) and runtime.RT.explicit:
        names = ", ".join(group.axes)
        raise ExplicitError(
            f"{op} would send rows over {names}, as {why}. Inside mw.explicit() this must be asked for: "
            "mw.reshard(x, placements) before the call"
        )
    if x.ndim == 1:  # torch.cat does not differentiate vectors of no elements twice
        return fetch_rows(op, mesh, x.unsqueeze(1), 0, axes, held, wanted, why).squeeze(1)
    own = [x.narrow(dim, start, length) for source, start, length in take if source == group.index]
    if sum(table):
        given = torch.cat([x.narrow(dim, start, length) for start, length in give] or [x.narrow(dim, 0, 0)], dim)
        n = group.size
        turned = tuple([table[j * n + i] for i in range(n) for j in range(n)])
        send = Send("exchange_rows", (dim, table), "exchange_rows", (dim, turned))
        back = _got(given, dim, table, group)
        said = recorded(op, send.kind, given, given.shape, group, why, send.bytes(given, group), back)
        got = sent(given, send, group, said)
    else:
        got = x.narrow(dim, 0, 0)
    left = iter(own)
    pieces = [next(left) if source == group.index else got.narrow(dim, start, length) for source, start, length in take]
    return torch.cat([*pieces, got.narrow(dim, 0, 0)], dim)  # whoever gets nothing is in the graph all the same


def _got(given: Tensor, dim: int, table: Sequence[int], group: collective.Group) -> float:
    row = math.prod(n for d, n in enumerate(given.shape) if d != dim) * given.element_size()
    return float(row * sum(table[group.index :: group.size]))


_Spans = tuple[tuple[tuple[int, int], ...], ...]


def _frozen(spans: Sequence[Sequence[tuple[int, int]]]) -> _Spans:
    return tuple([tuple([(a, b) for a, b in own]) for own in spans])


@lru_cache(maxsize=4096)
def _way(
    held: _Spans, wanted: _Spans, index: int
) -> tuple[tuple[int, ...], list[tuple[int, int]], list[tuple[int, int, int]]]:
    """How much who sends to whom; which rows of its own this rank sends; where the rows that it wants come from.

    The last: (rank, start, length), the start among this rank's own rows, or among all that it gets.
    """
    n = len(held)
    table, give, wants = [0] * (n * n), list[tuple[int, int]](), list[tuple[int, int, int]]()
    for q, spans in enumerate(wanted):
        for start, stop in spans:
            for _, p, at, length in sorted(_overlaps(held, start, stop)):
                if p != q:
                    table[p * n + q] += length
                    if p == index:
                        give.append((at, length))
                if q == index:
                    wants.append((p, at, length))
    first = [sum(table[p * n + index] for p in range(q)) for q in range(n)]
    take = []
    for p, at, length in wants:
        take.append((p, at if p == index else first[p], length))
        first[p] += length
    return tuple(table), give, take


def _overlaps(held: _Spans, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Of rows, who has them: (first row, rank, where in what that rank has, how many)."""
    for p, spans in enumerate(held):
        before = 0
        for a, b in spans:
            lo, hi = max(a, start), min(b, stop)
            if lo < hi:
                yield lo, p, before + lo - a, hi - lo
            before += b - a
