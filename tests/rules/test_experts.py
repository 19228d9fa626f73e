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
from meshwright.collective import rows
from meshwright.errors import CaptureError, DispatchError, RuleError
from meshwright.ranks import runtime
from meshwright.rules.experts import fraction
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


def sent_by(
    mesh: mw.Mesh, tokens: int, width: int, ids: Tensor, count: int = 2, k: int = 1, way: dict[str, str] | None = None
) -> list[dict[str, int]]:
    """Bytes of the forward, of each rank, with tokens and experts split over all axes."""
    laid = dict.fromkeys(mesh.axes, S)

    def run() -> dict[str, int]:
        x, scores = (mw.shard_tensor(drawn(tokens, n), mesh, laid).requires_grad_() for n in (width, k))
        up, down = (mw.shard_tensor(drawn(count, *s), mesh, laid) for s in ((8, width), (width, 4)))
        with collective.counting() as counts, mw.strategies({"experts": way or {}}):
            mw.experts(x, mw.shard_tensor(ids, mesh, laid), scores, up, down)
        return dict(counts.bytes)

    return mw.simulate(run, mesh)


def test_what_is_sent_is_the_lesser() -> None:
    """Rows go to where their experts are; or all, if all are needed; or the weights are gathered, if they are less."""
    mesh = mw.Mesh({"dp": 2})
    zeros = torch.zeros(4, 1, dtype=torch.long)
    whole = {"all_gather": (4 * 64 + 2 * 4) // 2 * 8, "reduce_scatter": 4 * 64 // 2 * 8}
    ids = {"all_gather": 4 // 2 * 8}
    # All tokens are for the first rank's expert: half of them come from the other, and nothing goes there.
    first, second = sent_by(mesh, 4, 64, zeros)
    assert first == {**ids, "gather_rows": 2 * (64 + 1) * 8, "scatter_rows": 2 * 64 * 8}
    assert second == {**ids, "gather_rows": 0, "scatter_rows": 0}
    for sent in sent_by(mesh, 4, 64, zeros, way={"dp": "whole"}):
        assert sent == whole
    with pytest.raises(RuleError, match="no strategy 'row'; did you mean 'rows'"):
        sent_by(mesh, 4, 64, zeros, way={"dp": "row"})
    for sent in sent_by(mesh, 4, 64, torch.zeros(4, 2, dtype=torch.long), k=2):  # of 2 experts each token needs 2
        assert sent == {"all_gather": (4 * 64 + 2 * 8) // 2 * 8, "reduce_scatter": 4 * 64 // 2 * 8}
    for sent in sent_by(mesh, 4000, 8, torch.zeros(4000, 1, dtype=torch.long)):
        assert sent == {"all_gather": 2 * (8 * 8 + 8 * 4) // 2 * 8}


def test_a_row_goes_once_to_each_rank_that_needs_it() -> None:
    """Bytes counted token by token; on average those of the formula: 4.63 of 7 where 8 of 256 experts are chosen."""
    mesh, tokens, width, count, k = mw.Mesh({"dp": 2, "ep": 4}), 200, 5, 256, 8
    draw = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(count, generator=draw)[:k] for _ in range(tokens)])
    own = [set(range(p * 32, p * 32 + 32)) for p in range(8)]
    found = sent_by(mesh, tokens, width, ids, count, k)
    total = 0
    for rank, sent in enumerate(found):
        rows = [t for t in range(tokens) if t // 25 != rank and own[rank] & set(ids[t].tolist())]
        total += len(rows)
        assert sent["gather_rows"] == len(rows) * (width + k) * 8
        assert sent["scatter_rows"] == len(rows) * width * 8
    assert fraction(count, 32, k) * 7 == pytest.approx(4.633, abs=0.0005)
    assert total / tokens == pytest.approx(4.633, rel=0.03)


AXES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "two axes of experts": ({"dp": 2, "ep": 2}, {"dp": S, "ep": S}, {"dp": S, "ep": S}, {"dp": S, "ep": S}),
    "a split sequence": ({"cp": 2, "ep": 2}, {"cp": mw.Shard(1), "ep": S}, {"cp": S, "ep": S}, {"cp": S, "ep": S}),
    "batch over the others": ({"dp": 2, "ep": 3}, {"dp": S, "ep": S}, {"ep": S}, {"ep": S}),
    "split inside": ({"ep": 2, "tp": 3}, {"ep": S}, {"ep": S, "tp": mw.Shard(2)}, {"ep": S, "tp": mw.Shard(2)}),
    "inside alone": ({"tp": 4}, {}, {"tp": mw.Shard(2)}, {"tp": mw.Shard(2)}),
    "outside and inside": ({"dp": 2, "tp": 2}, {"dp": S}, {"dp": S, "tp": S}, {"dp": S, "tp": S}),
    "more ranks than experts": ({"dp": 7}, {"dp": S}, {"dp": S}, {"dp": S}),
    "more ranks than tokens": ({"ep": 2, "dp": 4}, {"ep": S, "dp": S}, {"ep": S}, {"ep": S}),
}


def laid_out(
    name: str, unread: float, monkeypatch: pytest.MonkeyPatch, chosen: Tensor
) -> tuple[list[Tensor], list[Any]]:
    """Results on one device, and those of all ranks, each with the kinds of its collectives; tokens are (2, 5, c)."""
    sizes, tokens, up, down = AXES[name]
    mesh, ids = mw.Mesh(sizes), chosen.view(2, 5, K)
    given = {"x": X.view(2, 5, WIDTH), "scores": SCORES.view(2, 5, K), "gate_up": GATE_UP.view(COUNT, 2, INNER, WIDTH)}
    given |= {
        "down": DOWN,
        "gate_up_bias": BIASES["gate_up_bias"].view(COUNT, 2, INNER),
        "down_bias": BIASES["down_bias"],
    }
    places = {"x": tokens, "scores": tokens, "gate_up": up, "down": down}
    places["gate_up_bias"] = up
    places["down_bias"] = {a: p for a, p in down.items() if p == S}
    monkeypatch.setattr(rows, "UNREAD", unread)

    def run() -> Any:
        own = {k: mw.shard_tensor(t, mesh, places[k]).requires_grad_() for k, t in given.items()}
        with collective.counting() as counts:
            made = results(mw.experts, mw.shard_tensor(ids, mesh, tokens), own)
        assert made[0].placements == own["x"].placements
        return [plain(t) for t in made], dict(counts.kinds)

    alone = {k: t.clone().requires_grad_() for k, t in given.items()}
    return [plain(t) for t in results(mw.experts, ids, alone)], mw.simulate(run, mesh)


@pytest.mark.parametrize("chosen", ["spread", "all on one"])
@pytest.mark.parametrize("name", AXES)
def test_rows_over_axes(name: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value, gradients and gradients of these; and no bit of them hangs on what is in rows that are left out."""
    want, found = laid_out(name, 0.0, monkeypatch, CHOSEN[chosen])
    _, again = laid_out(name, float("nan"), monkeypatch, CHOSEN[chosen])
    for (got, kinds), (same, _) in zip(found, again, strict=True):
        check_equal(got, want)
        assert all(torch.equal(a, b) for a, b in zip(got, same, strict=True))
        assert ("gather_rows" in kinds) == (name != "inside alone")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("act", ["silu", "gelu", "relu", "tanh"])
def test_gradients_expert_by_expert(act: str, biased: bool) -> None:
    """Those of the definition, where nobody differentiates again; with a gate and without; of frozen weights none."""
    for parts in (2, 1):
        names = {"x": X, "scores": SCORES, "gate_up": GATE_UP[:, : parts * INNER], "down": DOWN}
        names |= {k: b[:, : parts * INNER] if "gate" in k else b for k, b in (BIASES if biased else {}).items()}
        given = {k: t.clone().requires_grad_(k != "down") for k, t in names.items()}
        x, scores, up, down, *bias = given.values()
        made = mw.experts(x, IDS, scores, up, down, act, **{k: t for k, t in given.items() if "bias" in k})
        rows = torch.einsum("tc,enc->tne", x, up).movedim(-1, 0) + (bias[0][:, None] if bias else 0)
        function = getattr(F, act)
        rows = function(rows) if parts == 1 else function(rows[..., :INNER]) * rows[..., INNER:]
        every = rows @ down.transpose(1, 2) + (bias[1][:, None] if bias else 0)
        chosen = F.one_hot(IDS, COUNT).to(x.dtype) * scores[..., None]
        want = torch.einsum("etc,te->tc", every, chosen.sum(1))
        leaves = [t for t in given.values() if t.requires_grad]
        check_equal(
            plain([made, *torch.autograd.grad(made.square().sum(), leaves)]),
            plain([want, *torch.autograd.grad(want.square().sum(), leaves)]),
        )


# Of three experts with tokens: three products in the forward (gates, what they gate, down), and in the backward what
# the asked gradients need; of x what they gate is added in place.
PRODUCTS = {"x": 2, "scores": 1, "gate_up": 3, "down": 1, "x scores gate_up down": 5, "scores gate_up down": 4}


@pytest.mark.parametrize("asked", PRODUCTS)
def test_no_gradient_is_computed_that_nobody_asks_for(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of frozen weights, of tokens that are data: as many products as the others need, and their gradients."""
    given = {"x": X, "scores": SCORES, "gate_up": GATE_UP, "down": DOWN}
    own = {k: t.clone().requires_grad_(k in asked.split()) for k, t in given.items()}
    ids, calls, mm = IDS.clamp(max=2), [0], torch.mm

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls[0] += 1
        return mm(*args, **kwargs)

    leaves = [own[k] for k in asked.split()]
    want = torch.autograd.grad(one_by_one(own["x"], ids, *list(own.values())[1:]).square().sum(), leaves)
    monkeypatch.setattr(torch, "mm", counted)
    made = mw.experts(own["x"], ids, *list(own.values())[1:])
    check_equal(plain(torch.autograd.grad(made.square().sum(), leaves)), plain(want))
    assert calls[0] == 3 * (3 + PRODUCTS[asked])


def test_tokens_and_weights_go_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only what has a gradient goes back, and is computed: bytes of what each rank sends, and records; products."""
    products, mm = [0], torch.mm

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        products[0] += 1
        return mm(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", counted)
    mesh, ids = mw.Mesh({"ep": 2}), torch.tensor([[0], [1], [0], [1]])

    def run(of_x: bool, dtype: torch.dtype) -> Any:
        x = mw.shard_tensor(drawn(4, 64), mesh, {"ep": S}).requires_grad_(of_x)
        scores = mw.shard_tensor(drawn(4, 1).to(dtype), mesh, {"ep": S}).requires_grad_()
        up, down = (mw.shard_tensor(drawn(2, *s), mesh, {"ep": S}) for s in ((8, 64), (64, 4)))
        with mw.explain() as report, collective.counting() as forward:
            made = mw.experts(x, mw.shard_tensor(ids, mesh, {"ep": S}), scores, up, down)
        with collective.counting() as backward:
            made.sum().backward()
        kinds = [r.kinds[0] for r in report.records]
        return forward.kinds["gather_rows"], kinds.count("gather_rows"), dict(backward.bytes)

    for of_x in (False, True):
        products[0] = 0
        for first in mw.simulate(lambda of_x=of_x: run(of_x, torch.float64), mesh):
            assert first == (1, 1, {"gather_rows": 64 * 8, "scatter_rows": (1 + 64 * of_x) * 8})
        assert products[0] == mesh.size * (3 + 1 + of_x)
    for messages, records, _ in mw.simulate(lambda: run(True, torch.float32), mesh):
        assert messages == records == 2


def test_load_of_experts() -> None:
    """The tokens of each, counted over all ranks: eager, and as a value that a captured step returns."""
    want, mesh = torch.bincount(IDS.flatten(), minlength=COUNT), mw.Mesh({"dp": 3, "ep": 2})
    laid, model = {"dp": S, "ep": S}, Model()

    def loss_fn(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
        ids = model.layers[0].router(x).topk(K).indices
        return {"loss": model(x), "load": mw.expert_load(ids, COUNT)}

    x = drawn(8, 3, WIDTH)
    routed = torch.bincount(model.layers[0].router(x).topk(K).indices.flatten(), minlength=COUNT)

    def run() -> Any:
        counted = mw.unshard(mw.expert_load(mw.shard_tensor(IDS.masked_fill(IDS == 2, -1), mesh, laid), COUNT))
        own = Model()
        step = mw.compile_step(own, loss_fn, torch.optim.SGD(own.parameters(), lr=0.1), x, mesh=mesh, batch=laid)
        return counted, mw.unshard(step(x)["load"])

    for counted, load in mw.simulate(run, mesh):
        assert torch.equal(counted, want * (torch.arange(COUNT) != 2))
        assert torch.equal(load, routed)
    with pytest.raises(DispatchError, match=r"ids of torch\.float64"):
        mw.expert_load(IDS.double(), COUNT)


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
        ({"ids": IDS > 0}, "ids .* of torch.bool"),
        ({"ids": IDS[:, :0], "weights": SCORES[:, :0]}, "do not fit"),
        ({"act": "slu"}, "did you mean 'silu'"),
        ({"act": "softmax"}, "no such function of each element 'softmax'"),  # of a split width it would be of parts
        ({"act": None}, "act is None: give a name"),
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


def test_a_function_that_uses_a_distributed_tensor() -> None:
    """Its gradient would be of this rank's rows alone."""
    mesh = mw.Mesh({"ep": 2})

    def run() -> None:
        scale = mw.shard_tensor(torch.tensor(2.0).double(), mesh, {}).requires_grad_()
        up = mw.shard_tensor(GATE_UP, mesh, {"ep": mw.Shard(0)})
        mw.experts(X, IDS, SCORES, up, DOWN, act=lambda rows: rows[:, :4] * rows[:, 4:] * scale)

    with pytest.raises(DispatchError, match="act uses a DistTensor that it is not given: multiply what experts gives"):
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


def test_autocast_leaves_float64_alone() -> None:
    """As a linear layer's products."""
    want = mw.experts(X, IDS, SCORES, GATE_UP, DOWN)
    assert want.dtype is torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mw.experts(X, IDS, SCORES, GATE_UP, DOWN), want)


def test_a_router_that_reads_values_cannot_be_captured() -> None:
    """Every rank is told the line; eagerly it runs."""

    class Reads(Layer):
        def forward(self, x: Tensor) -> Any:
            top, ids = self.router(x).softmax(-1).topk(K)
            if int(ids.max()) > COUNT:  # read here
                return x
            return x + mw.experts(x, ids, top, self.gate_up, self.down)

    mesh, x, told = mw.Mesh({"ep": 2}), drawn(4, 3, WIDTH), []
    layouts = {"gate_up": {"ep": S}, "down": {"ep": S}}

    def run() -> float:
        model = Reads().double()
        eager = mw.shard_module(model, mesh, layouts)(mw.shard_tensor(x, mesh, {"ep": S}))
        own = Reads().double()
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        try:
            mw.compile_step(
                own, lambda m, x: m(x).sum(), optimizer, x, mesh=mesh, layouts=layouts, batch={"ep": S}
            )  # fmt: skip
        except CaptureError as error:
            told.append(str(error))
        return mw.unshard(eager).sum().item()

    mw.simulate(run, mesh)
    assert len(told) == 2
    assert all("test_experts.py" in text and "int(ids.max()) > COUNT" in text for text in told), told


def test_rows_that_cannot_be_sent_are_told() -> None:
    mesh = mw.Mesh({"ep": 2})

    def run(tokens: Any, experts: Any) -> None:
        given = [mw.shard_tensor(t, mesh, tokens) for t in (X, IDS, SCORES)]
        held = [mw.shard_tensor(t, mesh, experts) for t in (GATE_UP, DOWN)]
        with mw.strategies({"experts": {"ep": "rows"}}):
            mw.experts(*given, *held)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mw.simulate(lambda: run({"ep": S}, {"ep": S}), mesh)
    for laid in (({"ep": S}, {}), ({}, {"ep": S})):
        with pytest.warns(UserWarning, match=r"no experts inside had both tokens and experts split over 'ep'.*'rows'"):
            mw.simulate(lambda laid=laid: run(*laid), mesh)


def test_rows_are_inferred_as_they_are_explained() -> None:
    mesh = mw.Mesh({"ep": 2})

    def run() -> tuple[float, float]:
        halves = GATE_UP.unflatten(1, (2, -1))
        given = [mw.shard_tensor(t, mesh, {"ep": S}) for t in (X, IDS, SCORES, halves, DOWN)]
        with mw.strategies({"experts": {"ep": "rows"}}):
            found = mw.infer_forward("meshwright::experts", *[t.spec for t in given], None, None, "silu", True)
            with mw.explain() as why:
                mw.experts(*[t.requires_grad_() if t.is_floating_point() else t for t in given])
        return found.sent, sum(r.bytes + r.backward_bytes for r in why.records)

    for sent, told in mw.simulate(run, mesh):
        assert sent == told > 0


def test_one_expert_on_many_ranks() -> None:
    mesh, ids = mw.Mesh({"ep": 3}), torch.zeros_like(IDS[:, :1])
    given = [t.clone().requires_grad_() for t in (X, SCORES[:, :1], GATE_UP[:1], DOWN[:1])]

    def fn(x: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor = ids) -> list[Tensor]:
        made = mw.experts(x, ids, scores, gate_up, down)
        return [made, *torch.autograd.grad(made.square().sum(), (x, scores, gate_up, down))]

    def run() -> Any:
        own = [mw.shard_tensor(t.detach(), mesh, {"ep": S}).requires_grad_() for t in given]
        with mw.strategies({"experts": {"ep": "rows"}}):
            return plain(fn(*own, mw.shard_tensor(ids, mesh, {"ep": S})))

    for found in mw.simulate(run, mesh):
        check_equal(found, plain(fn(*given)))


def test_one_expert_of_two_ranks_under_the_pass_that_joins_sums() -> None:
    """Its gradient is summed over ``ep``, cut to a rank's part, which one has not, and summed over ``dp``."""
    mesh = mw.Mesh({"dp": 2, "ep": 2})
    x = torch.randn(4, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(GATE_UP[:1].clone()), nn.Parameter(DOWN[:1].clone())

        def forward(self, x: Tensor) -> Tensor:
            ids = torch.zeros(*x.shape[:-1], 1, dtype=torch.int64)
            return mw.experts(x, ids, ids + 0.5, self.up, self.down).square().mean()

    alone = One()
    alone(x).backward()

    def run() -> Tensor:
        model, rows = One(), mw.Shard(0)
        step = mw.compile_step(
            model, None, torch.optim.SGD(model.parameters(), lr=0.0), x, mesh=mesh, batch={"dp": rows, "ep": rows},
            layouts={"up": {"ep": rows}, "down": {"ep": rows}}, gradients=True, passes=["data-parallel-optimization"],
        )  # fmt: skip
        step(x)
        return mw.unshard(model.up.grad)

    for grad in mw.simulate(run, mesh):
        torch.testing.assert_close(grad, alone.up.grad)


def test_a_lambda_of_each_call_is_one_function() -> None:
    """Of one code, where it holds nothing: no table grows, and the plan is found.  With values of its own it is new."""
    from meshwright.rules import experts

    def call(scale: float | None) -> Tensor:
        if scale is None:
            return mw.experts(X, IDS, SCORES, GATE_UP[:, :INNER], DOWN, act=lambda rows: rows * 2)
        return mw.experts(X, IDS, SCORES, GATE_UP[:, :INNER], DOWN, act=lambda rows: rows * scale)

    def other(rows: Tensor) -> Tensor:
        return rows * 3

    first = call(None)
    before = len(experts._FUNCTIONS)
    assert all(torch.equal(call(None), first) for _ in range(5))
    assert len(experts._FUNCTIONS) == before
    assert torch.equal(call(2.0), first)
    made = [call(scale) for scale in (3.0, 4.0)]
    assert not torch.equal(*made)
    assert torch.equal(mw.experts(X, IDS, SCORES, GATE_UP[:, :INNER], DOWN, act=other), made[0])
