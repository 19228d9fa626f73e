"""A distributed tensor as what it is underneath: this rank's plain tensor, and autograd's own slot for its gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from . import compat

Tensor = torch.Tensor

_slot: Any = Tensor.grad
is_sparse: Callable[[Tensor], bool] = Tensor.is_sparse.__get__  # type: ignore[attr-defined]  # of a plain tensor
# Below ``DistTensor.grad``; to be called with dispatch disabled.
get_grad = cast("Callable[[Tensor], Tensor | None]", _slot.__get__)
set_grad = cast("Callable[[Tensor, Tensor | None], None]", _slot.__set__)


OPEN, _CLOSED = "_open", "_closed"  # in a tensor's dict: the threads that have it open, and its class for others
_OPEN: dict[type[Any], type[Any]] = {}  # class to that of its tensors while they are open
_LOCK = threading.Lock()  # two threads may have one open


def open_as(kind: type[Any], opened: type[Any]) -> None:
    """Tensors of a class have another one while they are open."""
    _OPEN[kind] = _OPEN[opened] = opened


def mine(t: Tensor) -> bool:
    """Whether this thread sees a distributed tensor as the plain one that it is."""
    space = t.__dict__
    return OPEN in space and threading.get_ident() in space[OPEN]


def distributed(t: Tensor) -> bool:
    """Whether a tensor is distributed, as this thread sees it."""
    return getattr(t.__class__, "class_set", False) and not mine(t)


def open_tensors(tensors: Iterable[Tensor]) -> None:
    """From now on this thread sees them as plain local tensors; other threads see what they are."""
    here = (threading.get_ident(),)
    with _LOCK:
        for t in tensors:
            space = t.__dict__
            if space.get(OPEN):
                space[OPEN] += here
            else:
                space[OPEN], space[_CLOSED] = here, t.__class__
                t.__class__ = _OPEN[t.__class__]


def close_tensors(tensors: Iterable[Tensor]) -> None:
    """Undo :func:`open_tensors`."""
    here = (threading.get_ident(),)
    with _LOCK:
        for t in tensors:
            space = t.__dict__
            if space[OPEN] == here:
                t.__class__ = space[_CLOSED]
                del space[_CLOSED]
                space[OPEN] = ()  # and not gone: another thread may be about to look
            else:
                left = list(space[OPEN])
                left.remove(*here)
                space[OPEN] = tuple(left)


PLAIN = "_plain"  # in a tensor's dict: what :func:`plain_of` made of it


def plain_of(t: Tensor) -> Tensor:
    """:func:`bare`, which is made once and kept with the tensor, until that has :func:`moved`."""
    found: Tensor | None = t.__dict__.get(PLAIN)
    if found is None:
        found = bare(t)
        # Under inference mode nobody could write to it outside; of a sparse one it is not the memory that counts.
        if not torch.is_inference_mode_enabled() and not is_sparse(found):
            t.__dict__[PLAIN] = found
    return found


def plain_of_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """:func:`plain_of` each of a list that may be long, where these have been made of none yet."""
    with compat.DisableTorchFunctionSubclass():
        made = list(map(Tensor.detach, tensors))
    if torch.is_inference_mode_enabled() or not _TENSOR.issuperset(map(type, made)) or any(map(is_sparse, made)):
        return list(map(plain_of, tensors))
    for t, alias in zip(tensors, made, strict=True):
        t.__dict__[PLAIN] = alias
    return made


_TENSOR = {Tensor}


class Aliases:
    """What :func:`plain_of` keeps: another object once one of them is of no use, so that nobody asks each tensor."""

    now = object()


def moved(t: Tensor) -> None:
    """A tensor has other memory, or is of another shape there."""
    if t.__dict__.pop(PLAIN, None) is not None:
        Aliases.now = object()


class as_plain:
    """Distributed tensors seen as the plain local tensors that they are, for a while; gives one where one is given.

    By this thread alone, whose calls do not ask them either.
    """

    __slots__ = ("given", "guard", "opened")

    def __init__(self, *given: Tensor) -> None:
        self.given = given
        self.opened = [t for t in given if distributed(t)]

    def __enter__(self) -> Any:
        open_tensors(self.opened)
        self.guard = compat.DisableTorchFunctionSubclass()
        self.guard.__enter__()
        return self.given[0] if len(self.given) == 1 else self.given

    def __exit__(self, *error: Any) -> None:
        self.guard.__exit__(*error)
        close_tensors(self.opened)


@dataclass(eq=False)
class SharedMemory:
    """What tensors of one memory know in common, once one that counts its writes for itself was given it.

    ``shared``: how often that was; ``aliased``: one may have it now.
    """

    shared: int = 0
    aliased: bool = False


class Sharing:
    """Whether any memory of this process was ever shared: as long as none was, nobody needs to look.

    ``counted``: so that :func:`version_of` knows of all writes, as by reading ``.data``.
    """

    ever = False
    counted = False


# In the dict of a storage, which lives as long as the memory.
_MEMORY = "_memory"
_COUNTER = "_counter"  # an empty tensor that shares the version counter of all ``.data`` of this memory
_get_storage: Any = Tensor.untyped_storage
_get_version: Any = Tensor._version.__get__  # type: ignore[attr-defined]
_get_data: Any = Tensor.data.__get__  # type: ignore[attr-defined]
_set_data: Any = Tensor.data.__set__  # type: ignore[attr-defined]


def shared_memory(t: Tensor) -> SharedMemory | None:
    """What is known of the memory of a tensor; None where all that have it count its writes together."""
    return _place(t).get(_MEMORY) if Sharing.ever else None


def share_memory(t: Tensor) -> None:
    """Another tensor that counts its writes for itself is given the memory of this one."""
    Sharing.ever = True
    memory = _place(t).setdefault(_MEMORY, SharedMemory())
    memory.shared, memory.aliased = memory.shared + 1, True


def data_of(t: Tensor) -> Tensor:
    """``t.data``, whose writes :func:`version_of` counts for all that have this memory.

    To be called with dispatch disabled.  Reading ``.data`` changes nothing that a rank decides by: only writes count,
    so that one rank alone may look at it.
    """
    data: Tensor = _get_data(t)
    if t.is_inference() or data.__class__ is not Tensor or data.layout is not torch.strided:
        share_memory(t)
        return data
    space = _place(t)
    counter = space.get(_COUNTER)
    if counter is None:
        counter = space[_COUNTER] = data.detach()
        _set_data(counter, data.new_empty(0))  # or the storage would hold itself
        Sharing.counted = True
        return data
    made: Tensor = counter.detach()
    _set_data(made, data)
    return made


def version_of(t: Tensor) -> int:
    """How often the memory of a tensor was written to, as far as that is counted; with dispatch disabled."""
    version: int = _get_version(t)
    if Sharing.counted and (counter := _place(t).get(_COUNTER)) is not None:
        version += _get_version(counter)
    return version


def _place(t: Tensor) -> dict[str, Any]:
    try:
        made: Any = compat.disabled_torch_function_impl(_get_storage, (), (t,), {})
    except NotImplementedError:  # of a sparse tensor
        made = t
    space: dict[str, Any] = made.__dict__
    return space


def storage_of(t: Tensor) -> int:
    """What tells the storage of a tensor from others, as long as it lives: its memory may be empty, or none yet."""
    key: int = t.untyped_storage()._cdata
    return key


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one storage."""
    return storage_of(a) == storage_of(b)


def bare(t: Tensor) -> Tensor:
    """The local tensor under a distributed one: plain, without history, sharing memory and version."""
    with compat.DisableTorchFunctionSubclass():
        local = Tensor.detach(t)
        if local.__class__ is not Tensor:
            local.__class__ = Tensor  # nobody else has seen it
        return local


def is_dense(shape: Sequence[int], strides: Sequence[int], gaps: bool = False) -> bool:
    """Whether each element has a place of its own, with nothing (or, with ``gaps``, something) between them."""
    end = 1
    for step, n in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if step < end or (step > end and not gaps):
            return 0 in shape
        end = end + (n - 1) * step if gaps else end * n
    return True


def span_of(t: Tensor) -> int:
    """Elements of memory from the first to the last one of a tensor."""
    return 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0


__all__ = [
    "PLAIN",
    "Aliases",
    "SharedMemory",
    "Sharing",
    "as_plain",
    "bare",
    "close_tensors",
    "data_of",
    "distributed",
    "get_grad",
    "is_dense",
    "is_sparse",
    "mine",
    "moved",
    "open_as",
    "open_tensors",
    "plain_of",
    "plain_of_all",
    "same_storage",
    "set_grad",
    "share_memory",
    "shared_memory",
    "span_of",
    "storage_of",
    "version_of",
]
