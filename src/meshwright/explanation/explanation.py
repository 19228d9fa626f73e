"""The explanation: an account for people, as text and as a page."""

from __future__ import annotations

from html import escape
from typing import Any

from .. import drawing
from ..errors import ExtraError
from .account import Account
from .entries import folded
from .page import as_page
from .text import as_text, report


class Explanation(Account):
    """The communication of a step or of eager code, with its cost. Printing it gives the short form.

    `mw.explain` and `step.explain()` return one.

    Attributes:
        counts: Number of collectives and bytes, by kind and by axis.
        memory: Bytes on this rank by purpose; captured steps only.
        ledger: Each request of a captured step, and its effect.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})


        def reduce():
            x = mw.shard_tensor(torch.ones(4), mesh, {"dp": mw.Shard(0)})
            with mw.explain() as why:
                x.sum().item()
            return why.counts.kinds


        assert mw.simulate(reduce, mesh)[0]["all_reduce"] == 1
        ```
    """

    def text(self, width: int = 100, *, color: bool = False) -> str:
        """The report for a terminal of ``width`` columns."""
        return as_text(self, width, color)

    def to_html(self, title: str = "") -> str:
        """The report as one self-contained HTML page."""
        return as_page(self, title)

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks; its text where jinja2 is missing."""
        try:
            page = self.to_html()
        except ExtraError:
            return drawing.pre(self.text())
        return f'<iframe srcdoc="{escape(page)}" style="width:100%;height:600px;border:0"></iframe>'

    def __rich__(self) -> Any:
        return report(self)

    def __str__(self) -> str:
        if not self.collectives and not self.counts.total and not self.counts.copies:
            return "\n".join(["no communication", *self.notes]) if self.listed is None else "no communication"
        lines = [f"{n} × {c}" if n > 1 else str(c) for n, c in folded(self.collectives)]
        totals = ", ".join(f"{n} {k} ({self.counts.bytes[k]} bytes)" for k, n in self.counts.kinds.items())
        what = "implied conversions; ran in all" if self.listed is None else "collectives; in all"
        lines.append(f"{len(self.collectives)} {what}: {totals or 'nothing'}")
        copied = (f"{n} {way.replace('_', ' ')} ({nbytes} bytes)" for way, (n, nbytes) in self.counts.copies.items())
        lines += [f"copies: {', '.join(copied)}"] if self.counts.copies else []
        lines += self.notes if self.listed is None else []  # those of a step are in its report
        return "\n".join([*lines, *map(str, self.warnings)])

    __repr__ = __str__


__all__ = ["Explanation"]
