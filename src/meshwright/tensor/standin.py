"""Tensors that stand in for others while some code runs in this thread (gathered parameters, see ``shard.zero``).

A parameter stays the object that it is, in its module too: an op that reads it reads its stand-in.  What writes to it,
asks about it or differentiates it means the parameter itself.  Only what is marked so by its spec (``Spec.stored``) is
looked up, and only in this thread: other threads see the parameter as it is stored.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from ..dispatch import map_tensors, resolve, tensors_in

Tensor = torch.Tensor


class Scope(Protocol):
    """A piece of running code with stand-ins."""

    def find(self, p: Tensor) -> Tensor | None:
        """What stands in for a tensor, if this scope has something."""
        ...


class _Open(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Any] = []


OPEN = _Open()


def stands_in(p: Any) -> Any:
    """The tensor that ops of this thread read in the place of ``p``: itself, mostly."""
    spec = p.__dict__.get("_spec")
    if spec is not None and spec.stored:
        for scope in reversed(OPEN.scopes):
            found = scope.find(p)
            if found is not None:
                return found
    return p


def with_stand_ins(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The arguments of a call with the stand-ins of those that it reads; None if there are none."""
    if not OPEN.scopes:
        return None
    skip = args[:1] if resolve(func).inplace else ()
    rest, named = args[len(skip) :], {k: v for k, v in kwargs.items() if k != "out"}
    if all(stands_in(t) is t for t in tensors_in((rest, named))):
        return None
    rest, named = map_tensors((rest, named), stands_in)
    return (*skip, *rest), {**kwargs, **named}


__all__ = ["OPEN", "Scope", "stands_in", "with_stand_ins"]
