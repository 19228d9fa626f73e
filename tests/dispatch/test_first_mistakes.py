"""Mistakes of a first day: each is an error that says what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.errors import CaptureError, DesyncError, LayoutError, RuleError, ShardError
from meshwright.ranks import runtime
from meshwright.rules.factor_notation import RULES

MESH = mw.Mesh({"dp": 2})
ROWS = {"dp": mw.Shard(0)}


def rows(*shape: int) -> torch.Tensor:
    return mw.shard_tensor(torch.ones(shape), MESH, ROWS)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        made, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return made.square().mean()


def capture_packed() -> None:
    model, batch = Packed(), (torch.ones(4, 5, 3), torch.tensor([5, 3, 2, 4]))
    mw.compile_step(model, lambda m, b: m(*b), None, batch, mesh=MESH)


def read_on_one_rank() -> None:
    loss = rows(4, 3).sum()
    if mw.rank() == 0:
        loss.item()


def other_rows_on_each_rank() -> torch.Tensor:
    return mw.unshard(rows(5, 3)[mw.rank() :: 2])


PART = r"this rank's part of .*mw\.from_local\(t, mesh, \{'dp': mw\.Shard\(0\)\}\)"
MISTAKES: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "a part as targets": (lambda: F.cross_entropy(rows(4, 3), torch.ones(2, dtype=torch.long)), ValueError, PART),
    "a part as values": (lambda: F.mse_loss(rows(4, 3), torch.ones(2, 3)), RuntimeError, PART),
    "a part in arithmetic": (lambda: rows(4, 3) - torch.ones(2, 3), RuntimeError, PART),
    "an axis as placements": (
        lambda: mw.shard_module(nn.Linear(2, 2), MESH, "dp"), LayoutError, "'dp' is no file .* Pass a dict",
    ),
    "an axis in place of names": (
        lambda: mw.shard_module(nn.Linear(2, 2), MESH, ROWS), ShardError,
        r'Pass \{"\*\.weight": \{\'dp\': Shard\(0\)\}\}',
    ),
    "a value read on one rank": (read_on_one_rank, DesyncError, "read it on every rank"),
    "rows of a rank": (other_rows_on_each_rank, DesyncError, r"collective\n  rank 0: .* at test_first_mis"),
    "packed sequences": (capture_packed, CaptureError, "pass the padded batch to the RNN"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    call, error, text = MISTAKES[name]
    with pytest.raises(error, match=text):
        mw.simulate(call, MESH)


def test_a_rule_that_returns_text() -> None:
    mw.rule("special_erfcx")(lambda x: "a b -> a b")  # type: ignore[arg-type,return-value]
    try:
        with pytest.raises(RuleError, match=re.escape("returned 'a b -> a b'. Return notation(")):
            mw.simulate(lambda: torch.special.erfcx(rows(4, 3)), MESH)
    finally:
        RULES.pop("special_erfcx")


def test_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "RT", runtime.Runtime())
    assert mw.rank() == 0
    assert mw.simulate(mw.rank, MESH) == [0, 1]
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert mw.rank() == 3, "before the process group is there"
    assert mw.simulate(mw.rank, MESH) == [0, 1]
