"""Passes outside of a captured step: parts of one for a rank without others, and all of it for all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import meshwright as mw
from meshwright.collective import together
from meshwright.passes import PassManager
from meshwright.passes.agreement import exchanging
from meshwright.passes.buckets import FusedBucket
from meshwright.passes.gathers import Gathers
from meshwright.passes.gradients import Gradients
from meshwright.passes.levels import Levels
from meshwright.passes.order import Order, view_of
from meshwright.program import Program
from meshwright.ranks import runtime


def flattened(program: Program) -> tuple[Program, int]:
    """The program with sums of sums as one, and how many went."""
    found = Levels(program)
    made, joined = found.join({program.rank: found.view})
    return made, len(joined)


def gathered(
    program: Program, buckets: Sequence[FusedBucket], fuse: bool, overlap: bool
) -> tuple[Program, tuple[int, int]]:
    """The program with gathers that run together, and how many it had and has."""
    found = Gathers(program, buckets, fuse, overlap)
    made, counts, _ = found.run({program.rank: found.view})
    return made, counts


def ordered(program: Program, *others: Program) -> Order:
    """What the rank of a program decides with those of other ranks."""
    found = [Gradients(p) for p in (program, *others)]
    views = {g.program.rank: view_of(g, dict.fromkeys((r.node for r in g.reductions), 0.0)) for g in found}
    return Order(found[0], views[program.rank], views)


def passed_together(programs: Sequence[Program], passes: Sequence[Any]) -> list[Program]:
    """The programs of all ranks after passes, which exchange what they see as those of a captured step do."""
    mesh = programs[0].mesh
    by_rank = {p.rank: p for p in programs}

    def fn() -> Program:
        with together(mesh, "passes") as facts, exchanging(facts.exchange):
            return PassManager(passes)(by_rank[runtime.RT.rank])

    return mw.simulate(fn, mesh)


__all__ = ["flattened", "gathered", "ordered", "passed_together"]
