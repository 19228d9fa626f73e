"""``check_program``: what captured programs say of themselves, and of each other."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ProgramError, takes
from ..program import Program
from ..program.check.verify import verify, verify_together


@takes(ProgramError, programs=((Program, list, tuple), "give a program, step.program, or those of all ranks"))
def check_program(programs: Program | Sequence[Program]) -> None:
    """Check one rank's program, or the programs of all ranks of a mesh together.

    Raises:
        ProgramError: what is wrong in which program, and at which node.
        DesyncError: ranks that would not meet in the same collectives.
    """
    if not isinstance(programs, Program) and not all(isinstance(p, Program) for p in programs):
        raise ProgramError("check_program takes programs: step.program, or those of all ranks")
    if isinstance(programs, Program):
        verify(programs)
    else:
        verify_together(programs)
