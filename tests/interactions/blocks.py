"""Blocks of a model: from activations of (rows, positions, WIDTH) and token ids to activations of that shape.

What a user writes with functions of the package has a plain form beside it, which one device runs (``plain``).
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.parametrizations import weight_norm

import meshwright as mw

WIDTH, HEADS, TOKENS, LONGEST = 4, 2, 11, 8


class Block(nn.Module):
    plain = False

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        raise NotImplementedError


class Linear(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.up(x).tanh()


class Mlp(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(Block):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.down = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return self.down(mixed.transpose(1, 2).flatten(2))


class HeadsInnermost(Attention):
    """Queries, keys and values whose last dim is not the innermost one in memory, as einsum makes them."""

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.unflatten(-1, (-1, HEADS)).permute(0, 3, 1, 2) for t in self.qkv(x).chunk(3, -1))


class Rotary(Attention):
    """Tables of angles that the constructor computes, in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(LONGEST)[:, None] * torch.full((1, WIDTH // HEADS), 0.3).cumsum(-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().heads(x)
        cos, sin = (table[: x.shape[1]].to(x.dtype) for table in (self.cos, self.sin))
        return *(h * cos + torch.stack([-h[..., 1], h[..., 0]], -1) * sin for h in (q, k)), v


class Documents(Attention):
    """Packed documents: the ids of tokens say where they begin, alike in all rows."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        documents = torch.arange(x.shape[1]) // 3
        if self.plain:
            mask = (documents[:, None] == documents) & torch.ones(2 * x.shape[1:2], dtype=torch.bool).tril()
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            mixed = mw.attention(q, k, v, document_ids=documents)
        return self.down(mixed.transpose(1, 2).flatten(2))


class Conv(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.up(x.mT).tanh().mT


class BatchNorm(Block):
    """Without a bias before the norm: its gradient is rounding alone, which Adam divides by its own size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.norm(self.up(x).mT).mT


class LayerNorm(Block):
    """A norm whose scale has a leading dim of size one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.norm(self.up(x)) * self.scale


class Position(Block):
    def __init__(self) -> None:
        super().__init__()
        self.position, self.up = nn.Parameter(torch.zeros(1, LONGEST, WIDTH)), nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.position, std=0.5)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.up(x + self.position[:, : x.shape[1]]).tanh()


class Embedding(Block):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.up(x + self.table(ids)).tanh()


class Experts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.gate_up, self.down = nn.Parameter(torch.zeros(4, 4, WIDTH)), nn.Parameter(torch.zeros(4, WIDTH, 2))
        nn.init.normal_(self.gate_up)
        nn.init.normal_(self.down)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        if not self.plain:
            return mw.experts(x, chosen, weights, self.gate_up, self.down)
        gate, up = torch.einsum("btc,emc->btem", x, self.gate_up).chunk(2, -1)
        each = torch.einsum("btem,ecm->btec", F.silu(gate) * up, self.down)
        return (each.gather(2, chosen[..., None].expand(*chosen.shape, WIDTH)) * weights[..., None]).sum(2)


class Recurrent(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        made: Tensor = self.gru(x)[0]
        return made


class Tied(Block):
    """A weight that two modules of the block have; the model ties it to its first layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class LayerScale(Block):
    """A vector and a number that scale what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.scale, self.gain = nn.Parameter(torch.full((WIDTH,), 0.5)), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.scale * self.down(self.up(x).relu()) * self.gain


class Lora(Block):
    """A frozen weight and a factored one, which the constructor initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.up.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.empty(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))
        nn.init.normal_(self.a)
        nn.init.constant_(self.b, 0.1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return (self.up(x) + x @ self.a.T @ self.b.T).tanh()


class WeightNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.up(x).tanh()


BLOCKS: dict[str, type[Block]] = {
    "linear": Linear,
    "mlp": Mlp,
    "attention": Attention,
    "heads innermost": HeadsInnermost,
    "rotary": Rotary,
    "documents": Documents,
    "convolution": Conv,
    "batch norm": BatchNorm,
    "layer norm": LayerNorm,
    "position": Position,
    "embedding": Embedding,
    "experts": Experts,
    "recurrent": Recurrent,
    "tied": Tied,
    "layer scale": LayerScale,
    "lora": Lora,
    "weight norm": WeightNorm,
}
