"""Constraints of activations: what modules are given, or return, is brought to a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ...dispatch import map_tensors
from ...layout import Placements
from ...mesh import Mesh
from ...tensor.api import constrain
from ..parameters.names import Globs, matching

Tensor = torch.Tensor


@dataclass
class _Constraint:
    """A constraint of activations of a module.  An object and not a closure: it can be copied and pickled."""

    mesh: Mesh
    placements: Placements

    def bring(self, value: Any) -> Any:
        """Every floating-point DistTensor in ``value`` brought to the placements."""
        return map_tensors(value, self._one)

    def attach(self, module: nn.Module) -> None:
        """Have the module call this object."""
        raise NotImplementedError

    def _one(self, t: Tensor) -> Tensor:
        return constrain(t, self.placements) if t.dtype.is_floating_point or t.dtype.is_complex else t


class Inputs(_Constraint):
    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> Any:
        return self.bring(args)


class Outputs(_Constraint):
    def attach(self, module: nn.Module) -> None:
        module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.bring(output)


def hooked(modules: Mapping[str, nn.Module], globs: Globs, what: str) -> list[tuple[nn.Module, Placements]]:
    """Modules and the last constraint that matches each."""
    chosen: dict[str, Placements] = {}
    for glob, matched in matching(globs, modules, f"module (in {what})").items():
        for name in matched:
            chosen[name] = globs[glob]
    return [(modules[name], placements) for name, placements in chosen.items()]


__all__ = ["Inputs", "Outputs", "hooked"]
