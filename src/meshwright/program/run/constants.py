"""Numbers of Python that a program holds as they were when it was captured: a change is named, once."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ...ranks import runtime
from .bind import CompiledVariant

Values = Mapping[str, Any]


class Constants:
    """What the user's code is likely to read, of each program, as it was when that was captured.

    Args:
        read: gives it as it is, by name.
        name: of the function that captures.
    """

    def __init__(self, read: Callable[[], Values], name: str) -> None:
        self.read, self.name = read, name
        self.held: weakref.WeakKeyDictionary[CompiledVariant, Values] = weakref.WeakKeyDictionary()
        self.named: set[str] = set()
        self._calls = 0
        self._last: Values = {}

    def note(self, made: CompiledVariant) -> None:
        """A program was captured."""
        now = self.read()
        self._last = self.held[made] = self._last if now == self._last else now  # one copy of what is the same

    def check(self, made: CompiledVariant) -> None:
        """Warn where a number is another one than the program holds: looked at in calls 1, 2, 4, 8 and so on."""
        self._calls += 1
        held = self.held.get(made)
        if self._calls & (self._calls - 1) or held is None:
            return
        now = self.read()
        for name, before in held.items() if now != held else ():
            if name not in self.named and name in now and now[name] is not before and now[name] != before:
                self.named.add(name)
                warnings.warn(
                    f"{self.name}: {name} was {before!r} when the step was captured, and is {now[name]!r}. The program "
                    f"goes on with {before!r}, if the step reads it. Capture the step again, or make it a batch tensor "
                    "or a buffer",
                    RuntimeWarning, stacklevel=runtime.users_level(),
                )  # fmt: skip


__all__ = ["Constants"]
