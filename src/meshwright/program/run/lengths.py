"""Batches of many sizes: after captures that differ in sizes alone, one program serves the sizes that come next."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

from ... import collective
from ...errors import CaptureError
from ...mesh import Mesh
from ..ir.program import WHOLE
from ..ir.sizes import Fit, ManySizes, Unlike, Variables, many_sizes
from .bind import Code, CompiledVariant
from .runner import Compiled

if TYPE_CHECKING:
    from ..capture.conditions import Conditions

Shapes = tuple[tuple[int, ...], ...]
Dim = tuple[int, int]  # number of a tensor of the batch, and its dim
Read = tuple[tuple[str, str], ...]  # names and numbers
Ask = Callable[[Mapping[int, Sequence[int]]], "Conditions"]

FEWEST = 3  # captures: two that differ and one that agrees
MOST = 8
_LARGER = 4  # times what was seen: there other layouts may be the cheaper ones


@dataclass
class Many:
    """A program for batches of many sizes, and for which.

    Attributes:
        base: sizes at which the variables are 0.
        steps: of each variable, between two sizes that it serves.
        places: of each variable, the dims that have its size.
        ends: of each variable, the least and the largest size that was captured.
        like: the capture at ``base``; all that it is besides sizes, this is too.
    """

    sizes: ManySizes
    base: Shapes
    steps: tuple[int, ...]
    places: Sequence[Sequence[Dim]]
    ends: Sequence[tuple[int, int]]
    conditions: Conditions
    like: Capture

    def ready(self, variables: Variables, read: Read) -> CompiledVariant | None:
        """Bound for one size; None where the code may read other numbers now (``read``), or the model lies in memory
        as the program cannot take it."""
        like = self.like.ready
        served = read == self.like.read and like.follow()
        return like.at(self.sizes.at(variables), self.code, variables) if served else None

    @cached_property
    def code(self) -> Code:
        """What runs it, for all sizes."""
        whole = {} if self.sizes.program.pipeline else {WHOLE: self.sizes}
        parts = {**whole, **self.sizes.parts}
        return {name: Compiled(p.program, len(self.places)) for name, p in parts.items()}

    def variables(self, shapes: Shapes) -> Variables | None:
        """Those of a batch; None where it is not served."""
        made, expected = [], [list(s) for s in self.base]
        for places, step, (least, largest) in zip(self.places, self.steps, self.ends, strict=True):
            i, d = places[0]
            n = shapes[i][d]
            steps, rest = divmod(n - self.base[i][d], step)
            if rest or not least <= n <= _LARGER * largest:
                return None
            made.append(steps)
            for i, d in places:
                expected[i][d] = n
        served = tuple(map(tuple, expected)) == shapes and self.conditions.hold(shapes)
        return tuple(made) if served else None


@dataclass(frozen=True)
class Capture:
    """One of the captures of which a program for many is made.

    Attributes:
        ready: its program, bound.
        module: the graph of global ops.
        read: the numbers that the user's code may read.
    """

    ready: CompiledVariant
    module: Any
    read: Read


@dataclass
class _Seen:
    """What was captured of a step that differs in sizes alone.

    Attributes:
        asked: dims that vary to what sizes must fulfil, for each way that the code may take, or to why none can.
        many: of one remainder, or one way of the code, each.
        why: what stands against one program for all.
    """

    captures: dict[Shapes, Capture] = field(default_factory=dict)
    asked: dict[str, list[Conditions | Unlike]] = field(default_factory=dict)
    many: list[Many] = field(default_factory=list)
    why: str = ""

    def conditions(self, ask: Ask, last: Shapes, dims: Mapping[int, Sequence[int]]) -> Conditions:
        """What sizes must fulfil, asked once for the dims that vary and the way of the code at the last ones."""
        asked = self.asked.setdefault(repr(dims), [])
        for found in asked:
            if isinstance(found, Unlike):
                raise found
            if found.hold(last):
                return found
        if len(asked) == MOST:
            raise Unlike("the code branches on sizes in many ways")
        try:
            asked.append(ask(dims))
        except (Unlike, CaptureError) as error:
            asked.append(Unlike(str(error)))
            raise Unlike(str(error)) from error
        return cast("Conditions", asked[-1])


class Lengths:
    """Programs of a step by what else than sizes they are made for."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._seen: dict[Any, _Seen] = {}

    def captured(self, key: Any, shapes: Shapes, made: Capture, ask: Ask) -> None:
        """Note a capture, and make one program of several where that can be; all ranks call it together.

        Args:
            key: what else the program is made for.
            shapes: of the batch's tensors.
            ask: what sizes must fulfil, given the dims (of tensors, by number) that differ.
        """
        seen = self._seen[key] = self._seen.pop(key, _Seen())
        while len(self._seen) > MOST:
            del self._seen[next(iter(self._seen))]
        if len(seen.captures) == MOST:
            seen.captures.clear()
        seen.captures[shapes] = made
        if len(seen.captures) < FEWEST:
            return
        many, seen.why = None, ""
        for alike in _subsets(seen.captures, shapes):
            try:
                many = one_for_all(alike, shapes, self.mesh.size, partial(seen.conditions, ask, shapes))
                break
            except Exception as error:  # nothing is lost but time, and the other ranks wait for this one
                seen.why = str(error) if isinstance(error, Unlike) else f"{type(error).__name__}: {error}"
        if self.mesh.size > 1:
            mine = repr(many and (many.steps, many.places, many.ends))
            if len(set(collective.all_gather_object(mine, collective.group(self.mesh)))) > 1:
                many = None
        if many is not None:
            seen.many = [*[m for m in seen.many if many.variables(m.base) is None], many][-MOST:]

    def why(self, key: Any) -> str:
        """What stands against one program for all sizes; empty if nothing is known to."""
        return self._seen[key].why if key in self._seen else ""

    def serving(self, key: Any, shapes: Shapes) -> tuple[Many, Variables] | None:
        """The program for a batch, and the variables there; None if none serves it."""
        for many in self._seen[key].many if key in self._seen else ():
            variables = many.variables(shapes)
            if variables is not None:
                return many, variables
        return None

    def forget(self, key: Any) -> None:
        """What was captured no longer is what the model holds."""
        del self._seen[key]


def _varying(captures: Iterable[Shapes], last: Shapes) -> list[list[Dim]]:
    """The dims that vary, those together that vary in the same way."""
    held: dict[tuple[int, ...], list[Dim]] = {}
    for i, sizes in enumerate(last):
        for d, n in enumerate(sizes):
            if any(s[i][d] != n for s in captures):
                held.setdefault(tuple(s[i][d] for s in captures), []).append((i, d))
    return list(held.values())


def _subsets(captures: Mapping[Shapes, Capture], last: Shapes) -> Iterator[Mapping[Shapes, Capture]]:
    """All captures for which the code read the same numbers as for the last one, then those of them that differ from it
    in one size alone: an epoch's last batch is smaller."""
    captures = {s: c for s, c in captures.items() if c.read == captures[last].read}
    yield captures
    varying = _varying(captures, last)
    for own in varying if len(varying) > 1 else ():
        others = [of[0] for of in varying if of is not own]
        yield {s: r for s, r in captures.items() if all(s[i][d] == last[i][d] for i, d in others)}


def one_for_all(captures: Mapping[Shapes, Capture], last: Shapes, parts: int, ask: Ask) -> Many:
    """One program in place of several that were captured.

    Args:
        captures: shapes of the batch's tensors to what was captured for them.
        last: the shapes of the one captured last, which the others are compared with.
        parts: into how many a mesh may cut a size.
        ask: what sizes must fulfil, given the dims that differ.

    Raises:
        Unlike: no program serves those of one remainder, or too few were captured.
    """
    shapes = sorted(captures, key=lambda s: s != last)
    varying, why = _varying(shapes, last), Unlike("more batches of other sizes are needed")
    if len(varying) > 2:
        raise Unlike(f"{len(varying)} sizes vary by themselves")
    if len(shapes) < FEWEST:
        raise why
    dims = sorted(itertools.chain(*varying))
    conditions, numbers = ask({i: [d for j, d in dims if j == i] for i, _ in dims}), range(1, parts + 1)
    divisors = [n * conditions.divisor for n in numbers if parts % n == 0]
    places = [of[0] for of in varying]
    for steps in sorted(itertools.product(divisors, repeat=len(places)), key=math.prod):
        points: dict[Shapes, Variables] = {}
        for s in filter(conditions.hold, shapes):
            point = [divmod(s[i][d] - last[i][d], step) for (i, d), step in zip(places, steps, strict=True)]
            if not any(rest for _, rest in point):
                points[s] = tuple([n for n, _ in point])
        if len(points) < FEWEST or last not in points:
            continue
        try:
            conditions.explain({s: captures[s].module for s in points})
            sizes = many_sizes([captures[s].ready.program for s in points], Fit(list(points.values())))
        except Unlike as error:
            why = error
            continue
        seen = [[s[i][d] for s in points] for i, d in places]
        ends = [(min(n), max(n)) for n in seen]
        return Many(sizes, last, steps, varying, ends, conditions, captures[last])
    raise why


__all__ = ["Lengths", "Many", "one_for_all"]
