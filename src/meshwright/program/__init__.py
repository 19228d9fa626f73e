"""The static program: a training step captured once, completed, partitioned, and run without Python dispatch."""

from __future__ import annotations

from .build import Built, Plan, build
from .core import Input, Origin, Output, Program, value_of
from .load import load_program
from .run import last_uses
from .scale import LossScale
from .step import Step

__all__ = [
    "Built",
    "Input",
    "LossScale",
    "Origin",
    "Output",
    "Plan",
    "Program",
    "Step",
    "build",
    "last_uses",
    "load_program",
    "value_of",
]
