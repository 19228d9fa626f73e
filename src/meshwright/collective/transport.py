"""What goes over the wire: dtypes that backends carry, flat buffers, options, work under way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compat import AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions
from ..errors import CollectiveError
from ..layout import REDUCE_OPS as OPS
from ..layout import unreducible
from .groups import Group

Sizes = Sequence[int]

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # then divided: gloo has no avg for all dtypes
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "any": dist.ReduceOp.MAX,
    "all": dist.ReduceOp.MIN,
}
# The dtypes that every backend reduces; another one travels in a wider one, given by carrier.
REDUCIBLE = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64}
REDUCIBLE |= {torch.uint8, torch.int8}
# The dtypes that every backend moves; another one travels as bytes.
MOVABLE = REDUCIBLE | {torch.bool}
# The ops that need no work of our own before or after.
BASIC = {"sum", "max", "min", "product"}


class Pending:
    """A collective under way; ``wait()`` returns its result (also when called again)."""

    __slots__ = ("_finish", "_result", "_work")

    def __init__(self, work: Any, result: Any, finish: Callable[[Any], Any] | None = None) -> None:
        self._work, self._result, self._finish = work, result, finish

    @property
    def staged(self) -> bool:
        """Whether it is several collectives, of which :meth:`advance` starts the others."""
        return False

    def advance(self) -> None:
        """Start what is to come after the first of several collectives; where there is one there is nothing to do."""

    def done(self) -> bool:
        """Whether nothing is waited for any more."""
        if self._work is not None:
            return bool(self._work.done())
        return not isinstance(self._result, Pending) or self._result.done()  # a result of another one that is under way

    def wait(self) -> Tensor:
        """Block until the result is there (on a GPU: until the stream waits for it) and return it."""
        work, finish = self._work, self._finish
        self._work = self._finish = None
        if work is not None:
            work.wait()
        if finish is not None:
            self._result = finish(self._result)
        result: Tensor = self._result
        return result


def make_options(kind: Any, *, sync: bool, op: str = "") -> Any:
    made = kind()
    made.asyncOp = not sync
    if op:
        made.reduceOp = REDUCE_OPS[op]
    return made


# Made once: building them costs as much as a small collective.  Index 1 is for a caller that waits at once.
REDUCE = [{op: make_options(AllreduceOptions, sync=s, op=op) for op in OPS} for s in (False, True)]
SCATTER = [{op: make_options(ReduceScatterOptions, sync=s, op=op) for op in OPS} for s in (False, True)]
GATHER = [make_options(AllgatherOptions, sync=s) for s in (False, True)]
EXCHANGE = [make_options(AllToAllOptions, sync=s) for s in (False, True)]


def carrier(dtype: torch.dtype, op: str) -> torch.dtype:
    """The dtype in which a reduction travels.  Raises CollectiveError where it has no meaning."""
    if op not in REDUCE_OPS:
        raise CollectiveError(f"unknown reduction {op!r}: one of {', '.join(OPS)} was expected")
    if why := unreducible(op, dtype):
        raise CollectiveError(why)
    if dtype in REDUCIBLE or dtype.is_complex:
        return dtype
    if dtype is torch.bool or dtype.is_floating_point:  # the latter: float8
        return torch.uint8 if dtype is torch.bool else torch.float32
    return torch.int32 if dtype.itemsize < 4 else torch.int64


def to_wire(t: Tensor, op: str) -> Tensor:
    """``t`` as backends can reduce it; ``t`` itself where nothing needs to change."""
    travels = carrier(t.dtype, op)
    if travels.is_complex:
        return torch.view_as_real(t.resolve_conj())
    return t.to(travels)


def from_wire(t: Tensor, dtype: torch.dtype, op: str, n: int) -> Tensor:
    """Back from the wire, after the reduction over ``n`` ranks."""
    if op == "avg":
        t.div_(n)
    if t.dtype is dtype:
        return t
    return torch.view_as_complex(t) if dtype.is_complex else t.to(dtype)


def wire_op(dtype: torch.dtype, op: str) -> str:
    """The op that backends run: the sum of bools is whether any is true, and must not wrap around at 256."""
    return {"sum": "max", "product": "min"}.get(op, op) if dtype is torch.bool else op


def as_bytes(t: Tensor) -> Tensor:
    """``t`` with one more, innermost dim: the bytes of each element."""
    return t.resolve_conj().resolve_neg().contiguous().unsqueeze(-1).view(torch.uint8)


def numel(shape: Sequence[int], dim: int, size: int) -> int:
    return math.prod(shape[:dim]) * size * math.prod(shape[dim + 1 :])


def resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


@lru_cache(maxsize=4096)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    made, step = [], 1
    for n in reversed(shape):
        made.append(step)
        step *= max(n, 1)
    return tuple(reversed(made))


def contiguous(t: Tensor) -> Tensor:
    """``t`` with the strides of its shape, in dims of one element too: what operators say of what they give."""
    return t if t.stride() == row_major(t.shape) else t.clone(memory_format=torch.contiguous_format)


def even(sizes: Sizes) -> bool:
    return min(sizes) == max(sizes)


def checked_dim(t: Tensor, dim: int, kind: str) -> int:
    if not -t.dim() <= dim < t.dim():
        raise CollectiveError(f"{kind}: no dim {dim} in a tensor of shape {list(t.shape)}")
    return dim % t.dim()


def check_sizes(kind: str, name: str, sizes: Sizes, group: Group, expected: int, got: int) -> None:
    if len(sizes) != group.size:
        raise CollectiveError(f"{kind}: {name}={list(sizes)} for a group of {group.size} ranks")
    if expected != got:
        raise CollectiveError(f"{kind}: the tensor has length {got} but {name}={list(sizes)} says {expected}")


def reduced(parts: list[Tensor], op: str) -> Tensor:
    """The reduction of the parts, in the order of the ranks, as a new tensor (for simulated ranks)."""
    dtype = parts[0].dtype
    op = wire_op(dtype, op)
    wide = dtype if dtype is torch.bool else carrier(dtype, op)
    folds: dict[str, Any] = {"max": torch.maximum, "min": torch.minimum, "product": torch.mul}
    fold = folds.get({"any": "max", "all": "min"}.get(op, op), torch.add)
    acc = parts[0].to(wide)
    for part in parts[1:]:
        acc = fold(acc, part.to(wide))
    return (acc / len(parts) if op == "avg" else acc).to(dtype)
