"""Wires: the formats in which values travel between ranks.  What becomes of values in them is the business of
``collective``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import LayoutError

_MOST_BLOCK = 1 << 16
CASTS = (torch.bfloat16, torch.float16)  # dtypes that are wires by themselves


@dataclass(frozen=True)
class Float8:
    """Communication format: 8 bits per value (e4m3), and one scale of one byte per block.

    The scale is the smallest power of two that brings the largest finite value of the block within reach. The format
    follows the Open Compute Project (Rouhani et al., Microscaling Data Formats, 2023).

    Attributes:
        block: Number of elements that share a scale, 1 to 65536.

    Raises:
        LayoutError: If `block` is out of range.

    Examples:
        ```python
        precision = mw.Precision(grad_comm=mw.Float8(block=32))  # gradients are sent as float8
        assert precision.grad_comm.block == 32
        ```
    """

    block: int = 128

    dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if type(self.block) is not int or not 1 <= self.block <= _MOST_BLOCK:
            raise LayoutError(
                f"mw.Float8: block={self.block!r}: a number of elements from 1 to {_MOST_BLOCK} is wanted"
            )


Wire = torch.dtype | Float8


def block_of(wire: Wire | None) -> int:
    """How many elements are encoded together: where tensors share a buffer, they begin at multiples of it."""
    return wire.block if isinstance(wire, Float8) else 1


def wire_bytes(wire: Wire, n: int) -> int:
    """Bytes of ``n`` elements on the wire."""
    return n + math.ceil(n / wire.block) if isinstance(wire, Float8) else n * wire.itemsize


def bytes_each(wire: Wire) -> float:
    """Bytes of one element among many."""
    return 1 + 1 / wire.block if isinstance(wire, Float8) else wire.itemsize


def wire_name(wire: Wire) -> str:
    """``"bfloat16"``, ``"float8/128"``: what :func:`wire_from` reads."""
    return f"float8/{wire.block}" if isinstance(wire, Float8) else str(wire).removeprefix("torch.")


def wire_from(name: str) -> Wire:
    """A wire by its name.  Raises ValueError where there is none."""
    kind, _, block = name.partition("/")
    if kind == "float8" and block.isdecimal():
        return Float8(int(block))
    found = {wire_name(dtype): dtype for dtype in CASTS}.get(name)
    if found is None:
        raise ValueError(f"there is no wire {name!r}")
    return found
