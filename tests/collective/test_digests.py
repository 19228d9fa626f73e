"""Digests, by which ranks compare values: other values, other numbers, whatever the difference looks like."""

from __future__ import annotations

import itertools

import pytest
import torch

import meshwright as mw
from meshwright.collective import digests
from meshwright.errors import DesyncError

MESH = mw.Mesh({"dp": 2})


@pytest.mark.parametrize("whole", [True, False])
def test_generators_that_drew_other_counts(whole: bool) -> None:
    """Two counters of the state change by one, up and down: a plain sum would not tell them."""
    generator = torch.Generator().manual_seed(0)
    states = []
    for _ in range(1300):  # over two refills
        states.append(generator.get_state())
        torch.rand(1, generator=generator)
    assert len(set(digests(states, whole=whole))) == len(states)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.float64, torch.bool, torch.bfloat16])
def test_values_that_change_places_or_cancel(dtype: torch.dtype) -> None:
    """Every pair of places swapped, and every pair changed up and down by as much."""
    values = [torch.zeros(9, dtype=dtype)]
    for i, j in itertools.permutations(range(9), 2):
        made = torch.zeros(9, dtype=dtype)
        made[i] = 1
        values.append(made)
        other = made.clone()
        other[j] = 1
        values += [other] if i < j else []
        if dtype.is_signed:
            values.append(made - torch.eye(9, dtype=dtype)[j])
    distinct = {tuple(v.tolist()) for v in values}
    assert len(set(digests(values))) == len(distinct)


def test_wherever_it_lies() -> None:
    x = torch.randn(300, 301)
    assert len(set(digests([x, x.clone(), x.T.contiguous().T, torch.cat([x, x])[300:], x[:, :]]))) == 1
    assert len(set(digests([x, x.T, x.flip(0), x.double(), -x]))) == 5
    large = torch.zeros(1 << 17)
    changed = large.clone()
    changed[-1] = 1e-30
    assert len(set(digests([large, changed]))) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_of_one_element_whose_stride_is_not_one(dtype: torch.dtype) -> None:
    apart = torch.ones(4, dtype=dtype)[::2][:1]  # contiguous, says PyTorch
    assert digests([apart]) == digests([torch.ones(1, dtype=dtype)])


def test_ranks_whose_generators_are_out_of_step_are_told() -> None:
    def train() -> None:
        torch.manual_seed(0)
        torch.rand(1 + mw.ranks.runtime.RT.rank)
        mw.shard_module(torch.nn.Linear(2, 2, device="meta"), MESH, {"*": {"dp": mw.Replicate()}})

    with pytest.raises(DesyncError, match="different values of the default random generator"):
        mw.simulate(train, MESH)
