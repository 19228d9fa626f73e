"""The way of a parameter from where it is stored to ops, and of its gradient back, as conversion steps.

    stored --copy--> on the device --cast--> in the dtype of ops --gather--> seen

Units run the steps of many parameters together, captured steps record those of each.  A gradient goes back by the
transpose of the gather, in the dtype that it is reduced in, then by a cast, and a copy to the host.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ...layout import At, Shard, Spec
from ...resharding import conversions, planner
from ...resharding.conversions import ConversionStep
from ...resharding.cost import bytes_of
from ...resharding.planner import ConversionPlan
from .packing import whole_over
from .stored import Stored

Steps = tuple[ConversionStep, ...]


class Chain(NamedTuple):
    """Of one parameter, the steps that are needed.

    Attributes:
        stored, seen: the specs at both ends; undecided on the axes that no step touches, whatever their types will be.
        copy, cast, gather: none or one step each, in this order; a gather is over all axes at once that split it;
            of what is at a stage, which captured steps alone know, another one comes before it.
        back: the gather of a value that is reduced: its transpose reduces the gradient.
    """

    stored: Spec
    seen: Spec
    copy: Steps
    cast: Steps
    gather: Steps
    back: Steps

    @property
    def plan(self) -> ConversionPlan:
        """All of the way there."""
        steps = self.copy + self.cast + self.gather
        returned = bytes_of(conversions.transpose(self.back))
        return ConversionPlan(self.stored, self.seen, steps, bytes_of(steps), returned)


@lru_cache(4096)
def chain(spec: Spec, how: Stored) -> Chain:
    """The chain of a parameter with this record, of which ``spec`` says how it is stored."""
    moved = sum(1 << a for a in how.axes)
    compute, reduce = (spec.dtype,) * 2 if how.dtypes is None else (how.dtypes.compute, how.dtypes.reduce)
    stored = Spec(
        spec.shape,
        spec.dtype,
        spec.layout,
        undecided_mask=spec.mesh.everywhere & ~moved,
        comm_formats=spec.comm_formats,
    )
    near, wide = stored.with_(dtype=compute), stored.with_(dtype=reduce)
    (gather, seen), (back, _) = (_gathered(s, how.axes) for s in (near, wide))
    if how.dtypes is not None and how.dtypes.gather is not None:
        gather = conversions.gathered_as(gather, how.dtypes.gather)
    return Chain(
        stored,
        seen,
        (ConversionStep("to_device", (), stored, stored),) if how.device else (),
        (ConversionStep("cast", (), stored, near),) if compute is not spec.dtype else (),
        gather,
        back,
    )


def _gathered(spec: Spec, axes: tuple[int, ...]) -> tuple[Steps, Spec]:
    """The steps to the whole value, and its spec: to all stages, which do the same with what is at one, and over the
    axes that split it, of which each rank uses it for its own part."""
    steps: Steps = ()
    at = tuple(a for a in axes if isinstance(spec.layout.placements[a], At))
    split = tuple(a for a in axes if a not in at)
    for own, reduced in ((at, 0), (split, sum(1 << a for a in split))):
        if own:
            whole = spec.with_(layout=whole_over(spec, own), grad_partial_mask=reduced)
            steps, spec = (*steps, conversions.between(spec, whole, own)), whole
    return steps, spec


def between(have: Spec, want: Spec) -> ConversionPlan:
    """The plan between two layouts, of which one cuts a dim further: over all axes that do at once, before anything
    else is reduced, or after.  Where some axes sum what they cut and others do not, no one step does both."""
    pairs = enumerate(zip(have.layout.placements, want.layout.placements, strict=True))
    axes = tuple(a for a, (p, q) in pairs if p != q and isinstance(q, Shard) != isinstance(p, Shard))
    if len(axes) < 2 or len({type(s.layout.placements[a]) for s in (have, want) for a in axes}) > 2:
        return planner.plan(have, want)
    layout = have.layout
    for a in axes:
        layout = layout.replace(a, want.layout.placements[a])
    there = have.with_(layout=layout)
    rest = planner.plan(there, want)
    steps = (conversions.between(have, there, axes), *rest.steps)
    return ConversionPlan(have, want, steps, bytes_of(steps), bytes_of(conversions.transpose(steps)))


__all__ = ["Chain", "between", "chain"]
