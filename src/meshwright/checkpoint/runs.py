"""Which run the checkpoints of a folder are of: two that save to one would remove, and go on from, those of each other.

A run has a name, made at its first save and written in every manifest; a job that loads one of its checkpoints goes on
with it.  Two jobs of one run look alike to that name, so a job also knows which saves it found when it loaded, and
which it made: another complete one is of somebody who saves there too.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError
from ..ranks import runtime
from ..untrusted_files import open_regular
from .manifest import NAME, SaveFolder, remove, saves_in

_RUN = re.compile(rb'\n"run": "([0-9a-f]+)"')
_HEAD = 512  # bytes of a manifest that have the name of its run in them


@dataclass
class Run:
    """What this job knows of the run whose checkpoints are in a folder.

    Attributes:
        name: in manifests; empty until one was loaded or saved.
        own: names of the saves that it found complete when it loaded, and of those that it made.
        left: names of those that it found incomplete then: of processes that are gone.
    """

    name: str = ""
    own: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)

    def goes_on(self, name: str, own: Iterable[str], left: Iterable[str]) -> None:
        """This job loaded what is there, and goes on with it."""
        self.name, self.own, self.left = name, set(own), set(left)

    def owns(self, save: SaveFolder) -> bool:
        """Whether a save may be counted and removed as one of this run."""
        return save.path.name in self.own


# By rank and folder: whichever objects of the process save there, they are one run.
_RUNS: dict[tuple[int, str], Run] = {}


def run_in(folder: Path, rank: int | None = None) -> Run:
    """The run that this process has in a folder; in a thread of its own the rank is to be said."""
    rank = runtime.RT.rank if rank is None else rank
    return _RUNS.setdefault((rank, os.path.realpath(folder)), Run())


def stranger(folder: Path, run: Run) -> str:
    """Why a run cannot save to a folder: somebody else's checkpoint is there; empty where there is none."""
    other = next((s for s in saves_in(folder) if s.complete and not run.owns(s)), None)
    if other is None:
        return ""
    what = f"step {other.step} in {other.path.name}"
    if not run.own:
        return (
            f"it has checkpoints that this run did not load (the newest: {what}): load() one to go on from it, or save "
            "to another folder"
        )
    return (
        f"somebody else saved {what} there after this run began: of two runs in one folder each would remove, and "
        "go on from, the checkpoints of the other. End one of them, and give each a folder of its own"
    )


def clear(folder: Path, run: Run) -> None:
    """Remove what saves left that did not come to their end: the next one needs the room.

    Those of processes that are gone, for all that is known.  What cannot be removed stays.
    """
    for save in saves_in(folder):
        if save.path.name in run.own | run.left and not save.complete:
            with contextlib.suppress(OSError):
                remove(save.path)


def of_one_run(folder: Path, saves: Sequence[SaveFolder]) -> None:
    """Raise CheckpointError where checkpoints of which the newest is to be read are of several runs."""
    found: dict[str, list[int]] = {}
    for save in saves:
        if name := _run_of(save.path / NAME):
            found.setdefault(name, []).append(save.step)
    if len(found) > 1:
        listed = "; ".join(f"steps {', '.join(map(str, steps))}" for steps in found.values())
        raise CheckpointError(
            f"{folder} has checkpoints of {len(found)} runs ({listed}): which is meant? Leave those of one there"
        )


def _run_of(path: Path) -> str:
    """The run that a manifest names; empty where an earlier version wrote it."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            found = _RUN.search(file.read(_HEAD))
    except OSError:  # said where it is read as a whole
        return ""
    return found[1].decode() if found else ""


__all__ = ["Run", "clear", "of_one_run", "run_in", "stranger"]
