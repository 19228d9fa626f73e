"""Functions of users that rules call on the parts that a rank has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import DispatchError

Tensor = torch.Tensor


class _Foreign(TorchFunctionMode):
    """Inside, a distributed tensor is refused: below dispatch it would be this rank's part of it."""

    def __init__(self, name: str, fix: str) -> None:
        super().__init__()
        self.name, self.fix = name, fix

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_is_distributed, (*args, *(kwargs or {}).values()))):
            raise DispatchError(f"{self.name} uses a DistTensor that it is not given: {self.fix}")
        return func(*args, **(kwargs or {}))


def _is_distributed(a: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return any(map(_is_distributed, a))
    return isinstance(a, Tensor) and "_spec" in a.__dict__


def on_parts(fn: Callable[..., Any], parts: tuple[Tensor, ...], name: str, fix: str) -> Any:
    """What ``fn`` makes of parts.

    Raises:
        DispatchError: it uses a distributed tensor that it has from elsewhere (a closure, a module); with the fix.
    """
    parts = tuple([x.view_as(x) for x in parts])  # the object of a DistTensor may stand for what a rank has of it
    with _Foreign(name, fix):
        return fn(*parts)


__all__ = ["on_parts"]
