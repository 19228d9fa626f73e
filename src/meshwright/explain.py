"""Where communication comes from.

``explain`` collects what dispatch recorded while code ran and prints it; it recomputes nothing.
``explicit`` turns implied communication into errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

from . import collective, runtime
from .record import Record


class Explanation:
    """Communication of a piece of eager code: what ops implied, and what ran in all.

    Attributes:
        records: one entry per conversion that an op implied, in order.
        counts: every collective that ran, backward included: kinds and bytes.
        result: what the explained function returned (``explain(fn, ...)`` only).
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.counts = runtime.Counts()
        self.result: Any = None

    @property
    def bytes(self) -> float:
        """Bytes that the recorded conversions send per rank, forward."""
        return sum(r.bytes for r in self.records)

    def to_json(self) -> str:
        """The records and totals as one JSON object."""
        return json.dumps(
            {
                "records": [dataclasses.asdict(r) for r in self.records],
                "collectives": self.counts.kinds,
                "bytes": self.counts.bytes,
            }
        )

    def __str__(self) -> str:
        if not self.records and not self.counts.total:
            return "no communication"
        lines = [str(r) for r in self.records]
        totals = ", ".join(f"{n} {k} ({self.counts.bytes[k]} bytes)" for k, n in self.counts.kinds.items())
        lines.append(f"{len(self.records)} implied conversions; ran in all: {totals or 'nothing'}")
        return "\n".join(lines)

    __repr__ = __str__


@contextlib.contextmanager
def _explaining() -> Iterator[Explanation]:
    made = Explanation()
    before, runtime.RT.records = runtime.RT.records, made.records
    try:
        with collective.counting() as counts:
            yield made
    finally:
        runtime.RT.records = before
        made.counts = counts


def explain(fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """Explain the communication of eager code.

    ``with mw.explain() as why: ...; print(why)``, or ``why = mw.explain(fn, *args)`` to run a function.

    Returns:
        A context manager that gives an :class:`Explanation`, or the explanation of the call.
    """
    if fn is None:
        return _explaining()
    with _explaining() as made:
        made.result = fn(*args, **kwargs)
    return made


@contextlib.contextmanager
def explicit() -> Iterator[None]:
    """Inside, communication that no ``reshard``, ``unshard`` or ``constrain`` asked for is an ExplicitError.

    The error is raised before anything is sent, and on all ranks: it follows from layouts alone.
    """
    before, runtime.RT.explicit = runtime.RT.explicit, True
    try:
        yield
    finally:
        runtime.RT.explicit = before
