"""Passes over the static program: the framework and the passes that come with it, one module each."""

from __future__ import annotations

import importlib
import pkgutil

from ..program.ir.nodes import annotate, info_of
from ..program.ir.subgraphs import copied
from .data_parallel_optimization import DataParallelOptimization
from .gradient_merge import GradientMerge
from .pass_manager import Pass, PassManager, PassRecord, parse, register, registered
from .pipeline import Pipeline

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "DataParallelOptimization",
    "GradientMerge",
    "Pass",
    "PassManager",
    "PassRecord",
    "Pipeline",
    "annotate",
    "copied",
    "info_of",
    "parse",
    "register",
    "registered",
]
