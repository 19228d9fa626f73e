"""Values of one device and of all ranks: put together from what ranks hold, and compared.

What ranks hold is put together here by index arithmetic alone.  None of the conversions takes part, whose mistakes
would be looked for with themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..layout import At, Shard, Spec
from ..testing.values import tolerance_of

Tensor = torch.Tensor
Numbers = (bool, int, float, complex)
_REDUCED: Mapping[str, Any] = {
    "sum": lambda t: t.sum(0), "avg": lambda t: t.mean(0), "product": lambda t: t.prod(0), "any": lambda t: t.any(0),
    "all": lambda t: t.all(0), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0),
}  # fmt: skip
NOISE = 1e-13  # what is left of zeros that are differences of numbers
UPDATED = 1e-11  # and what Adam makes of them in a parameter: it divides by 1e-8 at least, and goes by its rate


@dataclass(frozen=True)
class Difference:
    """How a value of the ranks differs from that of one device.

    Attributes:
        text: in words.
        relative: the largest difference by the largest number of one device; infinite where they cannot be compared.
        copies: whether ranks hold different copies of what they are said to have alike.
    """

    text: str
    relative: float = math.inf
    copies: bool = False


def assemble(parts: Sequence[Tensor], spec: Spec | None, noise: float = NOISE) -> tuple[Tensor, str]:
    """The value of which the ranks, in order, hold ``parts``; and which of them hold different copies, in words."""
    if spec is None:
        return parts[0], _copies(parts, list(range(len(parts))), noise)
    mesh, partial = spec.mesh, spec.layout.partial
    split = [a for a, p in enumerate(spec.layout.placements) if isinstance(p, (Shard, At))]
    terms: dict[tuple[int, ...], Tensor] = {}
    first: dict[tuple[int, ...], int] = {}
    for i, (rank, part) in enumerate(zip(mesh.ranks, parts, strict=True)):
        here = mesh.coordinate(rank)
        term = tuple(here[a] for a in partial)
        place = (*term, *(here[a] for a in split))
        if place in first:
            if words := _copies([parts[first[place]], part], [first[place], i], noise):
                return part, words
            continue
        first[place] = i
        whole = terms.setdefault(term, part.new_zeros(tuple(spec.shape)))
        held = spec.local_shape(here)
        if held != part.shape:
            return part, f"rank {rank} holds {list(part.shape)}, and {list(held)} would be its part of {spec!r}"
        for there, own in spec.layout.local_boxes(spec.shape, here):
            whole[there] = part[own]
    for at, op in reversed(list(enumerate(partial.values()))):
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for term in sorted(terms):
            groups.setdefault(term[:at], []).append(terms[term])
        terms = {k: _REDUCED[op](torch.stack(alike)).to(alike[0].dtype) for k, alike in groups.items()}
    return terms[()], ""


def _copies(parts: Sequence[Tensor], ranks: Sequence[int], noise: float) -> str:
    """In words, which ranks hold something else than the first of them; empty where all hold the same."""
    for part, rank in zip(parts[1:], ranks[1:], strict=True):
        found = differing(part, parts[0], noise=noise)
        if found is not None:
            return f"ranks {ranks[0]} and {rank} hold different copies of it: {found.text}"
    return ""


def differing(got: Any, want: Any, tolerance: float = 1e-9, noise: float = NOISE) -> Difference | None:
    """How a value differs from that of one device by more than rounding explains; None where it does not."""
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return _numbers(got, want, tolerance)
    if got.shape != want.shape:
        return Difference(f"shape {list(got.shape)} instead of {list(want.shape)}")
    if got.dtype != want.dtype:
        return Difference(f"{got.dtype} instead of {want.dtype}")
    if got.layout is not torch.strided:
        got, want = got.to_dense(), want.to_dense()
    if not want.numel() or torch.equal(got, want):
        return None
    tolerance = max(tolerance, tolerance_of(want))
    if not (want.is_floating_point() or want.is_complex()):
        wrong = got != want
    else:
        got, want = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (got, want))
        wrong = ~torch.isclose(got, want, rtol=0, atol=tolerance * _scale(want) + noise, equal_nan=True)
    count = int(wrong.sum())
    if not count:
        return None
    at = wrong.nonzero()[0].tolist() if want.ndim else []
    g, w = (t[tuple(at)].item() for t in (got, want))
    off = apart(got, want)
    where = f" at {at}" if at else ""
    return Difference(
        f"{_text(g)} instead of {_text(w)}{where}; {count} of {want.numel()} differ", off / (_scale(want) or 1)
    )


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference of two tensors of one shape; infinite where one has a NaN, or an infinity, alone."""
    if not want.numel():
        return 0.0
    got, want = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (got, want))
    off = torch.where((got == want) | (got.isnan() & want.isnan()), 0.0, (got - want).abs())
    return float(torch.nan_to_num(off, nan=math.inf).max())


def _scale(t: Tensor) -> float:
    """The largest finite magnitude."""
    t = t if t.is_floating_point() or t.is_complex() else t.to(torch.float64)
    largest = float(t.abs().max()) if t.numel() else 0.0
    if math.isfinite(largest):
        return largest
    finite = t[torch.isfinite(t)].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _numbers(got: Any, want: Any, tolerance: float) -> Difference | None:
    if type(got) is type(want) and isinstance(want, (float, complex)):
        both_nan = got != got and want != want
        if both_nan or got == want or abs(got - want) <= tolerance * abs(want) + NOISE:
            return None
        return Difference(f"{_text(got)} instead of {_text(want)}", abs(got - want) / (abs(want) or 1))
    return None if type(got) is type(want) and got == want else Difference(f"{_brief(got)} instead of {_brief(want)}")


def _text(x: Any) -> str:
    return f"{x:.9g}" if isinstance(x, float) else str(x)


def _brief(x: Any) -> str:
    return f"{type(x).__name__} {list(x.shape)}" if isinstance(x, Tensor) else repr(x)
