"""Loss scaling in captured steps and eagerly, against torch's GradScaler on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import ProgramError
from meshwright.passes import DataParallelOptimization, GradientMerge
from tests.support.programs import DP, MESH

Tensor = torch.Tensor
TP = {"0.weight": {"tp": mw.Shard(0)}, "0.bias": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}}
ADAM: Callable[[Any], Any] = lambda ps: torch.optim.AdamW(ps, lr=0.01)  # noqa: E731
SGD: Callable[[Any], Any] = lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9)  # noqa: E731
BUCKETS, MERGE = DataParallelOptimization(bucket_bytes=1 << 20), GradientMerge(k_steps=4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def batches(n: int, overflows: Sequence[int]) -> list[Tensor]:
    """Some of which overflow: one element of one example, which a single rank of ``dp`` has."""
    made = [torch.randn(8, 6, generator=torch.Generator().manual_seed(i)) for i in range(n)]
    for i in overflows:
        made[i][i % 8, 0] = 60000.0
    return made


def loss_in(dtype: torch.dtype) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            out = model(x.clamp(-3.0, 3.0))  # what overflows is the weight of an example
        wanted = (x[:, :3] * 37).sin()  # nothing that can be learned: losses stay of one size
        return ((out.float() - wanted).square().mean(1) * x.abs().amax(1).clamp(min=1.0) ** 3).mean()

    return loss


Row = tuple[float, float]


def on_one_device(
    data: list[Tensor], make: Any, loss: Any, how: mw.LossScale, k: int = 1, clip: float | None = None
) -> tuple[list[Row], nn.Module]:
    model = network()
    optimizer = make(model.parameters())
    interval = how.growth_interval or 1 << 30
    scaler = torch.amp.GradScaler("cpu", init_scale=how.init, growth_interval=interval)
    rows = []
    for i in range(0, len(data), k):
        micro = data[i : i + k]
        losses = [loss(model, x) for x in micro]
        for value in losses:
            scaler.scale(value / len(micro)).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        if how.growth_interval is not None:
            scaler.update()
        else:
            scaler.update(how.init)
        optimizer.zero_grad()
        rows += [(value.item(), scaler.get_scale()) for value in losses]
    return rows, model


def captured(data: list[Tensor], make: Any, loss: Any, how: Any, k: int = 1, **options: Any) -> Any:
    model = network()
    step = mw.compile_step(
        model, loss, make(model.parameters()), data[0], mesh=MESH, batch=DP, loss_scale=how, **options
    )
    rows, scales = [], []
    for x in data:
        rows.append(step(x).item())
        scales.append(step.loss_scale.item())
    if step.flush():
        scales.append(step.loss_scale.item())
    return rows, scales, {n: mw.unshard(p).detach().clone() for n, p in model.named_parameters()}, step.program


def same(got: Any, wanted: tuple[list[Row], nn.Module], k: int, tolerance: float) -> None:
    losses, scales, tensors, _ = got
    n = len(losses)
    ends = [min(i + k, n) for i in range(0, n, k)]  # micro-steps, of which the last one changes the scale
    updates = [*scales[k - 1 : n : k], *scales[n:]]
    assert updates == [wanted[0][e - 1][1] for e in ends]
    for a, (b, _) in zip(losses, wanted[0], strict=True):
        assert abs(a - b) <= tolerance * max(abs(b), 1e-2) or not (a == a or b == b), (losses, wanted[0])
    for name, p in wanted[1].named_parameters():
        assert (tensors[name] - p).abs().max() <= tolerance, name
        assert tensors[name].isfinite().all()


HOW = mw.LossScale(1024.0, growth_interval=3)
CASES: dict[str, tuple[Any, torch.dtype, Any, dict[str, Any]]] = {
    "tp, clipped": (ADAM, torch.float16, HOW, {"layouts": TP, "clip_grad_norm": 0.5}),
    "bf16, buckets": (ADAM, torch.bfloat16, HOW, {"layouts": TP, "passes": [BUCKETS]}),
    "sgd, merged": (SGD, torch.float16, HOW, {"layouts": TP, "passes": [MERGE]}),
    "stored, both passes": (ADAM, torch.float16, HOW, {"fsdp": "dp", "passes": [MERGE, BUCKETS]}),
    "states split": (ADAM, torch.float16, HOW, {"shard_states": "dp", "clip_grad_norm": 0.5, "passes": [BUCKETS]}),
    "a number": (SGD, torch.float16, 512.0, {"gradients": True}),
}


def check(case: str, data: list[Tensor], tolerance: float = 2e-2, how: Any = None) -> list[Any]:
    make, dtype, usual, options = CASES[case]
    how = how or usual
    loss, k = loss_in(dtype), 4 if MERGE in options.get("passes", ()) else 1
    wanted = on_one_device(data, make, loss, mw.LossScale.of(how) or HOW, k, options.get("clip_grad_norm"))
    got: list[Any] = mw.simulate(lambda: captured(data, make, loss, how, k, **options), MESH, timeout=300)
    mw.check_program([g[3] for g in got])
    for g in got:
        same(g, wanted, k, tolerance)
    return got


@pytest.mark.parametrize("case", CASES)
@pytest.mark.thin(2)
def test_same_as_torch(case: str) -> None:
    got = check(case, batches(14, (2, 6, 7)))
    scales = got[0][1]
    assert len(set(scales)) > 1 or case == "a number"
    program = got[0][3]
    names = {str(n.target) for n in program.graph.nodes}
    # No host in between: nothing reads a value, and no shape depends on one.
    assert not any("_local_scalar" in n or "nonzero" in n or "is_nonzero" in n or "item" in n.split(".") for n in names)
    flags = [n for n in program.collectives() if n.args[1] == "max"]
    assert [n.args[-2] for n in flags] == ["dp,tp"]  # one flag, over all axes


# -- one shard, saving, bad input ------------------------------------------------------------------------


class OneRow(nn.Module):
    """Only the first row of the weight has a gradient that overflows: on the ranks that hold it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t() * torch.tensor([1e30, 0.0, 1.0, 1.0, 1.0])).sum()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shard_states", [None, "dp"])
def test_an_overflow_on_some_ranks_skips_the_update_on_all(dim: int, shard_states: str | None) -> None:
    def rank() -> Any:
        model = OneRow()
        before = model.weight.detach().clone()
        step = mw.compile_step(
            model, None, ADAM(model.parameters()), torch.ones(2, 4), mesh=MESH,
            layouts={"weight": {"tp": mw.Shard(dim)}},
            loss_scale=mw.LossScale(2.0**40), shard_states=shard_states,
        )  # fmt: skip
        step(torch.ones(2, 4))
        assert torch.equal(mw.unshard(model.weight), before)
        assert step.loss_scale.item() == 2.0**39
        states = [t for s in step.optimizer.state.values() for t in s.values()]
        assert all(not t.any() for t in states)  # the count of steps too
        step.load_state_dict({**step.state_dict(), "loss_scale": mw.LossScale(1.0).state("cpu")})
        step(torch.ones(2, 4))
        assert not torch.equal(mw.unshard(model.weight), before)
        return step.loss_scale.item(), mw.unshard(model.weight).detach()

    made = mw.simulate(rank, MESH)
    assert {scale for scale, _ in made} == {1.0}
    assert all(torch.equal(w, made[0][1]) for _, w in made)


def test_saved_and_loaded() -> None:
    data, loss = batches(12, (3, 4, 9)), loss_in(torch.float16)

    def rank() -> Any:
        def fresh() -> Any:
            model = network()
            return mw.compile_step(
                model, loss, ADAM(model.parameters()), data[0], mesh=MESH, batch=DP, loss_scale=HOW, passes=[MERGE]
            )

        step, other = fresh(), fresh()
        for x in data[:6]:
            step(x)
        saved = step.state_dict()
        assert saved["micro_step"] == 2
        other.model.load_state_dict(step.model.state_dict())
        other.optimizer.load_state_dict(step.optimizer.state_dict())
        other.load_state_dict(saved)
        for x in data[6:]:
            assert torch.equal(mw.unshard(step(x)), mw.unshard(other(x)))
            assert torch.equal(step.loss_scale, other.loss_scale)
        for a, b in zip(step.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(mw.unshard(a), mw.unshard(b))
        with pytest.raises(ProgramError, match="'loss_scale'"):
            step.load_state_dict({"micro_step": 0, "sums": saved["sums"]})
        with pytest.raises(ProgramError, match="of a loss scale"):
            step.load_state_dict({**saved, "loss_scale": {"loss_scale": torch.ones(())}})

    mw.simulate(rank, MESH)


def test_what_is_refused() -> None:
    for given in ("automatic", True, -1.0, float("inf"), mw.Shard(0)):
        with pytest.raises(ProgramError, match="expected"):
            mw.LossScale.of(given)
    with pytest.raises(ProgramError, match="growth_factor"):
        mw.LossScale(growth_factor=1.0)

    def rank(make: Any, dtype: torch.dtype) -> None:
        model = network().to(dtype)
        optimizer = make(model.parameters()) if make else None
        mw.compile_step(
            model, loss_in(torch.float16), optimizer, batches(1, ())[0].to(dtype), mesh=MESH, loss_scale="dynamic"
        )

    for make, dtype, text in (
        (torch.optim.RMSprop, torch.float32, "loss_scale with RMSprop"),
        (None, torch.float32, "loss_scale with no optimizer"),
        (ADAM, torch.float16, "0.weight in float16"),
    ):
        with pytest.raises(ProgramError, match=text):
            mw.simulate(lambda make=make, dtype=dtype: rank(make, dtype), MESH)


# -- eagerly ---------------------------------------------------------------------------------------------


def eagerly(data: list[Tensor], stored: bool) -> Any:
    model, loss = network(), loss_in(torch.float16)
    if stored:
        mw.shard_module(model, MESH, fsdp="dp")
    else:
        mw.shard_module(model, MESH, TP)
    optimizer = ADAM(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=HOW.init, growth_interval=3)
    losses, scales = [], []
    for x in data:
        value = loss(model, mw.shard_tensor(x, MESH, DP))
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(value.item())
        scales.append(scaler.get_scale())
    return losses, scales, {n: mw.unshard(p).detach().clone() for n, p in model.named_parameters()}, None


@pytest.mark.parametrize("stored", [False, True])
def test_torchs_own_scaler_eagerly(stored: bool) -> None:
    data = batches(14, (2, 6, 7))
    wanted = on_one_device(data, ADAM, loss_in(torch.float16), HOW, 1, 0.5)
    for got in mw.simulate(lambda: eagerly(data, stored), MESH):
        same(got, wanted, 1, 2e-2)
