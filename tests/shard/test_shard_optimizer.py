"""Optimizers on distributed parameters: values, states, classes, schedulers and scalers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from meshwright.errors import MeshError, ShardError
from tests.support.shard_networks import TP, batches, loss_of, net, same_values, trained

DP = mw.Mesh({"dp": 2})
THREE = mw.Mesh({"dp": 3})
BOTH = mw.Mesh({"dp": 2, "tp": 2})
IDS = batches(1)[0]
O = torch.optim  # noqa: E741
KINDS: list[tuple[type[O.Optimizer], dict[str, Any]]] = [
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (O.AdamW, {"lr": 0.01, "foreach": True}),
    (O.AdamW, {"lr": 0.01, "fused": True}),
    (O.Adam, {"lr": 0.01, "amsgrad": True}),
    (O.Adagrad, {"lr": 0.1}),
    (O.Adadelta, {}),
    (O.Adamax, {}),
    (O.ASGD, {}),
    (O.NAdam, {}),
    (O.RAdam, {}),
    (O.RMSprop, {"lr": 0.01, "centered": True}),
    (O.Rprop, {}),
]
IDENTITY = [f"{k.__name__}-{'-'.join(map(str, o))}" for k, o in KINDS]


def split(ids: torch.Tensor, mesh: mw.Mesh) -> mw.DistTensor:
    return mw.shard_tensor(ids, mesh, {"dp": mw.Shard(0)})


def once(model: nn.Module, ids: torch.Tensor) -> None:
    loss_of(model, ids).backward()


def reference(kind: Any, options: Any, n: int = 3, clip: float | None = None) -> nn.Module:
    one = net()
    return trained(one, kind(one.parameters(), **options), batches(n), once, clip)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDENTITY)
def test_plain_optimizers_step_as_on_one_device(kind: Any, options: Any) -> None:
    one = reference(kind, options)

    def fn() -> None:
        model = mw.shard_module(net(), BOTH, TP)
        opt = kind(model.parameters(), **options)
        trained(model, opt, [split(x, BOTH) for x in batches()], once)
        same_values(model, one)
        assert all(type(p) is mw.DistTensor for p in model.parameters())

    mw.simulate(fn, BOTH)


@pytest.mark.parametrize(("mesh", "placements"), [(DP, {}), (THREE, {}), (BOTH, TP)], ids=["dp", "uneven", "dp-tp"])
@pytest.mark.parametrize(("kind", "options"), KINDS[:4], ids=IDENTITY[:4])
def test_shard_states_an_axis(kind: Any, options: Any, mesh: mw.Mesh, placements: Any) -> None:
    one = reference(kind, options, clip=0.1)

    def fn() -> None:
        model = mw.shard_module(net(), mesh, placements)
        opt = mw.shard_optimizer(kind(model.parameters(), **options), shard_states="dp")
        trained(model, opt, [split(x, mesh) for x in batches()], once, 0.1)
        same_values(model, one)
        held = sum(t.to_local().numel() for s in opt.state.values() for t in s.values() if t.dim())
        whole = sum(p.to_local().numel() for p in model.parameters()) * len([*opt.state[model.scale]])
        assert held <= whole / mesh.sizes[0] + 200

    mw.simulate(fn, mesh)


def test_shard_states_sends_each_byte_once() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), DP)
        size = sum(p.numel() for p in model.parameters()) * 8
        opt = mw.shard_optimizer(O.AdamW(model.parameters()), shard_states="dp")
        for _ in range(2):
            opt.zero_grad()
            with mw.no_sync(model):
                once(model, split(IDS, DP))
            loss = loss_of(model, split(IDS, DP))
            with collective.counting() as counts:
                loss.backward()
            with collective.counting() as update:
                opt.step()
            # One dim of 11 is uneven: a row is padded.
            assert counts.table.keys() == {("reduce_scatter", ("dp",))}
            assert counts.kinds["reduce_scatter"] == 1
            assert size // 2 <= counts.total_bytes <= size // 2 + 8 * 8
            assert update.table.keys() == {("all_gather", ("dp",))}
            assert size // 2 <= update.total_bytes <= size // 2 + 8 * 8
        assert model.blocks[0].up.weight.grad.placements == (mw.Shard(0),)

    mw.simulate(fn, DP)


@pytest.mark.parametrize("how", ["no_sync", "again", "kept"])
def test_accumulation_with_split_states(how: str) -> None:
    def accumulate(model: nn.Module, ids: torch.Tensor) -> None:
        if how == "no_sync" and isinstance(model.scale, mw.DistTensor):
            with mw.no_sync(model):
                once(model, ids)
        else:
            once(model, ids)
        once(model, ids)
        if how == "kept" and isinstance(model.scale, mw.DistTensor):
            with mw.no_sync(model):
                once(model, ids)
            assert isinstance(model.scale.grad.placements[0], mw.Partial)
        elif how == "kept":
            once(model, ids)

    one = net()
    trained(one, O.AdamW(one.parameters(), lr=0.01), batches(), accumulate, 0.1)

    def fn() -> None:
        model = mw.shard_module(net(), BOTH, TP)
        opt = mw.shard_optimizer(O.AdamW(model.parameters(), lr=0.01), shard_states="dp")
        trained(model, opt, [split(x, BOTH) for x in batches()], accumulate, 0.1)
        same_values(model, one)

    mw.simulate(fn, BOTH)


def test_split_states_and_stored_parameters_together() -> None:
    one = reference(O.AdamW, {"lr": 0.01})

    def fn() -> None:
        model = mw.shard_module(net(), DP, fsdp={"blocks.0.*": "dp"})
        opt = mw.shard_optimizer(O.AdamW(model.parameters(), lr=0.01), shard_states="dp")
        trained(model, opt, [split(x, DP) for x in batches()], once)
        same_values(model, one)

    mw.simulate(fn, DP)


# -- states --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [None, "dp"])
def test_state_dicts_cross_layouts(over: str | None) -> None:
    """Train 2 steps, move the state to another optimizer (whole or distributed, other layout), train 1 more."""
    one = reference(O.AdamW, {"lr": 0.01})
    two = net()
    opt_of_one_device = O.AdamW(two.parameters(), lr=0.01)
    trained(two, opt_of_one_device, batches(3)[:2], once)

    def adopt(model: nn.Module, state: Any, weights: Any) -> O.Optimizer:
        opt = O.AdamW(model.parameters(), lr=0.5)
        model.load_state_dict(weights)
        opt.load_state_dict(state)
        assert opt.param_groups[0]["lr"] == 0.01
        return opt

    def fn() -> None:
        model = mw.shard_module(net(), BOTH, TP)
        opt = mw.shard_optimizer(O.AdamW(model.parameters(), lr=0.01), shard_states=over)
        trained(model, opt, [split(x, BOTH) for x in batches(3)[:2]], once)
        state = copy.deepcopy(opt.state_dict())
        moment = state["state"][1]["exp_avg"]
        assert isinstance(moment, mw.DistTensor)
        names = [n for n, _ in model.named_parameters()]
        assert moment.shape == model.get_parameter(names[1]).shape
        for placements in ({}, TP):
            other = mw.shard_module(net(), BOTH, placements)
            adopted = adopt(other, copy.deepcopy(state), model.state_dict())
            trained(other, adopted, [split(batches(3)[2], BOTH)], once)
            same_values(other, one)
        from_whole = mw.shard_module(net(), BOTH, TP)
        adopted = adopt(from_whole, copy.deepcopy(opt_of_one_device.state_dict()), two.state_dict())
        adopted = mw.shard_optimizer(adopted, shard_states=over)
        trained(from_whole, adopted, [split(batches(3)[2], BOTH)], once)
        same_values(from_whole, one)

    mw.simulate(fn, BOTH)


def test_a_state_of_a_wrong_shape() -> None:
    def fn() -> None:
        model = mw.shard_module(nn.Linear(4, 4), DP, {"weight": {"dp": mw.Shard(0)}})
        opt = O.SGD(model.parameters(), 0.1, momentum=0.9)
        state = opt.state_dict()
        state["state"] = {0: {"momentum_buffer": torch.ones(3, 4)}}
        opt.load_state_dict(state)
        model(mw.shard_tensor(torch.ones(2, 4), DP, {})).sum().backward()
        opt.step()

    with pytest.raises(ValueError, match=r"'momentum_buffer' of weight has shape \(3, 4\).*\(4, 4\)"):
        mw.simulate(fn, DP)


# -- other mechanisms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [None, "dp"])
@pytest.mark.parametrize("early", [False, True])
def test_schedulers(over: str | None, early: bool) -> None:
    one = net()
    opt = O.SGD(one.parameters(), 0.1, momentum=0.9)
    scheduler = O.lr_scheduler.StepLR(opt, 1, 0.5)
    for ids in batches():
        trained(one, opt, [ids], once)
        scheduler.step()

    def fn() -> None:
        model = mw.shard_module(net(), BOTH, TP)
        opt = O.SGD(model.parameters(), 0.1, momentum=0.9)
        scheduler = O.lr_scheduler.StepLR(opt, 1, 0.5) if early else None
        assert mw.shard_optimizer(opt, shard_states=over) is opt
        scheduler = scheduler or O.lr_scheduler.StepLR(opt, 1, 0.5)
        for ids in batches():
            trained(model, opt, [split(ids, BOTH)], once)
            scheduler.step()
        same_values(model, one)

    mw.simulate(fn, BOTH)


@pytest.mark.parametrize("over", [None, "dp"])
def test_closures(over: str | None) -> None:
    one = net()
    opt = O.SGD(one.parameters(), 0.1)

    def closure(model: nn.Module, ids: torch.Tensor, opt: O.Optimizer) -> torch.Tensor:
        opt.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        return loss

    for ids in batches():
        want = opt.step(lambda ids=ids: closure(one, ids, opt))

    def fn() -> None:
        model = mw.shard_module(net(), BOTH, TP)
        opt = mw.shard_optimizer(O.SGD(model.parameters(), 0.1), shard_states=over)
        for ids in batches():
            got = opt.step(lambda ids=ids: closure(model, split(ids, BOTH), opt))
        torch.testing.assert_close(mw.unshard(got.detach()), want.detach())
        same_values(model, one)

    mw.simulate(fn, BOTH)


@pytest.mark.parametrize("over", [None, "dp"])
def test_a_step_that_raises_leaves_the_parameters_distributed(over: str | None) -> None:
    class Broken(O.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("broken")

    def fn() -> None:
        model = mw.shard_module(net(), BOTH, TP)
        opt = mw.shard_optimizer(Broken(model.parameters(), 0.1), shard_states=over, by="element")
        once(model, split(IDS, BOTH))
        with pytest.raises(RuntimeError, match="broken"):
            opt.step()
        assert all(type(p) is mw.DistTensor for g in opt.param_groups for p in g["params"])
        assert all(type(p.grad) is mw.DistTensor for p in model.parameters())

    mw.simulate(fn, BOTH)


@pytest.mark.parametrize("over", [None, "dp"])
def test_grad_scaler(over: str | None) -> None:
    """All ranks skip a step in which any of them found an infinity, and unscale alike."""
    one = net()
    opt = O.SGD(one.parameters(), 0.1)
    once(one, batches(1)[0])
    opt.step()

    def fn() -> None:
        model = mw.shard_module(net(), BOTH, TP)
        opt = mw.shard_optimizer(O.SGD(model.parameters(), 0.1), shard_states=over)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for bad in (True, False):
            opt.zero_grad()
            scaler.scale(loss_of(model, split(IDS, BOTH))).backward()
            if bad and mw.ranks.runtime.RT.rank == 3:
                model.blocks[0].up.weight.grad.to_local()[0, 0] = float("inf")
            scaler.step(opt)
            scaler.update()
            assert scaler.get_scale() == 512.0
        same_values(model, one)

    mw.simulate(fn, BOTH)


def test_groups_and_plain_parameters() -> None:
    one, extra = net(), nn.Parameter(torch.ones(3, dtype=torch.float64))
    opt = O.AdamW([{"params": [one.scale], "lr": 0.1}, {"params": [extra]}], lr=0.01)
    opt.add_param_group({"params": list(one.blocks.parameters())})

    def step(model: Any, plain: nn.Parameter, opt: O.Optimizer, ids: torch.Tensor) -> None:
        opt.zero_grad()
        (loss_of(model, ids)).backward()
        plain.grad = torch.ones_like(plain)
        opt.step()

    for ids in batches():
        step(one, extra, opt, ids)

    def fn() -> None:
        model, plain = mw.shard_module(net(), BOTH, TP), nn.Parameter(torch.ones(3, dtype=torch.float64))
        opt = O.AdamW([{"params": [model.scale], "lr": 0.1}, {"params": [plain]}], lr=0.01)
        for k, ids in enumerate(batches()):
            if k == 0:
                opt.add_param_group({"params": list(model.blocks.parameters())})
            step(model, plain, opt, split(ids, BOTH))
        same_values(model, one)
        torch.testing.assert_close(plain, extra)

    mw.simulate(fn, BOTH)


# -- classes and mistakes ------------------------------------------------------------------------------------


class Mine(O.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-0.01)


def test_sparse_adam_is_refused() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), BOTH, TP)
        mw.shard_optimizer(O.SparseAdam(list(model.blocks.parameters())))

    with pytest.raises(ShardError, match="SparseAdam expects sparse gradients"):
        mw.simulate(fn, BOTH)


@pytest.mark.parametrize("make", [lambda p: O.Adafactor(p), lambda p: Mine(p)])
def test_they_run_on_replicated_parameters(make: Any) -> None:
    one = net()
    trained(one, make(one.parameters()), batches(), once)

    def fn() -> None:
        model = mw.shard_module(net(), DP)
        trained(model, make(model.parameters()), [split(x, DP) for x in batches()], once)
        same_values(model, one)

    mw.simulate(fn, DP)


def test_lbfgs_on_replicated_parameters() -> None:
    x = torch.randn(6, 3, dtype=torch.float64)
    one = nn.Linear(3, 1).double()
    start = copy.deepcopy(one.state_dict())

    def fit(model: nn.Module, x: torch.Tensor) -> Any:
        opt = O.LBFGS(model.parameters(), max_iter=4)

        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        return opt.step(closure)

    want = fit(one, x)

    def fn() -> None:
        model = nn.Linear(3, 1).double()
        model.load_state_dict(start)
        mw.shard_module(model, DP)
        loss = fit(model, mw.shard_tensor(x, DP, {"dp": mw.Shard(0)}))
        assert isinstance(loss, mw.DistTensor)  # what the closure gave, as on one device
        assert loss.detach().item() == pytest.approx(want.item())
        same_values(model, one)

    mw.simulate(fn, DP)


def test_own_class_declared_elementwise() -> None:
    one = net()
    trained(one, Mine(one.parameters()), batches(), once)

    def fn(over: str | None) -> None:
        model = mw.shard_module(net(), BOTH, TP)
        opt = mw.shard_optimizer(Mine(model.parameters()), by="element", shard_states=over)
        trained(model, opt, [split(x, BOTH) for x in batches()], once)
        same_values(model, one)

    for over in (None, "dp"):
        mw.simulate(lambda over=over: fn(over), BOTH)


def test_gradients_of_other_layouts() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), BOTH, TP)
        with mw.no_sync(model):
            once(model, split(IDS, BOTH))
        plain = O.SGD(model.parameters(), 0.1)
        with pytest.raises(ShardError, match=r"gradient of (scale|emb.weight) is still Partial.*mw.no_sync"):
            plain.step()
        assert type(model.scale) is mw.DistTensor
        grad = mw.reshard(model.scale.grad, {"dp": mw.Shard(0), "tp": mw.Replicate()})
        lonely = O.SGD([model.scale], 0.1)
        model.scale.grad = grad
        with pytest.raises(ShardError, match=r"gradient of scale lies as .*shard_optimizer"):
            lonely.step()
        one = net()
        once(one, IDS)
        O.SGD(one.parameters(), 0.1).step()
        mw.shard_optimizer(plain).step()
        same_values(model, one)

    mw.simulate(fn, BOTH)


@pytest.mark.parametrize("placements", [{}, {"tp": mw.Shard(0)}], ids=["whole", "split"])
def test_gradients_that_nobody_clears_are_added_to(placements: Any) -> None:
    """Of parameters without a sharded module: what a step has summed, and what each rank then contributes."""

    def values(mesh: mw.Mesh | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        start, x = torch.randn(4, 3), torch.randn(6, 4)
        w = nn.Parameter(mw.shard_tensor(start, mesh, placements) if mesh else start)
        opt = O.AdamW([w], lr=0.1)
        if mesh:
            x, opt = split(x, mesh), mw.shard_optimizer(opt)
        found = []
        for step in range(4):
            (x @ w).square().mean().backward()
            opt.step()
            found += [mw.unshard(t.detach()) if mesh else t.detach().clone() for t in (w, w.grad)]
            if step == 2:
                opt.zero_grad()
        return found

    for got in mw.simulate(lambda: values(BOTH), BOTH):
        torch.testing.assert_close(got, values(None))


def test_mistakes() -> None:
    def fn() -> None:
        with pytest.raises(ShardError, match=r"mw.shard_module\(model"):
            mw.shard_optimizer(O.SGD(nn.Linear(2, 2).parameters()))
        with pytest.raises(ShardError, match="not list"):
            mw.shard_optimizer([])  # type: ignore[arg-type]
        model = mw.shard_module(nn.Linear(2, 2), DP)
        with pytest.raises(MeshError, match="'pp'"):
            mw.shard_optimizer(O.SGD(model.parameters()), shard_states="pp")

    mw.simulate(fn, DP)


def _turned(m: Any) -> None:
    m.weight.data = m.weight.data.t()


def _turned_in_memory(m: Any) -> None:
    with torch.no_grad():
        m.weight.set_(m.weight.detach().t())


def _partial(m: Any) -> None:
    m.bias.data = m.weight.data.sum(1)


def _from_a_vector(m: Any) -> None:
    vector = nn.utils.parameters_to_vector(m.parameters())  # its graph is alive below
    nn.utils.vector_to_parameters(vector * 2, m.parameters())


@pytest.mark.parametrize("n", [6, 5, 1])
@pytest.mark.parametrize("write", [_turned, _turned_in_memory, _partial, _from_a_vector])
def test_a_parameter_keeps_its_layout_when_its_data_are_set(write: Any, n: int) -> None:
    """States of the optimizer, and graphs from before, are about the layout that it had."""
    x = torch.linspace(-1, 1, 4 * n, dtype=torch.float64).view(4, n)

    def run(mesh: mw.Mesh | None) -> nn.Linear:
        torch.manual_seed(0)
        m = nn.Linear(n, n, dtype=torch.float64)
        here = x
        if mesh is not None:
            layouts = dict(zip(mesh.axes, (mw.Shard(0), mw.Shard(1)), strict=False))
            m = mw.shard_module(m, mesh, {"weight": layouts})
            here = mw.shard_tensor(x, mesh, {mesh.axes[0]: mw.Shard(0)})
        before = m.weight.spec.layout if mesh is not None else None
        opt = torch.optim.AdamW(m.parameters(), lr=0.1)
        for step in range(3):
            opt.zero_grad()
            y = m(here)
            if step == 1:
                write(m)
                y.square().mean().backward()  # of the graph from before
            m(here).square().mean().backward()
            opt.step()
        assert before is None or m.weight.spec.layout == before
        return m

    want = run(None)
    for mesh in (BOTH, THREE):
        mw.simulate(lambda mesh=mesh: same_values(run(mesh), want), mesh)


@pytest.mark.parametrize("over", [{"shard_states": "dp"}, {"fsdp": "dp"}, {}])
def test_a_copy_goes_on_as_the_optimizer_that_it_is_of(over: dict[str, str]) -> None:
    """Copied or pickled with its model, twice too: with what it was told of the mesh, and the states' parts."""
    mesh, x = mw.Mesh({"dp": 2}), torch.randn(8, 6, generator=torch.Generator().manual_seed(0))

    def train() -> tuple[list[float], ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        mw.shard_module(model, mesh, fsdp=over.get("fsdp"))
        mw.shard_optimizer(opt, shard_states=over.get("shard_states"))

        def steps(model: nn.Module, opt: torch.optim.Optimizer, n: int) -> list[float]:
            losses = []
            for _ in range(n):
                loss = model(mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)})).square().mean()
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(loss.item())
            return losses

        steps(model, opt, 1)
        copies = [copy.deepcopy((model, opt)), copy.deepcopy(copy.deepcopy((model, opt)))]
        states = opt.state_dict()["state"][0]["exp_avg"].to_local().shape
        found = [steps(m, o, 3) for m, o in [*copies, (model, opt)]]
        for _, o in copies:
            assert o.state_dict()["state"][0]["exp_avg"].to_local().shape == states
        return tuple(found)

    for one, two, own in mw.simulate(train, mesh):
        assert one == two == own
