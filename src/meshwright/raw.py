"""A distributed tensor as what it is underneath: this rank's plain tensor, and autograd's own slot for its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from . import compat

Tensor = torch.Tensor

_slot: Any = Tensor.grad
# Below ``DistTensor.grad``; to be called with dispatch disabled.
get_grad = cast("Callable[[Tensor], Tensor | None]", _slot.__get__)
set_grad = cast("Callable[[Tensor, Tensor | None], None]", _slot.__set__)


class as_plain:
    """Distributed tensors seen as the plain local tensors that they are, for a while; gives one where one is given."""

    __slots__ = ("given", "kinds")

    def __init__(self, *given: Tensor) -> None:
        self.given = given
        self.kinds = [(t, type(t)) for t in given if getattr(type(t), "class_set", False)]

    def __enter__(self) -> Any:
        for t, _ in self.kinds:
            t.__class__ = Tensor
        return self.given[0] if len(self.given) == 1 else self.given

    def __exit__(self, *_: object) -> None:
        for t, kind in self.kinds:
            t.__class__ = kind


def bare(t: Tensor) -> Tensor:
    """The local tensor under a distributed one: plain, without history, sharing memory and version."""
    with compat.DisableTorchFunctionSubclass():
        local = Tensor.detach(t)
        if local.__class__ is not Tensor:
            local.__class__ = Tensor
        return local


__all__ = ["as_plain", "bare", "get_grad", "set_grad"]
