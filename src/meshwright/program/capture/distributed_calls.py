"""Calls of ``torch.distributed`` while a step is recorded: each becomes operators of this package.

``dist.all_reduce(t)`` reaches a dispatch mode as ``c10d.allreduce_``, with the process group and what to do as script
objects; the group's ranks say which axes of the mesh it spans.  What is written in place is written in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ...collective import ALL_GATHER, ALL_REDUCE, BROADCAST, OPERATORS, REDUCE_SCATTER, Kind, bytes_of, mesh_text
from ...compat import FakeWork
from ...errors import CaptureError
from ...mesh import Mesh
from ...ranks import runtime
from ...resharding import record

Tensor = torch.Tensor

_OPS = {0: "sum", 1: "avg", 2: "product", 3: "min", 4: "max"}


class DistCalls:
    """Emits what calls of ``torch.distributed`` do.

    Args:
        mesh, rank: whose step is recorded.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank, self.text = mesh, rank, mesh_text(mesh)

    def __call__(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Emit the operators of one call.

        Raises:
            CaptureError: a call that has no operator, or a group that no axes of the mesh span.
        """
        name = func._schema.name.removeprefix("c10d::")
        emit = _CALLS.get(name)
        if emit is None:
            raise CaptureError(
                f"torch.distributed's {name.strip('_')} cannot be part of a captured step: use all_reduce, broadcast, "
                "all_gather, all_gather_into_tensor, reduce_scatter or reduce_scatter_tensor"
            )
        with torch.no_grad():
            return emit(self, *args)

    # -- groups ---------------------------------------------------------------------------------------

    def ranks(self, boxed: Any) -> tuple[int, ...]:
        """The ranks of a process group."""
        return tuple(dist.get_process_group_ranks(ProcessGroup.unbox(boxed)))

    def axes(self, ranks: tuple[int, ...], ordered: bool = False) -> str:
        """The axes of the mesh that a group spans, as operators name them.

        Args:
            ordered: the order of the ranks matters.
        """
        for n in range(1, self.mesh.ndim + 1):
            for axes in itertools.combinations(range(self.mesh.ndim), n):
                along = self.mesh.group_ranks(self.rank, axes)
                if along == ranks or (not ordered and sorted(along) == sorted(ranks)):
                    return ",".join(self.mesh.axes[a] for a in axes)
        raise CaptureError(
            f"a collective over ranks {list(ranks)}: no axes of {self.mesh!r} are these ranks, seen from rank "
            f"{self.rank}; give capture_local a mesh whose axes are the process groups of the step"
        )

    def run(self, kind: Kind, x: Tensor, ranks: tuple[int, ...], *options: Any) -> Tensor:
        """One operator, with a record of why it is there."""
        operator = OPERATORS[kind.name].default
        axes = self.axes(ranks, ordered=kind is not ALL_REDUCE)
        runtime.RT.line, outer = None, runtime.RT.line
        moved = bytes_of(operator, x.shape, x.dtype, (*options, axes, self.text))
        made = record.Record(
            kind.name, 0, (kind.name,), tuple(axes.split(",")), tuple(x.shape), "local", "local", moved, 0.0,
            runtime.user_line(), "the step itself calls torch.distributed", asked=True,
        )  # fmt: skip
        runtime.RT.line = outer
        with runtime.serving(made):
            out: Tensor = operator(x, *options, axes, self.text)
        return out


def _op(boxed: Any) -> str:
    code = boxed.op()
    if code not in _OPS:
        raise CaptureError("this reduction cannot be part of a captured step: use SUM, AVG, MIN, MAX or PRODUCT")
    return _OPS[code]


def _work() -> Any:
    return FakeWork().boxed()


def _fill(out: Tensor, made: Tensor) -> None:
    out.detach().copy_(made.view(out.shape) if made.shape != out.shape else made)


def _all_reduce(calls: DistCalls, tensors: list[Tensor], group: Any, op: Any, *_: Any) -> Any:
    ranks = calls.ranks(group)
    for t in tensors if len(ranks) > 1 else ():
        _fill(t, calls.run(ALL_REDUCE, t.detach(), ranks, _op(op)))
    return tensors, _work()


def _all_reduce_coalesced(calls: DistCalls, tensors: list[Tensor], group: Any, op: Any, *_: Any) -> Any:
    return _all_reduce(calls, tensors, group, op)[1]


def _broadcast(calls: DistCalls, tensors: list[Tensor], group: Any, root: int, *_: Any) -> Any:
    ranks = calls.ranks(group)
    for t in tensors if len(ranks) > 1 else ():
        _fill(t, calls.run(BROADCAST, t.detach(), ranks, root))
    return tensors, _work()


def _gathered(calls: DistCalls, x: Tensor, group: Any) -> Tensor:
    ranks, x = calls.ranks(group), x.detach()
    x = x.view(1) if x.ndim == 0 else x
    return calls.run(ALL_GATHER, x, ranks, 0, [x.shape[0]] * len(ranks)) if len(ranks) > 1 else x


def _all_gather_base(calls: DistCalls, out: Tensor, x: Tensor, group: Any, *_: Any) -> Any:
    _fill(out, _gathered(calls, x, group))
    return out, _work()


def _all_gather(calls: DistCalls, outs: list[list[Tensor]], tensors: list[Tensor], group: Any, *_: Any) -> Any:
    for listed, x in zip(outs, tensors, strict=True):
        made = _gathered(calls, x, group)
        for out, piece in zip(listed, made.chunk(len(listed)), strict=True):
            _fill(out, piece)
    return outs, _work()


def _scattered(calls: DistCalls, x: Tensor, group: Any, op: Any) -> Tensor:
    ranks, x = calls.ranks(group), x.detach()
    n = len(ranks)
    if x.shape[0] % n:  # stacked, one part per rank
        raise CaptureError(f"reduce_scatter of {tuple(x.shape)} over {n} ranks: they do not divide dim 0")
    sizes = [x.shape[0] // n] * n
    index = ranks.index(calls.rank)
    return calls.run(REDUCE_SCATTER, x, ranks, _op(op), 0, sizes, index) if n > 1 else x


def _reduce_scatter_base(calls: DistCalls, out: Tensor, x: Tensor, group: Any, op: Any, *_: Any) -> Any:
    _fill(out, _scattered(calls, x, group, op))
    return out, _work()


def _reduce_scatter(
    calls: DistCalls, outs: list[Tensor], lists: list[list[Tensor]], group: Any, op: Any, *_: Any
) -> Any:
    for out, listed in zip(outs, lists, strict=True):
        _fill(out, _scattered(calls, torch.cat([x.reshape(1, *x.shape) for x in listed]), group, op))
    return outs, _work()


def _barrier(calls: DistCalls, *_: Any) -> Any:
    return _work()  # of no effect on values


_CALLS: dict[str, Callable[..., Any]] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce_coalesced,
    "broadcast_": _broadcast,
    "allgather_": _all_gather,
    "_allgather_base_": _all_gather_base,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "barrier": _barrier,
}

__all__ = ["DistCalls"]
