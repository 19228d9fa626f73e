"""Every error that Meshwright raises, as one tree.

``MeshwrightError`` is the root.  Each class also derives from the builtin that a PyTorch user would
catch for the same mistake (``ValueError``, ``RuntimeError``...), so existing ``except`` clauses work.
Messages name the culprit, say what was expected and end with the call that fixes it.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


class MeshwrightError(Exception):
    """Root of all errors of this package."""


class MeshError(MeshwrightError, ValueError):
    """A mesh that cannot be: unknown axis, sizes that do not match the processes."""


class LayoutError(MeshwrightError, ValueError):
    """A layout that cannot be: a placement for a dim that does not exist, two orders for one dim."""


class RuleError(MeshwrightError, RuntimeError):
    """A rule that contradicts itself or the op that it describes."""


class DispatchError(MeshwrightError, RuntimeError):
    """An op that cannot run on these layouts (an in-place op on an incompatible layout, say)."""


class ExplicitError(MeshwrightError, RuntimeError):
    """Communication that was not asked for by name, inside ``mw.explicit()``."""


class ShardError(MeshwrightError, ValueError):
    """A module, optimizer or data loader that cannot be sharded as asked."""


class CollectiveError(MeshwrightError, RuntimeError):
    """A collective that cannot run."""


class DesyncError(CollectiveError):
    """Ranks disagree: different collectives, shapes or placements, or a rank that left."""


class RankFailedError(DesyncError):
    """A rank is gone: its process died, failed, was stopped, or ended while this rank needs it.

    The other ranks raise it in their collective, or end 0.7 seconds later. Catch it to log; the run is over.

    Attributes:
        ranks: Ranks that are gone, or presumed to be.
        host: Host of the first of them, if known.
        cause: What happened to it.
        collective: The collective this rank waited in, with group and line; or the last one of the rank that left.
        step: Number of updates this rank had completed, or -1.

    Examples:
        ```python
        try:
            raise mw.RankFailedError("rank 3 is gone", ranks=(3,), cause="killed by signal 9", step=120)
        except mw.RankFailedError as error:  # around a training loop
            assert error.ranks == (3,) and error.step == 120
        ```
    """

    def __init__(
        self, message: str, ranks: tuple[int, ...] = (), host: str = "", cause: str = "", collective: str = "",
        step: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.ranks, self.host, self.cause, self.collective, self.step = ranks, host, cause, collective, step


class ConversionError(MeshwrightError, RuntimeError):
    """A change of layout that does not exist."""


class ProgramError(MeshwrightError, RuntimeError):
    """A captured program that is not well formed."""


class CaptureError(ProgramError):
    """A model that cannot be captured: what it does depends on values."""


class PassError(ProgramError):
    """A pass that cannot be applied, or passes in an order that they forbid."""


class VerifyError(MeshwrightError, ValueError):
    """A step that cannot be verified, or that is not the one that was."""


class HardwareError(MeshwrightError, ValueError):
    """A description of hardware that is not known, or cannot be read."""


class PlanError(MeshwrightError, ValueError):
    """A plan that cannot be found (memory, devices, contradictions), or that was made for something else."""


class DataError(MeshwrightError, ValueError):
    """Training data that cannot be used."""


class CheckpointError(MeshwrightError, RuntimeError):
    """A checkpoint that cannot be written or read: damaged, incomplete, or of another model."""


class ExtraError(MeshwrightError, ImportError):
    """A package that is not installed, as only one feature needs it."""


def extra(module: str, name: str, needed: str) -> Any:
    """The ``module`` of a package that the extra ``name`` installs, and that ``needed`` needs.

    Raises:
        ExtraError: it is not there; with what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        raise ExtraError(f"{needed} needs {missing}: pip install 'meshwright[{name}]'") from error


def near(name: str, known: Iterable[str]) -> str:
    """For the end of a message about a name that is not known: what may be meant, and what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(name.strip(), names, n=1, cutoff=0.5)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return f"{meant} (there are: {', '.join(names) or 'none'})"


def takes(error: type[MeshwrightError], **wanted: tuple[Any, str]) -> Callable[[_F], _F]:
    """Check arguments of a public function before anything else: name to (types, what to do about others).

    Raises ``error``, the same on every rank that makes the mistake, naming the function and the argument.
    """

    def wrap(fn: _F) -> _F:
        given = inspect.signature(fn).parameters
        places = {p.name: i for i, p in enumerate(given.values()) if p.kind is not p.KEYWORD_ONLY}
        checks = [(places.get(name, len(given)), name, kinds, fix) for name, (kinds, fix) in wanted.items()]

        last = len(given)

        @functools.wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for i, name, kinds, fix in checks:
                value = args[i] if i < min(len(args), last) else kwargs.get(name, checks)
                if value is not checks and not isinstance(value, kinds):
                    kind = type(value).__name__
                    raise error(f"{fn.__name__}: {name} cannot be {_article(kind)}: {fix}")
            return fn(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return wrap


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
