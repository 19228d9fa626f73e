"""Mixture of experts as one op: the numbers of one device, however tokens and experts are split."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright import collective
from meshwright.errors import DispatchError
from meshwright.ranks import runtime
from tests.support.compare import check_equal, plain

torch.manual_seed(0)
TOKENS, WIDTH, INNER, COUNT, K = 10, 6, 4, 5, 2


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


X, SCORES = drawn(TOKENS, WIDTH), torch.rand(TOKENS, K, dtype=torch.float64)
IDS = torch.stack([torch.randperm(COUNT)[:K] for _ in range(TOKENS)])
GATE_UP, DOWN = drawn(COUNT, 2 * INNER, WIDTH), drawn(COUNT, WIDTH, INNER)
BIASES = {"gate_up_bias": drawn(COUNT, 2 * INNER), "down_bias": drawn(COUNT, WIDTH)}


def one_by_one(x: Tensor, ids: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor, **bias: Tensor) -> Tensor:
    """The definition: all experts on all tokens, and of each token its own."""
    zero = torch.zeros(1, dtype=x.dtype)
    gate, up = (x @ gate_up.transpose(1, 2) + bias.get("gate_up_bias", zero)[:, None]).chunk(2, -1)
    made = (F.silu(gate) * up) @ down.transpose(1, 2) + bias.get("down_bias", zero)[:, None]
    chosen = F.one_hot(ids, len(gate_up)).to(x.dtype) * scores[..., None]
    return torch.einsum("etc,te->tc", made, chosen.sum(1))


def results(fn: Any, ids: Tensor, leaves: dict[str, Tensor]) -> list[Tensor]:
    """The value, gradients and gradients of these."""
    x, scores, gate_up, down, *_ = leaves.values()
    made = fn(x, ids, scores, gate_up, down, **{k: v for k, v in leaves.items() if "bias" in k})
    first = torch.autograd.grad(made.square().sum(), list(leaves.values()), create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in first), list(leaves.values()))
    return [made, *first, *again]


S, R = mw.Shard(0), mw.Replicate()
# How tokens lie, and how experts do.
LAID: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "both over dp": ({"dp": 2}, {"dp": S}, {"dp": S}),
    "over dp, uneven": ({"dp": 3}, {"dp": S}, {"dp": S}),
    "experts over tp": ({"tp": 4}, {}, {"tp": S}),
    "an axis of their own": ({"dp": 2, "ep": 2}, {"dp": S, "ep": S}, {"ep": S}),
    "two axes": ({"dp": 2, "tp": 2}, {"dp": S}, {"dp": S, "tp": S}),
    "fewer than ranks": ({"ep": 8}, {}, {"ep": S}),
    "tokens alone": ({"dp": 4}, {"dp": S}, {}),
    "none": ({"dp": 2}, {}, {}),
}
CHOSEN = {"spread": IDS, "all on one": torch.full_like(IDS, 3), "some on none": IDS.masked_fill(IDS == 2, COUNT)}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("name", LAID)
@pytest.mark.thin(3)
def test_like_one_device(name: str, chosen: str, biased: bool) -> None:
    sizes, tokens, laid = LAID[name]
    mesh, ids = mw.Mesh(sizes), CHOSEN[chosen]
    given = {"x": X, "scores": SCORES, "gate_up": GATE_UP, "down": DOWN, **(BIASES if biased else {})}
    fits = ids.clamp(max=COUNT - 1)
    scores = SCORES.masked_fill(ids == COUNT, 0.0)
    exact = {k: t.clone().requires_grad_() for k, t in (given | {"scores": scores}).items()}
    want = results(one_by_one, fits, exact)
    if chosen == "some on none":  # of a weight that counts for nothing the gradient is zero
        want = want[:1]
    else:
        alone = results(mw.experts, ids, {k: t.clone().requires_grad_() for k, t in given.items()})
        check_equal(plain(alone), plain(want))

    def run() -> Any:
        places = {"x": tokens, "scores": tokens}
        own = {k: mw.shard_tensor(t, mesh, places.get(k, laid)).requires_grad_() for k, t in given.items()}
        made = results(mw.experts, mw.shard_tensor(ids, mesh, tokens), own)
        assert made[0].placements == own["x"].placements
        return [plain(t) for t in made]

    for got in mw.simulate(run, mesh):
        check_equal(got[: len(want)], plain(want))


def test_what_is_sent_is_the_lesser() -> None:
    """Tokens are gathered and what experts make of them is scattered; or the weights are gathered, if they are less."""
    mesh = mw.Mesh({"dp": 2})

    def run(tokens: int, width: int) -> Any:
        x = mw.shard_tensor(drawn(tokens, width), mesh, {"dp": S}).requires_grad_()
        ids = mw.shard_tensor(torch.zeros(tokens, 1, dtype=torch.long), mesh, {"dp": S})
        scores = mw.shard_tensor(torch.ones(tokens, 1, dtype=torch.float64), mesh, {"dp": S})
        up, down = (mw.shard_tensor(drawn(2, *s), mesh, {"dp": S}) for s in ((8, width), (width, 4)))
        with collective.counting() as counts:
            mw.experts(x, ids, scores, up, down)
        return counts.bytes

    for sent in mw.simulate(lambda: run(4, 64), mesh):
        assert sent == {"all_gather": (4 * 64 + 2 * 4) // 2 * 8, "reduce_scatter": 4 * 64 // 2 * 8}
    for sent in mw.simulate(lambda: run(4000, 8), mesh):
        assert sent == {"all_gather": 2 * (8 * 8 + 8 * 4) // 2 * 8}


class Layer(nn.Module):
    """A router, experts, and a shared part."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = nn.Linear(WIDTH, COUNT), nn.Linear(WIDTH, WIDTH)
        self.gate_up = nn.Parameter(drawn(COUNT, 2 * INNER, WIDTH) / 4)
        self.down = nn.Parameter(drawn(COUNT, WIDTH, INNER) / 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).softmax(-1)
        top, ids = scores.topk(K)
        load = F.one_hot(ids, COUNT).to(x.dtype).sum(-2).flatten(0, -2).mean(0)
        balance = (load * scores.flatten(0, -2).mean(0)).sum() * COUNT
        made = mw.experts(x, ids, top / top.sum(-1, keepdim=True), self.gate_up, self.down)
        return x + self.shared(x) + made, balance


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([Layer(), Layer()]).double()

    def forward(self, x: Tensor) -> Tensor:
        total: Any = 0.0
        for layer in self.layers:
            x, balance = layer(x)
            total = total + 0.01 * balance
        return x.square().mean() + total


MESHES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "dp": ({"dp": 3}, {"dp": S}, {"dp": S}),
    "dp and ep": ({"dp": 2, "ep": 2}, {"dp": S, "ep": S}, {"ep": S}),
    "a sequence": ({"cp": 2, "ep": 2}, {"cp": mw.Shard(1)}, {"ep": S}),
}


@pytest.mark.parametrize("name", MESHES)
def test_training_like_one_device(name: str) -> None:
    sizes, batch, laid = MESHES[name]
    mesh, layouts = mw.Mesh(sizes), {"layers.*.gate_up": laid, "layers.*.down": laid}
    batches = [drawn(4, 3, WIDTH) for _ in range(3)]

    def trained(model: nn.Module, put: Any = lambda x: x) -> list[float]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for x in batches:
            optimizer.zero_grad()
            loss = model(put(x))
            loss.backward()
            optimizer.step()
            losses.append(float(mw.unshard(loss.detach())))
        return losses

    want = trained(Model())

    def eager() -> list[float]:
        return trained(mw.shard_module(Model(), mesh, layouts), lambda x: mw.shard_tensor(x, mesh, batch))

    def captured() -> list[float]:
        model = Model()
        step = mw.compile_step(
            model, lambda m, x: m(x), torch.optim.SGD(model.parameters(), lr=0.1), batches[0], mesh=mesh,
            layouts=layouts, batch=batch,
        )  # fmt: skip
        return [float(step(x)) for x in batches]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for run in (eager, captured):
            for got in mw.simulate(run, mesh):
                assert got == pytest.approx(want, rel=1e-9), run.__name__


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    mesh = mw.Mesh({"ep": 5})

    def run() -> Tensor:
        up, down = (mw.shard_tensor(t, mesh, {"ep": S}).requires_grad_() for t in (GATE_UP, DOWN))
        mw.experts(X, torch.zeros_like(IDS), SCORES, up, down).sum().backward()
        assert up.grad.placements == (S,)
        return mw.unshard(up.grad)

    for grad in mw.simulate(run, mesh):
        assert grad[0].abs().sum() > 0
        assert not grad[1:].any()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ids": IDS[:, :1]}, "do not fit: give x"),
        ({"ids": IDS.double()}, "ids .* of torch.float64"),
        ({"down": DOWN[:, :, :3]}, "down .*5, 6, 3.* do not fit"),
        ({"gate_up": GATE_UP[:4]}, r"gate_up \(4, 8, 6\)"),
        ({"act": "slu"}, "did you mean 'silu'"),
        ({"act": nn.PReLU()}, "PReLU has parameters"),
        ({"act": lambda rows: rows}, "act gave"),
        ({"down_bias": BIASES["gate_up_bias"]}, r"down_bias is \(5, 8\), \(5, 6\)"),
    ],
)
def test_refused(change: dict[str, Any], text: str) -> None:
    given = {"x": X, "ids": IDS, "weights": SCORES, "gate_up": GATE_UP, "down": DOWN} | change
    with pytest.raises(DispatchError, match=text):
        mw.experts(**given)
    mesh = mw.Mesh({"ep": 2})

    def run() -> None:
        laid = {k: mw.shard_tensor(t, mesh, {}) if k in ("x", "gate_up") else t for k, t in given.items()}
        mw.experts(**laid)

    with pytest.raises(DispatchError, match=text):
        mw.simulate(run, mesh)


def test_autocast() -> None:
    """Products in the low precision, as a linear layer's."""
    x, up, down = X.float(), GATE_UP.float(), DOWN.float()
    want = mw.experts(x, IDS, SCORES.float(), up, down)
    with torch.autocast("cpu", torch.bfloat16):
        low = mw.experts(x, IDS, SCORES.float(), up, down)
    assert low.dtype is torch.float32
    assert 1e-4 < (low - want).norm() / want.norm() < 3e-2
    mesh = mw.Mesh({"ep": 2})

    def run() -> Tensor:
        assert runtime.RT.sim is not None
        laid = [mw.shard_tensor(t, mesh, {"ep": S}) for t in (up, down)]
        with torch.autocast("cpu", torch.bfloat16):
            return mw.unshard(mw.experts(x, IDS, SCORES.float(), *laid))

    for got in mw.simulate(run, mesh):
        torch.testing.assert_close(got, low, rtol=1e-2, atol=1e-2)
