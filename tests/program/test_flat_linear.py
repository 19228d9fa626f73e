"""A linear layer between a flatten and its inverse: rows stay where they are, in steps with passes and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw

Tensor = torch.Tensor


class Attends(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=batch_first)
        self.layers = nn.ModuleList([self.layer, nn.Linear(8, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


class Flattens(nn.Module):
    """Two linear layers of one flatten; what is flat is read in another way, too."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.a, self.b, self.layers = nn.Linear(8, 4, bias=False), nn.Linear(8, 6), nn.ModuleList([nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        flat = y.reshape(-1, 8)
        a, b = self.a(flat).view(*y.shape[:2], 4), self.b(flat).view(*y.shape[:2], 2, 3)
        return a.transpose(0, 1).sum(-1) * b.transpose(0, 1).sum((-1, -2))


def stepped(of: Any, batch_first: bool, count: int, axes: dict[str, int] | None, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = of(batch_first).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(count, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    x = x if batch_first else x.transpose(0, 1).contiguous()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    if axes is None:
        loss(model, x).backward()
        optimizer.step()
        return [p.detach() for p in model.parameters()]
    dim = 0 if batch_first else 1
    batch = {"dp": mw.Shard(dim)} if "dp" in axes else None
    step = mw.compile_step(model, loss, optimizer, x, mesh=mw.Mesh(axes), batch=batch, **options)
    for _ in range(2 if "gradient-merge" in str(options) else 1):
        step(x)
    forward = [c for c in step.explain().collectives if c.role == "forward" and c.shape]
    return [mw.unshard(p).detach() for p in model.parameters()], forward


MERGE = {"passes": ["data-parallel-optimization", "gradient-merge:k_steps=2"]}
PIPELINE = {"passes": ["pipeline:micro_batches=2"], "stages": {"pp": "layers"}}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("of", [Attends, Flattens])
@pytest.mark.parametrize(
    ("axes", "count", "options"),
    [({"dp": 2}, 4, {}), ({"dp": 3}, 4, {}), ({"dp": 2}, 1, {}), ({"dp": 2}, 3, MERGE), ({"pp": 2}, 4, PIPELINE)],
)
def test_rows_stay_where_they_are(of: Any, batch_first: bool, axes: Any, count: int, options: Any) -> None:
    if options is PIPELINE and not (of is Attends and batch_first):  # without batch= rows are of the first dim
        options, axes = MERGE, {"dp": 2}
    mesh, expected = mw.Mesh(axes), stepped(of, batch_first, count, None, {})
    for made, sent in mw.simulate(lambda: stepped(of, batch_first, count, axes, options), mesh):
        torch.testing.assert_close(made, expected)
        # An uneven split of rows is none of rows times heads.
        assert not sent or of is Flattens or count % mesh.size
