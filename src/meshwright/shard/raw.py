"""The gradient slot of a tensor as autograd sees it, below ``DistTensor.grad``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

Tensor = torch.Tensor

_slot: Any = Tensor.grad
# To be called with dispatch disabled.
get_grad = cast("Callable[[Tensor], Tensor | None]", _slot.__get__)
set_grad = cast("Callable[[Tensor, Tensor | None], None]", _slot.__set__)


def become(t: Tensor, kind: type[Tensor]) -> None:
    """Change the class of a tensor, in place."""
    t.__class__ = kind


def bare(t: Tensor) -> Tensor:
    """The local tensor under a distributed one: plain, without history, sharing memory."""
    with torch._C.DisableTorchFunctionSubclass():
        local = Tensor.detach(t)
        if local.__class__ is not Tensor:
            become(local, Tensor)
        return local


__all__ = ["bare", "become", "get_grad", "set_grad"]
