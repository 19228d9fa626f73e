"""The data-parallel optimisation: fewer, larger reductions of gradients, started as soon as they can be.

The idea is that of PaddlePaddle's pass of this name: prune the scaling of each gradient, fuse all-reduces, overlap them
with the backward.  Here on a graph in which gradients, their producers and the first use of each sum are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import HardwareError, PassError
from ..machines import Network, hardware
from ..program.ir.nodes import value_of
from ..program.ir.program import WHOLE, Program
from ..program.ir.subgraphs import copied
from .agreement import StepPart, on_any_rank, parts_of, views_of
from .buckets import FusedBucket, by_limit, by_time, by_unit, in_order, times
from .fusing import Fusing
from .gathers import Gathers
from .gradients import Gradients, SentGradient, sums_of
from .levels import Levels
from .order import Order, Start, view_of
from .pass_manager import Pass, PassRecord, register
from .scaling import Pruned, Pruning


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
        hardware: the machine, as ``mw.hardware`` knows it, for ``"auto"``: how fast ranks send and compute.
        alpha_us, gb_per_s: other numbers than the machine's: latency of a collective in microseconds and bandwidth of a
            rank in gigabytes per second, for ``"auto"``.
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
    hardware: str = "cpu-gloo"
    alpha_us: float | None = None
    gb_per_s: float | None = None
    gflops: float | None = None

    def __post_init__(self) -> None:
        size = self.bucket_bytes
        if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise PassError(f"{self.name}: bucket_bytes={size!r}: a number of bytes or 'auto' was expected")
        for option in ("prune", "fuse", "overlap"):
            if not isinstance(getattr(self, option), bool):
                raise PassError(f"{self.name}: {option}={getattr(self, option)!r}: True or False was expected")
        for option in ("alpha_us", "gb_per_s", "gflops"):
            number = getattr(self, option)
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not number > 0:
                raise PassError(f"{self.name}: {option}={number!r}: a number above 0 was expected")
        try:
            hardware(self.hardware)
        except HardwareError as error:
            raise PassError(f"{self.name}: {error}") from error

    def apply(self, program: Program) -> tuple[Program, PassRecord]:
        """The program with fewer reductions of gradients, which run beside the backward."""
        ends = {WHOLE, *(runs[-1] for runs in program.schedules.values())}
        works = [_Work(p) for p in parts_of(program)]
        for work in works:
            work.program = copied(work.program)
        self._join(works)
        if self.prune:
            self._prune([w for w in works if w.part.name in ends])
        self._reduce(works)
        self._gather(works, program.pipeline is not None)
        whole, *parts = works
        record = whole.record()
        lines = (*record.lines, *(f"the part {w.part.name}: {w.record().summary}" for w in parts))
        decisions = [f"{w.part.name}: {d}" for w in works for d in w.decisions]
        made = replace(whole.program, parts={w.part.name: w.program for w in parts})
        return made, replace(record, lines=lines, decisions=tuple(decisions))

    def _join(self, works: Sequence[_Work]) -> None:
        """Sums over one axis after another become one."""
        found = {w.part.name: Levels(w.program) for w in works}
        views = views_of("sums of sums", [w.part for w in works], {n: f.view for n, f in found.items()})
        for work, (part, heard) in zip(works, views, strict=True):
            work.program, joined = found[part.name].join(heard)
            work.joined, work.decisions = len(joined), [*work.decisions, *joined]

    def _prune(self, works: Sequence[_Work]) -> None:
        """Factors go to where backwards start, or behind the sums."""
        parts, found = [w.part for w in works], {w.part.name: Pruning(w.program) for w in works}
        views = views_of("factors of gradients", parts, {n: f.factors for n, f in found.items()})
        could = {part.name: found[part.name].look(heard) for part, heard in views}
        for work, (part, heard) in zip(works, views_of("which factors may go", parts, could), strict=True):
            work.pruned = found[part.name].apply(heard)
            work.decisions += work.pruned.decisions

    def _reduce(self, works: Sequence[_Work]) -> None:
        """Reductions become buckets that start where all ranks start them; sums of sums in another round."""
        network = self._network(works[0].program)
        parts, later = [w.part for w in works], True
        while later:
            later = False
            found: dict[str, Gradients] = {}
            for part, heard in views_of("which sums come first", parts, {p.name: sums_of(p.program) for p in parts}):
                every, first = (set.intersection(*map(set, of)) for of in zip(*heard.values(), strict=True))
                found[part.name] = Gradients(part.program, first)
                later |= bool(first) and not first.issuperset(every)
            mine = {n: view_of(g, times(g, network)) for n, g in found.items()}
            for work, (part, views) in zip(works, views_of("sums of gradients", parts, mine), strict=True):
                gradients = found[part.name]
                order = Order(gradients, mine[part.name], views)
                fusing = Fusing(work.program, gradients, self.overlap)
                fusing.splits = not work.reductions and not gradients.later  # else sums wait for sums
                starts = order.starts(self._buckets(order, network), self.overlap)
                fusing.run(order, starts)
                work.program = fusing.done()
                work.note(order, starts, fusing.in_place)
            later = on_any_rank("sums of sums are left", later)

    def _gather(self, works: Sequence[_Work], staged: bool) -> None:
        """Gathers of parameters become one for each unit or bucket.

        Args:
            staged: of a pipeline, whose parts update what other parts have summed.
        """
        together = [b for w in works[1:] for b in w.buckets]
        found = {}
        for w in works:
            buckets = together if staged and w is not works[0] else w.buckets
            found[w.part.name] = Gathers(w.program, buckets, self.fuse, self.overlap)
        views = views_of("gathers of parameters", [w.part for w in works], {n: f.view for n, f in found.items()})
        for work, (part, heard) in zip(works, views, strict=True):
            work.program, work.gathers, decisions = found[part.name].run(heard)
            work.decisions += decisions

    def _network(self, program: Program) -> Network:
        """What the slowest links of the mesh send, unless options say otherwise."""
        found = hardware(self.hardware).network(1, program.mesh.size)
        said = {
            name: value * scale
            for name, value, scale in (
                ("latency", self.alpha_us, 1e-6), ("bandwidth", self.gb_per_s, 1e9), ("flops", self.gflops, 1e9),
            )
            if value is not None
        }  # fmt: skip
        return replace(found, **said)

    def _buckets(self, order: Order, network: Network) -> list[FusedBucket]:
        reductions = order.sums()
        if isinstance(self.bucket_bytes, int):
            for r in reductions:
                self._large_enough(r, self.bucket_bytes)
        if not self.fuse:
            return in_order([FusedBucket((r,), "fuse=False") for r in reductions])
        stored = by_unit([r for r in reductions if r.unit], order)
        rest = [r for r in reductions if not r.unit]
        if isinstance(self.bucket_bytes, int):
            return in_order([*stored, *by_limit(rest, self.bucket_bytes, order)])
        return in_order([*stored, *by_time(rest, network, order)])

    def _large_enough(self, r: SentGradient, size: int) -> None:
        value = value_of(r.gradient)
        if value is not None and size < value.dtype.itemsize:
            raise PassError(
                f"bucket_bytes={size} is smaller than one element of the gradient of {r.name} ({value.dtype}): give at "
                "least a few kilobytes, or 'auto'"
            )


@dataclass
class _Work:
    """One of the programs of a step while the pass changes it, and what became of it.

    Attributes:
        part: which it is, and on which ranks.
        reductions, buckets: of gradients; ``in_place``: how many are written where they are sent from.
        joined: sums that went into others; ``gathers``: of parameters, before and after.
        decisions: what reaches a collective, in words, the same on all ranks.
    """

    part: StepPart
    reductions: list[SentGradient] = field(default_factory=list)
    buckets: list[FusedBucket] = field(default_factory=list)
    pruned: Pruned = field(default_factory=Pruned)
    in_place: int = 0
    joined: int = 0
    gathers: tuple[int, int] = (0, 0)
    decisions: list[str] = field(default_factory=list)

    @property
    def program(self) -> Program:
        """As it is now."""
        return self.part.program

    @program.setter
    def program(self, made: Program) -> None:
        self.part.program = made

    def note(self, order: Order, starts: Sequence[Start], in_place: int) -> None:
        """Note what became of the reductions of a round."""
        self.reductions += order.gradients.reductions
        self.buckets += [s.bucket for s in starts]
        self.in_place += in_place
        for start in starts:
            members = start.bucket.members
            what = f"{members[0].kind} over {members[0].node.args[-2]}, {start.bucket.nbytes} bytes"
            names = " and ".join(r.name for r in members)
            self.decisions.append(f"gradients of {names}: {what}, behind {start.slot} collectives")

    def record(self) -> PassRecord:
        """What was done, in words."""
        buckets, pruned, gathers = self.buckets, self.pruned, self.gathers
        alone = [(b.members[0].name, b.why) for b in buckets if len(b.members) == 1]
        fused = [b for b in buckets if len(b.members) > 1]
        if not self.reductions:
            return PassRecord("no gradient is summed over ranks: nothing to do", details={"before": 0, "after": 0})
        lines = [f"{gathers[0]} gathers of parameters became {gathers[1]}"] if gathers[0] else []
        lines += [f"{self.joined} sums over one axis after another became one over all"] if self.joined else []
        lines += [pruned.text()] if pruned.text() else []
        for b in fused:
            first, last = b.members[0], b.members[-1]
            axes = first.node.args[-2]
            lines.append(f"{len(b.members)} gradients over {axes}, {b.nbytes} bytes: {first.name} ... {last.name}")
        lines += [f"alone: {name} ({why})" for name, why in alone]
        starts = pruned.folded[0] if len(pruned.folded) == 1 else pruned.folded or 1.0
        details: dict[str, Any] = {
            "before": len(self.reductions), "after": len(buckets), "alone": dict(alone), "pruned": pruned.removed,
            "folded": starts, "rescaled": dict(pruned.rescaled), "written_in_place": self.in_place,
            "joined": self.joined, "gathers": gathers,
            "buckets": [{"gradients": [r.name for r in b.members], "bytes": b.nbytes} for b in buckets],
        }  # fmt: skip
        summary = (
            f"{len(self.reductions)} reductions of gradients became {len(buckets)}: {len(fused)} fused, {len(alone)} "
            f"alone; {self.in_place} gradients are written where they are sent from"
        )
        return PassRecord(summary, tuple(lines), details)


__all__ = ["DataParallelOptimization"]
