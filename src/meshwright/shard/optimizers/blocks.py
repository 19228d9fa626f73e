"""States that are not one value per element: codes with the scales of their blocks, sums over rows and columns.

What such a state means lies in several tensors together, and in the part of the parameter that they were made from.  So
where states are split a rank's are its own: the steps of that rank read and write them as they are, and nothing cuts,
joins, saves or loads them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.optim.optimizer import Optimizer

from ... import collective
from ...errors import ShardError
from ...layout import Spec
from ...ranks import runtime
from ...tensor import DistTensor
from ..parameters.names import name_of
from .kinds import builtin

Tensor = torch.Tensor
_PLAIN = (Tensor, nn.Parameter, DistTensor)


def opaque(value: Any) -> bool:
    """Whether a value is a tensor of a class of its own, such as one that holds codes and scales."""
    return isinstance(value, Tensor) and value.__class__ not in _PLAIN


def non_elementwise_state(entry: Mapping[str, Any], spec: Spec) -> str | None:
    """Of the states of a parameter, the name of one that has neither one value nor one per element, or None.

    Integers and float8 are no values: they are codes, which mean something by the scales beside them.  What is in
    containers nobody cuts or joins.

    Args:
        spec: how its states lie; a plain tensor may have the rank's part or the whole.
    """
    shapes = (tuple(spec.shape), tuple(spec.local_shape(spec.mesh.coordinate(runtime.RT.rank))))
    for key, value in entry.items():
        if opaque(value) or (isinstance(value, (list, tuple, Mapping, deque)) and _holds_tensors(value)):
            return key
        if isinstance(value, Tensor) and math.prod(value.shape) != 1:
            wide = value.is_floating_point() and value.dtype.itemsize > 1
            codes = not (wide or value.is_complex() or value.dtype is torch.bool)
            if codes or tuple(value.shape) not in shapes:
                return key
    return None


def _holds_tensors(container: Any) -> bool:
    """Whether there are tensors of several elements in it."""
    values = container.values() if isinstance(container, Mapping) else container
    return any(
        v.numel() != 1 if isinstance(v, Tensor) else isinstance(v, (list, tuple, Mapping, deque)) and _holds_tensors(v)
        for v in values
    )


def _numbers(entry: Mapping[str, Any], spec: Spec) -> dict[str, str]:
    """States of one value, as ranks compare them; a part of one element has states of its shape, which are not such."""
    part = tuple(spec.local_shape(spec.mesh.coordinate(runtime.RT.rank)))
    plain = {k: v for k, v in entry.items() if isinstance(v, Tensor) and not opaque(v)}
    return {k: repr(v.item()) for k, v in plain.items() if v.numel() == 1 and (v.ndim == 0 or v.shape != part)}


def _differing(said: Sequence[Mapping[int, Mapping[str, str]]]) -> dict[int, str]:
    """Of each parameter a state of one value that the ranks do not have alike."""
    keys = sorted({(i, k) for numbers in said for i, entry in numbers.items() for k in entry})
    return {i: k for i, k in keys if len({numbers.get(i, {}).get(k) for numbers in said} - {None}) > 1}


class OpaqueStates:
    """The parameters of one optimizer whose states are each rank's own."""

    def __init__(self) -> None:
        self.found: dict[int, str] = {}  # on any rank: parts of other sizes may have other states
        self.judged: set[int] = set()
        self.left: dict[int, tuple[Spec, list[Any]]] = {}  # what a step has left behind

    def judge(self, opt: Optimizer, lies: Mapping[int, tuple[Spec, Spec]]) -> None:
        """Look at the states that a step has made.  Ranks tell each other of each parameter once: all have the same.

        A state of one value that is not the same on all ranks is one of a rank's own part, such as a scale.
        """
        if builtin(opt):
            return
        every = [p for g in opt.param_groups for p in g["params"] if id(p) in lies and p in opt.state]
        split = {i: p for i, p in enumerate(every) if not lies[id(p)][1].layout.is_replicated()}
        odd = {
            i: key for i, p in split.items() if (key := non_elementwise_state(opt.state[p], lies[id(p)][1])) is not None
        }
        told = [odd]
        new = [i for i, p in split.items() if id(p) not in self.judged]
        if new:
            self.judged |= {id(p) for p in split.values()}
            numbers = {i: _numbers(opt.state[p], lies[id(p)][1]) for i in new for p in [split[i]]}
            group = collective.group(next(iter(split.values()))._spec.mesh)
            said = collective.all_gather_object((odd, numbers), group)
            told = [rank for rank, _ in said]
            told += [_differing([n for _, n in said])]
        for rank in told:
            for i, key in rank.items():
                self.found.setdefault(
                    id(every[i]), f"the state {key!r} that {type(opt).__name__} keeps of {name_of(every[i])}"
                )
        self.left = {
            id(p): (lies[id(p)][1], list(opt.state[p].values())) for p in split.values() if id(p) in self.found
        }

    def holds(self, opt: Optimizer, p: DistTensor, entry: Mapping[str, Any], spec: Spec) -> bool:
        """Whether states are to be left as they are: whole ones, and those that a step of this rank has made.

        Raises:
            ShardError: they are from elsewhere, and the parameter's states are split.
        """
        if builtin(opt):
            return False
        key = non_elementwise_state(entry, spec)
        if spec.layout.is_replicated():
            return any(map(opaque, entry.values()))
        if key is None and id(p) not in self.found:
            return False
        made, values = self.left.get(id(p), (None, []))
        if (
            made is spec
            and len(values) == len(entry)
            and all(a is b for a, b in zip(values, entry.values(), strict=True))
        ):
            return True
        raise ShardError(
            f"{type(opt).__name__}: state {key or 'of some key'!r} of {name_of(p)} is not one value per element and "
            f"cannot be sharded as {spec.layout!r}. Start with new states (del optimizer.state[p]) or use AdamW."
        )

    def refusal(self, what: str) -> str:
        """Why states cannot be saved; empty where they can."""
        if not self.found:
            return ""
        return (
            f"{next(iter(self.found.values()))} is not one value per element: where states are split it is of "
            f"each rank's own part, and {what} cannot join the parts. Save the model without the optimizer and begin "
            "with new states, or use an optimizer with a state per element, such as torch.optim.AdamW"
        )


__all__ = ["OpaqueStates", "non_elementwise_state", "opaque"]
