"""What ranks exchange while passes run, so that a decision which reaches a collective is one decision of all ranks.

A pass looks at the program of its own rank, and other ranks may run other local ops: with one row autograd leaves out a
sum, and a step by hand may log on the first rank only.  So a pass exchanges what it sees (:func:`views_of`), and every
rank derives the same decision from what all of them see.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..collective import Fact, differing
from ..errors import DesyncError
from ..program.check.facts import CAPTURED, REBUILD
from ..program.ir.program import WHOLE, Program, part_named

Exchange = Callable[[str, Any], Sequence[Any]]  # what a value is, and this rank's: the values of all ranks

_exchange: ContextVar[Exchange | None] = ContextVar("how passes exchange what they see", default=None)


@contextmanager
def exchanging(by: Exchange) -> Iterator[None]:
    """Within this context passes exchange what they see by this function; elsewhere a rank decides alone."""
    token = _exchange.set(by)
    try:
        yield
    finally:
        _exchange.reset(token)


class Answers:
    """The answers that passes were given when a step was captured, to apply them again without the other ranks."""

    def __init__(self) -> None:
        self._given: list[tuple[str, Sequence[Any]]] = []

    def noting(self, exchange: Exchange) -> Exchange:
        """The same exchange, whose answers are noted."""

        def noted(about: str, value: Any) -> Sequence[Any]:
            self._given.append((about, exchange(about, value)))
            return self._given[-1][1]

        return noted

    def again(self, ranks: int) -> Exchange:
        """An exchange that gives the same answers in the same order; what nobody asked before a rank decides alone."""
        rest = iter(self._given)

        def answered(about: str, value: Any) -> Sequence[Any]:
            known, answer = next(rest, ("", ()))
            return answer if known == about else [value] * ranks

        return answered


@dataclass
class StepPart:
    """One of the programs of a step while a pass changes it.

    Attributes:
        name: of the part; ``program``: as it is now.
        peers: the ranks that have it, too: of a pipeline those of the same stage.
    """

    name: str
    program: Program
    peers: Collection[int]


def parts_of(program: Program) -> list[StepPart]:
    """A program and its parts; those of a stage are shared by the ranks of that stage."""
    mesh, how = program.mesh, program.pipeline
    everyone: Collection[int] = mesh.ranks
    peers = everyone
    if how is not None and any(map(part_named, program.parts)):
        here = mesh.coordinate(program.rank)[how.axis]
        peers = {r for r in mesh.ranks if mesh.coordinate(r)[how.axis] == here}
    return [StepPart(WHOLE, program, everyone), *(StepPart(name, part, peers) for name, part in program.parts.items())]


def views_of(
    about: str, parts: Sequence[StepPart], views: Mapping[str, Any]
) -> Iterator[tuple[StepPart, dict[int, Any]]]:
    """Each part, and what its ranks see of it, in the order of the ranks.

    Every rank calls this equally often.  Where passes run on one rank alone, that rank's view is the only one.

    Args:
        about: what is exchanged.
        views: this rank's, by the name of the part: tuples of numbers and text.
    """
    exchange, program = _exchange.get(), parts[0].program
    mine = dict(views)
    heard = {program.rank: mine}
    if exchange is not None:
        heard = dict(zip(program.mesh.ranks, exchange(about, mine), strict=True))
    for part in parts:
        of = {rank: seen.get(part.name) for rank, seen in heard.items() if rank in part.peers}
        if None in of.values():
            check_alike({r: [Fact(f"{'no' if v is None else 'a'} part {part.name}")] for r, v in of.items()})
        yield part, of


def on_any_rank(about: str, flag: bool) -> bool:
    """Whether something is so on some rank.  Every rank calls this equally often."""
    exchange = _exchange.get()
    return flag if exchange is None else any(exchange(about, flag))


def check_alike(facts: Mapping[int, Sequence[Fact]]) -> None:
    """Raises DesyncError for the first fact that ranks do not have alike: it names the gradient."""
    found, _ = differing(facts)
    if found:
        raise DesyncError(f"{CAPTURED.format(found)}; {REBUILD}")


def alike_in_groups(program: Program, axes: Collection[str], values: Mapping[int, Any]) -> bool:
    """Whether in each group of ranks over these axes all ranks that are known have the same value."""
    if len(set(values.values())) == 1:
        return True
    mesh, known = program.mesh, dict[Any, Any]()
    along = sorted(mesh.axis_index(a) for a in axes)
    return all(known.setdefault(tuple(mesh.group_ranks(r, along)), v) == v for r, v in values.items())


__all__ = [
    "Answers",
    "Exchange",
    "StepPart",
    "alike_in_groups",
    "check_alike",
    "exchanging",
    "on_any_rank",
    "parts_of",
    "views_of",
]
