"""Late ranks: what is started delivers nothing before its wait, as on a GPU, on simulated ranks and on real ones.

Gloo and the simulation deliver at the start or soon after it, so a wait that is missing, a buffer that is used again
and an input that is written to in flight go unnoticed there.  Here

* what a collective works in is filled with NaN (integers: a sentinel) at the start, and gets its values at the wait;
* at the wait an error says if the input, or what was filled, changed in between;
* nothing is done before it is waited for, and a start does not wait for other ranks.

``pytest --late`` runs all tests so; ``with late.ranks():`` one of them.  Inside ``with streams.counted():`` simulated
ranks have streams besides (``tests/support/streams.py``): work that is read on another stream without a wait is found.
Real ranks take NCCL's ways: their groups are not gloo's to Meshwright, so reductions are scattered by the backend and
nothing small is packed together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from meshwright.collective import groups
from meshwright.collective.transport import as_bytes
from meshwright.compat import AllreduceOptions
from meshwright.errors import CollectiveError, DesyncError
from meshwright.ranks import runtime, simulation
from meshwright.ranks.process_group import Link
from meshwright.ranks.simulation import Call, Simulation, _Rendezvous
from meshwright.shard.gradients import reductions
from meshwright.shard.parameters import host
from tests.support import streams

Tensor = torch.Tensor
ENCODED = {"wire_all_gather"}  # what it takes may change at once: it sends a copy
SENTINEL = 77  # of integers; also as a byte
NOTES: list[str] = []  # what was started and never waited for, in this process, by the line of the start


class LateError(AssertionError):
    """Memory of a collective under way was written to."""


def spoil(t: Tensor) -> None:
    """Fill memory that nobody may read yet."""
    with torch.no_grad(), streams.paused():
        t.fill_(float("nan") if t.is_floating_point() or t.is_complex() else (t.dtype is torch.bool or SENTINEL))


def bits(t: Tensor) -> Tensor:
    """The bytes of a tensor."""
    with torch.no_grad(), streams.paused():
        return as_bytes(t.detach()).clone()


class Flight:
    """The memory of one collective between its start and its wait."""

    def __init__(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self.what, self.line = what, runtime.user_line()
        own = {t.data_ptr() for t in writes}
        # Bytes: a copy of bools would not keep those of memory that nobody has written to, as padding is.
        self.reads = [(t, bits(t)) for t in reads if t.data_ptr() not in own]
        self.writes = [t.detach() for t in writes]
        for t in self.writes:
            spoil(t)
        self.spoiled = [bits(t) for t in self.writes]

    def land(self) -> None:
        """Raise if any of it changed."""
        with streams.paused():
            self._compare()

    def _compare(self) -> None:
        for now, before in self.reads:
            if not torch.equal(bits(now), before):
                raise LateError(f"{self.what}, started at {self.line}: its input changed before the wait")
        for now, before in zip(self.writes, self.spoiled, strict=True):
            if not torch.equal(bits(now), before):
                raise LateError(f"{self.what}, started at {self.line}: its output was written to before the wait")


def _note(flight: Flight | None) -> None:
    if flight is not None:
        NOTES.append(f"{flight.what}, started at {flight.line}")


# ---------------------------------------------------------------------------------------------- simulated ranks


class _Begun:
    """One collective of simulated ranks that this rank has started."""

    def __init__(self, of: LateSimulation, one: _Rendezvous, rank: int, flight: Flight, seen: streams.Clock) -> None:
        self.seen = seen
        self.of, self.one, self.rank = of, one, rank
        self.flight: Flight | None = flight

    def done(self) -> bool:
        return self.flight is None

    def wait(self) -> None:
        flight, self.flight = self.flight, None
        if flight is None:
            return
        if self.one.error == "" and len(self.one.calls) < len(self.one.ranks):
            self.of._wait_in(self.one, runtime.RT.rank)
        if self.one.error:
            raise DesyncError(self.one.error)
        flight.land()
        streams.end(self.seen)

    def result(self) -> Any:
        result = self.one.results.pop(self.rank)
        streams.came_from(self.seen, result)
        return result

    def __del__(self) -> None:
        _note(self.flight)


class _Posted:
    """A send that this rank has started."""

    def __init__(self, flight: Flight) -> None:
        self.flight: Flight | None = flight

    def done(self) -> bool:
        return self.flight is None

    def wait(self) -> None:
        flight, self.flight = self.flight, None
        if flight is not None:
            flight.land()

    def __del__(self) -> None:
        _note(self.flight)


class LateSimulation(Simulation):
    """Simulated ranks whose starts meet nobody."""

    def __init__(self, mesh: Any) -> None:
        super().__init__(mesh)
        self.begun: dict[tuple[int, tuple[int, ...]], int] = {}
        self.late: dict[tuple[tuple[int, ...], int], _Rendezvous] = {}

    def rendezvous(
        self, ranks: tuple[int, ...], call: Call, payload: Any, compute: Callable[[list[Any]], Sequence[Any]]
    ) -> Any:
        """As before; ranks that started other numbers of collectives of this group before it disagree."""
        own = self.begun.get((runtime.RT.rank, ranks), 0)

        def checked(parts: list[Any]) -> Sequence[Any]:
            if len({n for n, _ in parts}) > 1:
                raise CollectiveError(f"{call}: ranks {ranks} started {[n for n, _ in parts]} collectives before it")
            with streams.paused():
                return compute([p for _, p in parts])

        streams.end(streams.begin([t for t in tree_leaves(payload) if isinstance(t, Tensor)], []))
        return super().rendezvous(ranks, call, (own, payload), checked)

    def start(
        self, ranks: tuple[int, ...], call: Call, payload: Any, compute: Callable[[list[Any]], Sequence[Any]],
        writes: Tensor | None,
    ) -> _Begun:  # fmt: skip
        """Start a collective, the next one of its group that is not waited for at once."""
        if self.leaving:
            raise simulation._Left("this rank belongs to a simulation that was left")
        self._refuse(ranks, call)
        rank = runtime.RT.rank
        number = self.begun[rank, ranks] = self.begun.get((rank, ranks), 0) + 1
        one = self.late.setdefault((ranks, number), _Rendezvous(ranks))
        seen = streams.begin([payload], [] if writes is None else [writes])
        with streams.paused():
            one.calls[rank], one.payloads[rank] = call, payload.clone()
        reads = [] if call.kind in ENCODED else [payload]
        flight = Flight(f"{call} over ranks {ranks}", reads, [] if writes is None else [writes])
        if len(one.calls) == len(ranks):
            del self.late[ranks, number]
            self._meet(one, compute)
        return _Begun(self, one, rank, flight, seen)

    def _meet(self, one: _Rendezvous, compute: Callable[[list[Any]], Sequence[Any]]) -> None:
        aside, self.underway = self.underway, {one.ranks: one}
        waits, self.waits = self.waits, {r: w for r, w in self.waits.items() if w is one}
        try:
            with streams.paused():
                self._complete(one, compute)
        finally:
            self.underway, self.waits = aside, {r: w for r, w in waits.items() if w is not one}

    def post(self, lane: tuple[int, ...], call: Call, payload: Tensor) -> Any:
        """Send a copy; the sender must leave its own alone until it waits."""
        super().post(lane, call, payload)
        return _Posted(Flight(f"{call} along {lane}", [payload], []))


# ---------------------------------------------------------------------------------------------- copies to the host


class LateLeaving(host.AsyncOffload):
    """A copy to the host that arrives at the wait."""

    def __init__(self, t: Tensor, device: str) -> None:
        super().__init__(t, device)
        with streams.paused():
            self.arriving, self.made = self.made, torch.empty_like(self.made)
        streams.on_cpu(self.made)
        if streams.active() is not None:
            with self.lane:
                streams.copied(self.lane.reads(t), self.made)
        self.flight: Flight | None = Flight("a copy to the host", [t], [self.made])

    def wait(self) -> Tensor:
        """The tensor on the host."""
        flight, self.flight = self.flight, None
        if flight is not None:
            flight.land()
            with streams.paused():
                self.made.copy_(self.arriving)
        return super().wait()


# ---------------------------------------------------------------------------------------------- real ranks


class _Work:
    """Work of gloo on copies, which reach what they are copies of at the wait."""

    def __init__(self, work: Any, flight: Flight, moves: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.work, self.moves = work, moves
        self.flight: Flight | None = flight

    def is_completed(self) -> bool:
        return self.flight is None

    def wait(self, timeout: Any = None) -> None:
        flight, self.flight = self.flight, None
        if flight is None:
            return
        self.work.wait()
        flight.land()
        for to, made in self.moves:
            to.copy_(made)

    def __del__(self) -> None:
        _note(self.flight)


class LateGroup:
    """A process group of gloo in the manner of NCCL: ``Group`` sends everything through these methods."""

    def __init__(self, pg: Any) -> None:
        self.pg = pg

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pg, name)

    def _start(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], run: Callable[..., Any]) -> _Work:
        inputs, outputs = [t.clone() for t in reads], [t.clone() for t in writes]
        flight = Flight(what, reads, writes)
        return _Work(run(inputs, outputs), flight, list(zip(writes, outputs, strict=True)))

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Work:
        return self._start("allreduce", [], tensors, lambda _, out: self.pg.allreduce(out, options))

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Work:
        sends = self.pg.rank() == options.rootRank
        if sends:
            return self._start("broadcast", tensors, [], lambda given, _: self.pg.broadcast(given, options))
        return self._start("broadcast", [], tensors, lambda _, out: self.pg.broadcast(out, options))

    def _allgather_base(self, out: Tensor, t: Tensor, options: Any) -> _Work:
        return self._start("allgather", [t], [out], lambda i, o: self.pg._allgather_base(o[0], i[0], options))

    def allgather(self, outs: list[list[Tensor]], tensors: list[Tensor], options: Any) -> _Work:
        return self._start("allgather", tensors, outs[0], lambda i, o: self.pg.allgather([o], i, options))

    def alltoall_base(self, out: Tensor, t: Tensor, take: list[int], give: list[int], options: Any) -> _Work:
        def run(i: list[Tensor], o: list[Tensor]) -> Any:
            return self.pg.alltoall_base(o[0], i[0], take, give, options)

        return self._start("alltoall", [t], [out], run)

    def _reduce_scatter_base(self, out: Tensor, t: Tensor, options: Any) -> _Work:
        n, reduce = self.pg.size(), AllreduceOptions()
        reduce.reduceOp, reduce.asyncOp = options.reduceOp, options.asyncOp

        def run(i: list[Tensor], o: list[Tensor]) -> Any:  # gloo has none for all dtypes
            return _Scattered(self.pg.allreduce(i, reduce), o[0], i[0].view(n, *out.shape)[self.pg.rank()])

        return self._start("reduce_scatter", [t], [out], run)


class _Scattered:
    def __init__(self, work: Any, out: Tensor, part: Tensor) -> None:
        self.work, self.out, self.part = work, out, part

    def wait(self) -> None:
        self.work.wait()
        self.out.copy_(self.part)


def _late_name(pg: Any, device: str) -> str:
    """What a group that gloo carries calls its backend."""
    return "late"


def _late_link(inner: Callable[..., Link | None]) -> Callable[..., Link | None]:
    def new_link(*args: Any, **kwargs: Any) -> Link | None:
        link = inner(*args, **kwargs)
        if link is not None and not link.gloo:
            link.pg = LateGroup(link.pg)
        return link

    return new_link


class _LateInit:
    """``Group.__init__``, which takes a late group for one of PyTorch's own."""

    def __init__(self, inner: Callable[..., None]) -> None:
        self.inner = inner

    def __get__(self, group: Any, kind: Any = None) -> Callable[..., None]:
        def init(*args: Any, **kwargs: Any) -> None:
            self.inner(group, *args, **kwargs)
            if isinstance(group.pg, LateGroup):
                group.plain, group.scatters = True, True

        return init


# ---------------------------------------------------------------------------------------------- switches


def installed() -> bool:
    """Whether ranks of this process are late."""
    return simulation.Simulation is LateSimulation


def install(patch: pytest.MonkeyPatch) -> None:
    """From now on ranks of this process are late, and those of processes that it starts."""
    patch.setattr(simulation, "Simulation", LateSimulation)
    patch.setattr(reductions, "AsyncOffload", LateLeaving)
    patch.setattr(groups, "backend_name", _late_name)
    patch.setattr(groups, "new_link", _late_link(groups.new_link))
    patch.setattr(groups.Group, "__init__", _LateInit(groups.Group.__init__))


@contextlib.contextmanager
def ranks() -> Iterator[None]:
    """Inside, ranks of this process are late."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


__all__ = ["NOTES", "LateError", "LateSimulation", "install", "installed", "ranks", "spoil"]
