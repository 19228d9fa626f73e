"""Collectives as operators of torch's own kind: what a captured program holds instead of calls.

Each operator names its group by axes and mesh, so that a program can be printed, saved and read elsewhere; run, it is
the plain collective of this package.  An :class:`Emitter` is the ``sim`` of a rank whose step is being recorded: where
a rank would meet the others it emits one operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from ..errors import CollectiveError
from ..mesh import Mesh, parse_mesh
from ..operators import operator
from ..ranks import runtime
from ..ranks.simulation import Call
from . import exchange, ops, quantized, rows
from .groups import Group, group
from .kinds import Kind

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


def group_size(axes: str, mesh: str) -> int:
    """How many ranks are in a group over the named axes."""
    on = mesh_of_text(mesh)
    return math.prod(on.axis_size(a) for a in axes.split(","))


# ---------------------------------------------------------------------------------------------- operators


def _operator_of(kind: Kind, way: Callable[..., Any], suffix: str = "", *, writes: bool = False) -> Any:
    """The operator of a kind: ``name(x, options, axes, mesh)``."""
    to = "Tensor(a!)" if writes else "Tensor"

    def run(x: Tensor, *rest: Any) -> Tensor:
        *options, axes, mesh = rest
        made: Tensor = way(x, *options, group_of(axes, mesh))
        return made

    def fake(x: Tensor, *rest: Any) -> Tensor:
        return x if writes else x.new_empty(kind.shape(x.shape, rest[:-2]))  # of its own memory, row-major

    schema = f"{kind.name}{suffix}({to} x, {kind.options}, str axes, str mesh) -> {to}"
    return operator(schema, run, fake)


def _at_once(start: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: start(*args).wait()


OPERATORS: dict[str, Any] = {}
COLLECTIVES: dict[Any, Kind] = {}
STARTS: dict[Any, Any] = {}


def add(kind: Kind) -> None:
    """Give a kind its operators: from then on programs hold it, and all that reads programs knows it."""
    ops.KINDS[kind.name] = kind
    OPERATORS[kind.name] = made = _operator_of(kind, kind.run)
    COLLECTIVES[made.default] = kind
    if kind.start is not None:
        # A collective under way: between the start and the wait nobody may touch what it works on.  A program runs them
        # on the asynchronous collectives, with what is under way in place of the tensor; called as operators, the
        # start does it all.
        started = _operator_of(kind, _at_once(kind.start), "_start", writes=kind.start_writes)
        COLLECTIVES[started.default] = kind
        STARTS[made.default] = started.default


for _kind in (
    ops.ALL_REDUCE, ops.ALL_GATHER, ops.REDUCE_SCATTER, ops.BROADCAST, exchange.ALL_TO_ALL, exchange.PERMUTE,
    exchange.EXCHANGE_ROWS, rows.GATHER_ROWS, rows.SCATTER_ROWS,
    quantized.WIRE_ALL_REDUCE, quantized.WIRE_REDUCE_SCATTER, quantized.WIRE_ALL_GATHER,
):  # fmt: skip
    add(_kind)


def _same(x: Tensor) -> Tensor:
    return x


def _keep_one(x: Tensor, keep: bool) -> Tensor:
    return x.clone() if keep else torch.zeros_like(x)


WAIT_OP: Any = operator("wait(Tensor(a!) started) -> Tensor(a!)", _same, _same).default
KEEP_ONE = operator("keep_one(Tensor x, bool keep) -> Tensor", _keep_one, lambda x, keep: torch.empty_like(x))


def bytes_of(target: Any, shape: Sequence[int], dtype: torch.dtype, options: Sequence[Any]) -> int:
    """Bytes that a collective of a program moves per rank: exactly what running it counts.

    Args:
        target: the operator.
        shape, dtype: of the local tensor that goes in.
        options: the operator's other arguments.
    """
    kind = COLLECTIVES[target]
    *own, axes, mesh = options
    n = group_size(axes, mesh)
    return kind.bytes(kind.sent(shape, dtype, own), kind.got(shape, dtype, own), n)


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

    def rendezvous(
        self,
        ranks: tuple[int, ...],
        call: Call,
        payload: Any,
        compute: Callable[[list[Any]], Sequence[Any]],
    ) -> Any:
        """Emit the operator of ``call``."""
        kind = ops.KINDS.get(call.kind)
        if kind is None:
            raise CollectiveError(
                f"{call.kind} cannot be part of a captured program: it moves Python objects, not tensors"
            )
        x, *tensors = payload if kind.tensors else (payload,)
        said = {**dict(call.args), "op": call.op, "index": ranks.index(self.rank)}
        said |= dict(zip(kind.tensors, tensors, strict=True))
        options = [list(o) if isinstance(o := said[n], tuple) else o for n in kind.names]
        return OPERATORS[kind.name](x, *options, self._axes(ranks), self.text)

    def _axes(self, ranks: tuple[int, ...]) -> str:
        if ranks not in self.axes:
            here = self.mesh.coordinate(self.rank)
            places = [self.mesh.coordinate(r) for r in ranks]
            moving = [a for a in range(self.mesh.ndim) if any(p[a] != here[a] for p in places)]
            assert math.prod(self.mesh.sizes[a] for a in moving) == len(ranks)
            self.axes[ranks] = ",".join(self.mesh.axes[a] for a in moving)
        return self.axes[ranks]


@contextmanager
def as_rank(mesh: Mesh, rank: int) -> Iterator[None]:
    """Inside, this is ``rank`` of the mesh, which emits collectives instead of meeting others."""
    outer = runtime.RT
    inner = runtime.Runtime(rank, mesh.size, Emitter(mesh, rank))
    inner.records, inner.strategies, inner.spared = [], outer.strategies, outer.spared
    inner.met = outer.met
    runtime.RT = inner
    try:
        yield
    finally:
        runtime.RT = outer


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
    "as_rank",
    "bytes_of",
    "group_of",
    "group_size",
    "keep_one",
    "mesh_of_text",
    "mesh_text",
    "recording",
]
