"""Tensors made like others.  Of the shape of the first argument they get its layout, else they are made whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .dims import flat_ints, names, sizes_of
from .factor_notation import Arg, Local, LocalFn, Rule, composite, notation, rule

Tensor = torch.Tensor


def _like(make: Callable[..., Tensor], has_value: bool) -> Callable[..., Rule]:
    def size_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        given = kwargs["size"] if "size" in kwargs else (args[0] if has_value else flat_ints(args))
        return tuple(given)

    def like(x: Arg, *args: Any, **kwargs: Any) -> Rule:
        size = size_of(args, kwargs)

        def made(x: Tensor, shape: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            value = [kwargs.pop("fill_value", args[-1] if args else 0)] if has_value else []
            kwargs.pop("size", None)
            return make(x, shape, *value, **kwargs)

        def whole(x: Any, *args: Any, **kwargs: Any) -> Tensor:
            return made(torch.empty(0, dtype=x.dtype, device=x.device), size, args, kwargs)

        def local(ctx: Local) -> LocalFn:
            shape = ctx.out_shape()
            return lambda x, *args, **kwargs: made(x, shape, args, kwargs)

        if size == x.shape:
            return notation({x: x.letters}, x.letters, local=local)
        out = names("n", size)
        return notation({x: x.letters}, out, sizes=sizes_of(out, size), whole=out, local=local, decompose=whole)

    return like


for _name in ("new_zeros", "new_ones", "new_empty"):
    rule(_name)(_like(getattr(Tensor, _name), False))
rule("new_full")(_like(Tensor.new_full, True))


@composite("new_tensor")
def new_tensor(x: Any, data: Any, **kwargs: Any) -> Tensor:
    """Made from Python data, the same on every rank: plain."""
    return torch.empty(0, dtype=x.dtype, device=x.device).new_tensor(data, **kwargs)
