"""Calls on distributed tensors, as PyTorch hands them over: the commonest ones run here, the others in ``dispatch``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import collective
from ..collective import OP, op_range, profiler
from ..compat import python_dispatch as torchs
from ..dispatch import (
    ASKED,
    FOREACH_OVERRIDES,
    NO_KWARGS,
    Args,
    Frontend,
    Known,
    Kwargs,
    TensorBounds,
    call,
    call_disabled,
    count_write,
    disabled,
    key_of,
    key_part,
    mesh_of,
    op_name,
    resolve,
    tensors_in,
    with_numbers,
)
from ..ranks import runtime
from . import modes
from .dist_tensor import DistTensor, call_enabled, compute, wrap
from .non_ops import SPECIAL
from .substitutes import with_stand_ins

Tensor = torch.Tensor
is_inference_mode = torch.is_inference_mode_enabled


def claim_plain(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Plain tensors stand for what all ranks have: they are compared, in check mode now."""
    given = tensors_in((args, kwargs))
    plain = [t for t in given if not isinstance(t, DistTensor)]
    if kwargs.get("beta") == 0 and plain and plain[0] is given[0]:  # of torch.addmm and its kind: it is not read
        del plain[0]
    name = resolve(func).name
    collective.check_replicated_inputs(name, plain, lambda: collective.group(mesh_of(given, name)))


EAGER = Frontend(wrap, call_enabled, compute, SPECIAL, with_stand_ins, claim_plain)


PYTORCHS = (RuntimeError, ValueError, IndexError)  # and no error of ours


def fix_of_parts(text: str, tensors: Sequence[Tensor]) -> str:
    """The text of an error, and what to do where a plain tensor is as long as this rank's part of a distributed one;
    empty where none is."""
    if "out of bounds" in text or "out of range" in text:  # of an index, whose length is no clue
        return ""
    with disabled():
        parts = [(t._spec, Tensor.size(t)) for t in tensors if isinstance(t, DistTensor)]
        for t in [t for t in tensors if not isinstance(t, DistTensor)]:
            for spec, part in parts:
                for d, axes in spec.layout.dim_axes().items():
                    if d < t.ndim and t.shape[d] == part[d] != spec.shape[d] and "mw.from_local" not in text:
                        names = ", ".join(f"{spec.mesh.axes[a]!r}: mw.Shard({d})" for a in axes)
                        return (
                            f"{text.rstrip('. ')}. The plain tensor of shape {tuple(t.shape)} is as long as this "
                            f"rank's part of {spec!r}. Plain tensors have global values. Wrap a rank's part: "
                            f"mw.from_local(t, mesh, {{{names}}})."
                        )
    return ""


def dispatch(
    func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, known: Known | None = None
) -> Any:
    """Run a call whose plan has become a function (``RT.fast``), and wrap what it gives; all others are planned.

    ``known``: that function, where who calls has found it.
    """
    if torchs._is_in_non_infra_torch_dispatch_mode:
        made = modes.under(dispatch, func, types, args, kwargs)
        if made is not NotImplemented:
            return made
    if profiler._is_profiler_enabled and OP.func is not func and op_name(func) not in ASKED:
        return op_range(resolve(func).name, dispatch, func, types, args, kwargs, known)
    key: Any = None
    if known is None:
        if args and args[0].__class__ is list and func in FOREACH_OVERRIDES:
            args, kwargs = with_stand_ins(func, args, kwargs or NO_KWARGS) or (args, kwargs)
            return FOREACH_OVERRIDES[func](*args, **kwargs or NO_KWARGS)
        try:
            key = (func, *[a._spec if a.__class__ is DistTensor else key_part(a, func) for a in args])
        except TensorBounds:
            return dispatch(func, types, with_numbers(args), kwargs)
        if kwargs:
            named = [(k, v._spec if v.__class__ is DistTensor else key_part(v, func)) for k, v in kwargs.items()]
            key = (key, *named)
        known = runtime.RT.fast.get(key)
        if known is None:
            try:
                return call(EAGER, key, func, args, kwargs or NO_KWARGS)
            except (RuntimeError, ValueError, IndexError) as error:
                if type(error) in PYTORCHS and (fix := fix_of_parts(str(error), tensors_in((args, kwargs)))):
                    raise type(error)(fix) from error
                raise
    spec, run = known
    if run is None:
        out = call_disabled(func, types, args, kwargs or NO_KWARGS)
    else:
        out = run(args, kwargs or NO_KWARGS)
        if out is NotImplemented:
            return call(EAGER, key or key_of(func, args, kwargs or NO_KWARGS), func, args, kwargs or NO_KWARGS)
    if out.__class__ is not Tensor:  # in place, an op that returned its input, or several tensors
        if is_inference_mode() and isinstance(out, Tensor):
            count_write(out)
        return out
    if out.dtype is not spec.dtype:  # autocast
        spec = spec.with_(dtype=out.dtype)
    out.__class__ = DistTensor
    out._spec = spec  # type: ignore[attr-defined]
    return out


DistTensor.__torch_function__ = staticmethod(dispatch)  # type: ignore[method-assign]
