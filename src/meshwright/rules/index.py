"""Indexing with Python's notation, and lookups by index tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import crossing
from .dims import broadcast_letters, names, put, sizes_of, with_row
from .factor_notation import Arg, Local, LocalFn, Rule, composite, lines, notation, rule

Tensor = torch.Tensor


@dataclass
class Index:
    """What ``x[...]`` does to each dim: factors of x, of the result and of each index tensor."""

    source: list[str] = field(default_factory=list)
    result: list[str] = field(default_factory=list)
    whole: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    tensors: list[Arg] = field(default_factory=list)
    letters: list[list[str]] = field(default_factory=list)  # of each index tensor
    looked: list[int] = field(default_factory=list)  # dims of x that index tensors look up
    positions: list[int] = field(default_factory=list)  # where in the result the looked up dims would stand
    block: int = 0  # how many are looked up
    picked: dict[int, int] = field(default_factory=dict)  # dims of x of which one index is taken
    ways: dict[int, crossing.Along] = field(default_factory=dict)  # dims of which slices may stay split
    joined: dict[str, list[tuple[str, int]]] = field(default_factory=dict)  # dims that are cut once

    def inputs(self, x: Arg) -> dict[Arg | None, Sequence[str]]:
        """The letters of x and of the index tensors."""
        return {x: self.source, **dict(zip(self.tensors, self.letters, strict=True))}


def is_mask(a: Any) -> bool:
    return isinstance(a, bool) or (isinstance(a, Arg) and a.dtype in (torch.bool, torch.uint8))


def full_slices(indices: Sequence[Any]) -> tuple[Any, ...]:
    """ATen's index lists, where None stands for a full slice, in Python's notation."""
    return tuple(slice(None) if a is None else a for a in indices)


def items_of(x: Arg | Tensor, index: Any) -> list[Any] | None:
    """One entry per dim of x and per new dim, with ``...`` written out; None where there is no rule."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(is_mask(a) for a in items):
        return None
    plain = (int, slice, Arg, Tensor, type(None), type(...))
    if not all(isinstance(a, plain) or _int_list(a) is not None for a in items):
        return None
    used = sum(a is not None and a is not ... for a in items)
    if used > x.ndim or sum(a is ... for a in items) > 1:
        return None
    rest = [slice(None)] * (x.ndim - used)
    at = next((i for i, a in enumerate(items) if a is ...), len(items))
    return [*items[:at], *rest, *items[at + 1 :]]


def _int_list(a: Any) -> tuple[int, ...] | None:
    """Shape of a (nested) list of ints that indexes like a tensor."""
    if not isinstance(a, (list, tuple)):
        return None
    try:
        made = torch.tensor(a)
    except (TypeError, ValueError, RuntimeError):
        return None
    return tuple(made.shape) if made.dtype == torch.int64 else None


def read_index(x: Arg, index: Any) -> Index | None:
    """The factors of ``x[index]``; None for masks and what else has no rule."""
    items = items_of(x, index)
    if items is None:
        return None
    made, d = Index(), 0
    shapes: list[tuple[int, ...]] = []
    constant: list[int] = []
    for a in items:
        if a is None:
            made.result.append("1")
            continue
        n, f = x.shape[d], x.letters[d]
        made.source.append(f)
        if isinstance(a, slice):
            if any(isinstance(part, Arg) for part in (a.start, a.stop, a.step)):
                return None
            _slice(made, a, d, n, f)
        else:
            made.whole.add(f)
            if isinstance(a, int):
                made.picked[d] = a % max(n, 1)
            else:
                made.looked.append(d)
                made.positions.append(len(made.result))
                if isinstance(a, Arg):
                    made.tensors.append(a)
                    shapes.append(a.shape)
                else:
                    constant.append(len(shapes))
                    shapes.append(_int_list(a) or ())
        d += 1
    if shapes:
        _place(made, shapes, constant)
    return made


def _slice(made: Index, a: slice, d: int, n: int, f: str) -> None:
    size = len(range(*a.indices(n)))
    if size == n and (a.step is None or a.step == 1):
        made.result.append(f)
        return
    made.whole |= {f, f"s{d}"}
    made.sizes[f"s{d}"] = size
    start, stop, step = a.indices(n)
    if step == 1 and start < stop and f != "1":
        made.joined[f] = [("", start), (f"s{d}", size), ("", n - stop)]
    if size == 1:
        made.picked[d] = start
    elif (way := crossing.sliced(d, n, start, size, step)) is not None:
        made.ways[d] = way
    made.result.append(f"s{d}")


def _place(made: Index, shapes: list[tuple[int, ...]], constant: list[int]) -> None:
    """Put the broadcast dims of the index tensors into the result: in place if adjacent, else in front."""
    letters, out, shape = broadcast_letters(*shapes, prefix="i")
    made.letters = [fs for i, fs in enumerate(letters) if i not in constant]
    made.sizes |= sizes_of(out, shape)
    for i in constant:
        made.whole |= set(letters[i])  # a list in the call is the same on every rank
    adjacent = len(set(made.positions)) == 1  # a number between them is taken first, and is no gap
    made.block = math.prod(shape)
    at = made.positions[0] if adjacent else 0
    made.result[at:at] = out


@rule("getitem")
def getitem(x: Arg, index: Any) -> Rule | None:
    """Full slices keep their split; of a dim that is looked up, or of which one index is taken, each rank brings what
    it has; other dims are whole.
    """
    made = read_index(x, index)
    if made is None:
        return None
    if made.ways and not made.picked and not made.looked:
        return _divided_anew(x, made, index)
    held = set(made.picked)  # dims of which a rank may have a part
    if len(made.looked) == 1 and (made.tensors or 2 * made.block <= x.shape[made.looked[0]]):
        held |= set(made.looked)  # a long list takes more bytes to add up than to gather from
    factors = {d: made.source[d] for d in held if made.source[d] != "1"}
    return notation(
        made.inputs(x), made.result, whole=made.whole - set(factors.values()), sizes=made.sizes,
        reduced=factors.values(), op=sum_op(x), linear=[x], moves=True,
        local=lambda ctx: _take_own(ctx, made, factors, x.shape), blockwise=not factors,
        joined={} if factors else made.joined,
    )  # fmt: skip


def _divided_anew(x: Arg, made: Index, index: Any) -> Rule:
    """Slices that leave most rows of a dim: it stays split, and rows cross the borders of its parts."""
    letters = {f"s{d}": made.source[d] for d in made.ways}
    sizes = {made.source[d]: way.size for d, way in made.ways.items()}

    def local(ctx: Local) -> LocalFn | None:
        spec = ctx.inputs[0]
        parted = spec.layout.blocks
        spans = {
            d: crossing.own_rows(ctx, f)
            for d, f in enumerate(x.letters)
            if d in made.ways and d not in parted and ctx.is_split(f)
        }
        if not spans:
            return _own_ranges(ctx)

        def run(x: Tensor, index: Any) -> Tensor:
            for d, span in spans.items():
                rows = crossing.brought(ctx, x, d, made.source[d], made.ways[d].needs, crossing.CUT)
                x = made.ways[d].part(rows, *span)
            left, d = items_of(x, index) or [], 0
            for i, a in enumerate(left):
                if d in spans and a is not None:
                    left[i] = slice(None)
                elif d in parted and isinstance(a, slice):
                    left[i] = slice(*ctx.own(d, *a.indices(spec.shape[d])[:2]))
                d += a is not None
            return x[tuple(left)]

        return run

    return notation(
        made.inputs(x), [letters.get(f, f) for f in made.result], whole=made.whole - set(letters) - set(sizes),
        sizes=made.sizes, linear=[x], moves=True, local=local, crossing=sizes, joined=made.joined, blockwise=True,
    )  # fmt: skip


def sum_op(x: Arg) -> str:
    return "any" if x.dtype == torch.bool else "sum"


# ---------------------------------------------------------------------------------------- lookup in a shard


@dataclass(frozen=True)
class VocabRange:
    """This rank's part of a dim that is looked up: rows from ``start`` to ``stop`` of ``size``.

    ``wraps``: negative indices count from the end.
    """

    start: int
    stop: int
    size: int
    wraps: bool = False

    def find(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Local index (0 where the row is elsewhere), and whether it is elsewhere.

        An index that is in no rank's part stays as it is.  It is out of range of this part, too, so that the kernel
        refuses it as on one device: with an exception on a CPU, with its own assert, and no wait, on an accelerator.
        """
        if self.wraps:
            index = torch.where((index < 0) & (index >= -self.size), index + self.size, index)
        valid = (index >= 0) & (index < self.size)
        away = valid & ((index < self.start) | (index >= self.stop))
        return torch.where(valid, index - self.start, index).masked_fill(away, 0), away

    def place(self, at: int) -> tuple[int, bool]:
        """Local index of a row, and whether it is elsewhere; then it is that of any row."""
        at = at + self.size if at < 0 else at
        away = not self.start <= at < self.stop
        return 0 if away else at - self.start, away

    def with_zero_row(self, x: Tensor, dim: int) -> Tensor:
        """``x``, the own part, with a row of zeros where it has none: every rank looks up, and checks, alike."""
        if self.start != self.stop:
            return x
        return with_row(x, dim)

    def checked(self, fn: LocalFn) -> LocalFn:
        """``fn``, whose complaint about an index tells the size of the whole dim."""

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return fn(*args, **kwargs)
            except (IndexError, RuntimeError) as error:
                if "out of bounds" in str(error):
                    error.args = (re.sub(r"\bsize \d+", f"size {self.size}", str(error)),)
                raise

        return run


def shelf_of(ctx: Local, factor: str, size: int, wraps: bool = False) -> VocabRange | None:
    return VocabRange(*ctx.bounds(factor), size, wraps) if size and ctx.is_split(factor) else None


def widened(away: Tensor, after: int) -> Tensor:
    """A mask over the index dims, made to broadcast over the ``after`` dims that follow them."""
    return away.reshape([*away.shape, *[1] * after])


def _take_own(ctx: Local, made: Index, factors: Mapping[int, str], sizes: Sequence[int]) -> LocalFn | None:
    """``x[index]`` with zeros for what other ranks have of the dims with these factors."""
    if not factors:
        return _own_ranges(ctx)
    shelves = {d: s for d, f in factors.items() if (s := shelf_of(ctx, f, sizes[d], wraps=True))}
    looked = shelves.get(made.looked[0]) if len(made.looked) == 1 else None

    def local(x: Tensor, index: Any) -> Tensor:
        items, d, after = items_of(x, index) or [], 0, 0
        lost: bool | None = None
        away = None
        for i, a in enumerate(items):
            shelf = None if a is None else shelves.get(d)
            d += a is not None
            after += not isinstance(a, int)
            if shelf is None:
                continue
            x = shelf.with_zero_row(x, d - 1)
            if isinstance(a, (int, slice)):
                at, gone = shelf.place(a if isinstance(a, int) else a.indices(shelf.size)[0])
                items[i] = at if isinstance(a, int) else slice(at, at + 1)
                lost = gone or bool(lost)
            else:
                items[i], away = shelf.find(a if isinstance(a, Tensor) else torch.tensor(a, device=x.device))
                after = 0  # counts the dims of the result that follow
        out = x[tuple(items)]
        if away is not None:
            out = out.masked_fill(widened(away, after), 0)
        return out if lost is None else hidden(out, lost)

    return (looked.checked(local) if looked else local) if shelves else None


def _own_ranges(ctx: Local) -> LocalFn | None:
    """``x[index]``, where dims that are split by blocks are cut between blocks."""
    spec = ctx.inputs[0]
    if not spec.layout.blocks:
        return None

    def local(x: Tensor, index: Any) -> Tensor:
        items, d = items_of(x, index) or [], 0
        for i, a in enumerate(items):
            if d in spec.layout.blocks and isinstance(a, slice):
                items[i] = slice(*ctx.own(d, *a.indices(spec.shape[d])[:2]))
            d += a is not None
        return x[tuple(items)]

    return local


def hidden(t: Tensor, lost: bool) -> Tensor:
    """A copy of ``t``, or zeros in its place, by the same kernels."""
    return t.masked_fill(t.new_full((), lost, dtype=torch.bool), 0)


@rule("index_select")
def index_select(x: Arg, dim: int, index: Arg) -> Rule | None:
    """Rows of a dim by index; where the dim is split each rank brings the rows that it has."""
    if not x.ndim or index.ndim != 1:
        return None
    d, its = x.dim(dim), names("i", index.shape)
    return _looked_up(x, d, index, its, put(x.letters, {d: its[0]}), torch.index_select, x.ndim - d - 1)


def _looked_up(
    x: Arg, d: int, index: Arg, its: list[str], out: list[str], op: Callable[..., Tensor], after: int, **flags: Any
) -> Rule:
    """Where the dim that is looked up is split each rank brings what it has; ``after``: dims behind the index's."""
    f, size = x.letters[d], x.shape[d]

    def local(ctx: Local) -> LocalFn | None:
        shelf = shelf_of(ctx, f, size)
        if shelf is None:
            return None

        def lookup(x: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
            inside, away = shelf.find(index)
            return op(shelf.with_zero_row(x, d), d, inside, **kwargs).masked_fill(widened(away, after), 0)

        return shelf.checked(lookup)

    return notation(
        {x: x.letters, index: its}, out, reduced=[f], op=sum_op(x), linear=[x], moves=True, local=local, **flags
    )


# ------------------------------------------------------------------------------------------------ gather


def paired(x: Arg, others: Sequence[Arg], dim: int) -> tuple[list[list[str]], set[str], dict[str, int]]:
    """Letters of tensors used side by side with x, all dims but ``dim`` elementwise.

    A dim may be split where all have the same size; else it is whole in each.  On ``dim`` the others share
    a factor of their own.  Returns the letters, the whole factors and the sizes.
    """
    mine, its = x.letters, [["1"] * t.ndim for t in others]
    whole: set[str] = set()
    sizes: dict[str, int] = {}
    for j in range(x.ndim):
        same = all(t.shape[j] == x.shape[j] for t in others)
        if same and j != dim:
            for one in its:
                one[j] = mine[j]
            continue
        alike = len({t.shape[j] for t in others}) == 1
        for k, t in enumerate(others):
            f = f"g{j}" if alike else f"g{j}x{k}"
            if t.shape[j] != 1:
                its[k][j], sizes[f] = f, t.shape[j]
                if j != dim or not alike:
                    whole.add(f)
        if j != dim:
            whole.add(mine[j])
    return its, whole, sizes


@rule("gather")
def gather(x: Arg, dim: int, index: Arg, **kwargs: Any) -> Rule | None:
    """Elements along a dim by index; where the dim is split each rank brings the elements that it has."""
    if not x.ndim or index.ndim != x.ndim:
        return None
    d = x.dim(dim)
    (its,), whole, sizes = paired(x, [index], d)
    return _looked_up(x, d, index, its, its, torch.gather, 0, whole=whole, sizes=sizes)


@composite("take_along_dim")
def take_along_dim(x: Any, indices: Any, dim: int | None = None, **kwargs: Any) -> Any:
    """gather, with the other dims broadcast."""
    if dim is None:
        x, indices, dim = x.flatten(), indices.flatten(), 0
    d = dim % max(x.ndim, 1)
    indices = indices % max(x.shape[d], 1)  # as in PyTorch, where no index of this op is out of range
    shape = list(torch.broadcast_shapes(*[[1 if i == d else n for i, n in enumerate(t.shape)] for t in (x, indices)]))

    def expanded(t: Any) -> Any:
        want = [t.shape[d] if i == d else n for i, n in enumerate(shape)]
        return t if list(t.shape) == want else t.expand(want)

    return torch.gather(expanded(x), d, expanded(indices))


# ------------------------------------------------------------------------------------------------ by value


@rule("index")
def index(x: Arg, indices: Sequence[Any]) -> Rule | None:
    """``x[indices]``, where None stands for a full slice."""
    made = None if any(is_mask(a) for a in indices) else read_index(x, full_slices(indices))
    if made is None:
        return None
    return notation(made.inputs(x), made.result, whole=made.whole, sizes=made.sizes, linear=[x], moves=True)


@rule("searchsorted")
def searchsorted(edges: Arg, x: Any, *args: Any, sorter: Arg | None = None, **kwargs: Any) -> Rule | None:
    """Each element among sorted edges, which must be whole; leading dims go together."""
    if not isinstance(x, Arg) or not edges.ndim:
        return None
    its = [*x.letters[: edges.ndim - 1], "edge"]
    return notation({edges: its, x: x.letters, sorter: its}, x.letters, whole="edge")


lines({
    # A last dim of classes; how many must be said, else it depends on values.
    "one_hot": lambda x, num_classes=-1: (
        None if num_classes < 1
        else notation({x: x.letters}, [*x.letters, "class"], whole="class", sizes={"class": num_classes})
    ),
    # Each element among sorted boundaries, which must be whole.
    "bucketize": lambda x, boundaries, **kwargs: (
        notation({x: x.letters, boundaries: names("e", boundaries.shape)}, x.letters) if isinstance(x, Arg) else None
    ),
})  # fmt: skip
