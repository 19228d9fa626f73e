"""Random programs on a mesh against one device: every value, gradient and second gradient.

``program`` says what a program is, ``grammar`` which lines it may have, ``draw`` makes one from a seed, ``judge`` runs
it on one device and on simulated ranks, ``campaign`` does so many times.
"""

from .campaign import Finding, Tally, campaign, run_seed
from .draw import draw_program
from .judge import VERDICTS, Verdict, judge, shrink
from .program import Leaf, Program

__all__ = [
    "VERDICTS", "Finding", "Leaf", "Program", "Tally", "Verdict", "campaign", "draw_program", "judge", "run_seed",
    "shrink",
]  # fmt: skip
