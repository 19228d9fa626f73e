"""A step before and after passes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..program.check.verify import ROLES
from .entries import in_bytes
from .explanation import Explanation
from .memory import CATEGORIES
from .page import as_page
from .text import report


@dataclass(frozen=True)
class Comparison:
    """What passes changed.

    Attributes:
        before, after: the two steps.
    """

    before: Explanation
    after: Explanation

    @property
    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """Name of a figure, what it was and what it is."""
        return tuple(self._rows())

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        tables = [{(t.role, t.kind, t.axes): t for t in why.totals} for why in (self.before, self.after)]
        for key in sorted({*tables[0], *tables[1]}, key=lambda k: (ROLES.index(k[0]), k[1:])):
            role, kind, axes = key
            cells = [f"{t[key].count}, {in_bytes(t[key].bytes)}" if key in t else "none" for t in tables]
            yield f"{role} {kind.replace('_', '-')} over {', '.join(axes)}", cells[0], cells[1]
        both = self.before, self.after
        cells = [f"{why.counts.total}, {in_bytes(why.counts.total_bytes)}" for why in both]
        yield "all collectives", cells[0], cells[1]
        memories = [why.memory for why in both if why.memory is not None]
        if len(memories) == 2:
            yield "ops", str(memories[0].ops), str(memories[1].ops)
            yield "peak memory", in_bytes(memories[0].peak), in_bytes(memories[1].peak)
            for name in CATEGORIES:
                held = [in_bytes(m.highest[name]) for m in memories]
                yield f"most {name}", held[0], held[1]

    def to_dict(self) -> dict[str, Any]:
        """Both explanations as plain values."""
        return {"before": self.before.to_dict(), "after": self.after.to_dict()}

    def to_json(self, **how: Any) -> str:
        """``to_dict`` as one JSON object; ``how`` as for ``json.dumps``."""
        return json.dumps(self.to_dict(), **how)

    def to_html(self, title: str = "") -> str:
        """The page of the step after the passes, with the figures before."""
        return as_page(self.after, title, self.rows)

    def __rich__(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
        table.add_column("")
        table.add_column("before", justify="right")
        table.add_column("after", justify="right")
        for name, before, after in self.rows:
            table.add_row(name, before, after, style="bold" if before != after else "dim")
        title = Text("\nbefore and after the passes", style="bold")
        return Group(report(self.after), title, Padding(table, (0, 0, 0, 2), expand=False))
