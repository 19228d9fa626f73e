"""Tensors made like others.  Of the shape of the first argument they get its layout, else they are made whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .core import Arg, Local, LocalFn, Rule, composite, notation, rule
from .dims import flat_ints

Tensor = torch.Tensor


def _like(make: Callable[..., Tensor], has_value: bool) -> Callable[..., Rule]:
    def size_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        given = kwargs["size"] if "size" in kwargs else (args[0] if has_value else flat_ints(args))
        return tuple(given)

    def like(x: Arg, *args: Any, **kwargs: Any) -> Rule:
        size = size_of(args, kwargs)

        def whole(x: Any, *args: Any, **kwargs: Any) -> Tensor:
            value = [kwargs.pop("fill_value", args[-1] if args else 0)] if has_value else []
            kwargs.pop("size", None)
            return make(torch.empty(0, dtype=x.dtype, device=x.device), size, *value, **kwargs)

        def local(ctx: Local) -> LocalFn:
            shape = ctx.out_shape()

            def part(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                value = [kwargs.pop("fill_value", args[-1] if args else 0)] if has_value else []
                kwargs.pop("size", None)
                return make(x, shape, *value, **kwargs)

            return part

        if size == x.shape:
            dims = " ".join(x.letters)
            return notation(f"{dims} -> {dims}", x, local=local)
        made = [f"n{i}" if n != 1 else "1" for i, n in enumerate(size)]
        sizes = {f: n for f, n in zip(made, size, strict=True) if f != "1"}
        return notation(
            f"{' '.join(x.letters)} -> {' '.join(made)}",
            x,
            sizes=sizes,
            whole=" ".join(sizes),
            local=local,
            decompose=whole,
        )

    return like


for _name in ("new_zeros", "new_ones", "new_empty"):
    rule(_name)(_like(getattr(Tensor, _name), False))
rule("new_full")(_like(Tensor.new_full, True))


@composite("new_tensor")
def new_tensor(x: Any, data: Any, **kwargs: Any) -> Tensor:
    """Made from Python data, the same on every rank: plain."""
    return torch.empty(0, dtype=x.dtype, device=x.device).new_tensor(data, **kwargs)
