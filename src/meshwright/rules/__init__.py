"""The rule book.  Importing this package registers every family: each of its modules is one."""

from __future__ import annotations

import importlib
import pkgutil

from .core import COMPOSITES, RULES, Arg, Local, Native, Rule, Strategy, composite, notation, rule

for _module in sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "core"):
    importlib.import_module(f"{__name__}.{_module}")

__all__ = ["COMPOSITES", "RULES", "Arg", "Local", "Native", "Rule", "Strategy", "composite", "notation", "rule"]
