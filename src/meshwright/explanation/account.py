"""What a step or a piece of eager code sends and holds, as data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ..mesh import Mesh
from ..program.capture.ledger import OptionUse
from ..program.check.verify import ROLES
from ..ranks import runtime
from ..resharding.record import Record
from .entries import Collective, InputLayout, Total, Warned, folded, plain, recorded
from .memory import Memory
from .pipeline import PipelineAccount
from .timeline import Timeline


@dataclass
class Account:
    """Communication of a step or of a piece of eager code, and what it costs.

    Attributes:
        records: one entry per conversion that an op implied or somebody asked for, in order, with reasons.
        counts: every collective: kinds, axes and bytes.  Of a step what running it will count, to the byte; of eager
            code what ran.
        result: what the explained function returned (``explain(fn, ...)`` only).
        mesh, rank: whose program it is; None for eager code.
        collectives: the collectives of a step, or the recorded conversions of eager code, in order.
        laid: parameters, buffers and batch of a step and how they lie on the mesh.
        memory: what a rank holds along a step; None for eager code.
        update: the optimizer that the step contains, in words.
        notes: what else is to be known: what passes did.
        ledger: what was asked of a step, and what became of each request.
        time: when a rank computes, sends and waits along a step, as predicted; None where no hardware is known.
        pipeline: who computes what when, of a step that is cut into stages, and what their ranks hold.
    """

    records: list[Record] = field(default_factory=list)
    counts: runtime.Counts = field(default_factory=runtime.Counts)
    result: Any = None
    mesh: Mesh | None = None
    rank: int = 0
    listed: tuple[Collective, ...] | None = None
    laid: tuple[InputLayout, ...] = ()
    memory: Memory | None = None
    update: str = ""
    notes: tuple[str, ...] = ()
    ledger: tuple[OptionUse, ...] = ()
    pipeline: PipelineAccount | None = None
    time: Timeline | None = None

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """In the order in which they run."""
        if self.listed is not None:
            return self.listed
        return tuple(recorded(i, r) for i, r in enumerate(self.records))

    @property
    def bytes(self) -> float:
        """Bytes that the listed collectives move per rank."""
        return sum(c.bytes for c in self.collectives)

    @property
    def unlisted(self) -> int:
        """How many collectives of eager code ran that no op implied: those that synchronise gradients."""
        return 0 if self.listed is not None else self.counts.total - sum(len(r.kinds) for r in self.records)

    @property
    def totals(self) -> tuple[Total, ...]:
        """By role, kind and axes."""
        if self.listed is None:
            return tuple(Total("", k, a, n, b) for (k, a), (n, b) in self.counts.table.items())
        found: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
        for c in self.listed:
            entry = found.setdefault((c.role, c.kind, c.axes), [0, 0])
            entry[0] += 1
            entry[1] += int(c.bytes)
        order = sorted(found.items(), key=lambda e: (ROLES.index(e[0][0]), e[0][1:]))
        return tuple(Total(*key, *entry) for key, entry in order)

    @property
    def warnings(self) -> tuple[Warned, ...]:
        """Reductions that sum more than 8 ranks in fewer than 11 bits of significand."""
        listed = [(n, c) for n, c in folded(self.collectives) if c.narrow]
        made = [Warned(c.tensor, c.line, c.kind, c.axes, c.dtype, c.narrow, n) for n, c in listed]
        if self.listed is not None:
            return tuple(made)
        others = dict(self.counts.narrow)
        for r in self.records:
            for kind, dtype, ranks in zip(r.kinds, r.dtypes, r.sums, strict=True):
                alike = (k for k in others if (k[0], k[2], k[3]) == (kind, dtype, ranks) and {*k[1]} <= {*r.axes})
                if (key := next(alike, None)) is not None:
                    others[key] -= 1
        return (*made, *(Warned("gradients of parameters", "", *key, n) for key, n in others.items() if n > 0))

    # -- as data --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; see docs/explain.md for what the keys mean."""
        made: dict[str, Any] = {
            "mesh": None if self.mesh is None else dict(zip(self.mesh.axes, self.mesh.sizes, strict=True)),
            "rank": self.rank if self.mesh is not None else None,
            "update": self.update,
            "notes": list(self.notes),
            "ledger": [plain(e) for e in self.ledger],
            "warnings": [plain(w) for w in self.warnings],
            "collectives": self.counts.kinds,
            "bytes": self.counts.bytes,
            "total_bytes": self.counts.total_bytes,
            "copies": {way: {"count": n, "bytes": nbytes} for way, (n, nbytes) in self.counts.copies.items()},
            "totals": [plain(t) for t in self.totals],
            "records": [plain(c) for c in self.collectives],
            "layouts": [plain(x) for x in self.laid],
            "memory": None if self.memory is None else self.memory.to_dict(),
            "time": None if self.time is None else self.time.to_dict(),
            "pipeline": None if self.pipeline is None else self.pipeline.to_dict(),
        }
        return made

    def to_json(self, **how: Any) -> str:
        """``to_dict`` as one JSON object; ``how`` as for ``json.dumps``."""
        return json.dumps(self.to_dict(), **how)


__all__ = ["Account"]
