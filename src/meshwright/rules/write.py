"""Writes: ``x[...] = value`` and the scatter family.  Into a split dim each rank writes its own rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .dims import aligned, names, part, put, with_row
from .factor_notation import Arg, Local, LocalFn, Rule, composite, lines, notation, rule
from .index import Index, VocabRange, full_slices, is_mask, items_of, paired, read_index, shelf_of, widened

Tensor = torch.Tensor

# ------------------------------------------------------------------------------------------------ scatter


def _spilled(op: str, factor: str, size: int, d: int) -> Callable[[Local], LocalFn | None]:
    """A ``local`` for an op that writes rows of dim ``d``: other ranks' rows go to a spare one."""

    def made(ctx: Local) -> LocalFn | None:
        shelf = shelf_of(ctx, factor, size, wraps=op == "index_fill")
        if shelf is None or shelf.stop - shelf.start == shelf.size:  # no other rank has rows
            return None

        def local(x: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            inside, away = shelf.find(index)
            rows = x.shape[d]
            made: Tensor = getattr(with_row(x, d), op)(d, inside.masked_fill(away, rows), *args, **kwargs)
            return part(made, x.shape)

        return shelf.checked(local)

    return made


def _written(
    op: str, x: Arg, d: int, row: str, entries: dict[Any, list[str]], linear: Sequence[Any], adds: bool, **flags: Any
) -> Rule:
    """Elements or rows of dim ``d`` written; where the op adds, each rank can add its own part of the entries."""
    return notation(
        {x: x.letters, **entries}, x.letters, reduced=[row] if adds else [],
        linear=[linear] if all(isinstance(t, Arg) for t in linear) else [],
        local=_spilled(op, x.letters[d], x.shape[d], d), **flags,
    )  # fmt: skip


def _scattered(op: str, x: Arg, dim: int, index: Arg, src: Any, linear: bool = True, adds: bool = False) -> Rule | None:
    if not x.ndim or index.ndim != x.ndim:
        return None
    d = x.dim(dim)
    others = [t for t in (index, src) if isinstance(t, Arg) and t.ndim]
    its, whole, sizes = paired(x, others, d)
    entries = dict(zip(others, its, strict=True))
    if isinstance(src, Arg):
        entries.setdefault(src, [])
    along = its[0][d]
    split = adds and along not in whole
    whole |= set() if split else {along}
    return _written(op, x, d, along, entries, [x, src] if linear else [None], split, whole=whole, sizes=sizes)


@rule("scatter")
def scatter(x: Arg, dim: int, index: Arg, src: Any = None, *, value: Any = None, reduce: Any = None) -> Rule | None:
    """x with some elements along a dim replaced."""
    return _scattered("scatter", x, dim, index, src if value is None else value, reduce is None)


@rule("scatter_reduce")
def scatter_reduce(x: Arg, dim: int, index: Arg, src: Arg, reduce: str, *, include_self: bool = True) -> Rule | None:
    """As scatter_add for a sum that includes x."""
    adds = reduce == "sum" and include_self
    return _scattered("scatter_reduce", x, dim, index, src, adds, adds)


def _by_rows(op: str, x: Arg, dim: int, index: Arg, src: Any, adds: bool = False) -> Rule | None:
    """Writes of whole rows of ``dim``; all other dims may be split."""
    if not x.ndim:
        return None
    d, its = x.dim(dim), names("i", index.shape)
    row = its[0] if its else "1"
    entries = {index: its}
    if isinstance(src, Arg):
        entries[src] = put(x.letters, {d: row}) if src.ndim else []
    return _written(op, x, d, row, entries, [x, src], adds)


lines({
    # Jointly linear; each rank may add its own part.
    "scatter_add": lambda x, dim, index, src: _scattered("scatter_add", x, dim, index, src, adds=True),
    "index_add": lambda x, dim, index, source, **kwargs: _by_rows("index_add", x, dim, index, source, adds=True),
    "index_copy": lambda x, dim, index, source: _by_rows("index_copy", x, dim, index, source),
    "index_fill": lambda x, dim, index, value: _by_rows("index_fill", x, dim, index, value),
})  # fmt: skip


def _in_place(op: Callable[..., Any]) -> Callable[..., Any]:
    # A split dim is written by way of a copy with a spare row.  The op may keep its input for the backward, so it must
    # not be the tensor that is written.
    return lambda x, *args, **kwargs: x.copy_(op(x.clone() if x.requires_grad else x, *args, **kwargs))


for _name in ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill"):
    composite(f"{_name}_")(_in_place(getattr(Tensor, _name)))


# ------------------------------------------------------------------------------------------------ setitem


def _masked_write(x: Arg, mask: Arg, value: Any) -> Rule | None:
    """``x[mask] = number``: elementwise in the dims of the mask."""
    fits = mask.dtype == torch.bool and mask.shape == x.shape[: mask.ndim]
    if not fits or (isinstance(value, Arg) and value.ndim):
        return None
    given = {x: x.letters, mask: x.letters[: mask.ndim]} | ({value: []} if isinstance(value, Arg) else {})
    return notation(given, x.letters, linear=[[x, value]] if isinstance(value, Arg) else [])


@rule("setitem")
def setitem(x: Arg, index: Any, value: Any) -> Rule | None:
    """A write in place: every rank writes what it holds of the indexed part."""
    bare = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if isinstance(bare, Arg) and bare.dtype == torch.bool:
        return _masked_write(x, bare, value)
    made = read_index(x, index)
    return None if made is None else _write(x, made, value, _set_here)


def _write(x: Arg, made: Index, value: Any, run: Callable[[Shelves], LocalFn], accumulate: bool = False) -> Rule:
    entries = {f for fs in made.letters for f in fs}
    given, group = made.inputs(x), [x]
    if isinstance(value, Arg):
        given[value] = aligned(made.result, value.shape)
        group = [x, value]
    elif not isinstance(value, int) or isinstance(value, bool) or value:  # zero is a part of a sum
        group = []
    cut = [f for f in made.source if f in made.whole]

    def local(ctx: Local) -> LocalFn | None:
        shelves = {d: shelf_of(ctx, f, x.shape[d], wraps=True) for d, f in enumerate(made.source) if f in cut}
        found = {d: s for d, s in shelves.items() if s is not None}
        if len(found) == 1 and len(made.letters) < 2:  # else its complaint does not tell which dim it is about
            return next(iter(found.values())).checked(run(found))
        return run(found) if found else None

    split = accumulate and isinstance(value, Arg)
    return notation(
        given, made.source, whole=(made.whole - set(cut)) | (set() if split else entries), sizes=made.sizes,
        reduced=entries if split else [], linear=[group], local=local,
    )  # fmt: skip


@rule("index_put", "_unsafe_index_put", "index_put_")
def index_put(x: Arg, indices: Sequence[Any], values: Arg, accumulate: bool = False) -> Rule | None:
    """As ``x[indices] = values``, where None stands for a full slice; or added, then jointly linear."""
    if any(is_mask(a) for a in indices):
        if len(indices) == 1 and isinstance(indices[0], Arg) and not accumulate:
            return _masked_write(x, indices[0], values)
        return None
    made = read_index(x, full_slices(indices))
    return None if made is None else _write(x, made, values, _put_here, accumulate)


@composite("index_put_")
def index_put_(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """In place, by way of a copy; where None stands for a full slice, as ``x[:, i] = values``."""
    if any(i is None for i in indices) and not accumulate:  # Python's index_put does not know None
        x[full_slices(indices)] = values
        return x
    return x.copy_(torch.index_put(x, indices, values, accumulate))


# ---------------------------------------------------------------------------------------- writes in a shard

Shelves = dict[int, VocabRange]  # split dim to this rank's part of it


def _set_here(shelves: Shelves) -> LocalFn:
    def local(x: Tensor, index: Any, value: Any) -> None:
        into = _with_zero_row(x, shelves)
        part = _own_part(into, index, value, shelves)
        if part is not None:
            # By way of a view: what fills all that this rank has would otherwise cut it off from what was there, and
            # with it from the graph of ranks that have more.
            into.view_as(into)[part[0]] = part[1]
        if part is None or into is not x:
            _touch(x, value)

    return local


def _put_here(shelves: Shelves) -> LocalFn:
    def local(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
        into = _with_zero_row(x, shelves)
        own = _own_part(into, full_slices(indices), values, shelves, accumulate)
        if own is None:
            raise AssertionError("index tensors always have a part")
        where = [a if isinstance(a, Tensor) else None for a in own[0]]
        made: Tensor = torch.ops.aten.index_put.default(into, where, own[1], accumulate)
        return made if made.shape == x.shape else part(made, x.shape)

    return local


def _with_zero_row(x: Tensor, shelves: Shelves) -> Tensor:
    """``x`` with a row where this rank has none, so that its index tensors are checked as those of the others."""
    for d, shelf in shelves.items():
        x = shelf.with_zero_row(x, d)
    return x


def _touch(x: Tensor, value: Any) -> None:
    """Nothing to write here; x must still depend on the value, and count the write, as it does on the other ranks.

    Without a gradient too: what a captured step reads on one rank only would be dropped on the others.
    """
    nothing_of = x.narrow(0, 0, 0)
    if isinstance(value, Tensor):
        nothing_of.copy_(value.flatten()[:0].sum())
    else:
        nothing_of.zero_()


@dataclass
class _WrittenCut:
    """One indexed dim, in the shard: how x is indexed, and which part of the value goes there."""

    item: Any
    count: int  # size of the dim of the result before the cut
    first: int = 0
    taken: int | None = None  # None: all


def _cut(a: slice, n: int, shelf: VocabRange | None) -> _WrittenCut:
    if shelf is None:
        return _WrittenCut(a, len(range(*a.indices(n))))
    lo, hi, step = a.indices(shelf.size)
    count = len(range(lo, hi, step))
    first = min(max(-(-(shelf.start - lo) // step), 0), count)
    last = min(max(-(-(shelf.stop - lo) // step), first), count)
    begin = lo + first * step - shelf.start
    return _WrittenCut(
        slice(begin, begin + (last - first - 1) * step + 1 if last > first else begin, step),
        count,
        first,
        last - first,
    )


def _own_part(
    x: Tensor, index: Any, value: Any, shelves: Shelves, accumulate: bool = False
) -> tuple[tuple[Any, ...], Any] | None:
    """Index into the shard, and the part of the value for it; None where an int is on another rank."""
    d = 0
    cuts: list[_WrittenCut] = []  # one per dim of the result that is not looked up
    local: list[Any] = []
    looked: list[int] = []  # where in ``local`` index tensors stand
    places: list[int] = []  # and before which of ``cuts``
    shelf_at: dict[int, VocabRange] = {}
    for a in items_of(x, index) or []:
        if a is None:
            cuts.append(_WrittenCut(None, 1))
            local.append(None)
            continue
        shelf = shelves.get(d)
        if isinstance(a, slice):
            cuts.append(_cut(a, x.shape[d], shelf))
            local.append(cuts[-1].item)
        elif isinstance(a, int):
            if shelf is not None:
                a = (a + shelf.size if a < 0 else a) - shelf.start
                if not 0 <= a < shelf.stop - shelf.start:
                    return None
            local.append(a)
        else:
            looked.append(len(local))
            places.append(len(cuts))
            if shelf is not None:
                shelf_at[len(local)] = shelf
            local.append(a if isinstance(a, Tensor) else torch.tensor(a, device=x.device))
        d += 1
    at = places[0] if len(set(places)) == 1 else 0
    value, width = _narrowed(value, cuts, at, [local[i].shape for i in looked])
    if not shelf_at:
        return tuple(local), value
    return _select(x, local, looked, shelf_at, value, width, at, accumulate)


def _narrowed(value: Any, cuts: list[_WrittenCut], at: int, shapes: Sequence[Sequence[int]]) -> tuple[Any, int]:
    """The value expanded to the result's shape and cut to this rank's slices; how many dims are looked up."""
    block = list(torch.broadcast_shapes(*shapes)) if shapes else []
    if not isinstance(value, Tensor) or not value.ndim:
        return value, len(block)
    counts = [c.count for c in cuts]
    full = [*counts[:at], *block, *counts[at:]]
    value = value.reshape(value.shape[max(value.ndim - len(full), 0) :]).expand(full)
    for i, c in enumerate(cuts):
        if c.taken is not None:
            value = value.narrow(i if i < at else i + len(block), c.first, c.taken)
    return value, len(block)


def _select(
    x: Tensor, local: list[Any], looked: list[int], shelf_at: dict[int, VocabRange], value: Any, width: int, at: int,
    accumulate: bool,
) -> tuple[tuple[Any, ...], Any]:  # fmt: skip
    """Have the entries of the index tensors that are in other ranks' shards change nothing in this one.

    They stay, so that shapes do not depend on values: they add nothing, or write once more what the last entry of this
    shard writes, or what is there.
    """
    tensors = [t.flatten() for t in torch.broadcast_tensors(*[local[i] for i in looked])]
    away = torch.zeros_like(tensors[0], dtype=torch.bool)
    for k, i in enumerate(looked):
        if i in shelf_at:
            tensors[k], elsewhere = shelf_at[i].find(tensors[k])
            away = away | elsewhere
    if isinstance(value, Tensor) and value.ndim:
        front = value.movedim(list(range(at, at + width)), list(range(width)))
        value = front.reshape([away.numel(), *front.shape[width:]]).movedim(0, at)
    numbers = torch.arange(away.numel(), device=away.device)
    last = torch.where(away, 0, numbers).amax() if away.numel() else 0
    instead = numbers if accumulate else torch.where(away, last, numbers)
    for k, i in enumerate(looked):
        local[i] = tensors[k][instead]
    now = x[tuple(local)]
    value = (value.to(x.dtype) if isinstance(value, Tensor) else now.new_full((), value)).expand_as(now)
    gone, only = (widened(m, now.ndim - at - 1) for m in (away, away.all() & (numbers == 0)))
    if accumulate:
        return tuple(local), value.masked_fill(gone, 0)
    again = torch.where(away.all(), now, value.index_select(at, instead)).detach()  # has its gradient already
    return tuple(local), torch.where(only, now, torch.where(gone, again, value))
