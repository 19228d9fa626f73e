"""``x[torch.arange(len(x)), i]``: of each row what its own index says, as in attention masks and losses by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx as fx

from .constant_documents import erase_unread, value_from_numbers
from .out_arguments import called

aten = torch.ops.aten
Tensor = torch.Tensor


def pick_within_rows(graph: fx.Graph) -> None:
    """Indexing by the numbers of all rows, and by one more index, becomes a gather along the second dim.

    An index may pick any row, so it needs rows of other ranks, and mixes micro-batches.  A gather keeps to its rows.
    """
    made: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        if node.target is not aten.index.Tensor:
            continue
        arguments: Any = node.args
        x, indices = arguments
        with graph.inserting_before(node):
            picked = None if len(indices) > 2 or None in indices else _replaced(node, x, indices, made)
        if picked is not None:
            node.replace_all_uses_with(picked)
            graph.erase_node(node)
    erase_unread(graph, made)


def _replaced(like: fx.Node, x: fx.Node, indices: list[fx.Node], made: dict[fx.Node, Any]) -> fx.Node | None:
    """What takes the place of an indexing; None where that is something else."""
    rows, whole = indices[0], x.meta["val"]
    dim = _row_dim(rows, whole.shape[0], made)
    if dim is None:
        return None
    if len(indices) == 1:
        alone = called(like, aten.view.default, (x, [*rows.meta["val"].shape, *whole.shape[1:]]))
        return called(like, aten.clone.default, (alone,))
    index = indices[1]
    shape = torch.broadcast_shapes(rows.meta["val"].shape, index.meta["val"].shape)
    dim += len(shape) - rows.meta["val"].ndim
    if index.meta["val"].dtype is torch.bool or shape[dim] != whole.shape[0]:
        return None
    if whole.dtype.is_floating_point and math.prod(shape) > whole.shape[0]:
        return None  # its gradient would be as large as the result of each row times the dim that is picked from
    return _picked(like, x, index, shape, dim, made)


def _row_dim(rows: fx.Node, count: int, made: dict[fx.Node, Any]) -> int | None:
    """The dim along which a tensor of numbers alone counts all rows, and is the same along the others."""
    sizes = rows.meta["val"].shape
    long = [d for d, n in enumerate(sizes) if n != 1]
    if len(long) > 1 or not sizes or math.prod(sizes) != count or type(count) is not int:
        return None
    found = value_from_numbers(rows, made)
    if not isinstance(found, Tensor) or found.dtype is torch.bool:
        return None
    return (long[0] if long else 0) if torch.equal(found.flatten().long(), torch.arange(count)) else None


def _picked(
    like: fx.Node, x: fx.Node, index: fx.Node, shape: torch.Size, dim: int, made: dict[fx.Node, Any]
) -> fx.Node:
    """What is picked of each row, with the dims of both indices in front of the rest of the row."""
    n, length, *rest = x.meta["val"].shape
    lead = [n if d == dim else 1 for d in range(len(shape))]
    along = _row_dim(index, length, made)
    at = None if along is None else along + len(shape) - index.meta["val"].ndim
    if at is not None and at > dim and math.prod(shape) == n * length:  # all of each row, as it is
        return called(like, aten.clone.default, (called(like, aten.view.default, (x, [*shape, *rest])),))
    values = called(like, aten.view.default, (x, [*lead, length, *rest]))
    values = called(like, aten.expand.default, (values, [*shape, length, *rest]))
    places = index
    if index.meta["val"].dtype is not torch.int64:
        places = called(like, aten._to_copy.default, (places,), {"dtype": torch.int64})
    known = value_from_numbers(index, made)
    if known is None or bool((known < 0).any()):
        behind = called(like, aten.add.Tensor, (places, length))
        places = called(like, aten.where.self, (called(like, aten.lt.Scalar, (places, 0)), behind, places))
    own = places.meta["val"].shape
    places = called(
        like, aten.view.default, (places, [*([1] * (len(shape) - len(own))), *own, *([1] * (1 + len(rest)))])
    )
    places = called(like, aten.expand.default, (places, [*shape, 1, *rest]))
    return called(like, aten.squeeze.dim, (called(like, aten.gather.default, (values, len(shape), places)), len(shape)))


__all__ = ["pick_within_rows"]
