"""``--model MODULE:FUNCTION``: a model, loss and dataset of the user's own."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
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
        if not callable(self._loss):
            raise OptionError(
                f"--model {config.model}: its loss_fn is {_in_words(self._loss)}. Return (model, loss_fn, dataset) "
                "with loss_fn(model, batch)."
            )
        _check_signature(f"--model {config.model}", "loss_fn", self._loss, (None, None), "loss_fn(model, batch)")
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
            made = call_users_function(f"--model {self.title}", self.function, self.config.make_mesh(), "dataset")
        model, loss_fn, rows, *said = made
        known = (*(f.name for f in fields(Plan)), "evaluate")
        if said and not isinstance(said[0], Mapping):
            raise OptionError(
                f"--model {self.title}: it returned a {type(said[0]).__name__} last. Return a mapping of options "
                "there, or leave it out."
            )
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
        made = self._loss(model, batch)
        if not isinstance(made, Tensor) or made.numel() != 1:
            what = f"a tensor of shape {tuple(made.shape)}" if isinstance(made, Tensor) else _in_words(made)
            raise OptionError(
                f"--model {self.title}: its loss_fn returned {what}. Return the mean loss of the batch, a tensor of "
                "one element."
            )
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
    if not callable(function):
        raise OptionError(
            f"{path}: {name} is no function ({type(function).__name__}). Name a function that takes the mesh."
        )
    return function


def call_users_function(where: str, function: Callable[..., Any], mesh: mw.Mesh, data: str) -> tuple[Any, ...]:
    """What the user's function returns for a mesh: a tuple (model, loss_fn, data), and maybe options.

    Args:
        where: what messages begin with.
        data: how the third is called.

    Raises:
        OptionError: it takes other arguments, or returns something else.
    """
    name = getattr(function, "__name__", type(function).__name__)
    _check_signature(where, name, function, (mesh,), f"def {name}(mesh)")
    made = function(mesh)
    wanted = f"Return (model, loss_fn, {data}), or these and {{'layouts': {{...}}}}."
    if not isinstance(made, tuple):
        raise OptionError(f"{where}: {name} returned {_in_words(made)}. {wanted}")
    if len(made) not in (3, 4):
        raise OptionError(f"{where}: {name} returned a tuple of {len(made)}. {wanted}")
    if not isinstance(made[0], nn.Module):
        raise OptionError(f"{where}: {name} returned {_in_words(made[0])} first, and no nn.Module. {wanted}")
    return made


def _check_signature(where: str, name: str, function: Callable[..., Any], args: tuple[Any, ...], wanted: str) -> None:
    """Raises OptionError for a function that does not take these arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some callables of C nobody knows it
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise OptionError(f"{where}: {name}{signature} does not fit ({error}). Write {wanted}.") from None


def _in_words(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "nothing" if value is None else f"a {type(value).__name__}"


__all__ = ["UsersModel", "call_users_function", "users_function"]
