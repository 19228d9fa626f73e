"""Tensors that stand in for others while some code runs in this thread (gathered parameters, see ``shard.units``).

A parameter stays the object that it is, in its module too: an op that reads it reads its stand-in.  What asks about it
or differentiates it means the parameter itself.  What is written to a stand-in (by an op on the parameter, through a
view, or by one that changes an argument without saying so) is brought to the parameter before that is read or the code
ends.  Only what is marked so (``Marks.stored``) is looked up, and only in this thread: other threads see the parameter
as it is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Protocol

import torch

from ..dispatch import Args, Kwargs, map_tensors, resolve, tensors_in
from ..layout import MarkedSpec

Tensor = torch.Tensor


class Scope(Protocol):
    """A piece of running code with stand-ins."""

    def find(self, p: Tensor) -> Tensor | None:
        """What stands in for a tensor, if this scope has something."""
        ...

    def held(self, p: Tensor) -> Tensor | None:
        """The same, if that takes no communication."""
        ...

    def dtype(self, p: Tensor) -> torch.dtype | None:
        """The dtype of what stands in for a tensor, or would: nothing is done for it."""
        ...

    def device(self, p: Tensor) -> torch.device | None:
        """The device of what stands in for a tensor that is stored elsewhere, or would."""
        ...

    def keep(self) -> None:
        """Bring what was written to stand-ins to the tensors themselves."""
        ...

    def again(self, fn: Callable[..., Any]) -> Any:
        """Call ``fn`` in a scope that has stand-ins for the same tensors."""
        ...


class _Open(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Any] = []


OPEN = _Open()


def unsharded_for_read(p: Any) -> Any:
    """The tensor that ops of this thread read in the place of ``p``: itself, mostly."""
    spec = p.__dict__.get("_spec")
    if type(spec) is MarkedSpec and spec.marks.stored:
        for scope in reversed(OPEN.scopes):
            found = scope.find(p)
            if found is not None:
                return found
    return p


def itself(p: Tensor) -> Tensor:
    """``p``, which is about to be read or written to: what was written to what stands in for it is there."""
    spec = p.__dict__.get("_spec")
    if type(spec) is MarkedSpec and spec.marks.stored:
        for scope in OPEN.scopes:
            scope.keep()
    return p


def with_stand_ins(func: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any] | None:
    """The arguments of a call with the stand-ins of those that it reads; None if there are none."""
    if not OPEN.scopes:
        return None
    op = resolve(func)
    if op.python and op.rule is None:  # what it calls finds them
        return None
    map_tensors(kwargs.get("out"), itself)
    first = args[:1] if op.inplace else ()
    rest, named = args[len(first) :], {k: v for k, v in kwargs.items() if k != "out"}
    into = map_tensors(first, itself if op.turns else _written)
    if all(a is b for a, b in zip(tensors_in((first, rest, named)), _all(into, rest, named), strict=True)):
        return None
    rest, named = map_tensors((rest, named), unsharded_for_read)
    return (*into, *rest), {**kwargs, **named}


def _all(into: Any, rest: Any, named: Any) -> list[Tensor]:
    return [*tensors_in(into), *map(unsharded_for_read, tensors_in((rest, named)))]


def _written(p: Tensor) -> Tensor:
    """What a write to ``p`` goes to: what stands in for it, where that is there, so that views of it see the write."""
    spec = p.__dict__.get("_spec")
    if type(spec) is MarkedSpec and spec.marks.stored and not (torch.is_grad_enabled() and p.requires_grad):
        for scope in reversed(OPEN.scopes):
            found = scope.held(p)
            if found is not None:
                return found
    return itself(p)


def within(scopes: Sequence[Scope], fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, to be called later, with stand-ins for the tensors that these scopes have some for."""
    scopes = tuple(scopes)

    @wraps(fn)
    def run(*args: Any) -> Any:
        inner = partial(fn, *args)
        for scope in reversed(scopes):
            inner = partial(scope.again, inner)
        return inner()

    return run if scopes else fn


__all__ = ["OPEN", "Scope", "itself", "unsharded_for_read", "with_stand_ins", "within"]
