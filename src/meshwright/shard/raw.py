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


__all__ = ["become", "get_grad", "set_grad"]
