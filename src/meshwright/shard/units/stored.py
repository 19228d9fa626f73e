"""Parameters that ops see otherwise than they are stored: split over an axis (ZeRO-3), in another dtype, elsewhere.

Modules are grouped into *units* (a block of a transformer, say).  Before the forward of a unit one
all-gather brings its parameters, the next unit's is started, and the gathered tensors stand in for the
parameters while the forward runs.  What autograd saves of them is a reference: the backward gathers again.
Gradients arrive whole, one node per unit and forward, add up on each rank, and are reduce-scattered once per
backward.

After Rajbhandari et al., ZeRO (2020), and PyTorch's FSDP (Zhao et al., 2023).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ...mesh import Mesh
from ..gradients.sync import GradSync
from ..parameters.precision import Dtypes
from .forward import enter, leave
from .unit import Unit, Zero, stored_axis

Tensor = torch.Tensor


@dataclass
class _Enter:
    unit: Unit

    def __call__(self, module: nn.Module, args: Any) -> None:
        enter(self.unit, sys._getframe(1))


@dataclass
class _Leave:
    unit: Unit

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        leave(self.unit)


@dataclass
class _Begin:
    zero: Zero

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.zero.begin_forward()


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def install(
    model: nn.Module,
    mesh: Mesh,
    sync: GradSync,
    stored: Mapping[int, int],
    cast: Mapping[int, Dtypes],
    hosted: Set[int] = frozenset(),
    *,
    regather: bool = True,
) -> Zero:
    """Have the stored parameters of a model copied, cast and gathered for its forwards.

    Args:
        stored: id of a parameter to the axis that it is stored over.
        cast: id of a parameter to the dtypes that it is seen and reduced in.
        hosted: ids of parameters that are stored on the host.
        regather: gather again for the backward, instead of keeping what was gathered.
    """
    zero, otherwise = Zero(mesh, sync, regather), {*stored, *cast, *hosted}
    for module, members in units_of(model):
        places = [(m, k, p) for m in members for k, p in m._parameters.items() if id(p) in otherwise]
        params: list[Any] = [p for _, _, p in places]
        if params or (module is model and (cast or hosted)):
            spans = len(members) == sum(1 for _ in module.modules())
            unit = Unit(zero, params, stored, cast, hosted, spans, whole=module is model)
            unit.places = [(m, k, cast.get(id(p)), id(p) in hosted) for m, k, p in places]
            zero.units.append(unit)
            module.register_forward_pre_hook(_Enter(unit), prepend=True)  # other hooks may use parameters
            module.register_forward_hook(_Leave(unit), always_call=True)
    model.register_forward_pre_hook(_Begin(zero), prepend=True)
    return zero


def units_of(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Each unit: the module whose forward it spans, and the modules whose parameters belong to it.

    Entries of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` are units with all that is in them, unless
    they are such containers themselves.  Other modules are units of their own parameters.
    """
    taken: set[int] = set()

    def visit(module: nn.Module, entry: bool) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
        if id(module) in taken:
            return
        container = isinstance(module, _CONTAINERS)
        if entry and not container:
            inside = [m for m in module.modules() if id(m) not in taken]
            taken.update(id(m) for m in inside)
            yield module, inside
            return
        taken.add(id(module))
        yield module, [module]
        for child in module.children():
            yield from visit(child, container)

    yield from visit(model, False)


__all__ = ["Unit", "Zero", "install", "stored_axis", "units_of"]
