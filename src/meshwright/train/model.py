"""A byte-level GPT in plain PyTorch.  Nothing here knows about meshes: ``plan`` says how it is laid out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .config import VOCABULARY, TrainConfig


class Embedding(nn.Embedding):
    """An embedding that starts small, so that it can double as the head (``--tie``)."""

    def reset_parameters(self) -> None:
        """Normal values of standard deviation 0.02, as in GPT-2 (Radford et al., 2019)."""
        nn.init.normal_(self.weight, std=0.02)


class Head(nn.Linear):
    """Logits from the hidden state; shares the weight of ``tied_to`` if that is given."""

    def __init__(self, hidden: int, vocabulary: int, tied_to: nn.Embedding | None, **where: Any) -> None:
        self.tied = tied_to is not None
        super().__init__(hidden, vocabulary, bias=False, **where)
        if tied_to is not None:
            self.weight = tied_to.weight

    def reset_parameters(self) -> None:
        """A shared weight is the embedding's to set."""
        if not self.tied:
            super().reset_parameters()


class Attention(nn.Module):
    """Causal self-attention.

    One Linear makes queries, keys and values, and its output is read head by head: ``heads, 3, head_dim``.
    Whoever splits its weight by rows then splits whole heads.
    """

    def __init__(self, hidden: int, heads: int, dropout: float, **where: Any) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, **where)
        self.out = nn.Linear(hidden, hidden, **where)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` to the same."""
        made = self.qkv(x)
        batch, seq, width = made.shape
        q, k, v = made.view(batch, seq, self.heads, 3, width // (3 * self.heads)).transpose(1, 2).unbind(3)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.out(y.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """Up to four times the width, GELU, and down again."""

    def __init__(self, hidden: int, dropout: float, **where: Any) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, **where)
        self.down = nn.Linear(4 * hidden, hidden, **where)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` to the same."""
        return self.drop(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    """A pre-norm transformer block (Xiong et al., 2020)."""

    def __init__(self, hidden: int, heads: int, dropout: float, **where: Any) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden, **where)
        self.attention = Attention(hidden, heads, dropout, **where)
        self.norm2 = nn.LayerNorm(hidden, **where)
        self.mlp = MLP(hidden, dropout, **where)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The model of ``meshwright train``.

    Args:
        config: layers, hidden, heads, seq (the longest sequence), dropout, tie, dtype.
        device: where the parameters are made; ``"meta"``: nowhere yet.
    """

    def __init__(self, config: TrainConfig, device: str | torch.device = "cpu") -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": config.torch_dtype}
        self.tokens = Embedding(VOCABULARY, config.hidden, **where)
        self.positions = Embedding(config.seq, config.hidden, **where)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config.hidden, config.heads, config.dropout, **where) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.hidden, **where)
        self.head = Head(config.hidden, VOCABULARY, self.tokens if config.tie else None, **where)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, seq, 256]`` for the byte after each of ``x``: int64 ``[batch, seq]``."""
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        h = self.drop(h)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte over the whole batch."""
    # Every target counts.  A mean inside would first have to count those that are not ignored, on all ranks.
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / y.numel()
