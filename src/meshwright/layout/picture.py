"""Pictures of a sharding: which ranks hold which block of a tensor, as a grid."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import drawing
from .layout import Layout
from .placement import Partial, Shard

_MOST = 64  # blocks along a side that are drawn


@dataclass(frozen=True)
class Grid:
    """The blocks of a tensor along two of its dims.

    Attributes:
        dims: The dims that are drawn, down and across.
        rows: Start and stop of each block along the first dim.
        columns: Start and stop of each block along the second dim.
        ranks: The ranks that hold each block.
    """

    dims: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int], ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]


def grid_of(layout: Layout, shape: Sequence[int]) -> Grid:
    """The grid of a tensor of this global shape: of its first two sharded dims, else of its first two."""
    sharded = sorted({p.dim % len(shape) for p in layout.placements if isinstance(p, Shard)}) if shape else []
    dims = tuple(sorted([*sharded, *(d for d in range(len(shape)) if d not in sharded)][:2]))
    places = layout.mesh.coordinates()
    held = [layout.local_ranges(shape, at) for at in places]
    edges = []
    for d in dims:
        found = {0, shape[d], *(n for ranges in held for some in ranges[d : d + 1] for n in itertools.chain(*some))}
        edges.append(tuple(itertools.pairwise(sorted(found))) or ((0, 0),))
    while len(edges) < 2:
        edges.insert(0, ((0, 1),))

    def holds(ranges: list[list[tuple[int, int]]], k: int, block: tuple[int, int]) -> bool:
        if len(dims) < 2 and k == 0:
            return True
        if not dims:
            return True
        some = ranges[dims[k if len(dims) == 2 else 0]]
        return block[0] == block[1] or any(a <= block[0] and block[1] <= b for a, b in some)

    def owners(row: tuple[int, int], column: tuple[int, int]) -> tuple[int, ...]:
        pairs = zip(layout.mesh.ranks, held, strict=True)
        return tuple(rank for rank, ranges in pairs if holds(ranges, 0, row) and holds(ranges, 1, column))

    ranks = tuple(tuple(owners(row, column) for column in edges[1]) for row in edges[0])
    return Grid(dims, edges[0], edges[1], ranks)


def title(layout: Layout, shape: Sequence[int], dtype: str = "") -> str:
    """A line that says what is drawn."""
    return f"{dtype}{list(shape)} on {layout.mesh!r}: {layout!r}"


def notes(layout: Layout, shape: Sequence[int], grid: Grid) -> list[str]:
    """Partial axes, and dims that are not drawn."""
    made = [
        f"Partial({p.op!r}) over {layout.mesh.axes[a]}: the value is the {p.op} of what its ranks hold"
        for a, p in enumerate(layout.placements)
        if isinstance(p, Partial)
    ]
    sharded = {p.dim % len(shape) for p in layout.placements if isinstance(p, Shard)} if shape else set()
    if hidden := sorted(sharded - set(grid.dims)):
        made.append(f"dims {hidden} are sharded too, and not drawn")
    if len(grid.dims) < len(shape):
        made.append(f"drawn: dims {', '.join(map(str, grid.dims))}")
    return made


def listed(ranks: Sequence[int]) -> str:
    """Ranks as text, runs of them as ``0-3``."""
    made: list[str] = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        some = [rank for _, rank in run]
        made.append(str(some[0]) if len(some) == 1 else f"{some[0]}{',' if len(some) == 2 else '-'}{some[-1]}")
    return ",".join(made)


def as_html(layout: Layout, shape: Sequence[int], dtype: str = "") -> str:
    """The picture for a notebook."""
    grid = grid_of(layout, shape)
    head = drawing.heading(title(layout, shape, dtype))
    if len(grid.rows) > _MOST or len(grid.columns) > _MOST:
        return head
    owners: dict[tuple[int, ...], int] = {}
    cells = [
        [(listed(ranks), drawing.tint(owners.setdefault(ranks, len(owners)))) for ranks in row] for row in grid.ranks
    ]
    columns = [f"{a}:{b}" for a, b in grid.columns]
    rows = [f"{a}:{b}" for a, b in grid.rows] if len(grid.dims) > 1 else []
    made = drawing.grid(cells, columns, rows)
    return head + made + "".join(map(drawing.heading, notes(layout, shape, grid)))


def as_rich(layout: Layout, shape: Sequence[int], dtype: str = "") -> Any:
    """The picture for a terminal."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = grid_of(layout, shape)
    head = Text(title(layout, shape, dtype))
    if len(grid.rows) > _MOST or len(grid.columns) > _MOST:
        return head
    table = Table(box=box.SQUARE, show_header=True, show_lines=True)
    several = len(grid.dims) > 1
    if several:
        table.add_column("", justify="right")
    for a, b in grid.columns:
        table.add_column(f"{a}:{b}", justify="center")
    colors = ("cyan", "magenta", "yellow", "green", "blue", "red")
    owners: dict[tuple[int, ...], int] = {}
    for (a, b), row in zip(grid.rows, grid.ranks, strict=True):
        cells = [Text(listed(r), style=colors[owners.setdefault(r, len(owners)) % len(colors)]) for r in row]
        table.add_row(*([f"{a}:{b}"] if several else []), *cells)
    return Group(head, table, *map(Text, notes(layout, shape, grid)))


__all__ = ["Grid", "as_html", "as_rich", "grid_of"]
