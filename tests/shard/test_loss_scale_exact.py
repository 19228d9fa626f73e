"""Loss scaling bit for bit as ``torch.amp.GradScaler`` on one device, over 200 steps.

The arithmetic of the network is exact in float16 and bfloat16: weights and activations are rounded to -1, 0 and 1,
gradients are small integers times a power of two, and so are scales.  Then the order of sums, which a mesh changes,
changes nothing, and gradients are equal bit for bit.  What follows in float32 (states, master weights) is elementwise,
and the kernels round alike where all shards are multiples of a vector.  What may differ is the norm of all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.passes import DataParallelOptimization, GradientMerge
from tests.support.programs import DP, MESH

Tensor = torch.Tensor
TP = {"up": {"tp": mw.Shard(0)}, "bias": {"tp": mw.Shard(0)}, "down": {"tp": mw.Shard(1)}}
ADAM: Callable[[Any], Any] = lambda ps: torch.optim.AdamW(ps, lr=0.03, fused=True)  # noqa: E731
SGD: Callable[[Any], Any] = lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)  # noqa: E731
BUCKETS = DataParallelOptimization(bucket_bytes=1 << 20)


def rounded(x: Tensor) -> Tensor:
    """To -1, 0 or 1; its gradient is that of the identity."""
    return x.detach().round().clamp(-1, 1) + (x - x.detach())


class Exact(nn.Module):
    def __init__(self, width: int = 16, hidden: int = 64, out: int = 32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("up", (hidden, width)), ("bias", (hidden,)), ("down", (out, hidden))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.hardtanh(nn.functional.linear(x, rounded(self.up), rounded(self.bias)))
        return nn.functional.linear(h, rounded(self.down))


def batches(n: int, overflows: Sequence[int], usual: float, weight: float, width: int, out: int) -> list[Any]:
    """Inputs, what is wanted, and weights of examples: some so large that gradients overflow, on one rank of dp."""
    made = []
    for i in range(n):
        generator = torch.Generator().manual_seed(i)
        x = torch.randint(-1, 2, (8, width), generator=generator).float()
        y = torch.randint(-12, 13, (8, out), generator=generator).float()
        weights = torch.full((8,), usual)
        if i in overflows:
            weights = torch.zeros(8)  # so that the loss stays exact
            weights[i % 8] = weight
        made.append((x, y, weights))
    return made


def loss_in(dtype: torch.dtype) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y, weights = batch
        with torch.autocast("cpu", dtype=dtype):
            out = model(x)
        return ((out.float() - y).abs().sum(1) * weights / y.shape[1]).mean()

    return loss


@dataclass
class Run:
    """Losses of micro-steps; scales of updates; parameters after every tenth update and the last."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


def on_one_device(
    model: nn.Module, data: list[Any], make: Any, loss: Any, how: mw.LossScale, k: int, clip: float | None, parts: int
) -> Run:
    """torch's own loop.  ``parts``: the gradients of a batch as a sum of those of its parts, as ranks make them."""
    run, optimizer = Run(), make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=how.init, growth_interval=how.growth_interval or 1 << 30)
    for i in range(0, len(data), k):
        micro = data[i : i + k]
        for batch in micro:
            run.losses.append(loss(model, batch).item())
            for part in zip(*(t.chunk(parts) for t in batch), strict=True):
                scaler.scale(loss(model, part) / parts).backward()
        for p in model.parameters():
            p.grad /= len(micro)
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.scales.append(scaler.get_scale())
        if len(run.scales) % 10 == 0:
            run.weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return run


class NoHost(TorchDispatchMode):
    """Nothing may bring a value to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read by the host"
        return func(*args, **(kwargs or {}))


def captured(model: nn.Module, data: list[Any], make: Any, loss: Any, how: Any, k: int, **options: Any) -> Run:
    run = Run()
    step = mw.compile_step(
        model, loss, make(model.parameters()), data[0], mesh=MESH, batch=DP, loss_scale=how, **options
    )
    for i, batch in enumerate(data):
        with NoHost():
            made = step(batch)
        run.losses.append(made.item())
        if (i + 1) % k == 0:
            run.scales.append(step.loss_scale.item())
            if len(run.scales) % 10 == 0:
                run.weights.append({n: mw.unshard(p.detach()).clone() for n, p in model.named_parameters()})
    return run


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    make: Any
    dtype: torch.dtype
    k: int = 1
    clip: float | None = None
    options: Any = field(default_factory=dict)
    model: Any = Exact
    shape: tuple[int, int] = (16, 32)


HALF, BRAIN = torch.float16, torch.bfloat16
M4 = GradientMerge(k_steps=4)
CASES = {
    "tp": Case(ADAM, HALF, options={"layouts": TP}),
    "tp bf16, buckets": Case(ADAM, BRAIN, options={"layouts": TP, "passes": [BUCKETS]}),
    "merged": Case(SGD, HALF, 4, options={"layouts": TP, "passes": [M4]}),
    "stored": Case(ADAM, HALF, options={"fsdp": "dp"}),
    "stored, both passes": Case(ADAM, HALF, 4, options={"fsdp": "dp", "passes": [M4, BUCKETS]}),
    "stored bf16": Case(SGD, BRAIN, options={"fsdp": "dp", "passes": [BUCKETS]}),
    "states": Case(ADAM, HALF, options={"shard_states": "dp", "layouts": TP, "passes": [BUCKETS]}),
    "clipped": Case(ADAM, HALF, 1, 0.02, options={"layouts": TP}),
    "clipped, stored, merged": Case(SGD, HALF, 4, 0.02, options={"fsdp": "dp", "passes": [M4, BUCKETS]}),
}


def check(case: Case, steps: int, natural: bool) -> Run:
    """``natural``: the scale grows until gradients overflow by themselves, again and again."""
    k, brain = case.k, case.dtype is BRAIN
    # The largest gradients are of a size near 1/16: the scale at which they overflow is met within a few updates.
    init = 2.0 ** ((120 if natural else 60) if brain else (19 if natural else 10))
    usual, large = (256.0, 2.0**120) if brain else (1.0, 2.0**20)
    how = mw.LossScale(init, growth_interval=3 if natural else 12)
    # None in the first update: torch's fused SGD then goes on with a momentum that nobody initialised.
    forced = {s for s in (5, 20, 21, 47, 90, 150, 171) if s < steps}
    data = batches(steps, sorted(forced), usual, large, *case.shape)
    loss = loss_in(case.dtype)
    wanted = on_one_device(case.model(), data, case.make, loss, how, k, case.clip, 2 if natural else 1)
    # A scale is halved where the update was skipped, and nowhere else.
    skipped = {u for u, (a, b) in enumerate(zip([init, *wanted.scales], wanted.scales, strict=False)) if b < a}
    assert skipped >= {f // k for f in forced}
    assert (len(skipped) > len(forced)) == natural

    def run() -> Run:
        options = dict(case.options)
        if case.clip is not None:
            options["clip_grad_norm"] = case.clip
        return captured(case.model(), data, case.make, loss, how, k, **options)

    for got in mw.simulate(run, MESH, timeout=600):
        assert got.scales == wanted.scales
        # Bit for bit; the norm that clips is a root of sums of squares in another order: a few of the last bits.
        for a, b in zip(got.losses, wanted.losses, strict=True):
            assert a == b
        for after, expected in zip(got.weights, wanted.weights, strict=True):
            for name, w in expected.items():
                near = 0.0 if case.clip is None else 2e-6
                assert (after[name] - w).abs().max() <= near, (name, (after[name] - w).abs().max())


FAST = ["merged", "tp bf16, buckets", "stored, both passes", "clipped"]


@pytest.mark.parametrize(("name", "natural"), [(n, i % 2 == 1) for i, n in enumerate(FAST)])
@pytest.mark.thin(2)
def test_bit_for_bit(name: str, natural: bool) -> None:
    check(CASES[name], 40, natural)


@pytest.mark.long
@pytest.mark.parametrize("natural", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_two_hundred_steps(name: str, natural: bool) -> None:
    check(CASES[name], 200, natural)


# -- two optimizers --------------------------------------------------------------------------------------


def two(model: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers with parameters and schedules of their own."""
    optimizers = [
        torch.optim.SGD([model.up, model.bias], lr=0.1, momentum=0.9, fused=True),
        torch.optim.AdamW([model.down], lr=0.03, fused=True),
    ]
    return optimizers, [torch.optim.lr_scheduler.StepLR(o, 1, 0.7) for o in optimizers]


def sum_and_mean(model: nn.Module, batch: Any) -> Tensor:
    """Two losses of other reductions."""
    x, y, weights = batch
    with torch.autocast("cpu", dtype=HALF):
        out = model(x)
    far = (out.float() - y).abs()
    return (far.sum(1) * weights / 32).mean() + far.sum() * weights.sum() / 8192


def two_on_one_device(data: list[Any], how: mw.LossScale) -> Run:
    run, model = Run(), Exact()
    optimizers, schedules = two(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=how.init, growth_interval=how.growth_interval or 1)
    for i in range(0, len(data), 4):
        for batch in data[i : i + 4]:
            loss = sum_and_mean(model, batch)
            run.losses.append(loss.item())
            scaler.scale(loss).backward()
        for p in model.parameters():
            p.grad /= 4
        finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
        for o in optimizers:
            scaler.unscale_(o)
            if not finite:  # one flag for all, where torch has one for each
                scaler._per_optimizer_states[id(o)]["found_inf_per_device"] = {torch.device("cpu"): torch.ones(())}
            scaler.step(o)
            o.zero_grad()
        scaler.update()
        run.scales.append(scaler.get_scale())
        for s in schedules:
            s.step()
    run.weights.append({n: p.detach() for n, p in model.named_parameters()})
    return run


def test_two_optimizers_with_schedules_merged_and_stored_split() -> None:
    how = mw.LossScale(1024.0, growth_interval=2)
    data = batches(20, [9, 10], 1.0, 2.0**20, 16, 32)
    wanted = two_on_one_device(data, how)

    def run() -> Run:
        made, model = Run(), Exact()
        optimizers, schedules = two(model)
        step = mw.compile_step(
            model, sum_and_mean, optimizers, data[0], mesh=MESH, batch=DP, loss_scale=how, fsdp="dp",
            passes=[GradientMerge(k_steps=4, weighted=False), BUCKETS],  # a product of sums is no mean
        )  # fmt: skip
        for i, batch in enumerate(data):
            made.losses.append(step(batch).item())
            if i % 4 == 3:
                made.scales.append(step.loss_scale.item())
                for s in schedules:
                    s.step()
        made.weights.append({n: mw.unshard(p.detach()).clone() for n, p in model.named_parameters()})
        return made

    for got in mw.simulate(run, MESH):
        assert (got.losses, got.scales) == (wanted.losses, wanted.scales)
        assert all(torch.equal(got.weights[0][n], w) for n, w in wanted.weights[0].items())
