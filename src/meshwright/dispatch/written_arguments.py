"""Arguments that a call writes to: ``out=``, and those of custom ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .. import compat
from ..errors import DispatchError
from .binding import Args, Kwargs
from .calls import op_name, tensors_in


def into(func: Any, *args: Any, out: Any, **kwargs: Any) -> Any:
    """``out=``: compute, convert to the layout that ``out`` has, and copy into it."""
    name = op_name(func)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs, out))):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )
    for target, value in zip(tensors_in(out), tensors_in(func(*args, **kwargs)), strict=True):
        if not torch.can_cast(value.dtype, target.dtype):
            raise RuntimeError(f"{name}: result type {value.dtype} can't be cast to the desired type {target.dtype}")
        if target.shape != value.shape:
            if "_spec" in target.__dict__ or target.numel():
                raise DispatchError(
                    f"{name}: out= has shape {tuple(target.shape)}, the result {tuple(value.shape)}; only an empty "
                    "plain tensor is resized"
                )
            target.resize_(value.shape)
        with torch.no_grad():
            target.copy_(value)
    return out


def written(func: Any, args: Args, kwargs: Kwargs) -> Iterator[tuple[str, Any]]:
    """The arguments that an op writes to, as its schema says."""
    op = getattr(func, "_opoverload", func)
    op = getattr(op, op.overloads()[0]) if isinstance(op, compat.OpOverloadPacket) else op
    for i, argument in enumerate(op._schema.arguments if isinstance(op, compat.OpOverload) else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield argument.name, args[i] if i < len(args) else kwargs.get(argument.name)
