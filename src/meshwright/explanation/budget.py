"""What a step may send: bytes per axes and kind, and what became more since an explanation that was kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..collective import KINDS, Group
from ..errors import ExplicitError, MeshwrightError, near
from ..layout import Layout
from ..ranks import runtime
from ..resharding.record import SINCE, Record
from .account import Account
from .entries import Collective, Total, in_bytes, in_words, recorded

Budget = Mapping[str, int | float | Mapping[str, int | float]]


def check_budget(why: Account, budget: Budget) -> None:
    """Whether a step, or what ran, sends no more than it may.

    ::

        check_budget(step.explain(), {"tp": {"all_reduce": 4_000_000, "all_gather": 0}, "dp": 1_000_000})

    Args:
        why: of a captured step, or of eager code.
        budget: axes (``"tp"``, ``"dp,tp"``) to the bytes that a rank may move over them, or kind of collective to
            bytes, where other kinds may not be at all.  Axes that are not named may carry what they do.

    Raises:
        ExplicitError: what is too much; names the largest collective, its line, and what would avoid it.
        MeshwrightError: axes that the mesh has not, kinds that do not exist, what is no number of bytes.
    """
    known = known_axes() if why.mesh is None else list(why.mesh.axes)
    for axes, allowed in checked(budget, known).items():
        over = [t for t in why.totals if set(t.axes) == set(axes.split(","))]
        if not isinstance(allowed, Mapping):
            _check(why, over, allowed, f"over {axes}")
            continue
        for kind in dict.fromkeys((*allowed, *(t.kind for t in over))):
            _check(why, [t for t in over if t.kind == kind], allowed.get(kind, 0), f"by {kind} over {axes}")


def checked(budget: Budget, known: Sequence[str]) -> Budget:
    """A budget as it was given.

    Raises:
        MeshwrightError: it names axes that no mesh has, kinds of collectives that do not exist, or no number of bytes.
    """
    if not isinstance(budget, Mapping):
        raise MeshwrightError(f'budget={budget!r}: a dict, axes to bytes, was expected: {{"tp": 4_000_000}}')
    for axes, allowed in budget.items():
        unknown = [a for a in str(axes).split(",") if a not in known]
        if unknown and known:
            raise MeshwrightError(f"budget: there is no axis {unknown[0]!r}{near(unknown[0], known)}")
        kinds = allowed if isinstance(allowed, Mapping) else {}
        for kind in kinds:
            if kind not in KINDS:
                raise MeshwrightError(f"budget: {axes!r}: there is no collective {kind!r}{near(str(kind), KINDS)}")
        for most in kinds.values() if isinstance(allowed, Mapping) else [allowed]:
            if isinstance(most, bool) or not isinstance(most, (int, float)) or not most >= 0:
                raise MeshwrightError(f"budget: {axes!r}: {most!r} is no number of bytes, 0 or more")
    return budget


def known_axes() -> list[str]:
    """Names of the axes of all meshes over which this rank has groups."""
    return list(dict.fromkeys(a for g in runtime.RT.groups.values() if isinstance(g, Group) for a in g.axes))


def _check(why: Account, over: Sequence[Total], most: float, where: str) -> None:
    total = sum(t.bytes for t in over)
    if total <= most:
        return
    kinds = {(t.kind, t.axes) for t in over}
    listed = [c for c in why.collectives if {(k, c.axes) for k in c.kind.split(" + ")} & kinds]
    worst = max(listed, key=lambda c: c.bytes, default=None)
    beside = total - sum(c.bytes for c in listed)  # of eager code: gradients that are synchronised
    if worst is None or beside > worst.bytes:
        axes = ",".join(over[0].axes)
        raise ExplicitError(
            f"{_too_much(total, where, most)}; most of it, {in_bytes(beside)}, sums gradients of parameters over "
            f"{axes}. It goes where parameters are split over {axes} as ops see them, or where the batch is not"
        )
    raise ExplicitError(f"{_too_much(total, where, most)}; the largest of {len(listed)}: {worst}. {avoided(worst)}")


def _too_much(total: float, where: str, most: float) -> str:
    return f"a step moves {in_bytes(total)} {where}, and {in_bytes(most)} are allowed"


class Spending(list[Record]):
    """Records of eager code, of which each is held against a budget before anything is sent for it.

    What counts are bytes of layouts, which all ranks share: so all of them refuse alike.
    """

    def __init__(self, budget: Budget) -> None:
        super().__init__()
        self.budget, self._spent = budget, dict[tuple[str, frozenset[str]], float]()

    def append(self, r: Record) -> None:
        """Raises ExplicitError where it is too much."""
        super().append(r)
        if len(r.kinds) != 1:
            return  # whose bytes are counted when they ran
        (kind,), axes = r.kinds, frozenset(r.axes)
        self._spent[kind, axes] = self._spent.get((kind, axes), 0.0) + r.bytes
        for name, allowed in self.budget.items():
            if frozenset(name.split(",")) != axes:
                continue
            by_kind = isinstance(allowed, Mapping)
            most = allowed.get(kind, 0) if isinstance(allowed, Mapping) else allowed
            total = sum(n for (k, a), n in self._spent.items() if a == axes and (not by_kind or k == kind))
            if total > most:
                where = f"by {kind} over {name}" if by_kind else f"over {name}"
                raise ExplicitError(f"{_too_much(total, where, most)}, with {r}. {avoided(recorded(len(self), r))}")


def avoided(c: Collective) -> str:
    """What would be done without a collective, in words."""
    if c.parameter and c.role in ("backward", "optimizer"):
        axes = ",".join(c.axes)
        return f"It goes where {c.parameter} is split over {axes}, or where the batch is not"
    if isinstance(c.src, Layout) and c.src.partial and isinstance(c.dst, Layout):
        axes = ", ".join(c.axes)
        since = c.reason.partition(SINCE)[2] or c.op
        return f"It goes where nothing that is summed is split over {axes}, as in {since}: say so in layouts="
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


__all__ = ["Budget", "Spending", "check_budget", "checked", "grown", "known_axes"]
