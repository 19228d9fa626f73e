"""Where communication comes from: what a step or a piece of eager code sends, and why; as text, JSON and a page.

Nothing is computed again: eager code is explained from what dispatch recorded, a program from its nodes.
"""

from __future__ import annotations

from .budget import Budget, check_budget, grown
from .compare import Comparison
from .eager import explain, explicit
from .entries import Collective, InputLayout, Total
from .explanation import Explanation
from .memory import Memory, memory_of
from .step import explain_program

__all__ = [
    "Budget",
    "Collective",
    "Comparison",
    "Explanation",
    "InputLayout",
    "Memory",
    "Total",
    "check_budget",
    "explain",
    "explain_program",
    "explicit",
    "grown",
    "memory_of",
]
