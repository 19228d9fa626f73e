"""``torch._foreach_*`` on lists of distributed tensors: one native call on the locals.

Gradient clipping, ``zero_grad`` and ``GradScaler`` are written in terms of these functions, so PyTorch's own
``clip_grad_norm_`` gives the global norm: local sums, one all-reduce for all tensors that are split over the
same axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from types import NoneType, SimpleNamespace
from typing import Any, cast

import torch

from ... import collective, compat, torch_changes
from ...compat import foreach_utils
from ...dispatch import count_write, disabled, map_tensors, refresh, tensors_in, write_through
from ...layout import Partial, Replicate, Spec, cuts, marks_of
from ...local_tensor import as_plain, get_grad
from ...mesh import Mesh
from ...rules import COMPOSITES
from ...tensor import GRADIENT, DistTensor, OpenTensor, call_enabled, wrap
from ...tensor.api import reshard, unshard

Tensor = torch.Tensor
APART = {"_foreach_max", "_foreach_powsum", "_foreach_mm"}  # not elementwise
# What may be done to parts of a sum: f(a) + f(b) = f(a + b).
LINEAR = {"_foreach_zero_", "_foreach_neg", "_foreach_neg_"}
SCALING = {"_foreach_mul", "_foreach_mul_", "_foreach_div", "_foreach_div_"}


Specs = tuple[Spec | None, ...]


def _specs(a: Any) -> Specs | Spec | None:
    """Spec of a tensor, or of each tensor of a list; None for what is plain, and for numbers."""
    if isinstance(a, (list, tuple)):
        if a and not isinstance(a[0], Tensor):
            return None
        return _specs_of(a)
    return _spec(a)


def _specs_of(tensors: Sequence[Any]) -> Specs:
    return tuple([t._spec if t.__class__ is DistTensor else _spec(t) for t in tensors])


_DISTRIBUTED = {DistTensor}


def _spec(t: Any) -> Spec | None:
    found: Spec | None = t._spec if t.__class__ is DistTensor or isinstance(t, DistTensor) else None
    return found


def _elementwise(name: str) -> Callable[..., Any]:
    func = getattr(torch, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values()) if kwargs else args
        if _captured(given):
            return _one_by_one(name, args, kwargs)
        specs = tuple([_specs(a) for a in given])
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs)))
        if recorded or not _fits(name, specs) or _writes_to_meta(name, given[0], specs[0]):
            return _one_by_one(name, args, kwargs)
        _claim(name, given, specs)
        with disabled():
            made = func(*args, **kwargs)
        if name.endswith("_") or made is None:
            if torch.is_inference_mode_enabled():
                count_write(None)
            return made
        of_first: Any = specs[0]
        return [m if s is None else wrap(m, s) for m, s in zip(made, of_first, strict=True)]

    return run


def _claim(name: str, given: Sequence[Any], specs: Sequence[Any]) -> None:
    """Plain tensors behind the first list stand for what all ranks have."""
    plain: list[Tensor] = []
    for a, spec in zip(given[1:], specs[1:], strict=True):
        if isinstance(a, Tensor):
            plain += [a] if spec is None else []
        elif spec is not None and None in spec:
            plain += [t for t, s in zip(a, spec, strict=True) if s is None]
    mesh = next((s.mesh for s in specs[0] if s is not None), None)
    if plain and mesh is not None:
        collective.check_replicated_inputs(name, plain, lambda: collective.group(mesh))


def _captured(args: Sequence[Any]) -> bool:
    """Whether these are what a captured step runs on: each tensor a call of its own, which a program can hold."""
    for a in args:
        if a.__class__ is list and _DISTRIBUTED.issuperset(map(type, a)):
            continue
        others = [t for t in (a if isinstance(a, (list, tuple)) else (a,)) if not isinstance(t, DistTensor)]
        if others and any("_spec" in t.__dict__ for t in others if isinstance(t, Tensor)):
            return True
    return False


def _writes_to_meta(name: str, into: Sequence[Any], specs: Any) -> bool:
    """Whether plain tensors are written to that are on the meta device, which raises one by one."""
    return None in specs and name.endswith("_") and any(t.is_meta for t in into if isinstance(t, Tensor))


@lru_cache(maxsize=1024)
def _fits(name: str, specs: tuple[Specs | Spec | None, ...]) -> bool:
    """Whether the lists hold tensors of the same layouts, on whose locals the op means what it says."""
    first, *rest = specs
    assert isinstance(first, tuple)
    if any(s is not None and marks_of(s).copied for listed in specs if isinstance(listed, tuple) for s in listed):
        return False
    for other in rest:
        if isinstance(other, tuple):
            if len(other) != len(first):
                return True  # an error on the locals too
            for a, b in zip(first, other, strict=True):
                same = a is not None and b is not None and a.layout == b.layout
                if not same and not (_whole(a) and _whole(b)):
                    return False
        elif not _whole(other):
            return False
    if any(s is not None and _way(s) is None for s in first):
        return name in LINEAR or (name in SCALING and not any(isinstance(o, tuple) for o in rest))
    return True


def _whole(spec: Spec | None) -> bool:
    return spec is None or spec.layout.is_replicated()


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
            others = [reshard(o, t._spec.layout) if isinstance(o, DistTensor) and o.ndim else o for o in others]
        elif (
            method.endswith("_") and "_spec" not in t.__dict__
        ):  # a plain tensor is the same everywhere: what is written to it must be too
            others = [map_tensors(o, unshard) for o in others]
        if method.startswith("addc") and len(others) == 3:  # a number here, of a list's entries too, has a name there
            named["value"] = others.pop()
        made.append(getattr(t, method)(*others, **named))
    return None if method.endswith("_") else made


# ---------------------------------------------------------------------------------------------- norms


def norms(tensors: Sequence[Tensor], ord: Any = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The norm of each tensor (of its global value), as plain 0-d tensors that are the same on every rank."""
    ord = float(ord)
    tensors = list(tensors)
    if _captured((tensors,)):
        return [torch.linalg.vector_norm(t, ord, dtype=dtype) for t in tensors]
    specs = _specs_of(tensors)
    for i in _copies(specs):
        refresh(tensors[i], call_enabled)
    groups = _groups(specs)
    if groups is None:
        return norms([_reduced(t) if isinstance(t, DistTensor) else t for t in tensors], ord, dtype)
    with torch.no_grad(), disabled():
        made = _local_norms(tensors, ord, dtype)
        for (mesh, axes), members in groups:
            group = collective.group(mesh, axes)
            total = _of_wholes(torch.stack([made[i] for i in members]), ord, group)
            for i, value in zip(members, total.unbind(), strict=True):
                made[i] = value
    return made


@lru_cache(maxsize=1024)
def _copies(specs: Specs) -> list[int]:
    """Which tensors are views that are copies."""
    return [i for i, s in enumerate(specs) if s is not None and marks_of(s).copied]


@lru_cache(maxsize=1024)
def _groups(specs: Specs) -> list[tuple[tuple[Mesh, tuple[int, ...]], list[int]]] | None:
    """Which tensors' parts are combined over which axes; None where one is Partial and must be reduced first."""
    found: dict[tuple[Mesh, tuple[int, ...]], list[int]] = {}
    for i, spec in enumerate(specs):
        way = _way(spec) if spec is not None else ()
        if way is None:
            return None
        if way:
            found.setdefault(way, []).append(i)
    return list(found.items())


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
    return tuple(a for a, p in enumerate(spec.layout.placements) if cuts(p) and sizes[a] > 1)


def _local_norms(tensors: list[Tensor], ord: float, dtype: torch.dtype | None) -> list[Tensor]:
    typed = {} if dtype is None else {"dtype": dtype}
    if 0 <= ord < math.inf:
        return list(torch._foreach_norm(tensors, ord, **typed))
    # An empty shard has no extremum, nor a sum of inverses: the neutral element stands in.
    neutral = math.inf if ord < 0 else 0.0
    apart = [not Tensor.numel(t) and isinstance(t, DistTensor) and t._spec.shape.numel() for t in tensors]
    full = [Tensor.new_full(t, (1,), neutral) if a else t for a, t in zip(apart, tensors, strict=True)]
    return list(torch._foreach_norm(full, ord, **typed))


def _of_wholes(parts: Tensor, ord: float, group: collective.Group) -> Tensor:
    """Norms of parts to norms of wholes, which are summed in single precision at least."""
    return _combined(parts.to(torch.promote_types(parts.dtype, torch.float32)), ord, group).to(parts.dtype)


def _combined(local: Tensor, ord: float, group: collective.Group) -> Tensor:
    if math.isinf(ord):
        return collective.all_reduce(local, "max" if ord > 0 else "min", group)
    if ord in (0, 1):
        return collective.all_reduce(local, "sum", group)
    if ord == 2:
        return collective.all_reduce(local * local, "sum", group).sqrt_()
    return collective.all_reduce(local.pow(ord), "sum", group).pow_(1.0 / ord)


def _gradients(params: Sequence[Any]) -> list[Any]:
    """Of each its ``.grad``: at once, where these lie in their slots as what they are."""
    if _DISTRIBUTED.issuperset(map(type, params)) and not [
        s
        for s in map(_SPACE, params)
        if GRADIENT in s and (s[GRADIENT].held is not None or s[GRADIENT].aside is not None)
    ]:
        with disabled():
            found = list(map(get_grad, params))
        if _READ.issuperset(map(type, found)):
            return found
    return [p.grad for p in params]


_READ, _SPACE = {DistTensor, NoneType}, attrgetter("__dict__")


@lru_cache(maxsize=1024)
def _places(specs: Specs, device: torch.device) -> list[tuple[Mesh, tuple[int, ...], Tensor | None]] | None:
    """Over which axes parts of norms that lie in one vector are combined, and which of them (None: all).

    None where the tensors must be brought otherwise first, or have several dtypes.
    """
    if _copies(specs) or None in specs or len({s.dtype for s in specs if s is not None}) > 1:
        return None
    groups = _groups(specs)
    if groups is None:
        return None
    every = len(specs)
    return [(*way, None if len(of) == every else torch.tensor(of, device=device)) for way, of in groups]


def _clipped(grads: list[Tensor], max_norm: float, ord: float) -> Tensor | None:
    """As PyTorch's own computes and scales, on the parts, with all norms in one vector; None where that cannot be."""
    specs: Specs = tuple(map(_SPEC, grads))
    with torch.no_grad(), disabled():
        devices = set(map(_DEVICE, grads))
        places = _places(specs, *devices) if len(devices) == 1 else None
        if places is None:
            return None
        made = torch.stack(_local_norms(grads, ord, None))
        for mesh, axes, at in places:
            total = _of_wholes(made if at is None else made[at], ord, collective.group(mesh, axes))
            made = total if at is None else made.index_copy_(0, at, total)
        norm = torch.linalg.vector_norm(made, ord)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        mesh = specs[0].mesh  # type: ignore[union-attr]
        collective.check_replicated_inputs("_foreach_mul_", [scale], lambda: collective.group(mesh))
        torch._foreach_mul_(grads, scale)
    if torch.is_inference_mode_enabled():
        count_write(None)
    return norm


_SPEC, _DEVICE = attrgetter("_spec"), cast("Callable[[Tensor], torch.device]", Tensor.device.__get__)


@torch_changes.replace(
    "torch.nn.utils.clip_grad_norm_",
    "torch.nn.utils.clip_grad.clip_grad_norm_",
    why="clipping reads each gradient four times: of DistTensors once",
)
def _reading_once(original: Any, name: str) -> Any:
    """PyTorch's own, which asks parameters for their gradients and nothing else: for what has these."""

    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        if not isinstance(parameters, Tensor):
            listed = list(parameters)
            if not _DISTRIBUTED.isdisjoint(map(type, listed)):
                found = _gradients(listed)
                grads = [g for g in found if g is not None]
                if (
                    grads
                    and foreach is not False
                    and not error_if_nonfinite
                    and _DISTRIBUTED.issuperset(map(type, grads))
                ):
                    norm = _clipped(grads, float(max_norm), float(norm_type))
                    if norm is not None:
                        return norm
                parameters = [SimpleNamespace(grad=g) for g in found]
            elif listed:  # else PyTorch says that a generator gave none
                parameters = listed
        return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    return clip_grad_norm_


# ---------------------------------------------------------------------------------------------- mixed
# precision


def unscale(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """``GradScaler``'s check and unscaling; all ranks agree on whether there is a non-finite value."""
    meshes = dict.fromkeys(t._spec.mesh for t in grads if isinstance(t, DistTensor))
    copies = [grads[i] for i in _copies(_specs_of(grads))]
    for t in copies:
        refresh(t, call_enabled)
    with torch.no_grad(), disabled():
        with as_plain(*grads):
            compat.amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        for mesh in meshes:
            group = collective.group(mesh)
            collective.all_reduce(found_inf, "max", group, out_of_place=False)
        for t in copies:
            write_through(t, call_enabled)


def _register() -> None:
    for name in dir(torch):
        if name.startswith("_foreach_"):
            COMPOSITES[name] = _one_by_one_of(name) if name in APART else _elementwise(name)
    COMPOSITES["_foreach_norm"] = norms
    COMPOSITES["_amp_foreach_non_finite_check_and_unscale_"] = unscale


@torch_changes.install(
    "torch.utils._foreach_utils._foreach_supported_types",
    why="clipping and optimizers would go through DistTensors one by one, with an all-reduce for each norm",
)
def _support_foreach() -> None:
    foreach_utils._foreach_supported_types.extend((DistTensor, OpenTensor))


def _one_by_one_of(name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: _one_by_one(name, args, kwargs)


_register()

__all__ = ["norms", "split_axes", "unscale"]
