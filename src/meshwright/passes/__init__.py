"""Passes over the static program: the framework and the passes that come with it."""

from __future__ import annotations

from .core import Pass, PassManager, PassRecord, parse, register, registered
from .data_parallel_optimization import DataParallelOptimization
from .gradient_merge import GradientMerge
from .slicing import copied

__all__ = [
    "DataParallelOptimization",
    "GradientMerge",
    "Pass",
    "PassManager",
    "PassRecord",
    "copied",
    "parse",
    "register",
    "registered",
]
