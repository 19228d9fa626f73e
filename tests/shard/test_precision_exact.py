"""Training by ``mw.Precision`` against one device under the same casts, over many steps, and its reductions exactly.

Masters are float64.  ``close``: computed in float32, summed over ranks in float64.  ``equal``: computed in float64, all
casts being identities: nothing may be summed in less.  What is between those two is tested at the end: sums of float32
contributions, against those of the very parts that ranks compute.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

import meshwright as mw
from tests.support.shard_networks import Tokens

F32, F64 = torch.float32, torch.float64
POLICIES = {"close": (mw.Precision(F32, F64, F64), 1e-6), "equal": (mw.Precision(F64, F64, F64), 1e-12)}
STEPS, ROWS, LENGTH, VOCAB, WIDTH, HEADS = 50, 8, 6, 13, 16, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # Softmax does not see a bias of keys: its gradient would be noise, which Adam makes large.
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=i != 1) for i in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(Tokens):
    def __init__(self, tied):
        super().__init__(Block, WIDTH, VOCAB, tied)


torch.manual_seed(0)
START = {tied: Net(tied).double() for tied in (False, True)}
IDS = torch.randint(0, VOCAB, (STEPS, ROWS, LENGTH + 1))
COLUMNS, TP = ("q", "k", "v", "up"), {}
for name in COLUMNS:
    TP |= {f"blocks.*.{name}.{part}": {"tp": mw.Shard(0)} for part in ("weight", "bias")[: 1 + (name != "k")]}
TP |= {f"blocks.*.{name}.weight": {"tp": mw.Shard(1)} for name in ("out", "down")}
ROWS_OF, PARTS_OF = {"dp": mw.Shard(0)}, {"dp": mw.Shard(0), "tp": mw.Shard(1)}
SP = {
    "inputs": {"blocks.*.norm*": PARTS_OF} | {f"blocks.*.{name}": ROWS_OF for name in COLUMNS},
    "outputs": {f"blocks.*.{name}": PARTS_OF for name in ("out", "down")},
}
# Mesh, placements, options, micro-steps of an update, whether the embedding is tied.
CASES = {
    "dp": ({"dp": 4}, {}, {}, 1, True),
    "dp tp": ({"dp": 2, "tp": 2}, TP, {}, 1, True),
    "sequence parallel": ({"dp": 2, "tp": 2}, TP, SP, 1, False),
    "zero 3": ({"dp": 4}, {}, {"fsdp": "dp"}, 1, True),
    "zero 3 tp": ({"dp": 2, "tp": 2}, TP, {"fsdp": "dp"}, 1, False),
    "zero 1": ({"dp": 4}, {}, {"shard_states": "dp"}, 1, False),
    "micro-steps": ({"dp": 4}, {}, {}, 2, False),
    "micro-steps zero 3 tp": ({"dp": 2, "tp": 2}, TP, {"fsdp": "dp"}, 2, True),
}
QUICK = {("eager", "dp tp", "close"), ("eager", "micro-steps", "equal"), ("captured", "micro-steps zero 3 tp", "close")}


def loss_of(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def halves(i, micro):
    return IDS[i].chunk(micro)


def one_device(tied, micro, compute, steps):
    model = copy.deepcopy(START[tied])
    optimizer, losses = adam(model), []
    for i in range(steps):
        for batch in halves(i, micro):
            seen = {n: p.to(compute) for n, p in model.named_parameters()}
            loss = loss_of(lambda ids, seen=seen: functional_call(model, seen, (ids,)), batch)
            (loss / micro).backward()
            losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def eager(mesh, placements, options, micro, tied, policy, steps):
    options = dict(options)
    states = options.pop("shard_states", None)
    model = mw.shard_module(copy.deepcopy(START[tied]), mesh, placements, precision=policy, **options)
    optimizer, losses = mw.shard_optimizer(adam(model), shard_states=states), []
    for i in range(steps):
        for k, batch in enumerate(halves(i, micro)):
            with mw.no_sync(model) if k < micro - 1 else contextlib.nullcontext():
                loss = loss_of(model, mw.shard_tensor(batch, mesh, ROWS_OF))
                (loss / micro).backward()
            losses.append(float(mw.unshard(loss.detach())))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}


def captured(mesh, placements, options, micro, tied, policy, steps):
    model = copy.deepcopy(START[tied])
    step = mw.compile_step(
        model, loss_of, adam(model), halves(0, micro)[0], mesh=mesh, batch=ROWS_OF, layouts=placements,
        precision=policy, passes=[mw.passes.GradientMerge(micro)] if micro > 1 else [], **options,
    )  # fmt: skip
    losses = [float(mw.unshard(step(batch))) for i in range(steps) for batch in halves(i, micro)]
    return losses, {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}


def deviation(mode, case, policy, steps):
    """Largest relative deviation of a loss, and of a parameter in units of the largest of its tensor."""
    sizes, placements, options, micro, tied = CASES[case]
    mesh, run = mw.Mesh(sizes), {"eager": eager, "captured": captured}[mode]
    losses, params = mw.simulate(lambda: run(mesh, placements, options, micro, tied, policy, steps), mesh)[0]
    want, wanted = one_device(tied, micro, policy.compute, steps)
    assert len(losses) == len(want)
    assert wanted["norm.weight"].ne(1).all()
    off = max(float((params[n] - p).abs().max() / p.abs().max()) for n, p in wanted.items())
    return max(abs(a - b) / b for a, b in zip(losses, want, strict=True)), off


GRID = [
    pytest.param(m, c, p, id=f"{m}-{c}-{p}", marks=() if (m, c, p) in QUICK else pytest.mark.long)
    for m in ("eager", "captured") for c in CASES for p in POLICIES
]  # fmt: skip


@pytest.mark.parametrize(("mode", "case", "name"), GRID)
def test_training_is_that_of_one_device_under_the_same_casts(mode, case, name, request):
    policy, most = POLICIES[name]
    loss, params = deviation(mode, case, policy, STEPS if request.config.getoption("--whole") else 3)
    print(f"{mode}, {case}, {name}: losses {loss:.1e}, parameters {params:.1e}")
    assert loss <= most
    assert params <= 100 * most


# ------------------------------------------------------------------------------------------------ reductions alone


class Pairs(nn.Module):
    """Twice a column- and a row-parallel linear: each rank has a part of the gradient of the second's input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.up, self.down = (
            nn.ModuleList(nn.Linear(*io, bias=False) for _ in "ab") for io in ((WIDTH, 24), (24, WIDTH))
        )

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for up, down in zip(self.up, self.down, strict=True):
            x = torch.tanh(down(torch.relu(up(x))))
        return x


def loss_sum(out):
    return out.double().square().sum() / 64


def by_hand(start, xs, dp, tp):
    """On one device, but in the parts that ranks compute, in float32; all that ranks sum is summed in float64."""
    model = copy.deepcopy(start)
    optimizer, losses = adam(model), []
    for x in xs:
        loss = torch.zeros((), dtype=F64)
        for rows in x.chunk(dp):
            # What ranks sum is a cast to float64 and back here, whose backward sums in float64 too.  The input of the
            # first pair is made of leaves alone: each rank of tp has its own, and it is at the leaves that they meet.
            first = model.first
            xs_of = [torch.tanh(F.linear(rows.float(), first.weight.float(), first.bias.float())) for _ in range(tp)]
            for up, down in zip(model.up, model.down, strict=True):
                split = zip(xs_of, up.weight.chunk(tp), down.weight.chunk(tp, 1), strict=True)
                parts = [F.linear(torch.relu(F.linear(y, w.float())), v.float().contiguous()) for y, w, v in split]
                out = torch.tanh(sum(part.double() for part in parts).float())
                both = out.double()
                xs_of = [both.float() for _ in range(tp)]
            loss = loss + loss_sum(out)
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


PAIRS = {"up.*": {"tp": mw.Shard(0)}, "down.*": {"tp": mw.Shard(1)}}
STORED = {"replicated": {}, "zero 3": {"fsdp": "dp"}, "zero 1": {"shard_states": "dp"}}


def reduced(static, sizes, start, xs, options, precision):
    mesh = mw.Mesh(sizes)
    states, stored = options.get("shard_states"), options.get("fsdp")
    placements = {n: p for n, p in PAIRS.items() if "tp" in sizes}

    def run():
        model = copy.deepcopy(start)
        if static:
            step = mw.compile_step(
                model, lambda m, x: loss_sum(m(x)), adam(model), xs[0], mesh=mesh, batch=ROWS_OF, layouts=placements,
                precision=precision, **options,
            )  # fmt: skip
            losses = [float(mw.unshard(step(x))) for x in xs]
        else:
            mw.shard_module(model, mesh, placements, precision=precision, fsdp=stored)
            optimizer, losses = mw.shard_optimizer(adam(model), shard_states=states), []
            for x in xs:
                loss = loss_sum(model(mw.shard_tensor(x, mesh, ROWS_OF)))
                loss.backward()
                losses.append(float(mw.unshard(loss.detach())))
                optimizer.step()
                optimizer.zero_grad()
        return losses, {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}

    return mw.simulate(run, mesh)[0]


QUICKLY = {("replicated", False), ("zero 3", True)}
MESHES = {"dp": {"dp": 4}, "dp tp": {"dp": 2, "tp": 3}}
REDUCED = [
    pytest.param(n, stored, static, id=f"{n}-{stored}-{'captured' if static else 'eager'}",
                 marks=() if n == "dp tp" and (stored, static) in QUICKLY else pytest.mark.long)
    for n in MESHES for stored in STORED for static in (False, True)
]  # fmt: skip


@pytest.mark.parametrize(("name", "stored", "static"), REDUCED)
def test_reductions_of_float32_contributions_are_those_in_float64(name, stored, static, request):
    sizes = MESHES[name]
    torch.manual_seed(1)
    start, xs = Pairs().double(), torch.randn(STEPS if request.config.getoption("--whole") else 4, 8, 4)
    want, wanted = by_hand(start, xs, sizes["dp"], sizes.get("tp", 1))
    for partial in (F64, None)[: 2 if not static and stored == "replicated" else 1]:
        precision = mw.Precision(F32, F64, partial)
        losses, params = reduced(static, sizes, start, xs, STORED[stored], precision)
        loss = max(abs(a - b) / b for a, b in zip(losses, want, strict=True))
        off = max(float((params[n] - p).abs().max() / p.abs().max()) for n, p in wanted.items())
        print(f"{'captured' if static else 'eager'}, {sizes}, {stored}, {partial}: {loss:.1e}, {off:.1e}")
        assert (max(loss, off) <= 1e-12) == (partial is F64 or "tp" not in sizes)
