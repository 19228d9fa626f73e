"""float64 where the user's code asks for float32 by name, as models do for norms, softmax and rotary embeddings.

Else float32 rounds in between, and what follows from rounding (which way Adam goes where a gradient is nearly zero)
could not be told from what is wrong.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..compat import pytree
from ..program.capture.export import LossFn

_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_TENSOR: Any = torch.Tensor  # stubs leave some of its methods out
_FUNCTIONS = {_TENSOR.float: _TENSOR.double, _TENSOR.cfloat: _TENSOR.cdouble}


class Doubled(TorchFunctionMode):
    """Inside, calls that are given float32 as a dtype get float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_wide, (args, kwargs or {}))
        return _FUNCTIONS.get(func, func)(*args, **kwargs)


def _wide(x: Any) -> Any:
    return _WIDE.get(x, x) if isinstance(x, torch.dtype) else x


def doubled(loss_fn: LossFn) -> LossFn:
    """A loss function whose calls are computed in float64."""

    @functools.wraps(loss_fn, updated=())
    def wide(model: Any, batch: Any) -> Any:
        with Doubled():
            return loss_fn(model, batch)

    return wide
