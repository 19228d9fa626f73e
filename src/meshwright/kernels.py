"""Kernels of PyTorch that are called past the function that guards them, each with that guard.

A public function of PyTorch checks what its kernel takes for granted, and picks another kernel or makes a copy where
that does not hold.  A kernel called directly reads memory as if it held.  So such a kernel is called through a function
of this module, and nowhere else; ``tests/project/test_kernels.py`` finds others.

| kernel | what its public function checks | here |
|---|---|---|
| all kernels of attention | last dim of query, key and value (and of the result) has stride 1 | copied |
| flash, memory-efficient and cuDNN attention | rows begin at a multiple of 16 bytes | copied |
| flash, cuDNN, memory-efficient and CPU attention | head sizes: equal, or a multiple of 8 | padded with zeros |
| memory-efficient and cuDNN attention | as many heads of keys as of queries | heads repeated, gradients added |
| memory-efficient attention, backward | the result lies as (sequences, rows, heads, elements) | copied |
| all kernels of attention | four dims, one dtype, device, no empty sequence | ``rules/attention_kernels.py`` |

Each pair of functions has one signature.  Forward: query, key and value of (sequences, heads, rows, elements), whether
row i of n sees the keys up to its place counted from the last, how many keys at most (0: all), and the scale; it gives
the result, and for each row the log of its sum of exp(scores), (sequences, heads, rows).  Backward: the gradient, then
these, the result and the logs of the sums, which may be those of more keys.

The others that the package calls need no guard: ``_foreach_*``, ``_to_copy``, ``silu_backward`` and ``gelu_backward``
take any strides, and fused updates of captured programs get tensors that lie side by side (``capture/update.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Grads = tuple[Tensor, Tensor, Tensor]
_ATEN: Any = torch.ops.aten
_MULTIPLE = 8  # elements: head sizes and rows of GPU kernels are aligned to as many
_LOG_ROWS = 32  # memory-efficient attention keeps logs of sums for a multiple of as many rows


# ---------------------------------------------------------------------------------------------- the CPU


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Run PyTorch's fused attention of the CPU; causal where there are as many rows as keys."""
    size = max(query.shape[-1], value.shape[-1])
    tensors = [_row_major(_padded(t, size)) for t in (query, key, value)]
    result, logs = _ATEN._scaled_dot_product_flash_attention_for_cpu.default(*tensors, 0.0, causal, scale=scale)
    return result[..., : value.shape[-1]], logs


def flash_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, logs: Tensor, causal: bool, window: int,
    scale: float,
) -> Grads:  # fmt: skip
    """Run the backward of :func:`flash_attention`."""
    size = max(query.shape[-1], value.shape[-1])
    tensors = [_row_major(_padded(t, size)) for t in (grad, query, key, value, result)]
    grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default(*tensors, logs, 0.0, causal, scale=scale)
    return _cut(grads, query, value)


# ---------------------------------------------------------------------------------------------- flash attention


def cuda_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Run flash attention on a GPU; it counts places from the last key, takes windows, and grouped heads."""
    tensors = _flash_form(query, key, value, size=_flash_size(query, value))
    sizes = query.shape[2], key.shape[2]
    result, logs, *_ = _ATEN._flash_attention_forward.default(
        *tensors, None, None, *sizes, 0.0, causal, False, scale=scale, **_reach(causal, window)
    )
    return result.transpose(1, 2)[..., : value.shape[-1]], logs


def cuda_flash_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, logs: Tensor, causal: bool, window: int,
    scale: float,
) -> Grads:  # fmt: skip
    """Run the backward of :func:`cuda_flash_attention`, which reads logs of sums as they follow in memory."""
    g, q, k, v, made = _flash_form(grad, query, key, value, result, size=_flash_size(query, value))
    sizes = query.shape[2], key.shape[2]
    grads = _ATEN._flash_attention_backward.default(
        g.contiguous(), q, k, v, made.contiguous(), logs.contiguous(), None, None, *sizes, 0.0, causal,
        *_no_dropout(query, torch.uint64), scale=scale, **_reach(causal, window),
    )  # fmt: skip
    return _cut([t.transpose(1, 2) for t in grads], query, value)


def cuda_flash_attention_packed(
    query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int, int], causal: bool,
    window: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run flash attention on runs of rows, (rows, heads, elements), each with a range of keys.

    Args:
        query: (rows, heads, elements).
        key: (keys, heads, elements), or fewer heads.
        value: As the key.
        ends: of the runs, in int32, with a leading 0: in rows, and in keys.
        longest: run, in rows, and in keys.
        causal: Rows see keys up to their place, counted from the last of their run.
        window: How many keys at most; 0: all.
        scale: Of the scores.

    Returns:
        The result, and for each row the log of its sum, (heads, rows).
    """
    size = _flash_size(query, value)
    tensors = [_aligned(_padded(t, size)) for t in (query, key, value)]
    result, logs, *_ = _ATEN._flash_attention_forward.default(
        *tensors, *ends, *longest, 0.0, causal, False, scale=scale, **_reach(causal, window)
    )
    return result[..., : value.shape[-1]], logs


def cuda_flash_attention_packed_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, logs: Tensor,
    ends: tuple[Tensor, Tensor], longest: tuple[int, int], causal: bool, window: int, scale: float,
) -> Grads:  # fmt: skip
    """Run the backward of :func:`cuda_flash_attention_packed`."""
    size = _flash_size(query, value)
    g, q, k, v, made = (_aligned(_padded(t, size)) for t in (grad, query, key, value, result))
    grads = _ATEN._flash_attention_backward.default(
        g.contiguous(), q, k, v, made.contiguous(), logs.contiguous(), *ends, *longest, 0.0, causal,
        *_no_dropout(query, torch.uint64), scale=scale, **_reach(causal, window),
    )  # fmt: skip
    return _cut(grads, query, value)


def _flash_form(*tensors: Tensor, size: int) -> list[Tensor]:
    """As flash attention wants them: (sequences, rows, heads, elements), of one head size."""
    return [_aligned(_padded(t, size).transpose(1, 2)) for t in tensors]


def _flash_size(query: Tensor, value: Tensor) -> int:
    return _rounded(max(query.shape[-1], value.shape[-1]), _MULTIPLE)


def _reach(causal: bool, window: int) -> dict[str, int | None]:
    """How many keys to the left and to the right of its place a row sees."""
    return {"window_size_left": window - 1 if window else None, "window_size_right": 0 if window and causal else None}


# ---------------------------------------------------------------------------------------------- cuDNN


def cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Run cuDNN's attention; causal where there are as many rows as keys."""
    tensors = _grouped_form(query, key, value)
    result, logs, *_ = _ATEN._scaled_dot_product_cudnn_attention.default(
        *tensors, None, True, 0.0, causal, False, scale=scale
    )
    return result[..., : value.shape[-1]], logs.reshape(query.shape[:-1])  # (sequences, heads, rows, 1)


def cudnn_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, logs: Tensor, causal: bool, window: int,
    scale: float,
) -> Grads:  # fmt: skip
    """Run the backward of :func:`cudnn_attention`."""
    tensors = _grouped_form(query, key, value)
    g, made = (_aligned(_padded(t, tensors[2].shape[-1])).contiguous() for t in (grad, result))
    seed, offset = _no_dropout(query)
    grads = _ATEN._scaled_dot_product_cudnn_attention_backward.default(
        g, *tensors, made, logs.contiguous().unsqueeze(-1), seed, offset, None, None, None, query.shape[2],
        key.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
    return _cut(_summed_heads(grads, key), query, value)


# ---------------------------------------------------------------------------------------------- memory-efficient


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Run memory-efficient attention; causal where there are as many rows as keys."""
    tensors = _grouped_form(query, key, value)
    result, logs, *_ = _ATEN._scaled_dot_product_efficient_attention.default(
        *tensors, None, True, 0.0, causal, scale=scale
    )
    return result[..., : value.shape[-1]], logs[..., : query.shape[2]]


def efficient_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, logs: Tensor, causal: bool, window: int,
    scale: float,
) -> Grads:  # fmt: skip
    """Run the backward of :func:`efficient_attention`.

    Logs of sums are filled up with infinity, as the forward fills them: rows behind the last weigh exp(-inf).
    In half precision the kernel takes it for granted that heads of one row of the result follow each other.
    """
    tensors = _grouped_form(query, key, value)
    g, made = (_padded(t, tensors[2].shape[-1]).transpose(1, 2).contiguous().transpose(1, 2) for t in (grad, result))
    rows = query.shape[2]
    filled = F.pad(logs, (0, _rounded(rows, _LOG_ROWS) - rows), value=math.inf).contiguous()
    seed, offset = _no_dropout(query)
    *grads, _ = _ATEN._scaled_dot_product_efficient_attention_backward.default(
        g, *tensors, None, made, filled, seed, offset, 0.0, [True, True, True, False], causal, scale=scale
    )
    return _cut(_summed_heads(grads, key), query, value)


def _grouped_form(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Heads of keys and values repeated for each head of the query; head sizes of a multiple of 8."""
    serves = query.shape[1] // key.shape[1]
    heads = [query, *(t if serves == 1 else t.repeat_interleave(serves, 1) for t in (key, value))]
    return [_aligned(_padded(t, _rounded(t.shape[-1], _MULTIPLE))) for t in heads]


def _summed_heads(grads: Sequence[Tensor], key: Tensor) -> list[Tensor]:
    """The transpose of the repetition of heads, which is added up in float32 at least."""
    query, *others = grads
    serves = query.shape[1] // key.shape[1]
    if serves == 1:
        return [query, *others]
    wide = torch.promote_types(query.dtype, torch.float32)
    return [query, *(t.unflatten(1, (-1, serves)).sum(2, dtype=wide).to(t.dtype) for t in others)]


# ---------------------------------------------------------------------------------------------- guards


def _cut(grads: Sequence[Tensor], query: Tensor, value: Tensor) -> Grads:
    """Gradients without the zeros that filled up head sizes."""
    sizes = (query.shape[-1], query.shape[-1], value.shape[-1])
    q, k, v = (g[..., :size] for g, size in zip(grads, sizes, strict=True))
    return q, k, v


def _padded(t: Tensor, size: int) -> Tensor:
    """``t``, or with zeros behind its elements: they add nothing to a score, and give nothing to a result."""
    return t if t.shape[-1] == size else F.pad(t, (0, size - t.shape[-1]))


def _row_major(t: Tensor) -> Tensor:
    """``t``, or a copy whose last dim is contiguous: kernels never look at the stride of that one."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _aligned(t: Tensor) -> Tensor:
    """``t``, or a copy whose last dim is contiguous and whose rows begin at a multiple of 16 bytes.

    A dim that is expanded has a stride of 0, which aligns.
    """
    starts = [t.storage_offset(), *(step for step, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1)]
    aligned = t.stride(-1) == 1 and not any(n % _MULTIPLE for n in starts)
    return t if aligned else t.clone(memory_format=torch.contiguous_format)


def _rounded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _no_dropout(like: Tensor, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """The two states of a random generator that backwards without dropout take and do not read."""
    return torch.zeros(2, dtype=dtype, device=like.device), torch.zeros((), dtype=dtype, device=like.device)


__all__ = [
    *("flash_attention", "flash_attention_backward", "cuda_flash_attention", "cuda_flash_attention_backward"),
    *("cuda_flash_attention_packed", "cuda_flash_attention_packed_backward"),
    *("cudnn_attention", "cudnn_attention_backward", "efficient_attention", "efficient_attention_backward"),
]
