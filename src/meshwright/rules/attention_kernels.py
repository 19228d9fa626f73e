"""Which kernel computes a block of attention: one table of what each takes, and PyTorch's own ops for the rest.

Conditions are those under which PyTorch calls the kernel (``can_use_flash_attention`` and its kin), but for what
:mod:`..kernels` makes fit by itself: strides, head sizes, heads of keys that serve several of the query.  Kernels give
the log of each row's sum of exp(scores), and their backwards take it merged; so one may be of another kernel than the
other, and nothing that is sent depends on which one runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import kernels
from ..layout import dtype_name

Tensor = torch.Tensor
HALF = (torch.float16, torch.bfloat16)
MOST_SCORES = 1 << 24  # of a block in PyTorch's own ops, over all sequences and heads: 64 MiB in float32
_MOST_KEYS = 1024  # of such a block
_MOST_GRID = 65535  # sequences, and heads, of a GPU kernel: how large the second and third dim of a grid may be


class HeadSizes(NamedTuple):
    """What the choice of a kernel depends on; of one call, or of a node of a program."""

    device: str
    dtype: torch.dtype
    sequences: int
    heads: int
    size: int
    value_size: int


@dataclass(frozen=True)
class Kernel:
    """One kernel of attention: what it takes, and how it is called.

    Attributes:
        name: for people.
        device: the type of device that it runs on.
        dtypes: of query, key and value.
        head_size: the largest that it takes, of keys and of values; None: any.
        enabled: whether the user lets PyTorch choose it (``torch.nn.attention.sdpa_kernel``).
        at_end: it counts places from the last key, and takes windows: rows that follow each other are one call.
        deterministic: equal inputs give equal gradients.
        masked: it takes masks, which blocks that are merged have none of.
        fewest_keys: of one call.
        capability: of the GPU, from and to.
        refused_sizes: head sizes that the backward refuses, from and to, with the GPUs of which that holds.
        forward, backward: functions of :mod:`..kernels`.
        packed, packed_backward: the same of many runs of rows in one call, or None.
    """

    name: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    head_size: int | None
    enabled: Callable[[], bool]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    at_end: bool = False
    masked: bool = False
    deterministic: bool = True
    fewest_keys: int = 1
    capability: tuple[tuple[int, int], tuple[int, int]] = ((5, 0), (12, 1))
    refused_sizes: tuple[tuple[int, int], tuple[tuple[int, int], ...]] | None = None
    packed: Callable[..., tuple[Tensor, Tensor]] | None = None
    packed_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None

    def refusals(self, given: HeadSizes) -> Iterator[str]:
        """Why it does not take these, in words."""
        if given.dtype not in self.dtypes:
            yield f"takes {', '.join(map(dtype_name, self.dtypes))}, not {dtype_name(given.dtype)}"
        if not self.enabled():
            yield "is switched off"
        size = max(given.size, given.value_size)
        if self.head_size is not None and size > self.head_size:
            yield f"takes at most {self.head_size} elements per head, not {size}"
        if self.device == "cuda":
            yield from self._gpu_refusals(given, size)

    def _gpu_refusals(self, given: HeadSizes, size: int) -> Iterator[str]:
        has, (least, most) = capability(), self.capability
        if torch.version.hip:
            yield "was not tried on ROCm"
        if not least <= has <= most:
            yield f"runs on GPUs of capability {_dotted(least)} to {_dotted(most)}, not {_dotted(has)}"
        if has < (8, 0) and given.dtype == torch.bfloat16:
            yield "takes bfloat16 on GPUs of capability 8.0 and later"
        if self.refused_sizes is not None and has in self.refused_sizes[1]:
            first, last = self.refused_sizes[0]
            if first <= size <= last:
                yield f"has no backward for {size} elements per head on GPUs of capability {_dotted(has)}"
        if max(given.sequences, given.heads) > _MOST_GRID:
            yield f"takes at most {_MOST_GRID} sequences and heads"
        if not self.deterministic and torch.are_deterministic_algorithms_enabled():
            yield "is not deterministic"


def capability() -> tuple[int, int]:
    """Of this rank's GPU; where a step is captured without one, of the oldest that takes all kernels."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


# ---------------------------------------------------------------------------------------------- PyTorch's own ops


def _plain(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, causal, scale)
    logs = scores.logsumexp(-1)
    result = (scores - logs.unsqueeze(-1)).exp_() @ value.to(scores.dtype).unsqueeze(2)
    return result.flatten(1, 2), logs.flatten(1, 2)


def _plain_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, logs: Tensor, causal: bool, window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scores = _scores(query, key, causal, scale)
    groups = scores.shape[1:3]
    q, k, v = _wide(query, groups), key.to(scores.dtype).unsqueeze(2), value.to(scores.dtype).unsqueeze(2)
    g, made, sums = (_wide(t, groups) for t in (grad, result, logs))
    weights = (scores - sums.unsqueeze(-1)).exp_()
    of_scores = (g @ v.transpose(-1, -2) - (g * made).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
    of_key = (of_scores.transpose(-1, -2) @ q).sum(2)
    return (of_scores @ k).flatten(1, 2), of_key, (weights.transpose(-1, -2) @ g).sum(2)


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    """Of (sequences, heads of keys, heads that each serves, rows, keys), in float32 at least."""
    groups = (key.shape[1], query.shape[1] // key.shape[1])
    q = _wide(query, groups) * scale
    scores: Tensor = q @ key.to(q.dtype).transpose(-1, -2).unsqueeze(2)
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return scores


def _wide(t: Tensor, groups: Any) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32)).unflatten(1, tuple(groups))


# ---------------------------------------------------------------------------------------------- the table

_CUDA: Any = torch.backends.cuda
CPU = Kernel(
    "flash attention of the CPU", "cpu", (torch.float64, torch.float32, *HALF), None, _CUDA.flash_sdp_enabled,
    kernels.flash_attention, kernels.flash_attention_backward, masked=True,
)  # fmt: skip
FLASH = Kernel(
    "flash attention", "cuda", HALF, 256, _CUDA.flash_sdp_enabled,
    kernels.cuda_flash_attention, kernels.cuda_flash_attention_backward, at_end=True, capability=((8, 0), (12, 1)),
    refused_sizes=((193, 224), ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))),
    packed=kernels.cuda_flash_attention_packed, packed_backward=kernels.cuda_flash_attention_packed_backward,
)  # fmt: skip
CUDNN = Kernel(
    "cuDNN attention", "cuda", HALF, 128, _CUDA.cudnn_sdp_enabled, kernels.cudnn_attention,
    kernels.cudnn_attention_backward, deterministic=False, fewest_keys=2, capability=((8, 0), (12, 1)),
)  # fmt: skip
EFFICIENT = Kernel(
    "memory-efficient attention", "cuda", (torch.float32, *HALF), None, _CUDA.mem_efficient_sdp_enabled,
    kernels.efficient_attention, kernels.efficient_attention_backward, masked=True,
)  # fmt: skip
PLAIN = Kernel("PyTorch's own ops", "", (), None, lambda: True, _plain, _plain_backward)
TABLE = [CPU, FLASH, CUDNN, EFFICIENT]


class KernelChoice(NamedTuple):
    """The kernel that is taken, and why others are not."""

    kernel: Kernel
    refused: tuple[str, ...]

    def __str__(self) -> str:
        name = self.kernel.name
        if self.kernel is PLAIN:
            name = f"{name}, in blocks of at most {MOST_SCORES} scores"
        return f"{name}{''.join(f'; {why}' for why in self.refused)}"


def choose(given: HeadSizes) -> KernelChoice:
    """The first kernel of the table that takes these; else PyTorch's own ops."""
    refused: list[str] = []
    for kernel in TABLE:
        if kernel.device != given.device:
            continue
        why = ", ".join(kernel.refusals(given))
        if not why:
            return KernelChoice(kernel, tuple(refused))
        refused.append(f"{kernel.name} {why}")
    return KernelChoice(PLAIN, tuple(refused) or (f"no kernel of {given.device} gives the sums of its rows",))


def told(query: Sequence[int], keys: int, given: HeadSizes) -> str:
    """A call and its kernel, for ``explain``."""
    shown = f"attention of {list(query)} by {keys} keys in {dtype_name(given.dtype)}"
    return f"{shown} on {given.device}: {choose(given)}"


def shapes_of(query: Tensor, value: Tensor) -> HeadSizes:
    """Of a call with tensors of four dims."""
    b, h, _, size = query.shape
    return HeadSizes(query.device.type, query.dtype, b, h, size, value.shape[3])


def block_sizes(sequences: int, heads: int) -> tuple[int, int]:
    """How many rows and keys of a block have at most ``MOST_SCORES`` scores."""
    most = max(MOST_SCORES // max(sequences * heads, 1), 1)
    keys = min(_MOST_KEYS, max(math.isqrt(most), 1))
    return max(most // keys, 1), keys


__all__ = ["PLAIN", "TABLE", "HeadSizes", "Kernel", "KernelChoice", "block_sizes", "choose", "shapes_of", "told"]
