"""``capture_local``: a step that was written for one rank, captured once and run without Python dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn as nn
import torch.utils._pytree as pytree

from .. import runtime
from ..collective import together
from ..errors import ProgramError
from ..mesh import Mesh
from .base import BaseStep, options_of
from .capture.fakes import named_in
from .capture.local import HandWritten, StepFn, record_step
from .capture.optimizers import Given, as_one
from .capture.outside import places
from .capture.update import update_of
from .check.agree import CAPTURED, REBUILD, meetings, numbers
from .ir.program import Program
from .run.bind import BACKENDS, Carrier, Ready


class LocalStep(BaseStep):
    """A step written for one rank, captured.  Call it with this rank's batch; it returns this rank's loss.

    Attributes:
        step_fn: the step as it was written.
    """

    def __init__(
        self,
        step_fn: StepFn,
        mesh: Mesh,
        model: nn.Module,
        optimizer: Given,
        batch: Any,
        backend: str | None,
        transform: Callable[[Program], Program] | None,
    ) -> None:
        if backend not in BACKENDS:
            raise ProgramError(f"backend={backend!r}: None or 'inductor' was expected")
        self.step_fn, self.transform = step_fn, transform
        with together(mesh, "capture_local"):
            optimizer = as_one(optimizer)
        self.update = update_of(optimizer, {id(p): n for n, p in named_in(model, optimizer).items()})
        carrier = Carrier(model, optimizer, self.update is not None, backend=backend)
        super().__init__(mesh, carrier, batch, hooks=True)
        self._install(pytree.tree_leaves(batch), self._capture(batch))

    def _capture(self, batch: Any) -> Ready:
        assert self.optimizer is not None
        with together(self.mesh, "capture_local", CAPTURED, REBUILD) as facts:
            local = HandWritten(
                self.step_fn, self.mesh, runtime.RT.rank, self.model, self.optimizer, batch, self.update
            )
            program, tree = record_step(local)
            if self.transform is not None:
                program = self.transform(program)
            facts += [*numbers(options_of(self.optimizer)), *meetings(program)]
        leaves = {i.name: int(i.name.partition(".")[2]) for i in program.inputs if i.kind == "batch"}
        found = places([self.step_fn, self.model], program.constants.values())
        return Ready(program, self.carrier, leaves, tree, found)

    def __repr__(self) -> str:
        return f"<LocalStep of {type(self.model).__name__}: {self.program!r}>"


__all__ = ["LocalStep"]
