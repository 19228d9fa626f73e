"""Ranks agree before they act: a mistake on one is an error on all, and what must be alike is compared."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

from ..errors import DesyncError, MeshwrightError
from ..mesh import Mesh
from ..ranks.process_group import by_threads
from .claims import listed
from .groups import Group, group
from .ops import all_gather_object


class Fact(NamedTuple):
    """One thing that ranks have alike.

    Attributes:
        text: what all of them have alike.
        value: what those at the same ``place`` have alike besides.
        fix: what to do where values differ.
    """

    text: str
    value: Any = None
    place: Hashable = ()
    fix: str = ""


_NOTHING = Fact("nothing more")


def differing(everyone: Mapping[int, Sequence[Fact]]) -> tuple[str, str]:
    """The first fact that ranks do not have alike, who has what, and the fix; empty if there is none.

    Args:
        everyone: rank to what it has.
    """
    found: list[tuple[Fact, str]] = []
    for facts in zip_longest(*everyone.values(), fillvalue=_NOTHING):
        sides: dict[Hashable, dict[Any, list[int]]] = {}
        texts: dict[str, list[int]] = {}
        for rank, fact in zip(everyone, facts, strict=True):
            texts.setdefault(fact.text, []).append(rank)
            sides.setdefault(fact.place, {}).setdefault(str(fact.value), []).append(rank)
        if len(texts) > 1 and not found:
            return listed(texts), ""
        apart = next((held for held in sides.values() if len(held) > 1), None)
        if apart is not None:
            found.append((facts[0], listed(apart)))
    if not found:
        return "", ""
    more = f" (and {len(found) - 1} more differ)" if len(found) > 1 else ""
    return f"different {found[0][0].text}{more}: {found[0][1]}", found[0][0].fix


def difference(of: Group, facts: Sequence[Fact]) -> tuple[str, str]:
    """As :func:`differing`, of what the ranks of a group bring; they call it together, and get the same."""
    return differing(dict(zip(of.ranks, all_gather_object(list(facts), of), strict=True)))


@contextmanager
def together(
    mesh: Mesh,
    what: str,
    said: str = "",
    fix: str = "",
    kind: type[MeshwrightError] = DesyncError,
    doing: str = "",
) -> Iterator[list[Fact]]:
    """Inside, ranks prepare what they then do together: a mistake on one is raised on all when they leave it.

    ``with together(mesh, "shard_tensor") as facts: ...; facts.append(Fact(...))``: what must be alike is appended.

    Args:
        what: is being done.
        said: the message where facts differ, with ``{}`` for which and how.
        fix: what to do then.
        kind: of the error on ranks that made no mistake themselves.
        doing: what ranks do together here that others may not be about to do, for errors.

    Raises:
        DesyncError: on every rank, where facts differ.
    """
    facts: list[Fact] = []
    if mesh.size == 1:
        yield facts
        return
    try:
        yield facts
    except Exception as error:
        all_gather_object((str(error) or repr(error), ""), group(mesh), doing)
        raise
    everyone = group(mesh)
    digest = hashlib.sha1(repr([(f.text, f.value) for f in facts]).encode()).hexdigest()
    seen = all_gather_object(("", digest), everyone, doing)
    for rank, (text, _) in zip(mesh.ranks, seen, strict=True):
        if text:
            raise kind(f"{what} failed on rank {rank}: {text}")
    if len(set(seen)) > 1:
        found, own = difference(everyone, facts)
        if found:
            end = f"; {own or fix}" if own or fix else ""
            raise DesyncError((said or f"{what}: the ranks disagree: {{}}").format(found) + end + by_threads())


__all__ = ["Fact", "difference", "differing", "together"]
