"""Simulated streams: a clock for each stream of each simulated rank, as a race detector has one for each thread.

Kernels run at once and on the CPU, so no value is ever wrong here.  Instead each access to memory is checked: a stream
that reads what another one wrote must have waited for that (``wait_stream``, an event, a collective's ``wait``), and so
must one that writes what another one reads.  Memory that is freed while another stream uses it must have been recorded
for that stream.  The CPU is a stream too: all that it starts comes after what it did, and it waits by ``synchronize``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright import compat
from meshwright.ranks import runtime
from meshwright.shard.parameters import host

Tensor = torch.Tensor
Clock = dict[str, int]  # of each stream, how much of it has been waited for
OPS, CPU, COMM = "ops", "cpu", "collectives"
COPIES = ("aten::copy_", "aten::_to_copy", "aten::clone", "meshwright::to_device", "meshwright::to_host")
BLOCKING = ("aten::_local_scalar_dense", "meshwright::to_host")
ACTIVE = threading.local()  # of each thread, its Streams


class StreamError(AssertionError):
    """Two streams use the same memory at the same time."""


@dataclass
class Use:
    """Who uses a piece of memory: where it was allocated, its last write, and the reads since."""

    ref: StorageWeakRef
    home: str
    line: str
    on_cpu: bool = False
    fresh: bool = False  # made from no tensors, so its device is not known here: the one of what it meets first
    writer: tuple[str, int] | None = None
    readers: Clock = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)

    def last(self) -> Clock:
        """The last use of each stream."""
        found = dict(self.readers)
        if self.writer is not None:
            found[self.writer[0]] = max(self.writer[1], found.get(self.writer[0], 0))
        return found


class Streams(TorchDispatchMode):
    """Checks what one rank does with memory, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.time, self.checked = OPS, dict[str, int](), 0
        self.clocks: dict[str, Clock] = {}
        self.memory: dict[int, Use] = {}
        self.off = 0

    # -- clocks

    def clock(self, stream: str) -> Clock:
        return self.clocks.setdefault(stream, {})

    def merge(self, stream: str, seen: Clock) -> None:
        """A stream goes on when all of ``seen`` is done."""
        mine = self.clock(stream)
        mine.update((s, max(n, mine.get(s, 0))) for s, n in seen.items())

    def tick(self, stream: str) -> int:
        """The next work on a stream, which the CPU starts now."""
        self.merge(stream, self.clock(CPU))
        self.time[stream] = self.clock(stream)[stream] = self.time.get(stream, 0) + 1
        return self.time[stream]

    # -- memory

    def use(self, t: Tensor) -> Use:
        storage = t.untyped_storage()
        use = self.memory.get(storage._cdata)
        if use is None or use.ref.expired():
            use = self.memory[storage._cdata] = Use(StorageWeakRef(storage), self.now, runtime.user_line())
        return use

    def access(self, stream: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Work on a stream: raises StreamError where it waits for too little."""
        when, seen = self.tick(stream), self.clock(stream)
        for write, tensors in ((False, reads), (True, writes)):
            for t in tensors:
                use = self.use(t)
                self.checked += 1
                if use.fresh and stream == CPU:
                    use.on_cpu, use.writer, use.readers = True, (CPU, when), {}
                before = use.last() if write else dict([use.writer] if use.writer is not None else [])
                for other, n in before.items():
                    if other != stream and seen.get(other, 0) < n:
                        what = "writes to" if write else "reads"
                        raise StreamError(
                            f"{stream!r} {what} memory of {tuple(t.shape)} that {other!r} uses, "
                            "and has not waited for it"
                        )
                if write:
                    use.writer, use.readers = (stream, when), {}
                else:
                    use.readers[stream] = when

    def sweep(self) -> None:
        """Memory that is free again: who used it last must be done, or recorded."""
        for key in [k for k, use in self.memory.items() if use.ref.expired()]:
            use = self.memory.pop(key)
            for stream, n in use.last().items():
                waited = max(self.clock(use.home).get(stream, 0), self.clock(CPU).get(stream, 0))
                if stream not in (use.home, *use.recorded) and waited < n and not use.on_cpu:
                    raise StreamError(
                        f"memory of {use.home!r}, allocated at {use.line}, is free while {stream!r} uses it: "
                        "record_stream"
                    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.off:
            return result
        self.sweep()
        schema = func._schema
        given = [
            *zip(schema.arguments, args, strict=False),
            *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs),
        ]
        reads, writes = list[Tensor](), list[Tensor]()
        for argument, value in given:
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(t for t in tree_leaves(value) if isinstance(t, Tensor))
        inputs = {t.untyped_storage()._cdata for t in (*reads, *writes)}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        created = [t for t in made if t.untyped_storage()._cdata not in inputs]
        if not created and not writes and made:
            return result  # views read nothing
        on_cpu = schema.name not in COPIES and any(self.use(t).on_cpu for t in (*reads, *writes))
        fresh = all(self.use(t).fresh for t in (*reads, *writes))
        self.access(CPU if on_cpu else self.now, reads, [*writes, *created])
        for t in created:
            self.use(t).on_cpu = on_cpu or schema.name == "meshwright::to_host"
        for t in (*reads, *writes, *created):
            self.use(t).fresh = fresh
        if schema.name in BLOCKING:
            self.merge(CPU, self.clock(self.now))
        return result


def active() -> Streams | None:
    """The streams of this thread, where they count."""
    found: Streams | None = getattr(ACTIVE, "streams", None)
    return None if found is None or found.off else found


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside, tests do what no rank does."""
    found = active()
    if found is not None:
        found.off += 1
    try:
        yield
    finally:
        if found is not None:
            found.off -= 1


# ---------------------------------------------------------------------------------------------- torch.cuda


class Stream:
    """A stream by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        found = active()
        if found is not None:
            found.merge(self.name, found.clock(other.name))


class Event:
    """A point of a stream."""

    def __init__(self, **_: Any) -> None:
        self.seen: Clock = {}

    def record(self, stream: Stream) -> None:
        found = active()
        self.seen = {} if found is None else dict(found.clock(stream.name))

    def synchronize(self) -> None:
        found = active()
        if found is not None:
            found.merge(CPU, self.seen)


@contextlib.contextmanager
def entered(stream: Stream) -> Iterator[None]:
    """What `torch.cuda.stream` does."""
    found = active()
    before = "" if found is None else found.now
    if found is not None:
        found.now = stream.name
    try:
        yield
    finally:
        if found is not None:
            found.now = before


def _record(t: Tensor, stream: Stream) -> None:
    found = active()
    if found is not None:
        found.use(t).recorded.add(stream.name)


def _pinned(t: Tensor) -> Tensor:
    found = active()
    if found is not None:
        found.merge(CPU, found.clock(found.now))  # a copy to the CPU has ended before, which waits
        on_cpu(t)
    return t


def on_cpu(t: Tensor) -> None:
    """This is memory of the CPU."""
    found = active()
    if found is not None:
        found.use(t).on_cpu = True


def copied(t: Tensor, into: Tensor) -> None:
    """A copy is queued on the current stream."""
    found = active()
    if found is not None:
        found.access(found.now, [t], [into])


# ---------------------------------------------------------------------------------------------- collectives


def begin(reads: Iterable[Tensor], writes: Iterable[Tensor]) -> Clock:
    """A collective starts, on a stream of its own: when it ends."""
    found = active()
    if found is None:
        return {}
    found.merge(COMM, found.clock(found.now))
    reads, writes = list(reads), list(writes)
    found.access(COMM, reads, writes)
    for t in (*reads, *writes):
        found.use(t).recorded.add(COMM)  # process groups keep what they work on
    return dict(found.clock(COMM))


def end(seen: Clock) -> None:
    """The current stream waits for a collective."""
    found = active()
    if found is not None:
        found.merge(found.now, seen)


def came_from(seen: Clock, value: Any) -> None:
    """These are results of a collective."""
    found = active()
    if found is not None and COMM in seen:
        for t in tree_leaves(value):
            if isinstance(t, Tensor):
                found.use(t).writer = (COMM, seen[COMM])
                found.use(t).recorded.add(COMM)


# ---------------------------------------------------------------------------------------------- switches


@contextlib.contextmanager
def counted() -> Iterator[Streams]:
    """Inside, on one simulated rank, streams have clocks; :func:`install` comes first."""
    streams = ACTIVE.streams = Streams()
    try:
        with streams:
            yield streams
            streams.sweep()
    finally:
        ACTIVE.streams = None


def install(patch: pytest.MonkeyPatch) -> None:
    """Ranks that count have streams: the library believes that it copies to and from a GPU."""
    outside = compat.outside_modes

    @contextlib.contextmanager
    def outside_modes() -> Iterator[None]:
        found = getattr(ACTIVE, "streams", None)
        with outside(), found or contextlib.nullcontext():
            yield

    patch.setattr(compat, "outside_modes", outside_modes)
    patch.setattr(host, "pins", lambda device: True)
    patch.setattr(host, "_side", lambda device, back: Stream("copies back" if back else "copies"))
    patch.setattr(host, "keep_for", _record)
    patch.setattr(Tensor, "pin_memory", _pinned)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "current_stream", lambda *_: Stream(OPS if (s := active()) is None else s.now))
    patch.setattr(torch.cuda, "stream", entered)
    patch.setattr(torch.cuda, "Event", Event)


__all__ = [
    "StreamError",
    "Streams",
    "active",
    "begin",
    "came_from",
    "copied",
    "counted",
    "end",
    "install",
    "on_cpu",
    "paused",
]
