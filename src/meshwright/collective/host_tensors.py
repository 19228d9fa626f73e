"""Collectives of tensors that lie elsewhere than ranks meet: parameters and gradients that are stored on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

from ..errors import CollectiveError
from .groups import Group
from .transport import Pending

Tensor = torch.Tensor
Made = TypeVar("Made", bound="Tensor | Pending")


class _Silent(threading.local):
    why = ""


_SILENT = _Silent()


@contextmanager
def silent(why: str) -> Iterator[None]:
    """Inside, a collective of this thread is an error that says why: another thread starts some of its own."""
    before, _SILENT.why = _SILENT.why, why
    try:
        yield
    finally:
        _SILENT.why = before


def from_elsewhere(run: Callable[..., Made], *, writes: bool = False) -> Callable[..., Made]:
    """A collective that takes tensors of any device: its group's device gets a copy, and the result is copied back.

    Args:
        run: ``run(t, ...)`` with a group among its arguments.
        writes: it writes to ``t``, which it returns.
    """

    @wraps(run)
    def there(t: Tensor, *args: Any, **kwargs: Any) -> Made:
        group = args[-1] if args and args[-1].__class__ is Group else _group_in(args, kwargs)
        if _SILENT.why and group.size > 1:
            raise CollectiveError(_SILENT.why)
        if t.device.type == group.device or group.size == 1 or t.is_meta:
            return run(t, *args, **kwargs)
        into = t if writes or kwargs.get("out_of_place") is False else None

        def back(made: Tensor) -> Tensor:
            if into is None:
                return made.to(t.device)
            into.detach().copy_(made)
            return into

        made: Any = run(t.detach().to(group.device), *args, **kwargs)
        if isinstance(made, Tensor):
            return back(made)  # type: ignore[return-value]
        return _Back(made, back)  # type: ignore[return-value]

    return there


def _group_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Group:
    return next(a for a in (*args, *kwargs.values()) if isinstance(a, Group))


class _Back(Pending):
    """A collective under way whose result is copied back."""

    __slots__ = ("_sent",)

    def __init__(self, sent: Pending, back: Callable[[Tensor], Tensor]) -> None:
        super().__init__(None, sent, lambda p: back(p.wait()))
        self._sent = sent

    @property
    def staged(self) -> bool:
        """Whether it is several collectives."""
        return self._sent.staged

    def advance(self) -> None:
        """Start what is to come after the first of several collectives."""
        self._sent.advance()


__all__ = ["from_elsewhere", "silent"]
