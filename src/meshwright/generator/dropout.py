"""Dropout and its kin: masks that follow from one seed and global indices (:mod:`.counter`)."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..compat import FakeTensor, get_current_function_mode_stack, redispatch_function
from ..ranks import runtime
from . import attention as rows
from . import counter

Tensor = torch.Tensor
Place = tuple[tuple[int, ...], tuple[int, ...]]  # global shape, and where in it the local tensor begins
Kernel = Callable[..., Any]

ALPHA = 1.7580993408473766  # minus the limit of SELU at minus infinity: what alpha dropout sets elements to


def _dropout(at: Place, x: Tensor, p: float, train: bool | None) -> Tensor:
    if train is False or p == 0.0:  # no seed is drawn, as on one device
        return x.view_as(x)
    return counter.dropout(x, counter.draw_seed(), p, *at)


def _native_dropout(at: Place, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0.0:
        return x.view_as(x), torch.ones(x.shape, dtype=torch.bool, device=x.device)
    seed = counter.draw_seed()
    mask = counter.dropout(torch.ones(x.shape, dtype=torch.float32, device=x.device), seed, p, *at) != 0
    return counter.dropout(x, seed, p, *at), mask


def _noise(at: Place, x: Tensor, dims: int) -> tuple[Tensor, Place]:
    """Ones for the first ``dims`` dims of ``x``, broadcast over the others, and where they lie."""
    shape, offset = at
    own = x.new_ones((*x.shape[:dims], *(1,) * (x.ndim - dims)))
    return own, ((*shape[:dims], *(1,) * (x.ndim - dims)), (*offset[:dims], *(0,) * (x.ndim - dims)))


def _feature_dropout(at: Place, x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0.0:
        return x.view_as(x)
    ones, place = _noise(at, x.detach(), 2)
    return x * counter.dropout(ones, counter.draw_seed(), p, *place)


def _alpha_dropout(at: Place, x: Tensor, p: float, train: bool, dims: int | None = None) -> Tensor:
    """Dropped elements become ``-ALPHA``; an affine map then restores mean 0 and variance 1 (Klambauer et
    al., 2017)."""
    if not train or p == 0.0:
        return x.view_as(x)
    ones, place = _noise(at, x.detach(), x.ndim if dims is None else dims)
    kept = (counter.dropout(ones, counter.draw_seed(), p, *place) != 0).to(x.dtype)
    scale = 1.0 / math.sqrt((ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    return x * (kept * scale) + ((kept - 1) * (ALPHA * scale) + ALPHA * scale * p)


def _feature_alpha_dropout(at: Place, x: Tensor, p: float, train: bool) -> Tensor:
    return _alpha_dropout(at, x, p, train, dims=2)


def _rrelu(
    at: Place,
    x: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    if not training:
        return torch.rrelu(x, lower, upper, False)
    slope = counter.uniform(x.detach(), counter.draw_seed(generator), *at) * (upper - lower) + lower
    return torch.where(x <= 0, x * slope, x)


KERNELS: dict[str, Kernel] = {
    "dropout": _dropout,
    "native_dropout": _native_dropout,
    "feature_dropout": _feature_dropout,
    "alpha_dropout": _alpha_dropout,
    "feature_alpha_dropout": _feature_alpha_dropout,
    "rrelu": _rrelu,
}


# ---------------------------------------------------------------------------------------------- attention


def attention(
    at: Place,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    first: int = 0,
) -> Tensor:
    """Attention whose dropout mask follows from global indices; the fused kernels draw their own.

    ``first``: the number of the first row, where rows see keys up to themselves.  Where all scores are many, they are
    computed some rows at a time.
    """
    if enable_gqa and key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    size = (query.shape[-1] or math.nan) ** -0.5 if scale is None else scale
    seed = counter.draw_seed() if dropout_p > 0.0 else None
    call = rows.AttentionCall(at, dropout_p, first if is_causal else None, size)
    run = rows.attend if rows.fits(query, key) else rows.attend_in_rows
    return run(query, key, value, attn_mask, seed, call)


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
    lead = torch.broadcast_shapes(query.shape[:-2], (1,) if named.get("enable_gqa") else key.shape[:-2])
    shape = (*lead, query.shape[-2], key.shape[-2])
    return attention((shape, (0,) * len(shape)), query, key, value, *rest, **named)


# ---------------------------------------------------------------------------------------------- plain tensors

_RUNS_USERS_CODE = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class _Reproducible(TorchFunctionMode):
    """Runs the dropout ops of plain tensors with the masks that distributed tensors get."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if getattr(func, "__module__", None) == "torch.nn.functional" or func in _RUNS_USERS_CODE:
            # The body of a Python function: the dropout inside it is still ours, and that of a checkpoint's second run.
            with self:
                return redispatch_function(func, types, args, kwargs)
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        kernel = KERNELS.get(name.removesuffix("_"))
        drops = name == "scaled_dot_product_attention" and (args[4:5] or [kwargs.get("dropout_p", 0.0)])[0] > 0.0
        if x is None or hasattr(x, "_spec") or not (kernel or drops) or isinstance(x, FakeTensor):
            return func(*args, **kwargs)  # a fake's place in the global tensor is known to who captures it
        drawn = runtime.RT.drawn
        try:
            if kernel is None:
                return _plain_attention(*args, **kwargs)
            kwargs.pop("input", None)
            made = kernel((tuple(x.shape), (0,) * x.ndim), x, *args[1:], **kwargs)
        finally:
            runtime.RT.drawn = drawn  # a rank may do so alone
        return x.copy_(made) if name.endswith("_") else made


@functools.cache
def _uncompiled() -> type[_Reproducible]:
    """The mode where torch.compile may be in use, which is to leave alone what it does."""
    left = {"__torch_function__": torch.compiler.disable(_Reproducible.__torch_function__)}
    return type("_Uncompiled", (_Reproducible,), left)


def run_alike(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, which a checkpoint will run again: then as it runs now."""
    if not any(isinstance(m, _Reproducible) for m in get_current_function_mode_stack()):
        return fn

    def run(*args: Any, **kwargs: Any) -> Any:
        with reproducible_random():
            return fn(*args, **kwargs)

    return run


@contextmanager
def reproducible_random() -> Iterator[None]:
    """Make dropout of plain tensors draw the masks that DistTensors draw from the same seed.

    A run on one device then equals a distributed run on any mesh.

    Examples:
        ```python
        x = torch.ones(100)
        torch.manual_seed(0)
        with mw.reproducible_random():
            one = F.dropout(x, 0.5)
        mesh = mw.Mesh({"dp": 2})


        def dropped():
            torch.manual_seed(0)
            return mw.unshard(F.dropout(mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)}), 0.5))


        assert torch.equal(mw.simulate(dropped, mesh)[0], one)
        ```
    """
    with (_uncompiled() if "torch._dynamo" in sys.modules else _Reproducible)():
        yield
