"""What a loss is a mean over is decided from global shapes: by what crosses a mesh axis of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.errors import PassError
from meshwright.passes import GradientMerge

Tensor = torch.Tensor
F64 = torch.float64
Loss = Callable[[Any, Any], Tensor]
CLASSES = torch.linspace(0.5, 2.0, 5, dtype=F64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, dtype=F64), nn.Linear(6, 5, dtype=F64)
        self.share = nn.Parameter(torch.tensor(0.7, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh())
        return out


def batch_of(rows: int, seed: int, ignored: float = 0.4) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (rows, 3), generator=g)
    y = y.masked_fill(torch.rand(rows, 3, generator=g) < ignored, -100)
    return {"x": torch.randn(rows, 3, 4, generator=g, dtype=F64), "y": y, "num": (y != -100).sum()}


def flat(m: Any, b: Any) -> tuple[Tensor, Tensor]:
    return m(b["x"]).flatten(0, 1), b["y"].flatten()


def each(m: Any, b: Any) -> Tensor:
    return F.cross_entropy(*flat(m, b), reduction="none")


def kept(b: Any) -> Tensor:
    return (b["y"] != -100).flatten()


def total(m: Any, b: Any) -> Tensor:
    return (each(m, b) * kept(b)).sum()


def squares(m: Any, b: Any) -> Tensor:
    return m(b["x"]).square().sum((1, 2))  # type: ignore[no-any-return]


RIGHT: dict[str, Loss] = {
    "maximum": lambda m, b: total(m, b) / torch.maximum(kept(b).sum(), torch.tensor(1)),
    "nan_to_num": lambda m, b: torch.nan_to_num(F.cross_entropy(*flat(m, b))),
    "reciprocal": lambda m, b: total(m, b) * kept(b).sum().reciprocal(),
    "dot": lambda m, b: torch.dot(each(m, b), torch.ones(len(each(m, b)), dtype=F64)) / kept(b).sum(),
    "divided inside": lambda m, b: (each(m, b) / kept(b).sum() * kept(b)).sum(),
    "classes, smoothed": lambda m, b: F.cross_entropy(*flat(m, b), weight=CLASSES, label_smoothing=0.1),
    "and logits": lambda m, b: (
        F.cross_entropy(*flat(m, b)) + 0.1 * (m(b["x"]).logsumexp(-1).square() * (b["y"] != -100)).sum() / kept(b).sum()
    ),
    "two heads": lambda m, b: (
        F.cross_entropy(*flat(m, b)) + F.cross_entropy(m(-b["x"]).flatten(0, 1), b["y"].flatten())
    ),
    "by a number of the batch": lambda m, b: total(m, b) / b["num"],
    "by a number of the batch, not below one": lambda m, b: total(m, b) / b["num"].clamp(min=1),
    "learnt share": lambda m, b: m.share * F.cross_entropy(*flat(m, b)),
    "sequence means": lambda m, b: (
        (m(b["x"]).square().mean(-1) * (b["y"] > 1)).sum(1) / (b["y"] > 1).sum(1).clamp(min=1)
    ).mean(),
    "own classes": lambda m, b: F.cross_entropy(m(b["x"])[:, 0], torch.zeros(len(b["x"]), dtype=torch.long)),
    "and a penalty": lambda m, b: F.cross_entropy(*flat(m, b)) + 0.1 * m.up.weight.square().mean(),
    "and a penalty, by one at least": lambda m, b: (
        total(m, b) / kept(b).sum().clamp(min=1) + 0.1 * m.up.weight.square().mean()
    ),
    "smoothed": lambda m, b: F.cross_entropy(*flat(m, b), label_smoothing=0.1),
    # One row for all rows, as models have positions, class tokens and queries.
    "repeated bias": lambda m, b: F.cross_entropy(
        (m(b["x"]) + m.down.bias.expand(len(b["x"]), 3, 5)).flatten(0, 1), b["y"].flatten()
    ),
    "repeated positions": lambda m, b: F.cross_entropy(
        m(b["x"] + F.embedding(torch.arange(3).expand(len(b["x"]), -1), m.up.weight)).flatten(0, 1), b["y"].flatten()
    ),
    "a token in front": lambda m, b: (
        m(torch.cat([m.up.bias[:4].expand(len(b["x"]), 1, -1), b["x"]], 1))[:, 0].square().mean()
    ),
    "repeated queries": lambda m, b: (
        F.scaled_dot_product_attention(m.up.weight.repeat(len(b["x"]), 1, 1).tanh(), b["x"], b["x"]).square().mean()
    ),
}


def joined(parts: Sequence[Any]) -> dict[str, Tensor]:
    made = {k: torch.cat([p[k] for p in parts]) for k in ("x", "y")}
    return {**made, "num": torch.stack([p["num"] for p in parts]).sum()}


def one_device(loss: Loss, parts: Sequence[Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net()
    loss(model, joined(parts)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [p.detach() for p in model.parameters()]


def merged(loss: Loss, parts: Sequence[Any], axes: dict[str, int], **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model, mesh = Net(), mw.Mesh(axes)
    batch = {k: {"dp": mw.Shard(0)} for k in ("x", "y")}
    step = mw.compile_step(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.1), parts[0], mesh=mesh,
        **{"batch": batch, "passes": [GradientMerge(len(parts))], **options},
    )  # fmt: skip
    for part in parts:
        step(part)
    return [mw.unshard(p.detach()) for p in model.parameters()]


def same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.thin(4)
@pytest.mark.parametrize(("ranks", "rows"), [(2, (4, 2, 3)), (2, (2, 2)), (3, (2, 2))], ids=str)  # none on the last
@pytest.mark.parametrize("name", RIGHT)
def test_the_step_of_one_device(name: str, ranks: int, rows: Sequence[int]) -> None:
    parts = [batch_of(n, i) for i, n in enumerate(rows)]
    parts[1]["y"].fill_(-100)  # nothing of it counts
    parts[1]["num"].zero_()
    want = one_device(RIGHT[name], parts)
    axes = {"dp": ranks}
    for got in mw.simulate(lambda: merged(RIGHT[name], parts, axes), mw.Mesh(axes)):
        same(got, want)


def _hardest(m: Any, b: Any) -> Tensor:
    return squares(m, b).topk(1).values.sum()


MIXED: dict[str, Loss] = {
    "softmax": lambda m, b: (squares(m, b).softmax(0) * squares(m, b)).sum(),
    "hardest": _hardest,
    "contrastive": lambda m, b: F.cross_entropy(m(b["x"])[:, 0] @ m(b["x"])[:, 1].t(), torch.arange(len(b["x"]))),
    "balanced": lambda m, b: (squares(m, b) / (1 + (b["y"][:, :1] == b["y"][:, 0]).sum(1))).mean(),
    "largest": lambda m, b: squares(m, b).max(),
    "deviation": lambda m, b: (squares(m, b) - squares(m, b).mean()).square().mean(),
    "ranked": lambda m, b: (squares(m, b).sort().values * torch.arange(len(b["x"]))).mean(),
    "scan": lambda m, b: squares(m, b).cumsum(0).mean(),
    "neighbours": lambda m, b: (squares(m, b) * squares(m, b).roll(1)).mean(),
    "root": lambda m, b: squares(m, b).mean().sqrt(),
    "first row": lambda m, b: m.down.weight[b["y"][0].clamp(min=0)].sum() * squares(m, b).mean(),
    "first row alone": lambda m, b: m(b["x"])[0].sum(),
    "a mean, repeated": lambda m, b: squares(m, b).mean().expand(len(b["x"])).sum(),
    "a sum beside each": lambda m, b: (squares(m, b) + squares(m, b).sum()).sum(),
    "a penalty for each row": lambda m, b: squares(m, b).mean() + m.share.expand(len(b["x"])).square().sum(),
    "a sum and a penalty": lambda m, b: squares(m, b).sum() + m.share.square(),
    "a penalty repeated": lambda m, b: squares(m, b).mean() + m.up.weight.repeat(len(b["x"]), 1, 1).square().sum(),
    "a mean beside each": lambda m, b: (m(b["x"]) + squares(m, b).mean().expand(len(b["x"]), 3, 5)).square().mean(),
    "ones by rows": lambda m, b: squares(m, b).sum() / (torch.ones(len(b["x"])).sum() + 1),
}


@pytest.mark.parametrize("rows", [4, 2, 1])
@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_is_refused_at_any_size(name: str, rows: int) -> None:
    """One row on each rank, or none on some, are no other step."""
    mesh = mw.Mesh({"dp": 2})
    with pytest.raises(PassError, match=r"test_micro_batch_axis.py:\d+: .*weighted=False"):
        mw.simulate(lambda: merged(MIXED[name], [batch_of(rows, 0), batch_of(rows, 1)], {"dp": 2}), mesh)


def _squares_of(out: Tensor) -> Tensor:
    return out.square().mean()


def _view_where_possible(m: Any, b: Any) -> Tensor:
    x = m(b["x"].transpose(0, 1).contiguous().transpose(0, 1))
    return _squares_of(x.view(-1, 5) if x.is_contiguous() else x.reshape(-1, 5))


STRIDES: dict[str, Loss] = {
    "transposed, contiguous": lambda m, b: _squares_of(m(b["x"].transpose(0, 1).contiguous().transpose(0, 1))),
    "contiguous": lambda m, b: _squares_of(m(b["x"].contiguous().view(-1, 4))),
    "beside itself": lambda m, b: _squares_of(m(b["x"]) * m(b["x"].transpose(0, 1).contiguous()).transpose(0, 1)),
    "a view where possible": _view_where_possible,
    "positions outermost, as a view": lambda m, b: _squares_of(m(b["x"].mT.mT.reshape(b["x"].shape))),
}
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "row-major": lambda x: x,
    "positions first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda x: torch.stack([x, x], 1).flatten(1, 2)[:, ::2],
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.thin(3)
def test_strides_say_nothing_of_rows(name: str, order: str, rows: int) -> None:
    """A dim of one row has any stride, so that code may call other ops than for two; a batch of twice the rows has its
    dims in the same order in memory."""
    parts = [batch_of(rows, i) for i in range(2)]
    parts = [{**p, "x": ORDERS[order](p["x"])} for p in parts]
    want = one_device(STRIDES[name], parts)
    for got in mw.simulate(lambda: merged(STRIDES[name], parts, {"dp": 2}), mw.Mesh({"dp": 2})):
        same(got, want)


SECOND: dict[str, Loss] = {
    "softmax": lambda m, b: (m(b["x"]).square().sum(-1).softmax(1)).square().mean(),
    "deviation": lambda m, b: (m(b["x"]) - m(b["x"]).mean(1, keepdim=True)).square().mean(),
    "neighbours": lambda m, b: (m(b["x"]) * m(b["x"]).roll(1, 1)).mean(),
    "scan": lambda m, b: m(b["x"]).cumsum(1).mean(),
}


@pytest.mark.parametrize("name", SECOND)
def test_rows_in_the_second_dim(name: str) -> None:
    """A batch that is sharded on dim 1 alone may have its rows there: what mixes them is refused, or said."""
    mesh = mw.Mesh({"dp": 2})
    parts = [{k: v.transpose(0, 1).contiguous() if v.ndim else v for k, v in batch_of(2, i).items()} for i in range(2)]
    batch = {k: {"dp": mw.Shard(1)} for k in ("x", "y")}
    with pytest.raises(PassError, match=r"pass rows_dim= to GradientMerge"):
        mw.simulate(lambda: merged(SECOND[name], parts, {"dp": 2}, batch=batch), mesh)
    passes = [GradientMerge(2, rows_dim=1)]
    with pytest.raises(PassError, match="no weighted mean"):
        mw.simulate(lambda: merged(SECOND[name], parts, {"dp": 2}, batch=batch, passes=passes), mesh)
    passes = [GradientMerge(2, rows_dim=0)]
    got = mw.simulate(lambda: merged(SECOND[name], parts, {"dp": 2}, batch=batch, passes=passes), mesh)[0]
    same(got, one_device(SECOND[name], parts))


def test_means_over_each_row_of_a_sequence() -> None:
    """Where the first dim is a sequence, each row has its own divisor: that is no weight of a micro-batch."""
    mesh = mw.Mesh({"tp": 2})

    def over(dim: int) -> Loss:
        def loss(m: Any, b: Any) -> Tensor:
            mask = b["y"] != -100
            return ((m(b["x"]).square().mean(-1) * mask).sum(dim) / mask.sum(dim).clamp(min=1)).mean()

        return loss

    rows = [batch_of(2, i) for i in range(2)]
    parts = [{k: v.transpose(0, 1).contiguous() if v.ndim else v for k, v in p.items()} for p in rows]
    with pytest.raises(PassError, match=r"divided by 2 different sums.*pass rows_dim= to GradientMerge"):
        mw.simulate(lambda: merged(over(0), parts, {"tp": 2}, batch={}), mesh)
    passes = [GradientMerge(2, rows_dim=1)]
    got = mw.simulate(lambda: merged(over(0), parts, {"tp": 2}, batch={}, passes=passes), mesh)[0]
    same(got, one_device(over(1), rows))


@pytest.mark.parametrize("rows_dim", [-1, "0", 0.5])
def test_rows_dim_is_a_number(rows_dim: Any) -> None:
    with pytest.raises(PassError, match="rows_dim"):
        GradientMerge(2, rows_dim=rows_dim)
