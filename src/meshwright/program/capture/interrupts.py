"""Ctrl-C while a step is captured."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Inside, Ctrl-C waits for the end; a second one does not.

    While a step is captured, PyTorch calls Python from C++ that may not throw (the device of a fake tensor, say): a
    KeyboardInterrupt that is raised there ends the process with an abort.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            before(number, frame)
        came.append(frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if len(came) == 1:
        before(signal.SIGINT, came[0])


__all__ = ["interrupts_deferred"]
