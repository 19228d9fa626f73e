"""Attention of a split sequence in groups of heads: the numbers and bytes of all at once, and a bound of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import meshwright as mw
from meshwright import collective
from meshwright.errors import DispatchError, ExplicitError, RuleError
from tests.rules.test_context_memory import HIDDEN, LENGTH, held
from tests.support.compare import check_equal, plain

SDPA = "scaled_dot_product_attention"
BATCH, WIDTH = 2, 4


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def results(fn: Any, given: list[Tensor]) -> list[Tensor]:
    """The value, gradients and gradients of these."""
    made = fn(*given)
    first = torch.autograd.grad((made * torch.cos(made.detach())).sum(), given, create_graph=True)
    return [made, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), given)]


def sdpa(query: Tensor, key: Tensor, value: Tensor, causal: bool = True) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)


def everything(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return sdpa(query, key, value, False)


def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    ids = torch.arange(query.shape[2]) * 3 // query.shape[2]
    return mw.attention(query, key, value, document_ids=ids)


def in_windows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return mw.attention(query, key, value, window=3)


CP, BOTH = {"cp": mw.Shard(2)}, {"cp": mw.Shard(2), "tp": mw.Shard(1)}
# The mesh, how all lies, heads of the query and of keys, the sequence, strategy, what attends.
CASES: dict[str, tuple[dict[str, int], dict[str, mw.Shard], tuple[int, int], int, str, Any]] = {
    "gather": ({"cp": 2}, CP, (8, 4), 16, "gather", sdpa),
    "gather, uneven": ({"cp": 3}, CP, (3, 3), 7, "gather", sdpa),
    "gather, an empty part": ({"cp": 4}, CP, (2, 2), 5, "gather", everything),
    "gather, uneven heads": ({"cp": 2, "tp": 2}, BOTH, (3, 3), 8, "gather", sdpa),
    "gather, documents": ({"cp": 3}, CP, (4, 2), 13, "gather", packed),
    "heads": ({"cp": 2}, CP, (8, 4), 16, "heads", sdpa),
    "heads, uneven": ({"cp": 3}, CP, (6, 6), 7, "heads", everything),
    "heads, split too": ({"cp": 2, "tp": 2}, BOTH, (8, 8), 6, "heads", sdpa),
    "heads, documents": ({"cp": 2}, CP, (8, 4), 9, "heads", packed),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_like_one_device(name: str) -> None:
    sizes, laid, (h, g), t, strategy, fn = CASES[name]
    mesh = mw.Mesh(sizes)
    given = [drawn(BATCH, n, t, WIDTH) for n in (h, g, g)]
    with sdpa_kernel(SDPBackend.MATH):  # which can be differentiated twice
        want = plain(results(fn, [x.clone().requires_grad_() for x in given]))
    # One head of keys, or of each rank one.
    most = BATCH * t * WIDTH * 8 * (2 if strategy == "gather" else 2 + 2 * h // g)
    op = "attention" if fn in (packed,) else SDPA

    def run(wish: str, twice: bool) -> Any:
        own = [mw.shard_tensor(x, mesh, laid).requires_grad_() for x in given]
        with mw.strategies({op: {"cp": wish}}):
            found = plain(results(fn, own)) if twice else []
            with collective.counting() as forward:
                made = fn(*own)
            with collective.counting() as backward:
                made.sum().backward()
        return found, dict(forward.bytes), dict(forward.kinds), dict(backward.kinds)

    grouped = mw.simulate(lambda: run(f"{strategy}:max_bytes={most}", True), mesh)
    at_once = mw.simulate(lambda: run(strategy, False), mesh)
    kind = "all_gather" if strategy == "gather" else "all_to_all"
    count = -(-g // sizes.get("tp", 1)) // (1 if strategy == "gather" else sizes["cp"])
    for (found, sent, there, back), (_, sent_at_once, there_at_once, _) in zip(grouped, at_once, strict=True):
        check_equal(found, want)
        moved = 2 if strategy == "gather" else 4
        if name == "heads, split too":  # at once, tp would split after cp what it split before it
            assert sent[kind] == 4 * BATCH * h * t * WIDTH * 8 // 4 // 2 < sent_at_once[kind]
            assert there == {kind: moved * count}
        else:
            assert sent == pytest.approx(sent_at_once, abs=8)  # shares of uneven parts are rounded
            assert there[kind] - there_at_once[kind] == moved * (count - 1)
        assert back[kind] == count * (2 if strategy == "gather" else 8)  # there again, and gradients home


def test_what_is_sent_again_in_the_backward() -> None:
    """Keys and values, of which all but the own part come; or all but the own part of what was moved."""
    mesh, given = mw.Mesh({"cp": 2}), [drawn(BATCH, n, 16, WIDTH) for n in (8, 4, 4)]
    q, k = (x.nbytes // 2 for x in given[:2])

    def run(wish: str) -> Any:
        own = [mw.shard_tensor(x, mesh, CP).requires_grad_() for x in given]
        with mw.strategies({SDPA: {"cp": wish}}), collective.counting() as counts, mw.explain() as report:
            sdpa(*own).sum().backward()
        said: dict[str, float] = {}
        for r in report.records:
            said[r.kinds[0]] = said.get(r.kinds[0], 0) + r.bytes
        assert said == dict(counts.bytes)
        return said, {r.reason for r in report.records}

    one = 2 * BATCH * 16 * WIDTH * 8
    for said, why in mw.simulate(lambda: run(f"gather:max_bytes={2 * one}"), mesh):
        assert said == {"permute": 4 * q // 2, "all_gather": 2 * 2 * k, "reduce_scatter": 2 * k}
        assert f"keys and values of 2 heads of keys at once, in 2 groups: {2 * one} bytes of {2 * one}" in why
    for said, why in mw.simulate(lambda: run(f"heads:max_bytes={3 * one}"), mesh):
        assert said == {"all_to_all": ((2 * q + 2 * k) * 2 + 2 * k + 2 * q) // 2}
        assert any("in 2 groups" in w for w in why)


def test_windows_bring_what_they_reach_where_that_is_under_the_bound() -> None:
    mesh, given = mw.Mesh({"cp": 2}), [drawn(BATCH, n, 12, WIDTH) for n in (4, 2, 2)]

    def run(most: int) -> Any:
        own = [mw.shard_tensor(x, mesh, CP) for x in given]
        with mw.strategies({"attention": {"cp": f"gather:max_bytes={most}"}}), collective.counting() as counts:
            made = in_windows(*own)
        return mw.unshard(made), dict(counts.bytes)

    reached = 2 * BATCH * 2 * 2 * WIDTH * 8  # of keys and values two rows before the own ones, of two heads
    (found, sent), _ = mw.simulate(lambda: run(reached), mesh)
    check_equal(found, in_windows(*given))
    assert sent == {"exchange_rows": reached}
    with pytest.raises(DispatchError, match="is too small: one key head needs"):
        mw.simulate(lambda: run(reached - 1), mesh)


def test_memory_of_a_step_is_less() -> None:
    """32k positions: the peak of a step of one layer, from its program; what is not gathered at once is not there."""
    whole = 2 * LENGTH * HIDDEN * 4  # keys and values of all positions
    at_once, grouped = held({"cp": 4}, "gather"), held({"cp": 4}, f"gather:max_bytes={whole // 4}")
    assert grouped <= at_once - 0.6 * whole


def test_captured() -> None:
    mesh, given = mw.Mesh({"cp": 3}), drawn(2, 9, 12)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.qkv = torch.nn.Linear(12, 36, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            return sdpa(q, k, v).square().mean()

    def trained(wish: str) -> Any:
        model = Layer()
        step = mw.compile_step(
            model, lambda m, x: m(x), torch.optim.SGD(model.parameters(), lr=0.5), given, mesh=mesh,
            batch={"cp": mw.Shard(1)}, strategies={SDPA: {"cp": wish}},
        )  # fmt: skip
        losses = [step(given).item() for _ in range(3)]
        return losses, mw.unshard(model.qkv.weight).detach().clone(), dict(step.program.kinds), str(step.explain())

    model, losses = Layer(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        loss = model(given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for name, most in (("gather", 2 * 2 * 9 * 4 * 8), ("heads", 4 * 2 * 9 * 4 * 8)):
        for got, weight, kinds, page in mw.simulate(lambda w=f"{name}:max_bytes={most}": trained(w), mesh):
            assert got == pytest.approx(losses, rel=1e-12)
            torch.testing.assert_close(weight, model.qkv.weight.detach())
            assert kinds["all_gather" if name == "gather" else "all_to_all"] >= 4
            assert f"bytes of {most}" in page


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        ("gather:max_bytes=10", "max_bytes=10 is too small: one key head needs 1024 bytes. Raise it"),
        ("heads:max_bytes=10", "max_bytes=10 is too small: one key head needs 2048 bytes. Raise it"),
        ("gather:most=10", "'gather:most=10' sets no bound of bytes: give gather:max_bytes=1000000"),
        ("gather:max_bytes=-1", "sets no bound of bytes"),
        ("gathr:max_bytes=10", "no strategy 'gathr'; did you mean 'gather'"),
    ],
)
def test_refused(wish: str, text: str) -> None:
    mesh, given = mw.Mesh({"cp": 2}), [drawn(1, 2, 16, 4) for _ in range(3)]

    def run() -> None:
        with mw.strategies({SDPA: {"cp": wish}}):
            sdpa(*(mw.shard_tensor(x, mesh, CP) for x in given))

    with pytest.raises((DispatchError, RuleError), match=text):
        mw.simulate(run, mesh)


def test_calls_without_groups_are_refused_by_name() -> None:
    mesh, given = mw.Mesh({"cp": 2, "tp": 2}), [drawn(1, 2, 16, 4) for _ in range(3)]

    def run(laid: Any, how: Any, wishes: Any) -> None:
        with mw.strategies({SDPA: wishes}):
            how(*(mw.shard_tensor(x, mesh, laid) for x in given))

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, torch.ones(16, 16, dtype=torch.bool))

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    def explicitly(*given: Tensor) -> Tensor:
        with mw.explicit():
            return sdpa(*given)

    wish = {"cp": "gather:max_bytes=100000"}
    both = {"cp": mw.Shard(2), "tp": mw.Shard(2)}
    cases: list[tuple[Any, Any, Any, str, type[Exception]]] = [
        (CP, masked, wish, "attention with attn_mask is not computed in groups of heads", DispatchError),
        (CP, dropped, wish, "attention with dropout_p is not computed in groups of heads", DispatchError),
        (both, sdpa, wish, "cp, tp split one sequence: give all of them the same", DispatchError),
        (CP, explicitly, wish, "would bring groups of heads over cp. Inside mw.explicit", ExplicitError),
    ]
    for laid, how, wishes, text, kind in cases:
        with pytest.raises(kind, match=text):
            mw.simulate(lambda laid=laid, how=how, wishes=wishes: run(laid, how, wishes), mesh)
    with (
        pytest.raises(RuleError, match="'experts' takes no max_bytes"),
        mw.strategies({"experts": {"cp": "rows:max_bytes=9"}}),
    ):
        pass


@pytest.mark.parametrize("wish", ["heads:max_bytes=100000", "gather:max_bytes=100000"])
@pytest.mark.parametrize("lengths", [(7, 12), (12, 7), (3, 12), (16, 1), (1, 8)])
def test_queries_and_keys_of_other_lengths(lengths: tuple[int, int], wish: str) -> None:
    mesh, given = mw.Mesh({"cp": 4}), [drawn(BATCH, 4, n, WIDTH) for n in (lengths[0], lengths[1], lengths[1])]
    with sdpa_kernel(SDPBackend.MATH):
        want = plain(results(everything, [x.clone().requires_grad_() for x in given]))

    def run() -> Any:
        own = [mw.shard_tensor(x, mesh, CP).requires_grad_() for x in given]
        with mw.strategies({SDPA: {"cp": wish}}):
            return plain(results(everything, own))

    with sdpa_kernel(SDPBackend.MATH):  # of the process: not by each rank, which would leave it as another had it
        ranks = mw.simulate(run, mesh)
    for found in ranks:
        check_equal(found, want)


def test_queries_that_more_axes_split_are_refused() -> None:
    mesh = mw.Mesh({"cp": 2, "tp": 2})
    text = "queries are split over cp, tp, keys and values over cp: split all"

    def run() -> None:
        laid = ({**CP, "tp": mw.Shard(2)}, CP, CP)
        own = [mw.shard_tensor(drawn(BATCH, 4, 8, WIDTH), mesh, p) for p in laid]
        with mw.strategies({SDPA: {"cp": "heads:max_bytes=100000"}}), pytest.raises(DispatchError, match=text):
            sdpa(*own)

    mw.simulate(run, mesh)
