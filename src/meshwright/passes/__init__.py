"""Passes over the static program: the framework and the passes that come with it."""

from __future__ import annotations

from .core import Pass, PassManager, PassRecord, parse, register, registered

__all__ = ["Pass", "PassManager", "PassRecord", "parse", "register", "registered"]
