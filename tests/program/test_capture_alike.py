"""Numbers that a captured step bakes in are the same on all ranks, or all of them raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import DesyncError
from meshwright.ranks import runtime

DP = mw.Mesh({"dp": 3})


def train(decay: float = 0.01, factor: float = 2.0, exponent: int = 2) -> list[float]:
    torch.manual_seed(0)
    m = nn.Linear(6, 4)
    opt = torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=decay)
    x = torch.randn(7, 6)

    def loss(m: Any, x: Any) -> Any:
        with torch.no_grad():
            scale = (x * factor).mean()
        return m(x).pow(exponent).mean() * scale

    step = mw.compile_step(m, loss, opt, x, mesh=DP, batch={"dp": mw.Shard(0)})
    return [float(step(x)) for _ in range(2)]


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({"decay": 0.9}, "'weight_decay', 0.9"),
        ({"factor": 3.0}, r"mul\.Tensor\(Node, 3\.0\)"),
        ({"exponent": 4}, r"pow\.Tensor_Scalar\(Node, 4\)"),
    ],
    ids=str,
)
def test_one_rank_has_another_number(own: dict[str, Any], text: str) -> None:
    with pytest.raises(DesyncError, match=f"the ranks captured different steps: .*{text}"):
        mw.simulate(lambda: train(**own if runtime.RT.rank == 1 else {}), DP)
    found = mw.simulate(train, DP)
    assert found[0] == found[1] == found[2]
