"""What a function or an object does, as a digest: its code and whatever it reads, so that results can be kept by it.

The idea is that of ``datasets.fingerprint`` (Hugging Face), without a pickler of its own.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import sys
import sysconfig
import types
from typing import Any

import torch

from ..errors import DataError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, type(Ellipsis), range)


def fingerprint(value: Any) -> str:
    """A digest that is equal for what computes the same, in all processes of one Python.

    Raises:
        DataError: part of it cannot be read.
    """
    digest = hashlib.sha256()
    _Reader(digest.update).read(value)
    return digest.hexdigest()


class _Reader:
    """Walks through an object: each is read once, and afterwards named by its number."""

    def __init__(self, take: Any) -> None:
        self.take, self.numbers, self.kept = take, dict[int, int](), list[Any]()

    def read(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self._note(type(value).__name__, repr(value))
            return
        if id(value) in self.numbers:
            self._note("again", self.numbers[id(value)])
            return
        self.numbers[id(value)] = len(self.numbers)
        self.kept.append(value)
        self._note("begin", type(value).__qualname__)
        self._parts(value)
        self._note("end", "")

    def _note(self, *words: object) -> None:
        self.take("\0".join(map(str, words)).encode() + b"\1")

    def _all(self, *values: Any) -> None:
        for value in values:
            self.read(value)

    def _parts(self, value: Any) -> None:
        if isinstance(value, dict):
            self._all(*value, *value.values())
        elif isinstance(value, list | tuple):
            self._all(*value)
        elif isinstance(value, set | frozenset):
            self._all(*sorted(map(fingerprint, value)))
        elif isinstance(value, torch.Tensor):
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
            self._note(value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes().hex())
        elif isinstance(value, types.ModuleType):
            self._note(value.__name__, getattr(value, "__version__", ""))
        elif isinstance(value, types.FunctionType | type) and (library := _library(value)):
            self._note(library, value.__module__, value.__qualname__)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.CodeType):
            self._note(value.co_code.hex(), *value.co_names, *value.co_varnames)
            self._all(*value.co_consts)
        elif isinstance(value, types.MethodType):
            self._all(value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            self._all(value.func, value.args, value.keywords)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.BuiltinFunctionType) and (value.__self__ is None or _is_module(value.__self__)):
            self._note(value.__module__, value.__qualname__)
        else:
            self._object(value)

    def _function(self, fn: types.FunctionType) -> None:
        """Its code, what it closes over, and the globals of those names that its code has."""
        cells = [cell.cell_contents for cell in fn.__closure__ or ()]
        self._all(fn.__code__, fn.__defaults__, fn.__kwdefaults__, cells)
        for name in sorted(names_read(fn.__code__)):
            if name in fn.__globals__:
                self.read(fn.__globals__[name])

    def _class(self, one: type) -> None:
        self._note(one.__module__, one.__qualname__)
        for base in one.__mro__:
            if base is not one:
                self.read(base)
                continue
            for name, part in sorted(vars(base).items()):
                part = getattr(part, "__func__", getattr(part, "fget", part))
                if isinstance(part, (types.FunctionType, *_PLAIN, dict, list, tuple)) and name != "__doc__":
                    self._all(name, part)

    def _object(self, value: Any) -> None:
        self.read(type(value))
        if type(value).__module__ == "_thread":  # a lock
            return
        if (inner := getattr(value, "__wrapped__", None)) is not None:  # functools.cache
            self.read(inner)
            return
        own = any("__reduce__" in vars(c) or "__reduce_ex__" in vars(c) for c in type(value).__mro__[:-1])
        if not own and hasattr(value, "__dict__") and type(value).__module__ != "builtins":
            self.read(value.__dict__)
            return
        try:
            self._note(hashlib.sha256(pickle.dumps(value, protocol=4)).hexdigest())
        except Exception as error:
            raise DataError(
                f"{type(value).__qualname__} cannot be read ({error}): its results could be mistaken for those of "
                "another one. Give a function of plain values, or an object that can be pickled"
            ) from error


def _is_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(paths[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _library(value: Any) -> str:
    """Name and version of the installed library that a function or class is of; empty for the user's own code."""
    module = sys.modules.get(value.__module__)
    file = getattr(module, "__file__", None) or ""
    if module is None or (file and not file.startswith(_library_folders())) or value.__module__ == "__main__":
        return ""
    top = value.__module__.partition(".")[0]
    return f"{top} {getattr(sys.modules.get(top), '__version__', sys.version)}"


def names_read(code: types.CodeType) -> set[str]:
    """The globals and attributes that a function may read, those of functions inside of it included."""
    inner = [names_read(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


__all__ = ["fingerprint", "names_read"]
