"""Plans drawn at random from the space, not only the best ones, compute what one device does."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.planner.emit import Keeping, Layouts, table_of
from meshwright.planner.measure import TrainedStep
from meshwright.planner.search import Candidate, PlanSearch
from meshwright.planner.solve import Problem, solve
from meshwright.train.config import StepConfig
from meshwright.train.model import GPT, Llama, loss_of

Built = tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]
CASES = 300
DTYPE: dict[str, Any] = {"dtype": torch.float64}


def mlp(rows: int = 8) -> Built:
    net = nn.Sequential(
        nn.Linear(10, 24, **DTYPE), nn.GELU(), nn.Linear(24, 12, **DTYPE), nn.LayerNorm(12, **DTYPE),
        nn.Linear(12, 6, **DTYPE),
    )  # fmt: skip
    return net, lambda net, x: net(x).square().mean(), torch.randn(rows, 10, **DTYPE)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, **DTYPE), nn.GroupNorm(4, 8, **DTYPE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.conv(x)))


def images() -> Built:
    blocks = [Residual() for _ in range(4)]
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, **DTYPE), *blocks, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 6, **DTYPE)
    )
    batch = torch.randn(6, 3, 8, 8, **DTYPE), torch.randint(6, (6,))
    return net, lambda net, b: F.cross_entropy(net(b[0]), b[1], label_smoothing=0.1), batch


def encoder() -> Built:
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=True, **DTYPE)
    net = nn.Sequential(nn.Embedding(32, 16, **DTYPE), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
    ids = torch.randint(32, (4, 8))
    return net, lambda net, x: net(x).logsumexp(-1).mean(), ids


def decoder(llama: bool, **options: Any) -> Built:
    config = StepConfig(layers=4, hidden=16, heads=4, seq=8, batch=4, dtype="float64", **options)
    model = GPT(config, "cpu", Llama(vocabulary=32, **({"kv_heads": 2} if llama else {})) if llama else None)
    ids = torch.randint(32, (2, 4, 8))
    return model, lambda m, b: loss_of(m, *b), (ids[0], ids[1])


class Tangle(nn.Module):
    """Weights that two ops read, transposed and sliced, sums over rows, broadcasts, and results of several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 8, **DTYPE))
        self.scale = nn.Parameter(torch.randn(8, **DTYPE))
        self.mixer = nn.Linear(8, 24, **DTYPE)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = F.embedding(ids, self.table) * self.scale + x.unsqueeze(1)
        a, b, c = self.mixer(h).chunk(3, -1)
        h = torch.softmax(a, -1) * b.tanh() + c.mean(1, keepdim=True)
        h = torch.cat([h, h.flip(1)], 1).transpose(1, 2)
        return (h.sum(2) @ self.table.t()).log_softmax(-1) - h.amax((1, 2), keepdim=False).unsqueeze(-1)


def tangle() -> Built:
    batch = torch.randint(12, (6, 5)), torch.randn(6, 8, **DTYPE)
    return Tangle(), lambda net, b: net(*b).square().mean(), batch


MODELS: dict[str, Callable[[], Built]] = {
    "mlp": mlp, "uneven": lambda: mlp(5), "images": images, "encoder": encoder, "gpt": lambda: decoder(False, tie=True),
    "llama": lambda: decoder(True), "experts": lambda: decoder(True, experts=4), "tangle": tangle,
}  # fmt: skip
MESHES: list[dict[str, int]] = [{"a": 2}, {"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 3, "b": 2}]


def built(name: str) -> Built:
    torch.manual_seed(0)
    return MODELS[name]()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@functools.lru_cache(4)
def search_of(name: str, sizes: tuple[int, ...]) -> tuple[PlanSearch, Layouts | None]:
    model, loss_fn, batch = built(name)
    mesh = mw.Mesh(dict(zip("ab", sizes, strict=False)))
    step = TrainedStep(model, loss_fn, batch, optimizer_of(model))
    search = PlanSearch(step, mw.hardware("cpu-gloo"), 1e12, mesh.size, mesh)
    return search, search.layouts(mesh.sizes)


@functools.cache
def alone(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, loss_fn, batch = built(name)
    optimizer, losses = optimizer_of(model), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def drawn(draw: random.Random, layouts: Layouts) -> Layouts:
    """An assignment of the same space: the optimum of random prices, which only possible ones have."""
    problem = layouts.space.problem_of(0.0)
    other, most = Problem(problem.sizes, dict(problem.factors), problem.tables), draw.choice([10**8, 10**11])
    for v, size in enumerate(problem.sizes):
        other.add((v,), np.array([draw.randrange(most) for _ in range(size)], dtype=np.int64))
    return Layouts(layouts.space, solve(other), layouts.axes)


def storage_of(draw: random.Random, search: PlanSearch, layouts: Layouts) -> Keeping:
    rows = [a for a, role in zip(layouts.axes, layouts.roles, strict=True) if role in ("dp", "cp", "ep")]
    kind = draw.choice(["replicated", "states", "kept", "fsdp"]) if rows else "replicated"
    recompute = bool(search.repeats.runs) and draw.random() < 0.3
    return Keeping(kind, tuple(rows) if kind != "replicated" else (), recompute)


def candidate(seed: int) -> tuple[str, mw.Mesh, PlanSearch, Candidate]:
    draw = random.Random(seed)
    name, sizes = list(MODELS)[seed % len(MODELS)], draw.choice(MESHES)
    search, layouts = search_of(name, tuple(sizes.values()))
    assert layouts is not None
    layouts = drawn(draw, layouts)
    return name, mw.Mesh(sizes), search, Candidate(layouts, storage_of(draw, search, layouts), 0.0, 0.0, (0.0,) * 4)


@pytest.mark.thin(CASES // 15)
@pytest.mark.parametrize("seed", range(CASES))
def test_any_plan_equals_one_device(seed: int, tmp_path: Path) -> None:
    name, mesh, search, c = candidate(seed)
    counts = search.repeats.counts()
    blocks = search.repeats.blocks(counts)
    table_of(c.layouts, c.storage, lambda n: search.repeats.names(n, counts), blocks=blocks, fold=False).save(
        tmp_path / "plan.toml"
    )
    expected_losses, expected = alone(name)

    def train() -> Any:
        model, loss_fn, batch = built(name)
        step = mw.compile_step(
            model, loss_fn, optimizer_of(model), batch, mesh=mesh, layouts=tmp_path / "plan.toml", check=False
        )
        losses = [mw.unshard(step(batch)).item() for _ in range(2)]
        return losses, {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}

    losses, params = mw.simulate(train, mesh)[0]
    torch.testing.assert_close(losses, expected_losses, rtol=1e-9, atol=1e-9)
    for n, p in expected.items():
        torch.testing.assert_close(params[n], p, rtol=1e-7, atol=1e-9, msg=lambda m, n=n: f"{n}: {m}")
    assert math.isfinite(losses[-1])
