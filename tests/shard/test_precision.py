"""Precision by layout: compared with one device under the same casts, written by hand."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import OrderedDict, defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.errors import ShardError
from meshwright.ranks import runtime
from tests.support.device import DEVICE
from tests.support.shard_networks import Tokens

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
POLICY = mw.Precision(compute=F32, reduce=F64)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(Tokens):
    def __init__(self, d=8, vocab=11):
        super().__init__(lambda: Block(d), d, vocab)


torch.manual_seed(0)
START = Net().double()
IDS = torch.randint(0, 11, (3, 8, 6))
TARGETS = torch.randint(0, 11, (3, 8, 6))
TP = {
    "blocks.*.up.weight": {"tp": mw.Shard(0)},
    "blocks.*.up.bias": {"tp": mw.Shard(0)},
    "blocks.*.down.weight": {"tp": mw.Shard(1)},
}
SP = {
    "inputs": {"blocks.*.norm": {"dp": mw.Shard(0), "tp": mw.Shard(1)}, "blocks.*.up": {"dp": mw.Shard(0)}},
    "outputs": {"blocks.*.down": {"dp": mw.Shard(0), "tp": mw.Shard(1)}},
}


def loss_of(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def oracle(steps=3, micro=1, compute=F32):
    """One device with float64 masters that computes with casts of them."""
    model = copy.deepcopy(START)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for i in range(steps):
        for part in range(micro):
            rows = slice(part * 8 // micro, (part + 1) * 8 // micro)
            seen = {n: p.to(compute) for n, p in model.named_parameters()}
            loss = loss_of(functional_call(model, seen, (IDS[i, rows],)), TARGETS[i, rows]) / micro
            loss.backward()
            losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def eager(sizes, placements=None, steps=3, micro=1, shard_states=None, policy=POLICY, **options):
    mesh = mw.Mesh(sizes)

    def run():
        model = mw.shard_module(copy.deepcopy(START), mesh, placements, precision=policy, **options)
        optimizer = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), shard_states=shard_states)
        losses = []
        for i in range(steps):
            for part in range(micro):
                rows = slice(part * 8 // micro, (part + 1) * 8 // micro)
                ids, targets = (mw.shard_tensor(t[i, rows], mesh, {"dp": mw.Shard(0)}) for t in (IDS, TARGETS))
                with mw.no_sync(model) if part < micro - 1 else torch.enable_grad():
                    loss = loss_of(model(ids), targets) / micro
                    assert loss.dtype is policy.compute
                    loss.backward()
                losses.append(float(mw.unshard(loss.detach())))
            assert all(p.grad.dtype is F64 and p.dtype is F64 for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return losses, {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}

    return mw.simulate(run, mesh)[0]


def close(made, wanted, rtol=1e-6):
    assert made[0] == pytest.approx(wanted[0], rel=rtol)
    for name, p in wanted[1].items():
        torch.testing.assert_close(made[1][name], p, rtol=rtol * 10, atol=rtol * 10, msg=lambda m, n=name: f"{n}: {m}")


CASES = {
    "dp": (({"dp": 4},), {}),
    "dp tp": (({"dp": 2, "tp": 2}, TP), {}),
    "sequence parallel": (({"dp": 2, "tp": 2}, TP), SP),
    "zero 1": (({"dp": 4},), {"shard_states": "dp"}),
    "zero 3": (({"dp": 4},), {"fsdp": "dp"}),
    "zero 3 kept": (({"dp": 2},), {"fsdp": "dp", "reshard_after_forward": False}),
    "zero 3 tp": (({"dp": 2, "tp": 2}, TP), {"fsdp": "dp"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("micro", [1, 2])
def test_eager_training_equals_one_device_with_the_same_casts(case, micro):
    args, options = CASES[case]
    close(eager(*args, micro=micro, **options), oracle(micro=micro))


# ------------------------------------------------------------------------------------------------ reductions


class Scaled(nn.Module):
    """A norm's weight, used on each rank of tp for its own part of what comes next."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.scale * x


@pytest.mark.parametrize("axis", ["tp", "dp"])
@pytest.mark.parametrize("options", [{}, {"fsdp": "dp"}], ids=["whole", "stored"])
def test_contributions_are_reduced_in_the_dtype_asked_for_over_every_axis(axis, options):
    mesh = mw.Mesh({"dp": 2, "tp": 2})

    def run(reduce):
        model = mw.shard_module(Scaled(), mesh, precision=mw.Precision(BF16, reduce), **options)
        # 1 from one rank, 2**-9 from another: bfloat16 has 8 bits.
        x = mw.shard_tensor(torch.tensor([[1.0], [2**-9]], dtype=BF16).expand(2, 2), mesh, {axis: mw.Shard(0)})
        model(x).sum().backward()
        assert model.scale.dtype is model.scale.grad.dtype is F32
        return float(mw.unshard(model.scale.grad)[1])

    assert mw.simulate(lambda: run(F32), mesh)[0] == 1 + 2**-9
    assert mw.simulate(lambda: run(BF16), mesh)[0] == 1


@pytest.mark.parametrize("stored", [None, "dp"])
def test_sums_over_ranks_and_micro_steps_lose_nothing(stored):
    """Against the contributions of each rank, computed in float32 and summed in float64."""
    mesh, parts = mw.Mesh({"dp": 4}), torch.randn(2, 4, 3, 8)
    torch.manual_seed(1)
    start = nn.Linear(8, 5).double()
    want = torch.zeros(5, 8, dtype=F64)
    for x in parts.flatten(0, 1):
        w = start.weight.detach().float().requires_grad_()
        loss = nn.functional.linear(x, w, start.bias.detach().float()).square().sum()
        want += torch.autograd.grad(loss, w)[0].double()

    def run():
        model = mw.shard_module(copy.deepcopy(start), mesh, precision=POLICY, fsdp=stored)
        for i, x in enumerate(parts):
            with mw.no_sync(model) if i == 0 else torch.enable_grad():
                model(mw.shard_tensor(x.flatten(0, 1), mesh, {"dp": mw.Shard(0)})).square().sum().backward()
                if i == 0 and stored is None:
                    assert model.weight.grad.placements == (mw.Partial(),)
                    assert model.weight.grad.dtype is F64
        return mw.unshard(model.weight.grad)

    torch.testing.assert_close(mw.simulate(run, mesh)[0], want, rtol=1e-12, atol=1e-12)


def test_micro_steps_accumulate_in_reduce_where_masters_are_narrower():
    mesh = mw.Mesh({"dp": 2})

    def run(reduce, **options):
        model = mw.shard_module(Scaled().bfloat16(), mesh, precision=mw.Precision(BF16, reduce), **options)
        for i in range(5):
            x = mw.shard_tensor(torch.full((2, 2), 1.0 if i == 0 else 2**-8, dtype=BF16), mesh, {"dp": mw.Shard(0)})
            with mw.no_sync(model) if i < 4 else torch.enable_grad():
                model(x).sum().backward()
        assert model.scale.grad.dtype is BF16
        return float(mw.unshard(model.scale.grad)[1])

    assert mw.simulate(lambda: run(F32), mesh)[0] == 2 + 2**-5
    assert mw.simulate(lambda: run(F32, fsdp="dp"), mesh)[0] == 2 + 2**-5
    assert mw.simulate(lambda: run(None), mesh)[0] == 2


@pytest.mark.parametrize("stored", [None, "dp"])
def test_what_is_sent_has_the_dtypes_asked_for(stored):
    mesh = mw.Mesh({"dp": 2})

    def run(policy):
        model = nn.Sequential(nn.Linear(96, 128), nn.Linear(128, 32))
        mw.shard_module(model, mesh, precision=policy, fsdp=stored)
        x = mw.shard_tensor(torch.randn(8, 96), mesh, {"dp": mw.Shard(0)}).requires_grad_()
        with mw.explain() as why:
            model(x).float().square().mean().backward()
        return why.counts.kinds, why.counts.bytes

    plain, wide, narrow = (
        mw.simulate(lambda p=p: run(p), mesh)[0] for p in (None, mw.Precision(BF16, F32), mw.Precision(BF16, BF16))
    )
    assert plain[0] == wide[0] == narrow[0]
    if stored is None:
        assert [x[1] for x in (plain, wide, narrow)] == [{"all_reduce": n} for n in (66_176, 66_176, 33_088)]
    else:
        assert plain[1] == {"all_gather": 66_176, "reduce_scatter": 33_088}
        assert wide[1] == {"all_gather": 33_088, "reduce_scatter": 33_088}
        assert narrow[1] == {"all_gather": 33_088, "reduce_scatter": 16_544}


# ------------------------------------------------------------------------------------------------ what is said


def sharded(model, policy, mesh, fn, **options):
    return mw.simulate(lambda: fn(mw.shard_module(copy.deepcopy(model), mesh, precision=policy, **options)), mesh)[0]


DP = mw.Mesh({"dp": 2})
HALF = mw.Precision(BF16, F32)
NET = copy.deepcopy(START).float()


def test_globs_name_parameters_and_modules_and_the_last_one_counts():
    policy = {
        "*": HALF,
        "*norm": mw.Precision(),
        "blocks.1.down.bias": mw.Precision(F64),
        "blocks.0.down": mw.Precision(F64),
    }
    seen = {}

    def fn(model):
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(lambda m, args, n=name: seen.__setitem__(n, args[0].dtype))
        model.blocks[1].down.bias = None
        return model(mw.shard_tensor(IDS[0], DP, {"dp": mw.Shard(0)})).dtype

    with pytest.raises(mw.errors.ShardError, match=r"down.bias"):
        sharded(NET, {"*": HALF, "blocks.1.dwn.bias": HALF}, DP, fn)
    model = copy.deepcopy(NET)
    model.blocks[1].down.bias = None
    del policy["blocks.1.down.bias"]
    assert sharded(model, policy, DP, fn) is BF16
    assert seen["embed"] is torch.int64
    assert seen["head"] is BF16
    assert {n: d for n, d in seen.items() if "norm" in n} == dict.fromkeys(
        ("norm", "blocks.0.norm", "blocks.1.norm"), F32
    )
    assert seen["blocks.0.up"] is seen["blocks.1.down"] is BF16
    assert seen["blocks.0.down"] is F64


@pytest.mark.parametrize("stored", [None, "dp"])
def test_masters_keep_every_bit(stored):
    """What ops write to what they see reaches masters, and no other element of them is rounded."""
    torch.manual_seed(3)
    start = nn.Embedding(6, 4, max_norm=1.0)
    start.weight.data[0] *= 4 / start.weight.data[0].norm()
    start.weight.data[2] = 0.01 * torch.rand(4)

    def fn(model):
        model(mw.shard_tensor(torch.tensor([0, 2]), DP, {"dp": mw.Shard(0)}))
        state = {n: mw.unshard(t) for n, t in model.state_dict().items()}
        return state["weight"]

    made, before = sharded(start, HALF, DP, fn, fsdp=stored), start.weight.detach()
    assert made.dtype is F32
    assert torch.equal(made[1:], before[1:])
    torch.testing.assert_close(made[0], before[0] / before[0].norm(), rtol=1e-2, atol=1e-2)


def test_parameters_outside_of_their_modules_forward_are_seen_alike():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attn = nn.Embedding(5, 8), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, ids):
            x = self.embed(ids)
            x, _ = self.attn(x, x, x, need_weights=False)
            return nn.functional.linear(x, self.embed.weight)

    start, ids = Odd().double(), torch.randint(0, 5, (4, 3))
    one = {n: p.detach().requires_grad_() for n, p in start.named_parameters()}
    out = functional_call(start, {n: p.float() for n, p in one.items()}, (ids,))
    out.square().sum().backward()

    def fn(model):
        out = model(mw.shard_tensor(ids, DP, {"dp": mw.Shard(0)}))
        out.square().sum().backward()
        return mw.unshard(out.detach()), {n: mw.unshard(p.grad) for n, p in model.named_parameters()}

    for stored in (None, "dp"):
        made, grads = sharded(start, POLICY, DP, fn, fsdp=stored)
        torch.testing.assert_close(made, out.detach())
        for n, g in grads.items():
            torch.testing.assert_close(g, one[n].grad, rtol=1e-5, atol=1e-5)


def test_autocast_and_precision_say_the_same_or_are_refused():
    def fn(model, dtype):
        with torch.autocast(DEVICE, dtype):
            return mw.unshard(model(mw.shard_tensor(IDS[0], DP, {"dp": mw.Shard(0)})).detach())

    with pytest.raises(mw.errors.ShardError, match=r"autocast asks for torch.float16: leave one of them out"):
        sharded(NET, HALF, DP, lambda m: fn(m, torch.float16))
    with torch.autocast(DEVICE, BF16):
        want = functional_call(NET, {n: p.bfloat16() for n, p in NET.named_parameters()}, (IDS[0],)).detach()
    torch.testing.assert_close(sharded(NET, HALF, DP, lambda m: fn(m, BF16)), want, rtol=2e-2, atol=2e-2)


def test_what_cannot_be_meant_is_refused():
    shard = mw.errors.ShardError
    with pytest.raises(shard, match=r"compute=torch.int32: one of torch.float16"):
        mw.Precision(torch.int32)
    with pytest.raises(shard, match=r"precision cannot be a dtype: give a mw.Precision"):
        sharded(NET, BF16, DP, None)
    with pytest.raises(shard, match=r"'norm' is given torch.float32: a mw.Precision was expected"):
        sharded(NET, {"norm": F32}, DP, None)
    with pytest.raises(shard, match=r"leave out sync=False; mw.compile_step takes precision="):
        sharded(NET, HALF, DP, None, sync=False)
    model = nn.Module()
    model.n = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(shard, match=r"precision: n is torch.int64, and only floating-point"):
        sharded(model, {"n": HALF}, DP, None)

    def again(model):
        mw.shard_module(model, DP, precision=HALF)  # the same
        mw.shard_module(model, DP, precision=mw.Precision(torch.float16))

    with pytest.raises(shard, match=r"is sharded already, computed in torch.bfloat16, reduced in torch.float32"):
        sharded(NET, HALF, DP, again)
    with pytest.raises(shard, match=r"is sharded already, computed in torch.float32, reduced in torch.float32"):
        sharded(NET, None, DP, again)


def test_ranks_that_say_different_precisions_are_told():
    def fn():
        policy = HALF if runtime.RT.rank else mw.Precision(torch.float16)
        mw.shard_module(copy.deepcopy(NET), DP, precision=policy)

    with pytest.raises(mw.errors.DesyncError, match=r"bfloat16"):
        mw.simulate(fn, DP)


def test_a_model_with_a_precision_is_not_captured_without_it():
    def fn(model):
        mw.compile_step(model, lambda m, b: m(b).float().sum(), None, IDS[0], mesh=DP, batch={"dp": mw.Shard(0)})

    with pytest.raises(mw.errors.ProgramError, match=r"has a precision from mw.shard_module"):
        sharded(NET, HALF, DP, fn)


# ------------------------------------------------------------------------------------------------ captured


def captured(sizes, placements=None, steps=3, policy=POLICY, passes=(), start=START, **options):
    mesh = mw.Mesh(sizes)

    def run():
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen = []

        def loss_fn(m, batch):
            logits = m(batch[0])
            seen.append(logits.dtype)
            return loss_of(logits, batch[1])

        micro = next((p.k_steps for p in passes if isinstance(p, mw.passes.GradientMerge)), 1)
        rows = [slice(i * 8 // micro, (i + 1) * 8 // micro) for i in range(micro)]
        step = mw.compile_step(
            model, loss_fn, optimizer, (IDS[0, rows[0]], TARGETS[0, rows[0]]), mesh=mesh, batch={"dp": mw.Shard(0)},
            layouts=placements, precision=policy, passes=passes, **options,
        )  # fmt: skip
        losses = [float(mw.unshard(step((IDS[i, r], TARGETS[i, r])))) / micro for i in range(steps) for r in rows]
        assert set(seen) == {policy.compute}
        assert {p.dtype for p in model.parameters()} == {next(start.parameters()).dtype}
        return losses, {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}

    return mw.simulate(run, mesh)[0]


PASSES = {
    "plain": [],
    "merge": [mw.passes.GradientMerge(2)],
    "overlap": [mw.passes.DataParallelOptimization()],
}
QUICK = {("plain", "dp tp"), ("overlap", "zero 3"), ("merge", "zero 1")}
GRID = [
    pytest.param(p, c, id=f"{p}-{c}", marks=() if (p, c) in QUICK else pytest.mark.long) for p in PASSES for c in CASES
]


@pytest.mark.parametrize(("passes", "case"), GRID)
def test_captured_training_equals_one_device_with_the_same_casts(passes, case):
    args, options = CASES[case]
    made = captured(*args, passes=PASSES[passes], steps=2, **options)
    close(made, oracle(steps=2, micro=2 if passes == "merge" else 1))


@pytest.mark.parametrize("axis", ["tp", "dp"])
@pytest.mark.parametrize("options", [{}, {"fsdp": "dp"}, {"shard_states": "dp"}], ids=["whole", "zero3", "zero1"])
def test_captured_steps_reduce_in_the_dtype_asked_for(axis, options):
    mesh = mw.Mesh({"dp": 2, "tp": 2})

    def run(reduce):
        model, x = Scaled(), torch.tensor([[1.0], [2**-9]], dtype=BF16).expand(2, 2)
        step = mw.compile_step(
            model, lambda m, x: m(x).sum(), None, x, mesh=mesh, gradients=True, batch={axis: mw.Shard(0)},
            precision=mw.Precision(BF16, reduce), **options,
        )  # fmt: skip
        step(x)
        assert model.scale.grad.dtype is F32
        return float(mw.unshard(model.scale.grad)[1])

    assert mw.simulate(lambda: run(F32), mesh)[0] == 1 + 2**-9
    assert mw.simulate(lambda: run(BF16), mesh)[0] == 1


def test_captured_steps_send_what_was_cast():
    def counted(policy, passes):
        def run():
            model = copy.deepcopy(NET)
            step = mw.compile_step(
                model, lambda m, b: loss_of(m(b[0]).float(), b[1]), None, (IDS[0], TARGETS[0]), mesh=DP,
                batch={"dp": mw.Shard(0)}, precision=policy, fsdp="dp", passes=passes,
            )  # fmt: skip
            with mw.explain() as why:
                step((IDS[0], TARGETS[0]))
            return why.counts.kinds, why.counts.bytes

        return mw.simulate(run, DP)[0]

    for passes in ([], [mw.passes.DataParallelOptimization()]):
        plain, half = counted(None, passes), counted(HALF, passes)
        assert plain[0] == half[0]
        assert half[1].pop("all_gather") * 2 == plain[1].pop("all_gather")
        assert plain[1] == half[1]


@pytest.mark.parametrize("stored", [None, "dp"])
def test_masters_keep_every_bit_in_captured_steps(stored):
    start = nn.Embedding(6, 4, max_norm=1.0)
    start.weight.data[0] *= 4 / start.weight.data[0].norm()

    def run():
        model = copy.deepcopy(start)
        step = mw.compile_step(
            model, lambda m, x: m(x).float().sum(), None, torch.tensor([0, 2]), mesh=DP, batch={"dp": mw.Shard(0)},
            precision=HALF, fsdp=stored,
        )  # fmt: skip
        step(torch.tensor([0, 0]))
        return mw.unshard(model.weight.detach())

    made, before = mw.simulate(run, DP)[0], start.weight.detach()
    assert torch.equal(made[1:], before[1:])
    torch.testing.assert_close(made[0], before[0] / 4, rtol=1e-2, atol=1e-2)


def test_float16_asks_for_a_loss_scale():
    with pytest.raises(mw.errors.ProgramError, match=r"float16, in which small gradients vanish: scale the loss"):
        captured({"dp": 2}, policy=mw.Precision(torch.float16))
    made = captured({"dp": 2}, policy=mw.Precision(torch.float16), loss_scale=1024.0, steps=2, start=NET)
    assert made[0] == pytest.approx(oracle(steps=2)[0], rel=1e-2)


# ------------------------------------------------------------------------------------------------ habits


@functools.cache
def one_device():
    """Gradients of one device for the first batch."""
    model = copy.deepcopy(START)
    loss_of(
        functional_call(model, {n: p.float() for n, p in model.named_parameters()}, (IDS[0],)), TARGETS[0]
    ).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def batch():
    return [mw.shard_tensor(t[0], DP, {"dp": mw.Shard(0)}) for t in (IDS, TARGETS)]


def grads_close(model, times=1):
    for n, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(mw.unshard(p.grad), times * one_device()[n], rtol=1e-5, atol=1e-5)


class Checkpointed(Net):
    """Recomputes its blocks, and has the embedding once more as its head."""

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return nn.functional.linear(self.norm(x), self.embed.weight)


def frozen(model):
    ids, targets = batch()
    model.blocks[0].requires_grad_(False)
    loss_of(model(ids), targets).backward()
    grads_close(model)
    model.zero_grad()
    model.requires_grad_(True)
    loss_of(model(ids), targets).backward()
    grads_close(model)


def recomputed(model):
    ids, targets = batch()
    model.__class__ = Checkpointed
    loss_of(model(ids), targets).backward()
    grads_close(model)


def used_twice(model):
    ids, targets = batch()
    (loss_of(model(ids), targets) + loss_of(model(ids), targets)).backward()
    loss_of(functional_call(model, dict(model.named_parameters()), (ids,)), targets).backward()
    grads_close(model, 3)


def copied(model):
    ids, targets = batch()
    other = copy.deepcopy(model)
    loss_of(other(ids), targets).backward()
    grads_close(other)
    assert all(p.grad is None for p in model.parameters())


def loaded(model):
    ids, targets = batch()
    values = model.state_dict()
    assert {t.dtype for t in values.values()} == {F64}
    for p in model.parameters():
        p.detach().zero_()
    model.load_state_dict(START.state_dict())
    loss_of(model(ids), targets).backward()
    grads_close(model)


def read(model):
    ids, _ = batch()
    model.eval()
    with torch.no_grad():
        one = model(ids)
    with torch.inference_mode():
        other = model(ids)
    assert one.dtype is other.dtype is F32
    assert torch.equal(mw.unshard(one), mw.unshard(other))
    assert mw.unshard(model.embed.weight.detach()).dtype is F64


@pytest.mark.parametrize("stored", [None, "dp"])
@pytest.mark.parametrize("habit", [frozen, recomputed, used_twice, copied, loaded, read], ids=lambda f: f.__name__)
def test_habits(habit, stored):
    def fn(model):
        habit(model)
        return True

    assert sharded(START, POLICY, DP, fn, fsdp=stored)


@pytest.mark.parametrize("stored", [None, "dp"])
def test_masters_narrower_than_what_they_are_reduced_in(stored):
    def fn(model):
        ids, targets = batch()
        seen, p = {}, model.blocks[0].up.weight
        p.register_hook(lambda g: seen.__setitem__("contribution", g.dtype))
        p.register_post_accumulate_grad_hook(lambda q: seen.setdefault("gradient", q.grad.dtype))
        model = copy.deepcopy(model) if stored else model
        optimizer = mw.shard_optimizer(torch.optim.AdamW(model.parameters()))
        loss_of(model(ids), targets).backward()
        assert {p.grad.dtype for p in model.parameters()} == {BF16}
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1).dtype is BF16
        optimizer.step()
        optimizer.zero_grad()
        with mw.no_sync(model):
            loss_of(model(ids), targets).backward()
        optimizer.step()  # reduces what nobody has reduced yet
        assert {p.dtype for p in model.parameters()} == {BF16}
        return seen

    seen = sharded(copy.deepcopy(START).bfloat16(), HALF, DP, fn, fsdp=stored)
    assert seen == ({} if stored else {"contribution": F32, "gradient": BF16})


def test_gradients_that_are_reduced_where_weights_are_used_are_reduced_in_the_dtype_asked_for():
    """A tied weight that another use needs otherwise, and weights that are gathered for one use: no bucket has them."""
    mesh = mw.Mesh({"dp": 2, "tp": 2})

    def run(reduce, static):
        model, policy = copy.deepcopy(NET), mw.Precision(BF16, reduce)
        if static:
            step = mw.compile_step(
                model, lambda m, b: loss_of(m(b[0]), b[1]), None, (IDS[0], TARGETS[0]), mesh=mesh,
                batch={"dp": mw.Shard(0)}, layouts=TP, precision=policy, gradients=True, **SP,
            )  # fmt: skip
        else:
            mw.shard_module(model, mesh, TP, precision=policy, **SP)
        with mw.explain() as why:
            if static:
                step((IDS[0], TARGETS[0]))
            else:
                ids, targets = (mw.shard_tensor(t[0], mesh, {"dp": mw.Shard(0)}) for t in (IDS, TARGETS))
                loss_of(model(ids), targets).backward()
        number = 8  # of the targets, in int64
        return sum(why.counts.bytes[k] for k in ("all_reduce", "reduce_scatter")) - number

    for static in (False, True):
        wide, narrow = (mw.simulate(lambda r=r, s=static: run(r, s), mesh)[0] for r in (F32, BF16))
        assert wide == 2 * narrow


@pytest.mark.parametrize("stored", [None, "dp"])
def test_ranks_without_a_row_and_models_from_the_meta_device(stored):
    mesh = mw.Mesh({"dp": 5})
    one = copy.deepcopy(START)
    seen = {n: p.float() for n, p in one.named_parameters()}
    loss_of(functional_call(one, seen, (IDS[0, :3],)), TARGETS[0, :3]).backward()

    def run():
        with torch.device("meta"):
            model = Net().double()
        start = START.state_dict()
        mw.shard_module(
            model, mesh, precision=POLICY, fsdp=stored, init=lambda m: m.load_state_dict(start)
        )  # fmt: skip
        ids, targets = (mw.shard_tensor(t[0, :3], mesh, {"dp": mw.Shard(0)}) for t in (IDS, TARGETS))
        loss_of(model(ids), targets).backward()
        return {n: mw.unshard(p.grad) for n, p in model.named_parameters()}

    made = mw.simulate(run, mesh)[0]
    for n, p in one.named_parameters():
        torch.testing.assert_close(made[n], p.grad, rtol=1e-5, atol=1e-5)


def test_checkpoints_have_masters(tmp_path):
    def one(stored, load):
        model = mw.shard_module(copy.deepcopy(NET), DP, precision=HALF, fsdp=stored)
        optimizer = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        store, parts = mw.Checkpoints(tmp_path), {"model": model, "optimizer": optimizer}
        if load:
            assert store.load(**parts) == 1
            return {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}
        ids, targets = batch()
        loss_of(model(ids), targets).backward()
        optimizer.step()
        store.save(1, **parts, wait=True)
        return {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}

    saved, loaded = mw.simulate(lambda: (one("dp", False), one(None, True)), DP)[0]
    for n, p in saved.items():
        assert torch.equal(p, loaded[n])
        assert loaded[n].dtype is F32


@dataclasses.dataclass
class Given:
    value: torch.Tensor
    name: str = "given"


class Named(NamedTuple):
    value: torch.Tensor


class Kept(OrderedDict):
    kind = "kept"


CONTAINERS = {
    "dict": lambda t: {"value": t, "ids": torch.arange(2)},
    "ordered": lambda t: Kept(value=t),
    "default": lambda t: defaultdict(list, value=t),
    "named tuple": Named,
    "data class": Given,
    "namespace": lambda t: SimpleNamespace(value=t),
    "nested": lambda t: {"value": [t, (t, Given(t))]},
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_of_inputs_and_outputs_stay_what_they_are(make):
    seen = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, given, **more):
            seen.append((given, more["other"]))
            return make(self.weight * 2)

    def dtypes(value):
        inner = getattr(value, "value", None) if not isinstance(value, dict) else value["value"]
        if isinstance(inner, list):
            inner = inner[1][1].value
        return inner.dtype

    def run():
        mesh = mw.Mesh({"dp": 2})
        model = mw.shard_module(Model(), mesh, precision=mw.Precision(BF16, F32, outputs=F64))
        given = make(torch.ones(3))
        out = model(given, other=given)
        assert dtypes(given) is F32  # the caller's own is as it was
        assert dtypes(out) is F64
        return type(out)

    want = type(make(torch.ones(3)))
    assert mw.simulate(run, mw.Mesh({"dp": 2})) == [want] * 2
    for pair in seen:
        for got in pair:
            assert type(got) is want
            assert dtypes(got) is BF16
    if want is defaultdict:
        assert seen[0][0].default_factory is list


def test_names_of_one_parameter_are_told_the_same():
    def run(precision):
        return lambda: mw.shard_module(copy.deepcopy(START), mw.Mesh({"dp": 2}), precision=precision)

    mesh, low, high = mw.Mesh({"dp": 2}), mw.Precision(BF16, F32), mw.Precision(F32, F32)
    with pytest.raises(ShardError, match=r"embed.weight and head.weight are one parameter \(tied\).*bfloat16, .* and"):
        mw.simulate(run({"*": low, "head": high}), mesh)
    mw.simulate(run({"*": low, "head": high, "embed": high}), mesh)


@pytest.mark.parametrize("stored", [None, "dp"])
def test_a_parameter_that_was_replaced_by_one_in_another_dtype_is_refused(stored):
    def run(replace):
        def train():
            mesh = mw.Mesh({"dp": 2})
            model = mw.shard_module(
                nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
                mesh,
                fsdp=stored,
                precision=mw.Precision(BF16, F32),
            )
            replace(model)
            return model(mw.shard_tensor(torch.ones(4, 4), mesh, {"dp": mw.Shard(0)})).dtype

        return mw.simulate(train, mw.Mesh({"dp": 2}))[0]

    def assign(model):
        model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}, assign=True)

    def put(model):
        model[1].bias = nn.Parameter(mw.shard_tensor(torch.ones(2), mw.Mesh({"dp": 2}), ()))

    for replace in (assign, put):
        with pytest.raises(
            ShardError, match=r"of Linear was replaced after shard_module\(precision=\), by a tensor in"
        ):
            run(replace)
    assert run(lambda model: model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})) is BF16


@pytest.mark.parametrize("stored", [None, "dp"])
@pytest.mark.filterwarnings("ignore:lstm has no rule")
def test_a_forward_reads_the_dtype_that_its_ops_see(stored):
    """Code that asks ``self.weight.dtype`` took the other branch than one device did, and than a captured step."""
    seen = []

    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.inner = nn.LSTM(4, 3)  # compares dtypes itself

        def forward(self, x):
            seen.append([next(self.parameters()).dtype, self.inner.weight_ih_l0.dtype, self.weight.nbytes])
            x = x.to(self.weight.dtype) @ self.weight + torch.zeros(4, dtype=self.weight.dtype)
            return self.inner(x.masked_fill(x > 9, torch.finfo(self.weight.dtype).min))[0]

    def run():
        mesh = mw.Mesh({"dp": 2})
        model = mw.shard_module(Asking(), mesh, fsdp=stored, precision=mw.Precision(BF16, F32))
        out = model(mw.shard_tensor(torch.ones(4, 4), mesh, {"dp": mw.Shard(0)}))
        out.sum().backward()
        return out.dtype, model.weight.dtype, model.weight.grad.dtype

    assert mw.simulate(run, mw.Mesh({"dp": 2}))[0] == (BF16, F32, F32)
    assert seen == [[BF16, BF16, 32]] * 2


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("split", [False, True], ids=["replicated", "split"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)], ids=str)
def test_batch_norm_with_buffers_of_the_stored_dtype(dtypes: Any, split: bool, captured: bool) -> None:
    """``compute=`` leaves running statistics as they are, which PyTorch's kernel refuses next to cast weights."""
    stored, compute = dtypes
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=stored)
    mesh = mw.Mesh({"dp": 2})
    how = {"dp": mw.Shard(0)} if split else {}

    def loss_of(model: Any, batch: Any) -> Any:
        return model(batch).to(stored).square().mean()

    def model_of() -> Any:
        torch.manual_seed(0)
        return nn.BatchNorm1d(3, dtype=stored)

    alone = model_of()
    want = [loss_of(alone, x), loss_of(alone.eval(), x)]
    wanted = [b.double() for b in alone.buffers()]

    def run() -> Any:
        model, precision = model_of(), mw.Precision(compute=compute)
        if captured:
            step = mw.compile_step(model, loss_of, None, x, mesh=mesh, batch=how, gradients=True, precision=precision)
            losses = [step(x), step.eval(x)]
        else:
            mw.shard_module(model, mesh, precision=precision)
            batch = mw.shard_tensor(x, mesh, how)
            losses = [loss_of(model, batch)]
            losses[0].backward()
            losses.append(loss_of(model.eval(), batch))
        return [float(v) for v in losses], [mw.unshard(b).double() for b in model.buffers()]

    for losses, buffers in mw.simulate(run, mesh):
        assert losses == pytest.approx([v.item() for v in want], rel=2e-2 if compute is torch.bfloat16 else 1e-5)
        for a, b in zip(buffers, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2 if compute is torch.bfloat16 else 1e-5, atol=1e-2)
