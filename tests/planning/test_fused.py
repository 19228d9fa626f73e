"""Fused projections: split part by part, with the bytes that the same model sends whose projections are apart."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.explanation import explain_program

Tensor = torch.Tensor
Batch = tuple[Tensor, Tensor]
MESHES = {"dp2tp2": mw.Mesh({"dp": 2, "tp": 2}), "tp3": mw.Mesh({"tp": 3}), "tp4": mw.Mesh({"tp": 4})}
ROWS, LENGTH, WIDTH, HEADS, INNER, WORDS = 4, 5, 24, 12, 20, 24
SIZE = WIDTH // HEADS


class Conv1D(nn.Module):
    """A linear layer with its weight the other way round, as that of GPT-2."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, out) / width**0.5), nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Block(nn.Module):
    """A block whose queries, keys and values are one weight; ``how`` they are taken apart."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.keys = how, {"few": 6, "own": HEADS}.get(how, HEADS)
        self.sizes = [WIDTH, self.keys * SIZE, self.keys * SIZE]
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        if how == "own":
            self.q, self.k, self.v = (nn.Linear(WIDTH, n) for n in self.sizes)
            self.g, self.u = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        else:
            self.qkv = (Conv1D if how == "conv1d" else nn.Linear)(WIDTH, sum(self.sizes))
            self.gate_up = nn.Linear(WIDTH, 2 * INNER)
        self.out, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(INNER, WIDTH)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.how == "own":
            return self.q(x), self.k(x), self.v(x)
        y = self.qkv(x)
        if self.how == "chunk":
            return y.chunk(3, -1)
        if self.how == "slice":
            a, b = WIDTH, WIDTH + self.sizes[1]
            return y[..., :a], y[..., a:b], y[:, :, b:]
        if self.how == "view":
            return y.view(*x.shape[:2], 3, WIDTH).unbind(2)
        return y.split(self.sizes, -1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "heads":  # as vision transformers do
            y = self.qkv(self.n1(x)).reshape(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
            q, k, v = y.unbind(0)
        else:
            q, k, v = (t.unflatten(-1, (-1, SIZE)).transpose(1, 2) for t in self.parts(self.n1(x)))
            k, v = (t.repeat_interleave(HEADS // self.keys, 1) for t in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.n2(x)
        g, u = (self.g(h), self.u(h)) if self.how == "own" else self.gate_up(h).chunk(2, -1)
        return x + self.down(F.silu(g) * u)


HOW = ("split", "chunk", "slice", "view", "heads", "conv1d", "few")


def made(how: tuple[str, ...] = HOW) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *map(Block, how), nn.Linear(WIDTH, WORDS)).double()


def batch() -> Batch:
    g = torch.Generator().manual_seed(1)
    return torch.randint(WORDS, (ROWS, LENGTH), generator=g), torch.randint(WORDS, (ROWS, LENGTH), generator=g)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: mw.unshard(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def placed(table: mw.LayoutTable, name: str) -> object:
    return next(p for glob, p in reversed(list(table.items())) if fnmatch.fnmatchcase(name, glob))


def captured(how: tuple[str, ...], mesh: mw.Mesh) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    model, table = made(how), mw.layouts(made(how), mesh, batch(), loss_of)
    step = mw.compile_step(model, loss_of, None, batch(), mesh=mesh, layouts=table, gradients=True)
    loss = mw.unshard(step(batch()))
    return loss, gradients(model), dict(explain_program(step.program).counts.bytes)


@pytest.mark.parametrize("mesh", [MESHES["dp2tp2"], MESHES["tp3"]], ids=["dp2tp2", "tp3"])
def test_fused_projections_are_split_part_by_part(mesh: mw.Mesh) -> None:
    table = mw.layouts(made(), mesh, batch(), loss_of)
    for i, how in enumerate(HOW, 1):
        sizes = tuple(Block(how).sizes)
        names = [f"{n}.{kind}" for n in ("qkv", "gate_up") for kind in ("weight", "bias")]
        assert {n: placed(table, f"{i}.{n}") for n in names} == {
            "qkv.weight": {"tp": mw.Shard(int(how == "conv1d"), sizes)},
            "qkv.bias": {"tp": mw.Shard(0, sizes)},
            "gate_up.weight": {"tp": mw.Shard(0, (INNER, INNER))},
            "gate_up.bias": {"tp": mw.Shard(0, (INNER, INNER))},
        }
    assert not [note for note in table.notes if "gathered" in note]
    model = made()
    loss = loss_of(model, batch())
    loss.backward()

    def eager() -> tuple[Tensor, dict[str, Tensor], bool]:
        mine = mw.shard_module(made(), mesh, table)
        with mw.explain() as told:
            got = loss_of(mine, tuple(mw.shard_tensor(t, mesh, table.batch) for t in batch()))
            got.backward()
        return mw.unshard(got.detach()), gradients(mine), "gather" in str(told)

    for got, grads, gathers in mw.simulate(eager, mesh):
        torch.testing.assert_close(got, loss.detach())
        torch.testing.assert_close(grads, {n: p.grad for n, p in model.named_parameters()})
        assert not gathers


def test_captured_steps_equal_one_device() -> None:
    how, mesh = ("heads", "conv1d", "few"), MESHES["tp3"]
    model = made(how)
    loss = loss_of(model, batch())
    loss.backward()
    for got, grads, _ in mw.simulate(lambda: captured(how, mesh), mesh):
        torch.testing.assert_close(got, loss.detach())
        torch.testing.assert_close(grads, {n: p.grad for n, p in model.named_parameters()})


def test_they_send_what_projections_of_their_own_send() -> None:
    """Megatron's plan: 4 sums of the residual stream for a layer, forward and backward; and those of table and head."""
    mesh, how = MESHES["tp4"], ("conv1d",)
    *_, sent = mw.simulate(lambda: captured(how, mesh), mesh)[0]
    *_, apart = mw.simulate(lambda: captured(("own",), mesh), mesh)[0]
    assert sent == apart
    one, of_loss = (2 * 3 / 4 * ROWS * LENGTH * n * 8 for n in (WIDTH, 1))
    assert 0 <= sum(sent.values()) - one * (4 + 2) <= 4 * of_loss  # the split loss sums some numbers for a token


def test_a_plan_with_blocks_is_a_file(tmp_path: Path) -> None:
    table = mw.layouts(made(("few",)), MESHES["tp3"], batch(), loss_of)
    table.save(tmp_path / "plan.toml")
    assert dict(mw.load_layouts(tmp_path / "plan.toml")) == dict(table)
    assert "Shard(0, blocks=(24, 12, 12))" in (tmp_path / "plan.toml").read_text()


def test_too_few_heads_of_keys_are_said_to_be_gathered() -> None:
    class Few(Block):
        def __init__(self) -> None:
            super().__init__("few")

    few = Few()
    few.keys, few.sizes = 2, [WIDTH, 2 * SIZE, 2 * SIZE]
    few.qkv = nn.Linear(WIDTH, sum(few.sizes))
    mesh, x = MESHES["tp3"], torch.randn(ROWS, LENGTH, WIDTH)
    few.double()
    table = mw.layouts(few, mesh, x.double(), lambda m, b: m(b).square().mean())
    assert any("gathered" in note for note in table.notes)


class Folded(nn.Module):
    """Attention whose rows and heads are one dim, as that of DeBERTa: one axis splits the rows, the other the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            m(x).view(rows, length, HEADS, SIZE).permute(0, 2, 1, 3).contiguous().view(-1, length, SIZE)
            for m in (self.q, self.k, self.v)
        )
        y = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        return self.out(y.view(rows, HEADS, length, SIZE).permute(0, 2, 1, 3).reshape(rows, length, WIDTH))


def test_rows_and_heads_in_one_dim_are_not_both_split_by_blocks() -> None:
    mesh, x = MESHES["dp2tp2"], torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    def new() -> nn.Module:
        torch.manual_seed(0)
        return Folded().double()

    model = new()
    loss(model, x).backward()
    table = mw.layouts(new(), mesh, x, loss)

    def run() -> dict[str, Tensor]:
        mine = new()
        mw.compile_step(mine, loss, None, x, mesh=mesh, layouts=table, gradients=True)(x)
        return gradients(mine)

    for got in mw.simulate(run, mesh):
        torch.testing.assert_close(got, {n: p.grad for n, p in model.named_parameters()})
