"""What several ranks compute for themselves from the same values is the same bit by bit, however their parts lie."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

import meshwright as mw

MESH = mw.Mesh({"a": 2, "b": 2, "c": 2})


class Normed(nn.Module):
    """A linear behind a norm of channels: of three columns one rank has one, which is contiguous as two are not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.GroupNorm(1, 3), nn.Linear(3, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return made


@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_of_a_bias_behind_columns_that_are_split_unevenly(seed: int) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(seed)
        model = Normed().double()
        laid = {"norm.weight": {"c": mw.Shard(0)}, "head.bias": {"a": mw.Shard(0)}}
        mw.shard_module(model, MESH, laid, fsdp="b")
        x, labels = torch.randn(2, 3, 3, dtype=torch.float64), torch.randint(0, 3, (2, 3))
        made = model(mw.shard_tensor(x, MESH, {})).log_softmax(-1).transpose(1, 2)
        nn.functional.nll_loss(made, mw.shard_tensor(labels, MESH, {})).backward()
        grad = model.head.bias.grad
        assert isinstance(grad, mw.DistTensor)
        return grad.to_local().clone()

    made = mw.simulate(run, MESH)
    for half in (made[:4], made[4:]):
        assert all(torch.equal(half[0], other) for other in half)
