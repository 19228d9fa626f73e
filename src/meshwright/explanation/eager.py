"""Eager code: what dispatch recorded while it ran.

``explain`` collects it; ``explicit`` turns implied communication into errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any

from .. import collective
from ..collective import together
from ..errors import ExplicitError, MeshwrightError, takes
from ..mesh import Mesh
from ..ranks import runtime
from ..resharding.record import Record
from .budget import Budget, Spending, check_budget, checked, known_axes
from .explanation import Explanation


@contextlib.contextmanager
def _explaining(records: list[Record] | None = None) -> Iterator[Explanation]:
    made = Explanation(records if records is not None else [])
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
def explicit(budget: Budget | None = None) -> Iterator[None]:
    """Inside, communication that no ``reshard``, ``unshard`` or ``constrain`` asked for is an ExplicitError.

    The error is raised before anything is sent, and on all ranks: it follows from layouts alone.

    ::

        with mw.explicit(budget={"tp": {"all_reduce": 4_000_000}, "dp": 1_000_000}):
            step(batch)  # eager or captured, its capture too

    Args:
        budget: what may be sent inside instead, asked for or not, as :func:`~meshwright.explanation.check_budget` takes
            it: axes to bytes, or to bytes by kind.  Conversions are held against it before they are sent, a captured
            step before it runs, all that ran, gradients included, when the block ends, where all ranks meet.

    Raises:
        ExplicitError: on all ranks; what is too much names the collective, its line, and the layout that avoids it.
        MeshwrightError: a budget of axes or kinds that do not exist.
    """
    if budget is None:
        before, runtime.RT.explicit = runtime.RT.explicit, True
        runtime.RT.fast.clear()  # calls that refuse nothing
        try:
            yield
        finally:
            runtime.RT.explicit = before
        return
    outer, runtime.RT.budget = runtime.RT.budget, checked(budget, known_axes())
    try:
        with _explaining(Spending(budget)) as made:
            yield
    finally:
        runtime.RT.budget = outer
    meshes = (m for m, _ in runtime.RT.groups if isinstance(m, Mesh))
    whole = next((m for m in meshes if m.size == runtime.RT.world), None)
    if whole is None:
        check_budget(made, budget)
        return
    with together(whole, "mw.explicit(budget=...)", kind=ExplicitError):  # bytes of uneven parts differ by rank
        check_budget(made, budget)
