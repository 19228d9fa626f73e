"""Functions of users that rules call on the parts that a rank has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..compat import OpOverload, peek_interpreter_stack, tree_leaves
from ..errors import DispatchError

Tensor = torch.Tensor


class _Foreign(TorchFunctionMode):
    """Inside, tensors from elsewhere are refused that are, or get, this rank's part alone.

    A distributed tensor would be its local part below dispatch, and the gradient of a plain one that of a rank's rows.
    """

    def __init__(self, name: str, fix: str) -> None:
        super().__init__()
        self.name, self.fix = name, fix

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        if any("_spec" in t.__dict__ for t in given):
            raise DispatchError(f"{self.name} uses a DistTensor that it is not given: {self.fix}")
        users = torch.is_grad_enabled() and not isinstance(func, OpOverload)  # else calls that fakes make
        if users and any(map(_is_trained, given)):
            raise DispatchError(
                f"{self.name} uses a tensor that requires a gradient and that it is not given: {self.fix}"
            )
        return func(*args, **(kwargs or {}))


def _is_trained(t: Tensor) -> bool:
    """Whether it is no part, as those are views, and in ``torch.vmap`` require none; nor made of parts."""
    return t.requires_grad and (t.is_leaf or peek_interpreter_stack() is not None)


def on_parts(fn: Callable[..., Any], parts: tuple[Tensor, ...], name: str, fix: str) -> Any:
    """What ``fn`` makes of parts.

    Raises:
        DispatchError: it uses a distributed tensor that it has from elsewhere (a closure, a module), or one that
            requires a gradient; with the fix.
    """
    parts = tuple([x.view_as(x) for x in parts])  # the object of a DistTensor may stand for what a rank has of it
    with _Foreign(name, fix):
        return fn(*parts)


__all__ = ["on_parts"]
