"""One chain from stored to seen: captured and eager steps, on the host and over several axes, equal one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from meshwright.errors import CaptureError
from meshwright.shard.parameters.packing import Packing
from meshwright.shard.parameters.stored import stored
from meshwright.shard.units.unit import State
from tests.support.shard_networks import batches, loss_of, net, trained

Tensor = torch.Tensor
PAIR, THREE, GRID = mw.Mesh({"dp": 2}), mw.Mesh({"dp": 3}), mw.Mesh({"replica": 2, "dp": 3})
SQUARE = mw.Mesh({"replica": 2, "dp": 2})
DPO, MERGE = "data-parallel-optimization:bucket_bytes=4194304", "gradient-merge:k_steps=2"
BOTH = ("replica", "dp")


def split(mesh: mw.Mesh) -> dict[str, Any]:
    return {a: mw.Shard(0) for a in mesh.axes}


def one_device(clip: float | None = None) -> dict[str, Tensor]:
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained(model, opt, batches(2), lambda m, x: loss_of(m, x).backward(), clip)
    return {n: p.detach() for n, p in model.named_parameters()}


def same(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for n, t in want.items():
        torch.testing.assert_close(found[n], t, rtol=1e-10, atol=1e-12, msg=lambda text, n=n: f"{n}: {text}")


def eager(mesh: mw.Mesh, states: Any = None, **options: Any) -> tuple[dict[str, Tensor], Any]:
    """Parameters after two steps, and the counts of the last one."""

    def run() -> Any:
        model = mw.shard_module(net(), mesh, **options)
        opt = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), **(states or {}))
        for ids in batches(2):
            opt.zero_grad()
            with collective.counting() as counts:
                loss_of(model, mw.shard_tensor(ids, mesh, split(mesh))).backward()
                opt.step()
        return {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}, counts

    made: tuple[dict[str, Tensor], Any] = mw.simulate(run, mesh)[-1]
    return made


def captured(mesh: mw.Mesh, passes: tuple[str, ...] = (), **options: Any) -> tuple[dict[str, Tensor], Any]:
    """The same of a captured step."""

    def run() -> Any:
        model = net()
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = mw.compile_step(
            model, loss_of, opt, batches(1)[0], mesh=mesh, batch=split(mesh), passes=passes, **options
        )
        for ids in batches(2):
            for _ in range(2 if MERGE in passes else 1):
                with collective.counting() as counts:
                    step(ids)
        return {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}, counts

    made: tuple[dict[str, Tensor], Any] = mw.simulate(run, mesh)[-1]
    return made


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("mesh", "passes", "options"),
    [
        (PAIR, (), {}),
        (THREE, (DPO,), {"fsdp": "dp"}),
        (PAIR, (MERGE, DPO), {"fsdp": "dp", "reshard_after_forward": False, "clip_grad_norm": 0.1}),
        (SQUARE, (MERGE, DPO), {"fsdp": BOTH}),
    ],
    ids=["whole", "uneven", "merged, clipped", "two axes"],
)
def test_captured_steps_on_the_host(mesh: mw.Mesh, passes: tuple[str, ...], options: dict[str, Any]) -> None:
    """The bits, and the collectives, of the step that keeps them on the device."""
    on_device, before = captured(mesh, passes, **options)
    on_host, after = captured(mesh, passes, offload="cpu", **options)
    assert all(torch.equal(on_host[n], t) for n, t in on_device.items())
    assert {k: n for k, (n, _) in after.table.items()} == {k: n for k, (n, _) in before.table.items()}
    assert not before.copies
    assert after.copies["to_device"][1] >= after.copies["to_host"][1] > 0
    same(on_host, one_device(options.get("clip_grad_norm")))


def test_over_two_axes() -> None:
    """Eleven rows over two axes, the one after the other; each unit's in one gather and one reduction."""
    want, mesh = one_device(), mw.Mesh({"replica": 3, "dp": 2})
    for options in ({"fsdp": BOTH}, {"fsdp": ["dp", "replica"], "offload": "cpu"}):
        found, counts = eager(mesh, **options)
        same(found, want)
        assert {axes for kind, axes in counts.table if kind in ("all_gather", "reduce_scatter")} == {BOTH}
    found, counts = eager(mesh, {"shard_states": BOTH})
    same(found, want)
    assert {"all_gather", "reduce_scatter"} == {kind for kind, axes in counts.table if kind != "all_reduce"}
    for options in ({"fsdp": BOTH}, {"shard_states": BOTH}):
        same(captured(mesh, (DPO,), **options)[0], want)


def test_what_is_too_small_for_both_axes() -> None:
    """It is stored over the last ones, or whole."""

    def run() -> None:
        model = mw.shard_module(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), GRID, fsdp=BOTH)
        axes = {n: stored(p).axes for n, p in model.named_parameters()}
        assert axes == {"0.weight": (0, 1), "0.bias": (1,), "1.weight": (1,), "1.bias": (1,)}

    mw.simulate(run, GRID)


@pytest.mark.parametrize(("mesh", "over"), [(PAIR, None), (THREE, "dp"), (SQUARE, BOTH)], ids=str)
def test_states_alone_on_the_host(mesh: mw.Mesh, over: Any) -> None:
    """Gradients and parameters are copied there for the update, parameters back: the bits of states on the device."""
    states = {} if over is None else {"shard_states": over}
    want, before = eager(mesh, states)
    found, after = eager(mesh, {**states, "offload_states": "cpu"})
    assert all(torch.equal(found[n], t) for n, t in want.items())
    assert not before.copies
    assert after.copies["to_host"][0] == 2 * len(want)
    found, counts = captured(mesh, (DPO,), offload_states="cpu", **states)
    assert counts.copies["to_host"] == after.copies["to_host"]
    same(found, one_device())


def test_explain_tells_what_lies_on_the_host() -> None:
    def run(**options: Any) -> Any:
        model = net()
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        ids = batches(1)[0]
        step = mw.compile_step(model, loss_of, opt, ids, mesh=PAIR, batch=split(PAIR), fsdp="dp", **options)
        with collective.counting() as counts:
            step(ids)
        why = step.explain()
        assert why.counts.copies == counts.copies
        held = sum(p.to_local().nbytes for p in model.parameters())
        steps = sum(4 for _ in model.parameters())
        return why.memory.peak, why.memory.host, held, steps, why.text()

    peak, host, held, steps, text = mw.simulate(run, PAIR)[0]
    assert host == 0
    below, host, *_, text = mw.simulate(lambda: run(offload="cpu"), PAIR)[0]
    assert host == 3 * held + steps  # parameters and two states of AdamW, and how often each was updated
    assert below == peak - host
    assert "are stored on the CPU" in text
    below, host, *_ = mw.simulate(lambda: run(offload_states="cpu"), PAIR)[0]
    assert host == 2 * held + steps
    assert below < peak


@pytest.mark.parametrize(("saved", "loaded"), [
    ({"fsdp": BOTH}, {"fsdp": "dp", "offload": "cpu"}),
    ({"fsdp": BOTH, "offload": "cpu"}, {"shard_states": BOTH, "offload_states": "cpu"}),
    ({"shard_states": BOTH, "offload_states": "cpu"}, {"fsdp": BOTH}),
], ids=["to the host", "to states on the host", "from states on the host"])  # fmt: skip
@pytest.mark.parametrize("static", [False, True], ids=["eager", "captured"])
def test_checkpoints(tmp_path: Any, saved: Any, loaded: Any, static: bool) -> None:
    """Saved so, loaded otherwise on a mesh of other sizes, they go on as one device does."""

    def trains(mesh: mw.Mesh, options: dict[str, Any], ids: list[Tensor], resume: bool) -> dict[str, Tensor]:
        model = net(seed=2 if resume else 1)
        states = {k: v for k, v in options.items() if "states" in k}
        if static:
            opt = torch.optim.AdamW(model.parameters(), lr=0.01)
            step: Any = mw.compile_step(model, loss_of, opt, ids[0], mesh=mesh, batch=split(mesh), **options)
        else:
            model = mw.shard_module(model, mesh, **{k: v for k, v in options.items() if k not in states})
            opt = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), **states)

            def step(x: Tensor) -> None:
                opt.zero_grad()
                loss_of(model, mw.shard_tensor(x, mesh, split(mesh))).backward()
                opt.step()

        if resume:
            mw.Checkpoints(tmp_path).load(model=model, optimizer=opt)
        for x in ids:
            step(x)
        if not resume:
            mw.Checkpoints(tmp_path).save(1, model=model, optimizer=opt)
        return {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}

    first, *rest = batches(2)
    wide = mw.Mesh({"replica": 1, "dp": 3})
    mw.simulate(lambda: trains(SQUARE, saved, [first], False), SQUARE)
    same(mw.simulate(lambda: trains(wide, loaded, rest, True), wide)[0], one_device())


@pytest.mark.parametrize("precision", [
    mw.Precision(compute=torch.float32, reduce=torch.float64),
    mw.Precision(grad_comm=mw.Float8(), gather=mw.Float8()),
    mw.Precision(gather=torch.bfloat16),
], ids=["precision", "wires", "gathers"])  # fmt: skip
def test_with_precision_and_formats(precision: mw.Precision) -> None:
    """The same rounding wherever parameters are stored; eager and captured alike."""
    kept, _ = eager(SQUARE, precision=precision, fsdp=BOTH)
    for found, _ in (
        eager(SQUARE, precision=precision, offload="cpu", fsdp=BOTH),
        captured(SQUARE, (DPO,), precision=precision, offload="cpu", fsdp=BOTH),
    ):
        for n, t in kept.items():
            torch.testing.assert_close(found[n], t, rtol=1e-5, atol=1e-6, msg=lambda text, n=n: f"{n}: {text}")


def test_a_forward_that_writes() -> None:
    """What a captured forward writes to a parameter on the host is there afterwards."""

    class Clamps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.linear = nn.Parameter(torch.full((4,), 2.0)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.gate.clamp_(max=1.0)
            made: Tensor = self.linear(x * self.gate).square().mean()
            return made

    def run(**options: Any) -> Any:
        torch.manual_seed(0)
        model = Clamps()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile_step(model, None, opt, torch.ones(4, 4), mesh=PAIR, batch=split(PAIR), **options)
        step(torch.ones(4, 4))
        return mw.unshard(model.gate.detach())

    want = mw.simulate(run, PAIR)[0]
    for over in (None, "dp"):
        assert torch.equal(mw.simulate(lambda over=over: run(offload="cpu", fsdp=over), PAIR)[0], want)


def test_steps_that_do_not_know_of_the_host() -> None:
    def run() -> None:
        model = net()
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = mw.compile_step(model, loss_of, opt, batches(1)[0], mesh=PAIR, batch=split(PAIR), offload="cpu")
        step(batches(1)[0])
        again = mw.compile_step(model, loss_of, opt, batches(1)[0], mesh=PAIR, batch=split(PAIR), offload="cpu")
        again(batches(1)[0])
        with pytest.raises(CaptureError, match=r"is stored on the host .* say offload= to mw.compile_step"):
            mw.compile_step(model, loss_of, opt, batches(1)[0], mesh=PAIR, batch=split(PAIR))
        eager_ = mw.shard_module(net(), PAIR, offload="cpu")
        with pytest.raises(CaptureError, match=r"offload= was said to mw.shard_module"):
            mw.compile_step(eager_, loss_of, opt, batches(1)[0], mesh=PAIR)

    mw.simulate(run, PAIR)


def test_a_schedule_calls_the_verbs_of_units() -> None:
    """Gathered once for two forwards and freed then; hooks find what is there, and gradients are the same."""

    def run(ahead: bool) -> Any:
        model = mw.shard_module(net(), PAIR, fsdp="dp")
        ids = [mw.shard_tensor(x, PAIR, split(PAIR)) for x in batches(2)]
        (unit,) = (h.unit for h in model.blocks[0]._forward_pre_hooks.values())
        assert unit.state is State.STORED
        if ahead:
            unit.start()
            assert unit.state is State.COMING
            unit.gather(keep=True)
            assert unit.state is State.SEEN
        with collective.counting() as counts:
            losses = [loss_of(model, x) for x in ids]
        assert unit.state is (State.SEEN if ahead else State.STORED)
        unit.free()
        assert unit.state is State.STORED
        sum(losses).backward()
        assert unit.state is State.STORED
        return [mw.unshard(p.grad) for p in model.parameters()], counts.kinds["all_gather"]

    (want, every), (found, fewer) = (mw.simulate(lambda ahead=ahead: run(ahead), PAIR)[0] for ahead in (False, True))
    assert fewer == every - 2
    assert all(map(torch.equal, found, want))


def test_a_schedule_reduces_what_was_held_back() -> None:
    """Whatever no_sync left of two micro-steps, a unit at a time; the gradients of one device."""

    def run() -> None:
        one, model = net(), mw.shard_module(net(), PAIR, fsdp="dp")
        with mw.no_sync(model):
            for x in batches(2):
                loss_of(one, x).backward()
                loss_of(model, mw.shard_tensor(x, PAIR, split(PAIR))).backward()
        for block in model.blocks:
            (unit,) = (h.unit for h in block._forward_pre_hooks.values())
            assert all(p.grad.spec.layout.partial for p in unit.params)
            unit.reduce()
            assert not any(p.grad.spec.layout.partial for p in unit.params)
        for p, q in zip(model.blocks.parameters(), one.blocks.parameters(), strict=True):
            torch.testing.assert_close(mw.unshard(p.grad), q.grad, rtol=1e-10, atol=1e-12)

    mw.simulate(run, PAIR)


def test_what_was_gathered_of_weights_that_changed_is_gathered_again() -> None:
    def run() -> None:
        model = mw.shard_module(nn.Sequential(nn.Linear(4, 4)), PAIR, fsdp="dp")
        (unit,) = (h.unit for h in model[0]._forward_pre_hooks.values())
        unit.gather(keep=True)
        with torch.no_grad():
            model[0].weight.mul_(2)
        assert unit.state is State.STORED
        x = torch.ones(2, 4)
        want = x @ mw.unshard(model[0].weight.detach()).T + mw.unshard(model[0].bias.detach())
        torch.testing.assert_close(mw.unshard(model(mw.shard_tensor(x, PAIR, split(PAIR)))), want)

    mw.simulate(run, PAIR)


def test_rows_of_chunks_that_two_axes_cut() -> None:
    """Packed by each rank and unpacked it is what it was, and row r has what a layout gives rank r."""
    whole = [torch.arange(7 * 3).view(7, 3), torch.arange(4 * 11).view(4, 11)]
    packing = Packing([t.shape for t in whole], [0, 1], (2, 3))
    flat = packing.pack(whole)
    made = [torch.empty_like(t) for t in whole]
    packing.unpack(flat, made)
    assert all(map(torch.equal, made, whole))
    for rank, row in enumerate(flat.view(6, -1)):
        for t, dim, chunk in zip(whole, (0, 1), packing.chunks(row, rank), strict=True):
            layout = mw.Layout(GRID, {"replica": mw.Shard(dim), "dp": mw.Shard(dim)})
            bounds = layout.local_bounds(t.shape, GRID.coordinate(rank))
            assert torch.equal(chunk, t[tuple(slice(lo, hi) for lo, hi in bounds)])
