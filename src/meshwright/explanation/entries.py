"""What an explanation holds: collectives, layouts, totals; data, and what the views need to show it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..collective import rounds
from ..layout import At, Layout, Partial, Placement, Shard, dtype_from
from ..resharding.record import Record, in_dtypes

_NUMBERED = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Collective:
    """One collective of a step, or one recorded conversion of eager code.

    Attributes:
        number: its place in the order in which they run.
        place: how many ops of the step start before it; of eager code as ``number``.
        role: ``"forward"``, ``"recomputation"``, ``"backward"`` or ``"optimizer"``.
        kind: ``"all_reduce"``, ``"all_gather"``...; of eager code several, joined by ``" + "``.
        op, argument: the op that it serves and which of its tensors; or what is moved.
        parameter: name of the parameter that moves, or whose gradient does; ``""`` for none.  Names, where the
            gradients of several are fused.
        tensor: what moves, for people.
        shape: of the global tensor.
        local: of the tensor that this rank brings; of eager code unknown.
        dtype: of what moves; of several joined by ``" + "`` where they differ.
        src, dst: layouts before and after; of several tensors at once, which have none together, a word.
        bytes: that this rank moves (ring model): in a program the integer that running it counts.
        axes: the mesh axes over which it runs.
        ranks: its group; of eager code unknown.
        line: ``file:line`` of the user's code.
        reason: why: the rule and what it conflicts with, or the gradient.
        node: name of the node of the program.
        asked: whether the user asked for it by name.
        narrow: of how many ranks it adds up parts in fewer than 11 bits of significand, if more than 8; else 0.
        padding: bytes beyond these that a backend other than gloo moves, which makes all parts as long as the longest.
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
    src: Layout | str
    dst: Layout | str
    bytes: float
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    line: str
    reason: str
    node: str = ""
    asked: bool = False
    place: int = 0
    narrow: int = 0
    padding: int = 0

    def __str__(self) -> str:
        where = f"{self.line}: " if self.line else ""
        return (
            f"{where}{self.tensor} {list(self.shape)}: {self.kind} over {','.join(self.axes)}, {self.bytes:.0f} bytes"
            f"{in_dtypes([self.dtype])} ({self.src} -> {self.dst}): {self.reason}"
        )


@dataclass(frozen=True)
class InputLayout:
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
    layout: Layout
    seen: Layout
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


def recorded(number: int, r: Record) -> Collective:
    """A conversion of eager code."""
    lossy = [n for n, dtype in zip(r.sums, r.dtypes, strict=True) if n and rounds(dtype_from(dtype), n)]
    return Collective(
        number, r.phase, " + ".join(r.kinds), r.op, r.argument, "", r.tensor, r.shape,
        (), " + ".join(dict.fromkeys(r.dtypes)), r.src, r.dst, r.bytes, r.axes, (), r.line, r.reason, asked=r.asked,
        place=number, narrow=max(lossy, default=0),
    )  # fmt: skip


@dataclass(frozen=True)
class Warned:
    """Reductions that sum many ranks in few bits of significand: more than 8, in fewer than 11.

    Attributes:
        what: what is reduced, in words, and ``line``: where; of eager code that no op implied as the gradients of
            parameters, and nowhere.
        kind, axes, dtype: of the collective; ``ranks``: how many parts it adds up; ``count``: how many there are.
    """

    what: str
    line: str
    kind: str
    axes: tuple[str, ...]
    dtype: str
    ranks: int
    count: int

    def __str__(self) -> str:
        where = f"{self.line}: " if self.line else ""
        times = f"{self.count} × " if self.count > 1 else ""
        return (
            f"warning: {where}{times}{self.what}: {self.kind} over {','.join(self.axes)} sums {self.ranks} ranks in "
            f"{self.dtype}: see mw.Precision, reduce= and accumulate="
        )


# ---------------------------------------------------------------------------------------------- for the views


def starred(name: str) -> str:
    """A name with the numbers of repeated layers as ``*``: ``blocks.*.norm.weight``."""
    return _NUMBERED.sub("*", name)


def folded(collectives: Iterable[Collective]) -> list[tuple[int, Collective]]:
    """Collectives that differ in the number of the layer only, once: how many, and the first with ``*`` for numbers."""
    found: dict[tuple[Any, ...], list[Collective]] = {}
    for c in collectives:
        key = (
            c.narrow, c.role, c.kind, starred(c.tensor), c.shape, c.local, c.dtype, c.src, c.dst, c.axes, c.line,
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


def folded_layouts(laid: Iterable[InputLayout]) -> list[tuple[int, InputLayout]]:
    """Inputs of repeated layers that lie alike, once: how many, and the first with ``*`` for numbers."""
    found: dict[tuple[Any, ...], list[InputLayout]] = {}
    for x in laid:
        key = (starred(x.name), x.kind, x.shape, x.dtype, x.layout, x.seen, x.local, x.source)
        found.setdefault(key, []).append(x)
    return [
        (len(alike), alike[0] if len(alike) == 1 else dataclasses.replace(alike[0], name=starred(alike[0].name)))
        for alike in found.values()
    ]


def placed(layout: Layout) -> list[tuple[str, str]]:
    """(axis, placement for people): ``("dp", "Shard 0")``, ``("tp", "Replicate")``."""
    return [(axis, _worded(p)) for axis, p in zip(layout.mesh.axes, layout.placements, strict=True)]


def _worded(p: Placement) -> str:
    if isinstance(p, Shard):
        return f"Shard {p.dim}"
    if isinstance(p, At):
        return f"At {p.index}"
    return f"Partial {'' if p.op == 'sum' else p.op}".strip() if isinstance(p, Partial) else "Replicate"


def in_words(layout: Layout | str) -> str:
    """A layout without what is replicated: ``dp Shard 0``."""
    if isinstance(layout, str):
        return layout
    return ", ".join(f"{axis} {p}" for axis, p in placed(layout) if p != "Replicate") or "replicated"


def plain(a: Any) -> Any:
    """A part of an explanation as JSON has it: dicts and lists, and layouts as they are printed."""
    if dataclasses.is_dataclass(a):
        return {f.name: plain(getattr(a, f.name)) for f in dataclasses.fields(a)}
    return [plain(x) for x in a] if isinstance(a, tuple) else repr(a) if isinstance(a, Layout) else a


def in_bytes(n: float) -> str:
    """Bytes for people: ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"
