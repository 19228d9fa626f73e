"""What a step may send: bytes per axes and kind, and what became more since an explanation that was kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ExplicitError, MeshwrightError, near
from ..layout import Layout
from .account import Account
from .core import Collective, in_bytes, in_words

Budget = Mapping[str, int | Mapping[str, int]]


def check_budget(why: Account, budget: Budget) -> None:
    """Whether a step sends no more than it may.

    ::

        check_budget(step.explain(), {"tp": {"all_reduce": 4_000_000, "all_gather": 0}, "dp": 1_000_000})

    Args:
        budget: axes (``"tp"``, ``"dp,tp"``) to the bytes that a rank may move over them, or kind of collective to
            bytes, where other kinds may not be at all.  Axes that are not named may carry what they do.

    Raises:
        ExplicitError: what is too much; names the largest collective, its line, and what would avoid it.
        MeshwrightError: axes that the mesh has not.
    """
    known = [] if why.mesh is None else list(why.mesh.axes)
    for axes, allowed in budget.items():
        unknown = [a for a in axes.split(",") if a not in known]
        if unknown:
            raise MeshwrightError(f"budget: there is no axis {unknown[0]!r}{near(unknown[0], known)}")
        sent = [c for c in why.collectives if ",".join(c.axes) == axes]
        if not isinstance(allowed, Mapping):
            _check(sent, allowed, f"over {axes}")
            continue
        for kind in dict.fromkeys((*allowed, *(c.kind for c in sent))):
            _check([c for c in sent if c.kind == kind], allowed.get(kind, 0), f"by {kind} over {axes}")


def _check(sent: list[Collective], most: float, where: str) -> None:
    total = sum(c.bytes for c in sent)
    if total > most:
        worst = max(sent, key=lambda c: c.bytes)
        raise ExplicitError(
            f"a step moves {in_bytes(total)} {where}, and {in_bytes(most)} are allowed; the largest of {len(sent)}: "
            f"{worst}. {avoided(worst)}"
        )


def avoided(c: Collective) -> str:
    """What would be done without a collective, in words."""
    if c.parameter and c.role in ("backward", "optimizer"):
        axes = ",".join(c.axes)
        return f"It goes where {c.parameter} is split over {axes}, or where the batch is not"
    if isinstance(c.dst, Layout):
        return f"It goes where {c.tensor} lies as {in_words(c.dst)} from the start: say so in layouts=, or mw.constrain"
    return "It goes where what it joins is asked for apart"


def grown(before: Mapping[str, Any], after: Account) -> list[str]:
    """What a step sends more than one that was explained before (``to_dict()``), a line for each kind and axes.

    Raises:
        MeshwrightError: ``before`` is no explanation.
    """
    try:
        old = {(t["role"], t["kind"], tuple(t["axes"])): (t["count"], t["bytes"]) for t in before["totals"]}
    except (KeyError, TypeError) as error:
        raise MeshwrightError(f"no explanation to compare with: {error!r}; write one with explain --json") from None
    lines = []
    for t in after.totals:
        count, nbytes = old.get((t.role, t.kind, t.axes), (0, 0))
        if t.bytes > nbytes or t.count > count:
            alike = [c for c in after.collectives if (c.role, c.kind, c.axes) == (t.role, t.kind, t.axes)]
            worst = max(alike, key=lambda c: c.bytes)
            lines.append(
                f"{t.role} {t.kind} over {','.join(t.axes)}: {t.count} of {in_bytes(t.bytes)}, before {count} of "
                f"{in_bytes(nbytes)}; the largest: {worst}. {avoided(worst)}"
            )
    return lines


__all__ = ["Budget", "check_budget", "grown"]
