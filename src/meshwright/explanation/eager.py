"""Eager code: what dispatch recorded while it ran.

``explain`` collects it; ``explicit`` turns implied communication into errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any

from .. import collective
from ..errors import MeshwrightError, takes
from ..ranks import runtime
from .explanation import Explanation


@contextlib.contextmanager
def _explaining() -> Iterator[Explanation]:
    made = Explanation()
    before, runtime.RT.records = runtime.RT.records, made.records
    runtime.RT.fast.clear()  # calls that note nothing
    try:
        with collective.counting() as counts:
            yield made
    finally:
        runtime.RT.records = before
        made.counts = counts


@takes(MeshwrightError, fn=((Callable, NoneType), "give a function and its arguments, or write with mw.explain()"))
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
    runtime.RT.fast.clear()  # calls that refuse nothing
    try:
        yield
    finally:
        runtime.RT.explicit = before
