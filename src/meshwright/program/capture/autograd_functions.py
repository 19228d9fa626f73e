"""``torch.autograd.Function`` in a step that is captured: each call becomes an op of its own in the captured graph.

The op has no kernel but the call itself (PyTorch's CompositeImplicitAutograd), so where the graph is run on what lies
on a rank, autograd meets the user's backward, and what both do is recorded.  Like any op without a rule it runs on
gathered inputs on every rank, as eager code does (``tensor/autograd_functions.py``).  Functions of PyTorch that have a
rule of their own beside those of the ops that they are made of stay whole too.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...compat import apply_function, pytree
from ...errors import CaptureError
from ...local_tensor import storage_of
from ...operators import FUNCTIONS, GIVEN, KEPT
from ...ranks import runtime
from ...torch_changes import note
from .fakes import replaced

Tensor = torch.Tensor
_LIBRARY = torch.library.Library(FUNCTIONS.removesuffix("::"), "FRAGMENT")
_OPS: dict[str, Any] = {}


class _Calls(threading.local):
    """Those of the step that this thread captures, or captured last."""

    def __init__(self) -> None:
        self.made: list[_Call] = []


_CALLS = _Calls()
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class _Call:
    """One call: what it was given beside tensors, and how what it returned is made of tensors."""

    def __init__(self, cls: Any, leaves: list[Any], tree: Any, where: str) -> None:
        self.cls, self.tree, self.where = cls, tree, where
        self.fixed = [None if isinstance(x, Tensor) else x for x in leaves]
        self.at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.made: Callable[[list[Tensor]], Any] = lambda tensors: tensors

    def __repr__(self) -> str:
        """What ranks must have alike: not where objects are."""
        said = [repr(x) if isinstance(x, _PLAIN) else type(x).__name__ for x in self.fixed]
        return f"{self.cls.__qualname__}({', '.join(said)})"

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """The call, on other tensors."""
        leaves = list(self.fixed)
        for i, t in zip(self.at, tensors, strict=True):
            leaves[i] = t
        before = [t._version for t in tensors]
        made, tree = pytree.tree_flatten(apply_function(self.cls, *pytree.tree_unflatten(leaves, self.tree)))
        if before != [t._version for t in tensors]:
            raise CaptureError(
                f"{self.where}: {self.cls.__name__} writes to what it is given, which a captured step does not see: "
                "return a tensor of its own, or train eagerly"
            )
        at = [i for i, x in enumerate(made) if isinstance(x, Tensor)]
        rest = [None if isinstance(x, Tensor) else x for x in made]

        def whole(tensors: list[Tensor]) -> Any:
            for i, t in zip(at, tensors, strict=True):
                rest[i] = t
            return pytree.tree_unflatten(rest, tree)

        self.made = whole
        given = {storage_of(t) for t in tensors}
        outputs = [made[i] for i in at]
        return [t.clone() if storage_of(t) in given else t for t in outputs]  # an op shares no memory


def _run(tensors: list[Tensor], call: int, given: str) -> list[Tensor]:
    return _CALLS.made[call].run(tensors)


def _op(cls: Any) -> Any:
    """The op of all classes of a name."""
    name = re.sub(r"\W", "_", cls.__name__, flags=re.ASCII)
    if name not in _OPS:
        _LIBRARY.define(f"{name}(Tensor[] tensors, int call, str given) -> Tensor[]")
        _LIBRARY.impl(name, _run, "CompositeImplicitAutograd")
        _OPS[name] = getattr(getattr(torch.ops, _LIBRARY.ns), name)
    return _OPS[name]


note("torch.autograd.Function.apply", why="autograd functions of users are one op of the program each")


@contextlib.contextmanager
def functions_as_ops() -> Iterator[None]:
    """Inside, the user's calls of ``Function.apply`` are ops; torch's own go on."""
    held = inspect.getattr_static(torch.autograd.Function, "apply")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten(args)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if not tensors or kwargs or not runtime.is_users(sys._getframe(1).f_code.co_filename):
            return held.__get__(None, cls)(*args, **kwargs)
        call = _Call(cls, leaves, tree, runtime.user_line())
        _CALLS.made.append(call)
        made = _op(cls)(tensors, len(_CALLS.made) - 1, repr(call))
        return call.made(made)

    _CALLS.made, GIVEN.made = [], []
    with replaced(torch.autograd.Function, apply=classmethod(apply)):
        yield


def has_calls() -> bool:
    """Whether ops of the step that this thread captured last run functions of the user's, which only it can call."""
    return bool(_CALLS.made or GIVEN.made)


class OpaqueFunctions(TorchFunctionMode):
    """Inside, functions of PyTorch that are to stay one call do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return KEPT.get(func, func)(*args, **(kwargs or {}))


__all__ = ["OpaqueFunctions", "functions_as_ops", "has_calls"]
