"""What a case asks and the call of ours that answers it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .cases import Case, Const, Given


@dataclass(frozen=True)
class Slot:
    """Paddle's tensor ``index`` (variadic slots spread out), shown with dims permuted, dropped or made of one.

    That is a view, which moves nothing.  ``dims``: which of its dims ours has, in order (-1: a new one).
    """

    index: int
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def parts(self) -> list[Slot]:
        """The tensors that the indices of the last dim select, which must be whole for that."""
        return [replace(self, shape=self.shape[:-1], dims=self.dims[:-1]) for _ in range(self.shape[-1])]

    def unflatten(self, shape: Sequence[int]) -> Slot:
        """A tensor of one dim with several: its splits become splits of the first."""
        return replace(self, shape=tuple(shape), dims=(*self.dims, *[-1] * (len(shape) - 1)))

    def permute(self, order: Sequence[int]) -> Slot:
        """The same tensor with its dims in another order."""
        order = [d % self.ndim for d in order]
        return replace(self, shape=tuple(self.shape[d] for d in order), dims=tuple(self.dims[d] for d in order))

    def without(self, dim: int) -> Slot:
        """The same tensor less a dim of size 1."""
        dim %= self.ndim
        return self.permute([d for d in range(self.ndim) if d != dim])

    def as_(self, dtype: torch.dtype) -> Slot:
        """The same tensor with elements of another type."""
        return replace(self, dtype=dtype)


def slots_in(value: Any) -> Iterator[Any]:
    """The tensors among (nested) arguments, in order: slots, and in a composition what was made before."""
    if isinstance(value, (Slot, Made, Fresh)):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from slots_in(v)
    elif isinstance(value, Mapping):
        yield from slots_in(list(value.values()))


def fill(value: Any, given: Iterator[Any]) -> Any:
    """The same (nested) arguments with the next of ``given`` in place of each tensor."""
    if isinstance(value, (Slot, Made, Fresh)):
        return next(given)
    if isinstance(value, (list, tuple)):
        return type(value)(fill(v, given) for v in value)
    if isinstance(value, Mapping):
        return {k: fill(v, given) for k, v in value.items()}
    return value


@dataclass(frozen=True)
class Result:
    """Our result is Paddle's output ``index``, whose dim i is dim ``dims[i]`` of ours (None: the same dims).

    ``ndim`` is how many ours has, where its last ones are none of Paddle's.
    """

    index: int
    dims: tuple[int, ...] | None = None
    ndim: int = 0


@dataclass(frozen=True)
class Call:
    """A call of ours; ``results``: which outputs of Paddle's ours are, in order (None: the first ones)."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[Result, ...] | None = None


@dataclass(frozen=True)
class Made:
    """Output ``output`` of call number ``step``."""

    step: int
    output: int = 0


@dataclass(frozen=True)
class Fresh:
    """A tensor that the op makes itself, the same on every rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


class Steps:
    """An op of Paddle's as the calls that a PyTorch program would make, one after the other.

    Arguments are slots, what earlier calls made, and fresh tensors.  ``results``: which outputs of Paddle's are what.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.results: list[tuple[Made, Result]] = []

    def __call__(self, op: str, *args: Any, **kwargs: Any) -> Made:
        """Append a call; its first output."""
        self.calls.append(Call(op, args, kwargs))
        return Made(len(self.calls) - 1)

    def gives(self, index: int, made: Made, dims: tuple[int, ...] | None = None) -> Steps:
        """``made`` is Paddle's output ``index``, as in :class:`Result`."""
        self.results.append((made, Result(index, dims)))
        return self


def slots_of(call: Call | Steps) -> list[Slot]:
    """Paddle's tensors in a call, in order; those of a composition once each."""
    if isinstance(call, Call):
        return list(slots_in([call.args, call.kwargs]))
    found = slots_in([[c.args, c.kwargs] for c in call.calls])
    return list(dict.fromkeys(t for t in found if isinstance(t, Slot)))


class Question:
    """What a case asks: ``tensors`` (variadic slots as lists) and attributes."""

    def __init__(self, case: Case) -> None:
        self.attrs = case.attrs
        self.backward = case.direction == "backward"
        self.slots: list[Any] = []
        at = 0
        for entry in case.inputs:
            if isinstance(entry, list):
                self.slots.append([_slot(at + i, e) for i, e in enumerate(entry)])
                at += len(entry)
            else:
                self.slots.append(_slot(at, entry))
                at += 1
        tensors = (s for s in self.slots if isinstance(s, (Slot, list)))
        self.tensors: list[Any] = [s for s in tensors if isinstance(s, list) or s.index >= 0]

    @property
    def x(self) -> Slot:
        """The first tensor."""
        x = self.tensors[0]
        return x if isinstance(x, Slot) else x[0]

    def attr(self, *names: str, default: Any = None, at: int | None = None) -> Any:
        """An attribute by any of its names, or the constant that Paddle's newer form takes as input ``at``."""
        for name in names:
            if name in self.attrs:
                return self.attrs[name]
        if at is not None and at < len(self.slots) and isinstance(self.slots[at], Const):
            value = self.slots[at].value
            return int(value) if isinstance(value, float) and value.is_integer() else value
        return default

    def dims(self, *, at: int = 1) -> tuple[int, ...]:
        """The dims that a reduction reduces: none named are all."""
        axis = self.attr("axis", default=(), at=at)
        listed = [axis] if isinstance(axis, int) else list(axis or range(self.x.ndim))
        if self.attr("reduce_all", default=False):
            listed = list(range(self.x.ndim))
        return tuple(d % max(self.x.ndim, 1) for d in listed)

    @property
    def keepdim(self) -> bool:
        """Whether a reduction keeps its dims."""
        return bool(self.attr("keep_dim", "keepdim", "keepdims", default=False))


def _slot(index: int, entry: Any) -> Any:
    if isinstance(entry, Given):
        assert entry.shape is not None
        return Slot(index, entry.shape, tuple(range(len(entry.shape))))
    return entry
