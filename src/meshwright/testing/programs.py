"""``check_program``: what captured programs say of themselves, and of each other."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ProgramError, takes
from ..program import Program
from ..program.check.verify import verify, verify_together


@takes(ProgramError, programs=((Program, list, tuple), "give a program, step.program, or those of all ranks"))
def check_program(programs: Program | Sequence[Program]) -> None:
    """Check one rank's program, or the programs of all ranks of a mesh together.

    Args:
        programs: `step.program` of one rank, or those of all ranks.

    Raises:
        ProgramError: If a program is invalid. Names the program and the node.
        DesyncError: If ranks would not meet in the same collectives.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})


        def capture():
            net = nn.Linear(4, 1)
            options = {"mesh": mesh, "batch": {"dp": mw.Shard(0)}}
            return mw.compile_step(net, lambda model, x: model(x).sum(), None, torch.ones(4, 4), **options).program


        mw.check_program(mw.simulate(capture, mesh))
        ```
    """
    if not isinstance(programs, Program) and not all(isinstance(p, Program) for p in programs):
        raise ProgramError("check_program takes programs: step.program, or those of all ranks")
    if isinstance(programs, Program):
        verify(programs)
    else:
        verify_together(programs)
