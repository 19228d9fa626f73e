"""Operators of programs that put many tensors into one collective, and take them out: see ``shard/packing``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...operators import operator
from ...shard.parameters.packing import Packing

Tensor = torch.Tensor


def _pack(flat: Tensor, whole: Tensor, dim: int, n: int, offset: int) -> Tensor:
    packing = Packing([whole.shape], [dim], (n,))
    packing.place(flat.view(n, -1)[:, offset : offset + packing.row], [whole])
    return flat


def _row(chunks: Sequence[Tensor], offsets: Sequence[int], size: int) -> Tensor:
    gaps = size != sum(c.numel() for c in chunks)  # which would be encoded with what they lie beside
    row = (chunks[0].new_zeros if gaps else chunks[0].new_empty)(size)
    views = [row[o : o + c.numel()].view(c.shape) for o, c in zip(offsets, chunks, strict=True)]
    torch._foreach_copy_(views, list(chunks))
    return row


def _unpack(flat: Tensor, shape: Sequence[int], dim: int, n: int, offset: int) -> Tensor:
    packing = Packing([shape], [dim], (n,))
    whole = flat.new_empty(list(shape))
    packing.take(flat.view(n, -1)[:, offset : offset + packing.row], [whole])
    return whole


def _flat(flat: Tensor, *_: object) -> Tensor:
    return flat


def _fake_row(chunks: Sequence[Tensor], offsets: Sequence[int], size: int) -> Tensor:
    return chunks[0].new_empty(size)


def _whole(flat: Tensor, shape: Sequence[int], dim: int, n: int, offset: int) -> Tensor:
    return flat.new_empty(list(shape))


# Chunk r of a tensor along a dim goes to row r of a buffer of n rows, at an offset in the row.
PACK = operator("pack_(Tensor(a!) flat, Tensor whole, int dim, int n, int offset) -> Tensor(a!)", _pack, _flat)
# One rank's row from its chunks; and a whole tensor from the rows of all ranks.
ROW = operator("row(Tensor[] chunks, int[] offsets, int size) -> Tensor", _row, _fake_row)
UNPACK = operator("unpack(Tensor flat, int[] shape, int dim, int n, int offset) -> Tensor", _unpack, _whole)

__all__ = ["PACK", "ROW", "UNPACK"]
