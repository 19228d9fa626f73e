"""Values on one device and on ranks: random parts that reduce to a value, and what differs."""

from __future__ import annotations

from typing import Any

import torch

from ..layout import Partial, Spec
from ..ranks import runtime
from ..strategy_selection import carries_grad

Tensor = torch.Tensor
_TOLERANCE = {
    torch.float64: 1e-9, torch.complex128: 1e-9, torch.float16: 2e-2, torch.complex32: 2e-2, torch.bfloat16: 5e-2
}  # fmt: skip


def local_part(value: Tensor, spec: Spec, seed: int = 0) -> Tensor:
    """This rank's part of a value; Partial parts are random, of both signs, and reduce to it."""
    here = spec.mesh.coordinate(runtime.RT.rank)
    generator = torch.Generator().manual_seed(seed)
    part = value.detach()
    for a, p in enumerate(spec.layout.placements):
        if isinstance(p, Partial):
            part = _term(part, p.op, spec.mesh.sizes[a], here[a], generator)
    return spec.part(part, here).clone(memory_format=torch.contiguous_format)


def _term(value: Tensor, op: str, n: int, index: int, generator: torch.Generator) -> Tensor:
    """Part ``index`` of ``n`` random ones that reduce to a value; it is the same random numbers on every rank."""
    noise = torch.randn((n, *value.shape), generator=generator, dtype=torch.float64)
    holder = torch.randint(n, value.shape, generator=generator) == index
    if not carries_grad(value.dtype):  # whole numbers add up without rounding: labels stay labels
        noise = torch.round(2 * noise) if value.dtype is not torch.bool else noise > 0
    if op in ("sum", "avg") and value.dtype is not torch.bool:
        if torch.equal(value, torch.round(value.real)):
            noise = torch.round(4 * noise)
        noise = noise.to(value.dtype)
        part = noise[index] if index < n - 1 else value - noise[:-1].sum(0, dtype=value.dtype)
        return part * n if op == "avg" else part
    if op == "product" and value.is_floating_point() and not torch.equal(value, torch.round(value)):
        factors = noise[:-1].abs().add(0.5) * noise[:-1].sign()
        last = (value.to(factors.dtype) / factors.prod(0)).to(value.dtype)
        return factors[index].to(value.dtype) if index < n - 1 else last
    if value.dtype is torch.bool:  # a false one makes all false, a true one any true
        spread = value & noise[index] if op in ("sum", "max", "any") else value | noise[index]
        return torch.where(holder, value, spread)
    if op == "product":
        return torch.where(holder, value, 1)
    other = value - noise[index].abs().to(value.dtype) * (1 if op == "max" else -1)
    return torch.where(holder, value, other)


def tolerance_of(*tensors: Tensor) -> float:
    """The loosest of theirs."""
    return max((_TOLERANCE.get(t.dtype, 1e-4) for t in tensors if carries_grad(t.dtype)), default=1e-9)


def difference_of(got: Any, want: Any, tolerance: float = 1e-9) -> float | str | None:
    """None where equal up to rounding, else the largest difference, or what differs."""
    if not isinstance(want, Tensor):
        same = got == want or (isinstance(want, float) and abs(got - want) <= 1e-4 * max(1.0, abs(want)))
        return None if same else f"{got!r} instead of {want!r}"
    if not isinstance(got, Tensor):
        return f"a {type(got).__name__} instead of a tensor"
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
    if want.layout is not torch.strided:
        got, want = got.to_dense(), want.to_dense()
    if not carries_grad(want.dtype):
        return None if torch.equal(got, want) else float((got.double() - want.double()).abs().max())
    tolerance = max(tolerance, tolerance_of(want))
    got, want = got.detach(), want.detach()
    finite = want[torch.isfinite(want)].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    if torch.allclose(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
        return None
    return float(torch.nan_to_num((got - want).abs(), nan=float("inf")).max())
