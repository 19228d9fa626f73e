"""``--model MODULE:FUNCTION``: a model, loss and dataset of the user's own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.data import Dataset

import meshwright as mw
from meshwright.compat import pytree
from meshwright.errors import near
from meshwright.program import Plan

from .choices import OF_BATCH
from .config import TrainConfig
from .options import OptionError
from .subject import TrainingSubject


class UsersModel(TrainingSubject):
    """What a function of the user's returns: (model, loss_fn, dataset), and a mapping of options of the plan.

    It is called with the mesh and the default device.  ``"evaluate"`` in the mapping: the held-out dataset.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        assert config.model is not None
        self.function, self.title = users_function(config.model), config.model
        self._first, self._loss, self.rows, self._said = self._called()
        if not hasattr(self.rows, "__getitem__") or not hasattr(self.rows, "__len__"):
            raise OptionError(
                f"--model {config.model}: its dataset is a {type(self.rows).__name__}, without rows by number"
            )
        count = len(self.rows)
        if count < config.batch:
            raise OptionError(f"--batch {config.batch}: the dataset of {config.model} has {count} rows: take fewer")
        self.source = f"{count:,} rows of a {type(self.rows).__name__}"
        self.digest = str(getattr(self.rows, "digest", count))

    def _called(self) -> tuple[Any, ...]:
        torch.manual_seed(self.config.seed)
        with torch.device(self.config.device):
            made = self.function(self.config.make_mesh())
        if not isinstance(made, tuple) or len(made) not in (3, 4) or not isinstance(made[0], nn.Module):
            raise OptionError(
                f"--model {self.title}: it returned {type(made).__name__}; (model, loss_fn, dataset), or these and "
                "{'layouts': {...}}, was expected"
            )
        model, loss_fn, rows, *said = made
        known = (*(f.name for f in fields(Plan)), "evaluate")
        for key in said[0] if said else ():
            if key not in known:
                raise OptionError(f"--model {self.title}: it returned an option {key!r}{near(key, known)}")
            if self.config.plan is not None and key != "evaluate":
                raise OptionError(
                    f"--plan {self.config.plan}: {self.title} returns {key!r} too: leave one of the two out"
                )
        return model, loss_fn, rows, dict(said[0]) if said else {}

    def model(self, device: str | torch.device) -> nn.Module:
        first, self._first = self._first, None
        made: nn.Module = self._called()[0] if first is None else first
        return made

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        made: Tensor = self._loss(model, batch)
        return made

    def plan(self, mesh: mw.Mesh) -> Plan:
        batch = {axis: mw.Shard(0) for axis in mesh.axes if axis in OF_BATCH}
        said = {key: value for key, value in self._said.items() if key != "evaluate"}
        return Plan(**({"batch": batch} | said))

    @property
    def evaluates(self) -> bool:
        return "evaluate" in self._said

    def held_out(self) -> Dataset[Any]:
        held: Dataset[Any] = self._said["evaluate"]
        return held

    def count_labels(self, batch: Any) -> int:
        return int(next(t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)).shape[0])


def users_function(path: str) -> Callable[..., Any]:
    """The function ``module:function``, imported from the current folder too.  Raises OptionError."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise OptionError(f"{path}: module:function was expected, as in mypackage.train:step")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{path}: {error}") from error
    return function


__all__ = ["UsersModel", "users_function"]
