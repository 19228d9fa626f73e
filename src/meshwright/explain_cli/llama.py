"""A Llama-shaped model in plain PyTorch, and the few words that lay it on a mesh.

RMSNorm before each part, rotary positions, a gated MLP, no biases (Touvron et al., 2023).  It is there to be looked at:
on the meta device it takes no memory, whatever its size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.program import Plan


class Rotary(nn.Module):
    """Turns pairs of features by an angle that grows with the position (Su et al., 2021)."""

    def __init__(self, width: int, seq: int, base: float = 10000.0) -> None:
        super().__init__()
        speeds = base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles = torch.outer(torch.arange(seq, dtype=torch.float32), speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, heads, seq, width]`` to the same."""
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cos.to(x.dtype) + turned * self.sin.to(x.dtype)  # type: ignore[operator]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """``[batch, seq, hidden]`` to the same."""
        q, k, v = (
            made.unflatten(2, (self.heads, -1)).transpose(1, 2) for made in (self.query(x), self.key(x), self.value(x))
        )
        y = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Up, gated by SiLU (Shazeer, 2020), and down again."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` to the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention and MLP, each on what was normed and added to what came in."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm2 = nn.RMSNorm(hidden)
        self.mlp = MLP(hidden, inner)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """``[batch, seq, hidden]`` to the same."""
        x = x + self.attention(self.norm1(x), rotary)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """The model.

    Args:
        layers, hidden, heads: as usual; ``inner``: width of the MLP; ``vocabulary``: number of tokens.
        seq: the longest sequence.
    """

    def __init__(self, layers: int, hidden: int, heads: int, inner: int, vocabulary: int, seq: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.rotary = Rotary(hidden // heads, seq)
        self.layers = nn.ModuleList(Layer(hidden, heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits for the token after each of ``ids``."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, self.rotary)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy."""
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum") / targets.numel()


def plan_for(mesh: mw.Mesh, *, sequence_parallel: bool = False, **more: Any) -> Plan:
    """What must be said: the batch, the second weight of each pair, and the vocabulary.  All else follows."""
    batch = {"dp": mw.Shard(0)} if "dp" in mesh.axes else {}
    if "tp" not in mesh.axes:
        return Plan(batch=batch, **more)
    rows, columns = {"tp": mw.Shard(1)}, {"tp": mw.Shard(0)}
    layouts = {
        "*.attention.out.weight": rows, "*.mlp.down.weight": rows, "tokens.weight": columns, "head.weight": columns,
    }  # fmt: skip
    if not sequence_parallel:
        return Plan(layouts=layouts, batch=batch, **more)
    split, whole = {"tp": mw.Shard(1)}, {"tp": mw.Replicate()}
    outputs = dict.fromkeys(("tokens", "*.attention.out", "*.mlp.down"), split)
    inputs = dict.fromkeys(("*.norm1", "*.norm2", "norm"), split)
    return Plan(
        layouts=layouts, batch=batch, outputs={**outputs, **dict.fromkeys(("*.norm1", "*.norm2", "norm"), whole)},
        inputs=inputs, **more,
    )  # fmt: skip
