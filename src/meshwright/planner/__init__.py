"""The planner: mesh, layouts, storage and stages of a model for a machine, and why."""

from .result import FoundPlan, plan

__all__ = ["FoundPlan", "plan"]
