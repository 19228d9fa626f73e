"""What a step computes, op by op: seen by a mode of torch's functions, the same on one device and on ranks.

A value of one device and that of the ranks have the same key: the op, the user's line, how many calls of it there were
before at that line, and the place among what it gives.  A gradient has the key of its value.  Nothing is sent and
nothing is converted for it: what is kept of a distributed tensor is this rank's part and the spec.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..compat import add_hook, pytree
from ..dispatch import METADATA_METHODS, disabled, gradient_types
from ..layout import Spec
from ..local_tensor import bare
from ..ranks import runtime
from ..shard.parameters.stored import UNSHARDED, stored
from ..tensor import DistTensor, GradientHook, local_data, methods
from ..tensor.dist_tensor import GLOBAL_METHODS
from . import doubled

Tensor = torch.Tensor
Key = tuple[
    Any, ...
]  # "forward" or "backward", op, line, number, "out", "in" or "random", and place; "grad" and a name
_KEY = "_verified_as"  # in the dict of a tensor: who watches it, and its key
RAISED = "_raised_in"  # in the dict of an error: the op and the line
_METHODS = methods.__file__  # of distributed tensors, in whose place are torch's
_DOUBLED = doubled.__file__
_HERE = os.path.dirname(os.path.abspath(__file__))
# Of the object, or properties of it, which distributed tensors answer without a call.
_ASKED = {
    *METADATA_METHODS, *GLOBAL_METHODS, "__get__", "__set__", "__delete__", "backward", "register_hook", "data_ptr",
    "type", "detach",
}  # fmt: skip
# What they give is memory that nobody has written to.
_UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided", "empty_permuted", "new_empty_strided", "resize_"}


@dataclass(frozen=True)
class Observed:
    """A value that a step computed.

    Attributes:
        key: what it is compared by.
        op, line: what made it, and where in the user's code.
        value: of a distributed tensor this rank's part.
        spec: how it lies on the mesh; None for what is not distributed.
        name: of a parameter, buffer or batch tensor.
        folded: captured programs need no node for it: it is what the op was given, one of several results,
            computed of constants alone, or what nothing depends on.
    """

    key: Key
    op: str
    line: str
    value: Any
    spec: Spec | None = None
    name: str = ""
    folded: bool = False


Tell = Callable[[Observed], None]


class Watch(TorchFunctionMode):
    """Inside, ``tell`` is told of every value that the user's code computes, of gradients when they come, and of the
    random generator.

    Args:
        names: id of a parameter, buffer or batch tensor to its name.

    Attributes:
        calls: of each call its op, its line, and the keys of the tensors that it was given.
    """

    def __init__(self, tell: Tell, names: dict[int, str]) -> None:
        super().__init__()
        self.tell, self.names = tell, names
        self.calls: list[tuple[str, str, tuple[Key, ...]]] = []
        self._counted: Counter[tuple[str, str]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", func))
        line = None if name in _ASKED else callers_line()
        if line is None:
            return func(*args, **kwargs)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        call = (name, line, self._counted[name, line])
        seen = Observed((), name, line, None)
        used = tuple(self._key(t, replace(seen, key=("forward", *call, "in", i))) for i, t in enumerate(given))
        before = {id(t): t.grad_fn for t in given if t.requires_grad}
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            error.__dict__.setdefault(RAISED, (name, line))
            raise
        made = [t for t in pytree.tree_leaves(args[0] if out is None and args else out) if isinstance(t, Tensor)]
        if made:
            self._counted[name, line] += 1
            self.calls.append((name, line, used))
            for i, t in enumerate(made if name not in _UNWRITTEN else ()):
                own = replace(seen, key=("forward", *call, "out", i))
                if t.requires_grad and id(t) in before and t.grad_fn is before[id(t)]:
                    # It gave what it was given (contiguous, to): one value, whose gradient is a sum over all of its
                    # uses, while ranks may have made a new one, whose gradient is that of its own uses.
                    self.tell(held(t, own))
                else:
                    self._see(t, own)
            self.tell(replace(seen, key=("forward", *call, "random", 0), value=random_state()))
        return out

    def _key(self, t: Tensor, seen: Observed) -> Key:
        """The key of what a call is given; told of, where no call has made it."""
        watched_by, known = t.__dict__.get(_KEY, (None, ()))
        if watched_by is self.calls:
            return known
        name = self.names.get(id(t), "")
        if not name and not isinstance(t, DistTensor) and t.grad_fn is None:
            return ()  # a constant of the code
        if name:
            seen = replace(seen, key=("forward", "leaf", name), name=name)
        self._see(t, seen)
        return seen.key

    def _see(self, t: Tensor, seen: Observed) -> None:
        t.__dict__[_KEY] = self.calls, seen.key
        self.tell(held(t, seen))
        if t.requires_grad and not torch.is_inference_mode_enabled():
            watch_gradient(t, seen, self.tell)


def watch_gradient(t: Tensor, seen: Observed, tell: Tell) -> None:
    """Have ``tell`` told of the gradient of a tensor when it comes."""
    types, seen = gradient_types(t), replace(seen, key=("backward", *seen.key[1:]))

    def told(grad: Tensor | None) -> None:
        if grad is not None:
            spec = types()
            spec = None if spec is None or "product" in spec.layout.partial.values() else spec.grad()
            with disabled():
                tell(replace(seen, value=bare(grad).clone(), spec=spec))

    with disabled():
        # Gradients of parameters that are stored split are added up at the leaf only for hooks of the user's.
        add_hook(t, told if stored(t) == UNSHARDED else GradientHook(t, told))


def random_state() -> int:
    """Where the default random generator stands."""
    return hash(torch.get_rng_state().numpy().tobytes())


def held(t: Tensor, seen: Observed) -> Observed:
    """``seen`` with what this rank holds of a tensor, as it is now."""
    with torch.no_grad(), disabled():
        local = local_data(t)
        return replace(seen, value=local.clone(), spec=t.__dict__.get("_spec"))


def callers_line() -> str | None:
    """``file:line`` of the user's code that calls a function of torch; None where code of ours calls it."""
    for frame in _frames():
        name = frame.f_code.co_filename
        if runtime.is_users(name):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        if name == _DOUBLED:
            continue
        if name.startswith(_HERE):
            return "the model's own call"
        if name.startswith(runtime.OWN) and name != _METHODS:
            return None
    return None


def _frames() -> Iterator[Any]:
    frame: Any = sys._getframe(3)
    while frame is not None:
        yield frame
        frame = frame.f_back
