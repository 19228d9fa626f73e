"""Rows that go only where they are needed: an all-gather without the others, and a reduce-scatter without zeros.

Shapes are those of the whole collectives, so who needs what is a value, in a tensor that all ranks have alike.  In it
each rank counts how many rows go from one to another; nothing is asked of the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import CollectiveError
from ..ranks import runtime
from ..ranks.simulation import Call
from . import checking, ops
from .groups import Group
from .kinds import Cut, Kind
from .monitor import started
from .transport import EXCHANGE, MOVABLE, Sizes, as_bytes

UNREAD = 0.0  # what is in rows that a rank does not want


def gather_rows(t: Tensor, wanted: Tensor, sizes: Sizes, group: Group) -> Tensor:
    """The rows of all ranks, one part below the other, that this rank wants; zeros in the place of others.

    Args:
        t: the own rows, (sizes[index], ...).
        wanted: bool, (n, sum(sizes)), the same on all ranks: which rows each rank wants.
        sizes: how many rows each rank has; may differ and may be 0.

    Returns:
        (sum(sizes), ...).

    Raises:
        CollectiveError: shapes that do not fit.
        DesyncError: the ranks disagree (simulated ranks only).
    """
    me = group.index
    x = _checked("gather_rows", t, wanted, sizes, group, sizes[me])
    call = ops._call(group, "gather_rows", "", x, (("dim", 0), ("sizes", tuple(sizes))), (0,))
    whole = (sum(sizes), *x.shape[1:])
    if group.pg is None or not group.plain:

        def gathered(parts: list[Tensor]) -> list[Tensor]:
            rows = torch.cat(parts)
            return [_put(rows.new_full(whole, UNREAD), mask.nonzero()[:, 0], rows[mask]) for mask in wanted]

        return _together(GATHER_ROWS, group, call, (x, wanted), sizes, sizes, gathered)
    _count(GATHER_ROWS, group, x, wanted[me], sizes)
    made = x.new_full(whole, UNREAD)
    if not made.nbytes:
        return made
    own = wanted.split(list(sizes), 1)[me]
    give = own.clone()
    give[me] = False
    take = _others(wanted[me], sizes, me)
    arrived = _exchanged(x, give.nonzero()[:, 1], give.sum(1), _by_rank(take, sizes), group, call)
    at = own[me].nonzero()[:, 0]
    _put(made, at + sum(sizes[:me]), x[at])
    return _put(made, take.nonzero()[:, 0], arrived)


def scatter_rows(t: Tensor, wanted: Tensor, sizes: Sizes, group: Group) -> Tensor:
    """This rank's part of the sum of the rows of all ranks, of each rank the ones that it wanted.

    Args:
        t: (sum(sizes), ...), of which the other rows are not read.
        wanted, sizes: as for :func:`gather_rows`, of which this is the transpose.

    Returns:
        (sizes[index], ...), added up in the order of the ranks, in float32 at least.

    Raises:
        CollectiveError, DesyncError: as for :func:`gather_rows`.
    """
    me, n = group.index, group.size
    x = _checked("scatter_rows", t, wanted, sizes, group, sum(sizes))
    call = ops._call(group, "scatter_rows", "", x, (("dim", 0), ("sizes", tuple(sizes))))
    if group.pg is None or not group.plain:

        def scattered(parts: list[Tensor]) -> list[Tensor]:
            total = torch.zeros_like(x, dtype=_wide(x))
            for rows, mask in zip(parts, wanted, strict=True):
                total.index_add_(0, mask.nonzero()[:, 0], rows[mask].to(total.dtype))
            return [part.to(x.dtype, copy=True) for part in total.split(list(sizes))]

        return _together(SCATTER_ROWS, group, call, (x, wanted), sizes, [len(x)] * n, scattered)
    _count(SCATTER_ROWS, group, x, wanted[me], sizes)
    total = x.new_zeros((sizes[me], *x.shape[1:]), dtype=_wide(x))
    if not x.nbytes:
        return total.to(x.dtype)
    own = wanted.split(list(sizes), 1)[me]
    give = _others(wanted[me], sizes, me)
    come = own.clone()
    come[me] = False
    counts = come.sum(1)
    arrived = _exchanged(x, give.nonzero()[:, 0], _by_rank(give, sizes), counts, group, call)
    parts = list(arrived.split(counts.tolist()))
    at = [mask.nonzero()[:, 0] for mask in own]
    parts[me] = x[at[me] + sum(sizes[:me])]
    for i in range(n):
        total.index_add_(0, at[i], parts[i].to(total.dtype))
    return total.to(x.dtype)


def _together(
    kind: Kind, group: Group, call: Call, payload: tuple[Tensor, Tensor], sizes: Sizes, lengths: Sizes,
    compute: Callable[[list[Tensor]], list[Tensor]],
) -> Tensor:  # fmt: skip
    """What a rank gets where one computes for all, or (a Python group) each for itself; rows of ``lengths`` come in."""
    if group.pg is None:
        made: Tensor = checking.rendezvous(group, call, payload, lambda parts: compute([x for x, _ in parts]))
        if not getattr(runtime.RT.sim, "meets", False):
            return made  # recorded: how many rows there are is not known
    else:
        whole = ops._gather_now(payload[0], 0, lengths, group, call)
        made = compute(list(whole.split(list(lengths))))[group.index]
    _count(kind, group, payload[0], payload[1][group.index], sizes)
    return made


def _checked(name: str, t: Tensor, wanted: Tensor, sizes: Sizes, group: Group, rows: int) -> Tensor:
    if len(sizes) != group.size or t.ndim < 1 or len(t) != rows or wanted.shape != (group.size, sum(sizes)):
        raise CollectiveError(
            f"{name}: {list(t.shape)}, wanted {list(wanted.shape)} and sizes {list(sizes)} do not fit a group of "
            f"{group.size} ranks; {rows} rows and wanted ({group.size}, {sum(sizes)}) were expected"
        )
    return t.detach() if t.requires_grad else t


def _others(mask: Tensor, sizes: Sizes, me: int) -> Tensor:
    """The mask without the own rows."""
    made, start = mask.clone(), sum(sizes[:me])
    made[start : start + sizes[me]] = False
    return made


def _by_rank(mask: Tensor, sizes: Sizes) -> Tensor:
    """How many rows of each rank are in it."""
    return torch.stack([part.sum() for part in mask.split(list(sizes))])


def _put(made: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    return made.index_copy_(0, at, rows)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype


def _count(kind: Kind, group: Group, x: Tensor, mask: Tensor, sizes: Sizes) -> None:
    """Bytes of the rows that others send this rank, or that it sends them."""
    each = x.element_size() * (x.shape[1:].numel())
    runtime.RT.counts.add(kind.name, group.axes, int(_others(mask, sizes, group.index).sum()) * each)


def _exchanged(x: Tensor, at: Tensor, give: Tensor, take: Tensor, group: Group, call: Call) -> Tensor:
    """The rows at these places go out, ``give`` to each rank, and ``take`` come in from each."""
    packed = x.index_select(0, at)
    wire = packed if x.dtype in MOVABLE else as_bytes(packed)
    each = wire.shape[1:].numel()
    counts = torch.stack([give, take]).tolist()  # one read
    going, coming = ([each * n for n in of] for of in counts)
    out = wire.new_empty(sum(coming))
    started(group, call, group.pg.alltoall_base, out, wire.reshape(-1), coming, going, EXCHANGE[True]).wait()
    out = out.view(-1, *wire.shape[1:])
    return out if wire is packed else out.view(x.dtype).squeeze(-1)


def _gathered(x: Tensor, wanted: Tensor, dim: int, sizes: Sizes, index: int, group: Group) -> Tensor:
    return gather_rows(x, wanted, sizes, group)


def _scattered(x: Tensor, wanted: Tensor, dim: int, sizes: Sizes, index: int, group: Group) -> Tensor:
    return scatter_rows(x, wanted, sizes, group)


_OPTIONS = "Tensor wanted, int dim, int[] sizes, int index"
GATHER_ROWS = Kind(
    "gather_rows", _OPTIONS, _gathered, cuts=(Cut("dim", "sizes", "gathers", joins=True),), passes=(0, 1)
)
SCATTER_ROWS = Kind("scatter_rows", _OPTIONS, _scattered, cuts=(Cut("dim", "sizes", "scatters"),))
