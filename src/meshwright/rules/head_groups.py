"""Attention of a split sequence in groups of heads: what comes of other ranks at once stays under a bound of memory.

Keys and values of a few heads are gathered, or a few heads are brought together, attended, and left; then the next. The
backward brings them again and computes no product again, so a rank keeps its own part alone (the idea of UPipe,
arXiv 2602.21196).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch

from ..errors import DispatchError, ExplicitError
from ..layout import REPLICATE, Shard
from ..ranks import runtime
from .attention_blocks import QueryRows, attend, attend_backward, attend_forward, dense_grads, in_blocks
from .factor_notation import Arg, Local, RequestedStrategy
from .strategies import AllToAllSpec, Strategy

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor, "float | None", QueryRows], Tensor]


class GroupWay(Protocol):
    """How a group of heads comes and goes; each is linear, and has a gradient."""

    def there(self, given: Sequence[Tensor], phase: str = "forward") -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as they are attended."""

    def home(self, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Their gradients, to where these lie."""

    def back(self, made: Tensor) -> Tensor:
        """The result, to where the query lies."""

    def forth(self, made: Tensor) -> Tensor:
        """The transpose of that."""


@dataclass(frozen=True)
class KeysGathered:
    """Keys and values come to all ranks; queries stay."""

    ctx: Local
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    why: str

    def there(self, given: Sequence[Tensor], phase: str = "forward") -> tuple[Tensor, Tensor, Tensor]:
        """As :class:`GroupWay` has it."""
        query, key, value = given
        k, v = (self.ctx.comm.all_gather(t, self.axes, 2, self.sizes, self.why, phase) for t in (key, value))
        return query, k, v

    def home(self, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """As :class:`GroupWay` has it."""
        query, key, value = grads
        why = f"its gradient: {self.why}"
        k, v = (self.ctx.comm.reduce_scatter(t, self.axes, 2, self.sizes, why, "backward") for t in (key, value))
        return query, k, v

    def back(self, made: Tensor) -> Tensor:
        """As :class:`GroupWay` has it."""
        return made

    def forth(self, made: Tensor) -> Tensor:
        """As :class:`GroupWay` has it."""
        return made


@dataclass(frozen=True)
class HeadsSwapped:
    """Heads are split in place of the sequence."""

    ctx: Local
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    why: str
    rows: tuple[int, ...]  # of the query and of the result, which need not be as long as the keys

    def there(self, given: Sequence[Tensor], phase: str = "forward") -> tuple[Tensor, Tensor, Tensor]:
        """As :class:`GroupWay` has it."""
        q, k, v = (self._moved(t, of, True, phase) for t, of in zip(given, self._sizes(), strict=True))
        return q, k, v

    def home(self, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """As :class:`GroupWay` has it."""
        q, k, v = (self._moved(t, of, False, "backward") for t, of in zip(grads, self._sizes(), strict=True))
        return q, k, v

    def back(self, made: Tensor) -> Tensor:
        """As :class:`GroupWay` has it."""
        return self._moved(made, self.rows, False, "forward")

    def forth(self, made: Tensor) -> Tensor:
        """As :class:`GroupWay` has it."""
        return self._moved(made, self.rows, True, "backward")

    def _sizes(self) -> tuple[tuple[int, ...], ...]:
        return self.rows, self.sizes, self.sizes

    def _moved(self, x: Tensor, sizes: tuple[int, ...], there: bool, phase: str) -> Tensor:
        n = len(sizes)
        way = AllToAllSpec(1, (x.shape[1] // (n if there else 1),) * n, 2, sizes)
        way = way if there else way.back()
        why = self.why if phase == "forward" else f"its gradient: {self.why}"
        return cast(Tensor, self.ctx.comm.all_to_all(x, self.axes, way, why, phase))


# ---------------------------------------------------------------------------------------------- what is asked for


class Bounds(NamedTuple):
    """The axes over which groups of heads are brought, and how many bytes at once."""

    name: str  # of the strategy
    axes: tuple[int, ...]
    most: int


def sequence_axes(query: Arg, key: Arg, value: Arg) -> Iterator[tuple[int, tuple[Shard, ...]]]:
    """The axes, of more than one rank, that split the sequence of all three; and how each of them lies there."""
    specs = [s for s in (query.spec, key.spec, value.spec) if s is not None]
    cut = tuple(Shard(s.ndim - 2) for s in specs)
    for a, n in enumerate(specs[0].mesh.sizes if len(specs) == 3 else ()):
        if n > 1 and tuple(s.layout.placements[a] for s in specs) == cut:
            yield a, cut


def bounded(
    op: str, query: Arg, key: Arg, value: Arg, moved: dict[str, str], without: str = "", more: int = 0
) -> tuple[Bounds | None, list[tuple[int, Strategy]]]:
    """What the wishes with ``max_bytes`` ask for, and the strategies for it; axes that they name go out of ``moved``.

    Args:
        moved: the axes that are to split heads, to each what speaks against it.
        without: what the call has that keeps it from groups, or nothing.
        more: how many inputs it has beside these three, which stay whole.
    """
    requested_strategy = runtime.RT.strategies.get(op, {})
    wishes = {axis: RequestedStrategy.of(text) for axis, text in requested_strategy.items()}
    specs = [t.spec for t in (query, key, value)]
    if all(w.max_bytes is None for w in wishes.values()) or any(s is None or 0 in s.shape for s in specs):
        return None, []
    if key.shape[-2] == 1:  # one position, of which there is no part to keep
        return None, []
    mesh, found = specs[0].mesh, {}  # type: ignore[union-attr]
    for a, cut in sequence_axes(query, key, value):  # noqa: B007  (the same for each)
        axis = mesh.axes[a]
        found[a] = wishes.get(axis, RequestedStrategy(""))._replace(name="heads" if axis in moved else "gather")
    asked = {a: w for a, w in found.items() if w.max_bytes is not None}
    if not asked:
        return None, []
    names = ", ".join(mesh.axes[a] for a in found)
    wrong = next(filter(None, (moved.get(mesh.axes[a]) for a in asked)), "")
    if without:
        wrong = f"attention with {without} is not computed in groups of heads"
    elif len(set(found.values())) > 1:
        wrong = f"{names} split one sequence: give all of them the same strategy and the same max_bytes"
    elif any(list(axes) != sorted(axes) for s in specs for axes in s.layout.dim_axes().values()):  # type: ignore[union-attr]
        wrong = f"{names} split the sequence in another order than that of the mesh"
    wish = next(iter(asked.values()))
    if wrong:
        raise DispatchError(f"the strategy '{wish.name}' with max_bytes={wish.max_bytes}: {wrong}: leave out max_bytes")
    for a in asked:
        moved.pop(mesh.axes[a], None)
    assert wish.max_bytes is not None
    strategy = Strategy((*cut, *[REPLICATE] * more), cut[:1], "t")
    return Bounds(wish.name, tuple(asked), wish.max_bytes), [(a, strategy) for a in asked]


def in_groups(ctx: Local, bounds: Bounds | None) -> Attend | None:
    """What stands for :func:`.blocks.attend` where keys and values are parts; None where nothing is asked or needed."""
    axes = ctx.axes("s")
    if bounds is None or not axes:
        return None
    sizes = tuple(stop - start for start, stop in ctx.spans("s"))
    of_query, mesh = ctx.inputs[0], ctx.inputs[0].mesh
    n, origin = len(sizes), (0,) * mesh.ndim
    rows = tuple(of_query.local_shape(at)[-2] for at in ctx.group("s"))
    if bounds.name == "heads" and of_query.layout.dim_axes().get(of_query.ndim - 2, ()) != axes:
        of = of_query.layout.dim_axes().get(of_query.ndim - 2, ())
        own, of_keys = (", ".join(mesh.axes[a] for a in which) for which in (of, axes))
        raise DispatchError(
            f"the strategy 'heads' with max_bytes={bounds.most}: queries are split over {own or 'no axis'}, keys and "
            f"values over {of_keys}: split all three over the same axes, or leave out max_bytes"
        )
    # Of the rank that has most of all else, so that all take as many groups.
    q, k, v = (spec.local_shape(origin) for spec in ctx.inputs[:3])
    item, heads = ctx.inputs[0].dtype.itemsize, k[-3] if len(k) > 2 else 1
    if bounds.name == "gather":
        units, each = heads, math.prod(k[:-3]) * sum(sizes) * (k[-1] + v[-1]) * item
    else:
        per = sum(rows) * (q[-3] // heads if len(q) > 2 else 1) * (q[-1] + v[-1]) + sum(sizes) * (k[-1] + v[-1])
        units, each = heads // n, math.prod(k[:-3]) * per * item
    if bounds.most < each:
        raise DispatchError(
            f"max_bytes={bounds.most} is too small: one key head needs {each} bytes. Raise it or shard more dims."
        )
    count, unit = -(-units // (bounds.most // each)), 1 if bounds.name == "gather" else n
    what, most = "keys and values" if unit == 1 else "queries, keys, values and results", -(-units // count)
    why = f"{what} of {most * unit} heads of keys at once, in {count} groups: {most * each} bytes of {bounds.most}"
    way: GroupWay = KeysGathered(ctx, axes, sizes, why)
    if bounds.name == "heads":
        way = HeadsSwapped(ctx, axes, sizes, why, rows)
    return partial(_attend, way, (count, unit), ", ".join(mesh.axes[a] for a in axes))


# ---------------------------------------------------------------------------------------------- one call


def _attend(
    way: GroupWay, parts: tuple[int, int], names: str, query: Tensor, key: Tensor, value: Tensor, scale: float | None,
    which: QueryRows,
) -> Tensor:  # fmt: skip
    if runtime.RT.explicit:
        raise ExplicitError(
            f"attention would bring groups of heads over {names}. Inside mw.explicit() this must be asked for: "
            "mw.reshard(k, placements) before the call, and of v"
        )
    made: Tensor = _Groups.apply(query, key, value, which, scale, way, parts)
    return made


def _groups(query: Tensor, key: Tensor, parts: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    """Heads of the query and of the key, group by group."""
    (count, unit), serves = parts, query.shape[1] // max(key.shape[1], 1)
    units = key.shape[1] // unit
    for i in range(count):
        first, last = (unit * (j * units // count) for j in (i, i + 1))
        yield slice(first * serves, last * serves), slice(first, last)


class _Groups(torch.autograd.Function):
    """Keeps what it was given, the result, and of each row the log of its sum where the kernel gives it."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, which: QueryRows, scale: float | None, way: GroupWay,
        parts: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        made, sums = [], []
        ctx.fused = in_blocks(query, key, value)
        for of_query, of_key in _groups(query, key, parts):
            given = way.there((query[:, of_query], key[:, of_key], value[:, of_key]))
            if ctx.fused:
                own, own_sums = attend_forward(*given, which, scale)
                sums.append(own_sums)
            else:
                own = attend(*given, scale, which)
            made.append(way.back(own))
        whole = torch.cat(made, 1)
        ctx.save_for_backward(query, key, value, whole, which.rows, which.documents, *sums)
        ctx.said = which._replace(rows=None, documents=None), scale, way, parts
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, made, rows, documents, *sums = ctx.saved_tensors
        which, scale, way, parts = ctx.said
        which, given = which._replace(rows=rows, documents=documents), (query, key, value)
        if torch.is_grad_enabled():  # of ops that can be differentiated again, with all heads and scores at once
            q, k, v = way.there(given, "backward")
            of_given = dense_grads(way.forth(grad), q, k, v, which, scale)
            return *way.home(tuple(of_given)), None, None, None, None
        found = []
        for i, (of_query, of_key) in enumerate(_groups(query, key, parts)):
            own = (query[:, of_query], key[:, of_key], value[:, of_key])
            q, k, v = way.there(own, "backward")
            of_made = way.forth(grad[:, of_query])
            grads: Sequence[Tensor]
            if ctx.fused:
                result = way.forth(made[:, of_query])
                grads = attend_backward(of_made, q, k, v, result, sums[i], which, scale)
            else:
                q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
                with torch.enable_grad():
                    grads = torch.autograd.grad(attend(q, k, v, scale, which), (q, k, v), of_made)
            found.append(way.home(grads))
        return *(torch.cat(of, 1) for of in zip(*found, strict=True)), None, None, None, None


__all__ = ["Bounds", "bounded", "in_groups", "sequence_axes"]
