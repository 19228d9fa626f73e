"""Options as fields of frozen dataclasses: default, words for ``--help`` and bounds stand in one place.

A new option of a command is one such field; ``meshwright.cli.options`` makes the command line of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from meshwright.errors import MeshwrightError


class OptionError(MeshwrightError, ValueError):
    """Options of a command that do not fit together."""


@contextlib.contextmanager
def writing(what: str, instead: str) -> Iterator[None]:
    """Raises OptionError for what the system refuses inside: another path, or ``instead``."""
    try:
        yield
    except OSError as error:
        raise OptionError(
            f"{what} cannot be written ({error.strerror or error}): give another path, or {instead}"
        ) from None


@dataclass(frozen=True)
class Allowed:
    """Which values are allowed, and that in words: what ... was expected."""

    holds: Callable[[Any], bool]
    words: str


COUNT = Allowed(lambda n: n >= 1, "at least 1")
NATURAL = Allowed(lambda n: n >= 0, "at least 0")
POSITIVE = Allowed(lambda x: 0 < x < math.inf, "a positive number")
PROBABILITY = Allowed(lambda p: 0 <= p < 1, "a probability in [0, 1)")


def one_of(names: tuple[str, ...]) -> Allowed:
    """One of these words."""
    return Allowed(names.__contains__, f"one of {', '.join(names)}")


@dataclass(frozen=True)
class Option:
    """A field on the command line.

    Attributes:
        flag: ``--name``.
        panel, text: where and how ``--help`` explains it.
        allowed: which values are allowed; None always is.
        unset: what None means.
        metavar: how the value is called.
        read: makes the value from the text on the command line; ``shown``: its default as text.
    """

    flag: str
    panel: str
    text: str
    allowed: Allowed | None = None
    unset: str = ""
    metavar: str | None = None
    read: Callable[[str], Any] | None = None
    shown: str = ""


def option(default: Any, flag: str, panel: str, text: str, allowed: Allowed | None = None, **more: Any) -> Any:
    """A field with this default that is an :class:`Option`."""
    return field(default=default, metadata={"option": Option(flag, panel, text, allowed, **more)})


def options_in(config: type[Any]) -> dict[str, Option]:
    """Name of a field to its option, in the order of the fields."""
    return {f.name: f.metadata["option"] for f in fields(config)}


def check_bounds(config: Any) -> None:
    """Raises OptionError for the first value that is not allowed."""
    for name, made in options_in(type(config)).items():
        value = getattr(config, name)
        if value is not None and made.allowed is not None and not made.allowed.holds(value):
            unset = f" (leave it out: {made.unset})" if made.unset else ""
            raise OptionError(f"{made.flag} {value}: {made.allowed.words} was expected{unset}")
