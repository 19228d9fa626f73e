"""Parameters that are stored on the host: the numbers of those that are not, and what is copied when."""

from __future__ import annotations

import contextlib
import copy
import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective, compat
from meshwright.collective.host_tensors import from_elsewhere
from meshwright.errors import CaptureError, CollectiveError, DesyncError, ShardError
from meshwright.ranks import runtime
from meshwright.shard.gradients import backward as backwards
from meshwright.shard.parameters import host
from meshwright.shard.parameters.stored import on_host
from meshwright.tensor import GradientHook
from tests.support.device import DEVICE
from tests.support.shard_networks import TP, batches, loss_of, net, same_values, trained

ONE, DP, THREE = mw.Mesh({"dp": 1}), mw.Mesh({"dp": 2}), mw.Mesh({"dp": 3})
BOTH, ONLY_TP = mw.Mesh({"dp": 2, "tp": 2}), mw.Mesh({"tp": 2})
LOW = mw.Precision(compute=torch.float32, reduce=torch.float32)
IDS = batches(1)[0]


def split(ids: torch.Tensor, mesh: mw.Mesh) -> mw.DistTensor:
    return mw.shard_tensor(ids, mesh, {"dp": mw.Shard(0)} if "dp" in mesh.axes else {})


def weights_after(mesh: mw.Mesh, micro: int = 1, states: Any = None, checkpointed: bool = False, **options: Any) -> Any:
    """Parameters after three steps, on each rank, with the copies that were made."""

    def fn() -> Any:
        placements = TP if "tp" in mesh.axes else {}
        model = mw.shard_module(net(), mesh, placements, **options)
        model.checkpointed = checkpointed
        opt = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), shard_states=states)
        with collective.counting() as counts:
            for ids in batches(3):
                for k in range(micro):
                    with contextlib.nullcontext() if k == micro - 1 else mw.no_sync(model):
                        loss_of(model, split(ids, mesh)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                opt.step()
                opt.zero_grad()
        return {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}, counts

    return mw.simulate(fn, mesh)


CASES: dict[str, tuple[mw.Mesh, dict[str, Any]]] = {
    "one rank": (ONE, {}),
    "dp": (DP, {}),
    "uneven": (THREE, {"fsdp": "dp"}),
    "dp, precision": (DP, {"precision": LOW, "micro": 2}),
    "stored over dp": (DP, {"fsdp": "dp"}),
    "stored over dp, kept": (DP, {"fsdp": "dp", "reshard_after_forward": False, "checkpointed": True}),
    "stored over dp, precision": (DP, {"fsdp": "dp", "precision": LOW, "checkpointed": True}),
    "stored over dp, wire": (DP, {"fsdp": "dp", "precision": mw.Precision(grad_comm=mw.Float8()), "micro": 2}),
    "wire": (DP, {"precision": mw.Precision(grad_comm=mw.Float8())}),
    "states over dp": (DP, {"states": "dp", "micro": 2}),
    "tp": (ONLY_TP, {"checkpointed": True}),
    "dp x tp": (BOTH, {"fsdp": "dp", "micro": 2}),
    "dp x tp, whole": (BOTH, {"micro": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_wherever_parameters_are_stored(name: str) -> None:
    mesh, options = CASES[name]
    for (want, before), (found, after) in zip(
        weights_after(mesh, **options), weights_after(mesh, offload="cpu", **options), strict=True
    ):
        assert all(torch.equal(found[n], want[n]) for n in want)
        assert not before.copies
        assert {"to_device", "to_host"} == after.copies.keys()


@pytest.mark.parametrize("options", [{}, {"fsdp": "dp"}], ids=["whole", "split"])
def test_training_equals_one_device(options: Any) -> None:
    data = batches()
    one = net()
    trained(one, torch.optim.AdamW(one.parameters(), lr=0.01), data, lambda m, x: loss_of(m, x).backward(), 0.1)

    def fn() -> None:
        model = mw.shard_module(net(), DP, offload="cpu", **options)
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        trained(model, opt, [split(x, DP) for x in data], lambda m, x: loss_of(m, x).backward(), 0.1)
        same_values(model, one)

    mw.simulate(fn, DP)


@pytest.mark.parametrize("over", [None, "dp"])
def test_what_is_copied(over: str | None) -> None:
    """Parameters as they are stored, for the forward and, where the backward needs them, again; gradients once."""

    def fn() -> None:
        model = mw.shard_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), DP, fsdp=over, offload="cpu")
        share = 1 if over is None else 2
        stored = (4 * 4 + 4 + 2 * 4 + 2) * 4 // share
        x = mw.shard_tensor(torch.randn(2, 4), DP, {"dp": mw.Shard(0)})
        for _ in range(2):  # the second time with the next unit's on their way
            with mw.explain() as why:
                loss = model(x).sum()
            assert why.counts.copies == {"to_device": [4, stored]}
            with mw.explain() as why:
                loss.backward()
            again = (2 * 4 + 2) * 4 // share  # the weight of the first layer is not needed: x does not learn
            assert why.counts.copies["to_device"][1] == again
            assert why.counts.copies["to_host"][1] == stored
            model.zero_grad()
        assert f"copies: 2 to device ({again} bytes), " in str(why)
        assert why.to_dict()["copies"]["to_host"]["bytes"] == stored
        assert "copy to host" in why.text()

    mw.simulate(fn, DP)


def test_only_some_parameters() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), DP, fsdp={"blocks.*": "dp"}, offload={"blocks.*": "cpu"})
        assert {n for n, p in model.named_parameters() if on_host(p)} == {
            n for n, _ in model.named_parameters() if n.startswith("blocks")
        }
        loss_of(model, split(IDS, DP)).backward()
        same_gradients(model)

    mw.simulate(fn, DP)


def same_gradients(model: nn.Module, times: int = 1) -> None:
    one = net()
    for _ in range(times):
        loss_of(one, IDS).backward()
    for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mw.unshard(p.grad), q.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("over", [None, "dp"])
def test_accumulation_hooks_and_freezing(over: str | None) -> None:
    def fn() -> None:
        model = mw.shard_module(net(), DP, fsdp=over, offload="cpu")
        ids = split(IDS, DP)
        loss_of(model, ids).backward()
        loss_of(model, ids).backward()  # to the gradient of before, which is there
        with mw.no_sync(model):
            loss_of(model, ids).backward()
        loss_of(model, ids).backward()
        same_gradients(model, 4)
        model.zero_grad()

        seen: list[Any] = []
        p = model.blocks[0].up.weight
        first = p.register_hook(lambda g: seen.append(g.shape))
        second = p.register_post_accumulate_grad_hook(lambda q: seen.append(mw.unshard(q.grad).norm()))
        loss_of(model, ids).backward()
        assert seen[0] == p.shape
        assert torch.equal(seen[1], mw.unshard(p.grad).norm())
        same_gradients(model)
        first.remove()
        second.remove()
        model.zero_grad()

        p.requires_grad_(False)
        loss_of(model, ids).backward()
        assert p.grad is None
        p.requires_grad_(True)
        model.zero_grad()
        loss_of(model, ids).backward()
        same_gradients(model)

    mw.simulate(fn, DP)


@pytest.mark.parametrize("over", [None, "dp"])
def test_gradients_by_name_and_of_gradients(over: str | None) -> None:
    one = net()
    names = [n for n, _ in one.named_parameters()]
    (w, *_) = first = torch.autograd.grad(loss_of(one, IDS), list(one.parameters()), create_graph=True)
    w.square().sum().backward()

    def fn() -> None:
        model = mw.shard_module(net(), DP, fsdp=over, offload="cpu")
        made = torch.autograd.grad(loss_of(model, split(IDS, DP)), list(model.parameters()), create_graph=True)
        for g, want in zip(made, first, strict=True):
            torch.testing.assert_close(mw.unshard(g.detach()), want.detach())
        made[0].square().sum().backward()
        for name, p, q in zip(names, model.parameters(), one.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(mw.unshard(p.grad), q.grad, msg=lambda t, name=name: f"{name}: {t}")

    mw.simulate(fn, DP)


def test_a_module_that_runs_twice_and_a_backward_that_raises() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: Any) -> Any:
            return self.body(torch.tanh(self.body(x)))

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            raise RuntimeError("no")

    one, data = Twice(), torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    one(data).square().sum().backward()

    def fn() -> None:
        model = mw.shard_module(Twice(), DP, fsdp="dp", offload="cpu")
        x = mw.shard_tensor(data, DP, {"dp": mw.Shard(0)}).requires_grad_()
        with pytest.raises(RuntimeError, match="no"):
            model(Fails.apply(torch.tanh(x))).square().sum().backward()
        model.zero_grad()
        model(x).square().sum().backward()
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(mw.unshard(p.grad), q.grad)

    mw.simulate(fn, DP)


def test_copies_saved_states_and_writes() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), DP, fsdp="dp", offload="cpu")
        ids = split(IDS, DP)
        loss_of(model, ids)
        state = {n: torch.zeros_like(mw.unshard(t)) for n, t in model.state_dict().items()}
        model.load_state_dict(state)  # what was on its way for the next forward is copied anew
        assert not mw.unshard(model(ids).detach()).any()

        with torch.no_grad():
            model.emb.weight.data.fill_(1.0)  # counted nowhere
            model.blocks[1].norm.bias.copy_(torch.ones(8, dtype=torch.float64))
        assert (mw.unshard(model(ids).detach()) == 8).all()

        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert all(on_host(p) for p in other.parameters())
            loss_of(other, ids).backward()
            assert (mw.unshard(other(ids).detach()) == 8).all()

    mw.simulate(fn, DP)


def test_checkpoints_go_between_the_places(tmp_path: Path) -> None:
    def made(**options: Any) -> Any:
        model = mw.shard_module(net(), DP, fsdp="dp", **options)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        loss_of(model, split(IDS, DP)).backward()
        opt.step()
        opt.zero_grad()

    def fn() -> None:
        hosted, kept = made(offload="cpu"), made()
        step(*hosted)
        places = mw.Checkpoints(tmp_path / "checkpoints")
        places.save(1, wait=True, model=hosted[0], optimizer=hosted[1])
        places.load(model=kept[0], optimizer=kept[1])
        again = made(offload={"*": "cpu"})
        places.load(model=again[0], optimizer=again[1])
        for one in (hosted, kept, again):
            step(*one)
            for p, q in zip(one[0].parameters(), hosted[0].parameters(), strict=True):
                assert torch.equal(p.to_local(), q.to_local())

    mw.simulate(fn, DP)


def test_a_scaled_loss_and_other_threads() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), ONE, offload="cpu")
        scaler, opt = torch.amp.GradScaler(DEVICE, init_scale=8.0), torch.optim.SGD(model.parameters(), lr=0.0)
        ids = split(IDS, ONE)
        scaler.scale(loss_of(model, ids)).backward()
        scaler.unscale_(opt)
        same_gradients(model)
        model.zero_grad()

        loss_of(model, ids)  # what it began for the next one stays this thread's
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(model.blocks[0].up.weight.sum().item()))
        thread.start()
        thread.join()
        assert seen == [pytest.approx(net().blocks[0].up.weight.sum().item())]
        loss_of(model, ids).backward()
        same_gradients(model)

    mw.simulate(fn, ONE)


def test_values_from_the_meta_device() -> None:
    def fn() -> None:
        with torch.device("meta"):
            made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        torch.manual_seed(0)
        model = mw.shard_module(made, DP, fsdp="dp", offload="cpu")
        torch.manual_seed(0)
        for p, q in zip(model.parameters(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).parameters(), strict=True):
            assert on_host(p)
            assert torch.equal(mw.unshard(p.detach()), q)

    mw.simulate(fn, DP)


# ---------------------------------------------------------------------------------------------- another device


def test_a_leaf_that_is_served_in_another_thread_belongs_to_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd serves leaves on the host in the thread that asked, and what a device computes in the device's."""

    def fn() -> None:
        model = mw.shard_module(net(), ONE, offload="cpu")
        sync: Any = model.__dict__["_gradient_sync"]
        monkeypatch.setattr(compat, "current_graph_task_id", lambda: 7)
        made = backwards.Backward(sync)
        monkeypatch.setattr("meshwright.shard.gradients.sync.begin", lambda _: made)
        found = [sync.backward()]
        thread = threading.Thread(target=lambda: found.append(sync.backward()))
        thread.start()
        thread.join()
        assert found == [made, made]

    mw.simulate(fn, ONE)


def test_a_leaf_on_the_host_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two threads would, in an order that differs by rank."""
    served: list[str] = []
    real = backwards.Backward.ready

    def ready(self: Any, i: int, reached: bool) -> None:
        served.append(self.sync.names[i])
        real(self, i, reached)

    monkeypatch.setattr(backwards.Backward, "ready", ready)

    def fn() -> None:
        model = mw.shard_module(net(), DP, fsdp="dp", offload={"blocks.*": "cpu"})
        loss_of(model, split(IDS, DP)).backward()
        same_gradients(model)

    mw.simulate(fn, DP)
    assert served
    assert not [n for n in served if n.startswith("blocks")]


def test_hooks_beside_a_backward_do_not_communicate() -> None:
    def fn() -> None:
        mesh = mw.Mesh({"dp": 2}, device="cuda")
        p = mw.shard_tensor(torch.ones(2), DP, {})
        p._spec = p._spec.with_(layout=mw.Layout(mesh, {"dp": mw.Replicate()}), grad_partial_mask=1, undecided_mask=0)
        assert torch.equal(GradientHook(p, lambda g: g * 2)(torch.ones(2)), torch.full((2,), 2.0))
        with pytest.raises(CollectiveError, match="runs beside the backward of the device and cannot communicate"):
            GradientHook(p, mw.unshard)(torch.ones(2))

    mw.simulate(fn, DP)


def test_collectives_of_what_lies_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a copy on the device of their group, and the result is copied back."""

    def fn() -> tuple[Any, Any, Any]:
        group = collective.group(DP)
        away = collective.Group(group.ranks, group.index, group.axes, "far", group.pg)
        moved: list[Any] = []
        monkeypatch.setattr(torch.Tensor, "to", lambda t, *a, **k: (moved.append(a), t.clone())[1])
        t = torch.ones(2)
        kept = from_elsewhere(collective.all_reduce)(t, "sum", away, out_of_place=False)
        part = from_elsewhere(collective.all_gather_async)(t, 0, [2, 2], away).wait()
        sent = from_elsewhere(collective.sum_async, writes=True)(t, away, torch.bfloat16)
        sent.advance()
        assert sent.wait() is t is kept
        return t, part, moved

    for t, part, moved in mw.simulate(fn, DP):
        assert t.tolist() == [4, 4]
        assert part.tolist() == [2, 2, 2, 2]
        assert ("far",) in moved


class Streams:
    """Stands for ``torch.cuda``: what is asked of streams and events, in order."""

    def __init__(self) -> None:
        self.now, self.log = "ops", list[str]()

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> str:
        return self.now

    def Stream(self, device: int) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.log.append(f"behind {other}"))

    @contextlib.contextmanager
    def stream(self, side: Any) -> Any:
        before, self.now = self.now, "side"
        yield
        self.now = before

    def Event(self) -> Any:
        name = f"copy {len([e for e in self.log if e.endswith('begun')])}"
        return SimpleNamespace(
            record=lambda side: self.log.append(f"{name} begun"),
            synchronize=lambda: self.log.append(f"{name} awaited"),
        )


def test_copies_on_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins behind what ops were given before, that of the next unit before this one's is awaited."""
    streams = Streams()
    for name in ("current_device", "current_stream", "Stream", "stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(streams, name))
    monkeypatch.setattr(host, "pins", lambda device: True)
    monkeypatch.setattr(host, "_side", lambda device, back: streams.Stream(device))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)

    def fn() -> None:
        model = mw.shard_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), ONE, offload="cpu")
        x = mw.shard_tensor(torch.randn(2, 4), ONE, {})
        for _ in range(2):
            streams.log.clear()
            model(x).sum().backward()

    mw.simulate(fn, ONE)
    ahead = ["behind ops", "copy 0 begun", "behind ops", "copy 1 begun", "copy 0 awaited", "copy 1 awaited"]
    assert streams.log == [*ahead, "behind ops", "copy 2 begun", "copy 2 awaited"]  # the last for the backward


def test_the_device_that_code_of_a_model_asks_for() -> None:
    """Inside its forward the device where ops see a parameter, outside that where it is stored."""
    seen: list[Any] = []

    class Asks(nn.Linear):
        def forward(self, x: Any) -> Any:
            from meshwright.tensor.substitutes import OPEN

            OPEN.scopes[-1].unit.zero.mesh = mw.Mesh({"dp": 1}, device="meta")
            seen.append((self.weight.device.type, self.weight.is_cpu, self.weight.is_cuda, self.weight.is_meta))
            OPEN.scopes[-1].unit.zero.mesh = ONE
            return super().forward(x)

    def fn() -> None:
        model = mw.shard_module(Asks(2, 2), ONE, offload="cpu")
        model(mw.shard_tensor(torch.ones(1, 2), ONE, {}))
        assert model.weight.device.type == "cpu"

    mw.simulate(fn, ONE)
    assert seen == [("meta", False, False, False)]


# ---------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "cuda"}, "offload='cuda': 'cpu' was expected"),
        ({"offload": {"blocks.*": "disk"}}, "offload='disk'"),
        ({"offload": {"nothing.*": "cpu"}}, "nothing"),
        ({"offload": "cpu", "sync": False}, "leave out sync=False"),
        ({"offload": 3}, 'give "cpu"'),
    ],
)
def test_what_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        mw.simulate(lambda: mw.shard_module(net(), ONE, **options), ONE)


def test_what_was_laid_elsewhere_before() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), ONE)
        with pytest.raises(ShardError, match="scale is sharded already, and not so: say offload="):
            mw.shard_module(model, ONE, offload="cpu")
        again = mw.shard_module(net(), ONE, offload="cpu")
        mw.shard_module(again, ONE, offload="cpu")
        loss_of(again, IDS).backward()
        same_gradients(again)

    mw.simulate(fn, ONE)


def test_parameters_that_were_moved_or_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn() -> None:
        model = mw.shard_module(nn.Linear(2, 2), ONE, offload="cpu")
        x = mw.shard_tensor(torch.ones(1, 2), ONE, {})
        kept = model.weight
        model.weight = nn.Parameter(torch.ones(2, 2, device="meta"))
        with pytest.raises(ShardError, match="weight of Linear was replaced after shard_module"):
            model(x)
        model.weight = kept
        model(x)
        monkeypatch.setattr("meshwright.shard.parameters.host.HOST", "the host")
        with pytest.raises(ShardError, match=r"weight is stored on the host .* and lies on cpu since model.to"):
            model(x)

    mw.simulate(fn, ONE)


def test_ranks_that_differ() -> None:
    with pytest.raises(DesyncError, match="stored on the host"):
        mw.simulate(lambda: mw.shard_module(net(), DP, offload=None if runtime.RT.rank else "cpu"), DP)


def test_captured_steps_refuse_it() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), ONE, offload="cpu")
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(CaptureError, match=r"offload= was said to mw.shard_module"):
            mw.compile_step(model, loss_of, opt, IDS, mesh=ONE)
        with pytest.raises(CaptureError, match="is stored on the host"):
            mw.capture_local(lambda b: None, ONE, model=model, optimizer=opt, batch=IDS)

    mw.simulate(fn, ONE)


@pytest.mark.parametrize(
    "options", [{"fsdp": "dp"}, {"offload": "cpu"}, {"precision": mw.Precision(compute=torch.float64)}]
)
def test_a_parameter_that_was_swapped_is_named(options: dict[str, Any]) -> None:
    """``torch.utils.swap_tensors`` gives it all that another tensor is, which nothing was said of."""
    mesh = mw.Mesh({"dp": 2})

    def run() -> None:
        model = mw.shard_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), mesh, **options)
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(model[0].weight.detach() * 2))
        with pytest.raises(ShardError, match="weight of Linear was swapped for another tensor"):
            model(mw.shard_tensor(torch.ones(2, 4), mesh, {"dp": mw.Shard(0)}))

    mw.simulate(run, mesh)


class _Narrow(nn.Module):
    """Four columns over three ranks: the last one has none of ``up.weight``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.up, self.head = (nn.Linear(4, n, dtype=torch.float64) for n in (4, 4, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        return self.head(h + self.up(h).tanh())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fsdp", [None, {"up.bias": "dp"}], ids=["whole", "split"])
@pytest.mark.parametrize("rows", [6, 1])
def test_ranks_with_empty_shards_gather_when_the_others_do(size: int, fsdp: dict[str, str] | None, rows: int) -> None:
    """A saved weight without elements has no address, and gathers in the backward all the same: else the ranks'
    collectives are in different orders."""
    mesh, x = mw.Mesh({"dp": size}), torch.randn(rows, 2, 4, dtype=torch.float64)
    layouts = {"enter.*": {"dp": mw.Shard(0)}, "head.*": {"dp": mw.Shard(0)}, "up.weight": {"dp": mw.Shard(1)}}
    plain = _Narrow()
    plain(x).square().mean().backward()

    def run() -> dict[str, torch.Tensor]:
        model = mw.shard_module(_Narrow(), mesh, layouts, offload="cpu", fsdp=fsdp)
        for _ in range(2):
            model.zero_grad()
            model(mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)})).square().mean().backward()
        return {n: mw.unshard(p.grad) for n, p in model.named_parameters()}

    for found in mw.simulate(run, mesh):
        for name, p in plain.named_parameters():
            assert torch.allclose(found[name], p.grad, rtol=1e-12, atol=1e-14), name


@pytest.mark.parametrize("order", ["model first", "penalty first", "assigned"])
def test_a_second_backward_adds_to_gradients_of_uses_inside_and_outside_of_the_model(order: str) -> None:
    """A penalty on weights is served behind the model's contributions, whose sum is on its way then."""
    data = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)

    def gradients(mesh: mw.Mesh | None, **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        x = data
        if mesh is not None:
            mw.shard_module(model, mesh, **options)
            x = mw.shard_tensor(data, mesh, {"dp": mw.Shard(0)})
        for _ in range(3):
            parts = [lambda: model(x).square().mean(), lambda: sum(p.square().sum() for p in model.parameters())]
            one, two = [part() for part in (parts[::-1] if order == "penalty first" else parts)]
            (one + two).backward()
            if order == "assigned":
                for p in model.parameters():
                    p.grad = p.grad * 2
        return [mw.unshard(p.grad) if mesh is not None else p.grad for p in model.parameters()]

    want = gradients(None)
    for options in ({}, {"fsdp": "dp"}, {"bucket_bytes": 1}):
        for made in mw.simulate(lambda o=options: gradients(DP, offload="cpu", **o), DP):
            torch.testing.assert_close(made, want)


class _InFront(nn.Module):
    """A token in front of each row, and positions that are added: gradients that are parts of one."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.ones(1, 1, 4)), nn.Parameter(torch.ones(1, 3, 4))
        self.other, self.out = nn.Parameter(torch.ones(1, 3, 4)), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        made: torch.Tensor = self.out((rows + self.positions + self.other).tanh())
        return made


@pytest.mark.parametrize("options", [{"offload": "cpu"}, {"offload": "cpu", "fsdp": "dp"}, {}], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_gradients_share_no_memory(rows: int, options: dict[str, Any]) -> None:
    """Clipping scales each once, though autograd hands several of them the same memory."""
    x = torch.arange(2.0 * 2 * 4).view(2, 2, 4)[:rows] / 8

    def run(mesh: mw.Mesh | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, given = _InFront(), x
        if mesh is not None:
            mw.shard_module(model, mesh, **options)
            given = split(x, mesh)
        model(given).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return [mw.unshard(p.grad) for p in model.parameters() if p.grad is not None]

    for got in mw.simulate(lambda: run(DP), DP):
        for a, b in zip(got, run(None), strict=True):
            torch.testing.assert_close(a, b)
