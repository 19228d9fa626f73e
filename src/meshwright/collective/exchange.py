"""Collectives in which each rank sends its own to each other: all-to-all, rows in any amounts, whole tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CollectiveError
from ..ranks.simulation import Call
from . import checking, ops
from .groups import Group
from .kinds import Cut, Kind
from .monitor import started
from .transport import EXCHANGE, MOVABLE, Sizes, as_bytes, check_sizes, checked_dim, contiguous, numel, resized


def all_to_all(
    t: Tensor, split_dim: int, split_sizes: Sizes, concat_dim: int, concat_sizes: Sizes, group: Group
) -> Tensor:
    """Part j of ``t`` along ``split_dim`` goes to rank j; what comes in is concatenated along ``concat_dim``.

    Args:
        t: length ``sum(split_sizes)`` along ``split_dim``, and ``concat_sizes[index]`` along ``concat_dim``.
        split_sizes: length of the part for each rank; may differ and may be 0.
        concat_sizes: length along ``concat_dim`` of what each rank sends.

    Returns:
        Length ``split_sizes[index]`` along ``split_dim`` and ``sum(concat_sizes)`` along ``concat_dim``.

    Raises:
        CollectiveError: the sizes do not fit, or both dims are the same.
        DesyncError: the ranks disagree (simulated ranks only).
    """
    n, me = group.size, group.index
    split_dim = checked_dim(t, split_dim, "all_to_all")
    concat_dim = checked_dim(t, concat_dim, "all_to_all")
    if split_dim == concat_dim:
        raise CollectiveError(f"all_to_all: split and concatenation are both along dim {split_dim}")
    check_sizes("all_to_all", "split_sizes", split_sizes, group, sum(split_sizes), t.shape[split_dim])
    own = concat_sizes[min(me, len(concat_sizes) - 1)]
    check_sizes("all_to_all", "concat_sizes", concat_sizes, group, own, t.shape[concat_dim])
    if n == 1:
        return t
    x = t.detach() if t.requires_grad else t
    ops._count(ALL_TO_ALL, group, x.nbytes, 0)
    args = (
        ("split_dim", split_dim),
        ("split_sizes", tuple(split_sizes)),
        ("concat_dim", concat_dim),
        ("concat_sizes", tuple(concat_sizes)),
    )
    call = ops._call(group, "all_to_all", "", x, args, (concat_dim,))
    if group.pg is None:

        def exchange(parts: list[Tensor]) -> list[Tensor]:
            pieces = [p.split(list(split_sizes), split_dim) for p in parts]
            return [contiguous(torch.cat([row[j] for row in pieces], concat_dim)) for j in range(n)]

        received: Tensor = checking.rendezvous(group, call, x, exchange)
        return received
    if not numel(x.shape, concat_dim, sum(concat_sizes)):
        shape = resized(x.shape, split_dim, split_sizes[me])
        return x.new_empty(resized(shape, concat_dim, sum(concat_sizes)))
    if x.dtype in MOVABLE:
        return _exchange(x, split_dim, split_sizes, concat_dim, concat_sizes, group, call)
    raw = _exchange(as_bytes(x), split_dim, split_sizes, concat_dim, concat_sizes, group, call)
    return contiguous(raw.view(x.dtype).squeeze(-1))


def _exchange(
    x: Tensor, split_dim: int, split_sizes: Sizes, concat_dim: int, concat_sizes: Sizes, group: Group, call: Call
) -> Tensor:
    if not group.plain:  # a Python group: gather everything, keep the own slice
        whole = ops._gather_now(x, concat_dim, concat_sizes, group, call)
        start = sum(split_sizes[: group.index])
        return contiguous(whole.narrow(split_dim, start, split_sizes[group.index]))
    return _sent(x, split_dim, split_sizes, concat_dim, concat_sizes, group, call)


def _sent(
    x: Tensor, split_dim: int, split_sizes: Sizes, concat_dim: int, concat_sizes: Sizes, group: Group, call: Call
) -> Tensor:
    """The parts sent, and what comes in along ``concat_dim``; its other dims are those of this rank's part."""
    shape = x.shape if split_dim == concat_dim else resized(x.shape, split_dim, split_sizes[group.index])
    if split_dim == 0:
        flat = x.contiguous().view(-1)
    else:
        flat = torch.cat([part.reshape(-1) for part in x.split(list(split_sizes), split_dim)])
    outgoing = [numel(x.shape, split_dim, s) for s in split_sizes]
    incoming = [numel(shape, concat_dim, s) for s in concat_sizes]
    out = x.new_empty(sum(incoming))
    started(group, call, group.pg.alltoall_base, out, flat, incoming, outgoing, EXCHANGE[True]).wait()
    if concat_dim == 0:
        return out.view(resized(shape, 0, sum(concat_sizes)))
    pieces = zip(out.split(incoming), concat_sizes, strict=True)
    return contiguous(torch.cat([p.view(resized(shape, concat_dim, s)) for p, s in pieces], concat_dim))


def permute(t: Tensor, targets: Sizes, group: Group) -> Tensor:
    """The tensor of the rank that sends to this one, as a new tensor.

    Args:
        t: same shape and dtype on all ranks.
        targets: to which position the rank at each position sends: each position once, maybe its own.

    Raises:
        CollectiveError: the targets are no permutation of the positions.
        DesyncError: the ranks disagree (simulated ranks only).
    """
    n, me = group.size, group.index
    if sorted(targets) != list(range(n)):
        raise CollectiveError(f"permute: targets={list(targets)} is no permutation of the {n} positions in the group")
    if n == 1:
        return t
    x = t.detach() if t.requires_grad else t
    ops._count(PERMUTE, group, x.nbytes if targets[me] != me else 0, 0)
    call = ops._call(group, "permute", "", x, (("targets", tuple(targets)),))
    source = list(targets).index(me)
    if group.pg is None:
        sources = [list(targets).index(i) for i in range(n)]
        sent: Tensor = checking.rendezvous(group, call, x, lambda parts: [ops._fresh(parts[i]) for i in sources])
        return sent
    if not x.nbytes:
        return ops._fresh(x)
    wire = x.contiguous() if x.dtype in MOVABLE else as_bytes(x)
    if group.plain:
        out = torch.empty_like(wire)
        give, take = ([wire.numel() if i == to else 0 for i in range(n)] for to in (targets[me], source))
        work = started(group, call, group.pg.alltoall_base, out.view(-1), wire.view(-1), take, give, EXCHANGE[True])
        work.wait()
    else:  # a Python group
        out = ops._fresh(ops._gather_now(wire.unsqueeze(0), 0, [1] * n, group, call)[source])
    return out if x.dtype in MOVABLE else contiguous(out.view(x.dtype).squeeze(-1))


def exchange_rows(t: Tensor, dim: int, table: Sizes, group: Group) -> Tensor:
    """What the ranks send to this one along a dim, in their order: other amounts for each pair of them.

    Args:
        t: what goes to each rank along ``dim``, in the order of the ranks.
        table: how much goes from the i-th to the j-th, at ``i * n + j``; nothing to a rank itself.

    Raises:
        CollectiveError: the table does not fit the group or the tensor.
        DesyncError: the ranks disagree (simulated ranks only).
    """
    n, me = group.size, group.index
    dim = checked_dim(t, dim, "exchange_rows")
    give, take = list(table[me * n : (me + 1) * n]), list(table[me::n])
    if len(table) != n * n or any(table[:: n + 1]):
        raise CollectiveError(f"exchange_rows: {list(table)} is no table of what {n} ranks send to each other")
    if sum(give) != t.shape[dim]:
        raise CollectiveError(f"exchange_rows: {give} along dim {dim} of a tensor of shape {list(t.shape)}")
    x = t.detach() if t.requires_grad else t
    shape = resized(x.shape, dim, sum(take))
    if not sum(table):  # on all ranks
        return x.new_empty(shape)
    ops._count(EXCHANGE_ROWS, group, x.nbytes, 0)
    call = ops._call(group, "exchange_rows", "", x, (("dim", dim), ("table", tuple(table))), (dim,))
    if group.pg is None:

        def exchange(parts: list[Tensor]) -> list[Tensor]:
            pieces = [p.split(list(table[i * n : (i + 1) * n]), dim) for i, p in enumerate(parts)]
            return [contiguous(torch.cat([row[j] for row in pieces], dim)) for j in range(n)]

        received: Tensor = checking.rendezvous(group, call, x, exchange)
        return received
    if not numel(x.shape, dim, 1):  # on all ranks of the group; a program has it on all of the mesh
        return x.new_empty(shape)
    wire = x if x.dtype in MOVABLE else as_bytes(x)
    if group.plain:
        made = _sent(wire, dim, give, dim, take, group, call)
    else:  # a Python group
        lengths = [sum(table[i * n : (i + 1) * n]) for i in range(n)]
        parts = ops._gather_now(wire, dim, lengths, group, call).split(lengths, dim)
        made = torch.cat([p.split(list(table[i * n : (i + 1) * n]), dim)[me] for i, p in enumerate(parts)], dim)
    return contiguous(made if x.dtype in MOVABLE else made.view(x.dtype).squeeze(-1))


def exchange_pieces(t: Tensor, give: Sizes, take: Sizes, group: Group) -> Tensor:
    """What the ranks send to this one, in their order; each rank knows no more than what itself sends and receives.

    Args:
        t: a vector: what goes to each rank, in the order of the ranks.
        give: how much goes to each of them; ``take``: how much comes from each.

    Raises:
        CollectiveError: the lengths do not fit.
        DesyncError: the ranks disagree (simulated ranks only).
    """
    n, me = group.size, group.index
    if sum(give) != t.shape[0] or len(give) != n or len(take) != n or give[me] or take[me]:
        raise CollectiveError(f"exchange_pieces: {list(give)} and {list(take)} of {t.shape[0]} elements, by {n} ranks")
    ops._count(EXCHANGE_ROWS, group, t.nbytes, 0)
    call = ops._call(group, "exchange_pieces", "", t, (), (0,))
    if group.pg is None:

        def exchange(parts: list[tuple[Tensor, Sizes]]) -> list[Tensor]:
            pieces = [x.split(list(sizes)) for x, sizes in parts]
            return [torch.cat([row[j] for row in pieces]) for j in range(n)]

        received: Tensor = checking.rendezvous(group, call, (t, tuple(give)), exchange)
        return received
    if group.plain:
        out = t.new_empty(sum(take))
        started(group, call, group.pg.alltoall_base, out, t, list(take), list(give), EXCHANGE[True]).wait()
        return out
    table = [length for lengths in ops.all_gather_object(list(give), group) for length in lengths]  # a Python group
    return exchange_rows(t, 0, table, group)


def _exchanged(x: Tensor, split: int, give: Sizes, concat: int, take: Sizes, index: int, group: Group) -> Tensor:
    return all_to_all(x, split, give, concat, take, group)


def _permuted(x: Tensor, targets: Sizes, index: int, group: Group) -> Tensor:
    return permute(x, targets, group)


def _rows_exchanged(x: Tensor, dim: int, table: Sizes, index: int, group: Group) -> Tensor:
    return exchange_rows(x, dim, table, group)


ALL_TO_ALL = Kind(
    "all_to_all", "int split_dim, int[] split_sizes, int concat_dim, int[] concat_sizes, int index", _exchanged,
    cuts=(Cut("split_dim", "split_sizes", "splits"), Cut("concat_dim", "concat_sizes", "joins", joins=True)),
)  # fmt: skip
EXCHANGE_ROWS = Kind(
    "exchange_rows", "int dim, int[] table, int index", _rows_exchanged,
    cuts=(Cut("dim", "table", "exchanged", table=True),), whole=True,
)  # fmt: skip
PERMUTE = Kind("permute", "int[] targets, int index", _permuted, whole=True)
