"""What an explanation holds: collectives, layouts, totals; data only, shown by ``text`` and ``page``."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .. import runtime
from ..mesh import Mesh
from ..record import Record
from .memory import Memory

ROLES = ("forward", "backward", "optimizer")

_NUMBERED = re.compile(r"(?<=\.)\d+(?=\.)")
_PLACED = re.compile(r"(\w+): (\w+)\(([^)]*)\)")


@dataclass(frozen=True)
class Collective:
    """One collective of a step, or one recorded conversion of eager code.

    Attributes:
        number: its place in the order in which they run.
        role: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        kind: ``"all_reduce"``, ``"all_gather"``...; of eager code several, joined by ``" + "``.
        op, argument: the op that it serves and which of its tensors; or what is moved.
        parameter: name of the parameter that moves, or whose gradient does; ``""`` for none.
        tensor: what moves, for people.
        shape: of the global tensor.
        local: of the tensor that this rank brings; of eager code unknown.
        dtype: of what moves.
        src, dst: layouts before and after.
        bytes: that this rank moves (ring model): in a program the integer that running it counts.
        axes: the mesh axes over which it runs.
        ranks: its group; of eager code unknown.
        line: ``file:line`` of the user's code.
        reason: why: the rule and what it conflicts with, or the gradient.
        node: name of the node of the program.
        asked: whether the user asked for it by name.
    """

    number: int
    role: str
    kind: str
    op: str
    argument: int
    parameter: str
    tensor: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    dtype: str
    src: str
    dst: str
    bytes: float
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    line: str
    reason: str
    node: str = ""
    asked: bool = False

    def __str__(self) -> str:
        where = f"{self.line}: " if self.line else ""
        return (
            f"{where}{self.tensor} {list(self.shape)}: {self.kind} over {','.join(self.axes)}, {self.bytes:.0f} bytes "
            f"({self.src} -> {self.dst}): {self.reason}"
        )


@dataclass(frozen=True)
class Laid:
    """How an input of a step lies on the mesh.

    Attributes:
        name, kind: ``"param"``, ``"buffer"`` or ``"batch"``.
        shape: global.
        dtype: of the elements.
        layout: in which it is stored; ``seen``: in which ops see it (the same unless said otherwise).
        local: shape on this rank.
        bytes: on this rank; ``states``: of what the optimizer keeps for it, on this rank.
        source: where the layout came from: ``"user"``, ``"propagated"`` or ``"default"``.
        reason: the op and factor that it came through.
        lost: alternatives that lost.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    seen: str
    local: tuple[int, ...]
    bytes: int
    states: int
    source: str
    reason: str = ""
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Total:
    """How many collectives of one role and kind run over the same axes, and their bytes.  Of eager code the role is
    unknown."""

    role: str
    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int


@dataclass
class Explanation:
    """Communication of a step or of a piece of eager code, and what it costs.

    Attributes:
        records: one entry per conversion that an op implied or somebody asked for, in order, with reasons.
        counts: every collective: kinds, axes and bytes.  Of a step what running it will count, to the byte; of eager
            code what ran.
        result: what the explained function returned (``explain(fn, ...)`` only).
        mesh, rank: whose program it is; None for eager code.
        collectives: the collectives of a step, or the recorded conversions of eager code, in order.
        laid: parameters, buffers and batch of a step and how they lie on the mesh.
        memory: what a rank holds along a step; None for eager code.
        update: the optimizer that the step contains, in words.
    """

    records: list[Record] = field(default_factory=list)
    counts: runtime.Counts = field(default_factory=runtime.Counts)
    result: Any = None
    mesh: Mesh | None = None
    rank: int = 0
    listed: tuple[Collective, ...] | None = None
    laid: tuple[Laid, ...] = ()
    memory: Memory | None = None
    update: str = ""

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """In the order in which they run."""
        if self.listed is not None:
            return self.listed
        return tuple(_recorded(i, r) for i, r in enumerate(self.records))

    @property
    def bytes(self) -> float:
        """Bytes that the listed collectives move per rank."""
        return sum(c.bytes for c in self.collectives)

    @property
    def totals(self) -> tuple[Total, ...]:
        """By role, kind and axes."""
        if self.listed is None:
            return tuple(Total("", k, a, n, b) for (k, a), (n, b) in self.counts.table.items())
        found: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
        for c in self.listed:
            entry = found.setdefault((c.role, c.kind, c.axes), [0, 0])
            entry[0] += 1
            entry[1] += int(c.bytes)
        order = sorted(found.items(), key=lambda e: (ROLES.index(e[0][0]), e[0][1:]))
        return tuple(Total(*key, *entry) for key, entry in order)

    # -- as data --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; see docs/explain.md for what the keys mean."""
        made: dict[str, Any] = {
            "mesh": None if self.mesh is None else dict(zip(self.mesh.axes, self.mesh.sizes, strict=True)),
            "rank": self.rank if self.mesh is not None else None,
            "update": self.update,
            "collectives": self.counts.kinds,
            "bytes": self.counts.bytes,
            "total_bytes": self.counts.total_bytes,
            "totals": [dataclasses.asdict(t) for t in self.totals],
            "records": [dataclasses.asdict(c) for c in self.collectives],
            "layouts": [dataclasses.asdict(x) for x in self.laid],
            "memory": None if self.memory is None else self.memory.to_dict(),
        }
        return made

    def to_json(self, **how: Any) -> str:
        """``to_dict`` as one JSON object; ``how`` as for ``json.dumps``."""
        return json.dumps(self.to_dict(), **how)

    # -- for people -----------------------------------------------------------------------------------

    def text(self, width: int = 100, *, color: bool = False) -> str:
        """The report for a terminal of ``width`` columns."""
        from .text import as_text

        return as_text(self, width, color)

    def to_html(self, title: str = "") -> str:
        """The report as one self-contained HTML page."""
        from .page import as_page

        return as_page(self, title)

    def __rich__(self) -> Any:
        from .text import report

        return report(self)

    def __str__(self) -> str:
        if not self.collectives and not self.counts.total:
            return "no communication"
        lines = [f"{n} × {c}" if n > 1 else str(c) for n, c in folded(self.collectives)]
        totals = ", ".join(f"{n} {k} ({self.counts.bytes[k]} bytes)" for k, n in self.counts.kinds.items())
        what = "implied conversions; ran in all" if self.listed is None else "collectives; in all"
        lines.append(f"{len(self.collectives)} {what}: {totals or 'nothing'}")
        return "\n".join(lines)

    __repr__ = __str__


def _recorded(number: int, r: Record) -> Collective:
    gradient = "gradient of " if r.phase == "backward" else ""
    return Collective(
        number, r.phase, " + ".join(r.kinds), r.op, r.argument, "", f"{gradient}{r.op} argument {r.argument}", r.shape,
        (), "", r.src, r.dst, r.bytes, r.axes, (), r.line, r.reason, asked=r.asked,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- for the views


def starred(name: str) -> str:
    """A name with the numbers of repeated layers as ``*``: ``blocks.*.norm.weight``."""
    return _NUMBERED.sub("*", name)


def folded(collectives: Iterable[Collective]) -> list[tuple[int, Collective]]:
    """Collectives that differ in the number of the layer only, once: how many, and the first with ``*`` for numbers."""
    found: dict[tuple[Any, ...], list[Collective]] = {}
    for c in collectives:
        key = (
            c.role, c.kind, starred(c.tensor), c.shape, c.local, c.dtype, c.src, c.dst, c.axes, c.line,
            starred(c.reason), c.asked,
        )  # fmt: skip
        found.setdefault(key, []).append(c)
    return [(len(alike), _one_of(alike)) for alike in found.values()]


def _one_of(alike: list[Collective]) -> Collective:
    first = alike[0]
    if len({(c.tensor, c.reason) for c in alike}) == 1:
        return first
    return dataclasses.replace(
        first, tensor=starred(first.tensor), reason=starred(first.reason), parameter=starred(first.parameter)
    )


def folded_layouts(laid: Iterable[Laid]) -> list[tuple[int, Laid]]:
    """Inputs of repeated layers that lie alike, once: how many, and the first with ``*`` for numbers."""
    found: dict[tuple[Any, ...], list[Laid]] = {}
    for x in laid:
        key = (starred(x.name), x.kind, x.shape, x.dtype, x.layout, x.seen, x.local, x.source)
        found.setdefault(key, []).append(x)
    return [
        (len(alike), alike[0] if len(alike) == 1 else dataclasses.replace(alike[0], name=starred(alike[0].name)))
        for alike in found.values()
    ]


def placed(layout: str) -> list[tuple[str, str]]:
    """(axis, placement for people) of a printed layout: ``("dp", "Shard 0")``, ``("tp", "Replicate")``."""
    return [(axis, f"{kind} {arg}".replace("'", "").strip()) for axis, kind, arg in _PLACED.findall(layout)]


def in_words(layout: str) -> str:
    """A printed layout without what is replicated: ``dp Shard 0``."""
    return ", ".join(f"{axis} {p}" for axis, p in placed(layout) if p != "Replicate") or "replicated"


def in_bytes(n: float) -> str:
    """Bytes for people: ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"
