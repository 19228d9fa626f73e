"""Packed documents and sliding windows: the numbers of one device, the same work on all ranks, no mask."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import meshwright as mw
from meshwright import collective
from meshwright.errors import DesyncError, DispatchError
from meshwright.ranks import runtime
from meshwright.rules import attention_kernels as table
from tests.support import sweep as sweeps
from tests.support.compare import check_equal, plain

GATHER = {"attention": {"cp": "gather"}}


def ids_of(*lengths: int) -> Tensor:
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def dense(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, causal: bool = True, window: int | None = None
) -> Tensor:
    """The oracle: PyTorch's attention with a mask made by hand."""
    i = torch.arange(q.shape[-2])
    mask = torch.ones(len(i), len(i), dtype=torch.bool)
    if causal:
        mask = mask & (i[:, None] >= i)
    if window is not None:
        mask = mask & (i[:, None] - i < window)
    if ids is not None:
        mask = mask & (ids.unsqueeze(-1) == ids.unsqueeze(-2))
        mask = mask.unsqueeze(1) if ids.ndim > 1 else mask
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's fused kernels have no second derivative
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def results(attend: Any, given: list[Tensor]) -> list[Tensor]:
    """Values, gradients and gradients of these."""
    made = attend(*given)
    first = torch.autograd.grad(made.square().sum(), given, create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in first), given)
    return [made, *first, *again]


# Heads of queries and of keys; documents of each sequence; and what is said beside them.
CASES: dict[str, tuple[tuple[int, int], list[list[int]], dict[str, Any]]] = {
    "uneven": ((4, 2), [[5, 20, 12], [1, 1, 30, 5]], {}),
    "one document": ((2, 2), [[16]], {}),
    "fewer rows than ranks": ((2, 1), [[1, 1]], {}),
    "short documents": ((2, 1), [[1] * 24], {}),
    "windows": ((4, 2), [[9, 20, 3], [32]], {"window": 4}),
    "windows of one": ((2, 2), [[9, 4]], {"window": 1}),
    "windows longer than documents": ((2, 1), [[9, 20, 3]], {"window": 50}),
    "both ways": ((3, 1), [[9, 1, 14], [12, 12]], {"is_causal": False}),
    "scaled": ((2, 1), [[9, 14]], {"scale": 0.3}),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("n", [4, 3, 2])
@pytest.mark.parametrize("name", CASES)
def test_like_one_device(name: str, n: int) -> None:
    (heads, groups), packed, said = CASES[name]
    ids = torch.stack([ids_of(*lengths) for lengths in packed])
    given = [drawn(*(len(ids), h, ids.shape[1], 4), seed=h + i) for i, h in enumerate((heads, groups, groups))]
    scale = 1 if "scale" not in said else said["scale"] * 2  # of four elements

    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense(q * scale, k, v, ids, said.get("is_causal", True), said.get("window"))

    want = [plain(t) for t in results(by_hand, [t.clone().requires_grad_() for t in given])]
    alone = results(lambda *a: mw.attention(*a, document_ids=ids, **said), [t.clone().requires_grad_() for t in given])
    check_equal([plain(t) for t in alone], want)
    mesh = mw.Mesh({"cp": n})

    def run() -> Any:
        own = [mw.shard_tensor(t, mesh, {"cp": mw.Shard(2)}).requires_grad_() for t in given]
        split = mw.shard_tensor(ids, mesh, {"cp": mw.Shard(1)})
        for wish in ({}, GATHER):
            with mw.strategies(wish):
                made = results(lambda *a: mw.attention(*a, document_ids=split, **said), own)
            assert made[0].placements == own[0].placements
            check_equal([plain(t) for t in made], want)

    mw.simulate(run, mesh)


def test_what_users_have() -> None:
    """Cumulative lengths, ids of one sequence, position ids that start again, and a batch that is split too."""
    lengths = [7, 9, 4]
    ids, ends = ids_of(*lengths), torch.tensor([0, 7, 16, 20], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    q, k = drawn(4, 2, 20, 4), drawn(4, 1, 20, 4, seed=1)
    want, mesh = dense(q, k, k, ids), mw.Mesh({"dp": 2, "cp": 2})
    for said in (
        {"cu_seqlens": ends}, {"cu_seqlens": ends[:-1]}, {"document_ids": ids},
        {"document_ids": (positions == 0).cumsum(-1)}, {"document_ids": ids.to(torch.int32).expand(4, -1)},
    ):  # fmt: skip
        check_equal(mw.attention(q, k, k, **said), want)
        check_equal(mw.attention(q[0], k[0], k[0], **{n: t[0] if t.ndim > 1 else t for n, t in said.items()}), want[0])

        def run(said: dict[str, Tensor] = said) -> Tensor:
            own = [mw.shard_tensor(t, mesh, {"dp": mw.Shard(0), "cp": mw.Shard(2)}) for t in (q, k)]
            return plain(mw.attention(own[0], own[1], own[1], **said))

        for made in mw.simulate(run, mesh):
            check_equal(made, want)


@pytest.mark.parametrize("documents", [True, False])
def test_dropout_does_not_depend_on_the_layout(documents: bool) -> None:
    ids, q = ids_of(7, 9, 4) if documents else None, drawn(2, 2, 20, 4)
    mesh = mw.Mesh({"cp": 4})

    def run(place: dict[str, Any]) -> Tensor:
        torch.manual_seed(5)
        own = mw.shard_tensor(q, mesh, place).requires_grad_()
        made = mw.attention(own, own, own, document_ids=ids, window=5, dropout_p=0.4)
        return torch.stack([plain(made), plain(torch.autograd.grad(made.square().sum(), own)[0])])

    with mw.reproducible_random():
        torch.manual_seed(5)
        want = mw.attention(q, q, q, document_ids=ids, window=5, dropout_p=0.4)
    for split, whole in zip(
        mw.simulate(lambda: run({"cp": mw.Shard(2)}), mesh), mw.simulate(lambda: run({}), mesh), strict=True
    ):
        check_equal(split, whole)
        check_equal(whole[0], want)
        assert bool((split[0] != mw.attention(q, q, q, document_ids=ids, window=5)).any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision(dtype: torch.dtype) -> None:
    """Merged sums are rounded once; those of gradients of keys once on each rank, and added up in this dtype."""
    ids, given = ids_of(30, 4, 62), [drawn(1, h, 96, 16, seed=i).to(dtype) for i, h in enumerate((2, 1, 1))]

    def once(attend: Any, own: list[Tensor]) -> list[Tensor]:
        made = attend(*own)
        return [plain(t) for t in (made, *torch.autograd.grad(made.square().sum(), own))]

    exact = once(lambda *a: dense(*a, ids), [t.double().requires_grad_() for t in given])
    alone = once(lambda *a: mw.attention(*a, document_ids=ids), [t.clone().requires_grad_() for t in given])
    mesh = mw.Mesh({"cp": 4})

    def run() -> list[Tensor]:
        own = [mw.shard_tensor(t, mesh, {"cp": mw.Shard(2)}).requires_grad_() for t in given]
        return once(lambda *a: mw.attention(*a, document_ids=ids), own)

    for got in mw.simulate(run, mesh):
        for mine, theirs, true in zip(got, alone, exact, strict=True):
            assert mine.dtype is dtype
            assert (mine - true).norm() <= 2 * (theirs - true).norm()


# ---------------------------------------------------------------------------------------------- work


def packing(length: int, g: torch.Generator) -> list[int]:
    """Random documents, of lengths of several kinds."""
    kind, made = int(torch.randint(4, (), generator=g)), list[int]()
    while sum(made) < length:
        u = float(torch.rand((), generator=g))
        sizes = (1 + u * length, 1 + u * length / 16, length / 20 * 20 ** (2 * u - 1), (1, 2, length / 3)[int(3 * u)])
        made.append(max(1, int(sizes[kind])))
    made[-1] -= sum(made) - length
    return made


def test_ranks_work_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packings, counted from the kernels that ran: pairs of a row and a key that it sees, forward and backward."""
    pairs: dict[int, int] = {}

    def counted(query: Tensor, key: Tensor, causal: bool) -> None:
        n, m = query.shape[-2], key.shape[-2]
        own = n * (n + 1) // 2 if causal else n * m
        pairs[runtime.RT.rank] = pairs.get(runtime.RT.rank, 0) + own * query.shape[0]

    def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, scale: float) -> Any:
        counted(query, key, causal)
        return query[..., :1].expand(value.shape[:1] + query.shape[1:-1] + value.shape[-1:]), query[..., 0]

    def backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
        counted(query, key, rest[-3])
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    # What they compute is not asked here, and takes long.
    monkeypatch.setattr(table, "TABLE", [dataclasses.replace(table.CPU, forward=forward, backward=backward)])
    g, length, n = torch.Generator().manual_seed(3), 1024, 8
    mesh, q, k = mw.Mesh({"cp": n}), drawn(1, 2, length, 1), drawn(1, 1, length, 1)
    packed = [packing(length, g) for _ in range(100 if sweeps.WHOLE else 40)]

    def run() -> None:
        own = [mw.shard_tensor(t, mesh, {"cp": mw.Shard(2)}).requires_grad_() for t in (q, k)]
        made = mw.attention(own[0], own[1], own[1], document_ids=ids)
        made.sum().backward()

    before, worst = 0.0, 0.0
    for lengths in packed:
        ids = ids_of(*lengths)
        pairs.clear()
        mw.simulate(run, mesh)
        total = sum(pairs.values())
        assert total == 2 * sum(m * (m + 1) // 2 for m in lengths)
        worst = max(worst, max(pairs.values()) * n / total)
        rows = torch.cat([torch.arange(1, m + 1) for m in lengths]).view(n, -1).sum(1)
        before = max(before, float(rows.max() * n / rows.sum()))
    assert worst <= 1.05
    assert before > 2.5  # what ranks would have with the rows that they have


def test_what_is_sent() -> None:
    """Keys and values come to all; all but 1/n of the queries is dealt out, and of the results comes back; the ids are
    gathered, and five numbers of each rank."""
    mesh, n, ids = mw.Mesh({"cp": 4}), 4, ids_of(10, 22)
    q, k = drawn(2, 4, 32, 8), drawn(2, 2, 32, 8)

    def run() -> Any:
        own = [mw.shard_tensor(t, mesh, {"cp": mw.Shard(2)}).requires_grad_() for t in (q, k, k)]
        split = mw.shard_tensor(ids, mesh, {"cp": mw.Shard(0)})
        with mw.explain() as report, collective.counting() as counts:
            made = mw.attention(*own, document_ids=split)
        with collective.counting() as back:
            torch.autograd.grad(made.sum(), own)
        told: dict[str, float] = {}
        for r in report.records:
            told[r.kinds[0]] = told.get(r.kinds[0], 0) + r.bytes
        # Of 308 keys that rows see: 36, 40, 84 and 148.
        assert re.search("work per rank .* of the mean, and without it 0.47 0.52 1.09 1.92 of the mean", str(report))
        return dict(counts.bytes), dict(back.bytes), told

    unit = q.nbytes // n
    small = (n - 1) * (8 * 8 + 5 * 8)
    for forward, backward, told in mw.simulate(run, mesh):
        assert forward == told == {"all_gather": 2 * (n - 1) * unit // 2 + small, "all_to_all": 2 * unit * (n - 1) // n}
        assert backward == {"reduce_scatter": 2 * (n - 1) * unit // 2, "all_to_all": 2 * unit * (n - 1) // n}


# ---------------------------------------------------------------------------------------------- training


class Layer(nn.Module):
    def __init__(self, width: int = 24, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * groups * size)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * self.groups, -1)).transpose(1, 2).chunk(2, 1)
        return x + self.out(mw.attention(q, k, v, document_ids=ids).transpose(1, 2).flatten(2))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.second(self.first(x, ids), ids)


def network() -> nn.Module:
    torch.manual_seed(1)
    return Network().double()


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"], batch["ids"]).square().mean()


MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "cp": ({"cp": 4}, {"cp": mw.Shard(1)}),
    "odd": ({"cp": 3}, {"cp": mw.Shard(1)}),
    "dp and cp": ({"dp": 2, "cp": 2}, {"dp": mw.Shard(0), "cp": mw.Shard(1)}),
    "two axes on one sequence": ({"cp": 2, "tp": 2}, {"cp": mw.Shard(1), "tp": mw.Shard(1)}),
}


@pytest.mark.parametrize("name", MESHES)
def test_each_batch_has_its_own_documents(name: str) -> None:
    """Training, eager and captured: what was captured with one packing is right for the next ones."""
    sizes, batch = MESHES[name]
    mesh = mw.Mesh(sizes)
    packed = [([24], [3, 21]), ([5, 10, 9], [12, 12]), ([1, 1, 22], [20, 4])]
    batches = [
        {"x": drawn(2, 24, 24, seed=i), "ids": torch.stack([ids_of(*a), ids_of(*b)])} for i, (a, b) in enumerate(packed)
    ]

    def by_hand(model: nn.Module, put: Any = lambda b: b) -> list[float]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for b in batches:
            optimizer.zero_grad()
            loss = squares(model, put(b))
            loss.backward()
            optimizer.step()
            losses.append(mw.unshard(loss.detach()).item())
        return losses

    want = by_hand(network())

    def eager() -> list[float]:
        model = mw.shard_module(network(), mesh)
        return by_hand(model, lambda b: {k: mw.shard_tensor(t, mesh, batch) for k, t in b.items()})

    def captured() -> list[float]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile_step(model, squares, optimizer, batches[0], mesh=mesh, batch=batch)
        return [float(step(b)) for b in batches]

    for run in (eager, captured):
        for got in mw.simulate(run, mesh):
            assert got == pytest.approx(want, rel=1e-12), run.__name__


# ---------------------------------------------------------------------------------------------- bad input


def told(error: type[Exception], of: Any, mesh: mw.Mesh) -> set[str]:
    """What the ranks are told."""

    def run() -> str:
        try:
            of()
        except error as e:
            return str(e)
        return ""

    return set(mw.simulate(run, mesh))


def test_ids_that_are_wrong_are_an_error_on_all_ranks() -> None:
    """Also on ranks that do not have the sequence that is wrong."""
    mesh = mw.Mesh({"dp": 2, "cp": 2})
    q, ids = drawn(4, 2, 8, 4), torch.stack([ids_of(3, 5)] * 4)
    ids[3, 6] = 0

    def attend(given: Tensor) -> None:
        own = mw.shard_tensor(q, mesh, {"dp": mw.Shard(0), "cp": mw.Shard(2)})
        mw.attention(own, own, own, document_ids=mw.shard_tensor(given, mesh, {"dp": mw.Shard(0), "cp": mw.Shard(1)}))

    (text,) = told(DispatchError, lambda: attend(ids), mesh)
    assert "document ids decrease, from 1 to 0 at position 6 of sequence 3" in text
    assert "(position_ids == 0).cumsum(-1)" in text
    with pytest.raises(DispatchError, match="at position 6 of sequence 3"):
        mw.attention(q, q, q, document_ids=ids)

    def lengths(given: list[int]) -> None:
        own = mw.shard_tensor(q, mesh, {"cp": mw.Shard(2)})
        mw.attention(own, own, own, cu_seqlens=torch.tensor(given))

    for given, why in (
        ([0, 5, 3, 8], "decrease, from 5 to 3 at place 2"), ([2, 8], "begin with 2"), ([0, 9], "has 8 positions"),
    ):  # fmt: skip
        (text,) = told(DispatchError, lambda given=given: lengths(given), mesh)
        assert f"cu_seqlens {why}" in text or f"cu_seqlens end with 9, and the sequence {why}" in text


def test_ids_that_differ_by_rank_are_noticed() -> None:
    mesh = mw.Mesh({"cp": 2, "tp": 2})
    q = drawn(1, 2, 8, 4)

    def attend() -> None:
        own = mw.shard_tensor(q, mesh, {"cp": mw.Shard(2)})
        here = ids_of(3, 5) if runtime.RT.rank != 3 else ids_of(4, 4)
        mw.attention(own, own, own, document_ids=mw.from_local(here, mesh, {}))

    (text,) = told(DesyncError, attend, mesh)
    assert "the 1. and the 4. rank of the mesh were given different document ids" in text


def test_arguments_that_do_not_fit() -> None:
    q, ids = drawn(2, 4, 8, 4), ids_of(3, 5)
    for said, why in (
        ({"document_ids": ids, "cu_seqlens": torch.tensor([0, 8])}, "give one of them"),
        ({"document_ids": ids[:4]}, r"document_ids are \(4,\): give one for each position, \(2, 8\), or \(8,\)"),
        ({"document_ids": ids.double()}, "whole numbers, and were given as torch.float64"),
        ({"document_ids": [0] * 8}, "whole numbers, and were given as list"),
        ({"window": 2.5}, "window=2.5 is no whole number"),
        ({"cu_seqlens": torch.zeros(2, 2, dtype=torch.int32)}, r"give \(documents \+ 1,\)"),
        ({"document_ids": ids, "window": 0}, "window=0 is less than 1"),
        ({"document_ids": ids, "window": 3, "is_causal": False}, "window=3 asks for is_causal=True"),
    ):
        with pytest.raises(DispatchError, match=why):
            mw.attention(q, q, q, **said)
    for key in (q[..., :4, :], q[:, :3], q[0]):
        with pytest.raises(DispatchError, match="do not fit"):
            mw.attention(q, key, key, document_ids=ids)


@pytest.mark.parametrize(
    ("n", "t", "window", "heads"), [(4, 32, 3, 3), (3, 7, 4, 2), (4, 5, 2, 1), (2, 16, 20, 1), (4, 3, 2, 1)]
)
def test_windows_bring_the_keys_that_they_reach(n: int, t: int, window: int, heads: int) -> None:
    """To second order the numbers of one device; and in the forward the rows before a rank's own, in bytes."""
    mesh, cp = mw.Mesh({"cp": n}), {"cp": mw.Shard(2)}
    given = [torch.randn(2, m, t, 4, dtype=torch.float64) for m in (heads, 1, 1)]

    def results(own: list[Tensor]) -> list[Tensor]:
        made = mw.attention(*own, window=window)  # type: ignore[misc]
        first = torch.autograd.grad((made * torch.cos(made.detach())).sum(), own, create_graph=True)
        return [made, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), own)]

    def run() -> tuple[list[Tensor], dict[str, int]]:
        own = [mw.shard_tensor(x, mesh, cp).requires_grad_() for x in given]
        with collective.counting() as counts:
            mw.attention(*own, window=window)  # type: ignore[misc]
        return [mw.unshard(x.detach()) for x in results(own)], dict(counts.bytes)

    want = [x.detach() for x in results([x.clone().requires_grad_() for x in given])]
    found = mw.simulate(run, mesh)
    bounds = [(i * -(-t // n), min((i + 1) * -(-t // n), t)) for i in range(n)]
    rows = sum(a - max(a - window + 1, 0) for a, b in bounds if a < b)
    assert sum(sent["exchange_rows"] for _, sent in found) == rows * 2 * 2 * 4 * 8
    for got, sent in found:
        assert set(sent) == {"exchange_rows"}
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [{"cp": 3, "tp": 2}, {"cp": 2, "tp": 2}])
@pytest.mark.parametrize("window", [1, 4])
def test_windows_of_rows_that_more_axes_split_than_keys(sizes: dict[str, int], window: int) -> None:
    mesh, cut = mw.Mesh(sizes), {"cp": mw.Shard(2)}
    given = [drawn(2, 2, 8, 4, seed=s) for s in range(3)]
    want = results(lambda q, k, v: dense(q, k, v, None, window=window), [x.clone().requires_grad_() for x in given])

    def run() -> Any:
        laid = ({**cut, "tp": mw.Shard(2)}, cut, cut)
        own = [mw.shard_tensor(x, mesh, p).requires_grad_() for x, p in zip(given, laid, strict=True)]
        return plain(results(lambda q, k, v: mw.attention(q, k, v, window=window), own))

    for found in mw.simulate(run, mesh):
        check_equal(found, plain(want))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "query",
    [
        {"dp": mw.Shard(0), "cp": mw.Shard(2)},
        {"dp": mw.Shard(0)},
        {"dp": mw.Shard(1)},
        {"dp": mw.Shard(1), "cp": mw.Shard(2)},
    ],
)
def test_ranks_without_a_sequence(query: dict[str, mw.Shard], causal: bool) -> None:
    mesh, ids = mw.Mesh({"dp": 3, "cp": 2}), torch.stack([ids_of(3, 4), ids_of(1, 6)])
    given = [drawn(2, 2, 7, 4, seed=s) for s in range(3)]
    want = results(lambda q, k, v: dense(q, k, v, ids, causal), [x.clone().requires_grad_() for x in given])

    def run() -> Any:
        laid = (query, *[{"dp": mw.Shard(0), "cp": mw.Shard(2)}] * 2)
        own = [mw.shard_tensor(x, mesh, p).requires_grad_() for x, p in zip(given, laid, strict=True)]
        told = mw.shard_tensor(ids, mesh, {"dp": mw.Shard(0)})
        return plain(results(lambda q, k, v: mw.attention(q, k, v, document_ids=told, is_causal=causal), own))

    for found in mw.simulate(run, mesh):
        check_equal(found, plain(want))
