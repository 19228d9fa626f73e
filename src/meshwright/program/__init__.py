"""The static program: a training step captured once, completed, partitioned, and run without Python dispatch."""

from __future__ import annotations

from .capture.build import Built, Plan, build
from .capture.scale import LossScale
from .ir.nodes import value_of
from .ir.program import Input, Origin, Output, Program
from .ir.schedules import Action, Schedule, StagePart, schedule
from .ir.store import save_program
from .load import load_program
from .run.runner import last_uses

__all__ = [
    "Action",
    "Built",
    "Input",
    "LossScale",
    "Origin",
    "Output",
    "Plan",
    "Program",
    "Schedule",
    "StagePart",
    "build",
    "last_uses",
    "load_program",
    "save_program",
    "schedule",
    "value_of",
]
