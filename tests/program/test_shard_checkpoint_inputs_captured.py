"""``mw.shard_checkpoint_inputs`` in captured steps: the same bits, what is held, what is sent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright import collective
from meshwright.explanation.step import explain_program
from meshwright.program.ir.nodes import info_of
from tests.support.processes import run_processes
from tests.tensor.test_shard_checkpoint_inputs import BOTH, GELU, Block, again

Tensor = torch.Tensor
SPLIT = {"tp": mw.Shard(1)}
RULES = {"*.up.*": {"tp": mw.Shard(0)}, "*.down.weight": {"tp": mw.Shard(1)}}
BATCHES = torch.randn(3, 4, 6, 8, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def plain(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = again(block, x)
    return x


def in_pairs(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """A checkpoint in a checkpoint."""
    for block in blocks:
        x = again(lambda h, block=block: again(block, h.sin()) + h, x)
    return x


def selective(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = again(block, x, context_fn=GELU)
    return x


def skipping(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """What several blocks read, and what is used outside of blocks as well."""
    first = x = again(blocks[0], x)
    for block in blocks[1:]:
        x = again(lambda h, other, block=block: block(h) * other.sigmoid(), x, first)
    return x + first.tanh()


def closing_over(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """What is no argument."""
    for block in blocks:
        scale = x.square().mean(-1, keepdim=True)
        x = again(lambda h, block=block, scale=scale: block(h) / (1 + scale), x)
    return x


def transposed(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Inputs that are not in order, and one that is expanded."""
    for block in blocks:
        h = (x * 2).transpose(0, 1).contiguous().transpose(0, 1)
        one = x.mean(1, keepdim=True).expand_as(x)
        x = again(lambda h, one, block=block: block(h.transpose(1, 2).transpose(1, 2)) + one, h, one)
    return x


def reentrant(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


WAYS: dict[str, Callable[[nn.ModuleList, Tensor], Tensor]] = {
    f.__name__: f for f in (plain, in_pairs, selective, skipping, closing_over, transposed, reentrant)
}


class Model(nn.Module):
    def __init__(self, way: str, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.blocks = way, nn.ModuleList(Block(8) for _ in range(blocks)).double()

    def forward(self, x: Tensor) -> Tensor:
        return WAYS[self.way](self.blocks, self.blocks[0].norm(x))


def trained(mesh: mw.Mesh | None, way: str, split: Any, batches: Any = BATCHES, **options: Any) -> Any:
    """Parameters after a step of each batch, and the program."""
    model = Model(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        made = mw.shard_checkpoint_inputs(split)(model)(x) if split else model(x)
        return made.square().mean()

    torch.manual_seed(3)
    if mesh is None:
        model.eval()
        for x in batches:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()], None
    batch = {"dp": mw.Shard(0)} if "dp" in mesh.axes else {}
    step = mw.compile_step(model, loss_of, optimizer, batches[0], mesh=mesh, batch=batch, layouts=RULES, **options)
    mw.check_program(step.program)
    with collective.counting() as counts:
        for x in batches:
            step(x)
    if len({x.shape for x in batches}) == 1 and "merge" not in str(options):
        said = explain_program(step.program).counts.table
        assert {k: [len(batches) * n for n in v] for k, v in said.items()} == counts.table
    return [mw.unshard(p.detach()) for p in model.parameters()], step.program


def gathers(program: Any) -> int:
    return sum("kept its input split" in c.reason for c in explain_program(program).collectives)


@pytest.mark.thin(7)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"passes": ["data-parallel-optimization"]},
        {"fsdp": "dp", "passes": ["data-parallel-optimization"]},
        {"passes": ["gradient-merge:k_steps=3"]},
    ],
    ids=["", "passes", "zero 3", "merge"],
)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits(way: str, options: dict[str, Any]) -> None:
    def both() -> None:
        want, whole = trained(BOTH, way, None, **options)
        got, program = trained(BOTH, way, SPLIT, **options)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert gathers(whole) == 0
        assert gathers(program) >= 2

    mw.simulate(both, BOTH)


@pytest.mark.thin(2)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_uneven(dim: int) -> None:
    """Parts that differ, and empty ones."""
    mesh, data = mw.Mesh({"tp": 3}), BATCHES[:, :, :2]

    def both() -> None:
        want, _ = trained(mesh, "plain", None, data)
        got, program = trained(mesh, "plain", {"tp": mw.Shard(dim)}, data)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert gathers(program) == 3

    mw.simulate(both, mesh)


@pytest.mark.long
def test_sizes_as_inputs() -> None:
    """Other lengths run without a capture."""
    long = torch.randn(4, 20, 8, dtype=torch.double, generator=torch.Generator().manual_seed(2))
    data = [long[:, :n] for n in (16, 8, 12, 20)]

    def both() -> None:
        want, _ = trained(BOTH, "plain", None, data)
        got, _ = trained(BOTH, "plain", SPLIT, data)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    mw.simulate(both, BOTH)


def test_what_is_held() -> None:
    """Of three inputs of 2 x 6 x 8 doubles a half each between the forward and the backward, for a gather of each."""

    def run() -> None:
        _, whole = trained(BOTH, "plain", None)
        _, part = trained(BOTH, "plain", SPLIT)
        held = [_held(p) for p in (whole, part)]
        one = 2 * 6 * 8 * 8
        assert held[0] - held[1] == 3 * one // 2
        assert gathers(part) == 3
        assert "kept its input split (shard_checkpoint_inputs)" in str(explain_program(part))

    mw.simulate(run, BOTH)


def _held(program: Any) -> int:
    """Bytes of activations that the forward makes and the backward reads."""
    storages: dict[int, int] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and info_of(node).role == "forward":
            later = any(info_of(u).role in ("backward", "recomputation") for u in node.users)
            for v in info_of(node).values if later else ():
                storages[v.storage] = v.nbytes
    return sum(storages.values())


def test_one_device() -> None:
    want, _ = trained(None, "plain", None)

    def run() -> list[Tensor]:
        for module in (model := Model("plain")).modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def loss_of(model: nn.Module, x: Tensor) -> Tensor:
            with mw.shard_checkpoint_inputs(SPLIT):
                return model(x).square().mean()

        step = mw.compile_step(
            model, loss_of, optimizer, BATCHES[0], mesh=BOTH, batch={"dp": mw.Shard(0)}, layouts=RULES
        )
        for x in BATCHES:
            step(x)
        return [mw.unshard(p.detach()) for p in model.parameters()]

    for got in mw.simulate(run, BOTH):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def _worker() -> None:
    mesh = mw.init_mesh({"tp": 2})
    run = functools.partial(trained, mesh, "plain")
    assert all(torch.equal(a, b) for a, b in zip(run(SPLIT)[0], run(None)[0], strict=True))


@pytest.mark.processes
def test_between_processes() -> None:
    run_processes(_worker, 2)
