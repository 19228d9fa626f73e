"""Placements: what one mesh axis does to a tensor, how parts are cut, and which reductions there are."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..errors import LayoutError

REDUCE_OPS = ("sum", "avg", "max", "min", "product", "any", "all")


def unreducible(op: str, dtype: torch.dtype) -> str:
    """Why tensors of this dtype have no reduction ``op``; empty where they have."""
    if op in ("any", "all") and dtype is not torch.bool:
        return f"{op} reduces bool tensors, not {dtype}: compare first, e.g. x != 0"
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        return f"avg of {dtype} is not exact: convert to a floating dtype or reduce by sum"
    if dtype is torch.uint64 and op in ("max", "min"):
        return f"{op} of uint64 is not supported: convert to int64"
    if dtype.is_complex and op not in ("sum", "avg"):
        return f"{op} of {dtype} is not supported: complex tensors reduce by sum or avg"
    return ""


def neutral(op: str, dtype: torch.dtype) -> Any:
    """The value that changes nothing in a reduction: what a rank brings that has no part in it."""
    if op in ("sum", "avg", "any"):
        return False if dtype is torch.bool else 0
    if op in ("product", "all"):
        return True if dtype is torch.bool else 1
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


def commute(*placements: Placement) -> bool:
    """Whether the reductions among these placements of one tensor may be done in any order."""
    return len({"sum" if p.op == "avg" else p.op for p in placements if isinstance(p, Partial)}) < 2


@dataclass(frozen=True, slots=True)
class Shard:
    """Placement: the axis shards `dim` into `torch.chunk` parts, one per rank. Parts may be uneven or empty.

    DTensor: `Shard`.

    Args:
        dim: Dim of the tensor; negative dims count from the end.
        blocks: Lengths of blocks along `dim` that are sharded one by one, for fused weights. With queries, keys and
            values in one weight, `Shard(0, blocks=(64, 32, 32))` gives each rank its part of each. No other axis may
            shard that dim.

    Examples:
        ```python
        mesh = mw.Mesh({"tp": 2})
        qkv = torch.arange(8.0)  # 4 rows of queries, 2 of keys, 2 of values


        def parts():
            return mw.shard_tensor(qkv, mesh, {"tp": mw.Shard(0, blocks=(4, 2, 2))}).to_local().tolist()


        assert mw.simulate(parts, mesh) == [[0, 1, 4, 6], [2, 3, 5, 7]]
        ```
    """

    dim: int
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise LayoutError(f"Shard takes a dim number, not {self.dim!r}")
        if self.blocks != ():
            if not isinstance(self.blocks, (tuple, list)) or not all(type(n) is int and n >= 0 for n in self.blocks):
                raise LayoutError(f"Shard: blocks={self.blocks!r}: the lengths of the blocks of the dim were expected")
            some = tuple(n for n in self.blocks if n)
            object.__setattr__(self, "blocks", some if len(some) > 1 else ())

    def on(self, dim: int) -> Shard:
        """The same split of another dim."""
        return Shard(dim, self.blocks)

    def __repr__(self) -> str:
        return f"Shard({self.dim}, blocks={self.blocks})" if self.blocks else f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Placement: every rank of the axis holds the same values. The default of axes that are not named.

    DTensor: `Replicate`.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2, "tp": 2})
        layout = mw.Layout(mesh, {"tp": mw.Shard(0)})
        assert layout.placements == (mw.Replicate(), mw.Shard(0))
        ```
    """

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial:
    """Placement: each rank of the axis holds a contribution; their reduction is the value.

    Ops that are linear keep it, so the reduction happens as late as possible. See the page on Partial.

    DTensor: `Partial`.

    Args:
        op: Reduction, one of `"sum"`, `"avg"`, `"min"`, `"max"`, `"product"`, `"any"`, `"all"`.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})


        def add_ranks():
            x = mw.from_local(torch.tensor([1.0 + mw.rank()]), mesh, {"dp": mw.Partial()})
            return mw.unshard(x).item()  # 1 + 2


        assert mw.simulate(add_ranks, mesh) == [3.0, 3.0]
        ```
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCE_OPS:
            raise LayoutError(f"unknown reduction {self.op!r} for Partial: take one of {', '.join(REDUCE_OPS)}")

    def __repr__(self) -> str:
        return "Partial()" if self.op == "sum" else f"Partial({self.op!r})"


@dataclass(frozen=True, slots=True)
class At:
    """Placement: the rank at `index` of the axis holds the full value; the others hold no rows of it.

    No op computes on such a value. Ops see it replicated, or only at its pipeline stage. `compile_step(stages=)` uses
    it to store parameters at their stage.

    Args:
        index: Index of the rank along the axis, from 0.

    Examples:
        ```python
        mesh = mw.Mesh({"pp": 2})


        def store_on_first():
            x = mw.shard_tensor(torch.ones(3), mesh, {"pp": mw.At(0)})
            return x.to_local().numel(), mw.unshard(x).sum().item()


        assert mw.simulate(store_on_first, mesh) == [(3, 3.0), (0, 3.0)]
        ```
    """

    index: int

    def __post_init__(self) -> None:
        if not isinstance(self.index, int) or isinstance(self.index, bool) or self.index < 0:
            raise LayoutError(f"mw.At: index={self.index!r}, expected the index of a rank along the axis (int >= 0)")

    def __repr__(self) -> str:
        return f"At({self.index})"


Placement = Shard | Replicate | Partial | At
REPLICATE = Replicate()


def as_placement(value: Any) -> Placement:
    """A placement of ours from ours or from one of torch's.  Raises LayoutError for anything else."""
    if isinstance(value, (Shard, Replicate, Partial, At)):
        return value
    kind = type(value).__name__
    if type(value).__module__.startswith("torch.distributed"):
        if kind == "Shard":
            return Shard(value.dim)
        if kind == "Replicate":
            return REPLICATE
        if kind == "Partial":
            return Partial("sum" if value.reduce_op is None else str(value.reduce_op))
    raise LayoutError(f"{value!r} is not a placement: take mw.Shard(dim), mw.Replicate(), mw.Partial(op) or mw.At(i)")


_TEXT = re.compile(r"(Shard|Replicate|Partial|At)\((.*)\)")


def placement_from(text: str) -> Placement:
    """The placement that ``repr`` of one gives.  Raises LayoutError for another text."""
    found = _TEXT.fullmatch(text.strip())
    kind, inner = found.groups() if found else ("", "")
    try:
        if kind == "Shard":
            dim, _, blocks = inner.partition(", blocks=")
            given = blocks.strip("()").split(",") if blocks else []
            return Shard(int(dim), tuple(int(n) for n in given if n.strip()))
        if kind == "At":
            return At(int(inner))
        if kind == "Partial":
            return Partial(inner.strip("'\"") or "sum")
    except ValueError:
        kind = ""
    if kind != "Replicate" or inner:
        raise LayoutError(
            f"{text!r} is no placement: write Shard(dim), Replicate(), Partial(), Partial('max') or At(i)"
        )
    return REPLICATE


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part ``index`` of ``size`` things in ``parts`` ``torch.chunk`` parts."""
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(start + step, size)


def chunk_sizes(size: int, parts: int) -> list[int]:
    """Lengths of all parts, empty ones included: ``chunk_sizes(10, 4) == [3, 3, 3, 1]``."""
    return list(_chunk_sizes(size, parts))


@lru_cache(maxsize=4096)
def _chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    return tuple(b - a for a, b in (chunk_bounds(size, parts, i) for i in range(parts)))


def cuts(p: Placement) -> bool:
    """Whether ranks of the axis hold different parts of the value."""
    return isinstance(p, (Shard, At))


def own_bounds(p: Placement, size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of what rank ``index`` of an axis has of the ``size`` things that its placement cuts.

    Of blocks where it would be if each rank's parts of them lay together, those of the first rank first.
    """
    if isinstance(p, At):
        return (0, size) if p.index == index else (0, 0)
    if isinstance(p, Shard) and p.blocks:
        held = [sum(b - a for a, b in own_ranges(p, size, parts, i)) for i in range(index + 1)]
        return sum(held[:-1]), sum(held)
    return chunk_bounds(size, parts, index)


def own_ranges(p: Placement, size: int, parts: int, index: int) -> list[tuple[int, int]]:
    """Start and stop of all that rank ``index`` of an axis has: of each block a part, those that touch as one."""
    if not isinstance(p, Shard) or not p.blocks:
        return [own_bounds(p, size, parts, index)]
    if not size:  # at another stage
        return [(0, 0)]
    found: list[tuple[int, int]] = []
    start = 0
    for n in p.blocks:
        lo, hi = chunk_bounds(n, parts, index)
        if found and found[-1][1] == start + lo:
            found[-1] = found[-1][0], start + hi
        elif lo < hi or not found:
            found.append((start + lo, start + hi))
        start += n
    return found


def crowded(placements: Sequence[Placement]) -> bool:
    """Whether a dim that is split by blocks is split by another axis, too."""
    split = [p for p in placements if isinstance(p, Shard)]
    return any(p.blocks and q.dim == p.dim for i, p in enumerate(split) for j, q in enumerate(split) if i != j)


def dual(p: Placement, reduced: bool) -> tuple[Placement, bool]:
    """The type of a gradient on one axis, from that of its primal: placement, and whether a Replicate is reduced."""
    if isinstance(p, Partial):
        # The gradient of a sum is whole on every rank; as a value it may itself be differentiated, and then each rank
        # uses its copy for its own part: its cotangent is Partial, so it is of the reduced kind.  Of another reduction
        # each rank has its part's share of the gradient: what a maximum's holder gets, 1/n for an average.
        return (REPLICATE, True) if p.op == "sum" else (Partial(), False)
    return (Partial(), False) if reduced else (p, False)
