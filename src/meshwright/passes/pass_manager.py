"""Passes: functions from a program to a program, with a name, options and a record of what they did.

A pass is a frozen dataclass; its fields are its options.  :class:`PassManager` orders passes by what they declare,
verifies the program around each: what cannot be applied is an error before anything runs.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar, Union

from ..errors import PassError, ProgramError, near
from ..program.check.verify import verify
from ..program.ir.loss_weight import Weighing
from ..program.ir.nodes import no_collection
from ..program.ir.program import Program, without_unserved

_LOG = logging.getLogger("meshwright.passes")  # of the first rank; others say the same at a lower level
_KEBAB = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True)
class PassRecord:
    """What a pass did.

    Attributes:
        name: of the pass; ``options``: its fields as text.
        summary: one line; ``lines``: more, one thing each.
        details: the same as data.
        decisions: what of it reaches a collective, one text each: ranks compare them when the step is captured.
        seconds: that ``apply`` took; ``verify_seconds``: of the check after it.
        nodes: how many the program had before and after.
        kinds: kind of collective to how many there were before and after.
    """

    summary: str
    lines: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    options: str = ""
    seconds: float = 0.0
    verify_seconds: float = 0.0
    nodes: tuple[int, int] = (0, 0)
    kinds: tuple[Mapping[str, int], Mapping[str, int]] = field(default_factory=lambda: ({}, {}))
    decisions: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.name}{self.options and f'({self.options})'}: {self.summary} [{self.seconds * 1e3:.0f} ms]"
        return "\n  ".join((head, *self.lines))


@dataclass(frozen=True)
class Pass:
    """Base of passes.  Derive a frozen dataclass whose fields are the options, and give it a name.

    Attributes:
        name: kebab-case; the pass is found and written by it.
        before, after: names of passes that this one must come before or after, where both are used.
        conflicts_with: names of passes that cannot be used together with this one.
    """

    name: ClassVar[str] = ""
    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()
    conflicts_with: ClassVar[tuple[str, ...]] = ()

    @property
    def calls_per_update(self) -> int:
        """How many calls of the step the pass makes one update of: what compares steps must do so too."""
        return 1

    @property
    def averages(self) -> bool:
        """Whether an update is by the mean of the gradients of its calls, else by their sum."""
        return True

    @property
    def splits(self) -> int:
        """Into how many micro-batches each call of the step cuts its batch."""
        return 1

    @property
    def weighing(self) -> Weighing | None:
        """What the pass asks of a loss: how much micro-batches count; None: nothing."""
        return None

    def homes(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage of a step with stages, along their axis: the pass may give a rank several."""
        return tuple(range(ranks))

    def applies(self, program: Program) -> bool:
        """Whether there is something to do; else the pass is left out."""
        return True

    def apply(self, program: Program) -> tuple[Program, PassRecord]:
        """The program after the pass, and what was done.  The program that is given stays as it is.

        Raises:
            PassError: the pass cannot be applied to this program, and why.
        """
        raise NotImplementedError

    @property
    def options(self) -> str:
        """The options as :func:`parse` reads them."""
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))

    def __str__(self) -> str:
        return f"{self.name}:{self.options}" if self.options else self.name


# ---------------------------------------------------------------------------------------------- the registry

P = TypeVar("P", bound=type[Pass])
_REGISTRY: dict[str, type[Pass]] = {}


def register(cls: P) -> P:
    """Enter a pass under its name, for :func:`parse` and the command line.  A decorator, above ``@dataclass``.

    Raises:
        PassError: no frozen dataclass, no kebab-case name, or a name that another pass has.
    """
    checked_pass(cls)
    other = _REGISTRY.get(cls.name)
    if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise PassError(
            f"two passes are called {cls.name!r}: {other.__module__}.{other.__qualname__} has the name already"
        )
    _REGISTRY[cls.name] = cls
    return cls


def checked_pass(cls: Any) -> type[Pass]:
    """``cls`` as the class of a pass.  Raises PassError where something of one is missing."""
    if not isinstance(cls, type) or not issubclass(cls, Pass):
        raise PassError(f"{cls!r} is no pass: derive a frozen dataclass from mw.passes.Pass")
    params = cls.__dict__.get("__dataclass_params__")
    if params is None or not params.frozen:
        raise PassError(f"{cls.__name__} must be a frozen dataclass: write @dataclass(frozen=True) above it")
    if not _KEBAB.fullmatch(cls.name):
        raise PassError(f"{cls.__name__}.name is {cls.name!r}: a kebab-case name like 'my-pass' was expected")
    if cls.apply is Pass.apply:
        raise PassError(f"{cls.__name__} has no apply(program)")
    return cls


def registered() -> dict[str, type[Pass]]:
    """Name to class of all passes that :func:`parse` knows, sorted."""
    return dict(sorted(_REGISTRY.items()))


# ---------------------------------------------------------------------------------------------- reading


def parse(text: str) -> Pass:
    """A pass from its name and options: ``"gradient-merge:k_steps=4,avg=false"``.

    Raises:
        PassError: no such pass or option, a value of the wrong type, or one that the pass refuses.
    """
    name, _, options = text.partition(":")
    cls = _REGISTRY.get(name.strip())
    if cls is None:
        raise PassError(f"there is no pass {name.strip()!r}{near(name, _REGISTRY)}")
    hints = typing.get_type_hints(cls)
    known = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    given: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in options.split(","))):
        key, equals, value = (s.strip() for s in part.partition("="))
        if not equals:
            raise PassError(f"{text!r}: option=value was expected, not {part!r}")
        if key not in known:
            raise PassError(f"{cls.name} has no option {key!r}{near(key, known)}")
        if key in given:
            raise PassError(f"{text!r}: {key} is given twice")
        try:
            given[key] = _converted(value, known[key])
        except ValueError:
            raise PassError(f"{cls.name}: {key}={value!r}: {_wanted(known[key])} was expected") from None
    missing = [f.name for f in dataclasses.fields(cls) if _required(f) and f.name not in given]
    if missing:
        raise PassError(f"{cls.name} needs {', '.join(missing)}: write {cls.name}:{missing[0]}=...")
    return cls(**given)


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _converted(text: str, hint: Any) -> Any:
    """``text`` as a value of the type of a field.  Raises ValueError."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        found = [a for a in typing.get_args(hint) if str(a) == text]
        if not found:
            raise ValueError(text)
        return found[0]
    if origin in (Union, types.UnionType):
        for part in typing.get_args(hint):
            try:
                return _converted(text, part)
            except ValueError:
                continue
        raise ValueError(text)
    if hint is type(None):
        if text.lower() != "none":
            raise ValueError(text)
        return None
    if hint is bool:
        if text.lower() not in _WORDS:
            raise ValueError(text)
        return _WORDS[text.lower()]
    if hint in (int, float, str):
        return hint(text)
    raise ValueError(f"options of type {hint} cannot be written as text")


def _wanted(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return " or ".join(repr(a) for a in typing.get_args(hint))
    if origin in (Union, types.UnionType):
        return " or ".join(_wanted(part) for part in typing.get_args(hint))
    return {int: "an integer", float: "a number", bool: "true or false", type(None): "none"}.get(hint, str(hint))


# ---------------------------------------------------------------------------------------------- running

Callback = Callable[[PassRecord, Program, Program], Any]


class PassManager:
    """Passes in a valid order.

    Args:
        passes: passes, or texts that :func:`parse` reads.  What they declare decides the order, then the order given.
        keep_order: True: apply them as given; an order that they forbid is an error.
        after_each: called with the record, the program before and the program after each pass: to print, say.

    Raises:
        PassError: a pass given twice, two that conflict, an order that is forbidden or cannot be.
    """

    def __init__(
        self, passes: Sequence[Pass | str], *, keep_order: bool = False, after_each: Callback | None = None
    ) -> None:
        made = [parse(p) if isinstance(p, str) else p for p in passes]
        for p in made:
            if isinstance(p, type):
                raise PassError(f"{p.__name__} is a class: give a pass with its options, {p.__name__}(...)")
            checked_pass(type(p))
        names = [p.name for p in made]
        for name in names:
            if names.count(name) > 1:
                raise PassError(f"{name} is listed {names.count(name)} times: a pass is applied once")
        for p in made:
            for other in p.conflicts_with:
                if other in names:
                    raise PassError(f"{p.name} and {other} cannot be used together: leave one out")
        self.passes: tuple[Pass, ...] = tuple(_ordered(made, keep_order))
        self.after_each = after_each

    @property
    def calls_per_update(self) -> int:
        """How many calls of the step make one update, with all passes."""
        return math.prod(p.calls_per_update for p in self.passes)

    @property
    def averages(self) -> bool:
        """Whether an update is by the mean of the gradients of its calls, else by their sum."""
        return all(p.averages for p in self.passes)

    @property
    def splits(self) -> int:
        """Into how many micro-batches each call of the step cuts its batch."""
        return math.prod(p.splits for p in self.passes)

    @property
    def weighing(self) -> Weighing | None:
        """What the passes ask of a loss."""
        return next((w for p in self.passes if (w := p.weighing) is not None), None)

    def homes(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage of a step with stages, along their axis.

        Raises:
            PassError: a schedule for other numbers.
        """
        made = {p.homes(ranks) for p in self.passes} - {tuple(range(ranks))}
        return made.pop() if made else tuple(range(ranks))

    def __call__(self, program: Program) -> Program:
        """The program after all passes."""
        return self.run(program)[0]

    def run(self, program: Program) -> tuple[Program, tuple[PassRecord, ...]]:
        """The program after all passes, and a record of each.

        Raises:
            PassError: a pass cannot be applied, or left a program that is not well formed; the message names it.
        """
        records: list[PassRecord] = []
        for p in self.passes:
            if not p.applies(program):
                continue
            if not records:
                checked(program, "the program is not well formed before any pass")
            start = time.perf_counter()
            try:
                with no_collection():
                    made, record = p.apply(program)
                    made = without_unserved(made)
            except PassError as error:
                raise PassError(f"{p.name}: {error}") from error
            middle = time.perf_counter()
            checked(made, f"{p.name} left a program that is not well formed")
            end = time.perf_counter()
            record = replace(
                record, name=p.name, options=p.options, seconds=middle - start, verify_seconds=end - middle,
                nodes=(len(program.graph.nodes), len(made.graph.nodes)), kinds=(program.kinds, made.kinds),
            )  # fmt: skip
            records.append(record)
            made = replace(made, passes=(*program.passes, record))
            _LOG.log(logging.INFO if program.rank == program.mesh.ranks[0] else logging.DEBUG, "%s", record)
            if self.after_each is not None:
                self.after_each(record, program, made)
            program = made
        return program, tuple(records)


def checked(program: Program, what: str) -> None:
    """Raises PassError, beginning with ``what``, for a program that is not well formed."""
    try:
        verify(program)
    except ProgramError as error:
        raise PassError(f"{what}: {error}") from error


def _ordered(passes: list[Pass], keep: bool) -> list[Pass]:
    """The passes with all constraints held, else as given."""
    earlier: dict[str, set[str]] = {p.name: set(p.after) for p in passes}
    for p in passes:
        for name in p.before:
            earlier.setdefault(name, set()).add(p.name)
    names = {p.name for p in passes}
    earlier = {n: earlier[n] & names for n in names}
    if keep:
        done: set[str] = set()
        for p in passes:
            late = sorted(earlier[p.name] - done)
            if late:
                raise PassError(f"{p.name} is listed before {late[0]}, which must come first: swap them")
            done.add(p.name)
        return passes
    left, made = list(passes), []
    while left:
        ready = next((p for p in left if not earlier[p.name] & {q.name for q in left}), None)
        if ready is None:
            cycle = ", ".join(f"{p.name} after {' and '.join(sorted(earlier[p.name]))}" for p in left)
            raise PassError(f"no order of these passes is allowed: {cycle}")
        left.remove(ready)
        made.append(ready)
    return made


__all__ = ["Pass", "PassManager", "PassRecord", "parse", "register", "registered"]
