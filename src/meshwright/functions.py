"""``torch.autograd.Function`` of a user on distributed tensors.

``Function.apply`` does not ask its arguments who they are: the user's forward would see distributed tensors, autograd
local ones, and the gradient of a replicated input of rank-dependent work would not be summed, without a word.  So it
is treated as every op without a rule: its inputs are gathered, it runs on every rank on plain tensors, and a warning
names it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from .dispatch import disabled, map_tensors, mesh_of, tensors_in
from .layout import Layout, Replicate, Spec
from .tensor import DistTensor, stamp, whole

_apply: Any = torch.autograd.Function.__dict__["apply"].__func__
_enabled = torch._C._is_torch_function_enabled
_warned: set[str] = set()


def _is_dist(a: Any) -> bool:
    return isinstance(a, DistTensor)


def _guarded(cls: Any, *args: Any, **kwargs: Any) -> Any:
    # With dispatch disabled the caller works on locals: conversions do.
    if _enabled() and any(map(_is_dist, args)) and cls is not CheckpointFunction:
        return _gathered(cls, args)
    return _apply(cls, *args, **kwargs)


def _gathered(cls: Any, args: tuple[Any, ...]) -> Any:
    tensors = tensors_in(args)
    mesh = mesh_of(tensors, cls.__name__)
    split = any(not isinstance(p, Replicate) for t in tensors if isinstance(t, DistTensor) for p in t.placements)
    if split and cls.__name__ not in _warned:
        _warned.add(cls.__name__)
        warnings.warn(
            f"the autograd.Function {cls.__name__} is run on every rank on gathered inputs; to divide its work make it "
            'a custom op (torch.library.custom_op) with a rule: @mw.rule("lib::op")',
            stacklevel=3,
        )
    made = _apply(cls, *map_tensors(args, lambda t: whole(t) if isinstance(t, DistTensor) else t))
    everywhere = (1 << mesh.ndim) - 1
    with disabled():
        for t in tensors_in(made):
            if type(t) is torch.Tensor:
                stamp(t, Spec(t.shape, t.dtype, Layout(mesh), undecided=0 if t.requires_grad else everywhere))
    return made


def install() -> None:
    """Guard ``Function.apply``; plain tensors pass through."""
    torch.autograd.Function.apply = classmethod(_guarded)  # type: ignore[assignment,method-assign]


install()
