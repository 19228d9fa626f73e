"""The rule book.  Importing this package registers every family: each of its modules is one."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types

from .factor_notation import COMPOSITES, RULES, Arg, Local, Native, Rule, checked_strategies, composite, notation, rule
from .strategies import Strategy

for _module in sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "core"):
    importlib.import_module(f"{__name__}.{_module}")

from .book import Entry, partial_table, rules  # noqa: E402 (after the families)


class _Book(types.ModuleType):
    """The package, which called lists what it has: ``mw.rules("*_norm")``."""

    def __call__(self, pattern: str = "*") -> list[Entry]:
        """See :func:`meshwright.rules.book.rules`."""
        return rules(pattern)


sys.modules[__name__].__class__ = _Book

__all__ = [
    "COMPOSITES", "RULES", "Arg", "Entry", "Local", "Native", "Rule", "Strategy", "checked_strategies", "composite",
    "notation", "partial_table", "rule", "rules",
]  # fmt: skip
