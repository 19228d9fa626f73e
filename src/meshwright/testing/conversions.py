"""``check_conversion``: a conversion against its transpose."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import collective
from ..errors import ConversionError, takes
from ..layout import Layout, Partial, Replicate, Spec
from ..ranks import runtime
from ..ranks.simulation import simulate
from ..resharding import executor
from ..resharding.planner import plan as conversion_plan
from ..strategy_selection import carries_grad
from .values import difference_of, local_part

Tensor = torch.Tensor


@takes(
    ConversionError, src=(Spec, "give mw.Spec(shape, dtype, layout)"), dst=(Spec, "give mw.Spec(shape, dtype, layout)")
)
def check_conversion(src: Spec, dst: Spec) -> None:
    """Check the conversion between two specs: its value, and that its backward is the transpose.

    Args:
        src: Spec of the input.
        dst: Spec of the output, with the same floating-point dtype, shape and mesh. Types of `Replicate`
            (`Spec.grad_partial_mask`) count.

    Raises:
        ConversionError: If they differ. Names both specs, the steps between them and the difference.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})
        src = mw.Spec((5, 3), torch.float64, mw.Layout(mesh, {"dp": mw.Shard(0)}))
        dst = mw.Spec((5, 3), torch.float64, mw.Layout(mesh, {"dp": mw.Shard(1)}))
        mw.check_conversion(src, dst)
        ```
    """
    if src.undecided_mask or dst.undecided_mask:
        src, dst = src.decided(), dst.decided()
    generator = torch.Generator().manual_seed(0)
    value, cotangent = (torch.randn(src.shape, generator=generator, dtype=torch.float64) for _ in "xy")
    if not carries_grad(src.dtype):
        value = value > 0 if src.dtype is torch.bool else value.mul(3).round()
    value, cotangent = value.to(src.dtype), cotangent.to(src.dtype)
    for finding in simulate(lambda: _run_conversion(src, dst, value, cotangent), src.mesh):
        if finding is not None:
            steps = conversion_plan(src, dst).steps
            raise ConversionError(f"{finding} in the conversion from {src!r} to {dst!r} by {list(steps)}")


def _run_conversion(src: Spec, dst: Spec, value: Tensor, cotangent: Tensor) -> str | None:
    mesh, everywhere = src.mesh, Spec(dst.shape, dst.dtype, Layout(dst.mesh))
    x = local_part(value, src, 3).requires_grad_(carries_grad(src.dtype))
    out = executor.apply(conversion_plan(src, dst).steps, x)
    whole_ = executor.apply(conversion_plan(dst, everywhere).steps, out)
    finding = _difference("value", whole_.detach(), value)
    if not x.requires_grad:
        return finding
    (back,) = torch.autograd.grad(whole_, x, cotangent, retain_graph=True)
    for a in range(mesh.ndim):
        if src.grad_partial_mask >> a & 1:  # each rank has a contribution
            back = collective.all_reduce(back, "sum", collective.group(mesh, (a,)))
    finding = finding or _difference("gradient", back, _expected(x.detach(), src, cotangent))
    if any(op != "sum" for op in (*src.layout.partial.values(), *dst.layout.partial.values())):
        return finding  # not linear in the parts
    # Cotangents of replicated (invariant) types are equal on all ranks; those of other types are per rank.
    y = local_part(cotangent, dst.grad(), 5)
    (back,) = torch.autograd.grad(out, x, y)
    group = collective.group(mesh)
    left = collective.all_reduce(_dot(out.detach(), dst, y), "sum", group)
    right = collective.all_reduce(_dot(x.detach(), src, back), "sum", group)
    close = torch.allclose(left, right, rtol=1e-4, atol=1e-4)
    return finding or (None if close else f"wrong transpose ({left} against {right})")


def _difference(what: str, got: Tensor, want: Tensor) -> str | None:
    difference = difference_of(got, want)
    return None if difference is None else f"wrong {what} (difference {difference})"


def _expected(x: Tensor, src: Spec, cotangent: Tensor) -> Tensor:
    """The gradient of this rank's part of a value, from what all ranks hold: autograd's of the reduction itself."""
    mesh, here = src.mesh, src.mesh.coordinate(runtime.RT.rank)
    held = collective.all_gather_object(x, collective.group(mesh))
    leaves = {at: t.clone().requires_grad_() for at, t in zip(mesh.coordinates(), held, strict=True)}
    terms = leaves
    for a, p in enumerate(src.layout.placements):  # one axis after the other: reductions of one kind commute
        op = p.op if isinstance(p, Partial) else None
        terms = {
            at: _FOLDS[op](torch.stack([terms[(*at[:a], i, *at[a + 1 :])] for i in range(mesh.sizes[a])])) if op else t
            for at, t in terms.items()
        }
    mine = src.part(cotangent, here)
    (back,) = torch.autograd.grad(terms[here], leaves[here], mine)
    return back


_FOLDS: dict[str | None, Callable[[Tensor], Tensor]] = {
    "sum": lambda t: t.sum(0), "avg": lambda t: t.mean(0), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0),
    "product": lambda t: t.prod(0),
}  # fmt: skip


def _dot(x: Tensor, spec: Spec, y: Tensor) -> Tensor:
    """⟨x, y⟩ of a value and a cotangent of its type: every pair of parts counts, replicas once."""
    here = spec.mesh.coordinate(runtime.RT.rank)
    total = (x * y).sum()
    for a, p in enumerate(spec.layout.placements):
        if isinstance(p, Replicate) and not spec.grad_partial_mask >> a & 1 and here[a]:
            total = total * 0
    return total
