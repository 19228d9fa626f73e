"""Accelerate on a mesh: its state says that there is one process, whatever the launcher said."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from ..ranks import runtime


def one_device() -> None:
    """Let Accelerate see the mesh as one device.

    ``Accelerator.prepare`` then leaves a sharded model as it is (it would wrap it in DDP) and every rank's loader the
    global one; ``gather`` and ``reduce`` return values as they are; a loss is not divided among processes.  Only the
    first rank is a main process.  Call it when the processes are connected (:func:`meshwright.init_mesh`), before or
    after ``Accelerator()``; ``TrainingArguments(...)`` sets the state anew, so behind it (:mod:`.transformers` does).

    Example:
        >>> mesh = mw.init_mesh({"dp": 2, "tp": 2})
        >>> one_device()
        >>> accelerator = accelerate.Accelerator(cpu=True)
        >>> model, optimizer = accelerator.prepare(mw.shard_module(model, mesh, layouts), optimizer)
        >>> batches = mw.shard_dataloader(accelerator.prepare(loader), mesh, {"dp": mw.Shard(0)})
    """
    Accelerator.dispatch_batches = property(_dispatches)
    PartialState()  # makes the state where there is none yet
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        if shared:
            shared.update(distributed_type=DistributedType.NO, num_processes=1, process_index=runtime.RT.rank)


@contextlib.contextmanager
def as_the_first() -> Iterator[None]:
    """Inside, this process is the one that there is: what is made takes no number of a rank as its seed."""
    one_device()
    PartialState._shared_state["process_index"] = 0
    try:
        yield
    finally:
        one_device()


_of_its_configuration = Accelerator.dispatch_batches.fget


def _dispatches(self: Accelerator) -> bool | None:
    """The first process reads an ``IterableDataset`` for the others, of which there are none where there is one."""
    return False if self.num_processes == 1 else _of_its_configuration(self)
