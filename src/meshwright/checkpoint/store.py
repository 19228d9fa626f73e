"""``Checkpoints``: a folder of checkpoints of one run."""

from __future__ import annotations

import os
from pathlib import Path
from types import NoneType
from typing import Any

from torch import Tensor

from ..errors import CheckpointError, takes
from ..mesh import Mesh
from ..ranks import runtime
from .contents import Roles
from .coordination import attempt, mesh_of
from .files import BLOCK, NewFiles
from .loading import load
from .manifest import make_folder, saves_in
from .saving import Save, save, settle


class Checkpoints:
    """Save and load the checkpoints of one run, in one folder that all ranks share.

    A checkpoint holds global tensors. It loads on any mesh and layout.

    PyTorch: `torch.distributed.checkpoint` with `async_save`.

    Args:
        folder: Shared directory; the first save creates it.
        keep: Number of complete checkpoints to keep. `None` keeps all.
        mesh: The mesh of the ranks that take part. Needed only if nothing that is saved is a DistTensor.

    Raises:
        CheckpointError: If an argument is invalid.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})


        def save_and_load():
            torch.manual_seed(0)
            model = mw.shard_module(nn.Linear(4, 4), mesh, fsdp="dp")
            checkpoints = mw.Checkpoints("runs/a", keep=3)
            checkpoints.save(10, model=model).wait()  # without wait() it is written in the background
            return checkpoints.load(model=model), checkpoints.steps


        assert mw.simulate(save_and_load, mesh) == [(10, [10])] * 2
        ```
    """

    @takes(
        CheckpointError,
        folder=((str, os.PathLike), "give the path of a folder"),
        keep=((int, NoneType), "give how many stay, or None for all"),
        mesh=((Mesh, NoneType), "give the mesh that all ranks are in"),
    )
    def __init__(self, folder: str | os.PathLike[str], keep: int | None = None, *, mesh: Mesh | None = None) -> None:
        if keep is not None and (isinstance(keep, bool) or keep < 1):
            raise CheckpointError(f"keep={keep!r}: at least 1 was expected, or None for all")
        self.folder, self.keep, self.mesh = Path(folder), keep, mesh
        self._last: Save | None = None
        self._staging: dict[str, Tensor] = {}  # memory that the next save copies to

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r}, keep={self.keep})"

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, the newest (the last to be saved) first."""
        return [s.step for s in saves_in(self.folder) if s.complete]

    def check(self) -> None:
        """Find out whether all ranks can write to the folder, before there is something to lose; it is made.

        Raises:
            CheckpointError: on all ranks: they cannot.
        """
        attempt(mesh_of(Roles.of(None, None, None, None, None), self.mesh), f"save to {self.folder}", self._try)

    def _try(self) -> None:
        new, path = NewFiles(replacing=True), self.folder / f"check-{runtime.RT.rank:05d}.tmp"
        try:
            if not self.folder.is_dir():
                make_folder(self.folder)
            new.write(path, " " * BLOCK)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error
        finally:
            new.remove()

    def save(
        self, step: int, *, model: Any = None, optimizer: Any = None, scheduler: Any = None, loader: Any = None,
        program: Any = None, gradients: bool = False, wait: bool = False,
    ) -> Save:  # fmt: skip
        """Begin to save, on all ranks together.  Each writes its own parts, what several hold once.

        Returns when what is saved was copied; ``.wait()`` when it is a checkpoint, which survives anything from then
        on.  A save before is waited for.  The copy's memory is kept for the next one.

        Args:
            step: of the run, from 0.
            model: its parameters and what buffers its ``state_dict()`` has; tied ones once.
            optimizer: one or a list; states are saved by names of parameters.
            scheduler: one or a list.
            loader: one or a list, with the place in the data: what ``mw.shard_dataloader`` returns.
            program: a captured step, which has model and optimizer with it.
            gradients: ``.grad`` of the parameters too: for a save between two backwards of an accumulation.  A load
                puts them back; sums that a captured step holds are always saved.
            wait: write it all before this returns, from where it lies: no memory is needed for a copy.

        The state of the default random generator, which all ranks share, is always saved; those of Python and NumPy too
        where all ranks have the same.

        Raises:
            CheckpointError: on all ranks: what cannot be saved; the save before failed, and nobody waited for it; with
                ``wait``, this one could not be written.
            DesyncError: on all ranks: they save different things.
        """
        roles = Roles.of(model, optimizer, scheduler, loader, program)
        self._settle()
        staging = None if wait else self._staging
        self._last = save(self.folder, self.keep, step, roles, mesh_of(roles, self.mesh), staging, gradients)
        if wait:
            self._last.wait()
        return self._last

    def _settle(self) -> None:
        """One save is under way at a time; one that failed and was not waited for is said here."""
        if self._last is not None:
            self._last.settle()  # says an error once; where an interrupt ends this, the next one waits again
        settle(self.folder)

    def load(
        self, *, model: Any = None, optimizer: Any = None, scheduler: Any = None, loader: Any = None,
        program: Any = None, step: int | None = None,
    ) -> int | None:  # fmt: skip
        """Fill model, optimizer and so on, in place, from the newest complete checkpoint; on all ranks together.

        They may lie otherwise, on another mesh, than where they were saved.  Each rank reads what it needs.

        Args:
            step: that of this step instead.
            model, optimizer, scheduler, loader, program: as for :meth:`save`; what is not given is not loaded.

        Returns:
            The step; None where there is no checkpoint: nothing was changed.

        Raises:
            CheckpointError: on all ranks: none of that step, one of another model, one that is damaged.  Unless it is
                damaged, or a ``load_state_dict`` of what was given raises, nothing was changed.
            ShardError: on all ranks: a loader of another length or kind; nothing was changed.
            DesyncError: on all ranks: they load different things; nothing was changed.
        """
        roles = Roles.of(model, optimizer, scheduler, loader, program)
        self._settle()
        found = load(self.folder, step, roles, mesh_of(roles, self.mesh))
        return None if found is None else found.step


__all__ = ["Checkpoints"]
