"""Python values as JSON, the tensors among them named and kept apart; nothing that is read back can run code."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy
import torch

from ..errors import CheckpointError
from ..layout import dtype_from, dtype_name

Tensor = torch.Tensor
Put = Callable[[str, Tensor], str]  # takes a tensor under a name; returns how it is called in the checkpoint
Get = Callable[[str], Tensor]

# What JSON has no word for is a dict with one key that begins so.
_MARK = "$"
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, list, dict, set, tuple, str, bool)}
_PAIRS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}


def encoded(value: Any, where: str, put: Put) -> Any:
    """A value as JSON.

    Args:
        value: numbers, words, bytes, tensors and dtypes in containers of Python's.
        where: its name, for errors and for the tensors in it.
        put: takes the tensors.

    Raises:
        CheckpointError: a value of another kind.
    """
    if isinstance(value, Tensor):
        return {_MARK + "tensor": put(where, value)}
    if isinstance(value, numpy.number):  # whose arithmetic is not that of Python's numbers
        return {_MARK + "numpy": [value.dtype.str, value.tobytes().hex()]}
    if isinstance(value, numpy.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_MARK + "float": str(float(value))}
    if isinstance(value, complex):
        return {_MARK + "complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {_MARK + "bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {_MARK + "dtype": dtype_name(value)}
    if type(value) is list:
        return [encoded(v, f"{where}/{i}", put) for i, v in enumerate(value)]
    for word, kind in _SEQUENCES.items():
        if type(value) is kind:
            listed = [encoded(v, f"{where}/{i}", put) for i, v in enumerate(value)]
            if kind in (set, frozenset):  # each process has another order
                listed.sort(key=json.dumps)
            bound = value.maxlen if kind is deque else None
            return {_MARK + word: listed} if bound is None else {_MARK + "bounded": [listed, bound]}
    if type(value) is defaultdict and value.default_factory is not None:
        made = getattr(value.default_factory, "__name__", "")
        if _FACTORIES.get(made) is not value.default_factory:
            raise CheckpointError(f"{where} is a defaultdict of {value.default_factory!r}, which cannot be saved")
        return {_MARK + "default": [made, encoded(dict(value), where, put)]}
    if type(value) in (dict, defaultdict) and all(type(k) is str and not k.startswith(_MARK) for k in value):
        return {k: encoded(v, f"{where}/{k}", put) for k, v in value.items()}
    for word, kind in _PAIRS.items():
        if type(value) is kind:
            pairs = [(encoded(k, where, put), encoded(v, f"{where}/{k}", put)) for k, v in value.items()]
            return {_MARK + word: [list(p) for p in pairs]}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: numbers, "
        "words, tensors, and lists, tuples, sets and dicts of them can be saved"
    )


def decoded(data: Any, get: Get) -> Any:
    """The value that :func:`encoded` wrote; ``get`` brings the tensors."""
    if isinstance(data, list):
        return [decoded(v, get) for v in data]
    if not isinstance(data, dict):
        return data
    word = next(iter(data), "")
    if len(data) != 1 or not word.startswith(_MARK):
        return {k: decoded(v, get) for k, v in data.items()}
    (given,) = data.values()
    word = word.removeprefix(_MARK)
    if word == "tensor":
        return get(given)
    if word in _SEQUENCES:
        return _SEQUENCES[word](decoded(v, get) for v in given)
    if word in _PAIRS:
        return _PAIRS[word]({decoded(k, get): decoded(v, get) for k, v in given})
    if word == "bounded":
        return deque((decoded(v, get) for v in given[0]), given[1])
    if word == "default":
        return defaultdict(_FACTORIES[given[0]], decoded(given[1], get))
    made = _PLAIN.get(word)
    if made is None:
        raise CheckpointError(f"the checkpoint has a value of the unknown kind {word!r}: a newer version wrote it")
    return made(given)


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda pair: complex(*pair),
    "bytes": bytes.fromhex,
    "dtype": dtype_from,
    "numpy": lambda pair: _number(*pair),
}


def _number(kind: str, data: str) -> Any:
    """A number of NumPy's.  Raises ValueError for anything else that its words for dtypes can say."""
    (made,) = numpy.frombuffer(bytes.fromhex(data), kind)
    if not isinstance(made, numpy.number):
        raise ValueError(f"{kind!r} is no kind of number")
    return made


__all__ = ["Get", "Put", "decoded", "encoded"]
