"""Which rows see which keys, as blocks that kernels of attention take: whole rectangles, and triangles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

Tensor = torch.Tensor


class Tile(NamedTuple):
    """Some rows of the scores: local rows ``start:stop`` see the keys ``first:last``.

    ``kind`` 0: all of them; 1: the i-th row from the last the keys up to the i-th from the last, at most ``window``
    (0: all); -1: of as many keys as rows, the i-th row all from the i-th on.  ``batch``: of which sequence, or -1 for
    all.  Without a window there are as many keys as rows, unless a kernel counts from the end.
    """

    batch: int
    start: int
    stop: int
    first: int
    last: int
    kind: int
    window: int = 0

    def at(self, size: int) -> tuple[slice, slice, slice]:
        """Where it is: sequences of ``size``, rows and keys."""
        which = slice(0, size) if self.batch < 0 else slice(self.batch, self.batch + 1)
        return which, slice(self.start, self.stop), slice(self.first, self.last)


def plan_of(
    spans: tuple[int, ...], rows: Tensor | None, documents: Tensor | None, causal: bool, window: int, keys: int,
    at_end: bool = False, packed: bool = False, most: tuple[int, int] | None = None,
) -> Sequence[Sequence[Tile]]:  # fmt: skip
    """The calls of a kernel that attend these rows; of each the blocks.

    Args:
        spans: as :class:`.attention_blocks.QueryRows` has them, and so the next four.
        rows: or the number of each local row.
        documents: to which each position belongs.
        causal: rows see keys up to themselves.
        window: how many keys at most.
        keys: how many there are.
        at_end: the kernel counts places from the last key, and takes windows.
        packed: it takes many blocks of unlike sizes in one call.
        most: rows and keys of a block, at most; None: any.
    """
    read = [None if t is None else np.ascontiguousarray(t.detach().cpu().numpy()) for t in (rows, documents)]
    of_rows, of_documents = [None if a is None else (a.tobytes(), a.shape) for a in read]
    return _plan(spans, of_rows, of_documents, causal, window, keys, at_end, packed, most)


Array = tuple[bytes, tuple[int, ...]] | None


@lru_cache(maxsize=64)  # every layer asks for the same, and so does the backward
def _plan(
    spans: tuple[int, ...], rows: Array, documents: Array, causal: bool, window: int, keys: int, at_end: bool,
    packed: bool, most: tuple[int, int] | None,
) -> tuple[tuple[Tile, ...], ...]:  # fmt: skip
    limits: list[Any] = [None] if documents is None else [limits_of(ids) for ids in _read(documents)]
    given: list[Any] = [None] if rows is None else list(_read(rows))
    made: list[Tile] = []
    count, run = max(len(limits), len(given)), _run_at_end if at_end else _run
    for b in range(count):
        limit = limits[min(b, len(limits) - 1)]
        starts: Any = None if limit is None else limit[0]
        stops: Any = None if limit is None else limit[1]
        for start, row, size in _runs(spans, given[min(b, len(given) - 1)], starts):
            begin, end = (0, keys) if limit is None else (int(starts[row]), int(stops[row]))
            made += run(-1 if count == 1 else b, start, row, size, begin, end, causal, window)
    if most is not None:
        made = [part for tile in made for part in _bounded(tile, *most)]
    return tuple(map(tuple, _groups(made))) if packed else tuple((tile,) for tile in made)


def _read(array: Array) -> Any:
    assert array is not None
    return np.frombuffer(array[0], np.int64).reshape(array[1])


def limits_of(ids: Any) -> Any:
    """Where the document of each position begins and ends."""
    new = np.flatnonzero(np.diff(ids)) + 1
    edges = np.concatenate([[0], new, [len(ids)]])
    sizes = np.diff(edges)
    return np.stack([edges[:-1].repeat(sizes), edges[1:].repeat(sizes)])


def work(ids: Any, causal: bool, window: int) -> Any:
    """How many keys each row sees."""
    starts, stops = limits_of(ids)
    if not causal:
        return stops - starts
    seen = np.arange(len(ids)) - starts + 1
    return np.minimum(seen, window) if window else seen


def _runs(spans: Sequence[int], rows: Any, starts: Any) -> Iterator[tuple[int, int, int]]:
    """Rows that follow each other in one document: local number, number in the sequence, how many."""
    if rows is None:
        for s, r, n in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
            new = () if starts is None else (np.flatnonzero(np.diff(starts[r : r + n])) + 1).tolist()
            yield from ((s + a, r + a, b - a) for a, b in zip([0, *new], [*new, n], strict=True) if a < b)
        return
    begin = np.zeros_like(rows) if starts is None else np.where(rows < 0, -1, starts[rows])
    new = (np.flatnonzero((np.diff(rows) != 1) | (np.diff(begin) != 0)) + 1).tolist()
    yield from (
        (a, int(rows[a]), b - a) for a, b in zip([0, *new], [*new, len(rows)], strict=True) if a < b and rows[a] >= 0
    )


def _run(b: int, start: int, row: int, size: int, begin: int, end: int, causal: bool, window: int) -> Iterator[Tile]:
    """The blocks of rows that follow each other in one document: of each row first one that has its own key."""
    if not causal:
        yield Tile(b, start, start + size, begin, end, 0)
        return
    near = size if not window else min(max(begin + window - row, 0), size)  # rows that see their document's beginning
    if near:
        before, own = min(row, end), min(row + near, end)
        square = own - before  # of more rows than keys the last ones see all of these
        found = [Tile(b, start, start + square, before, own, 1), Tile(b, start + square, start + near, before, own, 0)]
        found.append(Tile(b, start, start + near, begin, before, 0))
        yield from (t for t in found if t.first < t.last and t.start < t.stop)
    for a in range(near, size, window or 1):
        n, r, s = min(window, size - a), row + a, start + a
        yield Tile(b, s, s + n, r, r + n, 1)
        if n < window:
            yield Tile(b, s, s + n, r + n - window, r, 0)
        if n > 1:  # the last row sees none of the keys that the first ones still see
            yield Tile(b, s, s + n - 1, r - window + 1, r + n - window, -1)


def _run_at_end(
    b: int, start: int, row: int, size: int, begin: int, end: int, causal: bool, window: int
) -> Iterator[Tile]:
    """The same for a kernel that counts from the last key: one block has all that a row sees."""
    own = min(max(end - row, 0), size) if causal else 0  # rows behind the last key see all keys
    if own:
        yield Tile(b, start, start + own, max(begin, row - window + 1) if window else begin, row + own, 1, window)
    if own < size:
        yield Tile(b, start + own, start + size, begin, end, 0)


def _bounded(tile: Tile, rows: int, keys: int) -> Iterator[Tile]:
    """The same in blocks of so many rows and keys at most; triangles along the diagonal."""
    step = min(rows, keys) if tile.kind else rows
    for a in range(0, tile.stop - tile.start, step):
        size, first, last = min(step, tile.stop - tile.start - a), tile.first, tile.last
        own = tile._replace(start=tile.start + a, stop=tile.start + a + size)
        if tile.kind:
            yield own._replace(first=first + a, last=first + a + size)
            first, last = (first, first + a) if tile.kind > 0 else (first + a + size, last)
        for c in range(first, last, keys):
            yield own._replace(first=c, last=min(c + keys, last), kind=0)


def _groups(tiles: Sequence[Tile]) -> list[list[Tile]]:
    """Blocks of one kind and window, such that no two of a group share a key: so a call holds no key twice."""
    found: list[list[Tile]] = []
    by_kind: dict[tuple[int, int], list[Tile]] = {}
    for tile in tiles:
        by_kind.setdefault((tile.kind, tile.window), []).append(tile)
    for of_kind in by_kind.values():
        levels: list[tuple[dict[int, int], list[Tile]]] = []  # where the keys of each sequence end
        for tile in sorted(of_kind, key=lambda t: (t.batch, t.first)):
            free = next((level for level in levels if level[0].get(tile.batch, 0) <= tile.first), None)
            if free is None:
                levels.append(free := ({}, []))
            free[0][tile.batch] = tile.last
            free[1].append(tile)
        found += [group for _, group in levels]
    return found


__all__ = ["Tile", "plan_of", "work"]
