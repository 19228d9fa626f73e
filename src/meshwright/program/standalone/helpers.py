"""Functions that are copied into written files: collectives in plain ``torch.distributed``.

Each does what the collective of its name does in ``collective``, with the same bits. A file has those that its step
calls. Nothing here may need anything but torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

MESH: dict[str, int] = {}  # a written file has its own


def mesh_group(*axes: str) -> Any:
    """The process group of this rank along axes of the mesh. All ranks call it in the same order."""
    grid = torch.arange(math.prod(MESH.values())).view(*MESH.values())
    outer = [d for d, axis in enumerate(MESH) if axis not in axes]
    inner = [d for d, axis in enumerate(MESH) if axis in axes]
    mine, n = None, math.prod(grid.shape[d] for d in inner)
    for ranks in grid.permute(*outer, *inner).reshape(-1, n).tolist():
        group = dist.new_group(ranks)
        mine = group if dist.get_rank() in ranks else mine
    return mine


def by_rank(*values: Any) -> Any:
    """The value of this rank."""
    return values[dist.get_rank()]


def along(axis: str, *values: Any) -> Any:
    """The value of this rank's place along an axis of the mesh."""
    d = list(MESH).index(axis)
    return values[dist.get_rank() // math.prod(list(MESH.values())[d + 1 :]) % len(values)]


def wait(started: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Block until a started collective has ended; its result."""
    return started()


def strided(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """``x`` with these strides, copied where they mean other places in memory."""
    if x.stride() == tuple(strides):
        return x
    same = all(a == b or n == 1 for n, a, b in zip(x.shape, x.stride(), strides, strict=True))
    if same or not x.numel():
        return x.as_strided(x.shape, strides) if x.ndim in (4, 5) and x.numel() else x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def keep_one(x: torch.Tensor, keep: bool) -> torch.Tensor:
    """``x`` on one rank and zeros on the others, whose sum over the ranks is ``x``."""
    return x.clone() if keep else torch.zeros_like(x)


def row(shards: Sequence[torch.Tensor], offsets: Sequence[int], size: int) -> torch.Tensor:
    """One flat buffer that holds this rank's shards, each from its offset on."""
    out = shards[0].new_zeros(size)
    for shard, offset in zip(shards, offsets, strict=True):
        out[offset : offset + shard.numel()] = shard.reshape(-1)
    return out


def pack(flat: torch.Tensor, x: torch.Tensor, dim: int, n: int, offset: int) -> torch.Tensor:
    """Write ``x`` into a buffer of ``n`` rows: into each row, from ``offset`` on, the shard of one rank."""
    for own, shard in zip(
        flat.view(n, -1), x.split(-(-x.shape[dim] // n), dim), strict=False
    ):  # last rows may be empty
        own[offset : offset + shard.numel()] = shard.reshape(-1)
    return flat


def unpack(flat: torch.Tensor, shape: Sequence[int], dim: int, n: int, offset: int) -> torch.Tensor:
    """A tensor from a gathered buffer of ``n`` rows: each row has, from ``offset`` on, the shard of one rank."""
    x = flat.new_empty(list(shape))
    for own, shard in zip(flat.view(n, -1), x.split(-(-shape[dim] // n), dim), strict=False):  # last rows may be empty
        shard.copy_(own[offset : offset + shard.numel()].view(shard.shape))
    return x


def laid(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy of ``x`` with these strides."""
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def to_device(x: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on the device, from the CPU."""
    return x.to(device, non_blocking=True, copy=True)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU."""
    return x.to("cpu", copy=True)


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` with row-major strides, in dims of one element too."""
    expected = torch.empty(x.shape, device="meta").stride()
    return x if x.stride() == expected else x.clone(memory_format=torch.contiguous_format)


def start_all_reduce(x: torch.Tensor, op: str, group: Any) -> Callable[[], torch.Tensor]:
    """All-reduce ``x`` in place without waiting. Call the result to wait."""
    if dist.get_world_size(group) == 1:
        return lambda: x
    ops = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    buffer = x.contiguous()
    work = dist.all_reduce(buffer, ops[op], group=group, async_op=True)

    def finish() -> torch.Tensor:
        work.wait()
        if op == "avg":
            buffer.div_(dist.get_world_size(group))
        return x if buffer is x else x.copy_(buffer)

    return finish


def all_reduce(x: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    """The sum (or ``avg``, ``max``, ``min``) of ``x`` over the group, as a new tensor."""
    if dist.get_world_size(group) == 1:
        return x
    return start_all_reduce(x.clone(memory_format=torch.contiguous_format), op, group)()


def all_reduce_in_order(x: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    """As `all_reduce`, for a few bytes: gathered, and reduced in the order of the ranks."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    stacked = torch.stack(parts)
    return {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op].to(x.dtype)


def start_all_gather(x: torch.Tensor, dim: int, sizes: Sequence[int], group: Any) -> Callable[[], torch.Tensor]:
    """Concatenate the shards of all ranks along ``dim``; ``sizes`` are their lengths. Call the result to wait."""
    if len(sizes) == 1:
        return lambda: x
    shapes = [(*x.shape[:dim], n, *x.shape[dim + 1 :]) for n in sizes]
    longest = max(math.prod(shape) for shape in shapes)
    flat = x.new_empty(longest)
    flat[: x.numel()] = x.reshape(-1)  # shards of other lengths are padded
    parts = [torch.empty_like(flat) for _ in sizes]
    work = dist.all_gather(parts, flat, group=group, async_op=True) if longest else None

    def finish() -> torch.Tensor:
        if work is not None:
            work.wait()
        shards = [p[: math.prod(shape)].view(shape) for p, shape in zip(parts, shapes, strict=True)]
        return dense(torch.cat(shards, dim))

    return finish


def all_gather(x: torch.Tensor, dim: int, sizes: Sequence[int], group: Any) -> torch.Tensor:
    """The shards of all ranks, concatenated along ``dim``; ``sizes`` are their lengths."""
    return start_all_gather(x, dim, sizes, group)()


def start_reduce_scatter(
    x: torch.Tensor, op: str, dim: int, sizes: Sequence[int], group: Any
) -> Callable[[], torch.Tensor]:
    """This rank's shard, along ``dim``, of the sum of ``x`` over the group. Call the result to wait."""
    rank, n = dist.get_rank(group), len(sizes)
    if n == 1:
        return lambda: x
    if dist.get_backend(group) == "gloo":  # which has no reduce-scatter
        reduced = start_all_reduce(x.clone(memory_format=torch.contiguous_format), op, group)
        return lambda: dense(reduced().narrow(dim, sum(sizes[:rank]), sizes[rank]).clone())
    shapes = [(*x.shape[:dim], m, *x.shape[dim + 1 :]) for m in sizes]
    rows = x.new_zeros(n, max(math.prod(shape) for shape in shapes))
    for row, part in zip(rows, x.split(list(sizes), dim), strict=True):
        row[: part.numel()] = part.reshape(-1)
    out = torch.empty_like(rows[0])
    work = dist.reduce_scatter_tensor(out, rows.view(-1), group=group, async_op=True)

    def finish() -> torch.Tensor:
        work.wait()
        shard = out[: math.prod(shapes[rank])].view(shapes[rank])
        return shard.div_(n) if op == "avg" else shard

    return finish


def reduce_scatter(x: torch.Tensor, op: str, dim: int, sizes: Sequence[int], group: Any) -> torch.Tensor:
    """This rank's shard, along ``dim``, of the sum of ``x`` over the group; ``sizes`` are the shards' lengths."""
    return start_reduce_scatter(x, op, dim, sizes, group)()


def broadcast(x: torch.Tensor, source: int, group: Any) -> torch.Tensor:
    """The tensor of the rank at a position of the group, as a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.broadcast(out, dist.get_global_rank(group, source), group=group)
    return out


def exchange(
    x: torch.Tensor, split_dim: int, send: Sequence[int], join_dim: int, receive: Sequence[int], group: Any
) -> torch.Tensor:
    """Send shards of ``x`` along ``split_dim`` to the ranks; concatenate what they send along ``join_dim``."""
    rank, shape = dist.get_rank(group), list(x.shape)
    if split_dim != join_dim:
        shape[split_dim] = send[rank]
    shapes = [(*shape[:join_dim], n, *shape[join_dim + 1 :]) for n in receive]
    flat = torch.cat([part.reshape(-1) for part in x.split(list(send), split_dim)])
    going = [part.numel() for part in x.split(list(send), split_dim)]
    coming = [math.prod(s) for s in shapes]
    out = x.new_empty(sum(coming))
    dist.all_to_all_single(out, flat, coming, going, group=group)
    parts = [p.view(s) for p, s in zip(out.split(coming), shapes, strict=True)]
    return dense(torch.cat(parts, join_dim))


def exchange_rows(x: torch.Tensor, dim: int, table: Sequence[int], group: Any) -> torch.Tensor:
    """Send rows along ``dim``: ``table[i * n + j]`` of them go from rank i of the group to rank j."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    return exchange(x, dim, table[rank * n : (rank + 1) * n], dim, table[rank::n], group)


def permute_ranks(x: torch.Tensor, targets: Sequence[int], group: Any) -> torch.Tensor:
    """Send ``x`` to the rank at ``targets[own position]``; what is received."""
    rank, n = dist.get_rank(group), len(targets)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    going = [x.numel() if i == targets[rank] else 0 for i in range(n)]
    coming = [x.numel() if i == list(targets).index(rank) else 0 for i in range(n)]
    dist.all_to_all_single(out.view(-1), x.contiguous().view(-1), coming, going, group=group)
    return out


def send_rows(rows: torch.Tensor, going: torch.Tensor, coming: torch.Tensor, group: Any) -> torch.Tensor:
    """Send ``going[i]`` rows to rank i of the group, in order; the ``coming[i]`` rows of each rank i."""
    out = rows.new_empty((int(coming.sum()), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), coming.tolist(), going.tolist(), group=group)
    return out


def gather_rows(x: torch.Tensor, wanted: torch.Tensor, sizes: Sequence[int], group: Any) -> torch.Tensor:
    """The rows of all ranks that this rank wants, zeros in the place of others; ``wanted`` has a row for each rank."""
    rank, start = dist.get_rank(group), sum(sizes[: dist.get_rank(group)])
    own = wanted.split(list(sizes), 1)[rank]  # who wants the rows of this rank
    give, take = own.clone(), wanted[rank].clone()
    give[rank], take[start : start + sizes[rank]] = False, False
    coming = torch.stack([part.sum() for part in take.split(list(sizes))])
    out = x.new_zeros((sum(sizes), *x.shape[1:]))
    out[take] = send_rows(x[give.nonzero()[:, 1]], give.sum(1), coming, group)
    mine = own[rank].nonzero()[:, 0]
    out[mine + start] = x[mine]
    return out


def scatter_rows(x: torch.Tensor, wanted: torch.Tensor, sizes: Sequence[int], group: Any) -> torch.Tensor:
    """This rank's rows of the sum over all ranks, of each rank the rows that it wanted: added in order, in float32."""
    rank, start = dist.get_rank(group), sum(sizes[: dist.get_rank(group)])
    own = wanted.split(list(sizes), 1)[rank]
    come, give = own.clone(), wanted[rank].clone()
    come[rank], give[start : start + sizes[rank]] = False, False
    going = torch.stack([part.sum() for part in give.split(list(sizes))])
    arrived = list(send_rows(x[give], going, come.sum(1), group).split(come.sum(1).tolist()))
    arrived[rank] = x[own[rank].nonzero()[:, 0] + start]
    wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
    total = x.new_zeros((sizes[rank], *x.shape[1:]), dtype=wide)
    for mask, rows in zip(own, arrived, strict=True):
        total.index_add_(0, mask.nonzero()[:, 0], rows.to(wide))
    return total.to(x.dtype)


def cut_rows(batch: Any, n: int) -> list[Any]:
    """The micro-batches of a batch: its tensors, cut along their first dim."""
    if isinstance(batch, torch.Tensor):
        if batch.ndim and len(batch) % n:
            raise ValueError(f"a batch of {len(batch)} rows: this file computes {n} micro-batches of equal rows")
        return list(batch.tensor_split(n)) if batch.ndim else [batch] * n
    if isinstance(batch, dict):
        cut = {key: cut_rows(value, n) for key, value in batch.items()}
        return [{key: parts[i] for key, parts in cut.items()} for i in range(n)]
    if isinstance(batch, (list, tuple)):
        listed = [cut_rows(value, n) for value in batch]
        return [type(batch)(parts[i] for parts in listed) for i in range(n)]
    return [batch] * n


def send(x: torch.Tensor, rank: int, tag: int) -> tuple[Any, torch.Tensor]:
    """Start to send a tensor to a rank; the work, and the memory that must stay until it is done."""
    x = x.contiguous()
    return dist.isend(x, rank, tag=tag), x


def receive(shape: Sequence[int], dtype: torch.dtype, rank: int, tag: int) -> torch.Tensor:
    """A tensor from a rank."""
    x = torch.empty(shape, dtype=dtype)
    dist.recv(x, rank, tag=tag)
    return x
