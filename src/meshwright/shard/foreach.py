"""``torch._foreach_*`` on lists of distributed tensors: one native call on the locals.

Gradient clipping, ``zero_grad`` and ``GradScaler`` are written in terms of these functions, so PyTorch's own
``clip_grad_norm_`` gives the global norm: local sums, one all-reduce for all tensors that are split over the
same axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.utils._foreach_utils as _foreach_utils

from .. import collective
from ..api import reshard, unshard
from ..dispatch import disabled, map_tensors, tensors_in
from ..layout import Partial, Replicate, Shard, Spec
from ..mesh import Mesh
from ..rules import COMPOSITES
from ..tensor import DistTensor, stamp

Tensor = torch.Tensor
APART = {"_foreach_max", "_foreach_powsum", "_foreach_mm"}  # not elementwise
# What may be done to parts of a sum: f(a) + f(b) = f(a + b).
LINEAR = {"_foreach_zero_", "_foreach_neg", "_foreach_neg_"}
SCALING = {"_foreach_mul", "_foreach_mul_", "_foreach_div", "_foreach_div_"}


@contextmanager
def plain(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, distributed tensors are the plain local tensors that they are underneath."""
    swapped: list[Any] = [t for t in tensors if t.__class__ is DistTensor]
    for t in swapped:
        t.__class__ = Tensor
    try:
        yield
    finally:
        for t in swapped:
            t.__class__ = DistTensor


def _elementwise(name: str) -> Callable[..., Any]:
    func = getattr(torch, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        first = args[0]
        tensors = tensors_in((args, kwargs))
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if recorded or not _fits(name, args, kwargs):
            return _one_by_one(name, args, kwargs)
        specs = [t._spec if isinstance(t, DistTensor) else None for t in first]
        with plain(tensors):
            made = func(*args, **kwargs)
        if name.endswith("_") or made is None:
            return made
        return [m if s is None else stamp(m, s) for m, s in zip(made, specs, strict=True)]

    return run


def _fits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the lists hold tensors of the same layouts, on whose locals the op means what it says."""
    first, rest = args[0], (*args[1:], *kwargs.values())
    for other in rest:
        if isinstance(other, (list, tuple)) and other and isinstance(other[0], Tensor):
            for a, b in zip(first, other, strict=True):
                sa, sb = (t._spec.layout if isinstance(t, DistTensor) else None for t in (a, b))
                if sa is not sb and sa != sb and not (_whole(sa) and _whole(sb)):
                    return False
        elif isinstance(other, DistTensor) and not _whole(other._spec.layout):
            return False
    if any(isinstance(t, DistTensor) and _way(t._spec) is None for t in first):
        scalar = name in SCALING and not any(isinstance(o, (list, tuple)) for o in rest)
        return name in LINEAR or scalar
    return True


def _whole(layout: Any) -> bool:
    return layout is None or layout.is_replicated()


def _one_by_one(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same op on each tensor, with the conversions that it needs."""
    method = name.removeprefix("_foreach_")

    def nth(a: Any, i: int) -> Any:
        return a[i] if isinstance(a, (list, tuple)) else a

    made = []
    for i, t in enumerate(args[0]):
        others = [nth(a, i) for a in args[1:]]
        named = {k: nth(v, i) for k, v in kwargs.items()}
        if isinstance(t, DistTensor):
            others = [reshard(o, t.layout) if isinstance(o, DistTensor) and o.ndim else o for o in others]
        elif method.endswith("_"):  # a plain tensor is the same everywhere: what is written to it must be too
            others = [map_tensors(o, unshard) for o in others]
        made.append(getattr(t, method)(*others, **named))
    return None if method.endswith("_") else made


# ---------------------------------------------------------------------------------------------- norms


def norms(tensors: Sequence[Tensor], ord: Any = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The norm of each tensor (of its global value), as plain 0-d tensors that are the same on every rank."""
    ord = float(ord)
    tensors = list(tensors)
    groups: dict[tuple[Mesh, tuple[int, ...]], list[int]] = {}
    for i, t in enumerate(tensors):
        if isinstance(t, DistTensor):
            way = _way(t._spec)
            if way is None:
                tensors[i] = whole = _reduced(t)
                way = _way(whole._spec)
            if way:
                groups.setdefault(way, []).append(i)
    with torch.no_grad(), disabled():
        with plain(tensors):
            made = _local_norms(tensors, ord, dtype)
        for (mesh, axes), members in groups.items():
            group = collective.group(mesh, axes)
            wide = torch.stack([made[i] for i in members])
            kind = wide.dtype
            total = _combined(wide.to(torch.promote_types(kind, torch.float32)), ord, group).to(kind)
            for i, value in zip(members, total.unbind(), strict=True):
                made[i] = value
    return made


def _reduced(t: DistTensor) -> DistTensor:
    return reshard(t, [Replicate() if isinstance(p, Partial) else p for p in t.placements])


@lru_cache(maxsize=4096)
def _way(spec: Spec) -> Any:
    """Mesh and axes over which parts of a tensor are combined; ``()`` for a whole one, None for a Partial one."""
    if spec.layout.partial:
        return None
    axes = split_axes(spec)
    return (spec.mesh, axes) if axes else ()


def split_axes(spec: Spec) -> tuple[int, ...]:
    """Axes of more than one rank that split a tensor."""
    sizes = spec.mesh.sizes
    return tuple(a for a, p in enumerate(spec.layout.placements) if isinstance(p, Shard) and sizes[a] > 1)


def _local_norms(tensors: list[Tensor], ord: float, dtype: torch.dtype | None) -> list[Tensor]:
    typed = {} if dtype is None else {"dtype": dtype}
    if not math.isinf(ord):
        return list(torch._foreach_norm(tensors, ord, **typed))
    # An empty shard has no extremum: the neutral element stands in.
    neutral = math.inf if ord < 0 else 0.0
    full = [t if t.numel() else t.new_full((1,), neutral) for t in tensors]
    return list(torch._foreach_norm(full, ord, **typed))


def _combined(local: Tensor, ord: float, group: collective.Group) -> Tensor:
    """Norms of parts to norms of wholes."""
    if math.isinf(ord):
        return collective.all_reduce(local, "max" if ord > 0 else "min", group)
    if ord in (0, 1):
        return collective.all_reduce(local, "sum", group)
    if ord == 2:
        return collective.all_reduce(local * local, "sum", group).sqrt_()
    return collective.all_reduce(local.pow(ord), "sum", group).pow_(1.0 / ord)


# ---------------------------------------------------------------------------------------------- mixed
# precision


def unscale(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """``GradScaler``'s check and unscaling; all ranks agree on whether there is a non-finite value."""
    meshes = dict.fromkeys(t._spec.mesh for t in grads if isinstance(t, DistTensor))
    with torch.no_grad(), disabled():
        with plain(grads):
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        for mesh in meshes:
            group = collective.group(mesh, tuple(range(mesh.ndim)))
            collective.all_reduce(found_inf, "max", group, out_of_place=False)


def _register() -> None:
    for name in dir(torch):
        if name.startswith("_foreach_"):
            COMPOSITES[name] = _one_by_one_of(name) if name in APART else _elementwise(name)
    COMPOSITES["_foreach_norm"] = norms
    COMPOSITES["_amp_foreach_non_finite_check_and_unscale_"] = unscale
    # What torch may call _foreach functions on; else it goes tensor by tensor, an all-reduce for each norm.
    if DistTensor not in _foreach_utils._foreach_supported_types:
        _foreach_utils._foreach_supported_types.append(DistTensor)


def _one_by_one_of(name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: _one_by_one(name, args, kwargs)


_register()

__all__ = ["norms", "plain", "split_axes", "unscale"]
