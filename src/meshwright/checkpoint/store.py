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
        """Begin to save, on all ranks together. Each rank writes its shards; values that several hold are written once.

        Returns once the values are copied. Call `.wait()` on the result to wait for the complete checkpoint, which
        survives any crash from then on. A save waits for the one before. The memory of the copy is kept for the next.

        The state of the default random generator, which all ranks share, is always saved. Those of Python and NumPy
        are saved if all ranks have the same.

        Args:
            step: Step of the run, from 0.
            model: Model; its parameters and the buffers of its `state_dict()`. Tied ones are saved once.
            optimizer: One or a list; states are saved by parameter name.
            scheduler: One or a list.
            loader: One or a list, with the position in the data: the results of `mw.shard_dataloader`.
            program: A captured step; includes its model and optimizer.
            gradients: Also save `.grad`, for a save between two backward passes of an accumulation. A load restores
                it. Sums that a captured step holds are always saved.
            wait: Write everything before returning, without a copy.

        Raises:
            CheckpointError: On all ranks, if something cannot be saved, the previous save failed and nobody waited for
                it, or, with `wait`, this one cannot be written.
            DesyncError: On all ranks, if they save different things.
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
        """Fill model, optimizer and so on, in place, from the newest complete checkpoint, on all ranks together.

        Mesh and layouts may differ from those of the save. Each rank reads only what it needs.

        Args:
            model: As for `save`. What is not given is not loaded.
            optimizer: As for `save`.
            scheduler: As for `save`.
            loader: As for `save`.
            program: As for `save`.
            step: Load the checkpoint of this step instead of the newest.

        Returns:
            The step, or `None` if there is no checkpoint; then nothing changes.

        Raises:
            CheckpointError: On all ranks, if there is none of that step, or it is damaged or of another model. Nothing
                changes, unless it is damaged or a `load_state_dict` of yours raises.
            ShardError: On all ranks, if a loader has another length or kind. Nothing changes.
            DesyncError: On all ranks, if they load different things. Nothing changes.
        """
        roles = Roles.of(model, optimizer, scheduler, loader, program)
        self._settle()
        found = load(self.folder, step, roles, mesh_of(roles, self.mesh))
        return None if found is None else found.step


__all__ = ["Checkpoints"]
