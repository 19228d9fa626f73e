"""Sketches of tensors: a few numbers that tell how far two tensors are from each other, without a copy of either.

A tensor is cut into rows of a few elements, each row gets a random factor of random sign, and the rows are added up in
float64.  The squares of the result add up, on average over factors, to the squares of the elements, and a sketch is
linear: the difference of two sketches is the sketch of the difference, and its norm estimates the norm of the
difference (Johnson and Lindenstrauss).  No factor is near zero, so an element that differs alone is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

Tensor = torch.Tensor

WIDTH = 64  # elements of a row: numbers of a sketch
_ROWS = 1 << 13  # of a chunk: 4 MiB in float64, whatever the tensor's size


@dataclass(frozen=True)
class Sketch:
    """What is remembered of a tensor, or of a weighted sum of tensors.

    Attributes:
        signed: sums of its finite elements, times random factors.
        odd: the same of where elements are not finite; None where all are.
        shape, dtype: of the tensor.
        terms: of a sum, the largest norm of what was added up: what it was rounded by.
    """

    signed: Tensor
    odd: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    terms: float = 0.0

    @property
    def norm(self) -> float:
        """About the Euclidean norm of the tensor's finite elements."""
        return float(torch.linalg.vector_norm(self.signed))

    @property
    def finite(self) -> bool:
        """Whether all elements are."""
        return self.odd is None

    def distance(self, other: Sketch) -> float:
        """About the Euclidean norm of the difference of the finite elements."""
        return float(torch.linalg.vector_norm(self.signed - other.signed))

    def factor(self, other: Sketch) -> float | None:
        """The multiple of this one that is closest to the other; None of zeros."""
        square = float(self.signed @ self.signed)
        return float(self.signed @ other.signed) / square if square else None

    def apart(self, other: Sketch, factor: float) -> float:
        """As :meth:`distance`, from a multiple of this one."""
        return float(torch.linalg.vector_norm(other.signed - factor * self.signed))

    def same_odd(self, other: Sketch) -> bool:
        """Whether the same elements are not finite."""
        if self.odd is None or other.odd is None:
            return self.odd is other.odd
        return bool((self.odd == other.odd).all())

    def times(self, weight: float) -> Sketch:
        """Of the tensor times a number."""
        return replace(self, signed=self.signed * weight, terms=max(self.terms, self.norm) * abs(weight))

    def zeros(self) -> Sketch:
        """Of zeros of the tensor's shape."""
        return replace(self, signed=torch.zeros_like(self.signed), odd=None, terms=0.0)

    def plus(self, other: Sketch) -> Sketch:
        """Of the sum of two tensors of one shape."""
        odd = self.odd if other.odd is None else other.odd if self.odd is None else self.odd + other.odd
        terms = max(self.terms, other.terms)
        return replace(self, signed=self.signed + other.signed, odd=odd, terms=terms)


def sketch(t: Tensor) -> Sketch:
    """The sketch of a local tensor."""
    shape, dtype = tuple(t.shape), t.dtype
    values = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    flat = values.reshape(-1)
    signed = _signed(flat, mask=False)
    if bool(torch.isfinite(signed).all()):
        return Sketch(signed.cpu(), None, shape, dtype)
    return Sketch(_signed(flat, mask=False, finite=True).cpu(), _signed(flat, mask=True).cpu(), shape, dtype)


def _signed(flat: Tensor, mask: bool, finite: bool = False) -> Tensor:
    total = torch.zeros(WIDTH, dtype=torch.float64, device=flat.device)
    size = WIDTH * _ROWS
    for number, begin in enumerate(range(0, flat.numel(), size)):
        chunk = flat[begin : begin + size].double()
        odd = ~torch.isfinite(chunk) if mask or finite else None
        if odd is not None:
            chunk = odd.double() if mask else chunk.masked_fill(odd, 0.0)
        rows = chunk.numel() // WIDTH
        factors = _factors(flat.device)
        part = factors[:rows] @ chunk[: rows * WIDTH].view(rows, WIDTH)
        if rest := chunk.numel() - rows * WIDTH:
            part[:rest] += chunk[rows * WIDTH :] * factors[rows]
        # Chunks that changed places are another tensor.
        total += part.roll(number) * factors[number % _ROWS]
    return total


@lru_cache(maxsize=4)
def _factors(device: torch.device) -> Tensor:
    """The same on all ranks, in every process: between 0.75 and 1.25, of either sign."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (_ROWS,), generator=generator).double().mul_(2).sub_(1)
    sizes = torch.rand(_ROWS, generator=generator, dtype=torch.float64).div_(2).add_(0.75)
    return (signs * sizes).to(device)


__all__ = ["Sketch", "sketch"]
