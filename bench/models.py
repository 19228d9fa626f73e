"""The model of the benchmarks of whole steps: a GPT with learned positions, and the loss in its forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .tensor_parallel import BlockBase

VOCABULARY = 4096


class GPTBlock(BlockBase):
    """Pre-norm.  The rows of ``qkv`` are grouped by head, so that a part of them is whole heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.o = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` to the same."""
        batch, seq, _ = x.shape
        made = self.qkv(self.enter(self.ln1(x)))
        made = made.view(batch, seq, made.shape[-1] // (3 * self.head_dim), 3, self.head_dim)
        q, k, v = (t.squeeze(3).transpose(1, 2) for t in made.split(1, 3))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.leave(self.o, attended.transpose(1, 2).reshape(batch, seq, -1))
        return x + self.leave(self.down, F.gelu(self.up(self.enter(self.ln2(x)))))


class SmallGPT(nn.Module):
    """``forward(ids, targets)`` gives the mean loss."""

    def __init__(self, layers: int, hidden: int, heads: int, seq: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(GPTBlock(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        self.register_buffer("positions", torch.arange(seq), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """``[batch, seq]`` each, to a number."""
        x = self.tokens(ids) + self.places(self.positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


Make = Callable[[], SmallGPT]
Batch = tuple[Tensor, Tensor]


def maker(
    layers: int = 4, hidden: int = 256, heads: int = 4, seq: int = 128, vocabulary: int = VOCABULARY, seed: int = 0
) -> Make:
    """A function that makes the model, with the same weights each time."""

    def make() -> SmallGPT:
        torch.manual_seed(seed)
        return SmallGPT(layers, hidden, heads, seq, vocabulary)

    return make


def batches(count: int, size: int, seq: int, vocabulary: int = VOCABULARY, seed: int = 0) -> list[Batch]:
    """Micro-batches, the same on all ranks: contenders of every kind then compute the same numbers."""
    rng = torch.Generator().manual_seed(seed + 1)

    def ids() -> Tensor:
        return torch.randint(0, vocabulary, (size, seq), generator=rng)

    return [(ids(), ids()) for _ in range(count)]
