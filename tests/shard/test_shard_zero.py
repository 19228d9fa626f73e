"""Parameters stored split over an axis: values, memory, and how often they are gathered."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from meshwright.shard.gradients import backward
from meshwright.shard.units import unit as units
from tests.support.shard_networks import TP, Block, batches, loss_of, net, same_values, trained

DP = mw.Mesh({"dp": 2})
THREE = mw.Mesh({"dp": 3})
BOTH = mw.Mesh({"dp": 2, "tp": 2})
IDS = batches(1)[0]


def split(ids: torch.Tensor, mesh: mw.Mesh) -> mw.DistTensor:
    return mw.shard_tensor(ids, mesh, {"dp": mw.Shard(0)})


def once(model: nn.Module, ids: torch.Tensor) -> None:
    loss_of(model, ids).backward()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize(("mesh", "placements"), [(DP, {}), (THREE, {}), (BOTH, TP)], ids=["dp", "dp-uneven", "dp-tp"])
def test_training_equals_one_device(
    mesh: mw.Mesh, placements: Any, reshard_after_forward: bool, checkpointed: bool
) -> None:
    data = batches()
    one = net()
    trained(one, torch.optim.AdamW(one.parameters(), lr=0.01), data, once, 0.1)

    def fn() -> None:
        model = mw.shard_module(net(), mesh, placements, fsdp="dp", reshard_after_forward=reshard_after_forward)
        model.checkpointed = checkpointed
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        trained(model, opt, [split(x, mesh) for x in data], once, 0.1)
        same_values(model, one)

    mw.simulate(fn, mesh)


def test_parameters_and_gradients_are_stored_split() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), DP, fsdp="dp")
        once(model, split(IDS, DP))
        for name, p in model.named_parameters():
            assert isinstance(p.placements[0], mw.Shard), name
            assert p.grad.spec.layout == p.spec.layout
            assert p.to_local().untyped_storage().nbytes() * 2 == p.numel() * 8, name

    mw.simulate(fn, DP)


def test_gathers_and_scatters_are_counted() -> None:
    """Per unit one all-gather forward and one backward; every gradient byte is scattered once."""

    def fn() -> None:
        model = mw.shard_module(net(), DP, fsdp="dp")
        for _ in range(3):
            loss = loss_of(model, split(IDS, DP))
            with collective.counting() as counts:
                loss.backward()
            model.zero_grad()
        size = sum(p.numel() for p in model.parameters()) * 8
        assert counts.bytes["reduce_scatter"] == size // 2
        assert "all_reduce" not in counts.kinds
        blocks = sum(p.numel() for p in model.blocks.parameters()) * 8
        assert blocks // 2 <= counts.bytes["all_gather"] <= size
        with collective.counting() as forward:
            loss_of(model, split(IDS, DP))
        assert forward.bytes["all_gather"] == size // 2 + model.emb.weight.numel() * 4  # the tied weight twice
        assert forward.kinds["all_gather"] == 5

    mw.simulate(fn, DP)


def test_what_no_backward_reads_is_not_gathered_for_it() -> None:
    """Not ahead of use either: an embedding in front of the blocks, one between them."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.between = nn.Embedding(16, 8), nn.Embedding(16, 8)
            self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.into(self.first(ids)) + self.between(ids))

    def fn() -> None:
        torch.manual_seed(0)
        model = mw.shard_module(Tables(), DP, fsdp="dp")
        for _ in range(3):
            made = model(split(IDS % 16, DP))
            with collective.counting() as counts:
                made.sum().backward()
        weights = model.into.weight.numel() + model.out.weight.numel()
        biases = model.into.bias.numel() + model.out.bias.numel()
        assert counts.kinds["all_gather"] == 2
        assert counts.bytes["all_gather"] == (weights + biases) * 4 // 2

    mw.simulate(fn, DP)


@pytest.mark.parametrize("precision", [None, mw.Precision(compute=torch.bfloat16)])
def test_what_was_gathered_is_gone_after_the_forward(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the backward is still to come: what autograd saved is a reference."""
    gathered = threading.local()  # of a rank
    gather = units.ParamGroup.gather

    def noted(unit: Any, **how: Any) -> list[torch.Tensor]:
        made = gather(unit, **how)
        gathered.refs += map(weakref.ref, made)
        return made

    monkeypatch.setattr(units.ParamGroup, "gather", noted)

    def fn() -> None:
        gathered.refs = []
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        model = mw.shard_module(net, DP, fsdp="dp", precision=precision)
        loss = model(mw.shard_tensor(torch.ones(4, 4), DP, {"dp": mw.Shard(0)})).sum()
        assert gathered.refs
        assert all(ref() is None for ref in gathered.refs)
        loss.backward()

    mw.simulate(fn, DP)


def test_whole_gradients_are_those_of_two_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank keeps its parts of what has been scattered."""
    whole: set[Any] = set()
    most = 0

    class Watched(backward.Scattering):
        def __init__(self, *args: Any) -> None:
            nonlocal most
            super().__init__(*args)
            whole.add(self)
            most = max(most, len(whole))

        def settle(self) -> None:
            super().settle()
            whole.discard(self)

    monkeypatch.setattr(units, "Scattering", Watched)

    def fn() -> None:
        model = mw.shard_module(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), DP, fsdp="dp")
        model(mw.shard_tensor(torch.ones(4, 4), DP, {"dp": mw.Shard(0)})).sum().backward()

    mw.simulate(fn, DP)
    assert not whole
    assert most == 2 * 2  # on each of two ranks


def test_without_resharding_the_backward_gathers_nothing() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), DP, fsdp="dp", reshard_after_forward=False)
        loss = loss_of(model, split(IDS, DP))
        with collective.counting() as counts:
            loss.backward()
        assert "all_gather" not in counts.kinds

    mw.simulate(fn, DP)


def test_accumulation_scatters_once() -> None:
    one = net()
    for _ in range(3):
        once(one, IDS)

    def fn() -> None:
        model = mw.shard_module(net(), DP, fsdp="dp")
        size = sum(p.numel() for p in model.parameters()) * 8
        for _ in range(2):
            model.zero_grad()
            with collective.counting() as counts:
                with mw.no_sync(model):
                    once(model, split(IDS, DP))
                    once(model, split(IDS, DP))
                    assert any(isinstance(p, mw.Partial) for p in model.scale.grad.placements)
                once(model, split(IDS, DP))
            same_values(model, one, grads=True)
            assert counts.bytes["reduce_scatter"] == size // 2

    mw.simulate(fn, DP)


def test_accumulation_on_top_of_a_synchronised_gradient() -> None:
    one = net()
    for _ in range(3):
        once(one, IDS)

    def fn(read: bool) -> None:
        model = mw.shard_module(net(), BOTH, TP, fsdp="dp")
        once(model, split(IDS, BOTH))
        with mw.no_sync(model):
            once(model, split(IDS, BOTH))
        if read:
            assert isinstance(model.scale.grad.placements[0], mw.Partial)
        once(model, split(IDS, BOTH))
        same_values(model, one, grads=True)

    for read in (False, True):
        mw.simulate(lambda read=read: fn(read), BOTH)


def test_some_parameters_only() -> None:
    one = net()
    once(one, IDS)

    def fn() -> None:
        model = mw.shard_module(net(), BOTH, TP, fsdp={"blocks.0.*": "dp", "blocks.1.norm.*": "tp"})
        assert model.blocks[0].norm.weight.placements == (mw.Shard(0), mw.Replicate())
        assert model.blocks[1].norm.weight.placements == (mw.Replicate(), mw.Shard(0))
        assert model.scale.spec.layout.is_replicated()
        once(model, split(IDS, BOTH))
        same_values(model, one, grads=True)

    mw.simulate(fn, BOTH)


def test_parameters_used_outside_their_module() -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    torch.manual_seed(0)
    one = nn.Sequential(Block(), Block()).double()
    (one(x) @ one[0].up.weight.t()).square().sum().backward()

    def fn() -> None:
        model = nn.Sequential(Block(), Block()).double()
        model.load_state_dict(one.state_dict())
        mw.shard_module(model, DP, fsdp="dp")
        dx = mw.shard_tensor(x, DP, {"dp": mw.Shard(0)})
        (model(dx) @ model[0].up.weight.t()).square().sum().backward()
        same_values(model, one, grads=True)

    mw.simulate(fn, DP)


def test_small_parameters_stay_whole() -> None:
    def fn() -> None:
        model = nn.Module()
        model.one, model.two, model.odd = (nn.Parameter(torch.ones(s)) for s in ((), (2,), (5, 9)))
        mw.shard_module(model, THREE, fsdp="dp")
        assert model.one.spec.layout.is_replicated()
        assert model.two.spec.layout.is_replicated()
        assert model.odd.placements == (mw.Shard(1),)

    mw.simulate(fn, THREE)


def test_a_step_between_forward_and_prefetch() -> None:
    """A gather that was started before the parameters changed is not used."""

    def fn() -> None:
        model = mw.shard_module(net(), DP, fsdp="dp")
        for _ in range(2):
            once(model, split(IDS, DP))
        unit = model.__dict__["_gradient_sync"] and next(
            h.unit for h in model.blocks[0]._forward_pre_hooks.values() if hasattr(h, "unit")
        )
        unit.start()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        (whole, *_) = unit.gather()
        torch.testing.assert_close(whole, mw.unshard(unit.params[0].detach()))

    mw.simulate(fn, DP)
