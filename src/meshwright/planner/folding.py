"""Names of layers that are alike, as one glob."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from ..layout import LayoutLine

T = TypeVar("T")


def folded(lines: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    """Lines of layers that are alike as one: numbers in names become ``*`` where that means these names alone.

    The few that differ from most follow behind, as the last line that matches a name counts.

    Args:
        lines: name to what is said of it: a line, or placements.
        names: all names that a glob could match.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in lines:
        groups[re.sub(r"(?<![^.])\d+(?![^.])", "*", name)].append(name)
    known = {*names, *lines}
    made: dict[str, T] = {}
    others: dict[str, T] = {}
    for glob, members in groups.items():
        usual, count = Counter(_key(lines[n]) for n in members).most_common(1)[0]
        if count < 2 or {n for n in known if fnmatchcase(n, glob)} != {*members}:
            made.update({n: lines[n] for n in members})
            continue
        alike = [n for n in members if _key(lines[n]) == usual]
        made[glob] = _common([lines[n] for n in alike])
        others.update({n: lines[n] for n in members if n not in alike})
    return made | others


def _key(said: Any) -> str:
    placements = said.placements if isinstance(said, LayoutLine) else said
    return repr(sorted(placements.items()) if isinstance(placements, Mapping) else placements)


def _common(alike: list[Any]) -> Any:
    """One for all, with the reason that most have."""
    if not isinstance(alike[0], LayoutLine):
        return alike[0]
    reasons = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", line.reason) for line in alike)
    return replace(alike[0], reason=reasons.most_common(1)[0][0])


__all__ = ["folded"]
