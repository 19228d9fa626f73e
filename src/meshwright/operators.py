"""Operators of our own: such as a captured program holds as one node, and functions that rules are written for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

Tensor = torch.Tensor
LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
KERNELS: dict[str, Callable[..., Any]] = {}  # by the names of operators; written files have their sources
FUNCTIONS = "meshwright_functions::"  # calls of the user's autograd.Functions, in a captured graph


def operator(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], *tags: torch.Tag) -> Any:
    """An operator of torch's own kind, without a gradient: a captured program holds one node of it.

    For kernels that work block by block, which would be many nodes.
    """
    name = LIBRARY.define(schema, tags=tags)
    KERNELS[name] = kernel
    LIBRARY.impl(name, torch.no_grad()(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"meshwright::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.meshwright, name)


# Functions of PyTorch, made of several ops, that a step under capture has as one call: each to what to call instead.
KEPT: dict[Callable[..., Any], Callable[..., Any]] = {}


def opaque_operator(schema: str, fn: Callable[..., Any]) -> Any:
    """An operator that is what ``fn`` makes of ops, and stays one call where these are traced."""
    name = LIBRARY.define(schema)
    LIBRARY.impl(name, fn, "CompositeImplicitAutograd")
    return getattr(torch.ops.meshwright, name)


# ``made``: functions among the arguments of calls of a step under capture, in this thread; its graph counts them.
GIVEN = threading.local()

INTERNAL: dict[str, Internal] = {}


class Internal:
    """A function as an op of its own: with distributed arguments, the rule of its name decides.

    The function gets local tensors, unless the rule's ``local`` replaces it.  It is an object so that dispatch takes it
    for one op, and never runs its body on distributed tensors.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        INTERNAL[fn.__name__] = self
        self.__name__: str = fn.__name__
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(self, tensors, *args, **kwargs)
        return self.fn(*args, **kwargs)


internal = Internal


@dataclass(frozen=True)
class UsersCall:
    """The call of the user's that an internal op is part of, for reports.

    Attributes:
        name: ``"cross_entropy"``.
        arguments: What the op's arguments are, in the words of that call.
    """

    name: str
    arguments: tuple[str, ...] = ()


USERS_CALLS: dict[str, UsersCall] = {}  # by the names of internal ops


def part_of(call: str, *arguments: str) -> Callable[[Internal], Internal]:
    """Reports name an internal op as this call of the user's."""

    def note(op: Internal) -> Internal:
        USERS_CALLS[op.__name__] = UsersCall(call, arguments)
        return op

    return note


__all__ = [
    "FUNCTIONS",
    "GIVEN",
    "INTERNAL",
    "KEPT",
    "KERNELS",
    "USERS_CALLS",
    "Internal",
    "UsersCall",
    "internal",
    "opaque_operator",
    "operator",
    "part_of",
]
