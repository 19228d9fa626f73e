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


def state_of(p: Tensor) -> tuple[int, int, Any]:
    """What changes when a tensor is written to, or could have been by a tensor that shares its memory."""
    return p._version, p.__dict__.get("_shared", 0), p._spec.layout  # type: ignore[attr-defined]


def aliased(p: Tensor) -> bool:
    """Whether writes to a tensor may go uncounted: somebody holds one that shares its memory (``p.data``)."""
    if "_shared" not in p.__dict__:
        return False
    storage = p.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) > 2  # the tensor and ``storage``


__all__ = ["aliased", "bare", "become", "get_grad", "set_grad", "state_of"]
