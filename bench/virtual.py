"""A virtual wire: a process group of two, in one process, whose collectives take ``alpha + bytes / beta`` and no CPU.

Results have the right shapes at once, as if the other rank had the same data, and are complete when one serial wire, a
thread that sleeps, has carried them.  Bytes are those that a ring sends per rank.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2


@dataclass
class Message:
    """What one collective took on the wire, seconds; when it was asked for, and when somebody first waited for it."""

    took: float
    gathers: bool
    asked: float
    waited: float = 0.0


class Wire(threading.Thread):
    """One serial link: each message starts when the one before has arrived.  ``instant``: it takes no time."""

    def __init__(self, alpha: float, beta: float) -> None:
        super().__init__(daemon=True)
        self.alpha, self.beta, self.instant = alpha, beta, True
        self.queue: queue.Queue[tuple[Message, Any, Any] | None] = queue.Queue()
        self.messages: list[Message] = []
        self.start()

    def put(self, sent: float, gathers: bool, future: Any, value: Any) -> Message:
        """Send that many bytes, then complete the future."""
        message = Message(self.seconds(sent), gathers, time.perf_counter())
        self.messages.append(message)
        if self.instant:
            future.set_result(value)
        else:
            self.queue.put((message, future, value))
        return message

    def seconds(self, sent: float) -> float:
        """That one message of so many bytes takes."""
        return self.alpha + sent / self.beta

    def run(self) -> None:
        """Carry messages until :meth:`close`."""
        free = 0.0
        while (item := self.queue.get()) is not None:
            message, future, value = item
            free = max(free, message.asked) + message.took
            left = free - time.perf_counter()
            if left > 0:
                time.sleep(left)
            future.set_result(value)

    def close(self) -> None:
        """No more messages."""
        self.queue.put(None)
        self.join()


class OnItsWay(dist._Work):  # type: ignore[name-defined]
    """What a collective on the wire gives."""

    def __init__(self, future: Any, message: Message) -> None:
        super().__init__()
        self.future, self.message = future, message

    def wait(self, timeout: Any = None) -> bool:
        """Until it has arrived."""
        self.message.waited = self.message.waited or time.perf_counter()
        self.future.wait()
        return True

    def get_future(self) -> Any:
        """Of the result."""
        return self.future

    def is_completed(self) -> bool:
        """Whether it has arrived."""
        return bool(self.future.done())


class OnWire(dist.ProcessGroup):
    """Rank 0 of two; the other one has the same data.  Sums are not doubled: all contenders do without alike."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(0, RANKS)  # type: ignore[call-arg]
        self.wire = wire

    def _sent(self, size: float, value: Any, gathers: bool = False) -> OnItsWay:
        future: Any = torch.futures.Future()
        return OnItsWay(future, self.wire.put(size, gathers, future, value))

    def _allgather_base(self, out: Any, given: Any, options: Any = None) -> OnItsWay:
        out.view(RANKS, -1).copy_(given.reshape(1, -1).expand(RANKS, -1))
        return self._sent(out.nbytes * (RANKS - 1) / RANKS, out, True)

    def allgather(self, outs: Any, given: Any, options: Any = None) -> OnItsWay:
        """A list of tensors; shapes that the other rank has otherwise are zeros."""
        for out in outs[0]:
            out.copy_(given[0] if given[0].shape == out.shape else given[0].new_zeros(out.shape))
        return self._sent(given[0].nbytes * (RANKS - 1), outs, True)

    def _reduce_scatter_base(self, out: Any, given: Any, options: Any = None) -> OnItsWay:
        out.copy_(given.view(RANKS, -1)[0].view(out.shape)).mul_(RANKS)
        return self._sent(given.nbytes * (RANKS - 1) / RANKS, out)

    def allreduce(self, tensors: Any, options: Any = None) -> OnItsWay:  # type: ignore[override]
        """As a ring does it."""
        return self._sent(sum(t.nbytes for t in tensors) * 2 * (RANKS - 1) / RANKS, tensors)

    def broadcast(self, tensors: Any, options: Any = None) -> OnItsWay:  # type: ignore[override]
        """Nothing is to be sent."""
        return self._sent(0.0, tensors)

    def getBackendName(self) -> str:
        """For error messages."""
        return "wire"

    def size(self) -> int:
        """Two."""
        return RANKS

    def rank(self) -> int:
        """The first."""
        return 0
