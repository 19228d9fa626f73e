"""Who am I: the rank, and what is kept per rank.

``RT`` is the Runtime of the running rank.  With real processes there is one.  Under ``simulate`` each rank
has its own, and the scheduler installs the running one at every switch.  So write ``from . import runtime``
and ``runtime.RT.rank``: a name imported from here would go stale.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist

# Not used, but imported while there is no process group: the defaults of its functions hold the one that they find,
# and PyTorch imports it in the middle of a run.  A group that is held is not destroyed, and its threads, which drop
# their tensors when they come to it, abort a process that is about to exit.
import torch.distributed.nn.functional  # noqa: F401


class Counts:
    """How often each kind of collective ran, and the bytes that it moved.

    ``table`` maps (kind, axis names) to [count, bytes].  The bytes are those of one rank in the ring model,
    for n ranks: all-gather and reduce-scatter (n-1)/n of the full tensor, all-reduce twice that, all-to-all
    (n-1)/n of the local tensor, broadcast the tensor.
    """

    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table: dict[tuple[str, tuple[str, ...]], list[int]] = {}

    def add(self, kind: str, axes: tuple[str, ...], nbytes: int) -> None:
        """Record one collective of ``kind`` over ``axes`` that moves ``nbytes`` bytes."""
        try:
            entry = self.table[kind, axes]
        except KeyError:
            entry = self.table[kind, axes] = [0, 0]
        entry[0] += 1
        entry[1] += nbytes

    def copy(self) -> Counts:
        """A snapshot."""
        made = Counts()
        made.table = {key: list(entry) for key, entry in self.table.items()}
        return made

    def since(self, before: Counts) -> Counts:
        """What was added after the snapshot ``before``; kinds that did not run are left out."""
        made = Counts()
        for key, (count, nbytes) in self.table.items():
            count0, nbytes0 = before.table.get(key, (0, 0))
            if count > count0:
                made.table[key] = [count - count0, nbytes - nbytes0]
        return made

    def _sum(self, column: int, part: int) -> dict[Any, int]:
        out: dict[Any, int] = {}
        for key, entry in self.table.items():
            out[key[part]] = out.get(key[part], 0) + entry[column]
        return out

    @property
    def kinds(self) -> dict[str, int]:
        """Kind to number of collectives."""
        return self._sum(0, 0)

    @property
    def bytes(self) -> dict[str, int]:
        """Kind to bytes."""
        return self._sum(1, 0)

    @property
    def bytes_by_axes(self) -> dict[tuple[str, ...], int]:
        """Names of the axes to bytes."""
        return self._sum(1, 1)

    @property
    def total(self) -> int:
        """Number of collectives."""
        return sum(entry[0] for entry in self.table.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all collectives."""
        return sum(entry[1] for entry in self.table.values())

    def __repr__(self) -> str:
        parts = (f"{k}[{','.join(a)}]: {n} × {b} B" for (k, a), (n, b) in self.table.items())
        return f"Counts({'; '.join(parts)})"


class Simulator(Protocol):
    """What a Runtime knows of the simulation that it belongs to."""

    def meet(
        self,
        ranks: tuple[int, ...],
        call: Any,
        payload: Any,
        compute: Callable[[list[Any]], Sequence[Any]],
    ) -> Any:
        """Bring ``payload``, wait for the other ``ranks``, and take the own one of ``compute(payloads)``."""
        ...


class Runtime:
    """The state of one rank.

    Attributes:
        rank, world: own global rank, and the number of ranks.  Unless given they are read from
            ``torch.distributed`` at the first use after it was initialised; rank 0 of 1 until then.
        sim: the simulation that this rank is part of, or None.
        plans: cache owned by dispatch.
        fast: of these, the calls that are one native op on locals: key to (spec of the output, whether it is
            untyped, native call).
        groups: cache owned by collective.
        memo: scratch for the other layers.
        records: list that explain collects into, or None.
        cause: the record that communication started now serves, or None; kept only while there are records.
        line: the user's line that records are to show, where the call stack cannot tell, or None.
        explicit: whether communication must be asked for by name.
        counts: the collectives that ran.
    """

    rank: int
    world: int

    def __init__(self, rank: int | None = None, world: int | None = None, sim: Simulator | None = None) -> None:
        if rank is not None and world is not None:
            self.rank, self.world = rank, world
        self.sim = sim
        self.plans: dict[Any, Any] = {}
        self.fast: dict[Any, Any] = {}
        self.groups: dict[Any, Any] = {}
        self.memo: dict[Any, Any] = {}
        self.records: list[Any] | None = None
        self.cause: Any = None
        self.line: str | None = None
        self.explicit = False
        self.counts = Counts()

    def __getattr__(self, name: str) -> int:
        # Reached only while the attribute is unset: afterwards rank and world are plain attributes.
        if name not in ("rank", "world"):
            raise AttributeError(f"Runtime has no attribute {name!r}")
        if not dist.is_available() or not dist.is_initialized():
            return 0 if name == "rank" else 1
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        return self.rank if name == "rank" else self.world

    def __repr__(self) -> str:
        kind = "simulated " if self.sim is not None else ""
        return f"Runtime({kind}rank {self.rank} of {self.world})"


RT = Runtime()


def reset() -> None:
    """Start afresh, as after ``destroy_process_group``: caches, counts and the known rank are dropped."""
    global RT
    RT = Runtime()


# After destroy_process_group the groups kept here are the last ones: their threads end while Python still runs.
atexit.register(reset)
