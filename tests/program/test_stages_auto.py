"""``stages={"pp": "auto"}``: stages that take equally long, of models of any shape; and one device's numbers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.errors import LayoutError
from meshwright.program.capture import balance
from meshwright.program.capture.export import capture
from meshwright.program.capture.stages import Stages, stages_of
from tests.support import stages

Tensor = torch.Tensor


def linears(n: int, *sizes: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(*sizes) for _ in range(n))


class Skips(nn.Module):
    """A U-Net: each block on the way up takes what one on the way down gave."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.out = linears(4, 6, 6), linears(4, 12, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x).relu()
            kept.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], -1)).relu()
        return self.out(x)


class Towers(nn.Module):
    """Two, of other sizes, that meet at the end; a penalty on what one of them has."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
        self.large, self.meet = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6))), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.meet(self.small(x)) * self.large(x + 1) + 0.1 * self.small[0].weight.square().sum()


class EncoderDecoder(nn.Module):
    """The decoder's blocks all look at what the encoder gave."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.encoder, self.decoder = nn.Linear(6, 6), linears(3, 6, 6), linears(3, 12, 6)
        self.start, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.into(x)
        for layer in self.encoder:
            seen = seen + layer(seen).relu()
        h = self.start(x.flip(1))
        for layer in self.decoder:
            h = h + layer(torch.cat([h, seen], -1)).relu()
        return self.out(h)


def laid(model: nn.Module, batch: Any, ranks: int, loss: Any = lambda m, x: m(x).square().mean()) -> Stages:
    mesh = mw.Mesh({"pp": ranks})
    found = stages_of(model, capture(model, loss, batch), mesh, {"pp": "auto"})
    assert found is not None
    assert sum(found.shares) == pytest.approx(1)
    return found


def test_blocks_stay_whole_and_what_is_at_the_ends_counts() -> None:
    """An embedding takes little, a head as much as several blocks: the last stage has fewer of these."""
    head = nn.Linear(64, 256)  # four blocks
    model = nn.Sequential(nn.Embedding(64, 64), *(nn.Linear(64, 64) for _ in range(16)), head)
    found = laid(model, torch.zeros(64, dtype=torch.long), 4)
    assert found.modules == ("0 to 5", "6 to 10", "11 to 16", "17")
    blocks = laid(stages.Net(blocks=(stages.Attention,) * 8), torch.zeros(8, 5, dtype=torch.long), 2)
    assert blocks.modules == ("tokens, layers.0 to 3", "layers.4 to 7, norm, head")


@pytest.mark.parametrize("kind", [Skips, Towers, EncoderDecoder])
def test_equals_one_device(kind: Callable[[], nn.Module]) -> None:
    """Cut into three and run by a schedule."""
    x = torch.randn(6, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def made() -> nn.Module:
        torch.manual_seed(0)
        return kind().double()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    def run() -> tuple[float, dict[str, Tensor], list[str]]:
        model = made()
        step = mw.compile_step(
            model, loss, torch.optim.SGD(model.parameters(), lr=0.1), x, mesh=mw.Mesh({"pp": 3}),
            stages={"pp": "auto"}, passes=["pipeline:micro_batches=3"],
        )  # fmt: skip
        told = [str(e) for e in step.ledger if e.asked.startswith("stage ")]
        return step(x).item(), stages.whole(model), told

    alone = made()
    wanted = loss(alone, x)
    wanted.backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    for found, params, told in mw.simulate(run, mw.Mesh({"pp": 3})):
        assert found == pytest.approx(wanted.item(), rel=1e-13)
        assert max((params[n] - p).abs().max().item() for n, p in alone.named_parameters()) < 1e-13
        assert len(told) == 3
        assert told[2].startswith("stages stage 2 of 3: applied: ")
        assert "% of the work: " in told[2]


def test_no_other_cut_is_much_faster() -> None:
    """Of random sequences, against all ways to cut them; of equally good ones the cheapest."""
    draw = random.Random(0)
    for _ in range(60):
        n, count = draw.randint(3, 9), draw.randint(2, 3)
        parts = [draw.random() for _ in range(n)]
        held = [draw.random() ** 4 for _ in range(n)]
        time, memory = ([sum(x[:i]) / sum(x) for i in range(n + 1)] for x in (parts, held))
        prices = [0.0, *(float(draw.randint(1, 3)) for _ in range(n - 1)), 0.0]

        def most(cuts: Any, of: list[float], n: int = n) -> float:
            return max(of[b] - of[a] for a, b in itertools.pairwise([0, *cuts, n]))

        ways = list(itertools.combinations(range(1, n), count - 1))
        room = max(2 / count, min(most(w, memory) for w in ways))
        ways = [w for w in ways if most(w, memory) <= room]
        best = min(most(w, time) for w in ways)
        good = [w for w in ways if most(w, time) <= balance._NEARLY * best]
        found = balance._cut(time, memory, prices, count)
        assert tuple(found) in good
        assert sum(prices[i] for i in found) == min(sum(prices[i] for i in w) for w in good)


def test_parameters_are_bounded() -> None:
    """A table takes no time to look at, and is more than its part of what the stages have: it is alone."""
    model = nn.Sequential(nn.Embedding(3000, 16), *(nn.Linear(16, 16) for _ in range(11)))
    assert laid(model, torch.zeros(4, dtype=torch.long), 4).modules == ("0", "1 to 4", "5 to 8", "9 to 11")


def test_a_checkpointed_call_is_not_cut() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears(4, 6, 6)

        def forward(self, x: Tensor) -> Tensor:
            first, *_ = self.layers
            x = checkpoint(lambda y: self.layers[2](self.layers[1](first(y))), x, use_reentrant=False)  # type: ignore[assignment]
            return self.layers[3](x)

    assert laid(Checkpointed(), torch.zeros(4, 6), 2).modules == ("layers.0 to 2", "layers.3")
    with pytest.raises(
        LayoutError, match=r"can be cut into 2 parts .* less than 3 stages: take fewer stages .* checkp"
    ):
        laid(Checkpointed(), torch.zeros(4, 6), 3)
