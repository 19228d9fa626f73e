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

_END = "the end"


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


class _Word(NamedTuple):
    """What a rank sends in one round: what it is about, the error that it met, and a value or its digest."""

    about: str
    error: str = ""
    value: Any = ""


class Facts(list[Fact]):
    """What ranks must have alike, and the rounds in which they exchange more before they compare that.

    Args:
        what: is being done; ``kind``: of the error on ranks that made no mistake; ``doing``: as of :func:`together`.

    Attributes:
        over: whether a round raised, on all ranks alike: nothing more is sent.
    """

    def __init__(self, mesh: Mesh, what: str, kind: type[MeshwrightError], doing: str) -> None:
        super().__init__()
        self.mesh, self.what, self.kind, self.doing, self.over = mesh, what, kind, doing, False

    def exchange(self, about: str, value: Any) -> list[Any]:
        """The values of all ranks, in the order of the mesh.

        Where all are alike only digests are sent, so ``repr`` must write a value as every process does.

        Args:
            about: what the value is, the same on all ranks.

        Raises:
            DesyncError: on every rank, where they exchange different things; or the error that a rank met.
        """
        if self.mesh.size == 1:
            return [value]
        if len({w.value for w in self._round(_Word(about, value=_digest(value)))}) == 1:
            return [value] * self.mesh.size
        return [w.value for w in self._round(_Word(f"{about}, where ranks differ", value=value))]

    def end(self) -> bool:
        """Whether all ranks have the same facts."""
        mine = _digest([(f.text, f.value) for f in self])
        return len({w.value for w in self._round(_Word(_END, value=mine))}) == 1

    def failed(self, error: Exception) -> None:
        """Let the others know that this rank met an error."""
        all_gather_object(_Word(_END, str(error) or repr(error)), group(self.mesh), self.doing)

    def _round(self, mine: _Word) -> list[_Word]:
        seen: list[_Word] = all_gather_object(mine, group(self.mesh), self.doing)
        steps: dict[str, list[int]] = {}
        for rank, word in zip(self.mesh.ranks, seen, strict=True):
            if word.error:
                self.over = True
                raise self.kind(f"{self.what} failed on rank {rank}: {word.error}")
            steps.setdefault(word.about, []).append(rank)
        if len(steps) > 1:
            self.over = True
            raise DesyncError(f"{self.what}: the ranks are not at the same step: {listed(steps)}{by_threads()}")
        return seen


def _digest(value: Any) -> str:
    return hashlib.sha1(repr(value).encode()).hexdigest()


@contextmanager
def together(
    mesh: Mesh,
    what: str,
    said: str = "",
    fix: str = "",
    kind: type[MeshwrightError] = DesyncError,
    doing: str = "",
) -> Iterator[Facts]:
    """Inside, ranks prepare what they then do together: a mistake on one is raised on all when they leave it.

    ``with together(mesh, "shard_tensor") as facts: ...; facts.append(Fact(...))``: what must be alike is appended.
    Values that ranks need of each other on the way are exchanged by ``facts.exchange(about, value)``.

    Args:
        what: is being done.
        said: the message where facts differ, with ``{}`` for which and how.
        fix: what to do then.
        kind: of the error on ranks that made no mistake themselves.
        doing: what ranks do together here that others may not be about to do, for errors.

    Raises:
        DesyncError: on every rank, where facts differ.
    """
    facts = Facts(mesh, what, kind, doing)
    if mesh.size == 1:
        yield facts
        return
    try:
        yield facts
    except Exception as error:
        if not facts.over:
            facts.failed(error)
        raise
    if not facts.end():
        found, own = difference(group(mesh), facts)
        if found:
            end = f"; {own or fix}" if own or fix else ""
            raise DesyncError((said or f"{what}: the ranks disagree: {{}}").format(found) + end + by_threads())


__all__ = ["Fact", "Facts", "difference", "differing", "together"]
