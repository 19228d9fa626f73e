"""Functions that are no ops: questions about the object, autograd's own, and what cannot work."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import torch_changes
from ..dispatch import INTO_PLAIN, Args, FunctionOverride, Kwargs, call_disabled
from ..errors import DispatchError
from ..layout import marked, marks_of
from ..resharding.executor import FORWARD_MODE, TRANSFORMS
from .autograd import backward, grad
from .dist_tensor import DistTensor, call_enabled, is_part, wrap
from .graph_marks import brought
from .storage import READERS, into_plain


@torch_changes.replace(
    "torch._functorch.eager_transforms._wrap_for_grad",
    "torch._functorch.vmap._add_batch_dim",
    "torch._functorch.vmap._remove_batch_dim",
    why="torch.func would transform the part that a rank holds of a DistTensor: refused",
)
def _refuse_transforms(original: Any, name: str) -> Any:
    """torch.func works below ``__torch_function__``: it would silently transform this rank's local tensors."""
    given = name != "_remove_batch_dim"

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, DistTensor) and (given or is_part(a._spec)) for a in args):
            raise DispatchError(TRANSFORMS)
        return original(*args, **kwargs)

    return guarded


def _detach(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return args[0].detach()


def _detach_in_place(func: Any, args: Args, kwargs: Kwargs) -> Any:
    (x,) = args
    if not x.requires_grad and x.is_leaf:  # such as a gradient, which may lie in memory that it shares with others
        return x
    call_disabled(func, (), args, kwargs)
    return wrap(x, marked(x._spec.untyped(), marks_of(x._spec).after_write()))


def _set(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, *source = args
    if kwargs or len(source) != 1 or not isinstance(x, DistTensor) or not isinstance(source[0], Tensor):
        raise DispatchError(
            "set_ of a DistTensor takes one tensor, whose memory it gets: another storage or shape is of "
            "this rank alone; give it to mw.from_local"
        )
    if torch.is_grad_enabled() and (x.requires_grad or source[0].requires_grad):
        raise RuntimeError("derivative for set_ is not implemented")
    x.data = source[0]
    return x


def _no_forward_mode(func: Any, args: Args, kwargs: Kwargs) -> Any:
    raise DispatchError(FORWARD_MODE)


def _by_numbers(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``x[...]`` with integer tensors of no dim, which select as numbers do."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    tensors = [a for a in index if isinstance(a, Tensor)]
    numbers = [a for a in tensors if not a.ndim and a.dtype not in (torch.bool, torch.uint8)]
    if not numbers or any(a.is_floating_point() or a.is_complex() for a in tensors):
        return NotImplemented
    return func(args[0], tuple(int(a) if any(a is n for n in numbers) else a for a in index))


def _constrained(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    x, placements = args
    return brought(x, placements, wrap, call_enabled)


SPECIAL: dict[str, FunctionOverride] = {
    **READERS,
    INTO_PLAIN: into_plain,
    "_make_dual": _no_forward_mode,
    "grad": grad,
    "backward": backward,
    "meshwright::constrain": _constrained,
    "detach": _detach,
    "detach_": _detach_in_place,
    "set_": _set,
    "__getitem__": _by_numbers,
}
