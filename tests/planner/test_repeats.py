"""Blocks that repeat: which are alike, what stands for what, and stages of them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch.nn as nn

from meshwright.planner.pipelines import cut, piped_seconds
from meshwright.planner.repeats import BlockRun, cut_to, repeats_of


class Net(nn.Module):
    def __init__(self, widths: list[int], other: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(w, w) for w in widths)
        self.more = nn.Sequential(*(nn.Linear(3, 3) for _ in range(other)))


def test_runs_of_blocks_that_are_alike() -> None:
    assert repeats_of(Net([4] * 3), 3).runs == ()
    found = repeats_of(Net([4, 4, 8, 8, 8, 8, 8, 4], other=5), 3)
    assert found.runs == (
        BlockRun("blocks", 0, 2), BlockRun("blocks", 2, 5), BlockRun("blocks", 7, 1), BlockRun("more", 0, 5),
    )  # fmt: skip
    assert found.kept == (2, 3, 1, 3)
    counts = found.counts()
    assert found.names("blocks.3.weight", counts) == ["blocks.3.weight", "blocks.4.weight", "blocks.5.weight"]
    assert found.names("blocks.4.weight", counts) == ["blocks.6.weight"]
    assert found.names("blocks.5", counts) == ["blocks.7"]
    assert found.names("more.0.bias", counts) == ["more.0.bias"]
    assert found.names("head", counts) == ["head"]
    fewer = (2, 2, 1, 3)
    assert found.names("blocks.3.weight", fewer) == []
    assert found.names("blocks.4.weight", fewer) == ["blocks.3.weight"]


def test_a_cut_model_is_whole_again() -> None:
    net = Net([4] * 7)
    names = [n for n, _ in net.named_parameters()]
    found = repeats_of(net, 3)
    with cut_to(net, found, (3,)):
        assert len(net.blocks) == 3
        assert [n for n, _ in net.named_parameters()] == names[:6]
    assert [n for n, _ in net.named_parameters()] == names
    covered = [n for i in range(3) for n in found.names(f"blocks.{i}", found.counts())]
    assert covered == [f"blocks.{i}" for i in range(7)]


def test_options_tell_blocks_apart_but_their_number_does_not() -> None:
    net = Net([4] * 6)
    for i, block in enumerate(net.blocks):
        block.layer_idx = i  # type: ignore[assignment]
    assert repeats_of(net, 3).runs == (BlockRun("blocks", 0, 6),)
    net.blocks[2].window = 5  # type: ignore[assignment]
    assert [r.count for r in repeats_of(net, 2).runs] == [2, 1, 3]


@pytest.mark.parametrize("seed", range(20))
def test_the_slowest_stage_is_the_fastest_possible(seed: int) -> None:
    draw = random.Random(seed)
    blocks, stages, ends = draw.randint(2, 9), draw.randint(1, 4), draw.choice([0.0, 0.5, 3.0])
    stages = min(stages, blocks)
    found = cut(blocks, stages, 1.0, ends)
    assert sum(s.blocks for s in found) == blocks
    assert min(s.blocks for s in found) >= 1
    ways = (c for c in itertools.product(range(1, blocks + 1), repeat=stages) if sum(c) == blocks)
    assert max(s.seconds for s in found) == min(max([*c[:-1], c[-1] + ends]) for c in ways)
    assert piped_seconds([1.0, 2.0], 3) == 7.0
