"""Networks for the tests of sharding, and training of one on a single device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import meshwright as mw

Tensor = torch.Tensor
TP = {"blocks.*.up.*": {"tp": mw.Shard(0)}, "blocks.*.down.weight": {"tp": mw.Shard(1)}}


class Block(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(d, 2 * d), nn.Linear(2 * d, d), nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.down(torch.relu(self.up(x))))
        return out


class Net(nn.Module):
    """Embedding, blocks, a head tied to the embedding, and a parameter of the root."""

    checkpointed = False

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) * self.scale + self.offset
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        out: Tensor = self.head(x)
        return out


class OwnScale(nn.Module):
    """With a parameter of the root's own, which no unit spans."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, 2))
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Any) -> Any:
        return self.layers(x) @ self.scale


class Tokens(nn.Module):
    """Embedding, blocks, a norm and a head, which may be tied to the embedding."""

    def __init__(self, block: Callable[[], nn.Module], width: int, vocab: int, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def net(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def batches(n: int = 3) -> list[Tensor]:
    g = torch.Generator().manual_seed(7)
    return [torch.randint(0, 11, (6, 5), generator=g) for _ in range(n)]


Step = Callable[[nn.Module, Tensor], Any]


def trained(
    model: nn.Module, opt: torch.optim.Optimizer, data: Iterable[Tensor], backward: Step, clip: float | None = None
) -> nn.Module:
    """The model after one optimizer step for each batch."""
    for ids in data:
        opt.zero_grad()
        backward(model, ids)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
    return model


def same_values(model: nn.Module, reference: nn.Module, *, grads: bool = False, **tolerance: Any) -> None:
    """All parameters (or gradients) equal those of a single-device model."""
    tolerance = tolerance or {"rtol": 1e-10, "atol": 1e-12}
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        a, b = (p.grad, q.grad) if grads else (p.detach(), q.detach())
        if a is None or b is None:
            assert a is b, name
            continue
        torch.testing.assert_close(mw.unshard(a), b, msg=lambda text, n=name: f"{n}: {text}", **tolerance)


class Weights(nn.Module):
    """What is saved and loaded: tied tensors, several dtypes, a number, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6).bfloat16()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("count", torch.arange(5))
