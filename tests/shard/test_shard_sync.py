"""Gradient synchronisation: values, number and bytes of collectives, and the corners of autograd."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from meshwright.errors import ShardError
from meshwright.ranks import runtime
from meshwright.shard.gradients.backward import Backward
from meshwright.shard.gradients.buckets import Buckets
from tests.support.shard_networks import TP, Net, batches, loss_of, net, same_values, trained

Tensor = torch.Tensor
DP = mw.Mesh({"dp": 2})
UNEVEN = mw.Mesh({"dp": 4})
BOTH = mw.Mesh({"dp": 2, "tp": 2})
IDS = batches(1)[0]


def split(ids: Tensor, mesh: mw.Mesh) -> mw.DistTensor:
    return mw.shard_tensor(ids, mesh, {"dp": mw.Shard(0)})


def once(model: nn.Module, ids: Tensor) -> None:
    loss_of(model, ids).backward()


def reference_grads() -> Net:
    model = net()
    once(model, IDS)
    return model


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [(DP, {}), (UNEVEN, {}), (mw.Mesh({"tp": 2, "dp": 1}), TP), (BOTH, TP), (BOTH, {})],
    ids=["dp", "dp-uneven", "tp", "dp-tp", "dp-replicated"],
)
def test_training_equals_one_device(mesh: mw.Mesh, placements: Any, clip: float | None) -> None:
    data = batches()
    one = net()
    trained(one, torch.optim.AdamW(one.parameters(), lr=0.01), data, once, clip)

    def fn() -> None:
        model = mw.shard_module(net(), mesh, placements)
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        trained(model, opt, [split(x, mesh) for x in data], once, clip)
        same_values(model, one)

    mw.simulate(fn, mesh)


def test_one_all_reduce_per_bucket_of_exactly_the_parameters_bytes() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), UNEVEN)
        n, size = 4, sum(p.numel() for p in model.parameters()) * 8
        for _ in range(3):
            loss = loss_of(model, split(IDS, UNEVEN))
            value = mw.unshard(loss)
            with collective.counting() as counts:
                loss.backward()
            assert counts.table == {("all_reduce", ("dp",)): [1, 2 * (n - 1) * size // n]}, counts
            assert value.requires_grad
            model.zero_grad()

    mw.simulate(fn, UNEVEN)


def test_small_buckets() -> None:
    one = reference_grads()

    def fn() -> None:
        model = mw.shard_module(net(), DP, bucket_bytes=600)
        for _ in range(3):
            with collective.counting() as counts:
                once(model, split(IDS, DP))
            same_values(model, one, grads=True)
            model.zero_grad()
        assert counts.kinds["all_reduce"] > 4

    mw.simulate(fn, DP)


def test_large_gradients_and_those_apart_travel_alone() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), DP)
        once(model, split(IDS, DP))  # which decides what gradients are
        params: Any = list(model.parameters())
        large = {i for i, p in enumerate(params) if p.numel() * p.element_size() >= 600}
        assert 0 < len(large) < len(params)
        small = min(set(range(len(params))) - large)
        made = Buckets(params, range(len(params)), 600, {small}).buckets
        alone = [b.members[0] for b in made if len(b.members) == 1]
        assert large <= set(alone)
        assert alone[-1] == made[-1].members[0] == small

    mw.simulate(fn, DP)


def test_a_bucket_without_one_of_its_gradients_is_sent_together() -> None:
    def fn() -> None:
        model = mw.shard_module(nn.ModuleList(nn.Linear(4, 4).double() for _ in range(3)), DP)
        x = mw.shard_tensor(torch.ones(4, 4, dtype=torch.float64), DP, {"dp": mw.Shard(0)})
        model[2](model[1](model[0](x))).square().mean().backward()
        with collective.counting() as counts:
            model[2](model[0](x)).square().mean().backward()
        assert counts.kinds == {"all_reduce": 1}

    mw.simulate(fn, DP)


def test_gradients_have_the_layout_of_their_parameters() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), BOTH, TP)
        once(model, split(IDS, BOTH))
        for p in model.parameters():
            assert p.grad is not None
            assert p.grad.spec.layout == p.spec.layout  # type: ignore[attr-defined]

    mw.simulate(fn, BOTH)


def test_over_an_axis_of_one_rank_nothing_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, started = mw.Mesh({"dp": 1, "tp": 2}), list[Any]()
    start = Backward._start
    monkeypatch.setattr(
        Backward, "_start", lambda self, bucket, *a: started.append(bucket.axes) or start(self, bucket, *a)
    )

    def run() -> None:
        model = mw.shard_module(net(), mesh, TP)
        for _ in range(2):  # the second is added to the first
            once(model, split(IDS, mesh))
        for p in model.parameters():
            assert p.grad is not None
            assert p.grad.spec.layout == p.spec.layout  # type: ignore[attr-defined]

    mw.simulate(run, mesh)
    assert set(started) <= {(1,)}  # gradients of what tp uses for its own part


def test_several_axes_are_reduced_over_one_flattened_group() -> None:
    mesh = mw.Mesh({"dp": 2, "sp": 2})
    model = nn.Linear(4, 4).double()
    x = torch.randn(4, 6, 4, dtype=torch.float64)
    model(x).square().mean().backward()
    want = model.weight.grad

    def fn() -> None:
        m = mw.shard_module(nn.Linear(4, 4).double(), mesh)
        m.load_state_dict(model.state_dict())
        loss = m(mw.shard_tensor(x, mesh, {"dp": mw.Shard(0), "sp": mw.Shard(1)})).square().mean()
        with collective.counting() as counts:
            loss.backward()
        assert counts.bytes_by_axes == {("dp", "sp"): 2 * 3 * 20 * 8 // 4}
        torch.testing.assert_close(mw.unshard(m.weight.grad), want)

    mw.simulate(fn, mesh)


# -- accumulation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placements", [{}, TP])
def test_accumulation_sends_the_gradients_once(placements: Any) -> None:
    one = net()
    for _ in range(3):
        once(one, IDS)

    def fn() -> None:
        model = mw.shard_module(net(), BOTH, placements)
        once(model, split(IDS, BOTH))
        model.zero_grad()
        with collective.counting() as plain:
            once(model, split(IDS, BOTH))
        model.zero_grad()
        with mw.no_sync(model), collective.counting() as quiet:
            once(model, split(IDS, BOTH))
            once(model, split(IDS, BOTH))
        assert any(isinstance(p, mw.Partial) for p in model.scale.grad.placements)
        with collective.counting() as last:
            once(model, split(IDS, BOTH))
        same_values(model, one, grads=True)
        assert last.table == plain.table
        total = quiet.bytes_by_axes.get(("dp",), 0)
        assert total <= 4 * 8 * 8, quiet  # what the loss itself needs, no gradients

    mw.simulate(fn, BOTH)


def test_backward_on_top_of_a_synchronised_gradient() -> None:
    one = net()
    for _ in range(3):
        once(one, IDS)

    def fn() -> None:
        model = mw.shard_module(net(), BOTH, TP)
        for _ in range(3):
            once(model, split(IDS, BOTH))
        same_values(model, one, grads=True)
        model.zero_grad()
        once(model, split(IDS, BOTH))
        with mw.no_sync(model):
            once(model, split(IDS, BOTH))
        once(model, split(IDS, BOTH))
        same_values(model, one, grads=True)
        model.zero_grad(set_to_none=False)
        for _ in range(3):
            once(model, split(IDS, BOTH))
        same_values(model, one, grads=True)

    mw.simulate(fn, BOTH)


def test_an_unused_parameter_with_accumulated_gradient_is_still_synchronised() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    one = nn.ModuleList([nn.Linear(3, 3).double() for _ in range(3)])
    one[0](x).sum().backward()
    one[1](x).sum().backward()

    def fn() -> None:
        model = mw.shard_module(nn.ModuleList([nn.Linear(3, 3).double() for _ in range(3)]), DP)
        model.load_state_dict(one.state_dict())
        dx = mw.shard_tensor(x, DP, {"dp": mw.Shard(0)})
        with mw.no_sync(model):
            model[0](dx).sum().backward()
        model[1](dx).sum().backward()
        same_values(model, one, grads=True)
        assert model[2].weight.grad is None

    mw.simulate(fn, DP)


def test_zero_grad_drops_what_was_accumulated() -> None:
    one = reference_grads()

    def fn(over: str | None) -> None:
        model = mw.shard_module(net(), DP, fsdp=over)
        with mw.no_sync(model):
            once(model, split(IDS, DP))
        model.zero_grad()
        once(model, split(IDS, DP))
        same_values(model, one, grads=True)

    for over in (None, "dp"):
        mw.simulate(lambda over=over: fn(over), DP)


def test_no_sync_needs_a_sharded_model() -> None:
    with pytest.raises(ShardError, match="shard_module"), mw.no_sync(nn.Linear(2, 2)):
        pass


# -- the corners of autograd -------------------------------------------------------------------------------

CORNERS = {}


def corner(fn: Any) -> Any:
    CORNERS[fn.__name__] = fn
    return fn


@corner
def retained(model: nn.Module, ids: Tensor) -> None:
    loss = loss_of(model, ids)
    loss.backward(retain_graph=True)
    loss.backward()


@corner
def two_forwards(model: nn.Module, ids: Tensor) -> None:
    (loss_of(model, ids) + 2 * loss_of(model, ids)).backward()


@corner
def given_inputs(model: Any, ids: Tensor) -> None:
    loss_of(model, ids).backward(inputs=[model.emb.weight, model.blocks[0].up.weight])


@corner
def create_graph(model: nn.Module, ids: Tensor) -> None:
    loss_of(model, ids).backward(create_graph=True)


@corner
def gradient_penalty(model: nn.Module, ids: Tensor) -> None:
    loss = loss_of(model, ids)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in grads)).backward()


@corner
def gradient_of_gradients(model: nn.Module, ids: Tensor) -> None:
    loss_of(model, ids).backward(create_graph=True)
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    sum(g.square().sum() for g in grads if g is not None).backward()  # type: ignore[union-attr]


@corner
def grad_beside_backward(model: nn.Module, ids: Tensor) -> None:
    once(model, ids)
    torch.autograd.grad(loss_of(model, ids), list(model.parameters()))
    once(model, ids)


@corner
def frozen_half_way(model: Any, ids: Tensor) -> None:
    once(model, ids)
    model.blocks[0].requires_grad_(False)
    once(model, ids)
    model.blocks[0].requires_grad_(True)
    once(model, ids)


@corner
def checkpointed(model: Any, ids: Tensor) -> None:
    model.checkpointed = True
    once(model, ids)
    once(model, ids)


@pytest.mark.thin(4)
@pytest.mark.parametrize("over", [None, "dp"])
@pytest.mark.parametrize(("name", "placements"), list(itertools.product(CORNERS, [{}, TP])))
def test_corners_of_autograd(name: str, placements: Any, over: str | None) -> None:
    one = net()
    CORNERS[name](one, IDS)

    def fn() -> None:
        model = mw.shard_module(net(), BOTH, placements, fsdp=over)
        CORNERS[name](model, split(IDS, BOTH))
        same_values(model, one, grads=True)
        model.zero_grad()
        CORNERS[name](model, split(IDS, BOTH))
        same_values(model, one, grads=True)

    mw.simulate(fn, BOTH)


def test_a_backward_that_raises_leaves_nothing_behind() -> None:
    one = reference_grads()

    def fn() -> None:
        model = mw.shard_module(net(), DP)
        for _ in range(2):
            handle = model.emb.weight.register_hook(lambda g: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                once(model, split(IDS, DP))
            handle.remove()
            model.zero_grad()
            once(model, split(IDS, DP))
            same_values(model, one, grads=True)
            model.zero_grad()

    mw.simulate(fn, DP)


def test_gradients_of_an_earlier_backward_stay_as_they_were() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), DP)
        kept = []
        for k in range(1, 4):
            model.zero_grad()
            (k * loss_of(model, split(IDS, DP))).backward()
            kept.append([p.grad for p in model.parameters()])
        for g1, g3 in zip(kept[0], kept[2], strict=True):
            torch.testing.assert_close(3 * mw.unshard(g1), mw.unshard(g3))

    mw.simulate(fn, DP)


def test_order_of_buckets_follows_the_first_backward() -> None:
    def fn() -> list[int]:
        model = mw.shard_module(net(), DP, bucket_bytes=200)
        sync = model.__dict__["_gradient_sync"]
        once(model, split(IDS, DP))
        model.zero_grad()
        once(model, split(IDS, DP))
        names = [sync.names[b.members[0]] for b in sync.buckets().buckets]
        assert names[0].startswith("blocks.1"), names
        return sync.order

    orders = mw.simulate(fn, DP)
    assert orders[0] == orders[1]


def test_ranks_count_alike() -> None:
    def fn() -> Any:
        model = mw.shard_module(net(), BOTH, TP)
        for _ in range(2):
            once(model, split(IDS, BOTH))
        return runtime.RT.counts.total_bytes

    assert len(set(mw.simulate(fn, BOTH))) == 1


@pytest.mark.parametrize("with_what", ["a new one", "each other"])
@pytest.mark.parametrize("to_none", [False, True])
def test_swapped_parameters_are_reduced_where_they_are(with_what: str, to_none: bool) -> None:
    def run(on_mesh: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)))
        x = torch.randn(6, 4, dtype=torch.float64)
        if on_mesh:
            model, x = mw.shard_module(model, DP, {}), mw.shard_tensor(x, DP, {"dp": mw.Shard(0)})
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(5):
            if step in (1, 3):
                first, second = model[0].weight, model[1].weight
                other = second if with_what == "each other" else nn.Parameter(first.detach() * 2)
                optimizer.zero_grad()
                torch.utils.swap_tensors(first, other)
            optimizer.zero_grad(set_to_none=to_none)
            model(x).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
        found += [p.detach() for p in model.parameters()]
        return [mw.unshard(t) if on_mesh else t for t in found]

    want = run(False)
    for made in mw.simulate(lambda: run(True), DP):
        torch.testing.assert_close(made, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("split", "placements", "unused"),
    [
        ({"dp": mw.Shard(0)}, {}, "tp"),
        ({}, {"0.*": {"tp": mw.Shard(0)}, "1.weight": {"tp": mw.Shard(1)}}, "dp"),
        ({"dp": mw.Shard(0), "tp": mw.Shard(1)}, {}, ""),
    ],
)
def test_an_axis_that_nothing_is_split_over_is_said_once(split: Any, placements: Any, unused: str) -> None:
    mesh = mw.Mesh({"dp": 2, "tp": 2})

    def run() -> None:
        model = mw.shard_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh, placements)
        for _ in range(2):
            model(mw.shard_tensor(torch.ones(4, 4), mesh, split)).sum().backward()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        mw.simulate(run, mesh)
    assert [str(w.message).split("'")[1] for w in told if "nothing is split" in str(w.message)] == [unused] * bool(
        unused
    )
    assert all(w.filename == __file__ for w in told)


@pytest.mark.parametrize("operation", ["zero", "multiply", "view"])
def test_an_assigned_whole_gradient_of_a_single_row_is_the_same_decision_on_all_ranks(operation: str) -> None:
    """It has the shape of the part on the rank that has the row, and not on the other: no fact to decide by."""
    mesh = mw.Mesh({"dp": 2})
    data = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)

    def norms(sharded: bool) -> list[float]:
        torch.manual_seed(0)
        model, x, seen = nn.Linear(6, 1).double(), data, []
        if sharded:
            mw.shard_module(model, mesh, {"*": {"dp": mw.Shard(0)}})
            x = mw.shard_tensor(data, mesh, {"dp": mw.Shard(0)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if sharded:
            mw.shard_optimizer(optimizer)
        for _ in range(3):
            model(x).square().mean().backward()
            for p in model.parameters():
                whole = mw.reshard(p.grad, {"dp": mw.Replicate()}) if sharded else p.grad.clone()
                p.grad = whole.view_as(p) if operation == "view" else whole
                if operation == "multiply":
                    p.grad.mul_(0.5)
            seen.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
            seen += [p.grad.norm().item() for p in model.parameters()]
            optimizer.step()
            seen += [p.norm().item() for p in model.parameters()]
            if operation == "zero":
                optimizer.zero_grad(set_to_none=False)
        return seen

    want = norms(sharded=False)
    for made in mw.simulate(lambda: norms(sharded=True), mesh):
        assert made == pytest.approx(want, rel=1e-12)
