"""Parameters that are split by blocks, in what people do with a model: on each mesh the numbers of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file

import meshwright as mw

Tensor = torch.Tensor
Batch = tuple[Tensor, Tensor]
Values = dict[str, Tensor]
MESHES = {"dp2tp2": mw.Mesh({"dp": 2, "tp": 2}), "tp3": mw.Mesh({"dp": 1, "tp": 3}), "tp5": mw.Mesh({"dp": 1, "tp": 5})}
WIDTH, INNER, WORDS, SIZE = 24, 18, 20, 2
FUSED = (WIDTH, WIDTH // 2, WIDTH // 2)  # 12 heads, 6 of keys: 5 ranks do not divide them
TABLE: dict[str, Any] = {
    "*.qkv.*": {"tp": mw.Shard(0, FUSED)},
    "*.gate_up.*": {"tp": mw.Shard(0, (INNER, INNER))},
    "*.down.weight": {"tp": mw.Shard(1)},
    "*.out.weight": {"tp": mw.Shard(1)},
}
OTHER: dict[str, Any] = {"*.qkv.weight": {"tp": mw.Shard(0, (12, 36))}, "*.gate_up.weight": {"tp": mw.Shard(0)}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, sum(FUSED)), nn.Linear(WIDTH, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, SIZE)).transpose(1, 2) for t in self.qkv(x).split(FUSED, -1))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), nn.Linear(WIDTH, WORDS)).double()


def batch(i: int) -> Batch:
    g = torch.Generator().manual_seed(i)
    return torch.randint(WORDS, (5, 3), generator=g), torch.randint(WORDS, (5, 3), generator=g)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def placed(mesh: mw.Mesh | None, model: nn.Module, **options: Any) -> nn.Module:
    return model if mesh is None else mw.shard_module(model, mesh, TABLE, **options)


def trained(mesh: mw.Mesh | None, model: nn.Module, start: int = 0, stop: int = 2, clip: float = 0.05) -> None:
    optimizer = adam(model) if mesh is None else mw.shard_optimizer(adam(model))
    for i in range(start, stop):
        given = batch(i) if mesh is None else tuple(mw.shard_tensor(t, mesh, {"dp": mw.Shard(0)}) for t in batch(i))
        loss_of(model, given).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> Values:
    return {n: mw.unshard(t.detach()).clone() for n, t in model.state_dict().items()}


def plain(mesh: mw.Mesh | None) -> Values:
    model = placed(mesh, made())
    trained(mesh, model)
    return values(model)


def stored(mesh: mw.Mesh | None) -> Values:
    model = placed(mesh, made(), **({} if mesh is None else {"fsdp": "dp"}))
    trained(mesh, model)
    return values(model)


def copied(mesh: mw.Mesh | None) -> Values:
    model = placed(mesh, made())
    other = copy.deepcopy(model)
    trained(mesh, other)
    return values(other) | {f"first.{n}": t for n, t in values(model).items()}


def written(mesh: mw.Mesh | None) -> Values:
    """Assigned, written to in rows that lie in several blocks, frozen, initialised anew."""
    model = placed(mesh, made())
    block: Any = model[1]
    block.qkv.weight.data = torch.arange(48.0 * WIDTH).view(48, WIDTH).double() / 999
    with torch.no_grad():
        block.qkv.weight[20:40] *= 0.5
        block.gate_up.bias[[1, 19, 30]] = 0.7
        torch.manual_seed(3)
        nn.init.kaiming_uniform_(block.gate_up.weight)
        block.qkv.weight.add_(torch.rand_like(block.qkv.weight))
    block.gate_up.weight.requires_grad_(False)
    trained(mesh, model)
    return values(model)


def normed(mesh: mw.Mesh | None) -> Values:
    """Weight norm: the weight is computed of a direction that is split by blocks, and lengths that are."""
    model = made()
    block: Any = model[1]
    torch.nn.utils.parametrizations.weight_norm(block.qkv)
    torch.nn.utils.parametrizations.weight_norm(block.gate_up, dim=1)
    blocks = {"*.qkv.p*": FUSED, "*.gate_up.p*1": (INNER, INNER)}
    if mesh is not None:
        table = {glob: {"tp": mw.Shard(0, sizes)} for glob, sizes in blocks.items()}
        model = mw.shard_module(model, mesh, TABLE | {"*.qkv.*": {}, "*.gate_up.*": {}} | table)
    trained(mesh, model)
    return values(model)


def averaged(mesh: mw.Mesh | None) -> Values:
    model = placed(mesh, made())
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for i in range(2):
        trained(mesh, model, i, i + 1)
        mean.update_parameters(model)
    return values(mean)


def by_hand(mesh: mw.Mesh | None) -> Values:
    model = placed(mesh, made())
    trained(mesh, model)
    whole, again = values(model), placed(mesh, made())
    again.load_state_dict({n: t * 2 for n, t in whole.items()})
    return values(again)


@pytest.mark.parametrize("use", [plain, stored, copied, written, normed, averaged, by_hand], ids=lambda f: f.__name__)
def test_in_use(use: Callable[[mw.Mesh | None], Values]) -> None:
    expected = use(None)
    for mesh in MESHES.values():
        for found in mw.simulate(lambda mesh=mesh: use(mesh), mesh):  # type: ignore[misc]
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"fsdp": "dp"}], ids=["held", "stored"])
def test_weights_are_written_in_the_models_own_order(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = values(made())
    for name, mesh in MESHES.items():
        folder = tmp_path / name

        def run(mesh: mw.Mesh = mesh, folder: Path = folder) -> Values:
            mw.save_weights(mw.shard_module(made(), mesh, TABLE, **options), folder)
            again = mw.shard_module(made(), mesh, OTHER, **options)
            with torch.no_grad():
                for p in again.parameters():
                    p.zero_()
            mw.load_weights(again, folder)
            return values(again)

        for found in mw.simulate(run, mesh):
            torch.testing.assert_close(found, expected)
        torch.testing.assert_close(load_file(folder / "model.safetensors"), expected)


@pytest.mark.parametrize(("first", "then"), [("tp3", "dp2tp2")])
def test_a_merge_that_is_saved_in_its_middle_goes_on_elsewhere(tmp_path: Path, first: str, then: str) -> None:
    """Captured steps: states and sums of gradients lie by blocks too, and a checkpoint knows none."""

    def run(mesh: mw.Mesh, table: dict[str, Any], stop: int) -> Values:
        model = made()
        step = mw.compile_step(
            model, loss_of, adam(model), batch(0), mesh=mesh, layouts=table, batch={"dp": mw.Shard(0)},
            passes=["gradient-merge:k_steps=2,avg=true"],
        )  # fmt: skip
        store = mw.Checkpoints(tmp_path)
        for i in range(store.load(program=step) or 0, stop):
            step(batch(i))
        if stop < 4:
            store.save(stop, program=step).wait()
        return values(model)

    one = made()
    optimizer = adam(one)
    for i in range(4):
        (loss_of(one, batch(i)) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    mw.simulate(lambda: run(MESHES[first], TABLE, 3), MESHES[first])
    for found in mw.simulate(lambda: run(MESHES[then], TABLE | OTHER, 4), MESHES[then]):
        torch.testing.assert_close(found, values(one))


def test_a_rank_without_rows_of_indices_looks_up_in_a_table_of_blocks() -> None:
    """One index more was made for it by asking which range of the columns it has: an error on that rank alone."""
    mesh = mw.Mesh({"a": 3, "b": 3})
    table, at = torch.arange(9.0, dtype=torch.float64).reshape(3, 3), torch.tensor([[0, 1], [2, 0]])
    weights = torch.arange(36.0, dtype=torch.float64).reshape(2, 2, 9)

    def run(table: Any, at: Any) -> Any:
        made = F.embedding(at, torch.cat([table] * 3, -1))
        (made * weights).sum().backward()
        return mw.unshard(made).detach(), mw.unshard(table.grad)

    wanted = run(table.clone().requires_grad_(), at)

    def rank() -> Any:
        rows = mw.shard_tensor(at, mesh, {"a": mw.Shard(0), "b": mw.Shard(1)})  # of two rows over three ranks
        return run(mw.shard_tensor(table, mesh, {"a": mw.Shard(1)}).requires_grad_(), rows)

    for found in mw.simulate(rank, mesh):
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
