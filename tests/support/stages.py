"""A network in stages, and steps of it: what tests of pipelines train, uncut and cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import meshwright as mw

Tensor = torch.Tensor
DP = {"dp": mw.Shard(0)}
TP = {
    "layers.*.up.weight": {"tp": mw.Shard(0)}, "layers.*.up.bias": {"tp": mw.Shard(0)},
    "layers.*.down.weight": {"tp": mw.Shard(1)},
}  # fmt: skip
STAGES = {"pp": "layers"}
Result = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(6, 12), nn.Linear(12, 6), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(self.up(x).relu())


class Attention(Block):
    """Over positions that lie before, then what a block does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18, bias=False), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 3).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return super().forward(x + self.out(mixed.transpose(1, 2).reshape(x.shape)))


class Checkpointed(Attention):
    """Runs again for its backward, which needs the first sum with the residual; keeps shards of what it reads."""

    def forward(self, x: Tensor) -> Tensor:
        with mw.shard_checkpoint_inputs({"tp": mw.Shard(1)}):
            made: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return made


class Experts(nn.Module):
    """Four, two of which see each position."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4, bias=False)
        self.gate_up, self.down = nn.Parameter(torch.randn(4, 8, 6)), nn.Parameter(torch.randn(4, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x).softmax(-1).topk(2)
        return x + mw.experts(x, ids, scores, self.gate_up, self.down)


class Dropped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.3))


class Noisy(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 0.1 * torch.randn_like(y)


class Sampled(Block):
    """Draws by values of a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.multinomial(self.up.weight.detach().sigmoid(), 6)[0]


class Net(nn.Module):
    """Three blocks, which two stages cannot share evenly; parameters that are numbers."""

    def __init__(self, tie: bool = False, blocks: Sequence[Callable[[], nn.Module]] = (Block,) * 3) -> None:
        super().__init__()
        self.head = nn.Linear(6, 11, bias=False)  # listed first, used last
        self.tokens, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.layers = nn.ModuleList(make() for make in blocks)
        if tie:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


class Regions(Net):
    """Checkpointed calls that begin outside of the layers: what reads the layer before belongs to the stage of that."""

    def forward(self, x: Tensor) -> Tensor:
        def gated(h: Tensor, layer: nn.Module) -> Tensor:
            made: Tensor = h + layer(h) * (F.layer_norm(h, (6,)).sin() + 1).square()
            return made

        h = self.tokens(x)
        for layer in self.layers:
            h = checkpoint(gated, h, layer, use_reentrant=False)
        made: Tensor = self.head(self.norm(h))
        return made


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def data(i: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(i)
    return torch.randint(11, (rows, 5), generator=draw), torch.randint(11, (rows, 5), generator=draw)


def ignoring(i: int, rows: int) -> tuple[Tensor, Tensor]:
    """Labels of which many are ignored: more of some micro-batches than of others, all of the last."""
    x, y = data(i, rows)
    y[torch.rand(y.shape, generator=torch.Generator().manual_seed(i)) < torch.linspace(0, 0.9, rows)[:, None]] = -100
    y[-1] = -100
    return x, y


def net(tie: bool = False, blocks: Sequence[Callable[[], nn.Module]] = (Block,) * 3) -> nn.Module:
    torch.manual_seed(0)
    return Net(tie, blocks).double()


def one_device(
    batches: Sequence[Any], clip: float | None = 0.3, tie: bool = False, blocks: Any = (Block,) * 3
) -> tuple[list[float], Result]:
    """Losses and parameters of a training without a mesh."""
    model = net(tie, blocks)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for batch in batches:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


def captured(
    mesh: mw.Mesh,
    tie: bool = False,
    clip: float | None = 0.3,
    blocks: Any = (Block,) * 3,
    example: Any = None,
    **options: Any,
) -> Any:
    """The step, its model and its optimizer; a batch of another size than the example's is captured again."""
    model = net(tie, blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"stages": STAGES, **options}
    step = mw.compile_step(model, loss_of, optimizer, example or data(0), mesh=mesh, clip_grad_norm=clip, **options)
    return step, model, optimizer


def whole(model: nn.Module) -> Result:
    return {n: mw.unshard(p.detach()).clone() for n, p in model.named_parameters()}


def steps(mesh: mw.Mesh, batches: Sequence[Any], how: str, **options: Any) -> tuple[list[float], Result]:
    """Losses and parameters of a training in micro-batches."""
    passes = [f"pipeline:{how}", *options.pop("passes", ())]
    step, model, _ = captured(mesh, passes=passes, example=batches[0], **options)
    return [step(batch).item() for batch in batches], whole(model)
