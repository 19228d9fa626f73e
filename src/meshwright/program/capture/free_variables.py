"""Tensors that a step finds outside of its model's state: closed over, global, attributes of modules.

A program shares their memory.  Where they are found is looked at before each step; another tensor there means another
program.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ... import compat
from ...compat import FakeTensor
from ...documents.fingerprints import names_read
from ...errors import CaptureError
from ...ranks import runtime
from .fakes import replaced

Tensor = torch.Tensor
LIMIT = 100000  # objects to look at
_LEAVES = (bool, int, float, complex, str, bytes, types.ModuleType, type(None))
_TABLES = (dict, list, tuple, deque)


@dataclass(frozen=True)
class Place:
    """Where a step finds a tensor, or what leads to one: the cell, dict or list, the key in it, and what was there."""

    table: Any
    key: Any
    value: Any
    state: tuple[Any, ...]

    def same(self) -> bool:
        """Whether the same is there: of a tensor with the same memory, of a module in the same mode."""
        try:
            found = _looked_up(self.table, self.key)
        except (LookupError, ValueError, AttributeError):
            return False
        return found is self.value and (not self.state or _state(found) == self.state)


def _looked_up(table: Any, key: Any) -> Any:
    if isinstance(table, types.CellType):
        return table.cell_contents
    return table[key] if isinstance(table, _TABLES) else getattr(table, key)


def _memory(t: Tensor) -> tuple[Any, ...]:
    with compat.DisableTorchFunctionSubclass():
        return Tensor.data_ptr(t), tuple(t.shape), Tensor.stride(t)


def _state(held: Any) -> tuple[Any, ...]:
    """What of a tensor, or of a module that is none of the model's, a program is made for."""
    if isinstance(held, Tensor):
        return (*_memory(held), held.requires_grad)
    if isinstance(held, nn.Module):
        own = held.__dict__
        return held.training, *own["_forward_pre_hooks"], *own["_forward_hooks"]
    return ()


def places(roots: Iterable[Any], wanted: Iterable[Tensor], model: nn.Module) -> tuple[Place, ...]:
    """Where a step has these tensors, and modules besides the model's, with what leads there."""
    keys, modules = {_memory(t) for t in wanted if t.numel()}, set(model.modules())
    found: list[Place] = []
    ways: dict[int, list[tuple[Any, Any, Any]]] = {}  # into each object, by its id: the object that refers to it, how
    seen, stack, reached = set[int](), [list(roots)], list[Any]()
    while stack and len(seen) < LIMIT:
        held = stack.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        for table, key, value in _inside(held):
            if not isinstance(value, Tensor):
                if not isinstance(value, _LEAVES):
                    ways.setdefault(id(value), []).append((held, table, key))
                    stack.append(value)
                    if isinstance(value, nn.Module) and value not in modules:
                        reached.append(value)
            elif type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and _memory(value) in keys:
                found.append(Place(table, key, value, _state(value)))
                reached.append(held)
    followed = set[int]()
    while reached:
        held = reached.pop()
        if id(held) in followed:
            continue
        followed.add(id(held))
        for parent, table, key in ways.get(id(held), ()):
            if table is not None:
                foreign = isinstance(held, nn.Module) and held not in modules  # of the model's the guard knows the mode
                found.append(Place(table, key, held, _state(held) if foreign else ()))
            reached.append(parent)
    return tuple(found)


def _inside(held: Any) -> Iterator[tuple[Any, Any, Any]]:
    """What an object refers to, and where."""
    if isinstance(held, types.FunctionType):
        for cell in held.__closure__ or ():
            with contextlib.suppress(ValueError):  # not yet assigned
                yield cell, None, cell.cell_contents
        for name in sorted(names_read(held.__code__)):
            if name in held.__globals__:
                yield held.__globals__, name, held.__globals__[name]
        yield from ((None, 0, v) for v in (held.__defaults__, held.__kwdefaults__) if v)
    elif isinstance(held, types.MethodType):
        yield from ((None, 0, x) for x in (held.__self__, held.__func__))
    elif isinstance(held, functools.partial):
        yield from ((None, 0, x) for x in (held.func, held.args, held.keywords))
    elif isinstance(held, dict):
        yield from ((held, k, v) for k, v in list(held.items()))
    elif isinstance(held, (list, tuple, deque)):
        yield from ((held, i, v) for i, v in enumerate(held))
    elif isinstance(held, nn.Module):
        yield None, 0, held.__dict__
        yield None, 0, type(held).forward
    elif _is_users(held):
        yield from ((held, name, getattr(held, name)) for name in _slots(type(held)) if hasattr(held, name))
        if hasattr(held, "__dict__"):
            yield None, 0, held.__dict__
        yield None, 0, type(held)
    elif isinstance(held, type) and _is_users_class(held):
        for base in held.__mro__:
            own = vars(base).items() if _is_users_class(base) else ()
            yield from ((base, name, v) for name, v in own if not name.startswith("__"))


def _is_users(held: Any) -> bool:
    """Whether an object is of a class of the user's."""
    return not isinstance(held, (type, types.ModuleType)) and _is_users_class(type(held))


def _is_users_class(of: type) -> bool:
    return not of.__module__.startswith(("torch", "meshwright")) and of.__module__ != "builtins"


def _slots(of: type) -> list[str]:
    """Attributes of objects that have no dict."""
    listed = [vars(base).get("__slots__", ()) for base in of.__mro__]
    return [n for names in listed for n in ([names] if isinstance(names, str) else names) if n[:2] != "__"]


def numbers(roots: Iterable[Any]) -> tuple[tuple[str, str], ...]:
    """The numbers and words that the functions and modules of a step may read, by name, in one order."""
    found, seen, stack = [], set[int](), list(roots)
    while stack and len(seen) < LIMIT:
        held = stack.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, types.FunctionType) and not runtime.is_users(held.__code__.co_filename):
            continue
        inside = [(key, value) for _, key, value in _inside(held)]
        if isinstance(held, types.FunctionType):  # config.limit, Config.limit
            named = names_read(held.__code__)
            for value in [v for _, v in inside if isinstance(v, (types.ModuleType, type))]:
                inside += [(n, vars(value)[n]) for n in sorted(named & vars(value).keys())]
        for key, value in inside:
            if isinstance(value, (bool, int, float, complex, str, bytes)):
                found.append((str(key), repr(value)))
            elif isinstance(value, nn.Module) or type(value).__module__.partition(".")[0] not in _NOT_READ:
                stack.append(value)
    return tuple(found)


_PLAIN = (bool, int, float, complex, str)


def constants(fn: Any, model: nn.Module) -> dict[str, Any]:
    """Numbers and words that a step is likely to read, by what the user calls them: attributes of modules, what the
    function refers to, attributes and entries of that.  It takes milliseconds; :func:`numbers` finds all."""
    found = {
        f"{path}.{key}" if path else key: value
        for path, module in model.named_modules()
        for key, value in module.__dict__.items()
        if isinstance(value, _PLAIN) and key != "training"
    }
    while isinstance(fn, functools.partial):
        fn = fn.func
    named = {"self": fn.__self__} if isinstance(fn, types.MethodType) else {}
    fn = getattr(fn, "__func__", fn)
    if isinstance(fn, types.FunctionType):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not yet assigned
                named[name] = cell.cell_contents
        named |= {n: fn.__globals__[n] for n in names_read(fn.__code__) & fn.__globals__.keys()}
    for name, value in named.items():
        entries = value if isinstance(value, dict) else vars(value) if _is_users(value) and _has_dict(value) else {}
        for key, inside in ((name, value), *((f"{name}.{k}", v) for k, v in list(entries.items()))):
            if isinstance(inside, _PLAIN):
                found[key] = inside
    return found


def _has_dict(held: Any) -> bool:
    return not isinstance(held, nn.Module) and hasattr(held, "__dict__")


# Of whose objects nothing is read: loggers, locks, tensors; but of functions and containers what is in them.
_NOT_READ = {*sys.stdlib_module_names, "torch"} - {"builtins", "types", "functools", "collections"}


# ---------------------------------------------------------------------------------------------- attributes


class Gone:
    """In place of a tensor that the forward of a captured step set as an attribute: it has no value behind the step."""

    def __init__(self, name: str, line: str) -> None:
        self.__dict__["text"] = (
            f"{line}: {name} was set in the forward of a captured step and has no value outside of it: return it "
            "beside the loss, or make it a buffer (register_buffer)"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # how copy and pickle ask
            raise AttributeError(name)
        raise CaptureError(self.text)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise CaptureError(next((a.text for a in args if isinstance(a, Gone)), "set in the forward of a captured step"))

    def _refuse(self, *_: Any) -> Any:
        raise CaptureError(self.text)

    __float__ = __int__ = __bool__ = __len__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = _refuse
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = __neg__ = __iter__ = _refuse


class Assigned(dict[tuple[nn.Module, str], str]):
    """Attributes that got tensors, and the user's lines; of a class that torch.export does not take for a container of
    the module's, which it would set back."""


@contextlib.contextmanager
def noting_attributes(noted: Assigned) -> Iterator[None]:
    """Inside, tensors that become attributes of modules are noted, with the user's line."""
    original: Callable[..., None] = nn.Module.__setattr__

    def assign(self: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            noted[(self, name)] = runtime.user_line()
        original(self, name, value)

    with replaced(nn.Module, __setattr__=assign):
        yield


@contextlib.contextmanager
def buffers_written(model: nn.Module, noted: Assigned) -> Iterator[None]:
    """Behind it, what became a buffer is written to the buffer that was there."""
    before = [(m, dict(m._buffers)) for m in model.modules()]
    yield
    for module, buffers in before:
        for key, old in buffers.items():
            new = module._buffers.get(key)
            if old is new:
                continue
            if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
                raise CaptureError(
                    f"{noted.get((module, key), key)}: the step replaces the buffer {key} by one of another shape or "
                    "dtype, which a captured step cannot"
                )
            with torch.no_grad():
                old.copy_(new)
            module._buffers[key] = old


def attribute(step: nn.Module, name: str) -> Any:
    """The tensor of the user's that is an attribute of a module; None where there is none of that name."""
    owner, _, key = name.rpartition(".")
    with contextlib.suppress(AttributeError):
        found = vars(step.get_submodule(owner)).get(key)
        return found if isinstance(found, Tensor) and not isinstance(found, FakeTensor) else None
    return None


def forget_attributes(step: nn.Module, assigned: Assigned, read: set[str]) -> None:
    """Leave a word in place of tensors that the forward set as attributes.

    Raises:
        CaptureError: of an attribute whose value of the step before the step reads.
    """
    names = {m: n for n, m in step.named_modules()}
    for (module, key), line in assigned.items():
        name = f"{names.get(module, type(module).__name__)}.{key}"
        if name in read:
            raise CaptureError(
                f"{line}: the step sets {name.removeprefix('model.')}, which it reads in the next step, and a captured "
                "step keeps state in buffers: register_buffer it"
            )
        if key in vars(module):
            vars(module)[key] = Gone(name.removeprefix("model."), line)


__all__ = [
    "Assigned", "Gone", "Place", "attribute", "buffers_written", "forget_attributes", "noting_attributes", "numbers",
    "places",
]  # fmt: skip
