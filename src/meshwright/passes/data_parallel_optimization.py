"""The data-parallel optimisation: fewer, larger reductions of gradients, started as soon as they can be.

The idea is that of PaddlePaddle's pass of this name: prune the scaling of each gradient, fuse all-reduces, overlap them
with the backward.  Here on a graph in which gradients, their producers and the first use of each sum are known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import PassError
from ..program.ir.nodes import value_of
from ..program.ir.program import Program
from ..program.ir.subgraphs import copied
from .buckets import FusedBucket, Network, by_limit, by_time, by_unit, in_order
from .fusing import Fusing
from .gathers import gathered
from .gradients import Gradients, SentGradient
from .levels import flattened
from .pass_manager import Pass, PassRecord, register
from .scaling import Pruned, prune


@register
@dataclass(frozen=True)
class DataParallelOptimization(Pass):
    """Prune the scaling of gradients, fuse their all-reduces, overlap them with the backward.

    Works on every reduction of a gradient over ranks, whatever the axes; reduce-scatters are overlapped, not fused.

    Attributes:
        bucket_bytes: gradients of one group and dtype share a collective up to this many bytes; ``"auto"`` cuts them so
            that, by a model of the backward and the network, the last sum is there soonest.
        prune: take factors off gradients: the backward starts from the factor if all have the same one.
        fuse: let gradients share collectives.
        overlap: start a collective as soon as its last gradient exists and wait at its first use; what has arrived is
            updated while the last ones are under way.  Otherwise start and wait after the backward.
        alpha_us, gb_per_s: latency of a collective in microseconds and bandwidth of a rank in gigabytes per second,
            for ``"auto"``.
        gflops: arithmetic of a rank in 1e9 operations per second, for ``"auto"``.

    Raises:
        PassError: options out of range; in :meth:`apply` a bucket smaller than an element, or a gradient that is
            scaled but not summed.
    """

    name = "data-parallel-optimization"

    bucket_bytes: int | Literal["auto"] = "auto"
    prune: bool = True
    fuse: bool = True
    overlap: bool = True
    alpha_us: float = 100.0
    gb_per_s: float = 1.0
    gflops: float = 100.0

    def __post_init__(self) -> None:
        size = self.bucket_bytes
        if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise PassError(f"{self.name}: bucket_bytes={size!r}: a number of bytes or 'auto' was expected")
        for option in ("prune", "fuse", "overlap"):
            if not isinstance(getattr(self, option), bool):
                raise PassError(f"{self.name}: {option}={getattr(self, option)!r}: True or False was expected")
        for option in ("alpha_us", "gb_per_s", "gflops"):
            number = getattr(self, option)
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not number > 0:
                raise PassError(f"{self.name}: {option}={number!r}: a number above 0 was expected")

    def apply(self, program: Program) -> tuple[Program, PassRecord]:
        """The program with fewer reductions of gradients, which run beside the backward."""
        made, record = self._one(program, [])
        parts, ends, reduced = {}, {runs[-1] for runs in made.schedules.values()}, list[FusedBucket]()
        for name, part in made.parts.items():
            # What adds to sums adds to them as the part does that uses them.
            buckets = reduced if program.pipeline is not None else []
            parts[name], other = replace(self, prune=self.prune and name in ends)._one(part, buckets)
            record = replace(record, lines=(*record.lines, f"the part {name}: {other.summary}"))
        return replace(made, parts=parts), record

    def _one(self, program: Program, buckets: list[FusedBucket]) -> tuple[Program, PassRecord]:
        """One of the programs of a step.

        Args:
            buckets: those of other parts, to which it adds its own.
        """
        made, joined = flattened(copied(program))
        pruned = prune(made) if self.prune else Pruned()
        reductions: list[SentGradient] = []
        before = len(buckets)
        in_place, later = 0, True
        while later:
            gradients = Gradients(made)
            fusing = Fusing(made, gradients, self.overlap)
            fusing.splits = not reductions and not gradients.later  # else sums wait for sums
            cut = self._buckets(gradients)
            for bucket in cut:
                fusing.run(bucket)
            made = fusing.done()
            reductions += gradients.reductions
            buckets += cut
            in_place, later = in_place + fusing.in_place, gradients.later
        made, gathers = gathered(made, buckets, self.fuse, self.overlap)
        return made, _record(reductions, buckets[before:], pruned, in_place, joined, gathers)

    def _buckets(self, gradients: Gradients) -> list[FusedBucket]:
        reductions = gradients.reductions
        if isinstance(self.bucket_bytes, int):
            for r in reductions:
                self._large_enough(r, self.bucket_bytes)
        if not self.fuse:
            return in_order([FusedBucket((r,), "fuse=False") for r in reductions])
        stored = by_unit([r for r in reductions if r.unit], gradients)
        rest = [r for r in reductions if not r.unit]
        if isinstance(self.bucket_bytes, int):
            return in_order([*stored, *by_limit(rest, self.bucket_bytes, gradients)])
        network = Network(self.alpha_us * 1e-6, self.gb_per_s * 1e9, self.gflops * 1e9)
        return in_order([*stored, *by_time(rest, network, gradients)])

    def _large_enough(self, r: SentGradient, size: int) -> None:
        value = value_of(r.gradient)
        if value is not None and size < value.dtype.itemsize:
            raise PassError(
                f"bucket_bytes={size} is smaller than one element of the gradient of {r.name} ({value.dtype}): give at "
                "least a few kilobytes, or 'auto'"
            )


def _record(
    reductions: list[SentGradient],
    buckets: list[FusedBucket],
    pruned: Pruned,
    in_place: int,
    joined: int,
    gathers: tuple[int, int],
) -> PassRecord:
    alone = [(b.members[0].name, b.why) for b in buckets if len(b.members) == 1]
    fused = [b for b in buckets if len(b.members) > 1]
    if not reductions:
        return PassRecord("no gradient is summed over ranks: nothing to do", details={"before": 0, "after": 0})
    lines = [f"{gathers[0]} gathers of parameters became {gathers[1]}"] if gathers[0] else []
    lines += [f"{joined} sums over one axis after another became one over all"] if joined else []
    lines += [pruned.text()] if pruned.text() else []
    for b in fused:
        first = b.members[0]
        axes = first.node.args[-2]
        lines.append(f"{len(b.members)} gradients over {axes}, {b.nbytes} bytes: {first.name} ... {b.members[-1].name}")
    lines += [f"alone: {name} ({why})" for name, why in alone]
    starts = pruned.folded[0] if len(pruned.folded) == 1 else pruned.folded or 1.0
    details: dict[str, Any] = {
        "before": len(reductions), "after": len(buckets), "alone": dict(alone), "pruned": pruned.removed,
        "folded": starts, "rescaled": dict(pruned.rescaled), "written_in_place": in_place, "joined": joined,
        "gathers": gathers,
        "buckets": [{"gradients": [r.name for r in b.members], "bytes": b.nbytes} for b in buckets],
    }  # fmt: skip
    summary = (
        f"{len(reductions)} reductions of gradients became {len(buckets)}: {len(fused)} fused, {len(alone)} alone; "
        f"{in_place} gradients are written where they are sent from"
    )
    return PassRecord(summary, tuple(lines), details)


__all__ = ["DataParallelOptimization"]
