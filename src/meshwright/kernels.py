"""Kernels of PyTorch that are called past the function that guards them, each with that guard.

A public function of PyTorch checks what its kernel takes for granted, and picks another kernel or makes a copy where
that does not hold.  A kernel called directly reads memory as if it held.  So such a kernel is called through a function
of this module, and nowhere else; ``tests/project/test_kernels.py`` finds others.

| kernel | what its public function checks | here |
|---|---|---|
| flash attention of the CPU | last dim of query, key and value (and of the result) has stride 1 | copied |
| flash attention of the CPU | four dims, one dtype, equal head dims, no empty sequence | asked by its callers |

The others that the package calls need no guard: ``_foreach_*``, ``_to_copy``, ``silu_backward`` and ``gelu_backward``
take any strides, and fused updates of captured programs get tensors that lie side by side (``capture/update.py``).
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, *, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Run PyTorch's fused attention of the CPU: the result, and each row's log of its sum of exp(scores)."""
    made: tuple[Tensor, Tensor] = _FORWARD(*map(_with_rows, (query, key, value)), dropout_p, is_causal, scale=scale)
    return made


def flash_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, sums: Tensor, dropout_p: float,
    is_causal: bool, *, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the backward of :func:`flash_attention`: the gradients of query, key and value."""
    tensors = map(_with_rows, (grad, query, key, value, result))
    grads: tuple[Tensor, Tensor, Tensor] = _BACKWARD(*tensors, sums, dropout_p, is_causal, scale=scale)
    return grads


def _with_rows(t: Tensor) -> Tensor:
    """``t``, or a copy whose last dim is contiguous: the kernel never looks at the stride of that one."""
    return t if t.stride(-1) == 1 else t.contiguous()


__all__ = ["flash_attention", "flash_attention_backward"]
