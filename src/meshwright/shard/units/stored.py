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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ...mesh import Mesh
from ..gradients.sync import GradSync
from ..parameters.names import units_of
from ..parameters.stored import Stored
from .forward import enter, leave
from .unit import FSDPState, ParamGroup

Tensor = torch.Tensor


@dataclass
class _Enter:
    unit: ParamGroup

    def __call__(self, module: nn.Module, args: Any) -> None:
        enter(self.unit, sys._getframe(1))


@dataclass
class _Leave:
    unit: ParamGroup

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        leave(self.unit)


@dataclass
class _Begin:
    zero: FSDPState

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.zero.begin_forward()


def install(
    model: nn.Module, mesh: Mesh, sync: GradSync, kept: Mapping[int, Stored], *, reshard_after_forward: bool = True
) -> FSDPState:
    """Have the stored parameters of a model copied, cast and gathered for its forwards.

    Args:
        kept: id of a parameter to its record.
        reshard_after_forward: gather again for the backward, instead of keeping what was gathered.
    """
    zero, elsewhere = FSDPState(mesh, sync, reshard_after_forward), any(s.dtypes or s.device for s in kept.values())
    for module, members in units_of(model):
        places = [(m, k, p) for m in members for k, p in m._parameters.items() if id(p) in kept]
        if places or (module is model and elsewhere):
            spans = len(members) == sum(1 for _ in module.modules())
            unit = ParamGroup(zero, [(m, k, p, kept[id(p)]) for m, k, p in places], spans, whole=module is model)  # type: ignore[misc]
            zero.units.append(unit)
            module.register_forward_pre_hook(_Enter(unit), prepend=True)  # other hooks may use parameters
            module.register_forward_hook(_Leave(unit), always_call=True)
    model.register_forward_pre_hook(_Begin(zero), prepend=True)
    return zero


__all__ = ["install"]
