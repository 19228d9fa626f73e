"""Ops that read the memory of a tensor by strides: of tensors whose memory on one device is known to be row-major.

A mesh has no memory of the whole.  What such ops mean on one device depends on strides and on the offset of the
tensor, and those of a part do not tell them: an op that needs communication makes new memory where one device has a
view.  So only a tensor that was just laid out row by row says what is meant (``ROW_MAJOR`` in its dict): all else is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import DispatchError
from ..operators import internal
from .dims import meta_shapes, names, sizes_of
from .factor_notation import Arg, Rule, composite, notation, rule

Tensor = torch.Tensor
ROW_MAJOR = "_row_major"  # in the dict of a tensor that has new memory, in row-major order


def is_row_major(x: Any) -> bool:
    """Whether on one device ``x`` is all of its memory, row by row."""
    space = x.__dict__
    return ROW_MAJOR in space and "_turned" not in space


def _check(x: Any, name: str) -> None:
    """Raises DispatchError for a tensor whose memory on one device is not known."""
    if not is_row_major(x):
        raise DispatchError(
            f"{name}: reads memory by strides, and the memory that one device has for {tuple(x.shape)} is not known "
            f"here. Use x.clone(memory_format=torch.contiguous_format).{name}(...), which has row-major strides and "
            "offset 0, or index the elements: x.flatten()[index], x.unfold(dim, size, step)."
        )


@internal
def elements_by_strides(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """``as_strided`` of memory that is row-major."""
    return torch.as_strided(x.contiguous(), size, stride, offset)


@internal
def scatter_by_strides(x: Tensor, values: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """``as_strided_scatter`` of memory that is row-major."""
    return torch.as_strided_scatter(x.contiguous(), values, size, stride, offset)


@rule("elements_by_strides")
def _elements(x: Arg, size: Sequence[int], stride: Sequence[int], offset: int) -> Rule:
    (shape,) = meta_shapes(torch.as_strided, x, size, stride, offset)
    out = names("m", shape)
    return notation({x: x.letters}, out, whole=[*x.letters, *out], sizes=sizes_of(out, shape), linear=[x], moves=True)


@rule("scatter_by_strides")
def _scattered(x: Arg, values: Arg, size: Sequence[int], stride: Sequence[int], offset: int) -> Rule:
    ins = {x: names("x", x.shape), values: names("v", values.shape)}
    return notation(ins, ins[x], whole=[*ins[x], *ins[values]], linear=[[x, values]])


@composite("as_strided")
def as_strided(x: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """Elements of memory, as a view."""
    _check(x, "as_strided")
    return elements_by_strides(x, tuple(size), tuple(stride), storage_offset or 0)


@composite("as_strided_copy")
def as_strided_copy(x: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """Elements of memory, copied."""
    _check(x, "as_strided_copy")
    made = elements_by_strides(x, tuple(size), tuple(stride), storage_offset or 0)
    return made.clone(memory_format=torch.contiguous_format)


@composite("as_strided_scatter")
def as_strided_scatter(
    x: Any, src: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """A copy of memory, in which some elements are those of another tensor."""
    _check(x, "as_strided_scatter")
    return scatter_by_strides(x, src, tuple(size), tuple(stride), storage_offset or 0)


@composite("as_strided_")
def as_strided_(x: Any, *args: Any, **kwargs: Any) -> Any:
    """In place the tensor would get another layout, and keep this one's memory."""
    raise DispatchError("as_strided_: cannot change the strides of a DistTensor in place. Use y = x.as_strided(...).")


def _resized(x: Any, shape: Sequence[int], name: str) -> Any:
    if tuple(x.shape) == tuple(shape):
        return x
    raise DispatchError(
        f"{name}: cannot resize the memory of a DistTensor in place ({tuple(x.shape)} to {tuple(shape)}). Make a new "
        "tensor: x.flatten()[:n].reshape(shape), or x.new_empty(shape)."
    )


@composite("resize_", "resize")
def resize_(x: Any, *sizes: Any, **kwargs: Any) -> Any:
    """Nothing to do, or refused: which elements stay is said by memory."""
    shape = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return _resized(x, shape or kwargs.get("size", ()), "resize_")


@composite("resize_as_", "resize_as")
def resize_as_(x: Any, the_template: Any, **kwargs: Any) -> Any:
    """As ``resize_``."""
    return _resized(x, the_template.shape, "resize_as_")
