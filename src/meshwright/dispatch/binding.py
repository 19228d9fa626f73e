"""Arguments by name: a rule sees every call in the order of its op's schema, whatever names the caller used.

PyTorch's own schemas say which names there are, so rules name their parameters as they like.  Done once per plan; a
call without names needs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from .. import compat

Tensor = torch.Tensor
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

# Other names that PyTorch's bindings take: ``self`` is ``input`` in functions, ``src`` of ``copy_`` and what ``to`` is
# given have names of their own, the rest is numpy's.
_ALIASES = {"self": ("input", "x", "a", "x1"), "input": ("x", "a", "x1"), "other": ("x2", "tensor"), "dim": ("axis",),
            "keepdim": ("keepdims",), "src": ("other",)}  # fmt: skip
# What bindings take beyond the schema.
_BEYOND = {"requires_grad", "pin_memory", "dtype", "device", "layout", "memory_format", "generator"}
_NEEDED = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a schema.

    ``tensor``: whether it must be one, None where no matter.  ``unread``: bindings of C take its default, a name, for a
    number, and so for 0: ``torch.kl_div(x, y)`` is not reduced, as ``aten.kl_div(x, y)`` is.
    """

    name: str
    keyword: bool = False
    default: Any = _NEEDED
    tensor: bool | None = None
    unread: bool = False

    def is_called(self, name: str) -> bool:
        """Whether a caller may use this name for it."""
        return name == self.name or name in _ALIASES.get(self.name, ())


Signature = tuple[Param, ...]


@dataclass(frozen=True, slots=True)
class Bindings:
    """How the call in the schema's order is made from a call with names: names to add in order, or values that stand
    for what was left out; and names to keep, with those of the schema."""

    more: tuple[tuple[str | None, Any], ...]
    named: tuple[tuple[str, str], ...]

    def __call__(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The arguments in the schema's order."""
        more = [default if name is None else kwargs[name] for name, default in self.more]
        return (*args, *more), {theirs: kwargs[name] for theirs, name in self.named}

    def around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn`` of the schema's order as a function of such calls."""

        def bound(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self(args, kwargs)
            return fn(*args, **kwargs)

        return bound


def bind(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Bindings | None:
    """How to bring a call of ``func`` (or of the ATen op ``name``) to the order of its schema.

    None where it is there already, or where no schema fits: then a rule gets the call as it is.
    """
    return next((b for s in signatures(func, name) if (b := _fit(s, args, kwargs)) is not None), None)


@lru_cache(maxsize=4096)
def signatures(func: Any, name: str) -> tuple[Signature, ...]:
    """What ``func`` may be called with: one signature, or one per overload of an op."""
    return tuple(_signatures(func, name))


def _signatures(func: Any, name: str) -> Iterator[Signature]:
    if isinstance(func, compat.CustomOpDef):
        func = func._opoverload
    func = inspect.unwrap(func) if inspect.isfunction(func) else func
    if isinstance(func, compat.OpOverload):
        yield _of_schema(func._schema)
    elif isinstance(func, compat.OpOverloadPacket):
        yield from (_of_schema(getattr(func, o)._schema) for o in func.overloads())
    elif inspect.isfunction(func):
        params = inspect.signature(func).parameters.values()
        if not any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in params):
            yield tuple(Param(p.name, p.kind == p.KEYWORD_ONLY, p.default) for p in params if p.kind != p.VAR_KEYWORD)
    else:
        for schema in compat.jit_get_schemas_for_operator(name if "::" in name else f"aten::{name}"):
            if _dispatched(schema) and not any(a.is_out for a in schema.arguments):
                yield _as_read(_of_schema(schema))


def unread(func: Any, name: str) -> bool:
    """Whether a call that leaves out arguments means others than the schema says."""
    return any(p.unread for s in signatures(func, name) for p in s)


def _as_read(signature: Signature) -> Signature:
    return tuple(
        replace(p, default=0, unread=True) if p.name == "reduction" and p.default is not _NEEDED else p
        for p in signature
    )


def _dispatched(schema: Any) -> bool:
    """Whether an overload is one of tensors (TorchScript has others, of lists and numbers) and without named dims."""
    if "names" in schema.overload_name.lower() or "dimname" in schema.overload_name.lower():
        return False
    try:
        compat.dispatch_find_schema_or_throw(schema.name, schema.overload_name)
    except RuntimeError:
        return False
    return any("Tensor" in str(a.type) for a in schema.arguments)


def _of_schema(schema: Any) -> Signature:
    def param(a: Any) -> Param:
        kind = str(a.type)
        tensor = True if kind == "Tensor" else False if "Tensor" not in kind and kind != "number" else None
        return Param(a.name, a.kwarg_only, a.default_value if a.has_default_value() else _NEEDED, tensor)

    return tuple(param(a) for a in schema.arguments)


def _fit(signature: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> Bindings | None:
    positional = [p for p in signature if not p.keyword]
    if any(p.tensor is not None and not _suits(p.tensor, a) for p, a in zip(positional, args, strict=False)):
        return None
    places: dict[int, str] = {}
    named: list[tuple[str, str]] = []
    for name, value in kwargs.items():
        p = next((p for p in signature if p.is_called(name)), None)
        if p is None:
            if name not in _BEYOND:
                return None
            named.append((name, name))
        elif p.tensor is not None and not _suits(p.tensor, value):
            return None
        elif p.keyword:
            named.append((p.name, name))
        else:
            places[positional.index(p)] = name
    if any(i < len(args) for i in places):
        return None
    given = {theirs for theirs, _ in named}
    last = max([*places, *(i for i, p in enumerate(positional) if p.unread and i >= len(args))], default=-1)
    left = [p for i, p in enumerate(positional[len(args) :], len(args)) if i not in places]
    if any(p.default is _NEEDED for p in (*left, *[p for p in signature if p.keyword and p.name not in given])):
        return None
    more = [(places.get(i), positional[i].default) for i in range(len(args), last + 1)]
    return Bindings(tuple(more), tuple(named))


def _suits(tensor: bool, value: Any) -> bool:
    """A tensor where one must be, or a number that PyTorch makes one of; no tensor elsewhere, but None for optional."""
    is_tensor = isinstance(value, Tensor)
    return (is_tensor or isinstance(value, (int, float, complex))) if tensor else not is_tensor
