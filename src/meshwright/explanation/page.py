"""The report as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from ..errors import extra
from ..mesh import Mesh
from ..program.check.verify import ROLES
from ..program.ir.schedules import StagePart
from .account import Account
from .entries import Collective, InputLayout, folded_layouts, in_bytes, placed, starred
from .memory import CATEGORIES, Memory
from .pipeline import PipelineAccount
from .timeline import Timeline

if TYPE_CHECKING:
    import jinja2

WIDTH = 1000  # of the timeline, in its own units
_TOP = 18  # above the part that shows memory
_HEIGHT = 150  # of that part
_LANE = 34  # of the bars of one axis
_MOST_CELLS = 4096  # a larger mesh is not drawn
_MESH = 440  # units to the right, at most, where it is large
_NUMBERS = 64  # cells of a larger mesh have no numbers
_ROW = 22  # of the schedule of one rank
_MOST_ACTIONS = 20000  # a longer schedule is not drawn
_PARTS = {
    StagePart.FORWARD: "forward",
    StagePart.BACKWARD_WEIGHT: "optimizer",
}  # and its color; the others' is "backward"


def as_page(why: Account, title: str, compared: Iterable[tuple[str, str, str]] = ()) -> str:
    """The page.

    Args:
        compared: names of figures and what they were before and after passes.
    """
    drawn = _drawn(why.pipeline)
    notes = [n for n in why.notes if drawn is None or not n.startswith("rank ")]  # the schedule as text
    return template().render(
        title=title or ("Training step" if why.mesh is not None else "Eager code"),
        why=why, compared=list(compared), roles=ROLES, categories=CATEGORIES, mesh=_mesh(why.mesh, why.rank),
        line=_timeline(why), time=_time(why.time), drawn=drawn, notes=notes,
        rows=_rows(why.collectives), kinds=sorted({c.kind for c in why.collectives}),
        axes=sorted({",".join(c.axes) for c in why.collectives}), tree=_tree(why.laid),
        totals=[(t, t.bytes / max(1, *(u.bytes for u in why.totals))) for t in why.totals],
    )  # fmt: skip


@cache
def template() -> jinja2.Template:
    """What a page is made from.  Raises ExtraError."""
    made = extra("jinja2", "html", "a page of HTML")
    environment = made.Environment(
        loader=made.PackageLoader("meshwright.explanation", "web"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=in_bytes, placed=placed, changes=_changes, by=_by, dash=_dash)
    return environment.get_template("page.html")


def _by(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "1"


def _changes(c: Collective) -> list[tuple[str, str, str]]:
    """(axis, placement before, placement after) where they differ."""
    if isinstance(c.src, str) or isinstance(c.dst, str):
        return [("", str(c.src), str(c.dst))]
    pairs = zip(placed(c.src), placed(c.dst), strict=True)
    return [(axis, before, after) for (axis, before), (_, after) in pairs if before != after]


def _dash(kind: str) -> str:
    return kind.replace("_", "-")


# ---------------------------------------------------------------------------------------------- the mesh


def _mesh(mesh: Mesh | None, rank: int) -> dict[str, Any] | None:
    """Cells of a drawing: the last axis in one direction, the others in the other, the longer one to the right."""
    if mesh is None:
        return None
    sizes = list(zip(mesh.axes, mesh.sizes, strict=True))
    if mesh.size > _MOST_CELLS:
        return {"axes": sizes, "cells": [], "size": mesh.size}
    inner = mesh.sizes[-1]
    outer = mesh.size // inner
    turned = outer > inner
    numbered = mesh.size <= _NUMBERS
    side = 34 if numbered else max(6, min(18, _MESH // max(outer, inner)))
    names = [", ".join(mesh.axes[:-1]), mesh.axes[-1]]
    here = mesh.coordinate(rank)
    cells = []
    for i, (r, at) in enumerate(zip(mesh.ranks, mesh.coordinates(), strict=True)):
        other = [a for a, p, q in zip(mesh.axes, at, here, strict=True) if p != q]
        kind = "own" if not other else f"axis{mesh.axes.index(other[0]) % 3}" if len(other) == 1 else ""
        y, x = reversed(divmod(i, inner)) if turned else divmod(i, inner)
        place = ", ".join(f"{a} {p}" for a, p in zip(mesh.axes, at, strict=True))
        cells.append({"x": x * side, "y": y * side, "rank": r, "kind": kind, "place": place})
    wide, high = max(outer, inner) * side, min(outer, inner) * side
    down, across = reversed(names) if turned else names
    return {
        "axes": sizes, "cells": cells, "side": side, "size": mesh.size, "numbered": numbered, "width": wide,
        "height": high, "across": across, "down": down,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- along the step


def _timeline(why: Account) -> dict[str, Any] | None:
    """Memory as stacked areas and collectives as bars, over the same ops."""
    listed = why.collectives
    if not listed:
        return None
    memory = why.memory
    ops = memory.ops if memory is not None else len(listed)
    lanes = list(dict.fromkeys(",".join(c.axes) for c in listed))
    top = _TOP + _HEIGHT + 10 if memory is not None else 8
    most = math.log1p(max(c.bytes for c in listed))
    bars = []
    for c in listed:
        height = 3 + (_LANE - 9) * (math.log1p(c.bytes) / most if most else 0)
        bottom = top + _LANE * (lanes.index(",".join(c.axes)) + 1) - 3
        bars.append(
            {
                "c": c, "x": round(c.place / ops * WIDTH, 2), "y": round(bottom - height, 2), "h": round(height, 2),
                "w": round(max(1.5, min(9, WIDTH / ops * 0.8)), 2),
            }
        )  # fmt: skip
    return {
        "width": WIDTH, "height": top + _LANE * len(lanes) + 4, "bars": bars,
        "lanes": [(name or "-", top + _LANE * i) for i, name in enumerate(lanes)], "lane": _LANE,
        "areas": _areas(memory) if memory is not None else [], "top": _TOP, "memory": _HEIGHT,
        "roles": _bands(memory) if memory is not None else [],
    }  # fmt: skip


def _time(time: Timeline | None) -> dict[str, Any] | None:
    """Lanes of compute and wires, with bars as long as they take."""
    if time is None:
        return None
    unit, rows = WIDTH / (time.seconds or 1.0), list(time.lanes())
    bars = [
        {
            "x": round(s.start * unit, 2), "w": round(max(0.3, (s.end - s.start) * unit), 2),
            "y": rows.index(s.lane) * _ROW, "h": _ROW - 4, "role": s.role, "what": s.what or s.lane,
            "ms": (s.end - s.start) * 1e3,
        }
        for s in time.spans
    ]  # fmt: skip
    labels = [(name, i * _ROW) for i, name in enumerate(rows)]
    return {"bars": bars if len(bars) <= _MOST_ACTIONS else [], "rows": labels, "height": _ROW * len(rows)}


def _areas(memory: Memory) -> list[tuple[str, str]]:
    """(category, path) of each category, on top of those before it."""
    n = len(memory.along)
    below = [0] * n
    made = []
    for k, name in enumerate(CATEGORIES):
        above = [b + held[k] for b, held in zip(below, memory.along, strict=True)]
        path = [_point(i, n, h, memory.peak) for i, h in enumerate(above)]
        path += [_point(i, n, h, memory.peak) for i, h in reversed(list(enumerate(below)))]
        made.append((name, "M" + " L".join(path) + " Z"))
        below = above
    return made


def _point(i: int, n: int, held: int, peak: int) -> str:
    x = i / max(1, n - 1) * WIDTH
    return f"{x:.1f},{_TOP + _HEIGHT - held / max(1, peak) * _HEIGHT:.1f}"


def _bands(memory: Memory) -> list[tuple[str, float, float]]:
    """(role, where its ops begin, where they end)."""
    starts = sorted(memory.starts.items(), key=lambda e: e[1])
    ends = [*(s for _, s in starts[1:]), memory.ops]
    return [(r, s / memory.ops * WIDTH, e / memory.ops * WIDTH) for (r, s), e in zip(starts, ends, strict=True)]


def _drawn(pipeline: PipelineAccount | None) -> dict[str, Any] | None:
    """The schedule: a row for each rank, a bar for each part that it runs, as long as it takes."""
    if pipeline is None or sum(map(len, pipeline.schedule.orders)) > _MOST_ACTIONS:
        return None
    order = pipeline.schedule
    times = order.times()
    unit = WIDTH / max(end for _, end in times.values())
    several = order.stages > len(order.orders)
    bars = []
    for rank, actions in enumerate(order.orders):
        for a in actions:
            start, end = times[a]
            wide = (end - start) * unit
            bars.append(
                {
                    "x": round(start * unit, 2), "w": round(max(0.4, wide - 0.6), 2), "y": rank * _ROW, "h": _ROW - 4,
                    "kind": _PARTS.get(a.part, "backward"),
                    "later": several and a.stage >= len(order.orders), "what": str(a),
                    "mark": str(a.micro) if wide >= 7 * len(str(a.micro)) + 2 else "",
                }
            )  # fmt: skip
    return {"bars": bars, "height": _ROW * len(order.orders), "row": _ROW, "split": order.split}


# ---------------------------------------------------------------------------------------------- tables


def _rows(listed: Iterable[Collective]) -> list[dict[str, Any]]:
    """Collectives with the number of those that differ in the layer only; the first stands for them."""
    groups: dict[Any, list[Collective]] = {}
    keys = []
    for c in listed:
        key = (c.role, c.kind, starred(c.tensor), c.shape, c.dtype, c.src, c.dst, c.axes, c.line, starred(c.reason))
        groups.setdefault(key, []).append(c)
        keys.append((c, key))
    order = {key: i for i, key in enumerate(groups)}
    return [
        {"c": c, "fold": order[key], "alike": len(groups[key]), "first": groups[key][0] is c} for c, key in keys
    ]  # fmt: skip


def _tree(laid: tuple[InputLayout, ...]) -> dict[str, Any]:
    """The names of the model as a tree; leaves are inputs that lie alike in repeated layers."""
    root: dict[str, Any] = {"name": "", "children": {}, "leaf": None, "n": 0, "bytes": 0}
    for n, x in folded_layouts(laid):
        at = root
        for part in x.name.split("."):
            at = at["children"].setdefault(part, {"name": part, "children": {}, "leaf": None, "n": n, "bytes": 0})
            at["bytes"] += n * (x.bytes + x.states)
        at["leaf"] = x
    return root
