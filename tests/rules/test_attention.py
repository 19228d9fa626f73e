"""Attention over a split sequence: blocks merged by their sums, no mask, the numbers of one device."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import meshwright as mw
from meshwright import collective
from meshwright.errors import DispatchError, RuleError
from meshwright.ranks import runtime
from meshwright.rules import attention_kernels as table
from tests.support.compare import check_equal, plain

torch.manual_seed(0)


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


class Seen:
    """Which blocks the kernels worked on: rows times keys, half of it where causal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work: dict[int, float] = {}
        own, counting = table.CPU, self.counting
        row = dataclasses.replace(own, forward=counting(own.forward, False), backward=counting(own.backward, True))
        monkeypatch.setattr(table, "TABLE", [row])

    def counting(self, kernel: Any, backward: bool) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            query, key = args[backward : backward + 2]
            rank, pairs = runtime.RT.rank, query.shape[-2] * key.shape[-2]
            self.work[rank] = self.work.get(rank, 0.0) + pairs * (0.5 if args[-3] else 1.0)
            return kernel(*args, **named)

        return run


def results(q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any], twice: bool = True) -> list[Tensor]:
    """Values, gradients and gradients of these."""
    made = F.scaled_dot_product_attention(q, k, v, **named)
    first = torch.autograd.grad(made.square().sum(), (q, k, v), create_graph=twice)
    again = torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v)) if twice else ()
    return [made, *first, *again]


CAUSAL = {"is_causal": True}
GATHER = {"scaled_dot_product_attention": {"cp": "gather"}}
# Shapes of queries and of keys and values, and what is said beside them.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "even": ((2, 3, 24, 4), (2, 3, 24, 4), CAUSAL),
    "odd parts": ((2, 3, 9, 4), (2, 3, 9, 4), CAUSAL),
    "uneven": ((2, 3, 7, 4), (2, 3, 7, 4), CAUSAL),
    "empty parts": ((1, 2, 2, 4), (1, 2, 2, 4), CAUSAL),
    "grouped": ((2, 6, 12, 4), (2, 2, 12, 4), CAUSAL | {"enable_gqa": True}),
    "scaled": ((2, 3, 12, 4), (2, 3, 12, 4), CAUSAL | {"scale": 0.3}),
    "more keys": ((2, 3, 8, 4), (2, 3, 11, 4), CAUSAL),
    "fewer keys": ((2, 3, 8, 4), (2, 3, 3, 4), CAUSAL),
    "three dims": ((3, 12, 4), (3, 12, 4), CAUSAL),
    "two dims": ((12, 4), (12, 4), CAUSAL),
    "five dims": ((2, 2, 3, 12, 4), (2, 3, 12, 4), CAUSAL),
    "heads that broadcast": ((2, 3, 12, 4), (2, 1, 12, 4), CAUSAL),
    "without a mask": ((2, 3, 7, 4), (2, 3, 5, 4), {}),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("n", [4, 3, 2])
@pytest.mark.parametrize("name", CASES)
def test_like_one_device(name: str, n: int) -> None:
    wide, long, named = CASES[name]
    given = [drawn(*wide), drawn(*long), drawn(*long)]
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's fused kernels have no second derivative
        want = [plain(t) for t in results(*[t.clone().requires_grad_() for t in given], named)]
    mesh = mw.Mesh({"cp": n})

    def run() -> Any:
        own = [mw.shard_tensor(t, mesh, {"cp": mw.Shard(t.ndim - 2)}).requires_grad_() for t in given]
        once = results(*own, named, twice=False)
        with mw.strategies(GATHER):  # whole rows are attended by PyTorch's kernel, as on one device
            return [plain(t) for t in once], [plain(t) for t in results(*own, named)] if named else want

    for once, twice in mw.simulate(run, mesh):
        check_equal(once, want[:4])
        check_equal(twice, want)


def test_no_mask_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of a row and a key that it sees is worked on once."""
    mesh, length = mw.Mesh({"cp": 4}), 64
    seen = Seen(monkeypatch)

    def run() -> None:
        q = mw.shard_tensor(drawn(1, 1, length, 4), mesh, {"cp": mw.Shard(2)}).requires_grad_()
        made = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        made.sum().backward()

    mw.simulate(run, mesh)
    assert sum(seen.work.values()) == 2 * length * (length / 2)


class Layer(nn.Module):
    """Causal attention of grouped heads, with what usually stands around it."""

    def __init__(self, width: int = 24, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.norm = nn.LayerNorm(width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * groups * size)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q = self.q(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2 * self.groups, -1)).transpose(1, 2).chunk(2, 1)
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups != self.heads)
        return x + self.out(made.transpose(1, 2).flatten(2))


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Layer(), Layer()).to(dtype)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


ROWS = {"0.q.*": {"tp": mw.Shard(0)}, "0.kv.*": {"tp": mw.Shard(0)}, "0.out.weight": {"tp": mw.Shard(1)}}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "cp": ({"cp": 4}, {"cp": mw.Shard(1)}, {}),
    "odd": ({"cp": 3}, {"cp": mw.Shard(1)}, {}),
    "dp and cp": ({"dp": 2, "cp": 2}, {"dp": mw.Shard(0), "cp": mw.Shard(1)}, {}),
    "two axes on one sequence": ({"cp": 2, "tp": 2}, {"cp": mw.Shard(1), "tp": mw.Shard(1)}, {}),
    "two axes the other way": ({"tp": 2, "cp": 2}, {"cp": mw.Shard(1), "tp": mw.Shard(1)}, {}),
    "cp and tp": ({"cp": 2, "tp": 2}, {"cp": mw.Shard(1)}, ROWS),
}


def trained(step: Any, batches: list[Tensor]) -> list[float]:
    return [float(mw.unshard(torch.as_tensor(step(x)))) for x in batches]


@pytest.mark.thin(2)
@pytest.mark.parametrize("length", [12, 7])
@pytest.mark.parametrize("name", MESHES)
def test_training_like_one_device(name: str, length: int) -> None:
    sizes, batch, layouts = MESHES[name]
    mesh = mw.Mesh(sizes)
    batches = [drawn(2, length, 24) for _ in range(3)]

    def by_hand(model: nn.Module, put: Any = lambda x: x) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = squares(model, put(x))
            loss.backward()
            optimizer.step()
            return loss.detach()

        return trained(step, batches)

    want = by_hand(network())

    def eager() -> list[float]:
        model = mw.shard_module(network(), mesh, layouts)
        return by_hand(model, lambda x: mw.shard_tensor(x, mesh, batch))

    def captured() -> list[float]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile_step(model, squares, optimizer, batches[0], mesh=mesh, layouts=layouts, batch=batch)
        return trained(step, batches)

    for run in (eager, captured):
        for got in mw.simulate(run, mesh):
            assert got == pytest.approx(want, rel=1e-9), run.__name__


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision(dtype: torch.dtype) -> None:
    """Merged sums are rounded once: no worse than one device, beside float64."""
    given = [drawn(1, 2, 64, 16).to(dtype) for _ in range(3)]
    exact = results(*[t.double().requires_grad_() for t in given], CAUSAL, twice=False)
    alone = results(*[t.clone().requires_grad_() for t in given], CAUSAL, twice=False)
    mesh = mw.Mesh({"cp": 4})

    def run() -> list[Tensor]:
        own = [mw.shard_tensor(t, mesh, {"cp": mw.Shard(2)}).requires_grad_() for t in given]
        return [plain(t) for t in results(*own, CAUSAL, twice=False)]

    for got in mw.simulate(run, mesh):
        for mine, theirs, true in zip(got, alone, exact, strict=True):
            assert mine.dtype is dtype
            assert (mine - true).norm() <= 1.5 * (theirs - true).norm()


class Causal(nn.Module):
    """Attention of heads that share one key, so that heads cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        q = x * self.scale
        made: Tensor = F.scaled_dot_product_attention(q, q[:, :1], q[:, 1:2], is_causal=True, enable_gqa=True)
        return made.square().sum()


@pytest.mark.parametrize("sequences", [2, 4])
def test_ranks_without_sequences_trade_too(sequences: int) -> None:
    """Of 2 and of 4 sequences the third rank has none: it sends as the others do, and all capture one program."""
    mesh, given = mw.Mesh({"dp": 3, "cp": 2}), drawn(sequences, 4, 8, 4)
    laid, alone = {"dp": mw.Shard(0), "cp": mw.Shard(2)}, Causal()
    expected = alone(given)
    expected.backward()

    def run() -> Any:
        model = mw.shard_module(Causal(), mesh, {})
        with collective.counting() as counts:
            made = model(mw.shard_tensor(given, mesh, laid))
            made.backward()
        step = mw.compile_step(Causal(), None, None, given, mesh=mesh, batch=laid)
        return mw.unshard(made.detach()), mw.unshard(model.scale.grad), counts.kinds, mw.unshard(step(given))

    for made, grad, kinds, loss in mw.simulate(run, mesh):
        torch.testing.assert_close((made, loss.detach()), (expected.detach(),) * 2)
        torch.testing.assert_close(grad, alone.scale.grad)
        assert kinds["permute"] == 4


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_ranks_work_alike(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Halves of causal rows are traded; what that sends is told."""
    mesh, length = mw.Mesh({"cp": n}), 8 * n
    seen = Seen(monkeypatch)
    q, k = drawn(1, 4, length, 4), drawn(1, 1, length, 4)

    def run() -> tuple[Any, list[Any]]:
        runtime.RT.records = records = []
        own, keys, values = (mw.shard_tensor(t, mesh, {"cp": mw.Shard(2)}).requires_grad_() for t in (q, k, k))
        with collective.counting() as counts:
            made = F.scaled_dot_product_attention(own, keys, values, is_causal=True, enable_gqa=True)
            made.sum().backward()
        return counts, records

    found = mw.simulate(run, mesh)
    assert max(seen.work.values()) <= 1.01 * sum(seen.work.values()) / n
    unit, group = q.nbytes // n, 4
    for rank, (counts, records) in enumerate(found):
        mine = 0 if 2 * rank == n - 1 else unit
        assert counts.bytes["permute"] == 2 * mine
        assert counts.bytes["all_gather"] == counts.bytes["reduce_scatter"] == 2 * (n - 1) * unit // group
        told = [r for r in records if r.kinds == ("permute",)]
        work = " ".join(f"{(2 * r + 1) / n:.2f}" for r in range(n))
        assert f"and without it {work} of the mean" in told[0].reason
        assert [r.phase for r in told] == ["forward"] * 2 + ["backward"] * 2
        assert sum(r.bytes for r in told) == 2 * mine


def test_explicit_code_sends_nothing_more() -> None:
    mesh = mw.Mesh({"cp": 2})
    q = drawn(1, 1, 8, 4)

    def run() -> Any:
        own, whole = mw.shard_tensor(q, mesh, {"cp": mw.Shard(2)}), mw.shard_tensor(q, mesh, {})
        with mw.explicit(), collective.counting() as counts:
            made = F.scaled_dot_product_attention(own, whole, whole, is_causal=True)
        return plain(made), counts.total

    for made, sent in mw.simulate(run, mesh):
        check_equal(made, F.scaled_dot_product_attention(q, q, q, is_causal=True))
        assert sent == 0


def exchanged(sizes: dict[str, int], placed: dict[str, Any], heads: tuple[int, int], length: int) -> tuple[Any, Any]:
    """What one device gives, and what each rank does with the bytes that it sends, forward and in all."""
    mesh = mw.Mesh(sizes)
    q, k, v = drawn(2, heads[0], length, 4), drawn(2, heads[1], length, 4), drawn(2, heads[1], length, 4)
    named = CAUSAL | {"enable_gqa": heads[0] != heads[1]}
    want = results(*(t.clone().requires_grad_() for t in (q, k, v)), named, twice=False)

    def run() -> Any:
        own = [mw.shard_tensor(t, mesh, placed).requires_grad_() for t in (q, k, v)]
        with collective.counting() as counts:
            made = F.scaled_dot_product_attention(*own, **named)
        with collective.counting() as back:
            grads = torch.autograd.grad(made.square().sum(), own)
        assert made.placements == own[0].placements
        return [plain(t) for t in (made, *grads)], dict(counts.bytes), dict(back.bytes)

    return [t.detach() for t in want], mw.simulate(run, mesh)


@pytest.mark.parametrize(
    ("n", "heads", "length"), [(2, (4, 4), 8), (3, (6, 3), 12), (4, (8, 4), 16), (4, (4, 4), 11), (8, (16, 8), 32)]
)
def test_heads_are_exchanged_where_that_sends_less(n: int, heads: tuple[int, int], length: int) -> None:
    """The bits of one device: each rank has whole rows of its heads."""
    want, found = exchanged({"cp": n}, {"cp": mw.Shard(2)}, heads, length)
    units = 2 * heads[0] * length * 4 * 8 / n * (2 + 2 * heads[1] / heads[0]) * (n - 1) / n  # of q on a rank
    sent = 0.0
    for made, forward, backward in found:
        for mine, theirs in zip(made[:1], want[:1], strict=True):
            assert torch.equal(mine, theirs)
        check_equal(made, want)
        assert forward.keys() == {"all_to_all"}
        sent += forward["all_to_all"]
        if length % n == 0:
            assert forward["all_to_all"] == units == backward["all_to_all"]
    assert sent == pytest.approx(units * n, rel=0.02)


def test_heads_over_several_axes() -> None:
    for placed in ({"cp": mw.Shard(2), "tp": mw.Shard(1)}, {"cp": mw.Shard(2), "tp": mw.Shard(2)}):
        want, found = exchanged({"cp": 2, "tp": 2}, placed, (8, 4), 12)
        for made, forward, _ in found:
            check_equal(made, want)
            assert forward.keys() == {"all_to_all"}


def test_keys_are_gathered_where_that_sends_less() -> None:
    """Of heads of keys that no axis can split, and of few keys for many queries."""
    for heads in ((8, 2), (6, 3)):
        for made, forward, _ in exchanged({"cp": 4}, {"cp": mw.Shard(2)}, heads, 16)[1]:
            assert forward.keys() == {"all_gather", "permute"}, made


def test_a_strategy_that_is_asked_for() -> None:
    def attend(wish: str, heads: tuple[int, int] = (4, 4)) -> Any:
        with mw.strategies({"scaled_dot_product_attention": {"cp": wish}}):
            mesh = mw.Mesh({"cp": 2})
            q, k = (mw.shard_tensor(drawn(1, h, 8, 4), mesh, {"cp": mw.Shard(2)}) for h in heads)
            with collective.counting() as counts:
                F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        return set(counts.bytes)

    mesh = mw.Mesh({"cp": 2})
    for kinds in mw.simulate(lambda: (attend("gather"), attend("heads"), attend("gather")), mesh):
        assert kinds == ({"all_gather", "permute"}, {"all_to_all"}, {"all_gather", "permute"})
    with pytest.raises(DispatchError, match=r"'heads': 3 heads cannot be split evenly over 'cp' of 2 ranks"):
        mw.simulate(lambda: attend("heads", (6, 3)), mesh)
    with pytest.raises(RuleError, match="has no strategy 'head'; did you mean 'heads'"):
        mw.simulate(lambda: attend("head"), mesh)
    one_way = pytest.raises(RuleError, match="'softmax' is computed in one way")
    with one_way, mw.strategies({"softmax": {"cp": "heads"}}):
        pass


SDPA = "scaled_dot_product_attention"


def test_a_wish_that_no_call_could_take_is_told_at_the_end() -> None:
    mesh = mw.Mesh({"cp": 2, "dp": 2})

    def run(axis: str, wish: str) -> None:
        laid = {"cp": mw.Shard(2), "dp": mw.Shard(0)}
        with mw.strategies({SDPA: {axis: wish}}):
            q = mw.shard_tensor(drawn(2, 4, 8, 4), mesh, laid)
            F.scaled_dot_product_attention(q, q, q)
            with mw.strategies({}):  # what is wished inside is another matter
                F.scaled_dot_product_attention(q, q, q)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mw.simulate(lambda: run("cp", "heads"), mesh)
    for axis in ("dp", "pc"):
        told = f"no {SDPA} inside had the sequences of q, k and v split over {axis!r}, so none took 'gather'"
        with pytest.warns(UserWarning, match=told) as found:
            mw.simulate(lambda axis=axis: run(axis, "gather"), mesh)
        assert found[0].filename == __file__


def test_what_is_inferred_to_be_sent_is_what_is_sent() -> None:
    """Queries that are traded, too, beside keys that are gathered; and groups of heads."""
    mesh = mw.Mesh({"cp": 4})
    q, k = ((2, 6, 16, 4), (2, 3, 16, 4))
    specs = [mw.Spec(s, torch.float64, mw.Layout(mesh, {"cp": mw.Shard(2)})) for s in (q, k, k)]

    def run(wish: str) -> tuple[float, float, float]:
        with mw.strategies({SDPA: {"cp": wish}}):
            found = mw.infer_forward("scaled_dot_product_attention", *specs, is_causal=True, enable_gqa=True)
            own = [mw.shard_tensor(drawn(*s), mesh, {"cp": mw.Shard(2)}).requires_grad_() for s in (q, k, k)]
            with collective.counting() as counts:
                F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True).sum().backward()
        return found.bytes, found.sent, counts.total_bytes

    for inferred, sent, counted in mw.simulate(lambda: run("gather"), mesh):
        assert (inferred, sent) == (counted, 4 * 2 * 6 * 2 * 4 * 8)
    for inferred, sent, counted in mw.simulate(lambda: run("gather:max_bytes=4096"), mesh):
        again = 2 * 2 * 3 * 3 * 4 * 4 * 8  # in the backward keys and values are brought once more
        assert (inferred, sent) == (counted - again, counted - again)


@pytest.mark.parametrize("wish", ["gather", "heads"])
def test_a_captured_strategy(wish: str) -> None:
    mesh, x = mw.Mesh({"cp": 2}), drawn(2, 12, 24)
    model = network()
    want = squares(model, x).item()

    def run() -> Any:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = mw.compile_step(
            model, squares, optimizer, x, mesh=mesh, batch={"cp": mw.Shard(1)},
            strategies={"scaled_dot_product_attention": {"cp": wish}},
        )  # fmt: skip
        return float(step(x)), "all_to_all" in step.program.kinds, step.program.kinds.get("permute", 0)

    for loss, exchanges, trades in mw.simulate(run, mesh):
        assert loss == pytest.approx(want, rel=1e-12)
        assert (exchanges, trades) == ((True, 0) if wish == "heads" else (False, 8))
    with pytest.raises(RuleError, match="the mesh has no axis 'pc'; did you mean 'cp'"):
        mw.simulate(
            lambda: mw.compile_step(
                model, squares, None, x, mesh=mesh, strategies={"scaled_dot_product_attention": {"pc": wish}}
            ),
            mesh,
        )


LONG = torch.randn(2, 1, 7, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
MASKED: dict[str, dict[str, Any]] = {
    "additive, of each sequence": {"attn_mask": LONG},
    "additive, of all": {"attn_mask": LONG[0, 0]},
    "which keys": {"attn_mask": LONG > -1},
    "which keys, of all rows": {"attn_mask": LONG[:, :, :1] > -1},
    "dropped weights": {"attn_mask": LONG, "dropout_p": 0.4},
    "dropped weights, causal": {"is_causal": True, "dropout_p": 0.4},
}


@pytest.mark.parametrize("split", ["rows", "rows and keys", "over two axes"])
@pytest.mark.parametrize("name", MASKED)
def test_masks_and_dropout(name: str, split: str) -> None:
    """With keys of another length, uneven parts and grouped heads: masks of each kind, weights that are dropped."""
    named, wide, long = MASKED[name], (2, 4, 7, 4), (2, 2, 9, 4)
    given = [drawn(*wide), drawn(*long), drawn(*long)]
    torch.manual_seed(3)
    with mw.reproducible_random():
        want = results(*[t.clone().requires_grad_() for t in given], named | {"enable_gqa": True}, twice=False)
    mesh = mw.Mesh({"cp": 2, "tp": 2} if split == "over two axes" else {"cp": 4})
    rows: dict[str, Any] = {axis: mw.Shard(2) for axis in mesh.axes}

    def run() -> list[Tensor]:
        torch.manual_seed(3)
        laid = [rows, *[{} if split == "rows" else rows] * 2]
        own = [mw.shard_tensor(t, mesh, place).requires_grad_() for t, place in zip(given, laid, strict=True)]
        return [plain(t) for t in results(*own, named | {"enable_gqa": True}, twice=False)]

    for got in mw.simulate(run, mesh):
        check_equal(got, [t.detach() for t in want])


def test_a_mask_beside_is_causal_is_what_it_is_on_one_device() -> None:
    """PyTorch documents both as an error, and its math says so; its kernel of the processor takes both."""
    mesh, q, mask = mw.Mesh({"cp": 2}), drawn(1, 2, 8, 4), torch.rand(8, 8) > 0.3
    mask[:, 0] = True
    want = F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=True)
    check_equal(want, F.scaled_dot_product_attention(q, q, q, attn_mask=mask.tril()))

    def run() -> Tensor:
        own = mw.shard_tensor(q, mesh, {"cp": mw.Shard(2)})
        return plain(F.scaled_dot_product_attention(own, own, own, attn_mask=mask, is_causal=True))

    for made in mw.simulate(run, mesh):
        check_equal(made, want)
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match="attn_mask should not be set"):
        mw.simulate(run, mesh)


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_beside_is_causal_where_keys_are_gathered(additive: bool) -> None:
    """Both hold; of three heads two ranks cannot exchange heads."""
    mesh, q = mw.Mesh({"cp": 2}), drawn(1, 3, 8, 4)
    mask = drawn(8, 8) if additive else torch.rand(8, 8) > 0.3
    mask[:, 0] = True
    hidden = ~torch.ones(8, 8, dtype=torch.bool).tril()
    seen = mask.masked_fill(hidden, -torch.inf) if additive else mask & ~hidden
    want = results(*[q.clone().requires_grad_() for _ in range(3)], {"attn_mask": seen}, twice=False)

    def run() -> list[Tensor]:
        own = [mw.shard_tensor(q, mesh, {"cp": mw.Shard(2)}).requires_grad_() for _ in range(3)]
        return [plain(t) for t in results(*own, {"attn_mask": mask, "is_causal": True}, twice=False)]

    for got in mw.simulate(run, mesh):
        check_equal(got, [plain(t) for t in want])
