"""Collectives as operators of torch's own kind: what a captured program holds instead of calls.

Each operator names its group by axes and mesh, so that a program can be printed, saved and read elsewhere; run, it is
the plain collective of this package.  An :class:`Emitter` is the ``sim`` of a rank whose step is being recorded: where
a rank would meet the others it emits one operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from .. import runtime
from ..errors import CollectiveError
from ..mesh import Mesh, parse_mesh
from ..operators import operator
from ..simulation import Call
from . import ops
from .groups import Group, group
from .wire import resized, ring_bytes

Tensor = torch.Tensor


def mesh_text(mesh: Mesh) -> str:
    """A mesh as the argument of an operator: ``dp=2,tp=4@cpu``, with its ranks where they are not 0, 1, 2..."""
    text = ",".join(f"{a}={n}" for a, n in zip(mesh.axes, mesh.sizes, strict=True)) + f"@{mesh.device}"
    return text if mesh.ranks == tuple(range(mesh.size)) else text + "#" + ",".join(map(str, mesh.ranks))


@lru_cache(maxsize=256)
def mesh_of_text(text: str) -> Mesh:
    """The mesh that :func:`mesh_text` wrote."""
    shape, _, rest = text.partition("@")
    device, _, ranks = rest.partition("#")
    made = parse_mesh(shape, device=device)
    if not ranks:
        return made
    return Mesh(dict(zip(made.axes, made.sizes, strict=True)), device=device, ranks=[int(r) for r in ranks.split(",")])


def group_of(axes: str, mesh: str) -> Group:
    """This rank's group over the named axes (``"dp,tp"``)."""
    on = mesh_of_text(mesh)
    return group(on, tuple(on.axis_index(a) for a in axes.split(",")))


# ---------------------------------------------------------------------------------------------- operators


def _all_reduce(x: Tensor, op: str, axes: str, mesh: str) -> Tensor:
    return ops.all_reduce(x, op, group_of(axes, mesh))


def _all_gather(x: Tensor, dim: int, sizes: Sequence[int], axes: str, mesh: str) -> Tensor:
    return ops.all_gather(x, dim, tuple(sizes), group_of(axes, mesh))


def _reduce_scatter(x: Tensor, op: str, dim: int, sizes: Sequence[int], index: int, axes: str, mesh: str) -> Tensor:
    return ops.reduce_scatter(x, dim, tuple(sizes), op, group_of(axes, mesh))


def _all_to_all(
    x: Tensor,
    split_dim: int,
    give: Sequence[int],
    concat_dim: int,
    take: Sequence[int],
    index: int,
    axes: str,
    mesh: str,
) -> Tensor:
    return ops.all_to_all(x, split_dim, tuple(give), concat_dim, tuple(take), group_of(axes, mesh))


def _broadcast(x: Tensor, src_index: int, axes: str, mesh: str) -> Tensor:
    return ops.broadcast(x, src_index, group_of(axes, mesh))


def _all_reduce_start(x: Tensor, op: str, axes: str, mesh: str) -> Tensor:
    return ops.all_reduce(x, op, group_of(axes, mesh), out_of_place=False)


def _same(x: Tensor, *_: Any) -> Tensor:
    return x


def _keep_one(x: Tensor, keep: bool) -> Tensor:
    return x.clone() if keep else torch.zeros_like(x)


def _like(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


def _row_major(x: Tensor, *_: Any) -> Tensor:
    """What comes out of every collective of its own memory (see ``ops``)."""
    return x.new_empty(x.shape)


def _fake_all_gather(x: Tensor, dim: int, sizes: Sequence[int], axes: str, mesh: str) -> Tensor:
    return x.new_empty(resized(x.shape, dim, sum(sizes)))


def _fake_scatter(x: Tensor, op: str, dim: int, sizes: Sequence[int], index: int, axes: str, mesh: str) -> Tensor:
    return x.new_empty(resized(x.shape, dim, sizes[index]))


def _fake_exchange(
    x: Tensor,
    split_dim: int,
    give: Sequence[int],
    concat_dim: int,
    take: Sequence[int],
    index: int,
    axes: str,
    mesh: str,
) -> Tensor:
    return x.new_empty(resized(resized(x.shape, split_dim, give[index]), concat_dim, sum(take)))


ALL_REDUCE = operator("all_reduce(Tensor x, str op, str axes, str mesh) -> Tensor", _all_reduce, _row_major)
ALL_GATHER = operator(
    "all_gather(Tensor x, int dim, int[] sizes, str axes, str mesh) -> Tensor", _all_gather, _fake_all_gather
)
REDUCE_SCATTER = operator(
    "reduce_scatter(Tensor x, str op, int dim, int[] sizes, int index, str axes, str mesh) -> Tensor",
    _reduce_scatter,
    _fake_scatter,
)
ALL_TO_ALL = operator(
    "all_to_all(Tensor x, int split_dim, int[] give, int concat_dim, int[] take, int index, str axes, str mesh)"
    " -> Tensor",
    _all_to_all,
    _fake_exchange,
)
BROADCAST = operator("broadcast(Tensor x, int src_index, str axes, str mesh) -> Tensor", _broadcast, _row_major)
# A collective under way: between the start and the wait nobody may touch what it works on.  A program runs them on the
# asynchronous collectives, with what is under way in place of the tensor; called as operators, the start does it all.
ALL_REDUCE_START = operator(
    "all_reduce_start(Tensor(a!) x, str op, str axes, str mesh) -> Tensor(a!)", _all_reduce_start, _same
)
REDUCE_SCATTER_START = operator(
    "reduce_scatter_start(Tensor x, str op, int dim, int[] sizes, int index, str axes, str mesh) -> Tensor",
    _reduce_scatter,
    _fake_scatter,
)
ALL_GATHER_START = operator(
    "all_gather_start(Tensor x, int dim, int[] sizes, str axes, str mesh) -> Tensor", _all_gather, _fake_all_gather
)
WAIT = operator("wait(Tensor(a!) started) -> Tensor(a!)", _same, _same)
KEEP_ONE = operator("keep_one(Tensor x, bool keep) -> Tensor", _keep_one, _like)

COLLECTIVES: dict[Any, str] = {
    ALL_REDUCE.default: "all_reduce",
    ALL_GATHER.default: "all_gather",
    REDUCE_SCATTER.default: "reduce_scatter",
    ALL_TO_ALL.default: "all_to_all",
    BROADCAST.default: "broadcast",
    ALL_REDUCE_START.default: "all_reduce",
    REDUCE_SCATTER_START.default: "reduce_scatter",
    ALL_GATHER_START.default: "all_gather",
}
STARTS: dict[Any, Any] = {
    ALL_REDUCE.default: ALL_REDUCE_START.default,
    REDUCE_SCATTER.default: REDUCE_SCATTER_START.default,
    ALL_GATHER.default: ALL_GATHER_START.default,
}
WAIT_OP: Any = WAIT.default


def bytes_of(target: Any, shape: Sequence[int], dtype: torch.dtype, options: Sequence[Any]) -> int:
    """Bytes that a collective of a program moves per rank: exactly what running it counts.

    Args:
        target: the operator.
        shape, dtype: of the local tensor that goes in.
        options: the operator's other arguments.
    """
    kind = COLLECTIVES[target]
    whole = resized(shape, options[0], sum(options[1])) if kind == "all_gather" else shape
    *_, axes, mesh = options
    on = mesh_of_text(mesh)
    n = math.prod(on.axis_size(a) for a in axes.split(","))
    return ring_bytes(kind, math.prod(whole) * dtype.itemsize, n)


# ---------------------------------------------------------------------------------------------- recording


class Emitter:
    """What a rank meets while its step is recorded: every collective becomes one operator.

    Args:
        mesh: the mesh of the program.
        rank: the rank whose program is recorded.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank, self.text = mesh, rank, mesh_text(mesh)
        self.axes: dict[tuple[int, ...], str] = {}

    def meet(
        self,
        ranks: tuple[int, ...],
        call: Call,
        payload: Any,
        compute: Callable[[list[Any]], Sequence[Any]],
    ) -> Any:
        """Emit the operator of ``call``."""
        args, index = dict(call.args), ranks.index(self.rank)
        where = (self._axes(ranks), self.text)
        if call.kind == "all_reduce":
            return ALL_REDUCE(payload, call.op, *where)
        if call.kind == "all_gather":
            return ALL_GATHER(payload, args["dim"], list(args["sizes"]), *where)
        if call.kind == "reduce_scatter":
            return REDUCE_SCATTER(payload, call.op, args["dim"], list(args["sizes"]), index, *where)
        if call.kind == "all_to_all":
            give, take = list(args["split_sizes"]), list(args["concat_sizes"])
            return ALL_TO_ALL(payload, args["split_dim"], give, args["concat_dim"], take, index, *where)
        if call.kind == "broadcast":
            return BROADCAST(payload, args["src_index"], *where)
        raise CollectiveError(f"{call.kind} cannot be part of a captured program: it moves Python objects, not tensors")

    def _axes(self, ranks: tuple[int, ...]) -> str:
        if ranks not in self.axes:
            here = self.mesh.coordinate(self.rank)
            places = [self.mesh.coordinate(r) for r in ranks]
            moving = [a for a in range(self.mesh.ndim) if any(p[a] != here[a] for p in places)]
            assert math.prod(self.mesh.sizes[a] for a in moving) == len(ranks)
            self.axes[ranks] = ",".join(self.mesh.axes[a] for a in moving)
        return self.axes[ranks]


def recording() -> bool:
    """Whether this rank's step is being recorded: then every rank must run the same ops, whatever its place."""
    return isinstance(runtime.RT.sim, Emitter)


def keep_one(t: Tensor, first: bool) -> Tensor:
    """``t`` on one rank and zeros on the others, as one operator with a constant that differs."""
    made: Tensor = KEEP_ONE(t, first)
    return made


__all__ = [
    "COLLECTIVES",
    "STARTS",
    "WAIT_OP",
    "Emitter",
    "bytes_of",
    "group_of",
    "keep_one",
    "mesh_of_text",
    "mesh_text",
    "recording",
]
