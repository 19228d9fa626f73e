"""HTML for notebooks: tables, grids of ranks, bars of a schedule. Inline styles, no scripts, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_CELL = "padding:2px 8px;border:1px solid rgba(128,128,128,.5);text-align:left;vertical-align:top"
_FONT = "font-family:ui-monospace,monospace;font-size:12px"


def tint(n: int, strength: float = 0.3) -> str:
    """A color for the n-th of several: the hues of neighbours differ much."""
    return f"hsla({n * 137 % 360},70%,55%,{strength})"


def heading(text: str) -> str:
    """A line above a drawing."""
    return f'<div style="{_FONT};margin:2px 0">{escape(text)}</div>'


def pre(text: str) -> str:
    """Text as it is."""
    return f'<pre style="font-size:12px;overflow-x:auto">{escape(text)}</pre>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts."""
    lines = [_row([_cell(h, _CELL, "th") for h in head])]
    lines += [_row([_cell(c, _CELL) for c in row]) for row in rows]
    return f'<table style="{_FONT};border-collapse:collapse">{"".join(lines)}</table>'


def _cell(text: str, style: str, tag: str = "td") -> str:
    return f'<{tag} style="{style}">{escape(text)}</{tag}>'


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def grid(
    cells: Sequence[Sequence[tuple[str, str]]], columns: Sequence[str] = (), rows: Sequence[str] = ()
) -> str:  # fmt: skip
    """Cells of (text, color) with names of columns and rows."""
    style = "padding:6px 10px;border:1px solid rgba(128,128,128,.7);text-align:center"
    name = "padding:2px 6px;opacity:.7;text-align:center;border:none"
    lines = [_row([*(["<td></td>"] if rows else []), *(_cell(c, name) for c in columns)])] if columns else []
    for i, row in enumerate(cells):
        side = [_cell(rows[i], name)] if rows else []
        lines.append(_row([*side, *(_cell(text, f"{style};background:{color}") for text, color in row)]))
    return f'<table style="{_FONT};border-collapse:collapse">{"".join(lines)}</table>'


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, float, float, str]]]], end: float) -> str:
    """Rows of bars along time: a name and (text, begin, end, color) of each bar."""
    lines = []
    for name, listed in rows:
        inside = "".join(_bar(text, a / end, b / end, color) for text, a, b, color in listed)
        lines.append(
            f'<div style="display:flex;margin:1px 0"><div style="width:60px">{escape(name)}</div>'
            f'<div style="position:relative;flex:1;height:18px">{inside}</div></div>'
        )
    return f'<div style="{_FONT};max-width:900px">{"".join(lines)}</div>'


def _bar(text: str, begin: float, end: float, color: str) -> str:
    place = f"position:absolute;left:{100 * begin:.3f}%;width:{100 * (end - begin):.3f}%;height:100%"
    look = "box-sizing:border-box;border:1px solid rgba(128,128,128,.6);overflow:hidden;text-align:center"
    return f'<div style="{place};{look};background:{color}" title="{escape(text)}">{escape(text)}</div>'


__all__ = ["bars", "grid", "heading", "pre", "table", "tint"]
