"""The same function on plain tensors and on distributed ones: ``same(fn, (tensor, placements), ...)``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import meshwright as mw
from meshwright.ranks import runtime

FOUR = mw.Mesh({"x": 4})
GRID = mw.Mesh({"dp": 2, "tp": 2})
R, P = mw.Replicate(), mw.Partial()
S0, S1 = mw.Shard(0), mw.Shard(1)


def ramp(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """0, 1, 2... over a few tenths: all different."""
    n = torch.Size(shape).numel()
    return ((torch.arange(n) - n // 3).to(dtype) / 8 if dtype.is_floating_point else torch.arange(n)).reshape(shape)


def plain(value: Any) -> Any:
    """Nested results with every DistTensor as its global value, and what type(d) it was forgotten."""
    if isinstance(value, torch.Tensor):
        return mw.unshard(value).detach()
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return value


def check_equal(got: Any, want: Any, where: str = "") -> None:
    """Nested results are equal; floats to 1e-9."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), (where, got)
        assert got.dtype == want.dtype, (where, got.dtype, want.dtype)
        assert got.shape == want.shape, (where, got.shape, want.shape)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m: f"{where}: {m}")
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want), (where, got, want)
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            check_equal(g, w, f"{where}[{i}]")
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for k in want:
            check_equal(got[k], want[k], f"{where}[{k!r}]")
    elif isinstance(want, (float, complex)):
        assert type(got) is type(want), where
        assert abs(got - want) <= 1e-9 * (1 + abs(want)), (where, got, want)
    else:
        assert got == want, (where, got, want)


def same(
    fn: Callable[..., Any],
    *leaves: tuple[torch.Tensor, Sequence[Any]],
    mesh: mw.Mesh = FOUR,
) -> None:
    """``fn`` gives the same on plain tensors and, on every simulated rank, on leaves of these placements."""
    want = plain(fn(*[fresh(t) for t, _ in leaves]))

    def run() -> Any:
        return plain(fn(*[laid(t, mesh, p) for t, p in leaves]))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rank, got in enumerate(mw.simulate(run, mesh)):
            check_equal(got, want, f"rank {rank}: ")


def laid(t: torch.Tensor, mesh: mw.Mesh, placements: Sequence[Any]) -> mw.DistTensor:
    """A leaf of these placements; where it is Partial, of parts that differ from rank to rank."""
    if not any(isinstance(p, mw.Partial) for p in placements) or not t.isfinite().all():
        return mw.shard_tensor(fresh(t), mesh, placements, check=False)
    part = t.detach()
    for p, n, i in zip(placements, mesh.sizes, mesh.coordinate(runtime.RT.rank), strict=True):
        if isinstance(p, mw.Partial):
            part = _PARTS[p.op](part, n, i)
    whole = [mw.Replicate() if isinstance(p, mw.Partial) else p for p in placements]
    part = mw.shard_tensor(part, mesh, whole, check=False).to_local()
    made = mw.from_local(part, mesh, placements, shape=t.shape, check=False)
    return made.requires_grad_(t.requires_grad)


def _summand(t: torch.Tensor, n: int, i: int) -> torch.Tensor:
    """Exact, and together the whole."""
    parts = [2, -2] * n
    return t * (parts[i] if i < n - 1 else 1 - sum(parts[: n - 1]))


def _factor(t: torch.Tensor, n: int, i: int) -> torch.Tensor:
    if not t.is_floating_point():
        return t if i == 0 else torch.ones_like(t)
    others = [2.0, 0.5] * n
    return t / math.prod(others[1:n]) if i == 0 else torch.full_like(t, others[i])


def _held(t: torch.Tensor, n: int, i: int) -> torch.Tensor:
    """Where this rank has the value that counts."""
    return (torch.arange(t.numel()) % n == i).reshape(t.shape)


_PARTS: dict[str, Callable[[torch.Tensor, int, int], torch.Tensor]] = {
    "sum": _summand,
    "avg": lambda t, n, i: _summand(t, n, i) * n,
    "max": lambda t, n, i: torch.where(_held(t, n, i), t, t - 1),
    "min": lambda t, n, i: torch.where(_held(t, n, i), t, t + 1),
    "product": _factor,
    "any": lambda t, n, i: t & _held(t, n, i),
    "all": lambda t, n, i: t | ~_held(t, n, i),
}


def fresh(t: torch.Tensor) -> torch.Tensor:
    """A copy that is a leaf."""
    return t.detach().clone().requires_grad_(t.requires_grad)


def on_ranks(fn: Callable[[], Any], mesh: mw.Mesh = FOUR) -> list[Any]:
    """``fn`` on every simulated rank."""
    return mw.simulate(fn, mesh)
