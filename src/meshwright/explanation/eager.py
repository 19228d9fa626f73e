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
    notes, runtime.RT.notes = runtime.RT.notes, {}
    runtime.RT.fast.clear()  # calls that note nothing
    try:
        with collective.counting() as counts:
            yield made
    finally:
        made.notes = tuple(runtime.RT.notes or ())
        runtime.RT.records, runtime.RT.notes = before, notes
        made.counts = counts


@takes(MeshwrightError, fn=((Callable, NoneType), "give a function and its arguments, or write with mw.explain()"))
def explain(fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """Record and explain the communication of eager code.

    Use it as a context manager, or pass a function and its arguments. A captured step has `step.explain()`.

    DTensor: `CommDebugMode`.

    Args:
        fn: Function to run. `None` returns a context manager.
        *args: Arguments of `fn`.
        **kwargs: Keyword arguments of `fn`.

    Returns:
        A context manager that gives an [Explanation][meshwright.Explanation], or the explanation of the call.

    Examples:
        ```python
        mesh = mw.Mesh({"tp": 2})


        def forward():
            model = mw.shard_module(nn.Linear(8, 4), mesh, {"weight": {"tp": mw.Shard(1)}})
            with mw.explain() as why:
                model(torch.ones(2, 8)).relu()
            return str(why)


        print(mw.simulate(forward, mesh)[0])  # one all_reduce, its line, and why: relu is not linear
        ```
    """
    if fn is None:
        return _explaining()
    with _explaining() as made:
        made.result = fn(*args, **kwargs)
    return made


@contextlib.contextmanager
def explicit(budget: Budget | None = None) -> Iterator[None]:
    """Raise on communication inside that no `reshard`, `unshard` or `constrain` asked for.

    The error comes before anything is sent, on all ranks, as it follows from layouts only.

    JAX: explicit sharding mode.

    Args:
        budget: What may be sent inside, asked for or not: axes to bytes, or axes to kinds to bytes. Conversions are
            compared with it before they are sent, and a captured step before it runs. When the block ends, everything
            that was sent is compared, gradients included; all ranks meet there.

    Raises:
        ExplicitError: On all ranks. Names the collective, its line, and the layout that avoids it.
        MeshwrightError: If the budget names axes or kinds that do not exist.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})


        def total():
            x = mw.shard_tensor(torch.ones(4), mesh, {"dp": mw.Shard(0)})
            with mw.explicit(budget={"dp": {"all_reduce": 1_000}}):  # at most 1,000 bytes
                return x.sum().item()


        assert mw.simulate(total, mesh) == [4.0, 4.0]
        ```
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
