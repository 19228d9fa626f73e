"""What an optimizer updates with, as numbers that ranks compare."""

from __future__ import annotations

from numbers import Real
from types import NoneType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

_PLAIN = {float, int, bool, NoneType}


def numbers_of(opt: Optimizer) -> list[dict[str, Any]]:
    """Of each parameter group its numbers (learning rate, weight decay...), and how many parameters have states so far.

    Not how many states: of parts of other sizes an optimizer may keep others.
    """
    states = sum(map(bool, opt.state.values()))
    return [
        {"states": states}
        | {
            k: v if v.__class__ in _PLAIN else _plain(v)
            for k, v in group.items()
            if k != "params" and type(v) is not str
        }
        for group in opt.param_groups
    ]


def is_fixed(value: Any) -> bool:
    """Whether a value is the same number, or none at all, as long as it is the same object."""
    return (
        value.__class__ in _PLAIN or isinstance(value, str) or (value.__class__ is tuple and all(map(is_fixed, value)))
    )


def _plain(value: Any) -> Any:
    """Numbers out of other kinds; what is none is not compared."""
    if value.__class__ in _PLAIN:
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, torch.Tensor):  # reading it on a device would wait
        return value.item() if value.__class__ is torch.Tensor and value.numel() == 1 and value.is_cpu else None
    return float(value) if isinstance(value, Real) else None


__all__ = ["is_fixed", "numbers_of"]
