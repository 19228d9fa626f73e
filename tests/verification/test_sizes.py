"""Sizes that are taken down: what stays of the step, what is said of it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.errors import VerifyError
from meshwright.ranks import runtime
from meshwright.verification import sizes

MESH = mw.Mesh({"dp": 2, "tp": 2})
SPLIT = {"dp": mw.Shard(0)}
ROWS, COLUMNS = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}


class Block(nn.Module):
    def __init__(self, index: int, slope: float) -> None:
        super().__init__()
        self.index, self.slope = index, slope
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.leaky_relu(self.up(x), self.slope))


class Deep(nn.Module):
    """Blocks of two kinds, every third of the second."""

    def __init__(self, layers: int = 9) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i, 0.5 if i % 3 == 2 else 0.1) for i in range(layers))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch(rows: int = 40) -> Any:
    torch.manual_seed(0)
    return torch.randn(rows, 6), torch.randint(3, (rows,))


LAYOUTS = {"blocks.*.up.*": ROWS, "blocks.*.down.weight": COLUMNS}


def test_blocks_of_each_kind_stay_and_are_said() -> None:
    report = mw.verify(Deep(), loss_fn, batch(), MESH, LAYOUTS, batch=SPLIT, steps=1, shrink=True)
    assert report.passed, str(report)
    assert "blocks: 4 of 9 blocks (0, 1, 2, 5)" in report.taken
    assert "the batch: 2 of 40 along dim 0" in report.taken
    assert "reduced for this run: blocks" in str(report)
    whole = mw.verify(Deep(), loss_fn, batch(), MESH, LAYOUTS, batch=SPLIT, steps=1, modes=["captured"])
    assert whole.taken == ()
    assert whole.digest == report.digest  # that of the sizes that were given


def test_an_error_in_one_kind_is_found_with_few_blocks() -> None:
    class Odd(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * (2.0 if runtime.RT.rank == 3 else 1.0))

    model = Deep()
    model.blocks[7] = Odd(7, 0.1)
    report = mw.verify(model, loss_fn, batch(), MESH, LAYOUTS, batch=SPLIT, steps=1, shrink=True, modes=["eager"])
    assert "blocks: 5 of 9 blocks (0, 1, 2, 5, 7)" in report.taken
    assert report.departures[0].op == "mul"


def test_layouts_of_one_block_make_it_a_kind() -> None:
    layouts = {**LAYOUTS, "blocks.4.up.weight": {"tp": mw.Shard(1)}, "blocks.[67].down.bias": {"tp": mw.Shard(0)}}
    del layouts["blocks.*.up.*"], layouts["blocks.*.down.weight"]
    report = mw.verify(Deep(), loss_fn, batch(), MESH, layouts, batch=SPLIT, steps=1, shrink=True, modes=["eager"])
    assert report.passed, str(report)
    assert "blocks: 7 of 9 blocks (0, 1, 2, 4, 5, 6, 7)" in report.taken


def test_an_optimizer_follows() -> None:
    model = Deep()
    decay, rest = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.3}, {"params": rest, "lr": 0.1}])
    report = mw.verify(
        model, loss_fn, batch(), MESH, LAYOUTS, batch=SPLIT, steps=1, shrink=True, optimizer=optimizer, modes=["eager"]
    )
    assert report.passed, str(report)
    assert report.taken
    assert len(model.blocks) == 9


def test_blocks_that_the_model_needs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    class Numbered(Deep):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in range(9):
                x = self.blocks[i](x)
            return self.head(x)

    report = mw.verify(Numbered(), loss_fn, batch(), MESH, LAYOUTS, batch=SPLIT, steps=1, shrink=True, modes=["eager"])
    assert report.passed
    assert any("fewer layers do not fit this step: KeyError" in t for t in report.taken)
    assert not any(t.startswith("blocks:") for t in report.taken)


def test_what_does_not_fit_is_refused_with_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "memory", lambda: 1000)
    with pytest.raises(VerifyError, match=r"to verify Deep takes .* 0\.0 GB are free; blocks: 4 of 9.*Give a model"):
        mw.verify(Deep(), loss_fn, batch(), MESH, LAYOUTS, batch=SPLIT)
    report = mw.verify(Deep(3), loss_fn, batch(), MESH, {}, batch=SPLIT, shrink=False, modes="eager", steps=1)
    assert report.passed
    assert report.taken == ()


def test_more_seconds_than_asked_are_said() -> None:
    report = mw.verify(Deep(), loss_fn, batch(), MESH, LAYOUTS, batch=SPLIT, steps=1, modes=["eager"], seconds=1e-3)
    assert report.passed
    assert report.taken[0].startswith("as it was given it would take about")
    assert "more than seconds=0" in report.taken[-1]


def test_a_large_model_of_transformers_without_memory_for_it() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=300,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    torch.manual_seed(0)
    ids = torch.randint(300, (8, 512))
    layouts = {"*.[qkv]_proj.weight": ROWS, "*.o_proj.weight": COLUMNS, "*.down_proj.weight": COLUMNS}
    layouts |= {"*.gate_proj.weight": ROWS, "*.up_proj.weight": ROWS}
    report = mw.verify(
        model, lambda m, b: m(input_ids=b, labels=b).loss, ids, MESH, layouts, batch=SPLIT, steps=1, modes=["eager"]
    )
    assert report.passed, str(report)
    assert report.taken[1:] == (
        "model.layers: 2 of 16 blocks (0, 1)", "the batch: 2 of 8 along dim 0", "the batch: 32 of 512 along dim 1",
        "dims, with new values: head_dim 256 to 8, hidden_size 2048 to 64, intermediate_size 5632 to 176",
    )  # fmt: skip


def test_blocks_of_a_dim_shrink_with_it() -> None:
    """Queries, keys and values of GPT-2 are one weight, which ``mw.layouts`` splits by blocks."""
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=4, n_embd=128, vocab_size=64))
    ids = torch.randint(64, (4, 6))
    batch = {"input_ids": ids, "labels": ids}
    mesh = mw.Mesh({"dp": 2, "tp": 2})
    table = mw.layouts(model, mesh, batch)
    assert mw.Shard(1, (128, 128, 128)) in [p.get("tp") for p in table.values()]
    report = mw.verify(model, None, batch, mesh, table, shrink=True, modes=["eager"], steps=1, save=False)
    assert report.passed, report
    assert any("n_embd" in line or "hidden_size" in line for line in report.taken), report.taken
